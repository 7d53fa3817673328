"""Answers in one SQLite file: the default. Several processes of one machine may share it.

A commit is written with one system call to the write-ahead log, so what was acknowledged survives the end of the
process, however it ends. A power cut may cost the last moments, never an older entry (``synchronous=NORMAL``).
"""

from __future__ import annotations

import fcntl
import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from semkv.errors import CorruptValue, StoreError
from semkv.stores.responses.base import News, ResponseStore, Selector, StoredResponse, read_selectors
from semkv.stores.responses.codec import decode, decode_head, encode

FORMAT = 1
_APPLICATION = 0x73656D72  # "semr"
_LOG = 1000
_TOUCHED = 65_536  # entries whose last use is remembered until the next write
_NOTHING = Selector(key="")
_BROKEN = ("malformed", "not a database")

_SCHEMA = """
CREATE TABLE answers (
  key TEXT PRIMARY KEY, head BLOB NOT NULL, payload BLOB NOT NULL, created REAL NOT NULL, stale_until REAL,
  used REAL NOT NULL, nbytes INTEGER NOT NULL);
CREATE INDEX answers_used ON answers (used);
CREATE INDEX answers_created ON answers (created);
CREATE INDEX answers_stale ON answers (stale_until) WHERE stale_until IS NOT NULL;
CREATE TABLE totals (entries INTEGER NOT NULL, nbytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER answers_in AFTER INSERT ON answers BEGIN
  UPDATE totals SET entries=entries+1, nbytes=nbytes+NEW.nbytes; END;
CREATE TRIGGER answers_out AFTER DELETE ON answers BEGIN
  UPDATE totals SET entries=entries-1, nbytes=nbytes-OLD.nbytes; END;
CREATE TABLE invalidations (number INTEGER PRIMARY KEY AUTOINCREMENT, selector TEXT NOT NULL);
"""

log = logging.getLogger("semkv")


