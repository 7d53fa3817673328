"""The two caches as the gateway uses them: off the event loop, within time limits, and every fault a counted miss.

The response tier holds whole answers under exact keys. The semantic cache finds a donor for a near-repeat. The donor's
parts then make a canonical request' with a key of its own, under which the response tier is asked again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

from semkv.account import Account
from semkv.cache import CacheStats, SemanticCache
from semkv.tiers.checking import same_text
from semkv.tiers.matching import PendingEntry
from semkv.tiers.tier import SEMANTIC
from semkv.types import Exactness, Plan, ReuseReport
from semkv_gateway.metrics import Metrics
from semkv_gateway.request_key import CanonicalRequest
from semkv_gateway.response_cache import Found, ResponseCache
from semkv_gateway.responses.store import Selector, StoredResponse
from semkv_gateway.rules import Rules
from semkv_gateway.sse import choices_of, text_of
from semkv_gateway.threads import Batches, Pool

log = logging.getLogger(__name__)

EXACT = "exact"

_P = ParamSpec("_P")
_T = TypeVar("_T")
_LOOKUP_S = 10.0  # longest wait for a semantic lookup
_RECENT = 64  # weight of the moving average of lookups that found something; 191 that found nothing bring it under 5%
_RARE = 0.05
_LOOKUPS = 256  # lookups that may wait for a thread; a further request goes on without one, and waits no seconds
# The same while few lookups find anything: more of them would take the cores from hits.
_UNLIKELY = 16
_CANDIDATES = 4  # requests on their way that the policy is asked about
_NICE = 5  # niceness of lookups: a third of an ordinary thread's share of a core, so that the event loop goes on
_QUEUED = (
    2048  # requests that may wait for the store; beyond it a hanging one costs no request any time
)
_THREADS = 8  # of a store that does several things at once
_TOGETHER = 64  # reads or writes of a file that one thread does together
_LARGE = 64 * 1024  # bytes of an answer that is looked through in a thread
_NAME = 200  # characters of a model's name that are noted
_ADMIN_S = 30.0
_INVALIDATE_S = 300.0  # every answer's head is read: a million take half a minute in Redis


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the caches have for a request."""

    canonical: CanonicalRequest  # what would be asked upstream: the request, or that of a plan
    found: Found | None = None  # its stored answer, or None
    report: ReuseReport | None = None  # of the semantic lookup; None where there was none
    entry: PendingEntry | None = None  # as near-repeats find it meanwhile; None where they may not

    @property
    def tier(self) -> str:
        """Where the donor came from; ``exact`` without one, and where its prompt is the request's own."""
        match = (
            self.report.plan.match
            if self.report is not None and self.report.plan.substituted
            else None
        )
        if self.report is None or match is None or match.exactness is Exactness.EXACT:
            return EXACT
        return self.report.provenance

    @property
    def score(self) -> float | None:
        """Of the donor; None without one."""
        match = self.report.plan.match if self.report is not None else None
        return match.score if match is not None and self.tier != EXACT else None

    @property
    def judged(self) -> bool:
        """Whether the donor is one to which a judge said yes."""
        match = self.report.plan.match if self.report is not None else None
        return match is not None and match.judged is True

    @property
    def donor(self) -> str:
        """Id of the donor; empty without one."""
        match = self.report.plan.match if self.report is not None else None
        return match.entry_id if match is not None and self.tier != EXACT else ""


@dataclass(slots=True, eq=False)
class Running:
    """A lookup, and how many wait for it."""

    task: asyncio.Task[Lookup]
    over: asyncio.Future[None]  # done when no request waits for the lookup
    readers: int = 0

    async def result(self) -> Lookup:
        self.readers += 1
        try:
            return await asyncio.shield(self.task)
        finally:
            self.readers -= 1
            if not self.readers and not self.over.done():
                self.over.set_result(None)


