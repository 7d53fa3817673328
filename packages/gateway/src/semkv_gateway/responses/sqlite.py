"""Responses in the database of a cache, or in a file of their own: the default store."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from semkv.errors import CorruptValue
from semkv.stores.catalog import CATALOG, FORMAT
from semkv_gateway.responses.store import (
    CHECKSUM,
    LOG,
    REFUSALS,
    REFUSED_S,
    News,
    ResponseStore,
    Selector,
    StoredResponse,
    decode,
    encode,
    read_selectors,
)
from semkv_stores.database import Database, Schema

_TABLES = """
CREATE TABLE responses (
  key TEXT PRIMARY KEY, head BLOB NOT NULL, payload BLOB NOT NULL, created REAL NOT NULL, stale_until REAL,
  used REAL NOT NULL, nbytes INTEGER NOT NULL);
CREATE INDEX responses_used ON responses (used);
CREATE INDEX responses_stale ON responses (stale_until) WHERE stale_until IS NOT NULL;
CREATE TABLE totals (entries INTEGER NOT NULL, nbytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER responses_in AFTER INSERT ON responses BEGIN
  UPDATE totals SET entries=entries+1, nbytes=nbytes+NEW.nbytes; END;
CREATE TRIGGER responses_out AFTER DELETE ON responses BEGIN
  UPDATE totals SET entries=entries-1, nbytes=nbytes-OLD.nbytes; END;
CREATE TABLE invalidations (number INTEGER PRIMARY KEY AUTOINCREMENT, selector TEXT NOT NULL);
INSERT INTO invalidations VALUES (:now, '{"key": ""}');
"""
SCHEMA = Schema(
    tables=_TABLES,
    version=FORMAT,
    file=CATALOG,
    probes=("SELECT created FROM responses NOT INDEXED LIMIT 1",),
    added=("CREATE TABLE IF NOT EXISTS refusals (name TEXT NOT NULL UNIQUE, at REAL NOT NULL)",),
    first="responses",
)
"""The tables of responses, beside those of the catalog or in a file of their own."""

_TENANTS_KNOWN = 65_536  # whose bytes are remembered
_HEAD = f"CAST(substr(head, {CHECKSUM + 1}) AS TEXT)"
_TENANT = f"CASE WHEN json_valid({_HEAD}) THEN json_extract({_HEAD}, '$.partition') END"
# Numbers and bytes are cast: a damaged row may have anything in their place.
_BYTES = "CAST(total(nbytes) AS INTEGER)"
_TOTALS = f"SELECT CAST(total(entries) AS INTEGER), {_BYTES} FROM totals"  # noqa: S608
_HEAD_BYTES = "coalesce(CAST(head AS BLOB), x'')"
_RESPONSE = f"{_HEAD_BYTES}, coalesce(CAST(payload AS BLOB), x'')"
_NAME = "coalesce(CAST(key AS TEXT), '')"
_SIZE = "CAST(coalesce(nbytes, 0) AS INTEGER)"
_BY_TENANT = (
    f"SELECT CAST({_TENANT} AS TEXT), COUNT(*), {_BYTES}, "  # noqa: S608 (our own words)
    "CAST(coalesce(MIN(created), 0) AS REAL), CAST(coalesce(MAX(used), 0) AS REAL) "
    f"FROM responses GROUP BY {_TENANT} ORDER BY COUNT(*) DESC, 1"
)
_TENANTS = f"CREATE INDEX IF NOT EXISTS responses_tenant ON responses ({_TENANT}, used, nbytes)"
_USED_BY = f"SELECT {_BYTES} FROM responses WHERE {_TENANT}=?"  # noqa: S608
_OLDEST = f"SELECT rowid, {_SIZE} FROM responses WHERE key<>? ORDER BY used, rowid"  # noqa: S608
_OLDEST_OF = (
    f"SELECT rowid, {_SIZE} FROM responses WHERE key<>? AND {_TENANT}=? ORDER BY used, rowid"  # noqa: S608
)


class SqliteStore(ResponseStore):
    """A `Database`, which says how a damaged file is replaced; a damaged row is deleted.

    Args:
        path: the file; made when missing, as is its folder.
        max_bytes: bound on heads and payloads; the file is a little larger.
        max_tenant_bytes: bound on the heads and payloads of each tenant; 0 for none.
        timeout_s: how long to wait for another process's write.
        clock: seconds since the epoch.
        replace: as for `Database`.

    Raises:
        StoreError: as `Database`.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = 4 << 30,
        max_tenant_bytes: int = 0,
        timeout_s: float = 2.0,
        clock: Callable[[], float] = time.time,
        replace: bool = True,
    ) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.max_tenant_bytes = max_tenant_bytes
        self._left: dict[
            str, int
        ] = {}  # bytes that a tenant may write until they are counted again
        self._clock = clock
        self.database = Database(
            path,
            schema=SCHEMA,
            timeout_s=timeout_s,
            raises_store_error=True,
            replace=replace,
        )

    def get(self, key: str) -> StoredResponse | None:
        rows = self.database.rows(f"SELECT {_RESPONSE} FROM responses WHERE key=?", key)  # noqa: S608
        if not rows:
            return None
        try:
            response = decode(key, *rows[0])
        except CorruptValue:
            with self.database.write() as db:
                db.execute("DELETE FROM responses WHERE key=?", (key,))
            raise
        if response.stale_until <= self._clock():
            return None
        self.database.later(
            "UPDATE responses SET used=MAX(used, ?) WHERE key=?", self._clock(), key
        )
        return response

    def put(self, response: StoredResponse, since: str = "") -> bool:
        return self.put_all([(response, since)])[0]

    def put_all(self, responses: Sequence[tuple[StoredResponse, str]]) -> list[bool]:
        """Keep several in one transaction."""
        now = self._clock()
        forms = [encode(response) for response, _ in responses]
        with self.database.write() as db:
            news = {since: self._news(db, since) for since in {since for _, since in responses}}
            db.execute("DELETE FROM responses WHERE stale_until<=?", (now,))
            kept = []
            for (response, since), form in zip(responses, forms, strict=True):
                is_gone = bool(since) and news[since].hit(response)
                kept.append(not is_gone and self._insert(db, response, form, now))
                # After each one: the file keeps the size that the largest moment needed.
                nbytes = db.execute(_TOTALS).fetchone()[1]
                self._trim(db, nbytes, self.max_bytes, _OLDEST, response.key)
        return kept

    def _insert(
        self,
        db: sqlite3.Connection,
        response: StoredResponse,
        form: tuple[bytes, bytes],
        now: float,
    ) -> bool:
        """Keep one whose stored form this is, unless it is larger than its bound."""
        size = len(form[0]) + len(form[1])
        if size > min(self.max_bytes, self.max_tenant_bytes or self.max_bytes):
            return False
        until = None if response.stale_until == float("inf") else response.stale_until
        db.execute("DELETE FROM responses WHERE key=?", (response.key,))
        db.execute(
            "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)",
            (response.key, *form, response.created, until, now, size),
        )
        if self.max_tenant_bytes:
            self._trim_tenant(db, response, size)
        return True

    def _trim_tenant(self, db: sqlite3.Connection, response: StoredResponse, size: int) -> None:
        """Keep a tenant's bound. Its bytes are counted again when this process has written a fiftieth of the bound, or
        what was left of it."""
        tenant, most = response.partition, self.max_tenant_bytes
        left = self._left.get(tenant, 0) - size
        if left < 0:
            db.execute(_TENANTS)
            nbytes = db.execute(_USED_BY, (tenant,)).fetchone()[0]
            left = min(
                most - self._trim(db, nbytes, most, _OLDEST_OF, response.key, tenant), most // 50
            )
            if len(self._left) > _TENANTS_KNOWN:
                self._left.clear()
        self._left[tenant] = left

    def _trim(
        self, db: sqlite3.Connection, nbytes: int, most: int, oldest: str, *values: str
    ) -> int:
        """Bring ``nbytes`` down to 0.98 of their bound where they are above it, so that not every write has to. Returns
        the bytes that are left."""
        if nbytes > most:
            gone = []
            for row, size in db.execute(oldest, values):
                if nbytes <= most * 0.98:
                    break
                gone.append(row)
                nbytes -= size
            _delete(db, gone)
        return nbytes

    # -- invalidation -------------------------------------------------------------------------------------------

    def invalidate(self, selector: Selector, *, dry_run: bool = False) -> int:
        """What cannot be read goes too: it may be of the selector."""
        where, values = ("", ()) if selector.key is None else ("WHERE key=?", (selector.key,))
        gone = []
        with self.database if dry_run else self.database.write() as db:
            statement = f"SELECT rowid, {_NAME}, {_HEAD_BYTES} FROM responses {where}"  # noqa: S608 (our own words)
            for row, name, head in db.execute(statement, values):
                with suppress(CorruptValue):
                    if not selector.matches(decode(name, head, None)):
                        continue
                gone.append(row)
            if not dry_run:
                _delete(db, gone)
                db.execute(
                    "INSERT INTO invalidations (selector) VALUES (?)",
                    (json.dumps(selector.view()),),
                )
                db.execute(
                    "DELETE FROM invalidations WHERE number<=(SELECT MAX(number) FROM invalidations)-?",
                    (LOG,),
                )
        return len(gone)

    def news(self, cursor: str) -> News:
        with self.database as db:
            return self._news(db, cursor)

    def _news(self, db: sqlite3.Connection, cursor: str) -> News:
        last = str(db.execute("SELECT coalesce(MAX(number), 0) FROM invalidations").fetchone()[0])
        if cursor in ("", last):
            return News(last)
        later = "SELECT number, selector FROM invalidations WHERE number>=CAST(? AS INTEGER) ORDER BY number"
        rows = db.execute(later, (cursor,)).fetchall()
        if not rows or str(rows[0][0]) != cursor:  # another store's, or too old
            return News(last, None)
        return News(last, read_selectors(row[1] for row in rows[1:]))

    # -- credentials --------------------------------------------------------------------------------------------

    def refuse(self, name: str, *, refused: bool) -> None:
        with self.database.write() as db:
            db.execute("DELETE FROM refusals WHERE name=?", (name,))
            if refused:
                db.execute("INSERT INTO refusals VALUES (?, ?)", (name, self._clock()))
                db.execute(
                    "DELETE FROM refusals WHERE rowid<=(SELECT MAX(rowid) FROM refusals)-?",
                    (REFUSALS,),
                )

    def refused(self, name: str) -> bool:
        rows = self.database.rows(
            "SELECT CAST(coalesce(at, 0) AS REAL) FROM refusals WHERE name=?", name
        )
        return bool(rows) and self._clock() - rows[0][0] < REFUSED_S

    # -- operators ----------------------------------------------------------------------------------------------

    def usage(self) -> tuple[int, int]:
        return cast("tuple[int, int]", self.database.rows(_TOTALS)[0])

    def by_tenant(self) -> list[tuple[str | None, int, int, float, float]]:
        """What each tenant has, most responses first: `StoredResponse.partition` (None where a head cannot be read),
        responses, bytes, when the first was stored, and when one was last stored or read (which a gateway writes when
        it next stores one). Expired ones that are not deleted yet are counted."""
        return self.database.rows(_BY_TENANT)

    def verify(self, *, repair: bool = False) -> Iterator[str]:
        """Read every response: for each why it would not be served, or an empty string. ``repair`` deletes those."""
        some = f"SELECT rowid, {_NAME}, {_RESPONSE} FROM responses WHERE rowid>? ORDER BY rowid LIMIT 1"  # noqa: S608
        return self.database.faults(some, decode, _delete if repair else None)

    def close(self) -> None:
        self.database.close()


def _delete(db: sqlite3.Connection, rows: Iterable[int]) -> None:
    db.executemany("DELETE FROM responses WHERE rowid=?", ((row,) for row in rows))
