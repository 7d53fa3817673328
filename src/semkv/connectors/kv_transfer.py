"""Copies between the engine's paged KV cache and rows on the host.

A block is opaque bytes. The cache tensors may be permuted views, so they are only ever indexed along dimension 0.

Rows travel through a staging tensor of fixed size, those of all requests of a step together: one copy for each run of
neighbouring rows, one ``index_copy_`` (or ``index_select``) a layer for each filling of the staging tensor. What a step
costs the processor so grows with its bytes, not with its requests. On a GPU copies run on streams of their own beside
the engine's; on the CPU the same calls are done when they return.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from semkv.errors import ConfigError
from semkv.stores.blocks import KVLayout, LayerLayout
from semkv.stores.container import Bytes

if TYPE_CHECKING:
    import torch

_SEGMENTS = 8  # parts of the staging tensor for captures: a part is free again as soon as it has been copied out
_HALVES = 2  # of the staging tensor for loads: one is filled over the bus while the other goes into the cache
_OUT, _BUS, _INSERT = range(3)  # the streams beside the engine's
_CPU_STAGING_BYTES = 32 << 20  # where staging saves nothing, and only must not be large


@dataclass(frozen=True, slots=True)
class Job:
    """Rows of one request: uint8 ``[n, row_bytes]`` in any number of pieces, and as many blocks of the engine's."""

    rows: Sequence[Bytes]
    block_ids: Sequence[int]


