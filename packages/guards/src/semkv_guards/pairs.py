"""Two texts set against each other: the words that only one of them has, and which may stand in for each other."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

from semkv_guards.language import KNOWN, TELLING, Language, Token
from semkv_guards.text import END, STOPS, Text

Tokens = tuple[Token, ...]

MOST = 32
"""Words that only one text has, up to which they are compared one by one; with more on both it is another text."""
_SIDED = ("comparison", "direction")  # opposites that say the same with their sides exchanged
_LETTERS = 6  # an abbreviation has fewer
_TYPO = 6  # letters of a word in which one may be wrong
_START = 4  # letters that two forms of a word share at least
# Of one word: "inform", "information". Others make another: print and printer, sand and sandal,
# java and javascript.
_ENDINGS = frozenset(
    (
        "s es d ed ing y ly ally ion ions ation ity ment ments ness nes ance ence ive est len ic ical ful less"
        " able abl ible ibl"
    ).split()
)
_AL = 5  # letters from which "al" is one, too: "arrival", but not "sandal"


class View(NamedTuple):
    """A pair from one side."""

    text: Text
    only: Tokens
    """The tokens that it alone has."""
    other: Text
    others: Tokens
    """Those that the other text alone has."""


class Exchange(NamedTuple):
    """What stands in each text between the same two words, where all of it is its own."""

    before: str
    """The stem before it; that of `END` at the start of a clause."""
    after: str
    """The stem behind it; that of `END` at the end of a clause."""
    first: Tokens
    """What the first text has there."""
    second: Tokens
    """What the second text has."""


class Pair:
    """Two texts of a language.

    Attributes:
        words: the words of both.
        only: the tokens that only the first and only the second text has, by stem.
        converse: stems of a comparison that is turned round with its sides: "A exceeds B", "B is below A".
    """

    def __init__(self, a: Text, b: Text, language: Language) -> None:
        self.a = a
        self.b = b
        self.language = language
        self.words = a.words | b.words
        first, second = _only(a, b), _only(b, a)
        if first and second:
            first, second = _unjoined(first, second, b), _unjoined(second, first, a)
        self.only: tuple[Tokens, Tokens] = first, second
        self.converse: frozenset[str] = self._converse() if first and second else frozenset()

    @cached_property
    def content(self) -> tuple[list[Token], list[Token]]:
        """Those of them that carry content."""
        return self._carrying(self.only[0], self.a), self._carrying(self.only[1], self.b)

    @cached_property
    def unmatched(self) -> tuple[list[Token], list[Token]]:
        """Those of them that have no synonym, other form or spelling in the other text."""
        left, right = self.content
        if not (left or right) or max(len(left), len(right)) > MOST:
            return left, right
        only_a, only_b = self.only
        abbreviated = _abbreviated(only_a, only_b) | _abbreviated(only_b, only_a)
        return (
            self._without_kin(left, self.b.tokens, abbreviated),
            self._without_kin(right, self.a.tokens, abbreviated),
        )

    @cached_property
    def without_counterpart(self) -> tuple[list[Token], list[Token]]:
        """Those that carry content and have no kin among the words that the other text alone has."""
        left, right = self.content
        only_a, only_b = self.only
        if max(len(left), len(right)) > MOST:
            return left, right
        abbreviated = _abbreviated(only_a, only_b) | _abbreviated(only_b, only_a)
        return (
            self._without_kin(left, only_b, abbreviated),
            self._without_kin(right, only_a, abbreviated),
        )

    @cached_property
    def exchanges(self) -> list[Exchange]:
        """The places where one text has some words and the other has others, articles left aside. Linear."""
        first = _own_stretches(self.a, self.b)
        second = _own_stretches(self.b, self.a)
        return [
            Exchange(before=place[0], after=place[1], first=words, second=second[place])
            for place, words in first.items()
            if place in second
        ]

    @cached_property
    def auxiliaries_differ(self) -> bool:
        """Whether one text has an auxiliary that the other has not."""
        auxiliaries = self.language.auxiliaries
        return any(t.stem in auxiliaries for only in self.only for t in only)

    @cached_property
    def views(self) -> tuple[View, View]:
        """The pair from each side."""
        only_a, only_b = self.only
        return (
            View(text=self.a, only=only_a, other=self.b, others=only_b),
            View(text=self.b, only=only_b, other=self.a, others=only_a),
        )

    def is_in_language(self) -> bool:
        """Whether both texts are in the pair's language; one is enough where they differ in words without content."""
        first = _tells_language(self.a, self.only[0])
        second = _tells_language(self.b, self.only[1])
        if first and second:
            return True
        differing = itertools.chain(*self.only)
        return (first or second) and all(t.word in self.language.stop_words for t in differing)

    def _converse(self) -> frozenset[str]:
        """The two opposites of a comparison, where their sides are exchanged as well."""
        found = self._opposites_with_sides()
        if len(found) != 1:
            return frozenset()
        x, y = found[0]
        before, after = self._around(self.a, x)
        other_before, other_after = self._around(self.b, y)
        shared = before & other_before | after & other_after
        left = before - shared
        right = after - shared
        is_exchanged = left == other_after - shared != other_before - shared == right
        return frozenset((x.stem, y.stem)) if is_exchanged else frozenset()

    def _opposites_with_sides(self) -> list[tuple[Token, Token]]:
        """Words that stand against opposites which say the same with their sides exchanged."""
        only_a, only_b = self.only
        opposed = self.language.opposed
        facing = {y.stem for y in only_b}
        compared = [x for x in only_a if x.stem in opposed][:MOST]
        return [
            (x, y)
            for x in compared
            if not facing.isdisjoint(opposed[x.stem])
            for y in only_b[:MOST]
            if opposed[x.stem].get(y.stem) in _SIDED
        ]

    def _around(self, text: Text, token: Token) -> tuple[set[str], set[str]]:
        """The content before and after a word."""
        place = next(i for i, t in enumerate(text.tokens) if t.stem == token.stem)
        stop_words = self.language.stop_words
        before = {t.stem for t in text.tokens[:place] if t.word not in stop_words}
        after = {t.stem for t in text.tokens[place + 1 :] if t.word not in stop_words}
        return before, after

    def _carrying(self, only: Iterable[Token], text: Text) -> list[Token]:
        """The tokens that carry content, without the numbers and units, which have a rule of their own."""
        stop_stems = self.language.stop_stems
        units = self.language.all_units
        measured = text.quantities.words
        return [
            t
            for t in only
            if (t.stem not in stop_stems or t.name)
            and t.word not in measured
            and not (t.name and len(t.word) > 1 and t.word in units)
            and t.word[0].isalpha()
        ]

    def akin(self, x: Token, y: Token) -> bool:
        """Whether two words may stand in for each other."""
        language = self.language
        if x.stem == y.stem or language.are_synonyms(x.stem, y.stem):
            return True
        if x.word in language.lookalikes and y.word in language.lookalikes:
            return False
        if x.name and y.name and x.word not in language.senses:
            return False
        if language.mean_the_same(x.word, y.word):
            return True
        if x.word[0] != y.word[0]:
            return False
        if _shared_start(x.stem, y.stem) or self._compare_alike(x, y):
            return True
        known = x.stem in language.known and y.stem in language.known
        return not known and _typo(x.word, y.word, language.vowels)

    def _compare_alike(self, x: Token, y: Token) -> bool:
        """Whether a word is the other's comparative, which has "more": "denser", "more dense"."""
        short, long = sorted((x.stem, y.stem), key=len)
        return long == short + "er" and ("more" in self.a.words or "more" in self.b.words)

    def neighbours(self, x: Token, y: Token) -> int:
        """How many of the two words next to the last of one stand next to the last of the other as well."""
        before, after = _beside_last(self.a, x.stem)
        other_before, other_after = _beside_last(self.b, y.stem)
        return (before == other_before) + (after == other_after)

    def _without_kin(self, own: list[Token], other: Tokens, abbreviated: set[Token]) -> list[Token]:
        """The words that have no kin among others."""
        function = self.language.function
        others = [t for t in other if t.word not in function]
        return [t for t in own if t not in abbreviated and not self._has_kin(t, others)]

    def _has_kin(self, token: Token, others: Iterable[Token]) -> bool:
        if len(token.word) == 1:
            return False
        related = self.language.related
        letter = token.word[0]
        is_name = token.name
        is_related = token.stem in related
        return any(
            self.akin(token, y)
            for y in others
            if y.word[0] == letter or (is_name and y.name) or (is_related and y.stem in related)
        )


