"""The way of a request that memory has no answer to: looked up, joined to another's, or asked upstream.

    store (thread) -> SemanticCache (thread) -> memory and store under the canonical request' of its plan
    -> single-flight -> upstream -> store

Where lookups rarely find anything the upstream is asked meanwhile. What is found before the answer is whole is used all
the same; after that there is nothing left to save.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from semkv.server.admission import REFUSED
from semkv.server.answers import Answers
from semkv.server.asgi import JSON, Answer
from semkv.server.asked import Asked
from semkv.server.caches import Caches, Resolution
from semkv.server.dispatch import LARGE, Dispatch
from semkv.server.flight import Flight, Subscription
from semkv.server.metrics import EQUAL, JOINED, MISS, SIMILAR, Metrics
from semkv.server.sse import event
from semkv.server.upstream import UpstreamError


class Misses:
    """Answers what memory could not.

    Args:
        caches: looks requests up.
        dispatch: starts flights, and works on in the background.
        answers: of what was found.
        metrics: where everything is counted.
        overlap: ask the upstream during the lookup, where lookups rarely find anything.
    """

    def __init__(
        self, caches: Caches, dispatch: Dispatch, answers: Answers, metrics: Metrics, *, overlap: bool
    ) -> None:
        self._caches, self._dispatch, self._answers = caches, dispatch, answers
        self._metrics, self._overlap = metrics, overlap

    async def answer(self, asked: Asked) -> Answer:
        """The answer of the caches, of a request on its way, or of the upstream."""
        try:
            if self._overlap and asked.shared and len(asked.call.body) <= LARGE and self._caches.odds.rare:
                return await self._overlapped(asked)
            return await self._after_lookup(asked)
        except UpstreamError as error:
            return self._answers.unreachable(error, MISS, asked.start)

    async def _after_lookup(self, asked: Asked) -> Answer:
        """What the lookup found, or else the upstream's answer."""
        if not asked.controls.read:
            return await self._ask(asked, Resolution(asked.canonical))
        looked = await self._caches.find(asked.canonical, keep=asked.controls.write)
        return self._found(asked, looked) or await self._ask(asked, looked)

    def _found(self, asked: Asked, looked: Resolution) -> Answer | None:
        answer = self._answers.hit(asked, looked)
        if answer is not None and looked.found is not None:
            self._dispatch.check_soon(asked, looked, looked.found.response.payload)
        return answer

    async def _overlapped(self, asked: Asked) -> Answer:
        """Ask the upstream while the lookup runs, unless a request is on its way whose answer this one may be given.

        What the lookup finds is served, or asked for, in place of the request, which is then cut off unless others wait
        for it. An answer that is whole before that is served: it is the request's own. Failures wait for the lookup.
        """
        own = Resolution(asked.canonical)
        raw = await self._dispatch.raw(asked, asked.canonical, stream=asked.canonical.stream)
        answer, seat = self._at_hand(asked, own)
        if answer is not None:
            return answer
        tier, newcomer = JOINED, self._dispatch.paraphrases.newcomer(asked.canonical)
        if seat is None:
            if self._dispatch.paraphrases.busy(newcomer):
                return await self._after_lookup(asked)
            tier, seat = MISS, self._dispatch.start(asked, own, raw)
        looking = asyncio.ensure_future(self._caches.find(asked.canonical, asked.start))
        if tier is MISS:
            self._dispatch.record_looked(asked, newcomer, looking, seat.flight)
        try:
            if await seat.whole_before(looking):
                return await self._answer(asked, own, seat, tier)
            looked = await looking
            if seat.flight.status in REFUSED:  # who is not let in gets nothing of what others computed
                return await self._answer(asked, own, seat, tier)
            another = looked.canonical.key != asked.canonical.key
            computed = seat.flight.kept and not another  # what was found may be what this very flight has brought
            if not computed and (answer := self._found(asked, looked)) is not None:
                self._give_up(seat)
                return answer
            if another:
                self._give_up(seat)
                return await self._ask(asked, looked)
            near = await self._dispatch.paraphrases.find(looked, asked.start, seat) if tier is MISS else None
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
            self._metrics.cut.inc()
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
        return (None, seat) if seat is not None else (self._answers.peek(asked, resolution), None)

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
        found = await self._caches.stored(near.canonical)
        answer = self._answers.hit(asked, replace(near, found=found), joined=seat is not None)
        if answer is None:
            self._metrics.parted.inc()
        elif found is not None:
            self._dispatch.check_soon(asked, near, found.response.payload)
        return answer

    def _joined(self, asked: Asked, near: Resolution, seat: Subscription) -> Answer:
        """A stream that runs for a similar request."""
        seconds = time.perf_counter() - asked.start
        self._metrics.request(JOINED, 200, seconds, asked.client.tenant)
        self._metrics.joins.labels(SIMILAR).inc()
        self._dispatch.spawn(self._landed_near(asked, near, seat.flight, seconds))
        headers = [*seat.flight.headers, *self._answers.told_hit(near, 0.0, " joined")]
        own = seat.flight.subscribe()  # last: nobody leaves it for what fails later
        events = _relay(own, include_usage=asked.canonical.include_usage)
        return Answer(200, headers, stream=events, close=own.aclose)

    async def _answer(self, asked: Asked, resolution: Resolution, seat: Subscription, tier: str) -> Answer:
        """The flight's answer in the form the client asked for.

        Raises:
            UpstreamError: there is none.
        """
        flight, stream = seat.flight, asked.canonical.stream
        await seat.begun()
        answer: Answer | None
        if tier is JOINED and flight.status in REFUSED:  # another's key was: it says nothing about this one
            answer = None
        elif flight.streamed and stream:
            events = _relay(seat, include_usage=asked.canonical.include_usage)
            answer = Answer(flight.status, list(flight.headers), stream=events, close=seat.aclose)
        else:
            answer = await self._whole(asked, seat)
        if answer is None and tier is MISS:  # asked in this form, answered in another: as the upstream would have it
            answer = Answer(flight.status, list(flight.headers), stream=_bare(seat), close=seat.aclose)
        if answer is None:  # refused, or in another form that cannot be turned into this one: ask for it alone
            seat.leave()
            raw = await self._dispatch.raw(asked, resolution.canonical, stream=stream)
            alone = self._dispatch.start(asked, resolution, raw, shared=False)
            try:
                return await self._answer(asked, resolution, alone, MISS)
            except BaseException:
                alone.leave()
                raise
        if tier is JOINED:
            self._metrics.joins.labels(EQUAL).inc()
        self._metrics.request(tier, flight.status, time.perf_counter() - asked.start, asked.client.tenant)
        reuse = "" if resolution.score is None else f" reuse={resolution.tier} score={resolution.score:.3f}"
        answer.headers.extend(self._answers.told(f"{tier}{reuse}"))
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
            answer = self._answers.as_stream(asked, flight.payload)
        else:
            answer = Answer(flight.status, list(flight.headers), flight.payload)
        if answer is not None:
            seat.leave()
        return answer

    async def _landed_near(self, asked: Asked, near: Resolution, flight: Flight, seconds: float) -> None:
        """Note a stream that was joined, once it is known to be an answer that the cache serves."""
        await flight.over()
        found = await self._caches.stored(near.canonical) if flight.kept else None
        if found is not None:
            self._answers.note(asked, near, found, seconds)
            self._dispatch.check_soon(asked, near, found.response.payload)


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
