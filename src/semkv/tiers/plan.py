"""From a candidate to a plan: the canonical prompt, if the donor can be used.

A donor is an entry of the catalog, or one that is pending: a request whose answer is on its way, as a donor for those
that come meanwhile. Until its answer is recorded it is compared here by the rules of the text tiers: the whole prompt,
after folding where that is on, or a similar question after the same prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from semkv.config import CacheConfig
from semkv.encoders.hooks import read_media
from semkv.encoders.vision import read_picture
from semkv.guards import Guard, pictures, wording
from semkv.stores.media import MediaStore
from semkv.tiers.base import EXACT, Candidate, Tally
from semkv.tiers.checking import Checking
from semkv.tiers.policies import Decider, Decision
from semkv.tiers.prompt_keys import Keyed, entry_of, exactness_of
from semkv.tiers.similar import SEMANTIC
from semkv.types import (
    CacheMode,
    Entry,
    Exactness,
    Match,
    MediaSegment,
    Near,
    Plan,
    Request,
    ReuseReport,
    Scope,
    Segment,
    Status,
)

if TYPE_CHECKING:
    from semkv.types import Vector

_REMEMBERED = 1024  # verdicts on images: a lookup meets a pair of images with several donors


class ImageGuard:
    """Compares the pixels of a request's images, from ``roots``, with those of a donor's, which the store keeps."""

    def __init__(self, media: MediaStore, roots: Sequence[Path]) -> None:
        self._media, self._roots = media, roots
        self._alike = lru_cache(maxsize=_REMEMBERED)(self._compare)

    def changed(self, own: Sequence[Segment], donor: Sequence[Segment]) -> bool:
        """Whether an image of a donor's run may show something else than the request's in its place: also where
        either cannot be read."""
        mine, theirs = ([s for s in run if isinstance(s, MediaSegment)] for run in (own, donor))
        if len(mine) != len(theirs):
            return True
        try:
            return not all(
                a.media_id == b.media_id or self._alike(a, b.media_id) for a, b in zip(mine, theirs, strict=True)
            )
        except OSError:  # which is not remembered
            return True

    def _compare(self, mine: MediaSegment, theirs: str) -> bool:
        first, second = read_media(mine, self._roots), self._media.get(theirs)
        if first is None or second is None:
            raise OSError("an image is gone")
        a, b = (read_picture(data, most_pixels=pictures.MOST_PIXELS, whole=True) for data in (first, second))
        return pictures.difference(a, b) < pictures.LIMIT


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a candidate.

    Attributes:
        plan: None where the candidate cannot be used.
        decision: the policy's, where it was asked.
        near: a match with the donor's whole prompt that the policy refused.
    """

    plan: Plan | None = None
    decision: Decision | None = None
    near: Near | None = None


