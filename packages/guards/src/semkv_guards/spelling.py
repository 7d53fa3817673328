"""Slips of the keyboard: a word that is none, where the other text has the word that was meant.

Only what is certain is put right. A word that stands in no list may be a drug, a product or a name, so the one that was
meant has to be common, one slip away, and in the other text; no other common word is one slip away.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from semkv_guards.folding import asks_of_typing
from semkv_guards.language import languages

WORDS = Path(__file__).parent / "words" / "spelling" / "en.toml"
SHORTEST = 5
"""Letters of a word that may have been meant."""
LONGEST = 24
"""Letters of a word that may be a slip: what is made of one by slips grows with the square of its length."""
_LONG = 8  # of one that lost its first letter
_EDGES = ".,;:?!()\"'"
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_MOST = 4  # slips in a text; one with more is no slip
_WORD = re.compile(r"(?<![^\s(\"'])[A-Za-z]?[a-z]{3,}(?![^\s.,;:?!)\"'])")


class Spelling(NamedTuple):
    """The words of a language."""

    common: frozenset[str]
    rare: frozenset[str]
    """Others that are one slip away from a common one."""


def alike(a: str, b: str) -> tuple[str, str]:
    """Two texts with each slip in one of them put right where the other has the word; as they are where none is.

    >>> alike("What is the captial of France?", "Which city is the capital of France?")
    ('What is the capital of France?', 'Which city is the capital of France?')
    """
    if not any(map(_meant, _differing(a, b))):
        return a, b
    first = _plain_words(a)
    second = _plain_words(b)
    only_first = first - second
    only_second = second - first
    meant = dict(_slips(only_first, only_second))
    meant |= dict(_slips(only_second, only_first))
    if not meant or len(meant) > _MOST:
        return a, b
    if asks_of_typing(a) or asks_of_typing(b):
        return a, b
    return _put_right(a, meant), _put_right(b, meant)


def slips(word: str) -> Iterator[str]:
    """What one slip makes of a word: a letter dropped, doubled, or two exchanged. The last letter is never dropped, and
    of shorter words neither is the first, since what is left is too often a name or another word."""
    last = len(word) - 1
    for at, letter in enumerate(word):
        before = word[:at]
        after = word[at + 1 :]
        is_inside = 0 < at < last
        shortest = SHORTEST + 1 if is_inside else _LONG
        if at < last and len(word) >= shortest:
            yield before + after
        if is_inside:
            yield before + 2 * letter + after
        if at < last:
            yield before + after[0] + letter + after[1:]


def _differing(a: str, b: str) -> Iterator[str]:
    """The words that one text alone has, in small letters and without the signs around them."""
    for chunk in set(a.split()).symmetric_difference(b.split()):
        word = chunk.strip(_EDGES).lower()
        is_plain = word.isalpha() and word.isascii()
        if is_plain and SHORTEST <= len(word) <= LONGEST:
            yield word


def _slips(own: frozenset[str], other: frozenset[str]) -> Iterator[tuple[str, str]]:
    """The words of one text that are slips, with the words of the other that were meant."""
    for word in own:
        for meant in sorted(_meant(word) & other)[:1]:
            yield word, meant


@lru_cache(maxsize=4096)
def _meant(word: str) -> frozenset[str]:
    """The common words of which one slip makes this, all of them forms of one; none where it is a word itself, or may
    be one of several."""
    if not SHORTEST <= len(word) <= LONGEST or _is_word(word):
        return frozenset()
    near = _near(word) & _spelling().common
    found = frozenset(each for each in near if word in slips(each))
    stems = {language.stem(each) for language in languages()[:1] for each in found}
    if len(stems) != 1 or not found.isdisjoint(_lookalikes()):
        return frozenset()
    return found


def _is_word(text: str) -> bool:
    """Whether a list has it."""
    known = _spelling()
    return text in known.common or text in known.rare or text in _lookalikes()


def _near(word: str) -> frozenset[str]:
    """The words of which a slip may make this: one letter more or less, or two exchanged."""
    found = set()
    for at in range(len(word) + 1):
        before = word[:at]
        after = word[at:]
        exchanged = after[1::-1] + after[2:]
        found |= {before + letter + after for letter in _ALPHABET}
        found |= {before + after[1:], before + exchanged}
    return frozenset(found)


def _plain_words(text: str) -> frozenset[str]:
    """The words in small letters that are no names: those of a sentence's start have a capital."""
    return frozenset(
        found[0].lower()
        for found in _WORD.finditer(text)
        if found[0].islower() or _starts(text, found.start())
    )


def _starts(text: str, place: int) -> bool:
    """Whether a sentence starts at a place."""
    while place and text[place - 1].isspace():
        place -= 1
    return not place or text[place - 1] in ".?!"


def _put_right(text: str, meant: dict[str, str]) -> str:
    """A text with each slip replaced."""

    def right(found: re.Match[str]) -> str:
        word = found[0]
        other = meant.get(word.lower())
        if other is None:
            return word
        if word.islower():
            return other
        return other.capitalize() if _starts(text, found.start()) else word

    return _WORD.sub(right, text)


@cache
def _spelling() -> Spelling:
    tables = tomllib.loads(WORDS.read_text(encoding="utf-8"))
    return Spelling(
        common=frozenset(tables["common"].split()), rare=frozenset(tables["rare"].split())
    )


@cache
def _lookalikes() -> frozenset[str]:
    return frozenset().union(*(language.lookalikes for language in languages()))
