"""What a partition is made of: blocks of plain rows, and graphs over many.

Rows are only ever appended; a removed row is marked by the slot -1 and skipped. What a search reads without a lock
(living vectors of a block below its count, a graph's `index`) never changes.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from semkv.indexes.kept import Claims
    from semkv.types import Vector

    Slots = npt.NDArray[np.int64]
    Matrix = npt.NDArray[np.float32]

LARGEST_BLOCK = 1024  # rows
_MAPPED = 1 << 18  # bytes
GONE = -1

_LINKS = 16  # M of HNSW: links of a node; 32 at the lowest level
_BUILD_BREADTH = 80  # efConstruction
_SEARCH_BREADTH = 96  # efSearch


def faiss_module() -> Any:
    """FAISS, whose stubs lack what its classes have."""
    import faiss

    return faiss


def use_threads(most: int) -> None:
    """Let FAISS's builds use so many threads when called from this thread; other threads keep their number."""
    faiss_module().omp_set_num_threads(most)


def _rows(room: int, dim: int) -> Matrix:
    """Room for vectors. Much room is mapped by itself, so that it goes back to the system when it is given up: what
    a process frees otherwise stays with it, half of all plain rows after they moved into a graph."""
    size = 4 * room * dim
    if size >= _MAPPED:
        with suppress(OSError):  # a process may have so many mappings only
            mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # a forked process has its own
            return np.frombuffer(mapped, dtype=np.float32).reshape(room, dim)
    return np.empty((room, dim), dtype=np.float32)


class Block:
    """At most ``room`` float32 rows, compared one by one.

    Attributes:
        slots: the slot of each row, or `GONE`.
        count, dead: rows written, and how many of them were removed.
    """

    __slots__ = ("count", "dead", "slots", "vectors")

    def __init__(self, dim: int, room: int) -> None:
        self.vectors = _rows(room, dim)
        self.slots: Slots = np.full(room, GONE, dtype=np.int64)
        self.count = self.dead = 0

    @property
    def full(self) -> bool:
        return self.count == len(self.slots)

    def append(self, vectors: Matrix, slots: Slots) -> int:
        """Write as many rows as fit; how many those were."""
        fit = min(len(slots), len(self.slots) - self.count)
        self.vectors[self.count : self.count + fit] = vectors[:fit]
        self.slots[self.count : self.count + fit] = slots[:fit]
        self.count += fit
        return fit

    def living(self) -> Slots:
        """The rows that were not removed."""
        return np.flatnonzero(self.slots[: self.count] != GONE)

    def drop(self, row: int) -> None:
        self.slots[row] = GONE
        self.dead += 1
        self.vectors[row] = 0  # after the slot: a search that compares it meanwhile finds it gone

    def vector(self, row: int) -> Vector:
        found: Vector = self.vectors[row]
        return found

    def compare(self, query: Vector, scores: Vector) -> None:
        """Write the scores of the first ``len(scores)`` rows, -inf for a removed one."""
        faiss = faiss_module()
        count = len(scores)
        faiss.fvec_inner_products_ny(  # in the calling thread alone, unlike a product of matrices
            faiss.swig_ptr(scores), faiss.swig_ptr(query), faiss.swig_ptr(self.vectors), len(query), count
        )
        if self.dead:
            scores[self.slots[:count] == GONE] = -np.inf


def nearest_rows(blocks: Sequence[tuple[Block, int]], query: Vector, k: int) -> tuple[list[float], list[int]]:
    """The best ``k`` of the first rows of each block, as many as stand beside it: scores and slots, in no order."""
    ends = list(itertools.accumulate(count for _, count in blocks))
    scores = np.empty(ends[-1] if ends else 0, dtype=np.float32)
    for (block, count), end in zip(blocks, ends, strict=True):
        block.compare(query, scores[end - count : end])
    if len(scores) <= k:
        rows = np.arange(len(scores))
    else:  # chosen once over all blocks, of which there are thousands before a large partition has its graphs
        rows = np.argmax(scores).reshape(1) if k == 1 else np.argpartition(scores, -k)[-k:]
    slots = []
    for row in rows.tolist():
        place = bisect.bisect_right(ends, row)
        slots.append(int(blocks[place][0].slots[row - ends[place] + blocks[place][1]]))
    return scores[rows].tolist(), slots


