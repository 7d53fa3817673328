"""Documents of generated facts and questions about them, as token ids. Needs numpy alone.

A document is its title, and facts between words that say nothing:

    entity value .       a fact
    attribute value .    a fact of the kind that every document has
    entity entity .      a link: what the second entity is stands in another document

Some entities have a fact in two documents. The kinds of questions, each with a right answer of one or two tokens:

    fact      an entity; its value                                                       one document
    scoped    a title and an attribute; the value that stands in this document           one document
    two       an entity with a link; the linked entity and its value                     two documents
    later     an entity with two facts; the value in the later document                  their order
    nth       a number; the title of the document of that number                         their order
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

BEGIN, END_OF_TEXT, DOCUMENT, END, ASK, STOP = range(6)
KINDS = ("fact", "scoped", "two", "later", "nth")
ORDERED = ("later", "nth")
"""Kinds whose right answer changes with the order of the documents."""

_KIND = 8
_NUMBERS = 16
_TITLES = np.arange(32, 288)
_ATTRIBUTES = np.arange(288, 304)
_VALUES = np.arange(304, 560)
_WORDS = np.arange(560, 816)
_ENTITIES = np.arange(816, 2048)
VOCABULARY = 2048


class Question(NamedTuple):
    kind: str
    tokens: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Plan:
    """How much there is; of facts and the like in each document.

    Attributes:
        documents: their number.
        size: the tokens of a document, a quarter more or less.
        system: the most words before the first document.
        questions: how many are asked after the documents.
    """

    documents: int
    size: int
    facts: int
    attributes: int
    links: int
    contested: int
    system: int = 64
    questions: int = 96

    @property
    def longest(self) -> int:
        """How many tokens of a text are kept: few have more."""
        return 2 + self.system + self.documents * self.size * 17 // 16 + self.questions * 9 // 2


LENGTH = 192  # of what repeats

SMALL = Plan(
    documents=2,
    size=44,
    facts=5,
    attributes=2,
    links=1,
    contested=1,
    system=8,
    questions=24,
)
MIDDLE = Plan(
    documents=4,
    size=112,
    facts=10,
    attributes=4,
    links=2,
    contested=2,
    system=32,
    questions=56,
)
LARGE = Plan(
    documents=6,
    size=256,
    facts=24,
    attributes=8,
    links=6,
    contested=6,
)


class Texts:
    """Some documents, and what may be asked of them."""

    def __init__(self, plan: Plan, draws: np.random.Generator) -> None:
        self._plan = plan
        self._draws = draws
        self.titles = draws.choice(_TITLES, plan.documents, replace=False).tolist()
        count = plan.documents
        entities = draws.permutation(_ENTITIES)
        own = count * plan.facts
        links = count * plan.links
        shared = count * plan.contested // 2
        self._facts = entities[:own].reshape(count, plan.facts)
        self._links = entities[own : own + links].reshape(count, plan.links)
        self._contested = entities[own + links : own + links + shared]
        self._values = draws.choice(_VALUES, self._facts.shape)
        self._targets = self._drawn_targets()
        self._pairs = np.array([draws.permutation(count)[:2] for _ in range(shared)])
        self._rivals = np.array([draws.choice(_VALUES, 2, replace=False) for _ in range(shared)])
        self._attributes = np.array(
            [draws.choice(_ATTRIBUTES, plan.attributes, replace=False) for _ in range(count)]
        )
        self._properties = draws.choice(_VALUES, self._attributes.shape)
        self.documents = [self._document(number) for number in range(count)]

    def _drawn_targets(self) -> np.ndarray:
        """For each link a document that is another one, and a fact of it."""
        shape = self._links.shape
        count = self._plan.documents
        away = self._draws.integers(1, count, shape)
        document = (np.arange(count)[:, None] + away) % count
        fact = self._draws.integers(0, self._plan.facts, shape)
        return np.stack((document, fact), -1)

    def _document(self, number: int) -> list[int]:
        items = [
            *zip(self._facts[number], self._values[number], strict=True),
            *zip(self._attributes[number], self._properties[number], strict=True),
        ]
        items += [
            (entity, self._facts[tuple(target)])
            for entity, target in zip(self._links[number], self._targets[number], strict=True)
        ]
        for entity, pair, rivals in zip(self._contested, self._pairs, self._rivals, strict=True):
            items += [
                (entity, value)
                for document, value in zip(pair, rivals, strict=True)
                if document == number
            ]
        return self._written(number, items)

    def _written(self, number: int, items: list[tuple[int, int]]) -> list[int]:
        size = self._plan.size
        wanted = int(self._draws.integers(size * 3 // 4, size * 5 // 4 + 1))
        words = max(0, wanted - 3 - 3 * len(items))
        gaps = self._draws.multinomial(words, np.ones(len(items) + 1) / (len(items) + 1))
        text = [DOCUMENT, self.titles[number]]
        for place, item in enumerate(self._draws.permutation(len(items))):
            text += self._words(gaps[place])
            text += [int(items[item][0]), int(items[item][1]), STOP]
        return [*text, *self._words(gaps[-1]), END]

    def _words(self, count: int) -> list[int]:
        found: list[int] = self._draws.choice(_WORDS, count).tolist()
        return found

    def system(self) -> list[int]:
        return [BEGIN, *self._words(int(self._draws.integers(0, self._plan.system + 1)))]

    def questions(self, kind: str, order: list[int]) -> list[Question]:
        """All questions of a kind, where the documents stand in this order."""
        found: list[tuple[list[int], list[int]]] = []
        places = {document: place for place, document in enumerate(order)}
        count = self._plan.documents
        if kind == "fact":
            pairs = zip(self._facts.flat, self._values.flat, strict=True)
            found = [([entity], [value]) for entity, value in pairs]
        elif kind == "scoped":
            found = [
                ([self.titles[document], attribute], [value])
                for document in range(count)
                for attribute, value in zip(
                    self._attributes[document], self._properties[document], strict=True
                )
            ]
        elif kind == "two":
            targets = self._targets.reshape(-1, 2)
            found = [
                ([entity], [self._facts[tuple(at)], self._values[tuple(at)]])
                for entity, at in zip(self._links.flat, targets, strict=True)
            ]
        elif kind == "later":
            rows = zip(self._contested, self._pairs, self._rivals, strict=True)
            found = [
                ([entity], [rivals[int(places[pair[1]] > places[pair[0]])]])
                for entity, pair, rivals in rows
            ]
        else:
            found = [
                ([_NUMBERS + place], [self.titles[document]]) for document, place in places.items()
            ]
        ask = [ASK, _KIND + KINDS.index(kind)]
        return [
            Question(
                kind=kind,
                tokens=[*ask, *map(int, given)],
                answer=[int(token) for token in answer],
            )
            for given, answer in found
        ]

    def asked(self, order: list[int]) -> list[Question]:
        """As many as the plan says, of all kinds, none twice."""
        share = -(-self._plan.questions // len(KINDS))
        found: list[Question] = []
        for kind in KINDS:
            own = self.questions(kind, order)
            chosen = self._draws.permutation(len(own))[:share]
            found += [own[number] for number in chosen]
        mixed = self._draws.permutation(len(found))[: self._plan.questions]
        return [found[number] for number in mixed]


def batch(
    plan: Plan,
    rows: int,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Texts with many questions each, and which kind's answer comes next: 0 for none, 1 for the first kind."""
    draws = np.random.default_rng(seed)
    ids = np.full((rows, plan.longest), END_OF_TEXT, np.int16)
    kinds = np.zeros((rows, plan.longest), np.int8)
    for row in range(rows):
        texts = Texts(plan, draws)
        order = draws.permutation(plan.documents).tolist()
        text = texts.system()
        for document in order:
            text += texts.documents[document]
        for question in texts.asked(order):
            text += question.tokens
            first = len(text)
            text += question.answer
            kinds[row, first - 1 : len(text) - 1] = 1 + KINDS.index(question.kind)
        kinds[row, -1] = 0  # what comes next was cut off
        kept = text[: plan.longest]
        ids[row, : len(kept)] = kept
    return ids, kinds


def repeats(
    rows: int,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """As `batch`, of random tokens that come again and again: a model must first learn to find what it has seen."""
    draws = np.random.default_rng(seed)
    ids = np.empty((rows, LENGTH), np.int16)
    kinds = np.zeros((rows, LENGTH), np.int8)
    for row in range(rows):
        size = int(draws.integers(8, LENGTH // 3))
        once = draws.choice(np.arange(_TITLES[0], VOCABULARY), size, replace=False)
        ids[row] = np.tile(once, -(-LENGTH // size))[:LENGTH]
        kinds[row, size:-1] = 1
    return ids, kinds
