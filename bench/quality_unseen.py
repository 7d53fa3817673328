"""The bounded policy on kinds of streams that nothing was tuned on; writes how often the bound held, as JSON.

The calibration is fitted on the half of the question pairs that ``bench/quality.py`` draws its streams from, the
streams come from the other half, with seeds of their own. The kinds: as there; short; a few clusters that get nearly
all requests; paraphrases alone, no text twice; mostly hard negatives; templates in which a number changes; and traffic
that turns from questions to pictures half way. No row of any data is written.

    python bench/quality_unseen.py --pairs ../shared/data/question_pairs_dev.jsonl.gz
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from quality import BOUNDS, CHECKS, COSINES, ROOT, SETTLED, TIERS, Remembering, fixed
from quality_streams import draw_stream, halves, minigqa_stream

from semkv.encoders.text import DEFAULT_MODEL
from semkv.guards import no_veto, veto
from semkv.tiers.bounded import Bounded
from semkv.tiers.policies import Calibration
from semkv_lab.evaluate import fit
from semkv_lab.quality import Asked, Corpus, Pair, Replay, build_corpus, clusters, read_pairs

Stream = list[Asked]
FIRST_SEED = 1000
TEMPLATES = (
    ("How many grams are in {n} ounces?", "{n} ounces are how many grams?", "Convert {n} ounces to grams"),
    ("What is {n} percent of 250?", "How much is {n}% of 250?", "Calculate {n} percent of 250"),
    (
        "Who won the Nobel Peace Prize in {y}?",
        "Nobel Peace Prize winner of {y}?",
        "Who got the Nobel Peace Prize in {y}?",
    ),
    ("How do I reset port {n} of the switch?", "How can I reset the switch's port {n}?", "Reset switch port {n}"),
    ("What does error code {n} mean?", "What is the meaning of error code {n}?", "Meaning of error {n}"),
    (
        "How long does it take to drive {n} miles?",
        "How much time do I need for a drive of {n} miles?",
        "Time to drive {n} miles",
    ),
)


def members(pairs: Sequence[Pair]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = defaultdict(list)
    for (_, text), number in clusters(pairs).items():
        found[number].append(text)
    return found


def hot(pairs: Sequence[Pair], seed: int) -> Stream:
    """Thirty clusters of several texts get nine requests of ten."""
    random = np.random.default_rng(seed)
    several = [n for n, texts in members(pairs).items() if len(texts) > 1]
    chosen = {int(n) for n in random.choice(several, 30, replace=False)}
    cluster = clusters(pairs)
    kept = [p for p in pairs if cluster[p.group, p.a] in chosen or not p.same]
    return draw_stream(kept, seed, requests=5000, popular=0.9)


def paraphrases(pairs: Sequence[Pair], seed: int) -> Stream:
    """Every text of the clusters of several, once."""
    random = np.random.default_rng(seed)
    stream = [Asked(text, str(n)) for n, texts in members(pairs).items() if len(texts) > 1 for text in texts]
    return [stream[i] for i in random.permutation(len(stream))][:3000]


def hard_negatives(pairs: Sequence[Pair], seed: int) -> Stream:
    """Pairs that are labelled different, three of four; the two texts of a pair come soon after one another."""
    random = np.random.default_rng(seed)
    cluster = clusters(pairs)
    sides = [[p for p in pairs if p.same is same] for same in (False, True)]
    stream: list[tuple[float, Asked]] = []
    for number in range(1500):
        side = sides[int(random.random() < 0.25)]
        pair = side[int(random.integers(len(side)))]
        stream += [
            (number + 20 * random.random(), Asked(text, str(cluster[pair.group, text]))) for text in (pair.a, pair.b)
        ]
    return [asked for _, asked in sorted(stream, key=lambda row: row[0])]


def templates(_: Sequence[Pair], seed: int) -> Stream:
    """Questions that differ from one another in a number, each worded in three ways; small numbers come more often."""
    random = np.random.default_rng(seed)
    stream = []
    for _turn in range(3000):
        kind = int(random.integers(len(TEMPLATES)))
        n = 1 + int(random.zipf(1.3)) % 120
        text = TEMPLATES[kind][int(random.integers(3))].format(n=n, y=1900 + n)
        stream.append(Asked(text, f"{kind} {n}"))
    return stream


def turned(pairs: Sequence[Pair], seed: int) -> Stream:
    """Questions at first, MiniGQA's with hard negatives from the middle on, all in one group for each picture."""
    with tempfile.TemporaryDirectory() as folder:
        second = minigqa_stream(Path(folder) / "m", seed, images=60)
    return [*draw_stream(pairs, seed, requests=len(second)), *second]


