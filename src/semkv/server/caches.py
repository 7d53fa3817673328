"""The two caches as the gateway uses them: off the event loop, within time limits, and every fault a counted miss.

The response tier holds whole answers under exact keys. The semantic cache finds a donor for a near-repeat; the donor's
parts then make a canonical request' with a key of its own, under which the response tier is asked again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ParamSpec, TypeVar

from semkv.cache import SemanticCache
from semkv.server.canonical import CanonicalRequest
from semkv.server.metrics import Metrics
from semkv.server.tags import TagRule, tags_by
from semkv.server.workers import Late, Workers
from semkv.stores.responses.base import Selector
from semkv.tiers.base import Candidate
from semkv.tiers.response import Found, ResponseCache
from semkv.tiers.stats import CacheStats
from semkv.tiers.underway import Underway
from semkv.types import Exactness, Plan, ReuseReport

log = logging.getLogger(__name__)

EXACT = "exact"

_P = ParamSpec("_P")
_T = TypeVar("_T")
_LOOKUP_S = 10.0  # longest wait for a semantic lookup
_LATELY = 64  # lookups; after 190 that found nothing their share counts as rare
_RARE = 0.05
_LOOKUPS = 256  # that may wait for a thread; beyond it a request goes on without one, so that none waits for seconds
_BESIDE = 16  # the same where the upstream is asked meanwhile: a lookup behind more comes after the answer
_ASIDE = 5  # niceness of lookups: a third of an ordinary thread's share of a core, so that the event loop goes on
_QUEUED = 2048  # requests that may wait for the store; beyond it a hanging one costs nobody any time
_SMALL = 64 * 1024  # bytes of an answer that the event loop itself looks into and writes
_NAME = 200  # characters of a model's name that are noted
_ADMIN_S = 30.0
_INVALIDATE_S = 300.0  # every answer's head is read: a million take half a minute in Redis
_SIZES = {
    "memory_entries": "memory_entries",
    "memory_bytes": "memory_bytes",
    "response_entries": "store_entries",
    "response_bytes": "store_bytes",
}


@dataclass(frozen=True, slots=True)
class Resolution:
    """What the caches have for a request.

    Attributes:
        canonical: what would be asked upstream: the request, or the canonical request' of a plan.
        found: its stored answer, or None.
        report: of the semantic lookup; None where there was none.
        underway: the request as its paraphrases find it while it is answered; None where they may not.
    """

    canonical: CanonicalRequest
    found: Found | None = None
    report: ReuseReport | None = None
    underway: Underway | None = None

    @property
    def tier(self) -> str:
        """Where the donor came from; ``exact`` without one, and where its prompt is the request's own."""
        match = self.report.plan.match if self.report is not None and self.report.plan.substituted else None
        if self.report is None or match is None or match.exactness is Exactness.EXACT:
            return EXACT
        return self.report.provenance

    @property
    def score(self) -> float | None:
        """Of the donor; None without one."""
        match = self.report.plan.match if self.report is not None else None
        return match.score if match is not None and self.tier != EXACT else None


class Odds:
    """How often lookups have found something lately; taken to be always until shown otherwise."""

    def __init__(self, share: float = 1.0) -> None:
        self.share = share

    def add(self, *, found: bool) -> None:
        self.share += (found - self.share) / _LATELY

    @property
    def rare(self) -> bool:
        """Whether so few do that work for the upstream costs less than their wait."""
        return self.share < _RARE


