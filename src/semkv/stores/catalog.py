"""The catalog: every recorded prompt with its answer, keys, vectors and tags, in one SQLite file.

The vector indexes are built from it at start and are never the only copy. Several processes may share a file: SQLite's
write-ahead log lets readers go on while one of them writes, and `Catalog.changed` says when another has written.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from semkv.errors import CorruptValue
from semkv.keys import Keyed, entry_of, namespace_key
from semkv.types import Entry, MediaSegment, Namespace, Request, Role, Segment, TextSegment
from semkv_stores.database import Database, Schema
from semkv_stores.digests import digest

if TYPE_CHECKING:
    from semkv.types import Vector

CATALOG = "catalog.sqlite"
"""Name of the database below a cache directory. A gateway keeps its responses in it too."""

FORMAT = 2
"""Version of that file, of all its tables."""

_TABLES = """
CREATE TABLE entries (
  id INTEGER PRIMARY KEY AUTOINCREMENT, entry_id TEXT NOT NULL UNIQUE,
  tenant TEXT NOT NULL, model TEXT NOT NULL, space TEXT NOT NULL,
  segments TEXT NOT NULL, chunk_text TEXT NOT NULL, response TEXT NOT NULL, metadata TEXT NOT NULL,
  frame TEXT NOT NULL, loose_frame TEXT NOT NULL, run TEXT NOT NULL, media TEXT NOT NULL,
  created REAL NOT NULL, last_hit REAL NOT NULL, used REAL NOT NULL, hits INTEGER NOT NULL);
CREATE INDEX entries_used ON entries (used);
CREATE INDEX entries_space ON entries (space);
CREATE TABLE entry_keys (
  key TEXT NOT NULL, entry INTEGER NOT NULL REFERENCES entries ON DELETE CASCADE,
  PRIMARY KEY (key, entry)) WITHOUT ROWID;
CREATE INDEX entry_keys_entry ON entry_keys (entry);
CREATE TABLE vectors (
  id INTEGER PRIMARY KEY AUTOINCREMENT, entry INTEGER NOT NULL REFERENCES entries ON DELETE CASCADE,
  layer TEXT NOT NULL, vector BLOB NOT NULL, UNIQUE (entry, layer));
CREATE TABLE media_vectors (
  space TEXT NOT NULL, layer TEXT NOT NULL, media TEXT NOT NULL, vector BLOB NOT NULL,
  PRIMARY KEY (space, layer, media));
CREATE TABLE entry_media (
  entry INTEGER NOT NULL REFERENCES entries ON DELETE CASCADE, position INTEGER NOT NULL, space TEXT NOT NULL,
  media TEXT NOT NULL, PRIMARY KEY (entry, position)) WITHOUT ROWID;
CREATE INDEX entry_media_media ON entry_media (media, space);
CREATE TABLE tags (
  tag TEXT NOT NULL, entry INTEGER NOT NULL REFERENCES entries ON DELETE CASCADE,
  PRIMARY KEY (tag, entry)) WITHOUT ROWID;
CREATE INDEX tags_entry ON tags (entry);
CREATE TABLE purge (mark TEXT NOT NULL);
INSERT INTO purge VALUES (hex(randomblob(16)));
INSERT INTO sqlite_sequence VALUES ('entries', :now), ('vectors', :now);
"""

# Files of earlier versions are without these tables, and had two that are dropped. `shared` has one row where the file
# shares entries with other files: the place in the log of removals up to which it has read. `removals` are those that
# are not in the log yet. `barred` are the texts that an entry must not answer, and `barred_by` says whose they are.
# `judged` are pairs of texts, and whether a judge said that one answer serves both; `judged_by` says whose they are.
_ADDED = (
    "CREATE TABLE IF NOT EXISTS removals (number INTEGER PRIMARY KEY AUTOINCREMENT, criteria TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS shared (cursor TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS barred (pair TEXT NOT NULL UNIQUE, entry TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS barred_entry ON barred (entry)",
    "CREATE TABLE IF NOT EXISTS barred_by (pair TEXT PRIMARY KEY, tenant TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS judged (pair TEXT NOT NULL UNIQUE, same INTEGER NOT NULL)",
    "CREATE TABLE IF NOT EXISTS judged_by (pair TEXT PRIMARY KEY, tenant TEXT NOT NULL) WITHOUT ROWID",
    "DROP TABLE IF EXISTS sentences",
    "DROP TABLE IF EXISTS contexts",
)
SCHEMA = Schema(
    tables=_TABLES,
    version=FORMAT,
    file=CATALOG,
    probes=("SELECT created FROM entries NOT INDEXED LIMIT 1",),
    added=_ADDED,
    first="entries",
)
"""The catalog's tables in that file."""

