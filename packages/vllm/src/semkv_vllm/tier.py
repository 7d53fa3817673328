"""The disk below vLLM's host memory: a secondary tier over `BlockStore`.

vLLM's scheduler calls a tier in every step, in its only thread. Here the tier asks the index where blocks are, hands
jobs to a process of its own (`disk_process`), and collects their results. An exception that left a tier would end the
engine: a fault is a miss, or a store that did not happen, and counted.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from semkv_stores.block_index import BlockRef
from semkv_vllm.disk_process import DiskProcess, FileDone
from semkv_vllm.shared import KVShared, request_fact

log = logging.getLogger("semkv.connectors")

FILE_BYTES = 64 << 20
"""Rows of one block file: large enough for the disk's full rate, and small enough to be evicted alone."""

_QUEUE_SHARE = 4  # of host memory a quarter may wait for the disk; what comes on top is not written, and counted
_MOST = 512  # keys asked for at once, and blocks of one file
_LOOK_S, _LOOKS = 1.0, 30  # with KV events: once a second the index is asked for a thirtieth of what was told


@dataclass
class _Lookups:
    """What the index said of one request's keys, as long as `KVShared.stamp` is the same. ``refused``: computing is
    faster than reading. ``promised``: how many blocks were."""

    stamp: object
    refs: dict[bytes, BlockRef | None] = field(default_factory=dict)
    promised: int = 0
    judged: bool = False
    refused: bool = False


@dataclass
class _Transfer:
    """A job of vLLM's, cut into files that are copied side by side."""

    job: TransferJob
    namespace: str
    parts: int
    waiting_bytes: int
    good: list[bytes] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)


