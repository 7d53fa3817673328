"""Rules over when something is, and whether it may, should or must be."""

from __future__ import annotations

from semkv_guards.language import Language
from semkv_guards.pairs import Pair, triples
from semkv_guards.rules.questions import what_is_asked
from semkv_guards.rules.rule import rule
from semkv_guards.text import END, Text

_PAST = frozenset(("past", "perfect"))


@rule(
    reasons=("modality",),
    tables=("modals", "moods"),
    vetoes=(
        ("You must not pay", "You do not have to pay"),
        ("Must not enter the room", "Need not enter the room"),
    ),
    allows=(("You do not have to pay", "You don't have to pay"),),
)
def forbidden_or_excused(pair: Pair) -> str | None:
    """One text forbids ("must not"), and the other excuses ("need not")."""
    first = _denied_duty(pair.a)
    second = _denied_duty(pair.b)
    return "modality" if first and second and first != second else None


@rule(
    reasons=("modality",),
    tables=("modals", "moods"),
    vetoes=(
        ("What may the tenant do?", "What must the tenant do?"),
        ("What can employees wear at work?", "What must employees wear at work?"),
        ("Do I have to pay tax?", "Am I allowed to pay tax?"),
    ),
    allows=(("What should I do in Rome?", "What can I do in Rome?"),),
)
def modality(pair: Pair) -> str | None:
    """One text says what may be, and the other what should or must be.

    Between neighbors it counts only where no question word asks for more than yes or no.
    """
    first = mood(pair.a)
    second = mood(pair.b)
    if not first or not second or first == second:
        return None
    language = pair.language
    modals = [language.modals.keys() & text.words for text in (pair.a, pair.b)]
    if not all(modals):
        closed = pair.a.asks_yes_or_no and pair.b.asks_yes_or_no
        return "modality" if closed and language.mild.isdisjoint((first, second)) else None
    asks_for_advice = not language.questions.keys().isdisjoint(pair.words)
    if not asks_for_advice or not modals[0] | modals[1] <= language.advice:
        return "modality"
    strength = list(dict.fromkeys(language.modals.values()))
    if not {first, second}.issubset(strength):  # a wish, after a polite "can you"
        return "modality"
    are_neighbors = abs(strength.index(first) - strength.index(second)) == 1
    asked = what_is_asked(pair.a) | what_is_asked(pair.b)
    return "modality" if not are_neighbors or "person" in asked else None


@rule(
    reasons=("tense",),
    tables=("tenses",),
    vetoes=(
        ("When will the new shop open?", "When was the shop opened?"),
        ("Will the new shop be in Rome?", "Was the shop in Rome?"),
    ),
    allows=(("When will the shop open?", "When does the shop open?"),),
)
def future_or_past(pair: Pair) -> str | None:
    """One text speaks of what will be, and the other of what was."""
    first = _tenses(pair.a)
    second = _tenses(pair.b)
    return "tense" if _is_ahead(first, second) or _is_ahead(second, first) else None


@rule(
    reasons=("tense",),
    tables=("tenses",),
    vetoes=(
        ("Are dodos extinct birds?", "Were dodos flightless birds?"),
        ("Is the new shop open?", "Was the shop open?"),
    ),
    allows=(("Is the shop open?", "Is the shop open now?"),),
)
def past_or_present_yes_or_no(pair: Pair) -> str | None:
    """One text asks whether something was, and the other whether it is."""
    tenses = pair.language.tenses
    times = {
        tenses.get(text.tokens[0].word, "") for text in (pair.a, pair.b) if text.asks_yes_or_no
    }
    return "tense" if times == {"past", "present"} else None


def mood(text: Text) -> str:
    """What the first auxiliary of what may or must be says, but for a polite "can you"; else the first other word that
    says it: "is it allowed"."""
    language = text.language
    tokens = text.tokens
    places = (i for i, t in enumerate(tokens) if t.word in language.modals and not t.name)
    place = next(places, None)
    if place is not None:
        is_polite = place == 0 and all(t.word in language.hearer for t in tokens[1:2])
        if not is_polite:
            return language.modals[tokens[place].word]
    return next((language.moods[t.word] for t in tokens if t.word in language.moods), "")


def weakest_mood(language: Language) -> str | None:
    """What the auxiliaries of what may be say."""
    return next(iter(language.modals.values()), None)


def _denied_duty(text: Text) -> str:
    """Whether a text forbids ("must not") or excuses ("need not", "not have to")."""
    language = text.language
    if language.strongest.isdisjoint(text.words):
        return ""
    for before, token, after in triples((END, *text.tokens, END)):
        if token.word not in language.strongest:
            continue
        if before.word in language.negations:
            return "excuses"
        if after.word in language.negations:
            return "forbids" if token.word in language.modals else "excuses"
    return ""


def _tenses(text: Text) -> set[str]:
    tenses = text.language.tenses
    return {tenses[t.word] for t in text.tokens if t.word in tenses}


def _is_ahead(mine: set[str], other: set[str]) -> bool:
    """Whether a text speaks of what will be alone, and the other of what was."""
    return "future" in mine - other and bool(other & _PAST) and not mine & _PAST