# A number that no earlier file has had. A removal without a criterion is one of everything.
_PURGED = "INSERT INTO shared VALUES (''); INSERT INTO removals VALUES (:now, '{}');"
EMPTIED = replace(SCHEMA, tables=_TABLES + _PURGED)
"""The same, for a file that takes the place of one that shared its entries."""

_AT_ONCE = 2000  # entries that make room for others: everybody waits for that, some 50 us an entry
_KEEP_VECTOR = (
    "INSERT OR IGNORE INTO vectors (entry, layer, vector)"
    " SELECT id, ?, ? FROM entries WHERE entry_id=?"
)
_COUNT_HIT = "UPDATE entries SET hits=hits+1, last_hit=MAX(last_hit, ?1), used=MAX(used, ?1) WHERE entry_id=?2"
_ROUNDING = 1e-3  # of a unit vector's squared length, in any precision
_REMOVALS = 1000  # that other processes have not seen yet; beyond it one removal of everything takes their place
_BARRED = 65_536  # pairs found wrong that are kept
_JUDGED = 65_536  # judged pairs that are kept
_PAIRS_SHARE = 100  # all of them to those that make room for others at once
_USE_VERDICT = "UPDATE judged SET rowid=(SELECT MAX(rowid) FROM judged)+1 WHERE pair=?"
_TAGS = "SELECT json_group_array(CAST(tag AS TEXT)) FROM tags WHERE entry=entries.id"
_ENTRIES = f"""SELECT id, entry_id, tenant, model, segments, chunk_text, CAST(response AS BLOB), metadata, ({_TAGS}),
created, last_hit, hits FROM """  # noqa: S608 (our own words)
_TESTS = {
    "tag": "id IN (SELECT entry FROM tags WHERE tag=?)",
    "entry_id": "entry_id=?",
    "space": "space=?",
    "before": "created<?",
    "tenants": "tenant IN (SELECT value FROM json_each(?))",
}

Criteria = dict[str, str | float | list[str]]
"""Which entries to remove: those that meet all of ``tag``, ``entry_id``, ``space``, ``before`` and ``tenants``. With
``wrong`` none is: the entry was wrong for a text, and this names the pair."""


@dataclass(frozen=True, slots=True)
class NamespaceUse:
    """What one tenant and model has in the catalog.

    ``hits`` count how often an entry stood in for a request; an exact repeat that a gateway answers is none. ``oldest``
    (when the first was recorded) and ``used`` (when one was last recorded or hit) are seconds since the epoch. ``name``
    is the model's, where an entry tells it.
    """

    tenant: str
    model: str
    entries: int
    hits: int
    oldest: float
    used: float
    name: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """An entry with everything by which it is found.

    Attributes:
        keys: digests under which `Catalog.find` returns it.
        question_slot: `Keyed.question_slot`, in which L1 and text layers compare; column ``frame``.
        any_media_slot: the same with every media item alike; column ``loose_frame``.
        media_prefix: `Keyed.media_prefix`, in which images are compared; column ``run``.
        vectors: layer key -> vector of this entry.
        media_vectors: (layer key, media id) -> vector of one media item.
        recorded: when another directory's entry came here, in seconds since the epoch; 0 for an entry of one's own.
    """

    entry: Entry
    keys: tuple[str, ...]
    question_slot: str = ""
    any_media_slot: str = ""
    media_prefix: str = ""
    vectors: Mapping[str, Vector] = field(default_factory=dict)
    media_vectors: Mapping[tuple[str, str], Vector] = field(default_factory=dict)
    recorded: float = 0.0


