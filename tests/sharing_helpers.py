"""Semantic caches of several directories on one Redis."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

from cache_helpers import WrittenEncoder, WrittenHook
from gateway_helpers import wait_until
from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.types import Namespace, Request, ReuseReport, Role, TextSegment
from semkv_gateway.donors import RedisDonors

LIMIT_S = 60.0  # of a lookup: a busy machine is no fault


class Cache:
    """A semantic cache in a directory of its own, whose encoder is told what is similar (``topic~0.95``)."""

    def __init__(
        self, folder: Path, store: Any, *, limit_s: float = LIMIT_S, **settings: Any
    ) -> None:
        config = CacheConfig(folder, guards=False, similarity_threshold=0.9, **settings)
        self.cache = SemanticCache(
            config,
            hook=WrittenHook(),
            text_encoder=WrittenEncoder(),
            shared=store,
            shared_limit_s=limit_s,
        )

    def look(self, text: str, tenant: str = "ours", history: str = "Be brief.") -> ReuseReport:
        segments = (TextSegment(history, Role.SYSTEM), TextSegment(text))
        return self.cache.try_reuse(Request("1", Namespace(tenant, "model"), segments))

    def finds(self, text: str, **more: str) -> bool:
        return self.look(text, **more).provenance == "text:semantic"

    def record(self, text: str, *, tags: tuple[str, ...] = (), **more: str) -> str:
        """Record a prompt, and wait until it is in the store."""
        before = self.count("shared out")
        entry_id = self.cache.add_observation(self.look(text, **more), f"of {text}", tags=tags)
        assert entry_id is not None
        wait_until(lambda: self.count("shared out") > before)
        return entry_id

    def count(self, name: str) -> int:
        return self.cache._tally.counts().get(name, 0)

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.cache.close()


class Caches:
    """Two of them on one deployment of a Redis, and a client that sees what lies there."""

    numbers = iter(range(1000))

    def __init__(
        self, folder: Path, url: str, *, vector_sets: bool = False, **settings: Any
    ) -> None:
        self.name = f"test {next(self.numbers)}"
        self.url = url
        self.vector_sets = vector_sets
        self.folder = folder / self.name
        self.one, self.other = (self.cache(name, **settings) for name in ("one", "other"))

    def cache(self, name: str, **settings: Any) -> Cache:
        return Cache(self.folder / name, self.store(), **settings)

    def store(self, **settings: Any) -> RedisDonors:
        return RedisDonors(
            self.url, timeout_s=60.0, name=self.name, vector_sets=self.vector_sets, **settings
        )

    def rows(self) -> list[bytes]:
        """All rows that the store has."""
        store = self.store()
        found = [
            row.data
            for partition in store._partitions()
            for wrong in (False, True)
            for row in store._rows(partition, wrong=wrong)
        ]
        store.close()
        return found

    def __enter__(self) -> Caches:
        return self

    def __exit__(self, *_: object) -> None:
        self.one.cache.close()
        self.other.cache.close()


class Again:
    """Does several things, each in a thread of its own, again and again while a block runs. Each is told how often it
    was done before."""

    def __init__(self, *actions: Callable[[int], None]) -> None:
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=partial(self._do, one)) for one in actions]

    def _do(self, action: Callable[[int], None]) -> None:
        number = 0
        while not self._stop.is_set():
            action(number)
            number += 1

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
