"""What a hook returned, checked: the right layers, lengths and numbers, each vector at length 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from semkv.encoders.hooks import EmbeddingHook
from semkv.errors import ConfigError
from semkv.tiers.base import PartError
from semkv.tiers.embedding import VISION
from semkv.types import EmbeddingLayer, Request

if TYPE_CHECKING:
    from semkv.types import Vector


def check_layers(layers: Sequence[EmbeddingLayer], hook: EmbeddingHook, hook_name: str) -> None:
    """Hold the configured layers against what the hook says it fills, where it says so.

    Raises:
        ConfigError: a layer that the hook does not fill, or one of another dimension.
    """
    for layer in layers if hook.dims else ():
        dim = hook.dims.get(layer.name)
        if dim is None:
            raise ConfigError(
                "--embedding-layer", layer.name, f"a layer that hook {hook_name} fills: {_list(hook.dims)}"
            )
        if dim != layer.dim:
            _refuse(layer, dim, hook_name)


def clean(
    request: Request, raw: Mapping[str, Vector], layers: Sequence[EmbeddingLayer], hook_name: str
) -> dict[str, Vector]:
    """Unit vectors by layer: float32 [dim], or [n_media, dim] for ``vision`` of a request with several media items.

    Raises:
        ConfigError: a vector of another length than its layer's.
        PartError: a vector that is not finite, has no length, or does not come once per media item.
    """
    vectors: dict[str, Vector] = {}
    for layer in layers:
        if layer.name not in raw:
            continue
        vector = np.asarray(raw[layer.name], dtype=np.float32)
        if vector.ndim not in (1, 2) or vector.shape[-1] != layer.dim:
            _refuse(layer, vector.shape[-1] if vector.ndim else 0, hook_name)
        expected = max(1, len(request.media)) if layer.name == VISION else 1
        rows = np.atleast_2d(vector)
        if len(rows) != expected:
            raise PartError(f"layer {layer.name}: {len(rows)} vectors where {expected} belong")
        lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)  # float32 holds no square of 1e30
        if not np.isfinite(rows).all() or not lengths.all():
            raise PartError(f"layer {layer.name}: a vector that is zero or not finite")
        unit = (rows / lengths).astype(np.float32)
        vectors[layer.name] = unit[0] if len(unit) == 1 else unit
    return vectors


def _refuse(layer: EmbeddingLayer, dim: int, hook_name: str) -> None:
    raise ConfigError(
        "--embedding-layer",
        f"{layer.name}:{layer.dim}",
        f"{layer.name}:{dim}, the dimension that hook {hook_name} returns",
    )


def _list(names: Mapping[str, int]) -> str:
    return ", ".join(f"{name}:{dim}" for name, dim in sorted(names.items()))
