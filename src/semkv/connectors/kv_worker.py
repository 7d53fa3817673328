"""The worker half of the KV connector: loads before the forward pass, captures after it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from semkv.connectors.counters import Counters
from semkv.connectors.kv_plan import KVStep
from semkv.connectors.kv_scheduler import rank_namespace
from semkv.connectors.kv_transfer import PagedTransfer
from semkv.connectors.settings import KVSettings
from semkv.connectors.writer import BackgroundWriter
from semkv.stores.blocks import KVStore
from semkv.stores.container import Bytes
from semkv.stores.extents import ExtentStore

log = logging.getLogger("semkv.connectors")


class KVWorker:
    """One rank's blocks. Runs in the model runner's thread; files are written in the background."""

    def __init__(
        self, settings: KVSettings, extents: ExtentStore, transfer: PagedTransfer, *, engine: str, rank: int
    ) -> None:
        self.settings, self.transfer, self.counters = settings, transfer, Counters()
        self._extents, self._rank = extents, rank
        self._stores: dict[str, KVStore] = {}
        self._writer = BackgroundWriter("semkv-kv-writer", settings.queue_bytes)
        self._failed_blocks: set[int] = set()
        self._poisoned_epoch = -1
        extents.put_layout(engine, rank, json.dumps(transfer.layout.document()))

    def _store(self, namespace: str) -> KVStore:
        """The store of the namespace the scheduler named; another one follows a reset."""
        if namespace not in self._stores:
            store = KVStore(self._extents, rank_namespace(namespace, self._rank), self.transfer.layout)
            self._stores = {namespace: store}
        return self._stores[namespace]

    def load(self, step: KVStep) -> None:
        """Put the planned blocks into the cache. What fails is kept for `take_failed_blocks`."""
        for plan in step.loads:
            rows = plan.rows
            if rows is None:
                rows = self._store(step.namespace).read_rows(plan.block_hashes)
            good = len(rows)
            if good:
                self.transfer.scatter(rows, plan.block_ids[:good])
            if good < len(plan.block_ids):
                log.warning("semkv: %d of %d blocks were gone", len(plan.block_ids) - good, len(plan.block_ids))
                self._failed_blocks.update(plan.block_ids[good:])
                self._poisoned_epoch = step.epoch
            plan.rows = None

    def capture(self, step: KVStep) -> None:
        """Copy the planned blocks out and queue them for the disk."""
        if step.epoch <= self._poisoned_epoch or not self._extents.writable:
            return
        for plan in step.captures:
            rows = self.transfer.gather(plan.block_ids)
            store, hashes, position = self._store(step.namespace), plan.block_hashes, plan.position

            def save(
                store: KVStore = store, hashes: Sequence[bytes] = hashes, rows: Bytes = rows, at: int = position
            ) -> None:
                store.save_rows(hashes, rows, position=at)

            if not self._writer.submit(save, rows.nbytes):
                self.counters.add("dropped", len(hashes))

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_counters(self) -> dict[str, int]:
        self.counters.merge(self._extents.counters)
        return self.counters.take()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything captured is on disk and found by lookups."""
        return self._writer.flush(timeout)

    def close(self) -> None:
        self._writer.close()
        self._extents.close()
