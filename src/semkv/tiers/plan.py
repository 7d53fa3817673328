"""From a candidate to a plan: the canonical prompt, if the donor can be used.

A donor is an entry of the catalog, or one that is pending: a request whose answer is on its way, as a donor for those
that come meanwhile. Until its answer is recorded it is compared here by the rules of the text tiers: the whole prompt,
after folding, or a similar question after the same prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from semkv.config import CacheConfig
from semkv.encoders.hooks import image_roots, read_media
from semkv.encoders.vision import read_picture
from semkv.guards import no_veto, pictures, veto, wording
from semkv.stores.media import MediaStore
from semkv.tiers.base import EXACT, SEMANTIC, Candidate, Tally
from semkv.tiers.checking import Checking
from semkv.tiers.policies import Decider, Decision
from semkv.tiers.prompt_keys import Keyed, entry_of, exactness_of, same_characters
from semkv.types import (
    CacheMode,
    Entry,
    Exactness,
    Match,
    MatchPolicy,
    MediaSegment,
    Plan,
    Request,
    ReuseReport,
    Scope,
    Segment,
    Status,
)

if TYPE_CHECKING:
    from semkv.types import Vector

_PAIRS = 1024  # verdicts on images that are remembered: a lookup meets a pair of images with several donors


@dataclass(slots=True)
class Lookup:
    """One request on its way through the tiers, and what they found."""

    request: Request
    statuses: dict[str, Status]  # of each tier
    vectors: dict[str, Vector] = field(default_factory=dict)  # unit vectors by layer, computed on the way
    plan: Plan | None = None  # of the first candidate that can be used
    donor: Entry | None = None  # of the plan
    decision: Decision | None = None  # the policy's on the plan, where it was asked
    near: tuple[Match, str] | None = None  # see `ReuseReport.near`


class Planner:
    """Checks candidates and puts the prompt together: the donor's leading run, then the request's own rest.

    Without ``config.normalised`` a text that nothing found similar must have the donor's characters, and one that only
    folds to the donor's is judged as an approximate match. An image in whose place a donor's stands must show the same.

    Attributes:
        guard: compares texts.
        least: cosine of a similar question from which the policy is asked.
    """

    def __init__(
        self, config: CacheConfig, media: MediaStore, decider: Decider, checking: Checking, tally: Tally
    ) -> None:
        self._media, self._decider, self._checking, self._tally = media, decider, checking, tally
        self._normalised, self._roots = config.normalised, image_roots(config)
        guarded = config.guards and config.match is MatchPolicy.ALL
        self.guard = veto if guarded else no_veto
        self._compare_images = guarded and config.scope is Scope.MEDIA
        self.least = config.similarity_threshold if decider.floor is None else decider.floor
        self._alike = lru_cache(maxsize=_PAIRS)(self._same_picture)

    def take(self, found: Lookup, candidates: Iterable[Candidate]) -> None:
        """Take the first candidate that can be used, with the statuses it brings. One that a guard or the policy
        refuses, or whose image is gone, is counted and passed over."""
        for candidate in candidates:
            found.plan = self._plan(found, candidate)
            if found.plan is not None:
                found.donor = candidate.donor
                found.near = None if found.plan.full else found.near
                found.statuses.update(dict.fromkeys(candidate.agreed, Status.HIT))
                return

    def _plan(self, found: Lookup, candidate: Candidate) -> Plan | None:
        request, donor = found.request, candidate.donor
        whole = candidate.run == len(donor.segments)
        own, run = request.segments if whole else request.segments[: candidate.run], donor.segments[: candidate.run]
        if not (self._normalised or candidate.checked or same_characters(own, run, candidate.similar)):
            return None
        exactness = exactness_of(own, run)
        if exactness is Exactness.NORMALISED and not self._normalised:
            exactness = Exactness.APPROXIMATE
        match = Match(candidate.tier, donor.entry_id, candidate.score, exactness, whole=whole, others=candidate.others)
        found.decision = None
        if exactness is Exactness.APPROXIMATE:
            if (reason := self._veto(request, donor, own, run, whole=whole)) is not None:
                self._tally.add(f"veto:{reason}")
                return None
            if whole:
                match = replace(match, wording=wording(request.chunk_text, donor.chunk_text))
            found.decision = self._judge(request, donor, match)
            if not found.decision.accept:
                found.near = found.near or ((match, donor.response) if whole else None)
                return None
        leading = own if exactness is Exactness.EXACT else self._available(request, run)
        if leading is None:
            self._tally.add("donor media lost")
            return None
        return Plan((*leading, *(() if whole else request.segments[candidate.run :])), len(leading), match)

    def _veto(
        self, request: Request, donor: Entry, own: Sequence[Segment], run: Sequence[Segment], *, whole: bool
    ) -> str | None:
        """Why no approximate match may be made of a run: by the texts that were compared, by the questions where the
        caller had other texts compared, by the images."""
        texts = [(request.chunk_text, donor.chunk_text), (request.question, donor.question)] if whole else []
        for mine, theirs in dict.fromkeys(texts):
            if (reason := self.guard(mine, theirs)) is not None:
                return reason
        return "image" if self._compare_images and self._shows_another(own, run) else None

    def _judge(self, request: Request, donor: Entry, match: Match) -> Decision:
        """What checks found, then the policy."""
        if self._checking.blocked(request, donor.entry_id):
            self._tally.add("barred")
            return Decision(False, "found wrong before")
        decision = self._decider.accept(request, donor, match)
        if not decision.accept:
            self._tally.add("refused")
        return decision

    def _shows_another(self, own: Sequence[Segment], run: Sequence[Segment]) -> bool:
        """Whether an image of a donor's run may show something else than the request's in its place: also where either
        cannot be read."""
        mine, theirs = ([s for s in segments if isinstance(s, MediaSegment)] for segments in (own, run))
        if len(mine) != len(theirs):
            return True
        pairs = [(a, b.media_id) for a, b in zip(mine, theirs, strict=True) if a.media_id != b.media_id]
        try:
            return not all(self._alike(a, b) for a, b in pairs)
        except OSError:  # which is not remembered
            return True

    def _same_picture(self, mine: MediaSegment, theirs: str) -> bool:
        first, second = read_media(mine, self._roots), self._media.get(theirs)
        if first is None or second is None:
            raise OSError("an image is gone")
        a, b = (read_picture(data, most_pixels=pictures.MOST_PIXELS, whole=True) for data in (first, second))
        return pictures.difference(a, b) < pictures.LIMIT

    def _available(self, request: Request, run: Sequence[Segment]) -> tuple[Segment, ...] | None:
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
    """A request that goes to the engine as it is."""

    donor: Entry  # what it will be recorded as; its response is still empty
    prompt_key: str  # of its whole prompt, folded; empty where exact matches are off
    slot_key: str  # the same of all but its question; empty where it has no question
    vector: Vector | None  # unit vector of its chunk text, [dim]
    least: float  # least cosine of a similar question
    question: int | None  # position of its question

    def donate(self, to: PendingEntry) -> Candidate | None:
        """This entry as a donor for another request; None where they are not similar."""
        run = len(self.donor.segments)
        if self.prompt_key and self.prompt_key == to.prompt_key:
            return Candidate(self.donor, run, EXACT, 1.0, (EXACT,))
        if not self.slot_key or self.slot_key != to.slot_key or self.vector is None or to.vector is None:
            return None
        score = min(1.0, float(self.vector @ to.vector))
        found = Candidate(self.donor, run, SEMANTIC, score, (SEMANTIC,), similar=self.question)
        return found if score >= self.least else None


class PendingTier:
    """Decides who may have the answer of a request that is still on its way. Any thread may call any method."""

    def __init__(self, config: CacheConfig, planner: Planner, checking: Checking, tally: Tally) -> None:
        self._config, self._planner, self._checking, self._tally = config, planner, checking, tally

    def _entry(self, request: Request, vector: Vector | None) -> PendingEntry:
        keyed, with_media = Keyed(request.namespace, request.segments), self._config.scope is Scope.MEDIA
        prompt_key = keyed.folded_key(len(keyed.segments), with_media=with_media) if self._config.exact else ""
        slot_key = keyed.question_slot(with_media=with_media)
        return PendingEntry(entry_of(request, keyed), prompt_key, slot_key, vector, self._planner.least, keyed.question)

    def entry(self, report: ReuseReport) -> PendingEntry | None:
        """The request of a lookup as others may find it until its answer is recorded; None where the cache is not live,
        or the lookup found a donor of more than a byte-equal beginning."""
        request = report.request
        if report.rewritten or report.plan.full or not request.segments or self._config.mode is not CacheMode.LIVE:
            return None
        with self._tally.boundary("request"):
            return self._entry(request, report.embeddings.get(SEMANTIC))
        return None

    def try_reuse(self, report: ReuseReport, candidate: Candidate) -> ReuseReport | None:
        """Whether a request whose lookup found nothing may have the answer of a pending entry, a ``candidate`` that
        `PendingEntry.donate` made: the report of the hit, or None. Guards, policy and the pairs found wrong are asked
        as for a stored donor, and the hit counts as theirs do."""
        with self._tally.boundary("join"):
            found = Lookup(report.request, dict(report.statuses))
            self._planner.take(found, [candidate])
            if found.plan is None or found.plan.match is None:
                return None
            hit_id = self._checking.open(report.request, found.plan.match, found.decision)
            self._tally.add(f"hit:{found.plan.match.tier}")
            return replace(report, plan=found.plan, statuses=found.statuses, hit_id=hit_id, near=None)
        return None
