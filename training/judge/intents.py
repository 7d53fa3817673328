"""Requests by what they ask for: each line of ``intents_*.txt`` is one intent, and its ways to ask for it.

A section ``# name`` has a line of values behind a colon, such as foods, and intents in which ``{x}`` is one of them.
Two intents of a section need two answers, and so do two values. Values next to each other are close in meaning. Names
between slashes mean the same. A file without sections has single intents, and behind ``//`` what is easily taken for
them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from random import Random

_HERE = Path(__file__).parent
_NEAR = 3  # places in a list up to which another value is a near one
_AN = re.compile(r"\ba (?=[aeio])")
_WORD = re.compile(r"\w+")
_DRAWS = 4  # of other intents, of which the one with the most words in common is taken


@dataclass(frozen=True, slots=True)
class Section:
    """Intents about one of several things."""

    values: tuple[tuple[str, ...], ...]
    intents: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Single:
    """The ways to ask for one thing, and what is easily taken for it."""

    ways: tuple[str, ...]
    others: tuple[str, ...]


def sections() -> list[Section]:
    """The sections of all files."""
    found = []
    for file in sorted(_HERE.glob("intents_*.txt")):
        for part in re.split(r"^# .*\n", file.read_text(encoding="utf-8"), flags=re.M)[1:]:
            head, *lines = part.strip().split("\n")
            names = (tuple(_split(value, "/")) for value in _split(head.removeprefix(":"), ";"))
            ways = (tuple(_split(line, "|")) for line in lines)
            found.append(Section(tuple(names), tuple(ways)))
    return found


def singles() -> list[Single]:
    """The single intents."""
    found = []
    for line in (_HERE / "intents_single.txt").read_text(encoding="utf-8").strip().split("\n"):
        ways, _, others = line.partition("//")
        found.append(Single(tuple(_split(ways, "|")), tuple(_split(others, "|"))))
    return found


def _split(text: str, sign: str) -> list[str]:
    return [part.strip() for part in text.split(sign) if part.strip()]


class Intents:
    """Pairs of intents."""

    def __init__(self) -> None:
        self._sections = sections()
        self._singles = singles()

    def same(self, random: Random) -> tuple[str, str]:
        """Two ways to ask for the same."""
        section = random.choice(self._sections)
        ways = random.choice(section.intents)
        value = random.choice(section.values)
        first, second = _two(ways, random)
        return _said(first, value, random), _said(second, value, random)

    def different(self, random: Random) -> tuple[str, str]:
        """Two requests that are close and need two answers."""
        section = random.choice(self._sections)
        place = random.randrange(len(section.intents))
        ways = section.intents[place]
        value = random.randrange(len(section.values))
        own = section.values[value]
        if random.random() < 0.3:
            first, second = _two(ways, random)
            other = section.values[_another(value, len(section.values), random)]
            return _said(first, own, random), _said(second, other, random)
        first = _said(random.choice(ways), own, random)
        drawn = []
        for _ in range(random.randrange(1, _DRAWS + 1)):
            intent = section.intents[_another(place, len(section.intents), random)]
            drawn.append(_said(random.choice(intent), own, random))
        return first, max(drawn, key=lambda text: _in_common(first, text))

    def single(self, random: Random, *, same: bool) -> tuple[str, str]:
        """A pair of a single intent."""
        single = random.choice(self._singles)
        if same:
            return _two(single.ways, random)
        return random.choice(single.ways), random.choice(single.others)


def _two(ways: tuple[str, ...], random: Random) -> tuple[str, str]:
    """Two ways of an intent; the same one twice where there is no other."""
    if len(ways) == 1:
        return ways[0], ways[0]
    first, second = random.sample(ways, 2)
    return first, second


def _said(way: str, value: tuple[str, ...], random: Random) -> str:
    return _AN.sub("an ", way.replace("{x}", random.choice(value)))


def _another(place: int, count: int, random: Random) -> int:
    """Another place, often a near one."""
    if random.random() < 0.5:
        near = [at for at in range(place - _NEAR, place + _NEAR + 1) if 0 <= at < count]
        return random.choice([at for at in near if at != place])
    return (place + random.randrange(1, count)) % count


def _in_common(first: str, second: str) -> float:
    """The share of words that two texts have in common."""
    words, others = (set(_WORD.findall(text.lower())) for text in (first, second))
    return len(words & others) / len(words | others)
