"""One contract for every store of answers, then what each has of its own: damage, bounds, kills, outages."""

from __future__ import annotations

import itertools
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from gateway_helpers import wait_until
from redis_server import RedisCluster, RedisServer, valkey
from semkv.errors import ConfigError, CorruptValue, StoreError
from semkv_gateway.response_cache import ResponseCache
from semkv_gateway.responses.listing import listed
from semkv_gateway.responses.opening import open_store
from semkv_gateway.responses.redis import RedisStore
from semkv_gateway.responses.spread import AWAY, PARTS, SpreadStore, part_of
from semkv_gateway.responses.sqlite import SqliteStore
from semkv_gateway.responses.store import (
    CHECKSUM,
    MemoryStore,
    ResponseStore,
    Selector,
    StoredResponse,
    decode,
    encode,
    weight,
)

INF = float("inf")
Make = Callable[..., ResponseStore]


def answer(key: str, **changes: object) -> StoredResponse:
    made = StoredResponse(
        key,
        "tenant",
        "model",
        b'{"choices": []}',
        time.time(),
        tags=("news",),
        prompt="What is it?",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def keys_beside(key: str) -> Iterator[str]:
    """Keys of answers that lie in the same part of a cluster."""
    return (other for other in map(str, itertools.count()) if part_of(other) == part_of(key))


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with RedisCluster(tmp_path_factory.mktemp("cluster"), program=valkey()) as cluster:
        yield cluster


@pytest.fixture(params=["memory", "sqlite", "redis_server", "redis_cluster"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Opens the store of this test; a second call opens the same one again, as another replica would."""
    opened: list[ResponseStore] = []

    def open_(**limits: object) -> ResponseStore:
        if request.param == "memory":
            store: ResponseStore = opened[0] if opened else MemoryStore(**limits)  # type: ignore[arg-type]
        elif request.param == "sqlite":
            store = SqliteStore(tmp_path / "answers.sqlite", **limits)  # type: ignore[arg-type]
        elif request.param == "redis_server":
            server = request.getfixturevalue(request.param)
            store = RedisStore(server.url, timeout_s=60.0, name=tmp_path.name, **limits)  # type: ignore[arg-type]
        else:
            cluster = request.getfixturevalue(request.param)
            if "max_bytes" in limits:  # of all parts
                limits["max_bytes"] = cast("int", limits["max_bytes"]) * PARTS
            store = SpreadStore(cluster.url, timeout_s=60.0, name=tmp_path.name, **limits)  # type: ignore[arg-type]
        opened.append(store)
        return store

    yield open_
    for store in opened:
        store.close()


# -- the contract ---------------------------------------------------------------------------------------------------


def test_an_answer_comes_back_as_it_was(make: Make) -> None:
    store = make()
    mine = answer(
        "a", payload='{"x": "ü\0 \u2028"}'.encode(), prompt="ü\nq", expires=time.time() + 50
    )
    assert store.put(mine)
    assert store.get("a") == mine
    assert make().get("a") == mine
    assert store.get("b") is None


def test_what_is_held_is_listed_piece_by_piece(make: Make) -> None:
    store = make()
    now = time.time()
    for number in range(7):
        store.put(answer(f"key {number}", created=now + number, payload=b"x" * 1000))
    for number in range(3):
        store.put(answer(f"gone {number}", created=now + 9, stale_until=now + 20))
    for most in (1, 3, 100):
        found: list[StoredResponse] = []
        after = ""
        while batch := listed(store, after, most, now + 30):
            found += [response for _, response in batch]
            after = batch[-1][0]
        assert [response.key for response in found] == [f"key {n}" for n in reversed(range(7))]
    assert found[0].prompt == "What is it?"
    for odd in ("x", "-1", "9" * 40, "\0"):
        listed(store, odd, 3, now)


def test_a_store_of_the_users_own_says_so_or_lists() -> None:
    with pytest.raises(StoreError, match="cannot list"):
        listed(cast("ResponseStore", object()), "", 3, 0.0)
    own = SimpleNamespace(scan=lambda after, most: [] if after else [("1", answer("a"))])
    ((place, found),) = listed(cast("ResponseStore", own), "", 3, 0.0)
    assert (place, found.key) == ("1", "a")
    assert listed(cast("ResponseStore", own), "1", 3, 0.0) == []


def test_a_later_answer_replaces_the_earlier(make: Make) -> None:
    store = make()
    store.put(answer("a", payload=b"1" * 500))
    once = store.usage()
    store.put(answer("a", payload=b"2" * 500))
    assert store.get("a").payload == b"2" * 500  # type: ignore[union-attr]
    assert store.usage()[0] == 1
    assert abs(store.usage()[1] - once[1]) < 20


def test_stale_answers_come_until_their_grace_ends(make: Make) -> None:
    now = time.time()
    store = make()
    store.put(answer("stale", expires=now - 1, stale_until=now + 60))
    store.put(answer("gone", expires=now - 2, stale_until=now - 1))
    assert store.get("stale") is not None
    assert store.get("gone") is None


def test_refused_credentials_are_held_within_bounds_until_they_are_accepted(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    store = make(clock=lambda: now)
    a, b, c, d, e = itertools.islice(keys_beside("0"), 5)
    store.refuse(b, refused=False)
    for name in (a, b, c, a):
        store.refuse(name, refused=True)
    replica = make(clock=lambda: now)
    assert [replica.refused(name) for name in (a, b, c, d)] == [True, True, True, False]
    store.refuse(b, refused=False)
    assert [store.refused(name) for name in (a, b, c)] == [True, False, True]
    assert store.usage()[0] == 0
    kind = RedisStore if isinstance(store, SpreadStore) else type(store)
    monkeypatch.setattr(f"{kind.__module__}.REFUSALS", 2)
    for name in (d, e):
        now += 1
        store.refuse(name, refused=True)
    assert [store.refused(name) for name in (a, c, d, e)] == [False, False, True, True]
    now += 90 * 86_400 - 0.5
    assert [store.refused(name) for name in (d, e)] == [False, True]


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        (Selector(key="a"), "a"),
        (Selector(tag="sport"), "b"),
        (Selector(model="other"), "c"),
        (Selector(partition="you"), "d"),
        (Selector(prefix="Who"), "bd"),
        (Selector(prefix="Who", tag="sport"), "b"),
        (Selector(tag="nothing"), ""),
        (Selector(before=1e9), "c"),
        (Selector(), "abcd"),
    ],
)
def test_invalidation_deletes_what_it_counted_and_nothing_else(
    make: Make, selector: Selector, names: str
) -> None:
    store = make()
    store.put(answer("a"))
    store.put(answer("b", tags=("sport", "news"), prompt="Who won?"))
    store.put(answer("c", model="other", created=1.0))
    store.put(answer("d", partition="you", prompt="Who am I?"))
    assert store.invalidate(selector, dry_run=True) == len(names)
    assert store.usage()[0] == 4
    assert store.invalidate(selector) == len(names)
    assert "".join(k for k in "abcd" if store.get(k) is None) == names
    assert store.usage()[0] == 4 - len(names)


def test_news_reaches_who_was_away_and_what_was_begun_before_is_not_kept(make: Make) -> None:
    store, replica = make(), make()
    cursor = replica.news("").cursor
    assert replica.news(cursor).selectors == ()
    store.invalidate(Selector(tag="news"))
    store.invalidate(Selector(tag="sport"), dry_run=True)
    store.invalidate(Selector(prefix="ü"))
    news = replica.news(cursor)
    assert news.selectors == (Selector(tag="news"), Selector(prefix="ü"))
    assert replica.news(news.cursor).selectors == ()
    assert not store.put(answer("a"), since=cursor)
    assert store.get("a") is None
    assert store.put(answer("b", tags=("sport",)), since=cursor)
    assert store.put(answer("a"), since=news.cursor)
    for _ in range(1001):
        store.invalidate(Selector(key="x"))
    unknown = next(key for key in keys_beside("x") if key not in ("a", "b"))
    assert store.news(cursor).hit(answer(unknown)), "the log does not reach back"
    assert not store.put(answer(unknown), since=cursor)


def test_the_bound_on_bytes_holds_and_the_least_recently_used_goes_first(make: Make) -> None:
    size = weight(answer("00", payload=b"x" * 2000))
    store = make(max_bytes=size * 10)
    keys = list(itertools.islice(keys_beside("0"), 40))
    for key in keys[:8]:
        store.put(answer(key, payload=b"x" * 2000))
    for key in keys[8:]:
        assert store.get(keys[0]) is not None
        store.put(answer(key, payload=b"x" * 2000))
        assert store.usage()[1] <= size * 10
    assert store.get(keys[1]) is None
    assert store.get(keys[39]) is not None
    assert not store.put(answer("huge", payload=b"x" * size * 11))


@pytest.mark.parametrize("reopened", [False, True])
def test_a_tenant_has_its_own_bound_and_takes_no_room_of_others(
    tmp_path: Path, reopened: bool
) -> None:
    clock = itertools.count(time.time())

    def opened(most: int) -> SqliteStore:
        return SqliteStore(tmp_path / "a", max_tenant_bytes=most, clock=lambda: next(clock))

    store = opened(0 if reopened else 100_000)
    store.put(answer("others", partition="other", payload=b"x" * 90_000))
    for number in range(20):
        assert store.put(answer(f"{number}", payload=b"x" * 9_000))
        store.get("0")
    if reopened:  # with more than it may have by now
        store.close()
        store = opened(100_000)
        store.put(answer("20", payload=b"x" * 9_000))
    used = {tenant: use for tenant, *use in store.by_tenant()}
    assert used["other"][0] == 1
    assert 80_000 < used["tenant"][1] <= 100_000
    assert store.get("0") is not None, "the least recently used go first"
    assert store.get("1") is None
    assert store.get("20" if reopened else "19") is not None
    assert not store.put(answer("large", payload=b"x" * 100_000))
    store.close()


# -- the stored form --------------------------------------------------------------------------------------------------


def test_every_flipped_bit_is_found() -> None:
    head, payload = encode(answer("a", stale_until=INF))
    assert decode("a", head, payload).stale_until == INF
    draw = random.Random(0)
    for _ in range(300):
        parts = [bytearray(head), bytearray(payload)]
        part = draw.choice(parts)
        part[draw.randrange(len(part))] ^= 1 << draw.randrange(8)
        with pytest.raises(CorruptValue):
            decode("a", bytes(parts[0]), bytes(parts[1]))
    with pytest.raises(CorruptValue):
        decode("b", head, payload)


def test_where_a_store_is(tmp_path: Path) -> None:
    assert open_store("memory", tmp_path / "x") is None
    store = open_store("", tmp_path / "deep" / "x.sqlite")
    assert isinstance(store, SqliteStore)
    store.close()
    with pytest.raises(ConfigError, match="--store"):
        open_store("postgres://user:secret@host", tmp_path / "x")
    for end in ("notaport/0", "6379/0?nosuch=1", "6379/0?ssl_cert_reqs=some", "[::1"):
        with pytest.raises(ConfigError, match="redis://host:6379/0") as caught:
            open_store(f"rediss://:hush@host:{end}", tmp_path / "x")
        assert "hush" not in str(caught.value)
    for where in (
        "memory",
        "redis://127.0.0.1:6379/0",
        "compressed_store:open_store",
    ):  # only a file has this bound
        with pytest.raises(
            ConfigError, match=r"^--tenant-mib: 5 is not allowed; expected 0 with this --store"
        ):
            open_store(where, tmp_path / "x", max_tenant_bytes=5 << 20)


# -- sqlite -----------------------------------------------------------------------------------------------------------


def test_what_tenants_hold_is_told_beside_whoever_writes(tmp_path: Path) -> None:
    path = tmp_path / "a?b#c%20.sqlite"

    def held() -> list[tuple[str | None, int, int, float, float]]:
        with closing(SqliteStore(path, replace=False)) as outside:
            return outside.by_tenant()

    path.touch()
    with pytest.raises(StoreError, match="is empty"):
        held()
    store = SqliteStore(path, clock=lambda: 50.0)
    given = [
        answer(str(n), partition=tenant, created=float(n))
        for n, tenant in enumerate(("alice", "bob", "alice"))
    ]
    sizes = [sum(map(len, encode(one))) for one in given if store.put(one)]
    expected = [("alice", 2, sizes[0] + sizes[2], 0.0, 50.0), ("bob", 1, sizes[1], 1.0, 50.0)]
    with store.database.write():
        assert held() == expected
    store.close()
    path.chmod(0o400)
    assert held() == expected
    path.chmod(0o600)
    for head, named in (
        (b"\xff" * 100, None),
        (b" " * CHECKSUM + b'{"partition": "b\xff"}', "b\ufffd"),
    ):
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE responses SET head=? WHERE key='1'", (head,))
        assert [use[:2] for use in held()] == [("alice", 2), (named, 1)]


def test_what_cannot_be_read_is_deleted_or_may_be_anything(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a")
    since = store.news("").cursor
    for key in "ab":
        store.put(answer(key), since)
    with closing(sqlite3.connect(tmp_path / "a")) as db, db:
        db.execute("UPDATE responses SET payload=x'00' WHERE key='a'")
        db.execute(
            "INSERT INTO invalidations (selector) VALUES (?)", ('{"of": "a later version"}',)
        )
    with pytest.raises(CorruptValue):
        store.get("a")
    assert store.get("a") is None
    assert store.get("b") is not None
    assert store.news(since).selectors is None
    assert not store.put(answer("b"), since)
    assert store.put(answer("b"), store.news(since).cursor)
    store.close()


def test_a_locked_file_is_a_store_error(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a.sqlite", timeout_s=0.05)
    assert store.put(answer("a", payload=b"x" * 100_000))
    blocker = sqlite3.connect(tmp_path / "a.sqlite", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="locked"):
        store.put(answer("b"))
    assert store.get("a") is not None
    blocker.execute("ROLLBACK")
    assert store.put(answer("b"))
    store.close()
    with pytest.raises(StoreError):
        store.get("a")


def test_several_are_kept_at_once_and_what_one_lacks_costs_the_others_nothing(
    tmp_path: Path,
) -> None:
    store = SqliteStore(tmp_path / "a", max_bytes=100_000)
    early = store.news("").cursor
    store.invalidate(Selector(tag="old"))
    large = answer("large", payload=b"x" * 100_000)
    gone = answer("gone", tags=("old",))
    first = answer("twice", payload=b"1")
    second = answer("twice", payload=b"2")
    several = [answer("a"), gone, large, first, second, answer("b")]
    assert store.put_all([(one, early) for one in several]) == [
        True,
        False,
        False,
        True,
        True,
        True,
    ]
    assert store.put_all([(gone, store.news("").cursor), (answer("c"), "")]) == [True, True]
    found = {key: store.get(key) for key in ("a", "b", "c", "gone", "large", "twice")}
    assert [key for key, one in found.items() if one is None] == ["large"]
    assert found["twice"] == second
    assert store.usage()[0] == 5
    store.close()


def test_several_at_once_need_no_more_room_than_one_by_one(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a", max_bytes=1 << 20)
    several = [answer(str(number), payload=b"x" * 300_000) for number in range(40)]
    assert all(store.put_all([(one, "") for one in several]))
    assert store.usage()[0] <= 3
    store.close()
    assert (
        sum(file.stat().st_size for file in (tmp_path / "a").rglob("*") if file.is_file()) < 4 << 20
    )


# -- a cluster --------------------------------------------------------------------------------------------------------


def test_answers_lie_on_all_nodes_of_a_cluster(redis_cluster: RedisCluster) -> None:
    import redis

    with closing(SpreadStore(redis_cluster.url, timeout_s=60.0, name="spread")) as store:
        for number in range(120):
            tags = ("even",) if number % 2 == 0 else ("odd",)
            assert store.put(answer(str(number), tags=tags))
        for node in redis_cluster.nodes:
            with redis.Redis(port=node.port, socket_timeout=60.0) as client:
                assert len(list(client.scan_iter(match="{semkv:spread:*}:a:*"))) > 20
        assert store.usage()[0] == 120
        assert store.invalidate(Selector(tag="even"), dry_run=True) == 60
        assert store.invalidate(Selector(tag="even")) == 60
        assert store.usage()[0] == 60
        assert store.invalidate(Selector()) == 60
        assert store.usage() == (0, 0)


def fault_of(store: ResponseStore, key: str) -> str:
    """Why an answer could not be read; empty where it was, or is not there."""
    try:
        store.get(key)
    except StoreError as error:
        return error.reason
    return ""


def test_a_node_that_is_away_takes_its_own_answers_with_it(tmp_path: Path) -> None:
    with (
        RedisCluster(tmp_path, program=valkey()) as cluster,
        closing(SpreadStore(cluster.url, timeout_s=0.5)) as store,
    ):
        keys = [
            next(k for k in map(str, itertools.count()) if part_of(k) == p) for p in range(PARTS)
        ]
        for key in keys:
            assert store.put(answer(key))
        cursor = store.news("").cursor
        cluster.nodes[1].kill()
        reasons = {key: fault_of(store, key) for key in keys}
        lost = [key for key, reason in reasons.items() if reason]
        assert 3 <= len(lost) <= 8
        assert {reasons[key] for key in lost} == {AWAY}
        with pytest.raises(StoreError) as of_usage:
            store.usage()
        assert of_usage.value.reason == AWAY, "others are read on"
        news = store.news(cursor)
        assert news.selectors == (), "it may be back in a moment"
        store._heard = [0.0] * PARTS
        news = store.news(news.cursor)
        assert {key for key in keys if news.hit(answer(key))} == set(lost)
        with pytest.raises(StoreError):
            store.invalidate(Selector())
        left = [key for key in keys if key not in lost]
        assert all(store.get(key) is None for key in left), "as far as it can be done"
        cluster.nodes[1].start()
        wait_until(lambda: not any(fault_of(store, key) for key in lost))
        for key in lost:
            assert not store.put(answer(key), since=news.cursor), "unheard of in between"
        news = store.news(news.cursor)
        assert all(store.put(answer(key), since=news.cursor) for key in keys)


# -- redis ------------------------------------------------------------------------------------------------------------


def test_kill_9_of_a_durable_redis_loses_nothing_acknowledged(tmp_path: Path) -> None:
    acknowledged: list[str] = []
    with (
        RedisServer(tmp_path, durable=True) as server,
        closing(RedisStore(server.url, timeout_s=60.0)) as store,
    ):
        for turn in range(3):
            killer = threading.Timer(0.2, server.kill)
            killer.start()
            with suppress(StoreError):
                for number in itertools.count():
                    key = f"{turn} {number}"
                    assert store.put(answer(key, payload=key.encode() * 2000))
                    acknowledged.append(key)
            killer.join()
            server.start()
            found = {key: store.get(key) for key in acknowledged}
            assert {key: one and one.payload for key, one in found.items()} == {
                k: k.encode() * 2000 for k in found
            }
    assert acknowledged


def test_redis_keeps_time_itself_and_loses_damaged_answers(redis_server: RedisServer) -> None:
    import redis

    store = RedisStore(f"{redis_server.url}?decode_responses=True", name="own", timeout_s=60.0)
    client = redis.Redis(port=redis_server.port)
    store.put(answer("a", stale_until=time.time() + 10_000))
    store.put(answer("b"))
    assert 0 < client.ttl("{semkv:own:1}:a:a") <= 10_000
    assert client.ttl("{semkv:own:1}:a:b") == -1
    client.hset("{semkv:own:1}:a:a", "payload", b"torn")
    with pytest.raises(CorruptValue):
        store.get("a")
    assert store.get("a") is None
    assert store.usage()[0] == 1
    cursor = store.news("").cursor
    client.flushall()
    assert store.news(cursor).selectors is None
    assert store.usage() == (0, 0)
    store.close()


def test_an_invalidation_that_no_replica_has_is_counted(tmp_path: Path) -> None:
    """A fail-over to that replica would bring the answer back."""
    folders = [tmp_path / name for name in ("primary", "replica")]
    for folder in folders:
        folder.mkdir()
    with RedisServer(folders[0]) as primary:
        store = RedisStore(primary.url, timeout_s=1.0)
        cache = ResponseCache(store)
        store.put(answer("a"))
        cache.invalidate(Selector(key="a"))
        assert store.unreplicated == 0, "there is no replica"
        follow = ("--replicaof", "127.0.0.1", str(primary.port))
        with RedisServer(folders[1], *follow) as replica:
            wait_until(lambda: store._db.info("replication").get("slave0", {}).get("offset"))
            cache.invalidate(Selector(key="a"))
            assert store.unreplicated == 0
            replica.freeze()
            store.put(answer("a"))
            assert cache.invalidate(Selector(key="a")) == 1
            assert store.unreplicated == 1
            assert cache._tally.counts()["invalidated, not replicated"] == 1
            assert store.get("a") is None
        cache.close()
