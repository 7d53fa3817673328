"""The catalog's tables, and how a file is begun."""

from __future__ import annotations

import sqlite3

from semkv.errors import StoreError

FORMAT = 1
_APPLICATION = 0x73656D6B  # "semk", so that another program's database is never taken for ours

_SCHEMA = """
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
"""


def prepare(db: sqlite3.Connection) -> None:
    """Make the tables of a new file, within the caller's transaction.

    Raises:
        StoreError: the file is another program's, or was written by another format version.
    """
    version, application, tables = (
        db.execute(statement).fetchone()[0]
        for statement in ("PRAGMA user_version", "PRAGMA application_id", "SELECT COUNT(*) FROM sqlite_master")
    )
    if not tables and not version and not application:
        for statement in _SCHEMA.split(";"):
            db.execute(statement)
        db.execute(f"PRAGMA application_id={_APPLICATION}")
        db.execute(f"PRAGMA user_version={FORMAT}")
    elif application != _APPLICATION:
        raise StoreError("not a semkv catalog; choose another cache directory")
    elif version != FORMAT:
        raise StoreError(
            f"written by format version {version}, this semkv reads version {FORMAT}; "
            "start once with --purge to empty the cache, or use another directory"
        )
