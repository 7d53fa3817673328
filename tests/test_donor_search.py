"""Search among the donors of a partition: FAISS in the process, or vector sets of a real Redis 8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pytest

from gateway_helpers import wait_until
from redis_server import RedisCluster, RedisServer, redis_8
from semkv.errors import ConfigError
from semkv.index import Row, VectorIndex
from semkv.tiers import sharing
from semkv_gateway import donors
from semkv_gateway.donors import RedisDonors, open_donors
from sharing_helpers import Caches

if TYPE_CHECKING:
    from semkv.types import Vector

DIM = 32


class Searched(Protocol):
    """What both engines do."""

    def add(self, partition: str, item: str, vector: Vector) -> None: ...
    def remove(self, partition: str, item: str) -> None: ...
    def nearest(self, partition: str, vector: Vector, most: int) -> Sequence[str]: ...


class Faiss:
    def __init__(self) -> None:
        self.index = VectorIndex(DIM, flat=64)

    def add(self, partition: str, item: str, vector: Vector) -> None:
        self.index.extend([Row(item, partition, vector)])

    def remove(self, partition: str, item: str) -> None:
        self.index.remove([item])

    def nearest(self, partition: str, vector: Vector, most: int) -> Sequence[str]:
        return [found.item for found in self.index.search(partition, vector, most)]


class VectorSets:
    def __init__(self, store: RedisDonors) -> None:
        self.store = store
        assert store.search_by("an encoder")

    def add(self, partition: str, item: str, vector: Vector) -> None:
        self.store.add_item(partition, item.encode(), "log 0-0", item, vector)

    def remove(self, partition: str, item: str) -> None:
        self.store.sweep(lambda data: data == item.encode(), [partition])

    def nearest(self, partition: str, vector: Vector, most: int) -> Sequence[str]:
        return self.store.nearest(partition, vector, most)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), program=redis_8()) as running:
        yield running


@pytest.fixture
def store(server: RedisServer, request: pytest.FixtureRequest) -> Iterator[RedisDonors]:
    made = RedisDonors(server.url, timeout_s=60.0, name=request.node.name, vector_sets=True)
    made.search_by("an encoder")
    yield made
    made.close()


@pytest.fixture(params=["faiss", "vector sets"])
def engine(request: pytest.FixtureRequest) -> Searched:
    if request.param == "faiss":
        return Faiss()
    return VectorSets(request.getfixturevalue("store"))


def drawn(count: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_the_nearest_of_a_partition_are_found_and_nothing_of_another(engine: Searched) -> None:
    vectors = drawn(400)
    for number, vector in enumerate(vectors):
        engine.add(f"tenant:{number % 2}", str(number), vector)
    queries = vectors[:100] + 0.1 * drawn(100, seed=1)
    own = np.arange(0, 400, 2)
    right = 0
    for query in queries:
        found = engine.nearest("tenant:0", query / np.linalg.norm(query), 4)
        assert len(found) == 4
        assert all(int(item) % 2 == 0 for item in found)
        best = own[np.argmax(vectors[own] @ query)]
        right += found[0] == str(best)
    assert right >= 95
    assert not engine.nearest("tenant:2", vectors[0], 4)


def test_what_is_removed_is_not_found(engine: Searched) -> None:
    vectors = drawn(100)
    for number, vector in enumerate(vectors):
        engine.add("tenant:0", str(number), vector)
    engine.remove("tenant:0", "7")
    found = engine.nearest("tenant:0", vectors[7], 200)
    assert sorted(map(int, found)) == [number for number in range(100) if number != 7]


# -- vector sets ------------------------------------------------------------------------------------------------------


def test_an_entry_of_two_gateways_is_found_once_and_stays_while_one_row_does(
    store: RedisDonors,
) -> None:
    (vector,) = drawn(1)
    for data in (b"first", b"second"):
        store.add_item("tenant:0", data, "log 0-0", "one", vector)
    store.add_item("tenant:0", b"has no vector", "log 0-0", "none", None)
    assert store.nearest("tenant:0", vector, 8) == ["one"]
    (row,) = store.rows_of("tenant:0", ["one", "unknown", "none"])
    assert (row.data, row.since) == (b"second", "log 0-0")
    assert len(store.read("tenant:0", "", "")) == 3
    store.sweep(lambda data: data == b"first", ["tenant:0"])
    assert store.rows_of("tenant:0", ["one"]) == [row]
    store._db.xdel(store._key("tenant:0"), row.at)
    assert store.nearest("tenant:0", vector, 8) == ["one"], "whose row is lost"
    assert not store.rows_of("tenant:0", ["one"])
    assert not store.nearest("tenant:0", vector, 8)


def test_the_oldest_rows_of_a_partition_go_with_their_vectors(server: RedisServer) -> None:
    most = 60_000
    store = RedisDonors(server.url, name="bounded", max_bytes=2 * most, vector_sets=True)
    store.search_by("an encoder")
    vectors = drawn(200)
    for number, vector in enumerate(vectors):
        store.add_item("tenant:0", b"x" * 500, "log 0-0", str(number), vector)
    rows = list(store._rows("tenant:0"))
    assert 10 < len(rows) < 150
    vectors_key = store._keys("tenant:0")[2]
    assert store._db.execute_command("VCARD", vectors_key) == len(rows)
    assert store.nearest("tenant:0", vectors[199], 1) == ["199"]
    assert "0" not in store.nearest("tenant:0", vectors[0], 200)
    taken = sum(store._db.memory_usage(key) or 0 for key in store._keys("tenant:0"))
    assert taken < 1.2 * most
    store.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with RedisCluster(folder, program=redis_8()) as running:
        yield running


@pytest.mark.parametrize("kind", ["server", "cluster"])
def test_a_gateway_with_another_encoder_or_none_takes_the_others_vectors_along(
    kind: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(kind).url

    def made(encoder: str) -> RedisDonors:
        store = RedisDonors(url, timeout_s=60.0, name=f"mixed {kind}", vector_sets=True)
        if encoder:
            store.search_by(encoder)
        return store

    one, other, none = made("one"), made("other"), made("")
    vectors = drawn(8)
    for number, vector in enumerate(vectors):
        one.add_item("tenant:0", b"own %d" % number, "log 0-0", str(number), vector)
    other.add_item("tenant:0", b"other", "log 0-0", "0", vectors[0])
    none.add_item("tenant:0", b"none", "log 0-0", "none", None)
    assert len(none.read("tenant:0", "", "")) == 10, "it is searched, so no row goes"
    sets = one._keys("tenant:0")[2:3] + other._keys("tenant:0")[2:3]

    def counts() -> list[int]:
        return [int(one._db.execute_command("VCARD", key) or 0) for key in sets]

    assert counts() == [8, 1]
    size = sum(one._db.memory_usage(key) or 0 for key in none._keys("tenant:0"))
    assert int(one._db.hget(one._about("tenant:0")[1], "tenant:0")) == size
    made("").sweep(lambda data: data == b"own 0", ["tenant:0"])
    assert counts() == [7, 1], "the other's row is there"
    other.sweep(lambda data: data != b"other", ["tenant:0"])
    assert counts() == [0, 1]
    # A partition goes with all that it has, also where one without an encoder lets it go.
    one.add_item("tenant:0", b"own", "log 0-0", "1", vectors[1])
    one._db.zincrby(one._about("tenant:0")[0], -90_000.0, "tenant:0")  # a day and more
    made("").add("tenant:1", b"x", "log 0-0")
    assert counts() == [0, 0]
    assert not one.read("tenant:0", "", "")
    for store in (one, other, none):
        store.close()


@pytest.mark.parametrize("kind", ["server", "cluster"])
def test_a_partition_with_more_than_is_read_is_searched(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donors, "MOST", 3)
    monkeypatch.setattr(sharing, "_NEAREST", 2)
    url = request.getfixturevalue(kind).url
    with Caches(tmp_path, url, vector_sets=True) as caches:
        one, other = caches.one, caches.other
        names = ("first", "bread", "salt", "milk", "eggs", "rice", "corn")
        for name in names:
            one.record(name, tags=(name,))
        one.record("few", tenant="theirs")
        assert other.finds("bread~0.95")
        assert other.count("shared in") == 2, "of seven"
        assert not other.finds("bread~0.95", tenant="theirs")
        assert other.finds("rice~0.95")
        hit = one.look("bread~0.95")
        assert one.cache.report_wrong(hit.hit_id)
        one.cache.invalidate(tag="milk")
        wait_until(lambda: not any(b"of milk" in row for row in caches.rows()))
        wait_until(lambda: not other.finds("bread~0.95"))
        with caches.cache("cold") as cold:
            assert not cold.finds("bread~0.95"), "found wrong"
            assert cold.finds("bread~0.96")
            assert not cold.finds("milk~0.95"), "removed"
            assert cold.finds("corn~0.95")
            assert not cold.count("fault:shared entries")


def test_a_redis_without_vector_sets_is_an_error(tmp_path: Path) -> None:
    def opened(search: str) -> RedisDonors | None:
        return open_donors("", 60.0, b"x" * 16, store_bytes=1 << 30, search=search)

    with RedisServer(tmp_path) as old, pytest.raises(ConfigError, match="Redis 8 or later"):
        opened(old.url)
    away = opened("redis://127.0.0.1:1")
    assert away is not None
    away.close()