class CacheClient:
    """Looks up, stores and removes answers."""

    def __init__(
        self,
        responses: ResponseCache,
        semantic: SemanticCache | None,
        metrics: Metrics,
        *,
        store_s: float,
        rules: Rules,
    ) -> None:
        self.responses = responses
        self.semantic = semantic
        self.account = Account() if semantic is None else semantic.account
        self._metrics = metrics
        self._store_s = store_s
        self.rules = rules
        # A store with one lock, such as a file, has one thread for all that wait; another has one for each.
        most = _TOGETHER if responses.takes_several else 1
        threads = 1 if responses.takes_several else _THREADS
        self._reads = Batches[tuple[str, ...], Found | None](
            "semkv-read",
            responses.lookup_all,
            most=most,
            threads=threads,
            queued=_QUEUED,
        )
        self._writes = Batches[tuple[StoredResponse, str], bool](
            "semkv-write",
            responses.keep_all,
            most=most,
            threads=threads,
            queued=_QUEUED,
        )
        self._store = Pool("semkv-store", threads=_THREADS, queued=_QUEUED)  # for all else
        self._lookups = Pool(
            "semkv-lookup",
            threads=2,
            queued=_LOOKUPS,
            nice=_NICE,
        )
        # No lookup waits behind a record.
        self._records = Pool(
            "semkv-record",
            threads=1,
            queued=_LOOKUPS,
            nice=_NICE,
        )
        self._running: dict[str, Running] = {}  # lookups that later requests may share
        self._waited_for: set[Running] = set()
        self._crowded_out = 0  # lookups left out since many waited and few find anything
        self.found_share = 1.0  # share of recent lookups that found something; 1 before the first

    # -- looking up ---------------------------------------------------------------------------------------------

    @property
    def rarely_finds(self) -> bool:
        """Whether fewer than 5% of recent lookups found something."""
        return self.found_share < _RARE

    def _count(self, *, found: bool) -> None:
        self.found_share += (found - self.found_share) / _RECENT

    async def stored(self, *keys: str) -> Found | None:
        """The first answer that is stored under one of the keys."""
        found = self.responses.peek(keys[0])
        if found is not None and not found.stale:
            return found
        return await self._guarded("store", self._reads.result(self._store_s, keys, always=False))

    async def look_up(self, canonical: CanonicalRequest, *, writes: bool = True) -> Lookup:
        """What the caches have; looked up once for all who ask for the same at the same time. Never raises. Without
        ``writes`` nothing of the request may be stored, and a look for similar images stores its own."""
        return await self._guarded("lookup", self._look_up(canonical, writes)) or Lookup(canonical)

    async def _look_up(self, canonical: CanonicalRequest, writes: bool) -> Lookup:
        if (
            not writes
            and self.semantic is not None
            and canonical.request is not None
            and canonical.request.media
        ):
            return Lookup(canonical, await self.stored(*canonical.keys))
        if self.semantic is None:
            return await self._find(canonical)
        # After an invalidation no lookup that began before it. Rules look at fields that are in no key.
        running = f"{canonical.key} {self.responses.begin()} {self.rules.least_cosine(canonical)}"
        found = await self._shared(running, canonical)
        # The lookup may be another request's: from here on it has this request's own fields, such as ``request_id``.
        report = found.report
        if report is None or not report.plan.substituted:
            return replace(found, canonical=canonical)
        other = await self._guarded("semantic", _in_thread(canonical.with_plan, report.plan))
        # The donor cannot be used after all, so nothing may be recorded as computed from it.
        if other is None:
            return Lookup(canonical)
        if other.key == canonical.key:
            return replace(found, canonical=canonical)
        if found.score is not None and found.score < self.rules.least_cosine(other):
            return replace(found, canonical=canonical, report=report.unchanged())
        return Lookup(other, await self.stored(other.key), report)

    async def _shared(self, key: str, canonical: CanonicalRequest) -> Lookup:
        """The lookup with this key that is running, or a new one."""
        running = self._running.get(key)
        if running is None:
            task = asyncio.ensure_future(self._find(canonical))
            running = Running(task, over=asyncio.get_running_loop().create_future())
            self._running[key] = running
            self._waited_for.add(running)
            running.over.add_done_callback(lambda _: self._waited_for.discard(running))
            for end in (task, running.over):
                end.add_done_callback(partial(self._ended, key, running))
        return await running.result()

    def _ended(self, key: str, running: Running, _: asyncio.Future[Any]) -> None:
        """Nobody shares a lookup that is done, or that everybody has left."""
        if self._running.get(key) is running:
            del self._running[key]

    async def running_lookups_over(self) -> None:
        """Wait until nobody waits for any lookup that is running now."""
        for running in list(self._waited_for):  # by the end of one, most others are over
            if not running.over.done():
                await asyncio.wait((running.over,))

    async def _find(self, canonical: CanonicalRequest) -> Lookup:
        """The stored answer, else a donor."""
        start = time.perf_counter()
        found = await self.stored(*canonical.keys)
        self.account.spent(EXACT, time.perf_counter() - start)
        if found is not None or self.semantic is None or canonical.request is None:
            self._count(found=found is not None)
            return Lookup(canonical, found)
        least = self.rules.least_cosine(canonical)
        if least > 1.0:  # no near-repeats, neither of others nor for others
            return Lookup(canonical)
        if self.rarely_finds and self._lookups.waiting > _UNLIKELY:
            self._crowded_out += 1
            return Lookup(canonical)
        start = time.perf_counter()
        work = self._lookups.run(_LOOKUP_S, self._try_reuse, self.semantic, canonical)
        looked = await self._guarded("semantic", work) or Lookup(canonical)
        self._metrics.lookup_seconds.observe(time.perf_counter() - start)
        if looked.score is not None and looked.score < least and looked.report is not None:
            looked = replace(looked, report=looked.report.unchanged())
        if least:  # a request on its way may be less near than the rule asks for
            looked = replace(looked, entry=None)
        if looked.report is not None:
            self._count(found=looked.report.rewritten)
        return looked

    def _try_reuse(self, semantic: SemanticCache, canonical: CanonicalRequest) -> Lookup:
        request = canonical.with_media(semantic.media)
        if request is None:
            return Lookup(canonical)
        report = semantic.try_reuse(request)
        stored = self.responses.keeps(canonical, tags=self.rules.tags(canonical))
        return Lookup(canonical, None, report, semantic.pending.entry(report) if stored else None)

    def leaves_out_similar(self, lookup: Lookup) -> bool:
        """Whether a request is not compared with others, since that does not pay."""
        report = lookup.report
        return self.account.auto and report is not None and SEMANTIC in report.left_out

    async def join(self, lookup: Lookup, others: Mapping[PendingEntry, str]) -> Lookup | None:
        """What a request that found nothing may use of others whose answers are on their way; None for nothing. All but
        the prompt must be equal: the key of the request with the donor's prompt must be the donor's own, which
        ``others`` has."""
        start = time.perf_counter()
        joined = await self._guarded("semantic", _in_thread(self._join, lookup, others))
        self.account.spent(SEMANTIC, time.perf_counter() - start)
        if joined is not None:
            self._count(found=True)
        return joined

    def _join(self, lookup: Lookup, others: Mapping[PendingEntry, str]) -> Lookup | None:
        assert self.semantic is not None
        assert lookup.report is not None
        assert lookup.entry is not None
        similar = self.semantic.pending.similar(lookup.entry, list(others))
        for entry, candidate in similar[:_CANDIDATES]:
            segments = candidate.donor.segments
            same = lookup.canonical.with_plan(Plan(segments, len(segments)))
            if same is None or same.key != others[entry]:
                continue
            report = self.semantic.pending.try_reuse(lookup.report, candidate)
            if report is not None:
                return Lookup(same, None, report)
        return None

    async def doubted(self, lookup: Lookup, own: CanonicalRequest) -> Lookup | None:
        """What a judge's yes would give a request: the donor's stored answer. None where its lookup left no doubt, or
        there is no such answer that it may have."""
        report = lookup.report
        if report is None or report.doubt is None:
            return None
        match, donor = report.doubt
        plan = Plan(donor.segments, len(donor.segments), match)
        other = await self._guarded("semantic", _in_thread(own.with_plan, plan))
        if other is None or other.key == own.key:
            return None
        least = max(self.rules.least_cosine(own), self.rules.least_cosine(other))
        found = await self.stored(other.key) if match.score >= least else None
        return None if found is None else Lookup(other, found, report)

    async def keep_verdict(self, report: ReuseReport, *, same: bool) -> None:
        """Remember what a judge said of a lookup's doubt."""
        if self.semantic is not None:
            keep = _in_thread(self.semantic.keep_verdict, report, same=same)
            await self._guarded("semantic", keep)

    async def settled(self, doubted: Lookup) -> Lookup | None:
        """The hit that a judge's yes makes of what `doubted` returned; None where policy or checks refuse it."""
        assert self.semantic is not None
        assert doubted.report is not None
        settling = _in_thread(self.semantic.settled, doubted.report)
        report = await self._guarded("semantic", settling)
        if report is None or not report.plan.full:
            return None
        self._count(found=True)
        found = await self.stored(doubted.canonical.key)  # it may be gone by now
        return replace(doubted, found=found, report=report)

    # -- storing ------------------------------------------------------------------------------------------------

    async def store(self, canonical: CanonicalRequest, payload: bytes, since: str) -> bool:
        """Store an answer; waits until it outlives this process, or the store's time is up."""
        return await self._guarded("keep", self._keep(canonical, payload, since)) is True

    async def _keep(self, canonical: CanonicalRequest, payload: bytes, since: str) -> bool:
        tags = self.rules.tags(canonical)
        prepare = partial(self.responses.prepared, canonical, payload, tags=tags)
        response = prepare() if len(payload) <= _LARGE else await asyncio.to_thread(prepare)
        if response is None:
            return False
        return await self._writes.result(self._store_s, (response, since), always=True)

    async def record(self, report: ReuseReport, payload: bytes, model: str) -> None:
        """Tell the semantic cache what was computed, and by which model as the request names it."""
        if self.semantic is not None:
            observe = partial(
                self.semantic.add_observation, report, metadata={"model": model[:_NAME]}
            )
            await self._guarded(
                "semantic", self._records.run(None, lambda: observe(response=text_of(payload)))
            )

    # -- credentials --------------------------------------------------------------------------------------------

    async def refused(self, name: bytes) -> bool | None:
        """Whether the upstream has refused these credentials, at whichever gateway; None where that cannot be said."""
        return await self._guarded(
            "store", self._store.run(self._store_s, self.responses.refused, name.hex())
        )

    async def refuse(self, name: bytes, *, refused: bool) -> None:
        """Note that the upstream refused credentials, or accepts them again."""
        note = self._store.complete(
            self._store_s, self.responses.refuse, name.hex(), refused=refused
        )
        await self._guarded("store", note)

    # -- checking and removing ----------------------------------------------------------------------------------

    def should_check(self, report: ReuseReport) -> bool:
        """Whether the unchanged request should be run, too."""
        return self.semantic is not None and self.semantic.should_check(report)

    async def check(
        self, report: ReuseReport, own: bytes, given: bytes, *, keep: bool
    ) -> bool | None:
        """Compare the unchanged request's own answer with the one that was given, and record it where it may be kept.
        Whether they say the same; None where that is not known."""
        if self.semantic is None:
            return None
        return await self._guarded(
            "semantic", self._records.run(None, _check, self.semantic, report, own, given, keep)
        )

    async def agree(self, own: bytes, given: bytes) -> bool | None:
        """Whether two answers to one request say the same: their choices are equal, or the texts of these, as `check`
        compares them. None where that is not known: neither has a text, or one cannot be read."""
        return await self._guarded(
            "comparison", self._records.run(None, _agree, self.semantic, own, given)
        )

    async def report_wrong(self, hit_id: str) -> None:
        """A hit was wrong: see `SemanticCache.report_wrong`."""
        if self.semantic is not None and hit_id:
            await self._lookups.run(_ADMIN_S, self.semantic.report_wrong, hit_id)

    async def bar(self, pair: str, donor: str) -> None:
        """Refuse a donor for a text from now on: see `SemanticCache.bar`."""
        if self.semantic is not None:
            await self._lookups.run(_ADMIN_S, self.semantic.bar, pair, donor)

    async def remove(self, key: str, before: float) -> int:
        """Remove the answer under a key, if it was kept before a time; how many were."""
        return await self.invalidate(Selector(key=key, before=before), dry_run=False)

    async def drop(self, donor: str) -> None:
        """Remove a donor."""
        if self.semantic is not None:
            await self._lookups.run(_ADMIN_S, partial(self.semantic.invalidate, entry_id=donor))

    async def forget(self, tenant: str, text: str) -> int:
        """Remove a tenant's donors that ask this; how many."""
        if self.semantic is None:
            return 0
        return await self._lookups.run(_ADMIN_S, self.semantic.forget, tenant, text)

    async def invalidate(self, selector: Selector, *, dry_run: bool) -> int:
        """Remove stored answers, or count them."""
        return await self._store.complete(
            _INVALIDATE_S, self.responses.invalidate, selector, dry_run=dry_run
        )

    async def figures(self, work: Callable[[], _T]) -> _T:
        """Read figures that need the stores."""
        return await self._store.run(_ADMIN_S, work)

    def sizes(self) -> dict[str, dict[str, float]]:
        """Sizes (``gauges``), and what the caches counted (``events``). Blocks."""
        gauges = {name: float(n) for name, n in self.responses.sizes().items()}
        events = {f"response {name}": float(n) for name, n in self.responses.counts().items()}
        events["semantic crowded out"] = float(self._crowded_out)
        if self.semantic is not None:
            more, counted = _semantic_figures(self.semantic.stats())
            gauges.update(more)
            gauges["media_limit_bytes"] = float(self.semantic.config.media_mib << 20)
            events.update(counted)
        return {"gauges": gauges, "events": events}

    # -- faults and the end -------------------------------------------------------------------------------------

    async def _guarded(self, part: str, work: Awaitable[_T]) -> _T | None:
        """The result of ``work``; None, counted, where it failed or took too long."""
        try:
            return await work
        except TimeoutError:
            self._metrics.fault(f"{part}: late")
        except Exception:
            self._fault(part)
        return None

    def _fault(self, part: str) -> None:
        log.exception("%s failed", part)
        self._metrics.fault(part)

    async def aclose(self) -> None:
        """Finish what is being written, and close the stores."""
        dropped = (self._lookups.close, self._records.close, self._reads.close)
        for close in dropped:
            await asyncio.to_thread(close, drop=True)
        for close in (self._writes.close, self._store.close):
            await asyncio.to_thread(close, drop=False)
        self.responses.close()
        if self.semantic is not None:
            self.semantic.close()


