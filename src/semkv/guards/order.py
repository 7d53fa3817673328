"""Guards over who does what to whom: shared words that come in another order, speakers and owners in other roles."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

from semkv.guards.language import Language, Token
from semkv.guards.pairs import Pair, Tokens
from semkv.guards.text import END, STOPS, Text

_HELPER = 5  # words among which the auxiliary of a question stands
_REACH = 16  # shared words between two that may have changed places
_VERB = 4  # words from a subject to its verb: "I have not yet been asked"

Places = tuple[int, int]
"""Where a shared word stands in the one text and in the other."""


def word_order(p: Pair) -> str | None:
    """Subject and object exchanged."""
    return "word order" if not p.converse and _Spines(p).reversed() else None


def sides(p: Pair) -> str | None:
    """Another word after a side or a "than", or after the "that" of a noun: "above the ring"; "birds that eat
    owls", "birds that owls eat". Or a color, a size and the like at another noun: "a green ball and a ring"."""
    if _attached(p):
        return "word order"
    if (p.language.around | p.language.relatives).isdisjoint(p.words):
        return None
    first, second = (_after(text, p.language) for text in (p.a, p.b))
    if first == second or first.keys() != second.keys() or p.converse:
        return None
    shared = p.a.stems.keys() & p.b.stems.keys()
    return "word order" if {*first.values(), *second.values()} <= {"", *shared} else None


def _attached(p: Pair) -> bool:
    """Whether a word that tells objects apart stands before another of the nouns that both texts have."""
    if p.language.grouped.isdisjoint(p.a.words & p.b.words):
        return False
    first, second = (
        {x.word: y.stem for x, y in itertools.pairwise(text.spine) if x.word in p.language.grouped}
        for text in (p.a, p.b)
    )
    shared = (p.a.stems.keys() & p.b.stems.keys()) - p.language.quiet - p.language.groupings
    return any(
        stem != second[word] and {stem, second[word]} <= shared for word, stem in first.items() if word in second
    )


def around(p: Pair) -> str | None:
    """Shared words in another order around a side or a "than": "left of the cone", where the cone moved, is another
    place."""
    pivots = p.language.around
    if pivots.isdisjoint(p.a.words) or pivots.isdisjoint(p.b.words) or p.converse:
        return None
    shared = {stem for stem, times in p.a.stems.items() if times == 1 and p.b.stems.get(stem) == 1} - p.language.quiet
    first, second = (_around(text.tokens, shared, pivots) for text in (p.a, p.b))
    return "word order" if first != second else None


def _around(tokens: Iterable[Token], shared: Collection[str], pivots: Collection[str]) -> list[str]:
    """The shared words in order; sides that follow one another, as in a choice of two, are one."""
    found = ["" if t.word in pivots else t.stem for t in tokens if t.word in pivots or t.stem in shared]
    return [stem for stem, before in zip(found, ["-", *found], strict=False) if stem or before]


def _after(text: Text, language: Language) -> dict[str, str]:
    """The first word of content after each of them in its clause."""
    found = {}
    for i, token in enumerate(text.tokens):
        pivot = token.word in language.around
        if pivot or (token.word in language.relatives and i and text.tokens[i - 1].word not in language.function):
            after = (t.stem for t in text.tokens[i + 1 : i + _HELPER] if t.word not in language.function)
            found[token.word] = next(after, "")
    return found


def focus(p: Pair) -> str | None:
    """An "only" that has moved to another word: "only I saw her", "I saw only her"; "the only", "only the"."""
    words, articles = p.language.focusing, p.language.articles
    if words.isdisjoint(p.a.words) or words.isdisjoint(p.b.words):
        return None
    first, second = _focused(p.a, p.language), _focused(p.b, p.language)
    both = p.a.stems.keys() & p.b.stems.keys()
    moved = any(x.isdisjoint(y) and x | y <= both for x, y in zip(first, second, strict=False))
    one, other = (
        sum(x.word in articles and y.word in words for x, y in itertools.pairwise(text.tokens)) for text in (p.a, p.b)
    )
    return "word order" if len(first) == len(second) and (moved or one != other) else None


