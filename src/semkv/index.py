"""The vector index: an exact matrix while a partition is small, FAISS's HNSW above.

Partitions come before the search: a vector is compared only with vectors of its own partition, so a tenant or another
image can neither match nor crowd out a match. The index is built from the catalog and is never the only copy.

A new row is a plain one, compared exactly. From `FLAT` plain rows on, a background thread moves them into a `Graph`: it
adds them to a copy, which then takes the graph's place, so that no search and no write waits for it. The same thread
rebuilds graphs with many removed rows and keeps graphs on disk (`semkv.stores.kept_graphs`) for the next start.
"""

from __future__ import annotations

import functools
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

from semkv.errors import CorruptValue
from semkv.stores.kept_graphs import KeptGraphs, faiss_module, name_hashes, read_graph, write_graph

if TYPE_CHECKING:
    import numpy.typing as npt

    from semkv.types import Vector

    RowNumbers = npt.NDArray[np.int64]
    Matrix = npt.NDArray[np.float32]

logger = logging.getLogger("semkv")

FLAT = 1024  # plain rows from which a partition gets a graph
GRAPH = 1 << 18  # rows of one graph: bounds the memory of a copy, and a larger graph finds less
_CHUNK = 1024  # plain rows that lie together
_MOVED = 1 << 13  # rows that move into a graph at once
_STALE = 0.2  # share of removed rows at which a graph is rebuilt
_UNKEPT = 0.25  # share of new rows at which a graph is written to disk again
_LINKS, _BUILD_BREADTH, _SEARCH_BREADTH = 16, 80, 96  # M, efConstruction and efSearch of HNSW
_ROW_BITS = 32  # of a place: above them lies the number of the partition or graph
_ROW_MASK = (1 << _ROW_BITS) - 1


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One search result: an item and its cosine with the query, in [-1, 1]."""

    item: str
    score: float


@dataclass(frozen=True, slots=True)
class Row:
    """One vector to be indexed: a unit vector of the index's dimension. ``namespace`` names the owner."""

    item: str
    partition: str
    vector: Vector
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class IndexSizes:
    """Rows by where they are: plain, in a graph, and removed from a graph but still taking room."""

    flat: int
    graph: int
    dead: int


