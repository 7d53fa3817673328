"""How often the parts of an approximate hit are right, on labelled pairs; prints JSON.

    python bench/pairs.py guards        traps that pass, paraphrases that stay, what a pair costs (results/traps.json)
    python bench/pairs.py policies      the same of every policy, held-out writers only (results/cpu/policies.json)
    python bench/pairs.py turns         the same through the cache, for last turns of conversations (results/turns.json)
    python bench/pairs.py comparator    how often the comparator behind checks errs (results/comparator.json)
    python bench/pairs.py separation    cosines of what may stand in and of what may not (results/separation.json)

Traps are pairs of near-equal texts with different answers, paraphrases pairs with the same; both are our own, in
``bench/data``. Every third trap and every second paraphrase of a category was held out while the guards were tuned.
Rows with ``passed_first`` or ``kept_first`` are later ones, by hands that had not seen the guards; the field says what
became of them at first sight. All of ``last_turns.jsonl`` were written so, and no guard was changed for them. No row of
the data sets in ``shared/data`` is written.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, SHARED, commands, machine, quantiles, write_json
from streams import halves, questions

from semkv import guards
from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.encoders.text import DEFAULT_MODEL, SentenceEncoder
from semkv.encoders.vision import TowerEncoder
from semkv.guards import veto
from semkv.keys import normalise
from semkv.server.request_key import CanonicalRequest, canonicalise
from semkv.tiers.bounded import Bounded
from semkv.tiers.checking import SameMeaning, same_text, wilson
from semkv.tiers.policies import Calibrated, Calibration, Decider, FixedThreshold
from semkv.types import Entry, Namespace, Request
from semkv_lab.evaluate import fit
from semkv_lab.minigqa.generate import Knobs, generate
from semkv_lab.quality import TIER, Corpus, Replay, build_corpus, clusters, encode, read_pairs
from semkv_lab.samples import read_jsonl

DATA = ROOT / "bench" / "data"
PAIRS, GQA = SHARED / "question_pairs_dev.jsonl.gz", SHARED / "gqa_testdev_llava13b.jsonl.gz"
CHECKPOINT = ROOT / "src" / "semkv" / "assets" / "minigqa-vlm"
ACCEPTED = 0.85  # a cosine that a threshold may well accept
THRESHOLD = 0.92  # the default
LONG = 7  # words from which the comparator compares meaning
QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
THRESHOLDS = (0.8, 0.85, 0.9, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.992, 0.993, 0.994, 0.995, 0.996, 0.997)

Row = dict[str, Any]
app = commands(__doc__)


def load(path: Path) -> list[Row]:
    return [dict(row) for _, row in read_jsonl(path)]


# -- guards ------------------------------------------------------------


def rates(rows: Sequence[Row], chosen: Sequence[Row], field: str, name: str) -> Row:
    """How many of the rows were chosen; by a field's value."""
    every, part = Counter(row[field] for row in rows), Counter(row[field] for row in chosen)
    return {
        "pairs": len(rows),
        name: len(chosen),
        "rate": round(len(chosen) / max(1, len(rows)), 4),
        "by": {kind: f"{part[kind]} of {count}" for kind, count in every.items()},
    }


def judged(rows: Sequence[Row], field: str, name: str) -> Row:
    """Pairs without a veto: of all, of those tuned on, of those held out; and as they were at first sight."""
    reasons = [veto(row["a"], row["b"]) for row in rows]
    free = [row for row, reason in zip(rows, reasons, strict=True) if reason is None]
    first = [row for row in rows if f"{name}_first" in row]
    found = rates(rows, free, field, name)
    for label, held in (("tuned on", False), ("held out", True)):
        found[label] = rates(*([r for r in part if r["held_out"] is held] for part in (rows, free)), field, name)
    found["as first seen"] = rates(first, [row for row in first if row[f"{name}_first"]], field, name)
    return found | {"reasons": dict(Counter(reason or "none" for reason in reasons).most_common())}


