"""Rules over words that go with one another: a color with its thing, "only" with what it limits, an owner with what he
owns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from semkv_guards.language import Language, Token
from semkv_guards.pairs import Pair, Tokens, triples
from semkv_guards.rules.rule import rule
from semkv_guards.text import END, STOPS, Text

_NEAR = 4  # words after a side among which is what it is the side of
_CLAUSE = 16  # words that an "only" may be about
_SAID = 3  # of them those that are compared

Partners = Mapping[str, set[str]]
"""By word, the stems that it goes with."""


@rule(
    reasons=("word order",),
    tables=("groups",),
    vetoes=(
        ("Is there a green ball and a ring?", "Is there a ball and a green ring?"),
        ("Is the small ball behind the big box?", "Is the big ball behind the small box?"),
    ),
    allows=(
        ("What is the red large ball?", "What is the large red ball?"),
        ("What is the maximum parcel size?", "What is the maximum size of a parcel?"),
    ),
)
def described_thing(pair: Pair) -> str | None:
    """A color or size belongs to another thing.

    Both texts have the same words, so an encoder sees hardly any difference.
    """
    return "word order" if _go_with_others(pair, _described) else None


@rule(
    reasons=("word order",),
    tables=("groups", "pivots", "relatives"),
    vetoes=(
        ("Who is taller than Tom?", "Who is Tom taller than?"),
        ("Is tea better than coffee?", "Is coffee better than tea?"),
    ),
    allows=(("What is better than coffee?", "What is better than the coffee?"),),
)
def related_thing(pair: Pair) -> str | None:
    """A side, a "than" or the "that" of a noun has another word after it: "birds that eat owls"."""
    return "word order" if _go_with_others(pair, _followed) else None


@rule(
    reasons=("word order",),
    tables=("focusing",),
    vetoes=(
        ("I only saw Ann", "Only I saw Ann"),
        ("She nearly won all games", "She won nearly all games"),
    ),
    allows=(("Is it only open in summer?", "Is it open only in summer?"),),
)
def focused_word(pair: Pair) -> str | None:
    """An "only" limits another word: what is open in summer only is not the only thing that is open."""
    return "word order" if _go_with_others(pair, _focused) else None


@rule(
    reasons=("person",),
    tables=("owns",),
    vetoes=(
        ("Who is Mary's father's boss?", "Who is Mary's boss's father?"),
        (
            "My neighbour's tree fell on my fence. Who is liable?",
            "My tree fell on my neighbour's fence. Who is liable?",
        ),
    ),
    allows=(("Is my neighbour's tree tall?", "Is the neighbour's tree tall?"),),
)
def owned_thing(pair: Pair) -> str | None:
    """An owner owns something else: "my neighbour's tree fell on my fence"."""
    return "person" if _go_with_others(pair, _owned) else None


@rule(
    reasons=("person",),
    tables=("owns", "persons"),
    vetoes=(
        (
            "Is my password visible to my colleague?",
            "Is my colleague's password visible to me?",
        ),
        ("Can I sell my car to my son?", "Can I sell my son's car?"),
        ("What if my dog bites someone?", "What if someone's dog bites me?"),
    ),
    allows=(
        (
            "What do I get my wife for her birthday?",
            "What do I get for my wife's birthday?",
        ),
    ),
)
def other_owner(pair: Pair) -> str | None:
    """A thing belongs to the speaker or the like in one text, and to somebody who is named in the other."""
    for view in pair.views:
        owned = _owned(view.text)
        if owned and pair.language.owns not in view.other.words and _is_mine(owned, view.other):
            return "person"
    return None


def _is_mine(owned: Partners, text: Text) -> bool:
    """Whether a text says "my" and the like of what somebody owns in the other; "her" may be the owner's."""
    language = text.language
    persons = language.persons
    for possessive, thing in itertools.pairwise(text.tokens):
        if possessive.word not in language.articles or possessive.word not in persons:
            continue
        is_third = persons[possessive.word] in language.third
        owners = {owner for owner, things in owned.items() if thing.stem in things}
        if owners and not (is_third and owners <= text.stems.keys()):
            return True
    return False


