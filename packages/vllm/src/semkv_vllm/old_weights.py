"""After a reset beside running requests: which blocks of vLLM's own cache may hold what old weights computed.

vLLM calls for a reset when the weights may have changed. Where requests run at that moment, vLLM keeps their blocks,
and the blocks of ended requests stay in its prefix cache: what a later request computes may rest on them. Such KV has
the right hashes and must not be stored. So from a reset on, until nothing from before it is left, old and new are
distinguished:

- **Blocks.** At the reset every block is old. A block that is handed to a request to be written becomes as the request
  is: old for an old one, new for a new one. vLLM writes a block only through the request that it was handed to.
- **Requests.** Those that the connector knows at the reset are old. A later one is old if it uses a block that is old,
  or tokens that were loaded by another connector, of which nothing is known. It stays so until it ends.

Of an old request nothing is stored. For new ones storing goes on at once. At the reset, and when an old request ends,
its blocks are taken out of vLLM's prefix cache, so that later requests compute anew what they would have found there.
When the last old request has ended, no request holds an old block, and none can find one: then all is new again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import yield_req_data

Groups = Sequence[Sequence[int]]
"""Ids of a request's blocks, by KV cache group, in the order of its tokens."""


class OldWeights:
    """See the module. For the scheduler's thread.

    Attributes:
        requests: the old ones.
        blocks: the old ones. Id 0 is vLLM's empty block, which is never written.
    """

    def __init__(
        self, requests: Iterable[str], kv_cache_manager: Any, tokens_per_block: Sequence[int]
    ) -> None:
        """``requests``: all that the connector knows. ``tokens_per_block``: of each KV cache group."""
        self.requests = set(requests)
        self._manager = kv_cache_manager
        self.blocks = set(range(1, kv_cache_manager.block_pool.num_gpu_blocks))
        self._tokens_per_block = tokens_per_block
        self._found: dict[str, int] = {}  # tokens that vLLM's own cache has of a request that waits
        self._known: dict[str, int] = {}  # tokens of a request whose blocks are accounted for
        self._forget(self.blocks)

    def looked_up(self, request: str, tokens: int) -> None:
        """vLLM's own cache has so many tokens of a request that is about to be scheduled."""
        self._found[request] = tokens

    def allocated(self, request: str, groups: Groups, loaded: int) -> None:
        """A request has its blocks: those that vLLM's cache has, then those that ``loaded`` tokens are read into, from
        a store that holds nothing old. Whether the first ones are old is known when the step is."""
        if request not in self._found:  # the second call of two
            return
        found = self._found.pop(request)
        self._known[request] = found + loaded
        for ids, tokens in zip(groups, self._tokens_per_block, strict=True):
            self.blocks.difference_update(
                ids[found // tokens : math.ceil((found + loaded) / tokens)]
            )

    def step(self, scheduled: Any) -> None:
        """What a step of vLLM's scheduler hands out, before anything of it is stored."""
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        begins = {new.req_id for new in scheduled.scheduled_new_reqs} | set(cached.resumed_req_ids)
        running = []
        beginning = []
        for request, groups, _ in yield_req_data(scheduled):
            if request in begins:
                beginning.append((request, groups or (), computed[request]))
            else:
                running.append((request, groups or (), 0))  # only blocks that come on top
        # One that begins may have found what others are about to write, whose place in the step is not known.
        known = -1
        while known < len(self.requests):
            known = len(self.requests)
            for request, groups, before in running + beginning:
                self._step_of(request, groups, before)
        for request in begins:
            self._known.pop(request, None)
        for copy in scheduled.kv_cache_block_copies or ():
            if copy.src_block_id in self.blocks:  # for whom is not said
                self.blocks.add(copy.dst_block_id)
                self.requests.update(computed)

    def _step_of(self, request: str, groups: Groups, before: int) -> None:
        if before > self._known.get(request, 0) or self._holds_old(groups, before):
            self.requests.add(request)
        for ids, tokens in zip(groups, self._tokens_per_block, strict=False):
            written = [block for block in ids[before // tokens :] if block]
            if request in self.requests:
                self.blocks.update(written)
            else:
                self.blocks.difference_update(written[1:] if before % tokens else written)

    def _holds_old(self, groups: Groups, tokens: int) -> bool:
        """Whether one of the blocks of the first tokens is old."""
        counts = [math.ceil(tokens / each) for each in self._tokens_per_block]
        return any(
            not self.blocks.isdisjoint(ids[:count])
            for ids, count in zip(groups, counts, strict=False)
        )

    def ended(self, request: str, groups: Groups) -> None:
        """A request has ended; its last blocks may still be stored in the next step."""
        self._found.pop(request, None)
        self._known.pop(request, None)
        if request in self.requests:
            self._forget({block for ids in groups for block in ids if block})

    def is_over(self, finished: Iterable[str]) -> bool:
        """Whether nothing old is left, now that nothing more will be stored of some requests."""
        self.requests.difference_update(finished)
        # A request that has its blocks and waits for a load may be of the old weights.
        if self.requests or self._known:
            return False
        self._forget(self.blocks)
        return True

    def _forget(self, blocks: set[int]) -> None:
        """Take blocks out of vLLM's prefix cache; requests that hold them keep them."""
        self._manager.evict_blocks(blocks)