def latency(rows: Sequence[Row], rounds: int) -> Row:
    """Milliseconds for two new texts, by the clock and of the processor; their words stay known, as they do in use."""
    wall, busy = [], []
    for row in list(rows) * rounds:
        for cache in guards._CACHES[:2]:  # texts and pairs
            cache.cache_clear()
        start, worked = time.perf_counter(), time.thread_time()
        guards.veto(row["a"], row["b"])
        guards.wording(row["a"], row["b"])
        wall.append(time.perf_counter() - start)
        busy.append(time.thread_time() - worked)
    return {"calls": len(wall)} | quantiles(wall, "") | quantiles(busy, "cpu_")


@app.command(name="guards")
def measure_guards(*, index_encoder: str = DEFAULT_MODEL, rounds: int = 15, out: Path | None = None) -> None:
    """How many traps pass, how many paraphrases stay, and what a pair costs.

    Args:
        rounds: calls for each paraphrase.
    """
    paraphrases = load(DATA / "paraphrases.jsonl")
    texts = sorted({row[side] for row in paraphrases for side in "ab"}, key=len)
    vectors = dict(zip(texts, encode(texts, SentenceEncoder(index_encoder), lambda _: None)[0], strict=True))
    near = [row for row in paraphrases if vectors[row["a"]] @ vectors[row["b"]] >= ACCEPTED]
    foreign = load(DATA / "other_languages.jsonl")
    result = {
        "machine": machine("semkv", "sentence-transformers", "numpy"),
        "encoder": index_encoder,
        "traps": judged(load(DATA / "traps.jsonl"), "category", "passed"),
        "paraphrases": {"written": len(paraphrases), "cosine at least": ACCEPTED} | judged(near, "kind", "kept"),
        "other languages": rates(
            foreign, [row for row in foreign if veto(row["a"], row["b"]) is None], "language", "passed"
        ),
        "latency": latency(paraphrases, rounds),
    }
    write_json(out, result)


# -- policies ------------------------------------------------------------

DONOR = Entry("", Namespace(), (), "", "")
STAY = 0.8  # of the paraphrases, where a policy has a threshold
RATES = (0.01, 0.05)  # of the bounded policy


def tempt(rows: Sequence[Row], corpus: Corpus, make: Callable[[], Decider]) -> list[float]:
    """The policy's confidence in each pair that it accepts, each asked of a policy of its own."""
    found = []
    for row in rows:
        a, b = corpus.number["", row["a"]], corpus.number["", row["b"]]
        policy = make()
        policy.arrived()
        match = corpus.match(a, b, dict(corpus.neighbours[a]).get(b, 0.0), policy)
        decision = match and policy.accept(corpus.request(a), DONOR, match)
        if match is not None and decision is not None and decision.accept:
            found.append(match.score if decision.risk is None else -decision.risk)
    return found


def taken_up(state: Any, left: float, rate: float, calibration: Calibration | None, tiers: frozenset[str]) -> Bounded:
    policy = Bounded(rate, calibration, tiers)
    policy._left = left  # which no restart takes up
    policy.restore(state)
    return policy


