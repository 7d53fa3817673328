"""Guards over who does what to whom: shared words that go with others, or come in another order, than in the other
text; speakers in other roles."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from semkv_guards.language import Language, Token
from semkv_guards.pairs import Pair, Tokens, agreeing
from semkv_guards.text import END, STOPS, Text

_HELPER = 5  # words among which the auxiliary of a question stands
_REACH = 16  # shared words between two that may have changed places
_VERB = 4  # words from a subject to its verb: "I have not yet been asked"

Places = tuple[int, int]
"""Where a shared word stands in the one text and in the other."""
Bonds = Mapping[str, set[str]]
"""The stems that a word goes with."""


def bonds(p: Pair) -> str | None:
    """A word that goes with another of the words that both texts have."""
    shared = p.a.stems.keys() & p.b.stems.keys() | {""}
    for reason, of in () if p.converse else _BONDS:
        first, second = of(p.a), of(p.b)
        for word in first.keys() & second.keys():
            if first[word].isdisjoint(second[word]) and first[word] | second[word] <= shared:
                return reason
    return None


def _described(text: Text) -> Bonds:
    """A color, size or the like with its noun: "a green ball and a ring"."""
    language = text.language
    return {
        x.word: {y.stem}
        for x, y in itertools.pairwise(text.without_articles)
        if x.word in language.grouped
        and y.stem not in language.stop_stems
        and y.stem not in language.groupings
    }


def _followed(text: Text) -> Bonds:
    """A side, a "than", or the "that" of a noun with the next word of content: "birds that eat owls"."""
    found: dict[str, set[str]] = {}
    language = text.language
    for i, token in enumerate(text.tokens):
        noun = i > 0 and text.tokens[i - 1].word not in language.function
        if token.word in language.around or (token.word in language.relatives and noun):
            after = (
                t.stem for t in text.tokens[i + 1 : i + _HELPER] if t.word not in language.function
            )
            found[token.word] = {next(after, "")}
    return found


def _owned(text: Text) -> Bonds:
    """An owner with what he owns: "my neighbour's tree fell on my fence"."""
    owns = text.language.owns
    near = triples(text.tokens) if owns in text.words else ()
    return {x.stem: {z.stem} for x, y, z in near if y.word == owns and _carries(x, text.language)}


def _focused(text: Text) -> Bonds:
    """An "only" with the next word and what follows its preposition ("only open in summer"), or with the last word of
    its clause."""
    language, found = text.language, dict[str, set[str]]()
    articles = {
        y.word: {x.stem} for x, y in itertools.pairwise(text.tokens) if x.word in language.articles
    }
    for i in [i for i, t in enumerate(text.without_articles) if t.word in language.focusing]:
        after = itertools.takewhile(
            lambda t: t.word not in STOPS, text.without_articles[i + 1 : i + 1 + _REACH]
        )
        said = [
            t.stem for t in after if t.word not in language.tenses and t.word not in language.modals
        ][:3]
        own = [stem for stem in said if stem not in language.relation_stems]
        reach = 2 if own[1:] and said[1] != own[1] else 1
        found[text.without_articles[i].word] = set(own[:reach]) or {
            t.stem for t in text.without_articles[max(0, i - 1) : i]
        }
    return found | {
        word: articles[word] for word in found.keys() & articles.keys()
    }  # "the only doctor"


_BONDS: tuple[tuple[str, Callable[[Text], Bonds]], ...] = (
    ("word order", _described),
    ("word order", _followed),
    ("word order", _focused),
    ("person", _owned),
)


def word_order(p: Pair) -> str | None:
    """Subject and object exchanged."""
    return "word order" if not p.converse and _Order(p).reversed() else None


class _Order:
    """The stems of both texts without articles and signs, between two empty ones."""

    def __init__(self, p: Pair) -> None:
        self.p = p
        self.language = p.language
        self.first, self.second = (
            ["", *[t.stem for t in text.without_articles if t.word not in STOPS], ""] for text in (p.a, p.b)
        )
        self.passive = _passive(p.a) != _passive(p.b)

    def reversed(self) -> bool:
        """Whether two shared words have changed places around a third that ties them together."""
        places = _once(self.second)
        shared = [(i, places[stem]) for stem, i in _once(self.first).items() if stem in places]
        if self._transposed():
            return True
        order = [j for _, j in shared]
        if not self.passive and order == sorted(order):
            return _fronted(self.p.a) != _fronted(self.p.b)
        # Verbs that one text alone has in the passive.
        self.participles = _participles(self.p.a) ^ _participles(self.p.b)
        return self._asks_other_side() or self._asks_other_part() or self._exchanged(shared)

    def _transposed(self) -> bool:
        """Whether two words have changed places, wherever they come, and nothing else: "Mary's father's boss", "Mary's
        boss's father"."""
        if len(self.first) != len(self.second):
            return False
        apart = [i for i, (x, y) in enumerate(zip(self.first, self.second, strict=True)) if x != y]
        stems = {self.first[i] for i in apart}
        if len(stems) != 2 or any(self.second[i] not in stems for i in apart):
            return False
        if apart[1] - apart[0] > 1:
            return not self.language.symmetric_stems.issuperset(self.first[apart[0] + 1 : apart[1]])
        one, other = stems
        told = self.language.movable.isdisjoint(stems)
        # "chocolate milk", "who is chasing Tom", "are all cats mammals", "[3, 1, 2]"; not "March 3"
        return (
            told and one[0].isalpha() == other[0].isalpha()
        ) or other in self.language.opposed.get(one, {})

    def _asks_other_side(self) -> bool:
        """Whether one asks for the subject and the other for the object: "who killed Bill", "who did Bill kill"."""
        for text in (self.p.a, self.p.b):
            asked = text.language.questions.get(text.tokens[0].word)
            if asked not in ("", "person") or (_open(text) and not _passive(text)):
                return False
        silent = self.language.stop_stems
        if self.language.unhelped.isdisjoint({*self.first, *self.second}):  # "who works for Tom"
            silent = self.language.stems(self.language.function)
        first, second = (
            [t.stem for t in x.tokens if t.stem not in silent] for x in (self.p.a, self.p.b)
        )
        turned = (first != second or self.passive) and sorted(first) == sorted(second)
        return turned and self._asks_object(self.p.a) != self._asks_object(self.p.b)

    def _asks_other_part(self) -> bool:
        """Whether all words are the same, but another one stands behind the auxiliary of a question for a person or
        thing: "who is the tall man chasing"."""
        if sorted(self.first) != sorted(self.second) or not self.language.symmetric.isdisjoint(
            self.p.words
        ):
            return False
        (lead, x), (other_lead, y) = (self._behind_auxiliary(text) for text in (self.p.a, self.p.b))
        if not lead or lead != other_lead or x.stem == y.stem:
            return False
        gerund = self.language.gerund
        is_being = lead[-1] in self.language.being
        tied = not self.language.relation_stems.isdisjoint(
            (x.stem, y.stem)
        )  # not "what can I do in Berlin this weekend"
        told = tied == is_being or (is_being and any(t.word.endswith(gerund) for t in (x, y)))
        return told or self.language.movable.isdisjoint((x.stem, y.stem))

    def _behind_auxiliary(self, text: Text) -> tuple[list[str], Token]:
        """The stems up to the first auxiliary of such a question, and the first word of content or place after it."""
        language, without_articles = self.language, text.without_articles
        i = next((i for i, t in enumerate(without_articles) if t.stem in language.auxiliaries), len(without_articles))
        if language.questions.get(without_articles[0].word) not in ("", "person"):
            return [], END
        told = (t for t in without_articles[i + 1 :] if _carries(t, language) or t.stem in language.relation_stems)
        told = (t for t in told if t.word not in language.adverbs)
        return [t.stem for t in without_articles[: i + 1]], next(told, END)

    def _asks_object(self, text: Text) -> bool:
        """Whether a "who" is not the one who acts: "who did he call", "who was called"; not "who was it built by"."""
        helped = any(t.word in self.language.helpers for t in text.tokens[1:_HELPER])
        words = [t.word for t in text.tokens if t.word not in STOPS]
        passive = not self.participles.isdisjoint(_participles(text))
        return (helped or passive) and self.language.by not in (words[0], words[-1])

    def _exchanged(self, shared: list[Places]) -> bool:
        """Whether "A X B" stands against "B X A", and the neighbors of A and B are exchanged too: "In Python, how do I
        sort a list?" moves a phrase and keeps its neighbors. A passive on one side turns the expectation round.
        """
        a, language = self.first, self.language
        stems = [a[i] for i, _ in shared]
        ties = self._ties(
            stem for stem in stems if stem not in language.stop_stems or stem in language.relation_stems
        )
        told = [x for x, stem in enumerate(stems) if stem not in language.stop_stems]
        (agents, agents_b), (joints, joints_b) = (
            self._counts(w) for w in ({language.by}, language.joint_stems)
        )
        for x, y in (
            (x, y)
            for n, x in enumerate(told)
            for y in told[n + 1 : n + _REACH]
            if 1 < y - x < _REACH
        ):
            (i, j), (k, m) = shared[x], shared[y]
            between = [shared[z] for z in range(x + 1, y) if stems[z] in ties]
            if m > j:
                tied = self.passive and any(
                    j < q < m and a[n] in self.participles for n, q in between
                )
                found = tied and (agents[k] > agents[i]) != (agents_b[m] > agents_b[j])
            elif self.passive:  # who refuses to be treated is not who refuses to treat
                found = any(
                    m < q < j
                    and a[n] not in self.participles
                    and a[n + 1] in language.ways
                    and self.second[q + 1] in language.ways
                    for n, q in between
                )
            else:  # what is one noun here may be parted by a preposition there: "May deadline", "deadline in May"
                between = [(n, q) for n, q in between if m < q < j and a[n] not in self.participles]
                compound = language.relation_stems.isdisjoint([a[n] for n, _ in between]) and (
                    (joints[k] > joints[i]) != (joints_b[j] > joints_b[m])
                )
                found = bool(between) and not compound and self._swapped((i, j), (k, m))
            if found:
                return True
        return False

    def _counts(self, among: Collection[str]) -> tuple[list[int], list[int]]:
        """How many of some words stand before each place."""
        first, second = (
            list(itertools.accumulate([stem in among for stem in stems], initial=0))
            for stems in (self.first, self.second)
        )
        return first, second

    def _ties(self, shared: Iterable[str]) -> set[str]:
        """Words that tie a subject to an object. A gerund on one side does not: "book a room", "room booking site"."""
        ties = set(shared) - self.language.symmetric_stems
        gerund = self.language.gerund
        first, second = (
            {t.stem for t in text.tokens if t.stem in ties and t.word.endswith(gerund)}
            for text in (self.p.a, self.p.b)
        )
        return ties - (first ^ second)

    def _swapped(self, one: Places, other: Places) -> bool:
        """Whether at least two of the four neighbors have changed places with the words."""
        (i, j) = one
        (k, m) = other
        a = self.first
        b = self.second
        low, high = self._block(i, j)
        left, right = self._block(k, m)
        exchanged = (
            (a[i - low - 1] == b[m - left - 1])
            + (a[k - left - 1] == b[j - low - 1])
            + (a[i + high + 1] == b[m + right + 1])
            + (a[k + right + 1] == b[j + high + 1])
        )
        return exchanged >= 2

    def _block(self, i: int, j: int) -> tuple[int, int]:
        """How far the two texts agree to the left and to the right of a shared word."""
        a, b = self.first, self.second
        low = agreeing(a[max(1, i - _REACH) : i][::-1], b[max(1, j - _REACH) : j][::-1])
        ends = min(i + _REACH, len(a) - 1), min(j + _REACH, len(b) - 1)
        return low, agreeing(a[i + 1 : ends[0]], b[j + 1 : ends[1]])


