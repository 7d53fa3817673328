"""Where an engine's KV blocks lie: one store per rank, under the namespace of now. No vLLM, no torch."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from semkv.connectors.resets import namespace_after
from semkv.errors import CorruptValue
from semkv.keys import digest
from semkv.stores.blocks import KVLayout, KVStore
from semkv.stores.extents import ExtentStore

log = logging.getLogger("semkv.connectors")


def rank_namespace(namespace: str, rank: int) -> str:
    """The namespace of one rank's blocks."""
    return digest("rank", namespace, str(rank))


def keyed(hashes: Sequence[bytes], adapter: str) -> list[bytes]:
    """The engine's block hashes as keys of the store, apart for each LoRA adapter's weights."""
    if not adapter:
        return [bytes(h) for h in hashes]
    return [hashlib.sha256(adapter.encode() + h).digest() for h in hashes]


class LocalWorker(Protocol):
    """What the scheduler half asks the worker half where both are in one process (`kv_worker.KVWorker`)."""

    def available(self, request_id: str, namespace: str, hashes: Sequence[bytes]) -> int | None: ...

    def holds(self, namespace: str, block_hash: bytes) -> bool: ...

    def forget(self, request_id: str) -> None: ...


class RankStores:
    """The stores of one engine, for its scheduler's thread.

    Attributes:
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
        self.worker, self.world_size = worker, world_size
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
        """Which of ``hashes`` are in host memory, on their way there, or stored. Several ranks ask nobody."""
        worker = self.worker()
        known = {i for i, h in enumerate(hashes) if worker is not None and worker.holds(self.namespace, h)}
        ask = [i for i in range(len(hashes)) if i not in known]
        for store in self.all() if ask and self.world_size == 1 else []:
            known |= {i for i, there in zip(ask, store.stored([hashes[i] for i in ask]), strict=True) if there}
        return known

    def reset(self) -> list[KVStore]:
        """Go on under a namespace that nobody else has; returns the stores of before."""
        before = self.all()
        self._namespace, self._stores = namespace_after(self.namespace), []
        return before
