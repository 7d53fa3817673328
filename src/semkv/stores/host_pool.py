"""The host level, between the GPU and the disk: KV blocks in one piece of memory, encoder outputs one by one.

What was captured, or read from the disk and checked, stays here until room is needed; least recently used goes first.
On CUDA a `HostPool`'s memory is page-locked, so that copies to the device run at the bus's rate (`kv_transfer`).
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from semkv.stores.container import Bytes

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Run:
    """Rows ``first`` to ``first + count`` of the pool's memory, in the order of the keys they were asked for."""

    first: int
    count: int


class HostPool:
    """Rows of equal size under keys, bounded by the memory given. Safe to use from several threads.

    A key goes through `reserve` (a row is set aside for the caller to fill), `publish` (others may read it) and
    `release`; `pin` and `release` bracket reading. A row in use is never evicted.

    Attributes:
        counters: ``host_evicted`` rows.
    """

    def __init__(self, memory: Bytes, row_bytes: int) -> None:
        """Take over ``memory`` (uint8 ``[n]``); what is left over after whole rows stays unused."""
        count = len(memory) // row_bytes
        self.rows = memory[: count * row_bytes].reshape(count, row_bytes)
        self.counters: Counter[str] = Counter()
        self._lock = threading.Lock()
        # Plain numbers under bytes: tens of thousands of objects would make every garbage collection a pause.
        self._row: OrderedDict[bytes, int] = OrderedDict()
        self._ready = bytearray(count)
        self._users = array("l", bytes(array("l").itemsize * count))
        self._free = list(range(count - 1, -1, -1))

    def __contains__(self, key: bytes) -> bool:
        """Whether the row is there or being filled."""
        return key in self._row

    def __len__(self) -> int:
        return len(self._row)

    def ready(self, keys: Iterable[bytes]) -> int:
        """How many leading rows of ``keys`` can be read."""
        n = 0
        with self._lock:
            for key in keys:
                row = self._row.get(key)
                if row is None or not self._ready[row]:
                    break
                n += 1
        return n

    def pin(self, keys: Sequence[bytes]) -> list[Run]:
        """The leading rows of ``keys`` that can be read; they count as used now, and stay until `release`."""
        rows: list[int] = []
        with self._lock:
            for key in keys:
                row = self._row.get(key)
                if row is None or not self._ready[row]:
                    break
                self._users[row] += 1
                self._row.move_to_end(key)
                rows.append(row)
        return runs(rows)

    def reserve(self, keys: Sequence[bytes]) -> tuple[list[int], list[Run]]:
        """Set rows aside for keys that are not there, in use by the caller; evicts what is not in use.

        Returns:
            Indexes into ``keys``, and the rows for them in the same order. Fewer where nothing may be evicted.
        """
        taken: list[int] = []
        rows: list[int] = []
        with self._lock:
            wanted = [i for i, key in enumerate(keys) if key not in self._row]
            self._evict(len(wanted) - len(self._free))
            for i in wanted[: len(self._free)]:
                row = self._row[keys[i]] = self._free.pop()
                self._users[row], self._ready[row] = 1, False
                taken.append(i)
                rows.append(row)
        return taken, runs(rows)

    def _evict(self, count: int) -> None:
        gone: list[bytes] = []
        for key, row in self._row.items() if count > 0 else ():
            if len(gone) >= count:
                break
            if not self._users[row]:
                gone.append(key)
        self._free += [self._row.pop(key) for key in reversed(gone)]
        self.counters["host_evicted"] += len(gone)

    def publish(self, keys: Iterable[bytes]) -> None:
        """The rows reserved under ``keys`` are filled; they stay in use."""
        with self._lock:
            for key in keys:
                self._ready[self._row[key]] = True

    def release(self, keys: Iterable[bytes]) -> None:
        """End one use of each of ``keys``; a row that was never published goes."""
        with self._lock:
            for key in keys:
                row = self._row[key]
                self._users[row] -= 1
                if not self._users[row] and not self._ready[row]:
                    self._free.append(self._row.pop(key))

    def clear(self) -> None:
        """Forget every row that is not in use."""
        with self._lock:
            self._evict(len(self._row))

    def view(self, run: Run) -> Bytes:
        """The bytes of a run, uint8 ``[count, row_bytes]``."""
        return self.rows[run.first : run.first + run.count]


class HostItems(Generic[_Value]):
    """Values of any size under keys, bounded by their bytes. For one thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: OrderedDict[Hashable, tuple[_Value, int]] = OrderedDict()
        self.nbytes = 0

    def get(self, key: Hashable) -> _Value | None:
        """The value, which counts as used now."""
        if key not in self._items:
            return None
        self._items.move_to_end(key)
        return self._items[key][0]

    def put(self, key: Hashable, value: _Value, nbytes: int) -> None:
        """Keep a value of ``nbytes``; one larger than the bound is not kept."""
        self.nbytes -= self._items.pop(key, (None, 0))[1]
        if nbytes > self._max_bytes:
            return
        self._items[key] = value, nbytes
        self.nbytes += nbytes
        while self.nbytes > self._max_bytes:
            self.nbytes -= self._items.popitem(last=False)[1][1]

    def clear(self) -> None:
        self._items.clear()
        self.nbytes = 0


def runs(rows: Sequence[int]) -> list[Run]:
    """Neighbouring rows as runs, in order."""
    found: list[Run] = []
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            found.append(Run(rows[start], i - start))
            start = i
    return found
