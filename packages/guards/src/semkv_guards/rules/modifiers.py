"""Rules over what is added to a noun: a modifier, the head of a compound, an owner, a phrase behind it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from semkv_guards.language import Language, Token, Words
from semkv_guards.pairs import Pair, View
from semkv_guards.rules.rule import rule
from semkv_guards.text import END, STOPS, Text


class Added(NamedTuple):
    """Words that one text has between two that stand side by side in the other."""

    before: Token
    words: tuple[Token, ...]
    after: Token


@rule(
    reasons=("modifier",),
    tables=("harmless_before",),
    vetoes=(
        ("How do I cancel my flight?", "How can I cancel my connecting flight?"),
        ("Can I return a gift?", "Can I return a gift card?"),
        ("How do I reset a password?", "How do I reset a colleague's password?"),
    ),
    allows=(
        ("How do I clean my oven?", "How do I clean my dirty oven?"),
        ("How much protein is in an egg?", "How much protein does an egg contain?"),
        ("How do I remove limescale?", "How do I get limescale off?"),
    ),
)
def added_modifier(pair: Pair) -> str | None:
    """A noun has a modifier, an owner or a compound's head in one text only, and nothing in its place in the other.

    A word that is not known to be harmless there tells another thing: "gift", "gift card".
    """
    language = pair.language
    if all(pair.unmatched) or not language.harmless_before:
        return None
    for view, unmatched in zip(pair.views, pair.unmatched, strict=True):
        telling = {t.stem for t in view.only if t.word in language.attributes}
        found = telling.union(t.stem for t in unmatched)
        if not language.negations.isdisjoint(view.other.words):
            found.discard(language.stem(language.free))  # "gluten free", "without gluten"
        for added in _additions(view, found) if found else ():
            is_part = _is_before(added, language) or _is_behind(added, language)
            if is_part and not _may_be_verb(added, pair):
                return "modifier"
    return None


@rule(
    reasons=("modifier",),
    tables=("relations",),
    vetoes=(
        ("What is the tax rate in Spain?", "What is the tax rate in Spain for companies?"),
        ("Why was I blocked?", "Why was I blocked for a week?"),
    ),
    allows=(
        ("How do I bake bread?", "How do I bake bread at home?"),
        ("Which movies do you like?", "Which movies do you like to watch?"),
    ),
)
def added_phrase(pair: Pair) -> str | None:
    """A preposition with its noun is in one text only, and nothing in its place in the other: "for companies"."""
    if all(pair.unmatched):
        return None
    for view, unmatched in zip(pair.views, pair.unmatched, strict=True):
        found = {t.stem for t in unmatched} - pair.language.harmless_phrase_stems
        if found and _adds_phrase(view, found):
            return "modifier"
    return None


@rule(
    reasons=("modifier",),
    tables=("singling", "adding"),
    vetoes=(
        ("Which planet has rings?", "Which planet has the most rings?"),
        ("Who was her husband?", "Who was her first husband?"),
        ("Who scored the most goals?", "Who scored the most own goals?"),
        ("Who won the prize?", "Who also won the prize?"),
    ),
    allows=(
        ("What are common symptoms?", "What are the most common symptoms?"),
        ("Can I pay by card?", "Can I also pay by card?"),
        ("When did they meet?", "When did they first meet?"),
        ("How do I start a business?", "How do I start my own business?"),
    ),
)
def singled_out(pair: Pair) -> str | None:
    """One text asks for the one that has most, or came first, or for one more, and the other for any."""
    for view in pair.views:
        words = {t.word for t in view.only}
        asks_which = view.text.tokens[:1] and view.text.tokens[0].word in pair.language.questions
        if asks_which and not words.isdisjoint(pair.language.adding):
            return "modifier"
        is_said = any(t.word in pair.language.numbers for t in view.others)
        if not is_said and not words.isdisjoint(pair.language.singling) and _singles_out(view):
            return "modifier"
    return None


@rule(
    reasons=("modifier",),
    tables=("amounts",),
    vetoes=(
        ("How many calories are in rice?", "How many calories are in a cup of rice?"),
        ("How much does a kilo of rice cost?", "How much does rice cost?"),
    ),
    allows=(("What is photosynthesis?", "What is the process of photosynthesis?"),),
)
def portion(pair: Pair) -> str | None:
    """An amount is asked for, of a thing in one text and of a portion of it in the other: "in a cup of rice"."""
    amounts = pair.language.amounts
    if amounts.isdisjoint(pair.a.words) or amounts.isdisjoint(pair.b.words):
        return None
    of = pair.language.of
    for view in pair.views:
        own = {t.stem for t in view.only if t.word not in STOPS}
        found = _additions(view, own) if of in {t.word for t in view.only} else ()
        if any(added.words[-1].word == of and len(added.words) > 1 for added in found):
            return "modifier"
    return None


def _singles_out(view: View) -> bool:
    """Whether such a word limits the noun behind it, or ends a clause: not "most common", "they first met"."""
    language = view.text.language
    words = language.singling & {t.word for t in view.only}
    tokens = (END, *view.text.tokens, END, END)
    before = _stems_before(tokens, language)
    beside = _neighbors(view.other)
    for place, token in enumerate(tokens):
        if token.word not in words:
            continue
        previous = tokens[place - 1]
        after, beyond = tokens[place + 1 : place + 3]
        ranks = token.word in language.ordinals
        if (before[place], _stem(after)) not in beside:
            continue
        if after.word in STOPS:
            return ranks
        is_noun = language.may_be_content(after) and not language.may_be_content(beyond)
        if is_noun and _may_limit(previous, language, ranks=ranks):
            return True
    return False


def _may_limit(previous: Token, language: Language, *, ranks: bool) -> bool:
    """Whether a noun may follow: "her first husband", "has most rings"; not "they first met", "are most common"."""
    if ranks:
        return previous.word in language.articles or previous.word == language.owns
    is_pronoun = previous.word in language.persons  # "my own goals" are no fewer than "my goals"
    is_open = previous.word in language.questions or previous.stem in language.being
    return not is_pronoun and not is_open


def _adds_phrase(view: View, found: set[str]) -> bool:
    language = view.text.language
    prepositions = language.relations - {language.owns, language.infinitive}
    tokens = (END, *view.text.tokens, END)
    before = _stems_before(tokens, language)
    beside = _neighbors(view.other)
    for start, token in enumerate(tokens):
        if token.word not in prepositions:
            continue
        end = start + 1
        while tokens[end].word in language.articles or tokens[end].stem in found:
            end += 1
        has_noun = any(t.stem in found for t in tokens[start:end])
        if has_noun and (before[start], _stem(tokens[end])) in beside:
            return True
    return False


def _additions(view: View, found: set[str]) -> Iterator[Added]:
    """What one text alone has of some words, where its neighbors are neighbors in the other text.

    Where an article follows, what is added is no part of a noun: "which countries share a border".
    """
    language = view.text.language
    tokens = (END, *view.text.tokens, END)
    before = _stems_before(tokens, language)
    beside = _neighbors(view.other)
    start = 1
    while start < len(tokens) - 1:
        end = start
        while tokens[end].stem in found or (end > start and tokens[end].word == language.owns):
            end += 1
        after = tokens[end]
        is_between = end > start and (before[start], _stem(after)) in beside
        if is_between and after.word not in language.articles:
            yield Added(before=tokens[start - 1], words=tokens[start:end], after=after)
        start = max(end, start + 1)


def _neighbors(text: Text) -> set[tuple[str, str]]:
    """The stems that stand side by side, articles left aside."""
    stems = [END.stem, *map(_stem, text.without_articles), END.stem]
    return set(itertools.pairwise(stems))


def _stems_before(tokens: Sequence[Token], language: Language) -> list[str]:
    """For each token the stem before it, articles left aside."""
    found = []
    before = END.stem
    for token in tokens:
        found.append(before)
        if token.word not in language.articles:
            before = _stem(token)
    return found


def _stem(token: Token) -> str:
    return END.stem if token.word in STOPS else token.stem


def _is_before(added: Added, language: Language) -> bool:
    """Whether what is added stands directly before a noun, and is not known to be harmless there."""
    if added.before.word in language.persons.keys() - language.articles:  # "I finally start"
        return False
    is_noun = language.may_be_content(added.after)
    return is_noun and _tells(added, language.harmless_before_stems, language)


def _is_behind(added: Added, language: Language) -> bool:
    """Whether what is added stands directly behind a noun, and is not known to be harmless there: "gift card"."""
    harmless = language.harmless_behind_stems | language.stop_stems
    return language.may_be_content(added.before) and _tells(added, harmless, language)


def _tells(added: Added, harmless: Words, language: Language) -> bool:
    """Whether a word that is added is neither harmless nor an adverb."""
    return not all(
        t.stem in harmless or t.word.endswith(language.manner) or t.word == language.owns
        for t in added.words
    )


def _may_be_verb(added: Added, pair: Pair) -> bool:
    """Whether what is added may be the verb of a noun before it: "does an egg contain"."""
    language = pair.language
    return language.may_be_content(added.before) and pair.auxiliaries_differ
