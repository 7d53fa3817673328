"""Guards: words that turn a similar sentence into a different question.

Sentence embeddings place a sentence and its reversal almost on the same spot: "left of" against "right of" has a cosine
of 0.99 with all-MiniLM-L6-v2. A guard looks at the words instead. It is a pure function of two texts, costs some
tenths of a millisecond, and can only veto a match, never make one. A language is one file in ``words``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from semkv_guards import meaning, order, values
from semkv_guards.folding import LITERAL, asks_of_typing, normalise, retyped
from semkv_guards.language import Language, languages
from semkv_guards.pairs import Pair
from semkv_guards.reading import differing
from semkv_guards.text import STOPS, Text

__all__ = [
    "MOST_UNMATCHED",
    "REASONS",
    "Guard",
    "Language",
    "Wording",
    "misspelled",
    "no_veto",
    "said_otherwise",
    "unread",
    "veto",
    "wording",
]

Guard = Callable[[str, str], str | None]
"""Takes two similar texts; says why they must not stand in for each other, or None."""

REASONS = (
    "code", "symbol", "quote", "case", "number", "unit", "date", "negation", "direction", "color", "choice", "antonym",
    "comparison", "quantity", "question word", "modality", "tense", "person", "word order", "relation", "entity",
    "substitution", "language", "typing", "unread", "lines",
    "length",
)  # fmt: skip
"""Every reason for a veto in English, in the order in which the guards are asked."""

MOST_UNMATCHED = 8.0
"""Unmatched words from which more make no difference to a calibration."""

_CHECKS: tuple[Callable[[Pair], str | None], ...] = (
    values.code,
    values.symbol,
    values.quote,
    values.case,
    meaning.form,
    values.quantity,
    values.date,
    values.narrower,
    meaning.negation,
    meaning.choice,
    order.bonds,
    meaning.groups,
    meaning.opposites,
    meaning.question,
    meaning.modality,
    meaning.tense,
    meaning.person,
    order.role,
    order.word_order,
    meaning.particle,
    meaning.relation,
    meaning.substitution,
    meaning.unknown_language,
)


class Wording(NamedTuple):
    """How the words of two texts differ: zero throughout for the same words in the same order."""

    unmatched: float
    """Content words that have neither synonym nor other form in the other text, up to `MOST_UNMATCHED`."""
    unshared: float
    """Share of the distinct words that only one text has, 0 to 1."""
    reordered: float
    """1 where the shared content words come in another order."""


def veto(a: str, b: str, language: Language | None = None) -> str | None:
    """Why two similar texts must not stand in for each other, or None where no guard objects.

    Symmetric; texts that differ only in spaces and the case of typing are vetoed only where there is code or a
    quotation. Linear in the length of the texts.

    Args:
        a: one text.
        b: the other.
        language: theirs; by default the first with a file in ``words`` that has most of their words, else English.

    Returns:
        One of `REASONS`.
    """
    if a != b and (asks_of_typing(a) or asks_of_typing(b)) and retyped(a, b):
        return "typing"
    alike = _alike(a, b)
    if alike and normalise(a) == normalise(b):
        return None
    reason = _said_otherwise(a, b, language, alike=alike)
    if reason is not None:
        return reason
    found = differing(a, b)
    if isinstance(found, str):
        return found
    reasons = (_said_otherwise(x, y, language, alike=_alike(x, y)) for x, y in found.places)
    return next(filter(None, reasons), None)


def said_otherwise(a: str, b: str) -> str | None:
    """Why two texts that may be long, and hold any characters, do not say the same: a veto by their words alone."""
    alike = _alike(a, b)
    if alike and normalise(a) == normalise(b):
        return None
    return _said_otherwise(a, b, None, alike=alike)


def _said_otherwise(a: str, b: str, language: Language | None, *, alike: bool) -> str | None:
    if (
        alike and a.split() == b.split() and LITERAL.search(a)
    ):  # `len('a  b')`, the indents of a program
        return "code"
    found = _pair(a, b, language)
    typed = alike and (found.a.cased is None or found.b.cased is None)
    for check in (values.code,) if typed else _CHECKS:
        reason = check(found)
        if reason is not None:
            return reason
    return None


def unread(a: str, b: str) -> str | None:
    """The guard that looks at no word, and only asks whether two texts may be compared by meaning: what
    ``--disable-guards`` uses."""
    found = differing(a, b)
    return found if isinstance(found, str) else None


def no_veto(_a: str, _b: str) -> None:
    """The guard that never objects: what ``--match any`` uses."""


def wording(a: str, b: str, language: Language | None = None) -> Wording:
    """How the words of two similar texts differ: symmetric; a calibration weighs it in addition to the cosine."""
    p = _pair(a, b, language)
    left, right = p.unmatched
    first, second = p.a.stems.keys() - STOPS, p.b.stems.keys() - STOPS
    shared, every = first & second, first | second
    quiet = p.language.stop_stems
    said = [
        [t.stem for t in text.tokens if t.stem in shared and (t.name or t.stem not in quiet)]
        for text in (p.a, p.b)
    ]
    return Wording(
        min(MOST_UNMATCHED, float(len(left) + len(right))),
        1.0 - len(shared) / len(every) if every else 0.0,
        float(said[0] != said[1]),
    )


def misspelled(a: str, b: str) -> bool:
    """Whether two sentences have the same words but for one, which is the same with another letter."""
    first, second = a.split(), b.split()
    apart = sum(x != y for x, y in zip(first, second, strict=False))
    return len(first) == len(second) and apart == 1 and wording(a, b).unmatched == 0


def _alike(a: str, b: str) -> bool:
    """Whether nothing but case, white space and Unicode form may differ."""
    if a.isascii() and b.isascii():
        return a.lower().split() == b.lower().split()
    return a.split() == b.split() or normalise(a).casefold() == normalise(b).casefold()


_read = lru_cache(maxsize=4)(Text)  # a request is compared with several donors, one after the other


def _pair(a: str, b: str, language: Language | None) -> Pair:
    known = (language,) if language else languages()
    pairs = (Pair(_read(a, one), _read(b, one), one) for one in known)
    first = next(pairs)
    return (
        first
        if len(known) == 1 or meaning.knows(first)
        else next(filter(meaning.knows, pairs), first)
    )
