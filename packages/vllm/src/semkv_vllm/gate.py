"""Whether an engine may reuse documents at other positions: what is not known to be right is refused, with the reason.

`refusal` looks at the configuration; it says the same in every process. `check` looks at the loaded model, in a worker:
it computes a text at two places and compares every layer with what rotation makes of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec

from semkv_vllm.moving import Cells, Slots, Turn, UnknownLayoutError, distance, tolerance
from semkv_vllm.repair import Gap, Repair

WORKER = "semkv_vllm.worker.DocumentWorker"
"""What ```--worker-cls``` must be: connectors are given the KV cache, and the repair needs the model."""

_ROTARY = "vllm.model_executor.layers.rotary_embedding"
_KNOWN = {
    "RotaryEmbedding",
    "LinearScalingRotaryEmbedding",
    "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
}
"""Rotary embeddings that are one table of angles, the same at every length."""

_KEYS = 128  # random keys of a check
_LEAST_BLOCKS = 3  # vLLM's empty one, and one for each of two texts


def wanted(vllm_config: Any) -> bool:
    """Whether the operator has turned the reuse of documents on."""
    return str(vllm_config.parallel_config.worker_cls) == WORKER


def refusal(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this configuration cannot reuse documents; empty where it can."""
    return next(_refusals(vllm_config, kv_cache_config), "")


def _refusals(config: Any, kv_cache_config: Any) -> Iterator[str]:
    model = config.model_config
    parallel = config.parallel_config
    kinds = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(kinds) != 1 or type(kinds[0]) is not FullAttentionSpec:
        yield f"its KV cache is not one group of full attention ({_names(kinds)})"
        return
    if kinds[0].sliding_window or kinds[0].attention_chunk_size or kinds[0].non_causal:
        yield "its attention has a window or is not causal"
    if config.cache_config.cache_dtype != "auto" or kinds[0].dtype != model.dtype:
        yield "its KV cache has another type than the model"
    if model.is_multimodal_model or model.uses_mrope or model.is_encoder_decoder:
        yield "models with pictures or an encoder are not handled yet"
    if model.runner_type != "generate":
        yield "it does not generate text"
    if config.speculative_config is not None:
        yield "speculative decoding is on"
    if config.lora_config is not None:
        yield "LoRA is on"
    if config.kv_events_config and config.kv_events_config.enable_kv_cache_events:
        yield "KV events are on, which would show reused blocks as computed from their tokens"
    if _ranks(parallel) > 1:
        yield "it has pipeline, data or context parallelism"
    if parallel.enable_expert_parallel or parallel.enable_eplb or parallel.use_ubatching:
        yield "it has expert parallelism or splits its batches"


def _names(kinds: list[Any]) -> str:
    return ", ".join(type(kind).__name__ for kind in kinds)


def _ranks(parallel: Any) -> int:
    """Ranks that are no tensor parallelism."""
    context = parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size
    return int(parallel.pipeline_parallel_size * parallel.data_parallel_size * context)


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


def rotation_error(rotary: Any, device: Any, dtype: torch.dtype, longest: int) -> float:
    """How far `Turn` is from the model's own rotary embedding, on random keys."""
    draws = torch.Generator().manual_seed(0)
    size = int(rotary.head_size)
    keys = torch.randn(_KEYS, size, generator=draws).to(device, dtype)
    source = torch.randint(0, longest, (_KEYS,), generator=draws).to(device)
    target = torch.randint(0, longest, (_KEYS,), generator=draws).to(device)

    def at(positions: torch.Tensor) -> torch.Tensor:
        _, rotated = rotary.forward_native(positions, keys.clone(), keys.clone())
        return rotated.view(_KEYS, 1, size)

    return distance(Turn(rotary, source, target)(at(source)), at(target))


@torch.inference_mode()
def check(layers: Layers, repair: Repair, runner: Any, block: int) -> None:
    """Compute one text at the first position and at later ones, and compare all layers.

    Attention sees the text alone each time, so values must be equal, and keys equal but for their rotation. This finds
    layers without rotation, learned positions, and what depends on the length.

    Raises:
        RefusedError: they are not.
    """
    config = runner.vllm_config
    longest = int(config.model_config.max_model_len)
    dtype = config.model_config.dtype
    most = tolerance(dtype)
    for rotary in {id(rotary): rotary for rotary in layers.rotaries}.values():
        error = rotation_error(rotary, runner.device, dtype, longest)
        if not error <= most:
            raise RefusedError(f"keys cannot be rotated as the model does it (off by {error:.2g})")
    if int(runner.kv_cache_config.num_blocks) < _LEAST_BLOCKS:
        raise RefusedError("its KV cache is too small for a check")
    count = min(block, longest // 2)
    draws = torch.Generator().manual_seed(1)
    vocabulary = config.model_config.get_vocab_size()
    tokens = torch.randint(0, vocabulary, (count,), generator=draws).tolist()
    places = torch.arange(count, device=runner.device)
    for shift in sorted({1, longest // 3, longest - count}):
        repair.run(
            [
                Gap(blocks=[1], tokens=tokens, begin=0, end=count),
                Gap(blocks=[2], tokens=tokens, begin=0, end=count, shift=shift),
            ]
        )
        turns = layers.turns(places, places + shift)
        _compare(layers, turns, places, block=block, most=most)


def _compare(
    layers: Layers, turns: list[Turn], places: torch.Tensor, *, block: int, most: float
) -> None:
    for number, (cells, turn) in enumerate(zip(layers.cells, turns, strict=True)):
        keys, values = cells.read(Slots.of(places + block, block))
        shifted_keys, shifted_values = cells.read(Slots.of(places + 2 * block, block))
        error = max(distance(turn(keys), shifted_keys), distance(values, shifted_values))
        if not error <= most:
            raise RefusedError(f"layer {number} depends on more than rotation (off by {error:.2g})")
