"""The one way to a SQLite file: how it is opened, made, locked, and replaced when it is damaged or of an older format.

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
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from semkv.errors import StoreError
from semkv.stores.files import FileId, check_regular, file_id, lock, make_folder, open_file
from semkv.stores.schema import APPLICATION, CATALOG, FIRST_NUMBERS, FORMAT, RESPONSES_1, TABLES

_POLL_S = 0.005
_LOCK_S = 60.0  # for other processes that open or replace the file
_BESIDE = ("-wal", "-shm")
_OURS = (APPLICATION, RESPONSES_1[1])
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

log = logging.getLogger("semkv")


class Database:
    """One connection behind one lock; any thread may use it. Several processes may share the file.

    A damaged file is put aside as ``<name>.damaged`` and one of an older format is deleted; either way a new file is
    begun, with a warning. A file that another process deleted or replaced is opened anew.

    Args:
        path: the file; made when missing, as is its folder.
        timeout_s: how long to wait for another process's write.
        follow_reads: look before every read too whether the file was deleted or replaced; without it before a write
            and in `version` alone.
        fault: makes the exception that is raised in place of SQLite's; None for SQLite's own.
        replace: do all of that. Without it a file is only looked after: one that is missing, damaged or of another
            format is refused, and one that this user cannot write is read.

    Attributes:
        lock: held while the connection is used; reentrant.
        opened: how often the file was opened.
        damaged: how many damaged files were put aside.

    Raises:
        StoreError: the file cannot be opened, is another program's, or was written by a newer format version.
    """

    def __init__(
        self,
        path: Path,
        *,
        timeout_s: float = 2.0,
        follow_reads: bool = False,
        fault: Callable[[sqlite3.Error], Exception] | None = None,
        replace: bool = True,
    ) -> None:
        self.path, self.lock = path, threading.RLock()
        self.opened = self.damaged = 0
        self._file: FileId | None = None  # that is open
        self._timeout_s, self._fault, self._replace, self._closed = timeout_s, fault, replace, False
        self._name, self._follow_reads = os.fspath(path), follow_reads
        try:
            if replace:
                make_folder(path.parent)
            self._open(wait_s=_LOCK_S)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"database {path}: {error}") from error

    def __enter__(self) -> sqlite3.Connection:
        """The connection, to read. SQLite's errors (locked, damaged, closed) become ``fault``'s."""
        self.lock.acquire()
        try:
            if self._follow_reads or self._file is None:
                self._follow()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self.connection

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                self._fail(error)
        finally:
            self.lock.release()

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """The connection, in a transaction that is undone on any exception; a full disk is one more fault.

        While another process writes, other threads go on reading.
        """
        until = time.monotonic() + self._timeout_s
        while True:
            with self:
                self._follow()
                if self._began(last=time.monotonic() >= until):
                    yield self.connection
                    self.connection.execute("COMMIT")
                    return
            time.sleep(_POLL_S)

    def _began(self, *, last: bool) -> bool:
        """Begin to write; False where another process writes, unless this try is the last one."""
        self.connection.execute("PRAGMA busy_timeout=0")
        try:
            self.connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if last or error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            return False
        finally:
            self.connection.execute(f"PRAGMA busy_timeout={self._timeout_s * 1000:.0f}")
        return True

    def _fail(self, error: BaseException) -> None:
        with suppress(sqlite3.Error):
            if self.connection.in_transaction:  # some errors have rolled back already
                self.connection.execute("ROLLBACK")
        if self._replace and is_damage(error):
            with suppress(sqlite3.Error):  # the next use tries again
                self._open_anew(damaged=self._file)
        if self._fault is not None and isinstance(error, sqlite3.Error):
            raise self._fault(error) from error

    def version(self) -> tuple[int, int]:
        """Another value whenever another connection has written, or the file was replaced."""
        with self:
            self._follow()
            return self.opened, int(self.connection.execute("PRAGMA data_version").fetchone()[0])

    def check(self) -> str:
        """The first fault in the structure of the file; empty where there is none."""
        try:
            with self as db:
                found = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            found = str(error)
        return "" if found == "ok" else found.splitlines()[-1]

    def truncate_log(self) -> bool:
        """Write the write-ahead log into the file and empty it, so that nothing deleted stays there; False where
        another process reads the database."""
        with self as db:
            return not db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]

    def close(self) -> None:
        """Close the file; later uses raise `sqlite3.ProgrammingError`."""
        with self.lock:
            self._closed = True
            # The last connection empties the log and deletes it by name: nobody may begin a new file meanwhile.
            with suppress(OSError, StoreError), _opening(self.path, self._timeout_s):
                self.connection.close()
            self.connection.close()

    # -- the file -----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Open anew what another process deleted or replaced: what is written to the old file is lost."""
        with suppress(OSError):  # it is gone
            status = os.stat(self._name)  # noqa: PTH116 (half the time of a path's)
            if (status.st_dev, status.st_ino) == self._file:
                return
        if not self._closed and self._replace and (self._file is None or not self.connection.in_transaction):
            self._open_anew()

    def _open_anew(self, damaged: FileId | None = None) -> None:
        self._file = None  # so that the next use tries again where this fails
        try:
            self._open(damaged, wait_s=self._timeout_s)
        except (OSError, sqlite3.Error, StoreError) as error:
            raise sqlite3.OperationalError(f"{self.path} cannot be opened anew: {error}") from error

    def _open(self, damaged: FileId | None = None, *, wait_s: float) -> None:
        """Open the file, or a new one in place of the one that was found to be damaged.

        Args:
            damaged: the file that was.
            wait_s: how long to wait for others who open, replace or write it.
        """
        if not self._replace:
            self.connection = self._connect(wait_s)
            return
        with _opening(self.path, wait_s):
            if self.opened:
                self.connection.close()
            if damaged is not None and damaged == file_id(self.path):  # else another process has replaced it
                self._put_aside("it was found to be damaged")
            try:
                self.connection = self._connect(wait_s)
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
                if self.path.name != CATALOG and error.sqlite_errorcode == sqlite3.SQLITE_NOTADB:
                    raise StoreError(f"{self.path} is no database: delete it, or choose another file") from error
                self._put_aside(str(error))
                self.connection = self._connect(wait_s)
            self._file = file_id(self.path)
            self.opened += 1

    def _connect(self, wait_s: float) -> sqlite3.Connection:
        if self._replace:
            self._make_private()
        writable = self._replace or (os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK))
        # Without a log nobody has the file open, and SQLite would leave one behind to read it.
        read = "mode=ro" if self._beside("-wal").exists() else "mode=ro&immutable=1"
        uri = f"{self.path.absolute().as_uri()}?{'mode=rw' if writable else read}"
        db = sqlite3.connect(uri, uri=True, timeout=wait_s, isolation_level=None, check_same_thread=False)
        try:
            db.execute("PRAGMA foreign_keys=ON")
            db.execute("PRAGMA secure_delete=ON")  # what goes is overwritten with zeros; not every build does it
            db.execute("PRAGMA synchronous=NORMAL")
            found = self._format_of(db)
            if found == "old" and self._replace:
                db.close()
                log.warning("semkv: %s was written by an older version of semkv; it is emptied", self.path)
                delete_files(self.path)
                return self._connect(wait_s)
            if found == "old":
                raise StoreError(
                    f"{self.path} was written by an older version of semkv: an engine or a gateway that is started on "
                    "it empties it, as does a purge without --tenant and --tag"
                )
            if found == "new" and not self._replace:
                raise StoreError(f"{self.path} is empty")
            if found == "new":
                self._begin(db)
            if writable:
                db.execute("PRAGMA journal_mode=WAL")  # after the above, which `is_ours` finds in the file then
            for table in ("entries", "responses"):  # a damaged page shows here
                db.execute(f"SELECT created FROM {table} NOT INDEXED LIMIT 1").fetchone()  # noqa: S608 (our own words)
            db.execute(f"PRAGMA busy_timeout={self._timeout_s * 1000:.0f}")
        except BaseException:
            db.close()
            raise
        return db

    def _format_of(self, db: sqlite3.Connection) -> str:
        """``ours``, ``old``, or ``new`` where nothing is in the file.

        Raises:
            StoreError: it is another program's, or was written by a newer format version.
        """
        version, application, tables = (
            db.execute(statement).fetchone()[0]
            for statement in ("PRAGMA user_version", "PRAGMA application_id", "SELECT COUNT(*) FROM sqlite_master")
        )
        if not tables and not version and not application:
            return "new"
        if application not in _OURS:
            raise StoreError(f"{self.path} is not a semkv database: choose another file or cache directory")
        if version > FORMAT:
            raise StoreError(
                f"{self.path} was written by format version {version}, this semkv reads version {FORMAT}: update "
                "semkv, start once with --purge to empty the cache, or choose another file or cache directory"
            )
        return "ours" if version == FORMAT else "old"

    def _make_private(self) -> None:
        if not check_regular(self.path):
            os.close(open_file(self.path, os.O_RDWR | os.O_CREAT))  # SQLite gives the files beside it the same mode
        for path in (self.path, *map(self._beside, _BESIDE)):
            with suppress(OSError):  # another user's, or gone
                if check_regular(path) and path.stat().st_mode & 0o077:
                    path.chmod(0o600)

    def _begin(self, db: sqlite3.Connection) -> None:
        now = time.time_ns() // 1000
        db.executescript(
            f"BEGIN IMMEDIATE; {TABLES} {FIRST_NUMBERS.replace(':now', str(now))}"
            f"PRAGMA application_id={APPLICATION}; PRAGMA user_version={FORMAT}; COMMIT"
        )
        old = self.path.with_name(RESPONSES_1[0])
        if self.path.name == CATALOG and _application(old) == RESPONSES_1[1]:
            log.warning("semkv: %s was written by an older version of semkv; it is deleted", old)
            delete_files(old)
            old.with_name(f"{old.name}.lock").unlink(missing_ok=True)

    def _put_aside(self, why: str) -> None:
        log.warning("semkv: %s is damaged and put aside; a new file is begun (%s)", self.path, why)
        self.damaged += 1
        if not self._beside(".damaged").exists():  # the first one is kept
            self.path.replace(self._beside(".damaged"))
        delete_files(self.path)

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)


