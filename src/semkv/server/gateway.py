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
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from semkv.server.asgi import EVENTS, JSON, Answer, Headers, Receive, error_answer, is_plain_json, unless_gone
from semkv.server.cache_client import EXACT, CacheClient, Lookup
from semkv.server.headers import Cors, Vary
from semkv.server.logs import current
from semkv.server.metrics import EQUAL, JOINED, MISS, PASSED, SIMILAR, HitView, Metrics, RecentHits
from semkv.server.request_key import CanonicalRequest, Uncacheable, canonicalise, loads
from semkv.server.settings import ServerSettings
from semkv.server.singleflight import InFlight, Pending, PendingRequests, Reader, SingleFlight
from semkv.server.sse import NotKeepable, replay
from semkv.server.tenancy import REFUSED, SALTED, BadTags, Client, Controls, NoPlace, Tenants, controls_of, salted
from semkv.server.upstream import Call, Reply, Upstream, UpstreamError, for_others
from semkv.stores.responses.base import Selector
from semkv.tiers.response import Found
from semkv.types import ReuseReport

log = logging.getLogger(__name__)

_LARGE = 64 * 1024  # bytes of a body that is parsed and written in a thread
_SMALL, _KNOWN = 4096, 1024  # bytes of a body whose canonical form is kept, and of how many of the latest it is
_CHECKS = 4  # unchanged requests run for checking at once
_ENDING_S = 5.0  # how long background work may go on at the end
_TAG = 8  # digits of a tenant's digest that operators see
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
        too_old: a stored answer was there, and is older than the client wants.
    """

    call: Call
    canonical: CanonicalRequest
    controls: Controls
    client: Client
    may_read: bool
    start: float
    reader: Reader | None = None
    too_old: bool = False

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
        return len(self.call.body) > _LARGE

    def accepts(self, found: Found) -> bool:
        """Whether a stored answer is fresh enough for the client."""
        oldest = self.controls.max_age_s
        return self.reads and (oldest is None or (found.age_s <= oldest and not found.stale))

    def why(self, *, sampled: bool) -> str:
        """Why it is a miss in spite of what may be stored; empty where nothing was found. ``sampled``: what is drawn at
        random is stored as well."""
        if not self.controls.read:
            return "no-cache"
        if not self.may_read:
            return "sampled" if self.canonical.sampled and not sampled else "key"
        return "too-old" if self.too_old else "" if self.reader is None else self.reader.flight.refused

    def leave(self) -> None:
        """Wait for no upstream answer."""
        if self.reader is not None:
            self.reader.leave()
        self.reader = None


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
        self.flights = SingleFlight(metrics.fault, max_answer_bytes=settings.bounds[1])
        self.pending = PendingRequests(cache)
        self.background: set[asyncio.Task[object]] = set()
        self._secret, self._checks, self._explained = secret, 0, False
        self._asking: dict[bytes, asyncio.Task[bool]] = {}
        self._tenants = Tenants(secret, trusted=settings.networks, single=settings.single_tenant)
        self._vary, self.cors = Vary(settings.vary_headers), Cors(settings.cors_origins)
        self._read_again = lru_cache(_KNOWN)(self._read)

    # -- a request ----------------------------------------------------------------------------------------------

    async def handle(self, call: Call, receive: Receive) -> Answer:
        """Answer a POST to one of `semkv.server.routes.ROUTES`.

        Raises:
            Vanished: the client hung up first.
        """
        start = time.perf_counter()
        controls = controls_of(call.scope)
        if not (controls.read or controls.write):
            return await self.forward(call, receive, "bypass")
        client = self._tenants.client(call.scope)
        canonical: CanonicalRequest | Uncacheable = Uncacheable("tenant")
        if client.believed and len(call.body) > _LARGE:
            canonical = await asyncio.to_thread(self._canonicalise, call, client.tenant)
        elif client.believed:
            canonical = self._canonicalise(call, client.tenant)
        if isinstance(canonical, Uncacheable):
            return await self.forward(call, receive, canonical.reason)
        if (seen := current()) is not None:
            seen.tenant, seen.model = client.tenant[:_TAG], canonical.model
        may_read = (self.settings.sampled or not canonical.sampled) and await self._may_read(client)
        request = GatewayRequest(call, canonical, controls, client, may_read, start)
        if (answer := self._from_memory(request, Lookup(canonical))) is not None:
            return answer
        return await unless_gone(self._answer(request), receive)

    async def _answer(self, request: GatewayRequest) -> Answer:
        """The answer to a request that memory has none for: looked up, joined to another's, or asked upstream.

        Where lookups rarely find anything the upstream is asked meanwhile (``overlap``). What the lookup finds before
        that answer is whole is used instead.
        """
        found, looking = Lookup(request.canonical), None
        overlaps = self.settings.overlap and request.shared and not request.large and self.cache.rarely_finds
        try:
            if overlaps and not self._join(request, found) and not self.pending.busy(request.canonical):
                self._start(request, found)
            reader = request.reader
            if request.controls.read:
                looking = asyncio.ensure_future(
                    self.cache.look_up(
                        request.canonical,
                        writes=request.controls.write,
                        asked_at=None if reader is None else request.start,
                    )
                )
                if reader is not None:
                    if not reader.joined:
                        self._record_soon(request, request.canonical, looking)
                    await asyncio.wait((looking, reader.flight.task), return_when=asyncio.FIRST_COMPLETED)
                if reader is None or looking.done() or not reader.flight.whole:
                    looked = await asyncio.shield(looking)
                    if reader is None or reader.flight.status not in REFUSED:  # who was refused gets nothing of others
                        found = looked
                        if (answer := await self._without_asking(request, found)) is not None:
                            self._give_up(request)
                            return answer
            if request.reader is None:
                self._start(request, found)
                self._record_soon(request, found.canonical, looking)
            return await self._serve(request, found, looking)
        except UpstreamError as error:
            request.leave()
            return self._unreachable(error, MISS, request.start, self._cache_header(MISS))
        except BaseException:
            request.leave()
            raise

    async def _without_asking(self, request: GatewayRequest, found: Lookup) -> Answer | None:
        """The answer that is stored, or that is on its way to a request that asks the same in other words. None where
        an upstream answer is needed: that of ``request.reader``, or of a request that starts before anything is
        awaited, so that of equal requests only one does."""
        if (answer := self._hit(request, found)) is not None:
            return answer
        if found.canonical.key != request.canonical.key:
            self._give_up(request)  # the donor's prompt is asked for
        if request.reader is None and (answer := self._join_or_memory(request, found)) is not None:
            return answer
        if not request.shared or (request.reader is not None and request.reader.joined):
            return None
        near = await self.pending.find(found, request.start)
        if near is not None and (answer := await self._near(request, near)) is not None:
            return answer
        return self._join_or_memory(request, found) if request.reader is None else None

    def _give_up(self, request: GatewayRequest) -> None:
        """Something better than the upstream answer that the request waits for was found."""
        if request.reader is not None and request.reader.is_last:
            self.metrics.cut.inc()
        request.leave()

    # -- credentials --------------------------------------------------------------------------------------------

    async def _may_read(self, client: Client) -> bool:
        """Whether stored answers may be given. The store is asked once for all who hold the same credentials; while it
        is asked again, what it said lately holds, so that no hit waits for it."""
        known = self._tenants.may_read(client)
        if known is not None:
            return known
        asking = self._asking.get(client.name)
        if asking is None:
            asking = self._asking[client.name] = asyncio.ensure_future(self._ask_store(client))
            asking.add_done_callback(lambda _: self._asking.pop(client.name, None))
        return self._tenants.accepted_lately(client) or await asyncio.shield(asking)

    async def _ask_store(self, client: Client) -> bool:
        return self._tenants.told(client, await self.cache.refused(client.name))

    def _answered(self, client: Client, status: int) -> None:
        """Note whether the upstream accepts these credentials, and tell the store where that changed."""
        refused = self._tenants.answered(client, status)
        if refused is not None:
            self._spawn(self.cache.refuse(client.name, refused=refused))

    # -- single flight ------------------------------------------------------------------------------------------

    def _flight_key(self, canonical: CanonicalRequest) -> str:
        """After an invalidation nobody joins a flight that began before it."""
        return f"{canonical.key} {self.cache.responses.begin()}"

    def _join(self, request: GatewayRequest, lookup: Lookup) -> bool:
        """Whether an equal request is on its way, which this one joins."""
        if request.shared:
            request.reader = self.flights.join(self._flight_key(lookup.canonical))
        return request.reader is not None

    def _join_or_memory(self, request: GatewayRequest, found: Lookup) -> Answer | None:
        """Join an equal request that is on its way; where there is none, the answer that memory may have by now."""
        return None if self._join(request, found) else self._from_memory(request, found)

    def _start(
        self, request: GatewayRequest, lookup: Lookup, *, stream: bool | None = None, shared: bool = True
    ) -> None:
        """Send what a lookup says upstream, and wait for it; with ``shared``, equal requests may join from here on."""
        canonical, started, since = lookup.canonical, time.perf_counter(), self.cache.responses.begin()
        stream = canonical.stream if stream is None else stream
        raw = b"" if request.large else _body(canonical, stream=stream)

        async def send() -> Reply:
            body = raw or await asyncio.to_thread(_body, canonical, stream=stream)
            reply = await self.upstream.send(request.call.with_body(body))
            self.cors.heard(request.call.scope, reply.status, reply.headers)
            return reply

        async def on_whole(flight: InFlight) -> None:
            seconds = time.perf_counter() - started
            self.metrics.upstream(seconds)
            if flight.status == 200 and flight.payload is not None:
                self.recent_hits.computed(canonical.key, seconds)
                asked_for = canonical.route.converts or flight.streamed == canonical.stream
                if asked_for and request.controls.write and not flight.refused:
                    flight.stored = await self.cache.store(canonical, flight.payload, since)

        on_status = partial(self._answered, request.client)
        refusal = partial(self._vary.refusal, by_credentials=request.client.by_credentials)
        reading = canonical.route.stream()
        flight = InFlight(self.flights, self._flight_key(canonical), send, on_status, on_whole, reading, refusal)
        request.reader = self.flights.start(flight, shared=shared and request.shared)

    async def _near(self, request: GatewayRequest, near: Lookup) -> Answer | None:
        """The answer to a request on its way that asks the same in other words; None where it is not to be had.

        A stream is passed on as it comes. A caller who has had no byte of it yet goes upstream itself once it turns out
        that the cache may not serve the answer: it failed, was cut off, or cannot be stored for another reason.
        """
        reader = self.flights.join(self._flight_key(near.canonical))
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
        self.metrics.request(JOINED, 200, seconds)
        self.metrics.joins.labels(SIMILAR).inc()
        self._spawn(self._note_near(request, near, flight, seconds))
        headers = [*for_others(flight.headers), *self._hit_header(near, 0.0, " joined")]
        reader = flight.reader()  # last, so that it is not left behind by a fault before
        return Answer(200, headers, stream=reader.pieces(usage=request.canonical.include_usage), close=reader.aclose)

    async def _note_near(self, request: GatewayRequest, near: Lookup, flight: InFlight, seconds: float) -> None:
        """Note a stream that was joined, once it is known to be an answer that the cache serves."""
        await asyncio.wait((flight.task,))
        found = await self.cache.stored(near.canonical) if flight.stored else None
        if found is not None:
            self._note_hit(request, replace(near, found=found), found, seconds)
            self._check_soon(request, near.report, found.response.payload)

    # -- serving ------------------------------------------------------------------------------------------------

    def _from_memory(self, request: GatewayRequest, lookup: Lookup) -> Answer | None:
        """What memory has under a key."""
        found = self.cache.responses.peek(lookup.canonical.key) if request.reads else None
        return None if found is None else self._hit(request, Lookup(lookup.canonical, found, lookup.report))

    def _hit(self, request: GatewayRequest, lookup: Lookup, *, joined: bool = False) -> Answer | None:
        """The stored answer in the form the client asked for; None where it will not do. ``joined``: the client waited
        for it to be computed for another request."""
        found = lookup.found
        if found is None or not request.accepts(found):
            request.too_old = found is not None and request.reads
            return None
        payload = found.response.payload
        answer = self._as_stream(request, payload) if request.canonical.stream else Answer(200, [JSON], payload)
        if answer is None:
            return None
        if found.stale and request.controls.write:
            self._refresh(request, lookup)
        seconds = time.perf_counter() - request.start
        self.metrics.request(JOINED if joined else lookup.tier, 200, seconds)
        if joined:
            self.metrics.joins.labels(SIMILAR).inc()
        self._note_hit(request, lookup, found, seconds)
        self._check_soon(request, lookup.report, payload)
        flags = (" stale" if found.stale else "") + (" joined" if joined else "")
        answer.headers.extend(self._hit_header(lookup, found.age_s, flags))
        return answer

    def _as_stream(self, request: GatewayRequest, payload: bytes) -> Answer | None:
        """A kept answer as a stream; None where a stream would lose something."""
        if not request.canonical.route.converts:
            return Answer(200, [EVENTS], payload)
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
        if answer is None:  # another's key was refused or its answer is its own, or a form that this one cannot have
            request.leave()
            self._start(request, lookup, shared=False)
            self._record_soon(request, lookup.canonical, looking)
            answer = await self._upstream_answer(request)
        assert answer is not None
        assert request.reader is not None
        tier = JOINED if request.reader.joined else MISS
        if request.reader.joined:
            self.metrics.joins.labels(EQUAL).inc()
        seconds = time.perf_counter() - request.start
        self.metrics.request(tier, request.reader.flight.status, seconds)
        reuse = "" if lookup.score is None else f" reuse={lookup.tier} score={lookup.score:.3f}"
        why = request.why(sampled=self.settings.sampled) if tier == MISS else ""
        if why:
            self.metrics.uncacheable(why)
            self._explain(request, why)
        text = f"{tier}{reuse}{why and f' reason={why}'}"
        answer.headers.extend(self._cache_header(text, lookup, request.reader.flight))
        if answer.stream is None:
            request.leave()
        return answer

    def _explain(self, request: GatewayRequest, why: str) -> None:
        """Say once what is to be done about clients that send no temperature."""
        if why == "sampled" and not self._explained and request.canonical.temperature is None:
            self._explained = True
            log.warning(
                "a request without a temperature is not answered from the cache, as its answer is drawn at random:"
                " let clients send temperature 0 or a seed, or start with --sampled"
            )

    async def _upstream_answer(self, request: GatewayRequest) -> Answer | None:
        """The same; None where it is to be had only by a request of one's own."""
        reader = request.reader
        assert reader is not None
        flight, stream, ours = reader.flight, request.canonical.stream, reader.joined
        await flight.until(lambda: flight.status)
        if not flight.status and flight.error is not None:
            raise flight.error
        if reader.joined and (flight.status in REFUSED or flight.refused):  # it says nothing of this client's request
            return None
        headers = for_others(flight.headers) if ours else list(flight.headers)
        if not (flight.streamed and stream):
            await flight.until(lambda: not flight.shared)
            if flight.done or flight.streamed:
                if flight.error is not None:
                    raise flight.error
                answer: Answer | None = None
                converts = request.canonical.route.converts
                if flight.payload is None or (flight.streamed and not converts):
                    pass
                elif flight.streamed:
                    answer = Answer(200, [JSON], flight.payload)
                elif converts and stream and flight.status == 200:
                    answer = self._as_stream(request, flight.payload)
                else:
                    answer = Answer(flight.status, headers, flight.payload)
                if answer is not None and not ours:
                    answer.ours = False
                    if answer.headers is not headers:  # in another form
                        answer.headers.extend(pair for pair in headers if pair[0].startswith(b"access-control-"))
                if answer is not None or ours:
                    return answer
        # As it comes: a stream, or too large to hold, or asked in this form and answered in another.
        usage = not (flight.streamed and stream) or request.canonical.include_usage
        return Answer(flight.status, headers, stream=reader.pieces(usage=usage), close=reader.aclose, ours=ours)

    def _cache_header(self, text: str, lookup: Lookup | None = None, flight: InFlight | None = None) -> Headers:
        """The header that says where an answer came from; logs and spans say it too."""
        if (seen := current()) is not None:
            seen.cache, seen.lookup, seen.flight = text, lookup, flight
        return [(b"x-semkv", text.encode("latin-1", "replace"))] if self.settings.tell else []

    def _hit_header(self, lookup: Lookup, age_s: float, flags: str) -> Headers:
        """The header of a hit, whose answer is ``age_s`` seconds old."""
        scored = "" if lookup.score is None else f" score={lookup.score:.3f}"
        return self._cache_header(f"hit tier={lookup.tier}{scored} age={age_s:.0f}{flags}", lookup)

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

    def _unreachable(self, error: UpstreamError, tier: str, start: float, header: Headers) -> Answer:
        """There is no answer to a request that came at ``start``, by `time.perf_counter`."""
        self.metrics.request(tier, error.status, time.perf_counter() - start)
        return error_answer(error.status, str(error), "upstream_error", header)

    # -- passing on ---------------------------------------------------------------------------------------------

    async def forward(self, call: Call, receive: Receive, reason: str) -> Answer:
        """Pass a request on, with nothing changed but the tenant's salt, and its answer back as it comes."""
        start, client = time.perf_counter(), self._tenants.client(call.scope)
        if (seen := current()) is not None:
            seen.tenant = client.tenant[:_TAG]
        header = self._cache_header(f"pass reason={reason.replace(' ', '_')}")
        self.metrics.uncacheable(reason)
        try:
            reply = await unless_gone(self._send_on(call, client.tenant), receive)
        except NoPlace as error:
            self.metrics.request(PASSED, 400, time.perf_counter() - start)
            return error_answer(400, str(error), "invalid_request_error", header)
        except UpstreamError as error:
            return self._unreachable(error, PASSED, start, header)
        if call.scope["method"] != "OPTIONS":  # which anybody may ask
            self._answered(client, reply.status)
        self.cors.heard(call.scope, reply.status, reply.headers)
        self.metrics.request(PASSED, reply.status, time.perf_counter() - start)
        headers = [*reply.headers, *header]
        return Answer(reply.status, headers, stream=reply.pieces(), close=reply.aclose, ours=False)

    async def _send_on(self, call: Call, tenant: str) -> Reply:
        scope = call.scope
        if self.settings.salt and scope["method"] == "POST" and scope["path"] in SALTED:
            call = replace(call, body=await asyncio.to_thread(salted, call.body, tenant, self._secret))
        return await self.upstream.send(call)

    def _canonicalise(self, call: Call, tenant: str) -> CanonicalRequest | Uncacheable:
        if not is_plain_json(call.scope):
            return Uncacheable("content type")
        try:
            tags = self._tenants.tags_of(call.scope)
        except BadTags:
            return Uncacheable("tags")
        read = self._read_again if len(call.body) <= _SMALL else self._read
        return read(call.scope["path"], call.body, tenant, tags, self._vary.read(call.scope))

    def _read(
        self, path: str, raw: bytes, tenant: str, tags: tuple[str, ...], headers: tuple[tuple[str, str], ...]
    ) -> CanonicalRequest | Uncacheable:
        """The canonical form of a body, which nothing else decides."""
        try:
            body = loads(raw)
        except (ValueError, RecursionError):
            return Uncacheable("no JSON")
        if not isinstance(body, dict):
            return Uncacheable("no JSON object")
        settings = self.settings
        return canonicalise(
            path,
            body,
            tenant=tenant,
            secret=self._secret,
            version=settings.data_version,
            remote_media=settings.remote_media,
            tags=tags,
            salts=settings.salt,
            headers=headers,
        )

    def look_upstream(self) -> None:
        """Say in the log whether the upstream answers."""
        self._spawn(self._look_upstream())

    async def _look_upstream(self) -> None:
        if await self.upstream.ready():
            log.info("the upstream answers")
        else:
            log.warning("the upstream does not answer yet: until it does, only stored responses are served")

    # -- recording and checking, in the background ----------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Do something in the background; a fault in it is counted."""
        task = asyncio.ensure_future(work)
        self.background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self.background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", exc_info=error)
            self.metrics.fault("background")

    def _record_soon(
        self, request: GatewayRequest, canonical: CanonicalRequest, looking: asyncio.Future[Lookup] | None
    ) -> None:
        """Record what the request just started brings; from here on near-repeats may join it."""
        assert request.reader is not None
        if self.cache.semantic is None or looking is None or (looking.done() and looking.result().report is None):
            return
        pending = Pending(canonical, request.reader.flight, looking, self.cache)
        if self.flights.is_shared(pending.flight):
            self.pending.add(pending)
        self._spawn(self._record(request, pending))

    async def _record(self, request: GatewayRequest, pending: Pending) -> None:
        """Tell the semantic cache what was computed; until then near-repeats find the request itself."""
        canonical, flight, payload = pending.canonical, pending.flight, None
        try:
            lookup = await asyncio.shield(pending.looking)
            report = lookup.report
            if report is not None and lookup.canonical.key != canonical.key:
                report = report.unused()  # the donor that was found had no part in what was asked
            await asyncio.wait((flight.task,))
            await asyncio.sleep(_RECORD_DELAY_S)
            kept = flight.stored or (canonical.sampled and not flight.refused)
            if flight.status == 200 and request.controls.write and kept:
                payload = flight.payload
            if report is not None and payload is not None:
                await self.cache.record(report, payload, canonical.model)
        finally:
            self.pending.end(pending)
        if payload is not None and flight.stored and report is not None and report.plan.substituted:
            self._check_soon(request, report, payload)  # of a donor's prompt, whose answer was not there anymore

    def _refresh(self, request: GatewayRequest, lookup: Lookup) -> None:
        """Fetch a fresh answer in place of a stale one: what is on its way already goes on for it."""
        background = replace(request, reader=None)
        self._join(background, lookup)
        self._spawn(self._fetch(background, lookup))

    def _check_soon(self, request: GatewayRequest, report: ReuseReport | None, given: bytes) -> None:
        """Run the unchanged request of an approximate hit, if it is selected and not too many are running."""
        if report is not None and self._checks < _CHECKS and self.cache.should_check(report):
            self._checks += 1
            self._spawn(self._check(replace(request, reader=None), report, given))

    async def _check(self, request: GatewayRequest, report: ReuseReport, given: bytes) -> None:
        """Compare the unchanged request's own answer with the one that was given, to know how often they differ."""
        try:
            own = await self._fetch(request, Lookup(request.canonical))
        finally:
            self._checks -= 1
        if own is not None:
            await self.cache.check(report, own, given)

    async def _fetch(self, request: GatewayRequest, lookup: Lookup) -> bytes | None:
        """The upstream's answer to a request, stored on the way; None where there is none."""
        if request.reader is None and not self._join(request, lookup):
            self._start(request, lookup, stream=False)
        assert request.reader is not None
        flight = request.reader.flight
        try:
            await flight.until(lambda: not flight.shared)
            return flight.payload if flight.status == 200 and not flight.refused else None
        finally:
            request.leave()

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
            "flights": float(len(self.flights.running)),
            "flight_bytes": float(self.flights.held_bytes),
            "flight_limit_bytes": float(self.flights.max_total_bytes),
            "memory_limit_bytes": float(self.settings.memory_mib << 20),
            "response_limit_bytes": float(self.settings.store_mib << 20),
        }
        return sizes

    async def aclose(self) -> None:
        """Stop upstream requests, finish what is being written, close the stores."""
        self.flights.close()
        if self.background:
            await asyncio.wait(self.background, timeout=_ENDING_S)
        await self.upstream.aclose()
        await self.cache.aclose()


def _body(canonical: CanonicalRequest, *, stream: bool) -> bytes:
    """What is sent upstream."""
    body = canonical.body()
    if not canonical.route.converts:
        return _encode(body).encode()
    body.pop("stream_options", None)
    body["stream"] = stream
    if stream:  # the usage is part of the whole answer; a client that did not ask for it does not see it
        body["stream_options"] = {"include_usage": True}
    return _encode(body).encode()
