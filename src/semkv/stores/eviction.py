"""Which extents go first: ARC, as pure functions.

Extents that were used once since they came are *recent*, those used again *frequent*; each list goes least recently
used first. What was evicted leaves a ghost (its first block's hash and size). A ghost asked for again tells which
list was too short, and moves the share of bytes that the recent ones may keep. So one walk through a data set does not
push out what is used every day, and a change of habits is followed. N. Megiddo and D. Modha, ARC: A Self-Tuning, Low
Overhead Replacement Cache, FAST 2003; here with bytes for pages. `bench/eviction.py` has what it was chosen over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExtentUse:
    """What eviction may look at.

    Attributes:
        extent: its id.
        nbytes: size of the file in bytes.
        blocks: rows it holds.
        frequent: used again since it came.
    """

    extent: str
    nbytes: int
    blocks: int
    frequent: bool = False


@dataclass(frozen=True, slots=True)
class Ghosts:
    """Bytes of the ghosts of either list."""

    recent: int
    frequent: int


def adapt(target: float, limit: int, nbytes: int, ghosts: Ghosts, *, frequent: bool) -> float:
    """The bytes that recent extents may keep, after a ghost was asked for again.

    Args:
        target: what they might keep so far.
        limit: bound of the store in bytes.
        nbytes: size of the ghost.
        frequent: which list the ghost came from; a recent one says that recent extents went too early.
    """
    if frequent:
        return max(0.0, target - nbytes * max(1.0, ghosts.recent / max(1, ghosts.frequent)))
    return min(float(limit), target + nbytes * max(1.0, ghosts.frequent / max(1, ghosts.recent)))


def victims(
    recent: Iterable[ExtentUse], frequent: Iterable[ExtentUse], recent_bytes: int, target: float
) -> Iterator[ExtentUse]:
    """The extents in the order in which they go.

    Args:
        recent, frequent: what may go of either list, least recently used first and, of one moment, the deepest in its
            prompt first, since a prefix is useless without its beginning. What a load holds is not among them.
        recent_bytes: of all recent extents, held ones included.
        target: bytes that recent extents may keep.
    """
    young, old = iter(recent), iter(frequent)
    first, second = next(young, None), next(old, None)
    while first is not None or second is not None:
        if first is not None and (recent_bytes > target or second is None):
            yield first
            recent_bytes -= first.nbytes
            first = next(young, None)
        elif second is not None:
            yield second
            second = next(old, None)
