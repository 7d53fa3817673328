"""Capture and injection of KV blocks by hand, for research on an in-process vLLM engine.

    llm = LLM(..., kv_transfer_config=KVTransferConfig(kv_connector="SemKVConnector", kv_role="kv_both"))
    adapter = KVAdapter(llm)
    output = llm.generate(prompt)[0]
    chunk = adapter.capture(output.request_id)          # KVChunk: block hashes and bytes

    llm.llm_engine.add_request("mine", prompt, params)
    adapter.inject("mine", chunk)                       # before the first step: its blocks are loaded, not computed

A capture reads what is stored for a request's blocks; an injection stores a chunk under the request's own hashes
before it starts. Nothing of this is in the way of other requests. Needs ``VLLM_ENABLE_V1_MULTIPROCESSING=0``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import make_offload_key

from semkv_stores.block_file import tenant_tag
from semkv_stores.errors import EngineError
from semkv_vllm.kv import SemKVConnector

log = logging.getLogger("semkv.connectors")

_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class KVChunk:
    """A prompt's leading KV blocks.

    Attributes:
        block_hashes: vLLM's hash of each block and its KV cache group; a hash covers all tokens before it.
        rows: the blocks' bytes, uint8 ``[n_blocks, row_bytes]``: of one block every layer, rank after rank.
        layout: what the bytes mean, as it stands in the head of the block files.
        namespace: digest of the model, its weights and all else that shapes the bytes.
    """

    block_hashes: tuple[bytes, ...]
    rows: npt.NDArray[np.uint8]
    layout: Mapping[str, Any]
    namespace: str

    @property
    def num_tokens(self) -> int:
        """Tokens the chunk covers, all of its blocks being full."""
        return (
            len(self.block_hashes)
            * int(self.layout["groups"][0][1])
            * int(self.layout["blocks_per_chunk"])
        )

    @property
    def tensors(self) -> dict[str, npt.NDArray[np.uint8]]:
        """By layer name the blocks' bytes, uint8 ``[n_blocks, layer bytes]``, keys and values together: views of
        ``rows``.

        Raises:
            ValueError: the model has several ranks; then a row is not one part a layer.
        """
        if self.layout["ranks"] != [1, 1]:
            raise ValueError("the rows of this model are not cut by layer")
        names = self.layout["groups"][0][2]
        size = (
            int(self.layout["bytes_per_block"]) * int(self.layout["blocks_per_chunk"]) // len(names)
        )
        return {name: self.rows[:, i * size : (i + 1) * size] for i, name in enumerate(names)}


class KVAdapter:
    """Reads and offers the KV blocks of one in-process engine's requests.

    Args:
        llm: a ``vllm.LLM`` whose KV connector is `SemKVConnector`.

    Raises:
        EngineError: the engine runs in another process, has another connector, several KV cache groups, or no
            directory that can be used.
    """

    def __init__(self, llm: Any) -> None:
        self._core: Any = getattr(llm.llm_engine.engine_core, "engine_core", None)
        connector = getattr(getattr(self._core, "scheduler", None), "connector", None)
        if not isinstance(connector, SemKVConnector):
            raise EngineError(
                "no SemKVConnector in this process: set VLLM_ENABLE_V1_MULTIPROCESSING=0 and "
                "kv_transfer_config=KVTransferConfig(kv_connector='SemKVConnector', kv_role='kv_both')"
            )
        self._connector = connector
        self._shared = connector.shared
        store = connector.shared.store
        groups = connector.scheduler.config.kv_group_configs
        if store is None or len(groups) != 1:
            raise EngineError(
                "capture and injection need a model with one KV cache group and a working store"
            )
        self._store = store
        self._group = groups[0]
        self._row_bytes = self._shared.row_bytes
        self._finished: dict[str, list[bytes]] = {}
        connector.on_finished = self._remember

    def _remember(self, request: Any) -> None:
        self._finished[request.request_id] = self._keys(request)
        if len(self._finished) > _REMEMBERED:
            del self._finished[next(iter(self._finished))]

    def _keys(self, request: Any) -> list[bytes]:
        each = self._group.hashes_per_chunk
        view = self._connector.by_content(request)
        if view is None:
            return []
        hashes = view.block_hashes[each - 1 :: each]
        return [make_offload_key(h, self._group.group_idx) for h in hashes]

    def _live(self, request_id: str) -> Any | None:
        requests = self._core.scheduler.requests
        return requests.get(request_name(request_id, requests))

    def capture(self, request_id: str) -> KVChunk | None:
        """The stored leading blocks of a request that runs, or finished since this adapter was made (the last 256).

        None when the request is unknown or its first block is not stored.
        """
        settle(self._core)
        live = self._live(request_id)
        namespace = self._shared.namespace()
        name = request_name(request_id, self._finished)
        keys = self._keys(live) if live is not None else self._finished.get(name, [])
        refs = [
            ref for ref in takewhile(bool, self._store.find(namespace, keys)) if ref is not None
        ]
        rows = np.empty((len(refs), self._row_bytes), np.uint8)
        good = self._store.read(self._shared.layout, namespace, keys[: len(refs)], refs, list(rows))
        count = sum(1 for _ in takewhile(bool, good))
        return (
            KVChunk(tuple(keys[:count]), rows[:count], self._shared.layout, namespace)
            if count
            else None
        )

    def refusal(self, request_id: str, chunk: KVChunk) -> str:
        """Why ``chunk`` may not be injected; empty where it is exactly what this request would compute itself, and it
        has not started yet.

        A block hash covers all tokens before it, the media items and the cache salt: equal hashes mean equal blocks.
        A chunk of another prompt is refused, since vLLM would keep it under this request's own hashes.
        """
        request = self._live(request_id)
        if request is None:
            return f"no live request {request_id}"
        if request.num_computed_tokens:
            return "the request has started"
        # The engine's hashes do not say which weights the adapter had.
        if request.lora_request is not None:
            return "the request has a LoRA adapter"
        if (chunk.layout, chunk.namespace) != (self._shared.layout, self._shared.namespace()):
            return "the chunk is of another model or layout, or of weights from before a reset"
        if tuple(self._keys(request)[: len(chunk.block_hashes)]) != chunk.block_hashes:
            return "the chunk's block hashes differ from the request's"
        return ""

    def inject(self, request_id: str, chunk: KVChunk) -> bool:
        """Have the request load ``chunk`` when it is scheduled; False, with the `refusal` logged, when it may not."""
        if reason := self.refusal(request_id, chunk):
            log.warning("semkv: not injected into %s: %s", request_id, reason)
            return False
        request = self._live(request_id)
        assert request is not None
        owner = tenant_tag(request.cache_salt)
        self._store.write(
            chunk.namespace, self._shared.layout, chunk.block_hashes, list(chunk.rows), owner=owner
        )
        return True


def settle(core: Any) -> None:
    """Let an in-process engine core step until its connector has no transfer under way.

    vLLM's own server does so by itself; `vllm.LLM` stops stepping with the last answer.
    """
    while core.scheduler.connector.has_pending_push_work():
        core.step()


def request_name(request_id: str, names: Collection[str]) -> str:
    """The one of ``names`` that vLLM made of the caller's id: it appends a random suffix; the newest match counts."""
    found = [name for name in names if name.rpartition("-")[0] == request_id]
    return found[-1] if found and request_id not in names else request_id
