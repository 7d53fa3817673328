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
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from semkv.connectors.kv import SemKVConnector
from semkv.errors import EngineError
from semkv.stores.block_file import tenant_tag

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
        return len(self.block_hashes) * int(self.layout["groups"][0][1]) * int(self.layout["blocks_per_chunk"])

    @property
    def tensors(self) -> dict[str, npt.NDArray[np.uint8]]:
        """By layer name the blocks' bytes, uint8 ``[n_blocks, layer bytes]``, keys and values together: views of
        ``rows``.

        Raises:
            ValueError: the model has several KV cache groups or ranks; then a row is not one part a layer.
        """
        groups, ranks = self.layout["groups"], self.layout["ranks"]
        if len(groups) != 1 or ranks != [1, 1]:
            raise ValueError("the rows of this model are not cut by layer")
        names = groups[0][2]
        size = int(self.layout["bytes_per_block"]) * int(self.layout["blocks_per_chunk"]) // len(names)
        return {name: self.rows[:, i * size : (i + 1) * size] for i, name in enumerate(names)}


class KVAdapter:
    """Reads and offers the KV blocks of one in-process engine's requests."""

    def __init__(self, llm: Any) -> None:
        """Find the connector's scheduler half.

        Args:
            llm: a ``vllm.LLM`` whose KV connector is `SemKVConnector`.

        Raises:
            EngineError: the engine runs in another process, has another connector, several KV cache groups, or no
                directory that can be used.
        """
        self._core: Any = getattr(llm.llm_engine.engine_core, "engine_core", None)
        connector = getattr(getattr(self._core, "scheduler", None), "connector", None)
        if not isinstance(connector, SemKVConnector):
            raise EngineError(
                "no SemKVConnector in this process: set VLLM_ENABLE_V1_MULTIPROCESSING=0 and "
                "kv_transfer_config=KVTransferConfig(kv_connector='SemKVConnector', kv_role='kv_both')"
            )
        if connector.shared.store is None or len(connector.scheduler.config.kv_group_configs) != 1:
            raise EngineError("capture and injection need a model with one KV cache group and a working store")
        self._connector, self._group = connector, connector.scheduler.config.kv_group_configs[0]
        self._finished: OrderedDict[str, list[bytes]] = OrderedDict()
        connector.on_finished = self._remember

    def _remember(self, request: Any) -> None:
        self._finished[request.request_id] = self._keys(request)
        if len(self._finished) > _REMEMBERED:
            self._finished.popitem(last=False)

    def _keys(self, request: Any) -> list[bytes]:
        from vllm.v1.kv_offload.base import make_offload_key

        each = self._group.hashes_per_chunk
        return [make_offload_key(h, self._group.group_idx) for h in request.block_hashes[each - 1 :: each]]

    def capture(self, request_id: str) -> KVChunk | None:
        """The stored leading blocks of a request that runs, or finished since this adapter was made (the last 256).

        None when the request is unknown or its first block is not stored.
        """
        self.flush()
        live = self._live(request_id)
        name = request_name(request_id, self._finished)
        keys = self._keys(live) if live is not None else self._finished.get(name or "", [])
        shared = self._connector.shared
        assert shared.store is not None
        refs = []
        for ref in shared.store.find(shared.namespace(), keys):
            if ref is None:
                break
            refs.append(ref)
        keys = keys[: len(refs)]
        rows = np.empty((len(refs), self._connector.manager.primary_tier.get_kv_memoryview().shape[1]), np.uint8)
        good = shared.store.read(shared.layout, shared.namespace(), keys, refs, list(rows))
        count = good.index(False) if False in good else len(good)
        if not count:
            return None
        return KVChunk(tuple(keys[:count]), rows[:count], shared.layout, shared.namespace())

    def _live(self, request_id: str) -> Any | None:
        requests = self._core.scheduler.requests
        name = request_name(request_id, requests)
        return None if name is None else requests[name]

    def refusal(self, request_id: str, chunk: KVChunk) -> str:
        """Why ``chunk`` may not be injected; empty where it is exactly what this request would compute itself, and it
        has not started yet.

        A block hash covers all tokens before it, the media items and the cache salt: equal hashes mean equal blocks.
        A chunk of another prompt is refused, since vLLM would keep it under this request's own hashes.
        """
        request, shared = self._live(request_id), self._connector.shared
        if request is None:
            return f"no live request {request_id}"
        if request.num_computed_tokens:
            return "the request has started"
        if request.lora_request is not None:  # the engine's hashes do not say which weights the adapter had
            return "the request has a LoRA adapter"
        if chunk.layout != shared.layout:
            return "the chunk has another layout than this engine"
        if chunk.namespace != shared.namespace():
            return "the chunk is of another model, or of weights from before a reset"
        if tuple(self._keys(request)[: len(chunk.block_hashes)]) != chunk.block_hashes:
            return "the chunk's block hashes differ from the request's"
        return ""

    def inject(self, request_id: str, chunk: KVChunk) -> bool:
        """Have the request load ``chunk`` when it is scheduled; False, with the `refusal` logged, when it may not."""
        if reason := self.refusal(request_id, chunk):
            log.warning("semkv: not injected into %s: %s", request_id, reason)
            return False
        shared, request = self._connector.shared, self._live(request_id)
        assert shared.store is not None
        assert request is not None
        owner = tenant_tag(request.cache_salt)
        shared.store.write(chunk.namespace, shared.layout, chunk.block_hashes, list(chunk.rows), owner=owner)
        return True

    def flush(self) -> None:
        """Let the engine step until everything that its requests computed is on disk."""
        settle(self._core)


def settle(core: Any) -> None:
    """Let an in-process engine core step until its connector has no transfer under way.

    vLLM's own server does so by itself; `vllm.LLM` stops stepping with the last answer.
    """
    while core.scheduler.connector.has_pending_push_work():
        core.step()


def request_name(request_id: str, names: Collection[str]) -> str | None:
    """The one of ``names`` that vLLM made of the caller's id: it appends a random suffix; the newest match counts."""
    if request_id in names:
        return request_id
    found = [name for name in names if name.rpartition("-")[0] == request_id]
    return found[-1] if found else None
