"""Labeled pairs and streams of requests, drawn from pairs, templates and MiniGQA; and calibrations fitted from pairs.

A calibration (`semkv.tiers.policies.Calibration`) says how likely an approximate hit is wrong. The share of same pairs
in a file says nothing of how often a *nearest neighbor* is the same question, which is what a cache meets. So the
pairs' texts are used as traffic: a random part is stored, each other text is looked up, and what it finds is labeled by
the clusters that the same pairs make. A file too small for that is fitted pair by pair.
"""

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import AliasChoices, ConfigDict, Field
from rich.console import Console
from rich.progress import track
from scipy.sparse import coo_array  # type: ignore[import-untyped]
from scipy.sparse.csgraph import connected_components  # type: ignore[import-untyped]

from semkv.encoders.text import TextEncoder
from semkv.errors import ConfigError, DatasetError
from semkv.tiers.policies import FEATURES, Calibration, features
from semkv_guards import Guard, Wording, veto, wording
from semkv_lab.minigqa import QUESTION_VARIANTS, generate
from semkv_lab.samples import NonEmpty

Item = tuple[str, str]
"""(group, text)"""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts, and whether one answer serves both. Texts of different groups (pictures) are never compared.

    As a row of a file ``same`` is 0 or 1, or a boolean.
    """

    __pydantic_config__ = ConfigDict(coerce_numbers_to_str=True)

    a: NonEmpty
    b: NonEmpty
    same: bool
    group: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a stream. Requests of one answer may stand in for one another; groups are never compared.

    As a row of a file it names the ``cluster`` of texts with its answer, or the answer. ``history`` are the messages
    before it, (role, text) each.
    """

    __pydantic_config__ = ConfigDict(coerce_numbers_to_str=True)

    text: NonEmpty
    answer: Annotated[str, Field(validation_alias=AliasChoices("cluster", "answer"))]
    group: str = ""
    history: tuple[tuple[str, str], ...] = ()


Stream = list[Asked]


# -- clusters ------------------------------------------------------------


def clusters(pairs: Sequence[Pair]) -> dict[Item, int]:
    """The number of the cluster of every text: texts that a chain of same pairs connects."""
    place: dict[Item, int] = {}  # of each text, in the order in which they come
    ends = []
    for pair in pairs:
        a = place.setdefault((pair.group, pair.a), len(place))
        b = place.setdefault((pair.group, pair.b), len(place))
        if pair.same:
            ends.append((a, b))
    rows, columns = np.array(ends, dtype=int).reshape(-1, 2).T
    graph = coo_array(
        (np.ones(len(ends)), (rows, columns)),
        shape=(len(place), len(place)),
    )
    _, numbers = connected_components(graph, directed=False)
    return dict(zip(place, numbers.tolist(), strict=True))


SEED = 0  # the first seed of what is drawn


