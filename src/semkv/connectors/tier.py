"""The disk below vLLM's host memory: a secondary tier over `BlockStore`.

vLLM's scheduler process calls a tier in every step, so nothing here reads or writes a file in that thread: it asks the
index, hands jobs to threads and collects their results. The threads copy between files and the rows of vLLM's host
memory with large system calls that release the interpreter. An exception that left a tier would end the engine: a
fault is a miss, or a store that did not happen, and counted.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
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

from semkv.connectors.kv_shared import KVShared, request_facts
from semkv.stores.blocks import BlockRef, BlockStore

log = logging.getLogger("semkv.connectors")

FILE_BYTES = 64 << 20
"""Rows of one block file: large enough for the disk's full rate, and small enough to be evicted alone."""

_READERS, _WRITERS = 8, 4
_MOST = 512  # keys asked for at once, and blocks of one file


@dataclass
class _Lookups:
    """What the index said of one request's keys. ``refused``: computing is faster than reading."""

    refs: dict[bytes, BlockRef | None] = field(default_factory=dict)
    judged: bool = False
    refused: bool = False


@dataclass
class _Transfer:
    """A job of vLLM's, cut into files that threads copy side by side."""

    job: TransferJob
    parts: int
    good: list[bytes] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    nbytes: int = 0


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
        self._rows: Any = np.asarray(primary_kv_view).view(np.uint8)
        self._row_bytes = int(self._rows.shape[1])
        self._queue_bytes = min(self._shared.settings.queue_bytes, self._rows.nbytes // 4)
        per_chunk = offloading_spec.blocks_per_chunk
        self._tokens = {g.group_id: g.tokens_per_block * per_chunk for g in offloading_spec.config.groups}
        self._readers = ThreadPoolExecutor(_READERS, "semkv-kv-read")
        self._writers = ThreadPoolExecutor(_WRITERS, "semkv-kv-write")
        self._idle = threading.Condition()  # guards the five that follow
        self._transfers: dict[int, _Transfer] = {}
        self._waiting_bytes = 0
        self._finished: deque[JobResult] = deque()
        self._events: list[OffloadingEvent] | None = None
        self._counted: Counter[str] = Counter()
        if offloading_spec.kv_events_config.enable_kv_cache_events:
            self._events = []

    # ------------------------------------------------------------------ in vLLM's scheduler thread

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        try:
            lookups = req_context.get_state(_Lookups)
            if lookups is None:
                req_context.set_state(lookups := _Lookups())
            if key not in lookups.refs:
                self._look_up(key, req_context, lookups)
            found = lookups.refs[key] is not None and not lookups.refused
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
            self._shared.counters.add("refused_loads", int(lookups.refused))

    def _namespace(self, context: Any) -> str:
        return self._shared.namespace(request_facts(context.kv_transfer_params).adapter)

    def submit_store(self, job_metadata: TransferJob) -> None:
        nbytes = len(job_metadata.keys) * self._row_bytes
        with self._idle:
            full = self._waiting_bytes > 0 and self._waiting_bytes + nbytes > self._queue_bytes
        store = self._shared.store
        if full or store is None or not store.writable:
            self._shared.counters.add("dropped", len(job_metadata.keys))
            self._finished.append(JobResult(job_metadata.job_id, True))
            return
        try:
            namespace = self._namespace(job_metadata.req_context)
            owner = request_facts(job_metadata.req_context.kv_transfer_params).owner
        except Exception:
            self._shared.fault("a store")
            self._finished.append(JobResult(job_metadata.job_id, True))
            return
        each = min(_MOST, max(1, FILE_BYTES // self._row_bytes))
        keys = list(job_metadata.keys)
        parts = [(keys[i : i + each], job_metadata.chunk_ids[i : i + each]) for i in range(0, len(keys), each)]
        generation = store.generation
        self._start(
            self._writers,
            job_metadata,
            nbytes,
            [
                lambda part=part: self._write(store, namespace, owner, generation, *part)  # type: ignore[misc]
                for part in parts
            ],
        )

    def submit_load(self, job_metadata: TransferJob) -> None:
        store, work = self._shared.store, []
        try:
            context, keys = job_metadata.req_context, list(job_metadata.keys)
            namespace = self._namespace(context)
            lookups = context.get_state(_Lookups) or _Lookups()
            files: dict[str, list[tuple[bytes, BlockRef, int]]] = {}
            for key, chunk in zip(keys, job_metadata.chunk_ids, strict=True):
                if (ref := lookups.refs.get(key)) is not None:
                    files.setdefault(ref.file, []).append((key, ref, int(chunk)))
                    self._shared.records[key] = (ref.owner, ref.created)
            if store is not None:
                work = [
                    lambda part=part: self._read(store, namespace, part)  # type: ignore[misc]
                    for part in files.values()
                ]
        except Exception:
            self._shared.fault("a load")
        if not work:
            self._loaded(job_metadata, (), 0.0)
            return
        self._start(self._readers, job_metadata, 0, work)

    def _start(
        self, pool: ThreadPoolExecutor, job: TransferJob, waiting: int, work: Sequence[Callable[[], Collection[bytes]]]
    ) -> None:
        transfer = _Transfer(job, len(work))
        with self._idle:
            self._transfers[job.job_id] = transfer
            self._waiting_bytes += waiting
        try:
            for part in work:
                pool.submit(self._run, part, transfer, waiting)
        except RuntimeError:  # the interpreter is ending
            self._shared.fault("a transfer")
            with self._idle:
                del self._transfers[job.job_id]
            self._finished.append(JobResult(job.job_id, not job.is_promotion))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events:
            events, self._events = self._events, []
            yield from events

    def drain_jobs(self) -> None:
        with self._idle:
            self._idle.wait_for(lambda: not self._transfers)

    def shutdown(self) -> None:
        """Write what waits, and let go of vLLM's memory before vLLM closes it."""
        self._readers.shutdown()
        self._writers.shutdown()
        self._rows = self._primary_kv_view = None  # type: ignore[assignment]

    # ------------------------------------------------------------------ in the threads

    def _run(self, part: Callable[[], Collection[bytes]], transfer: _Transfer, waiting: int) -> None:
        """One file of a job; the last one ends the job."""
        try:
            good = part()
        except Exception:
            self._shared.fault("a transfer")
            good = ()
        job = transfer.job
        with self._idle:
            transfer.good += good
            transfer.parts -= 1
            if transfer.parts:
                return
            seconds, nbytes = time.perf_counter() - transfer.started, len(transfer.good) * self._row_bytes
            self._waiting_bytes -= waiting
            del self._transfers[job.job_id]
            if job.is_promotion:
                self._loaded(job, transfer.good, seconds)
            else:
                if self._events is not None and transfer.good:
                    keys: Any = list(transfer.good)
                    self._events.append(OffloadingEvent(keys, Medium.STORAGE, removed=False, locality=self.locality))
                self._finished.append(JobResult(job.job_id, True, None, seconds, nbytes))
            self._idle.notify_all()

    def _loaded(self, job: TransferJob, good: Collection[bytes], seconds: float) -> None:
        """A load ended. What did not come is a miss from now on, or the request would ask for it for ever."""
        if (lookups := job.req_context.get_state(_Lookups)) is not None:
            lookups.refs.update(dict.fromkeys(set(job.keys).difference(good)))
        nbytes = len(good) * self._row_bytes
        if (gate := self._shared.gate) is not None:
            gate.disk.measured(nbytes, seconds)
        self._finished.append(JobResult(job.job_id, len(good) == len(job.keys), list(good), seconds, nbytes))

    def _write(
        self, store: BlockStore, namespace: str, owner: str, generation: str, keys: list[bytes], chunks: Any
    ) -> list[bytes]:
        rows = [self._rows[chunk] for chunk in chunks]
        done = store.write(namespace, self._shared.layout, keys, rows, owner=owner, generation=generation)
        return keys if done else []

    def _read(self, store: BlockStore, namespace: str, part: list[tuple[bytes, BlockRef, int]]) -> list[bytes]:
        keys, rows = [key for key, _, _ in part], [self._rows[chunk] for _, _, chunk in part]
        good = store.read(self._shared.layout, namespace, keys, [ref for _, ref, _ in part], rows)
        return list(itertools.compress(keys, good))

    # ------------------------------------------------------------------ metrics

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {f"vllm:semkv_{name}": OffloadingCounterMetadata(text) for name, text in COUNTERS.items()}

    def get_stats(self) -> OffloadingConnectorStats | None:
        totals = self._shared.totals()
        stats = OffloadingConnectorStats()
        for name in COUNTERS:
            if (new := totals[name] - self._counted[name]) > 0:
                stats.increase_counter(f"vllm:semkv_{name}", new)
        self._counted = totals
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
    "lora_skipped": "Requests left alone because the weights of their LoRA adapter are not known for certain",
    "errors": "Faults of the disk or of the tier",
}