@app.command
def policies(*, pairs: Path = PAIRS, index_encoder: str = DEFAULT_MODEL, out: Path | None = None) -> None:
    """What every policy makes of held-out writers' traps, where it lets 80% of their paraphrases stand.

    One half of the pairs fits the calibration. The bounded policy has served 10,000 requests from the other half, and
    each trap finds it in the state after them, with all that is left of its budget.

    Args:
        pairs: labelled pairs: JSONL of a, b, same; .gz too.
    """
    unseen = [
        [row for row in load(DATA / name) if row["held_out"] and first in row]
        for name, first in (("traps.jsonl", "passed_first"), ("paraphrases.jsonl", "kept_first"))
    ]
    encoder = SentenceEncoder(index_encoder, remembered=1 << 20)
    fitting, asking = halves(read_pairs(pairs), 0)
    texts = build_corpus(list(clusters(fitting)), encoder, veto)
    estimate = replace(fit(fitting, texts, encoder.fingerprint).calibration, limit=0.999)
    corpus = build_corpus([("", row[side]) for rows in unseen for row in rows for side in "ab"], encoder, veto)
    replay = Replay(questions(asking, 0), build_corpus(list(clusters(asking)), encoder, veto))
    tiers, fixed = frozenset([TIER]), FixedThreshold({TIER: 0.0})
    result: Row = {
        "machine": machine("semkv", "sentence-transformers", "numpy"),
        "traps": len(unseen[0]),
        "paraphrases": len(unseen[1]),
    }
    for name, policy in (("fixed", fixed), ("calibrated", Calibrated(estimate, tiers, fixed))):
        traps, kept = (sorted(tempt(rows, corpus, lambda policy=policy: policy), reverse=True) for rows in unseen)
        least = kept[min(len(kept), math.ceil(STAY * len(unseen[1]))) - 1]
        found = [sum(value >= least for value in values) for values in (traps, kept)]
        result[name] = {"threshold": round(abs(least), 4), "traps": found[0], "paraphrases": found[1]}
    for rate, calibration in product(RATES, (estimate, None)):
        learned = Bounded(rate, calibration, tiers)
        replay.play(learned, verify_rate=0.1)
        state = learned.state()
        make = partial(taken_up, state, learned._left, rate, calibration, tiers)
        found = [len(tempt(rows, corpus, make)) for rows in unseen]
        name = f"bounded {rate}{'' if calibration else ', no calibration'}"
        result[name] = {"traps": found[0], "paraphrases": found[1]}
    write_json(out, result)


# -- last turns ------------------------------------------------------------

CHAT = [("user", "Tell me about Lisbon."), ("assistant", "It is a city by the sea. Do you want to know more?")]
DOCUMENT = "The lease of the flat in Elm Street begins in May. " + "The tenant pays the rent on the first day. " * 40
FORMS: dict[str, list[tuple[str, str]]] = {
    "single turn": [],
    "second turn": CHAT,
    "turn 21": CHAT * 20,
    "document, question": [("user", DOCUMENT)],
    "system prompt, document, question": [("system", "Be brief."), ("user", DOCUMENT)],
}
CONVERSATIONS = 300


def asked(history: Sequence[tuple[str, str]], text: str, tenant: str) -> Request:
    """What the gateway makes of a conversation; a user's text right before the last is a part of the same message."""
    messages: list[Row] = [{"role": role, "content": [{"type": "text", "text": said}]} for role, said in history]
    if not messages or messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": []})
    messages[-1]["content"].append({"type": "text", "text": text})
    body = {"model": "m", "temperature": 0, "messages": messages}
    canonical = canonicalise("/v1/chat/completions", body, tenant=tenant, secret=b"bench")
    assert isinstance(canonical, CanonicalRequest)
    assert canonical.request is not None
    return canonical.request


def ask(cache: SemanticCache, request: Request) -> str:
    """The prompt whose answer the request gets, empty where it goes to the engine; then its own is recorded."""
    report = cache.try_reuse(request)
    cache.add_observation(report, report.request.request_id)
    return (report.donor_response or "") if report.plan.full else ""


