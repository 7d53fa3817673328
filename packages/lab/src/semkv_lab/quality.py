"""How far approximate hits can be trusted, without an engine: labelled pairs and streams of requests through a policy.

As in the cache: the exact text first; else the nearest stored texts, the guard and the policy; a miss is stored; a hit
is not, unless it was checked. An answer is wrong when the stored text that gave it belongs to another cluster.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby, islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from semkv.encoders.text import TextEncoder
from semkv.errors import DatasetError
from semkv.guards import Guard, Wording, wording
from semkv.tiers.policies import Decider, Decision
from semkv.types import Entry, Exactness, Match, Namespace, Request, TextSegment
from semkv_lab.samples import read_jsonl

if TYPE_CHECKING:
    from semkv.encoders.text import Matrix

TIER = "semantic_text"
NEIGHBOURS = 4  # the tier asks about so many
_POINTS = 100
SETTLED = 500  # requests before which a rate says little
FLOOR = 0.5  # cosines below are no neighbours
_MOST = 256  # neighbours of a text
_CHUNK = 512
_BATCH = 256

Item = tuple[str, str]
"""(group, text)"""
_DONOR = Entry("", Namespace(), (), "", "")


# -- files ------------------------------------------------------------


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


def read_pairs(path: Path) -> list[Pair]:
    """Read rows of ``a``, ``b``, ``same`` (0 or 1, or a boolean) and, where there is one, ``group``.

    Raises:
        DatasetError: names file and line.
    """
    pairs = []
    for where, row in _rows(path):
        if row.get("same") not in (0, 1):
            raise DatasetError(f"{where}: 'same' must be 0 or 1, not {row.get('same')!r}")
        a, b = _text(row, "a", where), _text(row, "b", where)
        pairs.append(Pair(a, b, bool(row["same"]), _label(row, "group", where)))
    return pairs


def read_stream(path: Path) -> list[Asked]:
    """Read rows of ``text`` and ``cluster`` (or ``answer``) in the order of the requests, ``group`` where there is one.

    Raises:
        DatasetError: names file and line.
    """
    asked = []
    for where, row in _rows(path):
        name = "cluster" if "cluster" in row else "answer"
        if name not in row:
            raise DatasetError(f"{where}: 'cluster' is missing: what names the answer that is right")
        asked.append(Asked(_text(row, "text", where), _label(row, name, where), _label(row, "group", where)))
    return asked


def clusters(pairs: Sequence[Pair]) -> dict[Item, int]:
    """The number of the cluster of every text: texts that a chain of same pairs connects."""
    from scipy.sparse import coo_array  # type: ignore[import-untyped]
    from scipy.sparse.csgraph import connected_components  # type: ignore[import-untyped]

    number: dict[Item, int] = {}
    for pair in pairs:
        for text in (pair.a, pair.b):
            number.setdefault((pair.group, text), len(number))
    same = [(number[pair.group, pair.a], number[pair.group, pair.b]) for pair in pairs if pair.same]
    a, b = np.array(same, dtype=np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(len(same)), (a, b)), shape=(len(number), len(number)))
    return dict(zip(number, connected_components(graph, directed=False)[1].tolist(), strict=True))


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


# -- texts and their neighbours ------------------------------------------------------------


class Corpus:
    """Distinct items, their neighbours within their group, and what the guard says of them.

    Args:
        items: distinct (group, text).
        vectors: unit vectors, float32 [len(items), dim].
        readable: False for a text beyond the encoder's window, which never matches.
        guard: called once for every pair that is asked about.
    """

    def __init__(self, items: Sequence[Item], vectors: Matrix, readable: Sequence[bool], guard: Guard) -> None:
        self.items = list(items)
        self.number = {item: n for n, item in enumerate(self.items)}
        self._watch(guard)
        self.neighbours: list[list[tuple[int, float]]] = [[] for _ in self.items]
        groups: dict[str, list[int]] = defaultdict(list)
        for n, (group, _) in enumerate(self.items):
            if readable[n]:
                groups[group].append(n)
        for members in groups.values():
            self._search(np.asarray(members), vectors)

    def _search(self, members: np.ndarray[tuple[int], np.dtype[np.intp]], vectors: Matrix) -> None:
        own = vectors[members]
        for start in range(0, len(members), _CHUNK):
            scores = own[start : start + _CHUNK] @ own.T
            order = np.argsort(-scores, axis=1, kind="stable")[:, : _MOST + 1]
            for row, places in enumerate(order):
                n = int(members[start + row])
                near = [(int(members[p]), min(1.0, float(scores[row, p]))) for p in places if scores[row, p] >= FLOOR]
                self.neighbours[n] = [(m, score) for m, score in near if m != n][:_MOST]

    def _watch(self, guard: Guard) -> None:
        def ask(a: int, b: int) -> str:
            return guard(self.items[a][1], self.items[b][1]) or ""

        self.veto = cache(ask)
        """Why a guard objects to b in place of a; empty where none does."""

    def with_guard(self, guard: Guard) -> Corpus:
        """The same texts and neighbours under another guard."""
        other = copy.copy(self)
        other._watch(guard)
        return other

    def wording(self, a: int, b: int) -> Wording:
        """How the words of a and b differ."""
        return wording(self.items[a][1], self.items[b][1])

    def request(self, a: int) -> Request:
        """The request that asks a."""
        group, text = self.items[a]
        return Request(str(a), Namespace(group), (TextSegment(text),))

    def match(self, a: int, b: int, score: float, policy: Decider) -> Match | None:
        """The match of a with b that a tier would hand to the policy; None where it would hand in none."""
        if not score or (policy.floor is not None and score < policy.floor) or self.veto(a, b):
            return None
        return Match(TIER, str(b), score, Exactness.APPROXIMATE, wording=self.wording(a, b))


def encode(texts: Sequence[str], encoder: TextEncoder, tick: Callable[[int], None]) -> tuple[Matrix, list[bool]]:
    """Unit vectors of texts, in batches, and which texts fit the encoder's window; ``tick`` hears how many are done."""
    parts = []
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        parts.append(encoder.encode(batch))
        tick(len(batch))
    return np.concatenate(parts or [np.zeros((0, encoder.dim), np.float32)]), [encoder.fits(text) for text in texts]


