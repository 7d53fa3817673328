"""Guards over what is said: denials, opposites, what a question asks for, time, persons, relations, other words."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from semkv.guards.language import Language, Token
from semkv.guards.order import agreeing
from semkv.guards.pairs import MOST, Pair, Tokens
from semkv.guards.text import END, STOPS, Text

_NAMED = 4  # letters of a stem that a prefix may turn round
_LOOSE = frozenset(("manner", "place"))  # "how can I buy" and "where can I buy" ask for much the same
_VERB = 5  # words of a question among which its verb stands
_QUESTION = 40  # tokens in which a question is looked for
_PLACES = 3  # words that stand against one each
_REACH = 4  # words within which a verb stands behind its auxiliary
_BLOCK = 4  # words that stand against others in one place
_TELLING = 14  # words of a text among which one tells its language
_KNOWN = 0.6  # share of the words that are known where none tells it


def negation(p: Pair) -> str | None:
    """Another number of denials, or one text denies with a verb what the other says."""
    (low_a, verbs_a), (low_b, verbs_b) = (_denials(text, only, other, p.language) for text, only, other, _ in p.views)
    if p.denied:
        return None
    if low_a > low_b + verbs_b or low_b > low_a + verbs_a:
        return "negation"
    content_a, content_b = p.content
    one_sided = bool(verbs_a) != bool(verbs_b) and not (content_b if verbs_a else content_a)
    return "negation" if low_a == low_b and one_sided else None


def _denials(text: Text, only: Tokens, other: Text, language: Language) -> tuple[int, int]:
    """How often a text denies, and how many verbs that only it has may deny as well; a "non-toxic" that is "nontoxic"
    in the other does not."""
    after = itertools.pairwise((*text.tokens, END))
    sure = sum(x.word in language.negations and x.word + y.word not in other.words for x, y in after)
    return sure, sum(t.stem in language.denying_verbs for t in only)


def groups(p: Pair) -> str | None:
    """Words whose presence must agree, sides and colors: one more or less tells one object from another."""
    if p.language.grouped.isdisjoint(p.words):
        return None
    for name, group in p.language.groups.items():
        first, second = (sorted([group[t.word] for t in text.tokens if t.word in group]) for text in (p.a, p.b))
        if first != second:
            return name
    return None


def choice(p: Pair) -> str | None:
    """A choice against a yes or no: "is it large or small?" and "is it large?"."""
    first, second = (p.language.choices.isdisjoint(text.words) for text in (p.a, p.b))
    return "choice" if first != second and all(_yes_or_no(text, p.language) for text in (p.a, p.b)) else None


def _yes_or_no(text: Text, language: Language) -> bool:
    """Whether a text starts with an auxiliary: it may be answered by yes or no, or offer a choice."""
    first = text.tokens[0].word if text.tokens else ""
    return first in language.tenses or first in language.modals


def _closed(text: Text, language: Language) -> bool:
    """Whether yes or no is all that a text asks for."""
    return (
        _yes_or_no(text, language)
        and text.words.isdisjoint(language.choices)
        and text.words.isdisjoint(language.questions)
    )


def opposites(p: Pair) -> str | None:
    """A word and its opposite, by table, degree or prefix. Where one text has both ("pros and cons") they prove
    nothing."""
    only_a, only_b = p.only
    if not only_a or not only_b or p.converse or p.denied:
        return None
    opposed = p.language.opposed
    mine, other = {t.stem for t in only_a}, {t.stem for t in only_b}
    reasons = {
        opposed[word][opposite]
        for word in mine
        if word in opposed and not other.isdisjoint(opposed[word])
        for opposite in (opposed[word].keys() & other) - _measuring(p)
        if mine.isdisjoint(opposed[word]) and other.isdisjoint(opposed[opposite]) and word not in _measuring(p)
    }
    if reasons:
        return min(reasons)
    if not p.language.lessening.isdisjoint(p.words) and any(
        _lessened(only, theirs, text, p.language) for text, only, _, theirs in p.views
    ):
        return "comparison"
    if min(len(only_a), len(only_b)) > MOST:
        return None
    if not _compared(only_a, p.language).isdisjoint(_compared(only_b, p.language, other=True)):
        return "comparison"
    alike = ((x.word, y.word) for x in only_a for y in only_b if x.word[-3:] == y.word[-3:])
    return "antonym" if any(_contrary(x, y, p.language) for x, y in alike) else None


def _measuring(p: Pair) -> frozenset[str]:
    """Stems of quantities that all have a unit, and a guard of their own: "one year", "12 months"."""
    a, b = p.a.quantities, p.b.quantities
    united = all(q.dimension for q in (*a.found, *b.found))
    return p.language.stems((a.words | b.words) - p.language.ordinals) if united else frozenset()


def _lessened(mine: Tokens, other: Tokens, text: Text, language: Language) -> bool:
    """Whether "less dense" or "as dense as" stands against "denser", "as rare as" against "more rare than", or "as much
    as" against "more than"."""
    words = [t.word for t in mine if t.word in language.lessening]
    even = len(set(words)) < len(words) and any(t.word in language.pivots or t.word in language.bounds for t in other)
    if even and all(q.loose for q in text.quantities.found) and language.negations.isdisjoint(text.words):
        return True
    if not words:
        return False
    bases = [t.word.removesuffix(ending) for t in other for ending in language.degrees if t.word.endswith(ending)]
    return any(base in text.stems or language.stem(base) in text.stems for base in bases)


