"""What happened, by time: requests by tier, reason, model and tenant. How often answers were used, names of tenants.

The figures lie in the file of what was saved, so all processes on a cache directory have the same. The event loop only
counts; a thread brings the counts into the file every few seconds.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from semkv.errors import StoreError
from semkv.periodic import Every
from semkv.stores.maintenance import StoreUse
from semkv_dashboard.names import DIGITS
from semkv_stores.database import Database, Schema, is_filled
from semkv_stores.ledger import FILE, OTHERS

log = logging.getLogger(__name__)

WINDOWS = {
    "1 hour": (60, 60),
    "24 hours": (900, 96),
    "7 days": (7200, 84),
}
"""Seconds of a bin, and bins of each window."""

TENANT = "tenant"
_WRITE_S = 5.0
_WAIT_S = 2.0  # for other processes that write
_NAMES = 100  # of one kind in one bin
_LONGEST = 100  # characters of a name
_WAITING = 2000  # counts that wait for the next write
_USES = 100_000  # answers whose uses are known, the latest
_TENANTS = 10_000  # that have names
_SHOWN = 1000  # of them, the latest

_TABLES = """
CREATE TABLE traffic (step INTEGER NOT NULL, at INTEGER NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
  count INTEGER NOT NULL, PRIMARY KEY (step, at, kind, name)) WITHOUT ROWID;
CREATE TABLE uses (key TEXT PRIMARY KEY, tenant TEXT NOT NULL, count INTEGER NOT NULL, at REAL NOT NULL);
CREATE INDEX uses_count ON uses (count);
CREATE INDEX uses_at ON uses (at);
CREATE TABLE names (tenant TEXT PRIMARY KEY, name TEXT NOT NULL, at REAL NOT NULL);
"""
SCHEMA = Schema(
    tables=_TABLES,
    version=1,
    file=FILE,
    probes=("SELECT count FROM traffic LIMIT 1", "SELECT count FROM uses NOT INDEXED LIMIT 1"),
    first="traffic",
)
_HERE = "step=? AND at=? AND kind=?"
_FIND = f"SELECT 1 FROM traffic WHERE {_HERE} AND name=?"  # noqa: S608 (our own words)
_FULL = f"SELECT COUNT(*) FROM traffic WHERE {_HERE}"  # noqa: S608
_LEAST = f"SELECT name, count FROM traffic WHERE {_HERE} AND name<>? ORDER BY count LIMIT 1"  # noqa: S608
_DROP = f"DELETE FROM traffic WHERE {_HERE} AND name=?"  # noqa: S608
_ADD = "INSERT INTO traffic VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET count=count+excluded.count"
_SEEN = "SELECT at, kind, name, count FROM traffic WHERE step=? AND at>?"
_FORGET = "DELETE FROM traffic WHERE step=? AND at<=?"
_USE = (
    "INSERT INTO uses VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE"
    " SET count=count+excluded.count, at=excluded.at"
)
_NAME = "INSERT OR REPLACE INTO names VALUES (?, ?, ?)"


def _trimmed(table: str, most: int) -> str:
    return (
        f"DELETE FROM {table} WHERE rowid IN (SELECT rowid FROM {table} ORDER BY at"  # noqa: S608
        f" LIMIT max(0, (SELECT COUNT(*) FROM {table}) - {most}))"
    )


_TRIM_USES = _trimmed("uses", _USES)
_TRIM_NAMES = _trimmed("names", _TENANTS)


class History:
    """Any thread may call any method; what reads or writes the file blocks.

    Args:
        folder: the cache directory.
        on_fault: called for a fault of the file; what was not written waits for the next time.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        folder: Path,
        on_fault: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.clock = clock
        self._folder = folder
        self.on_fault = on_fault
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._uses: Counter[tuple[str, str]] = Counter()
        self._names: dict[str, str] = {}
        self._opened: Database | None = None
        self._said = ""  # the fault that was logged
        self._writer = Every(_WRITE_S, self.write, "semkv-history")

    # -- counting -----------------------------------------------------------------------------------------------

    def add(
        self,
        kind: str,
        name: str,
        count: int = 1,
    ) -> None:
        """Count something of a kind, such as a request that a tier answered."""
        key = (kind, name)
        with self._lock:
            if key not in self._counts:
                key = (kind, _text(name) or "-")
                if len(self._counts) >= _WAITING:
                    key = (kind, OTHERS)
            self._counts[key] += count

    def used(
        self,
        key: str,
        tenant: str,
        count: int,
    ) -> None:
        """An answer was given so many times."""
        with self._lock:
            if len(self._uses) < _WAITING:
                self._uses[key, tenant] += count

    def named(self, names: Mapping[str, str]) -> None:
        """What tenants are called, by their digests."""
        with self._lock:
            for tenant, name in names.items():
                if len(self._names) < _WAITING:
                    self._names[tenant] = name

    def write(self) -> None:
        """Bring what is new into the file."""
        with self._writing:
            with self._lock:
                counts, self._counts = self._counts, Counter()
                uses, self._uses = self._uses, Counter()
                names, self._names = self._names, {}
            if not (counts or uses or names):
                return
            try:
                with self._database().write() as db:
                    _write(
                        db,
                        self.clock(),
                        counts=counts,
                        uses=uses,
                        names=names,
                    )
            except Exception as error:  # it costs no request anything
                self._fault(error)
                self._take_back(counts=counts, uses=uses, names=names)

    def _take_back(
        self,
        *,
        counts: Mapping[tuple[str, str], int],
        uses: Mapping[tuple[str, str], int],
        names: Mapping[str, str],
    ) -> None:
        """Keep what could not be written, within the same bounds as what is new."""
        for (kind, name), count in counts.items():
            self.add(kind, name, count)
        for (key, tenant), count in uses.items():
            self.used(key, tenant, count)
        self.named(names)

    def _fault(self, error: Exception) -> None:
        self.on_fault()
        if str(error) != self._said:
            self._said = str(error)
            log.warning("traffic by time cannot be written or read: %s", error)

    def _database(self) -> Database:
        if self._opened is None:
            self._opened = Database(
                self._folder / FILE,
                schema=SCHEMA,
                timeout_s=_WAIT_S,
                raises_store_error=True,
            )
        return self._opened

    def _rows(self, statement: str, *values: object) -> list[Any]:
        try:
            return self._database().rows(statement, *values)
        except StoreError as error:
            self._fault(error)
            return []

    # -- reading ------------------------------------------------------------------------------------------------

    def view(self, window: str) -> dict[str, Any]:
        """What happened in a window: sums by kind and name, and the tiers by bin."""
        self.write()
        step, bins = WINDOWS[window]
        now = int(self.clock())
        since = now - now % step - step * bins
        sums: dict[str, Counter[str]] = {}
        tiers: dict[int, Counter[str]] = {}
        for at, kind, name, count in self._rows(_SEEN, step, since):
            sums.setdefault(kind, Counter())[name] += count
            if kind == "tier":
                tiers.setdefault(at, Counter())[name] += count
        return {
            "window": window,
            "windows": list(WINDOWS),
            "step_s": step,
            "bins": bins,
            "now": now,
            "tiers": sorted(tiers.items()),
            "sums": {kind: dict(names.most_common()) for kind, names in sums.items()},
        }

    def most_used(
        self,
        first: int,
        most: int,
        least: int,
    ) -> list[str]:
        """Keys of answers that were used so often at least, the most used first, from a place on."""
        self.write()
        statement = "SELECT key FROM uses WHERE count>=? ORDER BY count DESC, key LIMIT ? OFFSET ?"
        return [key for (key,) in self._rows(statement, least, most, first)]

    def uses(self, keys: Sequence[str]) -> dict[str, tuple[int, float | None]]:
        """How often answers were used, and when last."""
        self.write()
        marks = ", ".join("?" for _ in keys)
        statement = f"SELECT key, count, at FROM uses WHERE key IN ({marks})"  # noqa: S608
        return {key: (count, at) for key, count, at in self._rows(statement, *keys)}

    def names(self) -> dict[str, str]:
        """What tenants are called, by their digests."""
        if not is_filled(self._folder / FILE):
            return {}
        latest = "SELECT tenant, name FROM names ORDER BY at DESC LIMIT ?"
        return dict(self._rows(latest, _SHOWN))

    def close(self) -> None:
        """Write what is left."""
        self._writer.stop(_WRITE_S)
        self.write()
        if self._opened is not None:
            self._opened.close()


