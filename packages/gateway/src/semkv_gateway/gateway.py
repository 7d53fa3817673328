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
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

from semkv.tenants import keyed_digest
from semkv.tiers.checking import pair_of
from semkv.tiers.matching import PendingEntry
from semkv.types import Exactness, ReuseReport
from semkv_dashboard.advice import SAMPLED, Advice
from semkv_dashboard.feedback import HEADER as HIT
from semkv_dashboard.feedback import Feedback
from semkv_dashboard.hit_ids import HitIds, WrongHit
from semkv_dashboard.recent import Hit, Recent, near_of
from semkv_gateway import http, strict_json
from semkv_gateway.cache_client import EXACT, CacheClient, Lookup
from semkv_gateway.document_reuse import (
    APPROXIMATE,
    COMPARED,
    FILE,
    LOST,
    DocumentReuse,
    Reuse,
    may_have_reused,
    without_spans,
)
from semkv_gateway.documents import Documents
from semkv_gateway.headers import Separation
from semkv_gateway.holdout import Holdout
from semkv_gateway.http import Answer, Call, Headers, Receive, Reply, UpstreamError
from semkv_gateway.judge import Judge
from semkv_gateway.kv_hints import HINTED, PARAMS, conversation_of, without_hints
from semkv_gateway.logs import ONLY, Seen, request_id
from semkv_gateway.metrics import EQUAL, JOINED, MISS, PASSED, SIMILAR, Metrics
from semkv_gateway.outcome import Outcome
from semkv_gateway.request_key import CanonicalRequest, Deployment, canonicalise, loads
from semkv_gateway.response_cache import Found
from semkv_gateway.responses.store import Selector, StoredResponse
from semkv_gateway.routes import ROUTES, Unkeyable
from semkv_gateway.rules import TAG_DIGITS
from semkv_gateway.salts import SALTED, NoPlace, read_object, salted
from semkv_gateway.sampling import Sampling, may_refuse, names_temperature
from semkv_gateway.settings import ServerSettings
from semkv_gateway.singleflight import InFlight, Reader, SingleFlight
from semkv_gateway.sse import Assembler, NotKeepable, replay, text_of, without_usage
from semkv_gateway.tenancy import REFUSED, Client, Controls, Tenants, controls_of
from semkv_gateway.upstreams import Upstreams
from semkv_gateway.usage import zeroed
from semkv_gateway.worth import Worth

log = logging.getLogger(__name__)

_LARGE = 64 * 1024  # bytes of a body that is parsed in a thread
# The canonical forms of the latest bodies are kept: of how many bytes at most, and of how many bodies.
_SMALL = 4096
_KNOWN = 1024
_CHECKS = 4  # unchanged requests run for checking at once
_ENDING_S = 5.0  # how long background work may go on at the end
_RECORD_DELAY_S = (
    0.005  # a record shares the interpreter with the answer that goes out and the next request
)
_T = TypeVar("_T")
_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(slots=True)
class GatewayRequest:
    """A request that has a key."""

    call: Call  # as it came
    canonical: CanonicalRequest
    controls: Controls  # what the client asks of the cache
    client: Client
    blocked: str  # why no stored answer will do, such as `sampled`; empty where one will
    start: float  # by `time.perf_counter`
    reader: Reader | None = None  # of the upstream answer that it waits for
    too_old: bool = False  # a stored answer was there, and is older than the client wants

    @property
    def shared(self) -> bool:
        """An answer that is on its way to another request would do, and the other way round."""
        return not self.blocked and self.controls.write and not self.controls.only

    def accepts(self, found: Found) -> bool:
        """Whether a stored answer is fresh enough for the client."""
        oldest = self.controls.max_age_s
        return not self.blocked and (oldest is None or (found.age_s <= oldest and not found.stale))

    @property
    def why(self) -> str:
        """Why it is a miss in spite of what may be stored; empty where nothing was found."""
        if self.blocked or self.too_old:
            return self.blocked or "too-old"
        return "" if self.reader is None else self.reader.flight.refused

    def leave(self) -> None:
        """Wait for no upstream answer."""
        if self.reader is not None:
            self.reader.leave()
        self.reader = None


