"""semkv: a hierarchical semantic cache on top of vLLM.

The names in ``__all__`` are the library's. Each is imported from its module when it is first asked for, so that
``import semkv`` and the command line stay light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semkv.cache import SemanticCache
    from semkv.config import CacheConfig
    from semkv.encoders import EmbeddingHook
    from semkv.encoders.text import TextEncoder
    from semkv.engines import Engine, EnginePrompt, EngineResult, FusionEngine, FusionProvider
    from semkv.errors import ConfigError, SemkvError, StoreError
    from semkv.index import Index
    from semkv.keys import media_id, model_fingerprint
    from semkv.tiers.policies import Decider, Decision
    from semkv.tiers.tier import Tier
    from semkv.types import (
        Entry,
        Match,
        MediaSegment,
        Namespace,
        Request,
        Role,
        Status,
        TextSegment,
    )

__version__ = "0.1.0"

__all__ = [
    "CacheConfig",
    "ConfigError",
    "Decider",
    "Decision",
    "EmbeddingHook",
    "Engine",
    "EnginePrompt",
    "EngineResult",
    "Entry",
    "FusionEngine",
    "FusionProvider",
    "Index",
    "Match",
    "MediaSegment",
    "Namespace",
    "Request",
    "Role",
    "SemanticCache",
    "SemkvError",
    "Status",
    "StoreError",
    "TextEncoder",
    "TextSegment",
    "Tier",
    "media_id",
    "model_fingerprint",
]

_MODULES = {
    "cache": "SemanticCache",
    "config": "CacheConfig",
    "encoders": "EmbeddingHook",
    "encoders.text": "TextEncoder",
    "engines": "Engine EnginePrompt EngineResult FusionEngine FusionProvider",
    "errors": "ConfigError SemkvError StoreError",
    "keys": "media_id model_fingerprint",
    "index": "Index",
    "tiers.tier": "Tier",
    "tiers.policies": "Decider Decision",
}
# The rest: `semkv.types`.
_ELSEWHERE = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_ELSEWHERE.get(name, 'types')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
