"""vLLM's tiering with our disk tier: the spec that vLLM makes in every process of an engine, and its two halves.

In the scheduler's process `SemKVManager` is the single place through which every lookup and every store goes. In a
worker, vLLM's own copies between GPU and host memory are used; a CPU engine, for which vLLM has none, gets `CPUWorker`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadingWorker,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from semkv_stores.block_file import PAGE
from semkv_stores.block_index import Purge
from semkv_vllm import REPORT_KEY, private
from semkv_vllm.holdings import HeldPrimary, Holdings
from semkv_vllm.params import client_params
from semkv_vllm.seals import Seals, check_tier
from semkv_vllm.shared import KVShared, RequestFacts, facts_of, ours
from semkv_vllm.tier import SemKVTier

log = logging.getLogger("semkv.connectors")


class SemKVManager(TieringOffloadingManager):
    """vLLM's manager, which forgets what was purged or is too old, keeps out what another's failed load spoiled, and
    checks what comes from other tiers."""

    shared: KVShared
    tells_events: bool  # of this engine's KV, to vLLM
    _seals: Seals | None
    _doomed: set[bytes]  # to be taken out of host memory as soon as no transfer uses them
    _under_way: dict[bytes, str]  # to host memory, each with its tenant's tag
    _spoiled: set[bytes]  # under way, and to be thrown away when they arrive
    _holdings: Holdings | None  # None where neither bounds nor conversations are asked for

    @classmethod
    def of(cls, manager: TieringOffloadingManager, shared: KVShared) -> SemKVManager:
        """Turn the manager that vLLM has just made into one of these. A second manager would poll the same tiers."""
        made: Any = manager
        made.__class__ = cls
        made.shared = shared
        made.tells_events = shared.tells_events
        made._seals = None
        made._doomed = set()
        made._spoiled = set()
        made._under_way = {}
        made._holdings = None
        shared.heard = 0 if shared.store is None else shared.store.last_purge()
        if shared.settings.sealed:
            made._check_tiers()
        if shared.settings.tenant_host_bytes or shared.settings.keep_bytes:
            made._hold()
        assert isinstance(made, cls)
        return made

    def _check_tiers(self) -> None:
        view = self.primary_tier.get_kv_memoryview()
        rows = np.frombuffer(view, np.uint8).reshape(view.shape or (0, 0))
        self._seals = Seals(rows, self.shared.namespace)
        for tier in self.secondary_tiers:
            if not isinstance(tier, SemKVTier):
                check_tier(tier, self.shared, self._seals)

    def _hold(self) -> None:
        primary = self.primary_tier
        _, row_bytes = primary.get_kv_memoryview().shape or (0, 0)
        self._holdings = Holdings(self.shared, primary, row_bytes)
        HeldPrimary.of(primary, self._holdings)

    def lookup(
        self, key: Any, req_context: Any, *, exclude_tier_idx: int | None = None
    ) -> LookupResult:
        if not self._may_load(key):
            return LookupResult.MISS
        return super().lookup(key, req_context, exclude_tier_idx=exclude_tier_idx)

    @ours("a lookup", otherwise=False)
    def _may_load(self, key: bytes) -> bool:
        return self.shared.loading and key not in self._doomed and not self._too_old(key)

    @ours("a lookup", otherwise=(0, False))
    def held(self, keys: Sequence[bytes], req_context: ReqContext) -> tuple[int, bool]:
        """How many of the first keys have a place in host memory, and whether one of these is still on its way there:
        vLLM's lookup without its clocks, for all of them at once. ``kv_load_tiers`` of a request is about the tiers
        below, there as here."""
        if self._doomed or self.shared.settings.max_age_s or not self.shared.loading:
            return 0, False
        private.finish_transfers(self)
        look_up = self.primary_tier.lookup
        count = 0
        pending = False
        for key in keys:
            found = look_up(key, req_context)
            if found is LookupResult.MISS:
                break
            count += 1
            pending |= found is LookupResult.HIT_PENDING
        if count and not pending:
            private.count_hits(self, req_context.req_id, keys[:count])
        return count, pending

    def _too_old(self, key: bytes) -> bool:
        limit = self.shared.settings.max_age_s
        if (
            not limit
            or (record := self.shared.records.get(key)) is None
            or time.time() - record[1] <= limit
        ):
            return False
        self._doomed.add(key)
        return True

    def on_new_request(
        self, req_context: Any, *, exclude_tier_idx: int | None = None
    ) -> RequestOffloadingContext:
        own = exclude_tier_idx is not None  # a tier's, on behalf of another engine
        if not own and not self._admit(req_context):
            req_context.kv_transfer_params = {}
        self._hear_of_purges()
        policy = super().on_new_request(req_context, exclude_tier_idx=exclude_tier_idx)
        if not own:
            self._prefetch(req_context)
        return policy

    @ours("a prefetch")
    def _prefetch(self, req_context: Any) -> None:
        """Bring what a request's conversation had into host memory."""
        found = None if self._holdings is None else self._holdings.prefetched(req_context)
        if found is None:
            return
        super().on_new_request(found)
        try:
            for key in private.key_positions(found):
                self.lookup(key, found)
        finally:
            super().on_request_finished(found)

    def on_request_finished(self, req_context: Any, *, exclude_tier_idx: int | None = None) -> None:
        super().on_request_finished(req_context, exclude_tier_idx=exclude_tier_idx)
        if self._holdings is not None and exclude_tier_idx is None:
            self._holdings.ended(req_context)

    @ours("a request", otherwise=False)
    def _admit(self, req_context: Any) -> bool:
        """Hand on what a client may say, and nothing else, also of a request that the connector did not see begin."""
        allowed = self.shared.settings.allowed_params
        params = req_context.kv_transfer_params
        if not isinstance(params, dict) or not isinstance(params.get(REPORT_KEY), RequestFacts):
            req_context.kv_transfer_params = client_params(params, allowed)
        if "kv_hints" not in allowed:
            req_context.kv_hints = None
        return True

    @ours("a purge")
    def _hear_of_purges(self) -> None:
        """What was purged from the disk, by any process, goes from host memory too.

        Which engine wrote a block is not known here: what one takes back goes as if it were everybody's.
        """
        shared = self.shared
        if shared.store is None or shared.store.last_purge() == shared.heard:
            return
        purges = shared.store.purges_after(shared.heard)
        # The index cannot be read at this moment.
        if purges == [Purge()] and shared.store.root.exists():
            return
        shared.stamp = object()
        for purge in purges:
            shared.heard = purge.id
            if purge.namespace in (None, *shared.used()):
                if self._holdings is not None:
                    self._holdings.forget(purge.owner)
                self._doomed.update(
                    key
                    for key, (owner, _) in shared.records.items()
                    if purge.owner in (None, owner)
                )
                self.spoil(
                    key for key, owner in self._under_way.items() if purge.owner in (None, owner)
                )

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> PrepareStoreOutput | None:
        if not self._may_store(req_context):
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        self._forget_doomed()  # vLLM takes what is there for stored
        prepared = super().prepare_store(keys, req_context)
        if prepared is not None:
            self._begun(prepared.keys_to_store, req_context)
        return prepared

    @ours("a store", otherwise=False)
    def _may_store(self, context: Any) -> bool:
        # vLLM takes a limit of 0 for none where it stores the tail of a block.
        nothing = (context.kv_transfer_params or {}).get("max_offload_tokens") == 0
        return not nothing and self.shared.may_store(context.req_id)

    @ours("a store")
    def _begun(self, keys: Collection[Any], context: Any) -> None:
        self._under_way.update(dict.fromkeys(keys, facts_of(context).owner))

    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        success = success and self._may_keep(keys)
        if success:
            self._note(keys, req_context)
        super().complete_store(keys, req_context, success)

    @ours("a store", otherwise=False)
    def _may_keep(self, keys: Collection[Any]) -> bool:
        for key in keys:
            self._under_way.pop(key, None)
        if self._spoiled.isdisjoint(keys):
            return True
        self.shared.counters["spoiled_blocks"] += len(keys)
        self._spoiled.difference_update(keys)
        return False

    @ours("a store")
    def _note(self, keys: Collection[Any], context: Any) -> None:
        record = (facts_of(context).owner, time.time())
        self.shared.records.update(dict.fromkeys(keys, record))

    def create_store_job(
        self, keys: Collection[Any], req_context: Any, tier_idx: int = 0
    ) -> TransferJob:
        """vLLM's, for all that leaves host memory for another tier. The block gets its seal first."""
        job = super().create_store_job(keys, req_context, tier_idx)
        if not isinstance(self.secondary_tiers[tier_idx], SemKVTier):
            self._seal(job)
        return job

    @ours("a seal")
    def _seal(self, job: TransferJob) -> None:
        if self._seals is not None:
            self._seals.write(job.keys, job.chunk_ids.tolist())

    def spoil(self, keys: Iterable[bytes]) -> None:
        """Throw away what is being stored under these keys."""
        self._spoiled.update(keys)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._holdings is not None:
            self._holdings.step()
        self._forget_doomed()
        self._forget_records()
        super().on_schedule_end(context)

    @ours("forgetting")
    def _forget_records(self) -> None:
        """Keep the records of what is in host memory."""
        records = self.shared.records
        primary = self.primary_tier
        rows, _ = primary.get_kv_memoryview().shape or (0, 0)
        if len(records) > 2 * rows + 64:
            nobody = ReqContext("")
            self.shared.records = {
                key: record
                for key, record in records.items()
                if primary.lookup(key, nobody) is not LookupResult.MISS
            }

    @ours("forgetting")
    def _forget_doomed(self) -> None:
        """Take blocks out of host memory that no transfer is using; the others wait for a later step."""
        primary = self.primary_tier
        gone = []
        for key in list(self._doomed):
            if self._holdings is not None:
                self._holdings.drop(key)
            was_there = private.remove_unused(primary, key)
            if was_there is None:
                continue
            if was_there:
                gone.append(key)
            self._doomed.discard(key)
            self.shared.records.pop(key, None)
        if self._holdings is not None:
            self._holdings.gone(gone)
        self.shared.counters["purged_blocks"] += len(gone)
        if gone and primary.events is not None:
            primary.events.append(OffloadingEvent(gone, primary.medium, removed=True))

    def reset_cache(self) -> None:
        super().reset_cache()
        if self._holdings is not None:
            self._holdings.reset()
        self._doomed.clear()
        self._spoiled.clear()
        self._under_way.clear()
        self.shared.records.clear()

    def shutdown(self) -> None:
        if self._seals is not None:
            self._seals.close()
        super().shutdown()


