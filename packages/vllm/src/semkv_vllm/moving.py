"""Moving a layer's keys and values to other tokens of its cache, with the keys rotated to their new positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.rotary_embedding.mrope import apply_interleaved_rope

_MOST = 63  # exact in every type of float
_TINY = 1e-12
_SHIFTS = (0, 6, 12, 18)  # of the digits of a place's number, in base 64


@dataclass(frozen=True)
class Slots:
    """Tokens of a cache, each by its block and its place in it."""

    blocks: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, numbers: torch.Tensor, block: int) -> Slots:
        """By vLLM's numbers of slots."""
        return cls(
            blocks=numbers // block,
            places=numbers % block,
        )


@dataclass(frozen=True)
class Moves:
    """Tokens that are moved, request after request, each request's in the order of its prompt.

    Attributes:
        slots: vLLM's numbers of their slots before and after, ``[2, tokens]``.
        source, target: their positions before and after, ``[axes, tokens]``.
        firsts: of each request the first column; at last the number of columns.
    """

    slots: torch.Tensor
    source: torch.Tensor
    target: torch.Tensor
    firsts: torch.Tensor

    def to(self, device: Any) -> Moves:
        return Moves(
            slots=on_device(self.slots.numpy(), device),
            source=on_device(self.source.numpy(), device),
            target=on_device(self.target.numpy(), device),
            firsts=on_device(self.firsts.numpy(), device),
        )


def on_device(values: np.ndarray, device: Any) -> torch.Tensor:
    """A copy that the processor does not wait for, where there is another device."""
    held = torch.from_numpy(values)
    if torch.device(device).type == "cpu":
        return held
    return held.pin_memory().to(device, non_blocking=True)


class UnknownLayoutError(Exception):
    """A cache is written in a way that cannot be read back."""


