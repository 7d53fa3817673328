"""The scheduler half of the KV connector: each step's work for the workers. No vLLM, no torch.

    kv_requests   what vLLM has said of its requests: where they lie, which of their blocks are full
    rank_stores   where blocks are stored, or soon will be: one store per rank, under the namespace of now
    kv_loads      what a request is promised, and what is loaded once it has room
    kv_captures   which full blocks are copied out
    kv_scheduler  these together: a request's way through them, the step, failed loads, resets

Everything here runs in the engine core's scheduler thread. vLLM's objects are taken as they come (``Any``): the
attributes used are the same from 0.26 to 0.33.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from semkv.connectors.break_even import RanksGate
from semkv.connectors.counters import Counters
from semkv.connectors.kv_captures import Captures
from semkv.connectors.kv_keys import block_keys
from semkv.connectors.kv_loads import Loads
from semkv.connectors.kv_plan import CapturePlan, KVStep, LoadPlan, PrefetchPlan
from semkv.connectors.kv_requests import Requests
from semkv.connectors.lora import Adapters
from semkv.connectors.outcome import REPORT_KEY, wants_skip
from semkv.connectors.rank_stores import LocalWorker, RankStores
from semkv.connectors.resets import Disowned, FreshBlocks
from semkv.connectors.settings import KVSettings
from semkv.stores.blocks import KVChunk, KVStore
from semkv.stores.extents import ExtentStore

log = logging.getLogger("semkv.connectors")


class KVScheduler:
    """See the module.

    Attributes:
        gate: whether loads are worth it, where the workers are in other processes.
    """

    def __init__(
        self,
        settings: KVSettings,
        extents: ExtentStore,
        namespace: Callable[[], str],
        *,
        engine: str,
        world_size: int,
        block_size: int,
        speculative: bool = False,
        local_worker: Callable[[], LocalWorker | None] = lambda: None,
        gate: RanksGate | None = None,
    ) -> None:
        """Plan for one engine.

        Args:
            namespace: is asked for once, when the first request comes.
            speculative: whether the engine drafts tokens; then no generated ones are captured.
            gate: used where the settings ask for it.
        """
        self.settings, self.counters, self.block_size = settings, Counters(), block_size
        self.gate = gate if settings.break_even else None
        if settings.capture_decode and speculative:
            log.warning("semkv: capture_decode has no effect with speculative decoding")
        self._extents, self._adapters, self._disowned = extents, Adapters(settings.cache_dir), Disowned()
        self._requests = Requests(block_size, decode=settings.capture_decode and not speculative)
        self._stores = RankStores(extents, namespace, engine, world_size, local_worker)
        self._loads = Loads(self._stores, self.counters, self.gate, block_size)
        self._captures = Captures(self._stores, self._adapter, settings.max_extent_blocks)
        self._step = self._epoch = 0
        self._last_load_step = self._confirmed_step = 0

    @property
    def namespace(self) -> str:
        return self._stores.namespace

    def stores(self) -> list[KVStore]:
        """See `RankStores.all`."""
        return self._stores.all()

    @property
    def fresh(self) -> FreshBlocks:
        """See `Requests`."""
        return self._requests.fresh

    def _adapter(self, request: Any) -> str | None:
        """`Adapters.identity` of the request's, or None where the request wants no cache."""
        return None if wants_skip(request.kv_transfer_params) else self._adapters.identity(request.lora_request)

    # ------------------------------------------------------------------ a request comes

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        """Tokens that can be loaded beyond the computed ones: whole blocks, at least one token left to compute.

        None while they are being read from the disk: ask again.
        """
        if num_computed_tokens % self.block_size or getattr(request, "skip_reading_prefix_cache", False):
            return 0
        if not self.stores() or (adapter := self._adapter(request)) is None:
            return 0
        start = num_computed_tokens // self.block_size
        end = (request.num_tokens - 1) // self.block_size
        hashes = block_keys(request.block_hashes[start:end], adapter)
        blocks = self._loads.promised(request.request_id, start, hashes) if hashes else 0
        return None if blocks is None else blocks * self.block_size

    def admitted(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """A request was admitted with its blocks; ``num_external_tokens`` of its tokens are to be loaded."""
        track = self._requests.get(request.request_id)
        if track is None:
            track = self._requests.add(request, self._adapter(request))
            self.counters.add("lora_skipped", int(track.adapter is None and request.lora_request is not None))
        track.admitted(block_ids)
        self.fresh.note(self._loads.admitted(request.request_id, track.block_ids, num_external_tokens))
        track.loaded_tokens = max(track.loaded_tokens, num_external_tokens)

    # ------------------------------------------------------------------ the step

    def build_step(self, scheduler_output: Any) -> KVStep:
        """Everything for the workers' next step; resets what was collected since the last."""
        self._step += 1
        self._disowned.settle()
        loads, prefetches = self._loads.take()
        if loads:
            self._last_load_step = self._step
        tokens = sum(scheduler_output.num_scheduled_tokens.values())
        step = KVStep(self.namespace if self.stores() else "", self._step, self._epoch, tokens, loads)
        step.prefetches = prefetches
        self._tell([*loads, *prefetches])
        self._requests.follow(scheduler_output)
        # With several ranks one rank's failed load spoils what all of them compute: wait for their reports.
        if self.stores() and (self._stores.world_size == 1 or self._last_load_step <= self._confirmed_step):
            if self._stores.offered.expire() and self.gate is not None:
                self.gate.forget()
            for full in self._requests.full(scheduler_output):
                step.captures += self._captures.plan(full)
        self._tell(step.captures)
        return step

    def _tell(self, plans: Sequence[LoadPlan | PrefetchPlan | CapturePlan]) -> None:
        if self.gate is not None and plans and self.stores():
            self.gate.told((h for plan in plans for h in plan.block_hashes), self._stores.row_bytes())

    # ------------------------------------------------------------------ what comes back

    def confirm(self, step: int) -> None:
        """All workers have finished step ``step``."""
        self._confirmed_step = max(self._confirmed_step, step)

    def load_failed(self, block_ids: set[int]) -> None:
        """Workers could not load these blocks; vLLM recomputes them."""
        self._epoch += 1
        self._stores.offered.clear()  # until they hear of the new epoch, workers capture nothing
        if self.gate is not None:
            self.gate.forget()
        self._requests.load_failed(block_ids)
        self.counters.add("failed_loads")

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Forget a request, and say what was done for it."""
        track = self._requests.end(request)
        self._loads.end(request.request_id)
        self._stores.release(request.request_id)
        if track is None or not self.settings.report:
            return None
        return {REPORT_KEY: {"loaded_tokens": track.loaded_tokens, "load_failed": track.load_failed}}

    def reset(self) -> bool:
        """Go on under a namespace of this engine's own, and delete what it captured so far.

        vLLM asks for this when the weights may have been exchanged or are about to be, and does not say which. So
        nothing that is stored is served to this engine any more, and nothing that it computes from now on is found
        under the old weights' name. What it captured may be of new weights already, so it goes, also what is under way;
        what other engines captured stays theirs. A request that goes on meanwhile rests on both, and so does one that
        finds blocks from before in the engine's own cache: nothing of them is captured. With ``fixed_weights`` nothing
        happens.

        Returns:
            Whether all of that is deleted; where not, each step tries again.
        """
        if self.settings.fixed_weights:
            return True
        before = self._stores.reset()
        self._loads.reset()
        self._requests.reset()
        return self._disowned.add(before)

    def take_counters(self) -> dict[str, int]:
        self.counters.merge({f"scheduler_{k}": v for k, v in self._extents.counters.items()})
        return self.counters.take()

    # ------------------------------------------------------------------ the research interface

    def block_hashes(self, request_id: str) -> list[bytes] | None:
        """The block hashes of a request that runs or finished lately, by vLLM's id or the caller's."""
        return self._requests.block_hashes(request_id)

    def inject(self, request_id: str, chunk: KVChunk) -> None:
        """Offer a chunk's blocks to the request of this (vLLM) id when it is scheduled first."""
        self._loads.inject(request_id, chunk)

    def close(self) -> None:
        """Close the files; what was captured after a reset is of use to nobody any more, and goes."""
        self._disowned.add(self.stores() if self.fresh.after_reset else ())
        self._extents.close()
