"""Copies between the engine's paged KV cache and rows on the host.

A block is opaque bytes. The cache tensors may be permuted views, so they are only ever indexed along dimension 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from semkv.errors import ConfigError
from semkv.stores.blocks import KVLayout, LayerLayout
from semkv.stores.container import Bytes

if TYPE_CHECKING:
    import torch

STAGING_BLOCKS = 256
"""Blocks copied at a time: bounds the staging tensor, at no measurable cost."""


class PagedTransfer:
    """The registered layers of one worker.

    A row is one block of every layer, layer after layer in `layout`'s order, each in the order of the tensor's
    dimensions whatever its strides.
    """

    def __init__(
        self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int, block_size: int, backend: str = ""
    ) -> None:
        """Take the tensors vLLM registers.

        Raises:
            ConfigError: a cache is no tensor with the blocks in dimension 0.
        """
        import torch

        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        self._tensors: list[torch.Tensor] = []
        layers: list[LayerLayout] = []
        seen: set[tuple[Any, ...]] = set()
        for name in sorted(kv_caches):
            cache = kv_caches[name]
            if not isinstance(cache, torch.Tensor) or cache.shape[0] == 0 or cache.shape[0] % num_blocks:
                raise ConfigError("KV cache layout", name, f"a tensor with {num_blocks} blocks in dimension 0")
            where = (cache.data_ptr(), tuple(cache.shape), cache.stride())
            if where in seen:  # layers that share one cache
                continue
            seen.add(where)
            # Kernels may use blocks smaller than the scheduler's: then a block is a run of rows.
            ratio = cache.shape[0] // num_blocks
            shape, strides = (ratio, *cache.shape[1:]), tuple(cache.stride())
            nbytes = ratio * cache[0].numel() * cache.element_size()
            layers.append(LayerLayout(name, str(cache.dtype).removeprefix("torch."), shape, strides, nbytes))
            # Integers of the same size: the bits pass through untouched, for fp8 too.
            self._tensors.append(cache.view(integer[cache.element_size()]))
        if not layers:
            raise ConfigError("KV cache layout", "no layers", "at least one layer with a KV cache")
        self.layout = KVLayout(tuple(layers), block_size, backend)
        self.device = self._tensors[0].device

    def _index(self, block_ids: Sequence[int], ratio: int) -> torch.Tensor:
        import torch

        ids = torch.as_tensor(block_ids, dtype=torch.int64)
        if ratio > 1:
            ids = (ids[:, None] * ratio + torch.arange(ratio)).reshape(-1)
        return ids.to(self.device)

    def gather(self, block_ids: Sequence[int]) -> Bytes:
        """Copy blocks to the host: uint8 ``[len(block_ids), row_bytes]``. Returns when the copy is done."""
        import numpy as np
        import torch

        out = np.empty((len(block_ids), self.layout.row_bytes), np.uint8)
        for first in range(0, len(block_ids), STAGING_BLOCKS):
            part = block_ids[first : first + STAGING_BLOCKS]
            staging = torch.empty((len(part), self.layout.row_bytes), dtype=torch.uint8, device=self.device)
            start = 0
            for tensor, layer in zip(self._tensors, self.layout.layers, strict=True):
                blocks = tensor.index_select(0, self._index(part, layer.shape[0])).contiguous()
                staging[:, start : start + layer.nbytes].copy_(blocks.view(-1).view(torch.uint8).view(len(part), -1))
                start += layer.nbytes
            torch.from_numpy(out[first : first + len(part)]).copy_(staging)
        return out

    def scatter(self, rows: Bytes, block_ids: Sequence[int]) -> None:
        """Copy rows (uint8 ``[len(block_ids), row_bytes]``) into the engine's blocks, on the current stream."""
        import torch

        for first in range(0, len(block_ids), STAGING_BLOCKS):
            part = block_ids[first : first + STAGING_BLOCKS]
            staging = torch.from_numpy(rows[first : first + len(part)]).to(self.device)
            start = 0
            for tensor, layer in zip(self._tensors, self.layout.layers, strict=True):
                blocks = staging[:, start : start + layer.nbytes].contiguous().view(-1).view(tensor.dtype)
                index = self._index(part, layer.shape[0])
                tensor.index_copy_(0, index, blocks.view(len(index), *layer.shape[1:]))
                start += layer.nbytes
