"""The vector index: an exact matrix while a partition is small, FAISS's HNSW above.

Partitions come before the search: a vector is compared only with vectors of its own partition, so a tenant or another
image can neither match nor crowd out a match. The index is built from the catalog and is never the only copy.

A new row is a plain one, compared exactly. From `FLAT` plain rows on, a background thread adds them to a copy of the
partition's graph, which then takes its place, so that no search and no write waits for it. The same thread builds a
partition with many removed rows anew. Graphs are in memory only: those of 100,000 vectors are built again within 40 s
of processor time after a start, and until then the search is exact.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from semkv.types import Vector

    Matrix = npt.NDArray[np.float32]

logger = logging.getLogger("semkv")

FLAT = 1024  # plain rows from which a partition gets a graph
_CHUNK = 1024  # rows that are compared, or added to a graph, in one call
_MOVED = 1 << 13  # plain rows that move into a graph at once
_STALE = 0.2  # share of removed rows at which a partition is built anew
# M, efConstruction and efSearch of HNSW
_LINKS = 16
_BUILD_BREADTH = 80
_SEARCH_BREADTH = 96
# Rows from which a graph is searched more broadly, by the root of their number: it would find less.
_MANY = 1 << 18


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One search result: an item and its cosine with the query, in [-1, 1]."""

    item: str
    score: float


@dataclass(frozen=True, slots=True)
class Row:
    """One vector to be indexed: a unit vector of the index's dimension."""

    item: str
    partition: str
    vector: Vector


def as_cosine(score: float) -> float:
    """A number in [-1, 1]; one that is none is -1, the least."""
    return max(-1.0, min(1.0, float(score))) if math.isfinite(score) else -1.0


class Index(Protocol):
    """Nearest vectors by cosine within a partition. Any thread may call any method.

    ``SemanticCache(index=)`` is called with the length of its vectors.

    It lives in memory: at each start it gets the vectors of the catalog again. `VectorIndex` is one.
    """

    def extend(self, rows: Iterable[Row]) -> None:
        """Add rows, each new and a float32 unit vector of the index's dimension."""
        ...

    def remove(self, items: Iterable[str]) -> None:
        """Forget items."""
        ...

    def search(self, partition: str, vector: Vector, k: int = 1) -> Sequence[Neighbour]:
        """The ``k`` nearest items of a partition with their cosines."""
        ...

    def score(self, item: str, vector: Vector) -> float | None:
        """The cosine of one item; None where it is unknown."""
        ...


