"""The core: one request, answered from the caches or by the upstream. Used by the gateway and by the middleware.

    parse -> canonicalise -> memory -> store (thread) -> SemanticCache (thread) -> memory and store under the canonical
    request' of its plan -> single-flight -> upstream -> store

An answer is kept under the key of the request it was computed from, before the client has the whole of it. A fault in
the cache is counted and the request goes on as a miss.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

from semkv.server.admission import Controls, Tenants, controls_of
from semkv.server.asgi import EVENTS, JSON, Answer, error_answer, unless_gone
from semkv.server.caches import EXACT, Caches, Resolution
from semkv.server.canonical import CanonicalRequest, Uncacheable, canonicalise, loads
from semkv.server.flight import Bounds, Desk, Flight, Subscription
from semkv.server.journal import Journal, Shown
from semkv.server.metrics import JOINED, MISS, PASSED, Metrics
from semkv.server.settings import ServerSettings
from semkv.server.sse import NotKeepable, event, replay
from semkv.server.upstream import Call, Headers, Receive, Reply, Upstream, UpstreamError
from semkv.stores.responses.base import Selector
from semkv.tiers.response import Found

log = logging.getLogger(__name__)

ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}

_LARGE = 64 * 1024  # bytes of a body that is parsed in a thread
_CHECKS = 4  # unchanged requests run for checking at once


@dataclass(frozen=True, slots=True)
class Asked:
    """One cacheable request on its way.

    Attributes:
        call: as it came.
        canonical: its canonical form.
        controls: what the client asked of the cache.
        tenant: digest.
        may_read: the upstream has let this client in before, and the answer is not to be drawn at random.
        start: when it was there, by `time.perf_counter`.
    """

    call: Call
    canonical: CanonicalRequest
    controls: Controls
    tenant: str
    may_read: bool
    start: float

    @property
    def reads(self) -> bool:
        """A stored answer would do."""
        return self.controls.read and self.may_read

    @property
    def shared(self) -> bool:
        """An answer that is on its way to somebody else would do, and the other way round."""
        return self.reads and self.controls.write

    @property
    def chat(self) -> bool:
        return ENDPOINTS[self.call.scope["path"]] == "chat"

    def will_do(self, found: Found) -> bool:
        """Whether a stored answer is fresh enough for the client."""
        oldest = self.controls.max_age_s
        return oldest is None or (found.age_s <= oldest and not found.stale)


class Gateway:
    """Answers requests.

    Args:
        settings: settings.
        secret: of the deployment.
        upstream: who answers misses.
        caches: stored answers and donors.
        metrics: where everything is counted.
    """

    def __init__(
        self, settings: ServerSettings, secret: bytes, upstream: Upstream, caches: Caches, metrics: Metrics
    ) -> None:
        self.settings, self.upstream, self.caches, self.metrics = settings, upstream, caches, metrics
        self.journal = Journal(metrics)
        self.desk = Desk(upstream, Bounds(answer=settings.bounds[1]))
        self._tenants = Tenants(secret, trusted=settings.networks, single=settings.single_tenant)
        self._secret = secret
        self._background: set[asyncio.Task[None]] = set()
        self._checks = 0

    # -- the request --------------------------------------------------------------------------------------------

    async def handle(self, call: Call, receive: Receive) -> Answer:
        """Answer a POST to one of `ENDPOINTS`.

        Raises:
            Vanished: the client hung up first.
        """
        start = time.perf_counter()
        controls = controls_of(call.scope)
        if not (controls.read or controls.write):
            return await self.forward(call, receive, "bypass")
        tenant = self._tenants.of(call.scope)
        if len(call.body) > _LARGE:
            canonical = await self.caches.parse(self._canonicalise, call, tenant)
        else:
            canonical = self._canonicalise(call, tenant)
        if isinstance(canonical, Uncacheable):
            self.metrics.uncacheable(canonical.reason)
            return await self.forward(call, receive, canonical.reason)
        may_read = self._tenants.may_read(call.scope) and (self.settings.sampled or not canonical.sampled)
        asked = Asked(call, canonical, controls, tenant, may_read, start)
        if (answer := self._peek(asked, Resolution(canonical))) is not None:
            return answer
        return await unless_gone(self._slow(asked), receive)

    def _canonicalise(self, call: Call, tenant: str) -> CanonicalRequest | Uncacheable:
        if call.scope.get("query_string"):
            return Uncacheable("query")
        try:
            body = loads(call.body)
        except (ValueError, RecursionError):
            return Uncacheable("no JSON")
        if not isinstance(body, dict):
            return Uncacheable("no JSON object")
        version, remote = self.settings.data_version, self.settings.remote_media
        try:
            return canonicalise(
                call.scope["path"], body, tenant=tenant, secret=self._secret, version=version, remote_media=remote
            )
        except Exception:  # a fault of ours must not cost the answer
            log.exception("canonicalise failed")
            self.metrics.fault("canonicalise")
            return Uncacheable("fault")

    async def forward(self, call: Call, receive: Receive, reason: str) -> Answer:
        """Pass a request on, untouched, and its answer back as it comes."""
        start = time.perf_counter()
        try:
            reply = await unless_gone(self.upstream.send(call), receive)
        except UpstreamError as error:
            return self._unreachable(error, PASSED, start)
        self.metrics.request(PASSED, reply.status, time.perf_counter() - start, "")
        told = f"pass reason={reason.replace(' ', '_')}" if reason else "pass"
        return Answer(reply.status, [*reply.headers, *self._told(told)], stream=_through(reply), close=reply.aclose)

    def _unreachable(self, error: UpstreamError, tier: str, start: float) -> Answer:
        self.metrics.request(tier, error.status, time.perf_counter() - start, "")
        return error_answer(error.status, str(error), "upstream_error", self._told(tier))

    def _told(self, text: str) -> Headers:
        return [(b"x-semkv", text.encode("latin-1", "replace"))] if self.settings.tell else []

    # -- answers from the cache ---------------------------------------------------------------------------------

    def _peek(self, asked: Asked, resolution: Resolution) -> Answer | None:
        """What memory has for a resolution."""
        if not asked.reads:
            return None
        found = self.caches.responses.peek(resolution.canonical.key)
        return self._hit(asked, Resolution(resolution.canonical, found, resolution.report))

    def _hit(self, asked: Asked, resolution: Resolution) -> Answer | None:
        """The stored answer in the form the client asked for; None where it will not do."""
        found = resolution.found
        if found is None or not asked.reads or not asked.will_do(found):
            return None
        if not asked.canonical.stream:
            answer: Answer | None = Answer(200, [JSON], found.response.payload)
        else:
            answer = self._as_stream(asked, found.response.payload)
        if answer is None:
            return None
        if found.stale and asked.controls.write:
            self._spawn(self._refresh(asked, resolution.canonical))
        tier, score = resolution.tier, resolution.score
        seconds = time.perf_counter() - asked.start
        self.metrics.request(tier, 200, seconds, asked.tenant)
        self.journal.hit(
            tier=tier,
            score=score,
            seconds=seconds,
            tenant=asked.tenant,
            found=found,
            asked=None if tier == EXACT else asked.canonical.request,
            report=resolution.report,
        )
        scored = "" if score is None else f" score={score:.3f}"
        told = f"hit tier={tier}{scored} age={found.age_s:.0f}{' stale' if found.stale else ''}"
        answer.headers.extend(self._told(told))
        return answer

    def _as_stream(self, asked: Asked, payload: bytes) -> Answer | None:
        """A whole answer as a stream; None where a stream would lose something."""
        try:
            body = replay(json.loads(payload), include_usage=asked.canonical.include_usage)
        except (NotKeepable, ValueError, AttributeError, TypeError, LookupError):
            self.metrics.uncacheable("no stream of it")
            return None
        return Answer(200, [EVENTS], body)

    # -- the way of a miss --------------------------------------------------------------------------------------

    async def _slow(self, asked: Asked) -> Answer:
        try:
            resolution = Resolution(asked.canonical)
            if asked.controls.read:
                resolution = await self.caches.find(asked.canonical)
            answer = self._hit(asked, resolution)
            if answer is None:
                return await self._ask(asked, resolution)
        except UpstreamError as error:
            return self._unreachable(error, MISS, asked.start)
        if self._checks < _CHECKS and self.caches.should_check(resolution.report):
            self._checks += 1
            self._spawn(self._check(asked, resolution))
        return answer

    async def _ask(self, asked: Asked, resolution: Resolution) -> Answer:
        """Join the flight of the same canonical request', or start it."""
        seat = self.desk.join(resolution.canonical.key) if asked.shared else None
        joined = seat is not None
        if seat is None:
            if (answer := self._peek(asked, resolution)) is not None:  # it landed while we looked elsewhere
                return answer
            seat = await self._start(asked, resolution, stream=asked.canonical.stream)
        try:
            return await self._answer(asked, resolution, seat, JOINED if joined else MISS)
        except BaseException:
            seat.leave()
            raise

    async def _start(self, asked: Asked, resolution: Resolution, *, stream: bool, shared: bool = True) -> Subscription:
        canonical, started = resolution.canonical, time.perf_counter()
        since = self.caches.responses.begin()
        body = canonical.body()
        body.pop("stream_options", None)
        body["stream"] = stream
        if stream:  # the usage is part of the whole answer; who did not ask for it does not see it
            body["stream_options"] = {"include_usage": True}

        async def landed(flight: Flight) -> None:
            seconds = time.perf_counter() - started
            self.metrics.upstream(seconds)
            if flight.status != 200 or flight.payload is None:
                return
            self.journal.computed(canonical.key, seconds)
            if asked.controls.write:
                kept = await self.caches.keep(canonical, flight.payload, since)
                if resolution.report is not None and (kept or canonical.sampled):
                    self._spawn(self.caches.observe(resolution.report, flight.payload))

        shared = shared and asked.shared
        if len(asked.call.body) <= _LARGE:
            raw = _dump(body)
        else:
            raw = await self.caches.parse(_dump, body)
            if shared and (seat := self.desk.join(canonical.key)) is not None:
                return seat
        return self.desk.start(canonical.key, asked.call.with_body(raw), landed, chat=asked.chat, shared=shared)

    async def _answer(self, asked: Asked, resolution: Resolution, seat: Subscription, tier: str) -> Answer:
        """The flight's answer in the form the client asked for.

        Raises:
            UpstreamError: there is none.
        """
        flight, stream = seat.flight, asked.canonical.stream
        await seat.begun()
        answer: Answer | None
        if flight.streamed and stream:
            events = _relay(seat, include_usage=asked.canonical.include_usage)
            answer = Answer(flight.status, list(flight.headers), stream=events, close=seat.aclose)
        else:
            answer = await self._whole(asked, seat)
        if answer is None:  # the flight has the other form and cannot be turned into this one: ask for it alone
            seat.leave()
            alone = await self._start(asked, resolution, stream=stream, shared=False)
            try:
                return await self._answer(asked, resolution, alone, MISS)
            except BaseException:
                alone.leave()
                raise
        if flight.status not in (401, 403):
            self._tenants.accepted(asked.call.scope)
        if tier is JOINED:
            self.metrics.joins.inc()
        self.metrics.request(tier, flight.status, time.perf_counter() - asked.start, asked.tenant)
        reuse = "" if resolution.score is None else f" reuse={resolution.tier} score={resolution.score:.3f}"
        answer.headers.extend(self._told(f"{tier}{reuse}"))
        return answer

    async def _whole(self, asked: Asked, seat: Subscription) -> Answer | None:
        """The answer of a flight whose form is not a stream, or not to be one; None where it cannot be had from it."""
        flight = seat.flight
        await seat.settled()
        if not flight.done and not flight.streamed:  # too large to hold
            return Answer(flight.status, list(flight.headers), stream=_bare(seat), close=seat.aclose)
        if flight.error is not None:
            raise flight.error
        if flight.payload is None:
            return None
        if flight.streamed:
            answer: Answer | None = Answer(200, [JSON], flight.payload)
        elif asked.canonical.stream and flight.status == 200:
            answer = self._as_stream(asked, flight.payload)
        else:
            answer = Answer(flight.status, list(flight.headers), flight.payload)
        if answer is not None:
            seat.leave()
        return answer

    # -- beside the requests ------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", exc_info=error)
            self.metrics.fault("background")

    async def _fetch(self, asked: Asked, canonical: CanonicalRequest) -> bytes | None:
        """The upstream's answer to a request, kept on the way; None where there is none."""
        seat = self.desk.join(canonical.key)
        if seat is None:
            seat = await self._start(asked, Resolution(canonical), stream=False)
        try:
            await seat.settled()
            return seat.flight.payload if seat.flight.status == 200 else None
        finally:
            seat.leave()

    async def _refresh(self, asked: Asked, canonical: CanonicalRequest) -> None:
        """Fetch a fresh answer in place of a stale one."""
        await self._fetch(asked, canonical)

    async def _check(self, asked: Asked, resolution: Resolution) -> None:
        """Run the unchanged request of an approximate hit, to know how often they are wrong."""
        try:
            own = await self._fetch(asked, asked.canonical)
        finally:
            self._checks -= 1
        if own is not None and resolution.found is not None and resolution.report is not None:
            await self.caches.check(resolution.report, own, resolution.found.response.payload)

    async def wrong(self, shown: Shown) -> int:
        """An operator says that a hit was wrong: its answer goes, and the donor of an approximate one."""
        if shown.tier != EXACT:
            await self.caches.report_wrong(shown.hit_id)
        return await self.caches.invalidate(Selector(key=shown.key), dry_run=False)

    def sizes(self) -> dict[str, dict[str, float]]:
        """Sizes (``gauges``), and what the caches counted (``events``). Blocks."""
        sizes = self.caches.sizes()
        sizes["gauges"] |= {
            "flights": float(len(self.desk)),
            "flight_bytes": float(self.desk.held),
            "flight_limit_bytes": float(self.desk.bounds.total),
            "memory_limit_bytes": float(self.settings.memory_mib << 20),
            "response_limit_bytes": float(self.settings.store_mib << 20),
        }
        return sizes

    async def aclose(self) -> None:
        """Stop flights, finish what is being written, close the stores."""
        await self.desk.aclose()
        if self._background:
            await asyncio.wait(self._background, timeout=5.0)
        await self.upstream.aclose()
        await self.caches.aclose()


def _dump(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


async def _through(reply: Reply) -> AsyncIterator[bytes]:
    async for piece in reply.pieces():
        yield piece


async def _bare(seat: Subscription) -> AsyncIterator[bytes]:
    async for piece in seat.pieces():
        yield piece.data


async def _relay(seat: Subscription, *, include_usage: bool) -> AsyncIterator[bytes]:
    """A running stream as one client sees it; a break becomes an error event, since the status is long sent."""
    try:
        async for piece in seat.pieces():
            if include_usage or not piece.usage:
                yield piece.data
    except UpstreamError as error:
        yield event({"error": {"message": str(error), "type": "upstream_error", "param": None, "code": error.status}})