async def _in_thread(work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Do work that must wait neither for the store nor for lookups."""
    return await asyncio.wait_for(asyncio.to_thread(work, *args, **kwargs), _LOOKUP_S)


def _check(
    semantic: SemanticCache, report: ReuseReport, own: bytes, given: bytes, keep: bool
) -> bool:
    same = semantic.same_answer(text_of(own), text_of(given))
    semantic.checked(report.hit_id, same)
    if keep:
        semantic.add_observation(report.unchanged(), text_of(own))
    return same


def _agree(semantic: SemanticCache | None, own: bytes, given: bytes) -> bool | None:
    same = same_text if semantic is None else semantic.same_answer
    choices = choices_of(own), choices_of(given)
    if None in choices:
        return None
    if choices[0] == choices[1]:
        return True
    first, second = text_of(own), text_of(given)
    if not (first or second):
        return None
    return bool(first and second) and same(first, second)


def _semantic_figures(stats: CacheStats) -> tuple[dict[str, float], dict[str, float]]:
    """Gauges and events of the semantic cache."""
    gauges = {"semantic_entries": float(stats.entries), "media_bytes": float(stats.media_bytes)}
    if stats.wrong_rate is not None:
        gauges |= {"hits_checked": float(stats.checked), "wrong_hit_share": stats.wrong_rate}
        gauges["wrong_hit_share_upper"] = stats.wrong_interval[1]
    groups = {
        "hit": stats.hits,
        "veto": stats.vetoes,
        "judged": stats.judged,
        "told apart": stats.told_apart,
        "fault": stats.faults,
    }
    events = {
        f"semantic {kind}:{name}": float(n)
        for kind, group in groups.items()
        for name, n in group.items()
    }
    plain = {
        "lookup": stats.lookups,
        "refused": stats.refused,
        "barred": stats.barred,
        "recorded": stats.recorded,
    }
    plain |= {
        "checked": stats.checked,
        "checked wrong": stats.checked_wrong,
        "reported wrong": stats.reported_wrong,
    }
    events |= {f"semantic {name}": float(n) for name, n in plain.items()}
    return gauges, events
