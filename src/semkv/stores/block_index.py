"""Which extent holds which block: one SQLite file per store directory, shared by every process that uses it.

The index is never the only copy: it is built again from the extents when it is missing or damaged. Then the sizes of
the files count at once, and the blocks are named as the headers are read (`adoption`): an extent of no blocks is one
that was found and not read yet.

It is also where the processes agree: an extent's bytes are reserved, and what must go for them is chosen, in one
transaction before the file is written, so that the bounds hold at every moment; and what a load is about to read is
held.
"""

from __future__ import annotations

import itertools
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from semkv.stores import ghosts
from semkv.stores.bounds import Bounds
from semkv.stores.eviction import ExtentUse, victims

_VERSION = 4
_SCHEMA = """
CREATE TABLE extents(
  extent TEXT PRIMARY KEY, namespace TEXT NOT NULL, blocks INTEGER NOT NULL, nbytes INTEGER NOT NULL,
  position INTEGER NOT NULL, created REAL NOT NULL, last_use REAL NOT NULL, frequent INTEGER NOT NULL,
  committed INTEGER NOT NULL, first BLOB NOT NULL, owner TEXT NOT NULL, writer TEXT NOT NULL) WITHOUT ROWID;
CREATE INDEX extents_by_creation ON extents(created);
CREATE INDEX extents_by_use ON extents(frequent, last_use, position DESC);
CREATE TABLE blocks(
  namespace TEXT NOT NULL, hash BLOB NOT NULL, extent TEXT NOT NULL, row INTEGER NOT NULL,
  PRIMARY KEY(namespace, hash)) WITHOUT ROWID;
CREATE INDEX blocks_by_extent ON blocks(extent);
CREATE TABLE holds(
  extent TEXT NOT NULL, holder TEXT NOT NULL, until REAL NOT NULL, PRIMARY KEY(extent, holder)) WITHOUT ROWID;
CREATE INDEX holds_by_holder ON holds(holder);
CREATE TABLE ghosts(
  namespace TEXT NOT NULL, first BLOB NOT NULL, nbytes INTEGER NOT NULL, frequent INTEGER NOT NULL, gone REAL NOT NULL,
  PRIMARY KEY(namespace, first)) WITHOUT ROWID;
CREATE TABLE arc(target REAL NOT NULL);
INSERT INTO arc VALUES(0);
CREATE TABLE layouts(
  engine TEXT NOT NULL, rank INTEGER NOT NULL, layout TEXT NOT NULL, created REAL NOT NULL,
  PRIMARY KEY(engine, rank)) WITHOUT ROWID;
CREATE TABLE disowned(
  writer TEXT NOT NULL, namespace TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY(writer, namespace)) WITHOUT ROWID;
CREATE TABLE generation(name TEXT NOT NULL);
"""
_INSERT = "INSERT OR REPLACE INTO extents VALUES(?,?,?,?,?,?,?,?,?,?,?,?)"
_MOST_ASKED = 512  # hashes in one query
_BUSY_MS = 10_000  # how long anything waits for another process's transaction
_LAYOUT_SECONDS = 7 * 86_400.0
_DISOWNED_SECONDS = 86_400.0  # by then nothing of what was under way waits any more

PENDING_SECONDS = 600.0
"""A reserved extent whose writer has said nothing for so long is given up: the writer died."""


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Where a block is: row ``row`` of extent ``extent``."""

    extent: str
    row: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for one extent, and what had to go for it."""

    granted: bool
    evicted: tuple[ExtentUse, ...] = ()


@dataclass(frozen=True, slots=True)
class NewExtent:
    """An extent that is about to be written; ``nbytes`` of the whole file, ``first`` its first block's hash, ``owner``
    and ``writer`` as in `container.ExtentHeader`."""

    extent: str
    namespace: str
    blocks: int
    nbytes: int
    position: int
    first: bytes
    owner: str = ""
    writer: str = ""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """An extent's file, not read yet: its size in bytes, and when it was written in seconds since the epoch."""

    extent: str
    nbytes: int
    created: float


