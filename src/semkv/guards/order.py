"""Guards over who does what to whom: shared words that go with others, or come in another order, than in the other
text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from semkv.guards.language import Language, Token
from semkv.guards.pairs import Pair, Tokens
from semkv.guards.text import END, STOPS, Text

_HELPER = 6  # words among which the auxiliary of a question stands
_REACH = 24  # words between two that may have changed places
_BLOCK = 8  # words that move together, on each side of one
_ASKED = ("", "person")  # senses of questions for the one who acts, or is acted on
_PERSON = "?"  # before the sense of a word for a person; alone for who is asked for

Places = tuple[int, int]
"""Where a shared word stands in the one text and in the other."""
Bonds = Mapping[str, set[str]]
"""The stems that a word goes with."""


def bonds(p: Pair) -> str | None:
    """A word that goes with another of the words that both texts have."""
    shared = p.shared | {""}
    for reason, of in () if p.converse else _BONDS:
        first, second = of(p.a), of(p.b)
        for word in first.keys() & second.keys():
            if first[word].isdisjoint(second[word]) and first[word] | second[word] <= shared:
                return reason
    return None


def _described(text: Text) -> Bonds:
    """A color, size or the like with its noun: "a green ball and a ring"."""
    language = text.language
    if language.grouped.isdisjoint(text.words):
        return {}
    return {
        x.word: {y.stem}
        for x, y in itertools.pairwise(text.spine)
        if x.word in language.grouped and y.stem not in language.quiet and y.stem not in language.groupings
    }


def _followed(text: Text) -> Bonds:
    """A side, a "than", or the "that" of a noun with the next word of content: "birds that eat owls"."""
    found: dict[str, set[str]] = {}
    language = text.language
    if language.around.isdisjoint(text.words) and language.relatives.isdisjoint(text.words):
        return found
    for i, token in enumerate(text.tokens):
        noun = i > 0 and text.tokens[i - 1].word not in language.function
        if token.word in language.around or (token.word in language.relatives and noun):
            after = (t.stem for t in text.tokens[i + 1 : i + _HELPER] if t.word not in language.function)
            found[token.word] = {next(after, "")}
    return found


def _owned(text: Text) -> Bonds:
    """An owner with what he owns: "my neighbour's tree fell on my fence"."""
    owns = text.language.owns
    found = triples(text.tokens) if owns in text.words else ()
    return {x.stem: {z.stem} for x, y, z in found if y.word == owns and _carries(x, text.language)}


def _focused(text: Text) -> Bonds:
    """An "only" with the next word and what follows its preposition ("only open in summer"), or with the last word of
    its clause."""
    language, found = text.language, dict[str, set[str]]()
    if language.focusing.isdisjoint(text.words):
        return found
    articles = {y.word: {x.stem} for x, y in itertools.pairwise(text.tokens) if x.word in language.articles}
    for i in [i for i, t in enumerate(text.spine) if t.word in language.focusing]:
        after = itertools.takewhile(lambda t: t.word not in STOPS, text.spine[i + 1 : i + 1 + _REACH])
        said = [t.stem for t in after if t.word not in language.tenses and t.word not in language.modals][:3]
        own = [stem for stem in said if stem not in language.ties]
        reach = 2 if own[1:] and said[1] != own[1] else 1
        found[text.spine[i].word] = set(own[:reach]) or {t.stem for t in text.spine[max(0, i - 1) : i]}
    return found | {word: articles[word] for word in found.keys() & articles.keys()}  # "the only doctor"


_BONDS: tuple[tuple[str, Callable[[Text], Bonds]], ...] = (
    ("word order", _described),
    ("word order", _followed),
    ("word order", _focused),
    ("person", _owned),
)


def word_order(p: Pair) -> str | None:
    """Two words in each other's place around a third: "the fox chases the hen", "my boss lies to me"."""
    return None if p.converse else _Order(p).exchange()