def build_corpus(
    items: Sequence[Item], encoder: TextEncoder, guard: Guard, tick: Callable[[int], None] = lambda _: None
) -> Corpus:
    """The corpus of distinct items."""
    distinct = list(dict.fromkeys(items))
    vectors, readable = encode([text for _, text in distinct], encoder, tick)
    return Corpus(distinct, vectors, readable, guard)


# -- pairs ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a policy made of labelled pairs.

    ``right`` are accepted pairs that are the same; to ``vetoed`` ones a guard objected. ``curve`` has (hit ratio,
    precision) of the most confident pairs first, a veto being the least confidence; ``area`` is under it (P-CHR AUC).
    """

    pairs: int
    same: int
    accepted: int
    right: int
    vetoed: int
    curve: tuple[tuple[float, float], ...]
    area: float

    @property
    def precision(self) -> float | None:
        return self.right / self.accepted if self.accepted else None

    @property
    def recall(self) -> float | None:
        return self.right / self.same if self.same else None

    @property
    def false_positive_rate(self) -> float | None:
        different = self.pairs - self.same
        return (self.accepted - self.right) / different if different else None


def judge(pairs: Sequence[Pair], corpus: Corpus, policy: Decider, *, verify_rate: float = 0.0) -> Judgement:
    """Ask the policy about every pair, in order. A policy that learns gets the refused and the checked pairs."""
    random = Random(0)  # noqa: S311
    ranked: list[tuple[float, bool]] = []
    accepted = right = vetoed = 0
    for pair in pairs:
        a, b = corpus.number[pair.group, pair.a], corpus.number[pair.group, pair.b]
        policy.arrived()
        score = 1.0 if a == b else dict(corpus.neighbours[a]).get(b, 0.0)
        veto = corpus.veto(a, b)
        vetoed += bool(veto)
        match = corpus.match(a, b, score, policy)
        yes, risk = False, None
        if match is not None:
            decision = policy.accept(corpus.request(a), _DONOR, match)
            yes, risk = decision.accept, decision.risk
            if not yes or (verify_rate > 0.0 and random.random() < max(verify_rate, decision.check)):
                policy.observe(match, correct=pair.same, served=decision if yes else None)
        ranked.append((2.0 if veto else 1.0 - score if risk is None else risk, pair.same))
        accepted += yes
        right += yes and pair.same
    curve, area = pair_curve(ranked)
    return Judgement(len(pairs), sum(p.same for p in pairs), accepted, right, vetoed, curve, area)


def pair_curve(ranked: list[tuple[float, bool]]) -> tuple[tuple[tuple[float, float], ...], float]:
    """Precision by hit ratio, and its mean; pairs of equal confidence count alike."""
    right, area, points, end = 0.0, 0.0, [], 0
    for _, tied in groupby(sorted(ranked, key=lambda pair: pair[0]), key=lambda pair: pair[0]):
        same = [same for _, same in tied]
        start, end = end, end + len(same)
        for count in range(start + 1, end + 1):
            right += sum(same) / len(same)
            area += right / count
        points.append((end / len(ranked), right / end))
    return tuple(points), area / len(ranked)


# -- streams ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a stream.

    ``wrong`` are hits of both kinds, ``wrong_exact`` those with the same text, but another answer in this place of the
    stream. ``worst`` is the highest share of wrong answers at any time after the first 500 requests, None for a shorter
    stream. ``curve`` has (requests, hits, wrong) along the stream.
    """

    requests: int
    exact: int = 0
    approximate: int = 0
    wrong: int = 0
    wrong_exact: int = 0
    checks: int = 0
    worst: float | None = None
    curve: tuple[tuple[int, int, int], ...] = field(default=(), repr=False)

    @property
    def hits(self) -> int:
        return self.exact + self.approximate

    @property
    def hit_rate(self) -> float:
        return self.hits / self.requests

    @property
    def wrong_rate(self) -> float:
        """Wrong answers per request."""
        return self.wrong / self.requests

    @property
    def wrong_per_approximate(self) -> float | None:
        """The share of approximate hits that are wrong; None without any."""
        return (self.wrong - self.wrong_exact) / self.approximate if self.approximate else None


