"""Which block file holds which block: one SQLite file for each store directory, shared by all processes that use it.

The index is never the only copy: it is built again from the headers of the block files where it is missing or damaged.

It is also where the processes agree:

- Room: the bytes of a file are reserved, and what must go for them is chosen, in one transaction before the file is
  written. A file is deleted in the transaction that forgets it. So the bounds hold at every moment.
- Purges: each deletion by choice leaves a record. A writer says which record was the last one when its blocks were
  computed; they are not stored where a later record covers them. A process that keeps blocks in memory reads the later
  records and drops what they cover.

Everything but numbers is stored as bytes, so that a flipped bit makes a row that is not found, and no fault. Moments
are microseconds since the epoch here, and seconds everywhere else.
"""

from __future__ import annotations

import hashlib
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from semkv.errors import StoreError
from semkv.stores.block_file import INDEX, found, unlink
from semkv.stores.database import Database, Schema
from semkv.stores.files import FileId

_VERSION = 7
_SCHEMA = """
CREATE TABLE files(
  number INTEGER PRIMARY KEY, namespace BLOB NOT NULL, blocks INTEGER NOT NULL, nbytes INTEGER NOT NULL,
  created INTEGER NOT NULL, used INTEGER NOT NULL, again INTEGER NOT NULL, committed INTEGER NOT NULL,
  owner BLOB NOT NULL, writer BLOB NOT NULL);
CREATE INDEX files_by_use ON files(again, used);
CREATE TABLE blocks(key BLOB PRIMARY KEY, file INTEGER NOT NULL, row INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX blocks_by_file ON blocks(file);
CREATE TABLE purges(id INTEGER PRIMARY KEY, owner BLOB, writer BLOB, namespace BLOB, before INTEGER);
"""
# One row for all keys: the interpreter may be handed to another thread at each row of SQLite's.
_FIND = """SELECT group_concat(hex(key) || ' ' || file || ' ' || row || ' ' || created || ' ' || hex(owner), ';')
FROM blocks JOIN files ON number=file WHERE committed AND key IN (%s)"""
_ASKED = (1, 32, 256)  # keys in one query: few forms, which SQLite prepares once
_AGES = """SELECT namespace, count(*), total(blocks), total(nbytes), CAST(min(created) AS INTEGER),
CAST(max(used) AS INTEGER) FROM files WHERE committed AND (owner IN (%s) OR ?) GROUP BY namespace"""
_MOST_PURGES = 1000  # records that are kept
BUSY_S = 10.0
"""How long a writer waits for another process's transaction."""

PENDING_S = 600.0
"""A reserved file that is not there after so long is given up: its writer died."""

