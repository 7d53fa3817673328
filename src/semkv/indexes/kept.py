"""Graphs that outlive the process: how one is written, and how its rows are taken up again.

A kept row has no item, only a hash of its name. It is taken up for an item whose name has that hash *and* whose vector,
in the graph's precision, is the row's to the last bit. So no item ever stands on a row that was computed from another
vector, whatever happened to the catalog meanwhile; a row that nobody takes up is one that was removed.

    rows (8 bytes), names uint64 [rows] (0 for a removed one), FAISS's own format
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

from semkv.errors import CorruptValue
from semkv.indexes.parts import GONE, Graph, faiss_module

if TYPE_CHECKING:
    import numpy.typing as npt

    from semkv.indexes.parts import Matrix, Slots

    Names = npt.NDArray[np.uint64]

_ROWS = struct.Struct("<Q")


class GraphStore(Protocol):
    """Where graphs are kept: bytes that come back as they were, or not at all. Nothing here raises."""

    def read(self, partition: str) -> Iterator[tuple[int, memoryview]]:
        """The number and checked bytes of each graph that a partition had at the start."""
        ...

    def save(
        self, namespace: str, partition: str, number: int, pour: Callable[[Callable[[bytes], int]], None]
    ) -> bool: ...
    def drop(self, namespace: str, partition: str, number: int) -> None: ...
    def reject(self, namespace: str, partition: str, number: int, error: Exception) -> None: ...
    def drop_unread(self) -> None: ...
    def heed(self, purge: str) -> None: ...


def hashes(items: Iterable[str]) -> Names:
    """xxh3_64 of each item's name."""
    return np.array([xxhash.xxh3_64_intdigest(item.encode()) for item in items], dtype=np.uint64)


def pour_graph(index: Any, names: Names, write: Callable[[bytes], int]) -> None:
    """Hand a graph's bytes to ``write``.

    Args:
        index: of a `Graph`.
        names: of its rows.
        write: returns how many bytes it took.
    """
    faiss = faiss_module()
    write(_ROWS.pack(len(names)) + names.astype("<u8", copy=False).tobytes())
    faiss.write_index(index, faiss.PyCallbackIOWriter(write))


def read_graph(body: memoryview, dim: int, room: int) -> Graph:
    """The graph behind `pour_graph`, none of whose rows is taken up yet.

    Args:
        body: its bytes, whole. Whoever may write the folder may have made them, as a checksum is no signature: FAISS
            refuses a graph whose links or entry lead out of it (1.15.1 does; the floor in pyproject.toml).
        dim, room: of the index that asks.

    Raises:
        CorruptValue: it is of another kind, dimension or size.
    """
    faiss = faiss_module()
    if len(body) < _ROWS.size or len(body) < (start := _ROWS.size + 8 * _ROWS.unpack_from(body)[0]):
        raise CorruptValue("a graph without the names of its rows")
    names = np.frombuffer(body[_ROWS.size : start], dtype="<u8").astype(np.uint64)
    place = start

    def read(most: int) -> bytes:
        nonlocal place
        data = bytes(body[place : place + most])
        place += len(data)
        return data

    try:
        index = faiss.read_index(faiss.PyCallbackIOReader(read))
    except RuntimeError as error:
        raise CorruptValue(f"a graph that FAISS cannot read: {error}") from error
    graph = Graph(dim, room)
    form = (type(index), index.d, index.metric_type, index.ntotal)
    if form != (type(graph.index), dim, graph.index.metric_type, len(names)) or not 0 < len(names) <= room:
        raise CorruptValue("a graph of another kind, dimension or size")
    graph.index, graph.count, graph.dead, graph.kept = index, len(names), len(names), len(names)
    graph.claims = Claims(names)
    return graph


class Claims:
    """Which rows of a kept graph stand for which items, while the catalog is read."""

    def __init__(self, names: Names) -> None:
        self._order = np.argsort(names)
        self._sorted = names[self._order]

    def take(self, graph: Graph, names: Names, vectors: Matrix, slots: Slots) -> Slots:
        """Take up rows for some items; the row of each, -1 for none.

        Args:
            graph: whose claims these are.
            names: hashes of the items' names.
            vectors: theirs.
            slots: theirs.
        """
        at = np.minimum(np.searchsorted(self._sorted, names), len(self._sorted) - 1)
        rows = self._order[at]
        found = np.flatnonzero((self._sorted[at] == names) & (names != 0) & (graph.slots[rows] == GONE))
        found = found[graph.same(rows[found], vectors[found])]
        found = found[np.unique(rows[found], return_index=True)[1]]  # two names of one hash: the row is the first's
        graph.take_up(rows[found], slots[found])
        taken = np.full(len(slots), -1, dtype=np.int64)
        taken[found] = rows[found]
        return taken