def halves(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """The pairs in two parts that share no cluster; pairs between the parts are left out."""
    cluster = clusters(pairs)
    count = max(cluster.values()) + 1
    first = np.random.default_rng(SEED).permutation(count) < count // 2
    sides: tuple[list[Pair], list[Pair]] = ([], [])
    for pair in pairs:
        a = first[cluster[pair.group, pair.a]]
        b = first[cluster[pair.group, pair.b]]
        if a == b:
            sides[0 if a else 1].append(pair)
    return sides


def _members(pairs: Sequence[Pair]) -> dict[int, list[str]]:
    """Texts by the number of their cluster."""
    found: dict[int, list[str]] = defaultdict(list)
    for (_, text), number in clusters(pairs).items():
        found[number].append(text)
    return found


# -- kinds of streams: of pairs, a seed, and at most so many requests -----------------------------------------

_POPULAR = (
    0.6  # of the clusters with several texts; the others lend one text each to the singletons
)
_POPULAR_REQUESTS = 0.7  # share of the requests that these get
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


def zipf(pairs: Sequence[Pair], seed: int, requests: int) -> Stream:
    """A share of the requests falls on clusters of several texts by Zipf's law, the rest on single texts."""
    random = np.random.default_rng(seed)
    texts = _members(pairs)

    def shuffled(numbers: list[int]) -> list[int]:
        return [numbers[i] for i in random.permutation(len(numbers))]

    def one_text(number: int) -> str:
        own = texts[number]
        return own[int(random.integers(len(own)))]

    order = shuffled([n for n in texts if len(texts[n]) > 1])
    head = order[: max(1, round(_POPULAR * len(order)))]
    single = [n for n in texts if len(texts[n]) == 1]
    single = shuffled(single + order[len(head) :])
    chosen = {n: one_text(n) for n in single}
    weights = 1.0 / np.arange(1, len(head) + 1)
    ranks = random.choice(
        len(head),
        size=requests,
        p=weights / weights.sum(),
    )
    stream = []
    used = 0
    for rank, lot in zip(ranks, random.random(requests), strict=True):
        if lot < _POPULAR_REQUESTS or not single:
            number = head[int(rank)]
            text = one_text(number)
        else:
            number = single[used % len(single)]
            text = chosen[number]
            used += 1
        stream.append(Asked(text, str(number)))
    return stream


def paraphrases(pairs: Sequence[Pair], seed: int, requests: int) -> Stream:
    """Every text of the clusters of several, once."""
    stream: Stream = []
    for number, texts in _members(pairs).items():
        if len(texts) > 1:
            stream += [Asked(text, str(number)) for text in texts]
    order = np.random.default_rng(seed).permutation(len(stream))
    return [stream[i] for i in order][:requests]


def hard_negatives(pairs: Sequence[Pair], seed: int, requests: int) -> Stream:
    """Pairs that are labeled different, three of four; the two texts of a pair come soon after one another."""
    random = np.random.default_rng(seed)
    cluster = clusters(pairs)
    same = [pair for pair in pairs if pair.same]
    different = [pair for pair in pairs if not pair.same]
    stream: list[tuple[float, Asked]] = []
    for number in range(math.ceil(requests / 2)):
        side = same if random.random() < 0.25 else different
        pair = side[int(random.integers(len(side)))]
        for text in (pair.a, pair.b):
            place = number + 20 * random.random()
            asked = Asked(text, str(cluster[pair.group, text]))
            stream.append((place, asked))
    stream.sort(key=lambda row: row[0])
    return [asked for _, asked in stream][:requests]


def templates(_: Sequence[Pair], seed: int, requests: int) -> Stream:
    """Questions that differ from one another in a number, each worded in three ways; small numbers come more often."""
    random = np.random.default_rng(seed)
    stream = []
    for _turn in range(requests):
        kind = int(random.integers(len(_TEMPLATES)))
        n = 1 + int(random.zipf(1.3)) % 120
        template = _TEMPLATES[kind][int(random.integers(3))]
        text = template.format(n=n, y=1900 + n)
        stream.append(Asked(text, f"{kind} {n}"))
    return stream


def minigqa(seed: int, requests: int) -> Stream:
    """MiniGQA's questions, three of ten a paraphrase and three a hard negative, in the order of its requests.

    One answer serves those of one image that mean the same. A group is an image.
    """
    rates = QUESTION_VARIANTS | {"paraphrase": 0.3, "negative": 0.3}
    images = max(1, round(requests / _IMAGE_QUESTIONS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "minigqa"
        generate(folder, images, seed=seed, questions=rates, pictures={})
        records = json.loads((folder / "val_balanced_questions.json").read_text(encoding="utf-8"))
    stream = []
    for row in records.values():
        image = str(row["imageId"])
        answer = f"{image}: {row['semanticStr']}"
        stream.append(Asked(row["question"], answer, image))
    return stream


def shift(pairs: Sequence[Pair], seed: int, requests: int) -> Stream:
    """Questions by Zipf's law at first, MiniGQA's with hard negatives from the middle on."""
    second = minigqa(seed, requests // 2)[: requests // 2]
    return [*zipf(pairs, seed, requests - len(second)), *second]


KINDS: dict[str, Callable[[Sequence[Pair], int, int], Stream]] = {
    kind.__name__.replace("_", "-"): kind
    for kind in (zipf, paraphrases, hard_negatives, templates, shift)
}


Floats = npt.NDArray[np.float64]
FLOOR = 0.5  # cosines below are no neighbors
_MOST = 256  # neighbors of a text
_ASKED = 4  # stored neighbors that a lookup asks about, as the tier does
_BATCH = 512
_STORED = (0.15, 0.32, 0.5, 0.68, 0.85)  # shares of the texts that are stored, one round each
_ENOUGH = 300  # lookups with a neighbor, to fit from them
_LEAST_PAIRS = 20
_RIDGE = 10.0


# -- neighbors ------------------------------------------------------------


def know(texts: Iterable[str], encoder: TextEncoder) -> None:
    """Encode texts, so that no lookup of an encoder that remembers them waits; a bar on stderr shows how far it is."""
    distinct = list(dict.fromkeys(texts))
    batches = [distinct[start : start + _BATCH] for start in range(0, len(distinct), _BATCH)]
    for batch in track(batches, "encoding", console=Console(stderr=True), transient=True):
        encoder.encode(batch)


def neighbors(items: Sequence[Item], encoder: TextEncoder) -> list[list[tuple[int, float]]]:
    """By item (group, text): the places of the nearest others of its group with their cosines, the nearest first.

    A text beyond the encoder's window has none.
    """
    found: list[list[tuple[int, float]]] = [[] for _ in items]
    groups: dict[str, list[int]] = defaultdict(list)
    for place, (group, text) in enumerate(items):
        if encoder.fits(text):
            groups[group].append(place)
    for members in groups.values():
        vectors = encoder.encode([items[place][1] for place in members])
        for start in range(0, len(members), _BATCH):
            scores = vectors[start : start + _BATCH] @ vectors.T
            nearest = np.argsort(-scores, axis=1, kind="stable")
            for row, places in enumerate(nearest[:, : _MOST + 1]):
                own = start + row
                near = [p for p in places if p != own and scores[row, p] >= FLOOR]
                found[members[own]] = [
                    (members[p], min(1.0, float(scores[row, p]))) for p in near[:_MOST]
                ]
    return found


# -- calibrations ------------------------------------------------------------


class Lookup(NamedTuple):
    """A text found its nearest neighbor, and no guard objects."""

    score: float
    wrong: bool
    wording: Wording


class Fit(NamedTuple):
    """A calibration and what it was fitted from; ``simulated`` says whether the pairs' texts served as traffic."""

    calibration: Calibration
    lookups: list[Lookup]
    simulated: bool


def fit(
    pairs: Sequence[Pair],
    encoder: TextEncoder,
    *,
    precision: float = 0.95,
    guard: Guard = veto,
) -> Fit:
    """Fit the chance of a wrong answer, where ``guard`` does not object; ``precision`` is the least chance of a right
    answer with which a donor may be used."""
    if not 0.0 < precision < 1.0:
        raise ConfigError("--precision", precision, "a share above 0 and below 1")
    if len(pairs) < _LEAST_PAIRS or len({pair.same for pair in pairs}) < 2:
        raise DatasetError(
            f"a calibration needs at least {_LEAST_PAIRS} pairs, same and different ones"
        )
    texts = _Texts(pairs, encoder, guard)
    rows = texts.as_traffic()
    simulated = len(rows) >= _ENOUGH and _of_both_kinds(rows)
    if not simulated:
        rows = texts.as_pairs()
    if not _of_both_kinds(rows):
        raise DatasetError(
            f"nothing can be fitted: among pairs above a cosine of {FLOOR}, all are of one kind"
        )
    return Fit(_calibration(rows, encoder.fingerprint, 1.0 - precision), rows, simulated)


def _of_both_kinds(rows: Sequence[Lookup]) -> bool:
    return len({row.wrong for row in rows}) == 2


class _Texts:
    """The texts of pairs, each with its cluster and its neighbors."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        encoder: TextEncoder,
        guard: Guard,
    ) -> None:
        cluster = clusters(pairs)
        self._pairs = pairs
        self._items = list(cluster)
        self._cluster = list(cluster.values())
        self._near = neighbors(self._items, encoder)
        self._guard = guard
        self._passed: dict[tuple[int, int], bool] = {}

    def _text(self, place: int) -> str:
        return self._items[place][1]

    def _free(self, a: int, b: int) -> bool:
        """Whether the guard has nothing against a text in place of another."""
        if (a, b) not in self._passed:
            self._passed[a, b] = self._guard(self._text(a), self._text(b)) is None
        return self._passed[a, b]

    def _lookup(
        self,
        a: int,
        b: int,
        *,
        score: float,
        wrong: bool,
    ) -> Lookup:
        return Lookup(score, wrong, wording(self._text(a), self._text(b)))

    def as_traffic(self) -> list[Lookup]:
        """What texts find while a drawn part of the others is stored, in rounds."""
        random = np.random.default_rng(0)
        found: dict[tuple[int, int], Lookup] = {}
        for share in _STORED:
            stored = random.random(len(self._items)) < share
            for a in np.flatnonzero(~stored).tolist():
                there = [(b, score) for b, score in self._near[a] if stored[b]]
                for b, score in there[:_ASKED]:
                    if self._free(a, b):
                        wrong = self._cluster[a] != self._cluster[b]
                        found[a, b] = self._lookup(a, b, score=score, wrong=wrong)
                        break
        return list(found.values())

    def as_pairs(self) -> list[Lookup]:
        """The pairs as they are, each text a lookup of the other."""
        place = {item: n for n, item in enumerate(self._items)}
        found = []
        for pair in self._pairs:
            a = place[pair.group, pair.a]
            b = place[pair.group, pair.b]
            score = dict(self._near[a]).get(b)
            if score is not None and self._free(a, b):
                found.append(self._lookup(a, b, score=score, wrong=not pair.same))
        return found


def _calibration(rows: Sequence[Lookup], fingerprint: str, limit: float) -> Calibration:
    """A higher cosine may not raise the chance. A feature's weight, by its standard deviation, is drawn to 0."""
    raw = np.array([features(row.score, row.wording) for row in rows])
    wrong = np.array([row.wrong for row in rows], dtype=float)
    middle = raw.mean(axis=0)
    spread = np.maximum(raw.std(axis=0), 1e-6)
    ones = np.ones((len(rows), 1))
    table = np.hstack([ones, (raw - middle) / spread])
    penalty = np.array([1e-3, *[_RIDGE] * len(FEATURES)])
    free = (None, None)
    falling = (None, 0.0)
    others = len(FEATURES) - 2
    bounds = [free, falling, falling, *[free] * others]
    found = logistic(table, wrong, penalty, bounds)
    weights = found[1:] / spread
    bias = float(found[0] - weights @ middle)
    rounded = [round(float(weight), 5) for weight in weights]
    named = dict(zip(FEATURES, rounded, strict=True))
    return Calibration(
        fingerprint=fingerprint,
        bias=round(bias, 5),
        weights=named,
        limit=round(limit, 6),
    )


def logistic(
    table: Floats,
    truth: Floats,
    penalty: Floats,
    bounds: Sequence[tuple[float | None, float | None]],
) -> Floats:
    """Weights of a logistic regression by penalized likelihood."""
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    def cost(weights: Floats) -> tuple[float, Floats]:
        odds = table @ weights
        chance = 1.0 / (1.0 + np.exp(-odds))
        unlikely = np.sum(np.logaddexp(0.0, odds) - truth * odds)
        value = float(unlikely + 0.5 * penalty @ weights**2)
        return value, table.T @ (chance - truth) + penalty * weights

    found: Floats = minimize(
        cost,
        np.zeros(table.shape[1]),
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
    ).x
    return found
