"""Misspelled words: an unknown word, where the other text has the word that was meant.

Only what is certain is put right. A word that stands in no list may be a drug, a product or a name, so the one that was
meant has to be common, one slip away, and in the other text; no other common word is one slip away.

Where two texts are the same but for one word, more is certain: short words, and first and last letters, are put right
as well. Of several words that may have been meant, that of the other text then has to be much more common than all
others.
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
SHORTEST_ALONE = 4
"""The same where nothing else differs."""
LONGEST = 24
"""Letters of a word that may be a slip: what is made of one by slips grows with the square of its length."""
_LONG = 8  # of one that lost its first letter
_EDGES = ".,;:?!()\"'"
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"
_MOST = 4  # slips in a text; one with more is no slip
_WORDS = 3  # of texts that are the same but for one word, at least
_MORE_COMMON = 4.0  # times as common as all other words that may have been meant
_RARE = 20_000  # rank of a word that is not among the frequent ones
_USUAL = 3_000  # rank of a word that may be meant by one that is hardly ever used
# What is asked may be the very word, which is slang, a brand or an abbreviation.
_OF_A_WORD = frozenset(
    "mean means meaning define defined definition stand stands term word slang acronym".split()
)
_WORD = re.compile(r"(?<![^\s(\"'])[A-Za-z]?[a-z]{2,}(?![^\s.,;:?!)\"'])")


class Spelling(NamedTuple):
    """The words of a language."""

    common: frozenset[str]
    rare: frozenset[str]
    """Others that are one slip away from a common one."""
    ranks: dict[str, int]
    """Of common words, by how often they are used: 1 for the most frequent one."""

    def frequency(self, word: str) -> float:
        """How often a word is used, by Zipf's law."""
        return 1.0 / self.ranks.get(word, _RARE)

    def has(self, word: str) -> bool:
        return word in self.common or word in self.rare or word in _lookalikes()


def alike(a: str, b: str) -> tuple[str, str]:
    """Two texts with each slip in one of them put right where the other has the word; as they are where none is.

    >>> alike("What is the captial of France?", "Which city is the capital of France?")
    ('What is the capital of France?', 'Which city is the capital of France?')
    """
    alone = _apart(a, b)
    if not alone and not any(map(_meant, _differing(a, b))):
        return a, b
    first = _plain_words(a)
    second = _plain_words(b)
    plain = first | second
    meant = {
        slip: word
        for slip, word in alone
        if {slip, word} <= plain or (_is_slip_of_name(slip, word) and _may_be_one(a, b, slip, word))
    }
    only_first = first - second
    only_second = second - first
    meant |= dict(_slips(only_first, only_second))
    meant |= dict(_slips(only_second, only_first))
    if not meant or len(meant) > _MOST:
        return a, b
    if asks_of_typing(a) or asks_of_typing(b):
        return a, b
    return _put_right(a, meant), _put_right(b, meant)


def may_be_word(word: str) -> bool:
    """Whether a word in small letters, without a capital, may be no name: it is in a list, or too short for one.

    >>> may_be_word("photos"), may_be_word("it"), may_be_word("canada")
    (True, True, False)
    """
    return len(word) < SHORTEST_ALONE or _spelling().has(word)


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


def slips_alone(word: str) -> Iterator[str]:
    """What any slip makes of a word: any letter dropped or doubled, or any two exchanged."""
    for i in range(len(word)):
        yield word[:i] + word[i + 1 :]
        yield word[:i] + word[i] + word[i:]
        if i < len(word) - 1:
            yield word[:i] + word[i + 1] + word[i] + word[i + 2 :]


def _apart(a: str, b: str) -> list[tuple[str, str]]:
    """The slip in which alone two texts differ, with the word that was meant; nothing where there is none."""
    first = a.split()
    second = b.split()
    if len(first) != len(second) or len(first) < _WORDS:
        return []
    if not _OF_A_WORD.isdisjoint(map(_core, first)):
        return []
    pairs = {(_core(x), _core(y)) for x, y in zip(first, second, strict=True) if x != y}
    apart = [(x, y) for x, y in pairs if x != y]
    if len(apart) != 1 or max(map(len, apart[0])) > LONGEST:
        return []
    both_ways = (apart[0], apart[0][::-1])
    return [pair for pair in both_ways if _is_slip_of(*pair) or _is_slip_of_name(*pair)]


def _core(chunk: str) -> str:
    return chunk.strip(_EDGES).lower()