class Replay:
    """A stream against a corpus that holds every (group, text) of it, ready to be played many times."""

    def __init__(self, stream: Sequence[Asked], corpus: Corpus) -> None:
        self._asked = [(corpus.number[asked.group, asked.text], asked.answer) for asked in stream]
        self._corpus = corpus

    def play(self, policy: Decider, *, verify_rate: float = 0.0) -> Outcome:
        """Send every request to a new policy; a ``verify_rate`` of 0 checks nothing, whatever the policy asks."""
        random = Random(0)  # noqa: S311
        stored: dict[int, str] = {}
        counts: Counter[str] = Counter()
        worst: float | None = None
        curve: list[tuple[int, int, int]] = []
        every = max(1, len(self._asked) // _POINTS)
        for count, (number, answer) in enumerate(self._asked, 1):
            policy.arrived()
            if number in stored:
                counts["exact"] += 1
                counts["wrong"] += stored[number] != answer
                counts["wrong_exact"] += stored[number] != answer
            else:
                match, decision = self._judge(policy, number, stored)
                served = decision if decision is not None and decision.accept else None
                correct = match is not None and stored[int(match.entry_id)] == answer
                checked = served is None
                if served is not None:
                    counts["approximate"] += 1
                    counts["wrong"] += not correct
                    checked = random.random() < max(verify_rate, served.check) and verify_rate > 0.0
                    counts["checks"] += checked
                if checked:
                    if match is not None:
                        policy.observe(match, correct=correct, served=served)
                    stored[number] = answer
            if count >= SETTLED:
                worst = max(worst or 0.0, counts["wrong"] / count)
            if count % every == 0:
                curve.append((count, counts["exact"] + counts["approximate"], counts["wrong"]))
        return Outcome(len(self._asked), **counts, worst=worst, curve=tuple(curve))

    def _judge(self, policy: Decider, number: int, stored: Mapping[int, str]) -> tuple[Match | None, Decision | None]:
        """The first match that is accepted, else the nearest one, with what the policy says of it."""
        nearest: tuple[Match | None, Decision | None] = (None, None)
        there = ((other, score) for other, score in self._corpus.neighbours[number] if other in stored)
        for other, score in islice(there, NEIGHBOURS):
            match = self._corpus.match(number, other, score, policy)
            if match is not None:
                decision = policy.accept(self._corpus.request(number), _DONOR, match)
                if decision.accept:
                    return match, decision
                nearest = nearest if nearest[0] else (match, decision)
        return nearest
