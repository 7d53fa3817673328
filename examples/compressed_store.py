"""A store of answers of your own: SQLite with compressed payloads.

    SEMKV_SECRET=sixteen-characters PYTHONPATH=examples semkv serve --upstream http://127.0.0.1:8000 \
      --store compressed_store:open_compressed

``semkv_gateway.ResponseStore`` says what each method promises.
"""

import zlib
from dataclasses import replace
from pathlib import Path

from semkv_gateway.responses.sqlite import SqliteStore
from semkv_gateway.responses.store import StoredResponse


class CompressedStore(SqliteStore):
    """Like its base, with smaller payloads."""

    def get(self, key: str) -> StoredResponse | None:
        found = super().get(key)
        return None if found is None else replace(found, payload=zlib.decompress(found.payload))

    def put(self, response: StoredResponse, since: str = "") -> bool:
        return super().put(replace(response, payload=zlib.compress(response.payload)), since)


def open_compressed(default: Path, max_bytes: int) -> CompressedStore:
    """A file next to ``default``, the database that may hold plain answers."""
    return CompressedStore(default.with_name("compressed.sqlite"), max_bytes=max_bytes)
