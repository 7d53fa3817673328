"""Rules over words and their opposites, and over words whose presence must agree."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from semkv_guards.language import Pairs
from semkv_guards.pairs import MOST, Pair, Tokens
from semkv_guards.rules.rule import rule
from semkv_guards.text import Text

_BARE = 4  # letters that a word keeps without its prefix
_SAME_END = 3  # letters at the end of two words that may differ in a prefix


@rule(
    reasons=("direction", "color", "quantity", "date", "entity"),
    tables=("groups",),
    vetoes=(
        ("What about the left one?", "What about the one?"),
        ("Is the car red?", "Is the car blue?"),
        ("What else is new?", "What is new?"),
        ("Can I have one more beer?", "Can I have one beer?"),
    ),
    allows=(("Is the gray cat asleep?", "Is the grey cat asleep?"),),
)
def presence(pair: Pair) -> str | None:
    """A side, a color or another word that tells one thing from the next is in one text only.

    The language names the reason of each group.
    """
    for name, senses in pair.language.groups.items():
        first = sorted([senses[t.word] for t in pair.a.tokens if t.word in senses])
        second = sorted([senses[t.word] for t in pair.b.tokens if t.word in senses])
        if first != second:
            return name
    return None


@rule(
    reasons=("antonym", "comparison", "direction", "modality"),
    tables=("opposites",),
    vetoes=(
        ("How do I lock my card?", "How do I unlock my card?"),
        ("Does it go north?", "Does it go south?"),
    ),
    allows=(("What are the pros and cons?", "What are the cons and pros?"),),
)
def opposite_words(pair: Pair) -> str | None:
    """A word stands against its opposite.

    Where one text has both ("pros and cons") they prove nothing.
    """
    opposed = pair.language.opposed
    if pair.converse:
        return None
    mine = {t.stem for t in pair.only[0]}
    if opposed.keys().isdisjoint(mine):
        return None
    other = {t.stem for t in pair.only[1]}
    measuring = _measuring_stems(pair)
    reasons = {
        opposed[word][opposite]
        for word in (mine & opposed.keys()) - measuring
        for opposite in (opposed[word].keys() & other) - measuring
        if mine.isdisjoint(opposed[word]) and other.isdisjoint(opposed[opposite])
    }
    return min(reasons) if reasons else None


def _measuring_stems(pair: Pair) -> frozenset[str]:
    """The words of quantities, where all have a unit: "one year", "12 months"."""
    first = pair.a.quantities
    second = pair.b.quantities
    if not all(quantity.dimension for quantity in (*first.found, *second.found)):
        return frozenset()
    return pair.language.stems((first.words | second.words) - pair.language.ordinals)


@rule(
    reasons=("comparison",),
    tables=("lessening",),
    vetoes=(
        ("Is iron denser than tin?", "Is iron less dense than tin?"),
        ("Does it cost more than rent?", "Does it cost as much as rent?"),
    ),
    allows=(("Is iron denser than tin?", "Is iron more dense than tin?"),),
)
def lessened_comparison(pair: Pair) -> str | None:
    """A comparison is turned round, or made even.

    "less dense" or "as dense as" stands against "denser", "as rare as" against "more rare than", or "as much as"
    against "more than".
    """
    if pair.converse:
        return None
    for text, only, _, others in pair.views:
        lessening = [t.word for t in only if t.word in text.language.lessening]
        if lessening and (_made_even(text, lessening, others) or _has_comparative(text, others)):
            return "comparison"
    return None


def _made_even(text: Text, lessening: list[str], others: Tokens) -> bool:
    """Whether a text says "as ... as" of what the other compares."""
    language = text.language
    return (
        len(set(lessening)) < len(lessening)
        and any(t.word in language.pivots or t.word in language.bounds for t in others)
        and all(quantity.loose for quantity in text.quantities.found)
        and language.negations.isdisjoint(text.words)
    )


def _has_comparative(text: Text, others: Tokens) -> bool:
    """Whether the other text has the comparative of a word of this one."""
    language = text.language
    endings = itertools.chain.from_iterable(language.degrees)
    bases = [
        t.word.removesuffix(ending) for ending in endings for t in others if t.word.endswith(ending)
    ]
    return any(base in text.stems or language.stem(base) in text.stems for base in bases)


@rule(
    reasons=("comparison",),
    tables=("degrees",),
    vetoes=(
        ("Which city is larger?", "Which city is largest?"),
        ("Which planet is hotter?", "Which planet is hottest?"),
    ),
    allows=(("Which is the biggest city?", "Which is the largest city?"),),
)
def other_degree(pair: Pair) -> str | None:
    """A comparative stands against the superlative of the same word."""
    return "comparison" if _differ_in_ending(pair, pair.language.degrees) else None


@rule(
    reasons=("antonym",),
    tables=("endings",),
    vetoes=(
        ("Who is the interviewer?", "Who is the interviewee?"),
        ("Is this a meat lasagna?", "Is this a meatless lasagna?"),
    ),
    allows=(("How do I interview people?", "How do I interview a person?"),),
)
def other_ending(pair: Pair) -> str | None:
    """An ending turns a word: "payer", "payee"."""
    return "antonym" if _differ_in_ending(pair, pair.language.endings) else None


@rule(
    reasons=("antonym",),
    tables=("contraries",),
    vetoes=(
        ("Which metals are magnetic?", "Which metals are nonmagnetic?"),
        ("Is the button clickable?", "Is the button unclickable?"),
    ),
    allows=(("What is a microprocessor?", "What are microprocessors?"),),
)
def contrary_prefix(pair: Pair) -> str | None:
    """A prefix turns a word: "encode", "decode"."""
    if not _has_few_words(pair):
        return None
    contraries = pair.language.contraries
    for x, y in itertools.product(*_words(pair)):
        if x[-_SAME_END:] != y[-_SAME_END:]:
            continue
        shared = _without_prefixes(x, contraries) & _without_prefixes(y, contraries)
        if any(len(rest) >= _BARE for rest in shared):
            return "antonym"
    return None


def _without_prefixes(word: str, prefixes: Iterable[str]) -> set[str]:
    found = {word.removeprefix(prefix) for prefix in prefixes if word.startswith(prefix)}
    return found | {word}


def _differ_in_ending(pair: Pair, endings: Pairs) -> bool:
    """Whether a word of one text is one of the other with another ending."""
    if not _has_few_words(pair):
        return False
    first, second = _words(pair)
    return not (
        _with_other_ending(first, endings).isdisjoint(second)
        and _with_other_ending(second, endings).isdisjoint(first)
    )


def _with_other_ending(words: Iterable[str], endings: Pairs) -> set[str]:
    """The words with another ending: "hottest" of "hotter", "payee" of "payer"."""
    return {
        word.removesuffix(one) + other
        for one, other in endings
        for word in words
        if word.endswith(one)
    }


def _has_few_words(pair: Pair) -> bool:
    """Whether words that one text alone has may be compared one by one."""
    first, second = pair.only
    return bool(first and second) and not pair.converse and min(len(first), len(second)) <= MOST


def _words(pair: Pair) -> tuple[set[str], set[str]]:
    first, second = pair.only
    return {t.word for t in first}, {t.word for t in second}
