"""Plain-English documents of invented facts, and questions about them.

A document is a log of numbered entries about things that do not exist. Their words are in ``documents.toml``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
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


VARIANTS = ("original", "whitespace", "case", "reworded", "edited", "other")
"""How a document returns: as it is, with blanks doubled, in small letters, with the filler of an entry reworded, with
the number in an entry changed; ``other`` is an unrelated one."""

_ASIDES = ("As before, ", "As expected, ", "Once again, ", "In addition, ")
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


def returning(documents: int, *, seed: int = 0, words: int = 1300) -> list[dict[str, str]]:
    """Questions about documents that return: six rows a document, the original, then at any later time the rest.

    1,300 words are about 2,000 tokens of minigqa-vlm's tokenizer.

    Returns:
        In the order of the requests: ``variant``, ``document`` (its number), ``context``, ``question``, ``answer``.
    """
    rng = Random(f"documents:{seed}")  # noqa: S311
    placed: list[tuple[float, dict[str, str]]] = []
    for number in range(documents):
        document, first = make_document(rng, words), rng.random()
        for variant, (text, told) in _variants(document, make_document(rng, words), rng).items():
            question, answer = rng.choice([pair for entry in told.entries for pair in entry.questions])
            row = {"variant": variant, "document": str(number), "context": text}
            row |= {"question": question, "answer": answer}
            placed.append((first if variant == "original" else rng.uniform(first, 1), row))
    return [row for _, row in sorted(placed, key=lambda pair: pair[0])]


def _variants(document: Document, other: Document, rng: Random) -> dict[str, tuple[str, Document]]:
    """The text of each of `VARIANTS`, and the document that it tells of."""
    at = rng.choice([at for at, entry in enumerate(document.entries) if "{count}" in entry.fact.sentence])
    entry = document.entries[at]
    count = rng.choice([c for c in map(str, range(12, 100)) if c != entry.slots["count"]])
    changed = {
        "reworded": replace(entry, filler=rng.choice(_ASIDES) + entry.filler[0].lower() + entry.filler[1:]),
        "edited": replace(entry, slots={**entry.slots, "count": count}),
    }
    loose = "".join(word + ("  " if rng.random() < 0.1 else " ") for word in document.text.split(" ")).rstrip(" ")
    found = {"original": (document.text, document), "whitespace": (loose, document)}
    found["case"] = (document.text.lower(), document)
    for variant, new in changed.items():
        told = replace(document, entries=(*document.entries[:at], new, *document.entries[at + 1 :]))
        found[variant] = (told.text, told)
    return {**found, "other": (other.text, other)}


def _make_entry(rng: Random, topic: Mapping[str, Any], number: int) -> Entry:
    fact = Fact(**rng.choice(topic["facts"]))
    slots = {
        "entry": str(number),
        "name": rng.choice(topic["names"]),
        "good": rng.choice(topic["goods"]),
        "place": rng.choice(topic["places"]),
        "count": str(rng.randrange(12, 100)),
        "time": f"{rng.randrange(5, 22):02d}:{rng.choice((0, 10, 15, 20, 30, 40, 45, 50)):02d}",
    }
    return Entry(fact, slots, rng.choice(topic["filler"]))