def _tells_language(text: Text, only: Iterable[Token]) -> bool:
    """Whether a frequent word tells the language of a text, or most words are known and all in which it differs."""
    language = text.language
    words = [t for t in text.tokens if t.word[0].isalpha()]
    telling = sum([t.word in language.telling for t in words])
    if telling >= max(1, len(words) / TELLING):
        return True
    known = [t.stem in language.known for t in words if not t.name]
    if not any(known) or sum(known) < KNOWN * len(known):
        return False
    return all(t.name or not t.word[0].isalpha() or t.stem in language.known for t in only)


def _only(mine: Text, other: Text) -> Tokens:
    """Tokens beyond those that the other text has, by stem: of a stem that both have, the last ones."""
    theirs = other.stems
    spare = {
        stem: times - theirs.get(stem, 0)
        for stem, times in mine.stems.items()
        if times > theirs.get(stem, 0)
    }
    rest = []
    for token in reversed(mine.tokens) if spare else ():
        if spare.get(token.stem, 0) > 0:
            spare[token.stem] -= 1
            rest.append(token)
    return tuple(rest[::-1])


def _own_stretches(mine: Text, other: Text) -> dict[tuple[str, str], Tokens]:
    """The longest stretches of words that the other text has not, or not as often, by the stems around them."""
    tokens = mine.without_articles
    is_own = _are_own(tokens, other)
    found: dict[tuple[str, str], Tokens] = {}
    start = 0
    for own, stretch in itertools.groupby(is_own):
        end = start + sum(1 for _ in stretch)
        if own:
            before = _stem_at(tokens, start - 1)
            after = _stem_at(tokens, end)
            found[before, after] = tokens[start:end]
        start = end
    return found


