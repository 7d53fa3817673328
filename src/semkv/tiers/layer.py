"""A layer of vectors and its index."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from semkv.counting import Tally
from semkv.index import Index, Neighbour, Row, as_cosine
from semkv.tiers.tier import status_of

if TYPE_CHECKING:
    from semkv.types import Vector


class Layer:
    """One layer of vectors and its index, which may be the user's own: its faults are counted, and what it finds in
    another partition, or without a cosine, is no result. A row that it fails on is missing until the next start.

    Args:
        name: of its vectors in a lookup.
        key: the catalog's name of the layer.
        dim: length of the vectors.
        threshold: least cosine.
        partition: the field of a catalog's row in which entries must agree to be compared.
    """

    def __init__(
        self,
        name: str,
        key: str,
        dim: int,
        threshold: float,
        partition: str,
        index: Index,
        tally: Tally,
    ) -> None:
        self.name = name
        self.key = key
        self.dim = dim
        self.threshold = threshold
        self.status = status_of(name)
        self.partition = partition
        self.index = index
        self._tally = tally
        self.items: dict[str, str] = {}  # with the partition of each
        self.members: dict[str, dict[str, None]] = {}  # items of each partition

    def extend(self, rows: Iterable[Row]) -> None:
        new = {row.item: row for row in rows if row.item not in self.items}
        with self._tally.boundary("index"):
            self.index.extend(new.values())
            self.items.update({row.item: row.partition for row in new.values()})
            for row in new.values():
                self.members.setdefault(row.partition, {})[row.item] = None

    def remove(self, items: Iterable[str]) -> None:
        known = {item: self.items.pop(item) for item in items if item in self.items}
        for item, partition in known.items():
            members = self.members[partition]
            del members[item]
            if not members:
                del self.members[partition]
        with self._tally.boundary("index"):
            self.index.remove(list(known))

    def search(
        self, partition: str, vector: Vector, most: int, least: float | None = None
    ) -> list[Neighbour]:
        """The nearest above the threshold, or another ``least`` cosine; best first."""
        least = self.threshold if least is None else least
        with self._tally.boundary("index"):
            found = [
                Neighbour(n.item, as_cosine(n.score))
                for n in self.index.search(partition, vector, most)
            ]
            own = [n for n in found if n.score >= least and self.items.get(n.item) == partition]
            return sorted(own, key=lambda n: -n.score)[:most]
        return []

    def score(self, item: str, vector: Vector) -> float:
        """The cosine of an item; -1, the least, where it is not there."""
        with self._tally.boundary("index"):
            found = self.index.score(item, vector) if item in self.items else None
            return -1.0 if found is None else as_cosine(found)
        return -1.0

    def close(self) -> None:
        """Call the index's own ``close``, where it has one."""
        with self._tally.boundary("index"):
            getattr(self.index, "close", lambda: None)()
