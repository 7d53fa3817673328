"""What a directory's index knows of a bucket, whose log is applied to it record by record.

A bucket is one place for the block files of many directories. Its log is a list of records, each under the next number
(its place). Every directory applies all of them in that order, so all agree on what the bucket holds:

- an add names files that were put into the bucket, with their blocks;
- a drop names files that are to be deleted there;
- a purge covers the files before it that meet all that is given, in the bucket and in every directory.

No clock decides anything. A directory adds files only at a place up to which it has applied the log: what a purge
covers was deleted from its index by then. ``files.place`` is the place of the add; 0: not in the bucket; -1: never to
be put there, since its blocks are there in other files, or it was dropped. ``files.stored`` is when the bucket says
that it was added, and ``files.age`` how old it was then, both in seconds.

The functions here are steps of a transaction, as those of `block_index`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from semkv_stores.block_index import (
    MOST_PURGES,
    condition,
    file_name,
    microseconds,
    number_of,
    purge,
)

_MOST = 1 << 62  # of any number in a record
_PENDING = "place=0 AND here=1 AND committed=1"
_TWIN = f"""UPDATE files SET place=-1 WHERE number=? AND {_PENDING} AND NOT EXISTS (
  SELECT 1 FROM blocks AS own WHERE own.file=number AND NOT EXISTS (
    SELECT 1 FROM blocks AS other JOIN files AS far ON far.number=other.file
    WHERE other.key=own.key AND far.place>0))"""  # noqa: S608 (our own words)
_ADD = "INSERT INTO files VALUES(?,?,?,?,?,?,0,1,?,?,0,?,?,?)"
_COVERED = """SELECT 1 FROM purges WHERE place IS NULL AND coalesce(owner, ?1)=?1 AND coalesce(writer, ?2)=?2
AND coalesce(namespace, ?3)=?3"""
_ABOUT = "number, namespace, owner, writer, nbytes, place, stored, age"


_DAMAGE = (ValueError, TypeError, AttributeError, ArithmeticError)


def _check(numbers: Iterable[object], words: Iterable[object] = ()) -> None:
    """See that a record can be applied everywhere."""
    if not all(type(number) is int and 0 <= number < _MOST * 2 for number in numbers):
        raise ValueError("a number out of range")
    if not all(isinstance(word, bytes) for word in words):
        raise ValueError("a text that is none")


@dataclass(frozen=True, slots=True, kw_only=True)
class FarFile:
    """A file of the bucket.

    Attributes:
        number: which is its id.
        namespace, owner, writer: as the index has them.
        nbytes: of the whole file.
        rows, keys: its blocks, by the index's keys.
        age: seconds from when its blocks were computed to when it was added.
        place, stored: see the module; in a snapshot only.
    """

    number: int
    namespace: bytes
    owner: bytes
    writer: bytes
    nbytes: int
    rows: list[int]
    keys: list[bytes]
    age: int = 0
    place: int = 0
    stored: int = 0

    def __post_init__(self) -> None:
        numbers = [self.number, self.nbytes, self.age, self.place, self.stored]
        words = [self.namespace, self.owner, self.writer]
        _check([*numbers, *self.rows], [*words, *self.keys])
        if len(self.rows) != len(self.keys):
            raise ValueError("not as many rows as keys")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPurge:
    """A purge; ``place`` in a snapshot only."""

    owner: bytes | None = None
    writer: bytes | None = None
    namespace: bytes | None = None
    place: int = 0

    def which(self) -> dict[str, str]:
        given = {
            "owner": self.owner,
            "writer": self.writer,
            "namespace": self.namespace,
        }
        return {name: word.decode() for name, word in given.items() if word is not None}

    def __post_init__(self) -> None:
        words = [self.owner, self.writer, self.namespace]
        _check([self.place], [word for word in words if word is not None])
        self.which()


EVERYTHING = LogPurge()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One object of the log, or a part of a snapshot. ``nonce`` tells its writer that it is its own."""

    nonce: bytes = b""
    purges: list[LogPurge] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    adds: list[FarFile] = field(default_factory=list)

    def __post_init__(self) -> None:
        _check(self.drops)


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """Where and when a record stands: its place, what the bucket's clock said, and what this machine's clock said at
    the same moment."""

    place: int
    stored: int = 0
    local: float = 0.0


# -- the position ----------------------------------------------------------------------------------------------------


def position(db: sqlite3.Connection) -> tuple[str, int]:
    """The bucket that this directory follows, empty for none, and the last place that was applied."""
    row = db.execute("SELECT bucket, CAST(place AS INTEGER) FROM log").fetchone()
    return ("", 0) if row is None else (bytes(row[0]).decode(), int(row[1]))


