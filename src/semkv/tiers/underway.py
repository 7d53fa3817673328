"""Requests whose answers are on their way, as donors for those that come meanwhile.

The catalog knows what was answered. Until an answer is recorded, its request is compared by the rules of the text tiers
here: the whole prompt, after folding where that is on, or a similar question after the same prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from semkv.config import CacheConfig
from semkv.tiers import exact_text, semantic_text
from semkv.tiers.base import Boundary, Candidate, Tally
from semkv.tiers.checking import HitLog
from semkv.tiers.keying import Keyed
from semkv.tiers.plan import Planner, Verdict
from semkv.tiers.record import entry_of
from semkv.types import CacheMode, Entry, Request, ReuseReport, Scope, Status

if TYPE_CHECKING:
    from semkv.types import Vector


@dataclass(frozen=True, slots=True, eq=False)
class Underway:
    """A request that goes to the engine as it is.

    Attributes:
        donor: the entry that it will be recorded as; its response is still empty.
        whole: key of its prompt, folded where normalised matches are on; empty where no such matches are.
        frame: the same of all but its question; empty where there is none.
        vector: unit vector of its chunk text, [dim]; None where it has none.
        least: least cosine of a similar question.
    """

    donor: Entry
    whole: str
    frame: str
    vector: Vector | None
    least: float

    @property
    def partition(self) -> str:
        """Requests of other partitions never match."""
        return self.frame or self.whole

    def candidate(self, other: Underway) -> Candidate | None:
        """The other request as a donor for this one; None where it is not similar."""
        run = len(other.donor.segments)
        if self.whole and self.whole == other.whole:
            return Candidate(other.donor, run, exact_text.STATUS, 1.0, (exact_text.STATUS,))
        if not self.frame or self.frame != other.frame or self.vector is None or other.vector is None:
            return None
        score = min(1.0, float(self.vector @ other.vector))
        if score < self.least:
            return None
        return Candidate(other.donor, run, semantic_text.STATUS, score, (semantic_text.STATUS,))


class Joining:
    """Decides who may have the answer of a request that is still on its way. Any thread may call any method.

    Args:
        config: of the cache.
        least: least cosine of a similar question that the policy is asked about.
        planner: the guards, the policy and the second stage.
        hits: the open hits.
        tally: counts hits and faults.
    """

    def __init__(self, config: CacheConfig, least: float, planner: Planner, hits: HitLog, tally: Tally) -> None:
        self._exact, self._normalised, self._with_media = config.exact, config.normalised, config.scope is Scope.MEDIA
        self._live, self._least = config.mode is CacheMode.LIVE, least
        self._planner, self._hits, self._tally = planner, hits, tally

    def _keys(self, request: Request) -> tuple[Keyed, str, str]:
        """Of a request: its keys, and `Underway.whole` and `Underway.frame`."""
        keyed = Keyed.of(request.namespace, request.segments)
        chain = keyed.chain(normalised=self._normalised, with_media=self._with_media)
        frame = keyed.frame(normalised=self._normalised, with_media=self._with_media)
        return keyed, keyed.whole(chain, "folded") if self._exact else "", frame

    def partition(self, request: Request) -> str:
        """`Underway.partition` of a request before its lookup; empty where it can join no other."""
        with Boundary(self._tally, "request"):
            if request.segments and self._live:
                _, whole, frame = self._keys(request)
                return frame or whole
        return ""

    def underway(self, report: ReuseReport) -> Underway | None:
        """The request of a lookup that found nothing, as others may find it until its answer is recorded.

        Returns:
            None where the cache is not live, or the lookup found a donor.
        """
        request = report.request
        if report.hit or not request.segments or not self._live:
            return None
        with Boundary(self._tally, "request"):
            keyed, whole, frame = self._keys(request)
            vector = report.embeddings.get(semantic_text.STATUS)
            return Underway(entry_of(request, keyed), whole, frame, vector, self._least)
        return None

    def try_join(self, report: ReuseReport, candidate: Candidate) -> ReuseReport | None:
        """Whether a request that found nothing may have the answer of another that is on its way.

        The guards, what checks found, the policy and the second stage are asked as for a stored donor, and the hit
        counts as theirs do.

        Args:
            report: of the request's lookup.
            candidate: the other one, from `Underway.candidate`.

        Returns:
            The report of the hit; None where it may not.
        """
        verdict = Verdict()
        with Boundary(self._tally, "join"):
            verdict = self._planner.plan(report.request, candidate)
        plan = verdict.plan
        if plan is None or plan.match is None:
            return None
        self._tally.add(f"hit:{plan.match.tier}")
        statuses = {**report.statuses, **dict.fromkeys(candidate.agreed, Status.HIT)}
        hit_id = self._hits.open(report.request, plan.match, verdict.check)
        return replace(report, plan=plan, statuses=statuses, hit_id=hit_id, near=None)
