"""Where an engine's KV blocks are stored, or soon will be: one store per rank, under the namespace of now.

No vLLM, no torch.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from semkv.connectors.kv_keys import rank_namespace
from semkv.connectors.resets import namespace_after
from semkv.errors import CorruptValue
from semkv.stores.blocks import KVLayout, KVStore
from semkv.stores.extents import ExtentStore

log = logging.getLogger("semkv.connectors")


_OFFERED_SECONDS = 30.0  # after this a captured block that is still not stored is captured again
_OFFERED_MOST = 1 << 17


class LocalWorker(Protocol):
    """What the scheduler half asks the worker half where both are in one process (`kv_worker.KVWorker`)."""

    def available(self, request_id: str, namespace: str, hashes: Sequence[bytes]) -> int | None: ...

    def holds(self, namespace: str, block_hash: bytes) -> bool: ...

    def forget(self, request_id: str) -> None: ...


class Offered:
    """Blocks that workers were told to capture, and that are not known to be stored yet."""

    def __init__(self, extents: ExtentStore) -> None:
        self._extents, self._generation = extents, extents.generation
        self._since: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._since

    def add(self, hashes: Iterable[bytes]) -> None:
        now = time.monotonic()
        self._since.update((h, now) for h in hashes)

    def settle(self, hashes: Iterable[bytes]) -> None:
        """What became of these is known."""
        for h in hashes:
            self._since.pop(h, None)

    def clear(self) -> None:
        self._since.clear()

    def expire(self) -> bool:
        """Give up what waits for too long, or is too much; everything after a purge. Whether there was a purge."""
        before, self._generation = self._generation, self._extents.generation
        if purged := self._generation != before:
            self.clear()
        limit = time.monotonic() - _OFFERED_SECONDS
        while self._since and (len(self._since) > _OFFERED_MOST or next(iter(self._since.values())) < limit):
            self._since.popitem(last=False)
        return purged


class RankStores:
    """The stores of one engine, for its scheduler's thread.

    Attributes:
        offered: what is on its way there.
        worker: the worker half of this process, or None.
        world_size: how many ranks there are.
    """

    def __init__(
        self,
        extents: ExtentStore,
        namespace: Callable[[], str],
        engine: str,
        world_size: int,
        worker: Callable[[], LocalWorker | None],
    ) -> None:
        """``namespace`` is asked for once, when the first request comes."""
        self.offered, self.worker, self.world_size = Offered(extents), worker, world_size
        self._extents, self._make_namespace, self._engine = extents, namespace, engine
        self._namespace = ""
        self._stores: list[KVStore] = []

    @property
    def namespace(self) -> str:
        if not self._namespace:
            self._namespace = self._make_namespace()
        return self._namespace

    def all(self) -> list[KVStore]:
        """One store per rank, in order; empty until every worker has said how its blocks look."""
        if not self._stores and self._extents.on:
            layouts = self._extents.layouts(self._engine)
            if all(rank in layouts for rank in range(self.world_size)):
                try:
                    self._stores = [
                        KVStore(
                            self._extents,
                            rank_namespace(self.namespace, rank),
                            KVLayout.parse(json.loads(layouts[rank])),
                        )
                        for rank in range(self.world_size)
                    ]
                except (CorruptValue, ValueError) as error:
                    log.warning("semkv: a worker's layout cannot be read (%s)", error)
        return self._stores

    def row_bytes(self) -> int:
        """Of a block, in the rank where it takes most."""
        return max(store.layout.row_bytes for store in self.all())

    def lookup(self, request_id: str, hashes: Sequence[bytes]) -> int:
        """How many leading blocks are stored in every rank; held for the request until `release`."""
        return min(store.lookup(hashes, self._holder(request_id)) for store in self.all())

    def release(self, request_id: str) -> None:
        """A request is over: what was held for it may go."""
        if (worker := self.worker()) is not None:
            worker.forget(request_id)
        else:
            self._extents.release(self._holder(request_id))

    def _holder(self, request_id: str) -> str:
        return f"{self._engine}/{request_id}"  # engines that share a directory may count their requests alike

    def kept(self, hashes: Sequence[bytes]) -> set[int]:
        """Which of ``hashes`` are stored, or soon will be. The stores of several ranks are not asked."""
        worker = self.worker()

        def under_way(h: bytes) -> bool:
            return h in self.offered or (worker is not None and worker.holds(self.namespace, h))

        known = {i for i, h in enumerate(hashes) if under_way(h)}
        ask = [i for i in range(len(hashes)) if i not in known]
        for store in self.all() if ask and self.world_size == 1 else []:
            known |= {i for i, there in zip(ask, store.stored([hashes[i] for i in ask]), strict=True) if there}
        return known

    def reset(self) -> list[KVStore]:
        """Go on under a namespace that nobody else has; returns the stores of before."""
        before = self.all()
        self.offered.clear()
        self._namespace, self._stores = namespace_after(self.namespace), []
        return before
