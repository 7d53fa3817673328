"""Rules over words and names that stand in the place of others, and over texts in no known language."""

from __future__ import annotations

import re
from collections.abc import Iterable

from semkv_guards import spelling
from semkv_guards.folding import normalise
from semkv_guards.language import Token
from semkv_guards.pairs import MOST, Exchange, Pair, Tokens, agreeing
from semkv_guards.rules.rule import rule
from semkv_guards.text import END, STOPS

_PLACES = 3  # words that stand against one each
_SMALL = 2  # one word of each text
_STRETCH = 2  # words of a text between two that both have
_WORD = re.compile(r"\w+")
_BLOCK = 5  # words that stand against others in one place

_FOOD = (
    "What is the use of bread butter cheese cream honey rice pasta soup salad bacon ham sausage flour "
    "sugar salt pepper garlic onion potato carrot cabbage lettuce tomato spinach pumpkin olive mushroom "
    "bean pea lentil apple pear plum peach cherry grape?"
)
_TOOLS = (
    "What is the use of hammer saw drill wrench chisel axe shovel rake ladder pliers anvil bolt nail "
    "screw hinge clamp vise file plane level tape rope chain pulley lever wedge crowbar mallet trowel "
    "bucket hose broom mop brush sponge cloth?"
)
_BEASTS = (
    "What is the use of lion tiger wolf fox otter badger weasel beaver mole hedgehog squirrel rabbit "
    "hare deer moose camel llama zebra giraffe rhino hippo monkey gorilla whale dolphin seal walrus "
    "penguin ostrich eagle falcon raven heron stork pelican swan?"
)


@rule(
    reasons=("substitution",),
    vetoes=(
        (_FOOD, _TOOLS),
        (_FOOD, _BEASTS),
    ),
    allows=(("How do I fix a bike?", "How do I repair a bike?"),),
)
def too_many_words(pair: Pair) -> str | None:
    """More words differ than are compared one by one."""
    return "substitution" if min(map(len, pair.only)) > MOST else None


@rule(
    reasons=("entity",),
    vetoes=(
        ("And in Paris?", "And in Berlin?"),
        ("Is Iran large?", "Is Iraq large?"),
    ),
    allows=(("Who wrote Emma?", "Who is the author of Emma?"),),
)
def name(pair: Pair) -> str | None:
    """A name stands where the other text has another name, or none."""
    left, right = _unmatched(pair)
    names = [any(t.name for t in own) for own in (left, right)]
    is_alone = len(left) + len(right) == 1
    return "entity" if all(names) or (is_alone and any(names)) else None


@rule(
    reasons=("entity", "substitution"),
    vetoes=(
        ("How do I get a work visa?", "How do I get a student visa?"),
        ("Is a cat on the sofa?", "Is a dog on the sofa?"),
        ("What is the price of a print?", "What is the price of a printer?"),
    ),
    allows=(
        ("How do I fix a bike?", "How do I repair a bike?"),
        ("Is the ticket refundable?", "Can the ticket be refunded?"),
    ),
)
def substitution(pair: Pair) -> str | None:
    """A word of content stands in the place of another that is no kin."""
    mine, other = _exchanged(pair)
    if len(mine) != len(other):
        return None
    places = set(zip(mine, other, strict=True))
    if not 0 < len(places) <= _PLACES or any(pair.akin(x, y) for x, y in places):
        return None
    if not _are_alone(pair) and not _are_in_same_places(pair, places):
        return None
    return "entity" if any(t.name for t in (*mine, *other)) else "substitution"


def _exchanged(pair: Pair) -> tuple[list[Token], list[Token]]:
    """The words of content that stand for one another.

    Those that the other text has as well, but not as often, are among them, and where one text has none, the words with
    little content that tell one thing from another: "a work visa", "a student visa".
    """
    mine, other = _without_equals(pair)
    if bool(mine) == bool(other):
        return mine, other
    return mine or _attributes(pair, pair.only[0]), other or _attributes(pair, pair.only[1])


def _without_equals(pair: Pair) -> tuple[list[Token], list[Token]]:
    left, right = _unmatched(pair)
    more_here = [t for t in pair.content[0] if t.stem in pair.b.stems]
    more_there = [t for t in pair.content[1] if t.stem in pair.a.stems]
    return left + more_here, right + more_there


def _are_alone(pair: Pair) -> bool:
    """Whether one word of content on each side is all that differs."""
    mine, other = _without_equals(pair)
    return bool(mine and other) and all(len({t.stem for t in only}) == 1 for only in pair.only)


def _are_in_same_places(pair: Pair, places: Iterable[tuple[Token, Token]]) -> bool:
    """Whether the words next to them are the same: one of two, or both where one text has no word without kin."""
    left, right = _unmatched(pair)
    near = 1 if left and right else 2
    return all(pair.neighbours(x, y) >= near for x, y in places)


