"""Streams of requests for the benches of quality: from question pairs labelled by meaning, and from MiniGQA.

The pairs are labelled by hand, and only where somebody looked. Those behind the wrong hits of a threshold and of
`Calibrated`, up to `REACH`, were read once more by a language model. ``quality_labels.json`` keeps each verdict under a
digest of the two texts, since no row of any data is written: true only where one answer serves both beyond doubt.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from semkv_lab.minigqa.generate import Knobs, generate
from semkv_lab.quality import Asked, Corpus, Pair, clusters

Stream = list[Asked]
REACH = 0.003  # wrong answers per request; beyond it many pairs were not read again
VERDICTS: dict[str, bool] = json.loads(Path(__file__).with_name("quality_labels.json").read_text(encoding="utf-8"))
_POPULAR = 0.6  # of the clusters with several texts; the others lend one text each to the singletons
TEMPLATES = (
    ("How many grams are in {n} ounces?", "{n} ounces are how many grams?", "Convert {n} ounces to grams"),
    ("What is {n} percent of 250?", "How much is {n}% of 250?", "Calculate {n} percent of 250"),
    ("Who won the Nobel Peace Prize in {y}?", "Nobel Peace Prize winner of {y}?",
     "Who got the Nobel Peace Prize in {y}?"),
    ("How do I reset port {n} of the switch?", "How can I reset the switch's port {n}?", "Reset switch port {n}"),
    ("What does error code {n} mean?", "What is the meaning of error code {n}?", "Meaning of error {n}"),
    ("How long does it take to drive {n} miles?", "How much time do I need for a drive of {n} miles?",
     "Time to drive {n} miles"),
)  # fmt: skip


def halves(pairs: Sequence[Pair], seed: int) -> tuple[list[Pair], list[Pair]]:
    """The pairs in two parts that share no cluster; pairs between the parts are left out."""
    cluster = clusters(pairs)
    count = max(cluster.values()) + 1
    first = np.random.default_rng(seed).permutation(count) < count // 2
    sides: tuple[list[Pair], list[Pair]] = ([], [])
    for pair in pairs:
        a, b = first[cluster[pair.group, pair.a]], first[cluster[pair.group, pair.b]]
        if a == b:
            sides[0 if a else 1].append(pair)
    return sides


def members(pairs: Sequence[Pair]) -> dict[int, list[str]]:
    """Texts by the number of their cluster."""
    found: dict[int, list[str]] = defaultdict(list)
    for (_, text), number in clusters(pairs).items():
        found[number].append(text)
    return found


def questions(pairs: Sequence[Pair], seed: int, *, requests: int = 10_000, popular: float = 0.7) -> Stream:
    """A share of the requests falls on clusters of several texts by Zipf's law, the rest on single texts."""
    random = np.random.default_rng(seed)
    texts = members(pairs)
    several = [n for n in texts if len(texts[n]) > 1]
    order = [several[i] for i in random.permutation(len(several))]
    head = order[: max(1, round(_POPULAR * len(order)))]
    single = [n for n in texts if len(texts[n]) == 1] + order[len(head) :]
    single = [single[i] for i in random.permutation(len(single))]
    chosen = {n: texts[n][int(random.integers(len(texts[n])))] for n in single}
    weights = 1.0 / np.arange(1, len(head) + 1)
    ranks = random.choice(len(head), size=requests, p=weights / weights.sum())
    stream, used = [], 0
    for rank, lot in zip(ranks, random.random(requests), strict=True):
        if lot < popular or not single:
            number = head[int(rank)]
            text = texts[number][int(random.integers(len(texts[number])))]
        else:
            number = single[used % len(single)]
            text, used = chosen[number], used + 1
        stream.append(Asked(text, str(number)))
    return stream


