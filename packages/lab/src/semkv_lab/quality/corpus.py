"""The distinct texts of a file with their vectors and nearest neighbours, computed once for any number of replays."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from semkv.encoders.text import TextEncoder
from semkv.guards import Guard, Wording, wording

if TYPE_CHECKING:
    from semkv.encoders.text import Matrix

FLOOR = 0.5  # cosines below are no neighbours
_MOST = 256  # neighbours of a text
_CHUNK = 512
_BATCH = 256

Item = tuple[str, str]
"""(group, text)"""


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
        self.guard = guard
        self._vetoes: dict[tuple[int, int], str] = {}
        self._wordings: dict[tuple[int, int], Wording] = {}
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
                near = [(int(members[p]), float(scores[row, p])) for p in places if scores[row, p] >= FLOOR]
                self.neighbours[n] = [(m, min(1.0, s)) for m, s in near if m != n][:_MOST]

    def with_guard(self, guard: Guard) -> Corpus:
        """The same texts and neighbours under another guard."""
        other = copy.copy(self)
        other.guard, other._vetoes = guard, {}
        return other

    def veto(self, a: int, b: int) -> str:
        """Why a guard objects to b in place of a; empty where none does."""
        key = (a, b)
        if key not in self._vetoes:
            self._vetoes[key] = self.guard(self.items[a][1], self.items[b][1]) or ""
        return self._vetoes[key]

    def wording(self, a: int, b: int) -> Wording:
        """How the words of a and b differ."""
        key = (a, b)
        if key not in self._wordings:
            self._wordings[key] = wording(self.items[a][1], self.items[b][1])
        return self._wordings[key]


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
