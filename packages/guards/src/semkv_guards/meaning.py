"""Guards over what is said: denials, opposites, what a question asks for, time, persons, relations, other words."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from semkv_guards.language import Pairs, Token
from semkv_guards.pairs import MOST, Pair, Tokens, agreeing, triples
from semkv_guards.text import END, STOPS, Text

_LOOSE = frozenset(
    ("manner", "place")
)  # "how can I buy" and "where can I buy" ask for much the same
_QUESTION = 40  # tokens in which a question is looked for
_PLACES = 3  # words that stand against one each
_REACH = 4  # words within which a verb stands behind its auxiliary
_BLOCK = 4  # words that stand against others in one place
_BARE = 4  # letters that a word keeps without its prefix
_TELLING = 14  # words of a text among which one tells its language
_KNOWN = 0.6  # share of the words that are known where none tells it


def negation(p: Pair) -> str | None:
    """Another number of denials, or one text denies with a verb what the other says."""
    (low_a, verbs_a), (low_b, verbs_b) = (_denials(*view[:3]) for view in p.views)
    if low_a > low_b + verbs_b or low_b > low_a + verbs_a:
        return "negation"
    content_a, content_b = p.content
    one_sided = bool(verbs_a) != bool(verbs_b) and not (content_b if verbs_a else content_a)
    return "negation" if low_a == low_b and one_sided else None


def _denials(text: Text, only: Tokens, other: Text) -> tuple[int, int]:
    """How often a text denies, and how many verbs that only it has may deny as well; a "non-toxic" that is "nontoxic"
    in the other does not."""
    negations = text.language.negations
    after = itertools.pairwise((*text.tokens, END))
    sure = sum(x.word in negations and x.word + y.word not in other.words for x, y in after)
    return sure, sum(t.stem in text.language.denial_stems for t in only)


def groups(p: Pair) -> str | None:
    """Words whose presence must agree, sides and colors: one more or less tells one object from another."""
    for name, group in p.language.groups.items():
        first, second = (
            sorted([group[t.word] for t in text.tokens if t.word in group]) for text in (p.a, p.b)
        )
        if first != second:
            return name
    return None


def choice(p: Pair) -> str | None:
    """A choice against a yes or no: "is it large or small?" and "is it large?"."""
    first, second = (p.language.choices.isdisjoint(text.words) for text in (p.a, p.b))
    return "choice" if first != second and _yes_or_no(p.a) and _yes_or_no(p.b) else None


def _yes_or_no(text: Text) -> bool:
    """Whether a text starts with an auxiliary: it may be answered by yes or no, or offer a choice."""
    first = text.tokens[0].word if text.tokens else ""
    return first in text.language.tenses or first in text.language.modals


def _closed(text: Text) -> bool:
    """Whether yes or no is all that a text asks for."""
    language = text.language
    return (
        _yes_or_no(text)
        and text.words.isdisjoint(language.choices)
        and text.words.isdisjoint(language.questions)
    )


def opposites(p: Pair) -> str | None:
    """A word and its opposite, by table, degree or prefix. Where one text has both ("pros and cons") they prove
    nothing."""
    only_a, only_b = p.only
    if p.converse:
        return None
    measured: frozenset[str] = frozenset()
    quantities = [text.quantities for text in (p.a, p.b)]
    if all(q.dimension for each in quantities for q in each.found):  # "one year", "12 months"
        words = quantities[0].words | quantities[1].words
        measured = p.language.stems(words - p.language.ordinals)
    opposed = p.language.opposed
    mine, other = ({t.stem for t in only} for only in p.only)
    reasons = {
        opposed[word][opposite]
        for word in mine
        if word in opposed and word not in measured
        for opposite in (opposed[word].keys() & other) - measured
        if mine.isdisjoint(opposed[word]) and other.isdisjoint(opposed[opposite])
    }
    if reasons:
        return min(reasons)
    if any(_lessened(text, only, others) for text, only, _, others in p.views):
        return "comparison"
    if min(len(only_a), len(only_b)) > MOST:
        return None
    first, second = ({t.word for t in only} for only in p.only)
    for reason, endings in (("comparison", p.language.degrees), ("antonym", p.language.endings)):
        if any(
            not _ended(mine, endings).isdisjoint(other)
            for mine, other in ((first, second), (second, first))
        ):
            return reason
    alike = ((x, y) for x in first for y in second if x[-3:] == y[-3:])
    return "antonym" if any(_contrary(x, y, p) for x, y in alike) else None


def _lessened(text: Text, mine: Tokens, other: Tokens) -> bool:
    """Whether "less dense" or "as dense as" stands against "denser", "as rare as" against "more rare than", or "as much
    as" against "more than"."""
    language = text.language
    words = [t.word for t in mine if t.word in language.lessening]
    if not words:
        return False
    even = len(set(words)) < len(words) and any(
        t.word in language.pivots or t.word in language.bounds for t in other
    )
    if (
        even
        and all(q.loose for q in text.quantities.found)
        and language.negations.isdisjoint(text.words)
    ):
        return True
    endings = itertools.chain.from_iterable(language.degrees)
    bases = [
        t.word.removesuffix(ending) for ending in endings for t in other if t.word.endswith(ending)
    ]
    return any(base in text.stems or language.stem(base) in text.stems for base in bases)


