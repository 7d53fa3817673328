"""The core: one request, answered from the caches or by the upstream. Used by the gateway and by the middleware.

    key -> memory -> lookup -> [hit: serve] -> single flight -> serve -> record

`Gateway.handle` reads the key and looks into memory; `Gateway._answer` is the rest of the way. An answer is stored
under the key of the request it was computed from, before the client has the whole of it. A fault in the cache is
counted and the request goes on as a miss.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from semkv.server.asgi import EVENTS, JSON, Answer, error_answer, is_plain_json, unless_gone
from semkv.server.cache_client import EXACT, CacheClient, Lookup
from semkv.server.metrics import EQUAL, JOINED, MISS, PASSED, SIMILAR, Metrics
from semkv.server.pending import Pending
from semkv.server.recent_hits import HitView, RecentHits
from semkv.server.request_key import CanonicalRequest, Uncacheable, canonicalise, loads
from semkv.server.settings import ServerSettings
from semkv.server.singleflight import InFlight
from semkv.server.sse import NotKeepable, replay
from semkv.server.tenancy import REFUSED, SALTED, BadTags, NoPlace, Tenants, controls_of, salted
from semkv.server.upstream import Call, Headers, Receive, Reply, Upstream, UpstreamError
from semkv.server.upstream_requests import LARGE, GatewayRequest, UpstreamRequests
from semkv.stores.responses.base import Selector
from semkv.tiers.response import Found
from semkv.types import ReuseReport

log = logging.getLogger(__name__)


class Gateway:
    """Answers requests.

    Args:
        settings: settings.
        secret: of the deployment.
        upstream: answers misses.
        cache: stored answers and donors.
        metrics: where everything is counted.
    """

    def __init__(
        self, settings: ServerSettings, secret: bytes, upstream: Upstream, cache: CacheClient, metrics: Metrics
    ) -> None:
        self.settings, self.upstream, self.cache, self.metrics = settings, upstream, cache, metrics
        self.recent_hits = RecentHits(metrics)
        self._secret = secret
        self._tenants = Tenants(secret, trusted=settings.networks, single=settings.single_tenant)
        self.outgoing = UpstreamRequests(upstream, cache, self._tenants, self.recent_hits, metrics, settings.bounds[1])

    # -- a request ----------------------------------------------------------------------------------------------

    async def handle(self, call: Call, receive: Receive) -> Answer:
        """Answer a POST to one of `ENDPOINTS`.

        Raises:
            Vanished: the client hung up first.
        """
        start = time.perf_counter()
        controls = controls_of(call.scope)
        if not (controls.read or controls.write):
            return await self.forward(call, receive, "bypass")
        client = self._tenants.client(call.scope)
        if not client.believed:
            self.metrics.uncacheable("tenant")
            return await self.forward(call, receive, "tenant")
        if len(call.body) > LARGE:
            canonical = await asyncio.to_thread(self._canonicalise, call, client.tenant)
        else:
            canonical = self._canonicalise(call, client.tenant)
        if isinstance(canonical, Uncacheable):
            self.metrics.uncacheable(canonical.reason)
            return await self.forward(call, receive, canonical.reason)
        may_read = self._tenants.may_read(client) and (self.settings.sampled or not canonical.sampled)
        request = GatewayRequest(call, canonical, controls, client, may_read, start)
        if (answer := self._from_memory(request, canonical)) is not None:
            return answer
        return await unless_gone(self._answer(request), receive)

    async def _answer(self, request: GatewayRequest) -> Answer:
        """The answer to a request that memory has none for: looked up, joined to another's, or asked upstream.

        Where lookups rarely find anything the upstream is asked meanwhile (``overlap``). What the lookup finds before
        that answer is whole is used instead.
        """
        own = Lookup(request.canonical)
        pending: Pending | None = None
        try:
            if self._overlaps(request) and not self.outgoing.join(request, request.canonical):
                pending = Pending(self.cache, request.canonical)
                if not self.outgoing.pending.busy(pending):
                    self.outgoing.start(request, request.canonical)
            reader = request.reader
            looking = self._look_up(request, overlapped=reader is not None) if request.controls.read else None
            if reader is not None and looking is not None:
                if not request.joined:
                    self.outgoing.record_soon(request, own, looking, pending)
                await asyncio.wait((looking, reader.flight.task), return_when=asyncio.FIRST_COMPLETED)
                if reader.flight.whole and not looking.done():
                    return await self._serve(request, own, looking)
            found = own
            if looking is not None:
                await asyncio.wait((looking,))
                found = looking.result()
            if reader is not None and reader.flight.status in REFUSED:  # this client gets nothing that others computed
                return await self._serve(request, own, looking)
            another = found.canonical.key != own.canonical.key
            brought = reader is not None and reader.flight.stored and not another  # by this very request
            if not brought and (answer := self._hit(request, found)) is not None:
                self._give_up(request)
                return answer
            if another:
                self._give_up(request)
            return await self._ask(request, found, looking)
        except UpstreamError as error:
            request.leave()
            return self._unreachable(error, MISS, request.start)
        except BaseException:
            request.leave()
            raise

    def _overlaps(self, request: GatewayRequest) -> bool:
        """Whether to ask the upstream during the lookup."""
        return self.settings.overlap and request.shared and not request.large and self.cache.rarely_finds

    def _look_up(self, request: GatewayRequest, *, overlapped: bool) -> asyncio.Future[Lookup]:
        asked_at = request.start if overlapped else None
        looked = self.cache.look_up(request.canonical, writes=request.controls.write, asked_at=asked_at)
        return asyncio.ensure_future(looked)

    def _give_up(self, request: GatewayRequest) -> None:
        """Something better than the upstream answer that the request waits for was found."""
        if request.reader is not None and request.reader.is_last:
            self.metrics.cut.inc()
        request.leave()

    # -- single flight ------------------------------------------------------------------------------------------

    async def _ask(self, request: GatewayRequest, found: Lookup, looking: asyncio.Future[Lookup] | None) -> Answer:
        """Join the flight of the same canonical request', or of one that asks the same in other words; else start one.

        From the last look to the start nothing is awaited, so that of equal requests only one starts.
        """
        if request.reader is None and (answer := self._join_or_memory(request, found)) is not None:
            return answer
        if request.shared and not request.joined:
            own = None if request.reader is None else request.reader.flight
            near = await self.outgoing.pending.find(found, request.start, own)
            if near is not None and (answer := await self._near(request, near)) is not None:
                self._give_up(request)
                return answer
            if request.reader is None and (answer := self._join_or_memory(request, found)) is not None:
                return answer
        if request.reader is None:
            self.outgoing.start(request, found.canonical)
            self.outgoing.record_soon(request, found, looking)
        return await self._serve(request, found, looking)

    def _join_or_memory(self, request: GatewayRequest, found: Lookup) -> Answer | None:
        """Join an equal request that is on its way; where there is none, the answer that memory may have by now."""
        if self.outgoing.join(request, found.canonical):
            return None
        return self._from_memory(request, found.canonical, found.report)

    async def _near(self, request: GatewayRequest, near: Lookup) -> Answer | None:
        """The answer to a request on its way that asks the same in other words; None where it is not to be had.

        A stream is passed on as it comes. A caller who has had no byte of it yet goes upstream itself once it turns out
        that the cache may not serve the answer: it failed, was cut off, or cannot be stored for another reason.
        """
        reader = self.outgoing.flights.join(self.outgoing.flight_key(near.canonical))
        if reader is not None:
            flight = reader.flight
            try:
                if request.canonical.stream:
                    await flight.until(lambda: flight.chunk(0) is not None)
                    if flight.streamed and flight.storable and not flight.done:
                        return self._near_stream(request, near, flight)
                await flight.until(lambda: not flight.storable)
            finally:
                reader.leave()
        found = await self.cache.stored(near.canonical)
        answer = self._hit(request, replace(near, found=found), joined=reader is not None)
        if answer is None:
            self.metrics.parted.inc()
        return answer

    def _near_stream(self, request: GatewayRequest, near: Lookup, flight: InFlight) -> Answer:
        """A stream that runs for a similar request."""
        seconds = time.perf_counter() - request.start
        self.metrics.request(JOINED, 200, seconds, request.client.tenant)
        self.metrics.joins.labels(SIMILAR).inc()
        self.outgoing.spawn(self._note_near(request, near, flight, seconds))
        headers = [*flight.headers, *self._hit_header(near, 0.0, " joined")]
        reader = flight.reader()  # last, so that it is not left behind by a fault before
        events = reader.events(include_usage=request.canonical.include_usage)
        return Answer(200, headers, stream=events, close=reader.aclose)

    async def _note_near(self, request: GatewayRequest, near: Lookup, flight: InFlight, seconds: float) -> None:
        """Note a stream that was joined, once it is known to be an answer that the cache serves."""
        await asyncio.wait((flight.task,))
        found = await self.cache.stored(near.canonical) if flight.stored else None
        if found is not None:
            self._note_hit(request, replace(near, found=found), found, seconds)
            self.outgoing.check_soon(request, near.report, found.response.payload)

    # -- serving ------------------------------------------------------------------------------------------------

    def _from_memory(
        self, request: GatewayRequest, canonical: CanonicalRequest, report: ReuseReport | None = None
    ) -> Answer | None:
        """What memory has under a key."""
        found = self.cache.responses.peek(canonical.key) if request.reads else None
        return None if found is None else self._hit(request, Lookup(canonical, found, report))

    def _hit(self, request: GatewayRequest, lookup: Lookup, *, joined: bool = False) -> Answer | None:
        """The stored answer in the form the client asked for; None where it will not do.

        Args:
            request: the request.
            lookup: what was found.
            joined: the client waited for it to be computed for another request.
        """
        found = lookup.found
        if found is None or not request.accepts(found):
            return None
        payload = found.response.payload
        answer = self._as_stream(request, payload) if request.canonical.stream else Answer(200, [JSON], payload)
        if answer is None:
            return None
        if found.stale and request.controls.write:
            self.outgoing.refresh(request, lookup.canonical)
        seconds = time.perf_counter() - request.start
        self.metrics.request(JOINED if joined else lookup.tier, 200, seconds, request.client.tenant)
        if joined:
            self.metrics.joins.labels(SIMILAR).inc()
        self._note_hit(request, lookup, found, seconds)
        self.outgoing.check_soon(request, lookup.report, payload)
        flags = (" stale" if found.stale else "") + (" joined" if joined else "")
        answer.headers.extend(self._hit_header(lookup, found.age_s, flags))
        return answer

    def _as_stream(self, request: GatewayRequest, payload: bytes) -> Answer | None:
        """A whole answer as a stream; None where a stream would lose something."""
        try:
            body = replay(json.loads(payload), include_usage=request.canonical.include_usage)
        except (NotKeepable, ValueError, AttributeError, TypeError, LookupError, RecursionError):
            self.metrics.uncacheable("no stream of it")
            return None
        return Answer(200, [EVENTS], body)

    async def _serve(self, request: GatewayRequest, lookup: Lookup, looking: asyncio.Future[Lookup] | None) -> Answer:
        """The upstream answer that the request waits for, in the form the client asked for.

        Raises:
            UpstreamError: there is none.
        """
        answer = await self._upstream_answer(request)
        if answer is None:  # another's key was refused, or a form that cannot be turned into this one
            request.leave()
            self.outgoing.start(request, lookup.canonical, shared=False)
            self.outgoing.record_soon(request, lookup, looking)
            answer = await self._upstream_answer(request)
            assert answer is not None
        assert request.reader is not None
        flight, tier = request.reader.flight, JOINED if request.joined else MISS
        if request.joined:
            self.metrics.joins.labels(EQUAL).inc()
        self.metrics.request(tier, flight.status, time.perf_counter() - request.start, request.client.tenant)
        reuse = "" if lookup.score is None else f" reuse={lookup.tier} score={lookup.score:.3f}"
        answer.headers.extend(self._cache_header(f"{tier}{reuse}"))
        if answer.stream is None:
            request.leave()
        return answer

    async def _upstream_answer(self, request: GatewayRequest) -> Answer | None:
        """The same; None where it is to be had only by a request of one's own."""
        reader = request.reader
        assert reader is not None
        flight = reader.flight
        await flight.until(lambda: flight.status)
        if not flight.status and flight.error is not None:
            raise flight.error
        answer: Answer | None = None
        if request.joined and flight.status in REFUSED:  # it says nothing about this client's key
            return None
        if flight.streamed and request.canonical.stream:
            events = reader.events(include_usage=request.canonical.include_usage)
            return Answer(flight.status, list(flight.headers), stream=events, close=reader.aclose)
        await flight.until(lambda: not flight.shared)
        if flight.done or flight.streamed:
            if flight.error is not None:
                raise flight.error
            if flight.payload is not None and flight.streamed:
                answer = Answer(200, [JSON], flight.payload)
            elif flight.payload is not None and request.canonical.stream and flight.status == 200:
                answer = self._as_stream(request, flight.payload)
            elif flight.payload is not None:
                answer = Answer(flight.status, list(flight.headers), flight.payload)
            if answer is not None or request.joined:
                return answer
        # Too large to hold, or asked in this form and answered in another: as the upstream would have it.
        return Answer(flight.status, list(flight.headers), stream=reader.data(), close=reader.aclose)

    def _cache_header(self, text: str) -> Headers:
        """The header that says where an answer came from."""
        return [(b"x-semkv", text.encode("latin-1", "replace"))] if self.settings.tell else []

    def _hit_header(self, lookup: Lookup, age_s: float, flags: str) -> Headers:
        """The header of a hit, whose answer is ``age_s`` seconds old."""
        scored = "" if lookup.score is None else f" score={lookup.score:.3f}"
        return self._cache_header(f"hit tier={lookup.tier}{scored} age={age_s:.0f}{flags}")

    def _note_hit(self, request: GatewayRequest, lookup: Lookup, found: Found, seconds: float) -> None:
        self.recent_hits.hit(
            tier=lookup.tier,
            score=lookup.score,
            seconds=seconds,
            tenant=request.client.tenant,
            found=found,
            asked=None if lookup.tier == EXACT else request.canonical.request,
            report=lookup.report,
        )

    def _unreachable(self, error: UpstreamError, tier: str, start: float) -> Answer:
        """There is no answer to a request that came at ``start``, by `time.perf_counter`."""
        self.metrics.request(tier, error.status, time.perf_counter() - start, "")
        return error_answer(error.status, str(error), "upstream_error", self._cache_header(tier))

    # -- passing on ---------------------------------------------------------------------------------------------

    async def forward(self, call: Call, receive: Receive, reason: str) -> Answer:
        """Pass a request on, with nothing changed but the tenant's salt, and its answer back as it comes."""
        start, client = time.perf_counter(), self._tenants.client(call.scope)
        header = self._cache_header(f"pass reason={reason.replace(' ', '_')}" if reason else "pass")
        try:
            reply = await unless_gone(self._send_on(call, client.tenant), receive)
        except NoPlace as error:
            self.metrics.request(PASSED, 400, time.perf_counter() - start, "")
            return error_answer(400, str(error), "invalid_request_error", header)
        except UpstreamError as error:
            return self._unreachable(error, PASSED, start)
        self._tenants.answered(client, reply.status)
        self.metrics.request(PASSED, reply.status, time.perf_counter() - start, "")
        return Answer(reply.status, [*reply.headers, *header], stream=_through(reply), close=reply.aclose)

    async def _send_on(self, call: Call, tenant: str) -> Reply:
        scope = call.scope
        if self.settings.salt and scope["method"] == "POST" and scope["path"] in SALTED:
            call = replace(call, body=await asyncio.to_thread(salted, call.body, tenant, self._secret))
        return await self.upstream.send(call)

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

    # -- operators ----------------------------------------------------------------------------------------------

    async def wrong(self, hit: HitView) -> int:
        """An operator says that a hit was wrong: its answer goes, and the donor of an approximate one."""
        if hit.tier != EXACT:
            await self.cache.report_wrong(hit.hit_id)
        return await self.cache.invalidate(Selector(key=hit.key), dry_run=False)

    def sizes(self) -> dict[str, dict[str, float]]:
        """Sizes (``gauges``), and what the caches counted (``events``). Blocks."""
        sizes = self.cache.sizes()
        sizes["gauges"] |= {
            "flights": float(len(self.outgoing.flights.running)),
            "flight_bytes": float(self.outgoing.flights.held_bytes),
            "flight_limit_bytes": float(self.outgoing.flights.max_total_bytes),
            "memory_limit_bytes": float(self.settings.memory_mib << 20),
            "response_limit_bytes": float(self.settings.store_mib << 20),
        }
        return sizes

    async def aclose(self) -> None:
        """Stop upstream requests, finish what is being written, close the stores."""
        await self.outgoing.aclose()
        await self.upstream.aclose()
        await self.cache.aclose()


async def _through(reply: Reply) -> AsyncIterator[bytes]:
    async for piece in reply.pieces():
        yield piece
