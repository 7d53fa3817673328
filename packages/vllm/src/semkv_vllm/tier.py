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

from semkv_stores.block_file import PAGE
from semkv_stores.block_index import BlockRef
from semkv_vllm import private
from semkv_vllm.disk_process import DiskProcess, FileDone, HostShape
from semkv_vllm.shared import KVShared, facts_of, ours

log = logging.getLogger("semkv.connectors")

FILE_BYTES = 64 << 20
"""Rows of one block file: large enough for the disk's full rate, and small enough to be evicted alone."""

_QUEUE_SHARE = 4  # of host memory a quarter may wait for the disk; what comes on top is not written, and counted
_MOST = 512  # keys asked for at once, and blocks of one file
_HUNG_S = 600.0  # how long a file is left alone after a read of it was given up
# With KV events: once a second a thirtieth of the reported blocks is looked up in the index.
_LOOK_S = 1.0
_LOOKS = 30


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
    """A job of vLLM's, cut into files that are copied side by side; ``parts`` of them are under way. ``places``: of a
    load, whether files are in the directory, in the bucket, or both."""

    job: TransferJob
    namespace: str
    waiting_bytes: int = 0
    parts: int = 0
    good: list[bytes] = field(default_factory=list)
    places: set[bool] = field(default_factory=set)
    started: float = field(default_factory=time.perf_counter)


