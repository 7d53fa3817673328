"""Two gateways over one real Redis: what they share, and what happens when it fails under them."""

from __future__ import annotations

import hmac
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from gateway_helpers import NEAR, ONE, OTHER, SECRET, Pair, wait_until
from redis_server import RedisServer
from semkv.server.tenancy import named_tenant
from semkv.stores.maintenance import purge
from semkv.stores.responses import Selector

PROXY = {"trusted_proxies": ("127.0.0.0/8",)}


class Settled(Pair):
    """A gateway whose answers are in the store when `post` returns, where that takes any: others find them later."""

    def post(self, text: Any, **more: Any) -> httpx.Response:
        answer = super().post(text, **more)
        while self.app.gateway.cache.responses.on_the_way(Selector()) and self._takes():
            time.sleep(0.001)
        return answer

    def _takes(self) -> bool:
        url = self.app.gateway.settings.store
        try:
            with redis.Redis.from_url(url, socket_timeout=0.5, socket_connect_timeout=0.5) as client:
                return bool(client.set("probe", "x", px=1))
        except redis.RedisError:
            return False


class Two:
    """Two gateways, each with an upstream of its own, so that an answer tells where it was computed."""

    def __init__(self, folder: Path, server: RedisServer, **settings: Any) -> None:
        more = {"store": server.url, "store_timeout": 10.0, **PROXY, **settings}
        self.server = server
        self.one, self.other = (Settled(folder / name, **more) for name in ("one", "other"))

    def __enter__(self) -> Two:
        self.one.__enter__()
        self.other.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.one.__exit__()
        self.other.__exit__()

    def told(self, text: str, **headers: str) -> tuple[str, str]:
        """What both say of a question, in a word."""
        one, other = (pair.post(text, headers=headers).headers["x-semkv"].split()[0] for pair in (self.one, self.other))
        return one, other

    def in_memory(self, text: str, **headers: str) -> None:
        """Ask until both have the answer in memory."""
        self.told(text, **headers)
        assert self.told(text, **headers) == ("hit", "hit")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    running = RedisServer(tmp_path_factory.mktemp("redis"))
    yield running
    running.kill()


@pytest.fixture(scope="module")
def two(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with Two(tmp_path_factory.mktemp("two"), server) as running:
        yield running


def key_of(pair: Pair, text: str) -> str:
    hits = pair.admin("hits").json()["hits"]
    return str(next(hit["key"] for hit in hits if hit["asked"][0]["text"] == text))


def partition_of(server: RedisServer, key: str) -> str:
    with redis.Redis(port=server.port) as client:
        head = client.hget("{semkv:answers:1}:a:" + key, "head")
    return str(json.loads(head[32:])["partition"])


class TestShared:
    def test_what_one_stored_the_other_serves(self, two: Two) -> None:
        first = two.one.post("shared")
        second = two.other.post("shared")
        assert first.headers["x-semkv"] == "miss"
        assert second.headers["x-semkv"].startswith("hit")
        assert second.content == first.content
        streamed = two.other.post("shared", stream=True)
        assert streamed.headers["x-semkv"].startswith("hit")
        assert streamed.text.endswith("[DONE]\n\n")
        assert two.other.upstream.total == 0

    @pytest.mark.parametrize("by", ["key", "tag", "model", "partition", "prefix"])
    def test_an_invalidation_reaches_the_others_memory(self, two: Two, by: str) -> None:
        text, spared = f"gone by {by}", f"spared by {by}"
        headers = {"X-Semkv-Tenant": f"tenant {by}", "X-Semkv-Tags": f"tag:{by}"}
        two.in_memory(spared, **{"X-Semkv-Tenant": f"another than {by}"})
        for pair in (two.one, two.other, two.one, two.other):
            pair.post(text, model=f"model {by}", headers=headers).raise_for_status()
        key = key_of(two.one, text)
        values = {
            "key": key,
            "tag": f"tag:{by}",
            "model": f"model {by}",
            "partition": partition_of(two.server, key),
            "prefix": "gone by " + by[:2],
        }
        memory = two.other.app.gateway.cache.responses.peek
        assert memory(key) is not None
        assert two.one.admin("invalidate", {by: values[by]}).json() == {"count": 1, "dry_run": True}
        assert memory(key) is not None
        assert two.one.admin("invalidate", {by: values[by], "dry_run": False}).json()["count"] == 1
        wait_until(lambda: memory(key) is None)
        for pair in (two.other, two.one):
            answer = pair.post(text, model=f"model {by}", headers=headers)
            assert answer.headers["x-semkv"].split()[0] == ("miss" if pair is two.other else "hit")
        assert two.told(spared, **{"X-Semkv-Tenant": f"another than {by}"}) == ("hit", "hit")


class Traffic:
    """Questions to both gateways, some new and some old, until it is told to stop; notes every status."""

    def __init__(self, two: Two) -> None:
        self.two, self.statuses, self.asked = two, set(), 0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(pair,)) for pair in (two.one, two.other)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, pair: Pair) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            self.statuses.add(pair.post(f"traffic {number if number % 2 else number % 10}").status_code)
            self.asked += 1

    def more(self, requests: int = 20) -> None:
        """Let so many more requests pass."""
        until = self.asked + requests
        wait_until(lambda: self.asked >= until)


