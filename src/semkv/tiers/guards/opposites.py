"""Opposites: by table, by prefix, or as two degrees of one word."""

from __future__ import annotations

from semkv.tiers.guards.content import MOST, Pair, Side
from semkv.tiers.guards.lexicon import Lexicon
from semkv.tiers.guards.marks import COMPARED, LESSENING, OPPOSED
from semkv.tiers.guards.text import Token

_NAMED = 4  # letters of a stem that a prefix may turn round


def opposites(p: Pair) -> str | None:
    """A word and its opposite, by table or by prefix. Where one text has both ("pros and cons") they prove nothing."""
    if p.converse or p.denied or not p.only_a or not p.only_b:
        return None
    table = p.lexicon.tables.opposites
    mine, other, measuring = {t.stem for t in p.only_a}, {t.stem for t in p.only_b}, _measuring(p)
    reasons = {
        table[word][opposite]
        for word in {t.stem for t in p.only_a if t.marks & OPPOSED} - measuring
        for opposite in table[word].keys() & other - measuring
        if mine.isdisjoint(table[word]) and other.isdisjoint(table[opposite])
    }
    if reasons:
        return min(reasons)
    if _lessened(p.only_a, p.only_b, p.a, p.lexicon) or _lessened(p.only_b, p.only_a, p.b, p.lexicon):
        return "comparison"
    if min(len(p.only_a), len(p.only_b)) > MOST:
        return None
    if not _compared(p.only_a, p.lexicon).isdisjoint(_compared(p.only_b, p.lexicon, other=True)):
        return "comparison"
    ends = {y.word[-3:] for y in p.only_b}
    turned = (x.word for x in p.only_a if x.word[-3:] in ends)
    return "antonym" if any(_contrary(x, y.word, p.lexicon) for x in turned for y in p.only_b) else None


def _measuring(p: Pair) -> set[str]:
    """Stems of quantities that all have a unit, and a guard of their own: "one year", "12 months"."""
    found = (p.a.quantities, p.b.quantities)
    if not all(q.dimension for quantities in found for q in quantities.found):
        return set()
    return {p.lexicon.stem(word) for quantities in found for word in quantities.words - p.lexicon.ordinals}


def _lessened(mine: tuple[Token, ...], other: tuple[Token, ...], side: Side, lexicon: Lexicon) -> bool:
    """Whether "less dense" or "as dense as" stands against "denser"."""
    if not any(t.marks & LESSENING for t in mine):
        return False
    endings = lexicon.lessening[1]
    bases = [t.word[: -len(e)] for t in other for e in endings if t.word.endswith(e)]
    return any(base in side.stems or lexicon.stem(base) in side.stems for base in bases)


def _compared(only: tuple[Token, ...], lexicon: Lexicon, *, other: bool = False) -> set[str]:
    """The words that end like a comparison, or what they would be with the ``other`` ending: "hotter", "hottest"."""
    endings = lexicon.lessening[1]
    turned = endings[::-1] if other else endings
    return {
        t.word[: -len(ending)] + instead
        for t in only
        if t.marks & COMPARED
        for ending, instead in zip(endings, turned, strict=True)
        if t.word.endswith(ending)
    }


def _contrary(x: str, y: str, lexicon: Lexicon) -> bool:
    """Whether two words are one stem with contrary prefixes: "encode" and "decode"."""
    if x[-3:] != y[-3:] or min(len(x), len(y)) < _NAMED:
        return False
    return any(
        a.startswith(p) and b.startswith(q) and a[len(p) :] == b[len(q) :] and len(a) - len(p) >= _NAMED - 1
        for p, q in lexicon.contraries
        for a, b in ((x, y), (y, x))
    )