def _compared(only: Tokens, language: Language, *, other: bool = False) -> set[str]:
    """The words that end like a comparison, or what they would be with the ``other`` ending: "hotter", "hottest"."""
    turned = language.degrees[::-1] if other else language.degrees
    return {
        t.word.removesuffix(ending) + instead
        for t in only
        if t.word.endswith(language.degrees)
        for ending, instead in zip(language.degrees, turned, strict=True)
        if t.word.endswith(ending)
    }


def _contrary(x: str, y: str, language: Language) -> bool:
    """Whether two words are one stem with contrary prefixes: "encode" and "decode"."""
    if min(len(x), len(y)) < _NAMED:
        return False
    return any(
        a.startswith(one)
        and b.startswith(other)
        and a[len(one) :] == b[len(other) :]
        and len(a) - len(one) >= _NAMED - 1
        for one, other in language.contraries
        for a, b in ((x, y), (y, x))
    )


def form(p: Pair) -> str | None:
    """The same words but for auxiliaries, in another time or mode; or any other form of a word that is itself asked
    about: its spelling, letters, sound, grammar, translation."""
    language = p.language
    mentioned = _mentions(p.a, language) or _mentions(p.b, language)
    said = [[t.stem for t in text.spine if t.stem not in language.auxiliaries] for text in (p.a, p.b)]
    if said[0] == said[1]:
        if _past(p.a, language) != _past(p.b, language):
            return "tense"
        if _may(p.a, language) != _may(p.b, language) and language.questions.keys().isdisjoint(p.words):
            return "modality"
    first, second = (("", "", *[t.word for t in text.spine], "") for text in (p.a, p.b))
    if [t.stem for t in p.a.spine] == [t.stem for t in p.b.spine]:
        for i, (x, y) in enumerate(zip(p.a.spine, p.b.spine, strict=True)):
            polite = x.word in language.modals and first[i + 3] in language.persons  # "can I get", "could I get"
            helped = not language.helpers.isdisjoint((*first[i : i + 2], *second[i : i + 2]))  # "did he lived"
            if language.is_past(x) != language.is_past(y) and (mentioned or not (polite or helped)):
                return "tense"
    if not mentioned:
        return None
    mine, other = ([t for t in x.tokens if t.word not in y.words] for x, y in ((p.a, p.b), (p.b, p.a)))
    function, aside = language.function, language.aside
    for x, y in itertools.product(mine[:MOST], other[:MOST]):
        quiet = aside if x.stem == y.stem else aside | language.quiet
        if x.word not in function and y.word not in function and quiet.isdisjoint((x.stem, y.stem)) and p.akin(x, y):
            return "substitution"
    return None


def _past(text: Text, language: Language) -> bool:
    """Whether a text is about what was or has been, by its auxiliaries and by verbs that have none before them: "won",
    not "is won"."""
    tokens, auxiliaries = text.spine, language.auxiliaries
    for i, token in enumerate(tokens):
        if token.stem not in auxiliaries:
            found = language.is_past(token) and not any(t.stem in auxiliaries for t in tokens[max(0, i - _REACH) : i])
        elif (kind := language.tenses.get(token.word)) == "perfect":
            found = any(language.is_past(t) or t.stem in language.being for t in tokens[i + 1 : i + _REACH])
        else:
            found = kind == "past"
        if found:
            return True
    return False


def _may(text: Text, language: Language) -> bool:
    """Whether a text speaks of what may be; "can you" is no more than polite."""
    modal = _modal(text, language)
    return bool(modal) and language.modals[modal] == next(iter(language.modals.values()))


