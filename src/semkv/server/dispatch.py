"""What goes upstream, and what becomes of the answers: kept, recorded, compared."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any

from semkv.server.admission import Tenants
from semkv.server.asked import Asked
from semkv.server.caches import Caches, Resolution
from semkv.server.canonical import CanonicalRequest
from semkv.server.flight import Desk, Flight, Subscription
from semkv.server.journal import Journal
from semkv.server.metrics import Metrics
from semkv.server.paraphrases import Newcomer, Paraphrases
from semkv.tiers.underway import Underway
from semkv.types import ReuseReport

log = logging.getLogger(__name__)

LARGE = 64 * 1024  # bytes of a body that is parsed and written in a thread
_CHECKS = 4  # unchanged requests run for checking at once
_ENDING_S = 5.0  # how long background work may go on at the end
_encode = json.JSONEncoder(separators=(",", ":")).encode
_STAND_BACK_S = 0.005  # before a record: it shares the interpreter with the answer that goes out and what comes next


class Dispatch:
    """Starts flights and works on in the background.

    Args:
        desk: the flights.
        caches: keep and record answers.
        tenants: are told whom the upstream lets in: whoever asked it, and nobody who joined.
        journal, metrics: where everything is noted.
    """

    def __init__(self, desk: Desk, caches: Caches, tenants: Tenants, journal: Journal, metrics: Metrics) -> None:
        self.desk, self.paraphrases = desk, Paraphrases(caches)
        self._caches, self._tenants, self._journal, self._metrics = caches, tenants, journal, metrics
        self._background: set[asyncio.Task[None]] = set()
        self._checks = 0

    # -- going upstream -----------------------------------------------------------------------------------------

    def _key(self, canonical: CanonicalRequest) -> str:
        """What a flight is joined by: after an invalidation none that began before it."""
        return f"{canonical.key} {self._caches.responses.begin()}"

    def join(self, canonical: CanonicalRequest) -> Subscription | None:
        """A seat on the flight that brings this request's answer."""
        return self.desk.join(self._key(canonical))

    async def raw(self, asked: Asked, canonical: CanonicalRequest, *, stream: bool) -> bytes:
        """The body to send upstream."""
        body = canonical.body()
        body.pop("stream_options", None)
        body["stream"] = stream
        if stream:  # the usage is part of the whole answer; who did not ask for it does not see it
            body["stream_options"] = {"include_usage": True}
        return _dump(body) if len(asked.call.body) <= LARGE else await self._caches.parse(_dump, body)

    def start(
        self,
        asked: Asked,
        resolution: Resolution,
        raw: bytes,
        *,
        shared: bool = True,
    ) -> Subscription:
        """Send a request upstream; equal and similar ones may join from here on.

        Args:
            asked: for whom.
            resolution: of what is asked.
            raw: its body.
            shared: whether others may join, where the client allows it.
        """
        canonical, started = resolution.canonical, time.perf_counter()
        since = self._caches.responses.begin()
        shared = shared and asked.shared

        async def landed(flight: Flight) -> None:
            seconds = time.perf_counter() - started
            self._metrics.upstream(seconds)
            if flight.status != 200 or flight.payload is None:
                return
            self._journal.computed(canonical.key, seconds)
            if asked.controls.write:
                flight.kept = await self._caches.keep(canonical, flight.payload, since)

        call, begun = asked.call.with_body(raw), partial(self._tenants.answered, asked.client)
        seat = self.desk.start(self._key(canonical), call, begun, landed, chat=asked.chat, shared=shared)
        if resolution.report is not None:
            self.spawn(self._record(asked, resolution, seat.flight, self._announced(resolution, seat.flight)))
        return seat

    def _announced(self, resolution: Resolution, flight: Flight) -> Underway | None:
        """Let similar requests join a flight; what they find it by, or None where they may not."""
        if resolution.underway is not None and flight.shared:
            self.paraphrases.add(resolution.canonical.key, resolution.underway, flight)
            return resolution.underway
        return None

    def record_looked(
        self, asked: Asked, newcomer: Newcomer, looking: asyncio.Future[Resolution], flight: Flight
    ) -> None:
        """Record what is asked while the lookup runs, once both are over; similar requests may join after the lookup.

        Args:
            asked: the request.
            newcomer: the same, as its paraphrases know it meanwhile.
            looking: the lookup.
            flight: what was started.
        """
        if self._caches.semantic is not None:
            self.paraphrases.expect(newcomer, flight)
            self.spawn(self._record_looked(asked, looking, flight))

    async def _record_looked(self, asked: Asked, looking: asyncio.Future[Resolution], flight: Flight) -> None:
        """A donor that was found had no part in what was asked."""
        underway = None
        try:
            looked = await looking
            if looked.report is not None and looked.canonical.key != asked.canonical.key:
                looked = Resolution(asked.canonical, None, looked.report.unused())
            underway = self._announced(looked, flight)
        finally:
            self.paraphrases.decided(flight)
        if looked.report is not None:
            await self._record(asked, looked, flight, underway)

    async def _record(self, asked: Asked, resolution: Resolution, flight: Flight, underway: Underway | None) -> None:
        """Tell the semantic cache what was computed; until then paraphrases find the request itself."""
        canonical, report = resolution.canonical, resolution.report
        try:
            await flight.over()
            await asyncio.sleep(_STAND_BACK_S)
            whole = flight.payload if flight.status == 200 and asked.controls.write else None
            if report is not None and whole is not None and (flight.kept or canonical.sampled):
                await self._caches.observe(report, whole, canonical.model)
        finally:
            if underway is not None:
                self.paraphrases.remove(canonical.key, underway)
        if whole is not None and flight.kept and report is not None and report.plan.substituted:
            self.check_soon(asked, resolution, whole)  # of a donor's prompt, where its answer was not there any more

    async def _fetch(self, asked: Asked, canonical: CanonicalRequest, seat: Subscription | None = None) -> bytes | None:
        """The upstream's answer to a request, kept on the way; None where there is none. A ``seat`` brings it."""
        if seat is None:
            raw = await self.raw(asked, canonical, stream=False)
            seat = self.join(canonical) or self.start(asked, Resolution(canonical), raw)
        try:
            await seat.settled()
            return seat.flight.payload if seat.flight.status == 200 else None
        finally:
            seat.leave()

    # -- in the background --------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside the requests; a fault in it is counted."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", exc_info=error)
            self._metrics.fault("background")

    def refresh(self, asked: Asked, canonical: CanonicalRequest) -> None:
        """Fetch a fresh answer in place of a stale one: what is on its way already goes on for it."""
        seat = self.join(canonical)

        async def fetch() -> None:
            await self._fetch(asked, canonical, seat)

        self.spawn(fetch())

    def check_soon(self, asked: Asked, resolution: Resolution, given: bytes) -> None:
        """Run the unchanged request of an approximate hit, if it is drawn and not too many are running.

        Args:
            asked: the request.
            resolution: the hit.
            given: the answer that it brought.
        """
        report = resolution.report
        if report is not None and self._checks < _CHECKS and self._caches.should_check(report):
            self._checks += 1
            self.spawn(self._check(asked, report, given))

    async def _check(self, asked: Asked, report: ReuseReport, given: bytes) -> None:
        """Compare the unchanged request's own answer with the one that was given, to know how often they differ."""
        try:
            own = await self._fetch(asked, asked.canonical)
        finally:
            self._checks -= 1
        if own is not None:
            await self._caches.check(report, own, given)

    async def aclose(self) -> None:
        """Stop flights, and give background work a little time."""
        await self.desk.aclose()
        if self._background:
            await asyncio.wait(self._background, timeout=_ENDING_S)


def _dump(body: dict[str, Any]) -> bytes:
    return _encode(body).encode()
