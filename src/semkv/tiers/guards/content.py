"""Content words: which of them only one text has, and which may stand in for each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from semkv.tiers.guards.lexicon import Lexicon
from semkv.tiers.guards.marks import DATE, KNOWN, MEASURE, NEGATION, SYNONYM
from semkv.tiers.guards.quantities import NOTHING, Quantities, measure
from semkv.tiers.guards.text import STOPS, Text, Token, read

Tokens = tuple[Token, ...]

MOST = 32
"""Words that only one text has, up to which they are compared one by one; with more on both it is another text."""
_SIDED = ("comparison", "direction")  # opposites that say the same with their sides exchanged
_RELATED = SYNONYM | MEASURE | DATE  # tables that make kin of words with other letters
_LETTERS = 6  # an abbreviation has fewer
_TYPO = 6  # letters of a word in which one may be wrong
_START = 4  # letters that two forms of a word share at least
_ENDING = 5  # letters that a form may have more: "inform", "information", not "java", "javascript"


class Side(NamedTuple):
    """One of the two texts."""

    text: Text
    quantities: Quantities
    words: frozenset[str]
    stems: Mapping[str, int]
    """How often each occurs."""
    marks: int
    """The tables in which its words stand."""
    spine: Tokens
    """The tokens but for articles."""


@dataclass(eq=False)
class Pair:
    """Two texts, and the tokens that only one of them has."""

    a: Side
    b: Side
    only_a: tuple[Token, ...]
    only_b: tuple[Token, ...]
    lexicon: Lexicon
    converse: frozenset[str]
    """Stems of a comparison that is turned round with its sides: "A is larger than B", "B is smaller than A"."""
    denied: frozenset[str]
    """Stems of a word and its denial, where the other text denies with a word: "unsafe", "not safe"."""

    @cached_property
    def unmatched(self) -> tuple[list[Token], list[Token]]:
        """Content words that have no synonym, other form or spelling in the other text."""
        left, right = content(self.only_a, self.a, self.lexicon), content(self.only_b, self.b, self.lexicon)
        if not (left or right) or max(len(left), len(right)) > MOST:
            return left, right
        short = _initials(self.only_a, self.only_b) | _initials(self.only_b, self.only_a)
        return _without_kin(left, self.b, short, self.lexicon), _without_kin(right, self.a, short, self.lexicon)


def side(text: str, lexicon: Lexicon) -> Side:
    """Take one text apart."""
    found = read(text, lexicon)
    tokens, articles = found.tokens, lexicon.articles
    stems = [t.stem for t in tokens]
    times: dict[str, int] = dict.fromkeys(stems, 1)
    if len(times) < len(stems):
        for stem in times:
            times[stem] = 0
        for stem in stems:
            times[stem] += 1
    marks = 0
    for token in tokens:
        marks |= token.marks
    quantities = measure(tokens, lexicon) if marks & MEASURE else NOTHING
    words = frozenset([t.word for t in tokens])
    spine = tokens if words.isdisjoint(articles) else tuple([t for t in tokens if t.word not in articles])
    return Side(found, quantities, words, times, marks, spine)


def pair(a: Side, b: Side, lexicon: Lexicon) -> Pair:
    """Set two texts against each other."""
    only_a, only_b = _only(a, b), _only(b, a)
    if only_a and only_b:
        only_a, only_b = _joined(only_a, only_b, b), _joined(only_b, only_a, a)
    converse, denied = _converse(a, b, only_a, only_b, lexicon), _denied(a, b, only_a, only_b, lexicon)
    return Pair(a, b, only_a, only_b, lexicon, converse, denied)


def _only(mine: Side, other: Side) -> tuple[Token, ...]:
    """Tokens beyond those that the other text has, by stem: of a stem that both have, the last ones."""
    left = mine.stems.keys() - other.stems.keys()
    tokens = mine.text.tokens
    if len(mine.stems) == len(tokens):
        return tuple([t for t in tokens if t.stem in left]) if left else ()
    spare = {stem: times - other.stems.get(stem, 0) for stem, times in mine.stems.items() if times > 1}
    rest = []
    for token in reversed(tokens):
        if token.stem in left:
            rest.append(token)
        elif spare.get(token.stem, 0) > 0:
            spare[token.stem] -= 1
            rest.append(token)
    return tuple(rest[::-1])


def _joined(mine: tuple[Token, ...], other: tuple[Token, ...], side: Side) -> tuple[Token, ...]:
    """Without words that the other text writes as two, or the parts of one that it writes as one."""
    words = [t.word for t in side.text.tokens]
    gone = {x + y for x, y in itertools.pairwise(words) if len(x) > 1}
    if len(mine) > 1:
        own, whole = [t.word for t in mine], {t.word for t in other}
        for x, y in itertools.pairwise(own):
            if len(x) > 1 and x + y in whole:
                gone |= {x, y}
    return mine if gone.isdisjoint([t.word for t in mine]) else tuple(t for t in mine if t.word not in gone)


def _converse(a: Side, b: Side, only_a: Tokens, only_b: Tokens, lexicon: Lexicon) -> frozenset[str]:
    table = lexicon.tables.opposites
    compared = [x for x in only_a if x.stem in table][:MOST] if only_b else []
    facing = {y.stem for y in only_b}
    compared = [x for x in compared if not facing.isdisjoint(table[x.stem])]
    turned = [(x, y) for x in compared for y in only_b[:MOST] if table[x.stem].get(y.stem) in _SIDED]
    if len(turned) != 1:
        return frozenset()
    x, y = turned[0]
    (before, after), (left, right) = _parted(a, x, lexicon), _parted(b, y, lexicon)
    shared = before & left | after & right
    exchanged = before - shared == right - shared != left - shared == after - shared
    return frozenset((x.stem, y.stem)) if exchanged else frozenset()


def _parted(side: Side, token: Token, lexicon: Lexicon) -> tuple[set[str], set[str]]:
    """The content before and after a word."""
    tokens = side.text.tokens
    i = next(i for i, t in enumerate(tokens) if t.stem == token.stem)
    first, second = (
        {t.stem for t in part if t.word not in lexicon.function_words and t.word not in STOPS}
        for part in (tokens[:i], tokens[i + 1 :])
    )
    return first, second


def _denied(a: Side, b: Side, only_a: Tokens, only_b: Tokens, lexicon: Lexicon) -> frozenset[str]:
    if not only_a or not only_b or not (a.marks | b.marks) & NEGATION:
        return frozenset()
    first, second = (sum(t.word in lexicon.negations for t in s.text.tokens) for s in (a, b))
    said, denied = (only_a, only_b) if first > second else (only_b, only_a)
    words = {t.word: t.stem for t in said[:MOST]}
    found = [
        (t.stem, words[t.word[len(prefix) :]])
        for t in denied[:MOST]
        if t.word.startswith(lexicon.denying)
        for prefix in lexicon.denying
        if t.word.startswith(prefix) and t.word[len(prefix) :] in words
    ]
    return frozenset(found[0]) if abs(first - second) == len(found) == 1 else frozenset()


def content(only: Iterable[Token], side: Side, lexicon: Lexicon) -> list[Token]:
    """The tokens that carry content, without the numbers and units, which have a guard of their own."""
    quiet, measured = lexicon.tables.quiet, side.quantities.words
    return [
        t
        for t in only
        if (t.stem not in quiet or t.name)
        and t.word not in measured
        and not (t.name and t.word in lexicon.units)
        and t.word[0].isalpha()
    ]


def _without_kin(own: list[Token], other: Side, short: set[Token], lexicon: Lexicon) -> list[Token]:
    if not own:
        return own
    others = [t for t in other.text.tokens if t.word not in lexicon.function_words]
    return [t for t in own if not (short and t in short) and not _has_kin(t, others, lexicon)]


def _has_kin(token: Token, others: list[Token], lexicon: Lexicon) -> bool:
    letter, marks, name = token.word[0], token.marks & _RELATED, token.name
    near = [y for y in others if y.word[0] == letter or y.marks & marks or (name and y.name)]
    return any(akin(token, y, lexicon) for y in near)


def _initials(mine: Tokens, other: Tokens) -> set[Token]:
    """Abbreviations, with the words of the other text that they stand for: "AC", "alternating current"."""
    found: set[Token] = set()
    for token in mine[:MOST]:
        n = len(token.word)
        if not token.name or not 1 < n < _LETTERS:
            continue
        for i in range(len(other[:MOST]) - n + 1):
            if all(letter == t.word[0] for letter, t in zip(token.word, other[i : i + n], strict=True)):
                found |= {token, *other[i : i + n]}
    return found


def akin(x: Token, y: Token, lexicon: Lexicon) -> bool:
    """Whether two words may stand in for each other."""
    if x.stem == y.stem:
        return True
    both = x.marks & y.marks
    if both & SYNONYM and not lexicon.tables.classes[x.stem].isdisjoint(lexicon.tables.classes[y.stem]):
        return True
    if x.name and y.name and not x.marks & DATE:
        short, long = sorted((x.stem, y.stem), key=len)
        return _demonym(short, long, lexicon)
    if both & (MEASURE | DATE):
        for table in (lexicon.units, lexicon.tables.dates):
            if x.word in table and table[x.word] == table.get(y.word):
                return True
    if x.word[0] != y.word[0]:
        return False
    return _shared_start(x.stem, y.stem) or (not both & KNOWN and _typo(x.word, y.word, lexicon.vowels))


def _demonym(short: str, long: str, lexicon: Lexicon) -> bool:
    """Whether one name is the adjective of the other: "India", "Indian"."""
    if len(short) < _START or not long.startswith(short[:-1]):
        return False
    return (long[len(short) :] if long.startswith(short) else long[len(short) - 1 :]) in lexicon.demonyms


def _shared_start(x: str, y: str) -> bool:
    short, long = sorted((x, y), key=len)
    n = _common(short, long)
    if n < _START:
        return False
    return (
        len(long) - n <= min(_ENDING, n) if n == len(short) else n >= max(0.6 * len(long), len(short) - 2, _START + 1)
    )


def _common(x: str, y: str) -> int:
    n = 0
    for one, other in zip(x, y, strict=False):
        if one != other:
            break
        n += 1
    return n


def _typo(x: str, y: str, vowels: str) -> bool:
    """Whether one insertion, deletion, exchange of neighbours, other last letter or other vowel in the
    front makes one word of the other: "separate", "seperate", not "nitrate", "nitrite"."""
    if min(len(x), len(y)) < _TYPO or abs(len(x) - len(y)) > 1:
        return False
    n = _common(x, y)
    a, b = x[n:], y[n:]
    if len(a) == len(b) and a[1:] == b[1:]:
        return len(a) == 1 or (len(a) > _START and a[0] in vowels and b[0] in vowels)
    return a[1:] == b or a == b[1:] or (a[2:] == b[2:] and a[:2] == b[:2][::-1])
