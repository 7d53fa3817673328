"""Which block file holds which block: the index of a store directory, shared by all processes that use it.

The index is the only truth. A file that it does not name is deleted; where it is lost or damaged, the store begins
anew. It is also where the processes agree:

- Room: the bytes of a file are reserved, and what must go for them is chosen, in one transaction before the file is
  written. A file is deleted in the transaction that forgets it. So the bounds hold at every moment.
- Purges: each deletion by choice leaves a record. A writer says which record was the last one when its blocks were
  computed; they are not stored where a later record covers them. A process that keeps blocks in memory reads the later
  records and drops what they cover.

- A bucket, where there is one: ``place`` is where its log names a file (`bucket_index`). ``here`` says whether the
  bytes lie in this directory too; only these count towards the bounds. A file that is in the bucket only is found, too.

The functions here are steps of a transaction over the tables. Everything but numbers is stored as bytes, and numbers
are cast, so that a flipped bit makes a row that is not found, and no fault. Moments are microseconds since the epoch in
the tables, and seconds everywhere else.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from semkv_stores.block_file import INDEX, discard_blocks, make_store, unlink
from semkv_stores.database import Schema

SCHEMA = Schema(
    """
CREATE TABLE files(
  number INTEGER PRIMARY KEY, namespace BLOB NOT NULL, blocks INTEGER NOT NULL, nbytes INTEGER NOT NULL,
  created INTEGER NOT NULL, used INTEGER NOT NULL, again INTEGER NOT NULL, committed INTEGER NOT NULL,
  owner BLOB NOT NULL, writer BLOB NOT NULL,
  here INTEGER NOT NULL, place INTEGER NOT NULL, stored INTEGER NOT NULL, age INTEGER NOT NULL);
CREATE INDEX files_by_use ON files(here, again, used);
CREATE INDEX files_by_place ON files(place, created);
CREATE TABLE blocks(key BLOB NOT NULL, file INTEGER NOT NULL, row INTEGER NOT NULL, PRIMARY KEY(key, file))
  WITHOUT ROWID;
CREATE INDEX blocks_by_file ON blocks(file);
CREATE TABLE purges(id INTEGER PRIMARY KEY, owner BLOB, writer BLOB, namespace BLOB, place INTEGER);
CREATE TABLE log(bucket BLOB NOT NULL, place INTEGER NOT NULL);
INSERT INTO purges(id, place) VALUES(:now, 0);
""",  # a process that used the index before this one has missed purges, so the first record is one of everything
    version=8,
    file=INDEX,
    probes=(
        "SELECT number, namespace, blocks, nbytes, created, used, again, committed FROM files LIMIT 1",
        "SELECT owner, writer, here, place, stored, age FROM files LIMIT 1",
        "SELECT key, file, row FROM blocks LIMIT 1",
        "SELECT id, owner, writer, namespace, place FROM purges LIMIT 1",
        "SELECT bucket, place FROM log LIMIT 1",
    ),
    prepare=make_store,
    discard=discard_blocks,
)
EMPTIED = replace(SCHEMA, tables=f"{SCHEMA.tables}INSERT INTO purges(id) VALUES(:now + 1);")
"""The index of a store that was emptied on purpose: a bucket is emptied, too."""
# One statement and one row for all keys, a line for each file: at each step and each new statement the interpreter may
# be handed to another thread. CROSS JOIN keeps the order: keys, their blocks, the files of these.
_FIND = """WITH RECURSIVE asked(at) AS (VALUES (0) UNION ALL SELECT at+1 FROM asked WHERE at+1 < :count)
SELECT group_concat(number || ' ' || CAST(here AS INTEGER) || ' ' || CAST(created AS INTEGER) || ' ' || hex(owner)
  || ' ' || places, ';') FROM (
  SELECT file, group_concat(at || ' ' || CAST(row AS INTEGER), ' ') AS places
  FROM asked CROSS JOIN blocks ON key = substr(:keys, at * :size + 1, :size) GROUP BY file
) CROSS JOIN files ON number=file"""
# total() is exact below 2**53, and no sum of what is stored makes it fail.
_TOTALS = "count(*), CAST(total(blocks) AS INTEGER), CAST(total(nbytes) AS INTEGER)"
_AGES = f"""SELECT namespace, {_TOTALS}, CAST(coalesce(min(created), 0) AS INTEGER),
CAST(coalesce(max(used), 0) AS INTEGER) FROM files
WHERE committed=1 AND here=1 AND (?1 IS NULL OR CAST(owner AS TEXT) IN (SELECT value FROM json_each(?1)))
GROUP BY namespace"""  # noqa: S608
# What another file of this directory has stays there.
_NAME = """INSERT INTO blocks SELECT ?1, ?2, ?3
WHERE NOT EXISTS (SELECT 1 FROM blocks JOIN files ON number=file WHERE key=?1 AND here=1)"""
MOST_PURGES = 1000  # records that are kept

PENDING_S = 600.0
"""A reserved file that is not there after so long is given up: its writer died."""


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Where a block is: id of the block file, row in it, when it was written, `tenant_tag` of its tenant, and whether
    the file lies in this directory. Else it lies in the bucket."""

    file: str
    row: int
    created: float
    owner: str
    here: bool = True


