"""The rule over persons that are spoken of."""

from __future__ import annotations

from semkv_guards.language import Language
from semkv_guards.pairs import Exchange, Pair
from semkv_guards.rules.rule import rule
from semkv_guards.text import Text


@rule(
    reasons=("person",),
    tables=("persons",),
    vetoes=(
        ("What about her?", "What about him?"),
        ("What is my name?", "What is your name?"),
        ("How do I use my data?", "How do you use my data?"),
        ("Why does my cat scratch me?", "Why does my cat scratch herself?"),
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
    if _other_hearer(pair) or any(_tells_third(one, pair.language) for one in pair.exchanges):
        return "person"
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


def _other_hearer(pair: Pair) -> bool:
    """Whether "I" stands in the place of "you", and what is the speaker's is his in both texts: "use my data"."""
    language = pair.language
    persons = language.persons
    said = pair.a.words & pair.b.words & persons.keys()
    for exchange in pair.exchanges:
        words = [[t.word for t in own] for own in (exchange.first, exchange.second)]
        are_alone = all(len(own) == 1 and own[0] in persons for own in words)
        if not are_alone:
            continue
        exchanged = {persons[own[0]] for own in words}
        are_said = {persons[word] for word in said}
        if len(exchanged) > 1 and exchanged.isdisjoint(language.third) and exchanged & are_said:
            return True
    return False


def _tells_third(exchange: Exchange, language: Language) -> bool:
    """Whether somebody stands in the place of the speaker or hearer, as in "scratch me", "scratch herself"."""
    persons = language.persons
    words = [[t.word for t in own] for own in (exchange.first, exchange.second)]
    if not all(len(own) == 1 and own[0] in persons for own in words):
        return False
    first, second = (persons[own[0]] for own in words)
    return first != second and not language.third.isdisjoint((first, second))