def is_damage(error: BaseException) -> bool:
    """Whether SQLite says that a file is damaged, or no database."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE


def is_ours(path: Path) -> bool | None:
    """Whether a database is semkv's; None where there is none, or none that can be read. Leaves nothing behind."""
    application = _application(path)
    return None if application is None else application in _OURS


def _application(path: Path) -> int | None:
    """The id of the program whose database a file is; None where it is none, or an empty one."""
    if not is_filled(path):
        return None
    # An immutable file is read without its log: the id is in the first page since the file was made.
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)) as db:
        application = int(db.execute("PRAGMA application_id").fetchone()[0])
        if application or db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
            return application
    return None


def is_filled(path: Path) -> bool:
    """Whether a file has anything in it. An empty one may be another program's: to open it is to make it ours."""
    return path.exists() and path.stat().st_size > 0


def delete_database(path: Path) -> None:
    """Delete a database, also under processes that have it open: they begin a new one at their next use.

    Raises:
        OSError: it cannot be deleted; BlockingIOError where another process opens it for a minute.
    """
    if path.parent.is_dir():
        with _opening(path, _LOCK_S):
            delete_files(path)


@contextmanager
def _opening(path: Path, wait_s: float) -> Iterator[None]:
    """One process at a time makes, replaces or deletes a database. Raises as `files.lock`."""
    guard = path.with_name(f"{path.name}.lock")
    with lock(guard, make=False, wait_s=wait_s):
        try:
            yield
        finally:
            guard.unlink(missing_ok=True)


def delete_files(path: Path) -> None:
    """Delete a database and what SQLite keeps beside it, while its lock is held."""
    path.unlink(missing_ok=True)
    for suffix in _BESIDE:  # lest they be read into the next
        path.with_name(path.name + suffix).unlink(missing_ok=True)