class BlockIndex:
    """The index of one directory. Safe to use from several threads and processes.

    Every method may raise `sqlite3.Error`: the disk is full, read-only, or the file was damaged meanwhile.

    Attributes:
        generation: a name drawn when the file was made: what was found through one index says nothing about another's.
    """

    def __init__(self, path: Path, found: Callable[[], Iterable[FoundFile]]) -> None:
        """Open or create the file; ``found`` says which extents are there, and is asked where it is created.

        Raises:
            sqlite3.DatabaseError: the file is damaged, or of another version.
        """
        self._lock = threading.Lock()
        self._told_to_disown: set[tuple[str, str]] = set()
        self._db = sqlite3.connect(path, timeout=_BUSY_MS / 1000, check_same_thread=False, isolation_level=None)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            # A lost commit is a lost cache entry, and its file is swept; a corrupt index cannot come of it.
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._create(found)
            self._db.execute("SELECT count(*) FROM extents").fetchone()
            self.generation = str(self._db.execute("SELECT max(name) FROM generation").fetchone()[0])
        except sqlite3.Error:
            self._db.close()
            raise

    def _create(self, found: Callable[[], Iterable[FoundFile]]) -> None:
        with self._write() as db:  # one transaction: another process sees all of it or nothing
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version == _VERSION:
                return
            if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise sqlite3.DatabaseError(f"index of version {version}, this one is {_VERSION}")
            for statement in _SCHEMA.split(";"):
                db.execute(statement)
            rows = ((f.extent, "", 0, f.nbytes, 0, f.created, f.created, False, True, b"", "", "") for f in found())
            db.executemany(_INSERT, rows)
            db.execute("INSERT INTO generation VALUES(?)", (uuid.uuid4().hex,))
            db.execute(f"PRAGMA user_version={_VERSION}")

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def _write(self, *, wait: bool = True) -> Iterator[sqlite3.Connection]:
        """One transaction that no other process writes beside; without ``wait`` it begins at once or not at all."""
        if not self._lock.acquire(blocking=wait):  # a thread of this process, which may wait for another process
            error = sqlite3.OperationalError("the index is in use")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise error
        try:
            with self._db:
                if not wait:
                    self._db.execute("PRAGMA busy_timeout=0")
                try:
                    self._db.execute("BEGIN IMMEDIATE")
                finally:
                    if not wait:
                        self._db.execute(f"PRAGMA busy_timeout={_BUSY_MS}")
                yield self._db
        finally:
            self._lock.release()

    # -- finding ------------------------------------------------------------------------------------------------

    def find(self, namespace: str, hashes: Iterable[bytes]) -> Iterator[BlockRef | None]:
        """Where each of ``hashes`` is, None for what is not stored; lazily, so that a caller may stop at a miss."""
        rest, count = iter(hashes), 1
        while some := list(itertools.islice(rest, count)):
            marks = ",".join("?" * len(some))
            query = f"SELECT hash, extent, row FROM blocks WHERE namespace=? AND hash IN ({marks})"  # noqa: S608
            with self._lock:
                found = {h: BlockRef(extent, row) for h, extent, row in self._db.execute(query, (namespace, *some))}
            yield from map(found.get, some)
            count = min(8 * count, _MOST_ASKED)

    def created(self, extent: str) -> float | None:
        """When an extent was written, in seconds since the epoch; None where it is unknown."""
        with self._lock:
            row = self._db.execute("SELECT created FROM extents WHERE extent=? AND committed", (extent,)).fetchone()
        return None if row is None else float(row[0])

    def touch(self, extents: Iterable[str], *, again: bool = False) -> None:
        """Note that these were used now; ``again``: a use of its own, after which an extent counts as frequent."""
        rows = [(time.time(), again, e) for e in extents]
        with self._write() as db:
            db.executemany("UPDATE extents SET last_use=?, frequent=max(frequent, ?) WHERE extent=?", rows)

    def hold(self, extents: Iterable[str], holder: str, seconds: float) -> set[str]:
        """Keep extents from being evicted, by any process, until `release` or for so many seconds; they count as used.

        Returns:
            Those that were still there, and are now held.
        """
        now = time.time()
        held = set()
        with self._write() as db:
            db.execute("DELETE FROM holds WHERE until<?", (now,))
            for extent in extents:
                if db.execute("UPDATE extents SET last_use=?, frequent=1 WHERE extent=?", (now, extent)).rowcount:
                    db.execute("INSERT OR REPLACE INTO holds VALUES(?,?,?)", (extent, holder, now + seconds))
                    held.add(extent)
        return held

    def release(self, holder: str) -> None:
        """End what ``holder`` holds."""
        with self._write() as db:
            db.execute("DELETE FROM holds WHERE holder=?", (holder,))

    # -- writing ------------------------------------------------------------------------------------------------

    def reserve(self, new: NewExtent, bounds: Bounds, delete: Callable[[str], None]) -> Reservation:
        """Make room for an extent and take it, in one step; `commit` or `remove` must follow.

        Args:
            new: what is about to be written.
            bounds: of the directory.
            delete: deletes the file of an extent that has to go, before anyone else may take the room.
        """
        now = time.time()
        if (bounds.max_bytes and new.nbytes > bounds.max_bytes) or (
            bounds.max_blocks and new.blocks > bounds.max_blocks
        ):
            return Reservation(False)
        with self._write() as db:
            if _disowned(db, new):
                return Reservation(False)
            target, returned = ghosts.target(db, new.namespace, new.first, bounds)
            _, blocks, nbytes = _totals(db)
            over_bytes = nbytes + new.nbytes - bounds.max_bytes if bounds.max_bytes else 0
            over_blocks = blocks + new.blocks - bounds.max_blocks if bounds.max_blocks else 0
            gone: list[ExtentUse] = []
            if over_bytes > 0 or over_blocks > 0:
                kept = db.execute("SELECT coalesce(sum(nbytes),0) FROM extents WHERE NOT frequent").fetchone()[0]
                recent, frequent = (_evictable(db, now, frequent=which) for which in (False, True))
                for use in victims(recent, frequent, kept, target):
                    gone.append(use)
                    over_bytes, over_blocks = over_bytes - use.nbytes, over_blocks - use.blocks
                    if over_bytes <= 0 and over_blocks <= 0:
                        break
                else:
                    return Reservation(False)  # nothing was written: the rest is held by loads
            ghosts.leave(db, gone, bounds, now)
            _delete(db, [use.extent for use in gone])
            for use in gone:
                delete(use.extent)
            db.execute("UPDATE arc SET target=?", (target,))
            row = (new.extent, new.namespace, new.blocks, new.nbytes, new.position, now, now, returned, False)
            db.execute(_INSERT, (*row, new.first, new.owner, new.writer))
        return Reservation(True, tuple(gone))

    def commit(self, new: NewExtent, hashes: Sequence[bytes]) -> int:
        """Name the blocks of a reserved extent whose file is there now, and return how many were new.

        With none new, or where the reservation was given up meanwhile, nothing is kept: the file must go.
        """
        with self._write() as db:
            if not db.execute("SELECT 1 FROM extents WHERE extent=?", (new.extent,)).fetchone():
                return 0
            added = self._name(db, new.namespace, new.extent, hashes)
            if added:
                db.execute("UPDATE extents SET committed=1 WHERE extent=?", (new.extent,))
            else:
                _delete(db, [new.extent])
        return added

    @staticmethod
    def _name(db: sqlite3.Connection, namespace: str, extent: str, hashes: Sequence[bytes]) -> int:
        rows = ((namespace, h, extent, row) for row, h in enumerate(hashes))
        return int(db.executemany("INSERT OR IGNORE INTO blocks VALUES(?,?,?,?)", rows).rowcount)

    def unread(self, most: int) -> list[str]:
        """Extents that were found without an index and not read yet, the youngest first."""
        query = "SELECT extent FROM extents WHERE blocks=0 ORDER BY created DESC LIMIT ?"
        with self._lock:
            return [row[0] for row in self._db.execute(query, (most,))]

    def adopt(self, read: Iterable[tuple[NewExtent, Sequence[bytes]]]) -> list[str]:
        """Name the blocks of extents that were `unread`; what another process adopted or evicted meanwhile is left.

        Returns:
            Those without a block that is not stored already, and disowned ones; they are forgotten, and their files
            must go.
        """
        fields = "namespace=?, blocks=?, position=?, first=?, owner=?, writer=?"
        query = f"UPDATE extents SET {fields} WHERE extent=? AND blocks=0"  # noqa: S608
        useless: list[str] = []
        with self._write() as db:
            for new, hashes in read:
                row = (new.namespace, new.blocks, new.position, new.first, new.owner, new.writer, new.extent)
                if db.execute(query, row).rowcount and (
                    _disowned(db, new) or not self._name(db, new.namespace, new.extent, hashes)
                ):
                    useless.append(new.extent)
            _delete(db, useless)
        return useless

    def remove(self, extents: Iterable[str]) -> None:
        with self._write() as db:
            _delete(db, extents)

    def disown(self, namespace: str, writer: str) -> list[str]:
        """Forget what ``writer`` wrote under this namespace, and take nothing more of it there; the files must go.
        The first call waits for others as all do, further ones do not: engines try again in each step."""
        what, now = (writer, namespace), time.time()
        first = what not in self._told_to_disown
        self._told_to_disown.add(what)
        with self._write(wait=first) as db:
            db.execute("DELETE FROM disowned WHERE at<?", (now - _DISOWNED_SECONDS,))
            db.execute("INSERT OR REPLACE INTO disowned VALUES(?,?,?)", (writer, namespace, now))
            query = "SELECT extent FROM extents WHERE namespace=? AND writer=?"
            gone = [row[0] for row in db.execute(query, (namespace, writer))]
            _delete(db, gone)
        return gone

    def expired(self, before: float) -> list[str]:
        """Extents written before this moment, and those whose writer died."""
        query = "SELECT extent FROM extents WHERE created<? OR (NOT committed AND created<?)"
        with self._lock:
            return [row[0] for row in self._db.execute(query, (before, time.time() - PENDING_SECONDS))]

    # -- looking at it ------------------------------------------------------------------------------------------

    def totals(self, namespace: str | None = None) -> tuple[int, int, int]:
        """Extents, blocks and bytes, of one namespace or of all; reserved and unread ones are among all."""
        with self._lock:
            return _totals(self._db, namespace)

    def extents(self, namespace: str | None = None) -> list[str]:
        """All extents of a namespace, or of the directory."""
        where, args = ("", ()) if namespace is None else (" WHERE namespace=?", (namespace,))
        with self._lock:
            return [row[0] for row in self._db.execute(f"SELECT extent FROM extents{where}", args)]  # noqa: S608

    def owned(self, owner: str) -> list[str]:
        """All extents of a tenant."""
        with self._lock:
            return [row[0] for row in self._db.execute("SELECT extent FROM extents WHERE owner=?", (owner,))]

    def ages(self, owners: Sequence[str] | None = None) -> dict[str, tuple[int, int, int, float, float]]:
        """By namespace: extents, blocks, bytes, when the oldest was written and the latest used; of some tenants."""
        whose = "" if owners is None else f" AND owner IN ({','.join('?' * len(owners))})"
        query = "SELECT namespace, count(*), sum(blocks), sum(nbytes), min(created), max(last_use) FROM extents"
        with self._lock:
            rows = self._db.execute(f"{query} WHERE committed{whose} GROUP BY namespace", tuple(owners or ()))
            return {row[0]: tuple(row[1:]) for row in rows}

    # -- layouts ------------------------------------------------------------------------------------------------

    def put_layout(self, engine: str, rank: int, layout: str) -> None:
        """Tell the scheduler of the same engine how this worker's blocks look."""
        now = time.time()
        with self._write() as db:
            db.execute("DELETE FROM layouts WHERE created<?", (now - _LAYOUT_SECONDS,))
            db.execute("INSERT OR REPLACE INTO layouts VALUES(?,?,?,?)", (engine, rank, layout, now))

    def layouts(self, engine: str) -> dict[int, str]:
        """What the workers of an engine said, by rank."""
        with self._lock:
            rows = self._db.execute("SELECT rank, layout FROM layouts WHERE engine=?", (engine,)).fetchall()
        return {int(rank): str(layout) for rank, layout in rows}


