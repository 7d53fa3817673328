"""Rules over emojis, lone signs and quotations."""

from __future__ import annotations

from semkv_guards.pairs import MOST, Pair
from semkv_guards.rules.rule import rule
from semkv_guards.text import STOPS, Text

_WILD = frozenset("%*_^~|\\")  # signs of patterns


@rule(
    reasons=("symbol",),
    vetoes=(
        ("What does 😂 mean?", "What does 😭 mean?"),
        ("What flag is 🇧🇬?", "What flag is 🇬🇧?"),
    ),
    allows=(("How hot is 30 °C?", "How hot is 30 degrees C?"),),
)
def symbol(pair: Pair) -> str | None:
    """The texts have other emojis or signs: encoders read all of them as one unknown word."""
    first = pair.a.symbols
    second = pair.b.symbols
    return "symbol" if first and second and first != second else None


@rule(
    reasons=("symbol",),
    vetoes=(
        ("Is it ironic: thanks a lot", "Is it ironic: thanks a lot :)"),
        ("Is it ironic: thanks a lot :D", "Is it ironic: thanks a lot :("),
        ("What does ' do in C?", 'What does " do in C?'),
        ("How do I reset my password?", "How do I reset my password? <s>"),
    ),
    allows=(
        ("Is it cheap - or not ?", "Is it cheap, or not?"),
        ("What is 4 * 5?", "What is 4*5?"),
    ),
)
def lone_sign(pair: Pair) -> str | None:
    """A sign stands alone that the other text does not have, a face or a tag: a model reads a face as a mood, and a tag
    as a part of its template."""
    first = any(sign not in pair.b.written for sign in pair.a.lone_signs)
    second = any(sign not in pair.a.written for sign in pair.b.lone_signs)
    return "symbol" if first or second else None


@rule(
    reasons=("quote",),
    vetoes=(
        ("Find names LIKE 'Mar%'", "Find names LIKE '%mar'"),
        ("Which names match 'a*'?", "Which names match '*a'?"),
    ),
    allows=(("Find names LIKE 'Mar%'", "Find the names LIKE 'Mar%'"),),
)
def quoted_pattern(pair: Pair) -> str | None:
    """Another pattern is quoted: "starts with 'a%'", "starts with '%a'"."""
    first = _patterns(pair.a)
    second = _patterns(pair.b)
    return "quote" if first and second and first != second else None


def _patterns(text: Text) -> set[str]:
    return {quoted for quoted in text.quotes if not _WILD.isdisjoint(quoted)}


@rule(
    reasons=("quote",),
    vetoes=(
        ('Who sang "Hurt"?', 'Who sang "Creep"?'),
        ('Does the sign say "stop"?', 'Does the sign say "yield"?'),
    ),
    allows=(('Who sang "Hurt"?', "Who sang Hurt?"),),
)
def quoted_words(pair: Pair) -> str | None:
    """Words are quoted that the other text does not have, and it has others instead."""
    first = _lacks_quoted(pair.a, pair.b)
    second = _lacks_quoted(pair.b, pair.a)
    if not first and not second:
        return None
    left, right = pair.content
    instead = (first and second) or (first and right) or (second and left)
    return "quote" if instead else None


def _lacks_quoted(mine: Text, other: Text) -> bool:
    """Whether the other text lacks words that this one quotes."""
    missing = mine.quotes - other.quotes
    if not missing:
        return False
    if len(missing) > MOST:
        return True
    words = " ".join(t.word for t in other.tokens if t.word not in STOPS)
    for quoted in missing:
        plain = " ".join(word for word in quoted.split() if word[0].isalnum())
        is_said = f" {plain} " in f" {words} " or quoted.replace(" ", "") in other.spelled
        if not is_said:
            return True
    return False
