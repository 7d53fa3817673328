"""vLLM's tiering with our disk tier: the spec that vLLM makes in every process of an engine, and its two halves.

In the scheduler's process `SemKVManager` is the single place through which every lookup and every store goes. In a
worker, vLLM's own copies between GPU and host memory are used; a CPU engine, for which vLLM has none, gets `CPUWorker`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from semkv_stores.block_index import Purge
from semkv_stores.files import described
from semkv_vllm.shared import KVShared, request_fact

log = logging.getLogger("semkv.connectors")

SHM = Path("/dev/shm")  # noqa: S108  where vLLM puts the host memory that its processes share
_SHARE = 0.8  # of the room there that an engine takes at most
_FILLING_S = 300.0  # for an engine to fill its memory; what is older and empty was left by one that was killed


def region_of(engine: str, shm: Path = SHM) -> Path:
    """Where vLLM's `SharedOffloadRegion` lies; it takes a file that is there already."""
    return shm / f"vllm_offload_{engine}.mmap"


def agreed_host_bytes(engine: str, wanted: int, shm: Path = SHM) -> tuple[int, bool]:
    """How much host memory an engine gets: what is ``wanted``, or four fifths of the room that there is.

    All processes of an engine must come to the same answer: the first one makes the file, whose length says it.

    Returns:
        Bytes, and whether this process is the first one.
    """
    region, folder = region_of(engine, shm), os.open(shm, os.O_RDONLY)
    with contextlib.ExitStack() as held:
        held.callback(os.close, folder)
        file = held.enter_context(os.fdopen(os.open(region, os.O_CREAT | os.O_RDWR, 0o600)))
        fcntl.flock(folder, fcntl.LOCK_EX)  # engines that start at once look one after the other
        if size := os.fstat(file.fileno()).st_size:
            return size, False
        atexit.register(region.unlink, missing_ok=True)  # where no scheduler comes
        status, regions = os.statvfs(shm), described(shm.glob(region_of("*").name))
        # What other engines that start at this moment have not filled yet is not free.
        new = [found for _, found in regions if time.time() - found.st_mtime < _FILLING_S]
        filling = sum(max(0, found.st_size - found.st_blocks * 512) for found in new)
        size = min(wanted, int(_SHARE * max(0, status.f_bavail * status.f_frsize - filling)))
        os.ftruncate(file.fileno(), size)
        return size, True


