"""Whether an engine may reuse documents at other positions: what is not known to be right is refused, with the reason.

`refusal` looks at the configuration; it says the same in every process. `Trial` looks at the loaded model, in a worker:
it compares every layer of a text at two places with what rotation makes of it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec

from semkv_vllm import private
from semkv_vllm.moving import (
    Cells,
    Moves,
    Slots,
    Turn,
    UnknownLayoutError,
    distance,
    move,
    tolerance,
)
from semkv_vllm.pictures import Prompt, straight
from semkv_vllm.repair import Gap, Pass, Repair
from semkv_vllm.spans import WATCHED

log = logging.getLogger("semkv.connectors")

WORKER = "semkv_vllm.worker.DocumentWorker"
"""What ```--worker-cls``` must be: connectors are given the KV cache, and the repair needs the model."""

_WITH_PICTURES = {
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
}
"""Models that take pictures, and of which it is tested that they keep nothing from one pass to the next but what
`semkv_vllm.private.picture_inputs_cleared` knows of."""

_ROTARY = "vllm.model_executor.layers.rotary_embedding"
_KNOWN = {
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
    "MRotaryEmbedding",
}
"""Rotary embeddings that are one table of angles, the same at every length."""

_AT_ONCE = 8192  # tokens that are moved at once: their keys and values are in memory twice
_KEYS = 128  # random keys of a check
_FUSED = 1e-2  # bfloat16 rounds by up to 0.4%
_FUSED_BLOCKS = 24  # some hundred tokens: several groups of the kernel's


def wanted(vllm_config: Any) -> bool:
    """Whether the operator has turned the reuse of documents on."""
    return str(vllm_config.parallel_config.worker_cls) == WORKER


def refusal(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this configuration cannot reuse documents; empty where it can."""
    kinds = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(kinds) != 1 or type(kinds[0]) is not FullAttentionSpec:
        return f"its KV cache is not one group of full attention ({_names(kinds)})"
    found = {
        **_of_attention(vllm_config, kinds[0]),
        **_of_model(vllm_config),
        **_of_ranks(vllm_config.parallel_config),
    }
    return next((reason for reason, holds in found.items() if holds), "")


def _of_attention(config: Any, kind: Any) -> dict[str, object]:
    """Reasons against a kind of KV cache, each with whether it holds."""
    cache_type = config.cache_config.cache_dtype
    other_type = cache_type != "auto" or kind.dtype != config.model_config.dtype
    return {
        "its blocks are too short to be checked": kind.block_size <= WATCHED,
        "its attention has a window": kind.sliding_window or kind.attention_chunk_size,
        "its attention is not causal": kind.non_causal,
        "its KV cache has another type than the model": other_type,
    }


def _of_model(config: Any) -> dict[str, object]:
    """Reasons against a model and what runs beside it."""
    model = config.model_config
    others = set(model.architectures) - _WITH_PICTURES
    pictures = (model.is_multimodal_model or model.uses_mrope) and others
    given = model.multimodal_config
    ranks = config.parallel_config.tensor_parallel_size
    events = config.kv_events_config
    shown = events is not None and events.enable_kv_cache_events
    return {
        f"models with pictures of this kind are not handled ({', '.join(sorted(others))})": pictures,
        "it takes pictures, and has several ranks": given is not None and ranks > 1,
        "it drops parts of pictures": given is not None and given.is_multimodal_pruning_enabled(),
        "it has an encoder": model.is_encoder_decoder,
        "it does not generate text": model.runner_type != "generate",
        "speculative decoding is on": config.speculative_config is not None,
        "LoRA is on": config.lora_config is not None,
        "KV events are on, and would show reused blocks as computed": shown,
    }


def _of_ranks(parallel: Any) -> dict[str, object]:
    """Reasons against a way to share the work."""
    context = parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size
    return {
        "it has pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "it has data parallelism": parallel.data_parallel_size > 1,
        "it has context parallelism": context > 1,
        "it has expert parallelism": parallel.enable_expert_parallel or parallel.enable_eplb,
        "it splits its batches": parallel.use_ubatching,
    }


def _names(kinds: list[Any]) -> str:
    return ", ".join(type(kind).__name__ for kind in kinds)


class RefusedError(Exception):
    """This model cannot reuse documents; the text says why."""