def advance(db: sqlite3.Connection, bucket: str, place: int) -> bool:
    db.execute("DELETE FROM log")
    db.execute("INSERT INTO log VALUES(?, ?)", (bucket.encode(), place))
    return True


def forget(db: sqlite3.Connection, bucket: str, *, pending: bool) -> bool:
    """Begin to follow a bucket anew: all that is known to be in one is forgotten.

    Args:
        pending: put the files of this directory into the bucket, since it is another one.
    """
    db.execute("DELETE FROM blocks WHERE file IN (SELECT number FROM files WHERE here=0)")
    db.execute("DELETE FROM files WHERE here=0")
    db.execute("UPDATE files SET place=? WHERE place<>0", (0 if pending else -1,))
    return advance(db, bucket, 0)


# -- applying --------------------------------------------------------------------------------------------------------


def apply(
    db: sqlite3.Connection,
    root: Path,
    record: Record,
    at: At,
    own_purges: Sequence[int] = (),
) -> list[int]:
    """Apply a record of the log; returns the files that are no longer in the bucket.

    Args:
        own_purges: ids in the index of the purges that the record has from there. What this directory has computed
            since them stays.
    """
    gone = []
    for each in record.purges:
        gone += _purge(db, root, each, at.place, own=bool(own_purges))
    mark = "UPDATE purges SET place=? WHERE id=?"
    db.executemany(mark, [(at.place, number) for number in own_purges])
    _erase(db, record.drops)
    for file in record.adds:
        _add(db, file, at)
    return [*gone, *record.drops]


def _purge(
    db: sqlite3.Connection, root: Path, purged: LogPurge, place: int, *, own: bool
) -> list[int]:
    which = purged.which()
    where, values = condition(which)
    query = f"SELECT number FROM files WHERE place>0 AND place<? AND {where}"  # noqa: S608 (our own words)
    covered = [number for (number,) in db.execute(query, [place, *values])]
    if not own:
        purge(db, root, which, place)
    _erase(db, covered)
    return covered


def _erase(db: sqlite3.Connection, files: Iterable[int]) -> None:
    """Files are not in the bucket any more."""
    rows = [(number,) for number in files]
    far = "(SELECT number FROM files WHERE number=? AND here=0)"
    db.executemany(f"DELETE FROM blocks WHERE file IN {far}", rows)  # noqa: S608 (our own words)
    db.executemany("DELETE FROM files WHERE number=? AND here=0", rows)
    db.executemany("UPDATE files SET place=-1 WHERE number=?", rows)


def _add(db: sqlite3.Connection, file: FarFile, at: At) -> None:
    place = file.place or at.place
    stored = file.stored or at.stored
    known = "UPDATE files SET place=?, stored=?, age=? WHERE number=?"
    if db.execute(known, (place, stored, file.age, file.number)).rowcount:
        return
    created = microseconds(max(0.0, at.local - (at.stored - stored) - file.age))
    db.execute(
        _ADD,
        (
            file.number,
            file.namespace,
            len(file.keys),
            file.nbytes,
            created,
            created,
            file.owner,
            file.writer,
            place,
            stored,
            file.age,
        ),
    )
    # What a purge of this directory covers is not found while that is on its way to the log.
    if db.execute(_COVERED, (file.owner, file.writer, file.namespace)).fetchone():
        return
    blocks = zip(file.keys, file.rows, strict=True)
    db.executemany(
        "INSERT OR IGNORE INTO blocks VALUES(?, ?, ?)",
        [(key, file.number, row) for key, row in blocks],
    )


def apply_purges(
    db: sqlite3.Connection, root: Path, purges: Sequence[LogPurge], after: int
) -> None:
    """Apply those purges of a snapshot that this directory has not heard of; everything, where some may be missing."""
    new = [each for each in purges if each.place > after]
    if len(purges) >= MOST_PURGES and len(new) == len(purges):
        new = [LogPurge(place=purges[-1].place)]
    for each in new:
        purge(db, root, each.which(), each.place)


# -- what goes into the log ------------------------------------------------------------------------------------------


def mark_twins(db: sqlite3.Connection, files: Iterable[str]) -> None:
    """Those of some files whose blocks are all in the bucket, in other files, are not put there."""
    db.executemany(_TWIN, [(number_of(file),) for file in files])


def pending(db: sqlite3.Connection, most: int) -> list[str]:
    """Files of this directory that are not in the bucket, oldest first."""
    query = f"SELECT number FROM files WHERE {_PENDING} ORDER BY created LIMIT ?"  # noqa: S608 (our own words)
    return [file_name(number) for (number,) in db.execute(query, (most,))]


