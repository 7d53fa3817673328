"""Looking after a file of answers from outside. It is read as it lies, and never made or moved."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from semkv.errors import CorruptValue, StoreError
from semkv.stores.responses.base import Selector
from semkv.stores.responses.codec import CHECKSUM, decode, decode_head
from semkv.stores.responses.sqlite import SqliteStore, is_new

_WAIT_S = 2.0
_BATCH = 256  # answers of one look: while it lasts, a gateway's log of writes cannot begin anew
_BY_TENANT = """
WITH heads AS (SELECT CAST(substr(head, ?) AS TEXT) AS head, nbytes, created, used FROM answers)
SELECT CASE WHEN json_valid(head) THEN json_extract(head, '$.partition') END AS tenant,
  COUNT(*), SUM(nbytes), MIN(created), MAX(used)
FROM heads GROUP BY tenant ORDER BY COUNT(*) DESC, tenant
"""


@dataclass(frozen=True, slots=True)
class AnswersUse:
    """What one tenant has in a store of answers; times are seconds since the epoch.

    Attributes:
        tenant: `StoredResponse.partition`; None for answers whose head cannot be read.
        answers: how many, those that have run out and are not deleted yet included.
        nbytes: of their heads and payloads.
        oldest: when the first was kept.
        used: when one was last kept or read; a gateway writes the latter when it next keeps an answer.
    """

    tenant: str | None
    answers: int
    nbytes: int
    oldest: float
    used: float


def by_tenant(path: Path) -> list[AnswersUse]:
    """What each tenant has in a file that `SqliteStore` wrote, most answers first. A gateway may be running on it.

    Raises:
        StoreError: the file cannot be read, is damaged, another program's, or of another format version.
    """
    with _reading(path) as db:
        rows = [] if is_new(db, path) else db.execute(_BY_TENANT, (CHECKSUM + 1,)).fetchall()
        return [
            AnswersUse(None if tenant is None else str(tenant), int(count), int(nbytes), float(oldest), float(used))
            for tenant, count, nbytes, oldest, used in rows
        ]


def count(path: Path) -> int:
    """How many answers there are. Raises as `by_tenant`."""
    with _reading(path) as db:
        return 0 if is_new(db, path) else int(db.execute("SELECT COUNT(*) FROM answers").fetchone()[0])


def examine(path: Path, *, repair: bool = False) -> Iterator[str]:
    """Read every answer as a gateway would: for each why it would not be served, or an empty string.

    Args:
        path: as for `by_tenant`, which says what is raised.
        repair: delete those.
    """
    after = 0
    while True:
        with _reading(path) as db:
            if is_new(db, path):
                return
            found = [
                (int(row), _fault(*answer))
                for row, *answer in db.execute(
                    "SELECT rowid, key, head, payload FROM answers WHERE rowid>? ORDER BY rowid LIMIT ?",
                    (after, _BATCH),
                )
            ]
        if not found:
            return
        if repair and (bad := [row for row, fault in found if fault]):
            _delete(path, bad)
        yield from (fault for _, fault in found)
        after = found[-1][0]


def _fault(key: str, head: bytes, payload: bytes) -> str:
    try:
        decode(key, bytes(head), bytes(payload))
    except (CorruptValue, LookupError, TypeError, ValueError) as error:
        return str(error) if isinstance(error, CorruptValue) else f"answer {key}: {error}"
    return ""


def _delete(path: Path, rows: Sequence[int]) -> None:
    """Delete those that fail their test still: a gateway may have written others in their place."""
    with _opened(path, "mode=rw") as db:
        db.execute("BEGIN IMMEDIATE")
        for row in rows:
            answer = db.execute("SELECT key, head, payload FROM answers WHERE rowid=?", (row,)).fetchone()
            if answer is not None and _fault(*answer):
                db.execute("DELETE FROM answers WHERE rowid=?", (row,))
        db.execute("COMMIT")


def remove(path: Path, selectors: Sequence[Selector], *, dry_run: bool) -> int:
    """Delete the answers that any of the selectors names, or only count them.

    It is logged in the file: running gateways heed it at their next look at the log, and what they compute meanwhile is
    not kept. Nothing is written where the file is damaged.

    Returns:
        How many lay there, those that had run out included. Raises as `by_tenant`.
    """
    with _reading(path) as db:
        if is_new(db, path):
            return 0
        found = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
        if found != "ok":
            raise sqlite3.DatabaseError(f"damaged: {found.splitlines()[-1]}")
        named = sum(_named(key, head, selectors) for key, head in db.execute("SELECT key, head FROM answers"))
    if not dry_run:
        with closing(SqliteStore(path)) as store:
            for selector in selectors:
                store.invalidate(selector)
    return named


def _named(key: str, head: bytes, selectors: Sequence[Selector]) -> bool:
    """Whether one of them names an answer; `SqliteStore.invalidate` takes those that cannot be read for named."""
    try:
        answer = decode_head(key, bytes(head))
    except (CorruptValue, TypeError):
        return True
    return any(selector.matches(answer) for selector in selectors)


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    # Without a log nobody has the file open, and SQLite would make one to read it.
    logged = path.with_name(path.name + "-wal").exists()
    with _opened(path, "mode=ro" if logged else "mode=ro&immutable=1") as db:
        yield db


@contextmanager
def _opened(path: Path, how: str) -> Iterator[sqlite3.Connection]:
    try:
        uri = f"{path.absolute().as_uri()}?{how}"
        with closing(sqlite3.connect(uri, uri=True, timeout=_WAIT_S, isolation_level=None)) as db:
            db.text_factory = lambda text: text.decode(errors="replace")  # a damaged key is one answer's fault
            yield db
    except (sqlite3.Error, OSError, TypeError, ValueError) as error:
        broken = type(error) is sqlite3.DatabaseError  # its subclasses mean locked, full and the like
        step = "; a gateway that is started on it puts it aside, or delete it" if broken else ""
        raise StoreError(f"answers {path}: {error}{step}") from error
