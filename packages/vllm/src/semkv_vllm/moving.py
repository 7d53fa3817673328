"""Moving a layer's keys and values to other tokens of its cache, with the keys rotated to their new positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_DIGITS = 4  # of base 64 in the number of a place
_BITS = 6  # 63 is exact in every type of float


@dataclass(frozen=True)
class Slots:
    """Tokens of a cache, each by its block and its place in it."""

    blocks: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, numbers: torch.Tensor, block: int) -> Slots:
        """By vLLM's numbers of slots."""
        return cls(blocks=numbers // block, places=numbers % block)


class UnknownLayoutError(Exception):
    """A cache is written in a way that cannot be read back."""


class Cells:
    """The cache of one attention layer, by token.

    Where a backend puts a number is found once, by having it write numbers: vLLM's CPU kernels pack keys in tiles.
    """

    def __init__(self, layer: Any, cache: torch.Tensor) -> None:
        """
        Raises:
            UnknownLayoutError: the backend loses a number, or has its cache in pieces.
        """
        self.heads = int(layer.num_kv_heads)
        self.size = int(layer.head_size)
        self.block = int(cache.shape[-2])
        self._cache = cache
        self._where = self._found(layer)
        plain = self._plain()
        self._rows = cache.transpose(1, 2) if torch.equal(self._where, plain) else None
        if self._rows is None:
            try:
                self._flat = cache.view(cache.shape[0], -1)
            except RuntimeError as error:
                raise UnknownLayoutError("its KV cache is not in one piece") from error

    def _found(self, layer: Any) -> torch.Tensor:
        """By half (keys, values), token of a block, head and number: the place in the block."""
        device = self._cache.device
        shape = (2, self.block, self.heads, self.size)
        numbers = torch.arange(1, 1 + 2 * self.block * self.heads * self.size, device=device)
        slots = torch.arange(self.block, 2 * self.block, device=device)
        scratch = torch.zeros((2, *self._cache.shape[1:]), dtype=self._cache.dtype, device=device)
        found = torch.zeros(scratch[1].numel(), dtype=torch.long, device=device)
        for digit in range(_DIGITS):
            part = (numbers >> _BITS * digit) & ((1 << _BITS) - 1)
            keys, values = part.to(self._cache.dtype).view(shape)
            layer.impl.do_kv_cache_update(layer, keys, values, scratch, slots)
            found += scratch[1].reshape(-1).long() << _BITS * digit
        place = torch.full((len(numbers) + 1,), -1, device=device)
        place[found] = torch.arange(len(found), device=device)
        where = place[1:].view(shape)
        if int(where.min()) < 0:
            raise UnknownLayoutError("its backend does not keep what it is given")
        return where

    def _plain(self) -> torch.Tensor:
        """The places where a block is ``[heads, tokens, keys and values]``."""
        numbers = torch.arange(self.heads * self.block * 2 * self.size, device=self._cache.device)
        block = numbers.view(self.heads, self.block, 2, self.size)
        return block.permute(2, 1, 0, 3)

    def read(self, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each ``[tokens, heads, size]``."""
        if self._rows is not None:
            keys, values = self._rows[slots.blocks, slots.places].chunk(2, -1)
            return keys, values
        rows = slots.blocks[:, None, None]
        keys = self._flat[rows, self._where[0][slots.places]]
        values = self._flat[rows, self._where[1][slots.places]]
        return keys, values

    def write(self, slots: Slots, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self._rows is not None:
            self._rows[slots.blocks, slots.places] = torch.cat((keys, values), -1)
            return
        rows = slots.blocks[:, None, None]
        self._flat[rows, self._where[0][slots.places]] = keys
        self._flat[rows, self._where[1][slots.places]] = values


class Turn:
    """Rotates keys from some positions to others, by the model's own table of cosines and sines.

    The angles come from two rows of the table, not from the difference of positions: so the rounding of the table's own
    angles does not show. A scale in the table (YaRN) is in the keys already and stays.
    """

    def __init__(self, rotary: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        table = rotary.cos_sin_cache
        before = table[source.to(table.device)].float()
        after = table[target.to(table.device)].float()
        cos_before, sin_before = before.chunk(2, -1)
        cos_after, sin_after = after.chunk(2, -1)
        scale = cos_before.square() + sin_before.square()
        cos = (cos_after * cos_before + sin_after * sin_before) / scale
        sin = (sin_after * cos_before - cos_after * sin_before) / scale
        self._cos = cos.to(source.device)[:, None]
        self._sin = sin.to(source.device)[:, None]
        self._size = int(rotary.rotary_dim)
        self._neox = bool(rotary.is_neox_style)

    def __call__(self, keys: torch.Tensor) -> torch.Tensor:
        """``keys``: ``[tokens, heads, size]``."""
        turned = keys[..., : self._size].float()
        rest = keys[..., self._size :]
        if self._neox:
            one, other = turned.chunk(2, -1)
        else:
            one = turned[..., ::2]
            other = turned[..., 1::2]
        new_one = one * self._cos - other * self._sin
        new_other = other * self._cos + one * self._sin
        if self._neox:
            turned = torch.cat((new_one, new_other), -1)
        else:
            turned = torch.stack((new_one, new_other), -1).flatten(-2)
        return torch.cat((turned.to(keys.dtype), rest), -1)


def move(cells: Cells, turn: Turn, source: Slots, target: Slots) -> None:
    """Move tokens of one layer, all at once: every read comes before every write."""
    keys, values = cells.read(source)
    cells.write(target, turn(keys), values.clone())


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The root mean square of the difference, by that of what is wanted."""
    wanted = wanted.float()
    off = (found.float() - wanted).square().mean().sqrt()
    return float(off / wanted.square().mean().sqrt().clamp_min(1e-12))


def tolerance(dtype: torch.dtype) -> float:
    """How far apart two computations of one value may be; something that is wrong is farther, by far."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.1
