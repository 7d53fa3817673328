"""What the tiers need of a vector index."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from semkv.types import Vector


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One search result: an item and its cosine with the query, in [-1, 1]."""

    item: str
    score: float


@dataclass(frozen=True, slots=True)
class Row:
    """One vector to be indexed: a unit vector of the index's dimension. ``namespace`` says whose it is."""

    item: str
    partition: str
    vector: Vector
    namespace: str = ""


class VectorIndex(Protocol):
    """Items are strings, unique over all partitions. Any thread may call any method."""

    dim: int

    def __len__(self) -> int: ...
    def __contains__(self, item: str) -> bool: ...
    def extend(self, rows: Iterable[Row]) -> None: ...
    def loaded(self) -> None: ...
    def remove(self, items: Iterable[str]) -> None: ...
    def search(self, partition: str, vector: Vector, k: int = 1) -> list[Neighbour]: ...
    def score(self, item: str, vector: Vector) -> float | None: ...
    def items(self) -> list[str]: ...
    def heed(self, purge: str) -> None: ...
    def close(self) -> None: ...
