"""What stores hold, for operators: heads of answers, the latest first, a few at a time.

A file goes by when an answer was written, Redis by when it was last used. A store of the user's own may have a method
``scan`` that does the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress

from semkv.errors import CorruptValue, StoreError
from semkv_gateway.responses.redis import RedisStore
from semkv_gateway.responses.spread import SpreadStore
from semkv_gateway.responses.sqlite import SqliteStore
from semkv_gateway.responses.store import MemoryStore, ResponseStore, StoredResponse, decode

Placed = tuple[str, StoredResponse]
"""Where an answer is, and the answer."""

_ROWS = (
    "SELECT rowid, coalesce(CAST(key AS TEXT), ''), coalesce(CAST(head AS BLOB), x'') FROM responses"
    " WHERE rowid<? ORDER BY rowid DESC LIMIT ?"
)
_LAST = (1 << 63) - 1
_PLACE = re.compile(r"\d{1,18}", re.ASCII)


def listed(
    store: ResponseStore,
    after: str,
    most: int,
    now: float,
) -> list[Placed]:
    """Answers without their payloads after a place; none at the end. Those that may not be served any more are left
    out. Blocks.

    Raises:
        StoreError: the store cannot be reached, or has no such method.
    """
    while True:
        found, place = _batch(store, after, most)
        alive = [(at, response) for at, response in found if response.stale_until > now]
        if alive or not place:
            return alive
        after = place


def _batch(
    store: ResponseStore,
    after: str,
    most: int,
) -> tuple[list[Placed], str]:
    """Answers, and the place behind all that was looked at; empty at the end."""
    if isinstance(store, MemoryStore):
        return _of_memory(store, after, most)
    if isinstance(store, SqliteStore):
        return _of_file(store, after, most)
    if isinstance(store, RedisStore | SpreadStore):
        return _of_redis(store, after, most)
    scan = getattr(store, "scan", None)
    if scan is None:
        raise StoreError("this --store cannot list what it has")
    found = list(scan(after, most))
    return found, found[-1][0] if found else ""


def _of_memory(
    store: MemoryStore,
    after: str,
    most: int,
) -> tuple[list[Placed], str]:
    placed = [(f"{held.created:020.6f} {held.key}", held) for held in store.held()]
    before = [pair for pair in placed if not after or pair[0] < after]
    found = sorted(
        before,
        key=lambda pair: pair[0],
        reverse=True,
    )[:most]
    return found, found[-1][0] if found else ""


def _of_file(
    store: SqliteStore,
    after: str,
    most: int,
) -> tuple[list[Placed], str]:
    last = int(after) if _PLACE.fullmatch(after) else _LAST
    rows = store.database.rows(_ROWS, last, most)
    return _decoded(rows), str(rows[-1][0]) if rows else ""


def _of_redis(
    store: RedisStore | SpreadStore,
    after: str,
    most: int,
) -> tuple[list[Placed], str]:
    first = int(after) if _PLACE.fullmatch(after) else 0
    heads = store.heads(first, most)
    rows = [(first + n, key, head) for n, (key, head) in enumerate(heads, 1)]
    return _decoded(rows), str(rows[-1][0]) if rows else ""


def _decoded(rows: Sequence[tuple[int, str, bytes | None]]) -> list[Placed]:
    found = []
    for place, key, head in rows:
        with suppress(CorruptValue):
            if head is not None:
                found.append((str(place), decode(key, head, None)))
    return found