class Layers:
    """The attention layers of a loaded model: their caches and rotary embeddings.

    Raises:
        RefusedError: something about a layer is not known to be right.
    """

    def __init__(self, runner: Any, caches: dict[str, torch.Tensor]) -> None:
        modules = dict(runner.get_model().named_modules())
        attention = get_layers_from_vllm_config(runner.vllm_config, Attention)
        self.fused: Any = None  # `semkv_vllm.fused.Fused`, where it does what `move` does
        names = {id(module): name for name, module in modules.items()}
        self.cells: list[Cells] = []
        self.rotaries: list[Any] = []
        if attention.keys() != caches.keys():
            raise RefusedError("its attention layers do not have a KV cache each")
        for layer_name, cache in caches.items():
            layer = attention[layer_name]
            self._look_at(layer, layer_name)
            self.cells.append(_cells(layer, layer_name, cache))
            self.rotaries.append(_rotary(modules, names.get(id(layer), ""), layer_name))

    def _look_at(self, layer: Any, name: str) -> None:
        """Refuse a layer whose attention is not known to be plain."""
        if getattr(layer, "kv_sharing_target_layer_name", None):
            raise RefusedError(f"{name} uses the KV of another layer")
        if getattr(layer.impl, "alibi_slopes", None) is not None:
            raise RefusedError(f"{name} has ALiBi")
        if not hasattr(layer.impl, "do_kv_cache_update"):
            raise RefusedError(f"the backend of {name} writes its KV in a way that is not known")

    def move(self, moves: Moves) -> None:
        """Move tokens of all layers, with their keys rotated."""
        if self.fused is None:
            self.move_in_parts(moves)
        else:
            self.fused(moves)

    def move_in_parts(self, moves: Moves) -> None:
        """The same by torch's operations, layer by layer.

        From the last tokens to the first, some thousands at once: a document moves on by less than a block, so what is
        written is never what others have yet to be read from.
        """
        count = moves.slots.shape[1]
        for end in range(count, 0, -_AT_ONCE):
            part = slice(max(0, end - _AT_ONCE), end)
            source = Slots.of(moves.slots[0, part], self.cells[0].block)
            target = Slots.of(moves.slots[1, part], self.cells[0].block)
            turns = self.turns(moves.source[:, part], moves.target[:, part])
            for cells, turn in zip(self.cells, turns, strict=True):
                move(cells, turn, source, target)

    def turns(self, source: torch.Tensor, target: torch.Tensor) -> list[Turn]:
        """For each layer what rotates its keys; layers with one rotary embedding share it."""
        made = {id(rotary): rotary for rotary in self.rotaries}
        turns = {name: Turn(rotary, source, target) for name, rotary in made.items()}
        return [turns[id(rotary)] for rotary in self.rotaries]


def _cells(layer: Any, name: str, cache: torch.Tensor) -> Cells:
    try:
        return Cells(layer, cache)
    except UnknownLayoutError as reason:
        raise RefusedError(f"{name}: {reason}") from reason


def _rotary(modules: dict[str, Any], path: str, name: str) -> Any:
    """The rotary embedding beside an attention layer, or above it."""
    while path:
        path = path.rpartition(".")[0]
        rotary = getattr(modules[path], "rotary_emb", None)
        if rotary is None:
            continue
        kind = type(rotary)
        if kind.__name__ not in _KNOWN or not kind.__module__.startswith(_ROTARY):
            raise RefusedError(f"its rotary embedding {kind.__name__} is not known to be right")
        return rotary
    raise RefusedError(f"no rotary embedding was found for {name}")


