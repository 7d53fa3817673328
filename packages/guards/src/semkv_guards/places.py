"""Whether a text may refer to one of several documents by its place: "the second document", "above", "[2]".

A program that puts documents into another order asks this of all that is said about them. What is not understood may
say anything, so it asks as well whether a text is in a language that has a file in ``words``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache

from semkv_guards.language import Language, languages
from semkv_guards.reading import is_read

_HEAD = 200  # characters of a document in which a label is looked for
_TAIL = 60  # and at its end
_SAMPLE = 2000  # characters of a document that show its language
_NEAR = 3  # words between a word for a document and one for a place
_FIGURES = 3
_TOKEN = re.compile(r"[^\W\d_]+|\d+")
_ROMAN = re.compile(r"[ivx]+", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
_OPEN = r"[\[({<#【（]\s*"
_CLOSED = r"\s*[\])}>,;:】）–-]"
_MARKED = re.compile(
    rf"{_OPEN}\^?\d+(?:{_CLOSED}|\b)|(?<!\w){_OPEN}(?:[ivx]+|[a-z]){_CLOSED}", re.IGNORECASE
)
_ORDINAL_FIGURE = re.compile(r"\b\d+(?:st|nd|rd|th)\b", re.IGNORECASE)


class _Places:
    """What one language says about places."""

    def __init__(self, language: Language) -> None:
        self._language = language
        self._of_place = language.placed | language.ordinals
        self._numbers = _any_of(language.numbers.keys())
        self._near = language.placed_near | language.numbers.keys()
        self._nouns = language.documents | language.pieces
        self._last_of_phrases = {phrase.split()[-1] for phrase in language.placed_phrases}
        self._named = _any_of(self._nouns | language.labels)
        phrases = "|".join(map(_phrase, language.placed_phrases)) or "(?!)"
        self._phrases = _pattern(rf"\b(?:{phrases})\b(?!\s+(?:to|that)\b)")

    def has(self, text: str) -> bool:
        """Whether a text is in this language."""
        return self._language.is_of([word.lower() for word in _WORD.findall(text)])

    def knows(self, word: str) -> bool:
        """Whether a table has a word, in small letters."""
        return word in self._language.telling or self._language.stem(word) in self._language.known

    @cached_property
    def _together(self) -> re.Pattern[str]:
        """Phrases for all documents at once, in front of them."""
        between = rf"(?:\s+{_any_of(self._language.together_between)})*"
        nouns = _any_of(self._language.together)
        return _pattern(rf"\bfollowing{between}\s+{nouns}\b|\b{nouns}{between}\s+below\b")

    def _refers(self, text: str) -> bool:
        tokens = _TOKEN.findall(text)
        words = [token.lower() for token in tokens]
        if self._last_of_phrases.intersection(words) and self._phrases.search(text):
            return True
        for at, word in enumerate(words):
            if word in self._of_place and not self._is_time(words, at):
                return True
            if word in self._nouns and self._is_referred_to(tokens, words, at):
                return True
        return False

    def _is_time(self, words: Sequence[str], at: int) -> bool:
        """Whether a word for a place belongs to a time or a name, as in "last year"."""
        return any(word in self._language.placed_otherwise for word in words[at + 1 : at + 2])

    def _is_referred_to(self, tokens: Sequence[str], words: Sequence[str], at: int) -> bool:
        """Whether words near one for a document say which one."""
        before = words[max(0, at - _NEAR - 1) : at]
        after = words[at + 1 : at + _NEAR + 2]
        if any(word in self._near or _is_count(word) for word in before):
            return True
        if any(word in self._near for word in after):
            return True
        following = tokens[at + 1 : at + 3]
        if following and following[0].lower() in self._language.labels:
            following = following[1:]
        return bool(following) and _is_label(following[0])

    def _refers_to_others(self, document: str) -> bool:
        words = [token.lower() for token in _TOKEN.findall(document)]
        return any(
            word in self._of_place and following in self._language.documents
            for word, following in itertools.pairwise(words)
        )

    @cached_property
    def _label(self) -> re.Pattern[str]:
        ordinals = _any_of(self._language.ordinals)
        return _pattern(
            rf"^\W*(?:[^\W\d]{{1,20}}\W{{0,4}})?\d+\b"
            rf"|^\W*(?:[^\W\d]{{1,20}}\W{{1,4}})?"
            rf"(?:(?:{self._numbers}|[ivxlc]+|[a-z])\s*[\])}}.:>–-]|{ordinals}\b)"
            rf"|\b{self._named}[\W_]{{0,6}}\d"
        )

    @cached_property
    def _last_label(self) -> re.Pattern[str]:
        return _pattern(rf"(?:{_OPEN}|\b{self._named}[\W_]{{0,6}})\d+\W*$")

    def refers(self, text: str, *, in_front: bool) -> bool:
        """Whether a text refers to documents by their places."""
        left = self._together.sub(" ", text) if in_front else text
        return self._refers(left)

    def numbered(self, document: str) -> bool:
        """Whether a document has a number or another label, or refers to others by their places."""
        if self._label.search(document[:_HEAD]) is not None:
            return True
        if self._last_label.search(document[-_TAIL:]) is not None:
            return True
        return self._refers_to_others(document)


def _is_count(word: str) -> bool:
    """Whether a word may count documents; a longer number is a year."""
    return word.isdigit() and len(word) <= _FIGURES


def _is_label(token: str) -> bool:
    """Whether what stands behind a word for a document may name one: a number or a capital letter."""
    is_letter = len(token) == 1 and token.isupper()
    return is_letter or token.isdigit() or _ROMAN.fullmatch(token) is not None


def _any_of(words: Iterable[str]) -> str:
    """A pattern of any of some words, for none of which a longer one is taken."""
    found = sorted(words, key=lambda word: (-len(word), word))
    return f"(?:{'|'.join(map(re.escape, found))})" if found else r"(?!)"


def _phrase(text: str) -> str:
    """A pattern of words, each star a word or none."""
    words = [r"(?:\w+\s+)?" if word == "*" else rf"{word}\s+" for word in text.split()]
    return "".join(words).removesuffix(r"\s+")


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.IGNORECASE)


@lru_cache(maxsize=1)
def _places() -> tuple[_Places, ...]:
    return tuple(map(_Places, languages()))


def is_understood(text: str) -> bool:
    """Whether every character of a text is read, and a language of ``words`` is its own.

    >>> is_understood("What does the report say?"), is_understood("Was sagt der Bericht?")
    (True, False)
    """
    return is_read(text) and any(places.has(text) for places in _places())


def words_of(text: str) -> frozenset[str]:
    """The words and numbers of a text, in small letters.

    >>> sorted(words_of("Emma, of 1815"))
    ['1815', 'emma', 'of']
    """
    return frozenset(word.lower() for word in _TOKEN.findall(text))


def unknown_words(text: str) -> frozenset[str]:
    """Words of which no table says anything, and all numbers. They may name a document by its place.

    >>> sorted(unknown_words("Who wrote Emma in 1815?"))
    ['1815', 'emma']
    """
    return frozenset(
        word
        for word in words_of(text)
        if word.isdigit() or not any(places.knows(word) for places in _places())
    )


def may_tell_by_place(text: str, *, in_front: bool = False) -> bool:
    """Whether a text may refer to one of several documents by its place, or wants an answer that goes by their places.

    Args:
        text: what is said about documents.
        in_front: it stands in front of all of them, so that "the following documents" means each of them.

    >>> may_tell_by_place("What does the second document say?"), may_tell_by_place("Who wrote Emma?")
    (True, False)
    >>> may_tell_by_place("Use the following documents.", in_front=True)
    False
    """
    if _MARKED.search(text) or _ORDINAL_FIGURE.search(text):
        return True
    return any(places.refers(text, in_front=in_front) for places in _places())


def has_place(document: str) -> bool:
    """Whether a document begins or ends with a number or another label, refers to others by their places, or is in
    a language that is not understood.

    >>> has_place("[1] Emma"), has_place("Document 3: Emma"), has_place("Emma is a novel.")
    (True, True, False)
    """
    sample = document[:_SAMPLE]
    known = any(places.has(sample) for places in _places())
    return not known or any(places.numbered(document) for places in _places())