INDEX_FAULTS = (sqlite3.Error, ValueError, TypeError)
"""What a faulty disk raises here: a damaged index may answer with anything."""


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Where a block is.

    Attributes:
        file: id of the block file.
        row: of the file.
        created: when it was written, in seconds since the epoch.
        owner: `block_file.tenant_tag` its tenant.
    """

    file: str
    row: int
    created: float
    owner: str


@dataclass(frozen=True, slots=True)
class NewFile:
    """A block file that is about to be written, or was found: with the length of the whole file in bytes, and when it
    was written."""

    file: str
    nbytes: int
    created: float
    namespace: str
    keys: Sequence[bytes]
    owner: str = ""
    writer: str = ""


@dataclass(frozen=True)
class Selection:
    """Files that meet all that is given; all files where nothing is.

    Attributes:
        owner: `block_file.tenant_tag` the tenant.
        writer: see `blocks.BlockStore.writer`.
        namespace: of the blocks.
        before: written before this moment, in seconds since the epoch.
    """

    owner: str | None = None
    writer: str | None = None
    namespace: str | None = None
    before: float | None = None

    def covers(self, new: NewFile) -> bool:
        """Whether a file is among them."""
        return (
            self.owner in (None, new.owner)
            and self.writer in (None, new.writer)
            and self.namespace in (None, new.namespace)
            and (self.before is None or new.created < self.before)
        )

    def values(self) -> tuple[Any, ...]:
        """As the index stores them."""
        words = (None if word is None else word.encode() for word in (self.owner, self.writer, self.namespace))
        return (*words, None if self.before is None else _us(self.before))

    def where(self) -> tuple[str, list[Any]]:
        """A condition over the table ``files``, with its values."""
        tests = zip(("owner=?", "writer=?", "namespace=?", "created<?"), self.values(), strict=True)
        given = [(test, value) for test, value in tests if value is not None]
        return " AND ".join(["1", *(test for test, _ in given)]), [value for _, value in given]


@dataclass(frozen=True)
class Purge(Selection):
    """The record of a deletion. A later one has a higher ``id``, in a new index too; 0 where it is not known."""

    id: int = field(default=0, kw_only=True)


@dataclass(frozen=True, slots=True)
class Reservation:
    """Whether there is room for a file, which purge was the last before, and what went for the file."""

    granted: bool
    since: int = 0
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


def _space(namespace: str) -> bytes:
    return hashlib.blake2b(namespace.encode(), digest_size=16).digest()


class BlockIndex:
    """The index of one directory. Safe to use from several threads and processes.

    A question waits for no other process. Every method may raise `INDEX_FAULTS`.

    Args:
        counters: where damaged block files are counted, as ``corrupt``.
        damaged: an index that is known to be damaged.
        wait_s: how long to wait for another process that opens the index.

    Raises:
        OSError, sqlite3.Error: the disk fails; BlockingIOError where another process is still at it.
        StoreError: the disk is read-only, and nothing of this format is there.
    """

    def __init__(
        self,
        root: Path,
        kind: str,
        counters: Counter[str],
        *,
        damaged: FileId | None = None,
        read_only: bool = False,
        wait_s: float,
    ) -> None:
        self.read_only, self._root = read_only, root

        def rebuild(db: sqlite3.Connection) -> None:
            for file, created, opened in found(root, kind, counters):
                head = opened.header
                owner, writer = head.owner, head.writer
                new = NewFile(file, opened.nbytes, created, head.namespace, opened.keys, owner, writer)
                self._insert(db, new, committed=True)
                if not _name(db, new):
                    self._delete(db, [_number(file)])
            _record(db, Selection())  # a process that used the index before this one has missed purges

        schema = Schema(_SCHEMA, _VERSION, ("files",), rebuild)
        try:  # `_write` waits, without the lock, and a question does not
            self.database = Database(
                root / INDEX, schema=schema, timeout_s=0.0, open_s=wait_s, damaged=damaged, replace=not read_only
            )
        except StoreError as error:
            if isinstance(error.__cause__, (OSError, sqlite3.Error)):
                raise error.__cause__ from None
            raise

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self.database.close()

    def _write(self, wait_s: float = BUSY_S) -> AbstractContextManager[sqlite3.Connection]:
        """One transaction that no other process writes beside. Where it has not begun after ``wait_s``, another
        process's is going on, and SQLITE_BUSY is raised. Questions of this process do not wait for that."""
        return self.database.write(wait_s)

    def _read(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        with self.database as db:
            return db.execute(query, values).fetchall()

    def _unlink(self, number: int) -> None:
        unlink(self._root, _id(number))

    # -- finding --------------------------------------------------------------------------------------------------

    def find(self, namespace: str, keys: Sequence[bytes]) -> list[BlockRef | None]:
        """Where each block is, None for what is not stored."""
        space = _space(namespace)
        wanted, known = [space + key for key in keys], dict[str, BlockRef]()
        for at in range(0, len(wanted), _ASKED[-1]):
            asked = wanted[at : at + _ASKED[-1]]
            size = next(size for size in _ASKED if size >= len(asked))
            ((answer,),) = self._read(_FIND % ",".join("?" * size), asked + [b""] * (size - len(asked)))
            for row in filter(None, (answer or "").split(";")):
                key, file, place, created, owner = row.split(" ")
                known[key] = BlockRef(_id(int(file)), int(place), int(created) / 1e6, _text(bytes.fromhex(owner)))
        return [known.get(key.hex().upper()) for key in wanted]

    def purges_after(self, id: int) -> list[Purge]:  # noqa: A002
        """What was purged after a purge; everything, where that one is not on record."""
        with self.database as db:
            return _purges_after(db, id)

    def last_purge(self) -> int:
        """Id of the last purge."""
        return int(self._read("SELECT max(id) FROM purges")[0][0])

    # -- writing --------------------------------------------------------------------------------------------------

    def touch(self, used: Mapping[str, float]) -> None:
        """Note when files were used last, where no other process is in the way."""
        with suppress(sqlite3.OperationalError), self._write(0.0) as db:
            _touch(db, used)

    def reserve(
        self, new: NewFile, max_bytes: int, max_blocks: int, used: Mapping[str, float], since: int | None
    ) -> Reservation:
        """Make room for a file and take it, in one step; `commit` or `remove` must follow.

        Args:
            new: what is about to be written.
            max_bytes, max_blocks: of the directory; 0 for no bound.
            used: see `touch`.
            since: the last purge when the blocks were computed; None for now.
        """
        if (max_bytes and new.nbytes > max_bytes) or (max_blocks and len(new.keys) > max_blocks):
            return Reservation(False)
        with self._write() as db:
            _touch(db, used)
            last = db.execute("SELECT max(id) FROM purges").fetchone()[0]
            if any(purge.covers(new) for purge in _purges_after(db, last if since is None else since)):
                return Reservation(False)
            _, blocks, nbytes = _totals(db)
            over_bytes = nbytes + new.nbytes - max_bytes if max_bytes else 0
            over_blocks = blocks + len(new.keys) - max_blocks if max_blocks else 0
            gone = _victims(db, over_bytes, over_blocks, _us(new.created - PENDING_S))
            if gone is None:
                return Reservation(False)
            self._delete(db, [number for number, _ in gone])
            self._insert(db, new, committed=False)
        return Reservation(True, last, len(gone), sum(blocks for _, blocks in gone))

    def commit(self, new: NewFile, since: int) -> bool:
        """Name the blocks of a file that was reserved after the purge ``since``, and is there now.

        Returns:
            False where none was new, they were purged meanwhile, or the reservation is gone: then the file is deleted.
        """
        with self._write() as db:
            kept = (
                db.execute("UPDATE files SET committed=1 WHERE number=?", (_number(new.file),)).rowcount
                and not any(purge.covers(new) for purge in _purges_after(db, since))
                and _name(db, new)
            )
            if not kept:
                self._delete(db, [_number(new.file)])
        return bool(kept)

    def remove(self, files: Iterable[str]) -> bool:
        """Delete files; True."""
        with self._write() as db:
            self._delete(db, list(map(_number, files)))
        return True

    def purge(self, which: Selection, wait_s: float = BUSY_S) -> int:
        """Delete files and record that for all who use the index; returns how many.

        What is being written keeps its room until its writer comes to commit it, and is told to delete it.
        """
        with self._write(wait_s) as db:
            where, values = which.where()
            query = f"SELECT number, committed OR created<? FROM files WHERE {where}"  # noqa: S608
            rows = db.execute(query, (_us(time.time() - PENDING_S), *values)).fetchall()
            if which == Selection():
                db.execute("DELETE FROM blocks")  # what is left of a damaged index too
            self._delete(db, [number for number, done in rows if done])
            for number, done in rows:
                if not done:
                    self._unlink(number)
            _record(db, which)
        return len(rows)

    def expire(self, before: float) -> int:
        """Delete what was written before this moment, and what writers reserved that died; how many files."""
        query = "SELECT number FROM files WHERE created<? OR (NOT committed AND created<?)"
        with self._write() as db:
            rows = db.execute(query, (_us(before), _us(time.time() - PENDING_S))).fetchall()
            self._delete(db, [number for (number,) in rows])
        return len(rows)

    def _insert(self, db: sqlite3.Connection, new: NewFile, *, committed: bool) -> None:
        at = _us(new.created)
        row = (_number(new.file), new.namespace.encode(), len(new.keys), new.nbytes, at, at, 0, committed)
        db.execute("INSERT INTO files VALUES(?,?,?,?,?,?,?,?,?,?)", (*row, new.owner.encode(), new.writer.encode()))

    def _delete(self, db: sqlite3.Connection, numbers: Sequence[int]) -> None:
        rows = [(number,) for number in numbers]
        db.executemany("DELETE FROM blocks WHERE file=?", rows)
        db.executemany("DELETE FROM files WHERE number=?", rows)
        for number in numbers:
            self._unlink(number)

    # -- looking at it --------------------------------------------------------------------------------------------

    def files(self, which: Selection = Selection(), *, committed: bool = False) -> list[str]:
        """Ids of files; with ``committed`` without those that are being written."""
        where, values = which.where()
        query = f"SELECT number FROM files WHERE committed>=? AND {where}"  # noqa: S608
        return [_id(number) for (number,) in self._read(query, [committed, *values])]

    def totals(self, namespace: str | None = None) -> tuple[int, int, int]:
        """Files, blocks and bytes, of one namespace or of all; with what is being written."""
        with self.database as db:
            return _totals(db, Selection(namespace=namespace))

    def ages(self, owners: Sequence[str] | None = None) -> dict[str, tuple[int, int, int, float, float]]:
        """By namespace: files, blocks, bytes, when the oldest was written and the latest used; of some tenants."""
        query, tags = _AGES % ",".join("?" * len(owners or ())), [owner.encode() for owner in owners or ()]
        rows = self._read(query, [*tags, owners is None])
        return {_text(row[0]): (row[1], int(row[2]), int(row[3]), row[4] / 1e6, row[5] / 1e6) for row in rows}


def _name(db: sqlite3.Connection, new: NewFile) -> int:
    """How many blocks of a file are found there now. What another file has stays, but for one that is not known."""
    space = _space(new.namespace)
    query = (
        "INSERT INTO blocks VALUES(?,?,?) ON CONFLICT(key) DO UPDATE SET file=excluded.file, row=excluded.row "
        "WHERE file NOT IN (SELECT number FROM files)"
    )
    rows = ((space + key, _number(new.file), row) for row, key in enumerate(new.keys))
    return int(db.executemany(query, rows).rowcount)


def _touch(db: sqlite3.Connection, used: Mapping[str, float]) -> None:
    rows = [(_us(at), _number(file)) for file, at in used.items()]
    db.executemany("UPDATE files SET used=?, again=1 WHERE number=?", rows)


def _totals(db: sqlite3.Connection, which: Selection = Selection()) -> tuple[int, int, int]:
    where, values = which.where()
    # total() is exact below 2**53, and no sum of what is stored makes it fail.
    query = f"SELECT count(*), total(blocks), total(nbytes) FROM files WHERE {where}"  # noqa: S608
    files, blocks, nbytes = db.execute(query, values).fetchone()
    return int(files), int(blocks), int(nbytes)


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


def _purges_after(db: sqlite3.Connection, id: int) -> list[Purge]:  # noqa: A002
    query = "SELECT id, owner, writer, namespace, CAST(before AS INTEGER) FROM purges WHERE id>=? ORDER BY id"
    rows = db.execute(query, (id,)).fetchall()
    if not rows or rows[0][0] != id:  # of an index before this one, or too long ago
        return [Purge(id=rows[-1][0] if rows else 0)]
    found = []
    for number, *words, before in rows[1:]:
        owner, writer, namespace = (None if word is None else _text(word) for word in words)
        found.append(Purge(owner, writer, namespace, None if before is None else before / 1e6, id=number))
    return found


def _record(db: sqlite3.Connection, which: Selection) -> None:
    last = db.execute("SELECT coalesce(max(id), 0) FROM purges").fetchone()[0]
    now = max(last + 1, _us(time.time()))  # from the clock, so that a later index has higher ones
    db.execute("INSERT INTO purges VALUES(?,?,?,?,?)", (now, *which.values()))
    db.execute(
        "DELETE FROM purges WHERE id<=(SELECT id FROM purges ORDER BY id DESC LIMIT 1 OFFSET ?)", (_MOST_PURGES,)
    )