def triples(tokens: Tokens) -> Iterable[tuple[Token, Token, Token]]:
    """Every three tokens in a row."""
    return zip(tokens, tokens[1:], tokens[2:], strict=False)


def _once(stems: list[str]) -> dict[str, int]:
    """Where each stem stands that comes once, in order."""
    times = Counter(stems)
    return {stem: i for i, stem in enumerate(stems) if times[stem] == 1}


def _open(text: Text) -> bool:
    """Whether an auxiliary leaves it open who acts: "which laws can judges", "which laws can bind"."""
    language = text.language
    return any(
        t.word in language.modals or language.tenses.get(t.word) == "perfect"
        for t in text.tokens[1:_HELPER]
    )


def _passive(text: Text) -> bool:
    """Whether an agent is named after an auxiliary: "was built by"."""
    language = text.language
    if language.by not in text.words:
        return False
    after = itertools.dropwhile(lambda t: t.word not in language.passive, text.tokens)
    return any(t.word == language.by for t in after)


def _participles(text: Text) -> set[str]:
    """Verbs that may be passive: "was built", "is the house built", "hit by"."""
    language = text.language
    found: set[str] = set()
    left = 0
    for token, after in (
        itertools.pairwise((*text.tokens, END))
        if not language.passive.isdisjoint(text.words)
        else ()
    ):
        if token.word in language.passive:
            left = _REACH
        elif token.stem in language.relation_stems or token.word in STOPS:
            left = 0
        elif (
            left
            and token.word not in language.function
            and (after.word == language.by or language.is_past(token))
        ):
            found.add(token.stem)
        left = max(0, left - 1)
    return found