@dataclass
class _Part:
    """What of a transfer is in one file; ``file`` is empty where it is written."""

    transfer: _Transfer
    keys: list[bytes]
    file: str


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
        self.shared: KVShared = offloading_spec.extra_config["semkv"]
        rows, stride = primary_kv_view.shape or (0, 0)
        self._row_bytes = stride - PAGE if self.shared.settings.sealed else stride
        self.shared.row_bytes = self._row_bytes
        self._queue_bytes = primary_kv_view.nbytes // _QUEUE_SHARE
        self._most_promised = max(1, rows // 2)
        self._tokens = {
            group.group_id: group.tokens_per_block for group in offloading_spec.config.groups
        }
        self._disk: DiskProcess | None = None
        if self.shared.store is not None:
            shape = HostShape(rows=rows, stride=stride, row_bytes=self._row_bytes)
            memory = private.descriptor(offloading_spec)
            bucket = self.shared.settings.follower()
            self._disk = DiskProcess(memory, shape, self.shared.store, bucket)
        self._parts: dict[int, _Part] = {}  # by the number of the disk's job
        # Files whose reads were given up, and until when they are not read again.
        self._hung = dict[str, float]()
        self._away_until = 0.0  # until when nothing is read from the bucket
        self._waiting_bytes = 0
        self._finished: deque[JobResult] = deque()
        self._counted = dict[str, int]()
        self._tells: bool = offloading_spec.kv_events_config.enable_kv_cache_events
        # Namespaces of blocks that vLLM knows to be on disk; looked at longest ago first.
        self._told = dict[bytes, str]()
        self._events = list[OffloadingEvent]()
        self._looked = 0.0

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        return LookupResult.HIT if self._has(key, req_context) else LookupResult.MISS

    @ours("a lookup", otherwise=False)
    def _has(self, key: bytes, context: Any) -> bool:
        lookups = context.get_state(_Lookups)
        if lookups is None or lookups.stamp is not self.shared.stamp:
            promised = 0 if lookups is None else lookups.promised
            lookups = _Lookups(self.shared.stamp, promised=promised)
            context.set_state(lookups)
        if key not in lookups.refs:
            self._look_up(key, context, lookups)
        ref = lookups.refs[key]
        if ref is None or lookups.refused or not self._may_read(ref):
            return False
        # What does not fit into host memory at once would push itself out there for ever.
        if lookups.promised >= self._most_promised:
            return False
        lookups.promised += 1
        return True

    def _may_read(self, ref: BlockRef) -> bool:
        """Not where a read of the file was given up a short while ago, or the bucket did not answer: another one would
        hold up everybody again."""
        now = time.monotonic()
        away = not ref.here and now < self._away_until
        return not away and self._hung.get(ref.file, 0.0) <= now

    def _look_up(self, key: bytes, context: Any, lookups: _Lookups) -> None:
        """Ask the index for ``key``; where it is found, for the keys of its group that follow too."""
        store = self.shared.store
        if store is None:
            lookups.refs[key] = None
            return
        namespace = self._namespace(context)
        (ref,) = store.find(namespace, [key])
        lookups.refs[key] = ref
        if ref is None:
            return
        places = private.key_positions(context)
        at, group = places.get(key, 0), key[-4:]
        rest = (
            k
            for k, place in places.items()
            if place > at and k[-4:] == group and k not in lookups.refs
        )
        more = list(itertools.islice(rest, _MOST))
        lookups.refs.update(zip(more, store.find(namespace, more), strict=True))
        if self.shared.gate is not None and not lookups.judged:
            lookups.judged = True
            run = [key, *itertools.takewhile(lambda k: lookups.refs[k] is not None, more)]
            tokens = places.get(run[-1], 0) - at + self._tokens.get(int.from_bytes(group, "big"), 0)
            far = sum(not found.here for k in run if (found := lookups.refs[k]) is not None)
            far_bytes = far * self._row_bytes
            nbytes = len(run) * self._row_bytes - far_bytes
            lookups.refused = not self.shared.gate.worth(tokens, nbytes, far_bytes)
            self.shared.counters["refused_loads"] += lookups.refused

    def _namespace(self, context: Any) -> str:
        return self.shared.namespace(facts_of(context).adapter)

    def submit_store(self, job_metadata: TransferJob) -> None:
        if not self._take(job_metadata):
            self._finished.append(JobResult(job_metadata.job_id, True))

    @ours("a store", otherwise=False)
    def _take(self, job: TransferJob) -> bool:
        """Hand a store to the disk, file by file; False where nothing can be written now."""
        store = self.shared.store
        keys = list(job.keys)
        nbytes = len(job.keys) * self._row_bytes
        full = self._waiting_bytes > 0 and self._waiting_bytes + nbytes > self._queue_bytes
        if self._disk is None or store is None or full or not store.writable:
            self.shared.counters["dropped"] += len(keys)
            return False
        most_bytes = min(FILE_BYTES, self.shared.settings.tenant_bytes // 4 or FILE_BYTES)
        each = min(max(1, most_bytes // self._row_bytes), _MOST)
        owner = facts_of(job.req_context).owner
        parts = [slice(i, i + each) for i in range(0, len(keys), each)]
        transfer = _Transfer(job, self._namespace(job.req_context), nbytes)
        for part in parts:
            chunks = [int(chunk) for chunk in job.chunk_ids[part]]
            self._hand_over(
                transfer, keys[part], chunks=chunks, owner=owner, since=self.shared.heard
            )
        if transfer.parts:
            self._waiting_bytes += nbytes
        return transfer.parts > 0

    @ours("a job for the disk")
    def _hand_over(self, transfer: _Transfer, keys: list[bytes], **job: Any) -> None:
        """Give a part of a transfer to the disk. Where that fails, nothing comes of this part."""
        assert self._disk is not None
        about = {"namespace": transfer.namespace, "layout": self.shared.layout}
        number = self._disk.submit(keys=keys, **about, **job)
        self._parts[number] = _Part(transfer, keys, job.get("file", ""))
        transfer.parts += 1

    def submit_load(self, job_metadata: TransferJob) -> None:
        if not self._bring(job_metadata):
            self._end(_Transfer(job_metadata, ""))

    @ours("a load", otherwise=False)
    def _bring(self, job: TransferJob) -> bool:
        """Ask the disk for a load, file by file; False where nothing can be read."""
        lookups = job.req_context.get_state(_Lookups)
        files = dict[tuple[str, str, bool], list[tuple[int, bytes, int]]]()
        if lookups is None or lookups.stamp is not self.shared.stamp:
            return False
        for key, chunk in zip(job.keys, job.chunk_ids, strict=True):
            if (ref := lookups.refs.get(key)) is not None:
                place = (ref.file, ref.owner, ref.here)
                files.setdefault(place, []).append((ref.row, key, int(chunk)))
                self.shared.records[key] = (ref.owner, ref.created)
        if self._disk is None or not files:
            return False
        transfer = _Transfer(job, self._namespace(job.req_context))
        transfer.places = {here for _, _, here in files}
        for (file, owner, here), part in files.items():
            part.sort()
            self._hand_over(
                transfer,
                [key for _, key, _ in part],
                chunks=[chunk for _, _, chunk in part],
                file=file,
                owner=owner,
                places=[place for place, _, _ in part],
                since=self.shared.heard,
                far=not here,
            )
        return transfer.parts > 0

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._collect()
        return [self._finished.popleft() for _ in range(len(self._finished))]

    @ours("a result of the disk's")
    def _collect(self) -> None:
        if self._parts and self._disk is not None:
            for done in self._disk.finished():
                self._part_done(done)

    @ours("a result of the disk's")
    def _part_done(self, done: FileDone) -> None:
        part = self._parts.pop(done.number, None)
        if part is None:
            return
        transfer = part.transfer
        good = list(itertools.compress(part.keys, done.good))
        transfer.good += good
        transfer.parts -= 1
        if transfer.parts == 0:
            self._end(transfer)
        self.shared.counters.update(done.counters)  # from here on a fault costs no request
        if done.hung and part.file:
            self._hung[part.file] = time.monotonic() + _HUNG_S
        if done.away_s:
            self._away_until = time.monotonic() + done.away_s
        if not self._tells:
            return
        if new := [key for key in good if self._told.get(key) != transfer.namespace]:
            self._told.update(dict.fromkeys(new, transfer.namespace))
            self._tell(new, removed=False)

    def _end(self, transfer: _Transfer) -> None:
        """All of a job is done. What did not come of a load is a miss from now on, or the request would ask for it for
        ever."""
        job = transfer.job
        keys = transfer.good
        success = True
        seconds = time.perf_counter() - transfer.started
        nbytes = len(keys) * self._row_bytes
        self._waiting_bytes -= transfer.waiting_bytes
        if job.is_promotion:
            success = len(keys) == len(job.keys)
            if (lookups := job.req_context.get_state(_Lookups)) is not None:
                lookups.refs.update(dict.fromkeys(set(job.keys).difference(keys)))
            self._measured(nbytes, seconds, transfer.places)
        self._finished.append(JobResult(job.job_id, success, keys, seconds, nbytes))

    @ours("a measurement")
    def _measured(self, nbytes: int, seconds: float, places: set[bool]) -> None:
        """Of a load from both the disk and the bucket nothing is learnt."""
        gate = self.shared.gate
        if gate is None or len(places) != 1:
            return
        pace = gate.disk if True in places else gate.bucket
        pace.measured(nbytes, seconds)

    def drain_jobs(self) -> None:
        for done in self._disk.drain() if self._disk is not None else ():
            self._part_done(done)

    def shutdown(self) -> None:
        """Let the disk write what waits, and let go of vLLM's memory before vLLM closes it."""
        if self._disk is not None:
            self._disk.close()
        self._primary_kv_view = None

    # ------------------------------------------------------------------ events and metrics

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Blocks that this engine wrote or read on disk, and those of them that any process has deleted since."""
        if self._told and time.monotonic() - self._looked > _LOOK_S:
            self._look()
        events = self._events
        self._events = []
        return events

    @ours("an event")
    def _look(self) -> None:
        """Ask the index whether the next blocks are still there."""
        self._looked = time.monotonic()
        store = self.shared.store
        # While it cannot be read, nothing is known to be gone.
        if store is None or not store.last_purge():
            return
        namespace = next(iter(self._told.values()))
        count = min(_MOST, len(self._told) // _LOOKS + 1)
        keys = list(
            itertools.islice((key for key, own in self._told.items() if own == namespace), count)
        )
        there = [ref is not None for ref in store.find(namespace, keys)]
        for key, is_there in zip(keys, there, strict=True):
            del self._told[key]
            if is_there:
                self._told[key] = namespace
        if gone := [key for key in keys if key not in self._told]:
            self._tell(gone, removed=True)

    def _tell(self, keys: list[Any], *, removed: bool) -> None:
        self._events.append(
            OffloadingEvent(keys, self.medium, removed=removed, locality=self.locality)
        )

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return {
            f"vllm:semkv_{name}": OffloadingCounterMetadata(text) for name, text in COUNTERS.items()
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        stats = OffloadingConnectorStats()
        self._count(stats)
        return None if stats.is_empty() else stats

    @ours("counting")
    def _count(self, stats: OffloadingConnectorStats) -> None:
        counters = dict(self.shared.counters)
        for name in COUNTERS if counters != self._counted else ():
            if (new := counters.get(name, 0) - self._counted.get(name, 0)) > 0:
                stats.increase_counter(f"vllm:semkv_{name}", new)
        self._counted = counters


COUNTERS = {
    "stored_blocks": "KV blocks written to disk",
    "stored_bytes": "Bytes of KV block files written",
    "read_blocks": "KV blocks read from disk and checked",
    "corrupt": "KV block files that failed a check and were deleted",
    "missing": "KV block files that had vanished",
    "dropped": "KV blocks not written because the disk was behind",
    "rejected": "KV block files larger than the bounds of the store",
    "bucket_stored_blocks": "KV blocks put into the bucket",
    "bucket_read_blocks": "KV blocks read from the bucket and checked",
    "bucket_errors": "Times that the bucket did not do what it was asked for",
    "evicted_blocks": "KV blocks evicted from disk",
    "purged_blocks": "KV blocks taken out of host memory by a purge or for their age",
    "kept_blocks": "KV blocks kept in host memory for a conversation",
    "unkept_blocks": "KV blocks not kept, since the tenant's budget for conversations was used up",
    "tenant_evicted_blocks": "KV blocks that tenants at their bound gave up in host memory",
    "unsealed_blocks": "KV blocks from other tiers of vLLM's that failed their check",
    "spoiled_blocks": "KV blocks not kept because another connector's load had failed",
    "refused_loads": "Requests computed because that was faster than the disk",
    "lora_skipped": "Requests not cached because the weights of their LoRA adapter are not known for certain",
    "document_tokens": "Prompt tokens of documents that were reused at another position",
    "document_rows": "Prompt tokens that were computed again beside these, outside of the steps' budget",
    "document_mismatches": "Live checks of reused documents that failed",
    "errors": "Faults of the disk or of the tier",
}
