"""From a candidate to a plan: the canonical prompt, if the donor can be used."""

from __future__ import annotations

from dataclasses import replace

from semkv.stores.media import MediaStore
from semkv.tiers.base import Candidate, PartError, Tally
from semkv.tiers.decision import Decider
from semkv.tiers.guards import Guard
from semkv.tiers.keying import exactness_of
from semkv.types import Entry, Exactness, Match, MediaSegment, Plan, Request, Segment


class Planner:
    """Checks a candidate and puts the prompt together: the donor's leading run, then the request's own rest."""

    def __init__(self, media: MediaStore, decider: Decider, guard: Guard, tally: Tally) -> None:
        self._media, self._decider, self._guard, self._tally = media, decider, guard, tally

    def plan(self, request: Request, candidate: Candidate) -> Plan | None:
        """The plan, or None where the decider refuses or a donor's image is gone (both counted)."""
        donor, run = candidate.donor, candidate.run
        whole = run == len(donor.segments)
        own = request.segments if whole else request.segments[:run]
        exactness = exactness_of(own, donor.segments[:run])
        match = Match(candidate.tier, donor.entry_id, candidate.score, exactness)
        if exactness is Exactness.APPROXIMATE and not self._accepts(request, donor, match, whole=whole):
            return None
        if exactness is Exactness.EXACT:
            leading: tuple[Segment, ...] | None = own
        else:
            leading = self._available(request, donor.segments[:run])
        if leading is None:
            self._tally.add("donor media lost")
            return None
        rest = () if whole else request.segments[run:]
        return Plan((*leading, *rest), len(leading), match)

    def _accepts(self, request: Request, donor: Entry, match: Match, *, whole: bool) -> bool:
        reason = self._guard(request.chunk_text, donor.chunk_text) if whole else None
        if reason is not None:
            self._tally.add(f"veto:{reason}")
            return False
        try:
            accepted = self._decider.accept(request, donor, match).accept
        except Exception as error:  # a decider may be the user's own
            raise PartError(f"decider: {error!r}") from error
        if not accepted:
            self._tally.add("refused")
        return accepted

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
