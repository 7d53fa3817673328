"""The guards: rules are asked in their order, until one vetoes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from semkv_guards import spelling
from semkv_guards.folding import LITERAL, asks_of_typing, normalise, retyped
from semkv_guards.language import Language, languages
from semkv_guards.pairs import Pair
from semkv_guards.reading import differing
from semkv_guards.rules.registry import RULES, RULES_OF_CODE
from semkv_guards.rules.rule import Rule
from semkv_guards.text import Text

Guard = Callable[[str, str], str | None]
"""Takes two similar texts; says why they must not stand in for each other, or None."""


class Objection(NamedTuple):
    """What a rule says of two texts."""

    rule: Rule
    reason: str


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
    alike = _are_alike(a, b)
    if alike and normalise(a) == normalise(b):
        return None
    reason = _veto_by_words(a, b, language, alike=alike)
    if reason is not None:
        return reason
    found = differing(a, b)
    if isinstance(found, str):
        return found
    for one, other in found.places:
        reason = _veto_by_words(one, other, language, alike=_are_alike(one, other))
        if reason is not None:
            return reason
    return None


def said_otherwise(a: str, b: str) -> str | None:
    """Why two texts that may be long, and hold any characters, do not say the same: a veto by their words alone."""
    alike = _are_alike(a, b)
    if alike and normalise(a) == normalise(b):
        return None
    return _veto_by_words(a, b, None, alike=alike)


def unread(a: str, b: str) -> str | None:
    """The guard that looks at no word, and only asks whether two texts may be compared by meaning: what
    ``--disable-guards`` uses."""
    found = differing(a, b)
    return found if isinstance(found, str) else None


def objection(pair: Pair, rules: Sequence[Rule] = RULES) -> Objection | None:
    """The first rule that objects to a pair, and its reason."""
    for rule in rules:
        reason = rule.check(pair)
        if reason is not None:
            return Objection(rule, reason)
    return None


def pair_of(a: str, b: str, language: Language | None = None) -> Pair:
    """Two texts in the language given, or else in the first that is theirs."""
    known = (language,) if language else languages()
    pairs = (Pair(_read(a, one), _read(b, one), one) for one in known)
    first = next(pairs)
    if len(known) == 1 or first.is_in_language():
        return first
    return next((pair for pair in pairs if pair.is_in_language()), first)


_read = lru_cache(maxsize=4)(Text)  # a request is compared with several donors, one after the other


def _veto_by_words(a: str, b: str, language: Language | None, *, alike: bool) -> str | None:
    """What the rules say. ``alike``: nothing but case, white space and Unicode form may differ."""
    # `len('a  b')`, the indents of a program
    if alike and a.split() == b.split() and LITERAL.search(a):
        return "code"
    pair = pair_of(*spelling.alike(a, b), language)
    case_is_style = pair.a.cased is None or pair.b.cased is None
    found = objection(pair, RULES_OF_CODE if alike and case_is_style else RULES)
    return found.reason if found else None


def _are_alike(a: str, b: str) -> bool:
    """Whether nothing but case, white space and Unicode form may differ."""
    if a.isascii() and b.isascii():
        return a.lower().split() == b.lower().split()
    return a.split() == b.split() or normalise(a).casefold() == normalise(b).casefold()