def _go_with_others(pair: Pair, partners_in: Callable[[Text], Partners]) -> bool:
    """Whether a word goes with another of the words that both texts have."""
    if pair.converse:
        return False
    first = partners_in(pair.a)
    second = partners_in(pair.b) if first else {}
    common = first.keys() & second.keys()
    if not common:
        return False
    shared = {"", *(pair.a.stems.keys() & pair.b.stems.keys())}
    for word in common:
        mine = first[word]
        theirs = second[word]
        if mine.isdisjoint(theirs) and mine | theirs <= shared:
            return True
    return False


def _described(text: Text) -> Partners:
    """By color, size or the like its noun: "a green ball and a ring"."""
    language = text.language
    found: dict[str, set[str]] = {}
    tokens = (END, *text.without_articles, END)
    for before, token, noun, beyond in zip(
        tokens, tokens[1:], tokens[2:], tokens[3:], strict=False
    ):
        is_last_of_several = before.word in language.symmetric and noun.word in STOPS
        if token.word not in language.grouped or is_last_of_several:  # "large and red?"
            continue
        if noun.stem not in language.stop_stems and noun.stem not in language.groupings:
            found[token.word] = (
                {noun.stem, beyond.stem} if language.may_be_content(beyond) else {noun.stem}
            )
    return found


def _followed(text: Text) -> Partners:
    """By side, "than" and "that" of a noun the next word of content."""
    language = text.language
    function = language.function
    found: dict[str, set[str]] = {}
    for i, token in enumerate(text.tokens):
        word = token.word
        after_noun = i > 0 and text.tokens[i - 1].word not in function
        if word in language.around or (word in language.relatives and after_noun):
            near = text.tokens[i + 1 : i + 1 + _NEAR]
            content = (t.stem for t in near if t.word not in function)
            found[word] = {next(content, "")}
    return found


def _owned(text: Text) -> Partners:
    """By owner what he owns."""
    language = text.language
    if language.owns not in text.words:
        return {}
    return {
        owner.stem: {thing.stem}
        for owner, between, thing in triples(text.tokens)
        if between.word == language.owns and _may_own(owner, language)
    }


def _may_own(owner: Token, language: Language) -> bool:
    return language.may_be_content(owner) or owner.word in language.somebody


def _focused(text: Text) -> Partners:
    """By "only" what it limits, or the word before it at the end of a clause."""
    language = text.language
    if language.focusing.isdisjoint(text.words):
        return {}
    found: dict[str, set[str]] = {}
    tokens = text.without_articles
    for i, token in enumerate(tokens):
        if token.word in language.focusing:
            before = {t.stem for t in tokens[max(0, i - 1) : i]}
            found[token.word] = _limited(tokens[i + 1 : i + 1 + _CLAUSE], language) or before
    return found | _noun_phrases(text.tokens, found, language)


def _limited(after: Sequence[Token], language: Language) -> set[str]:
    """The next word, and what follows its preposition: "only open in summer"."""
    clause = itertools.takewhile(lambda t: t.word not in STOPS, after)
    said = [t.stem for t in clause if not language.is_auxiliary(t)][:_SAID]
    content = [stem for stem in said if stem not in language.relation_stems]
    has_preposition = len(content) > 1 and said[1] != content[1]
    return set(content[: 2 if has_preposition else 1])


def _noun_phrases(tokens: Tokens, found: Partners, language: Language) -> dict[str, set[str]]:
    """By "only" the article before it, where it is part of a noun phrase: "the only doctor"."""
    return {
        token.word: {article.stem}
        for article, token in itertools.pairwise(tokens)
        if article.word in language.articles and token.word in found
    }
