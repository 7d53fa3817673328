"""The core: one request, answered from the caches or by the upstream. Used by the gateway and by the middleware.

    parse -> canonicalise -> memory (`answers`) -> lookup, upstream (`misses`)

An answer is kept under the key of the request it was computed from, before the client has the whole of it. A fault in
the cache is counted and the request goes on as a miss.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from semkv.server.admission import Tenants, controls_of
from semkv.server.answers import Answers
from semkv.server.asgi import Answer, error_answer, is_plain_json, unless_gone
from semkv.server.asked import Asked
from semkv.server.caches import EXACT, Caches, Resolution
from semkv.server.canonical import CanonicalRequest, Uncacheable, canonicalise, loads
from semkv.server.dispatch import LARGE, Dispatch
from semkv.server.flight import Bounds, Desk
from semkv.server.journal import Journal, Shown
from semkv.server.metrics import PASSED, Metrics
from semkv.server.misses import Misses
from semkv.server.salt import SALTED, NoPlace, salted
from semkv.server.settings import ServerSettings
from semkv.server.tags import BadTags
from semkv.server.upstream import Call, Receive, Reply, Upstream, UpstreamError
from semkv.stores.responses.base import Selector

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
        self._tenants = Tenants(secret, trusted=settings.networks, single=settings.single_tenant)
        self._dispatch = Dispatch(self.desk, caches, self._tenants, self.journal, metrics)
        self._answers = Answers(caches, self._dispatch, self.journal, metrics, tell=settings.tell)
        self._misses = Misses(caches, self._dispatch, self._answers, metrics, overlap=settings.overlap)
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
        client = self._tenants.client(call.scope)
        if not client.believed:
            self.metrics.uncacheable("tenant")
            return await self.forward(call, receive, "tenant")
        if len(call.body) > LARGE:
            canonical = await self.caches.parse(self._canonicalise, call, client.tenant)
        else:
            canonical = self._canonicalise(call, client.tenant)
        if isinstance(canonical, Uncacheable):
            self.metrics.uncacheable(canonical.reason)
            return await self.forward(call, receive, canonical.reason)
        may_read = self._tenants.may_read(client) and (self.settings.sampled or not canonical.sampled)
        asked = Asked(call, canonical, controls, client, may_read, start)
        if (answer := self._answers.peek(asked, Resolution(canonical))) is not None:
            return answer
        return await unless_gone(self._misses.answer(asked), receive)

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
        start, client = time.perf_counter(), self._tenants.client(call.scope)
        told = f"pass reason={reason.replace(' ', '_')}" if reason else "pass"
        try:
            reply = await unless_gone(self._send_on(call, client.tenant), receive)
        except NoPlace as error:
            self.metrics.request(PASSED, 400, time.perf_counter() - start, "")
            return error_answer(400, str(error), "invalid_request_error", self._answers.told(told))
        except UpstreamError as error:
            return self._answers.unreachable(error, PASSED, start)
        self._tenants.answered(client, reply.status)
        self.metrics.request(PASSED, reply.status, time.perf_counter() - start, "")
        headers = [*reply.headers, *self._answers.told(told)]
        return Answer(reply.status, headers, stream=_through(reply), close=reply.aclose)

    async def _send_on(self, call: Call, tenant: str) -> Reply:
        scope = call.scope
        if self.settings.salt and scope["method"] == "POST" and scope["path"] in SALTED:
            body = await self.caches.parse(salted, call.body, tenant, self._secret)
            call = replace(call, body=body)
        return await self.upstream.send(call)

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
