"""The vector index: an exact matrix while a partition is small, FAISS's HNSW above.

Partitions come before the search: a vector is compared only with vectors of its own partition, so a tenant or another
image can neither match nor crowd out a match. The index is built from the catalog and is never the only copy.

A new row is a plain one, compared exactly. From `FLAT` plain rows on, a background thread adds them to a copy of the
partition's `Graph`, which then takes its place, so that no search and no write waits for it. The same thread rebuilds a
graph with many removed rows. Graphs are in memory only: those of 100,000 vectors are built again within 40 s of
processor time after a start, and until then the search is exact.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from semkv.types import Vector

    Flags = npt.NDArray[np.bool_]
    Matrix = npt.NDArray[np.float32]

logger = logging.getLogger("semkv")

FLAT = 1024  # plain rows from which a partition gets a graph
_CHUNK = 1024  # rows that are compared, or added to a graph, in one call
_MOVED = 1 << 13  # plain rows that move into a graph at once
_STALE = 0.2  # share of removed rows at which a graph is rebuilt
_LINKS, _BUILD_BREADTH, _SEARCH_BREADTH = 16, 80, 96  # M, efConstruction and efSearch of HNSW
_MANY = 1 << 18  # rows from which a graph is searched more broadly, by the root of their number: it would find less


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


class Graph:
    """Rows under an HNSW graph with float16 vectors (Malkov and Yashunin, arXiv:1603.09320), on FAISS.

    No row is added: a graph with more takes its place. Removed rows still lead a search to others, and are no results.

    Attributes:
        index: FAISS's.
        items: name of each row; None for a removed one.
        dead: how many are removed.
    """

    def __init__(self, index: Any, items: list[str | None], alive: Flags) -> None:
        faiss = faiss_module()
        self.index, self.items, self.dead = index, items, len(items) - int(np.count_nonzero(alive))
        self._bits = np.packbits(alive, bitorder="little")
        breadth = round(_SEARCH_BREADTH * max(1.0, len(items) / _MANY) ** 0.5)
        self.params = faiss.SearchParametersHNSW(efSearch=breadth, sel=faiss.IDSelectorBitmap(self._bits))

    @property
    def alive(self) -> Flags:
        """Whether each row may be a result."""
        return np.unpackbits(self._bits, count=len(self.items), bitorder="little").astype(np.bool_)

    def remove(self, row: int) -> None:
        self.items[row] = None
        self._bits[row // 8] &= np.uint8(255 - (1 << (row % 8)))
        self.dead += 1

    def blank(self) -> None:
        """Overwrite the vectors of removed rows. A search that reads one meanwhile drops it from its results."""
        if self.dead:
            codes_of(self.index)[~self.alive] = 0


class Partition:
    """The plain rows of one partition, float32 and without holes, and the graph that has the others."""

    __slots__ = ("_room", "graph", "items", "name")

    def __init__(self, name: str, dim: int) -> None:
        self.name = name
        self.graph: Graph | None = None
        self.items: list[str] = []
        self._room: Matrix = np.empty((0, dim), dtype=np.float32)

    @property
    def rows(self) -> Matrix:
        """The plain vectors, [len(items), dim]."""
        return self._room[: len(self.items)]

    def append(self, items: Sequence[str], vectors: Matrix) -> None:
        used, needed = len(self.items), len(self.items) + len(items)
        if needed > len(self._room):
            larger = _matrix(max(needed, used + used // 2), self._room.shape[1])
            larger[:used] = self.rows
            self._room = larger
        self._room[used:needed] = vectors
        self.items += items

    def remove(self, row: int) -> str | None:
        """Take a plain row out; returns the item whose row lies in its place now, if any."""
        item, last = self.items.pop(), len(self.items) - 1
        moved = row <= last
        if moved:
            self.items[row] = item
            self._room[row] = self._room[last + 1]
        self._room[last + 1] = 0
        return item if moved else None

    def keep_only(self, stay: Flags) -> None:
        """Give up the other plain rows, and their room."""
        room = _matrix(int(np.count_nonzero(stay)), self._room.shape[1])
        self._room = np.compress(stay, self.rows, axis=0, out=room)
        self.items = [item for item, stays in zip(self.items, stay.tolist(), strict=True) if stays]

    def nearest(self, query: Vector, k: int) -> list[tuple[float, str]]:
        """The best ``k`` plain rows, in no order."""
        if not self.items:
            return []
        rows, scores = self.rows, np.empty(len(self.items), dtype=np.float32)
        for start in range(0, len(scores), _CHUNK):  # a larger product would wait for BLAS's threads
            np.dot(rows[start : start + _CHUNK], query, out=scores[start : start + _CHUNK])
        best = [int(scores.argmax())] if k == 1 else np.argpartition(scores, max(0, len(scores) - k))[-k:].tolist()
        return [(float(scores[row]), self.items[row]) for row in best]


_Place = tuple[Partition, bool, int]  # whether the row is one of its graph


class VectorIndex:
    """Nearest vectors by inner product over unit vectors, per partition. Any thread may call any method.

    A partition above ``flat`` rows is searched through a graph: about the nearest (``bench/index.py`` measures the
    share that is found), with scores from float16 vectors, which differ from the exact ones by less than 0.001.

    Args:
        dim: length of every vector.
        flat: plain rows from which a partition gets a graph, 4 or more.
    """

    def __init__(self, dim: int, *, flat: int = FLAT) -> None:
        self.dim, self._flat = dim, flat
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._partitions: dict[str, Partition] = {}
        self._place: dict[str, _Place] = {}
        self._removed: set[str] = set()  # since the build that goes on began
        self._work: dict[str, None] = {}  # names of partitions for the worker
        self._worker: threading.Thread | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, item: str) -> bool:
        return item in self._place

    def items(self) -> list[str]:
        """Every item."""
        with self._lock:
            return list(self._place)

    # -- writing ------------------------------------------------------------------------------------------------

    def extend(self, rows: Iterable[Row]) -> None:
        """Add rows; an item that is already there keeps its first vector.

        Raises:
            ValueError: a vector has another length than ``dim``; nothing was added.
        """
        grouped: dict[str, dict[str, Vector]] = defaultdict(dict)
        for row in rows:
            if row.vector.shape != (self.dim,):
                raise ValueError(f"vector of shape {row.vector.shape} in an index of dimension {self.dim}")
            grouped[row.partition].setdefault(row.item, row.vector)
        with self._lock:
            for name, members in grouped.items():
                items = [item for item in members if item not in self._place]
                if not items:
                    continue
                home = self._partitions.setdefault(name, Partition(name, self.dim))
                self._place.update({item: (home, False, row) for row, item in enumerate(items, len(home.items))})
                home.append(items, np.stack([members[item] for item in items]))
                self._look_after(home)

    def remove(self, items: Iterable[str]) -> None:
        """Forget items; unknown ones are ignored. No search that ends after this finds one of them."""
        with self._lock:
            touched = set()
            for item in items:
                place = self._place.pop(item, None)
                if place is None:
                    continue
                if self._worker is not None:
                    self._removed.add(item)
                home, in_graph, row = place
                touched.add(home)
                if in_graph and home.graph is not None:
                    home.graph.remove(row)
                elif (other := home.remove(row)) is not None:
                    self._place[other] = place
            for home in touched:
                self._tidy(home)

    def _tidy(self, home: Partition) -> None:
        """Drop what is empty; the worker does the rest."""
        if home.graph is not None and home.graph.dead == len(home.graph.items):
            home.graph = None
        if home.items or home.graph is not None:
            self._look_after(home)
        elif self._partitions.get(home.name) is home:
            del self._partitions[home.name]

    def apply_purges(self) -> None:
        """Say that everything a purge deleted was removed here: its vectors leave memory."""
        with self._lock:
            for home in self._partitions.values():
                if home.graph is not None:
                    home.graph.blank()
                self._look_after(home)

    # -- looking up ---------------------------------------------------------------------------------------------

    def search(self, partition: str, vector: Vector, k: int = 1) -> list[Neighbour]:
        """The ``k`` nearest items of one partition, best first; fewer where it has fewer, or some went meanwhile."""
        query = np.ascontiguousarray(vector, dtype=np.float32)
        with self._lock:
            home = self._partitions.get(partition)
            if home is None:
                return []
            found: list[tuple[float, str | None]] = [*home.nearest(query, k)]
            graph = home.graph
        if graph is not None:
            params = graph.params
            if 2 * k > params.efSearch:
                params = faiss_module().SearchParametersHNSW(efSearch=2 * k, sel=params.sel)
            scores, rows = graph.index.search(query.reshape(1, -1), k, params=params)
            pairs = zip(scores[0].tolist(), rows[0].tolist(), strict=True)
            found += [(score, graph.items[row]) for score, row in pairs if row >= 0]
        found.sort(key=lambda one: -one[0])
        near = [Neighbour(item, max(-1.0, min(1.0, score))) for score, item in found if item in self._place and item]
        return near[:k]

    def score(self, item: str, vector: Vector) -> float | None:
        """The cosine of one stored item with ``vector``, or None where the item is unknown."""
        with self._lock:
            place = self._place.get(item)
            if place is None:
                return None
            home, in_graph, row = place
            own = home.graph.index.reconstruct(row) if in_graph and home.graph is not None else home.rows[row]
            return max(-1.0, min(1.0, float(np.dot(own, vector))))

    # -- in the background --------------------------------------------------------------------------------------

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until the worker has nothing to do; False where it still had after ``timeout_s`` seconds."""
        with self._idle:
            return self._idle.wait_for(lambda: self._worker is None, timeout_s)

    def close(self) -> None:
        """Stop the worker, within a second or so; the index stays searchable."""
        with self._lock:
            self._closed, worker = True, self._worker
        if worker is not None:
            worker.join()

    def _look_after(self, home: Partition) -> None:
        if not self._closed and self._is_due(home):
            self._work[home.name] = None
            if self._worker is None:
                self._worker = threading.Thread(target=self._run, name="semkv-index", daemon=True)
                self._worker.start()

    def _is_due(self, home: Partition) -> bool:
        return len(home.items) >= self._flat or (home.graph is not None and self._is_stale(home.graph))

    def _is_stale(self, graph: Graph) -> bool:
        return graph.dead > max(self._flat // 4, _STALE * len(graph.items))

    def _run(self) -> None:
        try:
            faiss_module().omp_set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # for builds by this thread
            while (home := self._next()) is not None:
                self._build(home)
        except Exception as error:  # short of memory, most likely: that costs speed, and no answer
            logger.warning("vector index: %r: left as it is until the next write", error)
            with self._lock:
                self._rest()

    def _next(self) -> Partition | None:
        """The partition to build a graph for; None ends the thread, which the next write starts again."""
        with self._lock:
            while self._work and not self._closed:
                name = next(iter(self._work))
                home = self._partitions.get(name)
                if home is not None and self._is_due(home):
                    return home
                del self._work[name]
            self._rest()
            return None

    def _rest(self) -> None:
        self._work.clear()
        self._worker = None
        self._idle.notify_all()

    def _build(self, home: Partition) -> None:
        """Make a graph of the one there is, or of the rows left in a stale one, and of some plain rows."""
        with self._lock:
            self._removed.clear()
            items: list[str | None] = [*home.items[-_MOVED:]]
            vectors = home.rows[-_MOVED:].copy()
            graph = home.graph
            stale = graph if graph is not None and self._is_stale(graph) else None
            base = None if stale is not None else graph
            if stale is not None:
                left = np.flatnonzero(stale.alive)
                items = [*(stale.items[row] for row in left.tolist()), *items]
        index = _empty_graph(self.dim) if base is None else faiss_module().clone_index(base.index)
        if stale is not None and not self._grow(index, left, stale.index.reconstruct_batch):
            return
        if self._grow(index, np.arange(len(vectors)), vectors.__getitem__):
            with self._lock:
                if self._partitions.get(home.name) is home:  # else all its rows were removed meanwhile
                    self._publish(home, base, index, [None if item in self._removed else item for item in items])
                    self._tidy(home)

    def _grow(self, index: Any, rows: npt.NDArray[np.int64], read: Callable[[Any], Matrix]) -> bool:
        """Add rows to a graph that nobody searches yet, 0.2 ms each; False where the index was closed meanwhile."""
        for start in range(0, len(rows), _CHUNK):
            if self._closed:
                return False
            index.add(read(rows[start : start + _CHUNK]))
        return True

    def _publish(self, home: Partition, base: Graph | None, index: Any, moved: Sequence[str | None]) -> None:
        """Put a graph in place: the rows of ``base``, then those that moved, None for one that was removed."""
        before = [] if base is None else base.items
        new = np.array([item is not None for item in moved], dtype=np.bool_)
        home.graph = Graph(index, [*before, *moved], new if base is None else np.concatenate([base.alive, new]))
        home.graph.blank()
        names = set(moved)
        home.keep_only(np.array([item not in names for item in home.items], dtype=np.bool_))
        self._place.update({item: (home, True, row) for row, item in enumerate(moved, len(before)) if item is not None})
        self._place.update({item: (home, False, row) for row, item in enumerate(home.items)})


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


def _matrix(rows: int, dim: int) -> Matrix:
    """Room for vectors. Much room is mapped by itself: the system gets it back when it is given up, unlike that of the
    heap, where half of all plain rows would stay after they moved into a graph."""
    size = 4 * rows * dim
    if size >= 1 << 18:
        with suppress(OSError):  # a process may have only so many mappings
            mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return np.frombuffer(mapped, dtype=np.float32).reshape(rows, dim)
    return np.empty((rows, dim), dtype=np.float32)


def _empty_graph(dim: int) -> Any:
    faiss = faiss_module()
    index = faiss.IndexHNSWSQ(dim, faiss.ScalarQuantizer.QT_fp16, _LINKS, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = _BUILD_BREADTH
    return index
