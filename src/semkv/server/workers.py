"""Blocking work off the event loop: a few threads, a bounded queue, and a limit on how long anybody waits."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Late(Exception):  # noqa: N818
    """The work was not done in time, or there is too much of it. Work that has begun goes on."""


class Workers:
    """A thread pool that refuses work instead of piling it up.

    So a store that hangs costs each request at most the time limit, and nothing at all once every thread is stuck and
    the queue is full; when it recovers, the queue drains and work is taken again.

    Args:
        name: of the threads.
        threads: how many.
        queued: work that may wait beside what is being done.
        drops: work that nobody waits for any more is not begun. Right for questions, wrong for orders.
        nice: how far the threads stand back behind the event loop for a core, from 0 to 19; Linux alone.
    """

    def __init__(self, name: str, *, threads: int, queued: int, drops: bool = False, nice: int = 0) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=partial(_stand_back, nice))
        self._most, self._drops = threads + queued, drops
        self._pending = 0

    @property
    def pending(self) -> int:
        """How much is being done or waits."""
        return self._pending

    async def run(self, limit_s: float | None, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Do ``work(*args, **kwargs)`` in a thread.

        Args:
            limit_s: how long to wait for it; None for as long as it takes.
            work: the function, then its arguments.

        Raises:
            Late: it took longer, or was not begun because too much is waiting.
            Exception: whatever ``work`` raised.
        """
        if self._pending >= self._most:
            raise Late("too much is waiting")
        loop = asyncio.get_running_loop()
        job = self._pool.submit(work, *args, **kwargs)
        self._pending += 1
        done: asyncio.Future[_T] = loop.create_future()

        def tell(_: Future[_T]) -> None:
            loop.call_soon_threadsafe(finish)

        def finish() -> None:
            self._pending -= 1
            if done.done():  # nobody waits any more
                return
            if job.cancelled():
                done.cancel()
            elif (error := job.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(job.result())

        job.add_done_callback(tell)
        if limit_s is None:
            return await done
        timer = loop.call_later(limit_s, _expire, done)
        try:
            return await done
        finally:
            timer.cancel()
            if self._drops:
                job.cancel()

    def close(self) -> None:
        """Finish what is being done, drop what waits."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _stand_back(nice: int) -> None:
    """Raise the niceness of this thread, which on Linux is a thread's own; where that is refused it stays as it is."""
    if nice and sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))


def _expire(done: asyncio.Future[_T]) -> None:
    if not done.done():
        done.set_exception(Late("too slow"))
