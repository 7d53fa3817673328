"""The helper for SQLite files: how one is opened, made, locked, and replaced when it is of no use or purged.

A commit is one system call to the write-ahead log: it survives the end of the process, however it ends. A power cut may
cost the last moments, never an older row (``synchronous=NORMAL``). Deleted rows are overwritten with zeros. Only the
owner can read the file.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semkv_stores.errors import CorruptValue, StoreError
from semkv_stores.files import (
    FileId,
    check_regular,
    file_id,
    lock,
    make_folder,
    open_file,
    read_bytes,
)

_APPLICATION = 0x73656D6B  # "semk", so that another program's database is never taken for ours
_POLL_S = 0.005
_LATER = 65_536  # statements that wait for the next write
_LOCK_S = 60.0  # for other processes that open or replace the file, the first time
_BESIDE = ("-wal", "-shm")
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_TRANSIENT = (
    *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_INTERRUPT, sqlite3.SQLITE_NOMEM),
    *(sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_SCHEMA),
)
_DISK = (
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN),
    *(sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOLFS),
)
_REASONS = {
    sqlite3.SQLITE_FULL: "full",
    sqlite3.SQLITE_READONLY: "read-only",
    sqlite3.SQLITE_PERM: "read-only",
    sqlite3.SQLITE_BUSY: "busy",
    sqlite3.SQLITE_LOCKED: "busy",
}
# Of a file that was opened, `Schema.probes` has seen the columns: then a damaged table's text says this.
_WRONG_SQL = sqlite3.SQLITE_ERROR

log = logging.getLogger("semkv")


@dataclass(frozen=True, slots=True)
class Schema:
    """What is in a file.

    Attributes:
        tables: the statements that make it. ``:now`` is the time in microseconds since the epoch: numbers of rows go on
            from there, so that no reader takes a new file's for those of a damaged one that it has read already.
        version: of the tables.
        file: the name that such files have. Where a damaged head no longer says whose a file is, the name does.
        probes: queries that are made when the file is opened: a damaged page or table shows.
        added: statements that are made then where it can be written.
        first: one of the tables. A file of the same version that lacks it, since another part of semkv began the file,
            gets the tables when it is opened. Empty: no other part writes such files.
        prepare: makes its folder, also where that was deleted meanwhile, but none above it then.
        discard: deletes the files of the folder that only this database names, before a new one is begun. A damaged
            database is deleted then, and one of an earlier version. None: the first is put aside, the second refused.
    """

    tables: str
    version: int
    file: str
    probes: tuple[str, ...]
    added: tuple[str, ...] = ()
    first: str = ""
    prepare: Callable[[Path], object] | None = None
    discard: Callable[[Path], object] | None = None


class Database:
    """One connection behind one lock; any thread may use it. Several processes may share the file.

    A damaged file is put aside as ``<name>.damaged`` and a new one is begun, with a warning. A file that somebody
    deleted or replaced is opened anew.

    Args:
        path: the file; made when missing, as is its folder.
        schema: what is in it.
        timeout_s: how long to wait for another process's write.
        lazy: the first use opens it, and each later one where that failed.
        raises_store_error: in place of SQLite's errors.
        replace: put aside, begin and delete files. Without it one that is missing, damaged or of another format is
            refused, and one that this user cannot write is read.
        anew: delete the file that is there, and begin another. Processes that have it open notice it, and go on with
            the new one.

    Attributes:
        lock: held while the connection is used; reentrant.
        opened: how often the file was opened.
        file: the one that was opened last; None where that failed.

    Raises:
        StoreError: the file cannot be opened, is another program's, or was written by another format version.
    """

    def __init__(
        self,
        path: Path,
        *,
        schema: Schema,
        timeout_s: float = 2.0,
        lazy: bool = False,
        raises_store_error: bool = False,
        replace: bool = True,
        anew: bool = False,
    ) -> None:
        self.path = path
        self.lock = threading.RLock()
        self._schema = schema
        self._timeout_s = timeout_s
        self._raises_store_error = raises_store_error
        self._replace = replace
        self._later: deque[tuple[str, tuple[object, ...]]] = deque(maxlen=_LATER)
        self.opened = 0
        self._closed = False
        self.connection: sqlite3.Connection
        self.file: FileId | None = None
        self._name = os.fspath(path)
        try:
            if replace:
                make_folder(path.parent if schema.prepare is None else path.parent.parent)
            if not lazy:
                self._open(wait_s=_LOCK_S, anew=anew)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"database {path}: {error}") from error

    def __enter__(self) -> sqlite3.Connection:
        """The connection, to read."""
        self.lock.acquire()
        try:
            if self._closed:
                raise sqlite3.ProgrammingError(f"{self.path} is closed")
            if not self._is_current() and not (self.file and self.connection.in_transaction):
                self._open_anew()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self.connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        try:
            if error is not None:
                self._fail(error)
        finally:
            self.lock.release()

    @contextmanager
    def write(self, wait_s: float | None = None) -> Iterator[sqlite3.Connection]:
        """The connection, in a transaction that is undone on any exception; a full disk is one more fault.

        While another process writes, for ``timeout_s`` or ``wait_s`` at most, other threads go on reading.
        """
        until = time.monotonic() + (self._timeout_s if wait_s is None else wait_s)
        while True:
            with self:
                if self._began(last=time.monotonic() >= until):
                    # Lost where this fails: one of them may be of a damaged row.
                    for statement, values in [
                        self._later.popleft() for _ in range(len(self._later))
                    ]:
                        self.connection.execute(statement, values)
                    yield self.connection
                    self.connection.execute("COMMIT")
                    return
            time.sleep(_POLL_S)

    def later(self, statement: str, *values: object) -> None:
        """Run a statement with the next write, at the latest when the file is closed: a hit costs no write. The latest
        65,536 are kept."""
        self._later.append((statement, values))

    def _began(self, *, last: bool) -> bool:
        """Begin to write; False where another process writes, unless this try is the last one."""
        self.connection.execute("PRAGMA busy_timeout=0")
        try:
            self.connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if last or _code(error) != sqlite3.SQLITE_BUSY:
                raise
            return False
        finally:
            self.connection.execute(f"PRAGMA busy_timeout={self._timeout_s * 1000:.0f}")
        return True

    def _fail(self, error: BaseException) -> None:
        with suppress(sqlite3.Error):
            if self.file and self.connection.in_transaction:  # some errors have rolled back already
                self.connection.execute("ROLLBACK")
        # Of what can be computed again, anything that SQLite cannot do with it is damage.
        is_damaged = is_useless(error) if self._schema.discard else _code(error) in _DAMAGE
        if is_damaged and self._replace and self.file:
            with suppress(sqlite3.Error):  # the next use tries again
                self._open_anew(damaged=self.file)
        if self._raises_store_error and isinstance(error, sqlite3.Error):
            failed = StoreError(f"{self.path}: {error}")
            failed.reason = _REASONS.get(_code(error), "disk")
            raise failed from error

    def rows(self, statement: str, *values: object) -> list[Any]:
        """All rows that a statement finds."""
        with self as db:
            return db.execute(statement, values).fetchall()

    def version(self) -> tuple[int, int]:
        """Another value whenever another connection has written, or the file was replaced."""
        with self:
            return self.opened, int(self.rows("PRAGMA data_version")[0][0])

    def check(self) -> None:
        """Raise the first fault in the structure of the file."""
        with self as db:
            found = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
        if found != "ok":
            raise sqlite3.DatabaseError(found.splitlines()[-1])

    def faults(
        self, statement: str, read: Callable[..., object], delete: Callable[..., object] | None
    ) -> Iterator[str]:
        """What is wrong with each row, or an empty string.

        Args:
            statement: it finds the first row above a number; a row begins with its number.
            read: of the rest of a row; raises a CorruptValue where that is damaged.
            delete: called with the connection and the numbers of damaged rows; None where they stay.
        """
        number = 0
        # A damaged tree may lead back.
        while (row := next(iter(self.rows(statement, number)), None)) is not None and row[
            0
        ] > number:
            reason = ""
            try:
                read(*row[1:])
            except CorruptValue as error:
                reason = str(error)
                if delete:
                    with self.write() as db:  # rare, so that other processes go on writing
                        if db.execute(statement, (number,)).fetchone() == row:
                            delete(db, [row[0]])
            number = row[0]
            yield reason

    def truncate_log(self) -> bool:
        """Write the write-ahead log into the file and empty it, so that nothing deleted stays there; False where
        another process reads the database."""
        with self as db:
            return not db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]

    def close(self) -> None:
        """Close the file; later uses raise `sqlite3.ProgrammingError`."""
        if self._later and not self._closed:
            with suppress(sqlite3.Error, StoreError, ValueError), self.write():
                pass  # if this fails, only the order of use is lost
        with self.lock:
            if self.opened:
                with suppress(sqlite3.Error):
                    self.connection.close()
            self._closed = True
            self.file = None

    # -- the file -----------------------------------------------------------------------------------------------

    def _is_current(self) -> bool:
        """Whether the open file is still the one at its path. Writes to a file that was replaced are lost."""
        try:
            status = os.stat(self._name)  # noqa: PTH116 (half the time of a path's)
        except FileNotFoundError:
            return not self._replace and self.file is not None
        except OSError:  # a disk that does not answer has no other file
            return self.file is not None
        return (status.st_dev, status.st_ino) == self.file

    def _open_anew(self, damaged: FileId | None = None) -> None:
        self.file = None  # so that the next use tries again where this fails
        try:
            self._open(damaged, wait_s=self._timeout_s)
        except (OSError, sqlite3.Error, StoreError) as error:
            fault = sqlite3.OperationalError(f"{self.path} cannot be opened anew: {error}")
            is_busy = isinstance(error, BlockingIOError)
            fault.sqlite_errorcode = sqlite3.SQLITE_BUSY if is_busy else sqlite3.SQLITE_CANTOPEN
            raise fault from error

    def _open(
        self,
        damaged: FileId | None = None,
        *,
        wait_s: float,
        anew: bool = False,
    ) -> None:
        """Open the file, or a new one in place of the one that was found to be ``damaged``."""
        if self._replace and self._schema.prepare:
            self._schema.prepare(self.path.parent)
        # One process at a time makes, replaces or deletes a database.
        with lock(_beside(self.path, ".lock"), wait_s) if self._replace else nullcontext():
            if self.opened:
                self.connection.close()
            if anew:
                self._delete()
            # Where it is another file now, another process has replaced it.
            if damaged is not None and damaged == file_id(self.path):
                self._put_aside("it was found to be damaged")
            try:
                self.connection = self._connect(wait_s)
            # UnicodeDecodeError: SQLite's message is no text.
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                is_of_no_use = is_useless(error) or _code(error) == _WRONG_SQL
                ours = is_ours(self.path)  # None: only its name may tell
                named = ours is None and self.path.name == self._schema.file
                if not self._replace or not is_of_no_use or not (ours or named):
                    raise
                self._put_aside(str(error))
                self.connection = self._connect(wait_s)
            self.file = file_id(self.path)
            self.opened += 1

    def _connect(self, wait_s: float) -> sqlite3.Connection:
        """Open the file, with its tables. Raises where it is not ours, damaged, or of another version."""
        is_there = check_regular(self.path)
        if self._replace:
            if not is_there:  # SQLite gives its log and shared memory the same mode
                os.close(open_file(self.path, os.O_RDWR | os.O_CREAT))
            self._make_private()
        may_write = os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)
        writable = self._replace or may_write
        db = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?{self._mode(writable)}",
            uri=True,
            timeout=wait_s,
            isolation_level=None,
            check_same_thread=False,
        )
        db.text_factory = _text
        try:
            self._set_up(db, writable)
        except BaseException:
            db.close()
            raise
        return db

    def _mode(self, writable: bool) -> str:
        """How SQLite opens the file."""
        if writable:
            return "mode=rw"
        # Without a log no process has the file open, and SQLite would make one just to read, and leave it.
        return "mode=ro" if _beside(self.path, "-wal").exists() else "mode=ro&immutable=1"

    def _set_up(self, db: sqlite3.Connection, writable: bool) -> None:
        """The settings of a connection, and the tables where there are none."""
        db.execute("PRAGMA foreign_keys=ON")
        # Deleted rows are overwritten with zeros, which not every build of SQLite does by itself.
        db.execute("PRAGMA secure_delete=ON")
        db.execute("PRAGMA synchronous=NORMAL")
        is_new = self._is_new(db)
        if is_new and not self._replace:
            raise StoreError(f"{self.path} is empty")
        if is_new or self._lacks_tables(db):
            if not writable:
                missing = StoreError(f"{self.path} has no {self._schema.first}")
                missing.reason = "missing"
                raise missing
            self._begin(db)
        if writable:
            # After the above, which `is_ours` finds in the file then.
            db.execute("PRAGMA journal_mode=WAL")
        added = self._schema.added if writable else ()
        for query in (*self._schema.probes, *added):
            db.execute(query).fetchone()
        db.execute(f"PRAGMA busy_timeout={self._timeout_s * 1000:.0f}")

    def _is_new(self, db: sqlite3.Connection) -> bool:
        """Whether nothing is in the file. Raises where it is another program's, or of another format version."""
        version = db.execute("PRAGMA user_version").fetchone()[0]
        application = db.execute("PRAGMA application_id").fetchone()[0]
        tables = db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if not tables and not version and not application:
            return True
        if version == self._schema.version and application == _APPLICATION:
            return False
        if application != _APPLICATION:
            raise StoreError(
                f"{self.path} is not a semkv database: choose another file or cache directory"
            )
        if self._schema.discard and version < self._schema.version:
            raise sqlite3.DatabaseError("it is of an earlier format")
        raise StoreError(
            f"{self.path} was written by format version {version}, this semkv reads version {self._schema.version}: "
            "update semkv, empty the cache with 'semkv purge', or choose another file or cache directory"
        )

    def _lacks_tables(self, db: sqlite3.Connection) -> bool:
        first = self._schema.first
        named = "SELECT 1 FROM sqlite_master WHERE type='table' AND name=?"
        return bool(first) and db.execute(named, (first,)).fetchone() is None

    def _make_private(self) -> None:
        for path in (self.path, *(_beside(self.path, suffix) for suffix in _BESIDE)):
            with suppress(OSError):  # another user's, or gone
                if check_regular(path) and path.stat().st_mode & 0o077:
                    path.chmod(0o600)

    def _begin(self, db: sqlite3.Connection) -> None:
        if self._schema.discard:
            self._schema.discard(self.path.parent)
        tables = "; ".join(
            (*self._schema.added, self._schema.tables.replace(":now", str(time.time_ns() // 1000)))
        )
        identity = (
            f"PRAGMA application_id={_APPLICATION}; PRAGMA user_version={self._schema.version};"
        )
        db.executescript(f"BEGIN IMMEDIATE; {tables} {identity} COMMIT")

    def _put_aside(self, why: str) -> None:
        kept = "deleted" if self._schema.discard else "put aside"
        log.warning(
            "semkv: %s cannot be used and is %s; a new file is begun (%s)", self.path, kept, why
        )
        aside = _beside(self.path, ".damaged")
        if not self._schema.discard and not aside.exists():  # the first one is kept
            self.path.replace(aside)
        self._delete()

    def _delete(self) -> None:
        self.path.unlink(missing_ok=True)
        for suffix in _BESIDE:  # lest they be read into the next
            _beside(self.path, suffix).unlink(missing_ok=True)


def _text(stored: bytes) -> str:
    """A text, also a damaged one: it must not hide the rows that are read with it."""
    return stored.decode(errors="replace")


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def is_transient(error: BaseException) -> bool:
    """Whether another process was in the way, so that the same may go well the next time."""
    return _code(error) in _TRANSIENT


def is_useless(error: BaseException) -> bool:
    """Whether a file is damaged beyond use: SQLite finds a fault in it that neither the disk nor another process nor
    the caller has caused. (The message of such a fault may be no valid text.)"""
    found = isinstance(error, (sqlite3.DatabaseError, UnicodeDecodeError)) and not isinstance(
        error, sqlite3.ProgrammingError
    )
    return found and _code(error) not in (*_TRANSIENT, *_DISK, _WRONG_SQL)


def _code(error: BaseException) -> int:
    return int(getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def is_ours(path: Path) -> bool | None:
    """Whether a database is semkv's, by the header of the file; None where there is none, or a damaged one.

    Not of a file that this process has open: to close it takes SQLite's locks away.
    """
    try:
        head = read_bytes(path, 100)  # https://www.sqlite.org/fileformat.html#the_database_header
    except (OSError, StoreError):
        return None
    if not head.startswith(b"SQLite format 3\0"):
        return None
    return head[68:72] == _APPLICATION.to_bytes(4, "big")


def is_filled(path: Path) -> bool:
    """Whether a file has anything in it. An empty one may be another program's: to open it is to make it ours."""
    return path.exists() and path.stat().st_size > 0