class Graph:
    """Up to ``room`` rows under an HNSW graph with float16 vectors (Malkov and Yashunin, arXiv:1603.09320), on FAISS.

    ``index`` is never changed once it is set here: rows are added to a copy, which then takes its place, so that a
    search needs no lock and waits for nobody. Removed rows still lead the search to others, and are no results.

    Attributes:
        slots: the slot of each row, or `GONE`.
        count, dead: rows in ``index``, and how many of them were removed.
        blank: how many of the removed ones have no vector of theirs any more.
        purged: whether vectors of removed rows are to go at once, and not when it is written or built anew.
        number, kept: of its file, -1 where it has none, and how many rows that has, or had.
        claims: of a graph from a file, while the catalog is read: which rows stand for what.
    """

    def __init__(self, dim: int, room: int) -> None:
        faiss = faiss_module()
        self.room = room
        self.index: Any = faiss.IndexHNSWSQ(dim, faiss.ScalarQuantizer.QT_fp16, _LINKS, faiss.METRIC_INNER_PRODUCT)
        self.index.hnsw.efConstruction = _BUILD_BREADTH
        self.slots: Slots = np.full(room, GONE, dtype=np.int64)
        self.count = self.dead = self.blank = self.kept = 0
        self.number, self.purged = -1, False
        self.claims: Claims | None = None
        self._alive = np.zeros((room + 7) // 8, dtype=np.uint8)  # one bit a row
        self._breadth: dict[int, Any] = {}

    def grown(self, pages: Iterable[Matrix], wanted: Callable[[], bool]) -> Any:
        """A copy of ``index`` with more rows, for `publish`; None where it was not ``wanted`` any more.

        Takes a good part of a millisecond a row.
        """
        faiss = faiss_module()
        copy = faiss.clone_index(self.index)
        for page in pages:
            if not wanted():
                return None
            copy.add(page)
        return copy

    def publish(self, index: Any, slots: Slots) -> int:
        """Put a copy of `grown` into place, whose new rows have these slots; the first new row."""
        first = self.count
        rows = np.arange(first, first + len(slots))
        living = slots != GONE
        self.index = index
        self.count += len(slots)
        self.dead += len(slots)
        self.take_up(rows[living], slots[living])
        return first

    def gone(self) -> Slots:
        """The removed rows."""
        return np.flatnonzero(self.slots[: self.count] == GONE)

    def blanked(self, gone: Slots) -> Any:
        """A copy of ``index`` in which removed rows have the vector of a living one beside them, to lead on as before.

        Those with none beside them are spread over all living ones: many rows of one vector, each linked to the others
        alone, would hide what is near that vector.

        Raises:
            ValueError: there is no living row.
        """
        faiss = faiss_module()
        copy = faiss.clone_index(self.index)
        living = np.ones(copy.ntotal, dtype=np.bool_)
        living[gone] = False
        left = np.flatnonzero(living)
        if not len(left):
            raise ValueError("a graph without a living row")
        first = faiss.vector_to_array(copy.hnsw.offsets)[gone].astype(np.int64)
        near = faiss.vector_to_array(copy.hnsw.neighbors)[first[:, None] + np.arange(copy.hnsw.nb_neighbors(0))]
        beside = (near >= 0) & living[near]
        each = np.arange(len(gone))
        spread = left[each * len(left) // max(1, len(gone))]
        stand_in = np.where(beside.any(axis=1), near[each, np.argmax(beside, axis=1)], spread)
        codes = _codes(copy)
        codes[gone] = codes[stand_in]
        return copy

    def take_up(self, rows: Slots, slots: Slots) -> None:
        """Let some rows that stand for nothing stand for these slots."""
        self.slots[rows] = slots
        np.bitwise_or.at(self._alive, rows // 8, (1 << (rows % 8)).astype(np.uint8))
        self.dead -= len(rows)

    def same(self, rows: Slots, vectors: Matrix) -> npt.NDArray[np.bool_]:
        """Whether each row is a vector's to the last bit, in the graph's precision."""
        faiss = faiss_module()
        encoded = faiss.downcast_index(self.index.storage).sa_encode(vectors)
        equal: npt.NDArray[np.bool_] = (_codes(self.index)[rows] == encoded).all(axis=1)
        return equal

    def drop(self, row: int) -> None:
        self.slots[row] = GONE
        self._alive[row // 8] &= np.uint8(255 - (1 << (row % 8)))
        self.dead += 1

    def vector(self, row: int) -> Vector:
        found: Vector = self.index.reconstruct(row)
        return found

    def vectors(self, rows: Slots) -> Matrix:
        found: Matrix = self.index.reconstruct_batch(rows)
        return found

    def search(self, query: Vector, k: int) -> tuple[Vector, Slots]:
        """About the best ``k`` rows: scores and rows, in no order; a missing one is row -1."""
        scores, rows = self.index.search(query.reshape(1, -1), k, params=self._parameters(max(_SEARCH_BREADTH, 2 * k)))
        return scores[0], rows[0]

    def _parameters(self, breadth: int) -> Any:
        found = self._breadth.get(breadth)
        if found is None:
            faiss = faiss_module()
            living = faiss.IDSelectorBitmap(self._alive)
            found = self._breadth[breadth] = faiss.SearchParametersHNSW(efSearch=breadth, sel=living)
        return found


def _codes(index: Any) -> npt.NDArray[np.uint8]:
    """The vectors of a graph's index as they are stored, a row each, to be read and written in place."""
    faiss = faiss_module()
    storage = faiss.downcast_index(index.storage)
    codes: npt.NDArray[np.uint8] = faiss.rev_swig_ptr(storage.codes.data(), storage.codes.size())
    return codes.reshape(-1, storage.code_size)


def living(parts: Iterable[Block | Graph]) -> int:
    """How many rows of some parts were not removed."""
    return sum(part.count - part.dead for part in parts)
