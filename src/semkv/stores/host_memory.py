"""One host memory for all who use a cache directory in one process.

vLLM makes the KV connector and the encoder-cache connector apart from each other, each in a scheduler's and a worker's
half. Where they are in one process they find each other here, so that one bound holds for all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from semkv.stores.container import Bytes
from semkv.stores.host_pool import HostPool


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Memory (uint8 ``[n]``), and what gives it back to the system."""

    memory: Bytes
    free: Callable[[], None] = lambda: None


@dataclass(slots=True)
class _Shared:
    pool: HostPool
    buffer: HostBuffer
    users: int = 0


class HostMemories:
    """The host memories of a process, by cache directory. Safe to use from several threads.

    A memory is made for the first who asks and freed after the last has released it. Its bound and the size of its rows
    are the first one's: rows of another size than asked for would hold nothing of use, so there is one pool for each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shared: dict[tuple[Path, int], _Shared] = {}

    def __len__(self) -> int:
        return len(self._shared)

    def acquire(
        self, directory: Path, nbytes: int, allocate: Callable[[int], HostBuffer], row_bytes: int | None = None
    ) -> HostPool:
        """The pool of a cache directory; `release` must follow.

        Args:
            directory: the cache directory.
            nbytes: bound of the memory, where it is made now.
            allocate: makes it.
            row_bytes: of a row; None takes the rows that are there, or rows of 256 KiB.
        """
        directory = directory.resolve()
        with self._lock:
            key = (directory, row_bytes or next((size for path, size in self._shared if path == directory), 1 << 18))
            if key not in self._shared:
                buffer = allocate(nbytes)
                self._shared[key] = _Shared(HostPool(buffer.memory, key[1]), buffer)
            self._shared[key].users += 1
            return self._shared[key].pool

    def release(self, pool: HostPool) -> None:
        """One user of ``pool`` needs it no more."""
        with self._lock:
            key = next(key for key, shared in self._shared.items() if shared.pool is pool)
            self._shared[key].users -= 1
            if not self._shared[key].users:
                self._shared.pop(key).buffer.free()