def _are_own(tokens: Tokens, other: Text) -> list[bool]:
    """For each token, whether it is beyond those of its stem that the other text has; the first ones are shared."""
    left = Counter(t.stem for t in other.without_articles)
    found = []
    for token in tokens:
        left[token.stem] -= 1
        found.append(left[token.stem] < 0 and token.word not in STOPS)
    return found


def _stem_at(tokens: Tokens, place: int) -> str:
    """The stem at a place; that of `END` at a sign, and outside."""
    is_inside = 0 <= place < len(tokens)
    return tokens[place].stem if is_inside and tokens[place].word not in STOPS else END.stem


def _unjoined(mine: Tokens, other: Tokens, text: Text) -> Tokens:
    """Without words that the other text writes as two, or the parts of one that it writes as one."""
    gone = {x.word + y.word for x, y in itertools.pairwise(text.tokens) if len(x.word) > 1}
    whole = {t.word for t in other}
    for x, y in itertools.pairwise(mine):
        if len(x.word) > 1 and x.word + y.word in whole:
            gone |= {x.word, y.word}
    return tuple([t for t in mine if t.word not in gone])


def _shared_start(x: str, y: str) -> bool:
    short, long = sorted((x, y), key=len)
    n = agreeing(short, long)
    if n < _START:
        return False
    if n == len(short):
        ending = long[n:]
        return ending in _ENDINGS or (ending == "al" and n >= _AL)
    return n >= max(0.6 * len(long), len(short) - 2, _START + 1)


def _beside_last(text: Text, stem: str) -> tuple[str, str]:
    """The stems before and after the last word of a stem, without articles; empty at an end of the text."""
    stems = [t.stem for t in text.without_articles]
    place = len(stems) - 1 - stems[::-1].index(stem)
    before = stems[place - 1] if place else ""
    after = stems[place + 1] if place + 1 < len(stems) else ""
    return before, after


def _abbreviated(mine: Tokens, other: Tokens) -> set[Token]:
    """Abbreviations, with the words of the other text that they stand for: "AC", "alternating current"."""
    found: set[Token] = set()
    near = other[:MOST]
    for token in mine[:MOST]:
        length = len(token.word)
        if not token.name or not 1 < length < _LETTERS:
            continue
        for start in range(len(near) - length + 1):
            words = near[start : start + length]
            if all(letter == t.word[0] for letter, t in zip(token.word, words, strict=True)):
                found |= {token, *words}
    return found


def triples(tokens: Tokens) -> Iterable[tuple[Token, Token, Token]]:
    """Every three tokens in a row."""
    return zip(tokens, tokens[1:], tokens[2:], strict=False)


def agreeing(x: Sequence[str], y: Sequence[str]) -> int:
    """How many letters two words, or items two lists, share at the start."""
    return next(
        (n for n, (one, other) in enumerate(zip(x, y, strict=False)) if one != other),
        min(len(x), len(y)),
    )


def _typo(x: str, y: str, vowels: str) -> bool:
    """Whether one slip makes one word of the other: "separate", "seperate", not "nitrate", "nitrite".

    A slip is a letter more or less, two neighbors exchanged, another last letter, or another vowel in the front.
    """
    if min(len(x), len(y)) < _TYPO or abs(len(x) - len(y)) > 1:
        return False
    n = agreeing(x, y)
    rest = x[n:]
    other_rest = y[n:]
    if len(rest) == len(other_rest) and rest[1:] == other_rest[1:]:
        is_in_front = len(rest) > _START
        return len(rest) == 1 or (is_in_front and rest[0] in vowels and other_rest[0] in vowels)
    if rest[1:] == other_rest or rest == other_rest[1:]:
        return True
    return rest[2:] == other_rest[2:] and rest[:2] == other_rest[:2][::-1]