class Landing:
    """A copy under way, or done."""

    def __init__(self, start: Any = None, end: Any = None, share: float = 1.0) -> None:
        """``share``: of the time between the two events."""
        self._start, self._end, self._share = start, end, share

    def done(self) -> bool:
        return self._end is None or bool(self._end.query())

    def wait(self) -> None:
        """Return when the bytes are there; other threads go on."""
        if self._end is not None:
            self._end.synchronize()

    def seconds(self) -> float:
        """How long a finished copy took; 0 where the device does not say."""
        return self._start.elapsed_time(self._end) / 1e3 * self._share if self._start is not None else 0.0


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
            self._tensors.append(cache.unflatten(0, (num_blocks, ratio)))
        if not layers:
            raise ConfigError("KV cache layout", "no layers", "at least one layer with a KV cache")
        self.layout = KVLayout(tuple(layers), block_size, backend)
        self.device = self._tensors[0].device
        self.asynchronous = self.device.type == "cuda"
        self._tensors = _as_integers(self._tensors, self.layout)
        self._streams = [torch.cuda.Stream(self.device) for _ in range(3)] if self.asynchronous else None
        row = self.layout.row_bytes
        if not self.asynchronous:
            staging_bytes = min(staging_bytes, _CPU_STAGING_BYTES)
        # A quarter of the staging memory for loads, the rest for captures, which must not keep the engine waiting.
        self._segments = _SEGMENTS if self.asynchronous else 1
        self._segment = max(1, staging_bytes * 3 // 4 // self._segments // row)
        self._inward = max(1, staging_bytes // 4 // _HALVES // row)
        self._staging: dict[str, torch.Tensor] = {}
        self._copied_out: list[Any] = [None] * self._segments
        self._inserted: list[Any] = [None] * _HALVES
        self._turn = 0
        self._lock = threading.Lock()

    def _stage(self, name: str, rows: int) -> torch.Tensor:
        """A staging tensor, made when it is first needed: uint8 ``[rows, row_bytes]``."""
        import torch

        if name not in self._staging:
            shape = (rows, self.layout.row_bytes)
            self._staging[name] = torch.empty(shape, dtype=torch.uint8, device=self.device)
        return self._staging[name]

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        import torch

        ids = torch.as_tensor(block_ids, dtype=torch.int64)
        # From page-locked memory, or the copy would wait for what the engine computes.
        return ids.pin_memory().to(self.device, non_blocking=True) if self._streams else ids

    def _layers(self, staging: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's cache ``[num_blocks, ...]``, and its share of the staged rows in the same form."""
        start = 0
        for tensor, layer in zip(self._tensors, self.layout.layers, strict=True):
            share = staging[:, start : start + layer.nbytes].view(tensor.dtype)
            yield tensor, share.unflatten(1, tensor.shape[1:])
            start += layer.nbytes

    def gather(self, block_ids: Sequence[int]) -> Bytes:
        """Copy blocks to the host: uint8 ``[len(block_ids), row_bytes]``."""
        out = np.empty((len(block_ids), self.layout.row_bytes), np.uint8)
        if len(block_ids):
            self.copy_out([Job([out], block_ids)])[0].wait()
        return out

    def copy_out(self, jobs: Sequence[Job]) -> list[Landing]:
        """Start to copy blocks to the host; one landing for each job, of at least one row.

        What the engine has been asked to compute so far is waited for; what it is asked next may overwrite the blocks.
        """
        import torch

        compute = torch.cuda.current_stream(self.device) if self._streams else None
        ends = _Ends(jobs)
        with torch.inference_mode():
            staging = self._stage("out", self._segment * self._segments)
            for piece in _pieces(jobs, self._segment):
                first = self._turn * self._segment
                segment = staging[first : first + len(piece.block_ids)]
                if (busy := self._copied_out[self._turn]) is not None and compute is not None:
                    compute.wait_event(busy)
                index = self._index(piece.block_ids)
                for tensor, share in self._layers(segment):
                    share.copy_(tensor.index_select(0, index))
                event = None
                with self._beside(_OUT, compute) as stream:
                    for at, rows in _places(piece.rows):
                        torch.from_numpy(rows).copy_(segment[at : at + len(rows)], non_blocking=True)
                    if stream is not None:
                        event = torch.cuda.Event(blocking=True)
                        event.record(stream)
                self._copied_out[self._turn] = event
                self._turn = (self._turn + 1) % self._segments
                ends.reached(piece, None, event)
        return ends.landings

    def copy_in(self, jobs: Sequence[Job], after: Any = None) -> list[Landing]:
        """Start to copy rows into the engine's blocks; one landing for each job, of at least one row.

        The rows must stay until their job has landed.

        Args:
            jobs: of all requests of a step. Each lands as soon as its own rows are there.
            after: a `mark` to wait for, since the engine may still read what the blocks held before.
        """
        import torch

        ends, at = _Ends(jobs), 0
        with self._lock, torch.inference_mode():  # the engine's threads are in that mode, ours not
            with self._beside(_BUS, None) as stream:
                staging, start = self._stage("in", self._inward * _HALVES), self._event(stream)
                index = self._index([i for job in jobs for i in job.block_ids])
            if self._streams is not None:
                index.record_stream(self._streams[_INSERT])
            for number, piece in enumerate(_pieces(jobs, self._inward)):
                half, count = number % _HALVES, len(piece.block_ids)
                staged = staging[half * self._inward : half * self._inward + count]
                with self._beside(_BUS, self._inserted[half]) as stream:
                    for first, rows in _places(piece.rows):
                        staged[first : first + len(rows)].copy_(torch.from_numpy(rows), non_blocking=True)
                    filled = self._event(stream)
                with self._beside(_INSERT, after) as stream:
                    if stream is not None:
                        stream.wait_event(filled)
                    for tensor, share in self._layers(staged):
                        tensor.index_copy_(0, index[at : at + count], share)
                    self._inserted[half] = self._event(stream)
                ends.reached(piece, start, self._inserted[half])
                at += count
        return ends.landings

    @staticmethod
    def _event(stream: Any) -> Any:
        """The moment when a stream gets here; None on the CPU."""
        import torch

        if stream is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    @contextlib.contextmanager
    def _beside(self, number: int, after: Any) -> Iterator[Any]:
        """One of the streams beside the engine's, from ``after`` (a stream, an event or None) on; None on the CPU."""
        import torch

        if self._streams is None:
            yield None
            return
        stream = self._streams[number]
        with torch.cuda.stream(stream):
            if isinstance(after, torch.cuda.Stream):
                stream.wait_stream(after)
            elif after is not None:
                stream.wait_event(after)
            yield stream

    def mark(self) -> Any:
        """The moment when the engine's stream gets here, for `Landing`; None on the CPU."""
        import torch

        return self._event(torch.cuda.current_stream(self.device)) if self._streams else None


def _as_integers(tensors: Sequence[torch.Tensor], layout: KVLayout) -> list[torch.Tensor]:
    """The same memory as integers, so that all bits pass through untouched; of 8 bytes where the sizes allow that.

    Raises:
        ConfigError: a layer's elements straddle what the sizes of the layers allow.
    """
    import torch

    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    widest = math.gcd(8, *(layer.nbytes for layer in layout.layers))
    found: list[torch.Tensor] = []
    for tensor, layer in zip(tensors, layout.layers, strict=True):
        for width in sorted({widest, min(widest, tensor.element_size())}, reverse=True):
            with contextlib.suppress(RuntimeError):  # not with these strides
                found.append(tensor.view(integer[width]))
                break
        else:
            raise ConfigError("KV cache layout", layer.name, f"elements of {widest} bytes or contiguous ones")
    return found


class _Ends:
    """Which jobs have landed when a piece has: each when the piece with its last row has."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.landings: list[Landing] = []
        self._sizes = [len(job.block_ids) for job in jobs]
        self._copied = self._counted = 0

    def reached(self, piece: Job, start: Any, end: Any) -> None:
        self._copied += len(piece.block_ids)
        for size in self._sizes[len(self.landings) :]:
            if self._counted + size > self._copied:
                break
            self._counted += size
            self.landings.append(Landing(start, end, size / self._copied))


def _places(rows: Sequence[Bytes]) -> Iterator[tuple[int, Bytes]]:
    """Each part with the number of rows before it."""
    at = 0
    for part in rows:
        yield at, part
        at += len(part)


def _pieces(jobs: Sequence[Job], most: int) -> Iterator[Job]:
    """The jobs' rows in order, in pieces of ``most`` rows whatever request they belong to; the last may be shorter."""
    rows: list[Bytes] = []
    ids: list[int] = []
    for job in jobs:
        at = 0
        for part in job.rows:
            while len(part):
                taken, part = part[: most - len(ids)], part[most - len(ids) :]
                rows.append(taken)
                ids += job.block_ids[at : at + len(taken)]
                at += len(taken)
                if len(ids) == most:
                    yield Job(rows, ids)
                    rows, ids = [], []
    if ids:
        yield Job(rows, ids)
