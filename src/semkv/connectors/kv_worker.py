"""The worker half of the KV connector: loads before the forward pass, captures after it.

On a GPU both go on beside the engine: a load is a copy on a stream of its own that `KVWorker.finished` reports; a
capture is a gather on the engine's stream, a copy to host memory on another, and a file written in the background.
What must be read from the disk is read by threads into host memory, checked, before a load of it is promised
(`KVWorker.available`). On the CPU everything is done when the call returns.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from semkv.connectors.break_even import BreakEven
from semkv.connectors.counters import Counters
from semkv.connectors.host import PROCESS, allocate
from semkv.connectors.kv_keys import rank_namespace
from semkv.connectors.kv_plan import CapturePlan, KVStep, LoadPlan
from semkv.connectors.kv_transfer import Job, Landing, PagedTransfer
from semkv.connectors.settings import KVSettings
from semkv.connectors.writer import BackgroundWriter
from semkv.stores.blocks import KVStore
from semkv.stores.container import Bytes
from semkv.stores.extents import ExtentStore
from semkv.stores.host_memory import HostMemories
from semkv.stores.host_policy import until_from_now

log = logging.getLogger("semkv.connectors")

_READ_BYTES = 4 << 20  # of one read at least; larger where every thread has its share all the same
_MEASURED_TOKENS = 256  # a step of fewer says little about the rate of prefill
_IDLE_SECONDS = 1e-3  # how long an engine with nothing to compute waits for a copy in one step
_POLL_SECONDS = 2e-5  # meanwhile the reading threads get Python's lock


@dataclass(frozen=True, slots=True)
class _Read:
    """What a request loads, in host memory: rows and where they go, and the keys of the pool's rows among them."""

    request_id: str
    job: Job
    keys: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class _Load:
    """A load under way: what to wait for, which pool rows it uses, its bytes, and how many those are."""

    landing: Landing
    keys: Sequence[bytes]
    rows: Sequence[Bytes]
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Capture:
    """Blocks on their way out: hashes and pool keys in the order of the job's rows; see `CapturePlan`.

    ``generation``: of the store when they were captured.
    """

    job: Job
    hashes: list[bytes]
    keys: list[bytes]
    position: int
    owner: str
    generation: str


