"""Guards: words that turn a similar sentence into a different question.

Sentence embeddings place a sentence and its reversal almost on the same spot: "left of" against "right of" has a cosine
of .99 with all-MiniLM-L6-v2. A guard looks at the words instead. Each is a pure function of two texts, costs some
microseconds, and can only veto a match, never make one. English; a language is one `Lexicon`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from semkv.keys import normalise

Guard = Callable[[str, str], str | None]
"""Takes two similar texts; says why they must not stand in for each other, or None."""

_WORD = re.compile(r"\d+(?:[.,:/-]\d+)*%?|[^\W\d_]+(?:['’][^\W\d_]+)?")


def _group(*senses: str) -> Mapping[str, str]:
    """Words to the sense they stand for; words of one sense stand together, separated by blanks."""
    return MappingProxyType({word: sense.split()[0] for sense in senses for word in sense.split()})


@dataclass(frozen=True, slots=True)
class Lexicon:
    """The words of one language that the guards know.

    Attributes:
        negations: words that deny.
        numbers: number words, to digits.
        groups: by name, words that exclude one another ("left", "right"), each mapped to its sense.
        function_words: words whose order and presence carry no content.
    """

    negations: frozenset[str]
    numbers: Mapping[str, str]
    groups: Mapping[str, Mapping[str, str]]
    function_words: frozenset[str] = field(default_factory=frozenset)


_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()

ENGLISH = Lexicon(
    negations=frozenset("no not never none nothing nobody nowhere neither nor without cannot".split()),
    numbers=MappingProxyType({word: str(n) for n, word in enumerate(_NUMBERS)}),
    groups=MappingProxyType(
        {
            "direction": _group("left leftmost", "right rightmost"),
            "height": _group("above over atop upper top up", "below under beneath underneath lower bottom down"),
            "depth": _group("front", "behind back rear"),
            "place": _group("inside within", "outside"),
            "time": _group("before earlier until", "after later since"),
            "size": _group("large big huge", "small little tiny"),
            "comparison": _group(
                "larger bigger greater taller longer higher more most largest biggest",
                "smaller shorter less fewer least smallest",
            ),
            "sameness": _group("same equal identical alike", "different unequal differ"),
            "order": _group("first", "second", "third", "last final"),
            "switch": _group("enable enabled enabling", "off disable disabled disabling"),
            "change": _group("increase rise grow", "decrease fall shrink reduce"),
            "color": _group(
                *"red orange yellow green blue purple pink brown black white silver gold beige cyan magenta".split(),
                "gray grey",
            ),
            "age": _group("new young newest youngest", "old oldest"),
            "state": _group("open opened", "closed shut"),
            "choice": _group("and both", "or either"),
        }
    ),
    function_words=frozenset(
        "a an the is are was were be been do does did have has had of to it its this that these those there any some "
        "what which who whom whose how where when why you see can could would will shall may might i me my we our us "
        "your as with for by at from and or both either also than then so such please tell show give".split()
    ),
)


def words(text: str) -> list[str]:
    """The words and numbers of a text, folded, in order."""
    return _WORD.findall(normalise(text))


def veto(a: str, b: str, lexicon: Lexicon = ENGLISH) -> str | None:
    """Why two similar texts must not stand in for each other, or None where no guard objects.

    Returns:
        ``negation``, ``number``, a group's name such as ``direction``, or ``word order``.
    """
    first, second = words(a), words(b)
    if _negations(first, lexicon) != _negations(second, lexicon):
        return "negation"
    if _numbers(first, lexicon) != _numbers(second, lexicon):
        return "number"
    for name, group in lexicon.groups.items():
        if _senses(first, group) != _senses(second, group):
            return name
    return "word order" if _reordered(first, second, lexicon) else None


def no_veto(_a: str, _b: str) -> None:
    """The guard that never objects: what ``--disable-guards`` and ``--match any`` use."""


def _negations(text: list[str], lexicon: Lexicon) -> int:
    return sum(word in lexicon.negations or word.endswith(("n't", "n’t")) for word in text)


def _numbers(text: list[str], lexicon: Lexicon) -> Counter[str]:
    return Counter(lexicon.numbers.get(word, word) for word in text if word in lexicon.numbers or word[0].isdigit())


def _senses(text: list[str], group: Mapping[str, str]) -> Counter[str]:
    return Counter(group[word] for word in text if word in group)


def _reordered(first: list[str], second: list[str], lexicon: Lexicon) -> bool:
    """Whether the content words that both texts have come in another order: subject and object may have changed."""
    content = set(first) & set(second) - lexicon.function_words
    return [w for w in first if w in content] != [w for w in second if w in content]