class Partition:
    """The plain rows of one partition, float32 and without holes, and its graphs."""

    __slots__ = ("chunks", "graphs", "items", "name", "namespace", "number")

    def __init__(self, number: int, name: str, namespace: str) -> None:
        self.number, self.name, self.namespace = number, name, namespace
        self.graphs: list[Graph] = []
        self.items: list[str] = []
        self.chunks: list[Matrix] = []

    def append(self, items: Sequence[str], vectors: Matrix) -> None:
        done = 0
        while done < len(items):
            used = len(self.items) % _CHUNK
            fit = min(len(items) - done, _CHUNK - used)
            if not used:
                self.chunks.append(_matrix(min(_CHUNK, fit if not self.chunks else _CHUNK), vectors.shape[1]))
            elif used + fit > len(self.chunks[-1]):
                larger = _matrix(min(_CHUNK, max(used + fit, 2 * used)), vectors.shape[1])
                larger[:used] = self.chunks[-1][:used]
                self.chunks[-1] = larger
            self.chunks[-1][used : used + fit] = vectors[done : done + fit]
            self.items += items[done : done + fit]
            done += fit

    def vector(self, row: int) -> Vector:
        found: Vector = self.chunks[row // _CHUNK][row % _CHUNK]
        return found

    def last(self, count: int) -> Matrix:
        """A copy of the last rows."""
        first = (len(self.items) - count) // _CHUNK
        rows: Matrix = np.concatenate(self.chunks[first:])[: len(self.items) - first * _CHUNK]
        return rows[-count:]

    def remove(self, row: int) -> str | None:
        """Take a row out; returns the item whose row lies in its place now, if any."""
        last, item = len(self.items) - 1, self.items.pop()
        if row != last:
            self.items[row] = item
            self.vector(row)[:] = self.vector(last)
        self.vector(last)[:] = 0
        if last % _CHUNK == 0:
            self.chunks.pop()
        return item if row != last else None

    def nearest(self, query: Vector, k: int) -> list[tuple[float, str]]:
        """The best ``k`` plain rows, in no order."""
        count = len(self.items)
        if not count:
            return []
        scores = np.empty(len(self.chunks) * _CHUNK, dtype=np.float32)
        for start, chunk in zip(range(0, count, _CHUNK), self.chunks, strict=True):
            rows = min(_CHUNK, count - start)
            np.dot(chunk[:rows], query, out=scores[start : start + rows])
        scores = scores[:count]
        best = [int(scores.argmax())] if k == 1 else np.argpartition(scores, max(0, count - k))[-k:].tolist()
        return [(float(scores[row]), self.items[row]) for row in best]


class Graph:
    """Up to ``room`` rows under an HNSW graph with float16 vectors (Malkov and Yashunin, arXiv:1603.09320), on FAISS.

    ``index`` is never changed: a copy with more rows takes its place. Removed rows still lead the search to others,
    and are no results.

    Attributes:
        items: name of each row; None for a removed one, and for one from a file that is not claimed yet.
        dead, blank: how many rows are removed, and how many of those have no vector of their own any more.
        purged: whether the vectors of removed rows have to go now.
        file, kept: number of its file (-1: none), and how many rows that has.
        claims: row by hash of its item's name, of a graph from a file while the catalog is read.
    """

    def __init__(self, number: int, home: Partition, dim: int, room: int) -> None:
        faiss = faiss_module()
        self.number, self.home, self.room = number, home, room
        self.index: Any = faiss.IndexHNSWSQ(dim, faiss.ScalarQuantizer.QT_fp16, _LINKS, faiss.METRIC_INNER_PRODUCT)
        self.index.hnsw.efConstruction = _BUILD_BREADTH
        self.items: list[str | None] = []
        self.dead = self.blank = self.kept = 0
        self.file, self.purged = -1, False
        self.claims: dict[int, int] | None = None
        self.set_alive(np.zeros(room, dtype=np.bool_))

    def alive(self) -> npt.NDArray[np.bool_]:
        """Whether each row may be a result."""
        return np.unpackbits(self._bits, count=self.room, bitorder="little").astype(np.bool_)

    def set_alive(self, alive: npt.NDArray[np.bool_]) -> None:
        """Set which rows may be results. Searches under way keep the old ones."""
        faiss = faiss_module()
        self._bits = np.packbits(alive, bitorder="little")
        self.params = faiss.SearchParametersHNSW(efSearch=_SEARCH_BREADTH, sel=faiss.IDSelectorBitmap(self._bits))

    def remove(self, row: int) -> None:
        self.items[row] = None
        self._bits[row // 8] &= np.uint8(255 - (1 << (row % 8)))
        self.dead += 1

    def leave_out(self, rows: Sequence[int]) -> None:
        """Leave rows that moved out of later searches; those under way still find them here."""
        alive = self.alive()
        alive[rows] = False
        self.set_alive(alive)
        self.dead += len(rows)

    def claim(self, items: Sequence[str], vectors: Matrix) -> list[int]:
        """Give new items their rows of the file, where the vectors are the same to the last bit; -1 for the others."""
        faiss = faiss_module()
        claims, hashes = self.claims or {}, name_hashes(items).tolist()
        rows = np.array([claims.get(hashed, -1) for hashed in hashes])
        encoded = faiss.downcast_index(self.index.storage).sa_encode(vectors)
        same = (rows >= 0) & (codes_of(self.index)[rows] == encoded).all(axis=1)
        taken = [claims.pop(hashed, -1) if good else -1 for hashed, good in zip(hashes, same, strict=True)]
        alive = self.alive()
        for item, row in zip(items, taken, strict=True):
            if row >= 0:
                self.items[row], alive[row] = item, True
                self.dead -= 1
        self.set_alive(alive)
        return taken

    def vector(self, row: int) -> Vector:
        found: Vector = self.index.reconstruct(row)
        return found

    def grown(self, vectors: Matrix, wanted: Callable[[], bool]) -> Any:
        """A copy of ``index`` with more rows; None where it is not ``wanted`` any more. Some 0.2 ms a row."""
        copy = faiss_module().clone_index(self.index)
        for start in range(0, len(vectors), _CHUNK):
            if not wanted():
                return None
            copy.add(vectors[start : start + _CHUNK])
        return copy

    def blanked(self, gone: RowNumbers) -> Any:
        """A copy of ``index`` in which each removed row has the vector of a living neighbor, to lead on as before.

        Those without a living neighbor are spread over all living rows: many rows of one vector, linked only to each
        other, would hide what is near that vector.
        """
        faiss = faiss_module()
        copy = faiss.clone_index(self.index)
        living = np.ones(copy.ntotal, dtype=np.bool_)
        living[gone] = False
        left = np.flatnonzero(living)
        first = faiss.vector_to_array(copy.hnsw.offsets)[gone].astype(np.int64)
        near = faiss.vector_to_array(copy.hnsw.neighbors)[first[:, None] + np.arange(copy.hnsw.nb_neighbors(0))]
        beside = (near >= 0) & living[near]
        each = np.arange(len(gone))
        spread = left[each * len(left) // max(1, len(gone))]
        codes = codes_of(copy)
        codes[gone] = codes[np.where(beside.any(axis=1), near[each, np.argmax(beside, axis=1)], spread)]
        return copy


class VectorIndex:
    """Nearest vectors by inner product over unit vectors, per partition. Any thread may call any method.

    A partition above ``flat`` rows is searched through graphs: about the nearest (``bench/index.py`` measures the share
    that is found), with scores from float16 vectors, which differ from the exact ones by less than 0.001.

    Args:
        dim: length of every vector.
        flat: plain rows from which a partition gets a graph.
        graph: rows of one graph; a partition has as many graphs as it needs.
        kept: keeps graphs on disk. Rows added before `loaded` claim the kept graphs' rows, each only where its vector
            is the same to the last float16 bit, so that an old or foreign file costs time and no answer.

    Raises:
        ValueError: ``flat`` is below 4 or above ``graph``.
    """

    def __init__(self, dim: int, *, flat: int = FLAT, graph: int = GRAPH, kept: KeptGraphs | None = None) -> None:
        if not 4 <= flat <= graph:
            raise ValueError(f"flat {flat} and graph {graph}: flat must be 4 or more, and graph no less than flat")
        self.dim, self._flat, self._room, self._kept = dim, flat, graph, kept
        self._reading = kept is not None  # until `loaded`
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._partitions: dict[str, Partition] = {}
        self._parts: dict[int, Partition | Graph] = {}
        self._place: dict[str, int] = {}  # item -> number of its part, and row
        self._made = 0
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

    def sizes(self) -> IndexSizes:
        with self._lock:
            graphs = [graph for home in self._partitions.values() for graph in home.graphs]
            flat = sum(len(home.items) for home in self._partitions.values())
        dead = sum(graph.dead for graph in graphs)
        return IndexSizes(flat, sum(len(graph.items) for graph in graphs) - dead, dead)

    # -- writing ------------------------------------------------------------------------------------------------

    def extend(self, rows: Iterable[Row]) -> None:
        """Add rows; an item that is already there keeps its first vector.

        Raises:
            ValueError: a vector has another length than ``dim``; nothing was added.
        """
        grouped: dict[tuple[str, str], dict[str, Vector]] = defaultdict(dict)
        for row in rows:
            if row.vector.shape != (self.dim,):
                raise ValueError(f"vector of shape {row.vector.shape} in an index of dimension {self.dim}")
            grouped[row.partition, row.namespace].setdefault(row.item, row.vector)
        with self._lock:
            for (name, namespace), members in grouped.items():
                items = [item for item in members if item not in self._place]
                if items:
                    home = self._partitions.get(name) or self._open(name, namespace)
                    self._add(home, items, np.stack([members[item] for item in items]))
                    self._look_after(home)

    def _add(self, home: Partition, items: list[str], vectors: Matrix) -> None:
        for graph in home.graphs:
            if not graph.claims or not items:
                continue
            rows = graph.claim(items, vectors)
            self._place |= {item: _place(graph, row) for item, row in zip(items, rows, strict=True) if row >= 0}
            vectors = vectors[[row < 0 for row in rows]]
            items = [item for item, row in zip(items, rows, strict=True) if row < 0]
        first = _place(home, len(home.items))
        home.append(items, vectors)
        self._place.update(zip(items, range(first, first + len(items)), strict=True))

    def _open(self, name: str, namespace: str) -> Partition:
        """A new partition, with the graphs that were kept of it."""
        self._made += 1
        home = self._partitions[name] = self._parts[self._made] = Partition(self._made, name, namespace)
        if not self._reading or self._kept is None:
            return home
        for number, body in self._kept.read(name):
            graph = self._new_graph(home)
            try:
                graph.index, hashes = read_graph(body, graph.index, self._room)
            except CorruptValue as error:
                self._kept.reject(namespace, name, number, error)
                continue
            graph.items = [None] * len(hashes)
            graph.dead = graph.kept = len(hashes)
            graph.claims = {hashed: row for row, hashed in enumerate(hashes.tolist()) if hashed}
            graph.file = number
            home.graphs.append(graph)
            self._parts[graph.number] = graph
        return home

    def _new_graph(self, home: Partition) -> Graph:
        self._made += 1
        return Graph(self._made, home, self.dim, self._room)

    def loaded(self) -> None:
        """Say that the whole catalog has been read: rows of kept graphs that nobody claimed are removed ones."""
        if not self._reading:
            return
        with self._lock:
            self._reading = False
            for home in list(self._partitions.values()):
                for graph in home.graphs:
                    graph.claims = None
                self._tidy(home)
            if self._kept is not None:
                self._kept.drop_unread()

    def remove(self, items: Iterable[str]) -> None:
        """Forget items; unknown ones are ignored. No search that ends after this finds one of them."""
        with self._lock:
            touched = set()
            for item in items:
                place = self._place.pop(item, None)
                if place is not None:
                    touched.add(self._take_out(*self._at(place)))
            for home in touched:
                self._tidy(home)

    def _at(self, place: int) -> tuple[Partition | Graph, int]:
        return self._parts[place >> _ROW_BITS], place & _ROW_MASK

    def _take_out(self, part: Partition | Graph, row: int) -> Partition:
        if isinstance(part, Graph):
            part.remove(row)
            return part.home
        item = part.remove(row)
        if item is not None:
            self._place[item] = _place(part, row)
        return part

    def heed(self, purge: str) -> None:
        """Say that everything a purge deleted was removed here: its vectors leave memory and the kept graphs.

        Args:
            purge: the catalog's mark of that purge, read before it was asked which entries are gone.
        """
        with self._lock:
            for home in self._partitions.values():
                for graph in home.graphs:
                    if graph.dead > graph.blank:
                        graph.purged = True
                        self._forget_file(graph)
                    if graph.file < 0:
                        graph.kept = 0  # to be written again
                self._look_after(home)
            if self._kept is not None:
                self._kept.heed(purge)

    def _tidy(self, home: Partition) -> None:
        """Drop what is empty; the worker does the rest."""
        for graph in [graph for graph in home.graphs if graph.dead == len(graph.items) and not graph.claims]:
            self._forget_file(graph)
            home.graphs.remove(graph)
            del self._parts[graph.number]
        if home.items or home.graphs:
            self._look_after(home)
        elif self._partitions.get(home.name) is home:
            del self._partitions[home.name], self._parts[home.number]

    def _forget_file(self, graph: Graph) -> None:
        if self._kept is not None and graph.file >= 0:
            self._kept.drop(graph.home.namespace, graph.home.name, graph.file)
            graph.file = -1

    # -- looking up ---------------------------------------------------------------------------------------------

    def search(self, partition: str, vector: Vector, k: int = 1) -> list[Neighbour]:
        """The ``k`` nearest items of one partition, best first; fewer where it has fewer, or some went meanwhile."""
        query = np.ascontiguousarray(vector, dtype=np.float32)
        with self._lock:
            home = self._partitions.get(partition)
            if home is None:
                return []
            found: list[tuple[float, str | None]] = [*home.nearest(query, k)]
            graphs = [(graph.items, graph.index, graph.params) for graph in home.graphs]
        for items, index, params in graphs:
            if 2 * k > _SEARCH_BREADTH:
                params = faiss_module().SearchParametersHNSW(efSearch=2 * k, sel=params.sel)
            scores, rows = index.search(query.reshape(1, -1), k, params=params)
            found += [
                (score, items[row]) for score, row in zip(scores[0].tolist(), rows[0].tolist(), strict=True) if row >= 0
            ]
        found.sort(key=lambda one: -one[0])
        near = [Neighbour(item, max(-1.0, min(1.0, score))) for score, item in found if item in self._place and item]
        return near[:k]

    def score(self, item: str, vector: Vector) -> float | None:
        """The cosine of one stored item with ``vector``, or None where the item is unknown."""
        with self._lock:
            place = self._place.get(item)
            if place is None:
                return None
            part, row = self._at(place)
            return max(-1.0, min(1.0, float(np.dot(part.vector(row), vector))))

    # -- in the background --------------------------------------------------------------------------------------

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until the worker has nothing to do; False where it still had after ``timeout_s`` seconds."""
        with self._idle:
            return self._idle.wait_for(lambda: self._worker is None, timeout_s)

    def close(self) -> None:
        """Stop the worker, within a second or so, and keep the graphs; the index stays searchable."""
        with self._lock:
            self._closed, worker = True, self._worker
        if worker is not None:
            worker.join()
        with self._lock:
            homes = [] if self._reading or self._kept is None else list(self._partitions.values())
            graphs = [g for home in homes for g in home.graphs if g.file < 0 or g.kept != len(g.items)]
        for graph in graphs:
            self._keep(graph)

    def _look_after(self, home: Partition) -> None:
        if not self._closed and self._task(home) is not None:
            self._work[home.name] = None
            if self._worker is None:
                self._worker = threading.Thread(target=self._run, name="semkv-index", daemon=True)
                self._worker.start()

    def _task(self, home: Partition) -> Callable[[], None] | None:
        """The next thing to do for a partition."""
        if self._reading:
            return None
        for graph in home.graphs:
            if graph.purged:
                return functools.partial(self._blank, graph)
            if self._is_stale(graph):
                return functools.partial(self._move, graph)
            if self._kept is not None and len(graph.items) - graph.kept > _UNKEPT * len(graph.items):
                return functools.partial(self._keep, graph)
        return functools.partial(self._move, home) if len(home.items) >= self._flat else None

    def _is_stale(self, graph: Graph) -> bool:
        return graph.dead > max(self._flat // 4, _STALE * len(graph.items))

    def _run(self) -> None:
        try:
            faiss_module().omp_set_num_threads(max(1, (os.cpu_count() or 1) // 2))  # for builds by this thread
            while (task := self._next()) is not None:
                task()
        except Exception as error:  # short of memory, most likely: that costs speed, and no answer
            logger.warning("vector index: %r: left as it is until the next write", error)
            with self._lock:
                self._rest()

    def _next(self) -> Callable[[], None] | None:
        """What to do; None ends the thread, which the next write starts again."""
        with self._lock:
            while self._work and not self._closed:
                name = next(iter(self._work))
                home = self._partitions.get(name)
                if home is not None and (task := self._task(home)) is not None:
                    return task
                del self._work[name]
            self._rest()
            return None

    def _rest(self) -> None:
        self._work.clear()
        self._worker = None
        self._idle.notify_all()

    def _move(self, source: Partition | Graph) -> None:
        """Move some rows of a partition, or of a stale graph, into the last graph with room, or a new one."""
        home = source.home if isinstance(source, Graph) else source
        with self._lock:
            usable = [graph for graph in home.graphs if len(graph.items) < graph.room and not self._is_stale(graph)]
            target = usable[-1] if usable else self._new_graph(home)
            most = min(_MOVED, target.room - len(target.items))
            if isinstance(source, Graph):
                rows = np.flatnonzero(source.alive())[:most]
                items, old = [source.items[row] for row in rows.tolist()], source.index
            else:
                items = list(source.items[-most:])
                vectors = source.last(len(items))
        if not items:  # all were removed before this had its turn
            return
        if isinstance(source, Graph):
            vectors = old.reconstruct_batch(rows)
        index = target.grown(vectors, lambda: not self._closed)
        if index is not None:
            with self._lock:
                self._publish(source, target, items, index)

    def _publish(self, source: Partition | Graph, target: Graph, items: Sequence[str | None], index: Any) -> None:
        """Put a copy with moved rows in place; a row whose item was removed meanwhile is a removed row there."""
        home, first, alive = target.home, len(target.items), target.alive()
        if self._parts.get(home.number) is not home:  # all were removed meanwhile
            return
        moved: list[int] = []
        target.items += [None] * len(items)
        target.dead += len(items)
        for row, item in reversed(list(enumerate(items, first))):  # a partition's last row goes without another's move
            place = None if item is None else self._place.get(item)
            if item is None or place is None or place >> _ROW_BITS != source.number:
                continue
            if isinstance(source, Graph):
                moved.append(place & _ROW_MASK)
            else:
                self._take_out(source, place & _ROW_MASK)
            self._place[item] = _place(target, row)
            target.items[row], alive[row] = item, True
            target.dead -= 1
        target.index, target.purged = index, target.purged or not alive[first : len(target.items)].all()
        target.set_alive(alive)
        if isinstance(source, Graph):
            source.leave_out(moved)
        if target not in home.graphs:
            home.graphs.append(target)
            self._parts[target.number] = target
        self._tidy(home)

    def _blank(self, graph: Graph) -> None:
        """Take away the vectors of removed rows."""
        with self._lock:
            graph.purged = False
            gone = np.flatnonzero(~graph.alive()[: len(graph.items)])
        if graph.blank < len(gone) < len(graph.items):
            index = graph.blanked(gone)
            with self._lock:
                graph.index, graph.blank = index, len(gone)

    def _keep(self, graph: Graph) -> None:
        """Write a graph to disk, without the vectors of removed rows. Only one thread at a time may call."""
        home, kept = graph.home, self._kept
        if kept is None:
            return
        self._blank(graph)
        with self._lock:
            if graph.file < 0:
                taken = {other.file for other in home.graphs}
                graph.file = min(set(range(len(taken) + 1)) - taken)
            number, graph.kept = graph.file, len(graph.items)
            write = functools.partial(write_graph, graph.index, graph.items[:])
        saved = kept.save(home.namespace, home.name, number, write)
        with self._lock:
            if not saved or graph.file < 0 or graph not in home.graphs:  # purged, or all removed, meanwhile
                graph.file = -1
                kept.drop(home.namespace, home.name, number)


def codes_of(index: Any) -> npt.NDArray[np.uint8]:
    """The vectors of a graph's index as they are stored, a row each, to be read and written in place."""
    faiss = faiss_module()
    storage = faiss.downcast_index(index.storage)
    codes: npt.NDArray[np.uint8] = faiss.rev_swig_ptr(storage.codes.data(), storage.codes.size())
    return codes.reshape(-1, storage.code_size)


def _place(part: Partition | Graph, row: int) -> int:
    return part.number << _ROW_BITS | row


def _matrix(rows: int, dim: int) -> Matrix:
    """Room for vectors. Much room is mapped by itself: the system gets it back when it is given up, unlike that of the
    heap, where half of all plain rows would stay after they moved into a graph."""
    size = 4 * rows * dim
    if size >= 1 << 18:
        with suppress(OSError):  # a process may have only so many mappings
            mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return np.frombuffer(mapped, dtype=np.float32).reshape(rows, dim)
    return np.empty((rows, dim), dtype=np.float32)
