"""A gateway's answers as the commands that look after a cache directory see them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from semkv.stores.catalog import CATALOG
from semkv.stores.maintenance import StoreUse
from semkv_gateway.responses.sqlite import SqliteStore
from semkv_gateway.responses.store import Selector

_ALL = 1 << 62  # bounds that evict nothing: they are for the gateway to set
_WAIT_S = 5.0  # for other processes that use the database
_DIGEST = re.compile(r"[0-9a-f]{32}|")


class Answers:
    """A `Maintained` store: the answers in the database of a cache directory.

    Raises:
        StoreError: as `SqliteStore`.
    """

    name = "answers"

    def __init__(self, cache_dir: Path) -> None:
        file = cache_dir / CATALOG
        self._store = SqliteStore(
            file,
            max_bytes=_ALL,
            timeout_s=_WAIT_S,
            replace=False,
        )
        self._had_gateway = (cache_dir / "secret").exists()

    def usage(self, tenants: Sequence[str] | None = None) -> Iterator[StoreUse]:
        for tenant, count, nbytes, oldest, used in self._store.by_tenant():
            if tenants is None or tenant in tenants:
                yield StoreUse(
                    store=self.name,
                    namespace="?" if tenant is None else tenant,
                    items=count,
                    blocks=0,
                    nbytes=nbytes,
                    oldest=oldest,
                    used=used,
                )

    def verify(self, *, repair: bool = False) -> Iterator[str]:
        return self._store.verify(repair=repair)

    def collect(self, before: float) -> int:
        return self._invalidate(Selector(before=before), dry_run=False)

    def purge(
        self, *, tenants: Sequence[str] | None = None, tag: str | None = None, dry_run: bool = False
    ) -> int:
        selectors = [Selector(partition=tenant, tag=tag) for tenant in tenants or ()]
        if tenants is None:
            selectors = [Selector(tag=tag)]
        return sum(self._invalidate(selector, dry_run=dry_run) for selector in selectors)

    def _invalidate(self, selector: Selector, *, dry_run: bool) -> int:
        # The log of invalidations keeps a tenant's name or a tag. Where no gateway ever ran, no process reads that log.
        is_digest = selector.partition is not None and _DIGEST.fullmatch(selector.partition)
        if not (is_digest or self._had_gateway or self._store.usage()[0]):
            return 0
        return self._store.invalidate(selector, dry_run=dry_run)

    def close(self) -> None:
        self._store.close()
