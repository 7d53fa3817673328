"""How the words of two similar texts differ, in three numbers that a calibration weighs beside the cosine."""

from __future__ import annotations

from typing import NamedTuple

from semkv.tiers.guards.content import Pair, Side
from semkv.tiers.guards.lexicon import Lexicon
from semkv.tiers.guards.text import STOPS

MOST_UNMATCHED = 8.0


class Wording(NamedTuple):
    """Zero throughout for texts of the same words in the same order."""

    unmatched: float
    """Content words that have neither synonym nor other form in the other text, up to `MOST_UNMATCHED`."""
    unshared: float
    """Share of the distinct words that only one text has, 0 to 1."""
    reordered: float
    """1 where the shared content words come in another order."""


def measured(p: Pair) -> Wording:
    """The difference of two texts; symmetric."""
    left, right = p.unmatched
    first, second = p.a.stems.keys() - STOPS, p.b.stems.keys() - STOPS
    shared = first & second
    every = len(first) + len(second) - len(shared)
    moved = _content(p.a, shared, p.lexicon) != _content(p.b, shared, p.lexicon)
    return Wording(
        min(MOST_UNMATCHED, float(len(left) + len(right))), 1.0 - len(shared) / every if every else 0.0, float(moved)
    )


def _content(side: Side, shared: set[str], lexicon: Lexicon) -> list[str]:
    quiet = lexicon.tables.quiet
    return [t.stem for t in side.text.tokens if t.stem in shared and (t.stem not in quiet or t.name)]