class KVWorker:
    """One rank's blocks. Called from the model runner's thread, and by the scheduler half in the same process."""

    def __init__(
        self,
        settings: KVSettings,
        extents: ExtentStore,
        transfer: PagedTransfer,
        *,
        engine: str,
        rank: int,
        memories: HostMemories = PROCESS,
    ) -> None:
        """Take host memory, and tell the scheduler how this rank's blocks look.

        Raises:
            ConfigError: the host memory cannot be had.
        """
        self.settings, self.transfer, self.counters = settings, transfer, Counters()
        self.gate = BreakEven()
        row_bytes = transfer.layout.row_bytes
        self.pool = memories.acquire(settings.cache_dir, settings.host_bytes, allocate, row_bytes)
        self._memories = memories
        self._extents, self._rank = extents, rank
        self._engine = engine
        self._holder = f"{engine}/{rank}/"  # engines that share a directory may count their requests alike
        self._stores: dict[str, KVStore] = {}
        self._landings = BackgroundWriter("semkv-kv-landings", 1 << 62, extents.counters)
        self._writer = BackgroundWriter("semkv-kv-writer", settings.queue_bytes, extents.counters)
        self._readers = ThreadPoolExecutor(settings.read_threads, "semkv-kv-reader")
        self._jobs = ThreadPoolExecutor(2, "semkv-kv-jobs")
        self._fetches: dict[str, Future[None]] = {}
        self._prefetches: dict[str, Future[None]] = {}
        self._lock = threading.Lock()
        self._loads: dict[str, _Load] = {}
        self._coming: dict[str, Future[None]] = {}
        self._failed_blocks: set[int] = set()
        self._poisoned_epoch = -1
        self._started: object = None
        self._prefills: list[tuple[int, Landing]] = []
        extents.put_layout(engine, rank, json.dumps(transfer.layout.document()))

    def _store(self, namespace: str) -> KVStore:
        """The store of the namespace the scheduler named; another one follows a reset."""
        if namespace not in self._stores:
            store = KVStore(self._extents, rank_namespace(namespace, self._rank), self.transfer.layout)
            self._stores = {namespace: store}
        return self._stores[namespace]

    def _keys(self, namespace: str, hashes: Sequence[bytes]) -> list[bytes]:
        """Keys of the pool: the engine's own, since what it disowns may lie in a pool that others use too.

        After a purge, or with the store off, they are other ones: nothing from before it is found.
        """
        prefix = f"{self._engine} {namespace} {self._extents.generation} ".encode()
        return [prefix + h for h in hashes]

    # ------------------------------------------------------------------ before a load is promised

    def available(self, request_id: str, namespace: str, hashes: Sequence[bytes]) -> int | None:
        """How many leading blocks are in host memory; None while more of them come from the disk.

        The first question starts the reading, where it is worth it.
        """
        fetch = self._fetches.get(request_id)
        if fetch is not None and not fetch.done():
            return None
        self._extents.renew()
        keys = self._keys(namespace, hashes)
        ready, store = self.pool.ready(keys), self._store(namespace)
        if ready < len(keys) and keys[ready] in self.pool:  # a capture, or another request's reading, brings it
            return None
        if self._fetches.pop(request_id, None) is not None:
            return ready
        stored = store.lookup(hashes[ready:], holder=self._holder + request_id) if ready < len(hashes) else 0
        if not self._worth(ready + stored, stored):
            self.counters.add("refused_loads")
            stored = 0
            if not self._worth(ready, 0):
                ready = 0
        self.counters.add("host_tokens", ready * self.transfer.layout.block_size)
        if not stored:
            return ready
        wanted = hashes[: ready + stored]
        if self.transfer.asynchronous:
            self._fetches[request_id] = self._jobs.submit(self._fetch, request_id, namespace, wanted)
            return None
        self._fetch(request_id, namespace, wanted)
        return self.pool.ready(keys)

    def _worth(self, blocks: int, from_disk: int) -> bool:
        layout = self.transfer.layout
        return (
            not self.settings.break_even
            or not blocks
            or self.gate.worth(blocks * layout.block_size, blocks * layout.row_bytes, from_disk * layout.row_bytes)
        )

    def holds(self, namespace: str, block_hash: bytes) -> bool:
        """Whether a block is in host memory, or on its way there."""
        return self._keys(namespace, [block_hash])[0] in self.pool

    def forget(self, request_id: str) -> None:
        """A request is over, whatever became of its questions."""
        self._fetches.pop(request_id, None)

    def _fetch(self, request_id: str, namespace: str, hashes: Sequence[bytes]) -> None:
        """Read what host memory lacks of ``hashes``; afterwards the rows that are good are in the pool."""
        start, store, keys = time.perf_counter(), self._store(namespace), self._keys(namespace, hashes)
        taken, runs = self.pool.reserve(keys)
        row_bytes = self.transfer.layout.row_bytes
        most = max(1, _READ_BYTES // row_bytes, len(taken) // (2 * self.settings.read_threads))
        parts: list[tuple[list[int], Bytes]] = []
        at = 0
        for run in runs:
            for first in range(0, run.count, most):
                rows = self.pool.view(run)[first : first + most]
                parts.append((taken[at : at + len(rows)], rows))
                at += len(rows)

        def read(part: tuple[list[int], Bytes]) -> tuple[int, float]:
            mine, rows = [hashes[i] for i in part[0]], part[1]
            ends = store.ends(mine)
            return len(store.read_rows(mine, rows)), ends

        # One part needs no other thread, and a worker of several threads may be called from one.
        good = map(read, parts) if len(parts) == 1 else self._readers.map(read, parts)
        done, sound = 0, True
        try:
            for (n, ends), (which, _) in zip(good, parts, strict=True):
                if sound:  # what follows a bad row is computed anew, and must not pass for stored
                    self.pool.publish((keys[i] for i in which[:n]), ends)
                    done, sound = done + n, n == len(which)
        finally:
            self.pool.release(keys[i] for i in taken)
            store.release(self._holder + request_id)
        self.counters.add("disk_tokens", done * self.transfer.layout.block_size)
        self.gate.disk.measured(done * self.transfer.layout.row_bytes, time.perf_counter() - start)

    # ------------------------------------------------------------------ before the forward pass

    def load(self, step: KVStep) -> None:
        """Start to put the planned blocks into the cache. What fails is kept for `take_failed_blocks`."""
        self._started = self.transfer.mark() if step.tokens >= _MEASURED_TOKENS else None
        after = self.transfer.mark() if step.loads else None
        self._extents.renew()
        here: list[_Read] = []
        for plan in step.loads:
            if not self.transfer.asynchronous or plan.rows is not None or self._all_here(step.namespace, plan):
                here.append(self._read(step, plan))
            else:  # another process promised it, or it was evicted since
                self._coming[plan.request_id] = self._jobs.submit(self._load_late, step, plan, after)
        self._copy_in(here, after)
        if self.transfer.asynchronous:
            self._prefetch(step)
        else:
            for read in here:
                self._settle(read.request_id)

    def _prefetch(self, step: KVStep) -> None:
        self._prefetches = {name: job for name, job in self._prefetches.items() if not job.done()}
        for plan in step.prefetches:
            if not self.holds(step.namespace, plan.block_hashes[-1]):
                job = self._jobs.submit(self._fetch, plan.request_id, step.namespace, plan.block_hashes)
                self._prefetches[plan.request_id] = job

    def _all_here(self, namespace: str, plan: LoadPlan) -> bool:
        return plan.request_id not in self._prefetches and self.holds(namespace, plan.block_hashes[-1])

    def _load_late(self, step: KVStep, plan: LoadPlan, after: Any) -> None:
        if (under_way := self._prefetches.get(plan.request_id)) is not None:  # submitted before, so it has begun
            wait([under_way])
        self._copy_in([self._read(step, plan)], after)

    def _read(self, step: KVStep, plan: LoadPlan) -> _Read:
        """The rows of a planned load; what host memory lacks is read from the disk."""
        keys = self._keys(step.namespace, plan.block_hashes)
        used: Sequence[bytes] = ()
        if plan.rows is not None:
            rows: list[Bytes] = [plan.rows]
        else:
            runs = self.pool.pin(keys)
            if sum(run.count for run in runs) < len(keys):
                self.pool.release(keys[: sum(run.count for run in runs)])
                self._fetch(plan.request_id, step.namespace, plan.block_hashes)
                runs = self.pool.pin(keys)
            rows = [self.pool.view(run) for run in runs]
            used = keys[: sum(map(len, rows))]
            if len(used) < len(keys):  # too much for the pool
                rows.append(self._store(step.namespace).read_rows(plan.block_hashes[len(used) :]))
        good = sum(map(len, rows))
        if good < len(plan.block_ids):
            log.warning("semkv: %d of %d blocks were gone", len(plan.block_ids) - good, len(plan.block_ids))
            with self._lock:
                self._failed_blocks.update(plan.block_ids[good:])
                self._poisoned_epoch = step.epoch
        plan.rows = None
        return _Read(plan.request_id, Job(rows, plan.block_ids[:good]), used)

    def _copy_in(self, reads: Sequence[_Read], after: Any) -> None:
        """Start one copy for all of them."""
        landings = iter(self.transfer.copy_in([read.job for read in reads if read.job.block_ids], after))
        row_bytes = self.transfer.layout.row_bytes
        with self._lock:
            for read in reads:
                count = len(read.job.block_ids)
                landing = next(landings) if count else Landing()
                self._loads[read.request_id] = _Load(landing, read.keys, read.job.rows, count * row_bytes)

    def _settle(self, request_id: str) -> None:
        load = self._loads.pop(request_id)
        self.pool.release(load.keys)
        self.gate.host.measured(load.nbytes, load.landing.seconds())

    def finished(self, step: KVStep | None) -> set[str]:
        """The requests whose loads are done; called once a step, after the forward pass was started."""
        until = time.perf_counter() + _IDLE_SECONDS
        idle = step is not None and not step.tokens
        while not (done := self._landed()) and idle and (self._loads or self._coming or self._fetches):
            if time.perf_counter() > until or any(fetch.done() for fetch in self._fetches.values()):
                break
            time.sleep(_POLL_SECONDS)
        for request_id in done:
            self._settle(request_id)
        return done

    def _landed(self) -> set[str]:
        for request_id, job in list(self._coming.items()):
            if job.done():
                del self._coming[request_id]
                job.result()
        return {r for r, load in list(self._loads.items()) if r not in self._coming and load.landing.done()}

    # ------------------------------------------------------------------ after the forward pass

    def capture(self, step: KVStep) -> None:
        """Copy the planned blocks out and queue them for the disk."""
        self._measure(step)
        if step.epoch <= self._poisoned_epoch:
            return
        captures = [c for plan in step.captures if (c := self._reserve(step.namespace, plan)) is not None]
        landings = self.transfer.copy_out([capture.job for capture in captures])
        for capture, landing in zip(captures, landings, strict=True):
            self._save(step.namespace, capture, landing)

    def _measure(self, step: KVStep) -> None:
        if self._started is not None:
            self._prefills.append((step.tokens, Landing(self._started, self.transfer.mark())))
            self._started = None
        while self._prefills and self._prefills[0][1].done():
            tokens, landing = self._prefills.pop(0)
            self.gate.prefill.measured(tokens, landing.seconds())

    def _reserve(self, namespace: str, plan: CapturePlan) -> _Capture | None:
        """Host memory for those planned blocks that are not there; None for none."""
        if not self._extents.on:
            self.counters.add("dropped", len(plan.block_hashes))
            return None
        generation, wanted = self._extents.generation, self._keys(namespace, plan.block_hashes)
        taken, runs = self.pool.reserve(wanted)
        there = sum(key in self.pool for key in wanted)
        if there < len(wanted):
            self.counters.add("dropped", len(wanted) - there)
        if not taken:
            return None
        job = Job([self.pool.view(run) for run in runs], [plan.block_ids[i] for i in taken])
        hashes, keys = [plan.block_hashes[i] for i in taken], [wanted[i] for i in taken]
        return _Capture(job, hashes, keys, plan.position, plan.owner, generation)

    def _save(self, namespace: str, capture: _Capture, landing: Landing) -> None:
        """Publish a capture when it has landed, and queue it for the disk."""
        store, keys, rows = self._store(namespace), capture.keys, capture.job.rows
        ends = until_from_now(self.settings.max_age_s)

        def save() -> None:
            try:
                store.save_rows(
                    capture.hashes,
                    *rows,
                    position=capture.position,
                    generation=capture.generation,
                    owner=capture.owner,
                )
            finally:
                self.pool.release(keys)

        def land() -> None:
            landing.wait()
            self.pool.publish(keys, ends)
            if self._extents.writable and self._writer.submit(save, len(keys) * self.transfer.layout.row_bytes):
                return
            self.pool.release(keys)
            self.counters.add("dropped", len(keys))

        if self.transfer.asynchronous:
            self._landings.submit(land, 0)
        else:
            land()

    # ------------------------------------------------------------------ what is asked for

    def take_failed_blocks(self) -> set[int]:
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_counters(self) -> dict[str, int]:
        self.counters.merge(self._extents.counters)
        self.counters.merge(self.pool.counters)
        return self.counters.take()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything captured is on disk and found by lookups."""
        return self._landings.flush(timeout) and self._writer.flush(timeout)

    def close(self) -> None:
        self._jobs.shutdown()
        self._readers.shutdown()
        self._landings.close()
        self._writer.close()
        self._extents.close()
        self._memories.release(self.pool)
