"""The ghosts of evicted extents, as the index keeps them: see `eviction`. Each function is part of a transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from semkv.stores.bounds import Bounds
from semkv.stores.eviction import ExtentUse, Ghosts, adapt


def target(db: sqlite3.Connection, namespace: str, first: bytes, bounds: Bounds) -> tuple[float, bool]:
    """What recent extents may keep now, and whether the one that is about to come is an old acquaintance."""
    found = float(db.execute("SELECT target FROM arc").fetchone()[0])
    key = (namespace, first)
    ghost = db.execute("SELECT nbytes, frequent FROM ghosts WHERE namespace=? AND first=?", key).fetchone()
    if ghost is None:
        return found, False
    db.execute("DELETE FROM ghosts WHERE namespace=? AND first=?", key)
    return adapt(found, bounds.max_bytes, ghost[0], _bytes(db), frequent=bool(ghost[1])), True


def _bytes(db: sqlite3.Connection) -> Ghosts:
    found = dict(db.execute("SELECT frequent, sum(nbytes) FROM ghosts GROUP BY frequent").fetchall())
    return Ghosts(int(found.get(0, 0)), int(found.get(1, 0)))


def leave(db: sqlite3.Connection, gone: Sequence[ExtentUse], bounds: Bounds, now: float) -> None:
    """Remember what was evicted; each list's ghosts stand for as many bytes as the store may hold."""
    for use in gone:
        db.execute(
            "INSERT OR REPLACE INTO ghosts SELECT namespace, first, nbytes, frequent, ? FROM extents "
            "WHERE extent=? AND blocks",
            (now, use.extent),
        )
    for frequent, nbytes in enumerate((lambda g: (g.recent, g.frequent))(_bytes(db)) if gone else ()):
        over = nbytes - bounds.max_bytes
        query = "SELECT namespace, first, nbytes FROM ghosts WHERE frequent=? ORDER BY gone"
        for namespace, first, size in db.execute(query, (frequent,)).fetchall() if over > 0 else ():
            if over <= 0:
                break
            db.execute("DELETE FROM ghosts WHERE namespace=? AND first=?", (namespace, first))
            over -= size
