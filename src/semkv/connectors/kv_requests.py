"""What vLLM has said of its requests: in which of its blocks they lie, and which of those are full. No stores."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from semkv.connectors.resets import FreshBlocks

_REMEMBERED = 256


@dataclass(slots=True)
class Track:
    """An admitted request.

    Attributes:
        adapter: see `Adapters.identity`; None where the request is left alone.
        checked: leading blocks that need no more capturing.
        mixed: whether it rests on blocks of the engine's from before a reset; then it is not captured.
    """

    request: Any
    adapter: str | None
    block_ids: list[int] = field(default_factory=list)
    checked: int = 0
    loaded_tokens: int = 0
    load_failed: bool = False
    mixed: bool = False

    def admitted(self, block_ids: Sequence[int]) -> None:
        """It was admitted, perhaps again after a preemption, and lies in these blocks."""
        self.block_ids, self.checked = list(block_ids), 0


@dataclass(frozen=True, slots=True)
class FullBlocks:
    """How many leading blocks of a request are full after a step, and how many were ``computed`` before it."""

    track: Track
    computed: int
    complete: int


class Requests:
    """The requests of one engine, by vLLM's id: those admitted, and the block hashes of those that ended lately.

    Attributes:
        fresh: which of the engine's blocks rest on nothing from before a reset.
    """

    def __init__(self, block_size: int, *, decode: bool) -> None:
        """``decode``: whether blocks of generated tokens count as full too."""
        self.fresh = FreshBlocks()
        self._block_size, self._decode = block_size, decode
        self._tracks: dict[str, Track] = {}
        self._recent: OrderedDict[str, list[bytes]] = OrderedDict()

    def get(self, request_id: str) -> Track | None:
        return self._tracks.get(request_id)

    def add(self, request: Any, adapter: str | None) -> Track:
        track = self._tracks[request.request_id] = Track(request, adapter)
        return track

    def follow(self, scheduler_output: Any) -> None:
        """Take over which blocks the step's requests lie in."""
        cached = scheduler_output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, block_ids, computed in rows:  # before the new ones, which may share what these get now
            track = self._tracks.get(request_id)
            if track is None or block_ids is None:
                continue
            if request_id in cached.resumed_req_ids:
                track.admitted(block_ids[0])
                self._see_contents(track, computed)
            else:
                track.block_ids.extend(block_ids[0])
                self.fresh.note(block_ids[0], mixed=track.mixed)
        for new in scheduler_output.scheduled_new_reqs:
            if (track := self._tracks.get(new.req_id)) is not None:
                track.block_ids = list(new.block_ids[0])
                self._see_contents(track, new.num_computed_tokens)

    def _see_contents(self, track: Track, computed: int) -> None:
        """See whether what the engine's own prefix cache gave is of the weights of now."""
        track.mixed |= not self.fresh.cover(track.block_ids[: -(-computed // self._block_size)])
        self.fresh.note(track.block_ids, mixed=track.mixed)

    def full(self, scheduler_output: Any) -> list[FullBlocks]:
        """The step's requests that may be captured and have full blocks that were not checked yet."""
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        full = []
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            track = self._tracks.get(request_id)
            if track is None or track.adapter is None or track.mixed or request_id not in computed:
                continue
            # A block's hash exists once all of its tokens are known, so a hash plus a scheduled token is a full block.
            tokens = computed[request_id] + scheduled
            if not self._decode:
                tokens = min(tokens, track.request.num_prompt_tokens)
            blocks = min(tokens // self._block_size, len(track.request.block_hashes), len(track.block_ids))
            if blocks > track.checked:
                full.append(FullBlocks(track, computed[request_id] // self._block_size, blocks))
        return full

    def load_failed(self, block_ids: set[int]) -> None:
        """These blocks are computed again; nothing that was checked counts, in any request."""
        for track in self._tracks.values():
            track.checked = 0
            if not block_ids.isdisjoint(track.block_ids):
                track.load_failed = True

    def reset(self) -> None:
        """The weights may be others from now on: what goes on meanwhile rests on both."""
        self.fresh.reset()
        for track in self._tracks.values():
            track.mixed = True

    def end(self, request: Any) -> Track | None:
        """Let go of a request; its hashes are remembered for a while."""
        self._recent[request.request_id] = [bytes(h) for h in request.block_hashes]
        if len(self._recent) > _REMEMBERED:
            self._recent.popitem(last=False)
        return self._tracks.pop(request.request_id, None)

    def block_hashes(self, request_id: str) -> list[bytes] | None:
        """Of a request that runs or ended lately, by vLLM's id or the caller's."""
        if (name := vllm_id(request_id, self._recent)) is not None:
            return self._recent[name]
        if (name := vllm_id(request_id, self._tracks)) is not None:
            return [bytes(h) for h in self._tracks[name].request.block_hashes]
        return None


def vllm_id(request_id: str, names: Collection[str]) -> str | None:
    """The one of ``names`` that vLLM made of the caller's id: it appends a random suffix; the newest match counts."""
    if request_id in names:
        return request_id
    found = [n for n in names if n.rpartition("-")[0] == request_id]
    return found[-1] if found else None