def _text(name: str) -> str:
    return name[:_LONGEST].encode(errors="replace").decode()


def _write(
    db: sqlite3.Connection,
    now: float,
    *,
    counts: Counter[tuple[str, str]],
    uses: Counter[tuple[str, str]],
    names: Mapping[str, str],
) -> None:
    for step, bins in WINDOWS.values():
        at = int(now) - int(now) % step
        for (kind, name), count in counts.most_common():
            _count(db, (step, at, kind), name, count)
        db.execute(_FORGET, (step, at - step * bins))
    rows = [(key, tenant, count, now) for (key, tenant), count in uses.items()]
    db.executemany(_USE, rows)
    db.executemany(_NAME, [(tenant, name, now) for tenant, name in names.items()])
    if uses:
        db.execute(_TRIM_USES)
    if names:
        db.execute(_TRIM_NAMES)


def _count(
    db: sqlite3.Connection,
    place: tuple[int, int, str],
    name: str,
    count: int,
) -> None:
    """Add to a name's count. A new one takes the place of the rarest where there is no room, if it came more often."""
    if not db.execute(_FIND, (*place, name)).fetchone():
        ((there,),) = db.execute(_FULL, place).fetchall()
        if there >= _NAMES:
            rarest, least = db.execute(_LEAST, (*place, OTHERS)).fetchone()
            if least < count:
                db.execute(_DROP, (*place, rarest))
                db.execute(_ADD, (*place, OTHERS, least))
            else:
                name = OTHERS
    db.execute(_ADD, (*place, name, count))


class HistoryUpkeep:
    """A store that the commands look after: only a purge of tenants finds something in it."""

    name = "history"

    def __init__(self, cache_dir: Path) -> None:
        self._file = cache_dir / FILE

    def usage(self, tenants: Sequence[str] | None = None) -> Iterable[StoreUse]:
        del tenants  # it is bounded, and no user's data
        return ()

    def verify(self, *, repair: bool = False) -> Iterator[str]:
        del repair  # `Database` puts a damaged file aside
        return iter(())

    def collect(self, before: float) -> int:
        del before
        return 0

    def purge(
        self,
        *,
        tenants: Sequence[str] | None = None,
        tag: str | None = None,
        dry_run: bool = False,
    ) -> int:
        """Delete names, counts and uses of the tenants."""
        if dry_run or tag is not None or tenants is None or not is_filled(self._file):
            return 0
        database = Database(
            self._file,
            schema=SCHEMA,
            timeout_s=_WAIT_S,
            raises_store_error=True,
        )
        with database.write() as db:
            for tenant in tenants:
                shown = tenant[:DIGITS]
                db.execute("DELETE FROM uses WHERE tenant=?", (tenant,))
                db.execute("DELETE FROM names WHERE tenant=?", (tenant,))
                db.execute(
                    "DELETE FROM traffic WHERE kind LIKE ? AND name=?", (f"{TENANT}%", shown)
                )
        database.close()
        return 0

    def close(self) -> None:
        return None
