"""The upkeep of an index: one background thread that moves rows into graphs, builds graphs anew, and writes them down.

It works on copies and swaps them in under the index's lock, so that no search or write waits for it.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from semkv.indexes.kept import GraphStore, pour_graph
from semkv.indexes.parts import GONE, LARGEST_BLOCK, Graph, use_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from semkv.indexes.partition import Partition
    from semkv.indexes.slots import SlotTable

logger = logging.getLogger("semkv")


class Upkeep:
    """Partitions that need something done, and the thread that does it while there are any.

    Args:
        lock: of the index; held by whoever calls `look_after`, and by nobody who calls anything else.
        partitions: of the index, by name.
        table: of the index.
        store: keeps graphs on disk, or None.
    """

    def __init__(
        self, lock: threading.Lock, partitions: Mapping[str, Partition], table: SlotTable, store: GraphStore | None
    ) -> None:
        self._lock, self._partitions, self._table, self._store = lock, partitions, table, store
        self._work: dict[str, None] = {}  # names of partitions, in the order of their turn
        self._thread: threading.Thread | None = None
        self._idle = threading.Condition(lock)
        self._closed = False

    def look_after(self, partition: Partition) -> None:
        """Give a partition its turn where it needs one."""
        if partition.name in self._work or self._closed or not self._needs(partition):
            return
        self._work[partition.name] = None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="semkv-index")
            self._thread.start()

    def settle(self, timeout_s: float | None = None) -> bool:
        """See `FaissIndex.settle`."""
        with self._lock:
            return self._idle.wait_for(lambda: self._thread is None, timeout_s)

    def close(self) -> None:
        """Stop, within a second or so, and keep the graphs."""
        with self._lock:
            self._closed = True
        self.settle()
        with self._lock:
            graphs = [(p, g) for p in self._partitions.values() for g in p.settled()]
            unkept = [(p, g) for p, g in graphs if g.count > g.kept or g.number < 0]
        for partition, graph in unkept:
            self.keep(partition, graph)

    def _needs(self, partition: Partition) -> bool:
        if partition.plain >= partition.sizes.flat or partition.stale_graph() or partition.purged_graph():
            return True
        return self._store is not None and partition.unkept_graph() is not None

    def _wanted(self) -> bool:
        """Whether to go on: until `close`, or the end of the program."""
        return not self._closed and threading.main_thread().is_alive()

    def _run(self) -> None:
        use_threads(max(1, (os.cpu_count() or 1) // 2))
        try:
            while (partition := self._next()) is not None:
                self._improve(partition)
        except Exception as error:  # short of memory, most likely: that costs speed, and no answer
            logger.warning("vector index: %r: left as it is until the next write", error)
            with self._lock:
                self._rest()

    def _next(self) -> Partition | None:
        """The partition whose turn it is; None ends the thread, which the next write starts again."""
        with self._lock:
            while self._work and self._wanted():
                name = next(iter(self._work))
                partition = self._partitions.get(name)
                if partition is not None and self._needs(partition):
                    return partition
                del self._work[name]
            self._rest()
            return None

    def _rest(self) -> None:
        self._work.clear()
        self._thread = None
        self._idle.notify_all()

    def _improve(self, partition: Partition) -> None:
        """One step: forget what was purged, write a graph, build a stale one anew, or move plain rows into one."""
        with self._lock:
            purged = partition.purged_graph()
            unkept = partition.unkept_graph() if self._store is not None else None
            stale = partition.stale_graph()
        if purged is not None:
            self._blank(purged)
        elif unkept is not None:
            self.keep(partition, unkept)
        elif stale is not None:
            self._rebuild(partition, stale)
        else:
            self._move_up(partition)

    def keep(self, partition: Partition, graph: Graph) -> None:
        """Write a graph as it is now, without the vectors of removed rows. One thread at a time."""
        if self._store is None:
            return
        with self._lock:
            if graph.number < 0:
                graph.number = partition.free_number()
            number, graph.kept = graph.number, graph.count
        pour = functools.partial(self._pour, graph)
        saved = self._store.save(partition.namespace, partition.name, number, pour)
        with self._lock:
            if not saved or graph.number < 0 or graph not in partition.graphs:  # purged, or all removed, meanwhile
                graph.number = -1
                self._store.drop(partition.namespace, partition.name, number)

    def _pour(self, graph: Graph, write: Callable[[bytes], int]) -> None:
        self._blank(graph)
        with self._lock:
            index, names = graph.index, self._table.names(graph.slots[: graph.count])
        pour_graph(index, names, write)

    def _blank(self, graph: Graph) -> None:
        """Take away the vectors of removed rows."""
        with self._lock:
            graph.purged = False
            gone = graph.gone()
        if graph.blank < len(gone) < graph.count:
            index = graph.blanked(gone)
            with self._lock:
                graph.index, graph.blank = index, len(gone)

    def _rebuild(self, partition: Partition, stale: Graph) -> None:
        rows = np.flatnonzero(stale.slots[: stale.count] != GONE)
        target = Graph(partition.sizes.dim, partition.sizes.graph)
        pages = (stale.vectors(rows[start : start + LARGEST_BLOCK]) for start in range(0, len(rows), LARGEST_BLOCK))
        index = target.grown(pages, self._wanted)
        with self._lock:
            if index is not None and stale in partition.graphs:
                target.number = stale.number
                partition.graphs[partition.graphs.index(stale)] = target
                partition.publish(target, index, stale.slots[rows])

    def _move_up(self, partition: Partition) -> None:
        with self._lock:
            target, blocks = partition.next_move()
            rows = [block.living() for block in blocks]
        if not blocks:
            return  # all were removed before this had its turn
        index = target.grown((b.vectors[there] for b, there in zip(blocks, rows, strict=True)), self._wanted)
        with self._lock:
            moved = set(blocks)
            if index is None or not moved.issubset(partition.blocks):
                return  # packed meanwhile, as many rows were removed; the next step takes the new blocks
            if target not in partition.graphs:
                partition.graphs.append(target)
            slots = [block.slots[there] for block, there in zip(blocks, rows, strict=True)]
            partition.publish(target, index, np.concatenate(slots))
            partition.blocks = [block for block in partition.blocks if block not in moved]
