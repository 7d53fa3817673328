"""Settings of the connectors, as they stand in ``kv_connector_extra_config`` and ``ec_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from semkv.config import NOT_NEGATIVE, check, default_cache_dir
from semkv.connectors import TIER
from semkv.errors import ConfigError
from semkv.stores.blocks import KV_MAX_BYTES, Bounds
from semkv.stores.fusion import FUSION_MAX_BYTES


@dataclass(frozen=True, slots=True)
class KVSettings:
    """Settings of the KV connector.

    Attributes:
        cache_dir: the directory; KV blocks go under ``kv``.
        max_bytes: bound on the bytes of all KV block files in the directory; 0 for none.
        max_blocks: bound on the blocks in the directory; 0 for none.
        max_age_s: seconds after which a block is neither served, from host memory or the disk, nor kept; 0 for ever.
        capture_decode: also store the blocks of generated tokens.
        host_bytes: host memory for KV blocks, of all ranks together, in ``/dev/shm``; 0 takes 4 GiB beside a GPU and
            256 MiB on a CPU. Where ``/dev/shm`` has less room, it gets four fifths of that.
        break_even: do not load from the disk what is computed faster, by what was measured in this engine.
        report: tell each request's outcome in its ``kv_transfer_params``, under ``semkv``.
        fixed_weights: the weights of a running engine are never exchanged. Then what is stored stays through sleep,
            pause and resets, at which vLLM does not tell whether other weights follow. Never set it where they do:
            what the old weights computed would be served.
        secondary_tiers: tiers of vLLM below host memory (``p2p``, ``obj``, ...) in the order of their lookup. The
            entry ``{"type": "semkv"}`` is ours; without it ours comes first.
    """

    cache_dir: Path = field(default_factory=default_cache_dir)
    max_bytes: Annotated[int, NOT_NEGATIVE] = KV_MAX_BYTES
    max_blocks: Annotated[int, NOT_NEGATIVE] = 0
    max_age_s: Annotated[float, NOT_NEGATIVE] = 0.0
    capture_decode: bool = False
    host_bytes: Annotated[int, NOT_NEGATIVE] = 0
    break_even: bool = True
    report: bool = True
    fixed_weights: bool = False
    secondary_tiers: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        check(self, flags=False)
        if not all(tier.get("type") for tier in self.secondary_tiers):
            raise ConfigError("secondary_tiers", list(self.secondary_tiers), "a list of objects, each with a type")
        if sum(tier.get("type") == TIER for tier in self.secondary_tiers) > 1:
            raise ConfigError("secondary_tiers", list(self.secondary_tiers), f"at most one tier of type {TIER!r}")

    def bounds(self) -> Bounds:
        return Bounds(self.max_bytes, self.max_blocks, self.max_age_s)

    def tiers(self) -> list[dict[str, Any]]:
        """All tiers below host memory, ours among them."""
        tiers = [dict(tier) for tier in self.secondary_tiers]
        return tiers if any(tier.get("type") == TIER for tier in tiers) else [{"type": TIER}, *tiers]


@dataclass(frozen=True, slots=True)
class ECSettings:
    """Settings of the encoder-cache connector.

    Attributes:
        cache_dir: the directory; fusion states go under ``fusion``.
        fusion_dir: the fusion states' own directory instead of ``cache_dir/fusion``.
        max_bytes: bound on the bytes of all fusion states in the directory; 0 for none.
        max_items: bound on their number; 0 for none.
        max_age_s: seconds after which a state is neither served, from host memory or the disk, nor kept; 0 for ever.
        host_bytes: bound of the host memory for fusion states; 0 keeps none.
        report: tell each request's outcome in its ``ec_transfer_params``, under ``semkv``.
    """

    cache_dir: Path = field(default_factory=default_cache_dir)
    fusion_dir: Path | None = None
    max_bytes: Annotated[int, NOT_NEGATIVE] = FUSION_MAX_BYTES
    max_items: Annotated[int, NOT_NEGATIVE] = 0
    max_age_s: Annotated[float, NOT_NEGATIVE] = 0.0
    host_bytes: Annotated[int, NOT_NEGATIVE] = 1 << 30
    report: bool = True

    def __post_init__(self) -> None:
        check(self, flags=False)

    def bounds(self) -> Bounds:
        return Bounds(self.max_bytes, self.max_items, self.max_age_s)

    @property
    def root(self) -> Path:
        return self.fusion_dir or self.cache_dir / "fusion"


_S = TypeVar("_S", KVSettings, ECSettings)


def read_settings(kind: type[_S], extra: Mapping[str, Any] | None) -> _S:
    """Make settings from a connector's extra config.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or range.
    """
    known = [item.name for item in fields(kind)]
    for key in extra or {}:
        if key not in known:
            raise ConfigError(f"{kind.__name__} key", key, known)
    return kind(**(extra or {}))
