"""One partition of an index: new rows go into blocks, and from there into graphs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from semkv.indexes.parts import GONE, LARGEST_BLOCK, Block, Graph, living

if TYPE_CHECKING:
    import numpy.typing as npt

    from semkv.indexes.parts import Matrix, Slots
    from semkv.indexes.slots import SlotTable

_STALE = 0.2  # share of removed rows at which a graph is built anew
_UNKEPT = 0.25  # share of rows that its file lacks at which a graph is written


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an index is made with.

    Attributes:
        dim: length of every vector.
        flat: plain rows from which a partition gets a graph.
        graph: rows of one graph.
    """

    dim: int
    flat: int
    graph: int

    @property
    def block(self) -> int:
        """Rows of the largest blocks."""
        return min(LARGEST_BLOCK, self.flat // 2)

    @property
    def stale(self) -> int:
        """Removed rows below which no graph is built anew."""
        return self.flat // 4


@dataclass(slots=True, eq=False)
class Partition:
    """The blocks and graphs of one partition. Its owner locks.

    Attributes:
        name: the partition's.
        namespace: the catalog's name of whose entries they are.
        sizes: of the index.
        table: of the index; told where its rows are.
    """

    name: str
    namespace: str
    sizes: Sizes
    table: SlotTable
    blocks: list[Block] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)

    def take_up(self, vectors: Matrix, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which of some new items are in a graph that was kept; they have their rows now."""
        taken = np.zeros(len(slots), dtype=np.bool_)
        for graph in self.graphs:
            if graph.claims is not None:
                left = np.flatnonzero(~taken)
                rows = graph.claims.take(graph, self.table.names(slots[left]), vectors[left], slots[left])
                found = rows >= 0
                self.table.settle(graph, rows[found], slots[left[found]])
                taken[left[found]] = True
        return taken

    def append(self, vectors: Matrix, slots: Slots) -> None:
        """Add plain rows."""
        while len(slots):
            if not self.blocks or self.blocks[-1].full:
                self._add_block(len(slots))
            fit = self._fill(self.blocks[-1], vectors, slots)
            vectors, slots = vectors[fit:], slots[fit:]

    def _add_block(self, needed: int) -> None:
        """An empty block, or while blocks are small a larger one with the rows of the last."""
        last = self.blocks[-1] if self.blocks else None
        if last is None or len(last.slots) >= self.sizes.block:
            self.blocks.append(Block(self.sizes.dim, min(self.sizes.block, needed)))
            return
        carried = last.count - last.dead
        self.blocks[-1] = self._joined([last], min(self.sizes.block, max(2 * carried, carried + needed)))

    def _joined(self, sources: Sequence[Block], room: int) -> Block:
        """A block with what is left in others."""
        target = Block(self.sizes.dim, room)
        for source in sources:
            rows = source.living()
            self._fill(target, source.vectors[rows], source.slots[rows])
        return target

    def _fill(self, block: Block, vectors: Matrix, slots: Slots) -> int:
        """Write as many rows as fit; how many those were."""
        first = block.count
        fit = block.append(vectors, slots)
        self.table.settle(block, np.arange(first, first + fit), slots[:fit])
        return fit

    def publish(self, graph: Graph, index: object, slots: Slots) -> None:
        """Put a copy of `Graph.grown` into place, whose new rows have these slots; some may have been removed since."""
        first = graph.publish(index, slots)
        graph.purged |= bool((slots == GONE).any())
        self.table.settle(graph, np.arange(first, first + len(slots)), slots)

    def pack(self) -> list[Graph]:
        """Give back the room of removed rows where that is quick; the graphs that went, as nothing was left in them."""
        empty = [graph for graph in self.graphs if graph.dead == graph.count and graph.claims is None]
        self.graphs = [graph for graph in self.graphs if graph not in empty]
        packed: list[Block] = []
        for block in self.blocks:
            if block.dead == block.count:
                continue
            if block.dead > block.count // 2:
                joined = [block]
                if packed and living([packed[-1], block]) <= self.sizes.block:
                    joined.insert(0, packed.pop())
                block = self._joined(joined, living(joined))
            packed.append(block)
        self.blocks = packed
        return empty

    @property
    def empty(self) -> bool:
        return not self.blocks and not self.graphs

    @property
    def plain(self) -> int:
        return sum(block.count for block in self.blocks)

    def settled(self) -> list[Graph]:
        """The graphs whose rows are known. A row of another may yet be taken up: it is no removed one, and its name and
        vector stay."""
        return [graph for graph in self.graphs if graph.claims is None]

    def purged_graph(self) -> Graph | None:
        """A graph that may still show what was purged."""
        return next((graph for graph in self.settled() if graph.purged), None)

    def stale_graph(self) -> Graph | None:
        """A graph with so many removed rows that it is worth a new build."""
        return next((g for g in self.settled() if g.dead >= max(self.sizes.stale, _STALE * g.count)), None)

    def unkept_graph(self) -> Graph | None:
        """A graph with so many rows beyond its file's that it is worth writing."""
        return next((graph for graph in self.settled() if graph.count - graph.kept >= _UNKEPT * graph.count), None)

    def free_number(self) -> int:
        """The least number that no graph's file has."""
        taken = {graph.number for graph in self.graphs}
        return next(number for number in itertools.count() if number not in taken)

    def next_move(self) -> tuple[Graph, list[Block]]:
        """A graph with room, or a new one, and the blocks that should move into it."""
        roomy = (g for g in self.graphs if g.room - g.count >= self.sizes.block)
        graph = next(roomy, None) or Graph(self.sizes.dim, self.sizes.graph)
        # Twice the size at a time: a row is copied a few times in all, and a search soon has less to compare.
        return graph, _first(self.blocks, min(graph.room - graph.count, max(self.sizes.flat, graph.count)))


def _first(blocks: Sequence[Block], most: int) -> list[Block]:
    """The oldest blocks, which are full, up to ``most`` rows; at least one where there are any."""
    rows = itertools.accumulate(block.count for block in blocks)
    more = itertools.takewhile(lambda pair: pair[0].full and pair[1] <= most, zip(blocks, rows, strict=True))
    return [block for block, _ in more] or list(blocks[:1])