def _ended(words: Iterable[str], endings: Pairs) -> set[str]:
    """The words with another ending: "hottest" of "hotter", "payee" of "payer"."""
    return {
        word.removesuffix(one) + other
        for one, other in endings
        for word in words
        if word.endswith(one)
    }


def _contrary(x: str, y: str, p: Pair) -> bool:
    """Whether two words differ in a prefix that turns their meaning: "encode" and "decode"."""
    first, second = (
        {
            word.removeprefix(prefix)
            for prefix in ("", *p.language.contraries)
            if word.startswith(prefix)
        }
        for word in (x, y)
    )
    return any(len(rest) >= _BARE for rest in first & second)


def form(p: Pair) -> str | None:
    """The same words but for auxiliaries, in another time or mode; or any other form of a word that is itself asked
    about: its spelling, letters, sound, grammar, translation."""
    language = p.language
    mentioned = _mentions(p.a) or _mentions(p.b)
    said = [
        [t.stem for t in text.without_articles if t.stem not in language.auxiliaries]
        for text in (p.a, p.b)
    ]
    if said[0] == said[1]:
        if _past(p.a) != _past(p.b):
            return "tense"
        if _may(p.a) != _may(p.b) and language.questions.keys().isdisjoint(p.words):
            return "modality"
    if [t.stem for t in p.a.without_articles] == [t.stem for t in p.b.without_articles]:
        first, second = (
            ("", "", *[t.word for t in text.without_articles], "") for text in (p.a, p.b)
        )
        for i, (x, y) in enumerate(zip(p.a.without_articles, p.b.without_articles, strict=True)):
            polite = (
                x.word in language.modals and first[i + 3] in language.persons
            )  # "can I get", "could I get"
            helped = not language.helpers.isdisjoint(
                (*first[i : i + 2], *second[i : i + 2])
            )  # "did he lived"
            if language.is_past(x) != language.is_past(y) and (mentioned or not (polite or helped)):
                return "tense"
    if not mentioned:
        return None
    mine, other = (
        [t for t in x.tokens if t.word not in y.words] for x, y in ((p.a, p.b), (p.b, p.a))
    )
    for x, y in itertools.product(mine[:MOST], other[:MOST]):
        quiet = (
            language.mention_stems
            if x.stem == y.stem
            else language.mention_stems | language.stop_stems
        )
        if (
            language.function.isdisjoint((x.word, y.word))
            and quiet.isdisjoint((x.stem, y.stem))
            and p.akin(x, y)
        ):
            return "substitution"
    return None


def _past(text: Text) -> bool:
    """Whether a text is about what was or has been, by its auxiliaries and by verbs that have none before them: "won",
    not "is won"."""
    tokens, language = text.without_articles, text.language
    for i, token in enumerate(tokens):
        if token.stem not in language.auxiliaries:
            before = tokens[max(0, i - _REACH) : i]
            found = language.is_past(token) and not any(
                t.stem in language.auxiliaries for t in before
            )
        elif (kind := language.tenses.get(token.word)) == "perfect":
            found = any(
                language.is_past(t) or t.stem in language.being for t in tokens[i + 1 : i + _REACH]
            )
        else:
            found = kind == "past"
        if found:
            return True
    return False


def _may(text: Text) -> bool:
    """Whether a text speaks of what may be; "can you" is no more than polite."""
    return _mood(text) == next(iter(text.language.modals.values()), None)


def _mentions(text: Text) -> bool:
    """Whether a text speaks of words rather than things."""
    language = text.language
    if not language.mentions.isdisjoint(text.words):
        return True
    if language.counting.isdisjoint(text.words):
        return False
    return any(
        len(t.word) == 1 and t.word.isalpha() and t.word not in language.alone for t in text.tokens
    )


