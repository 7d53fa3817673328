"""Drawn pictures between short texts and questions about them, as token ids and scenes. Needs numpy alone.

A document is some words, its title, a picture, and some words more. A picture is a grid of cells, some of which hold a
glyph (a digit or a shape) in a colour; a glyph has one colour in a picture. The kinds of questions, each with its
answer:

    fact     a title and a glyph; its colour                                                one picture
    name     a title and a colour; the glyph that has it (the only one)                     one picture
    which    a colour and a glyph; the title of the only picture that has both              one of all pictures
    two      two titles and a glyph; its colour in either, and whether that is the same     two pictures
    later    two titles and a glyph; the title that comes later, and its colour there       their order
    nth      a number and a glyph; the title of the picture of that number, and its colour  their order
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

BEGIN, END_OF_TEXT, DOCUMENT, END, ASK, SAME, OTHER, UNKNOWN = range(8)
VISION_START, VISION_END, PICTURE, VIDEO = range(8, 12)
KINDS = ("fact", "name", "which", "two", "later", "nth")
ORDERED = ("later", "nth")
"""Kinds whose right answer changes with the order of the pictures."""

ANSWER = 3  # tokens of the longest one
_KIND = 16
_NUMBERS = 24
_COLOURS = range(32, 40)
_GLYPHS = range(40, 56)
_TITLES = range(64, 128)
_WORDS = range(128, 192)
VOCABULARY = 192

CELL = 16  # pixels
SHADES = np.array(
    [
        (230, 40, 40),
        (40, 200, 60),
        (60, 90, 240),
        (240, 220, 40),
        (230, 60, 220),
        (50, 220, 220),
        (245, 245, 245),
        (245, 140, 30),
    ],
    np.uint8,
)
"""Red, green, blue of each colour."""

GROUNDS = 48  # shades of grey behind the glyphs, from black on
_DIGITS = (
    "111101101101111",
    "010110010010111",
    "111001111100111",
    "111001111001111",
    "101101111001001",
    "111100111001111",
    "111100111101111",
    "111001010010010",
    "111101111101111",
    "111101111001111",
)
_MOVES = tuple((down, right) for down in (-1, 0, 1) for right in (-1, 0, 1))


class Question(NamedTuple):
    """A question, and what of the pictures its answer tells."""

    kind: str
    tokens: list[int]
    answer: list[int]
    told: frozenset[Any] = frozenset()


class Batch(NamedTuple):
    """Texts with questions.

    Attributes:
        ids: ``[texts, longest]``.
        kinds: of the same shape: which kind's answer comes next; 0 for none, 1 for the first kind.
        scenes: ``[pictures, cells, 3]`` of all texts in their order: glyph (0 for none), colour, shift.
        grounds: ``[pictures]``, the grey behind each.
    """

    ids: np.ndarray
    kinds: np.ndarray
    scenes: np.ndarray
    grounds: np.ndarray


@dataclass(frozen=True)
class Plan:
    """How much there is.

    Attributes:
        documents: their number.
        side: cells of a picture in a row, and in a column; a cell is one token.
        glyphs: in each picture.
        words: the most before a title; up to three times as many come behind a picture, at least as many.
        questions: the most that are asked after the documents.
        copies: of each glyph in a picture.
    """

    documents: int
    side: int
    glyphs: int
    words: int
    questions: int
    copies: int = 1

    @property
    def longest(self) -> int:
        """How many tokens of a text are kept: few have more."""
        document = 5 + self.words * 5 // 2 + self.side * self.side
        return 2 + self.words + self.documents * document + self.questions * 7


class Texts:
    """Some documents with pictures, and what may be asked of them."""

    def __init__(self, plan: Plan, draws: np.random.Generator) -> None:
        self._plan = plan
        self._draws = draws
        count = plan.documents
        cells = plan.side * plan.side
        self.titles = draws.choice(_TITLES, count, replace=False).tolist()
        self.colours: list[dict[int, int]] = []  # of each picture's glyphs
        self.scenes = np.zeros((count, cells, 3), np.int8)
        self.grounds = draws.integers(0, GROUNDS, count).astype(np.uint8)
        for scene in self.scenes:
            glyphs = draws.choice(len(_GLYPHS), plan.glyphs, replace=False)
            colours = draws.choice(len(_COLOURS), plan.glyphs)
            places = draws.permutation(cells)[: plan.glyphs * plan.copies]
            scene[places, 0] = np.repeat(glyphs + 1, plan.copies)
            scene[places, 1] = np.repeat(colours, plan.copies)
            scene[:, 2] = draws.integers(0, len(_MOVES), cells)
            self.colours.append(dict(zip(glyphs.tolist(), colours.tolist(), strict=True)))
        self.documents = [self._document(title) for title in self.titles]

    def _document(self, title: int) -> list[int]:
        words = self._plan.words
        before = self._words(int(self._draws.integers(0, words + 1)))
        behind = self._words(int(self._draws.integers(words, 3 * words + 1)))
        cells = self._plan.side * self._plan.side
        picture = [VISION_START, *[PICTURE] * cells, VISION_END]
        return [DOCUMENT, *before, title, *picture, *behind, END]

    def _words(self, count: int) -> list[int]:
        found: list[int] = self._draws.choice(_WORDS, count).tolist()
        return found

    def system(self) -> list[int]:
        return [BEGIN, *self._words(int(self._draws.integers(0, self._plan.words + 1)))]

    def questions(self, kind: str, order: list[int]) -> list[Question]:
        """All questions of a kind, where the documents stand in this order."""
        found: Iterator[tuple[list[Any], list[Any], list[Any]]]
        found = getattr(self, f"_{kind}")(order)
        ask = [ASK, _KIND + KINDS.index(kind)]
        return [
            Question(
                kind=kind,
                tokens=[*ask, *given],
                answer=answer,
                told=frozenset(told),
            )
            for given, answer, told in found
        ]

    def _each(self) -> Iterator[tuple[int, int, int]]:
        """Document, glyph and colour."""
        for document, colours in enumerate(self.colours):
            for glyph, colour in colours.items():
                yield document, glyph, colour

    def _fact(self, order: list[int]) -> Iterator[Any]:
        for document, glyph, colour in self._each():
            given = [self.titles[document], _GLYPHS[glyph]]
            yield given, [_COLOURS[colour]], [(document, glyph)]

    def _name(self, order: list[int]) -> Iterator[Any]:
        for document, glyph, colour in self._each():
            if list(self.colours[document].values()).count(colour) == 1:
                given = [self.titles[document], _COLOURS[colour]]
                yield given, [_GLYPHS[glyph]], [(document, glyph)]

    def _which(self, order: list[int]) -> Iterator[Any]:
        for document, glyph, colour in self._each():
            if sum(colours.get(glyph) == colour for colours in self.colours) == 1:
                given = [_COLOURS[colour], _GLYPHS[glyph]]
                yield given, [self.titles[document]], [(document, glyph)]

    def _pairs(self) -> Iterator[tuple[int, int, int]]:
        """Two documents, and a glyph that is in both pictures."""
        for first, second in permutations(range(self._plan.documents), 2):
            for glyph in sorted(self.colours[first].keys() & self.colours[second].keys()):
                yield first, second, glyph

    def _two(self, order: list[int]) -> Iterator[Any]:
        for first, second, glyph in self._pairs():
            own, other = (self.colours[document][glyph] for document in (first, second))
            given = [self.titles[first], self.titles[second], _GLYPHS[glyph]]
            answer = [_COLOURS[own], _COLOURS[other], SAME if own == other else OTHER]
            yield given, answer, [(first, glyph), (second, glyph)]

    def _later(self, order: list[int]) -> Iterator[Any]:
        for first, second, glyph in self._pairs():
            document = max(first, second, key=order.index)
            given = [self.titles[first], self.titles[second], _GLYPHS[glyph]]
            answer = [self.titles[document], _COLOURS[self.colours[document][glyph]]]
            yield given, answer, [(document, glyph), frozenset((first, second))]

    def _nth(self, order: list[int]) -> Iterator[Any]:
        for place, document in enumerate(order):
            for glyph, colour in self.colours[document].items():
                given = [_NUMBERS + place, _GLYPHS[glyph]]
                yield given, [self.titles[document], _COLOURS[colour]], [(document, glyph), place]

    def asked(self, order: list[int]) -> list[Question]:
        """As many as the plan says, of all kinds in turn; nothing that is asked was told before."""
        waiting = []
        for kind in KINDS:
            own = self.questions(kind, order)
            waiting.append([own[number] for number in self._draws.permutation(len(own))])
        told: set[Any] = set()
        found: list[Question] = []
        while any(waiting) and len(found) < self._plan.questions:
            for number in self._draws.permutation(len(waiting)):
                own = waiting[number]
                while own:
                    question = own.pop()
                    if told.isdisjoint(question.told):
                        told |= question.told
                        found.append(question)
                        break
        return found[: self._plan.questions]


def batch(
    plan: Plan,
    rows: int,
    seed: int,
) -> Batch:
    """Texts with many questions each."""
    draws = np.random.default_rng(seed)
    ids = np.full((rows, plan.longest), END_OF_TEXT, np.int16)
    kinds = np.zeros((rows, plan.longest), np.int8)
    scenes = []
    grounds = []
    for row in range(rows):
        texts = Texts(plan, draws)
        order = draws.permutation(plan.documents).tolist()
        scenes.append(texts.scenes[order])
        grounds.append(texts.grounds[order])
        text = texts.system()
        for document in order:
            text += texts.documents[document]
        for question in texts.asked(order):
            first = len(text) + len(question.tokens)
            last = first + len(question.answer)
            if last > plan.longest:
                break
            text += question.tokens + question.answer
            kinds[row, first - 1 : last - 1] = 1 + KINDS.index(question.kind)
        ids[row, : len(text)] = text
    return Batch(
        ids=ids,
        kinds=kinds,
        scenes=np.concatenate(scenes),
        grounds=np.concatenate(grounds),
    )


# ---------------------------------------------------------------------- pixels


def shifted_glyphs() -> np.ndarray:
    """Where a cell has its glyph's colour, ``[glyphs + 1, shifts, CELL, CELL]``; the first glyph is none."""
    down, right = np.mgrid[:CELL, :CELL] - (CELL - 1) / 2
    far = np.hypot(down, right)
    steep = np.maximum(abs(down), abs(right))
    shapes = [
        far < 5.8,
        (far < 6.2) & (far > 3.5),
        steep < 5,
        (abs(down) + abs(right)) < 6.5,
        (np.minimum(abs(down), abs(right)) < 1.6) & (steep < 6),
        (abs(right) < (down + 6) / 2) & (down < 5.5),
    ]
    digits = []
    for bits in _DIGITS:
        small = np.array(list(bits), int).reshape(5, 3)
        large = np.kron(small, np.ones((2, 3), int))
        digits.append(np.pad(large, ((3, 3), (4, 3))).astype(bool))
    drawn = [np.zeros((CELL, CELL), bool), *digits, *shapes]
    assert len(drawn) == len(_GLYPHS) + 1
    return np.array([[np.roll(glyph, move, (0, 1)) for move in _MOVES] for glyph in drawn])
