"""Who does what to whom: shared words that come in another order, where the order tells subject from object."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from semkv.tiers.guards.lexicon import Lexicon
from semkv.tiers.guards.text import STOPS, Token

_HELPER = 5  # words among which the auxiliary of a question stands
_REACH = 16  # shared words between two that may have changed places

_NONE = Token("", "", False)

Places = tuple[int, int]
"""Where a shared word stands in the one text and in the other."""


class _Spines(NamedTuple):
    """The stems of both texts without articles."""

    first: list[str]
    second: list[str]
    names: set[str]
    lexicon: Lexicon
    participles: frozenset[str] = frozenset()
    """Verbs that one text alone has in the passive."""
    agents: tuple[list[int], list[int]] = ([], [])
    """How many words for the agent of a passive stand before each place."""
    joints: tuple[list[int], list[int]] = ([], [])

    def quiet(self, stem: str) -> bool:
        return stem in self.lexicon.tables.quiet and stem not in self.names


def reversed_order(a: Sequence[Token], b: Sequence[Token], lexicon: Lexicon) -> bool:
    """Whether two shared words have changed places around a third that ties them together.

    "A X B" against "B X A" is an exchange when the neighbours of A and B are exchanged too: "In Python, how do I sort a
    list?" moves a phrase and keeps its neighbours. A passive on one side turns the expectation round.
    """
    names = {t.stem for tokens in (a, b) for t in tokens if t.name}
    s = _Spines(_spine(a, lexicon), _spine(b, lexicon), names, lexicon)
    passive = _passive(a, lexicon) != _passive(b, lexicon)
    order = _shared(s)
    if not passive and all(x[1] < y[1] for x, y in itertools.pairwise(order)):
        return _transposed(s, a, b) or _fronted(a, lexicon) != _fronted(b, lexicon)
    s = s._replace(
        participles=_participles(a, lexicon) ^ _participles(b, lexicon),
        agents=(_counts(s.first, {lexicon.by[0]}), _counts(s.second, {lexicon.by[0]})),
        joints=(_counts(s.first, lexicon.tables.joints), _counts(s.second, lexicon.tables.joints)),
    )
    if _transposed(s, a, b) or _asks_other_side(a, b, s):
        return True
    ties = _ties(a, b, s)
    for x, one in enumerate(order):
        if s.quiet(s.first[one[0]]):
            continue
        for y in range(x + 2, min(x + _REACH, len(order))):
            other = order[y]
            if not s.quiet(s.first[other[0]]):
                between = [p for p in order[x + 1 : y] if s.first[p[0]] in ties]
                if _contradicts(s, one, other, between, passive):
                    return True
    return False


def _spine(tokens: Sequence[Token], lexicon: Lexicon) -> list[str]:
    return [t.stem for t in tokens if t.word not in lexicon.articles and t.word not in STOPS]


def _counts(stems: list[str], among: Collection[str]) -> list[int]:
    return list(itertools.accumulate((stem in among for stem in stems), initial=0))


def _shared(s: _Spines) -> list[Places]:
    """The words that both texts have once, in the order of the first."""
    once, places = Counter(s.first), {stem: i for i, stem in enumerate(s.second)}
    times = Counter(s.second)
    return [(i, places[stem]) for i, stem in enumerate(s.first) if once[stem] == 1 and times[stem] == 1]


def _ties(a: Sequence[Token], b: Sequence[Token], s: _Spines) -> set[str]:
    """Words that tie a subject to an object. A gerund on one side does not: "book a hotel", "a hotel booking site"."""
    tables, ending = s.lexicon.tables, s.lexicon.by[2]
    gerunds = [{t.stem for t in tokens if ending and t.word.endswith(ending)} for tokens in (a, b)]
    return {
        stem
        for stem in s.first
        if stem not in tables.symmetric
        and (stem in tables.relations or not s.quiet(stem))
        and (stem in gerunds[0]) == (stem in gerunds[1])
    }


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


def _transposed(s: _Spines, a: Sequence[Token], b: Sequence[Token]) -> bool:
    """Whether two words have changed places, wherever they come, and nothing else: "Mary's father's boss", "Mary's
    boss's father".
    """
    if len(s.first) != len(s.second):
        return False
    apart = [i for i, (x, y) in enumerate(zip(s.first, s.second, strict=True)) if x != y]
    stems = {s.first[i] for i in apart}
    if len(stems) != 2 or any(s.second[i] not in stems for i in apart):
        return False
    if apart[1] - apart[0] < 2:
        one, other = stems
        return other in s.lexicon.tables.opposites.get(one, {}) or all(_parted(t, stems, s.lexicon) for t in (a, b))
    between = s.first[apart[0] + 1 : apart[1]]
    return not all(stem in s.lexicon.tables.symmetric for stem in between)


def _parted(tokens: Sequence[Token], stems: set[str], lexicon: Lexicon) -> bool:
    """Whether an article alone stands between two words: "is every square a rectangle"."""
    return any(
        {x.stem, z.stem} == stems and y.word in lexicon.articles
        for x, y, z in zip(tokens, tokens[1:], tokens[2:], strict=False)
    )


def _asks_other_side(a: Sequence[Token], b: Sequence[Token], s: _Spines) -> bool:
    """Whether one asks for the subject and the other for the object: "who killed Bill", "who did Bill kill"."""
    if not (a and b and _subject(a, s.lexicon) and _subject(b, s.lexicon)):
        return False
    if any(_open(tokens, s.lexicon) and not _passive(tokens, s.lexicon) for tokens in (a, b)):
        return False
    objects = [_asks_object(tokens, s) for tokens in (a, b)]
    first, second = ([t.stem for t in tokens if not s.quiet(t.stem)] for tokens in (a, b))
    turned = first != second or _passive(a, s.lexicon) != _passive(b, s.lexicon)
    return objects[0] != objects[1] and turned and sorted(first) == sorted(second)


def _open(tokens: Sequence[Token], lexicon: Lexicon) -> bool:
    """Whether an auxiliary leaves it open who acts: "which laws can judges", "which laws can bind"."""
    return any(t.word in lexicon.modals or lexicon.tenses.get(t.word) == "perfect" for t in tokens[1:_HELPER])


def _asks_object(tokens: Sequence[Token], s: _Spines) -> bool:
    """Whether a "who" is not the one who acts: "who did he call", "who was called"; not "who was it built by"."""
    helped = any(t.word in s.lexicon.helpers for t in tokens[1:_HELPER])
    words = [t.word for t in tokens if t.word not in STOPS]
    agent = s.lexicon.by[0] in (words[0], words[-1])
    return (helped or not s.participles.isdisjoint(_participles(tokens, s.lexicon))) and not agent


def _subject(tokens: Sequence[Token], lexicon: Lexicon) -> bool:
    return lexicon.questions.get(tokens[0].word) in ("", "person")


def _passive(tokens: Sequence[Token], lexicon: Lexicon) -> bool:
    """Whether an agent is named after an auxiliary: "was built by"."""
    by, forms, gerund = lexicon.by
    seen = False
    for token, after in itertools.pairwise(tokens):
        if token.word in forms:
            seen = True
        elif token.word == by and seen and not (gerund and after.word.endswith(gerund)):
            return True
    return False


def _participles(tokens: Sequence[Token], lexicon: Lexicon) -> frozenset[str]:
    """Verbs that may be passive: "was built", "is the house built", "hit by"."""
    by, forms, _ = lexicon.by
    found: set[str] = set()
    left = 0
    for token, after in itertools.pairwise((*tokens, _NONE)):
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


def _fronted(tokens: Sequence[Token], lexicon: Lexicon) -> bool:
    """Whether the agent of a passive is asked for: "by whom"."""
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