class Asking(InFlight):
    """The answer to a canonical request that goes upstream for a client's request, and what becomes of it.

    Args:
        gateway: keeps it.
        request: the client's.
        canonical: the request that is sent.
        key: others join by it.
        streams: a stream is asked for.
        reuse: documents are reused, so the answer is approximate; None where they are not.
    """

    def __init__(
        self,
        gateway: Gateway,
        request: GatewayRequest,
        canonical: CanonicalRequest,
        *,
        key: str,
        streams: bool,
        reuse: Reuse | None,
    ) -> None:
        super().__init__(gateway.flights, key, canonical.route.stream())
        self.gateway = gateway
        self.request = request
        self.canonical = canonical
        self.streams = streams
        self.reuse = reuse
        self.started = time.perf_counter()
        self.since = gateway.cache.responses.begin()  # an invalidation after it removes the answer
        self.begun = gateway.worth.sent(self)

    async def send(self) -> Reply:
        if self.gateway.stopping.is_set():
            raise _stopped()
        self.gateway.documents.sent(self.canonical)
        tenant = self.request.client.tenant
        conversation = None
        hints = self.gateway.hints(self.canonical.endpoint)
        if hints:
            about = (self.canonical.given, tenant, self.gateway.secret)
            if len(self.request.call.body) > _LARGE:
                conversation = await asyncio.to_thread(conversation_of, *about)
            else:
                conversation = conversation_of(*about)
        return await self.gateway.upstreams.send(
            self._call,
            tenant=tenant,
            model=self.canonical.model,
            conversation=conversation,
            hints=hints,
            spans=None if self.reuse is None else self.canonical.spans,
        )

    def _call(self, salted: bool) -> Call:
        body = _body(self.canonical, stream=self.streams, salted=salted)
        return self.request.call.with_body(body)

    def on_head(self, status: int, headers: Headers) -> str:
        """Note what an answer's head says; why the answer may go to nobody else, empty where it may."""
        why = self.gateway.read_head(self.request.client, status, headers)
        return why if self.reuse is None else why or APPROXIMATE

    async def on_whole(self) -> None:
        """Store a whole answer that has the form that was asked for."""
        seconds = time.perf_counter() - self.started
        self.gateway.metrics.upstream_seconds.observe(seconds)
        if self.payload is None or not self.whole:
            return
        is_report = self.refused == APPROXIMATE and not self.streamed
        if is_report and not may_have_reused(self.payload):
            self.refused = ""  # it says that it is exact
        worth = self.gateway.worth
        worth.computed(self.canonical, self.payload, seconds=seconds, begun=self.begun)
        converts = self.canonical.route.converts
        in_this_form = self.streamed == self.streams or (converts and not self.verbatim)
        if not in_this_form or self.refused or not self.request.controls.write:
            return
        if not self.gateway.rules.keeps(self.payload, verbatim=self.verbatim):
            self.gateway.metrics.unkept("rule")
            return
        as_it_came = converts and self.verbatim
        kept_as = self.canonical.streamed() if as_it_came else self.canonical
        self.stored = await self.gateway.cache.store(kept_as, self.payload, self.since)


