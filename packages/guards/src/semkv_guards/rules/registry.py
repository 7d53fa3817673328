"""Every rule, in the order in which they are asked."""

from __future__ import annotations

from semkv_guards import meaning, values
from semkv_guards.rules import attachment, roles, word_order
from semkv_guards.rules.rule import Check, Rule


def _without_cases(check: Check) -> Rule:
    """A rule whose cases are in ``bench/data/classes.jsonl`` alone."""
    return Rule(
        name=check.__name__,
        why=check.__doc__ or "",
        reasons=(),
        tables=(),
        vetoes=(),
        allows=(),
        check=check,
    )


_CODE = _without_cases(values.code)

RULES: tuple[Rule, ...] = (
    _CODE,
    _without_cases(values.symbol),
    _without_cases(values.quote),
    _without_cases(values.case),
    _without_cases(meaning.form),
    _without_cases(values.quantity),
    _without_cases(values.date),
    _without_cases(values.narrower),
    _without_cases(meaning.negation),
    _without_cases(meaning.choice),
    attachment.described_thing,
    attachment.related_thing,
    attachment.focused_word,
    attachment.owned_thing,
    _without_cases(meaning.groups),
    _without_cases(meaning.opposites),
    _without_cases(meaning.question),
    _without_cases(meaning.modality),
    _without_cases(meaning.tense),
    _without_cases(meaning.person),
    roles.role,
    word_order.word_order,
    _without_cases(meaning.particle),
    _without_cases(meaning.relation),
    _without_cases(meaning.substitution),
    _without_cases(meaning.unknown_language),
)

RULES_OF_CODE = (_CODE,)
"""Those that are asked of texts that differ in nothing but the case of typing."""

REASONS = (
    "code", "symbol", "quote", "case", "number", "unit", "date", "negation", "direction", "color", "choice", "antonym",
    "comparison", "quantity", "question word", "modality", "tense", "person", "word order", "relation", "entity",
    "substitution", "language", "typing", "unread", "lines",
    "length",
)  # fmt: skip
"""Every reason for a veto in English."""
