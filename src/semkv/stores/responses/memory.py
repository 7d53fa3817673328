"""Answers in this process's memory."""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from semkv.stores.responses.base import REFUSALS, REFUSED_S, News, ResponseStore, Selector, StoredResponse

_OVERHEAD = 640  # bytes of an entry beside its strings: objects, dictionary slot, allocator (measured: 500 to 620)
_LOG = 1000


def weight(response: StoredResponse) -> int:
    """Bytes that an answer takes in memory."""
    texts = (response.key, response.partition, response.model, response.prompt, *response.tags)
    return sys.getsizeof(response.payload) + sum(map(sys.getsizeof, texts)) + _OVERHEAD


class MemoryStore(ResponseStore):
    """An LRU bounded in bytes. No method waits for anything but a short lock.

    Args:
        max_bytes: bound on what it holds, overhead included.
        clock: seconds since the epoch.
    """

    def __init__(self, max_bytes: int = 256 << 20, *, clock: Callable[[], float] = time.time) -> None:
        self.max_bytes, self.evicted = max_bytes, 0
        self._clock = clock
        self._entries: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._log: deque[tuple[int, Selector]] = deque(maxlen=_LOG)
        self._number = 0
        self._refused: OrderedDict[str, float] = OrderedDict()

    @property
    def cursor(self) -> str:
        """The place of the latest invalidation."""
        return str(self._number)

    def get(self, key: str) -> StoredResponse | None:
        with self._lock:
            held = self._entries.get(key)
            if held is None:
                return None
            if held[0].stale_until <= self._clock():
                self._drop(key)
                return None
            self._entries.move_to_end(key)
            return held[0]

    def put(self, response: StoredResponse, since: str = "") -> bool:
        size = weight(response)
        with self._lock:
            if size > self.max_bytes or (since and self._news(since).hit(response)):
                return False
            self._drop(response.key)
            self._entries[response.key] = (response, size)
            self._bytes += size
            while self._bytes > self.max_bytes:
                self._drop(next(iter(self._entries)))
                self.evicted += 1
            return True

    def _drop(self, key: str) -> None:
        held = self._entries.pop(key, None)
        if held is not None:
            self._bytes -= held[1]

    def invalidate(self, selector: Selector, *, dry_run: bool = False) -> int:
        with self._lock:
            if not dry_run:
                self._number += 1
                self._log.append((self._number, selector))
            gone = [key for key, (response, _) in self._entries.items() if selector.matches(response)]
            for key in () if dry_run else gone:
                self._drop(key)
            return len(gone)

    def news(self, cursor: str) -> News:
        with self._lock:
            return self._news(cursor)

    def _news(self, cursor: str) -> News:
        if not cursor:
            return News(self.cursor)
        since = int(cursor)
        if self._number - since > len(self._log):
            return News(self.cursor, None)
        return News(self.cursor, tuple(selector for number, selector in self._log if number > since))

    def refuse(self, name: str, *, refused: bool) -> None:
        with self._lock:
            self._refused.pop(name, None)
            if refused:
                self._refused[name] = self._clock()
            if len(self._refused) > REFUSALS:
                self._refused.popitem(last=False)

    def refused(self, name: str) -> bool:
        return self._clock() - self._refused.get(name, float("-inf")) < REFUSED_S

    def usage(self) -> tuple[int, int]:
        with self._lock:
            return len(self._entries), self._bytes

    def close(self) -> None:
        with self._lock:
            self._entries.clear()
            self._bytes = 0
