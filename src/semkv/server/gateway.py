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
from collections.abc import AsyncIterator
from dataclasses import replace

from semkv.server.admission import Tenants, controls_of
from semkv.server.asgi import EVENTS, JSON, Answer, error_answer, is_plain_json, unless_gone
from semkv.server.asked import Asked
from semkv.server.caches import EXACT, Caches, Resolution
from semkv.server.canonical import CanonicalRequest, Uncacheable, canonicalise, loads
from semkv.server.dispatch import LARGE, Dispatch
from semkv.server.flight import Bounds, Desk, Flight, Subscription
from semkv.server.journal import Journal, Shown
from semkv.server.metrics import EQUAL, JOINED, MISS, PASSED, SIMILAR, Metrics
from semkv.server.salt import SALTED, NoPlace, salted
from semkv.server.settings import ServerSettings
from semkv.server.sse import NotKeepable, event, replay
from semkv.server.tags import BadTags
from semkv.server.upstream import Call, Headers, Receive, Reply, Upstream, UpstreamError
from semkv.stores.responses.base import Selector
from semkv.tiers.response import Found

log = logging.getLogger(__name__)


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
        self._dispatch = Dispatch(self.desk, caches, self.journal, metrics)
        self._tenants = Tenants(secret, trusted=settings.networks, single=settings.single_tenant)
        self._secret = secret

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
        if not self._tenants.believed(call.scope):
            self.metrics.uncacheable("tenant")
            return await self.forward(call, receive, "tenant")
        if len(call.body) > LARGE:
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
        if not is_plain_json(call.scope):
            return Uncacheable("content type")
        try:
            body = loads(call.body)
        except (ValueError, RecursionError):
            return Uncacheable("no JSON")
        if not isinstance(body, dict):
            return Uncacheable("no JSON object")
        settings = self.settings
        try:
            return canonicalise(
                call.scope["path"],
                body,
                tenant=tenant,
                secret=self._secret,
                version=settings.data_version,
                remote_media=settings.remote_media,
                tags=self._tenants.tags_of(call.scope),
                salts=settings.salt,
            )
        except BadTags:
            return Uncacheable("tags")
        except Exception:  # a fault of ours must not cost the answer
            log.exception("canonicalise failed")
            self.metrics.fault("canonicalise")
            return Uncacheable("fault")

    async def forward(self, call: Call, receive: Receive, reason: str) -> Answer:
        """Pass a request on, with nothing changed but the tenant's salt, and its answer back as it comes."""
        start = time.perf_counter()
        told = f"pass reason={reason.replace(' ', '_')}" if reason else "pass"
        try:
            reply = await unless_gone(self._send_on(call), receive)
        except NoPlace as error:
            self.metrics.request(PASSED, 400, time.perf_counter() - start, "")
            return error_answer(400, str(error), "invalid_request_error", self._told(told))
        except UpstreamError as error:
            return self._unreachable(error, PASSED, start)
        self._tenants.answered(call.scope, reply.status)
        self.metrics.request(PASSED, reply.status, time.perf_counter() - start, "")
        return Answer(reply.status, [*reply.headers, *self._told(told)], stream=_through(reply), close=reply.aclose)

    async def _send_on(self, call: Call) -> Reply:
        scope = call.scope
        if self.settings.salt and scope["method"] == "POST" and scope["path"] in SALTED:
            tenant = self._tenants.of(scope)
            body = await self.caches.parse(salted, call.body, tenant, self._secret)
            call = replace(call, body=body)
        return await self.upstream.send(call)

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

    def _hit(self, asked: Asked, resolution: Resolution, *, joined: bool = False) -> Answer | None:
        """The stored answer in the form the client asked for; None where it will not do.

        Args:
            asked: the request.
            resolution: what was found.
            joined: the client waited for it to be computed for another.
        """
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
            self._dispatch.refresh(asked, resolution.canonical)
        tier, score = resolution.tier, resolution.score
        seconds = time.perf_counter() - asked.start
        self.metrics.request(JOINED if joined else tier, 200, seconds, asked.tenant)
        if joined:
            self.metrics.joins.labels(SIMILAR).inc()
        self._note(asked, resolution, found, seconds)
        scored = "" if score is None else f" score={score:.3f}"
        flags = (" stale" if found.stale else "") + (" joined" if joined else "")
        answer.headers.extend(self._told(f"hit tier={tier}{scored} age={found.age_s:.0f}{flags}"))
        return answer

    def _note(self, asked: Asked, resolution: Resolution, found: Found, seconds: float) -> None:
        exact = resolution.tier == EXACT
        self.journal.hit(
            tier=resolution.tier,
            score=resolution.score,
            seconds=seconds,
            tenant=asked.tenant,
            found=found,
            asked=None if exact else asked.canonical.request,
            report=resolution.report,
        )

    def _as_stream(self, asked: Asked, payload: bytes) -> Answer | None:
        """A whole answer as a stream; None where a stream would lose something."""
        try:
            body = replay(json.loads(payload), include_usage=asked.canonical.include_usage)
        except (NotKeepable, ValueError, AttributeError, TypeError, LookupError, RecursionError):
            self.metrics.uncacheable("no stream of it")
            return None
        return Answer(200, [EVENTS], body)

    # -- the way of a miss --------------------------------------------------------------------------------------

    async def _slow(self, asked: Asked) -> Answer:
        try:
            if (partition := self._overlaps(asked)) is not None:
                return await self._overlapped(asked, partition)
            return await self._resolved(asked, await self._looked(asked))
        except UpstreamError as error:
            return self._unreachable(error, MISS, asked.start)

    async def _looked(self, asked: Asked) -> Resolution:
        if not asked.controls.read:
            return Resolution(asked.canonical)
        return await self.caches.find(asked.canonical, keep=asked.controls.write)

    async def _resolved(self, asked: Asked, resolution: Resolution) -> Answer:
        """What the lookup found, or else the upstream's answer."""
        answer = self._hit(asked, resolution)
        if answer is None:
            return await self._ask(asked, resolution)
        if resolution.found is not None:
            self._dispatch.check_soon(asked, resolution, resolution.found.response.payload)
        return answer

    def _overlaps(self, asked: Asked) -> str | None:
        """The partition of a request that goes upstream while the lookup runs; None where the lookup comes first.

        It comes first where lookups often find something, since each find then costs the upstream a request that is
        cut off, and while a request is on its way whose answer this one may be given.
        """
        caches = self.caches
        if not (self.settings.overlap and asked.shared and len(asked.call.body) <= LARGE):
            return None
        if not (caches.looks(asked.canonical) and caches.odds.rare):
            return None
        partition = caches.partition(asked.canonical)
        return None if self._dispatch.paraphrases.busy(partition) else partition

    async def _overlapped(self, asked: Asked, partition: str) -> Answer:
        """Ask the upstream while the lookup runs.

        The lookup has the last word, however soon the upstream answers: what it finds is served, or asked for, in place
        of the request, which is then cut off unless others wait for it.
        """
        own = Resolution(asked.canonical, await self.caches.stored(asked.canonical))
        if own.found is not None:
            return await self._resolved(asked, own)
        raw = await self._dispatch.raw(asked, asked.canonical, stream=asked.canonical.stream)
        answer, seat = self._at_hand(asked, own)
        if answer is not None:
            return answer
        if seat is None and self._dispatch.paraphrases.busy(partition):  # by now
            return await self._resolved(asked, await self._looked(asked))
        looking = asyncio.ensure_future(self.caches.find(asked.canonical, stored=False))
        tier = MISS if seat is None else JOINED
        if seat is None:
            seat = self._dispatch.start(asked, own, raw, looking=looking, partition=partition)
        try:
            looked = await asyncio.shield(looking)
            if seat.flight.status in (401, 403):  # who is not let in gets nothing of what others computed
                return await self._answer(asked, own, seat, tier)
            if looked.found is not None or looked.canonical.key != asked.canonical.key:
                self._give_up(seat)
                return await self._resolved(asked, looked)
            near = await self._dispatch.paraphrases.find(looked, asked.start) if tier is MISS else None
            if near is not None and (answer := await self._beside(asked, near)) is not None:
                self._give_up(seat)
                return answer
            return await self._answer(asked, own, seat, tier)
        except BaseException:
            seat.leave()
            raise

    def _give_up(self, seat: Subscription) -> None:
        """Something better than this seat's answer was found."""
        if seat.alone:
            self.metrics.cut.inc()
        seat.leave()

    async def _ask(self, asked: Asked, resolution: Resolution) -> Answer:
        """Join the flight of the same canonical request', or of one that asks the same in other words; else start one.

        From the last look to the start nothing is awaited, so that of equal requests one alone starts.
        """
        answer, seat = self._at_hand(asked, resolution)
        raw = b""
        if answer is None and seat is None:
            raw = await self._dispatch.raw(asked, resolution.canonical, stream=asked.canonical.stream)
            near = await self._dispatch.paraphrases.find(resolution, asked.start) if asked.shared else None
            if near is not None:
                answer = await self._beside(asked, near)
            if answer is None:
                answer, seat = self._at_hand(asked, resolution)
        if answer is not None:
            return answer
        tier = MISS if seat is None else JOINED
        if seat is None:
            seat = self._dispatch.start(asked, resolution, raw)
        try:
            return await self._answer(asked, resolution, seat, tier)
        except BaseException:
            seat.leave()
            raise

    def _at_hand(self, asked: Asked, resolution: Resolution) -> tuple[Answer | None, Subscription | None]:
        """An answer that landed while we looked elsewhere, or a seat on the flight that brings it."""
        seat = self._dispatch.join(resolution.canonical) if asked.shared else None
        return (None, seat) if seat is not None else (self._peek(asked, resolution), None)

    async def _beside(self, asked: Asked, near: Resolution) -> Answer | None:
        """The answer to a running request that asks the same in other words; None where it is not to be had.

        A stream is passed on as it comes. Whoever has had no byte of it yet goes upstream himself once it turns out
        that the cache may not serve the answer: it failed, was cut off, or cannot be kept for another reason.
        """
        seat = self._dispatch.join(near.canonical)
        if seat is not None:
            try:
                if asked.canonical.stream and await seat.flows():
                    return self._joined(asked, near, seat)
                await seat.decided()
            finally:
                seat.leave()
        found = await self.caches.stored(near.canonical)
        answer = self._hit(asked, replace(near, found=found), joined=seat is not None)
        if answer is None:
            self.metrics.parted.inc()
        elif found is not None:
            self._dispatch.check_soon(asked, near, found.response.payload)
        return answer

    def _joined(self, asked: Asked, near: Resolution, seat: Subscription) -> Answer:
        """A stream that runs for a similar request."""
        own = seat.flight.subscribe()
        seconds = time.perf_counter() - asked.start
        self.metrics.request(JOINED, 200, seconds, asked.tenant)
        self.metrics.joins.labels(SIMILAR).inc()
        self._dispatch.spawn(self._landed_near(asked, near, seat.flight, seconds))
        events = _relay(own, include_usage=asked.canonical.include_usage)
        headers = [*seat.flight.headers, *self._told(f"hit tier={near.tier} score={near.score:.3f} age=0 joined")]
        return Answer(200, headers, stream=events, close=own.aclose)

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
        if answer is None and tier is MISS:  # asked in this form, answered in another: as the upstream would have it
            answer = Answer(flight.status, list(flight.headers), stream=_bare(seat), close=seat.aclose)
        if answer is None:  # the flight has the other form and cannot be turned into this one: ask for it alone
            seat.leave()
            raw = await self._dispatch.raw(asked, resolution.canonical, stream=stream)
            alone = self._dispatch.start(asked, resolution, raw, shared=False)
            try:
                return await self._answer(asked, resolution, alone, MISS)
            except BaseException:
                alone.leave()
                raise
        self._tenants.answered(asked.call.scope, flight.status)
        if tier is JOINED:
            self.metrics.joins.labels(EQUAL).inc()
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

    async def _landed_near(self, asked: Asked, near: Resolution, flight: Flight, seconds: float) -> None:
        """Note a stream that was joined, once it is known to be an answer that the cache serves."""
        await flight.over()
        found = await self.caches.stored(near.canonical) if flight.kept else None
        if found is not None:
            self._note(asked, near, found, seconds)
            self._dispatch.check_soon(asked, near, found.response.payload)

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
        await self._dispatch.aclose()
        await self.upstream.aclose()
        await self.caches.aclose()


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