class VectorRow(NamedTuple):
    """One entry's vector as an index wants it; ``number`` grows with every row ever written."""

    number: int
    entry_id: str
    space: str
    question_slot: str
    any_media_slot: str
    layer: str
    data: bytes


class TextRow(NamedTuple):
    """One entry with a question; ``number`` grows with every entry ever written."""

    number: int
    entry_id: str
    question_slot: str
    any_media_slot: str
    encoded: bool  # it has a vector of the layer that was asked for


class MediaRow(NamedTuple):
    """One entry's media items; ``number`` grows with every entry ever written."""

    number: int
    entry_id: str
    space: str
    media_prefix: str
    media: tuple[str, ...]


class Removed(NamedTuple):
    """What a deletion took away: entries, and media items that no entry refers to any more."""

    entry_ids: tuple[str, ...] = ()
    media: tuple[str, ...] = ()


class Catalog:
    """Entries in one SQLite file, bounded in number; the least recently used go first.

    Any thread may call any method. Every method but `close` may raise `sqlite3.Error` (locked, full disk, damaged
    file); callers count it and treat it as a miss.

    Args:
        path: the file; made when missing, as is its folder.
        max_entries: bound on entries; when passed, the least recently used hundredth goes, or 2,000.
        timeout_s: how long a write waits for another process's write.
        replace: as for `Database`.

    Raises:
        StoreError: as `Database`.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_entries: int = 100_000,
        timeout_s: float = 2.0,
        replace: bool = True,
    ) -> None:
        self.path = path
        self.max_entries = max_entries
        self.database = Database(
            path,
            schema=SCHEMA,
            timeout_s=timeout_s,
            replace=replace,
        )
        self._version = self.database.version()

    def __len__(self) -> int:
        return int(self.database.rows("SELECT COUNT(*) FROM entries")[0][0])

    def is_full(self) -> bool:
        """Whether entries may have gone to keep the bound."""
        return len(self) >= self.max_entries - self._at_once()

    def close(self) -> None:
        """Close the file; later calls raise `sqlite3.ProgrammingError`."""
        self.database.close()

    # -- writing ------------------------------------------------------------------------------------------------

    def add(self, record: Record) -> tuple[bool, Removed]:
        """Record an entry; one that is there already (by ``entry_id``) gets new tags and missing vectors.

        Returns:
            Whether it is new, and what went to keep the bound.
        """
        with self.database.write() as db:
            row = self._put(db, record)
            return (True, self._trim(db, keep=row)) if row else (False, Removed())

    def add_all(self, records: Iterable[Record]) -> Removed:
        """The same of several in one write. Returns what went to keep the bound."""
        with self.database.write() as db:
            rows = [self._put(db, record) for record in records]
            return self._trim(db, keep=max(rows)) if any(rows) else Removed()

    def _put(self, db: sqlite3.Connection, record: Record) -> int:
        """The number of a new entry's row; 0 where the entry is there already."""
        entry = record.entry
        space = namespace_key(entry.namespace)
        found = db.execute("SELECT id FROM entries WHERE entry_id=?", (entry.entry_id,)).fetchone()
        if found:
            db.execute(
                "UPDATE entries SET used=MAX(used, ?) WHERE id=?",
                (entry.created, int(found[0])),
            )
            self._add_vectors(db, int(found[0]), space, record)
            return 0
        row = self._insert(db, record, space)
        self._add_vectors(db, row, space, record)
        return row

    def _insert(self, db: sqlite3.Connection, record: Record, space: str) -> int:
        entry = record.entry
        media = [s.media_id for s in entry.segments if isinstance(s, MediaSegment)]
        columns = {
            "entry_id": entry.entry_id,
            "tenant": entry.namespace.tenant,
            "model": entry.namespace.model,
            "space": space,
            "segments": dump_segments(entry.segments),
            "chunk_text": entry.chunk_text,
            "response": entry.response,
            "metadata": json.dumps(dict(entry.metadata), default=str),
            "frame": record.question_slot,
            "loose_frame": record.any_media_slot,
            "run": record.media_prefix,
            "media": " ".join(media),
            "created": entry.created,
            "last_hit": entry.last_hit,
            "used": max(entry.created, entry.last_hit, record.recorded),
            "hits": entry.hits,
        }
        names = ", ".join(columns)
        values = ", ".join(f":{name}" for name in columns)
        cursor = db.execute(f"INSERT INTO entries ({names}) VALUES ({values})", columns)  # noqa: S608 (our own words)
        row = int(cursor.lastrowid or 0)
        db.executemany(
            "INSERT OR IGNORE INTO entry_keys VALUES (?, ?)", [(k, row) for k in record.keys]
        )
        db.executemany(
            "INSERT INTO entry_media VALUES (?, ?, ?, ?)",
            [(row, i, space, m) for i, m in enumerate(media)],
        )
        return row

    def _add_vectors(
        self,
        db: sqlite3.Connection,
        row: int,
        space: str,
        record: Record,
    ) -> None:
        db.executemany(
            "INSERT OR IGNORE INTO tags VALUES (?, ?)", [(t, row) for t in record.entry.tags]
        )
        db.executemany(
            "INSERT OR IGNORE INTO vectors (entry, layer, vector) VALUES (?, ?, ?)",
            [(row, layer, pack(vector)) for layer, vector in record.vectors.items()],
        )
        db.executemany(
            "INSERT OR IGNORE INTO media_vectors VALUES (?, ?, ?, ?)",
            [
                (space, layer, media, pack(vector))
                for (layer, media), vector in record.media_vectors.items()
            ],
        )

    def tag(self, entry_id: str, tags: Sequence[str]) -> bool:
        """Add tags to an entry; False where it is no longer there. Without tags it is only looked for."""
        with self.database.write() if tags else self.database as db:
            db.executemany(
                "INSERT OR IGNORE INTO tags SELECT ?, id FROM entries WHERE entry_id=?",
                [(tag, entry_id) for tag in tags],
            )
            (found,) = db.execute(
                "SELECT COUNT(*) FROM entries WHERE entry_id=?", (entry_id,)
            ).fetchone()
        return bool(found)

    def hit(self, entry_id: str, now: float) -> None:
        """Count a hit on an entry at time ``now``, with the next write."""
        self.database.later(_COUNT_HIT, now, entry_id)

    def keep_vector(self, entry_id: str, layer: str, vector: Vector) -> None:
        """Add a vector that an entry lacks, with the next write."""
        self.database.later(_KEEP_VECTOR, layer, pack(vector), entry_id)

    def bar(self, pair: str, entry_id: str, tenant: str | None = None) -> int:
        """Note that an entry was wrong for a text, which ``pair`` names together with it. Returns for how many texts it
        was. Where there are too many pairs, the oldest of the tenant that has the most go. ``tenant`` is that of an
        entry which is not here."""
        with self.database.write() as db:
            own = db.execute("SELECT tenant FROM entries WHERE entry_id=?", (entry_id,)).fetchone()
            whose = tenant if own is None else str(own[0])
            db.execute("INSERT OR IGNORE INTO barred VALUES (?, ?)", (pair, entry_id))
            if whose is not None:
                name = digest("barred by", whose)[:16]
                db.execute("INSERT OR IGNORE INTO barred_by VALUES (?, ?)", (pair, name))
            _trim_pairs(db, "barred", _BARRED)
            count = db.execute("SELECT COUNT(*) FROM barred WHERE entry=?", (entry_id,))
            return int(count.fetchone()[0])

    def is_barred(self, pair: str) -> bool:
        """Whether an entry was wrong for a text."""
        return bool(self.database.rows("SELECT 1 FROM barred WHERE pair=?", pair))

    def judge(self, pair: str, tenant: str, *, same: bool) -> None:
        """Note whether one answer serves a tenant's pair of texts. Where there are too many pairs, those go that the
        tenant with the most has not used for the longest time."""
        with self.database.write() as db:
            name = digest("judged by", tenant)[:16]
            db.execute("INSERT OR REPLACE INTO judged VALUES (?, ?)", (pair, same))
            db.execute("INSERT OR IGNORE INTO judged_by VALUES (?, ?)", (pair, name))
            _trim_pairs(db, "judged", _JUDGED)

    def verdict(self, pair: str) -> bool | None:
        """Whether one answer serves a pair of texts; None where that is not known. A pair that is asked for stays."""
        found = self.database.rows("SELECT same FROM judged WHERE pair=?", pair)
        if not found:
            return None
        self.database.later(_USE_VERDICT, pair)
        return bool(found[0][0])

    def _trim(self, db: sqlite3.Connection, keep: int) -> Removed:
        excess = len(self) - self.max_entries
        if excess <= 0:
            return Removed()
        most = max(excess, self._at_once())
        rows = db.execute(
            "SELECT id FROM entries WHERE id<>? ORDER BY used, id LIMIT ?", (keep, most)
        )
        return delete(db, [int(r[0]) for r in rows.fetchall()])

    def _at_once(self) -> int:
        return min(self.max_entries // 100, _AT_ONCE)

    def invalidate(
        self,
        *,
        tag: str | None = None,
        entry_id: str | None = None,
        namespace: Namespace | None = None,
        tenants: Sequence[str] | None = None,
        before: float | None = None,
        dry_run: bool = False,
    ) -> Removed:
        """Delete the entries that meet every criterion given, or with ``dry_run`` only name what would go.

        Processes that share the file notice it by `purge`, and caches that share entries with it by `removals`.
        ``before`` is a time in seconds since the epoch: entries that were recorded before it meet the criterion.

        Raises:
            ValueError: no criterion was given.
        """
        space = None if namespace is None else namespace_key(namespace)
        given = {
            "tag": tag,
            "entry_id": entry_id,
            "space": space,
            "before": before,
        }
        criteria: Criteria = {name: value for name, value in given.items() if value is not None}
        if tenants is not None:
            criteria["tenants"] = list(tenants)
        if not criteria:
            raise ValueError("invalidate needs a tag, an entry_id, a namespace, tenants or a time")
        if dry_run:
            with self.database as db:
                return removal(db, self._meeting(db, criteria))
        with self.database.write() as db:
            if db.execute("SELECT COUNT(*) FROM shared").fetchone()[0]:
                _tell(db, criteria)
            return self._remove(db, criteria)

    def tell_wrong(self, pair: str, entry_id: str) -> None:
        """Let caches that share entries know, with the removals, that an entry was wrong for a text."""
        with self.database.write() as db:
            _tell(db, {"wrong": pair, "entry_id": entry_id})

    def asking(self, tenant: str, text: str) -> list[str]:
        """Ids of a tenant's entries with this chunk text."""
        statement = "SELECT entry_id FROM entries WHERE tenant=? AND chunk_text=?"
        return [str(found) for (found,) in self.database.rows(statement, tenant, text)]

    def _meeting(self, db: sqlite3.Connection, criteria: Criteria) -> list[int]:
        tests = " AND ".join(_TESTS[name] for name in criteria) or "1"
        values = [
            json.dumps(value) if isinstance(value, list) else value for value in criteria.values()
        ]
        return [int(r[0]) for r in db.execute(f"SELECT id FROM entries WHERE {tests}", values)]  # noqa: S608 (our own words)

    def _remove(self, db: sqlite3.Connection, criteria: Criteria) -> Removed:
        rows = self._meeting(db, criteria)
        if rows:
            db.execute("UPDATE purge SET mark=hex(randomblob(16))")
        return delete(db, rows)

    # -- what is shared with other files ------------------------------------------------------------------------

    def removals(self) -> list[tuple[int, str]]:
        """What was removed since the first `read_from` and not `sent` yet, in order: numbers and criteria (JSON)."""
        return self.database.rows("SELECT number, criteria FROM removals ORDER BY number")

    def sent(self, number: int) -> None:
        """The removals up to this one have reached the other files, and are dropped."""
        with self.database.write() as db:
            db.execute("DELETE FROM removals WHERE number<=?", (number,))

    def read_from(self) -> str:
        """How far this file has what others share; empty at first."""
        if not self.database.rows("SELECT 1 FROM shared"):
            with self.database.write() as db:
                db.execute("INSERT INTO shared SELECT '' WHERE NOT EXISTS (SELECT 1 FROM shared)")
        return str(self.database.rows("SELECT cursor FROM shared")[0][0])

    def read_to(self, cursor: str) -> None:
        """Note it. `read_from` comes before."""
        with self.database.write() as db:
            db.execute("UPDATE shared SET cursor=?", (cursor,))

    def apply_removal(self, criteria: Criteria) -> Removed:
        """Delete what another file's `invalidate` deleted there; without a criterion everything."""
        with self.database.write() as db:
            return self._remove(db, criteria)

    def by_namespace(self, tenant: str | None = None) -> list[NamespaceUse]:
        """What each tenant, or one, has of each model here, most entries first."""
        statement = (
            "SELECT CAST(tenant AS TEXT), CAST(model AS TEXT), COUNT(*), "  # a damaged row may have anything in a place
            "CAST(TOTAL(hits) AS INTEGER), CAST(MIN(created) AS REAL), CAST(MAX(used) AS REAL), "
            "COALESCE(CAST(MAX(CASE WHEN json_valid(metadata) THEN metadata ->> '$.model' END) AS TEXT), '') "
            "FROM entries WHERE ?1 IS NULL OR tenant=?1 GROUP BY tenant, model ORDER BY COUNT(*) DESC, tenant, model"
        )
        return [NamespaceUse(*row) for row in self.database.rows(statement, tenant)]

    def media(self, tenant: str | None = None) -> set[str]:
        """The media items that entries have, of all tenants or one."""
        statement = "SELECT entry_media.media FROM entry_media JOIN entries ON id=entry WHERE ?1 IS NULL OR tenant=?1"
        return {str(media) for (media,) in self.database.rows(statement, tenant)}

    # -- reading ------------------------------------------------------------------------------------------------

    def get(self, entry_id: str) -> Entry | None:
        """One entry, without its embeddings, or None."""
        return next(iter(self._entries("entries WHERE entry_id=?", entry_id)), None)

    def find(self, key: str, limit: int = 4) -> list[Entry]:
        """The entries registered under a key, oldest first, so that every request settles on the same donor."""
        return self._entries(
            "entry_keys JOIN entries ON id=entry WHERE key=? ORDER BY entry LIMIT ?", key, limit
        )

    def has(self, *keys: str) -> bool:
        """Whether any entry is registered under one of some keys."""
        marks = ",".join("?" * len(keys))
        statement = f"SELECT 1 FROM entry_keys WHERE key IN ({marks}) LIMIT 1"  # noqa: S608
        return bool(self.database.rows(statement, *keys))

    def _entries(self, where: str, *values: object) -> list[Entry]:
        found = []
        for row, *columns in self.database.rows(_ENTRIES + where, *values):
            try:
                found.append(_entry(*columns))
            except CorruptValue:
                with self.database.write() as db:
                    delete(db, [row])
                raise
        return found

    def verify(self, *, repair: bool = False) -> Iterator[str]:
        """Read every entry: for each what is wrong with it, or an empty string. ``repair`` deletes those."""
        statement = f"{_ENTRIES}entries WHERE id>? ORDER BY id LIMIT 1"
        return self.database.faults(statement, _entry, delete if repair else None)

    # -- for the indexes ----------------------------------------------------------------------------------------

    def changed(self) -> bool:
        """Whether another connection has written to this file since the last call, or the file was replaced."""
        with self.database.lock:
            before = self._version
            self._version = self.database.version()
            return before != self._version

    def purge(self) -> str:
        """The mark of the last `invalidate` that deleted anything, by this process or another."""
        return str(self.database.rows("SELECT mark FROM purge")[0][0])

    def missing(self, entry_ids: Sequence[str]) -> list[str]:
        """Which of some entries are not here."""
        statement = (
            "SELECT value FROM json_each(?)"
            " WHERE NOT EXISTS (SELECT 1 FROM entries WHERE entry_id=json_each.value)"
        )
        return [
            str(entry_id)
            for (entry_id,) in self.database.rows(statement, json.dumps(list(entry_ids)))
        ]

    def vectors(
        self,
        layers: Sequence[str],
        after: int,
        limit: int,
    ) -> list[VectorRow]:
        """The next vectors of entries under the given layer keys, in order of writing, numbered above ``after``."""
        statement = (
            "SELECT vectors.id, entry_id, space, frame, loose_frame, layer, vector FROM vectors JOIN entries"  # noqa: S608
            f" ON entries.id=entry WHERE vectors.id>? AND layer IN ({','.join('?' * len(layers))})"
            " ORDER BY vectors.id LIMIT ?"
        )
        rows = self.database.rows(statement, after, *layers, limit)
        return [VectorRow(*row) for row in rows if row[0] > after]  # a damaged tree may lead back

    def text_rows(self, layer: str, after: int, limit: int) -> list[TextRow]:
        """The next entries with a question, in order of writing, numbered above ``after``."""
        statement = (
            "SELECT id, entry_id, frame, loose_frame,"
            " EXISTS (SELECT 1 FROM vectors WHERE entry=entries.id AND layer=?)"
            " FROM entries WHERE id>? AND frame<>'' ORDER BY id LIMIT ?"
        )
        rows = self.database.rows(statement, layer, after, limit)
        return [TextRow(*row) for row in rows if row[0] > after]  # a damaged tree may lead back

    def media_rows(self, after: int, limit: int) -> list[MediaRow]:
        """The next entries with media items, in order of writing, numbered above ``after``."""
        statement = "SELECT id, entry_id, space, run, media FROM entries WHERE id>? AND media<>'' ORDER BY id LIMIT ?"
        rows = self.database.rows(statement, after, limit)
        return [MediaRow(*row, tuple(str(media).split())) for *row, media in rows if row[0] > after]  # type: ignore[call-arg]

    def media_vector(self, space: str, layer: str, media: str) -> bytes | None:
        """The packed vector of one media item, or None."""
        statement = "SELECT vector FROM media_vectors WHERE space=? AND layer=? AND media=?"
        return next(
            (bytes(vector) for (vector,) in self.database.rows(statement, space, layer, media)),
            None,
        )


def _entry(
    name: str,
    tenant: str,
    model: str,
    segments: str,
    chunk: str,
    response: bytes,
    metadata: str,
    tags: str,
    created: Any,
    last_hit: Any,
    hits: Any,
) -> Entry:
    """An entry of the columns of `_ENTRIES`. Its id is a digest of all that it is found by.

    Raises:
        CorruptValue: that is another's, or something cannot be read.
    """
    try:
        entry = Entry(
            name,
            Namespace(tenant, model),
            load_segments(segments),
            chunk_text=chunk,
            response=response.decode(),
            tags=tuple(sorted(json.loads(tags))),
            created=float(created),
            last_hit=float(last_hit),
            hits=int(hits),
            metadata=dict(json.loads(metadata)),
        )
        keyed = Keyed(entry.namespace, entry.segments)
        if entry_of(Request("", entry.namespace, entry.segments, chunk), keyed).entry_id != name:
            raise ValueError("its text is not what its id says")
        return entry
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptValue(f"entry {name}: {error}") from error


def removal(db: sqlite3.Connection, rows: Sequence[int]) -> Removed:
    """What `delete` would take away."""
    ids = (json.dumps(rows),)
    gone = db.execute(
        "SELECT entry_id FROM entries WHERE id IN (SELECT value FROM json_each(?))", ids
    ).fetchall()
    media = db.execute(
        "WITH gone AS (SELECT value FROM json_each(?)),"
        " shown AS (SELECT DISTINCT media FROM entry_media WHERE entry IN gone)"
        " SELECT media FROM shown WHERE NOT EXISTS"
        " (SELECT 1 FROM entry_media WHERE entry_media.media=shown.media AND entry NOT IN gone) ORDER BY media",
        ids,
    ).fetchall()
    return Removed(tuple(e for (e,) in gone), tuple(m for (m,) in media))


def delete(db: sqlite3.Connection, rows: Sequence[int]) -> Removed:
    """Delete entries by the numbers of their rows, with the vectors of media that only they had.

    What refers to an entry goes by itself (``ON DELETE CASCADE``).
    """
    removed, ids = removal(db, rows), (json.dumps(rows),)
    of_them = "entry IN (SELECT value FROM json_each(?))"
    media = db.execute(
        f"SELECT DISTINCT media, space FROM entry_media WHERE {of_them}",  # noqa: S608
        ids,
    ).fetchall()
    db.execute("DELETE FROM entries WHERE id IN (SELECT value FROM json_each(?))", ids)
    db.executemany(
        "DELETE FROM media_vectors WHERE media=?1 AND space=?2"
        " AND NOT EXISTS (SELECT 1 FROM entry_media WHERE media=?1 AND space=?2)",
        media,
    )
    return removed


def pack(vector: Vector) -> bytes:
    """Little-endian float32, the form of every vector in the catalog."""
    return vector.astype("<f4", copy=False).tobytes()


def unpack(data: bytes, dim: int) -> Vector:
    """The vector behind `pack`, read-only.

    Raises:
        CorruptValue: it has not ``dim`` numbers, or not the length 1.
    """
    if len(data) != 4 * dim:
        raise CorruptValue(f"a vector of {len(data)} bytes where {dim} numbers belong")
    vector = np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)
    # One pass; a catalog is opened by reading all of them.
    if not abs(np.dot(vector, vector) - 1.0) < _ROUNDING:
        raise CorruptValue("a vector that is not of length 1")
    return vector


