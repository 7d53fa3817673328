"""Requests in flight: equal ones share one upstream answer.

`SingleFlight` holds one upstream answer for any number of readers. It comes in through a task of its own, so that the
caller who asked first may hang up while others read on; the task is canceled when no reader is left. Everything that
came in is held until the end, so that later readers start at the beginning. Beyond a bound the answer is no longer
shared (nor stored), and its readers get the rest through a small window with back-pressure.

Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from semkv_gateway.http import Headers, Reply, UpstreamError, error_of, is_event_stream
from semkv_gateway.sse import (
    Assembler,
    NotKeepable,
    Recorder,
    Splitter,
    data_of,
    is_usage_only,
    read_chunk,
)

log = logging.getLogger(__name__)

_WINDOW_BYTES = 256 * 1024  # held for the slowest reader once an answer is no longer shared
_BEHIND_S = 5.0  # for which others wait for the slowest one then, before it is cut


class SingleFlight:
    """The answers on their way, by the key of their request. ``on_fault`` counts faults by the part that failed,
    ``on_unkept`` answers that cannot be kept by the reason.

    Attributes:
        max_answer_bytes: of one answer that is shared and stored.
        max_total_bytes: of all answers on their way; beyond it new bytes end the sharing of the answer they belong to.
    """

    max_answer_bytes = 8 << 20
    max_total_bytes = 256 << 20

    def __init__(self, on_fault: Callable[[str], None], on_unkept: Callable[[str], None]) -> None:
        self.on_fault = on_fault
        self.on_unkept = on_unkept
        self.held_bytes = 0
        self.running: set[InFlight] = set()
        self._shared: dict[str, InFlight] = {}

    def join(self, key: str) -> Reader | None:
        """A reader of the answer with this key, if one is on its way and shared."""
        flight = self._shared.get(key)
        return None if flight is None or not flight.shared else flight.reader(joined=True)

    def start(self, flight: InFlight, *, shared: bool = True) -> Reader:
        """Let an answer come in; with ``shared`` others may join by its key."""
        self.running.add(flight)
        if shared:
            self._shared[flight.key] = flight
        return flight.reader()

    def unshare(self, flight: InFlight) -> None:
        """Let no new reader join."""
        if self._shared.get(flight.key) is flight:
            del self._shared[flight.key]

    def close(self) -> None:
        """Cancel what is still running."""
        for flight in list(self.running):
            flight.cancel()


class InFlight:
    """One answer on its way. It comes in from the next step of the event loop on. A class of it says how the answer is
    asked for: `send`, `on_head` and `on_whole`.

    Args:
        flights: where it is started.
        key: others join by it.
        stream: reads a streamed answer.
    """

    async def send(self) -> Reply:
        """Send the request."""
        raise NotImplementedError

    def on_head(self, status: int, headers: Headers) -> str:
        """Called before readers see the answer's status and headers. Says why the answer may go to nobody but who asked
        for it; empty where it may."""
        return ""

    async def on_whole(self) -> None:
        """Awaited once the answer is whole, before its readers get the end of it. It sets ``stored``."""

    def __init__(self, flights: SingleFlight, key: str, stream: Assembler | Recorder) -> None:
        self.key = key
        self.status = 0  # 0 before the answer has begun
        self.headers: Headers = []  # without cookies: every reader gets the same, and a cookie belongs to one client
        self.refused = ""  # what `on_head` said
        self.streamed = False  # it is a stream of events
        self.shared = True  # it can still be joined, and will be whole in `payload`
        self.stored = False  # the cache has it and may serve it to others
        self.done = False  # it has ended, in whatever way
        self.payload: bytes | None = None  # the whole answer, as it is stored
        self.verbatim = (
            False  # `payload` is the events of a stream as they came: there is no other form of it
        )
        self.error: UpstreamError | None = None  # why it broke off
        self.readers: set[Reader] = set()
        self._flights = flights
        self._reading: Assembler | Recorder | None = stream  # None once it cannot be kept
        self._error_event = stream.broken
        self._chunks: list[bytes] = []  # as they came: events of a stream, or parts of a body
        self._first = 0  # number of the first chunk that is still held
        self._usage: set[int] = set()  # numbers of the events that hold only the usage
        self._held_bytes = 0
        self._change = asyncio.Event()
        self.task = asyncio.ensure_future(self._run())  # over once everything is settled

    # -- for readers --------------------------------------------------------------------------------------------

    def reader(self, *, joined: bool = False) -> Reader:
        """A new reader, from the start."""
        reader = Reader(self, joined)
        self.readers.add(reader)
        return reader

    @property
    def storable(self) -> bool:
        """Nothing has come in so far that forbids to store the answer, or to make its other form."""
        if not self.shared or self.refused or self.status not in (0, 200):
            return False
        return self._reading is not None and self._reading.understood

    @property
    def whole(self) -> bool:
        """The complete answer is there."""
        return self.status == 200 and self.payload is not None

    def chunk(self, number: int) -> bytes | None:
        """A chunk that is held, by its number from the start."""
        at = number - self._first
        return self._chunks[at] if at < len(self._chunks) else None

    def is_usage(self, number: int) -> bool:
        """Whether a chunk is an event that holds only the usage."""
        return number in self._usage

    def broken(self, error: UpstreamError) -> bytes:
        """The event that says why it broke off."""
        return self._error_event(**error_of(error.status, str(error), "upstream_error"))

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition on this answer holds, or it has ended."""
        while not self.done and not condition():
            await self._change.wait()

    def wake(self) -> None:
        """Let everybody who waits look again."""
        change = self._change
        self._change = asyncio.Event()
        change.set()

    def remove_reader(self, reader: Reader) -> None:
        """Cancel the answer when its last reader leaves."""
        self.readers.discard(reader)
        if self.readers:
            self.wake()  # the slowest may have been this one
        elif self.done:
            self._drop_chunks(len(self._chunks))
        else:
            self.cancel()

    def cancel(self) -> None:
        self.shared = False
        # A task canceled before its first step never ends.
        asyncio.get_running_loop().call_soon(self.task.cancel)

    # -- the task -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        reply: Reply | None = None
        try:
            reply = await self.send()
            self.headers = [(k, v) for k, v in reply.headers if k != b"set-cookie"]
            self.refused = self.on_head(reply.status, reply.headers)
            if self.refused:
                self._flights.unshare(self)
            self.status = reply.status
            self.streamed = is_event_stream(reply.headers)
            self.wake()
            await (self._read_stream(reply) if self.streamed else self._read_body(reply))
        except UpstreamError as error:
            self.error = error
        except asyncio.CancelledError:  # no reader is left, or the gateway stops
            self.error = UpstreamError("the gateway stops", 503)
        except Exception as error:
            log.exception("an upstream request failed")
            self.error = UpstreamError(f"the gateway failed: {type(error).__name__}")
        finally:
            self.done = True
            self._flights.running.discard(self)
            self._flights.unshare(self)
            self.wake()
            if not self.readers:
                self._drop_chunks(len(self._chunks))
            if reply is not None:
                await reply.aclose()

    async def _read_body(self, reply: Reply) -> None:
        async for data in reply.pieces():
            await self._take(data)
        if self.shared:
            await self._keep(b"".join(self._chunks))

    async def _read_stream(self, reply: Reply) -> None:
        splitter = Splitter()
        async for data in reply.pieces():
            for raw in splitter.feed(data):
                if await self._read_event(raw):
                    self._usage.add(self._first + len(self._chunks))
                await self._take(raw)
            if len(splitter.rest) > self._flights.max_answer_bytes:
                raise UpstreamError("the upstream sent an event without end")
        if splitter.rest.strip():
            await self._take(bytes(splitter.rest))
        if self._reading is not None and self.payload is None:
            self._flights.on_unkept("stream without end")

    async def _read_event(self, raw: bytes) -> bool:
        """Put one event to the others; whether it holds only the usage. A fault costs the storing alone."""
        reading = self._reading if self.payload is None else None
        chunk = read_chunk(data_of(raw)) if reading is not None or b'"usage"' in raw else None
        try:
            if reading is not None and reading.take(raw, chunk):
                whole = reading.whole()
                self.verbatim = whole is None
                await self._keep(b"".join((*self._chunks, raw)) if whole is None else whole)
        except NotKeepable as error:
            self._reading = None
            self._flights.on_unkept(str(error))
        except Exception:
            self._reading = None
            log.exception("a stream cannot be read")
            self._flights.on_fault("stream")
        return chunk is not None and is_usage_only(chunk)

    async def _keep(self, payload: bytes) -> None:
        """Store the whole answer before anybody has the end of it."""
        self.payload = payload
        try:
            await self.on_whole()
        except Exception:  # readers get the answer all the same
            log.exception("an answer is not stored")
            self._flights.on_fault("store")

    async def _take(self, chunk: bytes) -> None:
        flights = self._flights
        size = len(chunk)
        self._chunks.append(chunk)
        self._held_bytes += size
        flights.held_bytes += size
        self.wake()
        too_large = (
            self._held_bytes > flights.max_answer_bytes
            or flights.held_bytes > flights.max_total_bytes
        )
        if self.shared and too_large:
            self.shared = False
            self._reading = None
            flights.unshare(self)
            flights.on_unkept("too large")
        while not self.shared and self._held_bytes > _WINDOW_BYTES:
            # Without readers all goes: a cancellation may have been lost, as in `asyncio.wait_for` of Python 3.11.
            whole = self._first + len(self._chunks)
            self._drop_chunks(
                min((reader.position for reader in self.readers), default=whole) - self._first
            )
            if self._held_bytes > _WINDOW_BYTES and not await self._moves():
                self._cut_slowest(whole)

    async def _moves(self) -> bool:
        """Wait until there may be room; False where nothing has moved for a while."""
        try:
            async with asyncio.timeout(_BEHIND_S):
                await self._change.wait()
        except TimeoutError:
            return False
        return True

    def _cut_slowest(self, whole: int) -> None:
        """Let go of the readers that are behind, where others have read all there is and wait for them."""
        if any(reader.position >= whole for reader in self.readers):
            for reader in [reader for reader in self.readers if reader.position < whole]:
                reader.is_cut = True
                self.readers.discard(reader)
            self.wake()

    def _drop_chunks(self, count: int) -> None:
        """Drop the first ones of those that are held."""
        if count > 0:
            size = sum(map(len, self._chunks[:count]))
            del self._chunks[:count]
            self._usage.difference_update(range(self._first, self._first + count))
            self._first += count
            self._held_bytes -= size
            self._flights.held_bytes -= size


