"""Blocking work off the event loop: a few threads, a bounded queue, and a limit on how long a caller waits."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Late(Exception):  # noqa: N818
    """The work was not done in time, or there is too much of it. Work that has begun goes on."""


class Pool:
    """A thread pool that refuses work when too much is waiting.

    So a store that hangs costs each request at most the time limit, and nothing once all threads are stuck and the
    queue is full. When it recovers, the queue drains and work is taken again.

    Args:
        name: of the threads.
        threads: how many.
        queued: jobs that may wait in addition to those that run.
        nice: niceness of the threads (0 to 19, Linux only), so that the event loop gets the core first.
    """

    def __init__(self, name: str, *, threads: int, queued: int, nice: int = 0) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=partial(_set_niceness, nice))
        self._limit, self._lock = threads + queued, threading.Lock()
        self.pending = 0  # jobs that run or wait

    async def run(self, limit_s: float | None, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Do ``work(*args, **kwargs)`` in a thread. A job that has not begun at the time limit is dropped.

        Args:
            limit_s: how long to wait for it; None for as long as it takes.
            work: the function, then its arguments.

        Raises:
            Late: it took longer, or too much is waiting.
            Exception: whatever ``work`` raised.
        """
        return await _within(limit_s, asyncio.wrap_future(self._submit(partial(work, *args, **kwargs))))

    async def complete(self, limit_s: float | None, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """The same, but the job is always done, also after the time limit: for writes."""
        job = asyncio.wrap_future(self._submit(partial(work, *args, **kwargs)))
        job.add_done_callback(lambda job: job.cancelled() or job.exception())  # nobody may wait for it anymore
        return await _within(limit_s, asyncio.shield(job))

    def _submit(self, work: Callable[[], _T]) -> Future[_T]:
        with self._lock:
            if self.pending >= self._limit:
                raise Late("too much is waiting")
            self.pending += 1
        try:
            job = self._executor.submit(work)
        except RuntimeError:  # no more threads for now, or the interpreter ends
            with self._lock:
                self.pending -= 1
            raise
        job.add_done_callback(self._ended)
        return job

    def _ended(self, _: Future[Any]) -> None:
        with self._lock:
            self.pending -= 1

    def close(self) -> None:
        """Finish what runs, drop what waits."""
        self._executor.shutdown(wait=True, cancel_futures=True)


async def _within(limit_s: float | None, job: asyncio.Future[_T]) -> _T:
    try:
        async with asyncio.timeout(limit_s):
            return await job
    except TimeoutError:
        raise Late("too slow") from None


def _set_niceness(nice: int) -> None:
    """Raise the niceness of this thread, which on Linux belongs to a thread; where that is refused it stays."""
    if nice and sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))
