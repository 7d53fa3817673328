"""Clients' reports of wrong hits. Each hit has an id, in the header ``X-Semkv-Hit``."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from typing import Any, Protocol

from semkv_dashboard.hit_ids import HitIds, WrongHit
from semkv_dashboard.limits import Buckets

log = logging.getLogger(__name__)

PATH = "/v1/semkv/feedback"
HEADER = b"x-semkv-hit"
_BODY_BYTES = 4096  # the event loop waits while a body is read
_MINUTE_S = 60.0
_SHOWN = 16  # digits of an answer's key in the log
_ODD = "give a JSON object with the id of a hit, from X-Semkv-Hit, and perhaps delete: true"

Answer = tuple[int, dict[str, Any]]
"""A status, and what is said: the message of an error, where the status is one."""


class Removing(Protocol):
    """Where answers and donors are."""

    async def bar(
        self,
        pair: str,
        donor: str,
    ) -> None:
        """Let a donor never answer a text again."""
        ...

    async def drop(self, donor: str) -> None:
        """Remove a donor."""
        ...

    async def remove(
        self,
        key: str,
        before: float,
    ) -> int:
        """Remove the answer under a key, if it was kept before a time; how many were."""
        ...


class Feedback:
    """Hears what clients say of hits.

    Args:
        ids: of hits.
        cache: from which wrong answers are removed.
        count: called with what came of each report.
        most: reports a minute and tenant; 0 for none.
    """

    def __init__(
        self,
        ids: HitIds,
        cache: Removing,
        count: Callable[[str], None],
        most: int,
    ) -> None:
        self.ids = ids
        self._cache = cache
        self._count = count
        self._most = most
        self._buckets = Buckets(most, _MINUTE_S / max(1, most))

    async def hear(
        self,
        tenant: str,
        shown: str,
        body: bytes,
    ) -> Answer:
        """The answer to a client of a tenant, which operators see as ``shown``."""
        if not self._most:
            return self._refuse(403, "off", "this gateway hears of no wrong hits (--feedback 0)")
        if len(body) > _BODY_BYTES:
            return self._refuse(413, "odd", _ODD)
        wait = math.ceil(self._buckets.wait(tenant))
        if wait:
            return self._refuse(429, "limited", f"too many wrong hits: try again in {wait} s")
        self._buckets.take(tenant)
        given = _read(body)
        number = given.get("id")
        delete = given.get("delete", False)
        if not isinstance(number, str) or not isinstance(delete, bool):
            return self._refuse(400, "odd", _ODD)
        hit = self.ids.read(number, tenant) if number.isascii() else None
        if hit is None:
            return self._refuse(404, "unknown", "no such hit of this key")
        removed = await self.apply(hit, delete=delete)
        self._count("heard")
        fields = {
            "tenant": shown,
            "key": hit.key[:_SHOWN],
            "donor": hit.donor,
            "removed": removed,
        }
        log.info("a client calls a hit wrong", extra={"fields": fields})
        return 200, {
            "refused_from_now_on": bool(hit.pair),
            "removed": removed,
        }

    async def apply(
        self,
        hit: WrongHit,
        *,
        delete: bool,
    ) -> int:
        """Refuse a pair of texts from now on. Where there is none, or with ``delete``, remove the answer and the donor.
        Returns how many answers were removed."""
        if hit.pair:
            await self._cache.bar(hit.pair, hit.donor)
        if hit.pair and not delete:
            return 0
        if hit.donor:
            await self._cache.drop(hit.donor)
        return await self._cache.remove(hit.key, hit.created + 1.0)  # no newer one

    def _refuse(
        self,
        status: int,
        why: str,
        message: str,
    ) -> Answer:
        self._count(why)
        return status, {"message": message}


def _read(body: bytes) -> dict[str, Any]:
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return given if isinstance(given, dict) else {}