@dataclass(frozen=True, slots=True)
class NewFile:
    """A block file that is about to be written: with the length of the whole file in bytes, and the time."""

    file: str
    nbytes: int
    created: float
    namespace: str
    keys: Sequence[bytes]
    owner: str = ""
    writer: str = ""


class Purge(NamedTuple):
    """The record of a deletion: of the files that meet all that is given. A later one has a higher ``id``, in a new
    index too."""

    id: int = 0
    owner: str | None = None
    writer: str | None = None
    namespace: str | None = None


def new_file_id() -> str:
    """An id that is not in use: 63 random bits, which are the file's number in the index."""
    return file_name(secrets.randbits(63))


def file_name(number: Any) -> str:
    if not isinstance(number, int):  # the text that declares the table may be damaged too
        raise sqlite3.DatabaseError("a file without a number")
    return f"{number:016x}"


def number_of(file: str) -> int:
    return int(file, 16)


def microseconds(seconds: float) -> int:
    return int(min(seconds, 1e12) * 1e6)


def _text(stored: Any) -> str:
    return stored.decode(errors="replace") if isinstance(stored, bytes) else ""


def _space(namespace: str) -> bytes:
    return hashlib.blake2b(namespace.encode(), digest_size=16).digest()


def condition(which: Mapping[str, str]) -> tuple[str, list[bytes]]:
    """A condition over the table ``files``, with its values; ``which`` maps columns to what they must hold."""
    return " AND ".join(["1", *(f"{column}=?" for column in which)]), [
        word.encode() for word in which.values()
    ]


# -- reading ----------------------------------------------------------------------------------------------------------


def find(
    db: sqlite3.Connection,
    namespace: str,
    keys: Sequence[bytes],
) -> list[BlockRef | None]:
    """Where each block is, None for what is not stored. The keys are of one length."""
    found: list[BlockRef | None] = [None] * len(keys)
    if not keys:
        return found
    space = _space(namespace)
    size = len(space) + len(keys[0])
    asked = {
        "keys": b"".join(space + key for key in keys),
        "count": len(keys),
        "size": size,
    }
    (answer,) = db.execute(_FIND, asked).fetchone()
    for line in filter(None, (answer or "").split(";")):
        words = line.split(" ")
        file = file_name(int(words[0]))
        here = words[1] == "1"
        written = int(words[2]) / 1e6
        tag = _text(bytes.fromhex(words[3]))
        for at, row in zip(words[4::2], words[5::2], strict=True):
            if here or found[int(at)] is None:
                found[int(at)] = BlockRef(
                    file,
                    int(row),
                    written,
                    owner=tag,
                    here=here,
                )
    return found


def last_purge(db: sqlite3.Connection) -> int:
    """Id of the last purge."""
    return int(db.execute("SELECT coalesce(max(id), 0) FROM purges").fetchone()[0])


def purges_after(db: sqlite3.Connection, purge_id: int) -> list[Purge]:
    """What was purged after a purge; everything, where that one is not on record."""
    query = "SELECT id, owner, writer, namespace FROM purges WHERE id>=? ORDER BY id"
    rows = db.execute(query, (purge_id,)).fetchall()
    if not rows or rows[0][0] != purge_id:  # of an index before this one, or too long ago
        return [Purge(last_purge(db))]
    return [
        Purge(number, *(None if word is None else _text(word) for word in words))
        for number, *words in rows[1:]
    ]


def file_ids(
    db: sqlite3.Connection, which: Mapping[str, str], *, committed: bool = False
) -> list[str]:
    """Ids of files in this directory; with ``committed`` without those that are being written."""
    where, values = condition(which)
    query = f"SELECT number FROM files WHERE {where} AND here=1 AND (committed=1 OR NOT ?)"  # noqa: S608 (our own words)
    return [file_name(number) for (number,) in db.execute(query, [*values, committed])]


