"""Every rule, in the order in which they are asked."""

from __future__ import annotations

import itertools

from semkv_guards.rules import (
    attachment,
    case,
    code,
    dates,
    forms,
    modifiers,
    negation,
    numbers,
    opposites,
    persons,
    questions,
    relations,
    roles,
    signs,
    verbs,
    word_order,
    words,
)
from semkv_guards.rules.rule import Rule

RULES_OF_CODE = (
    code.unshared_code,
    code.recased_code,
    code.respelled_code,
    code.operators,
)
"""Those that are asked of texts that differ in nothing but the case of typing."""

RULES: tuple[Rule, ...] = (
    *RULES_OF_CODE,
    signs.symbol,
    signs.lone_sign,
    signs.quoted_pattern,
    signs.quoted_words,
    case.capital_at_start,
    case.capitals,
    forms.past_of_same_words,
    forms.possibility_of_same_words,
    forms.past_of_same_verb,
    forms.mentioned_form,
    numbers.quantity,
    numbers.counted_thing,
    dates.date_in_figures,
    dates.shifted_time,
    dates.date,
    dates.narrower,
    negation.negation,
    negation.choice,
    attachment.described_thing,
    attachment.related_thing,
    attachment.focused_word,
    attachment.owned_thing,
    attachment.other_owner,
    opposites.presence,
    opposites.opposite_words,
    opposites.lessened_comparison,
    opposites.other_degree,
    opposites.other_ending,
    opposites.contrary_prefix,
    questions.lone_question_word,
    questions.question_word,
    questions.asked_noun,
    questions.open_question,
    verbs.forbidden_or_excused,
    verbs.modality,
    verbs.future_or_past,
    verbs.past_or_present_yes_or_no,
    persons.person,
    roles.role,
    word_order.word_order,
    relations.particle,
    relations.other_way,
    relations.exchanged_ends,
    relations.contrary_relation,
    relations.moved_relation,
    relations.added_relation,
    relations.crossed_nouns,
    relations.relation,
    words.too_many_words,
    words.name,
    words.substitution,
    words.substituted_phrase,
    words.other_light_verb,
    words.unknown_language,
    modifiers.added_modifier,
    modifiers.added_phrase,
    modifiers.singled_out,
    modifiers.portion,
)

REASONS = (
    *dict.fromkeys(itertools.chain.from_iterable(rule.reasons for rule in RULES)),
    *("typing", "unread", "lines", "length"),
)
"""Every reason for a veto in English: those of the rules, and those of texts that are not compared by meaning."""
