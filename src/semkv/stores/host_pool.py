"""The host level, between the GPU and the disk: rows of equal size in one piece of memory, under keys.

What was captured, or read from the disk and checked, stays here until room is needed or it is too old (`host_policy`).
On CUDA the memory is page-locked, so that copies to the device run at the bus's rate. KV blocks take a row each,
fusion states several (`host_states`).
"""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from semkv.stores.container import Bytes
from semkv.stores.host_policy import FOREVER, victims


@dataclass(frozen=True, slots=True)
class Run:
    """Rows ``first`` to ``first + count`` of the pool's memory, in the order of the keys they were asked for."""

    first: int
    count: int


class Loan:
    """Rows lent to a reader: they stay until the loan is dropped, in whichever thread that happens."""

    def __init__(self, keys: Sequence[bytes], parts: Sequence[Bytes], returned: deque[Sequence[bytes]]) -> None:
        self.parts = parts
        self._keys, self._returned = keys, returned

    def __del__(self) -> None:
        self._returned.append(self._keys)  # no lock here: the collector may run inside the pool's own


class HostPool:
    """Rows of equal size under keys, bounded by the memory given. Safe to use from several threads.

    A key goes through `reserve` (a row is set aside for the caller to fill), `publish` (others may read it) and
    `release`; `pin` and `release` bracket reading, or a `Loan` does. A row in use is never evicted; one that is too old
    is never read.

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
        self._ends = array("d", [FOREVER]) * count
        self._aging = False
        self._free = list(range(count - 1, -1, -1))
        self._returned: deque[Sequence[bytes]] = deque()

    @property
    def row_bytes(self) -> int:
        return int(self.rows.shape[1])

    def __contains__(self, key: bytes) -> bool:
        """Whether the row is there or being filled, and not too old."""
        row = self._row.get(key)
        return row is not None and self._ends[row] > time.time()

    def __len__(self) -> int:
        with self._lock:
            self._take_back()
            return len(self._row)

    def ready(self, keys: Iterable[bytes]) -> int:
        """How many leading rows of ``keys`` can be read."""
        with self._lock:
            return len(self._readable(keys))

    def _readable(self, keys: Iterable[bytes]) -> list[int]:
        get, ready, ends, now = self._row.get, self._ready, self._ends, time.time()
        rows: list[int] = []
        for key in keys:
            row = get(key)
            if row is None or not ready[row] or ends[row] <= now:
                break
            rows.append(row)
        return rows

    def pin(self, keys: Sequence[bytes]) -> list[Run]:
        """The leading rows of ``keys`` that can be read; they count as used now, and stay until `release`."""
        with self._lock:
            rows = self._readable(keys)
            users, touch = self._users, self._row.move_to_end
            for key, row in zip(keys, rows, strict=False):
                users[row] += 1
                touch(key)
        return runs(rows)

    def lend(self, keys: Sequence[bytes]) -> Loan | None:
        """All of ``keys`` to read, until the loan is dropped; None where one of them cannot be read."""
        found = self.pin(keys)
        count = sum(run.count for run in found)
        if count < len(keys):
            self.release(keys[:count])
            return None
        return Loan(keys, [self.view(run) for run in found], self._returned)

    def reserve(self, keys: Sequence[bytes]) -> tuple[list[int], list[Run]]:
        """Set rows aside for keys that are not there, in use by the caller; evicts what is not in use.

        Returns:
            Indexes into ``keys``, and the rows for them in the same order. Fewer where nothing may be evicted.
        """
        with self._lock:
            self._take_back()
            if self._aging:
                now = time.time()
                self._drop(k for k in keys if (row := self._row.get(k)) is not None and self._ends[row] <= now)
            wanted = [i for i, key in enumerate(keys) if key not in self._row]
            self._evict(len(wanted) - len(self._free))
            taken = wanted[: len(self._free)]
            rows = self._take([keys[i] for i in taken])
        return taken, runs(rows)

    def reserve_all(self, keys: Sequence[bytes]) -> list[Run] | None:
        """Rows for one value that takes several; what is left of an older copy goes first.

        None, and nothing is set aside, where the value is in use or there is no room.
        """
        with self._lock:
            self._take_back()
            if any((row := self._row.get(key)) is not None and self._users[row] for key in keys):
                return None
            self._drop(keys)
            self._evict(len(keys) - len(self._free))
            if len(self._free) < len(keys):
                return None
            return runs(self._take(keys))

    def _take(self, keys: Iterable[bytes]) -> list[int]:
        rows = []
        for key in keys:
            row = self._row[key] = self._free.pop()
            self._users[row], self._ready[row], self._ends[row] = 1, False, FOREVER
            rows.append(row)
        return rows

    def _drop(self, keys: Iterable[bytes]) -> None:
        """Free the rows of ``keys`` that are there and not in use."""
        for key in keys:
            if (row := self._row.get(key)) is not None and not self._users[row]:
                self._free.append(self._row.pop(key))

    def _evict(self, count: int) -> None:
        if count > 0:
            line = victims(self._row.items(), self._users, self._ends, time.time(), aging=self._aging)
            gone = list(itertools.islice(line, count))
            self._free += [self._row.pop(key) for key in reversed(gone)]
            self.counters["host_evicted"] += len(gone)

    def publish(self, keys: Iterable[bytes], ends: float = FOREVER) -> None:
        """The rows reserved under ``keys`` are filled, and may be read until ``ends``; they stay in use."""
        with self._lock:
            self._aging |= ends < FOREVER
            for key in keys:
                row = self._row[key]
                self._ready[row], self._ends[row] = True, ends

    def release(self, keys: Iterable[bytes]) -> None:
        """End one use of each of ``keys``; a row that was never published goes."""
        with self._lock:
            self._end_use(keys)

    def _end_use(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            row = self._row[key]
            self._users[row] -= 1
            if not self._users[row] and not self._ready[row]:
                self._free.append(self._row.pop(key))

    def _take_back(self) -> None:
        """End the loans that were dropped."""
        while self._returned:
            self._end_use(self._returned.popleft())

    def clear(self) -> None:
        """Forget every row that is not in use."""
        with self._lock:
            self._take_back()
            self._evict(len(self._row))

    def view(self, run: Run) -> Bytes:
        """The bytes of a run, uint8 ``[count, row_bytes]``."""
        return self.rows[run.first : run.first + run.count]


def runs(rows: Sequence[int]) -> list[Run]:
    """Neighbouring rows as runs, in order."""
    found: list[Run] = []
    start = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            found.append(Run(rows[start], i - start))
            start = i
    return found