def _disowned(db: sqlite3.Connection, new: NewExtent) -> bool:
    query = "SELECT 1 FROM disowned WHERE writer=? AND namespace=?"
    return db.execute(query, (new.writer, new.namespace)).fetchone() is not None


def _totals(db: sqlite3.Connection, namespace: str | None = None) -> tuple[int, int, int]:
    where, args = ("", ()) if namespace is None else (" WHERE namespace=?", (namespace,))
    query = f"SELECT count(*), coalesce(sum(blocks),0), coalesce(sum(nbytes),0) FROM extents{where}"  # noqa: S608
    row = db.execute(query, args).fetchone()
    return int(row[0]), int(row[1]), int(row[2])


def _evictable(db: sqlite3.Connection, now: float, *, frequent: bool) -> Iterator[ExtentUse]:
    """What may go, in the order in which it goes: not what a load holds, and not what is being written."""
    query = (
        "SELECT extent, nbytes, blocks FROM extents WHERE frequent=? AND (committed OR created<?) AND NOT EXISTS "
        "(SELECT 1 FROM holds WHERE holds.extent=extents.extent AND until>=?) ORDER BY last_use, position DESC"
    )
    rows = db.execute(query, (frequent, now - PENDING_SECONDS, now))
    return (ExtentUse(extent, nbytes, blocks, frequent) for extent, nbytes, blocks in rows)


def _delete(db: sqlite3.Connection, extents: Iterable[str]) -> None:
    ids = [(e,) for e in extents]
    db.executemany("DELETE FROM blocks WHERE extent=?", ids)
    db.executemany("DELETE FROM extents WHERE extent=?", ids)
