"""Answers in a Redis Cluster, spread over its nodes.

    {semkv:<name>:<part>:1}:...   a `RedisStore` of its own, for the answers whose keys fall into this part

A part has its own share of the bytes and its own log, so what changes its answers and bookkeeping stays one script on
one node. The hash tags divide the cluster's slots evenly. A place in the log is that of every part.

A node that is away takes its parts with it: their answers are misses. `SpreadStore.news` names them as invalid after a
while, so that memory serves none that another gateway may have invalidated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import xxhash

from semkv.errors import StoreError
from semkv_gateway.responses.redis import RedisStore, connect, root_of
from semkv_gateway.responses.store import News, ResponseStore, Selector, StoredResponse
from semkv_stores.breaker import Rests

PARTS = 16  # more than a cluster of caches has nodes; a part must have room for the largest answer
AWAY = "part"  # `StoreError.reason` of a part that does not answer, where the others may
_SLOTS = 16_384
_UNHEARD_S = 20.0  # after which memory serves nothing of a part
_UNKNOWN = "-"  # a place that no log has


@dataclass(frozen=True, slots=True)
class _OfPart(Selector):
    """All answers of a part. It is for memory alone, and in no log."""

    part: int = 0

    def matches(self, response: StoredResponse) -> bool:
        return part_of(response.key) == self.part


class SpreadStore(ResponseStore):
    """A store that many gateways share, on all nodes of a cluster. Arguments and errors as of `RedisStore`."""

    def __init__(
        self,
        url: str,
        *,
        max_bytes: int = 4 << 30,
        timeout_s: float = 0.25,
        name: str = "answers",
        **more: Any,
    ) -> None:
        self.max_bytes = max_bytes
        self._db = connect(url, timeout_s)
        self._parts = [
            RedisStore(
                url,
                max_bytes=max_bytes // PARTS,
                timeout_s=timeout_s,
                name=part_name(name, part),
                client=self._db,
                **more,
            )
            for part in range(PARTS)
        ]
        self._rests = Rests()
        self._heard = [time.monotonic()] * PARTS

    @contextmanager
    def _part(self, number: int) -> Iterator[RedisStore]:
        """A part; one that was away a moment ago is not asked."""
        if self._rests.has(number):
            error = StoreError("redis: a node of the cluster was away a moment ago")
            error.reason = AWAY
            raise error
        began = time.monotonic()
        try:
            yield self._parts[number]
        except StoreError as error:
            if error.reason == "away":
                self._rests.failed(number, began)
                error.reason = AWAY
            raise

    def get(self, key: str) -> StoredResponse | None:
        with self._part(part_of(key)) as part:
            return part.get(key)

    def put(self, response: StoredResponse, since: str = "") -> bool:
        number = part_of(response.key)
        with self._part(number) as part:
            return part.put(response, _places(since)[number])

    def invalidate(self, selector: Selector, *, dry_run: bool = False) -> int:
        chosen = range(PARTS) if selector.key is None else [part_of(selector.key)]
        found = 0
        failed: StoreError | None = None
        for number in chosen:  # also behind one that fails
            try:
                found += self._parts[number].invalidate(selector, dry_run=dry_run)
            except StoreError as error:
                failed = error
        if failed is not None:
            raise failed
        return found

    def news(self, cursor: str) -> News:
        places = _places(cursor)
        selectors: list[Selector] = []
        failed: list[StoreError] = []
        for number in range(PARTS):
            try:
                with self._part(number) as part:
                    news = part.news(places[number])
            except StoreError as error:
                failed.append(error)
                if time.monotonic() - self._heard[number] > _UNHEARD_S:
                    places[number] = _UNKNOWN
                    selectors.append(_OfPart(part=number))
                places[number] = places[number] or _UNKNOWN
                continue
            self._heard[number] = time.monotonic()
            places[number] = news.cursor
            if news.selectors is None:  # all of it may be invalid
                selectors.append(_OfPart(part=number))
            else:
                selectors += news.selectors
        if len(failed) == PARTS:
            failed[0].reason = "away"
            raise failed[0]
        return News(",".join(places), tuple(dict.fromkeys(selectors)))

    @property
    def unreplicated(self) -> int:
        return sum(part.unreplicated for part in self._parts)

    def refuse(self, name: str, *, refused: bool) -> None:
        with self._part(part_of(name)) as part:
            part.refuse(name, refused=refused)

    def refused(self, name: str) -> bool:
        with self._part(part_of(name)) as part:
            return part.refused(name)

    def heads(self, first: int, most: int) -> list[tuple[str, bytes | None]]:
        """As `RedisStore.heads`."""
        used = chain.from_iterable(part.used(0, first + most) for part in self._parts)
        latest = sorted(used, key=lambda pair: -pair[1])[first : first + most]
        keys = [key for key, _ in latest]
        heads: dict[str, bytes | None] = {}
        for number in {part_of(key) for key in keys}:
            own = [key for key in keys if part_of(key) == number]
            heads.update(zip(own, self._parts[number].heads_of(own), strict=True))
        return [(key, heads[key]) for key in keys]

    def usage(self) -> tuple[int, int]:
        held = []
        for number in range(PARTS):
            with self._part(number) as part:
                held.append(part.usage())
        return sum(entries for entries, _ in held), sum(nbytes for _, nbytes in held)

    def close(self) -> None:
        self._db.close()


def part_of_slot(key: str) -> int:
    """The part that has the slot of a name in Redis."""
    from redis.crc import key_slot

    return key_slot(key.encode()) * PARTS // _SLOTS


def part_of(key: str) -> int:
    """The part in which an answer lies."""
    return xxhash.xxh3_64_intdigest(key.encode()) % PARTS


def part_name(name: str, part: int) -> str:
    """The name of a part's `RedisStore`. Its hash tag falls into the part's own sixteenth of a cluster's slots."""
    for number in count():
        found = f"{name}:{part}.{number}"
        if part_of_slot(root_of(found)) == part:
            return found
    raise AssertionError


def _places(cursor: str) -> list[str]:
    """The place in each part's log."""
    return cursor.split(",") if cursor else [""] * PARTS
