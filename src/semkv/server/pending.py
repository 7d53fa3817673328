"""Near-repeats of requests on their way: who asks the same in other words waits for the answer of the first.

A request that goes upstream is a pending entry of the semantic cache until its answer is recorded (or there is none),
and a while longer for lookups that began before that. So a near-repeat finds it here or in the cache. Who may join is
decided as for a stored donor, and everything but the prompt must be equal: the key of the request with the donor's
prompt must be the donor's own. Single flight on that key does the rest.

Everything here runs on the event loop; only the decision takes a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from functools import cached_property

from semkv.server.cache_client import CacheClient, Lookup
from semkv.server.request_key import CanonicalRequest
from semkv.server.singleflight import InFlight
from semkv.tiers.base import Candidate
from semkv.tiers.pending import PendingEntry

_GONE = 256  # that were recorded last; a lookup that takes longer than so many others may miss one
_CANDIDATES = 4  # the next ones are asked when the policy refuses the best


class Pending:
    """A request on its way.

    Attributes:
        key: of the request.
        flight: brings its answer; None before it was started.
        entry: as near-repeats find it; None where they may not, and before its lookup is over.
        looked_up: done once ``entry`` is final.
    """

    def __init__(self, cache: CacheClient, canonical: CanonicalRequest) -> None:
        self.key, self._cache, self._canonical = canonical.key, cache, canonical
        self.flight: InFlight | None = None
        self.entry: PendingEntry | None = None
        self.looked_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @cached_property
    def group(self) -> str:
        """Requests of other groups never match. Worked out when it is first asked for: a lone request does not pay."""
        return self._cache.pending_group(self._canonical)

    def take_entry(self, looking: asyncio.Future[Lookup]) -> None:
        """Take the entry of a lookup that is over, unless a donor stands in for the request."""
        failed = looking.cancelled() or looking.exception() is not None
        if not failed and looking.result().canonical.key == self.key:
            self.entry = looking.result().entry
        self.looked_up.set_result(None)


class PendingRequests:
    """The requests on their way that near-repeats may join.

    Args:
        cache: decides who may join whom.
    """

    def __init__(self, cache: CacheClient) -> None:
        self._cache = cache
        self._running: list[Pending] = []
        self._gone: deque[tuple[float, str, PendingEntry]] = deque(maxlen=_GONE)  # when, key and entry

    def __len__(self) -> int:
        return len(self._running)

    def add(self, pending: Pending, flight: InFlight, looking: asyncio.Future[Lookup]) -> None:
        """A request went upstream. Near-repeats can join it once its lookup is over, and wait for that."""
        pending.flight = flight
        self._running.append(pending)
        if looking.done():
            pending.take_entry(looking)
        else:
            looking.add_done_callback(pending.take_entry)

    def remove(self, pending: Pending) -> None:
        """Its answer is recorded, or there is none."""
        self._running.remove(pending)
        if pending.entry is not None:
            self._gone.append((time.perf_counter(), pending.key, pending.entry))

    def busy(self, pending: Pending) -> bool:
        """Whether a request waits for its answer that this one may turn out to be similar to."""
        others = [other for other in self._running if other.flight is not None and not other.flight.done]
        return bool(others and pending.group) and any(other.group == pending.group for other in others)

    async def find(self, lookup: Lookup, since: float, own: InFlight | None = None) -> Lookup | None:
        """What a request whose lookup found nothing gets from another; None where it has to go itself.

        None is returned in the same step of the event loop in which the last look was taken.

        Args:
            lookup: of the request.
            since: a time before that began, by `time.perf_counter`.
            own: brings the request's own answer; once that is whole, no other lookup is waited for.
        """
        entry, key, seen = lookup.entry, lookup.canonical.key, set[PendingEntry]()
        while entry is not None:
            undecided = [p for p in self._running if not p.looked_up.done() and p.key != key and p.group == entry.group]
            if undecided:
                if own is not None and own.whole:
                    return None
                waited_for = [undecided[0].looked_up, *([] if own is None or own.done else [own.task])]
                await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)
                continue  # others may have come meanwhile
            if not (candidates := self._similar(entry, key, since, seen)):
                break
            if (joined := await self._cache.join(lookup, candidates)) is not None:
                return joined
        return None

    def _similar(
        self, entry: PendingEntry, key: str, since: float, seen: set[PendingEntry]
    ) -> list[tuple[str, Candidate]]:
        """The most similar ones that were not seen before, with their keys. An equal request is none of them."""
        others = [(other.key, other.entry) for other in self._running if other.entry is not None]
        others += [(gone_key, gone) for at, gone_key, gone in self._gone if at >= since]
        found = []
        for other_key, other in others:
            if other_key != key and other.group == entry.group and other not in seen:
                seen.add(other)
                if (candidate := other.donate(entry)) is not None:
                    found.append((other_key, candidate))
        return sorted(found, key=lambda one: -one[1].score)[:_CANDIDATES]