class SemKVManager(TieringOffloadingManager):
    """vLLM's manager, which forgets what was purged or is too old and keeps what another's failed load spoiled out."""

    _shared: KVShared
    _doomed: set[bytes]  # to be taken out of host memory as soon as no transfer uses them
    _under_way: dict[bytes, str]  # to host memory, each with its tenant's tag
    _spoiled: set[bytes]  # under way, and to be thrown away when they arrive

    @classmethod
    def of(cls, manager: TieringOffloadingManager, shared: KVShared) -> SemKVManager:
        """Turn the manager that vLLM has just made into one of these. A second manager would poll the same tiers."""
        manager._doomed, manager._spoiled, manager._under_way, manager._shared = set(), set(), {}, shared
        shared.heard = 0 if shared.store is None else shared.store.last_purge()
        manager.__class__ = cls
        assert isinstance(manager, cls)
        return manager

    def lookup(self, key: Any, req_context: Any, *, exclude_tier_idx: int | None = None) -> LookupResult:
        try:
            if (self._doomed or self._shared.settings.max_age_s) and (key in self._doomed or self._too_old(key)):
                return LookupResult.MISS
        except Exception:
            self._shared.fault("a lookup")
        return super().lookup(key, req_context, exclude_tier_idx=exclude_tier_idx)

    def held(self, keys: Sequence[bytes], req_context: ReqContext) -> tuple[int, bool]:
        """How many of the first keys have a place in host memory, and whether one of these is still on its way there:
        vLLM's lookup without its clocks, for all of them at once."""
        count, pending = 0, False
        try:
            if self._doomed or self._shared.settings.max_age_s:
                return 0, False
            self._maybe_process_finished_jobs()
            chunk_of = self.primary_tier._policy.get
            for key in keys:
                if (chunk := chunk_of(key)) is None:
                    break
                count += 1
                pending |= chunk.ref_cnt < 0
            metrics = self._metrics._request_states.get(req_context.req_id)
            if count and not pending and metrics is not None and metrics.observed_lookups is not None:
                counted = metrics.observed_lookups.setdefault(self._metrics.primary_tier_label, {})
                before = len(counted)
                counted.update(dict.fromkeys(keys[:count]))
                if (new := len(counted) - before) > 0:
                    for name in (TieringOffloadingMetrics.CHUNK_QUERIES, TieringOffloadingMetrics.CHUNK_HITS):
                        self._metrics._stats.increase_counter(name, new, self._metrics.primary_tier_label)
        except Exception:
            self._shared.fault("a lookup")
            return 0, False
        return count, pending

    def _too_old(self, key: bytes) -> bool:
        limit = self._shared.settings.max_age_s
        if not limit or (record := self._shared.records.get(key)) is None or time.time() - record[1] <= limit:
            return False
        self._doomed.add(key)
        return True

    def on_new_request(self, req_context: Any, *, exclude_tier_idx: int | None = None) -> RequestOffloadingContext:
        try:
            self._hear_of_purges()
        except Exception:
            self._shared.fault("a purge")
        return super().on_new_request(req_context, exclude_tier_idx=exclude_tier_idx)

    def _hear_of_purges(self) -> None:
        """What was purged from the disk, by any process, goes from host memory too.

        Which engine wrote a block is not known here: what one takes back goes as if it were everybody's.
        """
        shared = self._shared
        if shared.store is None or shared.store.last_purge() == shared.heard:
            return
        purges = shared.store.purges_after(shared.heard)
        if purges == [Purge()] and shared.store.root.exists():  # the index cannot be read at this moment
            return
        shared.stamp = object()
        for purge in purges:
            shared.heard = purge.id
            if purge.namespace in (None, *shared.used()):
                self._doomed.update(key for key, (owner, _) in shared.records.items() if purge.owner in (None, owner))
                self.spoil(key for key, owner in self._under_way.items() if purge.owner in (None, owner))

    def prepare_store(self, keys: Collection[Any], req_context: Any) -> PrepareStoreOutput | None:
        # vLLM takes a limit of 0 for none where it stores the tail of a block.
        if not self._shared.storing or (req_context.kv_transfer_params or {}).get("max_offload_tokens") == 0:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        self._forget_doomed()  # vLLM takes what is there for stored
        if (prepared := super().prepare_store(keys, req_context)) is not None:
            owner = request_fact(req_context.kv_transfer_params, "owner")
            self._under_way.update(dict.fromkeys(prepared.keys_to_store, owner))
        return prepared

    def complete_store(self, keys: Collection[Any], req_context: Any, success: bool = True) -> None:
        for key in keys:
            self._under_way.pop(key, None)
        if not self._spoiled.isdisjoint(keys):
            self._shared.counters["spoiled_blocks"] += len(keys)
            self._spoiled.difference_update(keys)
            success = False
        if success:
            record = (request_fact(req_context.kv_transfer_params, "owner"), time.time())
            self._shared.records.update(dict.fromkeys(keys, record))
        super().complete_store(keys, req_context, success)

    def spoil(self, keys: Iterable[bytes]) -> None:
        """Throw away what is being stored under these keys."""
        self._spoiled.update(keys)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._forget_doomed()
        try:
            if len(self._shared.records) > 2 * self.primary_tier._num_chunks + 64:
                held, policy = self._shared.records, self.primary_tier._policy
                self._shared.records = {key: held[key] for key in held if policy.get(key) is not None}
        except Exception:
            self._shared.fault("forgetting")
        super().on_schedule_end(context)

    def _forget_doomed(self) -> None:
        """Take blocks out of host memory that no transfer is using; the others wait for a later step. Never raises."""
        primary, gone = self.primary_tier, []
        try:
            for key in list(self._doomed):
                chunk = primary._policy.get(key)
                if chunk is not None and chunk.ref_cnt != 0:
                    continue
                if chunk is not None:
                    primary._policy.remove(key)
                    primary._num_evictable_cache_chunks -= 1
                    primary._free_chunk(chunk)
                    gone.append(key)
                self._doomed.discard(key)
                self._shared.records.pop(key, None)
            self._shared.counters["purged_blocks"] += len(gone)
            if gone and primary.events is not None:
                primary.events.append(OffloadingEvent(gone, primary.medium, removed=True))
        except Exception:
            self._shared.fault("forgetting")

    def promoted(self, request_id: str) -> bool:
        """Whether vLLM notes of a request that blocks were brought into host memory for it."""
        return bool(self._request_load_sources.get(request_id))

    def reset_cache(self) -> None:
        super().reset_cache()
        self._doomed.clear()
        self._spoiled.clear()
        self._under_way.clear()
        self._shared.records.clear()


class SemKVSpec(TieringOffloadingSpec):
    """Made by vLLM in the scheduler's process and in every worker."""

    _manager: Any
    _worker: Any

    def __init__(self, config: Any) -> None:
        """Other tiers tell models apart by their names, so here the name says which weights these are, too."""
        name = f"{config.model.name}-{config.extra_config['semkv'].model}"
        super().__init__(replace(config, model=replace(config.model, name=name)))

    def get_manager(self) -> SemKVManager:
        if not isinstance(self._manager, SemKVManager):
            self._manager = SemKVManager.of(super().get_manager(), self.extra_config["semkv"])
        return self._manager

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if current_platform.is_cuda_alike() or current_platform.is_xpu():
            return super().get_worker(kv_caches)
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
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
        self._region, self._groups, self._done = region, kv_caches.group_data_refs, list[TransferResult]()
        self._device = [tensor.tensor.numpy() for tensor in kv_caches.tensors]  # int8 [blocks, page], the same memory
        self._host = [region.create_next_worker_view(t.page_size_bytes).numpy() for t in kv_caches.tensors]

    def _copy(self, job_id: int, blocks: Any, rows: Any, *, store: bool) -> bool:
        """Blocks come group after group, each with a row of host memory."""
        start, nbytes, at = time.perf_counter(), 0, 0
        for group, size in enumerate(blocks.group_sizes):
            ids, own, at = blocks.block_ids[at : at + size], rows[at : at + size], at + size
            for ref in self._groups[group]:
                device, host, page = self._device[ref.tensor_idx], self._host[ref.tensor_idx], ref.page_size_bytes
                if store:
                    host[own, :page] = device[ids, :page]
                else:
                    device[ids, :page] = host[own, :page]
                nbytes += page * size
        self._done.append(TransferResult(job_id, True, nbytes, time.perf_counter() - start))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec.block_ids, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copy(job_id, dst_spec, src_spec.block_ids, store=False)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        return None

    def shutdown(self) -> None:
        self._host = self._device = []
        with contextlib.suppress(BufferError):
            self._region.cleanup()