class SemKVSpec(TieringOffloadingSpec):
    """Made by vLLM in the scheduler's process and in every worker."""

    _manager: Any
    _worker: Any

    def __init__(self, config: Any) -> None:
        """Other tiers tell models apart by their names, so here the name says which weights these are, too.

        Where blocks are sealed each row is a page longer, and other tiers keep the rows under another name.
        """
        shared = config.extra_config["semkv"]
        sealed = shared.settings.sealed
        name = f"{config.model.name}-{shared.model}{'-sealed' if sealed else ''}"
        super().__init__(replace(config, model=replace(config.model, name=name)))
        if sealed:
            self.kv_bytes_per_chunk += PAGE
            self.num_chunks = int(self.extra_config["cpu_bytes_to_use"]) // self.kv_bytes_per_chunk

    def get_manager(self) -> SemKVManager:
        if not isinstance(self._manager, SemKVManager):
            self._manager = SemKVManager.of(super().get_manager(), self.extra_config["semkv"])
        return self._manager

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if current_platform.is_cuda_alike() or current_platform.is_xpu():
            return super().get_worker(kv_caches)
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CPUWorker(kv_caches, region)
        return self._worker


class CPUWorker(OffloadingWorker):
    """Copies blocks between the KV tensors of a CPU engine and the host memory's rows, at once."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._region = region
        self._groups = kv_caches.group_data_refs
        self._done = list[TransferResult]()
        # int8 [blocks, page], the same memory.
        self._device = [tensor.tensor.numpy() for tensor in kv_caches.tensors]
        self._host = [
            region.create_next_worker_view(t.page_size_bytes).numpy() for t in kv_caches.tensors
        ]

    def _copy(self, job_id: int, blocks: Any, rows: Any, *, store: bool) -> bool:
        """Blocks come group after group, each with a row of host memory."""
        start = time.perf_counter()
        nbytes = 0
        at = 0
        for group, size in enumerate(blocks.group_sizes):
            ids = blocks.block_ids[at : at + size]
            own = rows[at : at + size]
            at = at + size
            for ref in self._groups[group]:
                device = self._device[ref.tensor_idx]
                host = self._host[ref.tensor_idx]
                page = ref.page_size_bytes
                if store:
                    host[own, :page] = device[ids, :page]
                else:
                    device[ids, :page] = host[own, :page]
                nbytes += page * size
        self._done.append(TransferResult(job_id, True, nbytes, time.perf_counter() - start))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec.block_ids, store=True)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        return self._copy(job_id, dst_spec, src_spec.block_ids, store=False)

    def get_finished(self) -> list[TransferResult]:
        done = self._done
        self._done = []
        return done

    def wait(self, job_ids: set[int]) -> None:
        return None

    def shutdown(self) -> None:
        self._host = self._device = []
        with contextlib.suppress(BufferError):
            self._region.cleanup()