def _mentions(text: Text, language: Language) -> bool:
    """Whether a text speaks of words rather than things."""
    asks, says, counts = (
        not table.isdisjoint(text.words) for table in (language.mentions, language.sayings, language.counting)
    )
    if asks or (says and not language.tongues.isdisjoint(text.words)):
        return True
    return counts and any(len(t.word) == 1 and t.word.isalpha() and t.word not in language.alone for t in text.tokens)


def question(p: Pair) -> str | None:
    """Another question word: who, when, where, why, how, how many; or "what size" against "what color"."""
    language = p.language
    first, second = _asked(p.a, language), _asked(p.b, language)
    if first and second and not first & second and not (first | second == _LOOSE and _own(p.a, p) and _own(p.b, p)):
        return "question word"
    if bool(first) != bool(second) and (first | second) != {"manner"} and _closed(p.b if first else p.a, language):
        return "question word"
    one, other = _named(p.a, language), _named(p.b, language)
    if (one and _measured(second, p.b, one, language)) or (other and _measured(first, p.a, other, language)):
        return "question word"
    if one is None or other is None or p.akin(one, other) or one.stem in p.b.stems or other.stem in p.a.stems:
        return None
    return "question word"


def _asked(text: Text, language: Language) -> frozenset[str]:
    """What a text asks for; empty where that is open."""
    if language.questions.keys().isdisjoint(text.words):
        return frozenset()
    tokens = text.tokens[:_QUESTION]
    known, leads = language.questions, language.leads
    i = next((i for i, t in enumerate(tokens) if t.word in known or t.word not in leads), len(tokens))
    words = [t.word for t in tokens[i : i + 3]]
    kind = known.get(words[0]) if words else None
    if not kind:
        return frozenset()
    after, beyond = (*words[1:], "", "")[:2]
    much = after in language.how_much
    adjective = after not in language.function and beyond in language.function  # "how old is", not "how children learn"
    if words[0] != language.how or not (much or adjective):
        return frozenset((kind,))
    stem = tokens[i + 1].stem
    found = {f"{kind} {c}" for c in language.classes.get(stem, (stem,))}
    return frozenset(found if much else found | {kind})


def _own(text: Text, p: Pair) -> bool:
    """Whether somebody asks for himself."""
    return any(p.language.persons[word] not in p.language.third for word in text.words & p.language.persons.keys())


def _measured(asked: frozenset[str], text: Text, named: Token, language: Language) -> bool:
    """Whether one asks "how many" and the other for a noun that does not measure that: "which birds"."""
    kinds = {kind.split()[1] for kind in asked if " " in kind}
    if not kinds or language.how not in text.words or text.words.isdisjoint(language.how_much):
        return False
    return kinds.isdisjoint(map(str, language.classes.get(named.stem, ()))) and named.stem not in kinds


def _named(text: Text, language: Language) -> Token | None:
    """The noun that a "what" or "which" asks for."""
    for token, after in itertools.pairwise(text.tokens):
        if token.word in language.open_questions:
            return None if after.word in language.function or after.word in language.open else after
    return None


def modality(p: Pair) -> str | None:
    """What may, should or must be; between neighbours only where no question word asks for more than yes or no."""
    bound = {_bound(p.a, p.language), _bound(p.b, p.language)}
    if len(bound) == 2 and "" not in bound:
        return "modality"
    first, second = _modal(p.a, p.language), _modal(p.b, p.language)
    if not (first and second) and _closed(p.a, p.language) and _closed(p.b, p.language):
        moods = {_mood(p.a, first, p.language), _mood(p.b, second, p.language)}
        return "modality" if len(moods) == 2 and moods.isdisjoint(("", *p.language.mild)) else None
    if not first or not second or first == second:
        return None
    if p.language.modals[first] == p.language.modals[second]:
        return None
    asked = _asked(p.a, p.language) | _asked(p.b, p.language)
    near = {first, second} <= p.language.advice and not p.language.questions.keys().isdisjoint(p.words)
    strength = list(dict.fromkeys(p.language.modals.values()))
    x, y = (strength.index(p.language.modals[word]) for word in (first, second))
    sharp = ("person",) if abs(x - y) == 1 else ("person", "time")  # "when can I" may be "when should I"
    return None if near and asked.isdisjoint(sharp) else "modality"


def _modal(text: Text, language: Language) -> str:
    """The first auxiliary, but for a polite "can you"."""
    i = next((i for i, t in enumerate(text.tokens) if t.word in language.modals and not t.name), -1)
    polite = i == 0 and len(text.tokens) > 1 and text.tokens[1].word in language.hearer
    return "" if i < 0 or polite else text.tokens[i].word


