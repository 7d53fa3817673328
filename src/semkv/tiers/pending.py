"""Pending entries: requests whose answers are on their way, as donors for those that come meanwhile.

The catalog knows what was answered. Until an answer is recorded, its request is compared here by the rules of the text
tiers: the whole prompt, after folding where that is on, or a similar question after the same prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from semkv.config import CacheConfig
from semkv.tiers.base import EXACT, Candidate, Tally
from semkv.tiers.checking import Checking
from semkv.tiers.plan import Planner
from semkv.tiers.prompt_keys import Keyed, entry_of
from semkv.tiers.similar import SEMANTIC
from semkv.types import CacheMode, Entry, Request, ReuseReport, Scope, Status

if TYPE_CHECKING:
    from semkv.types import Vector


@dataclass(frozen=True, slots=True, eq=False)
class PendingEntry:
    """A request that goes to the engine as it is.

    Attributes:
        donor: the entry that it will be recorded as; its response is still empty.
        prompt_key: of its whole prompt, folded where normalised matches are on; empty where exact matches are off.
        slot_key: the same of all but its question; empty where it has no question.
        vector: unit vector of its chunk text, [dim]; None where it has none.
        least: least cosine of a similar question.
    """

    donor: Entry
    prompt_key: str
    slot_key: str
    vector: Vector | None
    least: float

    @property
    def group(self) -> str:
        """Entries of other groups never match."""
        return self.slot_key or self.prompt_key

    def donate(self, to: PendingEntry) -> Candidate | None:
        """This entry as a donor for another request; None where they are not similar."""
        run = len(self.donor.segments)
        if self.prompt_key and self.prompt_key == to.prompt_key:
            return Candidate(self.donor, run, EXACT, 1.0, (EXACT,))
        if not self.slot_key or self.slot_key != to.slot_key or self.vector is None or to.vector is None:
            return None
        score = min(1.0, float(self.vector @ to.vector))
        if score < self.least:
            return None
        return Candidate(self.donor, run, SEMANTIC, score, (SEMANTIC,))


class PendingTier:
    """Decides who may have the answer of a request that is still on its way. Any thread may call any method.

    Args:
        config: of the cache.
        least: least cosine of a similar question that the policy is asked about.
        planner: guards and policy.
        checking: the open hits.
        tally: counts hits and faults.
    """

    def __init__(self, config: CacheConfig, least: float, planner: Planner, checking: Checking, tally: Tally) -> None:
        self._exact, self._normalised, self._with_media = config.exact, config.normalised, config.scope is Scope.MEDIA
        self._live, self._least = config.mode is CacheMode.LIVE, least
        self._planner, self._checking, self._tally = planner, checking, tally

    def _keys(self, keyed: Keyed) -> tuple[str, str]:
        """`PendingEntry.prompt_key` and `PendingEntry.slot_key`."""
        chain = keyed.chain(normalised=self._normalised, with_media=self._with_media)
        slot_key = keyed.frame(normalised=self._normalised, with_media=self._with_media)
        return keyed.whole(chain, "folded") if self._exact else "", slot_key

    def group(self, request: Request) -> str:
        """`PendingEntry.group` of a request before its lookup; empty where it matches none."""
        with self._tally.boundary("request"):
            if request.segments and self._live:
                prompt_key, slot_key = self._keys(Keyed.of(request.namespace, request.segments))
                return slot_key or prompt_key
        return ""

    def entry(self, report: ReuseReport) -> PendingEntry | None:
        """The request of a lookup as others may find it until its answer is recorded.

        Returns:
            None where the cache is not live, or the lookup found a donor of more than a byte-equal beginning.
        """
        request = report.request
        if report.rewritten or report.plan.full or not request.segments or not self._live:
            return None
        with self._tally.boundary("request"):
            keyed = Keyed.of(request.namespace, request.segments)
            return PendingEntry(
                entry_of(request, keyed), *self._keys(keyed), report.embeddings.get(SEMANTIC), self._least
            )
        return None

    def try_reuse(self, report: ReuseReport, candidate: Candidate) -> ReuseReport | None:
        """Whether a request whose lookup found nothing may have the answer of a pending entry.

        Guards, policy and the pairs found wrong are asked as for a stored donor, and the hit counts as theirs do.

        Args:
            report: of the request's lookup.
            candidate: what `PendingEntry.donate` made of the pending entry.

        Returns:
            The report of the hit; None where it may not.
        """
        with self._tally.boundary("join"):
            verdict = self._planner.plan(report.request, candidate)
            if verdict.plan is None or verdict.plan.match is None:
                return None
            hit_id = self._checking.open(report.request, verdict.plan.match, verdict.decision)
            self._tally.add(f"hit:{verdict.plan.match.tier}")
            statuses = {**report.statuses, **dict.fromkeys(candidate.agreed, Status.HIT)}
            return replace(report, plan=verdict.plan, statuses=statuses, hit_id=hit_id, near=None)
        return None
