"""The vector index of one machine, on FAISS: plain rows below a size, a graph above.

Partitions come before the search: a vector is compared only with vectors of its own partition, so a tenant or another
image can neither match nor crowd out a match.

    write    appends to a block of plain rows: microseconds, whatever the size
    search   the partition's graphs and the plain rows not in a graph yet
    upkeep   one background thread moves plain rows into a graph, builds graphs with many removed rows anew, and keeps
             graphs on disk (`semkv.indexes.upkeep`)

No search or write waits for the upkeep. Until it has caught up, as after the first start with a large catalog, plain
rows are compared one by one: slower, and exact. Later starts take the graphs up again that were kept, row by row as
the catalog is read (`semkv.indexes.kept`).
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from semkv.errors import CorruptValue
from semkv.indexes.base import Neighbour, Row
from semkv.indexes.kept import GraphStore, read_graph
from semkv.indexes.partition import Partition, Sizes
from semkv.indexes.parts import GONE, living, nearest_rows
from semkv.indexes.slots import SlotTable
from semkv.indexes.upkeep import Upkeep

if TYPE_CHECKING:
    from semkv.indexes.parts import Graph
    from semkv.types import Vector

FLAT = 1024  # plain rows from which a partition gets a graph
GRAPH = 1 << 18  # rows of one graph: what a copy or a new build touches at most


@dataclass(frozen=True, slots=True)
class IndexSizes:
    """Rows by where they are: plain, in a graph, and removed but still taking room."""

    flat: int
    graph: int
    dead: int


class FaissIndex:
    """Nearest vectors by inner product over unit vectors, per partition.

    A partition above ``flat`` rows is searched through a graph: about the nearest (see ``bench/index.py`` for the
    share that is found), with scores from float16 vectors, which differ from the exact ones by less than 0.001.

    Args:
        dim: length of every vector.
        flat: plain rows from which a partition gets a graph.
        graph: rows of one graph; a partition has as many graphs as it needs.
        store: keeps graphs on disk; without it each start builds them.

    Raises:
        ValueError: ``flat`` is below 4 or above ``graph``.
    """

    def __init__(self, dim: int, *, flat: int = FLAT, graph: int = GRAPH, store: GraphStore | None = None) -> None:
        if not 4 <= flat <= graph:
            raise ValueError(f"flat {flat} and graph {graph}: flat must be 4 or more, and graph no less than flat")
        self.dim, self._sizes, self._store = dim, Sizes(dim, flat, graph), store
        self._reading = store is not None  # until `loaded`
        self._lock = threading.Lock()
        self._partitions: dict[str, Partition] = {}
        self._table = SlotTable()
        self._upkeep = Upkeep(self._lock, self._partitions, self._table, store)

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, item: str) -> bool:
        return item in self._table

    def items(self) -> list[str]:
        """Every item there is."""
        with self._lock:
            return list(self._table)

    def sizes(self) -> IndexSizes:
        with self._lock:
            blocks = [block for partition in self._partitions.values() for block in partition.blocks]
            graphs = [graph for partition in self._partitions.values() for graph in partition.graphs]
        dead = sum(block.dead for block in blocks) + sum(graph.dead for graph in graphs)
        return IndexSizes(living(blocks), living(graphs), dead)

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
                fresh = {item: vector for item, vector in members.items() if item not in self}
                if fresh:
                    home = self._partitions.get(name) or self._new_partition(name, namespace)
                    slots, vectors = self._table.add(fresh, name), np.stack(list(fresh.values()))
                    plain = ~home.take_up(vectors, slots)
                    home.append(vectors[plain], slots[plain])
                    self._upkeep.look_after(home)

    def _new_partition(self, name: str, namespace: str) -> Partition:
        home = self._partitions[name] = Partition(name, namespace, self._sizes, self._table)
        if self._reading and self._store is not None:
            for number, body in self._store.read(name):
                try:
                    graph = read_graph(body, self.dim, self._sizes.graph)
                except CorruptValue as error:
                    self._store.reject(namespace, name, number, error)
                    continue
                graph.number = number
                home.graphs.append(graph)
        return home

    def loaded(self) -> None:
        """Say that the catalog has been read: what of the kept graphs was not taken up is gone."""
        if not self._reading:
            return
        with self._lock:
            self._reading = False
            for partition in list(self._partitions.values()):
                for graph in partition.graphs:
                    graph.claims = None
                self._tidy(partition)
            if self._store is not None:
                self._store.drop_unread()

    def remove(self, items: Iterable[str]) -> None:
        """Forget items; unknown ones are ignored."""
        with self._lock:
            for name in {name for item in items if (name := self._table.remove(item)) is not None}:
                self._tidy(self._partitions[name])

    def heed(self, purge: str) -> None:
        """Say that all items that a purge took away were removed: their vectors go from memory and the kept graphs.

        Args:
            purge: what the catalog said of it (`Catalog.purge`) before it was asked what is gone.
        """
        with self._lock:
            for partition in self._partitions.values():
                for graph in partition.graphs:
                    if graph.dead > graph.blank:
                        graph.purged = True
                        self._drop_file(partition, graph)
                    if graph.number < 0:
                        graph.kept = 0  # written anew, without them; tried once a purge
                self._upkeep.look_after(partition)
            if self._store is not None:
                self._store.heed(purge)

    def _drop_file(self, partition: Partition, graph: Graph) -> None:
        if self._store is not None and graph.number >= 0:
            self._store.drop(partition.namespace, partition.name, graph.number)
            graph.number = -1

    def _tidy(self, partition: Partition) -> None:
        """Give back the room of removed rows where that is quick; the rest is left to the upkeep."""
        for graph in partition.pack():
            self._drop_file(partition, graph)
        if partition.empty:
            del self._partitions[partition.name]
        else:
            self._upkeep.look_after(partition)

    # -- looking up ---------------------------------------------------------------------------------------------

    def search(self, partition: str, vector: Vector, k: int = 1) -> list[Neighbour]:
        """The ``k`` nearest items of one partition, best first; fewer where it holds fewer, or some went meanwhile."""
        with self._lock:
            found = self._partitions.get(partition)
            if found is None:
                return []
            epoch = self._table.epoch
            graphs = tuple(found.graphs)
            blocks = tuple((block, block.count) for block in found.blocks)
        query = np.ascontiguousarray(vector, dtype=np.float32)
        scores, slots = nearest_rows(blocks, query, k)
        for graph in graphs:
            best, rows = graph.search(query, k)
            scores += best.tolist()
            slots += np.where(rows < 0, GONE, graph.slots[rows]).tolist()
        return self._table.named(scores, slots, k, epoch)

    def score(self, item: str, vector: Vector) -> float | None:
        """The cosine of one stored item with ``vector``, or None where the item is unknown."""
        with self._lock:
            place = self._table.place(item)
            if place is None:
                return None
            part, row = place
            return max(-1.0, min(1.0, float(np.dot(part.vector(row), vector))))

    # -- upkeep -------------------------------------------------------------------------------------------------

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until the upkeep has nothing to do; False where it still had after ``timeout_s`` seconds."""
        return self._upkeep.settle(timeout_s)

    def close(self) -> None:
        """Stop the upkeep, within a second or so, and keep the graphs; what is there stays searchable."""
        self._upkeep.close()