class SemKVTier(SecondaryTierManager):
    """Blocks on disk: checked, bounded, by tenant."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
    ) -> None:
        """``offloading_spec.extra_config["semkv"]`` is the `KVShared` of this engine."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality.LOCAL
        self._shared: KVShared = offloading_spec.extra_config["semkv"]
        rows, self._row_bytes = primary_kv_view.shape or (0, 0)
        self._queue_bytes = primary_kv_view.nbytes // _QUEUE_SHARE
        self._most_promised = max(1, rows // 2)
        self._tokens = {group.group_id: group.tokens_per_block for group in offloading_spec.config.groups}
        self._disk: DiskProcess | None = None
        if self._shared.store is not None:
            memory = offloading_spec._scheduler_mmap.fd
            self._disk = DiskProcess(memory, rows, self._row_bytes, self._shared.store)
        self._parts: dict[int, tuple[_Transfer, list[bytes]]] = {}  # by the number of the disk's job
        self._waiting_bytes = 0
        self._finished: deque[JobResult] = deque()
        self._counted = dict[str, int]()
        self._tells: bool = offloading_spec.kv_events_config.enable_kv_cache_events
        self._told = dict[bytes, str]()  # namespaces of blocks told to be on disk; looked at longest ago first
        self._events, self._looked = list[OffloadingEvent](), 0.0

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        try:
            lookups = req_context.get_state(_Lookups)
            if lookups is None or lookups.stamp is not self._shared.stamp:
                promised = 0 if lookups is None else lookups.promised
                req_context.set_state(lookups := _Lookups(self._shared.stamp, promised=promised))
            if key not in lookups.refs:
                self._look_up(key, req_context, lookups)
            # What does not fit into host memory at once would push itself out there for ever.
            found = lookups.refs[key] is not None and not lookups.refused and lookups.promised < self._most_promised
            lookups.promised += found
        except Exception:
            self._shared.fault("a lookup")
            found = False
        return LookupResult.HIT if found else LookupResult.MISS

    def _look_up(self, key: bytes, context: Any, lookups: _Lookups) -> None:
        """Ask the index for ``key``; where it is found, for the keys of its group that follow too."""
        store = self._shared.store
        if store is None:
            lookups.refs[key] = None
            return
        namespace = self._namespace(context)
        (ref,) = store.find(namespace, [key])
        lookups.refs[key] = ref
        if ref is None:
            return
        places: dict[bytes, int] = context._offload_key_positions
        at, group = places.get(key, 0), key[-4:]
        rest = (k for k, place in places.items() if place > at and k[-4:] == group and k not in lookups.refs)
        more = list(itertools.islice(rest, _MOST))
        lookups.refs.update(zip(more, store.find(namespace, more), strict=True))
        if self._shared.gate is not None and not lookups.judged:
            lookups.judged = True
            run = [key, *itertools.takewhile(lambda k: lookups.refs[k] is not None, more)]
            tokens = places.get(run[-1], 0) - at + self._tokens.get(int.from_bytes(group, "big"), 0)
            lookups.refused = not self._shared.gate.worth(tokens, len(run) * self._row_bytes)
            self._shared.counters["refused_loads"] += lookups.refused

    def _namespace(self, context: Any) -> str:
        return self._shared.namespace(request_fact(context.kv_transfer_params, "adapter"))

    def submit_store(self, job_metadata: TransferJob) -> None:
        try:
            if self._take(job_metadata):
                return
        except Exception:
            self._shared.fault("a store")
        self._finished.append(JobResult(job_metadata.job_id, True))

    def _take(self, job: TransferJob) -> bool:
        """Hand a store to the disk, file by file; False where nothing can be written now."""
        store, keys, nbytes = self._shared.store, list(job.keys), len(job.keys) * self._row_bytes
        full = self._waiting_bytes > 0 and self._waiting_bytes + nbytes > self._queue_bytes
        if self._disk is None or store is None or full or not store.writable:
            self._shared.counters["dropped"] += len(keys)
            return False
        each = min(max(1, FILE_BYTES // self._row_bytes), _MOST)
        owner = request_fact(job.req_context.kv_transfer_params, "owner")
        parts = [slice(i, i + each) for i in range(0, len(keys), each)]
        transfer = _Transfer(job, self._namespace(job.req_context), len(parts), nbytes)
        self._waiting_bytes += nbytes
        for part in parts:
            chunks = [int(chunk) for chunk in job.chunk_ids[part]]
            self._hand_over(transfer, keys[part], chunks=chunks, owner=owner, since=self._shared.heard)
        return True

    def _hand_over(self, transfer: _Transfer, keys: list[bytes], **job: Any) -> None:
        assert self._disk is not None
        about = {"namespace": transfer.namespace, "layout": self._shared.layout}
        self._parts[self._disk.submit(keys=keys, **about, **job)] = transfer, keys

    def submit_load(self, job_metadata: TransferJob) -> None:
        try:
            if self._bring(job_metadata):
                return
        except Exception:
            self._shared.fault("a load")
        self._end(_Transfer(job_metadata, "", 0, 0))

    def _bring(self, job: TransferJob) -> bool:
        """Ask the disk for a load, file by file; False where nothing can be read."""
        lookups, files = job.req_context.get_state(_Lookups), dict[tuple[str, str], list[tuple[int, bytes, int]]]()
        if lookups is None or lookups.stamp is not self._shared.stamp:
            return False
        for key, chunk in zip(job.keys, job.chunk_ids, strict=True):
            if (ref := lookups.refs.get(key)) is not None:
                files.setdefault((ref.file, ref.owner), []).append((ref.row, key, int(chunk)))
                self._shared.records[key] = (ref.owner, ref.created)
        if self._disk is None or not files:
            return False
        transfer = _Transfer(job, self._namespace(job.req_context), len(files), 0)
        for (file, owner), part in files.items():
            places, keys, chunks = map(list, zip(*sorted(part), strict=True))
            self._hand_over(transfer, keys, chunks=chunks, file=file, owner=owner, places=places)
        return True

    def get_finished_jobs(self) -> Iterable[JobResult]:
        try:
            if self._parts and self._disk is not None:
                for done in self._disk.finished():
                    self._part_done(done)
        except Exception:
            self._shared.fault("a result of the disk's")
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def _part_done(self, done: FileDone) -> None:
        transfer, keys = self._parts.pop(done.number, (None, []))
        if transfer is None:
            return
        good = list(itertools.compress(keys, done.good))
        transfer.good += good
        transfer.parts -= 1
        self._shared.counters.update(done.counters)
        if transfer.parts == 0:
            self._end(transfer)
        if not self._tells:
            return
        if new := [key for key in good if self._told.get(key) != transfer.namespace]:  # last: a fault costs no request
            self._told.update(dict.fromkeys(new, transfer.namespace))
            self._tell(new, removed=False)

    def _end(self, transfer: _Transfer) -> None:
        """All of a job is done. What did not come of a load is a miss from now on, or the request would ask for it for
        ever."""
        job, keys, success = transfer.job, transfer.good, True
        seconds, nbytes = time.perf_counter() - transfer.started, len(keys) * self._row_bytes
        self._waiting_bytes -= transfer.waiting_bytes
        if job.is_promotion:
            success = len(keys) == len(job.keys)
            if (lookups := job.req_context.get_state(_Lookups)) is not None:
                lookups.refs.update(dict.fromkeys(set(job.keys).difference(keys)))
            if self._shared.gate is not None:
                self._shared.gate.disk.measured(nbytes, seconds)
        self._finished.append(JobResult(job.job_id, success, keys, seconds, nbytes))

    def drain_jobs(self) -> None:
        for done in self._disk.drain() if self._disk is not None else ():
            try:
                self._part_done(done)
            except Exception:
                self._shared.fault("a result of the disk's")

    def shutdown(self) -> None:
        """Let the disk write what waits, and let go of vLLM's memory before vLLM closes it."""
        if self._disk is not None:
            self._disk.close()
        self._primary_kv_view = None

    # ------------------------------------------------------------------ events and metrics

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Blocks that this engine wrote or read on disk, and those of them that any process has deleted since."""
        try:
            if self._told and time.monotonic() - self._looked > _LOOK_S:
                self._look()
        except Exception:
            self._shared.fault("an event")
        events, self._events = self._events, []
        return events

    def _look(self) -> None:
        """Ask the index whether the next blocks are still there."""
        self._looked, store = time.monotonic(), self._shared.store
        if store is None or not store.last_purge():  # while it cannot be read, nothing is known to be gone
            return
        namespace, count = next(iter(self._told.values())), min(_MOST, len(self._told) // _LOOKS + 1)
        keys = list(itertools.islice((key for key, own in self._told.items() if own == namespace), count))
        there = [ref is not None for ref in store.find(namespace, keys)]
        for key, is_there in zip(keys, there, strict=True):
            del self._told[key]
            if is_there:
                self._told[key] = namespace
        if gone := [key for key in keys if key not in self._told]:
            self._tell(gone, removed=True)

    def _tell(self, keys: list[Any], *, removed: bool) -> None:
        self._events.append(OffloadingEvent(keys, self.medium, removed=removed, locality=self.locality))

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {f"vllm:semkv_{name}": OffloadingCounterMetadata(text) for name, text in COUNTERS.items()}

    def get_stats(self) -> OffloadingConnectorStats | None:
        stats = OffloadingConnectorStats()
        try:
            if (counters := dict(self._shared.counters)) != self._counted:
                for name in COUNTERS:
                    if (new := counters.get(name, 0) - self._counted.get(name, 0)) > 0:
                        stats.increase_counter(f"vllm:semkv_{name}", new)
                self._counted = counters
        except Exception:
            self._shared.fault("counting")
        return None if stats.is_empty() else stats


COUNTERS = {
    "stored_blocks": "KV blocks written to disk",
    "stored_bytes": "Bytes of KV block files written",
    "read_blocks": "KV blocks read from disk and checked",
    "corrupt": "KV block files that failed a check and were deleted",
    "missing": "KV block files that had vanished",
    "dropped": "KV blocks not written because the disk was behind",
    "rejected": "KV block files larger than the bounds of the store",
    "evicted_blocks": "KV blocks evicted from disk",
    "purged_blocks": "KV blocks taken out of host memory by a purge or for their age",
    "spoiled_blocks": "KV blocks not kept because another connector's load had failed",
    "refused_loads": "Requests computed because that was faster than the disk",
    "lora_skipped": "Requests not cached because the weights of their LoRA adapter are not known for certain",
    "errors": "Faults of the disk or of the tier",
}