def described(
    db: sqlite3.Connection, files: Iterable[str], now: float, most_blocks: int
) -> list[FarFile]:
    """Those of some files that still are to be added, the first ones up to so many blocks. A damaged row never is."""
    query = f"SELECT {_ABOUT}, created FROM files WHERE number=? AND {_PENDING}"  # noqa: S608 (our own words)
    found = []
    count = 0
    for file in files:
        if count >= most_blocks:
            break
        for *about, created in db.execute(query, (number_of(file),)).fetchall():
            try:
                age = int(max(0.0, now - created / 1e6))
                found.append(_far_file(db, about[:7], min(age, _MOST)))
                count += len(found[-1].keys)
            except _DAMAGE:
                db.execute("UPDATE files SET place=-1 WHERE number=?", (about[0],))
    return found


def settled(db: sqlite3.Connection, files: Iterable[str]) -> dict[str, bool]:
    """Those of some files that need no record, each with whether it has one. The others were deleted meanwhile."""
    found = {}
    for file in files:
        row = db.execute("SELECT place FROM files WHERE number=?", (number_of(file),)).fetchone()
        if row is None or row[0] != 0:
            found[file] = row is not None and row[0] > 0
    return found


def _far_file(db: sqlite3.Connection, about: Sequence[Any], age: int) -> FarFile:
    number = about[0]
    blocks = db.execute(
        "SELECT row, key FROM blocks WHERE file=? ORDER BY row", (number,)
    ).fetchall()
    return FarFile(
        number=number,
        namespace=about[1],
        owner=about[2],
        writer=about[3],
        nbytes=about[4],
        rows=[row for row, _ in blocks],
        keys=[key for _, key in blocks],
        age=age,
        place=about[5],
        stored=about[6],
    )


def pending_purges(db: sqlite3.Connection) -> dict[int, LogPurge]:
    """Purges of this directory that are not in the log, by their ids. Where more wait than the index keeps,
    some are lost, and so everything is purged."""
    query = "SELECT id, owner, writer, namespace FROM purges WHERE place IS NULL"
    rows = db.execute(query).fetchall()
    if len(rows) >= MOST_PURGES:
        return dict.fromkeys([row[0] for row in rows], EVERYTHING)
    return {
        number: _log_purge(owner=owner, writer=writer, namespace=namespace)
        for number, owner, writer, namespace in rows
    }


def _log_purge(**words: Any) -> LogPurge:
    """A purge by its row in the index; of a damaged one, of everything."""
    try:
        return LogPurge(**words)
    except _DAMAGE:
        return LogPurge(place=words.get("place", 0))


def victims(db: sqlite3.Connection, max_bytes: int, stored_before: int) -> list[int]:
    """The files that go from the bucket: those added longest ago, until the others fit; and what is too old. A bound of
    0 is none."""
    found = []
    held = db.execute("SELECT total(nbytes) FROM files WHERE place>0").fetchone()[0]
    query = "SELECT number, nbytes, stored FROM files WHERE place>0 ORDER BY place"
    for number, nbytes, stored in db.execute(query):
        over = max_bytes and held > max_bytes
        if not over and stored >= stored_before:
            break
        found.append(number)
        held -= nbytes
    return found


# -- snapshots -------------------------------------------------------------------------------------------------------


def log_purges(db: sqlite3.Connection) -> list[LogPurge]:
    """The purges of the log that are on record, in its order."""
    query = "SELECT owner, writer, namespace, place FROM purges WHERE place>0 ORDER BY place, id"
    return [
        _log_purge(owner=owner, writer=writer, namespace=namespace, place=place)
        for owner, writer, namespace, place in db.execute(query)
    ]


def page(db: sqlite3.Connection, after: int, most_blocks: int) -> Iterator[FarFile]:
    """The next files of the bucket by their numbers, up to so many blocks. What has none is of no use to anybody."""
    query = f"SELECT {_ABOUT} FROM files WHERE place>0 AND number>? AND blocks>0 ORDER BY number"  # noqa: S608
    count = 0
    for about in db.execute(query, (after,)):
        try:
            file = _far_file(db, about[:7], about[7])
        except _DAMAGE:
            continue
        if file.keys:
            yield file
        count += len(file.keys)
        if count >= most_blocks:
            return


def in_bucket(db: sqlite3.Connection) -> set[str]:
    """All files that the bucket holds."""
    return {file_name(number) for (number,) in db.execute("SELECT number FROM files WHERE place>0")}


def count_of(db: sqlite3.Connection, owners: Iterable[str]) -> int:
    """How many files of the bucket belong to some tenants."""
    query = "SELECT count(*) FROM files WHERE place>0 AND owner=?"
    return sum(db.execute(query, (owner.encode(),)).fetchone()[0] for owner in owners)
