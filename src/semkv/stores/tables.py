"""The tables of a cache's database: entries of the catalog, and a gateway's responses."""

from __future__ import annotations

from dataclasses import replace

from semkv_stores.database import Schema

CATALOG = "catalog.sqlite"
"""Name of the database below the cache directory: the catalog's entries, and a gateway's responses."""

FORMAT = 2

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

CREATE TABLE responses (
  key TEXT PRIMARY KEY, head BLOB NOT NULL, payload BLOB NOT NULL, created REAL NOT NULL, stale_until REAL,
  used REAL NOT NULL, nbytes INTEGER NOT NULL);
CREATE INDEX responses_used ON responses (used);
CREATE INDEX responses_stale ON responses (stale_until) WHERE stale_until IS NOT NULL;
CREATE TABLE totals (entries INTEGER NOT NULL, nbytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER responses_in AFTER INSERT ON responses BEGIN
  UPDATE totals SET entries=entries+1, nbytes=nbytes+NEW.nbytes; END;
CREATE TRIGGER responses_out AFTER DELETE ON responses BEGIN
  UPDATE totals SET entries=entries-1, nbytes=nbytes-OLD.nbytes; END;
CREATE TABLE invalidations (number INTEGER PRIMARY KEY AUTOINCREMENT, selector TEXT NOT NULL);
INSERT INTO sqlite_sequence VALUES ('entries', :now), ('vectors', :now);
INSERT INTO invalidations VALUES (:now, '{"key": ""}');
"""


# Files of earlier versions are without these tables, and had two of what contexts said. `shared` has a row where a file
# shares entries with others: how far those are read. `removals` are what they have not heard of. `barred` are the texts
# that an entry does not answer.
_ADDED = (
    "CREATE TABLE IF NOT EXISTS refusals (name TEXT NOT NULL UNIQUE, at REAL NOT NULL)",
    "CREATE TABLE IF NOT EXISTS removals (number INTEGER PRIMARY KEY AUTOINCREMENT, criteria TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS shared (cursor TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS barred (pair TEXT NOT NULL UNIQUE, entry TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS barred_entry ON barred (entry)",
    "DROP TABLE IF EXISTS sentences",
    "DROP TABLE IF EXISTS contexts",
)

_PROBES = tuple(
    f"SELECT created FROM {table} NOT INDEXED LIMIT 1"  # noqa: S608
    for table in ("entries", "responses")
)
CACHE = Schema(tables=_TABLES, version=FORMAT, file=CATALOG, probes=_PROBES, added=_ADDED)
"""Of `CATALOG`."""

_PURGED = "INSERT INTO shared VALUES (''); INSERT INTO removals VALUES (:now, '{}');"  # a number of no earlier file
EMPTIED = replace(CACHE, tables=_TABLES + _PURGED)
"""Of one that takes the place of a file that shared entries: a removal without a criterion is one of everything."""
