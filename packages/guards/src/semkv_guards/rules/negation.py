"""Rules over what is denied, and what is offered as a choice."""

from __future__ import annotations

import itertools

from semkv_guards.pairs import Pair
from semkv_guards.rules.rule import rule
from semkv_guards.text import END, Text


@rule(
    reasons=("negation",),
    tables=("negations", "denials", "free"),
    vetoes=(
        ("Is there a car?", "Is there no car?"),
        ("Login works", "Login fails"),
        ("Which breads contain gluten?", "Which breads are gluten free?"),
    ),
    allows=(
        ("Is it nontoxic?", "Is it non-toxic?"),
        ("Is there bread without gluten?", "Is there bread free of gluten?"),
        ("Is parking free?", "Is parking free of charge?"),
    ),
)
def negation(pair: Pair) -> str | None:
    """One text denies what the other says, or denies it with a verb: "fail"."""
    first = _denials(pair.a, pair.b)
    second = _denials(pair.b, pair.a)
    verbs, other_verbs = (
        sum(t.stem in pair.language.denial_stems for t in only) for only in pair.only
    )
    if first > second + other_verbs or second > first + verbs:
        return "negation"
    if first != second or bool(verbs) == bool(other_verbs):
        return None
    content, other_content = pair.content
    instead = other_content if verbs else content
    return None if instead else "negation"


def _denials(text: Text, other: Text) -> int:
    """How often a text denies; a "non-toxic" that is "nontoxic" in the other does not."""
    negations = text.language.negations
    found = _freedoms(text, other) if text.language.free in text.words else 0
    if negations.isdisjoint(text.words):
        return found
    pairs = itertools.pairwise((*text.tokens, END))
    return found + sum(x.word in negations and x.word + y.word not in other.words for x, y in pairs)


def _freedoms(text: Text, other: Text) -> int:
    """How often a text says that a thing is without something that the other names: "gluten free bread"."""
    language = text.language
    found = 0
    tokens = (END, END, END, *text.tokens, END)
    for i, token in enumerate(tokens):
        lacked = tokens[i - 1]
        if (
            token.word != language.free
            or lacked.stem not in other.stems.keys() - language.stop_stems
        ):
            continue
        is_said = language.is_auxiliary(tokens[i - 2]) and language.may_be_content(tokens[i - 3])
        found += is_said or language.may_be_content(tokens[i + 1])
    return found


@rule(
    reasons=("choice",),
    tables=("choices",),
    vetoes=(
        ("Is it large or small?", "Is it large?"),
        ("Is it cheaper to rent or to buy a home?", "Is it cheaper to rent a home?"),
    ),
    allows=(("Is it cheaper to rent or to buy?", "Is renting or buying cheaper?"),),
)
def choice(pair: Pair) -> str | None:
    """One text offers a choice, and the other asks for yes or no: "is it large or small?", "is it large?"."""
    choices = pair.language.choices
    if choices.isdisjoint(pair.a.words) == choices.isdisjoint(pair.b.words):
        return None
    return "choice" if pair.a.starts_with_auxiliary and pair.b.starts_with_auxiliary else None