class Graph:
    """The first rows of a partition under HNSW with float16 vectors (Malkov and Yashunin, arXiv:1603.09320), on FAISS.

    Removed rows still lead a search to others, and are no results.
    """

    def __init__(self, index: Any, items: Sequence[str | None]) -> None:
        faiss = faiss_module()
        self.index = index
        self._alive = np.packbits([item is not None for item in items], bitorder="little")
        self._selected = faiss.IDSelectorBitmap(self._alive)
        crowding = max(1.0, len(items) / _MANY)
        self._breadth = round(_SEARCH_BREADTH * crowding**0.5)
        removed = [row for row, item in enumerate(items) if item is None]
        codes_of(index)[removed] = 0

    def remove(self, row: int) -> None:
        """Overwrite a row. A search that reads it meanwhile drops it from its results."""
        self._alive[row // 8] &= np.uint8(255 - (1 << (row % 8)))
        codes_of(self.index)[row] = 0

    def search(self, query: Vector, k: int) -> list[tuple[float, int]]:
        params = faiss_module().SearchParametersHNSW(
            efSearch=max(self._breadth, 2 * k),
            sel=self._selected,
        )
        queries = query.reshape(1, -1)
        scores, rows = self.index.search(queries, k, params=params)
        found = zip(scores[0].tolist(), rows[0].tolist(), strict=True)
        return [(score, row) for score, row in found if row >= 0]


class Partition:
    """Rows in the order in which they came: first those of the graph, then plain ones. A row keeps its number.

    Attributes:
        items: name of each row; None for a removed one.
        place: number of each row by name.
        graph: has the first ``covered`` rows; None while there is none.
        gone: how many rows are removed.
        building: whether the index's worker is at it.
    """

    def __init__(self, dim: int) -> None:
        self.items: list[str | None] = []
        self.place: dict[str, int] = {}
        self.graph: Graph | None = None
        self.covered = self.gone = 0
        self.building = False
        self._room: Matrix = np.empty((0, dim), dtype=np.float32)
        self._removed: list[int] = []  # plain rows, by their place in the room

    @property
    def rows(self) -> Matrix:
        """The plain vectors, [rows, dim]; zero for a removed one."""
        return self._room[: len(self.items) - self.covered]

    def append(self, items: Sequence[str], vectors: Matrix) -> None:
        used = len(self.items) - self.covered
        needed = used + len(items)
        if needed > len(self._room):
            size = max(needed, used + used // 2)
            larger = np.zeros((size, self._room.shape[1]), dtype=np.float32)
            larger[:used] = self.rows
            self._room = larger
        self._room[used:needed] = vectors
        numbers = range(len(self.items), len(self.items) + len(items))
        self.place.update(zip(items, numbers, strict=True))
        self.items += items

    def take(
        self, other: Partition, rows: Sequence[int], items: Sequence[str | None] | None = None
    ) -> None:
        """Append rows of another partition; ``items`` are its items of a while ago."""
        if not rows:
            return
        names = other.items if items is None else items
        taken = [str(names[row]) for row in rows]
        vectors = [other.vector(row) for row in rows]
        self.append(taken, np.stack(vectors))

    def remove(self, item: str) -> None:
        row = self.place.pop(item)
        self.items[row] = None
        self.gone += 1
        if self.graph is not None and row < self.covered:
            self.graph.remove(row)
            return
        plain_row = row - self.covered
        self._room[plain_row] = 0
        self._removed.append(plain_row)

    def vector(self, row: int) -> Vector:
        if self.graph is not None and row < self.covered:
            found: Vector = self.graph.index.reconstruct(row)
        else:
            found = self.rows[row - self.covered]
        return found

    def nearest(self, query: Vector, k: int) -> list[tuple[float, str | None]]:
        """The best ``k`` plain rows, in no order."""
        rows = self.rows
        if len(self._removed) == len(rows):
            return []
        scores = np.empty(len(rows), dtype=np.float32)
        for start in range(0, len(rows), _CHUNK):  # a larger product would wait for BLAS's threads
            chunk = slice(start, start + _CHUNK)
            np.dot(rows[chunk], query, out=scores[chunk])
        scores[self._removed] = -np.inf
        if k == 1:
            best = [int(scores.argmax())]
        else:
            first = max(0, len(scores) - k)
            best = np.argpartition(scores, first)[first:].tolist()
        items = self.items
        return [(float(scores[row]), items[self.covered + row]) for row in best]

    def cover(self, index: Any, rows: int) -> None:
        """Put a graph of the first rows in place, and give up their plain vectors."""
        moved = rows - self.covered
        self._room = self.rows[moved:].copy()
        self._removed = [row - moved for row in self._removed if row >= moved]
        self.covered = rows
        self.graph = Graph(index, self.items[:rows])


class VectorIndex:
    """Nearest vectors by inner product over unit vectors, per partition. Any thread may call any method.

    A partition above ``flat`` rows is searched through a graph: about the nearest (``bench/index.py`` measures the
    share that is found), with scores from float16 vectors, which differ from the exact ones by less than 0.001. The
    vector of a removed item leaves memory at once.

    Args:
        dim: length of every vector.
        flat: plain rows from which a partition gets a graph, 4 or more.
    """

    def __init__(self, dim: int, *, flat: int = FLAT) -> None:
        self.dim = dim
        self._flat = flat
        self._lock = threading.Lock()
        self._partitions: dict[str, Partition] = {}
        self._home: dict[str, str] = {}  # item -> partition
        self._worker = ThreadPoolExecutor(1, "semkv-index", _use_half_the_cores)
        self._closed = False

    def __len__(self) -> int:
        return len(self._home)

    # -- writing ------------------------------------------------------------------------------------------------

    def extend(self, rows: Iterable[Row]) -> None:
        """Add rows; none of the items may be there already."""
        grouped: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            grouped[row.partition].append(row)
        with self._lock:
            for name, members in grouped.items():
                items = [row.item for row in members]
                vectors = [row.vector for row in members]
                home = self._partitions.setdefault(name, Partition(self.dim))
                home.append(items, np.stack(vectors))
                self._home.update(dict.fromkeys(items, name))
                self._look_after(name)

    def remove(self, items: Iterable[str]) -> None:
        """Forget items; unknown ones are ignored. No search that ends after this finds one of them."""
        with self._lock:
            touched = set()
            for item in items:
                name = self._home.pop(item, None)
                if name is not None:
                    self._partitions[name].remove(item)
                    touched.add(name)
            for name in touched:
                if not self._partitions[name].place:
                    del self._partitions[name]
                self._look_after(name)

    # -- looking up ---------------------------------------------------------------------------------------------

    def search(self, partition: str, vector: Vector, k: int = 1) -> list[Neighbour]:
        """The ``k`` nearest items of one partition, best first; fewer where it has fewer, or some went meanwhile."""
        query = np.ascontiguousarray(vector, dtype=np.float32)
        with self._lock:
            home = self._partitions.get(partition)
            if home is None:
                return []
            found = home.nearest(query, k)
            graph = home.graph
            items = home.items
        if graph is not None:
            found += [(score, items[row]) for score, row in graph.search(query, k)]
        found.sort(key=itemgetter(0), reverse=True)
        near = [
            Neighbour(item, as_cosine(score))
            for score, item in found
            if item in self._home and item
        ]
        return near[:k]

    def score(self, item: str, vector: Vector) -> float | None:
        """The cosine of one stored item with ``vector``, or None where the item is unknown."""
        with self._lock:
            name = self._home.get(item)
            if name is None:
                return None
            home = self._partitions[name]
            stored = home.vector(home.place[item])
            return as_cosine(float(np.dot(stored, vector)))

    # -- in the background --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop building, within a second or so; the index stays searchable."""
        self._closed = True
        self._worker.shutdown()

    def _look_after(self, name: str) -> None:
        home = self._partitions.get(name)
        if home is None or home.building or self._closed:
            return
        if len(home.rows) >= self._flat or self._is_stale(home):
            home.building = True
            self._worker.submit(self._build, name, home)

    def _is_stale(self, home: Partition) -> bool:
        return home.gone > max(self._flat // 4, _STALE * len(home.items))

    def _build(self, name: str, home: Partition) -> None:
        try:
            if self._is_stale(home):
                self._renew(name, home)
            else:
                self._enlarge(home)
        except Exception as error:  # short of memory, most likely: that costs speed, and no answer
            logger.warning("vector index: %r: left as it is until the next write", error)
            home.building = False
            return
        with self._lock:
            home.building = False
            self._look_after(name)

    def _enlarge(self, home: Partition) -> None:
        """Move plain rows into the graph."""
        with self._lock:
            moved = home.rows[:_MOVED].copy()
        graph = home.graph
        index = _empty_graph(self.dim) if graph is None else faiss_module().clone_index(graph.index)
        if self._grow(index, moved):
            with self._lock:
                home.cover(index, home.covered + len(moved))

    def _renew(self, name: str, home: Partition) -> None:
        """Put a new partition in place, of the rows that are left."""
        with self._lock:
            items = home.items.copy()
        fresh = Partition(self.dim)
        left = [row for row, item in enumerate(items) if item is not None]
        for start in range(0, len(left), _MOVED):
            fresh.take(home, left[start : start + _MOVED], items)
            if len(fresh.rows) >= self._flat:
                index = _empty_graph(self.dim) if fresh.graph is None else fresh.graph.index
                if not self._grow(index, fresh.rows):
                    return
                fresh.cover(index, len(fresh.items))
        with self._lock:
            for row in left:
                if home.items[row] is None:  # removed meanwhile
                    fresh.remove(str(items[row]))
            later = range(len(items), len(home.items))
            fresh.take(home, [row for row in later if home.items[row] is not None])
            if self._partitions.get(name) is home:  # else all of it was removed meanwhile
                self._partitions[name] = fresh

    def _grow(self, index: Any, vectors: Matrix) -> bool:
        """Add rows to a graph that nobody searches yet, 0.2 ms each; False where the index was closed meanwhile."""
        for start in range(0, len(vectors), _CHUNK):
            if self._closed:
                return False
            index.add(vectors[start : start + _CHUNK])
        return True


def _use_half_the_cores() -> None:
    """For builds by this thread."""
    faiss_module().omp_set_num_threads(max(1, (os.cpu_count() or 1) // 2))


def faiss_module() -> Any:
    """FAISS, whose stubs lack what its classes have; imported when the first partition is large enough for a graph."""
    import faiss

    return faiss


def codes_of(index: Any) -> npt.NDArray[np.uint8]:
    """The vectors of a graph's index as they are stored, a row each, to be read and written in place."""
    faiss = faiss_module()
    storage = faiss.downcast_index(index.storage)
    codes: npt.NDArray[np.uint8] = faiss.rev_swig_ptr(storage.codes.data(), storage.codes.size())
    return codes.reshape(-1, storage.code_size)


def _empty_graph(dim: int) -> Any:
    faiss = faiss_module()
    index = faiss.IndexHNSWSQ(
        dim, faiss.ScalarQuantizer.QT_fp16, _LINKS, faiss.METRIC_INNER_PRODUCT
    )
    index.hnsw.efConstruction = _BUILD_BREADTH
    return index
