"""The tables of the database of a cache: the catalog's entries, and a gateway's responses."""

from __future__ import annotations

CATALOG = "catalog.sqlite"
"""Name of the database below the cache directory."""

FORMAT = 2
APPLICATION = 0x73656D6B  # "semk", so that another program's database is never taken for ours
RESPONSES_1 = "responses.sqlite", 0x73656D72  # up to format 1 responses had a file of their own

TABLES = """
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
CREATE TABLE contexts (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE);
CREATE TABLE sentences (
  hash INTEGER NOT NULL, context INTEGER NOT NULL REFERENCES contexts ON DELETE CASCADE,
  PRIMARY KEY (hash, context)) WITHOUT ROWID;
CREATE INDEX sentences_context ON sentences (context);
CREATE TABLE purge (mark TEXT NOT NULL);
INSERT INTO purge VALUES (hex(randomblob(16)));

CREATE TABLE responses (
  key TEXT PRIMARY KEY, head BLOB NOT NULL, payload BLOB NOT NULL, created REAL NOT NULL, stale_until REAL,
  used REAL NOT NULL, nbytes INTEGER NOT NULL);
CREATE INDEX responses_used ON responses (used);
CREATE INDEX responses_created ON responses (created);
CREATE INDEX responses_stale ON responses (stale_until) WHERE stale_until IS NOT NULL;
CREATE TABLE totals (entries INTEGER NOT NULL, nbytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER responses_in AFTER INSERT ON responses BEGIN
  UPDATE totals SET entries=entries+1, nbytes=nbytes+NEW.nbytes; END;
CREATE TRIGGER responses_out AFTER DELETE ON responses BEGIN
  UPDATE totals SET entries=entries-1, nbytes=nbytes-OLD.nbytes; END;
CREATE TABLE invalidations (number INTEGER PRIMARY KEY AUTOINCREMENT, selector TEXT NOT NULL);
"""

# Numbers of rows go on from the time (microseconds since the epoch), so that no reader takes a new file's for those of
# an older file that it has read already. `Catalog` counts its writes among them: the page is written anyway.
FIRST_NUMBERS = """
INSERT INTO sqlite_sequence VALUES ('entries', :now), ('vectors', :now), ('writes', 0);
INSERT INTO invalidations VALUES (:now, '{"key": ""}');
"""