class SqliteStore(ResponseStore):
    """One connection behind one lock.

    A file that is damaged as a whole is put aside as ``<name>.damaged`` and a new one begun; a damaged row is deleted.

    Args:
        path: the file; made when missing, as is its folder.
        max_bytes: bound on heads and payloads; the file is a little larger.
        max_entries: bound on entries.
        timeout_s: how long to wait for another process's write.
        clock: seconds since the epoch.

    Raises:
        StoreError: the file cannot be opened, is another program's, or was written by another format version.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = 4 << 30,
        max_entries: int = 1_000_000,
        timeout_s: float = 2.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path, self.max_bytes, self.max_entries = path, max_bytes, max_entries
        self.evicted = self.damaged = 0
        self._timeout_s, self._clock = timeout_s, clock
        self._lock = threading.RLock()
        self._touched: dict[str, float] = {}
        self._closed = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"responses {path}: {error}") from error

    # -- the file -----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Open the file, or a new one where it is damaged. One process at a time."""
        with self.path.with_name(self.path.name + ".lock").open("w") as guard:
            fcntl.flock(guard, fcntl.LOCK_EX)
            try:
                self._db = self._connect()
            except sqlite3.DatabaseError as error:
                if not _is_broken(error):
                    raise
                log.warning("responses %s: %s; a new file is begun", self.path, error)
                self.damaged += 1
                self._put_aside()
                self._db = self._connect()
            self._inode = self.path.stat().st_ino

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=self._timeout_s, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(db)
        except BaseException:
            db.close()
            raise
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA secure_delete=ON")  # what goes is overwritten with zeros; not every build does it
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        if is_new(db, self.path):
            first = int(time.time() * 1000)  # so that the numbers of an older file are not met again
            db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA}")
            db.execute("INSERT INTO invalidations VALUES (?, ?)", (first, json.dumps(_NOTHING.view())))
            db.execute(f"PRAGMA application_id={_APPLICATION}")
            db.execute(f"PRAGMA user_version={FORMAT}")
            db.execute("COMMIT")
        db.execute("SELECT head FROM answers LIMIT 1").fetchone()

    def _put_aside(self) -> None:
        self.path.replace(self.path.with_name(self.path.name + ".damaged"))
        self._drop_log()

    def _drop_log(self) -> None:
        """Delete the write-ahead log of a file that is gone, lest it be read into the next."""
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    @contextmanager
    def _use(self, *, write: bool = False) -> Iterator[sqlite3.Connection]:
        """The connection, in a transaction that is undone on any exception where ``write``."""
        with self._lock:
            if self._moved():
                self._recover()
            try:
                if write:
                    self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                if write:
                    self._db.execute("COMMIT")
            except sqlite3.Error as error:
                self._undo()
                if _is_broken(error):
                    self._recover()
                raise StoreError(f"responses {self.path}: {error}") from error
            except BaseException:
                self._undo()
                raise

    def _moved(self) -> bool:
        """Whether the file was deleted, or put aside by another process: what is written to it would be lost."""
        try:
            return self.path.stat().st_ino != self._inode and not self._closed
        except OSError:
            return not self._closed

    def _undo(self) -> None:
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        except sqlite3.Error:
            pass  # the connection is closed or the file damaged

    def _recover(self) -> None:
        """Begin a new file in place of a damaged or missing one, unless another process has done so."""
        self._db.close()
        try:
            with self.path.with_name(self.path.name + ".lock").open("w") as guard:
                fcntl.flock(guard, fcntl.LOCK_EX)
                if not self.path.exists():
                    self._drop_log()
                elif self.path.stat().st_ino == self._inode:
                    log.warning("responses %s is damaged; a new file is begun", self.path)
                    self.damaged += 1
                    self._put_aside()
            self._open()
        except (OSError, sqlite3.Error, StoreError):
            log.exception("responses %s cannot be opened anew", self.path)

    # -- answers ------------------------------------------------------------------------------------------------

    def get(self, key: str) -> StoredResponse | None:
        with self._use() as db:
            row = db.execute("SELECT head, payload FROM answers WHERE key=?", (key,)).fetchone()
        if row is None:
            return None
        try:
            response = decode(key, bytes(row[0]), bytes(row[1]))
        except (CorruptValue, TypeError) as error:
            with self._use(write=True) as db:
                db.execute("DELETE FROM answers WHERE key=?", (key,))
            raise CorruptValue(str(error)) from error
        if response.stale_until <= self._clock():
            return None
        with self._lock:
            self._touched.pop(key, None)
            self._touched[key] = self._clock()
            if len(self._touched) > _TOUCHED:
                del self._touched[next(iter(self._touched))]
        return response

    def _flush(self, db: sqlite3.Connection) -> None:
        """Write when entries were last used. Kept in memory until something is put: a hit costs no write."""
        rows = [(at, key) for key, at in self._touched.items()]
        self._touched.clear()
        db.executemany("UPDATE answers SET used=MAX(used, ?) WHERE key=?", rows)

    def put(self, response: StoredResponse, since: str = "") -> bool:
        head, payload = encode(response)
        size, now = len(head) + len(payload), self._clock()
        if size > self.max_bytes:
            return False
        with self._use(write=True) as db:
            if since and self._news(db, since).hit(response):
                return False
            self._flush(db)
            db.execute("DELETE FROM answers WHERE key=?", (response.key,))
            db.execute(
                "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)",
                (response.key, head, payload, response.created, _finite(response.stale_until), now, size),
            )
            db.execute("DELETE FROM answers WHERE stale_until<=?", (now,))
            self._trim(db, response.key)
        return True

    def _trim(self, db: sqlite3.Connection, keep: str) -> None:
        """Bring the store down to 0.98 of its bounds where it is above them, so that not every write has to."""
        entries, nbytes = db.execute("SELECT entries, nbytes FROM totals").fetchone()
        if entries <= self.max_entries and nbytes <= self.max_bytes:
            return
        most_entries, most_bytes = int(self.max_entries * 0.98), int(self.max_bytes * 0.98)
        gone = []
        for key, size in db.execute("SELECT key, nbytes FROM answers WHERE key<>? ORDER BY used, rowid", (keep,)):
            if entries <= max(1, most_entries) and nbytes <= most_bytes:
                break
            gone.append((key,))
            entries, nbytes = entries - 1, nbytes - size
        db.executemany("DELETE FROM answers WHERE key=?", gone)
        self.evicted += len(gone)

    def slide(self, response: StoredResponse) -> None:
        with self._use(write=True) as db:
            row = db.execute("SELECT head FROM answers WHERE key=?", (response.key,)).fetchone()
            if row is not None and decode_head(response.key, bytes(row[0])).created == response.created:
                db.execute(
                    "UPDATE answers SET head=?, stale_until=? WHERE key=?",
                    (encode(response)[0], _finite(response.stale_until), response.key),
                )

    def invalidate(self, selector: Selector, *, dry_run: bool = False) -> int:
        if dry_run:
            with self._use() as db:
                return len(self._selected(db, selector)[1])
        with self._use(write=True) as db:
            gone, live = self._selected(db, selector)
            db.executemany("DELETE FROM answers WHERE key=?", [(key,) for key in gone])
            db.execute("INSERT INTO invalidations (selector) VALUES (?)", (json.dumps(selector.view()),))
            db.execute("DELETE FROM invalidations WHERE number<=(SELECT MAX(number) FROM invalidations)-?", (_LOG,))
        return len(live)

    def _selected(self, db: sqlite3.Connection, selector: Selector) -> tuple[list[str], list[str]]:
        """Keys of what a selector names, unreadable rows too; and of those that could have been served."""
        where, values = ("WHERE key=?", (selector.key,)) if selector.key is not None else ("", ())
        now = self._clock()
        gone, live = [], []
        for key, head in db.execute(f"SELECT key, head FROM answers {where}", values):  # noqa: S608 (our own words)
            try:
                response = decode_head(key, bytes(head))
            except (CorruptValue, TypeError):
                gone.append(key)
                continue
            if selector.matches(response):
                gone.append(key)
                if response.stale_until > now:
                    live.append(key)
        return gone, live

    def news(self, cursor: str) -> News:
        with self._use() as db:
            return self._news(db, cursor)

    def _news(self, db: sqlite3.Connection, cursor: str) -> News:
        # One by one: SQLite takes either from the end of the index, and reads all rows for both.
        last = db.execute("SELECT MAX(number) FROM invalidations").fetchone()[0]
        since = last if not cursor else int(cursor) if cursor.isdecimal() else 0  # another store's is none of ours
        if since == last:
            return News(str(last))
        first = db.execute("SELECT MIN(number) FROM invalidations").fetchone()[0]
        if not first <= since <= last:
            return News(str(last), None)
        rows = db.execute("SELECT selector FROM invalidations WHERE number>? ORDER BY number", (since,)).fetchall()
        return News(str(last), read_selectors(row[0] for row in rows))

    def recent(self, limit: int) -> Sequence[StoredResponse]:
        with self._use() as db:
            rows = db.execute(
                "SELECT key, head, payload FROM answers ORDER BY created DESC, rowid DESC LIMIT ?", (limit,)
            ).fetchall()
        found = []
        for key, head, payload in rows:
            try:
                found.append(decode(key, bytes(head), bytes(payload)))
            except (CorruptValue, TypeError):
                continue  # `get` counts and deletes it
        return found

    def usage(self) -> tuple[int, int]:
        with self._use() as db:
            entries, nbytes = db.execute("SELECT entries, nbytes FROM totals").fetchone()
        return int(entries), int(nbytes)

    def close(self) -> None:
        with self._lock:
            try:
                with self._use(write=True) as db:
                    self._flush(db)
            except StoreError:
                pass  # only the order of use is lost
            self._closed = True
            self._db.close()


def is_new(db: sqlite3.Connection, path: Path) -> bool:
    """Whether a file has nothing in it yet; it is read, and not written.

    Raises:
        StoreError: it is another program's, or was written by another format version.
        sqlite3.Error: it cannot be read.
    """
    version, application, tables = (
        db.execute(statement).fetchone()[0]
        for statement in ("PRAGMA user_version", "PRAGMA application_id", "SELECT COUNT(*) FROM sqlite_master")
    )
    if not tables and not version and not application:
        return True
    if application != _APPLICATION:
        raise StoreError(f"{path} is not a store of answers; choose another file")
    if version != FORMAT:
        raise StoreError(
            f"{path} was written by format version {version}, this semkv reads version {FORMAT}; "
            "delete it or choose another file"
        )
    return False


def _finite(value: float) -> float | None:
    return None if value == float("inf") else value


def _is_broken(error: sqlite3.Error) -> bool:
    return any(word in str(error) for word in _BROKEN)
