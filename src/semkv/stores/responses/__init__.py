"""Stores of responses: in memory, in SQLite, in Redis."""

from __future__ import annotations

from pathlib import Path

from semkv.errors import ConfigError
from semkv.stores.responses.base import ResponseStore

_REDIS = ("redis://", "rediss://", "unix://")


def open_store(
    where: str, default: Path, *, max_bytes: int = 4 << 30, max_entries: int = 1_000_000, timeout_s: float = 0.25
) -> ResponseStore | None:
    """The store that a setting names.

    Args:
        where: a file (SQLite), ``memory`` (None is returned: `ResponseCache` is memory enough), or a URL that begins
            with ``redis://``, ``rediss://`` or ``unix://``; empty for the file ``default``.
        default: the file that is taken where ``where`` is empty.
        max_bytes, max_entries: bounds.
        timeout_s: longest wait for a shared store.

    Raises:
        ConfigError: it is none of these, or the client library is missing.
        StoreError: the file cannot be opened. A Redis that is down is no error: it is tried again later.
    """
    if where == "memory":
        return None
    if where.startswith(_REDIS):
        from semkv.stores.responses.redis import RedisStore

        return RedisStore(where, max_bytes=max_bytes, max_entries=max_entries, timeout_s=timeout_s)
    if "://" in where:
        raise ConfigError("--store", where.partition("://")[0] + "://", "a file, memory, or a redis:// URL")
    from semkv.stores.responses.sqlite import SqliteStore

    file = Path(where) if where else default
    return SqliteStore(file, max_bytes=max_bytes, max_entries=max_entries)