def minigqa(seed: int, *, images: int) -> Stream:
    """MiniGQA's questions, three of ten a paraphrase and three a hard negative, in the order of its requests.

    One answer serves those of one picture that mean the same. A group is a picture.
    """
    plain = dict.fromkeys(("reencoded", "resized", "brightness", "shifted", "lookalike"), 0.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "minigqa"
        generate(folder, Knobs(images=images, paraphrase=0.3, negative=0.3, **plain), seed=seed)  # type: ignore[arg-type]
        records = json.loads((folder / "val_balanced_questions.json").read_text(encoding="utf-8"))
    return [
        Asked(row["question"], f"{row['imageId']}: {row['semanticStr']}", str(row["imageId"]))
        for row in records.values()
    ]


def pairs_of(stream: Sequence[Asked], *, most: int = 20) -> list[Pair]:
    """Labelled pairs from a stream: each text with earlier ones of its group, same and different."""
    seen: dict[str, list[Asked]] = defaultdict(list)
    pairs, done = [], set()
    for asked in stream:
        for other in seen[asked.group][-most:]:
            key = (asked.group, asked.text, other.text)
            if asked.text != other.text and key not in done:
                done.add(key)
                pairs.append(Pair(asked.text, other.text, asked.answer == other.answer, asked.group))
        seen[asked.group].append(asked)
    return pairs


# -- kinds of streams that nothing was tuned on ------------------------------------------------------------


def hot(pairs: Sequence[Pair], seed: int) -> Stream:
    """Thirty clusters of several texts get nine requests of ten."""
    several = [n for n, texts in members(pairs).items() if len(texts) > 1]
    chosen = {int(n) for n in np.random.default_rng(seed).choice(several, 30, replace=False)}
    cluster = clusters(pairs)
    kept = [p for p in pairs if cluster[p.group, p.a] in chosen or not p.same]
    return questions(kept, seed, requests=5000, popular=0.9)


def paraphrases(pairs: Sequence[Pair], seed: int) -> Stream:
    """Every text of the clusters of several, once."""
    stream = [Asked(text, str(n)) for n, texts in members(pairs).items() if len(texts) > 1 for text in texts]
    return [stream[i] for i in np.random.default_rng(seed).permutation(len(stream))][:3000]


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


def turns(pairs: Sequence[Pair], seed: int) -> Stream:
    """Questions at first, MiniGQA's with hard negatives from the middle on."""
    second = minigqa(seed, images=60)
    return [*questions(pairs, seed, requests=len(second)), *second]


KINDS: dict[str, Callable[[Sequence[Pair], int], Stream]] = {
    "as tuned, 10,000": questions,
    "2,000 requests": lambda pairs, seed: questions(pairs, seed, requests=2000),
    "500 requests": lambda pairs, seed: questions(pairs, seed, requests=500),
    "few clusters, hot": hot,
    "paraphrases alone": paraphrases,
    "mostly hard negatives": hard_negatives,
    "templates with numbers": templates,
    "turns half way": turns,
}


# -- pairs that were read again ------------------------------------------------------------


def digest(a: str, b: str) -> str:
    """Of two texts in either order."""
    return hashlib.sha256("\n".join(sorted((a, b))).encode()).hexdigest()[:16]


def corrected(streams: Sequence[Sequence[Asked]], corpus: Corpus) -> list[Stream]:
    """The streams, with one answer for the clusters of every pair that says the same by the reader's word."""
    answer = {corpus.number[asked.group, asked.text]: asked.answer for stream in streams for asked in stream}
    joined: dict[str, str] = {}

    def root(name: str) -> str:
        while name in joined:
            name = joined[name]
        return name

    for number, own in answer.items():
        for other, _ in corpus.neighbours[number]:
            if other in answer and VERDICTS.get(digest(corpus.items[number][1], corpus.items[other][1])):
                left, right = root(own), root(answer[other])
                if left != right:
                    joined[left] = right
    return [[replace(asked, answer=root(asked.answer)) for asked in stream] for stream in streams]
