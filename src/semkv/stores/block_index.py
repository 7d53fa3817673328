"""Which block file holds which block: one SQLite file for each store directory, shared by all processes that use it.

The index is never the only copy: it is built again from the block files where it is missing or damaged. Then the sizes
of the files count at once, and their blocks are found as the headers are read: until then a file has no blocks here.

It is also where the processes agree. Bytes are reserved, and what must go for them is chosen, in one transaction before
a file is written, so that the bounds hold at every moment. For the same reason every file that the index forgets is
deleted in the transaction that forgets it: nobody else may take its room before. A purge empties the index in place
and says so to all.

Everything but numbers is stored as bytes, so that a flipped bit makes a row that is not found, and no fault. Moments
are microseconds since the epoch here, and seconds everywhere else.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VERSION = 5
_SCHEMA = """
CREATE TABLE files(
  number INTEGER PRIMARY KEY, namespace BLOB NOT NULL, blocks INTEGER NOT NULL, nbytes INTEGER NOT NULL,
  created INTEGER NOT NULL, used INTEGER NOT NULL, again INTEGER NOT NULL, committed INTEGER NOT NULL,
  owner BLOB NOT NULL, writer BLOB NOT NULL);
CREATE INDEX files_by_use ON files(again, used);
CREATE TABLE blocks(key BLOB PRIMARY KEY, file INTEGER NOT NULL, row INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX blocks_by_file ON blocks(file);
CREATE TABLE purges(id INTEGER PRIMARY KEY, owner BLOB, before INTEGER);
CREATE TABLE disowned(writer BLOB NOT NULL, namespace BLOB NOT NULL, at INTEGER NOT NULL,
  PRIMARY KEY(writer, namespace)) WITHOUT ROWID;
CREATE TABLE generation(name BLOB NOT NULL);
"""
_INSERT = "INSERT INTO files VALUES(?,?,?,?,?,?,?,?,?,?)"
_ASKED = (256, 32, 4, 1)  # keys in one query: few forms, which SQLite prepares once
_FIND = """SELECT group_concat(hex(key) || ' ' || CAST(file AS INTEGER) || ' ' || CAST(row AS INTEGER), ';')
FROM blocks WHERE key IN (%s)"""
_FILES = """SELECT group_concat(number || ' ' || CAST(created AS INTEGER) || ' ' || hex(owner), ';')
FROM files WHERE committed AND number IN (%s)"""
_AGES = """SELECT namespace, count(*), total(blocks), total(nbytes), CAST(min(created) AS INTEGER),
CAST(max(used) AS INTEGER) FROM files WHERE committed AND (owner IN (%s) OR ?) GROUP BY namespace"""
_BUSY_S = 10.0  # how long a writer waits for another process's transaction
_DISOWNED_S = 86_400.0  # by then nothing of what was under way waits any more
_TRANSIENT = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_NOMEM)
_DISK = (
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN),
    *(sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOLFS),
)

PENDING_S = 600.0
"""A reserved file whose writer has said nothing for so long is given up: the writer died."""

INDEX_FAULTS = (sqlite3.Error, ValueError, TypeError)
"""What a faulty disk raises here: a damaged index may answer with anything."""


def is_transient(error: Exception) -> bool:
    """Whether another process was in the way, so that the same may go well the next time."""
    return _code(error) in _TRANSIENT


def is_damage(error: Exception) -> bool:
    """Whether the index is of no use any more, where the disk or another process is not to blame."""
    return _code(error) not in (*_TRANSIENT, *_DISK)


def _code(error: Exception) -> int:
    return int(getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Where a block is.

    Attributes:
        file: id of the block file.
        row: of the file.
        created: when it was written, in seconds since the epoch.
        owner: `block_file.owner_of` its tenant.
    """

    file: str
    row: int
    created: float
    owner: str


@dataclass(frozen=True, slots=True)
class Purge:
    """What was deleted: of one tenant, what was written before a moment, both, or everything.

    Attributes:
        id: a later purge has a higher one, in a new index too.
        owner: `block_file.owner_of` the tenant.
        before: in seconds since the epoch.
    """

    id: int
    owner: str | None
    before: float | None


@dataclass(frozen=True, slots=True)
class NewFile:
    """A block file that is about to be written, or was found: with the length of the whole file in bytes, and when it
    was written."""

    file: str
    nbytes: int
    created: float
    namespace: str = ""
    keys: Sequence[bytes] = ()
    owner: str = ""
    writer: str = ""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Whether there is room for a file, and what went for it."""

    granted: bool
    files: int = 0
    blocks: int = 0


def new_file_id() -> str:
    """An id that is not in use: 63 random bits, which are the file's number in the index."""
    return _id(secrets.randbits(63))


def _id(number: int) -> str:
    return f"{number & (1 << 64) - 1:016x}"


def _number(file: str) -> int:
    number = int(file, 16)
    return number - (number >> 63 << 64)  # SQLite's are signed


def _us(seconds: float) -> int:
    return int(min(seconds, 1e12) * 1e6)


def _text(stored: Any) -> str:
    return stored.decode(errors="replace") if isinstance(stored, bytes) else ""


def _block(namespace: str, key: bytes) -> bytes:
    return _space(namespace) + key


def _space(namespace: str) -> bytes:
    return hashlib.blake2b(namespace.encode(), digest_size=16).digest()


class BlockIndex:
    """The index of one directory. Safe to use from several threads and processes.

    It has two connections: what only reads (`find`, `purges_after`, `last_purge`, `generation`) waits for no writer.
    Every method may raise `INDEX_FAULTS`.
    """

    def __init__(
        self,
        path: Path,
        found: Callable[[], Iterable[NewFile]],
        unlink: Callable[[str], None],
        *,
        read_only: bool = False,
    ) -> None:
        """Open the file, or create it and tell in it what ``found`` says of the block files that are there.

        ``unlink`` deletes the block file of an id, and raises nothing.
        """
        self.read_only, self._unlink = read_only, unlink
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._disowned: set[tuple[str, str]] = set()
        self._reader = self._db = _connect(path, "mode=ro" if read_only else "mode=rw", _BUSY_S)
        try:
            if read_only:
                self._see_content(path)
            else:
                self._db.execute("PRAGMA journal_mode=WAL")
                # A lost commit is a lost block, and its file is swept; a damaged index cannot come of it.
                self._db.execute("PRAGMA synchronous=NORMAL")
                self._create(found)
                self._reader = _connect(path, "mode=rw", 0.0)
                self._reader.execute("PRAGMA query_only=1")
            version = self._reader.execute("PRAGMA user_version").fetchone()[0]
            if version != _VERSION:
                raise sqlite3.DatabaseError(f"an index of version {version}, this one is {_VERSION}")
            self._reader.execute("SELECT number FROM files LIMIT 1").fetchone()
        except BaseException:
            self.close()
            raise

    def _see_content(self, path: Path) -> None:
        """Open the file without its log where that is not there, and cannot be made on a read-only disk."""
        try:
            self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            self._db.close()
            self._reader = self._db = _connect(path, "immutable=1", _BUSY_S)

    def _create(self, found: Callable[[], Iterable[NewFile]]) -> None:
        with self._write() as db:  # one transaction: another process sees all of it or nothing
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version == _VERSION:
                return
            if version or db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise sqlite3.DatabaseError(f"an index of version {version}, this one is {_VERSION}")
            for statement in _SCHEMA.split(";"):
                db.execute(statement)
            times = ((_us(file.created), file) for file in found())
            rows = ((_number(f.file), b"", 0, f.nbytes, at, at, 0, 1, b"", b"") for at, f in times)
            db.executemany(_INSERT, rows)
            _record(db, None, None)  # a process that used the index before this one has missed purges
            db.execute("INSERT INTO generation VALUES(?)", (secrets.token_bytes(16),))
            db.execute(f"PRAGMA user_version={_VERSION}")

    def close(self) -> None:
        with self._reading, suppress(sqlite3.Error):
            self._reader.close()
        with self._lock, suppress(sqlite3.Error):
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
                        self._db.execute(f"PRAGMA busy_timeout={_BUSY_S * 1000:.0f}")
                yield self._db
        finally:
            self._lock.release()

    # -- reading beside writers -----------------------------------------------------------------------------------

    def _read(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self._reading:
            return self._reader.execute(query, values).fetchall()

    def find(self, namespace: str, keys: Sequence[bytes]) -> list[BlockRef | None]:
        """Where each block is, None for what is not stored.

        A query answers in one row, because the interpreter may be handed to another thread at each row of SQLite's.
        """
        space = _space(namespace)
        wanted = [space + key for key in keys]
        blocks = {row[0]: (int(row[1]), int(row[2])) for row in self._ask(_FIND, wanted)}
        files = {
            int(row[0]): (_id(int(row[0])), int(row[1]) / 1e6, _text(bytes.fromhex(row[2].decode())))
            for row in self._ask(_FILES, list({file for file, _ in blocks.values()}))
        }
        found: list[BlockRef | None] = []
        for key in wanted:
            number, place = blocks.get(key.hex().upper().encode(), (None, 0))
            file = None if number is None else files.get(number)
            found.append(None if file is None else BlockRef(file[0], place, file[1], file[2]))
        return found

    def _ask(self, query: str, values: Sequence[Any]) -> Iterator[list[bytes]]:
        """The rows of a query for many values, as text."""
        at = 0
        while at < len(values):
            size = next(size for size in _ASKED if size <= len(values) - at)
            ((answer,),) = self._read(query % ",".join("?" * size), values[at : at + size])
            yield from (row.split(b" ") for row in (answer or b"").split(b";") if row)
            at += size

    @property
    def generation(self) -> str:
        """A name that is drawn when an index is created, and anew when a purge deletes everything."""
        return _hex(self._read("SELECT max(name) FROM generation")[0][0])

    def purges_after(self, purge: int) -> list[Purge]:
        rows = self._read("SELECT id, owner, CAST(before AS INTEGER) FROM purges WHERE id>? ORDER BY id", (purge,))
        return [
            Purge(i, None if owner is None else _text(owner), None if at is None else at / 1e6) for i, owner, at in rows
        ]

    def last_purge(self) -> int:
        return int(self._read("SELECT coalesce(max(id), 0) FROM purges")[0][0])

    # -- writing ------------------------------------------------------------------------------------------------

    def touch(self, used: Mapping[str, tuple[float, bool]]) -> None:
        """Note when files were used last, and whether that was a use of its own; without waiting for anybody."""
        try:
            with self._write(wait=False) as db:
                _touch(db, used)
        except sqlite3.OperationalError as error:
            if not is_transient(error):
                raise

    def reserve(
        self,
        new: NewFile,
        max_bytes: int,
        max_blocks: int,
        used: Mapping[str, tuple[float, bool]],
        generation: str | None,
        since: int | None = None,
    ) -> Reservation:
        """Make room for a file and take it, in one step; `commit` or `remove` must follow.

        Args:
            new: what is about to be written.
            max_bytes, max_blocks: of the directory; 0 for no bound.
            used: see `touch`.
            generation: None, or the one in which the blocks were computed.
            since: None, or the last purge before that.
        """
        if (max_bytes and new.nbytes > max_bytes) or (max_blocks and len(new.keys) > max_blocks):
            return Reservation(False)
        with self._write() as db:
            _touch(db, used)
            now = db.execute("SELECT max(name) FROM generation").fetchone()[0]
            if _disowned(db, new) or generation not in (None, _hex(now)) or _purged_since(db, new, since):
                return Reservation(False)
            _, blocks, nbytes = _totals(db)
            over_bytes = nbytes + new.nbytes - max_bytes if max_bytes else 0
            over_blocks = blocks + len(new.keys) - max_blocks if max_blocks else 0
            gone = _victims(db, over_bytes, over_blocks, _us(new.created - PENDING_S))
            if gone is None:
                return Reservation(False)
            self._delete(db, [number for number, _ in gone])
            at = _us(new.created)
            row = (_number(new.file), new.namespace.encode(), len(new.keys), new.nbytes, at, at, 0, 0)
            db.execute(_INSERT, (*row, new.owner.encode(), new.writer.encode()))
        return Reservation(True, len(gone), sum(blocks for _, blocks in gone))

    def commit(self, new: NewFile) -> bool:
        """Name the blocks of a reserved file, which is there now.

        Returns:
            False where none was new, or the reservation is gone: then the file is deleted.
        """
        with self._write() as db:
            reserved = db.execute("UPDATE files SET committed=1 WHERE number=?", (_number(new.file),)).rowcount
            if reserved and _name(db, new):
                return True
            self._delete(db, [_number(new.file)])
            return False

    def unread(self, most: int) -> list[str]:
        """Files that were found without an index and not read yet, the youngest first."""
        with self._lock:
            rows = self._db.execute("SELECT number FROM files WHERE blocks=0 ORDER BY created DESC LIMIT ?", (most,))
            return [_id(row[0]) for row in rows]

    def adopt(self, read: Iterable[NewFile], useless: Iterable[str]) -> None:
        """Name the blocks of files that were `unread`, and delete ``useless`` ones.

        What another process adopted or evicted meanwhile is left. Files without a block that is not stored already, and
        disowned ones, are deleted too.
        """
        query = "UPDATE files SET namespace=?, blocks=?, owner=?, writer=? WHERE number=? AND blocks=0"
        gone = list(map(_number, useless))
        with self._write() as db:
            for new in read:
                row = (new.namespace.encode(), len(new.keys), new.owner.encode(), new.writer.encode())
                mine = db.execute(query, (*row, _number(new.file))).rowcount
                if mine and (_disowned(db, new) or not _name(db, new)):
                    gone.append(_number(new.file))
            self._delete(db, gone)

    def remove(self, files: Iterable[str]) -> bool:
        """Delete files; True."""
        with self._write() as db:
            self._delete(db, list(map(_number, files)))
        return True

    def disown(self, namespace: str, writer: str) -> None:
        """Delete what ``writer`` wrote under this namespace, and take nothing more of it there.

        The first call waits for others as all do, further ones do not: engines try again in each step.
        """
        what, now = (writer, namespace), time.time()
        first = what not in self._disowned
        self._disowned.add(what)
        with self._write(wait=first) as db:
            db.execute("DELETE FROM disowned WHERE at<?", (_us(now - _DISOWNED_S),))
            row = (writer.encode(), namespace.encode())
            db.execute("INSERT OR REPLACE INTO disowned VALUES(?,?,?)", (*row, _us(now)))
            self._delete(db, _numbers(db, "SELECT number FROM files WHERE writer=? AND namespace=?", row))

    def purge(self, owner: str | None, namespace: str | None, before: float | None) -> int:
        """Delete files, those that are being written too, and record that for all who use the index; how many."""
        with self._write() as db:
            gone = _numbers(db, *_chosen("number", owner, namespace, before))
            if owner is None and namespace is None and before is None:
                db.execute("DELETE FROM blocks")  # what is left of a damaged index too
                db.execute("UPDATE generation SET name=?", (secrets.token_bytes(16),))
            self._delete(db, gone)
            _record(db, owner, before)
        return len(gone)

    def expire(self, before: float) -> int:
        """Delete what was written before this moment, and what writers reserved that died; how many files."""
        query = "SELECT number FROM files WHERE created<? OR (NOT committed AND created<?)"
        with self._write() as db:
            gone = _numbers(db, query, (_us(before), _us(time.time() - PENDING_S)))
            self._delete(db, gone)
        return len(gone)

    def _delete(self, db: sqlite3.Connection, numbers: Sequence[int]) -> None:
        """Forget files and delete them, in one transaction of `_write`."""
        rows = [(number,) for number in numbers]
        db.executemany("DELETE FROM blocks WHERE file=?", rows)
        db.executemany("DELETE FROM files WHERE number=?", rows)
        for number in numbers:
            self._unlink(_id(number))

    # -- looking at it ------------------------------------------------------------------------------------------

    def files(
        self, *, owner: str | None = None, namespace: str | None = None, before: float | None = None
    ) -> list[str]:
        """All files, or those of a tenant, of a namespace, written before a moment, or of all that is given."""
        with self._lock:
            return [_id(number) for (number,) in self._db.execute(*_chosen("number", owner, namespace, before))]

    def totals(self, namespace: str | None = None) -> tuple[int, int, int]:
        """Files, blocks and bytes, of one namespace or of all; reserved and unread ones are among all."""
        with self._lock:
            return _totals(self._db, namespace)

    def ages(self, owners: Sequence[str] | None = None) -> dict[str, tuple[int, int, int, float, float]]:
        """By namespace: files, blocks, bytes, when the oldest was written and the latest used; of some tenants."""
        query, tags = _AGES % ",".join("?" * len(owners or ())), [owner.encode() for owner in owners or ()]
        with self._lock:
            rows = self._db.execute(query, [*tags, owners is None]).fetchall()
        return {_text(row[0]): (row[1], int(row[2]), int(row[3]), row[4] / 1e6, row[5] / 1e6) for row in rows}


def _connect(path: Path, how: str, wait_s: float) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?{how}"
    db = sqlite3.connect(uri, uri=True, timeout=wait_s, check_same_thread=False, isolation_level=None)
    db.text_factory = bytes
    return db


def _hex(stored: Any) -> str:
    return stored.hex() if isinstance(stored, bytes) else ""


def _name(db: sqlite3.Connection, new: NewFile) -> int:
    """How many blocks of a file are found there now. What another file has stays, but for one that is not known."""
    rows = ((_block(new.namespace, key), _number(new.file), row) for row, key in enumerate(new.keys))
    query = (
        "INSERT INTO blocks VALUES(?,?,?) ON CONFLICT(key) DO UPDATE SET file=excluded.file, row=excluded.row "
        "WHERE file NOT IN (SELECT number FROM files)"
    )
    return int(db.executemany(query, rows).rowcount)


def _touch(db: sqlite3.Connection, used: Mapping[str, tuple[float, bool]]) -> None:
    rows = [(_us(at), again, _number(file)) for file, (at, again) in used.items()]
    db.executemany("UPDATE files SET used=?, again=max(again, ?) WHERE number=?", rows)


def _disowned(db: sqlite3.Connection, new: NewFile) -> bool:
    row = (new.writer.encode(), new.namespace.encode())
    return db.execute("SELECT 1 FROM disowned WHERE writer=? AND namespace=?", row).fetchone() is not None


def _purged_since(db: sqlite3.Connection, new: NewFile, since: int | None) -> bool:
    query = "SELECT 1 FROM purges WHERE id>? AND before IS NULL AND (owner IS NULL OR owner=?)"
    return since is not None and db.execute(query, (since, new.owner.encode())).fetchone() is not None


def _totals(db: sqlite3.Connection, namespace: str | None = None) -> tuple[int, int, int]:
    # total() is exact below 2**53, and no sum of what is stored makes it fail.
    return tuple(map(int, db.execute(*_chosen("count(*), total(blocks), total(nbytes)", None, namespace)).fetchone()))  # type: ignore[return-value]


def _chosen(
    columns: str, owner: str | None, namespace: str | None, before: float | None = None
) -> tuple[str, list[Any]]:
    """A query over files, with its values."""
    given = {
        "owner=?": None if owner is None else owner.encode(),
        "namespace=?": None if namespace is None else namespace.encode(),
        "created<?": None if before is None else _us(before),
    }
    where = [test for test, value in given.items() if value is not None]
    query = f"SELECT {columns} FROM files" + (f" WHERE {' AND '.join(where)}" if where else "")  # noqa: S608
    return query, [value for value in given.values() if value is not None]


def _victims(
    db: sqlite3.Connection, over_bytes: float, over_blocks: float, pending: int
) -> list[tuple[int, int]] | None:
    """The files that go to free so much, with the blocks of each; None where all that may go is not enough.

    There are two queues, each with what was used longest ago first: what was not used again since it came, and what
    was. The first one gives while it holds more than half of all bytes. So a walk through a data set, of which each
    block is used once, does not push out what is used every day.
    """
    if over_bytes <= 0 and over_blocks <= 0:
        return []
    query = "SELECT number, nbytes, blocks FROM files WHERE again=? AND (committed OR created<?) ORDER BY used, number"
    queues = [db.execute(query, (again, pending)) for again in (0, 1)]
    heads = [next(queue, None) for queue in queues]
    held = [db.execute("SELECT total(nbytes) FROM files WHERE again=?", (again,)).fetchone()[0] for again in (0, 1)]
    gone: list[tuple[int, int]] = []
    while over_bytes > 0 or over_blocks > 0:
        which = 0 if held[0] > held[1] else 1
        if heads[which] is None:
            which = 1 - which
        if (head := heads[which]) is None:
            return None
        number, nbytes, blocks = head
        gone.append((number, blocks))
        held[which] -= nbytes
        over_bytes, over_blocks = over_bytes - nbytes, over_blocks - blocks
        heads[which] = next(queues[which], None)
    return gone


def _numbers(db: sqlite3.Connection, query: str, values: Sequence[Any]) -> list[int]:
    return [number for (number,) in db.execute(query, values)]


def _record(db: sqlite3.Connection, owner: str | None, before: float | None) -> None:
    """Note a purge in the place of those that it includes."""
    tag, at = None if owner is None else owner.encode(), None if before is None else _us(before)
    last = db.execute("SELECT coalesce(max(id), 0) FROM purges").fetchone()[0]
    db.execute("DELETE FROM purges WHERE (?1 IS NULL OR owner IS ?1) AND (?2 IS NULL OR before<=?2)", (tag, at))
    # From the clock, so that a later index has higher ones.
    db.execute("INSERT INTO purges VALUES(?,?,?)", (max(last + 1, _us(time.time())), tag, at))
