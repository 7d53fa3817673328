"""Caches of several directories over one real Redis or Valkey, single or a cluster: what they share of donors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import redis

from cache_helpers import LAYERS
from gateway_helpers import wait_until
from redis_server import RedisCluster, RedisServer, valkey
from semkv.errors import ConfigError
from semkv.keys import media_id
from semkv.stores.maintenance import purge
from semkv.tiers import sharing
from semkv.tiers.checking import pair_of
from semkv.tiers.sharing import Place, read_reached
from semkv.types import MediaSegment, Namespace, Request, ReuseReport, TextSegment
from semkv_gateway.responses.redis import connect
from semkv_gateway.responses.spread import PARTS
from sharing_helpers import Cache, Caches


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("servers")
    with ExitStack() as stack:
        single = stack.enter_context(RedisServer(folder))
        cluster = stack.enter_context(RedisCluster(folder, program=valkey()))
        yield {"single": single, "cluster": cluster}


@pytest.fixture(params=["single", "cluster"])
def caches(
    request: pytest.FixtureRequest, servers: dict[str, Any], tmp_path: Path
) -> Iterator[Caches]:
    with Caches(tmp_path, servers[request.param].url) as made:
        yield made


def test_a_partition_is_brought_when_it_is_asked_for_and_kept_current(caches: Caches) -> None:
    one, other = caches.one, caches.other
    for history in ("Be brief.", "Be long."):
        one.record("bread", history=history)
    assert other.finds("bread~0.95")
    assert not other.finds("bread~0.95", tenant="theirs")
    assert other.count("shared in") == 1, "nobody has asked for the other partition"
    one.record("salt")
    wait_until(lambda: other.finds("salt~0.95"))
    assert other.finds("bread~0.95", history="Be long.")
    assert not one.count("fault:shared entries") + other.count("fault:shared entries")


@pytest.mark.parametrize("by", ["entry", "tag", "tenant"])
def test_what_is_removed_goes_everywhere(caches: Caches, by: str) -> None:
    one, other = caches.one, caches.other
    entry_id = one.record("bread", tags=("food",))
    one.record("stays", tenant="theirs")
    assert other.finds("bread~0.95")
    assert other.finds("stays~0.95", tenant="theirs")
    chosen = {
        "entry": {"entry_id": entry_id},
        "tag": {"tag": "food"},
        "tenant": {"namespace": Namespace("ours", "model")},
    }
    assert one.cache.invalidate(**chosen[by]) == 1
    wait_until(lambda: not other.finds("bread~0.95"))
    wait_until(lambda: not any(b"of bread" in row for row in caches.rows()))
    assert other.finds("stays~0.95", tenant="theirs")
    assert any(b"of stays" in row for row in caches.rows())
    one.record("bread")
    wait_until(lambda: other.finds("bread~0.95"))


def test_a_row_that_was_removed_is_left_out_where_it_is_still_there(caches: Caches) -> None:
    """As where the gateway that removed it ended before it had deleted the row."""
    store = caches.store()
    for tag in ("food", "other"):
        caches.one.record(f"bread {tag}", tags=(tag,))
    left = {
        partition: [(row.data, row.since) for row in store._rows(partition)]
        for partition in store._partitions()
    }
    caches.one.cache.invalidate(tag="food")
    wait_until(lambda: len(caches.rows()) == 1)
    for partition, rows in left.items():
        for data, since in rows:
            store.add(partition, data, since)
        store.add(partition, b"of nobody", "")
        store.add(partition, rows[0][0], "another log 1-1")
    assert caches.other.finds("bread other~0.95")
    assert not caches.other.finds("bread food~0.95")
    assert caches.other.count("fault:shared entry") == 1
    store.close()


def test_a_pair_found_wrong_at_one_is_no_hit_at_the_other(caches: Caches) -> None:
    one, other = caches.one, caches.other
    one.record("bread")
    hit = one.look("bread~0.95")
    assert one.cache.report_wrong(hit.hit_id)
    wait_until(lambda: len(caches.rows()) == 2)
    assert not other.finds("bread~0.95")
    assert other.finds("bread~0.96")
    assert other.count("barred") == 1


def test_a_pair_that_a_gateway_without_the_donor_hears_of_is_no_hit_anywhere(
    caches: Caches,
) -> None:
    one, other = caches.one, caches.other
    entry_id = one.record("bread")
    hit = other.look("bread~0.95")
    with caches.cache("third") as third:
        third.cache.bar(pair_of(hit.request, entry_id), entry_id)
        for each in (one, other):
            wait_until(lambda each=each: not each.finds("bread~0.95"))
            assert each.finds("bread~0.96"), "the donor stays"
        with caches.cache("cold") as cold:
            assert not cold.finds("bread~0.95")
            assert cold.finds("bread~0.96")


def test_a_similar_image_finds_a_donor_of_the_other_with_its_bytes(caches: Caches) -> None:
    settings = {"embedding_layers": LAYERS, "embedding_hook": "cache_helpers:WrittenHook"}
    with caches.cache("seeing", **settings) as one, caches.cache("seeing too", **settings) as other:

        def look(cache: Cache, name: str) -> ReuseReport:
            data = f"bytes of {name}".encode()
            file = caches.folder / f"{media_id(data)}.bin"
            file.write_bytes(data)
            segments = (MediaSegment(media_id(data), file, name), TextSegment("What color?"))
            return cache.cache.try_reuse(Request("1", Namespace("ours", "model"), segments))

        one.cache.add_observation(look(one, "car"), "red")
        wait_until(lambda: one.count("shared out") == 1)
        assert not look(other, "tree").hit
        hit = look(other, "car~0.95")
        assert hit.provenance.startswith("embedding:")
        (image,) = (s for s in hit.plan.segments if isinstance(s, MediaSegment))
        assert image.source.read_bytes() == b"bytes of car"
        assert image.source.is_relative_to(caches.folder / "seeing too")
        store = caches.store()
        store.add(f"ours:image:{image.media_id}", b"a copy", "", most=1)
        store.add(f"ours:image:{image.media_id}", b"another", "", most=1)
        assert len(store.read(f"ours:image:{image.media_id}", "", "")) == 1
        store.sweep(bool, [f"ours:image:{image.media_id}"])
        store.close()
        one.cache.invalidate(namespace=Namespace("ours", "model"))
        purge(caches.folder / "seeing", tenants=["ours"])
        wait_until(lambda: not caches.rows())


def test_the_oldest_partitions_go_where_the_store_has_its_bytes(
    servers: dict[str, Any], tmp_path: Path
) -> None:
    with Caches(tmp_path, servers["cluster"].url) as caches:
        store = caches.store(max_bytes=40_000 * PARTS)
        names = map("tenant:{}".format, count())
        first, *others, name, other = islice((n for n in names if store.part_of(n) == 3), 20)
        for one in (first, *others, name):
            store.add(one, b"x" * 4000, "log 0-0")
        there = set(store._partitions())
        assert name in there
        assert 2 <= len(there) <= 10
        assert len(caches.rows()) == len(there)
        assert not store.read(first, "", "")
        about = store._about(name)[0]
        store._db.zadd(about, {name: store._db.zscore(about, name) - 90_000.0})  # a day and more
        store.add(other, b"x", "log 0-0")
        assert name not in set(store._partitions())
        assert not store.read(name, "", "")
        store.close()


def test_a_full_catalog_keeps_what_was_asked_for_last(
    servers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has dropped it reads again after a while."""
    with Caches(tmp_path, servers["single"].url) as caches:
        for number in range(6):
            caches.one.record(f"bread {number}", history=f"History {number}.")
        with caches.cache("small", max_entries=2) as small:
            for number in range(6):
                assert small.finds(f"bread {number}~0.95", history=f"History {number}.")
            assert small.cache.stats().entries <= 2
            assert small.finds("bread 5~0.95", history="History 5.")
            assert not small.finds("bread 0~0.95", history="History 0.")
            monkeypatch.setattr(sharing, "_AGAIN_S", 0.0)
            wait_until(lambda: small.finds("bread 0~0.95", history="History 0."))