def recovered(two: Two, name: str) -> bool:
    """Whether the gateways share answers again."""
    recovered.number += 1  # type: ignore[attr-defined]
    return two.told(f"{name} {recovered.number}") == ("miss", "hit")  # type: ignore[attr-defined]


recovered.number = 0  # type: ignore[attr-defined]


class TestFaults:
    @pytest.mark.parametrize("durable", [True, False])
    def test_killed_and_started_again_under_traffic(self, tmp_path: Path, durable: bool) -> None:
        server = RedisServer(tmp_path, durable=durable)
        try:
            with Two(tmp_path, server) as two:
                two.in_memory("from before")
                faults = [pair.metric("semkv_cache_events_total") for pair in (two.one, two.other)]
                with Traffic(two) as traffic:
                    traffic.more()
                    server.kill()
                    traffic.more(60)
                    assert two.told("from before") == ("hit", "hit"), "memory serves"
                    refused = two.one.admin("invalidate", {"prefix": "from", "dry_run": False})
                    assert refused.status_code == 503, "nothing is promised"
                    server.start()
                    wait_until(lambda: recovered(two, "after the kill"))
                    traffic.more()
                assert traffic.statuses == {200}
                for pair, before in zip((two.one, two.other), faults, strict=True):
                    assert events(pair, "response fault:store") > 0
                    assert pair.metric("semkv_cache_events_total") > before
                wait_until(lambda: two.told("still in step")[1] == "hit")
                two.one.admin("invalidate", {"prefix": "still", "dry_run": False}).raise_for_status()
                wait_until(lambda: two.other.post("still in step").headers["x-semkv"] == "miss")
        finally:
            server.kill()

    def test_an_answer_is_not_served_again_after_an_invalidation_that_failed_at_first(self, tmp_path: Path) -> None:
        server = RedisServer(tmp_path, durable=True)
        try:
            with Two(tmp_path, server) as two:
                two.in_memory("to go")
                old = two.one.post("to go").content
                server.kill()
                assert two.one.admin("invalidate", {"prefix": "to go", "dry_run": False}).status_code == 503
                server.start()
                wait_until(
                    lambda: two.one.admin("invalidate", {"prefix": "to go", "dry_run": False}).json().get("count") == 1
                )
                assert two.one.post("to go").headers["x-semkv"] == "miss"
                # It is kept once its gateway has heard of the invalidation itself, and not begun before.
                wait_until(lambda: two.other.post("to go").content == two.one.post("to go").content != old)
        finally:
            server.kill()


