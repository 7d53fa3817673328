"""Answers out of the cache, in the form that a client asked for, with what is noted of them."""

from __future__ import annotations

import json
import time

from semkv.server.asgi import EVENTS, JSON, Answer, error_answer
from semkv.server.asked import Asked
from semkv.server.caches import EXACT, Caches, Resolution
from semkv.server.dispatch import Dispatch
from semkv.server.journal import Journal
from semkv.server.metrics import JOINED, SIMILAR, Metrics
from semkv.server.sse import NotKeepable, replay
from semkv.server.upstream import Headers, UpstreamError
from semkv.tiers.response import Found


class Answers:
    """Makes answers of what was stored, and says in a header where they came from.

    Args:
        caches: stored answers.
        dispatch: fetches fresh ones in place of stale ones.
        journal, metrics: where everything is noted.
        tell: put an ``X-Semkv`` header on answers.
    """

    def __init__(self, caches: Caches, dispatch: Dispatch, journal: Journal, metrics: Metrics, *, tell: bool) -> None:
        self._caches, self._dispatch, self._tell = caches, dispatch, tell
        self._journal, self._metrics = journal, metrics

    def told(self, text: str) -> Headers:
        """The header that says where an answer came from."""
        return [(b"x-semkv", text.encode("latin-1", "replace"))] if self._tell else []

    def told_hit(self, resolution: Resolution, age_s: float, flags: str) -> Headers:
        """The header of a hit, whose answer is ``age_s`` seconds old."""
        scored = "" if resolution.score is None else f" score={resolution.score:.3f}"
        return self.told(f"hit tier={resolution.tier}{scored} age={age_s:.0f}{flags}")

    def unreachable(self, error: UpstreamError, tier: str, start: float) -> Answer:
        """There is no answer to a request that came at ``start``, by `time.perf_counter`."""
        self._metrics.request(tier, error.status, time.perf_counter() - start, "")
        return error_answer(error.status, str(error), "upstream_error", self.told(tier))

    def peek(self, asked: Asked, resolution: Resolution) -> Answer | None:
        """What memory has for a resolution."""
        if not asked.reads:
            return None
        found = self._caches.responses.peek(resolution.canonical.key)
        return self.hit(asked, Resolution(resolution.canonical, found, resolution.report))

    def hit(self, asked: Asked, resolution: Resolution, *, joined: bool = False) -> Answer | None:
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
            answer = self.as_stream(asked, found.response.payload)
        if answer is None:
            return None
        if found.stale and asked.controls.write:
            self._dispatch.refresh(asked, resolution.canonical)
        seconds = time.perf_counter() - asked.start
        self._metrics.request(JOINED if joined else resolution.tier, 200, seconds, asked.client.tenant)
        if joined:
            self._metrics.joins.labels(SIMILAR).inc()
        self.note(asked, resolution, found, seconds)
        flags = (" stale" if found.stale else "") + (" joined" if joined else "")
        answer.headers.extend(self.told_hit(resolution, found.age_s, flags))
        return answer

    def note(self, asked: Asked, resolution: Resolution, found: Found, seconds: float) -> None:
        """Put a hit into the journal."""
        exact = resolution.tier == EXACT
        self._journal.hit(
            tier=resolution.tier,
            score=resolution.score,
            seconds=seconds,
            tenant=asked.client.tenant,
            found=found,
            asked=None if exact else asked.canonical.request,
            report=resolution.report,
        )

    def as_stream(self, asked: Asked, payload: bytes) -> Answer | None:
        """A whole answer as a stream; None where a stream would lose something."""
        try:
            body = replay(json.loads(payload), include_usage=asked.canonical.include_usage)
        except (NotKeepable, ValueError, AttributeError, TypeError, LookupError, RecursionError):
            self._metrics.uncacheable("no stream of it")
            return None
        return Answer(200, [EVENTS], body)
