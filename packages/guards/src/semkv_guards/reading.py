"""What of a text is read, and the one stretch in which two texts differ.

A sentence encoder drops characters, or reads all that it does not know as one word, and a guard looks at words. What
neither reads may say anything to a model: a text that has it is compared with no other by meaning. A long text hides a
small change from the encoder, so two of them may differ in one stretch only, which is judged as a text of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from semkv_guards.folding import normalise
from semkv_guards.language import languages

_SIGNS = "°²³€£¥₹×·÷−–≤≥≠→⇒’‘“”"  # beyond ASCII: those that the guards read as another sign, a unit or a quotation
_LETTERS = "À-ÖØ-öø-ſ"  # Latin ones with a mark, which encoders drop: a word that has one must be the same in both
_UNREAD = re.compile(rf"[^ -~\n\t{_SIGNS}{_LETTERS}]")
_LETTER = re.compile(f"[{_LETTERS}]")
_ATTACHED = re.compile(  # one sign beside what it belongs to: an apostrophe, a quotation mark, a unit, an operator
    r"(?<=[A-Za-z])’(?=[A-Za-z])|^[“‘]|[”’](?=[.,;:?!)]*$)|(?<=[A-Za-z0-9)\]])[°²³€£¥₹×·÷−–≤≥≠→⇒]|[€£¥₹−≤≥](?=\d)|^°(?=[CF])"
)
_EDGES = ".,;:?!()[]\"'“”‘’"
_AROUND = " \n\t"
_LAYOUT = re.compile(r"\n[\n\t ]*|\t[\t ]*|  [\t ]*|\|")  # a bar parts columns
_BREAK = re.compile(r"\n[\n\t ]*|(?<=[.?!]) ")  # after a line or a sentence
SHORT = 30
"""Words of a text that is judged as a whole."""
MOST_PLACES = 4
"""Sentences in which two longer texts may differ."""


class Difference(NamedTuple):
    """Where two texts differ."""

    whole: bool
    """Whether the texts are judged as they are, since they are short or differ in typing only."""
    places: tuple[tuple[str, str], ...] = ()
    """Else the sentences of both that differ, each to be judged as a text of its own."""


def is_read(text: str) -> bool:
    """Whether encoder and guards read every character of a text, line ends and indents left aside."""
    return (text.isascii() and text.isprintable()) or _UNREAD.search(normalise(text)) is None


def differing(a: str, b: str) -> Difference | str:
    """Where two texts differ, or why they may not be compared by meaning.

    They may where every character is read, words with marked letters and signs that stand alone are the same, lines and
    columns begin at the same places, and what differs is a few sentences of one line, with at most `SHORT` words each.
    Linear in the texts.
    """
    a = normalise(a)
    b = normalise(b)
    if a == b:
        return Difference(whole=True)
    if _UNREAD.search(a) or _UNREAD.search(b) or _odd(a) != _odd(b):
        return "unread"
    laid_out = _LAYOUT.findall(a)
    if laid_out != _LAYOUT.findall(b):
        return "lines"
    if not laid_out and max(a.count(" "), b.count(" ")) < SHORT:
        return Difference(whole=True)
    return _places(a, b)


def _odd(text: str) -> list[str]:
    """Words with marked letters and signs that belong to no word or number, in their order."""
    if text.isascii():
        return []
    found = []
    chunks = ["", *text.split(), ""]
    for i, chunk in enumerate(chunks):
        if chunk.isascii():
            continue
        if _LETTER.search(chunk):
            found.append(chunk.strip(_EDGES).casefold())
        elif not _ATTACHED.sub("", chunk).isascii():
            is_operator = _operand(chunks[i - 1]) and _operand(chunks[i + 1])
            found += [] if is_operator else [chunk]
    return found


def _operand(chunk: str) -> bool:
    return len(chunk) == 1 or any(map(str.isdigit, chunk))


def _places(a: str, b: str) -> Difference | str:
    """The sentences in which two texts differ; where one has more of them, all between the first and the last, or the
    one beside those that only one text has."""
    first = _without_greetings(_sentences(a))
    second = _without_greetings(_sentences(b))
    head, tail = _same_ends(first, second)
    if head == len(first) == len(second):
        return Difference(whole=True)
    first = first[head : len(first) - tail]
    second = second[head : len(second) - tail]
    if _has_layout(first) or _has_layout(second):
        return "lines"
    if len(first) == len(second):
        pairs = [(x, y) for x, y in zip(first, second, strict=True) if _bare(x) != _bare(y)]
    else:
        pairs = [("".join(first), "".join(second))]
    places = tuple([(x.strip(_AROUND), y.strip(_AROUND)) for x, y in pairs])
    is_long = any(max(x.count(" "), y.count(" ")) >= SHORT for x, y in places)
    if is_long or len(places) > MOST_PLACES:
        return "length"
    return Difference(whole=False, places=places)


def _same_ends(first: list[str], second: list[str]) -> tuple[int, int]:
    """How many sentences are the same at the start and at the end; one fewer where one text only has more of them."""
    folded = list(map(_bare, first))
    other_folded = list(map(_bare, second))
    shorter = min(len(first), len(second))
    longer = max(len(first), len(second))
    head = _shared(folded, other_folded)
    tail = min(_shared(folded[::-1], other_folded[::-1]), shorter - head)
    if head + tail == shorter != longer:
        return (head - 1, tail) if head else (head, tail - 1)
    return head, tail


def _has_layout(sentences: list[str]) -> bool:
    """Whether there are lines or columns within some sentences."""
    return _LAYOUT.search("".join(sentences).strip(_AROUND)) is not None


def _sentences(text: str) -> list[str]:
    """The sentences and lines of a text, each with the blanks and line ends after it."""
    ends = [found.end() for found in _BREAK.finditer(text)]
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def _bare(sentence: str) -> str:
    return sentence.casefold().strip(" ")


def _without_greetings(sentences: list[str]) -> list[str]:
    """But for those at the start and the end, within the first and the last line."""
    start = 0
    end = len(sentences)
    while start < end - 1 and _greets(sentences[start]) and "\n" not in sentences[start]:
        start += 1
    while end > start + 1 and _greets(sentences[end - 1]) and "\n" not in sentences[end - 2]:
        end -= 1
    return sentences[start:end]


def _greets(sentence: str) -> bool:
    words = sentence.strip(" .!,\n").casefold()
    return any(words in language.greetings for language in languages())


def _shared(a: Sequence[str], b: Sequence[str]) -> int:
    """How many items two lists share at the start."""
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