def question(p: Pair) -> str | None:
    """Another question word: who, when, where, why, how, how many; or "what size" against "what color"."""
    first, second = _asked(p.a), _asked(p.b)
    if [len(only) for only in p.only] == [1, 1] and _another_question(p):
        return "question word"
    if (
        first
        and second
        and not first & second
        and not (first | second == _LOOSE and _own(p.a) and _own(p.b))
    ):
        return "question word"
    if (
        bool(first) != bool(second)
        and (first | second) != {"manner"}
        and _closed(p.b if first else p.a)
    ):
        return "question word"
    one, other = _named(p.a), _named(p.b)
    if one and other:
        return (
            None
            if p.akin(one, other) or one.stem in p.b.stems or other.stem in p.a.stems
            else "question word"
        )
    named, asked = (one, second) if one else (other, first)
    kinds = (
        {kind.split()[1] for kind in asked if " " in kind} if named else ()
    )  # "which birds", "how many birds"
    classes = p.language.classes.get(named.stem, ()) if named else ()
    return "question word" if kinds and kinds.isdisjoint(map(str, classes)) else None


def _another_question(p: Pair) -> bool:
    """Whether nothing but the question word differs: "what do pandas eat", "when do pandas eat"; not "what is the
    weather in Rome", "how is the weather in Rome"; "what is the best time", "when is the best time"."""
    (x,), (y,) = p.only
    language = p.language
    kinds = {language.questions.get(token.word, "statement") for token in (x, y)}
    if (
        len(kinds) == 1
        or "statement" in kinds
        or kinds == _LOOSE
        or not language.asked.isdisjoint(p.words)
    ):
        return False
    pairs = itertools.chain(itertools.pairwise(p.a.tokens), itertools.pairwise(p.b.tokens))
    helped = any(after.word in language.helpers for before, after in pairs if before in (x, y))
    return helped or kinds != {"", "manner"}


def _asked(text: Text) -> frozenset[str]:
    """What a text asks for; empty where that is open."""
    language = text.language
    tokens = text.tokens[:_QUESTION]
    known, leads = language.questions, language.leads
    i = next(
        (i for i, t in enumerate(tokens) if t.word in known or t.word not in leads), len(tokens)
    )
    word, after, beyond = (*[t.word for t in tokens[i : i + 3]], "", "", "")[:3]
    kind = known.get(word)
    if not kind:
        return frozenset()
    much = after in language.how_much
    adjective = (
        after not in language.function and beyond in language.function
    )  # "how old is", not "how children learn"
    if word != language.how or not (much or adjective):
        return frozenset((kind,))
    stem = tokens[i + 1].stem
    found = {f"{kind} {c}" for c in language.classes.get(stem, (stem,))}
    return frozenset(found if much else found | {kind})


def _own(text: Text) -> bool:
    """Whether somebody asks for himself."""
    persons = text.language.persons
    return any(persons[word] not in text.language.third for word in text.words & persons.keys())


def _named(text: Text) -> Token | None:
    """The noun that a "what" or "which" asks for."""
    language = text.language
    for token, after in itertools.pairwise(text.tokens):
        if token.word in language.open_questions:
            return None if after.word in language.function or after.word in language.open else after
    return None


def modality(p: Pair) -> str | None:
    """What may, should or must be; between neighbors only where no question word asks for more than yes or no."""
    language = p.language
    bound = {_bound(p.a), _bound(p.b)}
    if len(bound) == 2 and "" not in bound:
        return "modality"
    first, second = _mood(p.a), _mood(p.b)
    if not first or not second or first == second:
        return None
    spoken = [language.modals.keys() & text.words for text in (p.a, p.b)]
    if not all(spoken):
        return (
            "modality"
            if _closed(p.a) and _closed(p.b) and language.mild.isdisjoint((first, second))
            else None
        )
    asked = _asked(p.a) | _asked(p.b)
    near = spoken[0] | spoken[1] <= language.advice and not language.questions.keys().isdisjoint(
        p.words
    )
    strength = list(dict.fromkeys(language.modals.values()))
    sharp = (
        ("person",)
        if abs(strength.index(first) - strength.index(second)) == 1
        else ("person", "time")
    )
    return None if near and asked.isdisjoint(sharp) else "modality"


def _mood(text: Text) -> str:
    """What the first auxiliary of what may or must be says, but for a polite "can you"; else the first other word that
    says it: "is it allowed"."""
    language, words = text.language, [t.word for t in text.tokens]
    modal = next(
        (i for i, t in enumerate(text.tokens) if t.word in language.modals and not t.name), None
    )
    if modal is not None and not (modal == 0 and language.hearer.issuperset(words[1:2])):
        return language.modals[words[modal]]
    return next((language.moods[word] for word in words if word in language.moods), "")


def _bound(text: Text) -> str:
    """Whether a text forbids ("must not") or excuses ("need not", "not have to")."""
    language = text.language
    for before, token, after in triples((END, *text.tokens, END)):
        if token.word in language.bound and before.word in language.negations:
            return "excuses"
        if token.word in language.bound and after.word in language.negations:
            return "forbids" if token.word in language.modals else "excuses"
    return ""


