"""Single flight: one upstream answer on its way to any number of readers.

The answer comes in through a task of its own, so that the caller who asked first may hang up while others read on. The
task is canceled when no reader is left. Everything that came in is held until the end, so that later readers start at
the beginning. Beyond a bound the answer is no longer shared (nor stored), and its readers get the rest through a small
window with back-pressure.

Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from semkv.server.sse import Assembler, NotKeepable, Splitter, data_of, event, is_usage_only
from semkv.server.upstream import Headers, Reply, UpstreamError

log = logging.getLogger(__name__)

_WINDOW_BYTES = 256 * 1024  # held for the slowest reader once an answer is no longer shared


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes as they came: an event of a stream, or a part of a body. ``usage``: the event holds only the usage."""

    data: bytes
    usage: bool = False


class SingleFlight:
    """The answers on their way, by the key of their request.

    Args:
        max_answer_bytes: of one answer that is shared and stored.
        max_total_bytes: of all answers on their way; beyond it new bytes end the sharing of the answer they belong to.
    """

    def __init__(self, *, max_answer_bytes: int = 8 << 20, max_total_bytes: int = 256 << 20) -> None:
        self.max_answer_bytes, self.max_total_bytes = max_answer_bytes, max_total_bytes
        self.held_bytes = 0
        self.running: set[InFlight] = set()
        self._shared: dict[str, InFlight] = {}

    def join(self, key: str) -> Reader | None:
        """A reader of the answer with this key, if one is on its way and shared."""
        flight = self._shared.get(key)
        return None if flight is None or not flight.shared else flight.reader()

    def start(self, flight: InFlight, *, shared: bool = True) -> Reader:
        """Ask the upstream; with ``shared`` others may join by the key."""
        self.running.add(flight)
        if shared:
            self._shared[flight.key] = flight
        return flight.reader()

    def is_shared(self, flight: InFlight) -> bool:
        """Whether others may join this one."""
        return self._shared.get(flight.key) is flight

    def unshare(self, flight: InFlight) -> None:
        """Let no new reader join."""
        if self.is_shared(flight):
            del self._shared[flight.key]

    def close(self) -> None:
        """Cancel what is still running."""
        for flight in list(self.running):
            flight.cancel()


