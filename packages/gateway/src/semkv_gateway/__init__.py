"""The gateway in front of a vLLM server, and the same as middleware inside it."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """``Middleware``, loaded when vLLM asks for it: the rest of the package needs no web framework."""
    if name == "Middleware":
        from semkv_gateway.app import Middleware

        return Middleware
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
