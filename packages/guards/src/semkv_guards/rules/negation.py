"""Rules over what is denied, and what is offered as a choice."""

from __future__ import annotations

import itertools

from semkv_guards.pairs import Pair
from semkv_guards.rules.rule import rule
from semkv_guards.text import END, Text


@rule(
    reasons=("negation",),
    tables=("negations", "denials"),
    vetoes=(
        ("Is there a car?", "Is there no car?"),
        ("Login works", "Login fails"),
    ),
    allows=(("Is it nontoxic?", "Is it non-toxic?"),),
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
    if negations.isdisjoint(text.words):
        return 0
    pairs = itertools.pairwise((*text.tokens, END))
    return sum(x.word in negations and x.word + y.word not in other.words for x, y in pairs)


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
