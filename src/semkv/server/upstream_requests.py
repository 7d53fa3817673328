"""What goes upstream, and what becomes of the answers: stored, recorded, compared."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from semkv.server.cache_client import CacheClient, Lookup
from semkv.server.metrics import Metrics
from semkv.server.pending import Pending, PendingRequests
from semkv.server.recent_hits import RecentHits
from semkv.server.request_key import CanonicalRequest
from semkv.server.singleflight import InFlight, Reader, SingleFlight
from semkv.server.tenancy import Client, Controls, Tenants
from semkv.server.upstream import Call, Reply, Upstream
from semkv.tiers.response import Found
from semkv.types import ReuseReport

log = logging.getLogger(__name__)

ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
LARGE = 64 * 1024  # bytes of a body that is parsed and written in a thread

_CHECKS = 4  # unchanged requests run for checking at once
_ENDING_S = 5.0  # how long background work may go on at the end
_RECORD_DELAY_S = 0.005  # a record shares the interpreter with the answer that goes out and the next request
_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(slots=True)
class GatewayRequest:
    """A request that has a key.

    Attributes:
        call: as it came.
        canonical: its canonical form.
        controls: what the client asked of the cache.
        client: who asks.
        may_read: the upstream has let this client in before, and the answer is not to be drawn at random.
        start: when it was there, by `time.perf_counter`.
        reader: of the upstream answer that it waits for, if any.
        joined: that answer was asked for by another request.
    """

    call: Call
    canonical: CanonicalRequest
    controls: Controls
    client: Client
    may_read: bool
    start: float
    reader: Reader | None = None
    joined: bool = False

    @property
    def reads(self) -> bool:
        """A stored answer would do."""
        return self.controls.read and self.may_read

    @property
    def shared(self) -> bool:
        """An answer that is on its way to another request would do, and the other way round."""
        return self.reads and self.controls.write

    @property
    def large(self) -> bool:
        return len(self.call.body) > LARGE

    def accepts(self, found: Found) -> bool:
        """Whether a stored answer is fresh enough for the client."""
        oldest = self.controls.max_age_s
        return self.reads and (oldest is None or (found.age_s <= oldest and not found.stale))

    def take(self, reader: Reader, *, joined: bool) -> None:
        """Wait for an upstream answer."""
        self.reader, self.joined = reader, joined

    def leave(self) -> None:
        """Wait for no upstream answer."""
        if self.reader is not None:
            self.reader.leave()
        self.reader, self.joined = None, False


class UpstreamRequests:
    """Starts upstream requests, and works on in the background.

    Args:
        upstream: answers them.
        cache: stores and records the answers.
        tenants: learn from the status of each answer whom the upstream lets in.
        recent_hits, metrics: where everything is noted.
        max_answer_bytes: larger answers are neither shared nor stored.
    """

    def __init__(
        self,
        upstream: Upstream,
        cache: CacheClient,
        tenants: Tenants,
        recent_hits: RecentHits,
        metrics: Metrics,
        max_answer_bytes: int,
    ) -> None:
        self.flights = SingleFlight(max_answer_bytes=max_answer_bytes)
        self.pending = PendingRequests(cache)
        self.background: set[asyncio.Task[None]] = set()
        self._upstream, self._cache, self._tenants = upstream, cache, tenants
        self._recent_hits, self._metrics = recent_hits, metrics
        self._checks = 0

    def flight_key(self, canonical: CanonicalRequest) -> str:
        """After an invalidation nobody joins a flight that began before it."""
        return f"{canonical.key} {self._cache.responses.begin()}"

    def join(self, request: GatewayRequest, canonical: CanonicalRequest) -> bool:
        """Whether an equal request is on its way, which this one joins."""
        reader = self.flights.join(self.flight_key(canonical)) if request.shared else None
        if reader is not None:
            request.take(reader, joined=True)
        return reader is not None

    def start(
        self, request: GatewayRequest, canonical: CanonicalRequest, *, stream: bool | None = None, shared: bool = True
    ) -> None:
        """Send a request upstream; equal ones may join from here on.

        Args:
            request: for whom; it waits for the answer.
            canonical: what is asked.
            stream: ask for a stream; as the client did where not given.
            shared: whether others may join, where the client allows it.
        """
        started, since = time.perf_counter(), self._cache.responses.begin()
        stream = canonical.stream if stream is None else stream
        raw = b"" if request.large else _body(canonical, stream=stream)

        async def send() -> Reply:
            body = raw or await asyncio.to_thread(_body, canonical, stream=stream)
            return await self._upstream.send(request.call.with_body(body))

        async def on_whole(flight: InFlight) -> None:
            try:
                seconds = time.perf_counter() - started
                self._metrics.upstream(seconds)
                if flight.status == 200 and flight.payload is not None:
                    self._recent_hits.computed(canonical.key, seconds)
                    if request.controls.write:
                        flight.stored = await self._cache.store(canonical, flight.payload, since)
            except Exception:  # the client gets its answer all the same
                log.exception("an answer is not stored")
                self._metrics.fault("store")

        key, on_status = self.flight_key(canonical), partial(self._tenants.answered, request.client)
        chat = ENDPOINTS[request.call.scope["path"]] == "chat"
        flight = InFlight(self.flights, key, send, on_status, on_whole, chat=chat)
        request.take(self.flights.start(flight, shared=shared and request.shared), joined=False)

    # -- recording and checking, in the background ----------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something in the background; a fault in it is counted."""
        task = asyncio.ensure_future(work)
        self.background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", exc_info=error)
            self._metrics.fault("background")

    def record_soon(
        self,
        request: GatewayRequest,
        lookup: Lookup,
        looking: asyncio.Future[Lookup] | None,
        pending: Pending | None = None,
    ) -> None:
        """Record what the request just started brings; from here on near-repeats may join it.

        Args:
            request: waits for the answer.
            lookup: whose canonical request' was sent.
            looking: the lookup of the request.
            pending: the request, where it was made before.
        """
        assert request.reader is not None
        if self._cache.semantic is None or looking is None or (looking.done() and looking.result().report is None):
            return
        flight = request.reader.flight
        pending = pending or Pending(self._cache, lookup.canonical)
        if self.flights.is_shared(flight):
            self.pending.add(pending, flight, looking)
        self.spawn(self._record(request, lookup.canonical, flight, looking, pending))

    async def _record(
        self,
        request: GatewayRequest,
        canonical: CanonicalRequest,
        flight: InFlight,
        looking: asyncio.Future[Lookup],
        pending: Pending,
    ) -> None:
        """Tell the semantic cache what was computed; until then near-repeats find the request itself."""
        payload: bytes | None = None
        try:
            await asyncio.wait((looking,))
            report = looking.result().report
            if report is not None and looking.result().canonical.key != canonical.key:
                report = report.unused()  # the donor that was found had no part in what was asked
            await asyncio.wait((flight.task,))
            await asyncio.sleep(_RECORD_DELAY_S)
            if flight.status == 200 and request.controls.write and (flight.stored or canonical.sampled):
                payload = flight.payload
            if report is not None and payload is not None:
                await self._cache.record(report, payload, canonical.model)
        finally:
            if pending.flight is not None:
                self.pending.remove(pending)
        if payload is not None and flight.stored and report is not None and report.plan.substituted:
            self.check_soon(request, report, payload)  # of a donor's prompt, whose answer was not there anymore

    def refresh(self, request: GatewayRequest, canonical: CanonicalRequest) -> None:
        """Fetch a fresh answer in place of a stale one: what is on its way already goes on for it."""
        background = replace(request, reader=None)
        self.join(background, canonical)

        async def fetch() -> None:
            await self._fetch(background, canonical)

        self.spawn(fetch())

    def check_soon(self, request: GatewayRequest, report: ReuseReport | None, given: bytes) -> None:
        """Run the unchanged request of an approximate hit, if it is selected and not too many are running.

        Args:
            request: the request.
            report: of the hit.
            given: the answer that it brought.
        """
        if report is not None and self._checks < _CHECKS and self._cache.should_check(report):
            self._checks += 1
            self.spawn(self._check(replace(request, reader=None), report, given))

    async def _check(self, request: GatewayRequest, report: ReuseReport, given: bytes) -> None:
        """Compare the unchanged request's own answer with the one that was given, to know how often they differ."""
        try:
            own = await self._fetch(request, request.canonical)
        finally:
            self._checks -= 1
        if own is not None:
            await self._cache.check(report, own, given)

    async def _fetch(self, request: GatewayRequest, canonical: CanonicalRequest) -> bytes | None:
        """The upstream's answer to a request, stored on the way; None where there is none."""
        if request.reader is None and not self.join(request, canonical):
            self.start(request, canonical, stream=False)
        assert request.reader is not None
        flight = request.reader.flight
        try:
            await flight.until(lambda: not flight.shared)
            return flight.payload if flight.status == 200 else None
        finally:
            request.leave()

    async def aclose(self) -> None:
        """Stop upstream requests, and give background work a little time."""
        self.flights.close()
        if self.background:
            await asyncio.wait(self.background, timeout=_ENDING_S)


def _body(canonical: CanonicalRequest, *, stream: bool) -> bytes:
    """What is sent upstream."""
    body = canonical.body()
    body.pop("stream_options", None)
    body["stream"] = stream
    if stream:  # the usage is part of the whole answer; a client that did not ask for it does not see it
        body["stream_options"] = {"include_usage": True}
    return _encode(body).encode()
