"""Settings of the cache, checked when they are made.

A wrong value is a `ConfigError` that names the key, the value and what is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from semkv.errors import ConfigError
from semkv.types import DEFAULT_LAYER_THRESHOLD, CacheMode, EmbeddingLayer, MatchPolicy, Scope

IMAGE_ROOT_VARIABLES = ("SEMANTIC_CACHE_IMAGE_ROOT", "GQA_IMAGE_ROOT", "LLAVA_IMAGE_ROOT")

_E = TypeVar("_E", bound=StrEnum)


def parse_choice(key: str, value: str, kind: type[_E]) -> _E:
    """Turn a word into a member of ``kind``, or say what the words are."""
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(key, value, [str(m) for m in kind]) from None


def check_threshold(key: str, value: float) -> float:
    """A cosine threshold lies in [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ConfigError(key, value, "a number from 0 to 1")
    return value


def parse_embedding_layer(spec: str, key: str = "--embedding-layer") -> EmbeddingLayer:
    """Read ``NAME:DIM[:THRESHOLD]``, for example ``prompt:384:0.8``."""
    form = "NAME:DIM[:THRESHOLD] such as prompt:384:0.8"
    parts = spec.split(":")
    if len(parts) not in (2, 3) or not parts[0]:
        raise ConfigError(key, spec, form)
    try:
        dim = int(parts[1])
        threshold = float(parts[2]) if len(parts) == 3 else DEFAULT_LAYER_THRESHOLD
    except ValueError:
        raise ConfigError(key, spec, form) from None
    if dim < 1:
        raise ConfigError(key, spec, "a positive dimension")
    if not 0.0 <= threshold <= 1.0:
        raise ConfigError(key, spec, "a threshold from 0 to 1")
    return EmbeddingLayer(parts[0], dim, threshold)


@dataclass(frozen=True)
class CacheConfig:
    """Everything `SemanticCache` needs to know.

    Attributes:
        cache_dir: where catalog, media, KV extents and fusion states live; one directory, one format version.
        fusion_cache_dir: fusion states elsewhere than under ``cache_dir``.
        mode: off, dry-run or live.
        match: all or any (see `MatchPolicy`).
        scope: media or any (see `Scope`).
        exact: the exact text tier (L0.5).
        semantic: the semantic text tier (L1).
        fusion: the fusion tier (L1.5).
        guards: words may veto an approximate match: a changed number, negation, direction, color or word order (see
            `semkv.tiers.guards`). ``--match any`` goes without them.
        similarity_threshold: least cosine of the semantic text tier.
        embedding_layers: layers of the embedding tier (L2); empty turns it off.
        embedding_hook: none, prompt, vision, prompt_vision, or ``package.module:Factory``.
        index_encoder: sentence-transformers id or directory for the text tiers.
        vision_encoder: id or directory of the vision tower behind the ``vision`` hook; empty takes CLIP where present.
        image_roots: folders searched for ``<name>.jpg`` or ``.png`` when a media segment has no file of its own.
        max_cached_blocks: bound on stored KV blocks; 0 for no bound of this kind.
        max_entries: bound on catalog entries; the least recently used go first.
        max_media_bytes: bound on stored images; the least recently used go first, and their entries serve only
            requests that bring the same image.
        context_edit_share: how many of a context's sentences may be reworded for it still to be similar, as a share;
            one always may.
    """

    cache_dir: Path
    fusion_cache_dir: Path | None = None
    mode: CacheMode = CacheMode.LIVE
    match: MatchPolicy = MatchPolicy.ALL
    scope: Scope = Scope.MEDIA
    exact: bool = True
    semantic: bool = True
    fusion: bool = False
    guards: bool = True
    similarity_threshold: float = 0.92
    embedding_layers: tuple[EmbeddingLayer, ...] = ()
    embedding_hook: str = "none"
    index_encoder: str = "all-MiniLM-L6-v2"
    vision_encoder: str = ""
    image_roots: tuple[Path, ...] = field(default=())
    max_cached_blocks: int = 0
    max_entries: int = 100_000
    max_media_bytes: int = 4 << 30
    context_edit_share: float = 0.1

    def __post_init__(self) -> None:
        check_threshold("--similarity-threshold", self.similarity_threshold)
        names = [layer.name for layer in self.embedding_layers]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError("--embedding-layer", name, "each layer once")
        if self.embedding_layers and self.embedding_hook == "none":
            raise ConfigError(
                "--embedding-hook", "none", "a hook that fills " + ", ".join(names) + ", such as prompt_vision"
            )
        if self.max_cached_blocks < 0:
            raise ConfigError("--max-cached-blocks", self.max_cached_blocks, "0 (no bound) or a positive number")
        if self.max_entries < 1:
            raise ConfigError("max_entries", self.max_entries, "a positive number")
        if self.max_media_bytes < 1:
            raise ConfigError("max_media_bytes", self.max_media_bytes, "a positive number of bytes")
        if not 0.0 <= self.context_edit_share < 1.0:
            raise ConfigError("context_edit_share", self.context_edit_share, "a share from 0 to below 1")
