"""Which extent holds which block: one SQLite file per store directory, shared by every process that uses it.

The index is never the only copy: it is built again from the headers of the extents when it is missing or damaged.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from semkv.stores.eviction import ExtentUse

_SCHEMA = """
CREATE TABLE IF NOT EXISTS extents(
  extent TEXT PRIMARY KEY, namespace TEXT NOT NULL, blocks INTEGER NOT NULL, nbytes INTEGER NOT NULL,
  position INTEGER NOT NULL, last_use REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS blocks(
  namespace TEXT NOT NULL, hash BLOB NOT NULL, extent TEXT NOT NULL, row INTEGER NOT NULL,
  PRIMARY KEY(namespace, hash)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS blocks_by_extent ON blocks(extent);
CREATE TABLE IF NOT EXISTS layouts(
  engine TEXT NOT NULL, rank INTEGER NOT NULL, layout TEXT NOT NULL, created REAL NOT NULL,
  PRIMARY KEY(engine, rank)) WITHOUT ROWID;
"""
_LAYOUT_SECONDS = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Where a block is: row ``row`` of extent ``extent``."""

    extent: str
    row: int


class BlockIndex:
    """The index of one directory. Safe to use from several threads and processes.

    Every method may raise `sqlite3.Error`: the disk is full, read-only, or the file was damaged meanwhile.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            sqlite3.DatabaseError: the file is damaged.
        """
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, timeout=10.0, check_same_thread=False, isolation_level=None)
        try:
            self._db.execute("PRAGMA busy_timeout=10000")
            self._db.execute("PRAGMA journal_mode=WAL")
            # A lost commit is a lost cache entry, and its file is swept; a corrupt index cannot come of it.
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
            self._db.execute("SELECT count(*) FROM extents").fetchone()
        except sqlite3.Error:
            self._db.close()
            raise

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def find(self, namespace: str, hashes: Sequence[bytes]) -> list[BlockRef | None]:
        """Where each of ``hashes`` is, None for what is not stored."""
        query = "SELECT extent, row FROM blocks WHERE namespace=? AND hash=?"
        with self._lock:
            rows = [self._db.execute(query, (namespace, h)).fetchone() for h in hashes]
        return [None if r is None else BlockRef(*r) for r in rows]

    def find_prefix(self, namespace: str, hashes: Sequence[bytes]) -> list[BlockRef]:
        """Where the longest stored leading run of ``hashes`` is."""
        query = "SELECT extent, row FROM blocks WHERE namespace=? AND hash=?"
        refs: list[BlockRef] = []
        with self._lock:
            for h in hashes:
                row = self._db.execute(query, (namespace, h)).fetchone()
                if row is None:
                    break
                refs.append(BlockRef(*row))
        return refs

    def add(self, namespace: str, extent: str, hashes: Sequence[bytes], nbytes: int, position: int) -> int:
        """Commit an extent and return how many of its blocks were new; with none new, nothing is kept."""
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            new = self._db.executemany(
                "INSERT OR IGNORE INTO blocks VALUES(?,?,?,?)",
                ((namespace, h, extent, row) for row, h in enumerate(hashes)),
            ).rowcount
            if new:
                self._db.execute(
                    "INSERT OR REPLACE INTO extents VALUES(?,?,?,?,?,?)",
                    (extent, namespace, len(hashes), nbytes, position, time.time()),
                )
        return int(new)

    def remove(self, extents: Iterable[str]) -> None:
        ids = [(e,) for e in extents]
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("DELETE FROM blocks WHERE extent=?", ids)
            self._db.executemany("DELETE FROM extents WHERE extent=?", ids)

    def touch(self, extents: Iterable[str]) -> None:
        """Note that these were used now."""
        now = time.time()
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("UPDATE extents SET last_use=? WHERE extent=?", [(now, e) for e in extents])

    def totals(self, namespace: str | None = None) -> tuple[int, int, int]:
        """Extents, blocks and bytes, of one namespace or of all."""
        where, args = ("", ()) if namespace is None else (" WHERE namespace=?", (namespace,))
        query = f"SELECT count(*), coalesce(sum(blocks),0), coalesce(sum(nbytes),0) FROM extents{where}"  # noqa: S608
        with self._lock:
            row = self._db.execute(query, args).fetchone()
        return int(row[0]), int(row[1]), int(row[2])

    def uses(self, namespace: str | None = None) -> list[ExtentUse]:
        """What eviction may look at."""
        where, args = ("", ()) if namespace is None else (" WHERE namespace=?", (namespace,))
        query = f"SELECT extent, nbytes, blocks, last_use, position FROM extents{where}"  # noqa: S608
        with self._lock:
            return [ExtentUse(*row) for row in self._db.execute(query, args)]

    def has_extent(self, extent: str) -> bool:
        with self._lock:
            return self._db.execute("SELECT 1 FROM extents WHERE extent=?", (extent,)).fetchone() is not None

    def put_layout(self, engine: str, rank: int, layout: str) -> None:
        """Tell the scheduler of the same engine how this worker's blocks look."""
        now = time.time()
        with self._lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("DELETE FROM layouts WHERE created<?", (now - _LAYOUT_SECONDS,))
            self._db.execute("INSERT OR REPLACE INTO layouts VALUES(?,?,?,?)", (engine, rank, layout, now))

    def layouts(self, engine: str) -> dict[int, str]:
        """What the workers of an engine said, by rank."""
        with self._lock:
            rows = self._db.execute("SELECT rank, layout FROM layouts WHERE engine=?", (engine,)).fetchall()
        return {int(rank): str(layout) for rank, layout in rows}
