"""Who does what to whom: shared words that come in another order, where the order tells subject from object."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from semkv.tiers.guards.content import Side
from semkv.tiers.guards.lexicon import Lexicon
from semkv.tiers.guards.marks import AUXILIARY, BY, GERUND
from semkv.tiers.guards.text import STOPS, Token

_HELPER = 5  # words among which the auxiliary of a question stands
_REACH = 16  # shared words between two that may have changed places

_NONE = Token("", "", False)

Places = tuple[int, int]
"""Where a shared word stands in the one text and in the other."""


@dataclass(eq=False)
class _Spines:
    """The stems of both texts without articles."""

    a: Side
    b: Side
    first: list[str]
    second: list[str]
    lexicon: Lexicon

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset([t.stem for side in (self.a, self.b) for t in side.text.tokens if t.name])

    @cached_property
    def participles(self) -> frozenset[str]:
        """Verbs that one text alone has in the passive."""
        return _participles(self.a, self.lexicon) ^ _participles(self.b, self.lexicon)

    @cached_property
    def agents(self) -> tuple[list[int], list[int]]:
        """How many words for the agent of a passive stand before each place."""
        return _counts(self.first, {self.lexicon.by[0]}), _counts(self.second, {self.lexicon.by[0]})

    @cached_property
    def joints(self) -> tuple[list[int], list[int]]:
        joints = self.lexicon.tables.joints
        return _counts(self.first, joints), _counts(self.second, joints)

    def quiet(self, stem: str) -> bool:
        return stem in self.lexicon.tables.quiet and stem not in self.names

    def goal(self, i: int, j: int) -> bool:
        """Whether a filler is where something goes in one text and what goes there in the other: "into main"."""
        ways = self.lexicon.ways
        here, there = _at(self.first, i - 1) in ways, _at(self.second, j - 1) in ways
        after = _at(self.second, j + 1) if here else _at(self.first, i + 1)
        return here != there and after in ways


def reversed_order(a: Side, b: Side, lexicon: Lexicon) -> bool:
    """Whether two shared words have changed places around a third that ties them together.

    "A X B" against "B X A" is an exchange when the neighbours of A and B are exchanged too: "In Python, how do I sort a
    list?" moves a phrase and keeps its neighbours. A passive on one side turns the expectation round.
    """
    first, second = ([t.stem for t in side.spine if t.word not in STOPS] for side in (a, b))
    passive = _passive(a, lexicon) != _passive(b, lexicon)
    order = _shared(first, second)
    places = [j for _, j in order]
    if not passive and places == sorted(places):
        return _transposed(first, second, a, b, lexicon) or _fronted(a, lexicon) != _fronted(b, lexicon)
    s = _Spines(a, b, first, second, lexicon)
    if _transposed(first, second, a, b, lexicon) or _asks_other_side(s) or _relatives(s):
        return True
    moved = _moved(s, order, passive)
    return any(_contradicts(s, one, other, between, passive) for one, other, between in moved)


def _counts(stems: list[str], among: Collection[str]) -> list[int]:
    return list(itertools.accumulate([stem in among for stem in stems], initial=0))


def _shared(first: list[str], second: list[str]) -> list[Places]:
    """The words that both texts have once, in the order of the first."""
    once, places = _once(first), _once(second)
    return [(i, places[stem]) for stem, i in once.items() if stem in places]


def _once(stems: list[str]) -> dict[str, int]:
    """Where each stem stands that comes once, in order."""
    places = {stem: i for i, stem in enumerate(stems)}
    if len(places) < len(stems):
        times = Counter(stems)
        places = {stem: i for i, stem in enumerate(stems) if times[stem] == 1}
    return places


def _moved(s: _Spines, order: list[Places], passive: bool) -> Iterator[tuple[Places, Places, list[Places]]]:
    """Content words that may have changed places, or kept them in a passive, with the ties between them."""
    quiet, names, fillers = s.lexicon.tables.quiet, s.names, s.lexicon.fillers
    shared = [s.first[i] for i, _ in order]
    telling = [
        stem not in quiet or stem in names or (stem in fillers and s.goal(*places))
        for stem, places in zip(shared, order, strict=True)
    ]
    ties = _ties(s, shared)
    tied = [stem in ties for stem in shared]
    kept = passive and bool(s.participles)
    for x, one in enumerate(order):
        if not telling[x]:
            continue
        for y in range(x + 2, min(x + _REACH, len(order))):
            if telling[y] and (kept or order[y][1] < one[1]):
                between = [order[p] for p in range(x + 1, y) if tied[p]]
                if between:
                    yield one, order[y], between


def _ties(s: _Spines, shared: list[str]) -> set[str]:
    """Words that tie a subject to an object. A gerund on one side does not: "book a hotel", "a hotel booking site"."""
    tables, names = s.lexicon.tables, s.names
    ties = {
        stem
        for stem in shared
        if stem not in tables.symmetric and (stem in tables.relations or stem not in tables.quiet or stem in names)
    }
    if (s.a.marks | s.b.marks) & GERUND:
        first, second = ({t.stem for t in side.text.tokens if t.marks & GERUND} for side in (s.a, s.b))
        ties -= first ^ second
    return ties


def _contradicts(s: _Spines, one: Places, other: Places, between: list[Places], passive: bool) -> bool:
    (i, j), (k, m) = one, other
    if m < j:
        ties = [(p, q) for p, q in between if m < q < j and s.first[p] not in s.participles]
        if passive:  # who refuses to be treated is not who refuses to treat
            ways = s.lexicon.ways
            return any(_at(s.first, p + 1) in ways and _at(s.second, q + 1) in ways for p, q in ties)
        return bool(ties) and _swapped(s, one, other) and not _compound(s, one, other, {s.first[p] for p, _ in ties})
    tied = any(j < q < m and s.first[p] in s.participles for p, q in between)
    first, second = s.agents
    return passive and tied and (first[k] > first[i]) != (second[m] > second[j])


def _compound(s: _Spines, one: Places, other: Places, tied: set[str]) -> bool:
    """Whether what is one noun here is parted by a preposition there: "tax deadline in May", "May tax deadline"."""
    (i, j), (k, m) = one, other
    first, second = s.joints
    return s.lexicon.tables.relations.isdisjoint(tied) and (first[k] > first[i]) != (second[j] > second[m])


def _transposed(first: list[str], second: list[str], a: Side, b: Side, lexicon: Lexicon) -> bool:
    """Whether two words have changed places, wherever they come, and nothing else: "Mary's father's boss", "Mary's
    boss's father".
    """
    if len(first) != len(second):
        return False
    apart = [i for i, (x, y) in enumerate(zip(first, second, strict=True)) if x != y]
    stems = {first[i] for i in apart}
    if len(stems) != 2 or any(second[i] not in stems for i in apart):
        return False
    if apart[1] - apart[0] < 2:
        one, other = stems
        tokens = (a.text.tokens, b.text.tokens)
        return other in lexicon.tables.opposites.get(one, {}) or all(_parted(t, stems, lexicon) for t in tokens)
    between = first[apart[0] + 1 : apart[1]]
    return not all(stem in lexicon.tables.symmetric for stem in between)


def _relatives(s: _Spines) -> bool:
    """Whether a clause has its subject and its object exchanged: "animals that eat owls", "animals that owls eat"."""
    if sorted(s.first) != sorted(s.second):
        return False
    first, second = (_clauses(side, s) for side in (s.a, s.b))
    return any((y, x) in second and (x, y) not in second for x, y in first)


def _clauses(side: Side, s: _Spines) -> set[tuple[str, str]]:
    """The first content word behind each "that" or "which", with the next."""
    tokens, lexicon = side.text.tokens, s.lexicon
    found = set()
    for i in [i for i, t in enumerate(tokens) if t.word in lexicon.relatives]:
        telling = [t.stem for t in tokens[i + 1 : i + _HELPER] if t.word not in lexicon.joints]
        if len(telling) > 1 and not (s.quiet(telling[0]) or s.quiet(telling[1])):
            found.add((telling[0], telling[1]))
    return found


def _parted(tokens: Sequence[Token], stems: set[str], lexicon: Lexicon) -> bool:
    """Whether an article alone stands between two words: "is every square a rectangle"."""
    return any(
        {x.stem, z.stem} == stems and y.word in lexicon.articles
        for x, y, z in zip(tokens, tokens[1:], tokens[2:], strict=False)
    )


def _asks_other_side(s: _Spines) -> bool:
    """Whether one asks for the subject and the other for the object: "who killed Bill", "who did Bill kill"."""
    if not (_subject(s.a, s.lexicon) and _subject(s.b, s.lexicon)):
        return False
    if any(_open(side, s.lexicon) and not _passive(side, s.lexicon) for side in (s.a, s.b)):
        return False
    objects = [_asks_object(side, s) for side in (s.a, s.b)]
    first, second = ([t.stem for t in side.text.tokens if not s.quiet(t.stem)] for side in (s.a, s.b))
    turned = first != second or _passive(s.a, s.lexicon) != _passive(s.b, s.lexicon)
    return objects[0] != objects[1] and turned and sorted(first) == sorted(second)


def _open(side: Side, lexicon: Lexicon) -> bool:
    """Whether an auxiliary leaves it open who acts: "which laws can judges", "which laws can bind"."""
    tokens = side.text.tokens[1:_HELPER]
    return any(t.word in lexicon.modals or lexicon.tenses.get(t.word) == "perfect" for t in tokens)


def _asks_object(side: Side, s: _Spines) -> bool:
    """Whether a "who" is not the one who acts: "who did he call", "who was called"; not "who was it built by"."""
    tokens = side.text.tokens
    helped = any(t.word in s.lexicon.helpers for t in tokens[1:_HELPER])
    words = [t.word for t in tokens if t.word not in STOPS]
    agent = s.lexicon.by[0] in (words[0], words[-1])
    return (helped or not s.participles.isdisjoint(_participles(side, s.lexicon))) and not agent


def _subject(side: Side, lexicon: Lexicon) -> bool:
    tokens = side.text.tokens
    return bool(tokens) and lexicon.questions.get(tokens[0].word) in ("", "person")


def _passive(side: Side, lexicon: Lexicon) -> bool:
    """Whether an agent is named after an auxiliary: "was built by"."""
    if not (side.marks & BY and side.marks & AUXILIARY):
        return False
    by, forms, gerund = lexicon.by
    seen = False
    for token, after in itertools.pairwise(side.text.tokens):
        if token.word in forms:
            seen = True
        elif token.word == by and seen and not after.word.endswith(gerund):
            return True
    return False


def _participles(side: Side, lexicon: Lexicon) -> frozenset[str]:
    """Verbs that may be passive: "was built", "is the house built", "hit by"."""
    if not side.marks & AUXILIARY:
        return frozenset()
    by, forms, _ = lexicon.by
    found: set[str] = set()
    left = 0
    for token, after in itertools.pairwise((*side.text.tokens, _NONE)):
        if token.word in forms:
            left = _REACH
        elif token.stem in lexicon.tables.relations or token.word in STOPS:
            left = 0
        elif left and token.word not in lexicon.function_words and (after.word == by or participle(token, lexicon)):
            found.add(token.stem)
        left = max(0, left - 1)
    return frozenset(found)


def participle(token: Token, lexicon: Lexicon) -> bool:
    """Whether a word may be the participle of a passive."""
    return token.word != token.stem and token.word.endswith(lexicon.participles)


def _fronted(side: Side, lexicon: Lexicon) -> bool:
    """Whether the agent of a passive is asked for: "by whom"."""
    tokens = side.text.tokens
    return len(tokens) > 1 and tokens[0].word == lexicon.by[0] and tokens[1].word in lexicon.questions


def _swapped(s: _Spines, one: Places, other: Places) -> bool:
    """Whether at least two of the four neighbours have changed places with the words."""
    (i, j), (k, m) = one, other
    low, high = _block(s, i, j)
    left, right = _block(s, k, m)
    exchanged = (
        (_at(s.first, i - low - 1) == _at(s.second, m - left - 1))
        + (_at(s.first, k - left - 1) == _at(s.second, j - low - 1))
        + (_at(s.first, i + high + 1) == _at(s.second, m + right + 1))
        + (_at(s.first, k + right + 1) == _at(s.second, j + high + 1))
    )
    return exchanged >= 2


def _block(s: _Spines, i: int, j: int) -> tuple[int, int]:
    """How far the two texts agree to the left and to the right of a shared word."""
    low = high = 0
    while low < _REACH and i - low > 0 and j - low > 0 and s.first[i - low - 1] == s.second[j - low - 1]:
        low += 1
    end = min(len(s.first) - i, len(s.second) - j, _REACH)
    while high + 1 < end and s.first[i + high + 1] == s.second[j + high + 1]:
        high += 1
    return low, high


def _at(stems: list[str], i: int) -> str:
    return stems[i] if 0 <= i < len(stems) else ""
