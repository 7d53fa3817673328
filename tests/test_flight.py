"""A flight: nobody has the end of an answer before the cache was given the whole of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from semkv.server.flight import Bounds, Desk, Flight
from semkv.server.upstream import Call, Headers


class Scripted:
    """An upstream that answers every request with the same pieces."""

    status = 200

    def __init__(self, kind: bytes, pieces: list[bytes]) -> None:
        self.headers: Headers = [(b"content-type", kind)]
        self._pieces = pieces

    async def send(self, call: Call) -> Scripted:
        return self

    async def pieces(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece

    async def ready(self) -> bool:
        return True

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


@pytest.mark.parametrize(("kind", "pieces"), [(b"application/json", [BODY]), (b"text/event-stream", STREAM)])
def test_the_end_waits_until_the_answer_was_kept(kind: bytes, pieces: list[bytes]) -> None:
    async def story() -> None:
        asked, stored = asyncio.Event(), asyncio.Event()

        async def landed(flight: Flight) -> None:
            assert flight.payload is not None
            asked.set()
            await stored.wait()

        desk = Desk(Scripted(kind, pieces), Bounds())
        seat = desk.start("key", Call({}, b""), lambda _: None, landed, chat=True)
        await asyncio.wait_for(asked.wait(), 10)
        for _ in range(50):  # whatever else could run has run
            await asyncio.sleep(0)
        flight = seat.flight
        last = flight.piece(len(pieces) - 1)
        assert not flight.done
        assert flight.streamed is (last is None), "of a stream the last event is held back as well"
        stored.set()
        await asyncio.wait_for(flight.over(), 10)
        assert flight.done
        assert flight.error is None
        assert flight.piece(len(pieces) - 1) is not None
        seat.leave()

    asyncio.run(story())


def test_a_flight_that_is_cancelled_at_once_has_an_end() -> None:
    async def story() -> None:
        async def landed(flight: Flight) -> None:
            raise AssertionError("nothing came")

        desk = Desk(Scripted(b"application/json", []), Bounds())
        seat = desk.start("key", Call({}, b""), lambda _: None, landed, chat=True)
        await desk.aclose()
        await asyncio.wait_for(seat.settled(), 10)
        await asyncio.wait_for(seat.flight.over(), 10)
        assert seat.flight.done
        assert not len(desk)
        seat.leave()

    asyncio.run(story())
