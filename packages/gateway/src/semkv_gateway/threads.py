"""Threads for work that may block: what waits for them is bounded, and so is every wait.

A store that hangs costs each request at most the time limit, and nothing once all threads are stuck and the queue is
full. When it recovers, the queue drains and work is taken again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar, cast

from semkv.niceness import set_niceness

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


class _Outcome(asyncio.Future[Any]):
    """What comes of a job. ``is_wanted``: also where nobody waits for it any more."""

    is_wanted = False


class Batches(Generic[_Job, _Result]):
    """Threads that do jobs of one event loop, of which one thread takes all that wait, up to a number. A job that
    comes alone waits for no other.

    Args:
        name: of the threads; the first job starts them.
        do: does jobs, and returns a result for each. What it raises reaches all who wait for one of these jobs.
        most: jobs that one thread takes at a time.
        threads: how many there are.
        queued: jobs that may wait for a thread.
        nice: how far the threads give way to others.
    """

    def __init__(
        self,
        name: str,
        do: Callable[[list[_Job]], Sequence[_Result]],
        *,
        most: int,
        threads: int,
        queued: int,
        nice: int = 0,
    ) -> None:
        self._name = name
        self._do = do
        self._most = most
        self._most_threads = threads
        self._most_queued = queued
        self._nice = nice
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[tuple[_Job, _Outcome] | None] = SimpleQueue()
        self._drops = False

    @property
    def waiting(self) -> int:
        """Jobs that no thread has begun, dropped ones included: they stay in the queue until a thread takes them."""
        return self._queue.qsize()

    async def result(self, limit_s: float | None, job: _Job, *, always: bool) -> _Result:
        """The result of a job. With ``always`` it is done after the time limit, too, as a write must be; else it is
        dropped where it has not begun then. Raises `TimeoutError` where it takes longer than ``limit_s``, or too many
        wait."""
        if self.waiting >= self._most_queued:
            raise TimeoutError("too much is waiting")
        loop = asyncio.get_running_loop()
        outcome = _Outcome(loop=loop)
        outcome.is_wanted = always
        self._queue.put((job, outcome))
        while len(self._threads) < self._most_threads:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            thread.start()  # may fail: then the next job tries again
            self._threads.append(thread)
        if limit_s is None:
            return cast("_Result", await outcome)
        late = loop.call_later(limit_s, _fail, [outcome], TimeoutError())
        try:
            return cast("_Result", await outcome)
        finally:
            late.cancel()

    def close(self, *, drop: bool) -> None:
        """Do what waits, or ``drop`` it, and end the threads. Blocks. Later jobs are refused."""
        self._drops = drop
        self._most_queued = 0
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        set_niceness(self._nice)
        while (first := self._queue.get()) is not None:
            taken = [first]
            while len(taken) < self._most:
                try:
                    further = self._queue.get_nowait()
                except Empty:
                    break
                if further is None:
                    self._queue.put(None)  # the end comes after these
                    break
                taken.append(further)
            self._do_all([pair for pair in taken if pair[1].is_wanted or not pair[1].done()])

    def _do_all(self, taken: list[tuple[_Job, _Outcome]]) -> None:
        if not taken:
            return
        outcomes = [outcome for _, outcome in taken]
        loop = outcomes[0].get_loop()
        try:
            if self._drops:
                raise TimeoutError("nobody does this any more")
            results = self._do([job for job, _ in taken])
            settle = partial(_settle, outcomes, results)
        except BaseException as error:
            settle = partial(_fail, outcomes, error)
        with suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(settle)


class Pool(Batches[Callable[[], Any], Any]):
    """Threads that call functions, each one by itself."""

    def __init__(self, name: str, *, threads: int, queued: int, nice: int = 0) -> None:
        super().__init__(
            name,
            lambda jobs: [job() for job in jobs],
            most=1,
            threads=threads,
            queued=queued,
            nice=nice,
        )

    async def run(
        self, limit_s: float | None, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Do ``work(*args, **kwargs)`` in a thread, unless it has not begun at the time limit."""
        job = partial(work, *args, **kwargs)
        return cast("_T", await self.result(limit_s, job, always=False))

    async def complete(
        self, limit_s: float | None, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """The same, but the work is always done, also after the time limit: for writes."""
        job = partial(work, *args, **kwargs)
        return cast("_T", await self.result(limit_s, job, always=True))


def _settle(outcomes: list[_Outcome], results: Sequence[Any]) -> None:
    for outcome, result in zip(outcomes, results, strict=True):
        if not outcome.done():
            outcome.set_result(result)


def _fail(outcomes: list[_Outcome], error: BaseException) -> None:
    for outcome in outcomes:
        if not outcome.done():
            outcome.set_exception(error)
