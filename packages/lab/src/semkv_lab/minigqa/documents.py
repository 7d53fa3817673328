"""Plain-English documents of invented facts, and questions about them.

A document is a log of numbered entries about things that do not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class _Fact:
    """One kind of entry: a sentence with slots, and questions with the slot that answers each."""

    sentence: str
    questions: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Topic:
    """One kind of document: title and opening with slots, what its names and goods are, its facts and its filler."""

    title: str
    opening: str
    names: tuple[str, ...]
    goods: tuple[str, ...]
    places: tuple[str, ...]
    facts: tuple[_Fact, ...]
    filler: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a document: a fact with the words in its slots, and a sentence of filler."""

    fact: _Fact
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


_PORTS = ("Velmora", "Harrowgate", "Quillon Bay", "Saltmere", "Ostrava Point", "Grey Haven", "Tarnwick", "Lowmarsh")

_TOPICS = (
    _Topic(
        "Harbour log {number} of the port of {place}",
        "This log lists what came over the water this season, in the order in which the clerk wrote it down.",
        (
            "Tern",
            "Heron",
            "Plover",
            "Curlew",
            "Puffin",
            "Gannet",
            "Osprey",
            "Kestrel",
            "Dunlin",
            "Petrel",
            "Avocet",
            "Merlin",
        ),
        (
            "crates of lamp oil",
            "rolls of copper wire",
            "sacks of barley",
            "barrels of tar",
            "boxes of window glass",
            "bales of wool",
            "bags of cement",
            "baskets of apples",
            "drums of paint",
            "stacks of timber",
        ),
        ("pier 1", "pier 2", "pier 3", "pier 4", "pier 5", "the north quay", "the south quay", "the old dock"),
        (
            _Fact(
                "Entry {entry}: the barge {name} brought {count} {good} to {place} at {time}.",
                (
                    ("How many {good} did the barge {name} bring in entry {entry}?", "count"),
                    ("Where did the barge {name} land in entry {entry}?", "place"),
                    ("What did the barge {name} bring in entry {entry}?", "good"),
                    ("At what time was entry {entry} written?", "time"),
                ),
            ),
            _Fact(
                "Entry {entry}: the ferry {name} left {place} with {count} passengers at {time}.",
                (
                    ("How many passengers were on the ferry {name} in entry {entry}?", "count"),
                    ("From where did the ferry {name} leave in entry {entry}?", "place"),
                    ("At what time did the ferry {name} leave in entry {entry}?", "time"),
                ),
            ),
        ),
        (
            "The wind stood in the north and the tide was slow.",
            "The crew asked for fresh water and a new rope.",
            "A light rain fell, but the work went on without a break.",
            "The harbour bell was rung twice because of the fog.",
            "Nothing was lost, and the papers were found to be in order.",
            "The old crane held, although its chain made a loud noise.",
        ),
    ),
    _Topic(
        "Report {number} of the glass houses at {place}",
        "The report says what was planted and measured in each house, and which repairs were made.",
        ("Amber", "Birch", "Cedar", "Dahlia", "Elder", "Fern", "Ginger", "Hazel", "Iris", "Juniper", "Laurel", "Maple"),
        (
            "tomato plants",
            "pepper plants",
            "young vines",
            "lemon trees",
            "rows of lettuce",
            "pots of basil",
            "trays of moss",
            "beds of roses",
            "melon plants",
            "fig trees",
        ),
        ("the east wing", "the west wing", "the lower hall", "the upper hall", "the long shed", "the round house"),
        (
            _Fact(
                "Entry {entry}: house {name} in {place} now holds {count} {good}, counted at {time}.",
                (
                    ("How many {good} does house {name} hold in entry {entry}?", "count"),
                    ("Where is house {name} in entry {entry}?", "place"),
                    ("What does house {name} hold in entry {entry}?", "good"),
                    ("At what time was the count made in entry {entry}?", "time"),
                ),
            ),
            _Fact(
                "Entry {entry}: the pump of house {name} was set to {count} litres an hour at {time}.",
                (
                    ("To how many litres was the pump of house {name} set in entry {entry}?", "count"),
                    ("At what time was the pump set in entry {entry}?", "time"),
                ),
            ),
        ),
        (
            "The soil was dry on top and moist below.",
            "One window did not close, so a board was put over it.",
            "The leaves looked healthy after the change of light.",
            "A gardener swept the floor and cleaned the tools.",
            "The heating ran through the night because of the frost.",
            "No insects were seen, and the traps stayed empty.",
        ),
    ),
    _Topic(
        "Inspection {number} of the mountain railway near {place}",
        "The inspector walked the whole line, and wrote one entry for each thing that was checked.",
        (
            "Alder",
            "Bridge",
            "Cliff",
            "Dover",
            "Echo",
            "Falcon",
            "Granite",
            "Hollow",
            "Ivory",
            "Jasper",
            "Keystone",
            "Lantern",
        ),
        (
            "wooden sleepers",
            "iron bolts",
            "signal lamps",
            "steel plates",
            "drain covers",
            "fence posts",
            "warning signs",
            "switch levers",
            "rail joints",
            "brick arches",
        ),
        (
            "the upper station",
            "the lower station",
            "the long tunnel",
            "the stone viaduct",
            "the forest curve",
            "the lake siding",
        ),
        (
            _Fact(
                "Entry {entry}: section {name} at {place} needs {count} new {good}, as seen at {time}.",
                (
                    ("How many {good} does section {name} need in entry {entry}?", "count"),
                    ("Where is section {name} in entry {entry}?", "place"),
                    ("What does section {name} need in entry {entry}?", "good"),
                    ("At what time was entry {entry} written?", "time"),
                ),
            ),
            _Fact(
                "Entry {entry}: a test train passed section {name} at {count} kilometres an hour at {time}.",
                (
                    ("How fast did the test train pass section {name} in entry {entry}?", "count"),
                    ("At what time did the test train pass in entry {entry}?", "time"),
                ),
            ),
        ),
        (
            "The ground beside the track was firm.",
            "Some grass grew between the rails and was cut the same day.",
            "The paint had faded, but every number could still be read.",
            "Water ran freely in the ditch after the rain.",
            "The guard had nothing to add to this entry.",
            "A loose stone was carried away from the track.",
        ),
    ),
)


def make_document(rng: Random, words: int = 1100) -> Document:
    """A document of about ``words`` words: the last entry is the one that reaches that length."""
    topic = rng.choice(_TOPICS)
    title = topic.title.format(number=rng.randrange(1000, 10000), place=rng.choice(_PORTS))
    entries: list[Entry] = []
    length = len(title.split()) + len(topic.opening.split())
    while length < words or not entries:
        entry = _make_entry(rng, topic, len(entries) + 1)
        entries.append(entry)
        length += len(entry.sentence.split()) + len(entry.filler.split())
    return Document(title, topic.opening, tuple(entries))


def _make_entry(rng: Random, topic: _Topic, number: int) -> Entry:
    fact = rng.choice(topic.facts)
    slots = {
        "entry": str(number),
        "name": rng.choice(topic.names),
        "good": rng.choice(topic.goods),
        "place": rng.choice(topic.places),
        "count": draw_count(rng),
        "time": draw_time(rng),
    }
    return Entry(fact, slots, rng.choice(topic.filler))


def draw_count(rng: Random) -> str:
    return str(rng.randrange(12, 100))


def draw_time(rng: Random) -> str:
    return f"{rng.randrange(5, 22):02d}:{rng.choice((0, 10, 15, 20, 30, 40, 45, 50)):02d}"