def totals(db: sqlite3.Connection) -> tuple[int, int, int]:
    """Files, blocks and bytes in this directory, with what is being written."""
    counted = db.execute(f"SELECT {_TOTALS} FROM files WHERE here=1").fetchone()  # noqa: S608 (our own words)
    return cast("tuple[int, int, int]", counted)


def ages(
    db: sqlite3.Connection, owners: Sequence[str] | None
) -> dict[str, tuple[int, int, int, float, float]]:
    """By namespace: files, blocks, bytes, when the oldest was written and the latest used; of some tenants, or all."""
    rows = db.execute(_AGES, (None if owners is None else json.dumps(owners),))
    return {_text(row[0]): (*row[1:4], row[4] / 1e6, row[5] / 1e6) for row in rows}


# -- writing ----------------------------------------------------------------------------------------------------------


def touch(file: str, at: float) -> tuple[str, int, int]:
    """For `Database.later`: note when a file was used last."""
    return "UPDATE files SET used=?, again=1 WHERE number=?", microseconds(at), number_of(file)


def reserve(
    db: sqlite3.Connection,
    root: Path,
    new: NewFile,
    *,
    max_bytes: int,
    max_blocks: int,
    tenant_bytes: int = 0,
) -> tuple[int, int] | None:
    """Make room for a file and take it, in one step; `commit` or `delete` must follow.

    A tenant who would hold more than ``tenant_bytes`` gives up his own files first.

    Returns how many files and blocks went for it; None where there is no room. A bound of 0 is none.
    """
    if max(_over(max_bytes, new.nbytes), _over(tenant_bytes, new.nbytes)):
        return None
    if _over(max_blocks, len(new.keys)):
        return None
    pending = microseconds(new.created - PENDING_S)
    own = {"owner": new.owner}
    his_bytes = held(db, own) if tenant_bytes else 0
    his = _victims(db, _over(tenant_bytes, his_bytes + new.nbytes), 0, pending, own)
    if his is None:
        return None
    let_go(db, root, [victim.file for victim in his])
    stored = totals(db)
    over_blocks = _over(max_blocks, stored[1] + len(new.keys))
    over_bytes = _over(max_bytes, stored[2] + new.nbytes)
    rest = _victims(db, over_bytes, over_blocks, pending, {})
    if rest is None:
        return None
    let_go(db, root, [victim.file for victim in rest])
    gone = [*his, *rest]
    at = microseconds(new.created)
    row = (
        number_of(new.file),
        new.namespace.encode(),
        len(new.keys),
        new.nbytes,
        at,
        at,
        new.owner.encode(),
    )
    db.execute("INSERT INTO files VALUES(?,?,?,?,?,?,0,0,?,?,1,0,0,0)", (*row, new.writer.encode()))
    return len(gone), sum(victim.blocks for victim in gone)


def held(db: sqlite3.Connection, which: Mapping[str, str]) -> int:
    """Bytes in this directory of the files that meet ``which``, with what is being written."""
    where, values = condition(which)
    query = f"SELECT total(nbytes) FROM files WHERE here=1 AND {where}"  # noqa: S608 (our own words)
    return int(db.execute(query, values).fetchone()[0])


def _over(bound: int, wanted: int) -> int:
    """By how much what is wanted is beyond a bound, of which 0 is none."""
    return max(0, wanted - bound) if bound else 0


class Victim(NamedTuple):
    """A file that goes."""

    file: str
    nbytes: int
    blocks: int


def _is_purged(db: sqlite3.Connection, new: NewFile, since: int) -> bool:
    """Whether a purge after ``since`` covers a file, as far as is known."""
    words = (new.owner, new.writer, new.namespace)
    return any(
        all(given in (None, word) for given, word in zip(purge[1:], words, strict=True))
        for purge in purges_after(db, since)
    )


