"""What was saved, by day: kept for the pages and for ``semkv stats``, for so many days.

Figures only: names of tiers and models, digests of tenants, counts and seconds. Several processes may write at once.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Self

from semkv_stores.database import Database, Schema

FILE = "worth.sqlite"
"""Name of the database below the cache directory."""

OTHERS = "others"
"""Stands for the models and tenants of a day for which there was no room."""

_MOST = 1000  # pairs of a model and a tenant, and as many tiers, of one day
_DAY_S = 86_400
_WAIT_S = 2.0  # for other processes that write


@dataclass(slots=True)
class Sums:
    """Figures that are added up."""

    def add(self, other: Self) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    def less(self, other: Self) -> Self:
        """What is new since those others."""
        changed = {
            item.name: getattr(self, item.name) - getattr(other, item.name) for item in fields(self)
        }
        return replace(self, **changed)


@dataclass(slots=True)
class TierFigures(Sums):
    """The account of one tier.

    Attributes:
        asked: lookups.
        hits: requests that it served.
        spent_s: seconds that its lookups took.
        saved_s: seconds that its hits saved.
        left_out: requests for which ``auto`` did not ask it, or would not have.
        lost_hits: hits among those that ``auto`` would not have asked for.
    """

    asked: int = 0
    hits: int = 0
    spent_s: float = 0.0
    saved_s: float = 0.0
    left_out: int = 0
    lost_hits: int = 0


@dataclass(slots=True)
class Saved(Sums):
    """What was saved for a model and a tenant, and what was spent.

    Attributes:
        requests: that reached no upstream.
        input_tokens, output_tokens: of their answers.
        upstream_s: seconds of the upstream's answers.
        gpu_s: seconds of the upstream's machine that went to nobody.
        money: what these tokens cost, by the prices of that day.
        sent_requests: that the upstream answered.
        sent_money: what the tokens of those cost.
    """

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    upstream_s: float = 0.0
    gpu_s: float = 0.0
    money: float = 0.0
    sent_requests: int = 0
    sent_money: float = 0.0


class _Table:
    """A table of sums by day and by some texts, with its statements."""

    def __init__(
        self,
        name: str,
        keys: Sequence[str],
        kind: type[Sums],
    ) -> None:
        columns = [item.name for item in fields(kind)]
        types = {
            "int": "INTEGER",
            "float": "REAL",
        }
        texts = [f"{key} TEXT NOT NULL" for key in keys]
        sums = [f"{item.name} {types[str(item.type)]} NOT NULL" for item in fields(kind)]
        made = ", ".join(("day INTEGER NOT NULL", *texts, *sums))
        names = ", ".join(("day", *keys))
        here = " AND ".join(f"{key}=?" for key in ("day", *keys))
        marks = ", ".join("?" * (1 + len(keys) + len(columns)))
        more = ", ".join(f"{column}={column}+excluded.{column}" for column in columns)
        self.name = name
        self.create = f"CREATE TABLE {name} ({made}, PRIMARY KEY ({names})) WITHOUT ROWID;"
        self.find = f"SELECT 1 FROM {name} WHERE {here}"  # noqa: S608 (our own words)
        self.count = f"SELECT COUNT(*) FROM {name} WHERE day=?"  # noqa: S608
        self.add = f"INSERT INTO {name} VALUES ({marks}) ON CONFLICT DO UPDATE SET {more}"  # noqa: S608
        self.forget = f"DELETE FROM {name} WHERE day<=?"  # noqa: S608
        self._sums = ", ".join(f"SUM({column})" for column in columns)

    def sums(
        self,
        key: str,
        where: str,
    ) -> str:
        """The statement that adds up the rows after a day, by one key."""
        return (
            f"SELECT {key}, {self._sums} FROM {self.name} "  # noqa: S608
            f"WHERE day>? {where} GROUP BY {key} ORDER BY {key}"
        )


_TIERS = _Table("tiers", ["tier"], TierFigures)
_SAVED = _Table("saved", ["model", "tenant"], Saved)
_FORGET_TENANT = "DELETE FROM saved WHERE tenant=?"
SCHEMA = Schema(
    tables=_TIERS.create + _SAVED.create,
    version=1,
    file=FILE,
    first="tiers",
    probes=(_TIERS.count.replace("?", "0"), _SAVED.count.replace("?", "0")),
)


def today() -> int:
    """Days since the epoch, in UTC."""
    return int(time.time()) // _DAY_S


class Ledger:
    """The figures of all days in a file of a cache directory. Any thread may call any method; each may block.

    Args:
        cache_dir: the directory.
        days: that are kept.
        replace: make the file where it is missing, and begin another where it is damaged. Without it it is only read.

    Raises:
        StoreError: the file cannot be opened.
    """

    def __init__(
        self,
        cache_dir: Path,
        *,
        days: int = 90,
        replace: bool = True,
    ) -> None:
        self._days = days
        self._database = Database(
            cache_dir / FILE,
            schema=SCHEMA,
            timeout_s=_WAIT_S,
            raises_store_error=True,
            replace=replace,
        )

    def add(
        self,
        tiers: Mapping[str, TierFigures],
        saved: Mapping[tuple[int, str, str], Saved] | None = None,
    ) -> None:
        """Add figures: of tiers those of today, the others by day, model and tenant. Forget days that are too old.

        Raises:
            StoreError: nothing was added.
        """
        day = today()
        with self._database.write() as db:
            for tier, figures in tiers.items():
                _add(db, _TIERS, (day, tier), figures)
            for key, worth in (saved or {}).items():
                _add(db, _SAVED, key, worth)
            for table in (_TIERS, _SAVED):
                db.execute(table.forget, (day - self._days,))

    def forget(self, tenants: Sequence[str]) -> None:
        """Delete what is known of tenants."""
        with self._database.write() as db:
            db.executemany(_FORGET_TENANT, [(tenant,) for tenant in tenants])

    def tiers(self, days: int) -> dict[str, TierFigures]:
        """The latest days, today among them, by tier."""
        rows = self._database.rows(_TIERS.sums("tier", ""), today() - days)
        return {tier: TierFigures(*sums) for tier, *sums in rows}

    def by(
        self,
        name: str,
        days: int,
        tenants: Sequence[str] | None = None,
    ) -> dict[str, Saved]:
        """The latest days by ``day``, ``model`` or ``tenant``; of some tenants, or of all. Days are as ``2026-11-28``,
        the latest first; models and tenants come by what they saved."""
        marks = ", ".join("?" for _ in tenants or ())
        where = "" if tenants is None else f"AND tenant IN ({marks})"
        rows = self._database.rows(_SAVED.sums(name, where), today() - days, *(tenants or ()))
        found = [(key, Saved(*sums)) for key, *sums in rows]
        if name == "day":
            return {_date(day): saved for day, saved in reversed(found)}
        return dict(sorted(found, key=lambda row: -row[1].requests))

    def names(self) -> dict[str, str]:
        """What tenants are called, where a gateway has noted it in the file."""
        there = self._database.rows("SELECT 1 FROM sqlite_master WHERE name='names'")
        return dict(self._database.rows("SELECT tenant, name FROM names")) if there else {}

    def close(self) -> None:
        self._database.close()


def _add(
    db: sqlite3.Connection,
    table: _Table,
    key: tuple[object, ...],
    sums: Sums,
) -> None:
    day, *names = key
    if not db.execute(table.find, key).fetchone():
        ((count,),) = db.execute(table.count, (day,)).fetchall()
        key = (day, *(OTHERS for _ in names)) if count >= _MOST else key
    db.execute(table.add, (*key, *astuple(sums)))


def _date(day: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(day * _DAY_S))