class TestFull:
    """Redis with ``maxmemory`` reached and its default policy, which refuses every write that takes memory."""

    @pytest.fixture
    def full(self, tmp_path: Path) -> Iterator[tuple[Two, Any]]:
        server = RedisServer(tmp_path)
        try:
            with Two(tmp_path, server) as two, redis.Redis(port=server.port) as client:
                yield two, client
        finally:
            server.kill()

    @pytest.mark.parametrize("by", ["prefix", "tag"])
    def test_answers_go_on_and_invalidation_works(self, full: tuple[Two, Any], by: str) -> None:
        two, client = full
        labelled = {"X-Semkv-Tags": "old"}
        two.in_memory("old news", **labelled)
        two.in_memory("spared")
        client.config_set("maxmemory", 1)
        client.script_flush()
        with pytest.raises(Exception, match="maxmemory"):
            client.set("x", "y")
        assert two.told("while full")[0] == "miss"
        assert two.told("while full")[0] == "hit", "memory has it"
        assert two.told("old news", **labelled) == ("hit", "hit")
        chosen = {"prefix": "old"} if by == "prefix" else {"tag": "old"}
        assert two.one.admin("invalidate", chosen).json() == {"count": 1, "dry_run": True}
        assert two.one.admin("invalidate", {**chosen, "dry_run": False}).json() == {"count": 1, "dry_run": False}
        wait_until(lambda: two.other.post("old news", headers=labelled).headers["x-semkv"] == "miss")
        assert two.told("spared") == ("hit", "hit")
        assert events(two.one, "response fault:store put") > 0
        client.config_set("maxmemory", 0)
        wait_until(lambda: recovered(two, "with room again"))


def events(pair: Pair, name: str) -> float:
    """The caches' own counters whose name begins so."""
    lines = httpx.get(f"{pair.url}/metrics").text.splitlines()
    wanted = f'semkv_cache_events_total{{event="{name}'
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(wanted))


class TestAway:
    @pytest.mark.parametrize("how", ["kill", "freeze"])
    def test_memory_serves_on_and_all_say_that_the_store_is_away(self, tmp_path: Path, how: str) -> None:
        server = RedisServer(tmp_path, durable=True)
        try:
            with Two(tmp_path, server, store_timeout=0.5) as two:
                pair = two.one
                two.in_memory("kept")
                kept = pair.post("kept").content
                assert says_of_the_store(pair) == ("up", 1.0, 1.0)
                getattr(server, how)()
                wait_until(lambda: says_of_the_store(pair) == ("away", 0.0, 0.0))
                pair.app.gateway.cache.responses._heard -= 60.0
                assert pair.post("kept").content == kept
                assert pair.post("new").headers["x-semkv"] == "miss"
                pair.app.gateway.cache.responses._heard -= 600.0
                assert pair.post("kept").headers["x-semkv"] == "miss", "the bound on invalidations"
                (server.start if how == "kill" else server.thaw)()
                wait_until(lambda: says_of_the_store(pair) == ("up", 1.0, 1.0))
                wait_until(lambda: recovered(two, f"after {how}"))
        finally:
            server.kill()


def says_of_the_store(pair: Pair) -> tuple[str, float, float]:
    """What ``/readyz``, ``/metrics`` and the dashboard's figures say."""
    ready = httpx.get(f"{pair.url}/readyz", timeout=60)
    assert ready.status_code == 200
    return ready.json()["store"], pair.metric("semkv_store_up"), pair.admin("stats").json()["gauges"]["store_up"]


DIGEST = hmac.digest(SECRET.encode(), b"entry log", "sha256").hex()[:16]
ENTRIES = f"{{semkv:log:{DIGEST}:1}}:entries"


def entries_of(pair: Pair) -> list[tuple[str, str]]:
    """Ids and texts of the entries in a gateway's catalog."""
    with pair.semantic._catalog.database as db:
        return list(db.execute("SELECT entry_id, chunk_text FROM entries"))