class Cells:
    """The cache of one attention layer, by token.

    Where a backend puts a number is found once, by having it write numbers: vLLM's CPU kernels pack keys in tiles.

    Attributes:
        plain: the cache where it is ``[blocks, heads, tokens, keys and values]``, else None.
    """

    def __init__(self, layer: Any, cache: torch.Tensor) -> None:
        """
        Raises:
            UnknownLayoutError: the backend loses a number, or has its cache in pieces.
        """
        self.heads = int(layer.num_kv_heads)
        self.size = int(layer.head_size)
        self.block = int(cache.shape[-2])
        self.device = cache.device
        self.dtype = cache.dtype
        self._cache = cache
        self._where = self._found(layer)
        plain = self._plain()
        self.plain = cache if torch.equal(self._where, plain) else None
        self._rows = None if self.plain is None else cache.transpose(1, 2)
        if self._rows is None:
            try:
                self._flat = cache.view(cache.shape[0], -1)
            except RuntimeError as error:
                raise UnknownLayoutError("its KV cache is not in one piece") from error

    def _found(self, layer: Any) -> torch.Tensor:
        """By half (keys, values), token of a block, head and number: the place in the block."""
        device = self._cache.device
        kind = self._cache.dtype
        shape = (2, self.block, self.heads, self.size)
        count = 2 * self.block * self.heads * self.size
        numbers = torch.arange(1, count + 1, device=device)
        slots = torch.arange(self.block, 2 * self.block, device=device)
        two_blocks = (2, *self._cache.shape[1:])
        scratch = torch.zeros(
            two_blocks,
            dtype=kind,
            device=device,
        )
        found = torch.zeros(
            scratch[1].numel(),
            dtype=torch.long,
            device=device,
        )
        for shift in _SHIFTS:
            digit = (numbers >> shift) & _MOST
            halves = digit.to(kind).view(shape)
            layer.impl.do_kv_cache_update(
                layer,
                halves[0],
                halves[1],
                scratch,
                slots,
            )
            found += scratch[1].reshape(-1).long() << shift
        place = torch.full((count + 1,), -1, device=device)
        place[found] = torch.arange(len(found), device=device)
        where = place[1:].view(shape)
        if int(where.min()) < 0:
            raise UnknownLayoutError("its backend does not keep what it is given")
        return where

    def _plain(self) -> torch.Tensor:
        """The places where a block is ``[heads, tokens, keys and values]``."""
        count = 2 * self.block * self.heads * self.size
        numbers = torch.arange(count, device=self._cache.device)
        block = numbers.view(
            self.heads,
            self.block,
            2,
            self.size,
        )
        return block.permute(2, 1, 0, 3)

    def read(self, slots: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each ``[tokens, heads, size]``."""
        if self._rows is not None:
            both = self._rows[slots.blocks, slots.places]
            keys, values = both.chunk(2, -1)
            return keys, values
        rows = slots.blocks[:, None, None]
        of_keys = self._where[0][slots.places]
        of_values = self._where[1][slots.places]
        keys = self._flat[rows, of_keys]
        values = self._flat[rows, of_values]
        return keys, values

    def write(
        self,
        slots: Slots,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        if self._rows is not None:
            both = torch.cat((keys, values), -1)
            self._rows[slots.blocks, slots.places] = both
            return
        rows = slots.blocks[:, None, None]
        of_keys = self._where[0][slots.places]
        of_values = self._where[1][slots.places]
        self._flat[rows, of_keys] = keys
        self._flat[rows, of_values] = values


class Turn:
    """Rotates keys from some positions to others, by the model's own table of cosines and sines.

    The angles come from two rows of the table, not from the difference of positions: so the rounding of the table's own
    angles does not show. A scale in the table (YaRN) is in the keys already and stays.

    Args:
        rotary: the model's module.
        source, target: positions, ``[axes, tokens]``.

    Attributes:
        cos, sin: of each token's turn, a column for each pair of numbers.
        size: how many numbers of a key are rotated.
        neox: whether the halves of a key are paired, not its neighbours.
    """

    def __init__(
        self,
        rotary: Any,
        source: torch.Tensor,
        target: torch.Tensor,
    ) -> None:
        table = rotary.cos_sin_cache
        device = source.device
        cos_before, sin_before = _angles(rotary, table[source.to(table.device)].float())
        cos_after, sin_after = _angles(rotary, table[target.to(table.device)].float())
        scale = cos_before.square() + sin_before.square()
        cos = cos_after * cos_before
        cos += sin_after * sin_before
        sin = sin_after * cos_before
        sin -= cos_after * sin_before
        self.cos = (cos / scale).to(device)
        self.sin = (sin / scale).to(device)
        self.size = int(rotary.rotary_dim)
        self.neox = bool(rotary.is_neox_style)

    def __call__(self, keys: torch.Tensor) -> torch.Tensor:
        """``keys``: ``[tokens, heads, size]``."""
        cos = self.cos.unsqueeze(1)
        sin = self.sin.unsqueeze(1)
        turned = keys[..., : self.size].float()
        rest = keys[..., self.size :]
        if self.neox:
            one, other = turned.chunk(2, -1)
        else:
            one = turned[..., ::2]
            other = turned[..., 1::2]
        new_one = one * cos
        new_one -= other * sin
        new_other = other * cos
        new_other += one * sin
        if self.neox:
            turned = torch.cat((new_one, new_other), -1)
        else:
            pairs = torch.stack((new_one, new_other), -1)
            turned = pairs.flatten(-2)
        turned = turned.to(keys.dtype)
        return torch.cat((turned, rest), -1)


def _angles(rotary: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines by token, from the rows of a table by axis and token.

    With several axes each pair of numbers is rotated by its position on one of them: the first pairs by that on the
    first axis and so on, or in turns (``mrope_interleaved``).
    """
    cos, sin = rows.chunk(2, -1)
    if len(rows) == 1:
        return cos[0], sin[0]
    sections = rotary.mrope_section
    if rotary.mrope_interleaved:
        return apply_interleaved_rope(cos, sections), apply_interleaved_rope(sin, sections)
    parts_of_cos = cos.split(sections, -1)
    parts_of_sin = sin.split(sections, -1)
    own_cos = [part[axis] for axis, part in enumerate(parts_of_cos)]
    own_sin = [part[axis] for axis, part in enumerate(parts_of_sin)]
    return torch.cat(own_cos, -1), torch.cat(own_sin, -1)


def move(
    cells: Cells,
    turn: Turn,
    source: Slots,
    target: Slots,
) -> None:
    """Move tokens of one layer, all at once: every read comes before every write."""
    keys, values = cells.read(source)
    turned = turn(keys)
    cells.write(target, turned, values)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The root mean square of the difference, by that of what is wanted."""
    return float(distances(found.unsqueeze(0), wanted.unsqueeze(0)))


def distances(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """`distance` of each part, on the device."""
    wanted = wanted.float().flatten(1)
    off = found.float().flatten(1) - wanted
    size = wanted.square().mean(1).sqrt()
    distance = off.square().mean(1).sqrt()
    return distance / size.clamp_min(_TINY)


def tolerance(dtype: torch.dtype) -> float:
    """How far apart two computations of one value may be; something that is wrong is farther, by far."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.1
