"""The rule over the speaker and third persons: who acts, and who is acted on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from semkv_guards.language import Language, Token
from semkv_guards.pairs import Pair
from semkv_guards.rules.rule import rule
from semkv_guards.text import END, STOPS, Text

_VERB = 4  # words from a subject to its verb: "I have not yet been asked"


@rule(
    reasons=("person",),
    tables=("speaker", "third"),
    vetoes=(
        ("Why does my cat bite me?", "Why do I bite my cat?"),
        ("Can my employer report me?", "Can I report my employer?"),
        (
            "Do I have to tell my boss that I am ill?",
            "Does my boss have to tell anyone that I am ill?",
        ),
    ),
    allows=(("Why does my cat bite me?", "Why is my cat biting me?"),),
)
def role(pair: Pair) -> str | None:
    """The speaker or a third person has the role of another.

    He does in one text what is done to him in the other, or what somebody does there to whom he does it.
    """
    for is_subject in pair.language.subjects:
        if is_subject.keys().isdisjoint(pair.words):
            continue
        first = _deeds(pair.a, is_subject)
        second = _deeds(pair.b, is_subject)
        if _turned(pair.a, first, pair.b, second) or _turned(pair.b, second, pair.a, first):
            return "person"
    return None


class Deeds(NamedTuple):
    """What one person does and suffers in a text."""

    acts: dict[str, str]
    """By verb of which he is the subject, the word after it."""
    suffers: set[str]
    """Verbs of which he is the object."""


def _turned(mine: Text, done: Deeds, other: Text, others: Deeds) -> bool:
    """Whether the person acts in the first text alone, and is acted on or replaced in the other."""
    own = done.acts.keys() - done.suffers - others.acts.keys()
    if not own or own & others.suffers:
        return bool(own)
    first = next(i for i, t in enumerate(mine.tokens) if t.stem in own)
    before = {t.stem for t in mine.tokens[:first]}
    after = {t.stem for t in mine.tokens[first:]}
    objects = after - before - others.acts.keys()
    # "I use my dad's car", "my dad uses my car"
    owned = mine.language.owns in mine.words - other.words
    for i, (verb, thing) in enumerate(itertools.pairwise(other.without_articles)):
        if verb.stem not in own:
            continue
        subject = _subject_before(i, other)
        object_here = done.acts[verb.stem]
        is_exchanged = object_here == subject and _may_suffer(thing, other.language)
        if (owned or object_here == thing.stem or is_exchanged) and subject in objects:
            return True
    return False


def _may_suffer(token: Token, language: Language) -> bool:
    """Whether a word behind a verb may be its object."""
    is_named = token.word in language.somebody or token.word in language.persons
    may_be_noun = language.may_be_content(token) and not token.word.endswith(language.gerund)
    return is_named or may_be_noun


def _deeds(text: Text, is_subject: Mapping[str, bool]) -> Deeds:
    language = text.language
    tokens = text.without_articles
    found = Deeds(acts={}, suffers=set())
    for i, token in enumerate(tokens):
        acting = is_subject.get(token.word)
        if acting:
            _add_deed(found, text, _verb_after(i, text))
        elif i and acting is not None and language.may_be_content(tokens[i - 1]):
            found.suffers.add(tokens[i - 1].stem)
    return found


def _add_deed(found: Deeds, text: Text, place: int | None) -> None:
    """Note the verb at a place, and that of a gerund after it: "I stop hitting"."""
    if place is None:
        return
    language = text.language
    tokens = text.without_articles
    verb = tokens[place]
    if tokens[place - 1].word in language.passive and language.is_past(verb):
        found.suffers.add(verb.stem)
        return
    after, beyond = [*tokens[place + 1 : place + 3], END, END][:2]
    is_passive = verb.word in language.passive and language.is_past(after)
    if is_passive and not language.may_be_content(beyond):  # "I get paid"
        found.suffers.add(after.stem)
        return
    found.acts.setdefault(verb.stem, after.stem)
    if beyond is not END and after.word.endswith(language.gerund):
        found.acts.setdefault(after.stem, "")


def _verb_after(subject: int, text: Text) -> int | None:
    """Where the verb of a subject stands; None where a clause of its own may start before it."""
    language = text.language
    tokens = text.without_articles
    start = subject + 1
    while start < len(tokens) and tokens[start].stem in language.joint_stems:  # "I in Canada send"
        start += 2
    near = range(start, min(start + _VERB, len(tokens)))
    place = next((i for i in near if language.may_be_content(tokens[i])), None)
    between: Sequence[Token] = tokens[start:place]
    if any(t.word in STOPS or t.word in language.parting for t in between):
        return None
    return place


def _subject_before(verb: int, text: Text) -> str:
    """The word before a verb and its auxiliaries; "" where something else stands between them."""
    language = text.language
    near = text.without_articles[max(0, verb - _VERB) : verb]
    for token in reversed(near):
        if token.word in language.somebody:
            return token.stem
        may_part = language.is_auxiliary(token) or token.word in language.negations
        if not may_part and token.word not in language.between:
            return token.stem if language.may_be_content(token) else ""
    return ""