def knows(pair: Pair, text: str) -> bool:
    return any(text in said for _, said in entries_of(pair))


class TestDonors:
    """Near-repeats of what another gateway was asked; each gateway has a directory of its own."""

    @pytest.fixture(scope="class")
    def near(self, server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
        with Two(tmp_path_factory.mktemp("near"), server, **NEAR) as running:
            yield running

    def test_a_near_repeat_hits_at_the_other_gateway(self, near: Two) -> None:
        first = near.one.post(ONE)
        assert first.headers["x-semkv"] == "miss"
        wait_until(lambda: near.other.entries == 1)
        second = near.other.post(OTHER)
        assert second.headers["x-semkv"].startswith("hit tier=")
        assert "exact" not in second.headers["x-semkv"]
        assert second.content == first.content
        assert near.other.upstream.total == 0

    def test_tenants_stay_apart(self, near: Two) -> None:
        ours, theirs = ({"X-Semkv-Tenant": name} for name in ("ours", "theirs"))
        near.one.post("How tall is the highest mountain of Africa?", headers=ours)
        before = near.other.upstream.total
        self.known(near.other, "tall")
        asked = "How high is the tallest mountain of Africa?"
        assert near.other.post(asked, headers=theirs).headers["x-semkv"] == "miss"
        assert near.other.upstream.total == before + 1

    @pytest.mark.parametrize("by", ["wrong", "tenant", "everything"])
    def test_what_is_removed_at_one_goes_at_the_other(self, near: Two, by: str) -> None:
        text, tenant = f"Which river flows through the capital of country {by}?", {"X-Semkv-Tenant": f"gone by {by}"}
        near.one.post(text, headers=tenant)
        near.one.post("Who stays here?", headers={"X-Semkv-Tenant": "stays"})
        self.known(near.other, by)
        self.known(near.other, "stays")
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
        with redis.Redis(port=near.server.port) as client:
            wait_until(
                lambda: not any(f"country {by}".encode() in f.get(b"entry", b"") for _, f in client.xrange(ENTRIES))
            )
        near.one.post(f"Where does it begin, by {by}?", headers=tenant)  # sharing goes on
        self.known(near.other, "begin, by")

    @staticmethod
    def known(pair: Pair, text: str) -> None:
        wait_until(lambda: knows(pair, text))

    @pytest.mark.parametrize("how", ["killed", "frozen", "full", "flushed"])
    def test_a_store_that_fails_leaves_all_and_an_empty_one_nothing(self, tmp_path: Path, how: str) -> None:
        server = RedisServer(tmp_path)
        try:
            with Two(tmp_path, server, **{**NEAR, "store_timeout": 0.5}) as two:
                two.one.post(ONE)
                self.known(two.other, ONE)
                with Traffic(two) as traffic:
                    if how == "killed":
                        server.kill()
                    elif how == "frozen":
                        server.freeze()
                    else:
                        with redis.Redis(port=server.port) as client:
                            client.config_set("maxmemory", 1) if how == "full" else client.flushall()
                    traffic.more()
                    two.one.post("What came while it was away?")
                    if how != "flushed":
                        wait_until(lambda: events(two.one, "semantic fault:entry log") > 0)
                    if how == "killed":
                        server.start()
                    elif how == "frozen":
                        server.thaw()
                    elif how == "full":
                        with redis.Redis(port=server.port) as client:
                            client.config_set("maxmemory", 0)
                    traffic.more()
                assert traffic.statuses == {200}
                if how in ("killed", "flushed"):  # it is empty, and with it the removals: everybody starts anew
                    wait_until(lambda: not any(knows(pair, ONE) for pair in (two.one, two.other)))
                    two.one.post("What came after it was emptied?")
                    self.known(two.other, "after it was emptied")
                    return
                self.known(two.other, "while it was away")
                assert all(knows(pair, ONE) for pair in (two.one, two.other))
        finally:
            server.kill()
