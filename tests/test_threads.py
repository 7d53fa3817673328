"""Threads that do several jobs at once: what waits is bounded, dropped where it may be, and done where it must be."""

from __future__ import annotations

import asyncio
import threading

import pytest

from semkv_gateway.threads import Batches


def test_jobs_that_wait_are_done_together_and_writes_also_after_their_time() -> None:
    go = threading.Event()
    begun = threading.Event()
    done: list[list[int]] = []

    def work(jobs: list[int]) -> list[int]:
        begun.set()
        go.wait()
        done.append(jobs)
        if -1 in jobs:
            raise OSError("scripted")
        return [2 * job for job in jobs]

    async def story() -> None:
        batches = Batches("test", work, most=3, threads=1, queued=6)
        first = asyncio.ensure_future(batches.result(None, 1, always=False))
        await asyncio.to_thread(begun.wait)
        late = [asyncio.ensure_future(batches.result(0.01, job, always=job == 2)) for job in (2, 3)]
        others = [
            asyncio.ensure_future(batches.result(None, job, always=False)) for job in (4, 5, -1, 6)
        ]
        assert [type(error) for error in await asyncio.gather(*late, return_exceptions=True)] == [
            TimeoutError
        ] * 2
        with pytest.raises(TimeoutError, match="too much"):
            await batches.result(None, 7, always=True)
        go.set()
        assert await first == 2
        told = await asyncio.gather(*others, return_exceptions=True)
        assert [repr(one) for one in told] == ["8", *["OSError('scripted')"] * 3]
        await asyncio.to_thread(batches.close, drop=False)

    asyncio.run(story())
    assert done == [[1], [2, 4], [5, -1, 6]]


@pytest.mark.parametrize("drop", [False, True])
def test_at_the_end_what_waits_is_done_or_dropped(drop: bool) -> None:
    go = threading.Event()
    begun = threading.Event()

    def work(jobs: list[int]) -> list[int]:
        begun.set()
        go.wait()
        return jobs

    async def story() -> None:
        batches = Batches("test", work, most=1, threads=2, queued=10)
        first = asyncio.ensure_future(batches.result(None, 0, always=True))
        await asyncio.to_thread(begun.wait)
        others = [
            asyncio.ensure_future(batches.result(None, job, always=True)) for job in (1, 2, 3)
        ]
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(asyncio.to_thread(batches.close, drop=drop))
        while batches._most_queued:
            await asyncio.sleep(0.001)
        go.set()
        await closing
        assert await first == 0
        told = await asyncio.gather(*others, return_exceptions=True)
        dropped = [isinstance(one, TimeoutError) for one in told]
        assert dropped[1:] == [
            drop,
            drop,
        ]  # the second thread may have begun with the first of them
        with pytest.raises(TimeoutError):
            await batches.result(None, 4, always=True)

    asyncio.run(story())
