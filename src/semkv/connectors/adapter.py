"""Capture and injection of KV blocks by hand, for research on an in-process vLLM engine.

    llm = LLM(..., kv_transfer_config=KVTransferConfig(kv_connector="SemKVConnector", kv_role="kv_both"))
    adapter = KVAdapter(llm)
    output = llm.generate(prompt)[0]
    chunk = adapter.capture(output.request_id)          # KVChunk: hashes, block ids, bytes per layer

    llm.llm_engine.add_request("mine", prompt, params)
    adapter.inject("mine", chunk)                       # before the first step: its blocks are loaded, not computed

Needs ``VLLM_ENABLE_V1_MULTIPROCESSING=0`` and one rank.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from semkv.connectors.kv_requests import vllm_id
from semkv.connectors.kv_scheduler import KVScheduler
from semkv.connectors.kv_worker import KVWorker
from semkv.errors import EngineError
from semkv.stores.blocks import KVChunk

log = logging.getLogger("semkv.connectors")


@dataclass(frozen=True, slots=True)
class InjectCheck:
    """Whether a chunk may be injected, and if not, why. True or false as a condition."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


class KVAdapter:
    """Reads and offers the KV blocks of one in-process engine's requests."""

    def __init__(self, llm: Any) -> None:
        """Find the connector's two halves.

        Args:
            llm: a ``vllm.LLM`` whose KV connector is `SemKVConnector`.

        Raises:
            EngineError: the engine runs in another process, has another connector, or several ranks.
        """
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        self._engine_scheduler = getattr(core, "scheduler", None)
        connector = getattr(self._engine_scheduler, "connector", None)
        scheduler = getattr(connector, "scheduler_half", None)
        worker = getattr(get_kv_transfer_group(), "worker_half", None) if has_kv_transfer_group() else None
        if not isinstance(scheduler, KVScheduler) or not isinstance(worker, KVWorker):
            raise EngineError(
                "no SemKVConnector in this process: set VLLM_ENABLE_V1_MULTIPROCESSING=0 and "
                "kv_transfer_config=KVTransferConfig(kv_connector='SemKVConnector', kv_role='kv_both')"
            )
        if len(scheduler.stores()) != 1:
            raise EngineError("capture and injection by hand need an engine of one rank with a working store")
        self._scheduler, self._worker = scheduler, worker

    def capture(self, request_id: str) -> KVChunk | None:
        """The full blocks of a request that runs or finished lately (the last 256), from the first on.

        They come from the engine's cache, and from the store where the engine has evicted them. None when the request
        is unknown or not one full block of it can be found.
        """
        hashes = self._scheduler.block_hashes(request_id)
        if not hashes:
            return None
        ids = self._engine_blocks(hashes)
        rows = self._worker.transfer.gather(ids)
        if len(ids) < len(hashes):
            stored = self._scheduler.stores()[0].read_rows(hashes[len(ids) :])
            rows = np.concatenate([rows, stored]) if len(stored) else rows
        if not len(rows):
            return None
        return KVChunk.from_rows(
            rows,
            hashes[: len(rows)],
            self._worker.transfer.layout,
            block_ids=ids if len(ids) == len(rows) else None,
            namespace=self._namespace(),
        )

    def _namespace(self) -> str:
        stores = self._scheduler.stores()
        return stores[0].namespace if stores else ""

    def _engine_blocks(self, hashes: list[bytes]) -> list[int]:
        """Where the engine holds the longest leading run of ``hashes``."""
        assert self._engine_scheduler is not None
        pool = self._engine_scheduler.kv_cache_manager.block_pool
        ids: list[int] = []
        for h in hashes:
            blocks = pool.get_cached_block(h, [0])
            if not blocks or not self._scheduler.fresh.cover((int(blocks[0].block_id),)):
                break
            ids.append(int(blocks[0].block_id))
        return ids

    def _request(self, request_id: str) -> Any | None:
        assert self._engine_scheduler is not None
        requests = self._engine_scheduler.requests
        name = vllm_id(request_id, requests)
        return None if name is None else requests[name]

    def can_inject(self, request_id: str, chunk: KVChunk) -> InjectCheck:
        """Whether ``chunk`` is exactly what this request would compute itself, and it has not started yet.

        A block hash covers all tokens before it, the media items and the cache salt: equal hashes mean equal blocks.
        A chunk of another prompt is refused, since vLLM would keep it under this request's own hashes.
        """
        request = self._request(request_id)
        if request is None:
            return InjectCheck(False, f"no live request {request_id}")
        if request.num_computed_tokens:
            return InjectCheck(False, "the request has started")
        if request.lora_request is not None:  # the engine's hashes do not say which weights the adapter had
            return InjectCheck(False, "the request has a LoRA adapter")
        if chunk.layout != self._worker.transfer.layout:
            return InjectCheck(False, "the chunk has another layout than this engine")
        if chunk.namespace not in ("", self._namespace()):
            return InjectCheck(False, "the chunk is of another model, or of weights from before a reset")
        own = tuple(bytes(h) for h in request.block_hashes[chunk.position :][: len(chunk.block_hashes)])
        if own != chunk.block_hashes:
            return InjectCheck(False, "the chunk's block hashes differ from the request's")
        return InjectCheck(True)

    def inject(self, request_id: str, chunk: KVChunk) -> bool:
        """Have the request load ``chunk`` when it is scheduled; False, with the reason logged, when it may not."""
        check = self.can_inject(request_id, chunk)
        if not check:
            log.warning("semkv: not injected into %s: %s", request_id, check.reason)
            return False
        self._scheduler.inject(self._request(request_id).request_id, chunk)  # type: ignore[union-attr]
        return True

    def flush(self) -> None:
        """Wait until everything captured is on disk."""
        self._worker.flush()