class Caches:
    """Looks up, keeps and removes answers.

    Args:
        responses: whole answers.
        semantic: donors; None to go without.
        metrics: where faults are counted.
        store_s: how long a request waits for the store.
        sampled: answers that were drawn at random are kept too.
        tag_rules: what answers are labelled with, beside the labels that come with a request.
    """

    def __init__(
        self,
        responses: ResponseCache,
        semantic: SemanticCache | None,
        metrics: Metrics,
        *,
        store_s: float,
        sampled: bool = False,
        tag_rules: Sequence[TagRule] = (),
    ) -> None:
        self.responses, self.semantic, self._metrics = responses, semantic, metrics
        self._store_s, self._sampled, self._tag_rules = store_s, sampled, tag_rules
        self._store = Workers("semkv-store", threads=4, queued=_QUEUED, drops=True)
        self._keepers = Workers("semkv-keeper", threads=4, queued=_QUEUED)
        self._encoders = Workers("semkv-encoder", threads=2, queued=_LOOKUPS, drops=True, nice=_ASIDE)
        self._recorders = Workers("semkv-recorder", threads=1, queued=_LOOKUPS, drops=True, nice=_ASIDE)
        self.odds = Odds()
        self._parsers = Workers("semkv-parser", threads=2, queued=1 << 20)
        self._finding: dict[str, asyncio.Task[Resolution]] = {}

    # -- looking up ---------------------------------------------------------------------------------------------

    async def find(self, canonical: CanonicalRequest, since: float | None = None, *, keep: bool = True) -> Resolution:
        """What the caches have; looked up once for all who ask for the same at the same time.

        Args:
            canonical: the request.
            since: when it came, by `time.perf_counter`, where the upstream is asked meanwhile; else None.
            keep: False where nothing of it may be kept. A look for similar pictures writes the request's own.
        """
        if not keep and self.semantic is not None and canonical.request is not None and canonical.request.media:
            return Resolution(canonical, await self.stored(canonical))
        task = self._finding.get(canonical.key)
        if task is None:
            task = asyncio.ensure_future(self._find(canonical, since))
            self._finding[canonical.key] = task
            task.add_done_callback(lambda _: self._finding.pop(canonical.key, None))
            return await asyncio.shield(task)
        return await self._own(canonical, await asyncio.shield(task))

    async def _own(self, canonical: CanonicalRequest, looked: Resolution) -> Resolution:
        """What was found for an equal request, with what this one has beside the key, such as its ``request_id``."""
        if looked.canonical.key == canonical.key:
            return replace(looked, canonical=canonical)
        assert looked.report is not None
        own = await self._guarded("semantic", self._parsers, _LOOKUP_S, canonical.with_plan, looked.report.plan)
        return Resolution(canonical) if own is None else replace(looked, canonical=own)

    def partition(self, canonical: CanonicalRequest) -> str:
        """What a request shares with those whose answers it may join; empty where there are none."""
        if self.semantic is None or canonical.request is None:
            return ""
        return self.semantic.joining.partition(canonical.request)

    async def _find(self, canonical: CanonicalRequest, since: float | None) -> Resolution:
        if canonical.sampled and not self._sampled:
            return Resolution(canonical)
        own = Resolution(canonical, await self.stored(canonical))
        # What is younger than the question may be the answer to this very request, which is asked meanwhile.
        there = own.found is not None and (since is None or own.found.age_s > time.perf_counter() - since)
        if there or self.semantic is None or canonical.request is None:
            self.odds.add(found=there)
            return own
        if since is not None and self._encoders.pending > _BESIDE:
            self._metrics.left_out.inc()
            return own
        start = time.perf_counter()
        looked = await self._guarded("semantic", self._encoders, _LOOKUP_S, self._try_reuse, canonical)
        self._metrics.lookup(time.perf_counter() - start)
        report = None if looked is None else looked.report
        if looked is None or report is None:
            return own
        self.odds.add(found=bool(report.plan.substituted))
        if not report.plan.substituted:
            return replace(looked, found=own.found)
        other = await self._guarded("semantic", self._parsers, _LOOKUP_S, canonical.with_plan, report.plan)
        if other is None:  # the donor cannot be used after all, so nothing may be recorded as computed from it
            return own
        if other.key == canonical.key:
            return Resolution(canonical, None, report)
        return Resolution(other, await self.stored(other), report)

    def _try_reuse(self, canonical: CanonicalRequest) -> Resolution:
        assert self.semantic is not None
        request = canonical.with_media(self.semantic.media)
        if request is None:
            return Resolution(canonical)
        report = self.semantic.try_reuse(request)
        kept = self.responses.keeps(canonical, tags=self._tags(canonical))
        return Resolution(canonical, None, report, self.semantic.joining.underway(report) if kept else None)

    async def join(self, resolution: Resolution, others: Sequence[tuple[str, Candidate]]) -> Resolution | None:
        """What a request that found nothing may use of others whose answers are on their way; None for nothing.

        Args:
            resolution: of the request.
            others: keys of the others, and the others as donors.
        """
        joined = await self._guarded("semantic", self._parsers, _LOOKUP_S, self._join, resolution, others)
        if joined is not None:
            self.odds.add(found=True)
        return joined

    def _join(self, resolution: Resolution, others: Sequence[tuple[str, Candidate]]) -> Resolution | None:
        assert self.semantic is not None
        assert resolution.report is not None
        for key, candidate in others:
            segments = candidate.donor.segments
            same = resolution.canonical.with_plan(Plan(segments, len(segments)))
            if same is None or same.key != key:  # it differs in more than the prompt
                continue
            report = self.semantic.joining.try_join(resolution.report, candidate)
            if report is not None:
                return Resolution(same, None, report)
        return None

    async def stored(self, canonical: CanonicalRequest) -> Found | None:
        """The stored answer to exactly this request."""
        if canonical.sampled and not self._sampled:
            return None
        found = self.responses.peek(canonical.key)
        if found is not None:
            return found
        return await self._guarded("store", self._store, self._store_s, self.responses.lookup, canonical.key)

    async def _guarded(
        self,
        part: str,
        workers: Workers,
        limit_s: float | None,
        work: Callable[_P, _T],
        *args: _P.args,
        **kwargs: _P.kwargs,
    ) -> _T | None:
        """The result of ``work``; None, counted, where it failed or took too long."""
        try:
            return await workers.run(limit_s, work, *args, **kwargs)
        except Late:
            self._metrics.fault(f"{part}: late")
        except Exception:
            log.exception("%s failed", part)
            self._metrics.fault(part)
        return None

    async def parse(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Do work on a large body in a thread."""
        return await self._parsers.run(None, work, *args, **kwargs)

    # -- keeping ------------------------------------------------------------------------------------------------

    async def keep(self, canonical: CanonicalRequest, payload: bytes, since: str) -> bool:
        """Keep an answer; waits until it outlives this process, or the store's time is up."""
        small = len(payload) + len(canonical.prompt) <= _SMALL
        if small and (done := self._try_keep(canonical, payload, since)) is not None:
            return done
        kept = await self._guarded("store", self._keepers, self._store_s, self._keep, canonical, payload, since)
        return kept is True

    def _try_keep(self, canonical: CanonicalRequest, payload: bytes, since: str) -> bool | None:
        """At once, which costs less than a thread does; None where a thread must do it."""
        try:
            return self.responses.try_keep(canonical, payload, since=since, tags=self._tags(canonical))
        except Exception:
            log.exception("store failed")
            self._metrics.fault("store")
            return None

    def _keep(self, canonical: CanonicalRequest, payload: bytes, since: str) -> bool:
        return self.responses.keep(canonical, payload, since=since, tags=self._tags(canonical))

    def _tags(self, canonical: CanonicalRequest) -> list[str]:
        return sorted({*canonical.tags, *tags_by(self._tag_rules, canonical.prompt, canonical.model)})

    async def observe(self, report: ReuseReport, payload: bytes, model: str) -> None:
        """Tell the semantic cache what was computed, and by which model as the request names it."""
        if self.semantic is not None:
            observe = partial(self.semantic.add_observation, metadata={"model": model[:_NAME]})
            await self._guarded("semantic", self._recorders, None, observe, report, text_of(payload))

    # -- checking and removing ----------------------------------------------------------------------------------

    def should_check(self, report: ReuseReport | None) -> bool:
        """Whether the unchanged request should be run, too."""
        return report is not None and self.semantic is not None and self.semantic.should_check(report)

    async def check(self, report: ReuseReport, own: bytes, given: bytes) -> None:
        """Compare the unchanged request's own answer with the one that was given, and record it."""
        if self.semantic is not None:
            await self._guarded("semantic", self._recorders, None, self._check, self.semantic, report, own, given)

    def _check(self, semantic: SemanticCache, report: ReuseReport, own: bytes, given: bytes) -> None:
        semantic.checked(report.hit_id, semantic.same_answer(text_of(own), text_of(given)))
        semantic.add_observation(report.unchanged(), text_of(own))

    async def report_wrong(self, hit_id: str) -> None:
        """A hit was wrong: its donor goes."""
        if self.semantic is not None and hit_id:
            await self._encoders.run(_ADMIN_S, self.semantic.report_wrong, hit_id)

    async def invalidate(self, selector: Selector, *, dry_run: bool) -> int:
        """Remove stored answers, or count them.

        Raises:
            StoreError: the store could not be reached.
            Late: it did not answer.
        """
        return await self._keepers.run(_INVALIDATE_S, self.responses.invalidate, selector, dry_run=dry_run)

    async def figures(self, work: Callable[[], _T]) -> _T:
        """Read figures that need the stores."""
        return await self._store.run(_ADMIN_S, work)

    def sizes(self) -> dict[str, dict[str, float]]:
        """Sizes (``gauges``), and what the caches counted (``events``). Blocks."""
        counts = dict(self.responses.counts())
        gauges = {ours: float(counts.pop(theirs, 0)) for ours, theirs in _SIZES.items()}
        events = {f"response {name}": float(n) for name, n in counts.items()}
        if self.semantic is not None:
            more, counted = _semantic_figures(self.semantic.stats())
            gauges.update(more)
            gauges["media_limit_bytes"] = float(self.semantic.config.media_mib << 20)
            events.update(counted)
        return {"gauges": gauges, "events": events}

    async def aclose(self) -> None:
        """Finish what is being written, and close the stores."""
        for workers in (self._encoders, self._recorders, self._store, self._keepers, self._parsers):
            await asyncio.to_thread(workers.close)
        self.responses.close()
        if self.semantic is not None:
            self.semantic.close()


def _semantic_figures(stats: CacheStats) -> tuple[dict[str, float], dict[str, float]]:
    """Gauges and events of the semantic cache."""
    gauges = {"semantic_entries": float(stats.entries), "media_bytes": float(stats.media_bytes)}
    if stats.wrong_rate is not None:
        gauges |= {"hits_checked": float(stats.checked), "wrong_hit_share": stats.wrong_rate}
        gauges["wrong_hit_share_upper"] = stats.wrong_interval[1]
    groups = {"hit": stats.hits, "veto": stats.vetoes, "overruled": stats.overruled, "fault": stats.faults}
    events = {f"semantic {kind}:{name}": float(n) for kind, group in groups.items() for name, n in group.items()}
    plain = {"lookup": stats.lookups, "refused": stats.refused, "barred": stats.barred, "recorded": stats.recorded}
    plain |= {"checked": stats.checked, "checked wrong": stats.checked_wrong, "reported wrong": stats.reported_wrong}
    events |= {f"semantic {name}": float(n) for name, n in plain.items()}
    return gauges, events


def text_of(payload: bytes) -> str:
    """The text of an answer's first choice; its tool calls as JSON; empty where there is neither."""
    try:
        choice = json.loads(payload)["choices"][0]
        message = choice.get("message")
        if message is None:
            return str(choice.get("text") or "")
        if calls := message.get("tool_calls"):
            return json.dumps([call["function"] for call in calls], sort_keys=True)
        return str(message.get("content") or "")
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""