@lru_cache(maxsize=4096)
def _is_slip_of(slip: str, word: str) -> bool:
    """Whether a word that is none, or hardly ever used, stands for a common one, and hardly for any other."""
    known = _spelling()
    language = languages()[0]
    if word not in known.common or word in _lookalikes() or slip not in slips_alone(word):
        return False
    if known.has(slip) and not _is_unlikely(slip, word):
        return False
    is_function_word = word in language.stop_words
    if len(slip) < SHORTEST_ALONE and not is_function_word and not _is_cut_short(slip, word):
        return False  # it may be an abbreviation
    rivals = _rivals(slip, word)
    if any(each.endswith(word) or word.endswith(each) for each in rivals):
        return False  # such as "mmoral": "moral", or "immoral"
    return known.frequency(word) >= _MORE_COMMON * sum(map(known.frequency, rivals))


def _rivals(slip: str, word: str) -> list[str]:
    """Common words that a slip may stand for instead of a word, but for forms of that word."""
    language = languages()[0]
    near = _near(slip) & _spelling().common
    if word in language.stop_words:  # a word of content would not stand in its place
        near &= language.stop_words
    stem = language.stem(word)
    return [each for each in near if slip in slips_alone(each) and language.stem(each) != stem]


def _is_unlikely(slip: str, word: str) -> bool:
    """Whether a word of some list is hardly ever used, and much less than another that may have been meant."""
    known = _spelling()
    language = languages()[0]
    if slip in known.common or slip in known.ranks or slip in _lookalikes():
        return False
    if word in language.function:
        return word not in language.negations
    return len(slip) >= SHORTEST_ALONE and known.ranks.get(word, _RARE) <= _USUAL


def _is_cut_short(slip: str, word: str) -> bool:
    """Whether a slip of three letters begins as the word does, and is no mere abbreviation, as consonants are."""
    return slip[0] == word[0] and not set(languages()[0].vowels).isdisjoint(slip)


def may_be_slip(word: str, other: str) -> bool:
    """Whether one of two words is none, or hardly used, and one slip away from the other."""
    known = _spelling()
    if other not in known.common:
        word, other = other, word
    is_far = max(len(word), len(other)) > LONGEST or other not in known.common
    return not is_far and word not in known.common and word in slips_alone(other)


@lru_cache(maxsize=4096)
def _is_slip_of_name(slip: str, word: str) -> bool:
    """Whether what is in no list can only be a common word, or a country, that is a name here: "Engish"."""
    known = _spelling()
    language = languages()[0]
    is_known = word in language.nations or (word in known.common and word in known.ranks)
    if not is_known or word in _lookalikes() or word in language.stop_words:
        return False
    if len(slip) < SHORTEST_ALONE or known.has(slip):
        return False
    return slip in slips_alone(word) and not _rivals(slip, word)


def _may_be_one(a: str, b: str, slip: str, word: str) -> bool:
    """Whether a slip is no name of its own: it has no capital, unless the word has one, too ("Thorne", "throne")."""
    written = {chunk.strip(_EDGES) for chunk in (*a.split(), *b.split())}
    return slip.capitalize() not in written or word.capitalize() in written


def _differing(a: str, b: str) -> Iterator[str]:
    """The words that one text alone has, in small letters and without the signs around them."""
    for chunk in set(a.split()).symmetric_difference(b.split()):
        word = _core(chunk)
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
    known = _spelling()
    if not SHORTEST <= len(word) <= LONGEST or known.has(word):
        return frozenset()
    near = (each for each in _near(word) & known.common if len(each) >= SHORTEST)
    found = frozenset(each for each in near if word in slips(each))
    stems = {language.stem(each) for language in languages()[:1] for each in found}
    if len(stems) != 1 or not found.isdisjoint(_lookalikes()):
        return frozenset()
    return found


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
        return other if word.islower() else other.capitalize()

    return _WORD.sub(right, text)


@cache
def _spelling() -> Spelling:
    tables = tomllib.loads(WORDS.read_text(encoding="utf-8"))
    frequent = tables["frequent"].split()
    return Spelling(
        common=frozenset(tables["common"].split()),
        rare=frozenset(tables["rare"].split()),
        ranks={word: rank for rank, word in enumerate(frequent, 1)},
    )


@cache
def _lookalikes() -> frozenset[str]:
    return frozenset().union(*(language.lookalikes for language in languages()))