class Reader:
    """One caller's place in an answer. It must be left (`leave`), once or more often. ``joined``: others asked."""

    def __init__(self, flight: InFlight, joined: bool) -> None:
        self.flight = flight
        self.joined = joined
        self.position = 0
        self.is_cut = False  # others were waiting for it

    def leave(self) -> None:
        """Hang up; the upstream request is canceled when no reader is left."""
        if self in self.flight.readers:
            self.flight.remove_reader(self)

    async def aclose(self) -> None:
        """The same, for an `Answer`."""
        self.leave()

    async def pieces(self, *, usage: bool = True) -> AsyncIterator[bytes]:
        """The answer as it comes in, with or without the event that holds only the usage. A stream that breaks off ends
        with an error event, since its status is long sent; any other answer with `UpstreamError`."""
        flight = self.flight
        while not self.is_cut:
            await flight.until(lambda: flight.chunk(self.position) is not None)
            chunk = None if self.is_cut else flight.chunk(self.position)
            if chunk is None:
                break
            is_wanted = usage or not flight.is_usage(self.position)
            self.position += 1
            if not flight.shared:
                flight.wake()  # there may be room for more
            if is_wanted:
                yield chunk
        error = UpstreamError("the client reads too slowly", 503) if self.is_cut else flight.error
        if error is not None:
            if not flight.streamed:
                raise error
            yield flight.broken(error)
