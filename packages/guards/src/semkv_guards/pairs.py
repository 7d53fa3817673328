"""Two texts set against each other: the words that only one of them has, and which may stand in for each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property

from semkv_guards.language import Language, Token
from semkv_guards.text import Text

Tokens = tuple[Token, ...]

MOST = 32
"""Words that only one text has, up to which they are compared one by one; with more on both it is another text."""
_SIDED = ("comparison", "direction")  # opposites that say the same with their sides exchanged
_TELLING = 14  # words of a text among which one tells its language
_KNOWN = 0.6  # share of the words that are known where none tells it
_LETTERS = 6  # an abbreviation has fewer
_TYPO = 6  # letters of a word in which one may be wrong
_START = 4  # letters that two forms of a word share at least
_ENDING = 5  # letters that a form may have more: "inform", "information", not "java", "javascript"


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
        return self.carrying(self.only[0], self.a), self.carrying(self.only[1], self.b)

    @cached_property
    def unmatched(self) -> tuple[list[Token], list[Token]]:
        """Those of them that have no synonym, other form or spelling in the other text."""
        left, right = self.content
        if not (left or right) or max(len(left), len(right)) > MOST:
            return left, right
        only_a, only_b = self.only
        short = self._initials(only_a, only_b) | self._initials(only_b, only_a)
        return self._without_kin(left, self.b, short), self._without_kin(right, self.a, short)

    @cached_property
    def views(self) -> tuple[tuple[Text, Tokens, Text, Tokens], ...]:
        """Each text with the tokens that it alone has, then the other one with its own."""
        return (self.a, self.only[0], self.b, self.only[1]), (
            self.b,
            self.only[1],
            self.a,
            self.only[0],
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
        only_a, only_b = self.only
        opposed = self.language.opposed
        facing = {y.stem for y in only_b}
        compared = [x for x in only_a if x.stem in opposed][:MOST]
        compared = [x for x in compared if not facing.isdisjoint(opposed[x.stem])]
        turned = [
            (x, y) for x in compared for y in only_b[:MOST] if opposed[x.stem].get(y.stem) in _SIDED
        ]
        if len(turned) != 1:
            return frozenset()
        x, y = turned[0]
        (before, after) = self._parted(self.a, x)
        (left, right) = self._parted(self.b, y)
        shared = before & left | after & right
        exchanged = before - shared == right - shared != left - shared == after - shared
        return frozenset((x.stem, y.stem)) if exchanged else frozenset()

    def carrying(self, only: Iterable[Token], text: Text) -> list[Token]:
        """The tokens that carry content, without the numbers and units, which have a guard of their own."""
        quiet = self.language.stop_stems
        units = self.language.all_units
        measured = text.quantities.words
        return [
            t
            for t in only
            if (t.stem not in quiet or t.name)
            and t.word not in measured
            and not (t.name and len(t.word) > 1 and t.word in units)
            and t.word[0].isalpha()
        ]

    def akin(self, x: Token, y: Token) -> bool:
        """Whether two words may stand in for each other."""
        language = self.language
        if x.stem == y.stem or not language.classes.get(x.stem, _NO_CLASS).isdisjoint(
            language.classes.get(y.stem, _NO_CLASS)
        ):
            return True
        if x.word in language.lookalikes and y.word in language.lookalikes:
            return False
        if x.name and y.name and x.word not in language.senses:
            return False
        for table in (language.all_units, language.senses):
            if x.word in table and table[x.word] == table.get(y.word):
                return True
        if x.word[0] != y.word[0]:
            return False
        known = x.stem in language.known and y.stem in language.known
        return _shared_start(x.stem, y.stem) or (
            not known and _typo(x.word, y.word, language.vowels)
        )

    def neighbours(self, x: Token, y: Token) -> int:
        """How many of the two words next to the last of one stand next to the last of the other as well."""
        first, second = (
            ["", *[t.stem for t in text.without_articles], ""] for text in (self.a, self.b)
        )
        i = len(first) - 1 - first[::-1].index(x.stem)
        j = len(second) - 1 - second[::-1].index(y.stem)
        return (first[i - 1] == second[j - 1]) + (first[i + 1] == second[j + 1])

    def _parted(self, text: Text, token: Token) -> tuple[set[str], set[str]]:
        """The content before and after a word."""
        i = next(i for i, t in enumerate(text.tokens) if t.stem == token.stem)
        silent = self.language.stop_words
        first, second = (
            {t.stem for t in part if t.word not in silent}
            for part in (text.tokens[:i], text.tokens[i + 1 :])
        )
        return first, second

    def _without_kin(self, own: list[Token], other: Text, short: set[Token]) -> list[Token]:
        function = self.language.function
        related = self.language.related
        others = [t for t in other.tokens if t.word not in function]
        left = []
        for t in own:
            letter, tied = t.word[0], t.stem in related
            near = [
                y
                for y in others
                if y.word[0] == letter or (t.name and y.name) or (tied and y.stem in related)
            ]
            if t not in short and (len(t.word) == 1 or not any(self.akin(t, y) for y in near)):
                left.append(t)
        return left

    def _initials(self, mine: Tokens, other: Tokens) -> set[Token]:
        """Abbreviations, with the words of the other text that they stand for: "AC", "alternating current"."""
        found: set[Token] = set()
        for token in [t for t in mine[:MOST] if t.name and 1 < len(t.word) < _LETTERS]:
            n = len(token.word)
            for i in range(len(other[:MOST]) - n + 1):
                if all(
                    letter == t.word[0]
                    for letter, t in zip(token.word, other[i : i + n], strict=True)
                ):
                    found |= {token, *other[i : i + n]}
        return found


_NO_CLASS: frozenset[int] = frozenset()


def _tells_language(text: Text, only: Iterable[Token]) -> bool:
    """Whether a frequent word tells the language of a text, or most words are known and all in which it differs."""
    language = text.language
    words = [t for t in text.tokens if t.word[0].isalpha()]
    telling = sum([t.word in language.telling for t in words])
    if telling >= max(1, len(words) / _TELLING):
        return True
    known = [t.stem in language.known for t in words if not t.name]
    if not any(known) or sum(known) < _KNOWN * len(known):
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
        return len(long) - n <= min(_ENDING, n)
    return n >= max(0.6 * len(long), len(short) - 2, _START + 1)


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
    """Whether one insertion, deletion, exchange of neighbours, other last letter or other vowel in the
    front makes one word of the other: "separate", "seperate", not "nitrate", "nitrite"."""
    if min(len(x), len(y)) < _TYPO or abs(len(x) - len(y)) > 1:
        return False
    n = agreeing(x, y)
    a, b = x[n:], y[n:]
    if len(a) == len(b) and a[1:] == b[1:]:
        return len(a) == 1 or (len(a) > _START and a[0] in vowels and b[0] in vowels)
    return a[1:] == b or a == b[1:] or (a[2:] == b[2:] and a[:2] == b[:2][::-1])
