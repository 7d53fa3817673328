"""Rules over capitals that typing does not explain."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cached_property

from semkv_guards.language import Words
from semkv_guards.pairs import Pair
from semkv_guards.rules.rule import rule
from semkv_guards.spelling import may_be_word
from semkv_guards.text import Text

_SYMBOL = 2  # letters of a chemical symbol


@rule(
    reasons=("case",),
    tables=("twofold", "homographs"),
    vetoes=(
        ("Polish furniture tips", "polish furniture tips"),
        ("Windows crashed", "windows crashed"),
    ),
    allows=(("Furniture tips", "furniture tips"),),
)
def capital_at_start(pair: Pair) -> str | None:
    """A capital at the start is all that tells a name from a word: "Polish tips", "polish tips"."""
    if pair.a.starts == pair.b.starts:
        return None
    language = pair.language
    apart = (pair.a.starts ^ pair.b.starts) & (language.twofold | language.homographs)
    if not apart or [t.word for t in pair.a.tokens] != [t.word for t in pair.b.tokens]:
        return None
    said = language.function - language.tenses.keys()  # "will it", "will was"
    may_be_names = (
        after.word not in said or token.word not in language.function
        for token, after in itertools.pairwise(pair.a.tokens)
        if token.word in apart
    )
    return "case" if any(may_be_names) else None


@rule(
    reasons=("case",),
    vetoes=(
        ("Is NO toxic?", "Is No toxic?"),
        ("What is a CAT scan?", "What is a cat scan?"),
        ("Is mercury heavy?", "Is Mercury heavy?"),
        ("How do I delete Photos?", "How do I delete photos?"),
    ),
    allows=(
        ("How tall is the Eiffel Tower?", "How tall is the eiffel tower?"),
        ("What is the TCP port?", "What is the tcp port?"),
        ("What does NASA stand for?", "what does nasa stand for?"),
    ),
)
def capitals(pair: Pair) -> str | None:
    """A word has other capitals, beyond the case of typing.

    It is in capitals and the same word is small, a name and what may be a word when small, or any word where letters
    are asked about.
    """
    first = pair.a.cased
    second = pair.b.cased
    if first == second or first is None or second is None:
        return None
    case = _Case(pair)
    for written in first ^ second:
        mine, other = (pair.a, pair.b) if written in first else (pair.b, pair.a)
        if case.differs(written, mine, other):
            return "case"
    return None


class _Case:
    """What the case of two texts says."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.language = pair.language

    @cached_property
    def letters_asked(self) -> bool:
        """Whether both texts ask about letters."""
        spelling = self.language.spelling
        return not (
            spelling.isdisjoint(self.pair.a.words) or spelling.isdisjoint(self.pair.b.words)
        )

    @cached_property
    def named(self) -> set[str]:
        """Words that are identifiers in both texts."""
        return self._after(self.language.naming)

    @cached_property
    def coded(self) -> set[str]:
        """Those whose case counts whatever else is written."""
        return self._after(self.language.coding)

    @cached_property
    def writes_acronyms_small(self) -> dict[Text, bool]:
        """By text, whether the other one writes small what can only be an acronym of it."""
        a = self.pair.a
        b = self.pair.b
        return {a: self._small_acronyms(a, b), b: self._small_acronyms(b, a)}

    def differs(self, written: str, mine: Text, other: Text) -> bool:
        """Whether a word as it is written in one text alone is another one than the same word of the other text."""
        word = written.casefold()
        if not self._is_compared(word, mine, other):
            return False
        if not self.letters_asked and written.isupper() and self.writes_acronyms_small[mine]:
            return False
        theirs = _as_written(word, other)
        if self._is_exact(word, other):
            return bool(theirs)
        return any(
            self._is_another(written, their, other) or self._is_named(their, mine, other)
            for their in theirs
        )

    def _is_compared(self, word: str, mine: Text, other: Text) -> bool:
        """Whether both texts have a word, and its case in the other one is neither that of a sentence nor of "I"."""
        is_pronoun = len(word) == 1 and word in self.language.persons
        in_both = word in mine.words and word in other.words
        return in_both and word not in other.starts and not is_pronoun

    def _is_exact(self, word: str, other: Text) -> bool:
        """Whether every capital of a word counts."""
        if self.letters_asked or word in self.coded:
            return True
        return word in self.named and bool(other.cased or other.starts)

    def _is_another(self, written: str, their: str, other: Text) -> bool:
        """Whether a word with capitals is another one than the same word as the other text writes it."""
        language = self.language
        if not their.islower():
            return self._is_other_name(their)
        if their in other.quantities.words:
            return False
        if not written.isascii() and len(written) == 1:  # "Ω" and "ω"
            return True
        if written.isupper() and len(written) > 1:
            if other.is_small and their not in language.function:
                return False
            return not language.vowels or not set(their).isdisjoint(language.vowels)
        return their in language.twofold and bool(other.cased or other.starts)

    def _is_named(self, their: str, mine: Text, other: Text) -> bool:
        """Whether a small word that may be a word is a name in the other text: "photos", "Photos"; not as a part of a
        longer one that can be nothing else, "Eiffel Tower"."""
        if not (other.cased or other.starts) or not may_be_word(their):
            return False
        is_quoted = any(their in quote.split() for quote in mine.quotes & other.quotes)
        if is_quoted or len(their) == 1 or their in self.language.homographs:
            return False
        names = [t.word if t.name else "" for t in mine.tokens]
        beside = [
            names[near]
            for at, name in enumerate(names)
            for near in (at - 1, at + 1)
            if name == their and 0 <= near < len(names)
        ]
        return all(may_be_word(name) for name in beside)

    def _is_other_name(self, their: str) -> bool:
        """Whether a word with capitals has other ones as a name or a chemical symbol."""
        folded = their.casefold()
        if folded in self.language.twofold:
            return True
        return len(their) == _SYMBOL and self.language.stem(folded) not in self.language.classes

    def _after(self, naming: Words) -> set[str]:
        """The words that are identifiers in both texts by a word before them: "the branch Prod", "deploy to Prod"."""
        return self._named_in(self.pair.a, naming) & self._named_in(self.pair.b, naming)

    def _named_in(self, text: Text, naming: Words) -> set[str]:
        if naming.isdisjoint(text.words):
            return set()
        left_out = self.language.ways.keys() - self.language.joints
        words = [t.word for t in text.without_articles if t.word not in left_out]
        return {after for before, after in itertools.pairwise(words) if before in naming}

    def _small_acronyms(self, mine: Text, other: Text) -> bool:
        """Whether the other text writes small what can only be an acronym: it may do so with others, "tcp and udp"."""
        vowels = self.language.vowels
        if not vowels:
            return False
        written = _folded(other.cased or ())
        acronyms = _folded(
            word for word in mine.cased or () if len(word) > 1 and word.isupper() and word.isalpha()
        )
        return any(
            set(word).isdisjoint(vowels) and word in other.words for word in acronyms - written
        )


def _folded(words: Iterable[str]) -> set[str]:
    return {word.casefold() for word in words}


def _as_written(word: str, text: Text) -> set[str]:
    """How a text writes a word: with capitals, or else small where it is no name."""
    cased = {each for each in text.cased or () if each.casefold() == word}
    if cased:
        return cased
    is_small = any(t.word == word and not t.name for t in text.tokens)
    return {word} if is_small else set()
