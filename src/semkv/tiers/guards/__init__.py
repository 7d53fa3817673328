"""Guards: words that turn a similar sentence into a different question.

Sentence embeddings place a sentence and its reversal almost on the same spot: "left of" against "right of" has a cosine
of .99 with all-MiniLM-L6-v2. A guard looks at the words instead. Each is a pure function of two texts, costs some
microseconds, and can only veto a match, never make one. A language is one `Lexicon`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from semkv.keys import LITERAL, normalise
from semkv.tiers.guards.checks import CHECKS, code
from semkv.tiers.guards.content import MOST, Pair, Side, pair, side
from semkv.tiers.guards.english import ENGLISH
from semkv.tiers.guards.lexicon import Lexicon
from semkv.tiers.guards.text import forget_words
from semkv.tiers.guards.wording import Wording, measured

__all__ = ["ENGLISH", "REASONS", "Guard", "Lexicon", "Wording", "forget", "no_veto", "veto", "wording", "words"]

Guard = Callable[[str, str], str | None]
"""Takes two similar texts; says why they must not stand in for each other, or None."""

REASONS = (
    "code", "quote", "case", "number", "unit", "date", "negation", "direction", "color", "choice", "antonym",
    "comparison", "quantity", "question word", "modality", "tense", "person", "word order", "relation", "entity",
    "substitution", "language",
)  # fmt: skip
"""Every reason for a veto in English, in the order in which the guards are asked."""

_REMEMBERED = 512  # texts that stay taken apart: a request is compared with several donors, a donor with many requests
_PAIRS = 64  # pairs that stay set against each other, until the wording is asked for as well
_SHORT = 1000  # characters of a text that is remembered
_LONG = 10_000  # characters of two texts, from which it pays to count their words first
_UNLIKE = 10 * MOST  # words that each of two long texts has alone, none of which need be a form of another
_WORD = re.compile(r"\w+")


def veto(a: str, b: str, lexicon: Lexicon = ENGLISH) -> str | None:
    """Why two similar texts must not stand in for each other, or None where no guard objects.

    Symmetric; texts that differ in white space and the case of typing alone are vetoed only where there is code or a
    quotation. Linear in the length of the texts.

    Returns:
        One of `REASONS`.
    """
    alike = _alike(a, b)
    if alike and normalise(a) == normalise(b):
        return None
    if alike and a.split() == b.split() and LITERAL.search(a):  # `len('a  b')`, the indents of a program
        return "code"
    if min(len(a), len(b)) > _LONG and _unlike(a, b):
        return "substitution"
    found = _pair(a, b, lexicon)
    typed = alike and (found.a.text.cased is None or found.b.text.cased is None)
    for check in (code,) if typed else CHECKS:
        reason = check(found)
        if reason is not None:
            return reason
    return None


def _alike(a: str, b: str) -> bool:
    """Whether nothing but case, white space and Unicode form may differ."""
    if a.isascii() and b.isascii():
        first, second = a.split(), b.split()
        return len(first) == len(second) and a.lower().split() == b.lower().split()
    return a.split() == b.split() or normalise(a).casefold() == normalise(b).casefold()


def _unlike(a: str, b: str) -> bool:
    """Whether the words of two texts tell without a closer look that one is another text."""
    first, second = (set(_WORD.findall(text.casefold())) for text in (a, b))
    return min(len(first - second), len(second - first)) > _UNLIKE


def wording(a: str, b: str, lexicon: Lexicon = ENGLISH) -> Wording:
    """How the words of two similar texts differ: symmetric, and cheap after `veto` of the same two."""
    return measured(_pair(a, b, lexicon))


def forget(*, words: bool = False) -> None:
    """Drop the texts that are taken apart, and their ``words`` too: pieces of what users wrote."""
    _remembered.cache_clear()
    _paired.cache_clear()
    if words:
        forget_words()


def no_veto(_a: str, _b: str) -> None:
    """The guard that never objects: what ``--disable-guards`` and ``--match any`` use."""


def words(text: str, lexicon: Lexicon = ENGLISH) -> list[str]:
    """The words and numbers of a text as the guards see them: folded, phrases replaced, in order."""
    return [token.word for token in _side(text, lexicon).text.tokens]


def _pair(a: str, b: str, lexicon: Lexicon) -> Pair:
    return _paired(a, b, lexicon) if len(a) + len(b) <= _SHORT else pair(side(a, lexicon), side(b, lexicon), lexicon)


def _side(text: str, lexicon: Lexicon) -> Side:
    return _remembered(text, lexicon) if len(text) <= _SHORT else side(text, lexicon)


_remembered = lru_cache(maxsize=_REMEMBERED)(side)


@lru_cache(maxsize=_PAIRS)
def _paired(a: str, b: str, lexicon: Lexicon) -> Pair:
    return pair(_side(a, lexicon), _side(b, lexicon), lexicon)