@app.command
def turns(*, thresholds: Sequence[float] = (THRESHOLD, 0.8), out: Path | None = None) -> None:
    """How many last turns hit after an equal history, right and wrong, and how many after another history.

    Args:
        thresholds: of the semantic text tier.
    """
    rows, encoder = load(DATA / "last_turns.jsonl"), SentenceEncoder()
    result: Row = {"machine": machine("semkv", "sentence-transformers", "numpy"), "forms": []}
    vetoes = {same: sum(veto(r["a"], r["b"]) is None for r in rows if r["same"] is same) for same in (True, False)}
    result |= {"not vetoed": {"paraphrases": vetoes[True], "traps": vetoes[False]}}
    for form, threshold in product(FORMS, thresholds):
        with tempfile.TemporaryDirectory() as folder:
            config = CacheConfig(Path(folder), similarity_threshold=threshold)
            with SemanticCache(config, text_encoder=encoder) as cache:
                hits: Counter[bool] = Counter()
                for number, row in enumerate(rows):  # in a tenant each, so that no row hits another
                    ask(cache, asked(FORMS[form], row["a"], str(number)))
                    hits[row["same"]] += bool(ask(cache, asked(FORMS[form], row["b"], str(number))))
        result["forms"].append(
            {"form": form, "threshold": threshold, "paraphrases that hit": hits[True], "traps that hit": hits[False]}
        )
    kinds = Counter(row["same"] for row in rows)
    result |= {"paraphrases": kinds[True], "traps": kinds[False]}
    with tempfile.TemporaryDirectory() as folder:
        config = CacheConfig(Path(folder), similarity_threshold=min(thresholds))
        with SemanticCache(config, text_encoder=encoder) as cache:
            histories = [[("user", f"Describe house {n}."), ("assistant", "Done.")] for n in range(CONVERSATIONS)]
            requests = [asked(history, "What about the second one?", "") for history in histories]
            equal = [ask(cache, request) for request in requests]
            reworded = [ask(cache, asked(history, "How about the second one?", "")) for history in histories]
    result["conversations"] = {
        "count": CONVERSATIONS,
        "equal last turns that hit": sum(map(bool, equal)),
        "reworded ones that hit": sum(map(bool, reworded)),
        "of these the own conversation's": sum(a == r.request_id for a, r in zip(reworded, requests, strict=True)),
    }
    write_json(out, result)


# -- comparator ------------------------------------------------------------

Labeled = tuple[str, str, bool]


def misjudged(pairs: Iterable[Labeled], same: SameMeaning) -> Row:
    """Shares of misjudged pairs with 95% intervals (Wilson's)."""
    verdicts = [(same(a, b), truth) for a, b, truth in pairs]
    found: Row = {}
    for name, truth in (("says different of the same", True), ("says same of different", False)):
        of_it = [verdict for verdict, label in verdicts if label is truth]
        wrong = sum(verdict is not truth for verdict in of_it)
        interval = [round(end, 4) for end in wilson(wrong, len(of_it))]
        share = round(wrong / len(of_it), 4) if of_it else None
        found[name] = {"pairs": len(of_it), "wrong": wrong, "share": share, "interval": interval}
    return found


def short_answers(encoder: SentenceEncoder) -> Iterator[Labeled]:
    """LLaVA-1.5-13B's answers to GQA questions on one picture that threshold and guards take for one another.

    Equal strings say the same; the others were labeled by reading, before the comparator was asked.
    """
    rows = {row["questionId"]: row for row in load(GQA)}
    pictures: dict[str, list[str]] = defaultdict(list)
    for number, row in rows.items():
        pictures[row["imageId"]].append(number)
    for numbers in pictures.values():
        vectors = encoder.encode([rows[number]["question"] for number in numbers])
        for i, j in combinations(range(len(numbers)), 2):
            first, second = rows[numbers[i]], rows[numbers[j]]
            near = float(vectors[i] @ vectors[j]) >= THRESHOLD and veto(first["question"], second["question"]) is None
            if near and same_text(first["llava13b"], second["llava13b"]):
                yield first["llava13b"], second["llava13b"], True
    for row in load(DATA / "short_answers.jsonl"):
        yield rows[row["first"]]["llava13b"], rows[row["second"]]["llava13b"], row["same"]


def long_texts(path: Path, same: bool | None = None) -> list[Labeled]:
    """Labeled texts of `LONG` words and more; those of a file without labels have the given one."""
    rows = [(row["a"], row["b"], bool(row["same"]) if same is None else same) for row in load(path)]
    return [row for row in rows if min(len(row[0].split()), len(row[1].split())) >= LONG]


