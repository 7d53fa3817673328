"""Labeled pairs and streams of requests: as they are read from files, and drawn from pairs, templates and MiniGQA.

Every kind of `KINDS` takes labeled pairs, a seed, and how many requests there are at most.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semkv.errors import DatasetError
from semkv_lab.minigqa.generate import Knobs, generate
from semkv_lab.samples import read_jsonl

Item = tuple[str, str]
"""(group, text)"""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts, and whether one answer serves both. Texts of different groups (pictures) are never compared."""

    a: str
    b: str
    same: bool
    group: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a stream. Requests of one answer may stand in for one another; groups are never compared.

    ``history`` are the messages before it, (role, text) each.
    """

    text: str
    answer: str
    group: str = ""
    history: tuple[tuple[str, str], ...] = ()


Stream = list[Asked]


# -- files ------------------------------------------------------------


def read_pairs(path: Path) -> list[Pair]:
    """Read rows of ``a``, ``b``, ``same`` (0 or 1, or a boolean) and, where there is one, ``group``.

    Raises:
        DatasetError: names file and line.
    """
    pairs = []
    for where, row in _rows(path):
        if row.get("same") not in (0, 1):
            raise DatasetError(f"{where}: 'same' must be 0 or 1, not {row.get('same')!r}")
        pairs.append(
            Pair(_text(row, "a", where), _text(row, "b", where), bool(row["same"]), _label(row, "group", where))
        )
    return pairs


def read_stream(path: Path) -> Stream:
    """Read rows of ``text`` and ``cluster`` (or ``answer``) in the order of the requests, ``group`` where there is one.

    Raises:
        DatasetError: names file and line.
    """
    stream = []
    for where, row in _rows(path):
        name = "cluster" if "cluster" in row else "answer"
        if name not in row:
            raise DatasetError(f"{where}: 'cluster' is missing: what names the answer that is right")
        stream.append(Asked(_text(row, "text", where), _label(row, name, where), _label(row, "group", where)))
    return stream


def _rows(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Every row with where it stands; at least one."""
    rows = [(f"{path}, line {number}", row) for number, row in read_jsonl(path)]
    if not rows:
        raise DatasetError(f"{path}: no rows")
    return rows


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise DatasetError(f"{where}: {name!r} must be a text, not {value!r}")
    return value


