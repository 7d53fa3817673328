"""Rules over texts that have the same words in other forms."""

from __future__ import annotations

import itertools

from semkv_guards.language import Token
from semkv_guards.pairs import MOST, Pair
from semkv_guards.rules.rule import rule
from semkv_guards.rules.verbs import mood, weakest_mood
from semkv_guards.text import Text

_REACH = 4  # words within which a verb stands behind its auxiliary


@rule(
    reasons=("tense",),
    tables=("tenses", "verbs"),
    vetoes=(
        ("Are dodos hunted?", "Were dodos hunted?"),
        ("Does he live in Rome?", "Did he live in Rome?"),
    ),
    allows=(("What does he do in Rome?", "What is he doing in Rome?"),),
)
def past_of_same_words(pair: Pair) -> str | None:
    """The same words but for auxiliaries tell of the past in one text only."""
    if pair.a.content_stems != pair.b.content_stems:
        return None
    return "tense" if _is_past(pair.a) != _is_past(pair.b) else None


@rule(
    reasons=("modality",),
    tables=("modals",),
    vetoes=(
        ("Can dogs eat rice?", "Should dogs eat rice?"),
        ("It could rain today", "It will rain today"),
    ),
    allows=(("What can I cook?", "What shall I cook?"),),
)
def possibility_of_same_words(pair: Pair) -> str | None:
    """The same words but for auxiliaries say what may be in one text only; a question word asks for more."""
    if pair.a.content_stems != pair.b.content_stems:
        return None
    if _says_may(pair.a) == _says_may(pair.b):
        return None
    return "modality" if pair.language.questions.keys().isdisjoint(pair.words) else None


@rule(
    reasons=("tense",),
    tables=("past_endings", "verbs"),
    vetoes=(
        ("Is baking a verb?", "Is baked a verb?"),
        ("Can mammoths swim?", "Could mammoths swim?"),
    ),
    allows=(("Can I get a refund?", "Could I get a refund?"),),
)
def past_of_same_verb(pair: Pair) -> str | None:
    """One verb is in the past in one text only, and all other words have the same stems."""
    language = pair.language
    first = pair.a.without_articles
    second = pair.b.without_articles
    if [t.stem for t in first] != [t.stem for t in second]:
        return None
    asks_of_words = _asks_of_words(pair)
    for i, (x, y) in enumerate(zip(first, second, strict=True)):
        if language.is_past(x) == language.is_past(y):
            continue
        if asks_of_words or not (_is_polite(i, pair) or _is_helped(i, pair)):
            return "tense"
    return None


@rule(
    reasons=("substitution",),
    tables=("mentions", "counting"),
    vetoes=(
        ("How do you spell color?", "How do you spell colour?"),
        ("What rhymes with cat?", "What rhymes with cats?"),
    ),
    allows=(("What do cats eat?", "What does a cat eat?"),),
)
def mentioned_form(pair: Pair) -> str | None:
    """A text asks about a word itself: its spelling, sound, grammar, translation. Then every form of it counts."""
    if not _asks_of_words(pair):
        return None
    language = pair.language
    mine = [t for t in pair.a.tokens if t.word not in pair.b.words]
    other = [t for t in pair.b.tokens if t.word not in pair.a.words]
    for x, y in itertools.product(mine[:MOST], other[:MOST]):
        left_out = language.mention_stems
        if x.stem != y.stem:
            left_out = left_out | language.stop_stems
        is_content = language.function.isdisjoint((x.word, y.word))
        if is_content and left_out.isdisjoint((x.stem, y.stem)) and pair.akin(x, y):
            return "substitution"
    return None


def _is_past(text: Text) -> bool:
    """Whether a text is about what was or has been."""
    tokens = text.without_articles
    return any(_tells_past(i, token, text) for i, token in enumerate(tokens))


def _tells_past(i: int, token: Token, text: Text) -> bool:
    """Whether a word is an auxiliary of the past, or a verb in it that has none before it: "won", not "is won"."""
    language = text.language
    tokens = text.without_articles
    if token.stem not in language.auxiliaries:
        before = tokens[max(0, i - _REACH) : i]
        return language.is_past(token) and not any(t.stem in language.auxiliaries for t in before)
    tense = language.tenses.get(token.word)
    if tense != "perfect":
        return tense == "past"
    after = tokens[i + 1 : i + _REACH]
    return any(language.is_past(t) or t.stem in language.being for t in after)


def _says_may(text: Text) -> bool:
    """Whether a text speaks of what may be; "can you" is no more than polite."""
    return mood(text) == weakest_mood(text.language)


def _is_polite(i: int, pair: Pair) -> bool:
    """Whether an auxiliary stands before a person: "can I get", "could I get"."""
    tokens = pair.a.without_articles
    language = pair.language
    return (
        tokens[i].word in language.modals
        and i + 1 < len(tokens)
        and tokens[i + 1].word in language.persons
    )


def _is_helped(i: int, pair: Pair) -> bool:
    """Whether one of the two words before is an auxiliary of a question: "did he lived"."""
    start = max(0, i - 2)
    near = (*pair.a.without_articles[start:i], *pair.b.without_articles[start:i])
    return any(t.word in pair.language.helpers for t in near)


def _asks_of_words(pair: Pair) -> bool:
    return _speaks_of_words(pair.a) or _speaks_of_words(pair.b)


def _speaks_of_words(text: Text) -> bool:
    """Whether a text speaks of words rather than things."""
    language = text.language
    if not language.mentions.isdisjoint(text.words):
        return True
    if language.counting.isdisjoint(text.words):
        return False
    return any(
        len(t.word) == 1 and t.word.isalpha() and t.word not in language.alone for t in text.tokens
    )
