"""Where each item of an index is: a table by slot, a number that an item has until it is removed.

Parts of an index name their rows by slot, so that a search hands out numbers, and a row moves without its item.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from semkv.indexes.base import Neighbour
from semkv.indexes.kept import hashes
from semkv.indexes.parts import GONE, Block, Graph

if TYPE_CHECKING:
    from semkv.indexes.kept import Names
    from semkv.indexes.parts import Slots


class SlotTable:
    """Items, and the part and row in which each is. Its owner locks, but for `named`.

    Attributes:
        epoch: one more with every write that adds.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._slot_of: dict[str, int] = {}
        self._items: list[str | None] = []  # by slot, as are the next five
        self._home: list[str | None] = []  # the partition's name
        self._part = np.empty(0, dtype=object)  # Block | Graph | None
        self._row: Slots = np.empty(0, dtype=np.int64)
        self._named_in: Slots = np.empty(0, dtype=np.int64)  # the epoch in which the slot got its item
        self._names: Names = np.empty(0, dtype=np.uint64)  # hashes
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._slot_of)

    def __iter__(self) -> Iterator[str]:
        return iter(self._slot_of)

    def __contains__(self, item: str) -> bool:
        return item in self._slot_of

    def add(self, items: Collection[str], home: str) -> Slots:
        """Slots for new items of the partition of that name; `settle` must follow."""
        self.epoch += 1
        free = [self._free.pop() for _ in range(min(len(self._free), len(items)))]
        first, more = len(self._items), len(items) - len(free)
        slots = np.array([*free, *range(first, first + more)], dtype=np.int64)
        self._items += [None] * more
        self._home += [None] * more
        if len(self._items) > len(self._row):
            room = max(64, len(self._items) * 5 // 4)
            self._row, self._named_in = _widened(self._row, room), _widened(self._named_in, room)
            self._part, self._names = _widened(self._part, room), _widened(self._names, room)
        self._names[slots] = hashes(items)
        self._named_in[slots] = self.epoch  # before the items, see `named`
        for item, slot in zip(items, slots.tolist(), strict=True):
            self._items[slot], self._home[slot], self._slot_of[item] = item, home, slot
        return slots

    def settle(self, part: Block | Graph, rows: Slots, slots: Slots) -> None:
        """Note that the items of some slots are in these rows of ``part`` now; what is `GONE` is passed over."""
        there = slots != GONE
        self._row[slots[there]] = rows[there]
        self._part[slots[there]] = part

    def remove(self, item: str) -> str | None:
        """Give up an item's slot and row; the name of the partition it was in, None for an unknown item."""
        slot = self._slot_of.pop(item, None)
        if slot is None:
            return None
        part, home = self._part[slot], self._home[slot]
        assert part is not None
        assert home is not None
        part.drop(int(self._row[slot]))
        self._items[slot] = self._home[slot] = self._part[slot] = None
        self._free.append(slot)
        return home

    def place(self, item: str) -> tuple[Block | Graph, int] | None:
        """The part and the row in which an item is."""
        slot = self._slot_of.get(item)
        if slot is None:
            return None
        part = self._part[slot]
        assert part is not None
        return part, int(self._row[slot])

    def names(self, slots: Slots) -> Names:
        """Hashes of the names of some slots' items; 0 for `GONE`."""
        return np.where(slots == GONE, np.uint64(0), self._names[slots])

    def named(self, scores: list[float], slots: list[int], k: int, epoch: int) -> list[Neighbour]:
        """The best ``k`` with their items; one that moved during the search may come twice, a removed one has none.

        A slot that got another item since the search began, in ``epoch``, is passed over: the score was its former
        item's. The epoch is written before the item and read after it, so that no lock is needed.
        """
        found: dict[str, Neighbour] = {}
        for score, slot in sorted(zip(scores, slots, strict=True), reverse=True):
            item = self._items[slot] if slot != GONE else None
            if item is not None and item not in found and self._named_in[slot] <= epoch:
                found[item] = Neighbour(item, max(-1.0, min(1.0, score)))
                if len(found) == k:
                    break
        return list(found.values())


def _widened(column: Any, room: int) -> Any:
    """The same array with more room. Not `numpy.resize`, which fills it with what is there: more owners of parts."""
    wider = np.empty(room, dtype=column.dtype)  # an object array is made of None
    wider[: len(column)] = column
    return wider
