"""Which extents go first: pure functions over what is known of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExtentUse:
    """What a score may look at.

    Attributes:
        extent: its id.
        nbytes: size of the file in bytes.
        blocks: rows it holds.
        last_use: seconds since the epoch.
        position: index in its prompt of its first block.
    """

    extent: str
    nbytes: int
    blocks: int
    last_use: float
    position: int


Score = Callable[[ExtentUse], tuple[float, ...]]
"""The lowest score goes first."""


def lru(use: ExtentUse) -> tuple[float, ...]:
    """Least recently used; of one moment, the deepest first, since a prefix is useless without its beginning."""
    return (use.last_use, -use.position)


def choose_victims(
    uses: Iterable[ExtentUse], *, nbytes: int, blocks: int, held: Set[str] = frozenset(), score: Score = lru
) -> list[str]:
    """The extents to drop so that at least ``nbytes`` bytes and ``blocks`` blocks come free, in order of score.

    Extents in ``held`` are never chosen, so less than asked for may come free.
    """
    victims: list[str] = []
    for use in sorted((u for u in uses if u.extent not in held), key=score):
        if nbytes <= 0 and blocks <= 0:
            break
        victims.append(use.extent)
        nbytes -= use.nbytes
        blocks -= use.blocks
    return victims