def _focused(text: Text, language: Language) -> list[set[str]]:
    """To what each "only" belongs: to the next word, with what follows its preposition ("only open in summer"), or at
    the end of a clause to the last one."""
    found = []
    for i in [i for i, t in enumerate(text.spine) if t.word in language.focusing]:
        after = itertools.takewhile(lambda t: t.word not in STOPS, text.spine[i + 1 : i + 1 + _REACH])
        said = [t.stem for t in after if t.word not in language.tenses and t.word not in language.modals][:3]
        own = [stem for stem in said if stem not in language.ties]
        both = len(own) == 2 and said[1] != own[1]
        found.append(set(own[: 1 + both]) or {t.stem for t in text.spine[max(0, i - 1) : i]})
    return found


class _Spines:
    """The stems of both texts without articles and signs, between two empty ones."""

    def __init__(self, p: Pair) -> None:
        self.p, self.language = p, p.language
        self.first, self.second = (
            ["", *[t.stem for t in text.spine if t.word not in STOPS], ""] for text in (p.a, p.b)
        )

    def reversed(self) -> bool:
        """Whether two shared words have changed places around a third that ties them together."""
        a, b, language = self.p.a, self.p.b, self.language
        passive = _passive(a, language) != _passive(b, language)
        places = _once(self.second)
        shared = [(i, places[stem]) for stem, i in _once(self.first).items() if stem in places]
        if self._transposed():
            return True
        order = [j for _, j in shared]
        if not passive and order == sorted(order):
            return _fronted(a, language) != _fronted(b, language)
        return self._asks_other_side() or self._exchanged(shared, passive)

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
            return not self.language.joined.issuperset(self.first[apart[0] + 1 : apart[1]])
        one, other = stems
        return other in self.language.opposed.get(one, {}) or all(
            any(y.word in self.language.articles and {x.stem, z.stem} == stems for x, y, z in _triples(text.tokens))
            for text in (self.p.a, self.p.b)  # "is every square a rectangle"
        )

    def _asks_other_side(self) -> bool:
        """Whether one asks for the subject and the other for the object: "who killed Bill", "who did Bill kill"."""
        a, b, language = self.p.a, self.p.b, self.language
        passives = [_passive(text, language) for text in (a, b)]
        if not all(
            asks_for_one(text, language) and (passive or not _open(text, language))
            for text, passive in zip((a, b), passives, strict=True)
        ):
            return False
        first, second = ([t.stem for t in text.tokens if t.stem not in language.quiet] for text in (a, b))
        turned = first != second or passives[0] != passives[1]
        return turned and sorted(first) == sorted(second) and self._asks_object(a) != self._asks_object(b)

    @cached_property
    def participles(self) -> set[str]:
        """Verbs that one text alone has in the passive."""
        return _participles(self.p.a, self.language) ^ _participles(self.p.b, self.language)

    def _asks_object(self, text: Text) -> bool:
        """Whether a "who" is not the one who acts: "who did he call", "who was called"; not "who was it built by"."""
        helped = any(t.word in self.language.helpers for t in text.tokens[1:_HELPER])
        words = [t.word for t in text.tokens if t.word not in STOPS]
        passive = not self.participles.isdisjoint(_participles(text, self.language))
        return (helped or passive) and self.language.by not in (words[0], words[-1])

    def _exchanged(self, shared: list[Places], passive: bool) -> bool:
        """Whether "A X B" stands against "B X A", and the neighbours of A and B are exchanged too: "In Python, how do I
        sort a list?" moves a phrase and keeps its neighbours. A passive on one side turns the expectation round.
        """
        a, b, quiet, fillers = self.first, self.second, self.language.quiet, self.language.fillers
        ways, participles = self.language.ways, self.participles
        stems = [a[i] for i, _ in shared]
        ties = self._ties(stem for stem in stems if stem not in quiet or stem in self.language.ties)
        telling = [a[i] not in quiet or (a[i] in fillers and self._goal(i, j)) for i, j in shared]
        (agents, agents_b), (joints, joints_b) = (self._counts(w) for w in ({self.language.by}, self.language.joining))
        told = [x for x, tells in enumerate(telling) if tells]
        near = [(x, y) for x in told for y in range(x + 2, min(x + _REACH, len(shared))) if telling[y]]
        for x, y in near:
            (i, j), (k, m) = shared[x], shared[y]
            if m > j and not passive:
                continue
            between = [shared[z] for z in range(x + 1, y) if stems[z] in ties]
            if m > j:
                tied = any(j < q < m and a[n] in participles for n, q in between)
                found = tied and (agents[k] > agents[i]) != (agents_b[m] > agents_b[j])
            else:
                between = [(n, q) for n, q in between if m < q < j and a[n] not in participles]
                if passive:  # who refuses to be treated is not who refuses to treat
                    found = any(a[n + 1] in ways and b[q + 1] in ways for n, q in between)
                else:  # what is one noun here may be parted by a preposition there: "May deadline", "deadline in May"
                    compound = self.language.ties.isdisjoint([a[n] for n, _ in between]) and (
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

    def _goal(self, i: int, j: int) -> bool:
        """Whether a filler is where something goes in one text and what goes there in the other: "into main"."""
        ways, a, b = self.language.ways, self.first, self.second
        return (b[j + 1] in ways if a[i - 1] in ways else a[i + 1] in ways) and (a[i - 1] in ways) != (b[j - 1] in ways)

    def _ties(self, shared: Iterable[str]) -> set[str]:
        """Words that tie a subject to an object. A gerund on one side does not: "book a room", "room booking site"."""
        ties, gerund = set(shared) - self.language.joined, self.language.gerund
        first, second = (
            {t.stem for t in text.tokens if t.stem in ties and t.word.endswith(gerund)} for text in (self.p.a, self.p.b)
        )
        return ties - (first ^ second)

    def _swapped(self, one: Places, other: Places) -> bool:
        """Whether at least two of the four neighbours have changed places with the words."""
        (i, j), (k, m), a, b = one, other, self.first, self.second
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


def agreeing(first: Sequence[str], second: Sequence[str]) -> int:
    """How many items two sequences share at the start."""
    short = min(len(first), len(second))
    return next((n for n in range(short) if first[n] != second[n]), short)


def asks_for_one(text: Text, language: Language) -> bool:
    """Whether a text starts with "who", "what" or "which"."""
    return bool(text.tokens) and language.questions.get(text.tokens[0].word) in ("", "person")


def _triples(tokens: Tokens) -> Iterable[tuple[Token, Token, Token]]:
    return zip(tokens, tokens[1:], tokens[2:], strict=False)


def _once(stems: list[str]) -> dict[str, int]:
    """Where each stem stands that comes once, in order."""
    places = {stem: i for i, stem in enumerate(stems)}
    if len(places) < len(stems):
        times = Counter(stems)
        places = {stem: i for stem, i in places.items() if times[stem] == 1}
    return places


def _open(text: Text, language: Language) -> bool:
    """Whether an auxiliary leaves it open who acts: "which laws can judges", "which laws can bind"."""
    words = [t.word for t in text.tokens[1:_HELPER]]
    return any(word in language.modals or language.tenses.get(word) == "perfect" for word in words)


def _passive(text: Text, language: Language) -> bool:
    """Whether an agent is named after an auxiliary: "was built by"."""
    if language.by not in text.words or language.passive.isdisjoint(text.words):
        return False
    start = next(i for i, t in enumerate(text.tokens) if t.word in language.passive)
    return any(t.word == language.by for t in text.tokens[start:])


def _participles(text: Text, language: Language) -> set[str]:
    """Verbs that may be passive: "was built", "is the house built", "hit by"."""
    found: set[str] = set()
    left = 0
    for token, after in itertools.pairwise((*text.tokens, END)) if not language.passive.isdisjoint(text.words) else ():
        if token.word in language.passive:
            left = _REACH
        elif token.stem in language.ties or token.word in STOPS:
            left = 0
        elif left and token.word not in language.function and (after.word == language.by or language.is_past(token)):
            found.add(token.stem)
        left = max(0, left - 1)
    return found


def _fronted(text: Text, language: Language) -> bool:
    """Whether the agent of a passive is asked for: "by whom"."""
    words = [t.word for t in text.tokens[:2]]
    return len(words) > 1 and words[0] == language.by and words[1] in language.questions


def role(p: Pair) -> str | None:
    """The speaker, a third person or an owner in the place of another.

    One does in one text what is done to him in the other, or what somebody does there whom he does it to; or an owner
    has another of two things: "my neighbour's tree fell on my fence".
    """
    if _owns_another(p):
        return "person"
    for one in p.language.selves:
        if not one.keys().isdisjoint(p.words):
            first, second = _acts(p.a, one, p.language), _acts(p.b, one, p.language)
            if _turned(p.a, first, p.b, second, p.language) or _turned(p.b, second, p.a, first, p.language):
                return "person"
    return None


_Acts = tuple[dict[str, str], set[str]]


def _turned(mine: Text, acted: _Acts, other: Text, others: _Acts, language: Language) -> bool:
    """Whether the speaker acts in the first text alone, and is acted on or replaced in the other."""
    acts, suffers = acted
    own = acts.keys() - suffers - others[0].keys()
    if not own or own & others[1]:
        return bool(own)
    first = next(i for i, t in enumerate(mine.tokens) if t.stem in own)
    before, after = ({t.stem for t in part} for part in (mine.tokens[:first], mine.tokens[first:]))
    objects = after - before - others[0].keys()
    return any(
        x.stem in own and acts[x.stem] == y.stem and _subject(other.spine[max(0, i - _VERB) : i], language) in objects
        for i, (x, y) in enumerate(itertools.pairwise(other.spine))
    )


def _acts(text: Text, one: Mapping[str, bool], language: Language) -> _Acts:
    """Verbs of which ``one`` is the subject, each with the word after it, and verbs of which he is the object."""
    acts: dict[str, str] = {}
    suffers: set[str] = set()
    spine = text.spine
    for i, token in enumerate(spine):
        acting = one.get(token.word)
        if acting:
            start = i + 1
            while start < len(spine) and spine[start].stem in language.joining:  # "I in Canada send"
                start += 2
            k = next((k for k in range(start, min(start + _VERB, len(spine))) if _verb(spine[k], language)), None)
            if k is None or any(t.word in STOPS or t.word in language.parting for t in spine[start:k]):
                continue
            if spine[k - 1].word in language.passive and language.is_past(spine[k]):
                suffers.add(spine[k].stem)
            else:
                acts.setdefault(spine[k].stem, spine[k + 1].stem if k + 1 < len(spine) else "")
                if k + 2 < len(spine) and spine[k + 1].word.endswith(language.gerund):  # "I stop hitting"
                    acts.setdefault(spine[k + 1].stem, "")
        elif i and acting is not None and _verb(spine[i - 1], language):
            suffers.add(spine[i - 1].stem)
    return acts, suffers


def _verb(token: Token, language: Language) -> bool:
    return token.word[0].isalpha() and token.word not in language.function


def _subject(tokens: Tokens, language: Language) -> str:
    """The word before a verb and its auxiliaries; "" where something else stands between them."""
    helpers = (language.tenses, language.modals, language.negations, language.between)
    found = next((t for t in reversed(tokens) if not any(t.word in table for table in helpers)), None)
    return found.stem if found is not None and _verb(found, language) else ""


def _owns_another(p: Pair) -> bool:
    """Whether an owner has another of two things that both texts speak of."""
    owns, language = p.language.owns, p.language
    first, second = (
        {x.stem: z.stem for x, y, z in _triples(text.tokens) if y.word == owns and _verb(x, language)}
        for text in (p.a, p.b)
    )
    both = p.a.stems.keys() & p.b.stems.keys()
    return any(thing != second.get(owner, thing) and {thing, second[owner]} <= both for owner, thing in first.items())
