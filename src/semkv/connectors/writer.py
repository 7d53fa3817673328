"""A background thread that writes, with a bound on what waits for it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import weakref
from collections import Counter
from collections.abc import Callable

log = logging.getLogger("semkv.connectors")


class BackgroundWriter:
    """Runs jobs one after the other in a daemon thread; started by the first job.

    A job that raises is counted, and the next one runs. What still waits at the interpreter's end is written then.

    Args:
        name: of the thread.
        max_bytes: bound on what waits.
        counters: where ``errors`` are counted.
    """

    def __init__(self, name: str, max_bytes: int, counters: Counter[str]) -> None:
        self._name, self._max_bytes, self._counters = name, max_bytes, counters
        self._queue: queue.SimpleQueue[tuple[Callable[[], object], int] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending_bytes = self._pending_jobs = 0
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], object], nbytes: int) -> bool:
        """Queue a job that holds ``nbytes``; False when too much waits already."""
        with self._changed:
            if self._pending_bytes and self._pending_bytes + nbytes > self._max_bytes:
                return False
            self._pending_bytes += nbytes
            self._pending_jobs += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
                atexit.register(_flush_at_exit, weakref.ref(self))
        self._queue.put((job, nbytes))
        return True

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            job, nbytes = item
            try:
                job()
            except Exception:
                log.exception("semkv: what %s was to write is not stored", self._name)
                self._counters["errors"] += 1
            finally:
                del job, item
                with self._changed:
                    self._pending_bytes -= nbytes
                    self._pending_jobs -= 1
                    self._changed.notify_all()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything queued is written; False when ``timeout`` seconds did not suffice."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending_jobs, timeout)

    def close(self) -> None:
        """Write what waits, then end the thread."""
        if self._thread is not None:
            self.flush()
            self._queue.put(None)
            self._thread.join()
            self._thread = None


def _flush_at_exit(ref: weakref.ref[BackgroundWriter]) -> None:
    if (writer := ref()) is not None:
        with contextlib.suppress(RuntimeError):
            writer.flush(timeout=60.0)
