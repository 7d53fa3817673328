"""What is stored, page by page: by text, model, tenant, age and uses."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

PAGE = 25
_AT_ONCE = 64  # heads of answers, each of which has a whole question
_LOOK_S = 2.0  # for one page; the next one goes on from there
_RANKS = 100
_TEXT = 400  # characters of a prompt in a list
_USED = "used"
_ORDERS = ("newest", _USED)
_PLACE = re.compile(r"\d{1,9}", re.ASCII)


class Source(Protocol):
    """Where answers are. Rows have ``key``, ``tenant``, ``model``, ``prompt``, ``created``, ``expires``, ``tags``."""

    async def scan(
        self,
        after: str,
        most: int,
    ) -> list[dict[str, Any]]:
        """Rows after a place, the latest first, each with its own under ``place``; none at the end."""
        ...

    async def row(self, key: str) -> dict[str, Any] | None:
        """One row; None where there is no such answer."""
        ...

    async def most_used(
        self,
        first: int,
        most: int,
        least: int,
    ) -> list[str]:
        """Keys of those that were used so often at least, the most used first, from a place on."""
        ...

    async def uses(self, keys: Sequence[str]) -> Mapping[str, tuple[int, float | None]]:
        """How often answers were used, and when last."""
        ...


class BadQueryError(ValueError):
    """A query has another form."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which entries are wanted.

    Attributes:
        text: in the prompt; case does not count.
        model: in the model's name.
        tenants: what their digests begin with; None for all.
        younger_s, older_s: bounds of the age.
        least_uses: uses at least.
        order: ``newest`` or ``used``.
        after: where the page before ended.
    """

    text: str = ""
    model: str = ""
    tenants: tuple[str, ...] | None = None
    younger_s: float | None = None
    older_s: float | None = None
    least_uses: int = 0
    order: str = "newest"
    after: str = ""

    @classmethod
    def of(
        cls,
        query: Mapping[str, str],
        tenants: frozenset[str] | None,
    ) -> Wanted:
        """Raises `BadQueryError`."""
        try:
            younger = float(query["younger"]) if query.get("younger") else None
            older = float(query["older"]) if query.get("older") else None
            uses = int(query.get("uses") or 0)
        except ValueError:
            raise BadQueryError("younger and older are seconds, uses is a number") from None
        order = query.get("order") or "newest"
        if order not in _ORDERS:
            raise BadQueryError(f"order is one of {', '.join(_ORDERS)}")
        return cls(
            text=query.get("text", "").casefold(),
            model=query.get("model", "").casefold(),
            tenants=None if tenants is None else tuple(tenants),
            younger_s=younger,
            older_s=older,
            least_uses=uses,
            order=order,
            after=query.get("after", ""),
        )

    def meets(
        self,
        row: Mapping[str, Any],
        now: float,
    ) -> bool:
        """Whether a row is wanted, uses aside."""
        age = now - row["created"]
        return (
            self.text in row["prompt"].casefold()
            and self.model in row["model"].casefold()
            and (self.tenants is None or row["tenant"].startswith(self.tenants))
            and (self.younger_s is None or age <= self.younger_s)
            and (self.older_s is None or age >= self.older_s)
        )


async def find(source: Source, wanted: Wanted) -> dict[str, Any]:
    """A page of entries, where the next one begins, and how many answers were looked at for it."""
    until = time.monotonic() + _LOOK_S
    found: list[dict[str, Any]] = []
    looked = 0
    after = wanted.after
    while True:
        rows, places = await _next(source, wanted, after)
        now = time.time()
        for row, place in zip(
            rows,
            places,
            strict=True,
        ):
            after = place
            looked += row is not None
            if row is not None and wanted.meets(row, now):
                found.append(row)
            if len(found) == PAGE:
                break
        await _add_uses(source, found)
        if not places or len(found) == PAGE or not after or time.monotonic() > until:
            break
    more = after if places else ""
    return {
        "entries": [_short(row) for row in found],
        "next": more,
        "looked": looked,
    }


async def _next(
    source: Source, wanted: Wanted, after: str
) -> tuple[list[dict[str, Any] | None], list[str]]:
    """Rows, and the place behind each."""
    if wanted.order == _USED or wanted.least_uses:
        first = int(after) if _PLACE.fullmatch(after) else 0
        keys = await source.most_used(first, _RANKS, wanted.least_uses)
        rows = [await source.row(key) for key in keys]
        return rows, [str(first + n) for n in range(1, len(keys) + 1)]
    plain = await source.scan(after, _AT_ONCE)
    return list(plain), [row["place"] for row in plain]


async def _add_uses(source: Source, rows: Sequence[dict[str, Any]]) -> None:
    new = [row["key"] for row in rows if "uses" not in row]
    uses = await source.uses(new) if new else {}
    for row in rows:
        if "uses" not in row:
            count, at = uses.get(row["key"], (0, None))
            row |= {
                "uses": count,
                "used": at,
            }


def _short(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **row,
        "prompt": row["prompt"][:_TEXT],
    }