def _label(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row.get(name, "")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DatasetError(f"{where}: {name!r} must be a text or a whole number, not {value!r}")
    return str(value)


# -- clusters ------------------------------------------------------------


def clusters(pairs: Sequence[Pair]) -> dict[Item, int]:
    """The number of the cluster of every text: texts that a chain of same pairs connects."""
    parent: dict[Item, Item] = {}

    def root(item: Item) -> Item:
        while parent[item] != item:
            item = parent[item] = parent[parent[item]]
        return item

    for pair in pairs:
        one, other = (pair.group, pair.a), (pair.group, pair.b)
        parent.setdefault(one, one)
        parent.setdefault(other, other)
        if pair.same:
            parent[root(other)] = root(one)
    number: dict[Item, int] = {}
    return {item: number.setdefault(root(item), len(number)) for item in parent}


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


def _members(pairs: Sequence[Pair]) -> dict[int, list[str]]:
    """Texts by the number of their cluster."""
    found: dict[int, list[str]] = defaultdict(list)
    for (_, text), number in clusters(pairs).items():
        found[number].append(text)
    return found


# -- kinds of streams ------------------------------------------------------------

_POPULAR = 0.6  # of the clusters with several texts; the others lend one text each to the singletons
_IMAGE_QUESTIONS = 31.5  # requests that MiniGQA has for an image
_TEMPLATES = (
    ("How many grams are in {n} ounces?", "{n} ounces are how many grams?", "Convert {n} ounces to grams"),
    ("What is {n} percent of 250?", "How much is {n}% of 250?", "Calculate {n} percent of 250"),
    ("Who won the Nobel Peace Prize in {y}?", "Nobel Peace Prize winner of {y}?",
     "Who got the Nobel Peace Prize in {y}?"),
    ("How do I reset port {n} of the switch?", "How can I reset the switch's port {n}?", "Reset switch port {n}"),
    ("What does error code {n} mean?", "What is the meaning of error code {n}?", "Meaning of error {n}"),
    ("How long does it take to drive {n} miles?", "How much time do I need for a drive of {n} miles?",
     "Time to drive {n} miles"),
)  # fmt: skip


def zipf(pairs: Sequence[Pair], seed: int, requests: int, popular: float = 0.7) -> Stream:
    """A share of the requests falls on clusters of several texts by Zipf's law, the rest on single texts."""
    random = np.random.default_rng(seed)
    texts = _members(pairs)
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


def hot(pairs: Sequence[Pair], seed: int, requests: int) -> Stream:
    """Thirty clusters of several texts get nine requests of ten."""
    several = [n for n, texts in _members(pairs).items() if len(texts) > 1]
    drawn = np.random.default_rng(seed).choice(several, min(30, len(several)), replace=False)
    chosen, cluster = {int(n) for n in drawn}, clusters(pairs)
    kept = [p for p in pairs if cluster[p.group, p.a] in chosen or not p.same]
    return zipf(kept, seed, requests, popular=0.9)


def paraphrases(pairs: Sequence[Pair], seed: int, requests: int) -> Stream:
    """Every text of the clusters of several, once."""
    stream = [Asked(text, str(n)) for n, texts in _members(pairs).items() if len(texts) > 1 for text in texts]
    return [stream[i] for i in np.random.default_rng(seed).permutation(len(stream))][:requests]


def hard_negatives(pairs: Sequence[Pair], seed: int, requests: int) -> Stream:
    """Pairs that are labeled different, three of four; the two texts of a pair come soon after one another."""
    random = np.random.default_rng(seed)
    cluster = clusters(pairs)
    sides = [[p for p in pairs if p.same is same] for same in (False, True)]
    stream: list[tuple[float, Asked]] = []
    for number in range(requests // 2):
        side = sides[int(random.random() < 0.25)]
        pair = side[int(random.integers(len(side)))]
        stream += [
            (number + 20 * random.random(), Asked(text, str(cluster[pair.group, text]))) for text in (pair.a, pair.b)
        ]
    return [asked for _, asked in sorted(stream, key=lambda row: row[0])]


def templates(_: Sequence[Pair], seed: int, requests: int) -> Stream:
    """Questions that differ from one another in a number, each worded in three ways; small numbers come more often."""
    random = np.random.default_rng(seed)
    stream = []
    for _turn in range(requests):
        kind = int(random.integers(len(_TEMPLATES)))
        n = 1 + int(random.zipf(1.3)) % 120
        text = _TEMPLATES[kind][int(random.integers(3))].format(n=n, y=1900 + n)
        stream.append(Asked(text, f"{kind} {n}"))
    return stream


def minigqa(_: Sequence[Pair], seed: int, requests: int) -> Stream:
    """MiniGQA's questions, three of ten a paraphrase and three a hard negative, in the order of its requests.

    One answer serves those of one image that mean the same. A group is an image.
    """
    plain = dict.fromkeys(("reencoded", "resized", "brightness", "shifted", "lookalike"), 0.0)
    images = max(1, round(requests / _IMAGE_QUESTIONS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "minigqa"
        generate(folder, Knobs(images=images, paraphrase=0.3, negative=0.3, **plain), seed=seed)
        records = json.loads((folder / "val_balanced_questions.json").read_text(encoding="utf-8"))
    return [
        Asked(row["question"], f"{row['imageId']}: {row['semanticStr']}", str(row["imageId"]))
        for row in records.values()
    ]


def shift(pairs: Sequence[Pair], seed: int, requests: int) -> Stream:
    """Questions by Zipf's law at first, MiniGQA's with hard negatives from the middle on."""
    second = minigqa(pairs, seed, requests // 2)
    return [*zipf(pairs, seed, len(second)), *second]


KINDS: dict[str, Callable[[Sequence[Pair], int, int], Stream]] = {
    kind.__name__.replace("_", "-"): kind
    for kind in (zipf, hot, paraphrases, hard_negatives, templates, minigqa, shift)
}
