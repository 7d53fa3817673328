"""Every rule, in the order in which they are asked."""

from __future__ import annotations

from semkv_guards import values
from semkv_guards.rules import (
    attachment,
    forms,
    negation,
    opposites,
    persons,
    questions,
    relations,
    roles,
    verbs,
    word_order,
    words,
)
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
    forms.past_of_same_words,
    forms.possibility_of_same_words,
    forms.past_of_same_verb,
    forms.mentioned_form,
    _without_cases(values.quantity),
    _without_cases(values.date),
    _without_cases(values.narrower),
    negation.negation,
    negation.choice,
    attachment.described_thing,
    attachment.related_thing,
    attachment.focused_word,
    attachment.owned_thing,
    opposites.presence,
    opposites.opposite_words,
    opposites.lessened_comparison,
    opposites.other_degree,
    opposites.other_ending,
    opposites.contrary_prefix,
    questions.lone_question_word,
    questions.question_word,
    questions.asked_noun,
    verbs.forbidden_or_excused,
    verbs.modality,
    verbs.future_or_past,
    verbs.past_or_present_yes_or_no,
    persons.person,
    roles.role,
    word_order.word_order,
    relations.particle,
    relations.other_way,
    relations.relation,
    words.too_many_words,
    words.name,
    words.substitution,
    words.substituted_phrase,
    words.unknown_language,
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