def rotation_error(
    rotary: Any,
    device: Any,
    dtype: torch.dtype,
    longest: int,
    axes: int,
) -> float:
    """How far `Turn` is from the model's own rotary embedding, on random keys that move by the same on all axes."""
    draws = torch.Generator().manual_seed(0)
    size = int(rotary.head_size)
    keys = torch.randn(_KEYS, size, generator=draws).to(device, dtype)
    source = torch.randint(0, longest // 2, (axes, _KEYS), generator=draws)
    target = source + torch.randint(0, longest // 2, (_KEYS,), generator=draws)
    source = source.to(device)
    target = target.to(device)

    def at(positions: torch.Tensor) -> torch.Tensor:
        told = positions if axes > 1 else positions[0]
        _, rotated = rotary.forward_native(told, keys.clone(), keys.clone())
        return rotated.view(_KEYS, 1, size)

    return distance(Turn(rotary, source, target)(at(source)), at(target))


@dataclass(frozen=True)
class Trial:
    """A text that is computed at the first position and at later ones.

    Attention sees the text alone each time, so values must be equal, and keys equal but for their rotation. This finds
    layers without rotation, learned positions, and what depends on the length.

    Attributes:
        passes: compute it: in block 1 at the first position, in the next ones at the others.
        shifts: from the first position to each of the others.
        places: of its tokens.
        positions: of its tokens at the first position, ``[axes, tokens]``.
    """

    layers: Layers
    passes: list[Pass]
    shifts: list[int]
    places: torch.Tensor
    positions: torch.Tensor

    def refuse(self, most: float) -> None:
        """Compare all layers.

        Raises:
            RefusedError: some are farther off than ``most``.
        """
        for number, shift in enumerate(self.shifts):
            turns = self.layers.turns(self.positions, self.positions + shift)
            reasons = _differing(
                self.layers,
                turns,
                self.places,
                other=2 + number,
                most=most,
            )
            if reasons:
                raise RefusedError(reasons[0])


def trial_of(
    layers: Layers,
    repair: Repair,
    runner: Any,
    block: int,
) -> Trial:
    """What is to be computed for a check of the model, with nothing computed yet.

    Raises:
        RefusedError: keys cannot be rotated, or the cache is of another kind.
    """
    model = runner.vllm_config.model_config
    longest = int(model.max_model_len)
    most = tolerance(model.dtype)
    rotaries = {id(rotary): rotary for rotary in layers.rotaries}
    for rotary in rotaries.values():
        error = rotation_error(rotary, runner.device, model.dtype, longest, repair.axes)
        if not error <= most:
            raise RefusedError(f"keys cannot be rotated as the model does it (off by {error:.2g})")
    if any(cells.block != block for cells in layers.cells):
        raise RefusedError("its backend has blocks of another size")
    count = min(block, longest // 2)
    shifts = sorted({0, 1, longest // 3, longest - count})
    if int(runner.kv_cache_config.num_blocks) <= len(shifts):  # vLLM's empty one comes on top
        raise RefusedError("its KV cache is too small for a check")
    vision = getattr(model.hf_config, "vision_config", None)
    if not private.keeps_picture_inputs(runner.get_model(), vision):
        raise RefusedError("it keeps what pictures add to its layers in a way that is not known")
    tokens = _random_tokens(count, model.get_vocab_size())
    positions = _positions(repair.axes, count)
    gaps = [
        Gap(
            blocks=np.array([1 + number]),
            tokens=tokens,
            prompt=Prompt(positions + shift),
            begin=0,
            end=count,
        )
        for number, shift in enumerate(shifts)
    ]
    return Trial(
        layers=layers,
        passes=repair.passes(gaps),
        shifts=shifts[1:],
        places=torch.arange(count, device=runner.device),
        positions=torch.from_numpy(positions).to(runner.device),
    )


def _positions(axes: int, count: int) -> np.ndarray:
    """Those of a text; with several axes they differ, as in a picture."""
    found = straight(axes, count)
    slower = np.arange(1, axes + 1)[:, None]
    positions: np.ndarray = found // slower
    return positions


def fuse(layers: Layers, blocks: int, longest: int) -> None:
    """Move tokens by one kernel from now on, where that writes what torch's operations write."""
    try:
        from semkv_vllm.fused import Fused

        fused = Fused(layers.cells, layers.rotaries)
        with torch.inference_mode():
            off = fused_error(layers, fused, min(blocks - 1, _FUSED_BLOCKS), longest)
    except Exception as error:  # of Triton, which has many
        log.warning("semkv: documents are moved by torch's operations, which is slower: %s", error)
        return
    if off <= _FUSED:
        layers.fused = fused
    else:
        log.warning(
            "semkv: documents are moved by torch's operations: the kernel is off by %g", off
        )


def fused_error(
    layers: Layers,
    fused: Any,
    count: int,
    longest: int,
) -> float:
    """How far a kernel is from torch's operations, on random keys and values in the first blocks.

    Tokens move on by half a block, so that some are written to where others came from.
    """
    first = layers.cells[0]
    block = first.block
    shift = block // 2
    size = (count - 2) // 2 * block  # of a request; two, with a block between them
    source = torch.cat((torch.arange(size), torch.arange(size) + size + block)) + block
    positions = (torch.arange(2 * size) % (longest // 2)).unsqueeze(0)
    moves = Moves(
        slots=torch.stack((source, source + shift)),
        source=positions,
        target=positions + longest // 2,
        firsts=torch.tensor([0, size, 2 * size]),
    ).to(first.device)
    everywhere = torch.arange(block, (count + 1) * block, device=first.device)
    slots = Slots.of(everywhere, block)
    worst = 0.0
    drawn = []
    for cells in layers.cells:
        shape = (2, len(everywhere), cells.heads, cells.size)
        drawn.append(torch.randn(shape, device=first.device).to(cells.dtype))
    found = []
    for move_all in (layers.move_in_parts, fused):
        for cells, both in zip(layers.cells, drawn, strict=True):
            cells.write(slots, both[0], both[1])
        move_all(moves)
        found.append([torch.stack(cells.read(slots)) for cells in layers.cells])
    for wanted, own in zip(*found, strict=True):
        worst = max(worst, distance(own, wanted))
    return worst


def _random_tokens(count: int, vocabulary: int) -> list[int]:
    draws = torch.Generator().manual_seed(1)
    found: list[int] = torch.randint(0, vocabulary, (count,), generator=draws).tolist()
    return found


def _differing(
    layers: Layers,
    turns: list[Turn],
    places: torch.Tensor,
    *,
    other: int,
    most: float,
) -> list[str]:
    """What is wrong with which layers in block ``other``, compared with block 1."""
    block = layers.cells[0].block
    first = Slots.of(places + block, block)
    second = Slots.of(places + other * block, block)
    found = []
    for number, (cells, turn) in enumerate(zip(layers.cells, turns, strict=True)):
        keys, values = cells.read(first)
        shifted_keys, shifted_values = cells.read(second)
        of_keys = distance(turn(keys), shifted_keys)
        of_values = distance(values, shifted_values)
        error = max(of_keys, of_values)
        if not error <= most:
            found.append(f"layer {number} depends on more than rotation (off by {error:.2g})")
    return found
