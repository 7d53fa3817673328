"""Rules over days, months, seasons and times of day."""

from __future__ import annotations

from semkv_guards.pairs import MOST, Pair, Tokens
from semkv_guards.rules.rule import rule
from semkv_guards.text import Text


@rule(
    reasons=("date",),
    vetoes=(
        ("Due 3/4/2021", "Due 4/3/2021"),
        ("What happened on 9/11/2001?", "What happened on 9/12/2001?"),
    ),
    allows=(("What happened on 9/11/2001?", "What did happen on 9/11/2001?"),),
)
def date_in_figures(pair: Pair) -> str | None:
    """Another date is written in figures."""
    return "date" if pair.a.dates != pair.b.dates else None


@rule(
    reasons=("date",),
    tables=("shifts",),
    vetoes=(
        (
            "Who was king in the year the war ended?",
            "Who was king in the year after the war ended?",
        ),
        ("Is the shop open Monday?", "Is the shop open until Monday?"),
    ),
    allows=(("Is the shop open Monday?", "Is the shop open on Monday?"),),
)
def shifted_time(pair: Pair) -> str | None:
    """A lone word makes another time of one: "the year after the war"."""
    alone = [t.word for only in pair.only for t in only]
    return "date" if len(alone) == 1 and alone[0] in pair.language.shifts else None


@rule(
    reasons=("date",),
    tables=("dates",),
    vetoes=(
        ("And on Friday?", "And on Saturday?"),
        ("Winter sale", "Summer sale"),
    ),
    allows=(("Is it open in the fall?", "Is it open in autumn?"),),
)
def date(pair: Pair) -> str | None:
    """Another day, month, season or time of day."""
    first = _senses(pair, pair.only[0])
    second = _senses(pair, pair.only[1]) if first else set()
    both = {name for name, _ in first} & {name for name, _ in second}
    return "date" if any(name in both for name, _ in first ^ second) else None


def _senses(pair: Pair, only: Tokens) -> set[tuple[str, str]]:
    """The words of the calendar that one text alone has."""
    senses = pair.language.senses
    return {senses[t.word] for t in only if t.word in senses}


@rule(
    reasons=("quantity",),
    tables=("narrowing", "narrowing_times", "per"),
    vetoes=(
        ("How much rain falls in Rome?", "How much rain falls in Rome per day?"),
        ("What is the price of gold?", "What is the maximum price of gold?"),
    ),
    allows=(("Is it open now?", "Is it open right now?"),),
)
def narrower(pair: Pair) -> str | None:
    """One text asks about less: it names a bound, a rate or a time, and the other has nothing in its place."""
    for text, only, other, others in pair.views:
        if only and _may_narrow(text, only) and _narrows(text, only, other, others):
            return "quantity"
    return None


def _may_narrow(text: Text, only: Tokens) -> bool:
    language = text.language
    return language.per in text.words or any(t.word in language.narrow for t in only)


def _narrows(text: Text, only: Tokens, other: Text, others: Tokens) -> bool:
    """Whether a word that one text alone has makes its question narrower, and the other has no content instead."""
    if any(t.word not in text.language.stop_words for t in others):
        return False
    before = ["", *[t.word for t in text.tokens]]
    following = zip(before, text.tokens, strict=False)
    alone = [(word, t.word) for word, t in following if t in only]
    return any(_is_narrower(word, after, other) for word, after in alone[:MOST])


def _is_narrower(before: str, word: str, other: Text) -> bool:
    """Whether a word and the one before it make a question narrower than the other text is."""
    language = other.language
    if before == language.per or word in language.narrowing:
        return True
    kind, _ = language.senses.get(word, ("", ""))
    which, _ = language.senses.get(before, ("", ""))
    if which == "which" and (kind or word in language.all_units):  # "next week"
        return language.senses[before] != language.senses.get("this")
    if word in language.twofold or word in language.verbs:  # "may", "fall"
        return False
    has_clock = any(quantity.dimension == "clock" for quantity in other.quantities.found)
    return kind in language.narrowing_times and not has_clock
