"""A background thread that writes, with a bound on what waits for it."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger("semkv.connectors")


class BackgroundWriter:
    """Runs jobs one after the other in a thread. What still waits at the interpreter's end is written then.

    A job that raises is counted, and the next one runs.

    Args:
        name: of the thread.
        max_bytes: bound on what waits.
        counters: where ``errors`` are counted.
    """

    def __init__(self, name: str, max_bytes: int, counters: Counter[str]) -> None:
        self._max_bytes, self._counters = max_bytes, counters
        self._lock, self._waiting_bytes = threading.Lock(), 0
        self._pool = ThreadPoolExecutor(1, name)

    def submit(self, job: Callable[[], object], nbytes: int) -> bool:
        """Queue a job that holds ``nbytes``; False when too much waits already."""
        with self._lock:
            if self._waiting_bytes and self._waiting_bytes + nbytes > self._max_bytes:
                return False
            self._waiting_bytes += nbytes
        self._pool.submit(self._run, job, nbytes)
        return True

    def _run(self, job: Callable[[], object], nbytes: int) -> None:
        try:
            job()
        except Exception:
            log.exception("semkv: an encoder output is not stored")
            self._counters["errors"] += 1
        finally:
            with self._lock:
                self._waiting_bytes -= nbytes

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything queued is written; False when ``timeout`` seconds did not suffice."""
        try:
            self._pool.submit(int).result(timeout)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Write what waits, then end the thread."""
        self._pool.shutdown()
