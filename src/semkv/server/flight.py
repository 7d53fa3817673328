"""Single-flight: one upstream answer on its way to any number of callers.

A flight runs in a task of its own, so that the caller who started it may hang up while others read on. It is cancelled
when nobody is left. What has come in is kept until the end, so that later callers join from the start; beyond a bound
the flight stops being shared (and kept), and its readers get the rest through a small window with back-pressure.

Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from semkv.server.sse import Assembler, NotKeepable, Splitter, data_of, is_usage_only
from semkv.server.upstream import Call, Headers, Reply, Upstream, UpstreamError

log = logging.getLogger(__name__)

_WINDOW = 256 * 1024  # bytes held for the slowest reader once a flight is no longer shared


Begun = Callable[[int], None]
Landed = Callable[["Flight"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes as they came: an event of a stream, or a part of a body. ``usage``: the event brings the usage alone."""

    data: bytes
    usage: bool = False


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may be held in memory.

    Attributes:
        answer: bytes of one answer that is shared and kept.
        total: bytes of all answers on their way.
    """

    answer: int = 8 << 20
    total: int = 256 << 20


class Desk:
    """The flights on their way, by key.

    Args:
        upstream: who answers.
        bounds: memory bounds.
    """

    def __init__(self, upstream: Upstream, bounds: Bounds) -> None:
        self.upstream, self.bounds = upstream, bounds
        self.held = 0
        self._flights: dict[str, Flight] = {}
        self._running: set[Flight] = set()

    def __len__(self) -> int:
        return len(self._running)

    def join(self, key: str) -> Subscription | None:
        """A seat on the flight with this key, if one is running and shared."""
        flight = self._flights.get(key)
        if flight is None or not flight.shared:
            return None
        return flight.subscribe()

    def start(
        self, key: str, call: Call, begun: Begun, landed: Landed, *, chat: bool, shared: bool = True
    ) -> Subscription:
        """Send a request upstream.

        Args:
            key: what others may join it by.
            call: the request.
            begun: called with the answer's status, before its readers see it. It must not raise.
            landed: called once the answer is whole, before its readers get the end of it. It must not raise.
            chat: its stream has chat chunks.
            shared: others may join.
        """
        flight = Flight(self, key, call, begun, landed, chat=chat)
        self._running.add(flight)
        if shared:
            self._flights[key] = flight
        return flight.subscribe()

    def unshare(self, flight: Flight) -> None:
        """Nobody joins this flight any more."""
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def ended(self, flight: Flight) -> None:
        self._running.discard(flight)
        self.unshare(flight)

    async def aclose(self) -> None:
        """Cancel what is still running."""
        for flight in list(self._running):
            flight.cancel()


class Flight:
    """One answer. Readers use a `Subscription`; the fields below are for reading.

    Attributes:
        status: of the answer; 0 before it has begun.
        streamed: the answer is a stream of events.
        shared: it can still be joined, and will be whole in ``payload``.
        payload: JSON of the whole, non-streamed answer once ``done``; None where there is none.
        kept: the cache has it, and may serve it to others. Set by ``landed``.
        error: why it broke off.
        why_not: why a stream could not be put together.
    """

    def __init__(self, desk: Desk, key: str, call: Call, begun: Begun, landed: Landed, *, chat: bool) -> None:
        self.key, self.status = key, 0
        self.headers: Headers = []
        self.streamed = self.done = self.kept = False
        self.shared = True
        self.payload: bytes | None = None
        self.error: UpstreamError | None = None
        self.why_not = ""
        self._desk, self._call, self._begun, self._landed = desk, call, begun, landed
        self._assembler: Assembler | None = Assembler(chat=chat)
        self._pieces: list[Piece] = []
        self._first = 0  # number of the first piece that is still held
        self._held = 0
        self._readers: set[Subscription] = set()
        self._waiters: list[asyncio.Future[None]] = []
        self._task = asyncio.ensure_future(self._fly())

    # -- readers ------------------------------------------------------------------------------------------------

    def subscribe(self) -> Subscription:
        reader = Subscription(self)
        self._readers.add(reader)
        return reader

    def leave(self, reader: Subscription) -> None:
        self._readers.discard(reader)
        if not self._readers:
            if self.done:
                self._forget()
            else:
                self.cancel()
        else:
            self.wake()

    @property
    def keepable(self) -> bool:
        """Nothing has come in so far that forbids to keep the answer."""
        return self.shared and self.status in (0, 200) and self._assembler is not None

    @property
    def whole(self) -> bool:
        """It has ended with a complete answer."""
        return self.done and self.status == 200 and self.payload is not None

    async def over(self) -> None:
        """Wait until it has ended, in whatever way; keeps nothing alive."""
        await asyncio.wait((self._task,))

    def cancel(self) -> None:
        self.shared = False
        asyncio.get_running_loop().call_soon(self._task.cancel)  # after its first step, without which it has no end

    def piece(self, number: int) -> Piece | None:
        at = number - self._first
        return self._pieces[at] if at < len(self._pieces) else None

    def changed(self) -> asyncio.Future[None]:
        """Done when something has happened after this call."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def wake(self) -> None:
        """Let all who wait look again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def wake_writer(self) -> None:
        """A reader has moved on."""
        if not self.shared:
            self.wake()

    # -- the flight ---------------------------------------------------------------------------------------------

    async def _fly(self) -> None:
        reply: Reply | None = None
        try:
            reply = await self._desk.upstream.send(self._call)
            # Whoever joins gets the same headers, and a cookie is one client's alone.
            self.headers = [(k, v) for k, v in reply.headers if k != b"set-cookie"]
            self.status = reply.status
            self._begun(self.status)
            said = dict(reply.headers)
            events = said.get(b"content-type", b"").lower().startswith(b"text/event-stream")
            self.streamed = events and b"content-encoding" not in said  # what is compressed passes as it is
            self.wake()
            await (self._read_stream(reply) if self.streamed else self._read_body(reply))
        except UpstreamError as error:
            self.error = error
        except asyncio.CancelledError:  # nobody is left, or the gateway stops
            self.error = UpstreamError("cancelled", 503)
        except Exception as error:
            log.exception("a flight failed")
            self.error = UpstreamError(f"the gateway failed: {type(error).__name__}")
        finally:
            self.done = True
            self._desk.ended(self)
            self.wake()
            if not self._readers:
                self._forget()
            if reply is not None:
                await reply.aclose()

    async def _read_body(self, reply: Reply) -> None:
        async for data in reply.pieces():
            await self._take(Piece(data))
        if self.shared:
            self.payload = b"".join(piece.data for piece in self._pieces)
            await self._landed(self)

    async def _read_stream(self, reply: Reply) -> None:
        splitter = Splitter()
        async for data in reply.pieces():
            for event in splitter.feed(data):
                await self._take_event(event)
            if len(splitter.rest) > self._desk.bounds.answer:
                raise UpstreamError("the upstream sent an event without end")
        if self.payload is None:
            self.why_not = self.why_not or "cut off"
        if splitter.rest.strip():
            await self._take(Piece(splitter.rest))

    async def _take_event(self, event: bytes) -> None:
        data = data_of(event)
        usage = False
        if self._assembler is not None and data:
            try:
                chunk = self._assembler.add(data)
                usage = is_usage_only(chunk)
                if not chunk:  # [DONE]: keep the answer before anybody has the whole of it
                    self.payload = json.dumps(self._assembler.answer(), separators=(",", ":")).encode()
                    await self._landed(self)
            except NotKeepable as reason:
                self.why_not, self._assembler = str(reason), None
        elif data != b"[DONE]" and b'"usage"' in data:
            usage = is_usage_only_event(data)
        await self._take(Piece(event, usage))

    async def _take(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._held += len(piece.data)
        self._desk.held += len(piece.data)
        self.wake()
        bounds = self._desk.bounds
        if self.shared and (self._held > bounds.answer or self._desk.held > bounds.total):
            self.shared, self._assembler = False, None
            self._desk.unshare(self)
        while not self.shared and self._held > _WINDOW:
            self._trim()
            if self._held > _WINDOW:
                await self.changed()

    def _trim(self) -> None:
        """Drop the pieces that every reader has had."""
        passed = min((reader.position for reader in self._readers), default=0) - self._first
        if passed > 0:
            gone = sum(len(piece.data) for piece in self._pieces[:passed])
            del self._pieces[:passed]
            self._first += passed
            self._held -= gone
            self._desk.held -= gone

    def _forget(self) -> None:
        self._desk.held -= self._held
        self._held = 0
        self._pieces = []


def is_usage_only_event(data: bytes) -> bool:
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(chunk, dict) and is_usage_only(chunk)


class Subscription:
    """One caller's view of a flight, from its start. Must be left (`leave`), once or more often."""

    def __init__(self, flight: Flight) -> None:
        self.flight = flight
        self.position = 0

    @property
    def alone(self) -> bool:
        """Whether a flight would be cut off if this reader left."""
        return not self.flight.done and self.flight._readers == {self}

    def leave(self) -> None:
        """Hang up; the flight is cancelled when nobody is left."""
        if self in self.flight._readers:
            self.flight.leave(self)

    async def aclose(self) -> None:
        """The same, as what an `Answer` closes."""
        self.leave()

    async def begun(self) -> None:
        """Wait for status and headers.

        Raises:
            UpstreamError: there will be none.
        """
        while not self.flight.status and not self.flight.done:
            await self.flight.changed()
        if self.flight.error is not None and not self.flight.status:
            raise self.flight.error

    async def flows(self) -> bool:
        """Wait for the first bytes; whether they begin a stream that goes on, and may be kept as far as it has come."""
        flight = self.flight
        while not flight.done and flight.piece(self.position) is None:
            await flight.changed()
        return flight.streamed and flight.keepable and not flight.done

    async def decided(self) -> None:
        """Wait until the answer is kept, or known not to be."""
        while not self.flight.done and self.flight.keepable:
            await self.flight.changed()

    async def settled(self) -> None:
        """Wait until the answer is whole, or known to be too large to be held."""
        while not self.flight.done and self.flight.shared:
            await self.flight.changed()

    async def whole_before(self, other: asyncio.Future[Any]) -> bool:
        """Wait until the answer is whole or ``other`` is done, which goes on either way; whether it was the answer."""
        flight = self.flight
        other.add_done_callback(lambda _: flight.wake())
        while not other.done() and not flight.whole:
            await flight.changed()
        return not other.done()

    async def pieces(self) -> AsyncIterator[Piece]:
        """What has come in and what comes.

        Raises:
            UpstreamError: it broke off.
        """
        flight = self.flight
        while True:
            piece = flight.piece(self.position)
            if piece is not None:
                self.position += 1
                flight.wake_writer()
                yield piece
            elif flight.done:
                break
            else:
                await flight.changed()
        if flight.error is not None:
            raise flight.error
