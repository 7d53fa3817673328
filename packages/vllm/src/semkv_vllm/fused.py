"""All layers' keys and values moved to other tokens of the cache by one kernel; `semkv_vllm.moving.move` says what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from semkv_vllm.moving import Cells, Moves, Turn, UnknownLayoutError

_GROUP = 64  # that one program has in its registers
_WARPS = 8
_ALIGNED = 16  # bytes by which the kernel takes addresses to be divisible
_TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    caches,
    rows,
    firsts,
    cosines,
    sines,
    count,
    block_stride,
    head_stride,
    token_stride,
    kind: tl.constexpr,
    block: tl.constexpr,
    size: tl.constexpr,
    half: tl.constexpr,
    half_room: tl.constexpr,
    rest_room: tl.constexpr,
    neox: tl.constexpr,
    group: tl.constexpr,
):
    """One program moves the keys, or the values, of one head in one layer of one request.

    It goes from the last tokens to the first. A token moves on by less than a block, to where only later ones came
    from, and these have been read. Within a group of tokens all are read before the first is written.
    """
    request = tl.program_id(0)
    head = tl.program_id(1) // 2
    part = tl.program_id(1) % 2  # 0: keys
    cache = tl.load(caches + tl.program_id(2)).to(tl.pointer_type(kind))
    cache = tl.multiple_of(cache, 16)
    cache += head * head_stride + part * size
    first = tl.load(firsts + request)
    end = tl.load(firsts + request + 1)
    pairs = tl.arange(0, half_room)
    if neox:
        ones = pairs
        others = pairs + half
    else:
        ones = 2 * pairs
        others = 2 * pairs + 1
    rest = 2 * half + tl.arange(0, rest_room)
    while end > first:
        tokens = end - group + tl.arange(0, group)
        is_token = tokens >= first
        source = tl.load(rows + tokens, mask=is_token, other=0)
        target = tl.load(rows + count + tokens, mask=is_token, other=0)
        from_token = (source // block) * block_stride + (source % block) * token_stride
        to_token = (target // block) * block_stride + (target % block) * token_stride
        is_pair = is_token[:, None] & (pairs < half)[None, :]
        is_rest = is_token[:, None] & (rest < size)[None, :]
        one = tl.load(cache + from_token[:, None] + ones[None, :], mask=is_pair)
        other = tl.load(cache + from_token[:, None] + others[None, :], mask=is_pair)
        kept = tl.load(cache + from_token[:, None] + rest[None, :], mask=is_rest)
        if part == 0:
            angles = tokens[:, None] * half + pairs[None, :]
            cosine = tl.load(cosines + angles, mask=is_pair)
            sine = tl.load(sines + angles, mask=is_pair)
            wide_one = one.to(tl.float32)
            wide_other = other.to(tl.float32)
            one = (wide_one * cosine - wide_other * sine).to(kind)
            other = (wide_other * cosine + wide_one * sine).to(kind)
        tl.debug_barrier()
        tl.store(cache + to_token[:, None] + ones[None, :], one, mask=is_pair)
        tl.store(cache + to_token[:, None] + others[None, :], other, mask=is_pair)
        tl.store(cache + to_token[:, None] + rest[None, :], kept, mask=is_rest)
        end -= group


@dataclass
class _Group:
    """Layers of one rotary embedding and one shape; ``caches``: where each layer's cache begins."""

    rotary: Any
    cells: Cells
    cache: torch.Tensor
    caches: torch.Tensor


class Fused:
    """Moves tokens of all layers.

    Raises:
        UnknownLayoutError: a cache is of a type or in an order that the kernel does not know.
    """

    def __init__(self, cells: Sequence[Cells], rotaries: Sequence[Any]) -> None:
        groups: dict[Any, list[int]] = {}
        kept: dict[Any, tuple[Any, Cells, torch.Tensor]] = {}
        for own, rotary in zip(cells, rotaries, strict=True):
            cache = own.plain
            if cache is None or cache.stride(-1) != 1 or cache.dtype not in _TYPES:
                raise UnknownLayoutError("its KV cache has another layout")
            if cache.data_ptr() % _ALIGNED:
                raise UnknownLayoutError("its KV cache begins at an odd address")
            shape = (cache.stride(), cache.dtype, own.heads, own.size)
            groups.setdefault((id(rotary), shape), []).append(cache.data_ptr())
            kept[id(rotary), shape] = (rotary, own, cache)
        self._groups = [
            _Group(*kept[name], caches=torch.tensor(starts, device=cells[0].device))
            for name, starts in groups.items()
        ]

    def __call__(self, moves: Moves) -> None:
        for group in self._groups:
            self._move(group, moves)

    def _move(self, group: _Group, moves: Moves) -> None:
        slots = moves.slots.contiguous()
        turn = Turn(group.rotary, moves.source, moves.target)
        half = turn.size // 2
        size = group.cells.size
        requests = len(moves.firsts) - 1
        _move[requests, 2 * group.cells.heads, len(group.caches)](
            group.caches,
            slots,
            moves.firsts,
            turn.cos.contiguous(),
            turn.sin.contiguous(),
            slots.shape[1],
            *group.cache.stride()[:3],
            kind=_TYPES[group.cache.dtype],
            block=group.cells.block,
            size=size,
            half=half,
            half_room=triton.next_power_of_2(half),
            rest_room=triton.next_power_of_2(max(1, size - turn.size)),
            neox=turn.neox,
            group=_GROUP,
            num_warps=_WARPS,
        )