def _mood(text: Text, modal: str, language: Language) -> str:
    """What the first auxiliary says, or else the first other word that says what may or must be: "is it allowed"."""
    if modal:
        return language.modals[modal]
    return next((language.moods[t.word] for t in text.tokens if t.word in language.moods), "")


def _bound(text: Text, language: Language) -> str:
    """Whether a text forbids ("must not", "cannot") or excuses ("need not", "not have to")."""
    if language.bound.isdisjoint(text.words):
        return ""
    for before, token, after in zip((END, *text.tokens), text.tokens, (*text.tokens[1:], END), strict=False):
        if token.word in language.bindings:
            return language.bindings[token.word]
        if token.word in language.bound and before.word in language.negations:
            return "excuses"
        if token.word in language.bound and after.word in language.negations:
            return "forbids" if token.word in language.modals else "excuses"
    return ""


def tense(p: Pair) -> str | None:
    """What was against what will be, or against what is where nothing else differs or yes or no is asked for."""
    tenses = p.language.tenses
    first, second = ({tenses[t.word] for t in text.tokens if t.word in tenses} for text in (p.a, p.b))
    if first == second:
        return None
    for mine, other in ((first, second), (second, first)):
        if "future" in mine - other and other & {"past", "perfect"} and not mine & {"past", "perfect"}:
            return "tense"
    if not (_closed(p.a, p.language) and _closed(p.b, p.language)):
        return None
    times = {tenses.get(text.tokens[0].word, "") for text in (p.a, p.b)}
    return "tense" if times == {"past", "present"} else None


def person(p: Pair) -> str | None:
    """Another person: "he" and "she", "I" and "they"; "my" and "your" where nothing else says who speaks; or "I" and
    "you" in each other's place."""
    persons, third = p.language.persons, p.language.third
    said = [[persons[t.word] for t in text.tokens if t.word in persons] for text in (p.a, p.b)]
    first, second = set(said[0]), set(said[1])
    if said[0] == said[1] or not first or not second:
        return None
    if first == second or max(len(first & third), len(second & third)) > 1:
        return "person" if sorted(said[0]) == sorted(said[1]) else None
    if first & third != second & third and ((first & third and second & third) or first.isdisjoint(second)):
        return "person"
    mine, yours = ({persons[word] for word in text.words & p.language.owners} for text in (p.a, p.b))
    others = (p.a.words | p.b.words) & persons.keys() - p.language.owners
    return "person" if mine and yours and not mine & yours and not others else None


def particle(p: Pair) -> str | None:
    """Another verb by the word after it: "adopt" and "adopt out", "turn in" and "turn over"."""
    if p.language.after.keys().isdisjoint(p.a.stems):
        return None
    return "relation" if any(_another_verb(text, only, other, p) for text, only, other, _ in p.views if only) else None


def _another_verb(mine: Text, only: Tokens, other: Text, p: Pair) -> bool:
    """Whether a verb that both texts have goes with a particle that the other text does not have."""
    after, missing = p.language.after, {t.word for t in only}
    tokens, theirs = (*mine.tokens, END), (*other.tokens, END)
    return any(
        x.stem in after
        and y.word in missing
        and y.word in after[x.stem]
        and z.word not in p.language.spots
        and any(s.stem == x.stem and (t.word == y.word or not p.akin(y, t)) for s, t in itertools.pairwise(theirs))
        for x, y, z in zip(tokens, tokens[1:], tokens[2:], strict=False)
    )


def relation(p: Pair) -> str | None:
    """Another relation where all else is the same and no question word asks for more: "in the box", "on the box"; or
    the other way to or from the same: "leave for Rome", "leave from Rome"."""
    only_a, only_b = p.only
    first = _ways(p.a, only_a, p.language)
    second = _ways(p.b, only_b, p.language) if first else {}
    if any(way != second.get(where, way) for where, way in first.items()):
        return "relation"
    if len(only_a) != 1 or len(only_b) != 1 or not p.language.questions.keys().isdisjoint(p.words):
        return None
    x, y, choices = only_a[0], only_b[0], p.language.choices
    tied = {x.stem, y.stem} <= p.language.ties
    joined = {x.stem, y.stem} <= p.language.joined and (x.word in choices) != (y.word in choices)
    return "relation" if (tied or joined) and not p.akin(x, y) and p.neighbours(x, y) else None