class Planner:
    """Checks a candidate and puts the prompt together: the donor's leading run, then the request's own rest.

    Args:
        media: where donors' images are.
        guard: may veto an approximate match of the whole prompt.
        images: may veto one in which another image stands in; None goes without.
        normalised: False has texts that are equal after folding alone judged as approximate matches are.
    """

    def __init__(
        self,
        media: MediaStore,
        decider: Decider,
        guard: Guard,
        checking: Checking,
        tally: Tally,
        *,
        images: ImageGuard | None,
        normalised: bool,
    ) -> None:
        self._media, self._decider, self._guard, self._tally = media, decider, guard, tally
        self._checking, self._images, self._normalised = checking, images, normalised

    def plan(self, request: Request, candidate: Candidate) -> Verdict:
        """The plan; none where a guard or the policy refuses, or a donor's image is gone (all counted)."""
        donor, run = candidate.donor, candidate.run
        whole = run == len(donor.segments)
        own = request.segments if whole else request.segments[:run]
        exactness = exactness_of(own, donor.segments[:run], normalised=self._normalised)
        match = Match(candidate.tier, donor.entry_id, candidate.score, exactness, whole=whole, others=candidate.others)
        decision = None
        if exactness is Exactness.APPROXIMATE:
            if whole:
                if reason := self._veto(request, donor):
                    self._tally.add(f"veto:{reason}")
                    return Verdict()
                match = replace(match, wording=wording(request.chunk_text, donor.chunk_text))
            if self._images is not None and self._images.changed(own, donor.segments[:run]):
                self._tally.add("veto:image")
                return Verdict()
            decision = self._judge(request, donor, match)
            if not decision.accept:
                return Verdict(near=Near(match, donor.response) if whole else None)
        leading = own if exactness is Exactness.EXACT else self._available(request, donor.segments[:run])
        if leading is None:
            self._tally.add("donor media lost")
            return Verdict()
        rest = () if whole else request.segments[run:]
        return Verdict(Plan((*leading, *rest), len(leading), match), decision)

    def _veto(self, request: Request, donor: Entry) -> str | None:
        """Of the texts that were compared, and of the questions where the caller had other texts compared."""
        reason = self._guard(request.chunk_text, donor.chunk_text)
        if reason is None and (request.question, donor.question) != (request.chunk_text, donor.chunk_text):
            reason = self._guard(request.question, donor.question)
        return reason

    def _judge(self, request: Request, donor: Entry, match: Match) -> Decision:
        """What checks found, then the policy."""
        if self._checking.blocked(request, donor.entry_id):
            self._tally.add("barred")
            return Decision(False, "found wrong before")
        decision = self._decider.accept(request, donor, match)
        if not decision.accept:
            self._tally.add("refused")
        return decision

    def _available(self, request: Request, run: tuple[Segment, ...]) -> tuple[Segment, ...] | None:
        """The run with a readable, verified file behind each media item that is not the request's own."""
        own = {segment.media_id: segment for segment in request.media}
        ready: list[Segment] = []
        for segment in run:
            if not isinstance(segment, MediaSegment):
                ready.append(segment)
            elif segment.media_id in own:
                ready.append(own[segment.media_id])
            elif self._media.get(segment.media_id) is None:
                return None
            else:
                ready.append(replace(segment, source=self._media.path(segment.media_id)))
        return tuple(ready)


# -- pending entries -----------------------------------------------------------------------------------------------


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
        return Candidate(self.donor, run, SEMANTIC, score, (SEMANTIC,)) if score >= self.least else None


class PendingTier:
    """Decides who may have the answer of a request that is still on its way. Any thread may call any method.

    ``least`` is the least cosine of a similar question that the policy is asked about.
    """

    def __init__(self, config: CacheConfig, least: float, planner: Planner, checking: Checking, tally: Tally) -> None:
        self._config, self._least = config, least
        self._planner, self._checking, self._tally = planner, checking, tally

    def _keys(self, keyed: Keyed) -> tuple[str, str]:
        """`PendingEntry.prompt_key` and `PendingEntry.slot_key`."""
        normalised, with_media = self._config.normalised, self._config.scope is Scope.MEDIA
        chain = keyed.chain(normalised=normalised, with_media=with_media)
        slot_key = keyed.frame(normalised=normalised, with_media=with_media)
        return keyed.whole(chain, "folded") if self._config.exact else "", slot_key

    def group(self, request: Request) -> str:
        """`PendingEntry.group` of a request before its lookup; empty where it matches none."""
        with self._tally.boundary("request"):
            if request.segments and self._config.mode is CacheMode.LIVE:
                prompt_key, slot_key = self._keys(Keyed.of(request.namespace, request.segments))
                return slot_key or prompt_key
        return ""

    def entry(self, report: ReuseReport) -> PendingEntry | None:
        """The request of a lookup as others may find it until its answer is recorded; None where the cache is not live,
        or the lookup found a donor of more than a byte-equal beginning."""
        request = report.request
        if report.rewritten or report.plan.full or not request.segments or self._config.mode is not CacheMode.LIVE:
            return None
        with self._tally.boundary("request"):
            keyed = Keyed.of(request.namespace, request.segments)
            vector = report.embeddings.get(SEMANTIC)
            return PendingEntry(entry_of(request, keyed), *self._keys(keyed), vector, self._least)
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
