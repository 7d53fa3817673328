"""Content words: which of them only one text has, and which may stand in for each other."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from semkv.tiers.guards.lexicon import Lexicon
from semkv.tiers.guards.quantities import Quantities, measure
from semkv.tiers.guards.text import Text, Token, read

MOST = 32
"""Words that only one text has, up to which they are compared one by one; with more on both it is another text."""
_TYPO = 6  # letters of a word in which one may be wrong
_START = 4  # letters that two forms of a word share at least
_ENDING = 5  # letters that a form may have more: "inform", "information", not "java", "javascript"


class Side(NamedTuple):
    """One of the two texts."""

    text: Text
    quantities: Quantities
    words: frozenset[str]
    stems: Counter[str]


class Pair(NamedTuple):
    """Two texts, and the tokens that only one of them has."""

    a: Side
    b: Side
    only_a: tuple[Token, ...]
    only_b: tuple[Token, ...]
    lexicon: Lexicon


def side(text: str, lexicon: Lexicon) -> Side:
    """Take one text apart."""
    found = read(text, lexicon)
    tokens = found.tokens
    return Side(found, measure(tokens, lexicon), frozenset(t.word for t in tokens), Counter([t.stem for t in tokens]))


def pair(a: Side, b: Side, lexicon: Lexicon) -> Pair:
    """Set two texts against each other."""
    only_a, only_b = _only(a, b), _only(b, a)
    if only_a and only_b:
        only_a, only_b = _joined(only_a, only_b, b), _joined(only_b, only_a, a)
    return Pair(a, b, only_a, only_b, lexicon)


def _only(mine: Side, other: Side) -> tuple[Token, ...]:
    """Tokens beyond those that the other text has, by stem."""
    theirs = other.stems
    left = {stem: times - theirs.get(stem, 0) for stem, times in mine.stems.items() if times > theirs.get(stem, 0)}
    if not left:
        return ()
    rest = []
    for token in reversed(mine.text.tokens):
        if left.get(token.stem, 0) > 0:
            left[token.stem] -= 1
            rest.append(token)
    return tuple(reversed(rest))


def _joined(mine: tuple[Token, ...], other: tuple[Token, ...], side: Side) -> tuple[Token, ...]:
    """Without words that the other text writes as two, or the parts of one that it writes as one."""
    doubles, whole = _doubles(side.text.tokens), {t.word for t in other}
    parts = {
        word
        for x, y in itertools.pairwise(mine)
        if len(x.word) > 1 and x.word + y.word in whole
        for word in (x.word, y.word)
    }
    return tuple(t for t in mine if t.word not in doubles and t.word not in parts)


def _doubles(tokens: tuple[Token, ...]) -> set[str]:
    return {x.word + y.word for x, y in itertools.pairwise(tokens) if len(x.word) > 1}


def content(only: Iterable[Token], side: Side, lexicon: Lexicon) -> list[Token]:
    """The tokens that carry content, without the numbers and units, which have a guard of their own."""
    quiet, measured = lexicon.tables.quiet, side.quantities.words
    return [
        t
        for t in only
        if (t.stem not in quiet or t.name)
        and t.word not in measured
        and t.word not in lexicon.units
        and t.word[0].isalpha()
    ]


def unmatched(p: Pair) -> tuple[list[Token], list[Token]]:
    """Content words that have no synonym, other form or spelling in the other text."""
    left, right = content(p.only_a, p.a, p.lexicon), content(p.only_b, p.b, p.lexicon)
    if max(len(left), len(right)) > MOST:
        return left, right
    return (
        [t for t in left if not any(akin(t, other, p.lexicon) for other in p.b.text.tokens)],
        [t for t in right if not any(akin(t, other, p.lexicon) for other in p.a.text.tokens)],
    )


def akin(x: Token, y: Token, lexicon: Lexicon) -> bool:
    """Whether two words may stand in for each other."""
    if x.stem == y.stem:
        return True
    classes = lexicon.tables.classes
    if x.stem in classes and y.stem in classes and classes[x.stem] & classes[y.stem]:
        return True
    if x.name and y.name:
        short, long = sorted((x.stem, y.stem), key=len)
        return _demonym(short, long, lexicon)
    return x.word[0] == y.word[0] and (_shared_start(x.stem, y.stem) or _typo(x.word, y.word))


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
    return len(long) - n <= min(_ENDING, n) if n == len(short) else n >= 0.6 * len(long) and n >= len(short) - 2


def _common(x: str, y: str) -> int:
    n = 0
    for one, other in zip(x, y, strict=False):
        if one != other:
            break
        n += 1
    return n


def _typo(x: str, y: str) -> bool:
    """Whether one insertion, deletion, change or exchange of neighbours makes one word of the other."""
    if min(len(x), len(y)) < _TYPO or abs(len(x) - len(y)) > 1:
        return False
    n = _common(x, y)
    a, b = x[n:], y[n:]
    return a[1:] == b[1:] or a[1:] == b or a == b[1:] or (a[2:] == b[2:] and a[:2] == b[:2][::-1])