def test_a_log_of_removals_that_has_lost_its_end_reaches_no_row(caches: Caches) -> None:
    """As after a fail-over to a replica that was behind, whose clock is, too."""
    one, other = caches.one, caches.other
    one.record("bread", tags=("food",))
    assert other.finds("bread~0.95")
    store = caches.store()
    for tag in ("food", "none"):
        one.cache.invalidate(tag=tag)
    part = store.parts - 1

    def has_reached(cache: Cache, place: Place) -> bool:
        reached = read_reached(cache.cache._catalog.read_from(), store.parts)
        return reached is not None and reached[part].removals == place

    wait_until(lambda: len(store.removals(part, Place()).rows) == 2)
    (first, _), (last, _) = store.removals(part, Place()).rows
    for each in (one, other):
        wait_until(lambda each=each: has_reached(each, last))
    store._db.xdel(f"{store._roots[part]}:removals", f"{last.at[0]}-{last.at[1]}")
    assert not store.removals(part, last).reach(last)
    assert store.removals(part, last).end == first
    assert store.removals(part, first).reach(first)
    for each in (one, other):  # they begin anew, and from the end that there is
        wait_until(lambda each=each: has_reached(each, first))
        assert not each.cache.stats().entries
    one.record("later")
    wait_until(lambda: other.finds("later~0.95"))
    store.close()


def test_a_node_that_fails_costs_its_own_partitions_for_a_while(
    servers: dict[str, Any], tmp_path: Path
) -> None:
    cluster = servers["cluster"]
    node = cluster.nodes[1]
    with Caches(tmp_path, cluster.url) as caches:
        histories = [f"History {number}." for number in range(12)]
        for history in histories:
            caches.one.record("bread", history=history)
        for name, fail, recover in (
            ("frozen", node.freeze, node.thaw),
            ("killed", node.kill, node.start),
        ):
            with caches.cache(name, limit_s=0.5) as third:
                wait_until(third.cache._sharing._followed.is_set)
                third.cache._sharing._store._db = connect(cluster.url, 0.5)
                fail()
                found = [third.finds("bread~0.95", history=history) for history in histories]
                assert third.count("fault:shared entries")
                assert not all(found)
                recover()
                for history in histories:
                    wait_until(lambda history=history: third.finds("bread~0.95", history=history))


def test_a_url_that_names_no_cluster_is_an_error() -> None:
    for end in ("host:7000/1", "host:notaport", "", "/0", "host:7000?nosuch=1"):
        with pytest.raises(ConfigError, match="redis\\+cluster://host:7000"):
            connect(f"redis+cluster://user:hush@{end}", 1.0)
    away = connect("rediss+cluster://user:hush@127.0.0.1:1,127.0.0.1:2/0", 1.0)
    with pytest.raises(redis.exceptions.RedisClusterException):
        away.get("x")
    away.close()
