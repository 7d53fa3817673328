"""Embedding hooks: what fills the layers of the embedding tier.

A hook takes a request and returns one vector per layer; a layer it leaves out is skipped. A hook of your own is given
as ``package.module:Factory`` and called with the `CacheConfig`::

    class Factory:
        dims = {"prompt": 8}              # so that a wrong --embedding-layer fails at load
        fingerprint = "my-encoder-v1"     # vectors of another fingerprint are never compared

        def __init__(self, config): ...
        def __call__(self, request): return {"prompt": vector}
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from semkv import plug
from semkv.config import IMAGE_ROOT_VARIABLES, CacheConfig
from semkv.encoders.text import TextEncoder, stands_for
from semkv.encoders.vision import MOST_PIXELS, VisionEncoder, build_vision_encoder, pixels_of
from semkv.errors import ConfigError
from semkv.keys import media_id
from semkv.types import EmbeddingLayer, MediaSegment, Request
from semkv_stores.digests import digest

if TYPE_CHECKING:
    from semkv.types import Vector

logger = logging.getLogger("semkv")

HOOKS = ("none", "prompt", "vision", "prompt_vision")
_KEY = "--embedding-hook"
_NAME = re.compile(r"[\w][\w.-]*")  # one path component: no separators, no leading dot
_SUFFIXES = (".jpg", ".png", ".jpeg")


class EmbeddingHook(Protocol):
    """Fills the embedding layers. Called from any thread, before the engine sees the request.

    ``--embedding-hook`` calls a dotted path with the `CacheConfig`.

    Attributes:
        dims: length of the vectors by layer, as far as known before the first call.
        fingerprint: names what computes the vectors.
    """

    @property
    def dims(self) -> Mapping[str, int]: ...

    @property
    def fingerprint(self) -> str: ...

    def __call__(self, request: Request) -> Mapping[str, Vector]:
        """Vectors by layer, float32 of any length but zero: [dim], or for ``vision`` [n_media, dim] when a request
        has several media items. A layer without input is left out.

        An exception is counted, and the layers miss. A `ConfigError` reaches the caller.
        """
        ...


class PromptHook:
    """``prompt``: the sentence vector of the question, where it stands for all of it.

    What stands before the question is not in the vector: the tier compares only requests that agree on it.
    """

    def __init__(self, encoder: TextEncoder) -> None:
        self._encoder = encoder
        self.dims = {"prompt": encoder.dim}
        self.fingerprint = encoder.fingerprint

    def __call__(self, request: Request) -> Mapping[str, Vector]:
        text = request.question
        if not stands_for(self._encoder, text):
            return {}
        return {"prompt": self._encoder.encode([text])[0]}


class VisionHook:
    """``vision``: one vector per media item, from its file (`read_media`); left out when any file is missing, or when
    all have more pixels together than are read. The latest vectors are ``remembered``."""

    def __init__(
        self, encoder: VisionEncoder, roots: Iterable[Path] = (), *, remembered: int = 256
    ) -> None:
        self._encoder = encoder
        self._roots = tuple(roots)
        self._vector = lru_cache(remembered)(self._encoded)
        self.dims = {"vision": encoder.dim}
        self.fingerprint = encoder.fingerprint

    def __call__(self, request: Request) -> Mapping[str, Vector]:
        try:
            if sum(pixels_of(self._read(segment)) for segment in request.media) > MOST_PIXELS:
                return {}
            vectors = [self._vector(segment) for segment in request.media]
        except FileNotFoundError:
            return {}
        if not vectors:
            return {}
        return {"vision": vectors[0] if len(vectors) == 1 else np.stack(vectors)}

    def forget(self) -> None:
        """Drop the vectors in memory."""
        self._vector.cache_clear()

    def _encoded(self, segment: MediaSegment) -> Vector:
        return self._encoder.encode(self._read(segment))

    def _read(self, segment: MediaSegment) -> bytes:
        data = read_media(segment, self._roots)
        if data is None:
            raise FileNotFoundError(segment.name)
        return data


class JoinedHook:
    """Several hooks as one; of none, one that fills nothing. One that does not say its ``fingerprint`` has ``name``."""

    def __init__(self, *hooks: Any, name: str = "") -> None:
        self._hooks = hooks
        self.dims = {
            layer: dim for hook in hooks for layer, dim in getattr(hook, "dims", {}).items()
        }
        fingerprints = [str(getattr(hook, "fingerprint", name)) for hook in hooks]
        self.fingerprint = fingerprints[0] if len(hooks) == 1 else digest(*fingerprints)[:16]

    def __call__(self, request: Request) -> Mapping[str, Vector]:
        return {layer: vector for hook in self._hooks for layer, vector in hook(request).items()}

    def forget(self) -> None:
        """Let the hooks drop what they have in memory, where they keep anything."""
        for hook in self._hooks:
            getattr(hook, "forget", lambda: None)()


def image_roots(config: CacheConfig) -> tuple[Path, ...]:
    """Folders searched for images: the configured ones, then those the environment names."""
    named = (os.environ.get(name) for name in IMAGE_ROOT_VARIABLES)
    return (*config.image_roots, *(Path(value) for value in named if value))


def read_media(segment: MediaSegment, roots: Iterable[Path]) -> bytes | None:
    """The bytes of a media item, or None where no file has exactly these.

    The segment's own file is read, else ``<name>.jpg``, ``.png`` or ``.jpeg`` under the roots. A file whose digest is
    not the segment's id is not this item, whatever its name.
    """
    files = [segment.source] if segment.source is not None else []
    if _NAME.fullmatch(segment.name):
        files += [root / f"{segment.name}{suffix}" for root in roots for suffix in _SUFFIXES]
    for file in files:
        try:
            data = file.read_bytes()
        except OSError:
            continue
        if media_id(data) == segment.media_id:
            return data
        logger.debug("an image file does not have the bytes of media item %s", segment.media_id)
    return None


def build_hook(config: CacheConfig, text_encoder: TextEncoder, given: Any = None) -> EmbeddingHook:
    """The hook given, or that of ``config.embedding_hook``, held against the layers that it should fill.

    Raises:
        ConfigError: no such hook, a dotted path that cannot be imported or called, or a layer that it does not fill.
    """
    name = config.embedding_hook
    if given is not None:
        hook = JoinedHook(given, name=type(given).__name__)
    elif plug.is_path(name):
        own = plug.load(_KEY, name, config)
        if not callable(own):
            raise ConfigError(_KEY, name, "a factory that returns a callable hook")
        hook = JoinedHook(own, name=name)
    elif name not in HOOKS:
        raise ConfigError(_KEY, name, f"one of {', '.join(HOOKS)}, or {plug.FORM}")
    else:
        hooks: list[EmbeddingHook] = [PromptHook(text_encoder)] if name.startswith("prompt") else []
        if name.endswith("vision"):
            hooks.append(
                VisionHook(build_vision_encoder(config.vision_encoder), image_roots(config))
            )
        hook = JoinedHook(*hooks)
    for layer in config.embedding_layers if hook.dims else ():
        dim = hook.dims.get(layer.name)
        if dim is None:
            filled = ", ".join(f"{name}:{dim}" for name, dim in sorted(hook.dims.items()))
            raise ConfigError(
                "--embedding-layer", layer.name, f"a layer that hook {name} fills: {filled}"
            )
        if dim != layer.dim:
            raise wrong_dimension(layer, dim, name)
    return hook


def wrong_dimension(layer: EmbeddingLayer, dim: int, hook_name: str) -> ConfigError:
    """What is said of a layer whose hook returns vectors of another dimension."""
    allowed = f"{layer.name}:{dim}, the dimension that hook {hook_name} returns"
    return ConfigError("--embedding-layer", f"{layer.name}:{layer.dim}", allowed)
