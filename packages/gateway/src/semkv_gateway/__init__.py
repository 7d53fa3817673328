"""The gateway in front of a vLLM server, and the same as middleware inside it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from semkv_gateway.app import Middleware
    from semkv_gateway.responses.store import ResponseStore

__all__ = ["Middleware", "ResponseStore"]

_MODULES = {"Middleware": "app", "ResponseStore": "responses.store"}


def __getattr__(name: str) -> Any:
    """A name of ``__all__``, loaded when it is asked for: the rest of the package needs no web framework."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
