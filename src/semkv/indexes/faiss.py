"""The vector index of one machine, on FAISS: plain rows below a size, a graph above.

Partitions come before the search: a vector is compared only with vectors of its own partition, so a tenant or another
image can neither match nor crowd out a match.

    write    appends to a block of plain rows: microseconds, whatever the size
    search   the partition's graphs and the plain rows not in a graph yet
    upkeep   one background thread moves plain rows into a graph, builds graphs with many removed rows anew, and keeps
             graphs on disk

Upkeep works on copies and swaps them in, so that no search or write waits for it. Until it has caught up, as after the
first start with a large catalog, plain rows are compared one by one: slower, and exact. Later starts take the graphs up
again that were kept, row by row as the catalog is read (`semkv.indexes.kept`).
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from semkv.errors import CorruptValue
from semkv.indexes.base import Neighbour, Row
from semkv.indexes.kept import GraphStore, hashes, pour_graph, read_graph
from semkv.indexes.parts import (
    GONE,
    LARGEST_BLOCK,
    Block,
    Graph,
    Partition,
    first_blocks,
    living,
    nearest_rows,
    use_threads,
    widened,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from semkv.indexes.kept import Names
    from semkv.indexes.parts import Matrix, Slots
    from semkv.types import Vector

logger = logging.getLogger("semkv")

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
        self.dim, self._flat, self._graph, self._store = dim, flat, graph, store
        self._reading = store is not None  # until `loaded`
        self._block = min(LARGEST_BLOCK, flat // 2)
        self._partitions: dict[str, Partition] = {}
        self._slot_of: dict[str, int] = {}
        self._items: list[str | None] = []  # by slot, as are the next five
        self._home: list[Partition | None] = []
        self._part = np.empty(0, dtype=object)  # Block | Graph | None
        self._row: Slots = np.empty(0, dtype=np.int64)
        self._named_in: Slots = np.empty(0, dtype=np.int64)  # the epoch in which the slot got its item
        self._names: Names = np.empty(0, dtype=np.uint64)  # hashes
        self._free: list[int] = []
        self._epoch = 0  # one more with every write that adds
        self._lock = threading.Lock()
        self._work: dict[str, None] = {}  # names of partitions, in the order of their turn
        self._upkeep: threading.Thread | None = None
        self._idle = threading.Condition(self._lock)
        self._closed = False

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, item: str) -> bool:
        return item in self._slot_of

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
                fresh = {item: vector for item, vector in members.items() if item not in self._slot_of}
                if fresh:
                    home = self._partitions.get(name) or self._new_partition(name, namespace)
                    slots, vectors = self._new_slots(home, fresh), np.stack(list(fresh.values()))
                    plain = ~self._taken_up(home, vectors, slots)
                    self._append(home, vectors[plain], slots[plain])
                    self._look_after(home)

    def _new_partition(self, name: str, namespace: str) -> Partition:
        home = self._partitions[name] = Partition(name, namespace)
        if self._reading and self._store is not None:
            for number, body in self._store.read(name):
                try:
                    graph = read_graph(body, self.dim, self._graph)
                except CorruptValue as error:
                    self._store.reject(namespace, name, number, error)
                    continue
                graph.number = number
                home.graphs.append(graph)
        return home

    def _taken_up(self, home: Partition, vectors: Matrix, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of some new items are in a graph that was kept."""
        taken = np.zeros(len(slots), dtype=np.bool_)
        for graph in home.graphs:
            if graph.claims is not None:
                left = np.flatnonzero(~taken)
                rows = graph.claims.take(graph, self._names[slots[left]], vectors[left], slots[left])
                found = left[rows >= 0]
                self._row[slots[found]] = rows[rows >= 0]
                self._part[slots[found]] = graph
                taken[found] = True
        return taken

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

    def _new_slots(self, home: Partition, items: dict[str, Vector]) -> Slots:
        self._epoch += 1
        free = [self._free.pop() for _ in range(min(len(self._free), len(items)))]
        first, more = len(self._items), len(items) - len(free)
        slots = np.array([*free, *range(first, first + more)], dtype=np.int64)
        self._items += [None] * more
        self._home += [None] * more
        if len(self._items) > len(self._row):
            room = max(64, len(self._items) * 5 // 4)
            self._row, self._named_in = widened(self._row, room), widened(self._named_in, room)
            self._part, self._names = widened(self._part, room), widened(self._names, room)
        self._names[slots] = hashes(items)
        self._named_in[slots] = self._epoch  # before the items, see _named
        for item, slot in zip(items, slots.tolist(), strict=True):
            self._items[slot], self._home[slot], self._slot_of[item] = item, home, slot
        return slots

    def _append(self, partition: Partition, vectors: Matrix, slots: Slots) -> None:
        while len(slots):
            if not partition.blocks or partition.blocks[-1].full:
                self._add_block(partition, len(slots))
            block = partition.blocks[-1]
            first = block.count
            fit = block.append(vectors, slots)
            self._settle_rows(block, first, slots[:fit])
            vectors, slots = vectors[fit:], slots[fit:]

    def _add_block(self, partition: Partition, needed: int) -> None:
        """An empty block, or while blocks are small a larger one with the rows of the last."""
        last = partition.blocks[-1] if partition.blocks else None
        if last is None or len(last.slots) >= self._block:
            partition.blocks.append(Block(self.dim, min(self._block, needed)))
            return
        carried = last.count - last.dead
        block = Block(self.dim, min(self._block, max(2 * carried, carried + needed)))
        self._move([last], block)
        partition.blocks[-1] = block

    def _move(self, sources: Iterable[Block], target: Block) -> None:
        for source in sources:
            rows = np.flatnonzero(source.slots[: source.count] != GONE)
            first = target.count
            target.append(source.vectors[rows], source.slots[rows])
            self._settle_rows(target, first, source.slots[rows])

    def _settle_rows(self, part: Block | Graph, first: int, slots: Slots) -> None:
        """Note where the items of some slots are now: in ``part``, from row ``first`` on."""
        rows = np.arange(first, first + len(slots))
        there = slots != GONE
        self._row[slots[there]] = rows[there]
        self._part[slots[there]] = part

    def remove(self, items: Iterable[str]) -> None:
        """Forget items; unknown ones are ignored."""
        with self._lock:
            touched = set()
            for item in items:
                slot = self._slot_of.pop(item, None)
                if slot is None:
                    continue
                part, home = self._part[slot], self._home[slot]
                assert part is not None
                assert home is not None
                part.drop(int(self._row[slot]))
                self._items[slot] = self._home[slot] = self._part[slot] = None
                self._free.append(slot)
                touched.add(home)
            for home in touched:
                self._tidy(home)

    def _tidy(self, partition: Partition) -> None:
        """Give back the room of removed rows where that is quick; the rest is left to the upkeep."""
        partition.blocks = [block for block in partition.blocks if block.dead < block.count]
        for graph in [g for g in partition.graphs if g.dead == g.count and g.claims is None]:
            partition.graphs.remove(graph)
            self._drop_file(partition, graph)
        if not partition.blocks and not partition.graphs:
            del self._partitions[partition.name]
            return
        packed: list[Block] = []
        for block in partition.blocks:
            joined = [block]
            if block.dead > block.count // 2:
                if packed and living([packed[-1], block]) <= self._block:
                    joined.insert(0, packed.pop())
                block = Block(self.dim, living(joined))
                self._move(joined, block)
            packed.append(block)
        partition.blocks = packed
        self._look_after(partition)

    # -- looking up ---------------------------------------------------------------------------------------------

    def search(self, partition: str, vector: Vector, k: int = 1) -> list[Neighbour]:
        """The ``k`` nearest items of one partition, best first; fewer where it holds fewer, or some went meanwhile."""
        with self._lock:
            found = self._partitions.get(partition)
            if found is None:
                return []
            epoch = self._epoch
            graphs = tuple(found.graphs)
            blocks = tuple((block, block.count) for block in found.blocks)
        query = np.ascontiguousarray(vector, dtype=np.float32)
        scores, slots = nearest_rows(blocks, query, k)
        for graph in graphs:
            best, rows = graph.search(query, k)
            scores += best.tolist()
            slots += np.where(rows < 0, GONE, graph.slots[rows]).tolist()
        return self._named(scores, slots, k, epoch)

    def _named(self, scores: list[float], slots: list[int], k: int, epoch: int) -> list[Neighbour]:
        """The best ``k`` with their items; one that moved during the search may come twice, a removed one has none.

        A slot that got another item since the search began is passed over: the score was its former item's. The epoch
        is written before the item and read after it, so that no lock is needed.
        """
        named: dict[str, Neighbour] = {}
        for score, slot in sorted(zip(scores, slots, strict=True), reverse=True):
            item = self._items[slot] if slot != GONE else None
            if item is not None and item not in named and self._named_in[slot] <= epoch:
                named[item] = Neighbour(item, max(-1.0, min(1.0, score)))
                if len(named) == k:
                    break
        return list(named.values())

    def score(self, item: str, vector: Vector) -> float | None:
        """The cosine of one stored item with ``vector``, or None where the item is unknown."""
        with self._lock:
            slot = self._slot_of.get(item)
            if slot is None:
                return None
            part = self._part[slot]
            assert part is not None
            stored = part.vector(int(self._row[slot]))
            return max(-1.0, min(1.0, float(np.dot(stored, vector))))

    # -- upkeep -------------------------------------------------------------------------------------------------

    def _needs(self, partition: Partition) -> bool:
        if partition.plain >= self._flat or partition.stale_graph(self._flat // 4) is not None:
            return True
        return self._store is not None and partition.unkept_graph() is not None

    def _look_after(self, partition: Partition) -> None:
        if partition.name in self._work or self._closed or not self._needs(partition):
            return
        self._work[partition.name] = None
        if self._upkeep is None:
            self._upkeep = threading.Thread(target=self._keep_up, name="semkv-index")
            self._upkeep.start()

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait until the upkeep has nothing to do; False where it still had after ``timeout_s`` seconds."""
        with self._lock:
            return self._idle.wait_for(lambda: self._upkeep is None, timeout_s)

    def close(self) -> None:
        """Stop the upkeep, within a second or so, and keep the graphs; what is there stays searchable."""
        with self._lock:
            self._closed = True
        self.settle()
        with self._lock:
            unkept = [(p, g) for p in self._partitions.values() for g in p.graphs if g.count > g.kept]
        for partition, graph in unkept:
            self._keep(partition, graph)

    def _wanted(self) -> bool:
        """Whether upkeep should go on: until `close`, or the end of the program."""
        return not self._closed and threading.main_thread().is_alive()

    def _keep_up(self) -> None:
        use_threads(max(1, (os.cpu_count() or 1) // 2))
        try:
            while (partition := self._next()) is not None:
                self._improve(partition)
        except Exception as error:  # short of memory, most likely: that costs speed, and no answer
            logger.warning("vector index: %r: left as it is until the next write", error)
            with self._lock:
                self._rest()

    def _next(self) -> Partition | None:
        """The partition whose turn it is; None ends the upkeep, which the next write starts again."""
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
        self._upkeep = None
        self._idle.notify_all()

    def _improve(self, partition: Partition) -> None:
        """One step: write a graph, build a stale one anew, or move plain rows into one."""
        with self._lock:
            unkept = partition.unkept_graph() if self._store is not None else None
            stale = partition.stale_graph(self._flat // 4)
        if unkept is not None:
            self._keep(partition, unkept)
        elif stale is not None:
            self._rebuild(partition, stale)
        else:
            self._move_up(partition)

    def _keep(self, partition: Partition, graph: Graph) -> None:
        """Write a graph as it is now. Called by the upkeep, and once more when that has ended."""
        if self._store is None:
            return
        with self._lock:
            index, slots = graph.index, graph.slots[: graph.count].copy()
            names = np.where(slots == GONE, np.uint64(0), self._names[slots])
            if graph.number < 0:
                graph.number = partition.free_number()
            number = graph.number
        pour = functools.partial(pour_graph, index, names)
        self._store.save(partition.namespace, partition.name, number, pour)
        with self._lock:
            graph.kept = len(slots)
            if graph not in partition.graphs:  # all its rows were removed meanwhile
                self._store.drop(partition.namespace, partition.name, number)

    def _drop_file(self, partition: Partition, graph: Graph) -> None:
        if self._store is not None and graph.number >= 0:
            self._store.drop(partition.namespace, partition.name, graph.number)

    def _rebuild(self, partition: Partition, stale: Graph) -> None:
        rows = np.flatnonzero(stale.slots[: stale.count] != GONE)
        target = Graph(self.dim, self._graph)
        pages = (stale.vectors(rows[start : start + LARGEST_BLOCK]) for start in range(0, len(rows), LARGEST_BLOCK))
        index = target.grown(pages, self._wanted)
        with self._lock:
            if index is not None and stale in partition.graphs:
                target.number = stale.number
                partition.graphs[partition.graphs.index(stale)] = target
                self._publish(target, index, stale.slots[rows])

    def _move_up(self, partition: Partition) -> None:
        with self._lock:
            room = (g for g in partition.graphs if g.room - g.count >= self._block)
            target = next(room, None) or Graph(self.dim, self._graph)
            # Twice the size at a time: a row is copied a few times in all, and a search soon has less to compare.
            blocks = first_blocks(partition.blocks, min(target.room - target.count, max(self._flat, target.count)))
        index = target.grown((block.vectors for block in blocks), self._wanted)
        with self._lock:
            moved = set(blocks)
            if index is None or not moved.issubset(partition.blocks):
                return  # packed meanwhile, as many rows were removed; the next step takes the new blocks
            if target not in partition.graphs:
                partition.graphs.append(target)
            self._publish(target, index, np.concatenate([block.slots for block in blocks]))
            partition.blocks = [block for block in partition.blocks if block not in moved]

    def _publish(self, graph: Graph, index: Any, slots: Slots) -> None:
        self._settle_rows(graph, graph.publish(index, slots), slots)
