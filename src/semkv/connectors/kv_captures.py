"""Planning of captures: which full blocks are copied out and stored. No vLLM, no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from semkv.connectors.kv_keys import block_keys
from semkv.connectors.kv_plan import CapturePlan
from semkv.connectors.kv_requests import FullBlocks
from semkv.connectors.rank_stores import RankStores
from semkv.stores.container import owner_of


class Captures:
    """The captures of one engine, for its scheduler's thread."""

    def __init__(self, stores: RankStores, adapter: Callable[[Any], str | None], max_extent_blocks: int) -> None:
        """``adapter``: says as which LoRA adapter a request goes now, see `kv_requests.Track`."""
        self._stores, self._adapter, self._most = stores, adapter, max_extent_blocks

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
        hashes = block_keys(track.request.block_hashes[track.checked : full.complete], adapter)
        # A request that resumes, or another one's failed load, has more blocks computed than there are to capture.
        first, old = track.checked, min(full.computed, full.complete) - track.checked
        if old > 0 and self._stores.kept([hashes[old - 1]]):
            hashes, first, old = hashes[old:], first + old, 0
        missing = {i for i, h in enumerate(hashes) if h not in self._stores.offered}
        missing -= self._stores.kept(hashes[: max(0, old)])
        track.checked = full.complete
        chosen = sorted(missing)
        self._stores.offered.add(hashes[i] for i in chosen)
        plans, owner = [], owner_of(getattr(track.request, "cache_salt", None))
        for at in range(0, len(chosen), self._most):
            part = chosen[at : at + self._most]
            ids = [track.block_ids[first + i] for i in part]
            plans.append(CapturePlan(ids, [hashes[i] for i in part], first + part[0], owner))
        return plans
