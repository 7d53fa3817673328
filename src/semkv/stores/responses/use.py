"""What a file of answers holds, told from outside: it is read as it lies, and never made, mended or moved."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from semkv.errors import StoreError
from semkv.stores.responses.codec import CHECKSUM
from semkv.stores.responses.sqlite import is_new

_WAIT_S = 2.0
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
    # Without a log nobody has the file open, and SQLite would make one to read it.
    how = "mode=ro" if path.with_name(path.name + "-wal").exists() else "mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, timeout=_WAIT_S)) as db:
            rows = [] if is_new(db, path) else db.execute(_BY_TENANT, (CHECKSUM + 1,)).fetchall()
        return [
            AnswersUse(None if tenant is None else str(tenant), int(count), int(nbytes), float(oldest), float(used))
            for tenant, count, nbytes, oldest, used in rows
        ]
    except (sqlite3.Error, OSError, TypeError, ValueError) as error:
        raise StoreError(f"answers {path}: {error}") from error
