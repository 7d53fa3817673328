"""Single-flight for near-repeats: a request whose question is being answered for somebody else joins that answer.

A request that goes upstream is known here from then on until its answer is recorded (or there is none), and to lookups
that began before that for a while longer, so that a paraphrase finds it here or in the semantic cache. What may join is
decided as for a stored donor, and everything but the prompt must be the same: the key of the request with the donor's
prompt must be the donor's own.

Everything here runs on the event loop; only the decision takes a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import cached_property, partial

from semkv.server.caches import Caches, Resolution
from semkv.server.canonical import CanonicalRequest
from semkv.server.flight import Flight, Subscription
from semkv.tiers.base import Candidate
from semkv.tiers.underway import Underway

_GONE = 256  # that were recorded last; a lookup that takes longer than so many others may miss one
_CANDIDATES = 4  # the next ones are asked when the policy refuses the best


class Newcomer:
    """A request that may be asked upstream while it is looked up.

    Args:
        partition: works out what it shares with its paraphrases; asked once, and only where others are on their way.
    """

    def __init__(self, partition: Callable[[], str]) -> None:
        self._work_out = partition
        self.decided: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @cached_property
    def partition(self) -> str:
        return self._work_out()


class Paraphrases:
    """The requests on their way upstream, by what they share with their paraphrases.

    Args:
        caches: decides who may join whom.
    """

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._underway: dict[str, dict[str, tuple[Underway, Flight]]] = {}  # partition -> key -> request
        self._expected: dict[Flight, Newcomer] = {}  # requests that are not known yet
        self._gone: deque[tuple[float, str, Underway]] = deque(maxlen=_GONE)  # when, key and request

    def __len__(self) -> int:
        return sum(map(len, self._underway.values()))

    def newcomer(self, canonical: CanonicalRequest) -> Newcomer:
        """A request that is not known here yet."""
        return Newcomer(partial(self._caches.partition, canonical))

    def busy(self, newcomer: Newcomer) -> bool:
        """Whether a request that this one may join waits for its answer."""
        known = (flight for same in self._underway.values() for _, flight in same.values())
        if all(flight.done for flight in (*self._expected, *known)):
            return False  # the upstream need not wait for the partition to be worked out
        expected = (flight for flight, other in self._expected.items() if other.partition == newcomer.partition)
        underway = (flight for _, flight in self._underway.get(newcomer.partition, {}).values())
        return bool(newcomer.partition) and any(not flight.done for flight in (*expected, *underway))

    def expect(self, newcomer: Newcomer, flight: Flight) -> None:
        """A request went upstream before its lookup; until `decided`, `find` waits."""
        self._expected[flight] = newcomer

    def decided(self, flight: Flight) -> None:
        """The request that was expected has been added, or will not be."""
        self._expected.pop(flight).decided.set_result(None)

    def _awaited(self, partition: str) -> list[Newcomer]:
        """The expected requests of a partition; none of an empty one."""
        return [other for other in self._expected.values() if other.partition == partition] if partition else []

    def add(self, key: str, request: Underway, flight: Flight) -> None:
        """A request went upstream under this key."""
        self._underway.setdefault(request.partition, {})[key] = request, flight

    def remove(self, key: str, request: Underway) -> None:
        """Its answer is recorded, or there is none."""
        same = self._underway.get(request.partition, {})
        if key in same and same[key][0] is request:
            del same[key]
            self._gone.append((time.perf_counter(), key, request))
            if not same:
                del self._underway[request.partition]

    async def find(self, resolution: Resolution, since: float, seat: Subscription | None = None) -> Resolution | None:
        """What a request that found nothing gets by joining another; None where it has to go itself.

        None is returned in the same step of the event loop in which the last look was taken.

        Args:
            resolution: what its lookup found.
            since: a time before that began, by `time.perf_counter`.
            seat: on the flight of the request itself; once that is whole nobody is waited for.
        """
        own, seen = resolution.underway, set[Underway]()
        for other in self._awaited(own.partition) if own is not None else ():  # who comes later waits for this one
            if seat is None:
                await asyncio.wait((other.decided,))
            elif await seat.whole_before(other.decided):
                return None
        while own is not None:
            if not (found := self._similar(own, resolution.canonical.key, seen, since)):
                break
            joined = await self._caches.join(resolution, found)
            if joined is not None:
                return joined
        return None

    def _similar(self, own: Underway, mine: str, seen: set[Underway], since: float) -> list[tuple[str, Candidate]]:
        """The most similar not seen before, with their keys. An equal request, with the key ``mine``, is none."""
        others = [(key, other) for key, (other, _) in self._underway.get(own.partition, {}).items()]
        others += [(key, other) for at, key, other in self._gone if at >= since and other.partition == own.partition]
        found = []
        for key, other in others:
            if key != mine and other not in seen:
                seen.add(other)
                if (candidate := own.candidate(other)) is not None:
                    found.append((key, candidate))
        return sorted(found, key=lambda one: -one[1].score)[:_CANDIDATES]
