"""The store of responses that ``--store`` names."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from semkv import plug
from semkv.errors import ConfigError, SemkvError, StoreError
from semkv_gateway.responses.store import ResponseStore

_SCHEMES = ("redis://", "rediss://", "unix://", "redis+cluster://", "rediss+cluster://")


def is_redis(where: str) -> bool:
    """Whether a setting names a Redis, or a cluster of them."""
    return where.startswith(_SCHEMES)


def open_store(
    where: str,
    default: Path,
    *,
    max_bytes: int = 4 << 30,
    max_tenant_bytes: int = 0,
    timeout_s: float = 0.25,
    clock: Callable[[], float] = time.time,
) -> ResponseStore | None:
    """The store that a setting names.

    Args:
        where: a file (SQLite), ``memory`` (None is returned: `ResponseCache` is memory enough), a URL of Redis, or the
            dotted path of the user's own; empty for the file ``default``.
        max_bytes: bound on what it holds.
        max_tenant_bytes: bound on what each tenant has in a file; 0 for none.
        timeout_s: longest wait for a shared store.
        clock: seconds since the epoch.

    Raises:
        ConfigError: it is none of these, or the client library is missing.
        StoreError: the file cannot be opened. A Redis that is down is no error: it is tried again later.
    """
    if max_tenant_bytes and (where == "memory" or "://" in where or plug.is_path(where)):
        raise ConfigError(
            "--tenant-mib",
            max_tenant_bytes >> 20,
            "0 with this --store: only a file has a bound by tenant",
        )
    if where == "memory":
        return None
    if is_redis(where):
        from semkv_gateway.responses.redis import RedisStore
        from semkv_gateway.responses.spread import SpreadStore

        kind = SpreadStore if "+cluster://" in where else RedisStore
        return kind(
            where,
            max_bytes=max_bytes,
            timeout_s=timeout_s,
            clock=clock,
        )
    if plug.is_path(where):
        own = plug.require(
            "--store", plug.load("--store", where, default, max_bytes), ResponseStore, where
        )
        return cast("ResponseStore", _Guarded(own))
    if "://" in where:
        allowed = f"a file, memory, a redis:// or redis+cluster:// URL, or {plug.FORM}"
        raise ConfigError("--store", where.partition("://")[0] + "://", allowed)
    from semkv_gateway.responses.sqlite import SqliteStore

    file = Path(where) if where else default
    return SqliteStore(
        file,
        max_bytes=max_bytes,
        max_tenant_bytes=max_tenant_bytes,
        clock=clock,
    )


class _Guarded:
    """A user's store: whatever it raises is a `StoreError`, and so is an answer that lies under another key."""

    unreplicated = 0

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == "put_all":  # a class made of one of ours may have a `put` of its own alone
            raise AttributeError(name)
        method = getattr(self._store, name)

        def call(*arguments: Any, **more: Any) -> Any:
            try:
                found = method(*arguments, **more)
                if name == "get" and found is not None and found.key != arguments[0]:
                    raise StoreError(
                        f"--store: get returned an answer of another key, {found.key!r}"
                    )
            except SemkvError:
                raise
            except Exception as error:
                raise StoreError(f"--store: {name}: {error!r}") from error
            return found

        return call
