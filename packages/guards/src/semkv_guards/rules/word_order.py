"""The rule over the order of words: who does what to whom."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from semkv_guards.language import Token
from semkv_guards.pairs import Pair, agreeing
from semkv_guards.rules.rule import rule
from semkv_guards.text import END, STOPS, Text

_HELPER = 5  # words among which the auxiliary of a question stands
_REACH = 16  # shared words between two that may have changed places
_WHOLE_QUESTION = ("", "person")  # kinds of question words that ask for a subject or object


@rule(
    reasons=("word order",),
    vetoes=(
        ("Subtract 5 from 9", "Subtract 9 from 5"),
        ("Who taught Plato?", "Who did Plato teach?"),
    ),
    allows=(("In Python, how do I sort a list?", "How do I sort a list in Python?"),),
)
def word_order(pair: Pair) -> str | None:
    """Subject and object are exchanged.

    The words are the same, so encoders hardly see it; a passive on one side turns the expectation round.
    """
    return "word order" if not pair.converse and _Order(pair).is_reversed() else None


class Place(NamedTuple):
    """Where a word that both texts have once stands."""

    first: int
    second: int


class _Order:
    """The stems of both texts without articles and signs, between two empty ones."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.language = pair.language
        self.first = _stems(pair.a)
        self.second = _stems(pair.b)
        self.passive = _is_passive(pair.a) != _is_passive(pair.b)

    def is_reversed(self) -> bool:
        """Whether two shared words have changed places around a third that ties them together."""
        if self._transposed():
            return True
        shared = self._shared()
        order = [place.second for place in shared]
        if not self.passive and order == sorted(order):
            return _asks_by_whom(self.pair.a) != _asks_by_whom(self.pair.b)
        return self._asks_other_side() or self._asks_other_part() or self._exchanged(shared)

    def _shared(self) -> list[Place]:
        """The places of the words that both texts have once, in the order of the first."""
        places = _once(self.second)
        return [
            Place(first, places[stem])
            for stem, first in _once(self.first).items()
            if stem in places
        ]

    @cached_property
    def participles(self) -> set[str]:
        """Verbs that one text alone has in the passive."""
        return _participles(self.pair.a) ^ _participles(self.pair.b)

    # -- two words alone --------------------------------------------------------

    def _transposed(self) -> bool:
        """Whether two words have changed places, and nothing else: "Mary's father's boss", "Mary's boss's father"."""
        if len(self.first) != len(self.second):
            return False
        both = enumerate(zip(self.first, self.second, strict=True))
        apart = [i for i, (x, y) in both if x != y]
        stems = {self.first[i] for i in apart}
        if len(stems) != 2 or any(self.second[i] not in stems for i in apart):
            return False
        start, end = apart[:2]
        if end - start > 1:
            return not self.language.symmetric_stems.issuperset(self.first[start + 1 : end])
        return self._order_matters(*stems)

    def _order_matters(self, one: str, other: str) -> bool:
        """Whether neighbors mean something else in the other order: "chocolate milk", "who is chasing Tom", "are all
        cats mammals", "[3, 1, 2]"; not "March 3"."""
        if other in self.language.opposed.get(one, {}):
            return True
        both_words_or_figures = one[0].isalpha() == other[0].isalpha()
        return both_words_or_figures and self.language.movable.isdisjoint((one, other))

    # -- questions ---------------------------------------------------------------

    def _asks_other_side(self) -> bool:
        """Whether one asks for the subject and the other for the object: "who killed Bill", "who did Bill kill"."""
        if not all(map(_may_ask_for_object, (self.pair.a, self.pair.b))):
            return False
        left_out = self.language.stop_stems
        if self.language.unhelped.isdisjoint({*self.first, *self.second}):  # "who works for Tom"
            left_out = self.language.stems(self.language.function)
        first = [t.stem for t in self.pair.a.tokens if t.stem not in left_out]
        second = [t.stem for t in self.pair.b.tokens if t.stem not in left_out]
        if (first == second and not self.passive) or sorted(first) != sorted(second):
            return False
        return self._asks_object(self.pair.a) != self._asks_object(self.pair.b)

    def _asks_object(self, text: Text) -> bool:
        """Whether a "who" is not the one who acts: "who did he call", "who was called"; not "who was it built by"."""
        helpers = self.language.helpers
        helped = any(t.word in helpers for t in text.tokens[1:_HELPER])
        if not helped and self.participles.isdisjoint(_participles(text)):
            return False
        words = [t.word for t in text.tokens if t.word not in STOPS]
        return self.language.by not in (words[0], words[-1])

    def _asks_other_part(self) -> bool:
        """Whether all words are the same, but another one stands behind the auxiliary of a question for a person or
        thing: "who is the tall man chasing"."""
        language = self.language
        if sorted(self.first) != sorted(self.second):
            return False
        if not language.symmetric.isdisjoint(self.pair.words):
            return False
        lead, one = self._behind_auxiliary(self.pair.a)
        other_lead, other = self._behind_auxiliary(self.pair.b)
        stems = (one.stem, other.stem)
        if not lead or lead != other_lead or one.stem == other.stem:
            return False
        if language.movable.isdisjoint(stems):
            return True
        is_being = lead[-1] in language.being
        has_relation = not language.relation_stems.isdisjoint(stems)
        if has_relation == is_being:  # not "what can I do in Berlin this weekend"
            return True
        return is_being and any(t.word.endswith(language.gerund) for t in (one, other))

    def _behind_auxiliary(self, text: Text) -> tuple[list[str], Token]:
        """The stems up to the first auxiliary of such a question, and the first word of content or place after it."""
        language = self.language
        tokens = text.without_articles
        if language.questions.get(tokens[0].word) not in _WHOLE_QUESTION:
            return [], END
        places = (i for i, t in enumerate(tokens) if t.stem in language.auxiliaries)
        end = next(places, len(tokens)) + 1
        content = (
            t
            for t in tokens[end:]
            if t.word not in language.adverbs
            and (language.may_be_content(t) or t.stem in language.relation_stems)
        )
        return [t.stem for t in tokens[:end]], next(content, END)

    # -- any two shared words ----------------------------------------------------

    def _exchanged(self, shared: list[Place]) -> bool:
        """Whether "A X B" stands against "B X A", and the neighbors of A and B are exchanged too.

        "In Python, how do I sort a list?" moves a phrase and keeps its neighbors.
        """
        language = self.language
        stems = [self.first[place.first] for place in shared]
        tying = self._tying(stems)
        content = [n for n, stem in enumerate(stems) if stem not in language.stop_stems]
        changed = self._changed_voice if self.passive else self._changed_places
        self._agents = self._counts({language.by})
        self._joints = self._counts(language.joint_stems)
        for x, y in _near(content):
            between = [shared[n] for n in range(x + 1, y) if stems[n] in tying]
            if between and changed(shared[x], shared[y], between):
                return True
        return False

    def _changed_places(self, left: Place, right: Place, between: Sequence[Place]) -> bool:
        """Whether two words have changed places around a verb or preposition.

        What is one noun here may be parted by a preposition there: "May deadline", "deadline in May".
        """
        inside = [
            place
            for place in between
            if right.second < place.second < left.second
            and self.first[place.first] not in self.participles
        ]
        if not inside:
            return False
        first, second = self._joints
        parted_here = first[right.first] > first[left.first]
        parted_there = second[left.second] > second[right.second]
        relations = self.language.relation_stems
        has_relation = any(self.first[place.first] in relations for place in inside)
        if parted_here != parted_there and not has_relation:
            return False
        return self._swapped(left, right)

    def _changed_voice(self, left: Place, right: Place, between: Sequence[Place]) -> bool:
        """The same where one text is in the passive: then the words have to change places."""
        if right.second > left.second:
            if not any(
                left.second < place.second < right.second
                and self.first[place.first] in self.participles
                for place in between
            ):
                return False
            first, second = self._agents
            agent_here = first[right.first] > first[left.first]
            agent_there = second[right.second] > second[left.second]
            return agent_here != agent_there
        # Who refuses to be treated is not who refuses to treat.
        ways = self.language.ways
        return any(
            right.second < place.second < left.second
            and self.first[place.first] not in self.participles
            and self.first[place.first + 1] in ways
            and self.second[place.second + 1] in ways
            for place in between
        )

    def _counts(self, among: Collection[str]) -> tuple[list[int], list[int]]:
        """How many of some words stand before each place."""
        return _running_count(self.first, among), _running_count(self.second, among)

    def _tying(self, stems: Iterable[str]) -> set[str]:
        """Words that tie a subject to an object. A gerund on one side does not: "book a room", "room booking site"."""
        language = self.language
        tying = {
            stem
            for stem in stems
            if stem not in language.stop_stems or stem in language.relation_stems
        }
        tying -= language.symmetric_stems
        gerunds = [
            {t.stem for t in text.tokens if t.word.endswith(language.gerund)}
            for text in (self.pair.a, self.pair.b)
        ]
        return tying - (gerunds[0] ^ gerunds[1])

    def _swapped(self, left: Place, right: Place) -> bool:
        """Whether at least two of the four neighbors have changed places with the words."""
        low, high = self._block(*left)
        other_low, other_high = self._block(*right)
        before_left = self.first[left.first - low - 1]
        before_right = self.first[right.first - other_low - 1]
        after_left = self.first[left.first + high + 1]
        after_right = self.first[right.first + other_high + 1]
        exchanged = [
            before_left == self.second[right.second - other_low - 1],
            before_right == self.second[left.second - low - 1],
            after_left == self.second[right.second + other_high + 1],
            after_right == self.second[left.second + high + 1],
        ]
        return sum(exchanged) >= 2

    def _block(self, i: int, j: int) -> tuple[int, int]:
        """How far the two texts agree to the left and to the right of a shared word."""
        before = self.first[max(1, i - _REACH) : i]
        other_before = self.second[max(1, j - _REACH) : j]
        after = self.first[i + 1 : min(i + _REACH, len(self.first) - 1)]
        other_after = self.second[j + 1 : min(j + _REACH, len(self.second) - 1)]
        return agreeing(before[::-1], other_before[::-1]), agreeing(after, other_after)