def dump_segments(segments: Iterable[Segment]) -> str:
    """Segments as JSON; a media item keeps its id and name, never a path."""
    rows = [
        {"media": s.media_id, "name": s.name}
        if isinstance(s, MediaSegment)
        else {"role": s.role, "text": s.text}
        for s in segments
    ]
    return json.dumps(rows, ensure_ascii=False)


def load_segments(text: str) -> tuple[Segment, ...]:
    """The segments behind `dump_segments`; raises what JSON and a missing field raise."""
    return tuple(
        MediaSegment(row["media"], None, row["name"])
        if "media" in row
        else TextSegment(row["text"], Role(row["role"]))
        for row in json.loads(text)
    )


def _tell(db: sqlite3.Connection, criteria: Criteria) -> None:
    """Let caches that share entries know of a removal."""
    waiting = db.execute("SELECT COUNT(*) FROM removals").fetchone()[0]
    if waiting >= _REMOVALS:  # others were away for long
        db.execute("DELETE FROM removals")
        db.execute("INSERT INTO removals (criteria) VALUES ('{}')")
    db.execute("INSERT INTO removals (criteria) VALUES (?)", (json.dumps(criteria),))


def _trim_pairs(db: sqlite3.Connection, table: str, bound: int) -> None:
    """Where a table has more pairs than its bound, drop the first ones of the tenant that has the most."""
    if db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] <= bound:  # noqa: S608 (our own words)
        return
    whose = f"{table}_by"
    owned = (
        f"SELECT {table}.rowid, COALESCE(tenant, '') AS tenant "  # noqa: S608 (our own words)
        f"FROM {table} LEFT JOIN {whose} USING (pair)"
    )
    most = f"SELECT tenant FROM ({owned}) GROUP BY tenant ORDER BY COUNT(*) DESC LIMIT 1"  # noqa: S608 (our own words)
    (tenant,) = db.execute(most).fetchone()
    oldest = f"SELECT rowid FROM ({owned}) WHERE tenant=? ORDER BY rowid LIMIT ?"  # noqa: S608 (our own words)
    share = max(1, bound // _PAIRS_SHARE)
    db.execute(f"DELETE FROM {table} WHERE rowid IN ({oldest})", (tenant, share))  # noqa: S608 (our own words)
    db.execute(f"DELETE FROM {whose} WHERE pair NOT IN (SELECT pair FROM {table})")  # noqa: S608 (our own words)
