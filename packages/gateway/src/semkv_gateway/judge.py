"""Asks a model whether the answer of a doubtful donor serves a request.

A pair is shown once, with the credentials and in the partition of the request that found it, to a chat completion of
one token. Requests wait a short time for a verdict. One that comes later counts for the next request with these texts.
A judge that fails several times in a row is left alone for a while, and one that is late is not waited for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from functools import lru_cache
from typing import Any

from semkv.account import JUDGE
from semkv.latest import Latest
from semkv.tenants import tenant_salt
from semkv.tiers.judging import one_token, shown, verdict
from semkv.types import ReuseReport
from semkv_gateway.cache_client import CacheClient, Lookup
from semkv_gateway.http import JSON, BegunReply, Call, HttpUpstream, Reply, Scope, UpstreamError
from semkv_gateway.metrics import Metrics
from semkv_gateway.request_key import CanonicalRequest
from semkv_gateway.settings import ServerSettings
from semkv_gateway.upstreams import Member, Upstreams
from semkv_gateway.worth import Worth
from semkv_stores.breaker import Breaker

log = logging.getLogger(__name__)

PATH = "/v1/chat/completions"
YES = "yes"
NO = "no"
LATE = "late"
FAILED = "failed"
LEFT = "left alone"
_CONNECT_S = 5.0
_LONGEST_S = 30.0  # for a verdict that nobody waits for
_AT_ONCE = 16  # pairs that are judged at once, of all tenants: half of them of one
_BYTES = 64 * 1024  # of an answer
_BREAKERS = 1024
_SHOWN = 100  # characters of a model's name
_KEYS = frozenset((b"authorization", b"api-key", b"x-api-key"))
_ONCE = frozenset((b"idempotency-key", b"x-idempotency-key"))  # of the request that asks


class Judge:
    """Settles doubts. Used only on the event loop.

    Args:
        settings: which model, where, and how long a request waits.
        secret: of the deployment, for the tenants' salts.
        key: sent to a server of its own in place of the request's.
        cache: keeps the verdicts.
        upstreams: where the requests go.
        metrics: whose counters it adds to.
        worth: which learns what it costs.
    """

    def __init__(
        self,
        settings: ServerSettings,
        *,
        secret: bytes,
        key: str,
        cache: CacheClient,
        upstreams: Upstreams,
        metrics: Metrics,
        worth: Worth,
    ) -> None:
        self._model = settings.judge_model
        self._secret = secret
        self._key = key
        self._limit_s = settings.judge_timeout
        self._cache = cache
        self._own: Member | None = None
        if settings.judge_url:
            server = HttpUpstream(settings.judge_url, connect_s=_CONNECT_S)
            self._own = Member(server, salt=settings.salt)
        self._upstreams = upstreams
        self._metrics = metrics
        self._worth = worth
        self._account = cache.account
        self._running: dict[str, asyncio.Task[bool | None]] = {}
        self._tenants: Counter[str] = Counter()  # how many of each are running
        self._said_failed: Latest[str, None] = Latest(_BREAKERS)  # models that were said to fail
        # The key of one tenant may be refused, or the model of another be slow.
        self._breaker = lru_cache(_BREAKERS)(_new_breaker)
        self._lateness = lru_cache(_BREAKERS)(_new_breaker)

    async def settled(self, call: Call, asked: CanonicalRequest, found: Lookup) -> Lookup | None:
        """The hit that a yes makes of a lookup's doubt; None where there is no doubt, or no yes in time."""
        doubted = await self._cache.doubted(found, asked)
        if doubted is None:
            return None
        pair = f"{asked.key} {doubted.canonical.key}"
        judging = self._running.get(pair) or self._begin(pair, call, asked, doubted)
        if judging is None:
            return None
        lateness = self._lateness(asked.partition, self._model or asked.model)
        if not await self._in_time(judging, lateness):
            return None
        return await self._cache.settled(doubted)

    def _begin(
        self, pair: str, call: Call, asked: CanonicalRequest, doubted: Lookup
    ) -> asyncio.Task[bool | None] | None:
        """Show a pair to the judge; None where it is not shown."""
        report = doubted.report
        assert report is not None
        messages = shown(report)
        if messages is None:
            return None
        breaker = self._breaker(asked.partition, self._model or asked.model)
        is_busy = self._is_busy(asked.partition)
        pays = self._account.pays(JUDGE)
        if breaker.is_open or is_busy or (self._account.auto and not pays):
            self._metrics.judged.labels(LEFT).inc()
            return None
        asking = self._ask(call, asked, messages)
        judging = self._judge(asking, breaker=breaker, asked=asked, report=report, pays=pays)
        task = asyncio.ensure_future(judging)
        self._running[pair] = task
        self._tenants[asked.partition] += 1
        task.add_done_callback(lambda _: self._over(pair, asked.partition))
        return task

    def _is_busy(self, tenant: str) -> bool:
        """Whether a tenant's share is in use. One more tenant would find room, unless all are taken by others."""
        own = self._tenants[tenant]
        others = len(self._tenants.keys() - {tenant})
        share = max(1, _AT_ONCE // (others + 2))
        return own >= share or self._tenants.total() >= _AT_ONCE

    def _over(self, pair: str, tenant: str) -> None:
        self._running.pop(pair, None)
        self._tenants[tenant] -= 1
        self._tenants += Counter()  # which drops those without any

    async def _in_time(self, judging: asyncio.Task[bool | None], lateness: Breaker) -> bool:
        """Whether the judge says yes before the request's time is up."""
        if self._limit_s <= 0.0 or lateness.is_open:
            return False
        try:
            found = await asyncio.wait_for(asyncio.shield(judging), self._limit_s)
        except TimeoutError:
            lateness.failed()
            self._metrics.judged.labels(LATE).inc()
            return False
        lateness.succeeded()
        return found is True

    async def _judge(
        self,
        asking: Coroutine[Any, Any, bytes],
        *,
        breaker: Breaker,
        asked: CanonicalRequest,
        report: ReuseReport,
        pays: bool,
    ) -> bool | None:
        """Ask, and keep the verdict; None where there is none."""
        start = time.perf_counter()
        payload, found = await self._answer(asking)
        seconds = time.perf_counter() - start
        self._metrics.judge_seconds.observe(seconds)
        model = self._model or asked.model
        self._worth.judged(asked, model, payload, seconds=seconds, counts=pays)
        if isinstance(found, str):
            breaker.failed()
            self._metrics.judged.labels(FAILED).inc()
            if breaker.is_open:
                self._say_failed(model, found)
            return None
        breaker.succeeded()
        self._said_failed.pop(model, None)
        self._metrics.judged.labels(YES if found else NO).inc()
        await self._cache.keep_verdict(report, same=found)
        return found

    def _say_failed(self, model: str, fault: str) -> None:
        """Log that a judge is left alone: once, until it answers again."""
        if model in self._said_failed:
            return
        self._said_failed[model] = None
        log.warning(
            "the judge %r failed several times in a row (%s) and is left alone for a while: its pairs are misses",
            model[:_SHOWN],
            fault,
        )

    async def _answer(self, asking: Coroutine[Any, Any, bytes]) -> tuple[bytes, bool | str]:
        """What the judge answers, and its verdict, or why there is none."""
        payload = b""
        if self._own is None:
            self._worth.shares.begin()
        try:
            async with asyncio.timeout(_LONGEST_S):
                payload = await asking
            found = verdict(json.loads(payload))
            return payload, "it says neither yes nor no" if found is None else found
        except (UpstreamError, TimeoutError, ValueError, RecursionError) as error:
            fault = str(error) or "no answer in time"
        except Exception:
            fault = "a fault in the gateway"
            log.exception("asking the judge failed")
            self._metrics.fault("judge")
        finally:
            if self._own is None:
                self._worth.shares.end()
        return payload, fault

    async def _send(self, asked: CanonicalRequest, made: Callable[[bool], Call]) -> Reply:
        """Ask the judge's own server, or one of those that answer requests."""
        if self._own is not None:
            return await self._own.salts.send(self._own.upstream, made)
        model = self._model or asked.model
        return await self._upstreams.send(made, tenant=asked.partition, model=model)

    async def _ask(
        self, call: Call, asked: CanonicalRequest, messages: list[dict[str, str]]
    ) -> bytes:
        """The judge's answer. Raises `UpstreamError` where it gives none."""
        plain = self._body(asked, messages)
        salt = tenant_salt(self._secret, asked.partition, None)
        asking = Call(self._scope(call.scope), b"", canonical=True)

        def made(salted: bool) -> Call:
            body = {**plain, "cache_salt": salt} if salted else plain
            return asking.with_body(json.dumps(body).encode())

        reply = await self._send(asked, made)
        try:
            if reply.status != 200:
                raise UpstreamError(f"status {reply.status}")
            return await BegunReply(reply).read(_BYTES)
        finally:
            await reply.aclose()

    def _body(self, asked: CanonicalRequest, messages: list[dict[str, str]]) -> dict[str, Any]:
        body = one_token(messages)
        if model := self._model or asked.model:
            body["model"] = model
        template = asked.given.get("chat_template_kwargs")
        if template and not self._model and self._own is None:  # such as: no thinking
            body["chat_template_kwargs"] = template
        return body

    def _scope(self, scope: Scope) -> Scope:
        """That of the asking request with another path; to a server of its own only what says who asks."""
        headers = [pair for pair in scope["headers"] if pair[0].lower() not in _ONCE]
        more: Mapping[str, Any] = {}
        if self._own is not None:
            more = {"query_string": b""}
            headers = [JSON, *(pair for pair in headers if pair[0].lower() in _KEYS)]
            if self._key:
                headers = [JSON, (b"authorization", f"Bearer {self._key}".encode())]
        return {**scope, "path": PATH, "raw_path": PATH.encode(), "headers": headers, **more}

    async def aclose(self) -> None:
        """Ask nothing more."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._own is not None:
            await self._own.upstream.aclose()


def _new_breaker(_tenant: str, _model: str) -> Breaker:
    return Breaker()