@app.command
def comparator(*, out: Path | None = None) -> None:
    """How often the comparator says "different" of answers that say the same, and "same" of others."""
    encoder = SentenceEncoder()
    same = SameMeaning(encoder)
    result: Row = {"encoder": encoder.fingerprint}
    if GQA.exists():
        result["short answers, GQA"] = misjudged(short_answers(encoder), same)
    result["long answers"] = misjudged(long_texts(DATA / "long_answers.jsonl"), same)
    ours = long_texts(DATA / "paraphrases.jsonl", same=True) + long_texts(DATA / "traps.jsonl", same=False)
    result["stand-ins: paraphrases and traps"] = misjudged(ours, same)
    if PAIRS.exists():
        result["stand-ins: question pairs"] = misjudged(long_texts(PAIRS), same)
    write_json(out, result)


# -- separation ------------------------------------------------------------


def describe(cosines: Sequence[float]) -> Row:
    """Quantiles, and the share at or above each threshold."""
    values = np.asarray(cosines)
    return {
        "pairs": len(values),
        "quantiles": {str(q): round(float(np.quantile(values, q)), 4) for q in QUANTILES},
        "accepted": {str(t): round(float((values >= t).mean()), 4) for t in THRESHOLDS},
    }


def of_images(folder: Path, count: int, seed: int, encoder: TowerEncoder) -> Row:
    every = dict.fromkeys(("reencoded", "resized", "brightness", "shifted", "lookalike"), 1.0)
    generate(folder, Knobs(images=count, questions_per_image=1, questions_spread=0, **every), seed=seed)
    origin = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["val"]["images"]
    vectors = {name: encoder.encode((folder / "images" / f"{name}.jpg").read_bytes()) for name in origin}
    pairs: dict[str, list[float]] = defaultdict(list)
    for name, row in origin.items():
        if row["derivedFrom"]:
            pairs[row["variant"]].append(float(vectors[name] @ vectors[row["derivedFrom"]]))
    originals = np.stack([vectors[name] for name, row in origin.items() if not row["derivedFrom"]])
    pairs["other"] = list((originals @ originals.T)[~np.eye(len(originals), dtype=bool)])
    return {kind: describe(found) for kind, found in pairs.items()}


def of_questions(folder: Path, count: int, seed: int, encoder: SentenceEncoder) -> Row:
    generate(folder, Knobs(images=count, paraphrase=0.3, negative=0.3), seed=seed)
    origin = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["val"]["questions"]
    records = json.loads((folder / "val_balanced_questions.json").read_text(encoding="utf-8"))
    pairs: dict[str, dict[tuple[str, str], None]] = {"paraphrase": {}, "negative": {}}
    for name, row in origin.items():
        if row["variant"] in pairs and row["of"]:
            a, b = (normalise(records[key]["question"]) for key in (row["of"], name))
            if a != b:
                pairs[row["variant"]][a, b] = None
    vectors = {kind: [encoder.encode([pair[i] for pair in found]) for i in (0, 1)] for kind, found in pairs.items()}
    return {kind: describe(list(np.sum(a * b, axis=1))) for kind, (a, b) in vectors.items()}


@app.command
def separation(
    *,
    images: int = 150,
    seed: int = 3,
    checkpoint: Path = CHECKPOINT,
    grid: int = 6,
    layer: int = -2,
    index_encoder: str = DEFAULT_MODEL,
    out: Path | None = None,
) -> None:
    """Cosines of MiniGQA's pictures with near-duplicates and look-alikes, and of its questions with paraphrases and
    hard negatives: where to put the thresholds of an encoder.

    Args:
        checkpoint: a LLaVA checkpoint with a CLIP tower.
        grid: places on a side that the tower's output is pooled to.
        layer: of the tower.
    """
    tower, text = TowerEncoder(checkpoint, grid=grid, layer=layer), SentenceEncoder(index_encoder)
    with tempfile.TemporaryDirectory() as name:
        vision = {"encoder": checkpoint.name, "grid": grid, "layer": layer, "dim": tower.dim}
        vision["cosines"] = of_images(Path(name) / "images", images, seed, tower)
        words = {"encoder": index_encoder, "dim": text.dim}
        words["cosines"] = of_questions(Path(name) / "questions", images, seed, text)
    write_json(out, {"images": images, "seed": seed, "machine": machine(), "vision": vision, "text": words})


if __name__ == "__main__":
    app()
