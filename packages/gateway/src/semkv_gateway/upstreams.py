"""The servers behind the gateway, and which of them a request goes to.

A request goes where the same beginning was sent last, as that server's prefix cache has it, unless that server is much
busier than the least busy one, which gets it then. A server to which no connection can be made, or that does not say
that it is well, is left out until it does; the request goes to another one. A request that a server may have begun goes
to no other.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from functools import cache
from typing import Any

import xxhash

from semkv.latest import Latest
from semkv_gateway.http import Call, Reply, Upstream, UpstreamError
from semkv_gateway.kv_hints import Conversation, hinted
from semkv_gateway.metrics import Metrics
from semkv_gateway.salts import Salts

log = logging.getLogger(__name__)

_BEGINNINGS = 65_536  # whose server is known
_SHORTEST = 256  # bytes of a beginning; each next one is half as long again
_LONGEST = 4 << 20
_BUSIER = (
    4  # requests more than twice those of the least busy server, from which on one is much busier
)
_LOOK_S = 1.0  # between two looks whether a server answers
_UNANSWERED = 2  # looks in a row, from which on it is left out
_LIST_BYTES = 1 << 20  # of a list of models


class Member:
    """One server.

    Attributes:
        name: its host and port.
        salts: whether it takes them.
        running: requests that have no whole answer yet.
        down: no connection could be made, or it did not answer looks, and it has not answered since.
        models: those it says it serves; None where it does not say.
        peer: where its p2p tier listens; empty for none.
    """

    def __init__(self, upstream: Upstream, *, salt: bool, peer: str = "") -> None:
        self.name = upstream.name
        self.upstream = upstream
        self.peer = peer
        self.salts = Salts(upstream.name, on=salt)
        self.running = 0
        self.down = False
        self.models: frozenset[str] | None = None
        self.turn = 0  # of the latest request
        self.unanswered = 0  # looks in a row

    def can(self, model: str) -> bool:
        return not model or self.models is None or model in self.models


class Upstreams:
    """Sends requests to one of some servers. Used only on the event loop."""

    def __init__(
        self,
        upstreams: Sequence[Upstream],
        metrics: Metrics,
        *,
        salt: bool,
        peers: Sequence[str] = (),
    ) -> None:
        """``peers``: where the upstreams' p2p tiers listen, in the same order; empty for none."""
        each_peer = peers or [""] * len(upstreams)
        self.members = [
            Member(upstream, salt=salt, peer=peer)
            for upstream, peer in zip(upstreams, each_peer, strict=True)
        ]
        self._several = len(self.members) > 1
        self._sent_last: Latest[bytes, Member] = Latest(_BEGINNINGS)
        self._turn = 0
        self._looking: asyncio.Task[None] | None = None
        self._up = metrics.gauge(
            "upstream_up",
            "1 while connections to a server can be made.",
            "upstream",
            mode="livemin",
        )
        self._running = metrics.gauge(
            "upstream_requests",
            "Requests on their way to a server.",
            "upstream",
            mode="livesum",
        )
        self._sent = metrics.counter("upstream_sent", "Requests sent to a server.", "upstream")
        self._moved = metrics.counter(
            "upstream_moved",
            "Requests sent with the peer that has their beginning.",
            "upstream",
        )
        self._failed = metrics.counter(
            "upstream_failed", "Connections to a server that could not be made.", "upstream"
        )
        self.publish()

    @property
    def salted(self) -> bool:
        """Whether any server takes salts."""
        return any(member.salts.on for member in self.members)

    @property
    def salt_refused(self) -> bool:
        return any(member.salts.refused for member in self.members)

    # -- sending ------------------------------------------------------------------------------------------------

    async def send(
        self,
        call: Callable[[bool], Call],
        *,
        tenant: str = "",
        model: str = "",
        conversation: Conversation | None = None,
        hints: bool = False,
        spans: Mapping[str, Any] | None = None,
    ) -> Reply:
        """Send what ``call`` makes with salts (True) or without. Returns when the head of the answer is there.

        Args:
            call: makes the request.
            tenant: who asks.
            model: which the request names.
            conversation: that it belongs to.
            hints: whether the request may carry hints for vLLM's KV connector.
            spans: what it says to that of documents that are reused.

        Raises:
            UpstreamError: as the upstream that was asked last does.
        """
        known = []
        if self._several:
            call = cache(call)
            known = list(_beginnings(tenant, model, call(True).body))
            self._looking = self._looking or asyncio.ensure_future(self._look_after())
        left = [member for member in self.members if member.can(model)] or list(self.members)
        while True:
            member = self._chosen(left, known)
            left.remove(member)
            peer = self._peer_of(member, known, model) if hints else ""
            made = hinted(call, conversation if hints else None, peer, spans)
            for beginning in known:
                self._sent_last[beginning] = member
            try:
                reply = await self._send_to(member, made)
            except UpstreamError as error:
                if error.begun:
                    raise
                self._failed.labels(member.name).inc()
                self._leave_out(member, "cannot be reached")
                if not left:
                    raise
            else:
                if peer and member.salts.on:  # hints go with salts only
                    self._moved.labels(member.name).inc()
                return reply

    async def _send_to(self, member: Member, call: Callable[[bool], Call]) -> Reply:
        self._turn += 1
        member.turn = self._turn
        member.running += 1
        self._sent.labels(member.name).inc()
        try:
            reply = await member.salts.send(member.upstream, call)
        except BaseException:
            member.running -= 1
            raise
        if reply.status < 500:
            self._take_in(member)
        return Counted(reply, member)

    def _chosen(self, left: Sequence[Member], known: Sequence[bytes]) -> Member:
        """Where a request goes, of those that are left."""
        up = [member for member in left if not member.down] or left
        least = min(up, key=lambda member: (member.running, member.turn))
        last = self._last(known, up) or least
        return last if last.running <= 2 * least.running + _BUSIER else least

    def _last(self, known: Sequence[bytes], among: Sequence[Member]) -> Member | None:
        """Which of some servers had the longest of these beginnings last; None where none had any."""
        last = None
        for beginning in known:
            before = self._sent_last.get(beginning)
            if before is not None and before in among:
                last = before
        return last

    def _peer_of(self, member: Member, known: Sequence[bytes], model: str) -> str:
        """Where a server can get a request's beginning; empty where it is itself the one that has it, or nobody is."""
        up = [each for each in self.members if each.can(model) and not each.down]
        last = self._last(known, up)
        return "" if last is None or last is member else last.peer

    # -- servers that are away ----------------------------------------------------------------------------------

    def _leave_out(self, member: Member, why: str) -> None:
        if not member.down:
            log.warning("the upstream %s %s and is left out", member.name, why)
        member.down = True

    def _take_in(self, member: Member) -> None:
        member.unanswered = 0
        if member.down:
            log.warning("the upstream %s answers again", member.name)
        member.down = False

    async def _look_after(self) -> None:
        """Ask each server again and again whether it answers, and which models it has when it begins to."""
        await self._of_each(self._learn)
        lists = {member.models for member in self.members if member.models is not None}
        if len(lists) > 1:
            log.warning(
                "the upstreams serve other models: a request goes to those that have its model"
            )
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._of_each(self._look)

    async def _of_each(self, ask: Callable[[Member], Awaitable[None]]) -> None:
        """Ask all servers at once. A fault of ours is logged, and they are asked again all the same."""
        for fault in await asyncio.gather(*map(ask, self.members), return_exceptions=True):
            if fault is not None:
                log.error("a look whether an upstream answers failed", exc_info=fault)

    async def _look(self, member: Member) -> None:
        if await member.upstream.ready():
            if member.down:
                await self._learn(member)
            self._take_in(member)
            return
        member.unanswered += 1
        if member.unanswered >= _UNANSWERED:
            self._leave_out(member, "does not answer")

    async def _learn(self, member: Member) -> None:
        """Ask a server which models it has. One that does not say may have any."""
        member.models = await _models_of(member.upstream)

    # -- operators ----------------------------------------------------------------------------------------------

    async def ready(self) -> bool:
        """Whether any server would answer now."""
        return any(await asyncio.gather(*(member.upstream.ready() for member in self.members)))

    def view(self) -> list[dict[str, Any]]:
        """What is known of each."""
        return [
            {
                "name": member.name,
                "up": not member.down,
                "running": member.running,
                "salt_refused": member.salts.refused,
            }
            for member in self.members
        ]

    def publish(self) -> None:
        """Set the gauges."""
        for member in self.members:
            self._up.labels(member.name).set(not member.down)
            self._running.labels(member.name).set(member.running)

    async def aclose(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        for member in self.members:
            await member.upstream.aclose()


class Counted:
    """An answer that counts as running until it is closed."""

    def __init__(self, reply: Reply, member: Member) -> None:
        self._reply = reply
        self._member: Member | None = member
        self.status = reply.status
        self.headers = reply.headers

    def pieces(self) -> AsyncIterator[bytes]:
        return self._reply.pieces()

    async def aclose(self) -> None:
        if self._member is not None:
            self._member.running -= 1
            self._member = None
        await self._reply.aclose()


def _beginnings(tenant: str, model: str, body: bytes) -> Iterator[bytes]:
    """Digests of a body's beginnings, the shortest first. Those of tenants and of models differ."""
    state = xxhash.xxh3_128(json.dumps([tenant, model]).encode())
    length = _SHORTEST
    done = 0
    while length <= min(len(body), _LONGEST):
        state.update(body[done:length])
        yield state.digest()
        done = length
        length += length // 2


async def _models_of(upstream: Upstream) -> frozenset[str] | None:
    """The models that a server lists; None where it does not."""
    scope = {"method": "GET", "path": "/v1/models", "headers": []}
    text = b""
    try:
        async with asyncio.timeout(_LOOK_S * 2):
            reply = await upstream.send(Call(scope, b""))
            try:
                async for piece in reply.pieces():
                    text += piece
                    if len(text) > _LIST_BYTES:
                        return None
            finally:
                await reply.aclose()
        rows: Collection[Any] = json.loads(text)["data"] if reply.status == 200 else ()
        return frozenset(str(row["id"]) for row in rows) or None
    except (UpstreamError, TimeoutError, ValueError, LookupError, TypeError, RecursionError):
        return None
