"""Settings of the connectors, as they stand in ``kv_connector_extra_config`` and ``ec_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from semkv.config import default_cache_dir, typed
from semkv.errors import ConfigError
from semkv.stores.bounds import KV_MAX_BYTES, Bounds
from semkv.stores.fusion import FUSION_MAX_BYTES


@dataclass(frozen=True, slots=True)
class KVSettings:
    """Settings of the KV connector.

    Attributes:
        cache_dir: the directory; KV blocks go under ``kv``.
        max_bytes: bound on the bytes of all KV extents in the directory; 0 for none.
        max_blocks: bound on the blocks of all KV extents in the directory (of every rank); 0 for none.
        max_age_s: seconds after which what was stored is neither served, from host memory or the disk, nor kept;
            0 for ever.
        capture_decode: also keep the blocks of generated tokens.
        host_bytes: bound of the host memory of each process, for KV blocks and fusion states together; page-locked
            on a GPU. Captures pass through it, and loads.
        staging_bytes: GPU memory of each rank for copies, taken beyond what vLLM was told to use. Where it is smaller
            than what a step computes, the step may wait for the bus.
        read_threads: of each rank, for the disk.
        break_even: compute a prompt's blocks where that is faster than loading them, by what was measured; on a
            GPU.
        queue_bytes: captured bytes that may wait for the disk; what comes on top is dropped and counted.
        max_extent_blocks: blocks per file at most.
        report: tell each request's outcome in its ``kv_transfer_params``, under ``semkv``.
        recompute_on_failure: turn vLLM's ``kv_load_failure_policy`` to ``recompute`` for this engine: its default
            ``fail`` ends a request whose load failed, which no cache should do.
        fixed_weights: the weights of a running engine are never exchanged. Then what is stored stays through sleep,
            pause and resets, at which vLLM does not tell whether other weights follow. Never where they do: what the
            old ones computed would be served.
        stable_hashes: where vLLM (before 0.29) seeds its block hashes at random, seed them with ``PYTHONHASHSEED=0``
            so that a restart finds what was stored. Only for the cryptographic hashes.
    """

    cache_dir: Path
    max_bytes: int = KV_MAX_BYTES
    max_blocks: int = 0
    max_age_s: float = 0.0
    capture_decode: bool = False
    host_bytes: int = 4 << 30
    staging_bytes: int = 768 << 20
    read_threads: int = 8
    break_even: bool = True
    queue_bytes: int = 2 << 30
    max_extent_blocks: int = 256
    report: bool = True
    recompute_on_failure: bool = True
    fixed_weights: bool = False
    stable_hashes: bool = True

    def __post_init__(self) -> None:
        for key in ("host_bytes", "staging_bytes", "read_threads", "queue_bytes", "max_extent_blocks"):
            if getattr(self, key) < 1:
                raise ConfigError(key, getattr(self, key), "a positive number")
        _not_negative(self, "max_bytes", "max_blocks", "max_age_s")

    def bounds(self) -> Bounds:
        return Bounds(self.max_bytes, self.max_blocks, self.max_age_s)


@dataclass(frozen=True, slots=True)
class ECSettings:
    """Settings of the encoder-cache connector.

    Attributes:
        cache_dir: the directory; fusion states go under ``fusion``.
        fusion_dir: the fusion states' own directory instead; empty for ``cache_dir/fusion``.
        max_bytes: bound on the bytes of all fusion states in the directory; 0 for none.
        max_items: bound on their number; 0 for none.
        max_age_s: seconds after which what was stored is neither served, from host memory or the disk, nor kept;
            0 for ever.
        host_bytes: bound of the host memory where the KV connector is not in the same process with the same
            ``cache_dir``; where it is, fusion states share its memory, under its bound. 0 keeps none in either.
        queue_bytes: bytes that may wait for the disk; what comes on top is dropped and counted.
        report: tell each request's outcome in its ``ec_transfer_params``, under ``semkv``.
    """

    cache_dir: Path
    fusion_dir: str = ""
    max_bytes: int = FUSION_MAX_BYTES
    max_items: int = 0
    max_age_s: float = 0.0
    host_bytes: int = 1 << 30
    queue_bytes: int = 512 << 20
    report: bool = True

    def __post_init__(self) -> None:
        _not_negative(self, "max_bytes", "max_items", "max_age_s", "host_bytes")
        if self.queue_bytes < 1:
            raise ConfigError("queue_bytes", self.queue_bytes, "a positive number")
        if self.fusion_dir:
            typed("fusion_dir", self.fusion_dir, Path)

    def bounds(self) -> Bounds:
        return Bounds(self.max_bytes, self.max_items, self.max_age_s)

    @property
    def root(self) -> Path:
        return Path(self.fusion_dir).expanduser() if self.fusion_dir else self.cache_dir / "fusion"


def _not_negative(settings: KVSettings | ECSettings, *keys: str) -> None:
    for key in keys:
        if not getattr(settings, key) >= 0:
            raise ConfigError(key, getattr(settings, key), "0 (none) or a positive number")


_S = TypeVar("_S", KVSettings, ECSettings)


def read_settings(kind: type[_S], extra: Mapping[str, Any] | None) -> _S:
    """Make settings from a connector's extra config.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or range.
    """
    kinds = get_type_hints(kind)
    values: dict[str, Any] = {} if extra and "cache_dir" in extra else {"cache_dir": default_cache_dir()}
    for key, value in (extra or {}).items():
        if key not in kinds:
            raise ConfigError(f"{kind.__name__} key", key, kinds)
        values[key] = typed(key, value, kinds[key])
    return kind(**values)
