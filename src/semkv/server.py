"""The gateway's name before it became a distribution of its own; kept for one release. Use `semkv_gateway`."""

from semkv_gateway import Middleware

__all__ = ["Middleware"]
