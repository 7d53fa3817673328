"""The guards. Each is a pure function of two texts taken apart, symmetric, and says why it objects or None."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

from semkv.tiers.guards.content import MOST, Pair, Side, akin, content
from semkv.tiers.guards.lexicon import Lexicon
from semkv.tiers.guards.marks import (
    CHOICE,
    DATE,
    DENIAL,
    GROUP,
    KNOWN,
    NATIVE,
    NEGATION,
    PARTICLE,
    PIVOT,
    QUESTION,
    SHIFT,
    TELLING,
    WAY,
)
from semkv.tiers.guards.operators import other_operators
from semkv.tiers.guards.opposites import opposites
from semkv.tiers.guards.order import reversed_order
from semkv.tiers.guards.quantities import Quantity, differ
from semkv.tiers.guards.questions import modality, person, question, tense, yes_or_no
from semkv.tiers.guards.roles import exchanged
from semkv.tiers.guards.substitution import neighbours, substitution
from semkv.tiers.guards.text import STOPS, Token

Check = Callable[[Pair], str | None]

_TELLING = 14  # words of a text among which one tells its language
_KNOWN = 0.6  # share of the words that are known where none tells it
_WILD = frozenset("%*_^~|\\")  # signs of patterns
_END = Token("?", "?", False)


def code(p: Pair) -> str | None:
    """An identifier, flag, path or version that the other text does not have; or other operators."""
    for mine, other in ((p.a, p.b), (p.b, p.a)):
        for token in mine.text.code:
            if token not in other.text.spelled and token not in other.words:
                return "code"
    return "code" if other_operators(p.a.text.operators, p.b.text.operators) else None


def case(p: Pair) -> str | None:
    """Other letters, beyond the case of typing: a word in capitals and the same one small; a name and the word that it
    is when small; any capital where letters are asked about.
    """
    first, second = p.a.text.cased, p.b.text.cased
    if first == second or first is None or second is None:
        return None
    asked = not (p.lexicon.spelling.isdisjoint(p.a.words) or p.lexicon.spelling.isdisjoint(p.b.words))
    small = [_small_acronyms(mine, other, p.lexicon) for mine, other in ((p.a, p.b), (p.b, p.a))]
    for written in first ^ second:
        mine, other = (p.a, p.b) if written in first else (p.b, p.a)
        word = written.casefold()
        pronoun = len(word) == 1 and word in p.lexicon.persons
        typed = small[mine is p.b] and not asked and written.isupper() and not _is_word(word, other, p.lexicon)
        if not typed and word in mine.words and word in other.words and word not in other.text.starts and not pronoun:
            theirs = {w for w in other.text.cased or () if w.casefold() == word}
            if not theirs and any(t.word == word and not t.name for t in other.text.tokens):
                theirs = {word}
            if any(asked or _apart(written, their, other, p.lexicon) for their in theirs):
                return "case"
    return None


def _small_acronyms(mine: Side, other: Side, lexicon: Lexicon) -> bool:
    """Whether a text writes small what can only be an acronym: it may do so with others, "tcp and udp"."""
    sure = (w.casefold() for w in mine.text.cased or () if len(w) > 1 and w.isupper() and w.isalpha())
    written = {w.casefold() for w in other.text.cased or ()}
    return any(
        lexicon.vowels and set(w).isdisjoint(lexicon.vowels) and w in other.words and w not in written for w in sure
    )


def _is_word(small: str, side: Side, lexicon: Lexicon) -> bool:
    """Whether what is an acronym in capitals is another word when small: "AIDS", "aids"."""
    return small in lexicon.acronyms or any(t.word == small and t.marks & KNOWN for t in side.text.tokens)


def _apart(written: str, their: str, other: Side, lexicon: Lexicon) -> bool:
    """Whether a word with capitals is another one than the same word as the other text writes it."""
    if not their.islower():
        return their.casefold() in lexicon.twofold
    if their in other.quantities.words:
        return False
    if written.isupper() and len(written) > 1:
        return not lexicon.vowels or not set(their).isdisjoint(lexicon.vowels)
    return their in lexicon.twofold and bool(other.text.cased or other.text.starts)


def language(p: Pair) -> str | None:
    """Other words, or in another order, where a text is not in the language whose words the guards know.

    A text is where a frequent word tells so, or where most words are known and all in which it differs.
    """
    if not p.lexicon.telling:
        return None
    told = [_told(s, only) for s, only in ((p.a, p.only_a), (p.b, p.only_b))]
    if all(told) or (any(told) and all(t.word in p.lexicon.function_words | STOPS for t in (*p.only_a, *p.only_b))):
        return None
    first, second = ([t.word for t in s.text.tokens if t.word not in STOPS] for s in (p.a, p.b))
    return "language" if first != second else None


def _told(side: Side, only: tuple[Token, ...]) -> bool:
    tokens = side.text.tokens
    if side.marks & TELLING and len(tokens) <= _TELLING:
        return True
    found = [t for t in tokens if t.word[0].isalpha()]
    if len([t for t in found if t.marks & TELLING]) >= len(found) / _TELLING:
        return True
    known = [bool(t.marks & KNOWN) for t in found if not t.name]
    return any(known) and sum(known) >= _KNOWN * len(known) and all(map(_is_known, only))


def _is_known(token: Token) -> bool:
    return token.name or not token.word[0].isalpha() or bool(token.marks & KNOWN)


def quote(p: Pair) -> str | None:
    """Quoted words that the other text does not have, where it has other words instead."""
    if p.a.text.quotes == p.b.text.quotes:
        return None
    wild = [{quoted for quoted in s.text.quotes if not _WILD.isdisjoint(quoted)} for s in (p.a, p.b)]
    if all(wild) and wild[0] != wild[1]:
        return "quote"
    first, second = _unquoted(p.a, p.b), _unquoted(p.b, p.a)
    if first and (second or content(p.only_b, p.b, p.lexicon)):
        return "quote"
    return "quote" if second and content(p.only_a, p.a, p.lexicon) else None


def _unquoted(mine: Side, other: Side) -> bool:
    missing = mine.text.quotes - other.text.quotes
    if len(missing) > MOST:
        return True
    text = f" {' '.join(t.word for t in other.text.tokens if t.word not in STOPS)} "
    for quoted in missing:
        plain = " ".join(w for w in quoted.split() if w[0].isalnum())
        if f" {plain} " not in text and quoted.replace(" ", "") not in other.text.spelled:
            return True
    return False


def quantity(p: Pair) -> str | None:
    """Another number or unit, or the same number of something else."""
    reason = differ(p.a.quantities, p.b.quantities, p.lexicon, converse=bool(p.converse))
    if reason or not p.only_a or not p.only_b:
        return reason
    mine, other = (_counted(s, only, p.lexicon) for s, only in ((p.a, p.only_a), (p.b, p.only_b)))
    if len(mine) > MOST or len(other) > MOST:
        return None
    quiet = p.lexicon.tables.quiet
    apart = (
        q.raw == r.raw
        and not (q.dimension and r.dimension)
        and not (x.stem in quiet and y.stem in quiet)
        and not akin(x, y, p.lexicon)
        for q, x in mine
        for r, y in other
    )
    return "unit" if any(apart) else None


def _counted(side: Side, only: tuple[Token, ...], lexicon: Lexicon) -> list[tuple[Quantity, Token]]:
    """Quantities with what they count, where that is in this text alone."""
    stems = {t.stem for t in only if t.word not in lexicon.function_words and t.word[0].isalpha()}
    return [(quantity, token) for quantity, token in side.quantities.after if token.stem in stems]


def date(p: Pair) -> str | None:
    """Another day, month, season or time of day."""
    if p.a.text.dates != p.b.text.dates:
        return "date"
    if not (p.a.marks | p.b.marks) & (DATE | SHIFT):
        return None
    alone = (*p.only_a, *p.only_b)
    if len(alone) == 1 and alone[0].marks & SHIFT:
        return "date"
    table = p.lexicon.tables.dates
    first, second = _dated(p.only_a, table), _dated(p.only_b, table)
    return "date" if any(second.get(name, senses) != senses for name, senses in first.items()) else None


def _dated(tokens: Iterable[Token], table: Mapping[str, tuple[str, str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for token in tokens:
        if token.marks & DATE:
            name, sense = table[token.word]
            found.setdefault(name, set()).add(sense)
    return found


def negation(p: Pair) -> str | None:
    """Another number of denials, or one text denies with a verb what the other says."""
    if p.denied or not (p.a.marks | p.b.marks) & (NEGATION | DENIAL):
        return None
    low_a, high_a = _denials(p.a, p.only_a, p.b, p.lexicon)
    low_b, high_b = _denials(p.b, p.only_b, p.a, p.lexicon)
    if low_a > high_b or low_b > high_a:
        return "negation"
    first, second = (any(t.marks & DENIAL for t in only) for only in (p.only_a, p.only_b))
    if low_a == low_b and first != second:
        other = content(p.only_b, p.b, p.lexicon) if first else content(p.only_a, p.a, p.lexicon)
        return None if other else "negation"
    return None


def _denials(side: Side, only: tuple[Token, ...], other: Side, lexicon: Lexicon) -> tuple[int, int]:
    """How often a text denies, at least and at most; a "non-toxic" that is "nontoxic" in the other does not."""
    if not side.marks & (NEGATION | DENIAL):
        return 0, 0
    tokens = (*side.text.tokens, _END)
    sure = sum(
        x.word in lexicon.negations and x.word + y.word not in other.words for x, y in itertools.pairwise(tokens)
    )
    return sure, sure + sum(t.stem in lexicon.tables.denials for t in only)


def groups(p: Pair) -> str | None:
    """Words whose presence must agree, sides and colors: one more or less tells one object from another."""
    if not (p.a.marks | p.b.marks) & GROUP:
        return None
    grouped = [[t.word for t in s.text.tokens if t.marks & GROUP] for s in (p.a, p.b)]
    for name, group in p.lexicon.groups.items():
        first, second = (sorted([group[word] for word in words if word in group]) for words in grouped)
        if first != second:
            return name
    return None


def choice(p: Pair) -> str | None:
    """A choice against a yes or no: "is it large or small?" and "is it large?"."""
    differ = (p.a.marks ^ p.b.marks) & CHOICE
    return "choice" if differ and yes_or_no(p.a, p.lexicon) and yes_or_no(p.b, p.lexicon) else None


def sides(p: Pair) -> str | None:
    """Shared words in another order around a side or a "than": "left of the cone", where the cone moved, is
    another place."""
    if p.converse or not p.a.marks & p.b.marks & PIVOT:
        return None
    group = p.lexicon.tables.pivots
    shared = {stem for stem, times in p.a.stems.items() if times == 1 and p.b.stems.get(stem) == 1}
    first, second = (_around(side.text.tokens, shared, group, p.lexicon) for side in (p.a, p.b))
    return "word order" if first != second else None


def _around(tokens: Iterable[Token], shared: set[str], group: frozenset[str], lexicon: Lexicon) -> list[str]:
    """The shared content words in order; sides that follow one another, as in a choice of two, are one."""
    found: list[str] = []
    for token in tokens:
        stem = "" if token.word in group else token.stem
        if stem and (stem not in shared or stem in lexicon.tables.quiet):
            continue
        if stem or not found or found[-1]:
            found.append(stem)
    return found


def nation(p: Pair) -> str | None:
    """A country for what is of it, but before a noun; or another word for a country: "cook turkey", "cook Turkish"."""
    if not (p.a.marks | p.b.marks) & NATIVE:
        return None
    return "entity" if _another_nation(p.a, p.b, p.lexicon) or _another_nation(p.b, p.a, p.lexicon) else None


def _another_nation(mine: Side, other: Side, lexicon: Lexicon) -> bool:
    for x, after in itertools.pairwise((*mine.text.tokens, _END)):
        if x.marks & NATIVE and x.word not in lexicon.peoples and x.word not in other.words:
            countries = [t for t in other.text.tokens if t.stem == x.stem and not t.marks & NATIVE]
            noun = after.word[0].isalpha() and (
                after.word in lexicon.fillers or after.word not in lexicon.function_words
            )
            if countries and not (noun and all(t.name or t.word not in lexicon.twofold for t in countries)):
                return True
    return False


def role(p: Pair) -> str | None:
    """The speaker, or an owner, in the place of another."""
    return "person" if exchanged(p) else None


def order(p: Pair) -> str | None:
    """Subject and object exchanged."""
    if p.converse:
        return None
    return "word order" if reversed_order(p.a, p.b, p.lexicon) else None


def particle(p: Pair) -> str | None:
    """Another verb by the word after it: "adopt" and "adopt out", "turn in" and "turn over"."""
    if not p.a.marks & p.b.marks & PARTICLE:
        return None
    apart = ((p.a, p.only_a, p.b), (p.b, p.only_b, p.a))
    return "relation" if any(_another_verb(*sides, p.lexicon) for sides in apart) else None


def _another_verb(mine: Side, only: tuple[Token, ...], other: Side, lexicon: Lexicon) -> bool:
    """Whether a verb that both texts have goes with a particle that the other text does not have."""
    verbs, missing = lexicon.tables.particles, {t.word for t in only}
    tokens, theirs = (*mine.text.tokens, _END), (*other.text.tokens, _END)
    return any(
        y.word in missing
        and y.word in verbs.get(x.stem, ())
        and z.word not in lexicon.spots
        and any(s.stem == x.stem and not _placed(y, t, lexicon) for s, t in itertools.pairwise(theirs))
        for x, y, z in zip(tokens, tokens[1:], tokens[2:], strict=False)
    )


def _placed(particle: Token, after: Token, lexicon: Lexicon) -> bool:
    """Whether another word for the same place follows a verb: "sleep in a cave", "sleep inside a cave"."""
    return after.word != particle.word and akin(particle, after, lexicon)


def relation(p: Pair) -> str | None:
    """Another relation where all else is the same and no question word asks for more: "in the box", "on the box"; or
    the other way to or from the same: "leave for Rome", "leave from Rome"."""
    first = _ways(p.a, p.only_a, p.lexicon)
    second = _ways(p.b, p.only_b, p.lexicon) if first else {}
    if any(way != second.get(where, way) for where, way in first.items()):
        return "relation"
    if len(p.only_a) != 1 or len(p.only_b) != 1 or (p.a.marks | p.b.marks) & QUESTION:
        return None
    x, y, tables, choices = p.only_a[0], p.only_b[0], p.lexicon.tables, p.lexicon.choices
    tied = x.stem in tables.relations and y.stem in tables.relations
    joined = x.stem in tables.symmetric and y.stem in tables.symmetric and (x.word in choices) != (y.word in choices)
    return "relation" if (tied or joined) and not akin(x, y, p.lexicon) and neighbours(x, y, p) else None


def _ways(side: Side, only: tuple[Token, ...], lexicon: Lexicon) -> dict[str, str]:
    """Which way it goes from what, by the words for it that one text alone has; "" is the end of a clause."""
    own = {t.word for t in only if t.marks & WAY}
    if not own:
        return {}
    return {
        "" if y.word in STOPS else y.stem: lexicon.ways[x.word]
        for x, y in itertools.pairwise((*side.spine, _END))
        if x.word in own
    }


CHECKS: tuple[Check, ...] = (
    code, quote, case, quantity, date, negation, groups, choice, sides, opposites, question, modality, tense, person,
    role, order, particle, relation, nation, substitution, language,
)  # fmt: skip
