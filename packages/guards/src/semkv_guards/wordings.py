"""How much the words of two texts differ: what a calibration weighs in addition to their cosine."""

from __future__ import annotations

from typing import NamedTuple

from semkv_guards.guard import pair_of
from semkv_guards.language import Language
from semkv_guards.pairs import Pair
from semkv_guards.text import STOPS

MOST_UNMATCHED = 8.0
"""Unmatched words from which more make no difference to a calibration."""


class Wording(NamedTuple):
    """How the words of two texts differ: zero throughout for the same words in the same order."""

    unmatched: float
    """Content words that have neither synonym nor other form in the other text, up to `MOST_UNMATCHED`."""
    unshared: float
    """Share of the distinct words that only one text has, 0 to 1."""
    reordered: float
    """1 where the shared content words come in another order."""


def wording(a: str, b: str, language: Language | None = None) -> Wording:
    """How the words of two similar texts differ. Symmetric."""
    pair = pair_of(a, b, language)
    stop_stems = pair.language.stop_stems
    first = pair.a.stems.keys() - STOPS
    second = pair.b.stems.keys() - STOPS
    shared = first & second
    every = first | second
    content = [
        [t.stem for t in text.tokens if t.stem in shared and (t.name or t.stem not in stop_stems)]
        for text in (pair.a, pair.b)
    ]
    unmatched = sum(map(len, pair.unmatched))
    return Wording(
        unmatched=min(MOST_UNMATCHED, float(unmatched)),
        unshared=1.0 - len(shared) / len(every) if every else 0.0,
        reordered=float(content[0] != content[1]),
    )


def same_words(a: str, b: str) -> bool:
    """Whether two similar texts ask for the same kind of answer in words that all have their kin in the other text, in
    the same order. Where no guard objects either, they hardly ever need two answers. Symmetric."""
    pair = pair_of(a, b)
    if any(pair.unmatched) or pair.a.asks_yes_or_no != pair.b.asks_yes_or_no:
        return False
    if any(_begins(x.stem, y.stem, pair) for x in pair.content[0] for y in pair.content[1]):
        return False
    return not wording(a, b, pair.language).reordered


def _begins(x: str, y: str, pair: Pair) -> bool:
    """Whether one stem begins with another: "printer" may be another thing than "print"."""
    is_longer = x != y and (x.startswith(y) or y.startswith(x))
    return is_longer and not pair.language.are_synonyms(x, y)


def misspelled(a: str, b: str) -> bool:
    """Whether two sentences have the same words but for one, which is the same with another letter."""
    first = a.split()
    second = b.split()
    if len(first) != len(second):
        return False
    apart = sum(x != y for x, y in zip(first, second, strict=True))
    return apart == 1 and wording(a, b).unmatched == 0
