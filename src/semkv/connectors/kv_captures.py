"""Planning of captures: which full blocks are copied out and stored. No vLLM, no torch."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from semkv.connectors.kv_plan import CapturePlan
from semkv.connectors.kv_requests import FullBlocks
from semkv.connectors.rank_stores import RankStores, keyed
from semkv.stores.container import owner_of

_OFFERED_SECONDS = 30.0  # after this a captured block that is still not stored is captured again
_OFFERED_MOST = 1 << 17


class Offered:
    """Blocks that workers were told to capture, and that are not known to be stored yet."""

    def __init__(self) -> None:
        self._since: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._since

    def add(self, hashes: Iterable[bytes]) -> None:
        now = time.monotonic()
        self._since.update((h, now) for h in hashes)

    def settle(self, hashes: Iterable[bytes]) -> None:
        """What became of these is known."""
        for h in hashes:
            self._since.pop(h, None)

    def clear(self) -> None:
        self._since.clear()

    def expire(self) -> None:
        """Give up what waits for too long, or is too much."""
        limit = time.monotonic() - _OFFERED_SECONDS
        while self._since and (len(self._since) > _OFFERED_MOST or next(iter(self._since.values())) < limit):
            self._since.popitem(last=False)


class Captures:
    """The captures of one engine, for its scheduler's thread."""

    def __init__(
        self,
        stores: RankStores,
        offered: Offered,
        adapter: Callable[[Any], str | None],
        max_extent_blocks: int,
    ) -> None:
        """``adapter``: says as which LoRA adapter a request goes now, see `kv_requests.Track`."""
        self._stores, self._offered, self._adapter = stores, offered, adapter
        self._most = max_extent_blocks

    def plan(self, full: FullBlocks) -> list[CapturePlan]:
        """What to copy out of the blocks that were not checked yet.

        What this step computes is not looked up: had it been stored, it would have been loaded, and the writer leaves
        out what is stored all the same. What was there before is as a rule stored as a whole or not at all, and
        eviction starts at the end, so the last of it is looked up first.
        """
        track = full.track
        adapter = self._adapter(track.request)
        if adapter is None or adapter != track.adapter:  # its files were changed meanwhile
            track.adapter = None
            return []
        hashes = keyed(track.request.block_hashes[track.checked : full.complete], adapter)
        first, old = track.checked, full.computed - track.checked
        if old > 0 and self._kept([hashes[old - 1]]):
            hashes, first, old = hashes[old:], full.computed, 0
        missing = {i for i, h in enumerate(hashes) if h not in self._offered}
        missing -= self._kept(hashes[: max(0, old)])
        track.checked = full.complete
        chosen = sorted(missing)
        self._offered.add(hashes[i] for i in chosen)
        plans, owner = [], owner_of(getattr(track.request, "cache_salt", None))
        for at in range(0, len(chosen), self._most):
            part = chosen[at : at + self._most]
            ids = [track.block_ids[first + i] for i in part]
            plans.append(CapturePlan(ids, [hashes[i] for i in part], first + part[0], owner))
        return plans

    def _kept(self, hashes: list[bytes]) -> set[int]:
        """Which of ``hashes`` are stored, or will be."""
        offered = {i for i, h in enumerate(hashes) if h in self._offered}
        rest = [i for i in range(len(hashes)) if i not in offered]
        return offered | {rest[i] for i in self._stores.kept([hashes[i] for i in rest])}