def _stems(text: Text) -> list[str]:
    return ["", *[t.stem for t in text.without_articles if t.word not in STOPS], ""]


def _once(stems: list[str]) -> dict[str, int]:
    """Where each stem stands that comes once, in order."""
    times = Counter(stems)
    return {stem: i for i, stem in enumerate(stems) if times[stem] == 1}


def _near(places: list[int]) -> Iterator[tuple[int, int]]:
    """Every two of some shared words that are not far from each other, with one between them at least."""
    for n, x in enumerate(places):
        for y in places[n + 1 : n + _REACH]:
            if 1 < y - x < _REACH:
                yield x, y


def _running_count(stems: list[str], among: Collection[str]) -> list[int]:
    return list(itertools.accumulate([stem in among for stem in stems], initial=0))


def _may_ask_for_object(text: Text) -> bool:
    """Whether a text asks for a person or thing, and says which side acts: "which laws can judges" does not."""
    language = text.language
    if language.questions.get(text.tokens[0].word) not in _WHOLE_QUESTION:
        return False
    is_open = any(
        t.word in language.modals or language.tenses.get(t.word) == "perfect"
        for t in text.tokens[1:_HELPER]
    )
    return not is_open or _is_passive(text)


def _is_passive(text: Text) -> bool:
    """Whether an agent is named after an auxiliary: "was built by"."""
    language = text.language
    if language.by not in text.words:
        return False
    after = itertools.dropwhile(lambda t: t.word not in language.passive, text.tokens)
    return any(t.word == language.by for t in after)


def _participles(text: Text) -> set[str]:
    """Verbs that may be passive: "was built", "is the house built", "hit by"."""
    language = text.language
    if language.passive.isdisjoint(text.words):
        return set()
    found: set[str] = set()
    left = 0
    for token, after in itertools.pairwise((*text.tokens, END)):
        if token.word in language.passive:
            left = _REACH
        elif token.stem in language.relation_stems or token.word in STOPS:
            left = 0
        elif left and token.word not in language.function:
            may_be_passive = after.word == language.by or language.is_past(token)
            found |= {token.stem} if may_be_passive else set()
        left = max(0, left - 1)
    return found


def _asks_by_whom(text: Text) -> bool:
    """Whether the agent of a passive is asked for: "by whom"."""
    words: list[str] = [t.word for t in text.tokens[:2]]
    return words[:1] == [text.language.by] and words[-1] in text.language.questions
