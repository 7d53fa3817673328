"""How much a store directory may hold."""

from __future__ import annotations

from dataclasses import dataclass

from semkv.errors import ConfigError

KV_MAX_BYTES = 32 << 30


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much a store directory may hold, over all models and ranks that share it. 0: no bound of this kind.

    Attributes:
        max_bytes: of all extent files, headers included.
        max_blocks: of all extents.
        max_age_s: seconds after which what was stored is neither served nor kept.
    """

    max_bytes: int = KV_MAX_BYTES
    max_blocks: int = 0
    max_age_s: float = 0.0

    def __post_init__(self) -> None:
        for key in ("max_bytes", "max_blocks", "max_age_s"):
            if not 0 <= getattr(self, key) < 2**63:  # what SQLite and a clock can hold
                raise ConfigError(key, getattr(self, key), "0 (no bound) or a positive number below 2**63")
