"""The rule over persons that are spoken of."""

from __future__ import annotations

from semkv_guards.pairs import Pair
from semkv_guards.rules.rule import rule
from semkv_guards.text import Text


@rule(
    reasons=("person",),
    tables=("persons",),
    vetoes=(
        ("What about her?", "What about him?"),
        ("What is my name?", "What is your name?"),
    ),
    allows=(("How do I reset my password?", "How do you reset a password?"),),
)
def person(pair: Pair) -> str | None:
    """Another person is spoken of: "he" and "she", "I" and "they"; or "I" and "you" in each other's place.

    "my" and "your" count where nothing else says who speaks.
    """
    said = _persons(pair.a)
    other_said = _persons(pair.b)
    first = set(said)
    second = set(other_said)
    if said == other_said or not first or not second:
        return None
    third = pair.language.third
    if first == second or max(len(first & third), len(second & third)) > 1:
        return "person" if sorted(said) == sorted(other_said) else None
    if first & third != second & third:
        both_have_third = bool(first & third and second & third)
        if both_have_third or first.isdisjoint(second):
            return "person"
    return "person" if _other_owners(pair) else None


def _persons(text: Text) -> list[str]:
    persons = text.language.persons
    return [persons[t.word] for t in text.tokens if t.word in persons]


def _other_owners(pair: Pair) -> bool:
    """Whether something belongs to another person, and nothing else says who speaks."""
    persons = pair.language.persons
    owners = pair.language.owners
    mine = {persons[word] for word in pair.a.words & owners}
    theirs = {persons[word] for word in pair.b.words & owners}
    if not mine or not theirs or mine & theirs:
        return False
    return (persons.keys() - owners).isdisjoint(pair.words)
