"""Single-flight for near-repeats: a request whose question is being answered for somebody else joins that answer.

A request that goes upstream is known here from then on until its answer is recorded (or there is none), so that there
is no moment at which a paraphrase would find it neither here nor in the semantic cache. What may join is decided as
for a stored donor, and everything but the prompt must be the same: the key of the request with the donor's prompt must
be the donor's own.

Everything here runs on the event loop; only the decision takes a thread.
"""

from __future__ import annotations

import asyncio

from semkv.server.caches import Caches, Resolution
from semkv.tiers.base import Candidate
from semkv.tiers.underway import Underway

_CANDIDATES = 4  # the next ones are asked when the policy refuses the best


class Paraphrases:
    """The requests on their way upstream, by what they share with their paraphrases.

    Args:
        caches: decides who may join whom.
    """

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._underway: dict[str, dict[str, Underway]] = {}  # partition -> key -> request
        self._expected: dict[str, asyncio.Event] = {}  # partition -> that its first request is known, or none comes

    def __len__(self) -> int:
        return sum(map(len, self._underway.values()))

    def busy(self, partition: str) -> bool:
        """Whether a request of this partition is on its way upstream; never for an empty one."""
        return partition in self._underway or partition in self._expected

    def expect(self, partition: str) -> None:
        """A request of a partition that is not `busy` goes upstream before its lookup; `find` waits until `decided`."""
        if partition:
            self._expected[partition] = asyncio.Event()

    def decided(self, partition: str) -> None:
        """The request that was expected has been added, or will not be."""
        if (event := self._expected.pop(partition, None)) is not None:
            event.set()

    def add(self, key: str, request: Underway) -> None:
        """A request went upstream under this key."""
        self._underway.setdefault(request.partition, {})[key] = request

    def remove(self, key: str, request: Underway) -> None:
        """Its answer is recorded, or there is none."""
        same = self._underway.get(request.partition, {})
        if same.get(key) is request:
            del same[key]
            if not same:
                del self._underway[request.partition]

    async def find(self, resolution: Resolution) -> Resolution | None:
        """What a request that found nothing gets by joining another; None where it has to go itself.

        None is returned in the same step of the event loop in which the last look was taken.
        """
        own, seen = resolution.underway, set[Underway]()
        while own is not None and (event := self._expected.get(own.partition)) is not None:
            await event.wait()
        while own is not None and (found := self._similar(own, seen)):
            joined = await self._caches.join(resolution, found)
            if joined is not None:
                return joined
        return None

    def _similar(self, own: Underway, seen: set[Underway]) -> list[tuple[str, Candidate]]:
        """The most similar of those not seen before, with their keys."""
        found = []
        for key, other in self._underway.get(own.partition, {}).items():
            if other not in seen:
                seen.add(other)
                if (candidate := own.candidate(other)) is not None:
                    found.append((key, candidate))
        return sorted(found, key=lambda one: -one[1].score)[:_CANDIDATES]