class Gateway:
    """Answers requests."""

    def __init__(
        self,
        settings: ServerSettings,
        secret: bytes,
        upstreams: Upstreams,
        cache: CacheClient,
        metrics: Metrics,
        *,
        sampling: Sampling,
        worth: Worth,
        judge: Judge | None = None,
    ) -> None:
        self.settings = settings
        self.judge = judge
        self.worth = worth
        self.holdout = Holdout(settings.holdout, metrics)
        self.upstreams = upstreams
        self.cache = cache
        self.metrics = metrics
        self.recent = Recent(text_of)
        self.names = metrics.names
        self.feedback = Feedback(
            HitIds(keyed_digest(secret, "hit:", "")),
            cache,
            lambda outcome: metrics.feedback.labels(outcome).inc(),
            settings.feedback,
        )
        self.flights = SingleFlight(metrics.fault, metrics.unkept)
        # Lookups of requests whose answers are on their way, or are being recorded: near-repeats find these here.
        self.pending: dict[InFlight, Lookup] = {}  # in the order in which they went upstream
        self.background: set[asyncio.Task[object]] = set()
        self.stopping = asyncio.Event()  # what is still open is ended
        self._stop: asyncio.TimerHandle | None = None
        self.advice = Advice(steady=settings.default_temperature is not None)
        count = metrics.documents_settled
        self.documents = Documents(settings.reorder_documents, count, metrics.fault)
        self.reuse = DocumentReuse(
            settings.document_error_rate,
            metrics.document_reused,
            settings.cache_dir / FILE,
            metrics.fault,
        )
        self._sampling = sampling
        self.rules = cache.rules
        self.secret = secret
        self._known_fields = frozenset(settings.known_fields)
        self._checks = 0
        self._separation = Separation(settings.ignored_headers)
        self._tenants = Tenants(
            secret,
            separation=self._separation,
            trusted=settings.networks,
            single=settings.single_tenant,
        )

    # -- a request ----------------------------------------------------------------------------------------------

    async def handle(self, call: Call, receive: Receive) -> Answer:
        """Answer a POST to one of `semkv_gateway.routes.ROUTES`. Raises `Vanished` where the client hung up first."""
        start = time.perf_counter()
        controls = controls_of(call.scope)
        if not (controls.read or controls.write):
            return await self.forward(call, receive, "bypass")
        client = await self._client(call)
        self.metrics.separated(client.unknown)
        try:
            if len(call.body) > _LARGE:
                asked, settled = await asyncio.to_thread(self._settled, call, client, controls)
            else:
                asked, settled = self._settled(call, client, controls)
        except Unkeyable as error:
            self.advice.count(str(error))
            return await self.forward(call, receive, str(error))
        request = GatewayRequest(
            call=call,
            canonical=settled,
            controls=controls,
            client=client,
            blocked=await self._blocked(settled, controls, client),
            start=start,
        )
        self.advice.count("" if request.blocked == "no-cache" else request.blocked)
        outcome = Outcome("")
        try:
            answer = await self._answer_or_vanish(request, receive)
            steadied = settled.steadied and not may_refuse(answer)
            if settled.steadied and not steadied:
                answer = await self._without_temperature(request, asked, answer, receive)
            outcome = answer.outcome or outcome
            outcome.steadied = steadied
            outcome.reordered = settled.reordered
        except http.Vanished as vanished:
            vanished.outcome = outcome
            raise
        finally:
            self._say_who(outcome, client)
            outcome.model = asked.model
        return answer

    async def _answer_or_vanish(self, request: GatewayRequest, receive: Receive) -> Answer:
        """The answer to a request. Raises `Vanished` where the client hung up first."""
        answer = self._from_memory(request, Lookup(request.canonical))
        return await http.unless_gone(self._answer(request), receive) if answer is None else answer

    async def _without_temperature(
        self, request: GatewayRequest, asked: CanonicalRequest, error: Answer, receive: Receive
    ) -> Answer:
        """The answer to a request as it came, after an error that may be about the temperature it was given. It is
        about that where it names it and the request succeeds without: of an error alone nothing follows."""
        if error.close is not None:
            await error.close()
        plain = self._sampling.as_drawn(asked, request.controls)
        blocked = await self._blocked(plain, request.controls, request.client)
        again = replace(request, canonical=plain, blocked=blocked, reader=None, too_old=False)
        answer = await self._answer_or_vanish(again, receive)
        if 200 <= answer.status < 300 and names_temperature(error):
            self._sampling.refuses(asked)
        return answer

    async def _blocked(
        self, canonical: CanonicalRequest, controls: Controls, client: Client
    ) -> str:
        """Why no stored answer will do; empty where one will."""
        if not controls.read:
            return "no-cache"
        if canonical.sampled:
            return SAMPLED
        return "" if await self._may_read(client) else "key"

    async def _answer(self, request: GatewayRequest) -> Answer:
        """The answer to a request that memory has none for: looked up, joined to another's, or asked upstream."""
        found = held = Lookup(request.canonical)
        try:
            if request.controls.read and request.blocked != SAMPLED:
                held = await self.cache.look_up(request.canonical, writes=request.controls.write)
                found = self.holdout.applied(request.canonical, held)
                answer = await self._without_asking(request, found)
                if answer is not None:
                    return answer
            if request.controls.only:
                return self._none_stored(MISS)
            if request.reader is None:
                self._start(request, found)
            self._compare_held(request, found, held)
            return await self._serve(request, found)
        except UpstreamError as error:
            request.leave()
            return self._unreachable(error, MISS, Outcome(MISS), request.start)
        except BaseException:
            request.leave()
            raise

    async def _without_asking(self, request: GatewayRequest, found: Lookup) -> Answer | None:
        """The answer that is stored, or that is on its way to a request that asks the same in other words. None where
        an upstream answer is needed: that of ``request.reader``, or of a request that starts before anything is
        awaited, so that of equal requests only one does."""
        answer = self._hit(request, found) or self._join_or_memory(request, found)
        if answer is not None or request.reader is not None or not request.shared:
            return answer
        near = await self._similar(found)
        if near is not None:
            answer = await self._near(request, near)
        elif self.judge is not None and not self.holdout.holds(request.canonical):
            judged = await self.judge.settled(request.call, request.canonical, found)
            answer = None if judged is None else self._hit(request, judged)
        return answer or self._join_or_memory(request, found)

    async def hear(self, call: Call) -> Answer:
        """The answer to a client that calls a hit wrong."""
        client = await self._client(call)
        if not client.believed:
            return http.error_answer(403, "a tenant is named by a client that is no trusted proxy")
        shown = client.tenant[:TAG_DIGITS]
        try:
            status, said = await self.feedback.hear(client.tenant, shown, call.body)
        except Exception:  # a store that is away; to say it again does no harm
            log.exception("a wrong hit could not be noted")
            self.metrics.fault("feedback")
            return http.error_answer(503, "the wrong hit could not be noted: say it again later")
        if status != 200:
            return http.error_answer(status, said["message"])
        return Answer(200, [http.JSON], _encode(said).encode())

    def ended(self, seen: Seen) -> None:
        """Count a request by time, model and tenant, and show operators what was no hit."""
        outcome = seen.outcome
        if not outcome.kind:
            return
        # Names of no model, and keys that are refused, would fill the tables.
        failed = seen.status >= 500 or seen.status == 429
        if seen.status == 200 or failed:
            kind = "error" if failed else outcome.kind
            self.metrics.note(f"model {kind}", outcome.model or "-")
            self.metrics.note(f"tenant {kind}", outcome.tenant or "-")
        if outcome.kind not in ("hit", JOINED) and seen.method == "POST":
            self.recent.missed(**seen.row(), **outcome.details())

    # -- credentials --------------------------------------------------------------------------------------------

    async def _client(self, call: Call) -> Client:
        """Who sent a request. What a tenant is called is learned at its first request."""
        client = self._tenants.client(call.scope)
        if self.settings.separate_users:
            client = await self._user(client, call.body)
        if client.tenant and client.tenant not in self.names and client.believed:
            keys, named = self._tenants.told(call.scope)
            self.names.learn(client.tenant, keys=keys, named=named)
        return client

    async def _user(self, client: Client, body: bytes) -> Client:
        """The end user of a client, whom a body may name."""
        if len(body) > _LARGE:
            return await asyncio.to_thread(self._tenants.of_user, client, body)
        return self._tenants.of_user(client, body)

    async def _may_read(self, client: Client) -> bool:
        """Whether stored answers may be given."""
        known = self._tenants.may_read(client)
        return (
            self._tenants.looked_up(client, await self.cache.refused(client.name))
            if known is None
            else known
        )

    def read_head(self, client: Client, status: int, headers: Headers) -> str:
        """Note what the head of a client's answer says; why the answer may go to nobody else, empty where it may."""
        self._answered(client, status)
        return self._separation.refusal(headers, by_credentials=client.by_credentials)

    def _answered(self, client: Client, status: int) -> None:
        """Note whether the upstream accepts these credentials, and tell the store where that changed."""
        refused = self._tenants.answered(client, status)
        if refused is not None:
            self.spawn(self.cache.refuse(client.name, refused=refused))

    # -- single flight ------------------------------------------------------------------------------------------

    def _flight_key(self, canonical: CanonicalRequest) -> str:
        """After an invalidation nobody joins a flight that began before it."""
        return f"{canonical.key} {self.cache.responses.begin()}"

    def _join(self, request: GatewayRequest, canonical: CanonicalRequest) -> bool:
        """Whether an equal request is on its way, which this one joins."""
        if request.shared:
            request.reader = self.flights.join(self._flight_key(canonical))
        return request.reader is not None

    def _join_or_memory(self, request: GatewayRequest, found: Lookup) -> Answer | None:
        """Join an equal request that is on its way; where there is none, the answer that memory may have by now."""
        return None if self._join(request, found.canonical) else self._from_memory(request, found)

    def _start(
        self,
        request: GatewayRequest,
        lookup: Lookup,
        *,
        stream: bool | None = None,
        shared: bool = True,
        form: str = "",
    ) -> None:
        """Send the canonical request of a lookup upstream for a request that waits for the answer, and record what it
        brings. ``shared``: others may join from here on, by ``form`` where they want no other form."""
        canonical = lookup.canonical
        reuse = self.reuse.accept(canonical)
        shared = shared and request.shared and reuse is None
        flight = Asking(
            self,
            request,
            canonical,
            key=form or self._flight_key(canonical),
            streams=canonical.stream if stream is None or not canonical.route.converts else stream,
            reuse=reuse,
        )
        request.reader = self.flights.start(flight, shared=shared)
        if reuse is not None:
            flight.task.add_done_callback(lambda _: self._came(request, reuse, flight))
        if lookup.report is not None:
            if shared:
                self.pending[flight] = lookup
            self.spawn(self._record(request, flight, lookup.canonical, lookup.report))

    async def _similar(self, found: Lookup) -> Lookup | None:
        """What a request that found nothing may use of others on their way that ask the same in other words. They are
        listed before anything is awaited."""
        own = found.entry
        if own is None or self.cache.leaves_out_similar(found):
            return None
        others = dict[PendingEntry, str]()
        for flight, pending in self.pending.items():
            entry = pending.entry
            key = pending.canonical.key
            lost = flight.done and not flight.stored
            if entry is not None and not lost and key != found.canonical.key and entry.meets(own):
                others[entry] = key
        return await self.cache.join(found, others) if others else None

    async def _near(self, request: GatewayRequest, near: Lookup) -> Answer | None:
        """The answer to a request on its way that asks the same in other words, once it is whole. None where the cache
        may not serve it: it failed, was cut off, or cannot be stored for another reason."""
        reader = self.flights.join(self._flight_key(near.canonical))
        if reader is not None:
            try:
                await reader.flight.until(lambda: not reader.flight.storable)
            finally:
                reader.leave()
        found = await self.cache.stored(near.canonical.key)
        return self._hit(request, replace(near, found=found), joined=reader is not None)

    # -- serving ------------------------------------------------------------------------------------------------

    def _from_memory(self, request: GatewayRequest, lookup: Lookup) -> Answer | None:
        """What memory has under a key. Of a donor a stream that is for streams only is no answer to others."""
        own = lookup.canonical.key == request.canonical.key
        keys = lookup.canonical.keys if own else (lookup.canonical.key,)
        for key in () if request.blocked else keys:
            found = self.cache.responses.peek(key)
            if found is None:
                continue
            answer = self._hit(request, Lookup(lookup.canonical, found, lookup.report))
            if answer is not None:
                return answer
        return None

    def _hit(
        self, request: GatewayRequest, lookup: Lookup, *, joined: bool = False
    ) -> Answer | None:
        """The stored answer in the form the client asked for; None where it will not do. ``joined``: the client waited
        for it to be computed for another request."""
        found = lookup.found
        if found is None or not request.accepts(found):
            request.too_old = found is not None and not request.blocked
            return None
        payload = found.response.payload
        verbatim = found.response.key != lookup.canonical.key
        answer = self._in_form(request, payload, verbatim=verbatim)
        if answer is None:
            return None
        if found.stale and request.shared:
            self._refresh(request, lookup, stream=verbatim)
        seconds = time.perf_counter() - request.start
        self.metrics.request(JOINED if joined else lookup.tier, 200, seconds)
        if joined:
            self.metrics.joins.labels(SIMILAR).inc()
        number = self._number(lookup, found.response)
        answer.headers.append((HIT, number.encode()))
        hit = Hit(
            number=number,
            request_id=request_id(),
            tier=lookup.tier,
            score=lookup.score,
            seconds=seconds,
            age_s=found.age_s,
            tenant=request.client.tenant[:TAG_DIGITS],
            key=found.response.key,
            model=found.response.model,
            prompt=found.response.prompt,
            payload=payload,
        )
        if lookup.tier == EXACT:
            self.recent.hit(hit, None, ())
        else:
            sent = request.canonical.request
            self.recent.hit(hit, lookup.report, () if sent is None else sent.segments)
        self.worth.hit(lookup, found.response)
        self.holdout.answered(request.canonical, lookup, seconds)
        self._check_soon(request, lookup.report, payload)
        is_zeroed = self.settings.hit_usage == "zero"
        if is_zeroed:
            answer.body = zeroed(answer.body)
        answer.outcome = Outcome(
            "hit",
            tier=lookup.tier,
            score=lookup.score,
            donor=lookup.donor,
            age_s=found.age_s,
            stale=found.stale,
            judged=lookup.judged,
            joined=joined,
            zeroed=is_zeroed,
            payload=lambda: payload,
        )
        return answer

    def _number(self, lookup: Lookup, response: StoredResponse) -> str:
        """The id of a hit, by which its client may call it wrong."""
        report = lookup.report
        created = int(response.created)
        ids = self.feedback.ids
        if report is None or report.plan.match is None or not lookup.donor:
            return ids.exact(response.partition, created, response.key)
        is_similar = report.plan.match.exactness is Exactness.APPROXIMATE
        pair = pair_of(report.request, lookup.donor) if is_similar else ""
        hit = WrongHit(created, response.key, donor=lookup.donor, pair=pair)
        return ids.of(response.partition, hit)

    def _in_form(self, request: GatewayRequest, payload: bytes, *, verbatim: bool) -> Answer | None:
        """A stored answer in the form the client asked for; None where a stream would lose something. ``verbatim``:
        the events of a stream are stored, for clients that ask for a stream."""
        if verbatim:
            events = payload if request.canonical.include_usage else without_usage(payload)
            return Answer(200, [http.EVENTS], events)
        if request.canonical.stream:
            return self._as_stream(request, payload)
        return Answer(200, [http.JSON], payload)

    def _as_stream(self, request: GatewayRequest, payload: bytes) -> Answer | None:
        """A kept answer as a stream; None where a stream would lose something."""
        if not request.canonical.route.converts:
            return Answer(200, [http.EVENTS], payload)
        try:
            stored = strict_json.read(payload)
            body = replay(stored, include_usage=request.canonical.include_usage)
        except (NotKeepable, ValueError, AttributeError, TypeError, LookupError, RecursionError):
            self.metrics.unkept("no stream of it")
            return None
        return Answer(200, [http.EVENTS], body)

    async def _serve(self, request: GatewayRequest, lookup: Lookup) -> Answer:
        """The upstream answer that the request waits for, in the form the client asked for."""
        answer = await self._upstream_answer(request)
        if answer is None and request.reader is not None and request.reader.flight.whole:
            # The answer cannot be given in this form. One request asks for the form, for all clients that want it.
            request.leave()
            form = f"{self._flight_key(lookup.canonical)} {'stream' if request.canonical.stream else 'whole'}"
            request.reader = self.flights.join(form)
            if request.reader is None:
                self._start(request, lookup, form=form)
            answer = await self._upstream_answer(request)
        if (
            answer is None
        ):  # the other client's key was refused, or its answer may go to no other client
            request.leave()
            self._start(request, lookup, shared=False)
            answer = await self._upstream_answer(request)
        assert answer is not None
        assert request.reader is not None
        flight = request.reader.flight
        tier = MISS
        why = ""
        if request.reader.joined:
            tier = JOINED
            self.metrics.joins.labels(EQUAL).inc()
            self.worth.joined(lookup.canonical, flight)
        elif why := request.why:
            self.metrics.unkept(why)
        seconds = time.perf_counter() - request.start
        self.metrics.request(tier, flight.status, seconds)
        self.holdout.answered(request.canonical, lookup, seconds)
        answer.outcome = Outcome(
            tier,
            reason=why,
            tier="" if lookup.score is None else lookup.tier,
            score=lookup.score,
            donor=lookup.donor,
            payload=lambda: flight.payload,
            details=partial(_details, request.canonical, lookup, flight, why),
        )
        if answer.stream is None:
            request.leave()
        return answer

    async def _upstream_answer(self, request: GatewayRequest) -> Answer | None:
        """The upstream answer in that form; None where the client needs an upstream request of its own."""
        reader = request.reader
        assert reader is not None
        flight = reader.flight
        joined = reader.joined
        await flight.until(lambda: flight.status)
        if not flight.status and flight.error is not None:
            raise flight.error
        if joined and _is_refusal(flight):  # it says nothing of this client's request
            return None
        headers = http.for_others(flight.headers) if joined else list(flight.headers)
        passes_on = flight.streamed and request.canonical.stream
        if not passes_on:
            await flight.until(lambda: not flight.shared)
            if flight.done or flight.streamed:
                answer = self._whole(request, flight, headers)
                if answer is not None or joined:
                    return answer
        # As it comes: a stream, or too large to hold, or asked in this form and answered in another.
        usage = not passes_on or request.canonical.include_usage
        pieces = reader.pieces(usage=usage)
        return Answer(flight.status, headers, stream=pieces, close=reader.aclose, ours=joined)

    def _whole(self, request: GatewayRequest, flight: InFlight, headers: Headers) -> Answer | None:
        """A whole upstream answer in the form that the client asked for; None where it has no such form. Raises what
        the upstream request ended with."""
        if flight.error is not None:
            raise flight.error
        assert request.reader is not None
        answer = None
        as_stream = request.canonical.route.converts and request.canonical.stream
        if flight.payload is None or flight.verbatim:
            return None
        if flight.streamed:
            answer = Answer(200, [http.JSON], flight.payload)
        elif as_stream and flight.status == 200:
            answer = self._as_stream(request, flight.payload)
        else:
            return Answer(flight.status, headers, flight.payload, ours=request.reader.joined)
        if answer is not None:
            answer.ours = request.reader.joined
            answer.headers.extend(
                pair for pair in headers if pair[0].startswith(b"access-control-")
            )
        return answer

    def _unreachable(
        self, error: UpstreamError, tier: str, outcome: Outcome, start: float
    ) -> Answer:
        """There is no answer to a request that came at ``start``, by `time.perf_counter`."""
        self.metrics.request(tier, error.status, time.perf_counter() - start)
        answer = http.error_answer(error.status, str(error), "upstream_error")
        answer.outcome = outcome
        return answer

    def _none_stored(self, kind: str) -> Answer:
        """For a client that wants a stored answer or none. No request has failed, so none is counted."""
        self.metrics.unkept(ONLY)
        said = f"no stored answer will do, and the client wants no other ({ONLY})"
        answer = http.error_answer(504, said)
        answer.outcome = Outcome(kind, reason=ONLY)
        return answer

    # -- passing on ---------------------------------------------------------------------------------------------

    async def forward(self, call: Call, receive: Receive, reason: str) -> Answer:
        """Pass a request on, with nothing changed but the tenant's salt, and its answer back as it comes."""
        client = await self._client(call)
        outcome = Outcome("pass", reason=reason)
        try:
            answer = await self._forward(call, receive, client, outcome)
            outcome = answer.outcome or outcome
            return answer
        except http.Vanished as vanished:
            vanished.outcome = outcome
            raise
        finally:
            self._say_who(outcome, client)

    def _say_who(self, outcome: Outcome, client: Client) -> None:
        outcome.tenant = client.tenant[:TAG_DIGITS]
        outcome.tenant_name = self.names.of(outcome.tenant)

    async def _forward(
        self, call: Call, receive: Receive, client: Client, outcome: Outcome
    ) -> Answer:
        start = time.perf_counter()
        if controls_of(call.scope).only:
            return self._none_stored("pass")
        self.metrics.unkept(outcome.reason)
        try:
            sending = self._unless_stopping(self._send_on(call, client.tenant))
            reply = await http.unless_gone(sending, receive)
        except NoPlace as error:
            self.metrics.request(PASSED, 400, time.perf_counter() - start)
            refused = http.error_answer(400, str(error))
            refused.outcome = outcome
            return refused
        except UpstreamError as error:
            return self._unreachable(error, PASSED, outcome, start)
        if call.scope["method"] != "OPTIONS":  # which anybody may ask
            self._answered(client, reply.status)
        self.metrics.request(PASSED, reply.status, time.perf_counter() - start)
        return Answer(
            reply.status,
            list(reply.headers),
            stream=self._pieces(reply, call.scope["path"]),
            close=reply.aclose,
            ours=False,
            outcome=outcome,
        )

    async def _pieces(self, reply: Reply, path: str) -> AsyncIterator[bytes]:
        """The body of an answer that is passed on. A stream of events that breaks off ends with an error event."""
        pieces = reply.pieces()
        events = http.is_event_stream(reply.headers)
        last = b"\n\n"
        try:
            while (piece := await self._unless_stopping(anext(pieces, None))) is not None:
                yield piece
                last = (last + piece)[-4:]
        except UpstreamError as error:
            if not events:
                raise
            if not last.endswith((b"\n\n", b"\r\n\r\n")):
                yield b"\n\n"  # it broke off within an event
            reading = ROUTES[path].stream() if path in ROUTES else Assembler(chat=True)
            yield reading.broken(**http.error_of(error.status, str(error), "upstream_error"))

    async def _unless_stopping(self, work: Awaitable[_T]) -> _T:
        """Await ``work``. Raises `UpstreamError` where the gateway stops first."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self.stopping.wait())
        is_taken = False
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise _stopped()
            is_taken = True
            return working.result()
        finally:
            stopping.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait((working,))
            if not is_taken and not working.cancelled() and working.exception() is None:
                await _close(working.result())

    def stop_soon(self, seconds: float) -> None:
        """Stop after so many seconds, counted from the first call."""
        if self._stop is None:
            self._stop = asyncio.get_running_loop().call_later(seconds, self.stop)

    def stop(self) -> None:
        """End what is still open: streams with an error event, all else with a 503 where it has not begun."""
        self.stopping.set()
        self.flights.close()

    async def _send_on(self, call: Call, tenant: str) -> Reply:
        scope = call.scope
        if self.reuse.is_on and call.body:
            bare = await asyncio.to_thread(without_spans, call.body)
            if bare is not call.body:  # nobody would count its answer
                call = call.with_body(bare)
        salts = self.upstreams.salted and scope["method"] == "POST" and scope["path"] in SALTED
        if not salts:
            return await self.upstreams.send(lambda _: call, tenant=tenant)
        send = await asyncio.to_thread(self._with_salt, call, tenant)
        return await send()

    def _with_salt(self, call: Call, tenant: str) -> Callable[[], Awaitable[Reply]]:
        """What sends a request on with its tenant's salt. A client's own hints for vLLM's KV connector are left out;
        where it says anything else to a connector, no hints are added. Raises `NoPlace` where the body has no place
        for a salt."""
        body = read_object(call.body)
        hints = self.hints(call.scope["path"])
        conversation = None
        bare = body
        try:
            if hints:
                conversation = conversation_of(body, tenant, self.secret)
                bare = without_hints(body)
            ours = replace(call, body=salted(bare, tenant, self.secret))
        except (ValueError, RecursionError) as error:
            raise NoPlace("the body is nested too deeply") from error
        model = body.get("model")
        return partial(
            self.upstreams.send,
            lambda salts: ours if salts else call,
            tenant=tenant,
            model=model if isinstance(model, str) else "",
            conversation=conversation,
            hints=hints and PARAMS not in bare,
        )

    def hints(self, path: str) -> bool:
        """Whether requests to a path tell vLLM's KV connector of their conversation."""
        return self.settings.kv_hints and path in HINTED

    def _settled(
        self, call: Call, client: Client, controls: Controls
    ) -> tuple[CanonicalRequest, CanonicalRequest]:
        """A request as it came, and as it is keyed and sent. Raises `Unkeyable` where it has no canonical form."""
        given = self._canonicalise(call, client)
        if self.rules.skips(given):
            raise Unkeyable("rule")
        asked = self.documents.settled(given)
        return asked, self._sampling.settled(asked, controls)

    def _canonicalise(self, call: Call, client: Client) -> CanonicalRequest:
        """The canonical form of a request. Raises `Unkeyable` where it has none."""
        if not client.believed:
            raise Unkeyable("tenant")
        if not http.is_json(http.header(call.scope, b"content-type")):
            raise Unkeyable("content type")
        settings, scope = self.settings, call.scope
        tags = self._tenants.tags_of(scope)
        deployment = Deployment(
            endpoint=scope["path"],
            tenant=client.tenant,
            secret=self.secret,
            version=settings.data_version,
            tags=tags,
            headers=client.headers,
            known_fields=self._known_fields,
            stateless=settings.stateless_responses,
            reuses_documents=self.reuse.is_on,
            separates_documents=settings.reuse_separated_documents,
        )
        return (_read_again if len(call.body) <= _SMALL else _read)(call.body, deployment)

    # -- recording and checking, in the background ----------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        """Do something in the background; a fault in it is counted."""
        task = asyncio.ensure_future(work)
        self.background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self.background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", exc_info=error)
            self.metrics.fault("background")

    async def _record(
        self,
        request: GatewayRequest,
        flight: InFlight,
        canonical: CanonicalRequest,
        report: ReuseReport,
    ) -> None:
        """Tell the semantic cache what was computed. Near-repeats find the request in `pending` until every lookup
        that may have missed the entry is over."""
        payload = None
        try:
            await asyncio.wait((flight.task,))
            await asyncio.sleep(_RECORD_DELAY_S)
            kept = flight.stored or (canonical.sampled and not flight.refused)
            if flight.status == 200 and request.controls.write and kept and not flight.verbatim:
                payload = flight.payload
            if payload is not None:
                await self.cache.record(report, payload, canonical.model)
                await self.cache.running_lookups_over()
        finally:
            self.pending.pop(flight, None)
        if payload is not None and flight.stored and report.plan.substituted:
            self._check_soon(
                request, report, payload
            )  # the donor's prompt ran again, since its answer was gone

    def _refresh(self, request: GatewayRequest, lookup: Lookup, *, stream: bool) -> None:
        """Fetch a fresh answer in place of a stale one, in its form: what is on its way already goes on for it."""
        background = replace(request, reader=None)
        self._join(background, lookup.canonical)
        self.spawn(self._fetch(background, lookup.canonical, stream=stream))

    def _check_soon(
        self, request: GatewayRequest, report: ReuseReport | None, given: bytes
    ) -> None:
        """Run the unchanged request of an approximate hit, if it is selected and not too many are running."""
        if report is not None and self._checks < _CHECKS and self.cache.should_check(report):
            self._checks += 1
            self.spawn(self._check(replace(request, reader=None), report, given))

    async def _check(self, request: GatewayRequest, report: ReuseReport, given: bytes) -> None:
        """Compare the unchanged request's own answer with the one that was given, to know how often they differ."""
        try:
            own = await self._fetch(request, request.canonical)
        finally:
            self._checks -= 1
        if own is not None and own.payload is not None:
            await self.cache.check(report, own.payload, given, keep=own.stored)

    def _came(self, request: GatewayRequest, reuse: Reuse, flight: InFlight) -> None:
        """An answer for which documents were reused is there, or has failed."""
        if reuse.came(flight):
            assert flight.payload is not None
            self.spawn(self._check_reuse(replace(request, reader=None), reuse, flight.payload))

    async def _check_reuse(self, request: GatewayRequest, reuse: Reuse, given: bytes) -> None:
        """Compare it with the exact one."""
        outcome = LOST
        try:
            own = await self._fetch(request, request.canonical)
            if own is not None and own.payload is not None:
                outcome = COMPARED[await self.cache.agree(own.payload, given)]
        finally:
            reuse.checked(outcome)
        if self.reuse.is_due:
            await asyncio.to_thread(self.reuse.save)

    def _compare_held(self, request: GatewayRequest, found: Lookup, held: Lookup) -> None:
        """Compare the near-hit that a request was not given with the answer that it gets."""
        if found is held or held.found is None or request.reader is None:
            return
        assert held.report is not None
        given = held.found.response.payload
        self.spawn(self._compare(request.reader.flight, held.report, given))

    async def _compare(self, flight: InFlight, report: ReuseReport, given: bytes) -> None:
        await asyncio.wait((flight.task,))
        if flight.whole and flight.payload is not None and flight.refused != APPROXIMATE:
            same = await self.cache.check(report, flight.payload, given, keep=flight.stored)
            if same is not None:
                self.holdout.compared(same=same)

    async def _fetch(
        self, request: GatewayRequest, canonical: CanonicalRequest, *, stream: bool = False
    ) -> InFlight | None:
        """The upstream's exact answer, stored on the way where it may be; None where there is none."""
        canonical = canonical.exactly
        if request.reader is None and not self._join(request, canonical):
            self._start(request, Lookup(canonical), stream=stream)
        assert request.reader is not None
        flight = request.reader.flight
        try:
            await flight.until(lambda: not flight.shared)
            is_usable = flight.status == 200 and not flight.refused and not flight.verbatim
            return flight if is_usable else None
        finally:
            request.leave()

    # -- operators ----------------------------------------------------------------------------------------------

    async def wrong(self, hit: Hit) -> int:
        """An operator says that a hit was wrong: its answer goes, and the donor of an approximate one is reported."""
        if hit.hit_id:
            await self.cache.report_wrong(hit.hit_id)
        return await self.cache.invalidate(Selector(key=hit.key), dry_run=False)

    def sizes(self) -> dict[str, dict[str, float]]:
        """Sizes (``gauges``), and what the caches counted (``events``). Blocks."""
        self.worth.publish()
        self.upstreams.publish()
        sizes = self.cache.sizes()
        sizes["gauges"] |= {
            "salt_refused": float(self.upstreams.salt_refused),
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
        if self.judge is not None:
            await self.judge.aclose()
        if self.background:
            await asyncio.wait(self.background, timeout=_ENDING_S)
        await self.upstreams.aclose()
        await asyncio.to_thread(self.reuse.save)
        await asyncio.to_thread(self.worth.close)
        if self.metrics.history is not None:
            await asyncio.to_thread(self.metrics.history.close)
        await self.cache.aclose()


def _details(
    canonical: CanonicalRequest, lookup: Lookup, flight: InFlight, why: str
) -> dict[str, Any]:
    """What operators are shown of a miss: the question, why its answer was not kept, and what was nearly a hit."""
    unkept = ""
    if flight.done and not flight.stored and not why and flight.status == 200:
        payload = flight.payload or b""
        reason = canonical.refusal(payload, 200) if 0 < len(payload) <= _LARGE else ""
        unkept = flight.refused or reason or "too large, broken off, or not stored"
    return {"prompt": canonical.prompt, "unkept": unkept, "near": near_of(lookup.report)}


async def _close(found: object) -> None:
    """Close an answer that came in the moment in which nobody waited for it any more."""
    close = getattr(found, "aclose", None)
    if close is not None:
        await close()


def _is_refusal(flight: InFlight) -> bool:
    """Whether an upstream answer says nothing of a request that only waits for it: it is about credentials."""
    return flight.status in REFUSED or bool(flight.refused)


def _stopped() -> UpstreamError:
    return UpstreamError("the gateway stops", 503)


def _read(raw: bytes, deployment: Deployment) -> CanonicalRequest:
    """The canonical form of a body, which nothing else decides."""
    return canonicalise(loads(raw), deployment)


_read_again = lru_cache(_KNOWN)(_read)


def _body(
    canonical: CanonicalRequest,
    *,
    stream: bool,
    salted: bool,
) -> bytes:
    """The body that is sent upstream, without ``kv_transfer_params``."""
    body = canonical.body(salted=salted)
    if not canonical.route.converts:
        return _encode(body).encode()
    body.pop("stream_options", None)
    body["stream"] = stream
    if (
        stream
    ):  # the usage is part of the whole answer; a client that did not ask for it does not see it
        body["stream_options"] = {"include_usage": True}
    return _encode(body).encode()
