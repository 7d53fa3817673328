"""What is purged from the catalog leaves running processes, too: indexes and words of texts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_helpers import DIM, WrittenEncoder, WrittenHook, vector_of
from gateway_helpers import wait_until
from maintenance_helpers import left, purge
from other_process import Other, obey
from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.index import VectorIndex
from semkv.stores.maintenance import inspect, prepare
from semkv.stores.maintenance import purge as purge_from_here
from semkv.types import EmbeddingLayer, Namespace, Plan, Request, ReuseReport, TextSegment

COUNT = 1100  # above `FLAT`, so that there are graphs
TAGGED = range(0, COUNT, 25)


class Forgetful(WrittenEncoder):
    """It counts how often it was told to forget."""

    forgot = 0

    def forget(self) -> None:
        Forgetful.forgot += 1


def ask(number: int, tenant: str) -> Request:
    text = f"What color is {tenant}'s car with number {number}?"
    return Request(str(number), Namespace(tenant, "m"), (TextSegment(text),))


def vectors(tenant: str, numbers: Iterable[int]) -> np.ndarray:
    return np.stack([vector_of(ask(number, tenant).question) for number in numbers])


def found(rows: np.ndarray, tenant: str, numbers: Iterable[int]) -> int:
    """How many questions' vectors are among some rows; those of others have a cosine far below."""
    return int(((vectors(tenant, numbers) @ rows.T).max(axis=1, initial=0) > 0.999).sum())


def opened(folder: Path) -> SemanticCache:
    config = CacheConfig(
        folder, embedding_layers=(EmbeddingLayer("prompt", DIM, 0.9),), embedding_hook="prompt"
    )
    return SemanticCache(config, hook=WrittenHook(), text_encoder=Forgetful())


def record(cache: SemanticCache, tenant: str, count: int = COUNT) -> None:
    for number in range(count):
        request = ask(number, tenant)
        tags = ("secret",) if number in TAGGED else ()
        vectors = {"semantic_text": vector_of(request.question)}
        report = ReuseReport(request, Plan(request.segments), {}, vectors)
        cache.add_observation(report, "red", tags=tags)


def indexes(cache: SemanticCache) -> list[VectorIndex]:
    found = [layer.index for layer in cache._similar.layers.values()]
    assert len(found) == 2
    return found


def settled(cache: SemanticCache) -> None:
    """Wait until nothing is being built."""
    for index in indexes(cache):
        while index._worker.submit(int).result() or any(
            home.building for home in list(index._partitions.values())
        ):
            pass


def in_memory(cache: SemanticCache, tenant: str, numbers: Sequence[int]) -> int:
    """How many vectors the indexes have of some questions, whether or not they are found."""
    count = 0
    for index in indexes(cache):
        for part in index._partitions.values():
            rows = [part.rows]
            if (graph := part.graph) is not None:  # another may come in its place
                rows.append(graph.index.reconstruct_n(0, graph.index.ntotal))
            count += found(np.concatenate(rows), tenant, numbers)
    return count


def _serve(folder: Path, pipe: Connection) -> None:
    """A process that has a cache open and does what it is told."""
    cache = opened(folder)
    does: dict[str, Callable[..., Any]] = {
        "record": lambda *which: record(cache, *which),
        "settle": lambda: settled(cache),
        "known": lambda: [len(index) for index in indexes(cache)],
        "in memory": lambda *which: in_memory(cache, *which),
        "forgot": lambda: Forgetful.forgot,
        "ask": lambda tenant: len(cache._catalog.find(next(iter(keys(cache, tenant))))),
        "close": cache.close,
        "faults": lambda: cache.stats().faults,
    }
    obey(pipe, does)


def keys(cache: SemanticCache, tenant: str) -> list[str]:
    statement = "SELECT key FROM entry_keys JOIN entries ON id=entry WHERE tenant=?"
    rows = cache._catalog.database.connection.execute(statement, (tenant,))
    return [row[0] for row in rows]


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    process = Other(_serve, tmp_path)
    yield process
    process.end()


def test_what_is_purged_leaves_the_memory_of_an_idle_process(tmp_path: Path, other: Other) -> None:
    other("record", "alice"), other("record", "bob"), other("settle")
    assert other("in memory", "alice", range(COUNT)) == 2 * COUNT
    assert other("ask", "alice")
    purge(tmp_path, "--tenant", "alice")
    wait_until(lambda: other("known") == [COUNT, COUNT])
    wait_until(lambda: other("forgot"))
    assert other("in memory", "alice", range(COUNT)) == 0
    assert other("in memory", "bob", range(COUNT)) == 2 * COUNT
    purge(tmp_path, "--tag", "secret")
    wait_until(lambda: other("known") == [COUNT - len(TAGGED)] * 2)
    wait_until(lambda: (other("settle"), other("in memory", "bob", TAGGED))[1] == 0)
    purge(tmp_path)
    wait_until(lambda: other("known") == [0, 0])
    assert other("in memory", "bob", range(COUNT)) == 0
    other("record", "alice", 3)
    assert [(use.tenant, use.entries) for use in inspect(tmp_path).entries] == [("alice", 3)]
    other("close")
    assert other("faults") == {"catalog": 1}, "which is closed now"
    prepare(CacheConfig(tmp_path), purge=True)
    assert (left(tmp_path), inspect(tmp_path).entries) == ([], ())


@pytest.mark.parametrize("by", ["another process", "this one"])
def test_what_is_recorded_again_during_a_purge_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    cache = opened(tmp_path)
    record(cache, "bob", 30)
    name = "missing" if by == "another process" else "invalidate"
    real, again = getattr(cache._catalog, name), []

    def asked(*which: Any, **criteria: Any) -> Any:
        """Just after it, another thread records the same."""
        gone = real(*which, **criteria)
        if gone and not again:
            again.append(threading.Thread(target=record, args=(cache, "bob", 30)))
            again[0].start()
            again[0].join(0.2)
        return gone

    monkeypatch.setattr(cache._catalog, name, asked)
    if by == "another process":
        purge_from_here(tmp_path, tenants=["bob"])
    else:
        assert cache.invalidate(namespace=Namespace("bob", "m")) == 30
    wait_until(lambda: again and cache._similar._purge == cache._catalog.purge())
    again[0].join(120)
    assert [len(index) for index in indexes(cache)] == [30, 30] == [len(cache._catalog)] * 2
    cache.close()