def _victims(
    db: sqlite3.Connection,
    over_bytes: float,
    over_blocks: float,
    pending: int,
    which: Mapping[str, str],
) -> list[Victim] | None:
    """The files of those that meet ``which`` that go to free so much; None where all that may go is not enough.

    There are two queues, each with what was used longest ago first: what was not used again since it came, and what
    was. The first one gives while it holds more than half of all bytes. So a walk through a data set, of which each
    block is used once, does not push out what is used every day.
    """
    gone: list[Victim] = []
    if over_bytes <= 0 and over_blocks <= 0:
        return gone
    where, values = condition(which)
    may_go = f"""SELECT number, CAST(nbytes AS INTEGER), CAST(blocks AS INTEGER) FROM files
WHERE {where} AND here=1 AND again=? AND (committed=1 OR created<?) ORDER BY used"""  # noqa: S608
    total = f"SELECT total(nbytes) FROM files WHERE {where} AND here=1 AND again=?"  # noqa: S608
    held_by = [db.execute(total, [*values, again]).fetchone()[0] for again in (0, 1)]
    queues = [db.execute(may_go, [*values, again, pending]) for again in (0, 1)]
    while over_bytes > 0 or over_blocks > 0:
        first = 0 if held_by[0] > held_by[1] else 1
        for queue in (first, 1 - first):
            if (head := queues[queue].fetchone()) is not None:
                break
        else:
            return None
        victim = Victim(file_name(head[0]), *head[1:])
        gone.append(victim)
        held_by[queue] -= victim.nbytes
        over_bytes -= victim.nbytes
        over_blocks -= victim.blocks
    return gone


def commit(db: sqlite3.Connection, root: Path, new: NewFile, since: int) -> bool:
    """Name the blocks of a file that was reserved and is there now. False where none was new, they were purged after
    the purge ``since``, or the reservation is gone: then the file is deleted."""
    number, space = number_of(new.file), _space(new.namespace)
    kept = not _is_purged(db, new, since)
    kept = (
        kept and db.execute("UPDATE files SET committed=1 WHERE number=?", (number,)).rowcount > 0
    )
    rows = [(space + key, number, row) for row, key in enumerate(new.keys)]
    if kept and db.executemany(_NAME, rows).rowcount:
        return True
    delete(db, root, [new.file])
    return False


def delete(db: sqlite3.Connection, root: Path, files: Iterable[str]) -> bool:
    """Delete files, and forget their blocks. Of one that is in the bucket the row stays, by which that is bounded."""
    rows = [(number_of(file),) for file in files]
    db.executemany("DELETE FROM blocks WHERE file=?", rows)
    return let_go(db, root, [file_name(number) for (number,) in rows])


def let_go(db: sqlite3.Connection, root: Path, files: Iterable[str]) -> bool:
    """Delete files of this directory. Blocks are found on in the bucket where they are there, and else forgotten."""
    rows = [(number_of(file),) for file in files]
    db.executemany(
        "DELETE FROM blocks WHERE file=? AND file IN (SELECT number FROM files WHERE place<=0)",
        rows,
    )
    db.executemany("DELETE FROM files WHERE number=? AND place<=0", rows)
    db.executemany("UPDATE files SET here=0 WHERE number=?", rows)
    for (number,) in rows:
        unlink(root, file_name(number))
    return True


def purge(
    db: sqlite3.Connection,
    root: Path,
    which: Mapping[str, str],
    place: int | None = None,
) -> int:
    """Delete the files that meet ``which`` and record that for all who use the index; returns how many.

    A file that is being written keeps its room. Its writer deletes it when it comes to commit it.

    Args:
        place: of the purge in the bucket's log; None where it is not there yet.
    """
    where, values = condition(which)
    query = f"SELECT number, committed OR created<? FROM files WHERE {where}"  # noqa: S608 (our own words)
    rows = db.execute(query, [microseconds(time.time() - PENDING_S), *values]).fetchall()
    delete(db, root, [file_name(number) for number, done in rows if done])
    for number, done in rows:
        if not done:
            unlink(root, file_name(number))
    words = [
        which[name].encode() if name in which else None for name in ("owner", "writer", "namespace")
    ]
    record = "INSERT INTO purges SELECT max(?, coalesce(max(id), 0) + 1), ?, ?, ?, ? FROM purges"
    # From the clock, so that a later index has higher ones.
    db.execute(record, (microseconds(time.time()), *words, place))
    db.execute(
        "DELETE FROM purges WHERE id<=(SELECT id FROM purges ORDER BY id DESC LIMIT 1 OFFSET ?)",
        (MOST_PURGES,),
    )
    return len(rows)


def expire(db: sqlite3.Connection, root: Path, before: float) -> int:
    """Delete what was written before this moment, and what writers reserved that died; how many files."""
    query = "SELECT number FROM files WHERE here=1 AND (created<? OR (committed<>1 AND created<?))"
    rows = db.execute(
        query, (microseconds(before), microseconds(time.time() - PENDING_S))
    ).fetchall()
    let_go(db, root, [file_name(number) for (number,) in rows])
    return len(rows)
