"""Rules over what a question asks for."""

from __future__ import annotations

import itertools

from semkv_guards.language import Token
from semkv_guards.pairs import Pair, View
from semkv_guards.rules.rule import rule
from semkv_guards.text import Text

_NEARLY_SAME = frozenset(("manner", "place"))  # "how can I buy" and "where can I buy"
_STATEMENT = "statement"
_QUESTION = 40  # tokens in which a question is looked for


@rule(
    reasons=("question word",),
    tables=("questions",),
    vetoes=(
        ("What do pandas eat?", "When do pandas eat?"),
        ("Who is Siri?", "What is Siri?"),
    ),
    allows=(("What is the weather in Rome?", "How is the weather in Rome?"),),
)
def lone_question_word(pair: Pair) -> str | None:
    """Nothing but the question word differs: "what do pandas eat", "when do pandas eat".

    Not "what is the weather in Rome", "how is the weather in Rome"; "what is the best time", "when is the best time".
    """
    language = pair.language
    if [len(only) for only in pair.only] != [1, 1]:
        return None
    (x,), (y,) = pair.only
    kinds = {language.questions.get(token.word, _STATEMENT) for token in (x, y)}
    if len(kinds) == 1 or _STATEMENT in kinds or kinds == _NEARLY_SAME:
        return None
    if not language.asked.isdisjoint(pair.words):
        return None
    if kinds != {"", "manner"}:
        return "question word"
    following = (*itertools.pairwise(pair.a.tokens), *itertools.pairwise(pair.b.tokens))
    helped = any(token.word in language.helpers for before, token in following if before in (x, y))
    return "question word" if helped else None


@rule(
    reasons=("question word",),
    tables=("questions",),
    vetoes=(
        ("Where do I pay?", "How much do I pay?"),
        ("Is the shop open?", "When is the shop open?"),
        ("Does tea raise blood pressure?", "How does tea raise blood pressure?"),
        ("Can I take a cello on board?", "How can I take a cello on board?"),
    ),
    allows=(("Where can I buy a bike?", "How can I buy a bike?"),),
)
def question_word(pair: Pair) -> str | None:
    """The texts ask for different things: who, when, where, why, how, how many; or one asks for yes or no alone."""
    first = what_is_asked(pair.a)
    second = what_is_asked(pair.b)
    if first and second:
        both_ask_for_self = first | second == _NEARLY_SAME and all(
            map(_asks_for_self, (pair.a, pair.b))
        )
        return None if first & second or both_ask_for_self else "question word"
    if bool(first) == bool(second):
        return None
    closed = pair.b if first else pair.a
    if not closed.asks_yes_or_no:
        return None
    # "Can I pay by card" may ask how, but not beside "how can I pay by card"; "does tea raise blood pressure" does not.
    is_the_same = [len(only) for only in pair.only] in ([0, 1], [1, 0])
    may_ask_how = closed.tokens[0].word not in pair.language.helpers and not is_the_same
    return None if may_ask_how and first | second == {"manner"} else "question word"


@rule(
    reasons=("question word",),
    tables=("questions",),
    vetoes=(
        ("What color is the car?", "What size is the car?"),
        ("How many dogs are there?", "Which dogs are there?"),
    ),
    allows=(("What kind of dog is it?", "What type of dog is it?"),),
)
def asked_noun(pair: Pair) -> str | None:
    """Another noun is asked for: "what size" against "what color", "which birds" against "how many nests"."""
    first = _noun_asked_for(pair.a)
    second = _noun_asked_for(pair.b)
    if first and second:
        same = pair.akin(first, second) or first.stem in pair.b.stems or second.stem in pair.a.stems
        return None if same else "question word"
    noun = first or second
    if not noun:
        return None
    asked = what_is_asked(pair.b if first else pair.a)
    kinds = [kind.split()[1] for kind in asked if " " in kind]
    classes = {str(number) for number in pair.language.classes.get(noun.stem, ())}
    return "question word" if kinds and classes.isdisjoint(kinds) else None


@rule(
    reasons=("question word",),
    tables=("questions", "tenses"),
    vetoes=(
        ("Are there moons of Mars?", "What are the moons of Mars?"),
        ("Do I have to pay taxes?", "What taxes do I have to pay?"),
    ),
    allows=(
        ("Can you tell me the fee?", "What is the fee?"),
        ("Is there a way to bake bread?", "What is a way to bake bread?"),
        ("Are there alternatives to Yelp?", "What are some alternatives to Yelp?"),
    ),
)
def open_question(pair: Pair) -> str | None:
    """One text asks whether there is something, and the other what it is."""
    for view in pair.views:
        if not view.text.asks_yes_or_no or not _asks_what(view.other):
            continue
        asks_politely = view.text.tokens[0].word in view.text.language.modals
        if not asks_politely and not _asks_for_any(view):
            return "question word"
    return None


def _asks_what(text: Text) -> bool:
    """Whether a text asks what or which there is, but not whether it is so."""
    start = _question_start(text)
    words = [t.word for t in text.tokens[start : start + 1]]
    return bool(words) and words[0] in text.language.open_questions


def _asks_for_any(view: View) -> bool:
    """Whether who asks whether there is one asks for it: "is there any", "is there a way"; "what are some"."""
    language = view.text.language
    return not (
        language.asked.isdisjoint(view.text.words)
        and language.some.isdisjoint(view.text.words | view.other.words)
    )


def what_is_asked(text: Text) -> frozenset[str]:
    """What a text asks for; empty where that is open."""
    language = text.language
    tokens = text.tokens[:_QUESTION]
    start = _question_start(text)
    words = [*[t.word for t in tokens[start : start + 3]], "", "", ""]
    kind = language.questions.get(words[0])
    if not kind:
        return frozenset()
    after, beyond = words[1:3]
    is_much = after in language.how_much
    # "how old is", not "how children learn"
    is_adjective = after not in language.function and beyond in language.function
    if words[0] != language.how or not (is_much or is_adjective):
        return frozenset((kind,))
    stem = tokens[start + 1].stem
    found = {f"{kind} {each}" for each in language.classes.get(stem, (stem,))}
    return frozenset(found if is_much else found | {kind})


def _question_start(text: Text) -> int:
    """Where the question word stands, or the first word that cannot stand before one."""
    language = text.language
    tokens = text.tokens[:_QUESTION]
    places = (
        i
        for i, t in enumerate(tokens)
        if t.word in language.questions or t.word not in language.leads
    )
    return next(places, len(tokens))


def _asks_for_self(text: Text) -> bool:
    """Whether somebody asks for himself."""
    language = text.language
    said = text.words & language.persons.keys()
    return any(language.persons[word] not in language.third for word in said)


def _noun_asked_for(text: Text) -> Token | None:
    """The noun that a "what" or "which" asks for."""
    language = text.language
    for token, after in itertools.pairwise(text.tokens):
        if token.word in language.open_questions:
            is_open = after.word in language.function or after.word in language.open
            return None if is_open else after
    return None
