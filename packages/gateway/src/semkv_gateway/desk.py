"""The gateway as the dashboard reads and changes it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isinf
from pathlib import Path
from typing import Any, TypeVar

from semkv import __version__
from semkv_dashboard.admin import Desk
from semkv_dashboard.shared import Shared
from semkv_gateway.gateway import Gateway
from semkv_gateway.metrics import FOLDER
from semkv_gateway.responses.store import Selector, StoredResponse
from semkv_gateway.rules import TAG_DIGITS

_T = TypeVar("_T")
_PROMPT = 20_000  # characters of a question


class GatewayDesk(Desk):
    """See `Desk`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        workers = gateway.metrics.workers
        folder = Path(os.environ[FOLDER]) if workers > 1 else None
        self._shared = Shared(gateway.recent.view, folder)

    async def _read(self, work: Callable[[], _T]) -> _T:
        return await self._gateway.cache.figures(work)

    # -- seeing -------------------------------------------------------------------------------------------------

    async def stats(
        self,
        window: str,
        days: int,
    ) -> dict[str, Any]:
        gateway, metrics = self._gateway, self._gateway.metrics
        figures = await self._read(metrics.figures)
        worth = await self._read(partial(gateway.worth.view, days))
        figures |= {
            "worth": worth,
            "latency": metrics.live.view(),
        }
        if metrics.history is not None:
            figures["traffic"] = await self._read(partial(metrics.history.view, window))
            figures["names"] = await self._read(self._names)
        about = {
            "version": __version__,
            "workers": metrics.workers,
            "advice": gateway.advice.text,
            "store": gateway.cache.responses.store_state,
            "semantic": gateway.cache.semantic is not None,
            "upstreams": gateway.upstreams.view(),
        }
        return figures | about

    def _names(self) -> dict[str, str]:
        """Of tenants by their first digits: those of the file, which other workers have learned, and our own."""
        history, names = self._gateway.metrics.history, self._gateway.names
        assert history is not None
        found = {tenant[:TAG_DIGITS]: name for tenant, name in history.names().items()}
        own = {digits: names.of(digits) for digits in found}
        return found | {digits: name for digits, name in own.items() if name} | names.given

    async def recent(self) -> dict[str, list[dict[str, Any]]]:
        return await asyncio.to_thread(self._shared.view)

    async def scan(
        self,
        after: str,
        most: int,
    ) -> list[dict[str, Any]]:
        found = await self._read(partial(self._gateway.cache.responses.scan, after, most))
        return [_row(response) | {"place": place} for place, response in found]

    async def row(self, key: str) -> dict[str, Any] | None:
        response = await self._response(key)
        return None if response is None else _row(response)

    async def _response(self, key: str) -> StoredResponse | None:
        return await self._read(partial(self._gateway.cache.responses.read, key))

    async def answer(self, key: str) -> dict[str, Any] | None:
        response = await self._response(key)
        if response is None:
            return None
        uses = (await self.uses([key])).get(key, (0, None))
        row = _row(response)
        row["prompt"] = row["prompt"][:_PROMPT]
        row["answer"] = self._gateway.recent.shown(response.payload)
        row["bytes"] = len(response.payload)
        row["uses"] = uses[0]
        row["used"] = uses[1]
        return row

    async def most_used(
        self,
        first: int,
        most: int,
        least: int,
    ) -> list[str]:
        history = self._gateway.metrics.history
        if history is None:
            return []
        return await self._read(partial(history.most_used, first, most, least))

    async def uses(self, keys: Sequence[str]) -> Mapping[str, tuple[int, float | None]]:
        history = self._gateway.metrics.history
        if history is None:
            return {}
        self._gateway.worth.publish()
        return await self._read(partial(history.uses, keys))

    def tenants(self, text: str) -> frozenset[str] | None:
        return self._gateway.names.find(text) if text else None

    # -- doing --------------------------------------------------------------------------------------------------

    async def delete(self, key: str) -> dict[str, int]:
        cache = self._gateway.cache
        response = await self._response(key)
        donors = 0
        if response is not None and response.prompt:
            donors = await cache.forget(response.partition, response.prompt)
        removed = await cache.invalidate(Selector(key=key), dry_run=False)
        return {
            "answers": removed,
            "donors": donors,
        }

    async def invalidate(
        self,
        criteria: Mapping[str, str],
        *,
        dry_run: bool,
    ) -> int:
        selector = Selector.of(dict(criteria))
        return await self._gateway.cache.invalidate(selector, dry_run=dry_run)

    async def wrong(self, hit: str) -> int | None:
        found = self._gateway.recent.find(hit)
        if found is not None:
            return await self._gateway.wrong(found)
        named = self._gateway.feedback.ids.read(hit, None)  # another worker's
        return None if named is None else await self._gateway.feedback.apply(named, delete=True)

    def refused(self, why: str) -> None:
        self._gateway.metrics.admin_refused.labels(why).inc()


def _row(response: StoredResponse) -> dict[str, Any]:
    return {
        "key": response.key,
        "tenant": response.partition,
        "model": response.model,
        "prompt": response.prompt,
        "tags": list(response.tags),
        "created": response.created,
        "expires": None if isinf(response.expires) else response.expires,
    }
