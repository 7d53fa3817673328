"""Two gateways over one real Redis: what they share, and what happens when it fails under them."""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from gateway_helpers import NEAR, ONE, OTHER, SECRET, Pair, kind, numbers, wait_until
from redis_server import RedisServer
from semkv.stores.maintenance import purge
from semkv.tenants import named_tenant
from sharing_helpers import Again


class Two:
    """Two gateways, each with an upstream of its own, so that an answer tells where it was computed."""

    def __init__(self, folder: Path, server: RedisServer, **settings: Any) -> None:
        more = {
            "store": server.url,
            "store_timeout": 10.0,
            "trusted_proxies": ("127.0.0.0/8",),
            **settings,
        }
        self.server = server
        self.one, self.other = (Pair(folder / name, **more) for name in ("one", "other"))

    def __enter__(self) -> Two:
        self.one.__enter__()
        self.other.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.one.__exit__()
        self.other.__exit__()

    def told(self, text: str, **headers: str) -> tuple[str, str]:
        """What both say of a question, in a word."""
        return kind(self.one.post(text, headers=headers)), kind(
            self.other.post(text, headers=headers)
        )

    def in_memory(self, text: str, **headers: str) -> None:
        """Ask until both have the answer in memory."""
        self.told(text, **headers)
        assert self.told(text, **headers) == ("hit", "hit")

    def in_step(self) -> bool:
        """Whether what one computes now reaches the other."""
        return self.told(f"question {next(numbers)}") == ("miss", "hit")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def two(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with Two(tmp_path_factory.mktemp("two"), server) as running:
        yield running


def test_what_one_stored_the_other_serves(two: Two) -> None:
    first, second = two.one.post("shared"), two.other.post("shared")
    assert (kind(first), kind(second)) == ("miss", "hit")
    assert second.content == first.content
    streamed = two.other.post("shared", stream=True)
    assert kind(streamed) == "hit"
    assert streamed.text.endswith("[DONE]\n\n")
    assert two.other.upstream.total == 0


def test_operators_and_clients_of_one_reach_what_the_other_served(two: Two) -> None:
    two.one.post("seen from both sides")
    found = two.other.admin("entries?text=both sides").json()["entries"]
    assert [entry["prompt"] for entry in found] == ["seen from both sides"]
    hit = two.one.post("seen from both sides").headers["x-semkv-hit"]
    url = f"{two.other.url}/v1/semkv/feedback"
    assert httpx.post(url, json={"id": hit}).json()["removed"] == 1
    assert two.other.admin("entries?text=both sides").json()["entries"] == []


def test_an_invalidation_reaches_the_others_memory(two: Two) -> None:
    labelled, stranger = {"X-Semkv-Tags": "old"}, {"X-Semkv-Tenant": "another"}
    two.in_memory("news", **labelled)
    two.in_memory("news", **stranger)
    for dry_run in (True, False):
        assert two.told("news", **labelled) == ("hit", "hit")
        said = two.one.admin("invalidate", {"tag": "old", "dry_run": dry_run}).json()
        assert said == {"count": 1, "dry_run": dry_run}
    wait_until(lambda: kind(two.other.post("news", headers=labelled)) == "miss")
    assert kind(two.one.post("news", headers=labelled)) == "hit"
    assert two.told("news", **stranger) == ("hit", "hit")


def test_a_key_that_is_refused_at_one_reads_no_more_at_the_other(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semkv_gateway.tenancy._GOOD_S", 0.2)
    key = {"Authorization": "Bearer revoked"}
    two.in_memory("before", **key)
    monkeypatch.setattr(two.one.upstream, "script", {"revoked": {"status": "401"}})
    assert two.one.post("revoked", headers=key).status_code == 401
    wait_until(lambda: kind(two.other.post("before", headers=key)) == "miss")


def test_a_full_redis_is_still_read_and_invalidated(two: Two) -> None:
    """With ``maxmemory`` reached and the default policy, which refuses every write that takes memory."""
    labelled = {"X-Semkv-Tags": "aged"}
    two.in_memory("old news", **labelled)
    two.in_memory("from before")
    with redis.Redis(port=two.server.port) as client:
        client.config_set("maxmemory", 1)
        try:
            client.script_flush()
            with pytest.raises(redis.RedisError, match="maxmemory"):
                client.set("x", "y")
            assert [two.told("while full")[0] for _ in range(2)] == ["miss", "hit"], "memory has it"
            assert two.told("old news", **labelled) == ("hit", "hit")
            for dry_run in (True, False):
                assert (
                    two.one.admin("invalidate", {"tag": "aged", "dry_run": dry_run}).json()["count"]
                    == 1
                )
            wait_until(lambda: kind(two.other.post("old news", headers=labelled)) == "miss")
            for pair in (two.one, two.other):
                pair.app.gateway.cache.responses._memory._entries.clear()
            assert two.told("from before") == ("hit", "hit"), "from the store"
            assert events(two.one, "response fault:store put") > 0
            assert events(two.one, "response unwritten:full") > 0
            assert httpx.get(f"{two.one.url}/readyz", timeout=60).json()["store"] == "full"
            assert two.one.metric("semkv_store_writable") == 0
        finally:
            client.config_set("maxmemory", 0)
    wait_until(two.in_step)


class Traffic(Again):
    """Questions to both gateways, some new and some old, until it is told to stop; notes every status."""

    def __init__(self, two: Two) -> None:
        super().__init__(partial(self._ask, two.one), partial(self._ask, two.other))
        self.statuses: set[int] = set()
        self.asked = 0

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        assert self.statuses == {200}

    def _ask(self, pair: Pair, number: int) -> None:
        name = number if number % 2 else number % 10
        self.statuses.add(pair.post(f"traffic {name}").status_code)
        self.asked += 1

    def more(self, requests: int = 20) -> None:
        """Let so many more requests pass."""
        until = self.asked + requests
        wait_until(lambda: self.asked >= until)


def events(pair: Pair, name: str) -> float:
    """The caches' own counters whose name begins so."""
    lines = httpx.get(f"{pair.url}/metrics").text.splitlines()
    wanted = f'semkv_cache_events_total{{event="{name}'
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(wanted))


def says_of_the_store(pair: Pair) -> tuple[str, float, float]:
    """What ``/readyz``, ``/metrics`` and the dashboard's figures say."""
    ready = httpx.get(f"{pair.url}/readyz", timeout=60)
    assert ready.status_code == 200
    return (
        ready.json()["store"],
        pair.metric("semkv_store_up"),
        pair.admin("stats").json()["gauges"]["store_up"],
    )


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_while_the_store_is_away_memory_serves_and_all_say_so(tmp_path: Path, how: str) -> None:
    chosen = {"prefix": "kept", "dry_run": False}
    with (
        RedisServer(tmp_path, durable=True) as server,
        Two(tmp_path, server, store_timeout=0.5) as two,
    ):
        pair, responses = two.one, two.one.app.gateway.cache.responses
        two.in_memory("kept")
        old = pair.post("kept").content
        with Traffic(two) as traffic:
            traffic.more()
            assert says_of_the_store(pair) == ("up", 1.0, 1.0)
            (server.freeze if how == "frozen" else server.kill)()
            wait_until(lambda: says_of_the_store(pair) == ("away", 0.0, 0.0))
            responses._heard -= 60.0
            assert pair.post("kept").content == old
            assert kind(pair.post("new")) == "miss"
            responses._heard -= 600.0
            assert kind(pair.post("kept")) == "miss", "the bound on invalidations"
            assert pair.admin("invalidate", chosen).status_code == 503, "nothing is promised"
            (server.thaw if how == "frozen" else server.start)()
            wait_until(lambda: says_of_the_store(pair) == ("up", 1.0, 1.0))
            wait_until(two.in_step)
            traffic.more()
        assert min(events(gateway, "response fault:store") for gateway in (two.one, two.other)) > 0
        wait_until(lambda: pair.admin("invalidate", chosen).status_code == 200)
        # It is kept once its gateway has heard of the invalidation itself, and not begun before.
        wait_until(lambda: two.other.post("kept").content == two.one.post("kept").content != old)


# -- near-repeats of what another gateway was asked; each has a directory of its own ---------------------------------

DIGEST = hmac.digest(SECRET.encode(), b"entry log", "sha256").hex()[:16]


def rows_of(server: RedisServer) -> list[bytes]:
    """All rows of donors in a Redis."""
    with redis.Redis(port=server.port, socket_timeout=60.0) as client:
        keys = client.scan_iter(match=f"{{semkv:donors:2:{DIGEST}:*")
        return [fields[b"row"] for key in keys for _, fields in client.xrange(key)]


def entries_of(pair: Pair) -> list[tuple[str, str]]:
    """Ids and texts of the entries in a gateway's catalog."""
    with pair.semantic._catalog.database as db:
        return list(db.execute("SELECT entry_id, chunk_text FROM entries"))


def knows(pair: Pair, text: str) -> bool:
    return any(text in said for _, said in entries_of(pair))


def until_known(pair: Pair, text: str, headers: Any = None) -> None:
    """Ask in the same partition until near-repeats find it: an entry is in the catalog before it is in the index."""
    similar = pair.semantic._similar

    def is_known() -> bool:
        pair.post(f"Is it there yet, at try {next(numbers)}?", headers=headers)
        known = {*similar.layers["semantic_text"].items, *similar._unencoded.entries()}
        return any(text in said and name in known for name, said in entries_of(pair))

    wait_until(is_known)


@pytest.fixture(scope="module")
def near(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with Two(tmp_path_factory.mktemp("near"), server, **NEAR) as running:
        yield running


def test_a_near_repeat_hits_at_the_other_gateway_within_its_tenant(near: Two) -> None:
    ours, theirs = ({"X-Semkv-Tenant": name} for name in ("ours", "theirs"))
    first = near.one.post(ONE, headers=ours)
    assert kind(first) == "miss"
    wait_until(lambda: any(ONE.encode() in row for row in rows_of(near.server)))
    assert not knows(near.other, ONE), "nobody has asked for it"
    second = near.other.post(OTHER, headers=ours)
    assert second.headers["x-semkv"].startswith("hit tier=text:semantic")
    assert second.content == first.content
    assert near.other.upstream.total == 0
    assert near.other.post(OTHER, headers=theirs).headers["x-semkv"] == "miss"
    assert near.other.upstream.total == 1


def test_a_near_repeat_called_wrong_at_one_is_none_at_the_other(near: Two) -> None:
    tenant = {"X-Semkv-Tenant": "calls it wrong"}
    one, other = (text.replace("sourdough", "rye") for text in (ONE, OTHER))
    near.one.post(one, headers=tenant)
    until_known(near.other, one, tenant)
    hit = near.other.post(other, headers=tenant).headers["x-semkv-hit"]
    url = f"{near.one.url}/v1/semkv/feedback"
    said = httpx.post(url, json={"id": hit}, headers=tenant, timeout=60).json()
    assert said["refused_from_now_on"]
    wait_until(lambda: kind(near.other.post(other, headers=tenant)) == "miss")


@pytest.mark.parametrize("by", ["wrong", "tenant", "everything"])
def test_what_is_removed_at_one_goes_at_the_other(near: Two, by: str) -> None:
    text, tenant = (
        f"Which river flows through the capital of country {by}?",
        {"X-Semkv-Tenant": f"gone by {by}"},
    )
    near.one.post(text, headers=tenant)
    stays = {"X-Semkv-Tenant": "stays"}
    near.one.post("Who stays here?", headers=stays)
    until_known(near.other, by, tenant)
    until_known(near.other, "stays", stays)
    folder = near.one.app.gateway.settings.cache_dir
    if by == "wrong":
        (entry_id,) = (name for name, said in entries_of(near.one) if by in said)
        assert near.one.semantic.invalidate(entry_id=entry_id) == 1
    elif by == "tenant":
        purge(folder, tenants=[named_tenant(SECRET.encode(), f"gone by {by}")])
    else:
        purge(folder)
    wait_until(lambda: not knows(near.other, by))
    assert knows(near.other, "stays") == (by != "everything")
    wait_until(lambda: not any(f"country {by}".encode() in row for row in rows_of(near.server)))
    near.one.post(f"Where does it begin, by {by}?", headers=tenant)  # sharing goes on
    until_known(near.other, "begin, by", tenant)


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("failing")
    with (
        RedisServer(folder) as server,
        Two(folder, server, **{**NEAR, "store_timeout": 0.5}) as running,
    ):
        yield running


@pytest.mark.parametrize("how", ["frozen", "full", "flushed", "killed"])
def test_a_store_that_fails_leaves_all_entries_and_an_empty_one_nothing(
    failing: Two, how: str
) -> None:
    one, server = failing.one, failing.server
    faults = events(one, "semantic fault:shared entries")
    one.post(f"What came before it was {how}?")
    until_known(failing.other, f"before it was {how}")
    with Traffic(failing) as traffic, redis.Redis(port=server.port) as client:
        {
            "frozen": server.freeze,
            "full": lambda: client.config_set("maxmemory", 1),
            "flushed": client.flushall,
            "killed": server.kill,
        }[how]()
        traffic.more()
        one.post(f"What came while it was {how}?")
        if how != "flushed":
            wait_until(lambda: events(one, "semantic fault:shared entries") > faults)
        if how == "full":
            client.config_set("maxmemory", 0)
        elif how != "flushed":
            (server.thaw if how == "frozen" else server.start)()
        traffic.more()
    if how in ("killed", "flushed"):  # it is empty, and with it the removals: everybody starts anew
        wait_until(
            lambda: not any(knows(pair, f"before it was {how}") for pair in (one, failing.other))
        )
        one.post(f"What came after it was {how}?")
        until_known(failing.other, f"after it was {how}")
    else:
        until_known(failing.other, f"while it was {how}")
        assert all(knows(pair, f"before it was {how}") for pair in (one, failing.other))
