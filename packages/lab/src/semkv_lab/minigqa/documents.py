"""Plain-English documents of invented facts, and questions about them.

A document is a log of numbered entries about things that do not exist. Their words are in ``documents.toml``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True)
class Fact:
    """One kind of entry: a sentence with slots, and questions with the slot that answers each."""

    sentence: str
    questions: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a document: a fact with the words in its slots, and a sentence of filler."""

    fact: Fact
    slots: Mapping[str, str]
    filler: str

    @property
    def sentence(self) -> str:
        return self.fact.sentence.format(**self.slots)

    @property
    def questions(self) -> tuple[tuple[str, str], ...]:
        """Questions, each with the answer that the sentence gives."""
        return tuple((text.format(**self.slots), self.slots[answer]) for text, answer in self.fact.questions)


@dataclass(frozen=True, slots=True)
class Document:
    """A title, an opening and entries; `text` is what a reader sees."""

    title: str
    opening: str
    entries: tuple[Entry, ...]

    @property
    def text(self) -> str:
        body = "\n".join(f"{entry.sentence} {entry.filler}" for entry in self.entries)
        return f"{self.title}\n{self.opening}\n{body}"


_WORDS: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("documents.toml").read_text(encoding="utf-8"))


def make_document(rng: Random, words: int = 1100) -> Document:
    """A document of about ``words`` words: the last entry is the one that reaches that length."""
    topic = rng.choice(_WORDS["topics"])
    title = topic["title"].format(number=rng.randrange(1000, 10000), place=rng.choice(_WORDS["ports"]))
    entries: list[Entry] = []
    length = len(title.split()) + len(topic["opening"].split())
    while length < words or not entries:
        entry = _make_entry(rng, topic, len(entries) + 1)
        entries.append(entry)
        length += len(entry.sentence.split()) + len(entry.filler.split())
    return Document(title, topic["opening"], tuple(entries))


def _make_entry(rng: Random, topic: Mapping[str, Any], number: int) -> Entry:
    fact = Fact(**rng.choice(topic["facts"]))
    slots = {
        "entry": str(number),
        "name": rng.choice(topic["names"]),
        "good": rng.choice(topic["goods"]),
        "place": rng.choice(topic["places"]),
        "count": draw_count(rng),
        "time": draw_time(rng),
    }
    return Entry(fact, slots, rng.choice(topic["filler"]))


def draw_count(rng: Random) -> str:
    return str(rng.randrange(12, 100))


def draw_time(rng: Random) -> str:
    return f"{rng.randrange(5, 22):02d}:{rng.choice((0, 10, 15, 20, 30, 40, 45, 50)):02d}"