KINDS: dict[str, Callable[[Sequence[Pair], int], Stream]] = {
    "as tuned, 10,000": lambda pairs, seed: draw_stream(pairs, seed),
    "2,000 requests": lambda pairs, seed: draw_stream(pairs, seed, requests=2000),
    "500 requests": lambda pairs, seed: draw_stream(pairs, seed, requests=500),
    "few clusters, hot": hot,
    "paraphrases alone": paraphrases,
    "mostly hard negatives": hard_negatives,
    "templates with numbers": templates,
    "turns half way": turned,
}


def measure(streams: Sequence[Stream], corpus: Corpus, calibration: Calibration | None, bound: float) -> dict[str, Any]:
    replays = [Replay(stream, corpus) for stream in streams]
    bare = [Replay(stream, corpus.with_guard(no_veto)) for stream in streams]
    outcomes = [
        replay.play(Bounded(bound, calibration, TIERS), verify_rate=CHECKS, seed=n) for n, replay in enumerate(replays)
    ]
    best = []
    for replay in bare:
        tried = [replay.play(fixed(cosine)) for cosine in COSINES]
        best.append(max(o.hit_rate for o in tried if o.wrong_rate <= bound))
    return {
        "bound": bound,
        "streams": len(streams),
        "requests": round(float(np.mean([o.requests for o in outcomes]))),
        "held": sum(o.wrong_rate <= bound for o in outcomes),
        "wrong": round(float(np.mean([o.wrong_rate for o in outcomes])), 6),
        "wrong_worst": round(max(o.wrong_rate for o in outcomes), 6),
        "worst_at_any_time": round(max(o.worst or 0.0 for o in outcomes), 6),
        "hits": round(float(np.mean([o.hit_rate for o in outcomes])), 5),
        "exact": round(float(np.mean([o.exact / o.requests for o in outcomes])), 5),
        "static_hits": round(float(np.mean(best)), 5),
        "more_hits_least": round(min(o.hit_rate - b for o, b in zip(outcomes, best, strict=True)), 5),
        "checks": round(float(np.mean([o.checks / o.requests for o in outcomes])), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=Path, default=ROOT.parent / "shared" / "data" / "question_pairs_dev.jsonl.gz")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="measure these, keep the others' figures"
    )
    parser.add_argument("--vectors", type=Path, help="keep the vectors in this .npz for the next time")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "quality_unseen.json")
    options = parser.parse_args()
    encoder = Remembering(options.vectors)
    first, second = halves(read_pairs(options.pairs), 0)
    fitted = fit(second, build_corpus(list(clusters(second)), encoder, veto), encoder.fingerprint)
    result: dict[str, Any] = {
        "encoder": DEFAULT_MODEL,
        "checks": CHECKS,
        "settled": SETTLED,
        "first_seed": options.first_seed,
        "kinds": {},
    }
    if options.out.is_file():
        kept = json.loads(options.out.read_text(encoding="utf-8"))["kinds"]
        result["kinds"] = {name: rows for name, rows in kept.items() if name not in options.kinds}
    for name in options.kinds:
        draw = KINDS[name]
        streams = [draw(first, options.first_seed + n) for n in range(options.seeds)]
        items = [(asked.group, asked.text) for stream in streams for asked in stream]
        corpus = build_corpus(items, encoder, veto)
        rows = result["kinds"][name] = {"calibrated": [], "no calibration": []}
        for bound in BOUNDS:
            rows["calibrated"].append(measure(streams, corpus, fitted.calibration, bound))
            rows["no calibration"].append(measure(streams, corpus, None, bound))
            for kind in rows:
                row = rows[kind][-1]
                print(name, kind, *(f"{key} {row[key]}" for key in row), flush=True)
        result["kinds"] = {name: result["kinds"][name] for name in KINDS if name in result["kinds"]}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    encoder.keep()


if __name__ == "__main__":
    main()