def tense(p: Pair) -> str | None:
    """What was against what will be, or against what is where nothing else differs or yes or no is asked for."""
    tenses = p.language.tenses
    first, second = (
        {tenses[t.word] for t in text.tokens if t.word in tenses} for text in (p.a, p.b)
    )
    for mine, other in ((first, second), (second, first)):
        if (
            "future" in mine - other
            and other & {"past", "perfect"}
            and not mine & {"past", "perfect"}
        ):
            return "tense"
    times = {tenses.get(text.tokens[0].word, "") for text in (p.a, p.b) if _closed(text)}
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
    if first & third != second & third and (
        (first & third and second & third) or first.isdisjoint(second)
    ):
        return "person"
    mine, yours = (
        {persons[word] for word in text.words & p.language.owners} for text in (p.a, p.b)
    )
    others = p.words & persons.keys() - p.language.owners
    return "person" if mine and yours and not mine & yours and not others else None


def particle(p: Pair) -> str | None:
    """Another verb by the word after it: "adopt" and "adopt out", "turn in" and "turn over"."""
    particles = p.language.particles_of
    for mine, only, other, _ in p.views:
        missing = {t.word for t in only}
        for x, y in itertools.pairwise(mine.tokens) if missing else ():
            if y.word in missing and y.word in particles.get(x.stem, ()):
                theirs = [
                    t for s, t in itertools.pairwise((*other.tokens, END)) if s.stem == x.stem
                ]
                if any(t.word == y.word or not p.akin(y, t) for t in theirs):
                    return "relation"
    return None


def relation(p: Pair) -> str | None:
    """Another relation where all else is the same and no question word asks for more: "in the box", "on the box"; or
    the other way to or from the same: "leave for Rome", "leave from Rome"."""
    first, second = _ways(p.a, p.only[0]), _ways(p.b, p.only[1])
    if any(first[where] != second[where] for where in first.keys() & second.keys()):
        return "relation"
    if [len(only) for only in p.only] != [1, 1] or not p.language.questions.keys().isdisjoint(
        p.words
    ):
        return None
    (x,), (y,) = p.only
    choices = p.language.choices
    tied = {x.stem, y.stem} <= p.language.relation_stems
    joined = {x.stem, y.stem} <= p.language.symmetric_stems and (x.word in choices) != (
        y.word in choices
    )
    return "relation" if (tied or joined) and not p.akin(x, y) and p.neighbours(x, y) else None


def _ways(text: Text, only: Tokens) -> dict[str, str]:
    """Which way it goes from what, by the words for it that one text alone has; "" is the end of a clause."""
    ways = text.language.ways
    own = {t.word for t in only if t.word in ways}
    pairs = itertools.pairwise((*text.without_articles, END)) if own else ()
    return {"" if y.word in STOPS else y.stem: ways[x.word] for x, y in pairs if x.word in own}


def substitution(p: Pair) -> str | None:
    """A name where the other text has another or none; or a content word in the place of another that is no kin."""
    only_a, only_b = p.only
    if min(len(only_a), len(only_b)) > MOST:
        return "substitution"
    left, right = ([t for t in own if t.stem not in p.converse] for own in p.unmatched)
    names = [any(t.name for t in own) for own in (left, right)]
    if all(names) or (len(left) + len(right) == 1 and any(names)):
        return "entity"
    # Content words that the other text has as well, but not as often, stand for others too.
    mine = left + [t for t in p.content[0] if t.stem in p.b.stems]
    other = right + [t for t in p.content[1] if t.stem in p.a.stems]
    both = mine and other
    if bool(mine) != bool(other):  # "a work visa" and "a student visa"
        attributes = p.language.attributes | p.language.speaker
        mine, other = (
            own or [t for t in only if t.word in attributes]
            for own, only in ((mine, only_a), (other, only_b))
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
    first, second = (
        [t.stem for t in text.without_articles if t.word not in STOPS] for text in (p.a, p.b)
    )
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
    told = [_told(text, only) for text, only, _, _ in p.views]
    return all(told) or (
        any(told) and all(t.word in p.language.stop_words for only in p.only for t in only)
    )


def _told(text: Text, only: Iterable[Token]) -> bool:
    language = text.language
    words = [t for t in text.tokens if t.word[0].isalpha()]
    if sum([t.word in language.telling for t in words]) >= max(1, len(words) / _TELLING):
        return True
    known = [t.stem in language.known for t in words if not t.name]
    return (
        any(known)
        and sum(known) >= _KNOWN * len(known)
        and all(t.name or not t.word[0].isalpha() or t.stem in language.known for t in only)
    )