@rule(
    reasons=("substitution",),
    vetoes=(
        ("How do I remove candle oil?", "How do I remove wax?"),
        (
            "Which chamber pumps blood into the aorta?",
            "Which chamber pumps blood into the pulmonary artery?",
        ),
        ("Can I hand in the essay by email?", "Can I hand in the essay on paper?"),
    ),
    allows=(("How do I remove wax?", "How do I get rid of wax?"),),
)
def substituted_phrase(pair: Pair) -> str | None:
    """A few words in one place stand against a few others, and nothing else differs: "wax", "candle oil".

    A word of the place may have its kin elsewhere in the other text: "submit the essay by email", "on paper".
    """
    if not all(pair.without_counterpart):
        return None
    first, second = (
        [t.stem for t in text.without_articles if t.word not in STOPS] for text in (pair.a, pair.b)
    )
    before = agreeing(first, second)
    after = agreeing(first[before:][::-1], second[before:][::-1])
    same = before + after
    apart = len(first) + len(second) - 2 * same
    return "substitution" if same > 1 and apart <= _BLOCK else None


@rule(
    reasons=("substitution",),
    tables=("light_verbs",),
    vetoes=(
        ("How do I get antibiotics?", "How do I take antibiotics?"),
        ("Can my manager see my sick notes?", "Can my manager ask for my sick notes?"),
    ),
    allows=(
        ("How do I get a stain out of a carpet?", "How do I remove a stain from a carpet?"),
        ("How do I know if she likes me?", "How can I tell if she likes me?"),
        ("How do I make my laptop faster?", "How can I speed up my laptop?"),
    ),
)
def other_light_verb(pair: Pair) -> str | None:
    """A verb of little content stands between the same two words as another verb that is no kin, and no other word of
    content differs: "get insulin", "use insulin"."""
    language = pair.language
    left, right = (_telling(only, pair) for only in pair.only)
    for exchange in pair.exchanges:
        first = _telling(exchange.first, pair)
        second = _telling(exchange.second, pair)
        is_all = len(first) == len(left) == len(second) == len(right) == 1
        if not is_all or not _is_within(exchange, pair):
            continue
        (x,), (y,) = first, second
        is_light = not language.light_verb_stems.isdisjoint((x.stem, y.stem))
        is_kin = pair.akin(x, y) or language.are_kindred_verbs(x.stem, y.stem)
        if is_light and not is_kin and not spelling.may_be_slip(x.word, y.word):
            return "substitution"
    return None


def _is_within(exchange: Exchange, pair: Pair) -> bool:
    """Whether a few words stand within a clause, or one verb of little content each at its end."""
    every = (*exchange.first, *exchange.second)
    are_few = max(len(exchange.first), len(exchange.second)) <= _STRETCH
    if exchange.after == END.stem:
        are_light = all(t.stem in pair.language.light_verb_stems for t in every)
        are_few = len(every) == _SMALL and are_light
    relations = pair.language.relations  # behind one stands a noun: "in production"
    is_noun = any(words[0].word in relations for words in (exchange.first, exchange.second))
    return are_few and not is_noun and exchange.before != END.stem


def _telling(tokens: Tokens, pair: Pair) -> list[Token]:
    """The nouns, verbs and the like that are neither a measure nor a date, which have rules of their own."""
    language = pair.language
    measured = pair.a.quantities.words | pair.b.quantities.words | language.all_units.keys()
    return [
        t
        for t in tokens
        if (language.may_be_content(t) or t.stem in language.light_verb_stems)
        and t.word not in measured
        and t.word not in language.senses
    ]


@rule(
    reasons=("language",),
    tables=("telling",),
    vetoes=(
        ("Jag vill ha kaffe", "Jag vill inte ha kaffe"),
        ("Ile kosztuje bilet?", "Ile kosztują dwa bilety?"),
        ("Er hasst die Armen Leute", "Er hasst die armen Leute"),
    ),
    allows=(("How much is a ticket?", "How much is the ticket?"),),
)
def unknown_language(pair: Pair) -> str | None:
    """Words differ, in case too, or come in another order, where a text is not in the language whose words the guards
    know."""
    if not pair.language.telling or pair.is_in_language():
        return None
    first, second = (_WORD.findall(normalise(text.written)) for text in (pair.a, pair.b))
    return "language" if first != second else None


def _unmatched(pair: Pair) -> tuple[list[Token], list[Token]]:
    """The words that have no kin in the other text, but for a comparison that is turned round."""
    first, second = pair.unmatched
    if not pair.converse:
        return first, second
    left = [t for t in first if t.stem not in pair.converse]
    right = [t for t in second if t.stem not in pair.converse]
    return left, right


def _attributes(pair: Pair, only: Tokens) -> list[Token]:
    """Words with little content that tell one thing from another before its noun."""
    return [t for t in only if t.word in pair.language.attributes | pair.language.speaker]