def _fronted(text: Text) -> bool:
    """Whether the agent of a passive is asked for: "by whom"."""
    words = [t.word for t in text.tokens[:2]]
    return words[:1] == [text.language.by] and words[-1] in text.language.questions


def role(p: Pair) -> str | None:
    """The speaker or a third person in the place of another: one does in one text what is done to him in the other, or
    what somebody does there whom he does it to."""
    for one in p.language.subjects:
        if not one.keys().isdisjoint(p.words):
            first, second = _acts(p.a, one), _acts(p.b, one)
            if _turned(p.a, first, p.b, second) or _turned(p.b, second, p.a, first):
                return "person"
    return None


_Acts = tuple[dict[str, str], set[str]]


def _turned(mine: Text, acted: _Acts, other: Text, others: _Acts) -> bool:
    """Whether the speaker acts in the first text alone, and is acted on or replaced in the other."""
    acts, suffers = acted
    own = acts.keys() - suffers - others[0].keys()
    if not own or own & others[1]:
        return bool(own)
    first = next(i for i, t in enumerate(mine.tokens) if t.stem in own)
    before, after = ({t.stem for t in part} for part in (mine.tokens[:first], mine.tokens[first:]))
    objects = after - before - others[0].keys()
    owned = (
        mine.language.owns in mine.words - other.words
    )  # "I use my dad's car", "my dad uses my car"
    return any(
        x.stem in own
        and (acts[x.stem] == y.stem or owned)
        and _subject(other.without_articles[max(0, i - _VERB) : i], other) in objects
        for i, (x, y) in enumerate(itertools.pairwise(other.without_articles))
    )


