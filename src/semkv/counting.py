"""Counters, and the blocks in which a fault of the cache ends as a counted miss."""

from __future__ import annotations

import logging
import threading
from collections import Counter

from semkv.errors import ConfigError

logger = logging.getLogger("semkv")


class Tally:
    """Counters that any thread may add to; faults are logged as warnings, each kind's first time, then as debug."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def fault(self, kind: str, error: BaseException) -> None:
        """Count a fault inside the cache; the request goes on as a miss."""
        name = f"fault:{kind}"
        self.add(name)
        level = logging.WARNING if self._counts[name] == 1 else logging.DEBUG
        logger.log(level, "%s: %s: %s (counted as a miss)", kind, type(error).__name__, error)

    def boundary(self, kind: str) -> Boundary:
        """A ``with`` block where faults end: counted here, and the code after the block goes on."""
        return Boundary(self, kind)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


class Boundary:
    """See `Tally.boundary`. A `ConfigError` is no fault: it says what to change."""

    def __init__(self, tally: Tally, kind: str) -> None:
        self._tally = tally
        self._kind = kind

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, ConfigError):
            return False
        self._tally.fault(self._kind, error)
        return True