class _Order:
    """The words of both texts, each with the one who acts before the verb, between two empty ones."""

    def __init__(self, p: Pair) -> None:
        self.p, self.language = p, p.language
        self.first, self.second = (["", *_acting(text), ""] for text in (p.a, p.b))
        self.places, there = _places(self.first), _places(self.second)
        self.shared: list[Places] = []
        for stem, places in self.places.items():
            others = there.get(stem, [])
            if len(places) == len(others) or stem.startswith(_PERSON):
                self.shared += zip(places, others, strict=False)
        self.shared.sort()

    def exchange(self) -> str | None:
        """Why the order tells one text from the other."""
        order = [place for _, place in self.shared]
        if order == sorted(order):
            return None
        a, b = self.p.a, self.p.b
        first, second = ({t.stem for t in x.tokens if t.word.endswith(self.language.gerund)} for x in (a, b))
        self.gerunds = first & second
        # "book a room", "room booking"; "the time is shown", "shows the time"
        self.loose = self.language.joined | (first ^ second) | (_participles(a) ^ _participles(b))
        for x, (i, j) in enumerate(self.shared):
            for y in range(x + 1, len(self.shared)):
                k, m = self.shared[y]
                if k - i > _REACH:
                    break
                words = self.first[i], self.first[k]
                if 0 < j - m <= _REACH and all(map(self._moves, words)) and self._exchanged(x, y):
                    return "person" if any(len(word) > 1 and word[0] == _PERSON for word in words) else "word order"
        return None

    def _moves(self, word: str) -> bool:
        return word not in self.language.functions or word in self.language.pointing

    def _exchanged(self, x: int, y: int) -> bool:
        """Whether two shared words have changed places around another that ties them, and their neighbors with them:
        "In Python, how do I sort a list?" moves a phrase and keeps its neighbors."""
        a, b, language = self.first, self.second, self.language
        (i, j), (k, m) = self.shared[x], self.shared[y]
        if (k, m) == (i + 1, j - 1) and a[k] in language.opposed.get(a[i], {}):
            return True  # "hide shown files"
        if (k, m) == (i + 1, j - 1) and a[i - 1] == b[m - 1] and not self.gerunds.isdisjoint((a[i], a[k])):
            return True  # "my brother hitting me", "hitting my brother"
        low, high = self._block(i, j)
        left, right = self._block(k, m)
        between = [a[n] for n, q in self.shared[x + 1 : y] if i + high < n < k - left and m < q < j]
        ties = list(filter(self._ties, between))
        if not language.joined.isdisjoint(a[i + 1 : k]):  # "distilled water and purified water"
            ties = [stem for stem in ties if stem in language.ties or len(self.places[stem]) == 1]
        # what is one noun here may be parted by a preposition there: "May deadline", "deadline in May"
        joints = [sorted(language.joining.intersection(part)) for part in (a[i + 1 : k], b[m + 1 : j])]
        if not ties or (language.ties.isdisjoint(ties) and joints[0] != joints[1] and _PERSON not in (a[i], a[k])):
            return False
        exchanged = (
            (a[i - low - 1] == b[m - left - 1])
            + (a[k - left - 1] == b[j - low - 1])
            + (a[i + high + 1] == b[m + right + 1])
            + (a[k + right + 1] == b[j + high + 1])
        )
        return exchanged >= 2

    def _ties(self, stem: str) -> bool:
        """Whether a word ties a subject to an object."""
        language = self.language
        said = stem not in language.functions and not stem.startswith(_PERSON)
        return stem not in self.loose and (said or stem in language.ties or stem in language.articles)

    def _block(self, i: int, j: int) -> Places:
        """How far the two texts agree to the left and to the right of a shared word."""
        a, b = self.first, self.second
        low = agreeing(a[max(1, i - _BLOCK) : i][::-1], b[max(1, j - _BLOCK) : j][::-1])
        ends = min(i + 1 + _BLOCK, len(a) - 1), min(j + 1 + _BLOCK, len(b) - 1)
        return low, agreeing(a[i + 1 : ends[0]], b[j + 1 : ends[1]])


def _acting(text: Text) -> list[str]:
    """The stems of a text, with the one who acts before the verb: "the hen was chased by the fox" as "the fox chased
    the hen", "who did he call" as "he called who". An article stays behind a noun: "is every square a rectangle"."""
    language = text.language
    tokens = [
        token
        for before, token in itertools.pairwise((END, *text.tokens))
        if token.word not in STOPS
        and (token.word not in language.articles or (_carries(before, language) and token.word not in language.persons))
    ]
    words = [t.word for t in tokens]
    if _passive(text):
        helper = next(i for i, word in enumerate(words) if word in language.passive)
        by = words.index(language.by, helper)
        if not helper or tokens[helper - 1].stem not in language.ties:  # "refuse to be treated by"
            verb = next((i for i in range(by - 1, helper, -1) if language.is_past(tokens[i])), by - 1)
            agent = tokens[by + 1 :] or tokens[:1]
            tokens = [*agent, *tokens[verb:by], *tokens[by + 1 == len(tokens) : verb]]
    else:
        asked = next((i for i, word in enumerate(words[:2]) if language.questions.get(word) in _ASKED), _HELPER)
        for i, (token, after) in enumerate(itertools.pairwise(tokens[:_HELPER])):
            perfect = language.tenses.get(token.word) == "perfect" and not language.is_past(after)
            if i > asked and (token.word in language.helpers or perfect):
                tokens = [*tokens[:asked], *tokens[i + 1 :], *tokens[asked:i]]
                break
    return [_role(token, language) for token in tokens]


def _role(token: Token, language: Language) -> str:
    """A word's stem, but one word for all forms of a person."""
    if language.questions.get(token.word) in _ASKED:
        return _PERSON
    return _PERSON + language.persons[token.word] if token.word in language.persons else token.stem


def _places(stems: Sequence[str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for i, stem in enumerate(stems):
        found.setdefault(stem, []).append(i)
    return found


def agreeing(first: Sequence[str], second: Sequence[str]) -> int:
    """How many items two sequences share at the start."""
    short = min(len(first), len(second))
    return next((n for n in range(short) if first[n] != second[n]), short)


def triples(tokens: Tokens) -> Iterable[tuple[Token, Token, Token]]:
    """Every three tokens in a row."""
    return zip(tokens, tokens[1:], tokens[2:], strict=False)


def _passive(text: Text) -> bool:
    """Whether an agent is named after an auxiliary: "was built by"."""
    language = text.language
    if language.by not in text.words:
        return False
    after = itertools.dropwhile(lambda t: t.word not in language.passive, text.tokens)
    return any(t.word == language.by for t in after)


def _participles(text: Text) -> set[str]:
    """Verbs that may be in a passive without an agent: "was built"."""
    language = text.language
    if language.passive.isdisjoint(text.words) or _passive(text):
        return set()
    return {t.stem for t in text.tokens if language.is_past(t) and t.word not in language.function}


def _carries(token: Token, language: Language) -> bool:
    """Whether a word may be a verb or a noun."""
    return token.word[0].isalpha() and token.word not in language.function
