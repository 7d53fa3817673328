"""Rules over the small words that relate one thing to another."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Set

from semkv_guards.language import Language
from semkv_guards.pairs import Exchange, Pair, Tokens, View, triples
from semkv_guards.rules.rule import rule
from semkv_guards.text import END, STOPS, Text

_SMALL = 2  # one word of each text
_STRETCH = 2  # words between two that both have, but for auxiliaries and persons
_BOTH_ENDS = frozenset(("from", "for"))  # the senses of words for ways


@rule(
    reasons=("relation",),
    tables=("particles",),
    vetoes=(
        ("How do I set up an alarm?", "How do I set off an alarm?"),
        ("Can I adopt a dog?", "Can I adopt out a dog?"),
    ),
    allows=(("How do I look up a word?", "How do I look a word up?"),),
)
def particle(pair: Pair) -> str | None:
    """Another verb is meant by the word after it: "adopt" and "adopt out", "turn in" and "turn over"."""
    particles = pair.language.particles_of
    for mine, only, other, _ in pair.views:
        missing = {t.word for t in only}
        if not missing:
            continue
        for verb, word in itertools.pairwise(mine.tokens):
            if word.word not in missing or word.word not in particles.get(verb.stem, ()):
                continue
            following = itertools.pairwise((*other.tokens, END))
            theirs = [after for before, after in following if before.stem == verb.stem]
            if any(after.word == word.word or not pair.akin(word, after) for after in theirs):
                return "relation"
    return None


@rule(
    reasons=("relation",),
    tables=("ways",),
    vetoes=(
        ("When did he sail for India?", "When did he sail from India?"),
        ("Where do ships depart for Malta?", "Where do ships depart from Malta?"),
    ),
    allows=(("How do I get to Malta?", "How do I get into Malta?"),),
)
def other_way(pair: Pair) -> str | None:
    """It goes the other way, to or from the same: "leave for Rome", "leave from Rome"."""
    first = _ways(pair.a, pair.only[0])
    second = _ways(pair.b, pair.only[1]) if first else {}
    common = first.keys() & second.keys()
    return "relation" if any(first[where] != second[where] for where in common) else None


@rule(
    reasons=("relation",),
    tables=("relations", "symmetric"),
    vetoes=(
        ("Put the key in the box", "Put the key on the box"),
        ("Read the file and delete it", "Read the file or delete it"),
    ),
    allows=(("What is in the menu?", "What is on the menu?"),),
)
def relation(pair: Pair) -> str | None:
    """Another relation stands where all else is the same: "in the box", "on the box".

    A question word asks for more than the relation.
    """
    language = pair.language
    if [len(only) for only in pair.only] != [1, 1]:
        return None
    if not language.questions.keys().isdisjoint(pair.words):
        return None
    (x,), (y,) = pair.only
    stems = {x.stem, y.stem}
    are_relations = stems <= language.relation_stems
    is_choice = (x.word in language.choices) != (y.word in language.choices)
    if not are_relations and not (is_choice and stems <= language.symmetric_stems):
        return None
    return "relation" if not pair.akin(x, y) and pair.neighbours(x, y) else None


@rule(
    reasons=("relation",),
    tables=("kindred_relations",),
    vetoes=(
        (
            "What should I do until the ambulance arrives?",
            "What should I do when the ambulance arrives?",
        ),
        ("What was said of the king?", "What was said by the king?"),
        ("What happened during the war?", "What happened since the war?"),
    ),
    allows=(
        ("What do I do when it leaks?", "What do I do if it leaks?"),
        ("What do I pay until May?", "What do I pay till May?"),
    ),
)
def contrary_relation(pair: Pair) -> str | None:
    """Another small word says something else of the same: what to do "until" and "when" somebody comes, what is said
    "of" and "by" the king."""
    return "relation" if any(_is_contrary(one, pair) for one in pair.exchanges) else None


def _is_contrary(exchange: Exchange, pair: Pair) -> bool:
    """Whether small words alone stand in a place, and none of them may stand in for one of the other text."""
    kindred = _kindred(exchange, pair)
    if not kindred or not _are_small(exchange, pair.language, kindred):
        return False
    counting = _counting(exchange, pair.language, kindred)
    first = [t.word for t in exchange.first if t.word in counting]
    second = [t.word for t in exchange.second if t.word in counting]
    if not first or not second:
        return False
    return not any(x in kindred.get(y, ()) for x, y in itertools.product(first, second))


def _kindred(exchange: Exchange, pair: Pair) -> dict[str, set[str]]:
    """By small word, those that may stand in for it in a place."""
    if _forms(pair.a, exchange.after) == _forms(pair.b, exchange.after):
        return pair.language.kindred
    return pair.language.kindred_with_forms


def _are_small(exchange: Exchange, language: Language, kindred: Collection[str]) -> bool:
    """Whether no word in a place has content."""
    every = (*exchange.first, *exchange.second)
    return all(t.stem in language.stop_stems or t.word in kindred for t in every)


def _counting(exchange: Exchange, language: Language, kindred: Collection[str]) -> Set[str]:
    """The words that say something else of the same in a place."""
    is_inside = END.stem not in (exchange.before, exchange.after)
    small = frozenset(kindred) - language.questions.keys()
    if is_inside:
        small = language.small_words.union(kindred)
    if len(exchange.first) + len(exchange.second) <= _SMALL:
        return small
    is_short = all(_is_short(words, language) for words in (exchange.first, exchange.second))
    if is_inside and is_short and _tells_time(exchange, language):
        return small - language.relatives
    return frozenset()


def _tells_time(exchange: Exchange, language: Language) -> bool:
    every = (*exchange.first, *exchange.second)
    return not language.timing.isdisjoint(t.word for t in every)


def _is_short(words: Tokens, language: Language) -> bool:
    """Whether there are few words but for auxiliaries and persons."""
    counted = [t for t in words if not language.is_auxiliary(t) and t.word not in language.persons]
    return len(counted) <= _STRETCH


def _forms(text: Text, stem: str) -> set[str]:
    """The words of a stem that a text has."""
    return {t.word for t in text.tokens if t.stem == stem}


@rule(
    reasons=("relation",),
    tables=("stranded",),
    vetoes=(
        ("What do I need a passport for?", "What do I need for a passport?"),
        ("Who do I get a letter from?", "Who do I get from a letter?"),
    ),
    allows=(
        ("Which team does he play for?", "For which team does he play?"),
        ("What is it made of?", "Of what is it made?"),
    ),
)
def moved_relation(pair: Pair) -> str | None:
    """A small word stands before another noun, or at the end of its clause, and all else is the same."""
    auxiliaries = pair.language.auxiliaries | pair.language.joint_stems
    if any(t.stem not in auxiliaries for only in pair.only for t in only):
        return None
    first = _followers(pair.a)
    second = _followers(pair.b)
    for word in first.keys() & second.keys():
        here, there = first[word], second[word]
        if END.stem in (here | there) and here.isdisjoint(there):
            return "relation"
    return None


def _followers(text: Text) -> dict[str, set[str]]:
    """By a small word that may be stranded, what stands behind it; nothing where that is a question word."""
    language = text.language
    found: dict[str, set[str]] = {}
    for token, after in itertools.pairwise((*text.without_articles, END)):
        if token.word in language.stranded and after.word not in language.questions:
            found.setdefault(token.word, set()).add(END.stem if after.word in STOPS else after.stem)
    return found


@rule(
    reasons=("relation",),
    tables=("recipients", "returning"),
    vetoes=(
        ("Do you sell to companies?", "Do you sell companies?"),
        ("Has my order been sent?", "Has my order been sent back?"),
    ),
    allows=(
        ("How do I learn to swim?", "How do I learn swimming?"),
        ("How do I restore a backup?", "How do I restore from a backup?"),
    ),
)
def added_relation(pair: Pair) -> str | None:
    """A small word stands behind a verb in one text only, and all else is the same: "sell to companies"."""
    auxiliaries = pair.language.auxiliaries
    first, second = (sum(t.stem in auxiliaries for t in only) for only in pair.only)
    is_one = len(pair.only[0]) + len(pair.only[1]) == first + second + 1
    if not is_one or first != second:
        return None
    return "relation" if any(_adds_relation(view) for view in pair.views) else None


def _adds_relation(view: View) -> bool:
    """Whether a text has such a word between two that stand side by side in the other in the same form."""
    language = view.text.language
    following = (END, *view.other.without_articles, END)
    beside = {(x.stem, y.word) for x, y in itertools.pairwise(following)}
    own = {t.word for t in view.only}
    for before, token, after in triples((END, *view.text.without_articles, END)):
        if token.word not in own or (before.stem, after.word) not in beside:
            continue
        if (
            token.word in language.recipients
            and language.may_be_content(before)
            and not before.name
        ):
            return after.word not in STOPS
        if token.word in language.returning:
            return after.word in STOPS
    return False


@rule(
    reasons=("word order",),
    tables=("relations", "symmetric"),
    vetoes=(
        ("Can I leave my coat in the museum?", "Can I leave the museum with my coat?"),
        ("Is there milk in the coffee?", "Is there coffee with the milk?"),
    ),
    allows=(
        ("What is the price of a ticket?", "What is a ticket's price?"),
        ("How do I get from Rome to Oslo?", "How do I get to Oslo from Rome?"),
    ),
)
def crossed_nouns(pair: Pair) -> str | None:
    """Two words of content have changed places around another small word.

    "The coat in the museum", "the museum with the coat"."""
    first = _tied(pair.a)
    second = _tied(pair.b)
    for (x, y), words in first.items():
        others = second.get((y, x))
        if others and words.isdisjoint(others):
            return "word order"
    return None


def _tied(text: Text) -> dict[tuple[str, str], set[str]]:
    """By two words of content the small words between them, but for those that tell a way: "from Rome to Oslo"."""
    language = text.language
    found: dict[tuple[str, str], set[str]] = {}
    others = (language.symmetric, language.ways.keys(), language.tenses.keys(), {language.owns})
    ties = language.relations.difference(*others)
    for x, tie, y in triples(text.without_articles):
        if tie.word in ties and language.may_be_content(x) and language.may_be_content(y):
            found.setdefault((x.stem, y.stem), set()).add(tie.word)
    return found


@rule(
    reasons=("relation",),
    tables=("ways",),
    vetoes=(
        (
            "Can I switch from another provider to you?",
            "Can I switch from you to another provider?",
        ),
        (
            "How do I move from another plan to yours?",
            "How do I move from your plan to another?",
        ),
    ),
    allows=(
        (
            "Can I switch from another provider to you?",
            "Can I switch to you from another provider?",
        ),
    ),
)
def exchanged_ends(pair: Pair) -> str | None:
    """Start and end of a way are exchanged: "from another provider to you", "from you to another provider"."""
    ends = [_ends(text) for text in (pair.a, pair.b)]
    if any(found.keys() != _BOTH_ENDS for found in ends):
        return None
    first, other_first = (found["from"] for found in ends)
    second, other_second = (found["for"] for found in ends)
    crossed = [first & other_second, second & other_first]
    kept = (first & other_first) | (second & other_second)
    return "relation" if all(same - kept for same in crossed) else None


def _ends(text: Text) -> dict[str, set[str]]:
    """By the way that it goes, what is named behind the word for it: up to the next preposition or sign."""
    language = text.language
    found: dict[str, set[str]] = {}
    if len({language.ways[word] for word in text.words & language.ways.keys()}) < len(_BOTH_ENDS):
        return found
    way = ""
    for token in text.tokens:
        if token.word in language.ways:
            way = language.ways[token.word]
        elif token.word in STOPS or token.word in language.relations:
            way = ""
        elif way:
            person = language.persons.get(token.word)
            found.setdefault(way, set()).add(person or token.stem)
    return found


def _ways(text: Text, only: Tokens) -> dict[str, str]:
    """Which way it goes from what, by the words for it that one text alone has; "" is the end of a clause."""
    ways = text.language.ways
    own = {t.word for t in only if t.word in ways}
    if not own:
        return {}
    following = itertools.pairwise((*text.without_articles, END))
    return {
        "" if after.word in STOPS else after.stem: ways[word.word]
        for word, after in following
        if word.word in own
    }
