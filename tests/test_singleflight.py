"""Single flight: nobody has the end of an answer before the cache was given the whole of it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from semkv.server.cache_client import CacheClient
from semkv.server.http import Headers
from semkv.server.metrics import Metrics
from semkv.server.singleflight import InFlight, SingleFlight
from semkv.server.sse import Assembler
from semkv.stores.responses import Selector, StoredResponse
from semkv.stores.responses.sqlite import SqliteStore
from semkv.tiers.response import ResponseCache


class Scripted:
    """An upstream that answers every request with the same pieces."""

    status = 200

    def __init__(self, kind: bytes, pieces: list[bytes]) -> None:
        self.headers: Headers = [(b"content-type", kind)]
        self._pieces = pieces

    async def send(self) -> Scripted:
        return self

    async def pieces(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece

    async def aclose(self) -> None:
        return


def event(**fields: Any) -> bytes:
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [], **fields}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


BODY = b'{"id": "1", "choices": []}'
STREAM = [
    event(choices=[{"index": 0, "delta": {"role": "assistant", "content": "red"}, "finish_reason": None}]),
    event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]),
    event(usage={"total_tokens": 1}),
    b"data: [DONE]\n\n",
]


def start(flights: SingleFlight, kind: bytes, pieces: list[bytes], on_whole: Any) -> InFlight:
    send = Scripted(kind, pieces).send
    flight = InFlight(flights, "key", send, lambda *_: "", on_whole, Assembler(chat=True))
    flights.start(flight)
    return flight


@pytest.mark.parametrize(("kind", "pieces"), [(b"application/json", [BODY]), (b"text/event-stream", STREAM)])
def test_the_end_waits_until_the_answer_was_kept(kind: bytes, pieces: list[bytes]) -> None:
    async def story() -> None:
        asked, stored = asyncio.Event(), asyncio.Event()

        async def on_whole(flight: InFlight) -> None:
            assert flight.payload is not None
            asked.set()
            await stored.wait()

        flight = start(SingleFlight(faults.append), kind, pieces, on_whole)
        await asked.wait()
        for _ in range(50):  # whatever else could run has run
            await asyncio.sleep(0)
        last = flight.chunk(len(pieces) - 1)
        assert not flight.done
        assert flight.streamed is (last is None), "of a stream the last event is held back as well"
        stored.set()
        await flight.task
        assert (flight.done, flight.error) == (True, None)
        assert flight.chunk(len(pieces) - 1) is not None

    faults: list[str] = []
    asyncio.run(story())
    assert not faults


def test_a_flight_that_is_canceled_at_once_has_an_end() -> None:
    async def story() -> None:
        flights = SingleFlight(print)
        flight = start(flights, b"application/json", [], None)
        flights.close()
        await flight.until(lambda: False)
        await flight.task
        assert flight.done
        assert not flights.running

    asyncio.run(story())


def test_a_fault_while_a_stream_is_put_together_costs_no_reader_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        flight = start(SingleFlight(faults.append), b"text/event-stream", STREAM, None)
        assert [piece async for piece in flight.reader().pieces()] == STREAM
        assert not flight.storable

    def broken(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    faults: list[str] = []
    monkeypatch.setattr(Assembler, "_add", broken)
    asyncio.run(story())
    assert faults == ["stream"]


def test_a_lookup_that_began_before_an_invalidation_is_not_joined(tmp_path: Path) -> None:
    read, go_on = threading.Event(), threading.Event()

    class Slow(SqliteStore):
        def get(self, key: str) -> StoredResponse | None:
            found = super().get(key)
            read.set()
            go_on.wait()  # the reply of a shared store is on its way
            return found

    class Canonical:
        key, sampled, request = "a" * 64, False, None

    async def story() -> None:
        store = Slow(tmp_path / "store.sqlite")
        store.put(StoredResponse(Canonical.key, "", "model", b"{}", time.time()), store.news("").cursor)
        cache = CacheClient(ResponseCache(store), None, Metrics(), store_s=300)
        early = asyncio.create_task(cache.look_up(Canonical()))  # type: ignore[arg-type]
        await asyncio.to_thread(read.wait)
        assert await cache.invalidate(Selector(key=Canonical.key), dry_run=False) == 1
        late = asyncio.create_task(cache.look_up(Canonical()))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        go_on.set()
        await early
        assert (await late).found is None
        await cache.aclose()

    asyncio.run(story())