def _ways(text: Text, only: Tokens, language: Language) -> dict[str, str]:
    """Which way it goes from what, by the words for it that one text alone has; "" is the end of a clause."""
    own = {t.word for t in only if t.word in language.ways}
    return {
        "" if y.word in STOPS else y.stem: language.ways[x.word]
        for x, y in (itertools.pairwise((*text.spine, END)) if own else ())
        if x.word in own
    }


def nation(p: Pair) -> str | None:
    """A country for what is of it, but before a noun; or another word for a country: "cook turkey", "cook Turkish"."""
    if p.language.natives.isdisjoint(p.words):
        return None
    return "entity" if any(_another_nation(text, other, p.language) for text, _, other, _ in p.views) else None


def _another_nation(mine: Text, other: Text, language: Language) -> bool:
    named = (mine.words & language.natives) - other.words - language.peoples
    for x, after in itertools.pairwise((*mine.tokens, END)) if named else ():
        countries = [t for t in other.tokens if t.stem == x.stem and t.word not in language.natives]
        if x.word in named and countries:
            noun = after.word[0].isalpha() and (after.word in language.fillers or after.word not in language.function)
            if not noun or not all(t.name or t.word not in language.twofold for t in countries):
                return True
    return False


def substitution(p: Pair) -> str | None:
    """A name where the other text has another or none; or a content word in the place of another that is no kin."""
    only_a, only_b = p.only
    if not only_a and not only_b:
        return None
    if min(len(only_a), len(only_b)) > MOST:
        return "substitution"
    explained = p.converse | p.denied
    left, right = ([t for t in own if t.stem not in explained] for own in p.unmatched)
    names = [any(t.name for t in own) for own in (left, right)]
    if all(names) or (len(left) + len(right) == 1 and any(names)):
        return "entity"
    if not only_a or not only_b:
        return None
    # Content words that the other text has as well, but not as often, stand for others too.
    mine = left + [t for t in p.content[0] if t.stem in p.b.stems]
    other = right + [t for t in p.content[1] if t.stem in p.a.stems]
    both = mine and other
    if bool(mine) != bool(other):  # "a work visa" and "a student visa"
        attributes = p.language.attributes | p.language.speaker
        mine, other = (
            own or [t for t in only if t.word in attributes] for own, only in ((mine, only_a), (other, only_b))
        )
    alone = len({t.stem for t in only_a}) == len({t.stem for t in only_b}) == 1
    near = 1 if left and right else 2
    pairs = set(zip(mine, other, strict=False)) if len(mine) == len(other) else set()
    apart = 0 < len(pairs) <= _PLACES and not any(p.akin(x, y) for x, y in pairs)
    if apart and ((alone and both) or all(p.neighbours(x, y) >= near for x, y in pairs)):
        return "entity" if any(t.name for t in (*mine, *other)) else "substitution"
    return "substitution" if left and right and _in_one_place(p) else None


def _in_one_place(p: Pair) -> bool:
    """Whether a few words in one place, and nothing else, stand against a few others: "wax", "candle oil"."""
    if sum(map(len, p.only)) > _BLOCK:
        return False
    first, second = ([t.stem for t in text.spine if t.word not in STOPS] for text in (p.a, p.b))
    low = agreeing(first, second)
    high = agreeing(first[low:][::-1], second[low:][::-1])
    return low + high > 1 and len(first) + len(second) - 2 * (low + high) <= _BLOCK


def unknown_language(p: Pair) -> str | None:
    """Other words, or in another order, where a text is not in the language whose words the guards know."""
    if not p.language.telling or knows(p):
        return None
    first, second = ([t.word for t in text.tokens if t.word not in STOPS] for text in (p.a, p.b))
    return "language" if first != second else None


def knows(p: Pair) -> bool:
    """Whether two texts are in the pair's language; one is enough where they differ in words without content.

    A text is where a frequent word tells so, or where most words are known and all in which it differs.
    """
    told = [_told(text, only, p.language) for text, only, _, _ in p.views]
    silent = p.language.silent
    return all(told) or (any(told) and all(t.word in silent for only in p.only for t in only))


def _told(text: Text, only: Iterable[Token], language: Language) -> bool:
    if len(text.tokens) <= _TELLING and not language.telling.isdisjoint(text.words):
        return True
    words = [t for t in text.tokens if t.word[0].isalpha()]
    if sum([t.word in language.telling for t in words]) >= len(words) / _TELLING:
        return True
    known = [t.stem in language.known for t in words if not t.name]
    return (
        any(known)
        and sum(known) >= _KNOWN * len(known)
        and all(t.name or not t.word[0].isalpha() or t.stem in language.known for t in only)
    )
