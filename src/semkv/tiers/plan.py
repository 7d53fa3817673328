"""From a candidate to a plan: the canonical prompt, if the donor can be used."""

from __future__ import annotations

from dataclasses import dataclass, replace

from semkv.guards import Guard, wording
from semkv.stores.media import MediaStore
from semkv.tiers.base import Candidate, PartError, Tally
from semkv.tiers.checking import Checking
from semkv.tiers.images import ImageGuard
from semkv.tiers.policies import Decider, Decision
from semkv.tiers.prompt_keys import exactness_of
from semkv.types import Entry, Exactness, Match, MediaSegment, Near, Plan, Request, Segment


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a candidate.

    Attributes:
        plan: the plan; None where the candidate cannot be used.
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
        decider: the policy.
        guard: may veto an approximate match of the whole prompt.
        images: may veto one in which another image stands in; None goes without.
        checking: knows the pairs that were found wrong.
        tally: counts vetoes, refusals and lost images.
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
        images: ImageGuard | None = None,
        normalised: bool = True,
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
        if exactness is Exactness.EXACT:
            leading: tuple[Segment, ...] | None = own
        else:
            leading = self._available(request, donor.segments[:run])
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
        try:
            decision = self._decider.accept(request, donor, match)
            accepted = decision.accept
        except Exception as error:  # a decider may be the user's own
            raise PartError(f"decider: {error!r}") from error
        if not accepted:
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