class InFlight:
    """One answer on its way. It comes in from the next step of the event loop on.

    Args:
        flights: where it is started.
        key: others join by it.
        send: sends the request.
        on_status: called with the answer's status before its readers see it. It must not raise.
        on_whole: awaited once the answer is whole, before its readers get the end of it. It must not raise.
        chat: a streamed answer has chat chunks.

    Attributes:
        status: of the answer; 0 before it has begun.
        headers: of the answer, without cookies.
        streamed: the answer is a stream of events.
        shared: it can still be joined, and will be whole in ``payload``.
        done: it has ended, in whatever way.
        payload: JSON of the whole answer; None where there is none (yet).
        stored: the cache has it and may serve it to others. Set by ``on_whole``.
        error: why it broke off.
        readers: its readers.
        task: brings it; over once everything is settled.
    """

    def __init__(
        self,
        flights: SingleFlight,
        key: str,
        send: Callable[[], Awaitable[Reply]],
        on_status: Callable[[int], None],
        on_whole: Callable[[InFlight], Awaitable[None]],
        *,
        chat: bool,
    ) -> None:
        self.key, self.status = key, 0
        self.headers: Headers = []
        self.streamed = self.done = self.stored = False
        self.shared = True
        self.payload: bytes | None = None
        self.error: UpstreamError | None = None
        self.readers: set[Reader] = set()
        self._flights, self._send, self._on_status, self._on_whole = flights, send, on_status, on_whole
        self._assembler: Assembler | None = Assembler(chat=chat)
        self._chunks: list[Chunk] = []
        self._first = 0  # number of the first chunk that is still held
        self._held_bytes = 0
        self._change = asyncio.Event()
        self.task = asyncio.ensure_future(self._run())

    # -- for readers --------------------------------------------------------------------------------------------

    def reader(self) -> Reader:
        """A new reader, from the start."""
        reader = Reader(self)
        self.readers.add(reader)
        return reader

    @property
    def storable(self) -> bool:
        """Nothing has come in so far that forbids to store the answer."""
        return self.shared and self.status in (0, 200) and self._assembler is not None

    @property
    def whole(self) -> bool:
        """It has ended with a complete answer."""
        return self.done and self.status == 200 and self.payload is not None

    def chunk(self, number: int) -> Chunk | None:
        """A chunk that is held, by its number from the start."""
        at = number - self._first
        return self._chunks[at] if at < len(self._chunks) else None

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition on this answer holds, or it has ended."""
        while not self.done and not condition():
            await self._change.wait()

    def wake(self) -> None:
        """Let everybody who waits look again."""
        change, self._change = self._change, asyncio.Event()
        change.set()

    def remove_reader(self, reader: Reader) -> None:
        """Cancel the answer when its last reader leaves."""
        self.readers.discard(reader)
        if self.readers:
            self.wake()  # the slowest may have been this one
        elif self.done:
            self._drop_chunks()
        else:
            self.cancel()

    def cancel(self) -> None:
        self.shared = False
        asyncio.get_running_loop().call_soon(self.task.cancel)  # a task canceled before its first step never ends

    # -- the task -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        reply: Reply | None = None
        try:
            reply = await self._send()
            # Every reader gets the same headers, and a cookie belongs to one client.
            self.headers = [(k, v) for k, v in reply.headers if k != b"set-cookie"]
            self.status = reply.status
            self._on_status(self.status)
            named = dict(reply.headers)
            events = named.get(b"content-type", b"").lower().startswith(b"text/event-stream")
            self.streamed = events and b"content-encoding" not in named  # compressed streams pass as they are
            self.wake()
            await (self._read_stream(reply) if self.streamed else self._read_body(reply))
        except UpstreamError as error:
            self.error = error
        except asyncio.CancelledError:  # no reader is left, or the gateway stops
            self.error = UpstreamError("cancelled", 503)
        except Exception as error:
            log.exception("an upstream request failed")
            self.error = UpstreamError(f"the gateway failed: {type(error).__name__}")
        finally:
            self.done = True
            self._flights.running.discard(self)
            self._flights.unshare(self)
            self.wake()
            if not self.readers:
                self._drop_chunks()
            if reply is not None:
                await reply.aclose()

    async def _read_body(self, reply: Reply) -> None:
        async for data in reply.pieces():
            await self._take(Chunk(data))
        if self.shared:
            self.payload = b"".join(chunk.data for chunk in self._chunks)
            await self._on_whole(self)

    async def _read_stream(self, reply: Reply) -> None:
        splitter = Splitter()
        async for data in reply.pieces():
            for one in splitter.feed(data):
                await self._take_event(one)
            if len(splitter.rest) > self._flights.max_answer_bytes:
                raise UpstreamError("the upstream sent an event without end")
        if splitter.rest.strip():
            await self._take(Chunk(splitter.rest))

    async def _take_event(self, raw: bytes) -> None:
        data, usage = data_of(raw), False
        if self._assembler is not None and data:
            try:
                chunk = self._assembler.add(data)
                usage = is_usage_only(chunk)
                if not chunk:  # [DONE]: store the answer before anybody has the whole of it
                    self.payload = json.dumps(self._assembler.answer(), separators=(",", ":")).encode()
                    await self._on_whole(self)
            except NotKeepable as reason:
                log.debug("a stream is not stored: %s", reason)
                self._assembler = None
        elif data != b"[DONE]" and b'"usage"' in data:
            usage = _has_only_usage(data)
        await self._take(Chunk(raw, usage))

    async def _take(self, chunk: Chunk) -> None:
        flights, size = self._flights, len(chunk.data)
        self._chunks.append(chunk)
        self._held_bytes += size
        flights.held_bytes += size
        self.wake()
        too_large = self._held_bytes > flights.max_answer_bytes or flights.held_bytes > flights.max_total_bytes
        if self.shared and too_large:
            self.shared, self._assembler = False, None
            flights.unshare(self)
        while not self.shared and self._held_bytes > _WINDOW_BYTES:
            self._drop_read_chunks()
            if self._held_bytes > _WINDOW_BYTES:
                await self._change.wait()

    def _drop_read_chunks(self) -> None:
        """Drop the chunks that every reader has had."""
        read = min((reader.position for reader in self.readers), default=0) - self._first
        if read > 0:
            gone = sum(len(chunk.data) for chunk in self._chunks[:read])
            del self._chunks[:read]
            self._first += read
            self._held_bytes -= gone
            self._flights.held_bytes -= gone

    def _drop_chunks(self) -> None:
        self._flights.held_bytes -= self._held_bytes
        self._held_bytes = 0
        self._chunks = []


class Reader:
    """One caller's place in an answer. It must be left (`leave`), once or more often."""

    def __init__(self, flight: InFlight) -> None:
        self.flight = flight
        self.position = 0

    @property
    def is_last(self) -> bool:
        """Whether the upstream request would be canceled if this reader left."""
        return not self.flight.done and self.flight.readers == {self}

    def leave(self) -> None:
        """Hang up; the upstream request is canceled when no reader is left."""
        if self in self.flight.readers:
            self.flight.remove_reader(self)

    async def aclose(self) -> None:
        """The same; for `semkv.server.asgi.Answer`."""
        self.leave()

    async def data(self) -> AsyncIterator[bytes]:
        """The answer as it comes in. Raises as `chunks` does."""
        async for chunk in self.chunks():
            yield chunk.data

    async def events(self, *, include_usage: bool) -> AsyncIterator[bytes]:
        """A stream as one client sees it; a break becomes an error event, since the status is long sent."""
        try:
            async for chunk in self.chunks():
                if include_usage or not chunk.usage:
                    yield chunk.data
        except UpstreamError as error:
            details = {"message": str(error), "type": "upstream_error", "param": None, "code": error.status}
            yield event({"error": details})

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Everything that came in and comes.

        Raises:
            UpstreamError: it broke off.
        """
        flight = self.flight
        while True:
            await flight.until(lambda: flight.chunk(self.position) is not None)
            chunk = flight.chunk(self.position)
            if chunk is None:
                break
            self.position += 1
            if not flight.shared:
                flight.wake()  # there may be room for more
            yield chunk
        if flight.error is not None:
            raise flight.error


def _has_only_usage(data: bytes) -> bool:
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(chunk, dict) and is_usage_only(chunk)
