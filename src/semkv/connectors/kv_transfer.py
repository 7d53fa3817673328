"""Copies between the engine's paged KV cache and rows on the host.

A block is opaque bytes. The cache tensors may be permuted views, so they are only ever indexed along dimension 0.

On a GPU rows travel through a staging tensor of fixed size: one copy over the bus, one ``index_copy_`` (or
``index_select``) a layer. Copies run on streams of their own beside the engine's. On the CPU the same calls are done
when they return.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from semkv.errors import ConfigError
from semkv.stores.blocks import KVLayout, LayerLayout
from semkv.stores.container import Bytes

if TYPE_CHECKING:
    import torch

_SEGMENTS = 8  # parts of the staging tensor for captures: a part is free again as soon as it has been copied out


class Landing:
    """A copy under way, or done."""

    def __init__(self, start: Any = None, end: Any = None) -> None:
        self._start, self._end = start, end

    def done(self) -> bool:
        return self._end is None or bool(self._end.query())

    def wait(self) -> None:
        """Return when the bytes are there; other threads go on."""
        if self._end is not None:
            self._end.synchronize()

    def seconds(self) -> float:
        """How long a finished copy took; 0 where the device does not say."""
        return self._start.elapsed_time(self._end) / 1e3 if self._start is not None else 0.0


class PagedTransfer:
    """The registered layers of one worker.

    A row is one block of every layer, layer after layer in `layout`'s order, each in the order of the tensor's
    dimensions whatever its strides.
    """

    def __init__(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        num_blocks: int,
        block_size: int,
        backend: str = "",
        staging_bytes: int = 256 << 20,
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
        self.asynchronous = self.device.type == "cuda"
        self._streams = [torch.cuda.Stream(self.device) for _ in range(2)] if self.asynchronous else None
        row = self.layout.row_bytes
        # A quarter of the staging memory for loads, the rest for captures, which must not keep the engine waiting.
        self._segment = max(1, staging_bytes * 3 // 4 // _SEGMENTS // row)
        self._inward = max(1, staging_bytes // 4 // row)
        self._staging: dict[str, torch.Tensor] = {}
        self._copied_out: list[Any] = [None] * _SEGMENTS
        self._turn = 0
        self._lock = threading.Lock()

    def host_memory(self, nbytes: int) -> Bytes:
        """Memory for a `HostPool`, uint8 ``[nbytes]``, page-locked where that makes copies faster."""
        import torch

        memory = np.empty(nbytes, np.uint8)
        if self._streams is not None and nbytes:
            result = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, nbytes, 0)
            if int(result) != 0:
                raise ConfigError("host_bytes", nbytes, "memory that can be page-locked")
        return memory

    def _stage(self, name: str, rows: int) -> torch.Tensor:
        """A staging tensor, made when it is first needed: uint8 ``[rows, row_bytes]``."""
        import torch

        if name not in self._staging:
            shape = (rows, self.layout.row_bytes)
            self._staging[name] = torch.empty(shape, dtype=torch.uint8, device=self.device)
        return self._staging[name]

    def _index(self, block_ids: Sequence[int]) -> dict[int, torch.Tensor]:
        """Where the blocks are in the layers, by the layers' rows per block."""
        import torch

        found = {}
        for ratio in {layer.shape[0] for layer in self.layout.layers}:
            ids = torch.as_tensor(block_ids, dtype=torch.int64)
            if ratio > 1:
                ids = (ids[:, None] * ratio + torch.arange(ratio)).reshape(-1)
            # From page-locked memory, or the copy would wait for what the engine computes.
            found[ratio] = ids.pin_memory().to(self.device, non_blocking=True) if self._streams else ids
        return found

    def _select(self, block_ids: Sequence[int], out: torch.Tensor) -> None:
        import torch

        index, start = self._index(block_ids), 0
        for tensor, layer in zip(self._tensors, self.layout.layers, strict=True):
            blocks = tensor.index_select(0, index[layer.shape[0]]).contiguous()
            out[:, start : start + layer.nbytes].copy_(blocks.view(-1).view(torch.uint8).view(len(block_ids), -1))
            start += layer.nbytes

    def _insert(self, staging: torch.Tensor, block_ids: Sequence[int]) -> None:
        index, start = self._index(block_ids), 0
        for tensor, layer in zip(self._tensors, self.layout.layers, strict=True):
            blocks = staging[:, start : start + layer.nbytes].contiguous().view(-1).view(tensor.dtype)
            where = index[layer.shape[0]]
            tensor.index_copy_(0, where, blocks.view(len(where), *layer.shape[1:]))
            start += layer.nbytes

    def gather(self, block_ids: Sequence[int]) -> Bytes:
        """Copy blocks to the host: uint8 ``[len(block_ids), row_bytes]``."""
        out = np.empty((len(block_ids), self.layout.row_bytes), np.uint8)
        self.copy_out(block_ids, [out]).wait()
        return out

    def copy_out(self, block_ids: Sequence[int], out: Sequence[Bytes]) -> Landing:
        """Start to copy blocks to the host, into the rows of ``out`` one after the other.

        What the engine has been asked to compute so far is waited for; what it is asked next may overwrite the blocks.
        """
        import torch

        if self._streams is None:
            at = 0
            for rows in out:
                self._select(block_ids[at : at + len(rows)], torch.from_numpy(rows))
                at += len(rows)
            return Landing()
        stream, compute = self._streams[0], torch.cuda.current_stream(self.device)
        staging = self._stage("out", self._segment * _SEGMENTS)
        for part in _pieces(out, self._segment):
            first = self._turn * self._segment
            if (busy := self._copied_out[self._turn]) is not None:
                compute.wait_event(busy)
            at = sum(len(rows) for _, rows in part)
            segment = staging[first : first + at]
            self._select(block_ids[part[0][0] : part[0][0] + at], segment)
            stream.wait_stream(compute)
            with torch.cuda.stream(stream):
                at = 0
                for _, rows in part:
                    torch.from_numpy(rows).copy_(segment[at : at + len(rows)], non_blocking=True)
                    at += len(rows)
                self._copied_out[self._turn] = torch.cuda.Event(blocking=True)
                self._copied_out[self._turn].record(stream)
            self._turn = (self._turn + 1) % _SEGMENTS
        return Landing(None, self._copied_out[self._turn - 1])

    def copy_in(self, rows: Sequence[Bytes], block_ids: Sequence[int], after: Any = None) -> Landing:
        """Start to copy rows into the engine's blocks, one after the other; the rows must stay until that is done.

        Args:
            rows: uint8 ``[n, row_bytes]`` each.
            block_ids: as many as there are rows.
            after: a `mark` to wait for, since the engine may still read what the blocks held before.
        """
        import torch

        if self._streams is None:
            at = 0
            for part in rows:
                self._insert(torch.from_numpy(part), block_ids[at : at + len(part)])
                at += len(part)
            return Landing()
        stream = self._streams[1]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self._lock, torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            start.record(stream)
            staging = self._stage("in", self._inward)
            for pieces in _pieces(rows, self._inward):
                at = 0
                for _, part in pieces:
                    staging[at : at + len(part)].copy_(torch.from_numpy(part), non_blocking=True)
                    at += len(part)
                self._insert(staging[:at], block_ids[pieces[0][0] : pieces[0][0] + at])
            end.record(stream)
        return Landing(start, end)

    def mark(self) -> Any:
        """The moment when the engine's stream gets here, for `Landing`; None on the CPU."""
        import torch

        if self._streams is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


def _pieces(rows: Sequence[Bytes], most: int) -> Iterator[list[tuple[int, Bytes]]]:
    """Groups of at most ``most`` rows in order; each part with the number of rows before it."""
    group: list[tuple[int, Bytes]] = []
    room, at = most, 0
    for part in rows:
        while len(part):
            taken, part = part[:room], part[room:]
            group.append((at, taken))
            at, room = at + len(taken), room - len(taken)
            if not room:
                yield group
                group, room = [], most
    if group:
        yield group
