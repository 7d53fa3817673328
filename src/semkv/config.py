"""Settings of the cache, checked when they are made.

A wrong value is a `ConfigError` that names the key, the value and what is allowed.
"""

from __future__ import annotations

import math
import os
import types
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from semkv.errors import ConfigError
from semkv.types import DEFAULT_LAYER_THRESHOLD, CacheMode, EmbeddingLayer, MatchPolicy, PolicyName, Scope

IMAGE_ROOT_VARIABLES = ("SEMANTIC_CACHE_IMAGE_ROOT", "GQA_IMAGE_ROOT", "LLAVA_IMAGE_ROOT")

_E = TypeVar("_E", bound=StrEnum)


def default_cache_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """``SEMKV_CACHE_DIR``, else ``~/.cache/semkv``.

    Raises:
        ConfigError: it is no path.
    """
    return _path("SEMKV_CACHE_DIR", environment.get("SEMKV_CACHE_DIR") or "~/.cache/semkv")


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


def parse_embedding_layer(spec: str | EmbeddingLayer, key: str = "--embedding-layer") -> EmbeddingLayer:
    """Read ``NAME:DIM[:THRESHOLD]``, for example ``prompt:384:0.8``; a layer is checked in the same way."""
    form = "NAME:DIM[:THRESHOLD] such as prompt:384:0.8"
    parts = [str(part) for part in astuple(spec)] if isinstance(spec, EmbeddingLayer) else spec.split(":")
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


def typed(key: str, value: Any, kind: Any) -> Any:
    """A value of the type that a setting is declared with: bool, int, float (finite), str, a `StrEnum`, `Path`,
    `EmbeddingLayer`, a tuple of these, or one of them or None.

    What a flag takes as text may be text here as well: the words of an enum, a path (``~`` is the home directory), a
    layer as ``NAME:DIM[:THRESHOLD]``. Numbers and switches may not: ``"false"`` would be true.

    Raises:
        ConfigError: it is none, and cannot be read as one.
    """
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (k for k in get_args(kind) if k is not types.NoneType)
        return None if value is None else typed(key, value, kind)
    if get_origin(kind) is tuple:
        if not isinstance(value, tuple | list):
            raise ConfigError(key, value, "a tuple")
        return tuple(typed(key, item, get_args(kind)[0]) for item in value)
    if issubclass(kind, StrEnum):
        return parse_choice(key, value, kind)
    if kind is EmbeddingLayer and isinstance(value, str | EmbeddingLayer):
        return parse_embedding_layer(value, key)
    if kind is Path and isinstance(value, str | Path):
        return _path(key, value)
    if isinstance(value, bool):  # a number to Python
        if kind is bool:
            return value
    elif kind is str and isinstance(value, str):
        return value
    elif kind is int and isinstance(value, Integral):
        return int(value)
    elif kind is float and isinstance(value, Real):
        return _finite(key, value)
    raise ConfigError(key, value, f"a value of type {kind.__name__}")


def _path(key: str, value: str | Path) -> Path:
    if not str(value).strip() or "\0" in str(value):
        raise ConfigError(key, value, "a path")
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise ConfigError(key, value, "a path below a home directory that there is") from None


def _finite(key: str, value: Real) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigError(key, value, "a finite number")
    return number


@dataclass(frozen=True)
class CacheConfig:
    """Everything `SemanticCache` needs to know. Text will do where a flag takes it, as `typed` says.

    Attributes:
        cache_dir: where catalog, media, KV extents and fusion states live; one directory, one format version.
        fusion_cache_dir: fusion states elsewhere than under ``cache_dir``.
        mode: off, dry-run or live.
        match: all or any (see `MatchPolicy`).
        scope: media or any (see `Scope`).
        exact: the exact text tier (L0.5).
        normalised: texts that are equal after `keys.normalise` alone are the same. Off, only byte-equal ones are: a
            question, or a few sentences of a context, that differ in typing may still be found similar, mostly at a
            cosine near 1, by vectors, guards and policy; all other texts of a donor have to be byte-equal.
            ``--match any`` asks for the texts of no other layer than the best, and is the same either way.
        semantic: the semantic text tier (L1).
        fusion: the fusion tier (L1.5).
        guards: words may veto an approximate match: a changed number, unit, date, negation, direction, name,
            code or word order (see `semkv.guards`). ``--match any`` goes without them.
        similarity_threshold: least cosine of the semantic text tier. At 1 even an equal vector may fall short of it,
            here and in a layer: cosines are float32, good to a millionth.
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
        policy: who has the last word on an approximate match: fixed, calibrated or bounded.
        max_error_rate: the bounded policy's limit on wrong approximate answers, as a share of all requests.
        calibration: what ``semkv calibrate`` wrote: the curve of the calibrated policy, the prior of the bounded one.
        verify_rate: share of approximate hits to be checked against the unchanged request's own answer; the bounded
            policy checks more where it knows little. None is 0.1 for the bounded policy, and 0 for the others.
    """

    cache_dir: Path
    fusion_cache_dir: Path | None = None
    mode: CacheMode = CacheMode.LIVE
    match: MatchPolicy = MatchPolicy.ALL
    scope: Scope = Scope.MEDIA
    exact: bool = True
    normalised: bool = True
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
    policy: PolicyName = PolicyName.FIXED
    max_error_rate: float = 0.01
    calibration: Path | None = None
    verify_rate: float | None = None

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            object.__setattr__(self, name, typed(name, getattr(self, name), kind))
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
            raise ConfigError("--max-entries", self.max_entries, "a positive number")
        if self.max_media_bytes < 1:
            raise ConfigError("max_media_bytes", self.max_media_bytes, "a positive number of bytes")
        if not 0.0 <= self.context_edit_share < 1.0:
            raise ConfigError("context_edit_share", self.context_edit_share, "a share from 0 to below 1")
        self._check_policy()

    def _check_policy(self) -> None:
        if self.verify_rate is not None:
            check_threshold("--verify-rate", self.verify_rate)
        if not 0.0 < self.max_error_rate < 1.0:
            raise ConfigError("--max-error-rate", self.max_error_rate, "a share above 0 and below 1, such as 0.01")
        if self.policy is PolicyName.CALIBRATED and self.calibration is None:
            raise ConfigError("--calibration", None, "a file that `semkv calibrate` wrote, for --policy calibrated")
        if self.policy is PolicyName.FIXED and self.calibration is not None:
            raise ConfigError("--calibration", str(self.calibration), "given with --policy calibrated or bounded only")

    @property
    def checked_share(self) -> float:
        """The share of approximate hits to check, with the policy's default filled in."""
        if self.verify_rate is not None:
            return self.verify_rate
        return 0.1 if self.policy is PolicyName.BOUNDED else 0.0
