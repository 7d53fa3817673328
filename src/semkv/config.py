"""Settings of the cache, checked when they are made.

A wrong value is a `ConfigError` that names the key, the value and what is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from semkv.errors import ConfigError
from semkv.types import DEFAULT_LAYER_THRESHOLD, CacheMode, EmbeddingLayer, MatchPolicy, PolicyName, Scope

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
        normalised: texts that are equal after `keys.normalise` alone are the same. Off, only byte-equal ones are: a
            question, or a few sentences of a context, that differ in typing may still be found similar, mostly at a
            cosine near 1, by vectors, guards and policy; all other texts of a donor have to be byte-equal.
            ``--match any`` asks for the texts of no other layer than the best, and is the same either way.
        semantic: the semantic text tier (L1).
        fusion: the fusion tier (L1.5).
        guards: words may veto an approximate match: a changed number, unit, date, negation, direction, name,
            code or word order (see `semkv.tiers.guards`). ``--match any`` goes without them.
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