def _acts(text: Text, one: Mapping[str, bool]) -> _Acts:
    """Verbs of which ``one`` is the subject, each with the word after it, and verbs of which he is the object."""
    acts: dict[str, str] = {}
    suffers: set[str] = set()
    without_articles, language = text.without_articles, text.language
    for i, token in enumerate(without_articles):
        acting = one.get(token.word)
        if acting:
            start = i + 1
            while (
                start < len(without_articles) and without_articles[start].stem in language.joint_stems
            ):  # "I in Canada send"
                start += 2
            k = next(
                (
                    k
                    for k in range(start, min(start + _VERB, len(without_articles)))
                    if _carries(without_articles[k], language)
                ),
                None,
            )
            if k is None or any(
                t.word in STOPS or t.word in language.parting for t in without_articles[start:k]
            ):
                continue
            if without_articles[k - 1].word in language.passive and language.is_past(without_articles[k]):
                suffers.add(without_articles[k].stem)
                continue
            after = [*without_articles[k + 1 : k + 3], END, END]
            acts.setdefault(without_articles[k].stem, after[0].stem)
            if after[1] is not END and after[0].word.endswith(language.gerund):  # "I stop hitting"
                acts.setdefault(after[0].stem, "")
        elif i and acting is not None and _carries(without_articles[i - 1], language):
            suffers.add(without_articles[i - 1].stem)
    return acts, suffers


def _carries(token: Token, language: Language) -> bool:
    """Whether a word may be a verb or a noun."""
    return token.word[0].isalpha() and token.word not in language.function


def _subject(tokens: Tokens, text: Text) -> str:
    """The word before a verb and its auxiliaries; "" where something else stands between them."""
    language = text.language
    helpers = (language.tenses, language.modals, language.negations, language.between)
    found = next(
        (t for t in reversed(tokens) if not any(t.word in table for table in helpers)), END
    )
    return found.stem if _carries(found, language) else ""
