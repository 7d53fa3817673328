"""The response tier: what is kept, for how long, and what happens when the store fails."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway_helpers import wait_until
from redis_server import RedisServer
from semkv.errors import ConfigError, StoreError
from semkv.server.routes import ROUTES
from semkv.stores.responses import MemoryStore, Selector, SteadyClock, open_store
from semkv.stores.responses.redis import RedisStore
from semkv.stores.responses.sqlite import SqliteStore
from semkv.tiers.response import Lifetime, ResponseCache, parse_rule


@dataclass(frozen=True)
class Asked:
    key: str = "a"
    partition: str = "tenant"
    model: str = "model"
    prompt: str = "What is the weather?"
    sampled: bool = False

    def refusal(self, payload: bytes, status: int) -> str:
        return ROUTES["/v1/chat/completions"].refusal(payload, status)


class Clock:
    def __init__(self, now: float = 1e9) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def payload(*reasons: Any, **fields: Any) -> bytes:
    choices = [{"index": i, "message": {"content": "x"}, "finish_reason": reason} for i, reason in enumerate(reasons)]
    return json.dumps({"choices": choices, **fields}).encode()


GOOD = payload("stop")


# -- what is kept -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (GOOD, 200, ""),
        (payload("tool_calls"), 200, ""),
        (GOOD, 500, "status"),
        (payload("stop", "length"), 200, "unfinished"),
        (payload("length"), 200, "unfinished"),
        (payload(None), 200, "unfinished"),
        (payload(["stop"]), 200, "unfinished"),
        (payload(), 200, "unfinished"),
        (payload("stop", error={"message": "x"}), 200, "error"),
        (b"[]", 200, "error"),
        (b'{"choices": {"finish_reason": "stop"}}', 200, "unfinished"),
        (b"", 200, "no JSON"),
        (b"[" * 100_000, 200, "no JSON"),
    ],
)
def test_only_complete_answers_are_kept(body: bytes, status: int, why: str) -> None:
    assert Asked().refusal(body, status) == why
    cache = ResponseCache(None)
    assert cache.keep(Asked(), body, status=status) is not bool(why)
    assert (cache.peek("a") is None) is bool(why)
    assert cache.counts().get(f"refused:{why}" if why else "kept") == 1


def test_an_answer_comes_back_byte_for_byte(tmp_path: Path) -> None:
    body = payload("stop", "tool_calls", usage={"total_tokens": 3}, system_fingerprint="é").replace(b": ", b" :  ")
    cache = ResponseCache(SqliteStore(tmp_path / "a"))
    assert cache.keep(Asked(), body, tags=("x",))
    cache.close()
    again = ResponseCache(SqliteStore(tmp_path / "a"))
    assert again.peek("a") is None
    found = again.lookup("a")
    assert found is not None
    assert found.response.payload == body
    assert found.response.tags == ("x",)
    assert again.peek("a") is not None
    assert again.lookup("b") is None
    counts = again.counts()
    assert (counts["hit:store"], counts["hit:memory"], counts["miss"]) == (1, 1, 1)
    assert (again.sizes()["response_entries"], again.sizes()["memory_entries"]) == (1, 1)
    again.close()


# -- how long -----------------------------------------------------------------------------------------------------


def test_time_to_live_is_absolute_and_then_stale_and_then_over() -> None:
    clock = Clock()
    cache = ResponseCache(None, lifetime=Lifetime(10.0, stale_s=5.0), clock=clock)
    cache.keep(Asked(), GOOD)
    for after, seen in ((0.0, False), (9.9, False), (10.0, True), (14.9, True), (15.0, None)):
        clock.now = 1e9 + after
        found = cache.lookup("a")
        assert (found.stale if found else None) is seen
        if found:
            assert found.age_s == pytest.approx(after)


def steady(wall: Clock, passed: Clock, file: Path) -> ResponseCache:
    """A gateway's cache, by the machine's two clocks."""
    clock = SteadyClock(wall, passed)
    return ResponseCache(open_store("", file, clock=clock), lifetime=Lifetime(100.0), clock=clock)


@pytest.mark.parametrize("back", [0.0, 50.0, 3600.0, 1e9])
def test_a_clock_that_goes_back_lengthens_no_life(tmp_path: Path, back: float) -> None:
    wall, passed = Clock(), Clock()
    cache = steady(wall, passed, tmp_path / "a")
    cache.keep(Asked(), GOOD)
    wall.now, passed.now = 1e9 + 60.0 - back, 1e9 + 60.0
    assert cache.lookup("a") is not None
    assert cache.keep(Asked("b"), GOOD)
    wall.now, passed.now = 1e9 + 101.0 - back, 1e9 + 101.0
    assert cache.lookup("a") is None
    assert cache.peek("a") is None
    assert cache.lookup("b").age_s == pytest.approx(41.0)  # type: ignore[union-attr]
    assert cache.keep(Asked("c"), GOOD)  # the latest time in the file
    cache.close()
    passed.now = 7.0  # the machine was started anew as well
    again = steady(wall, passed, tmp_path / "a")
    assert again.lookup("a") is None
    passed.now, wall.now = 7.0 + 60.0, wall.now + 60.0
    assert again.lookup("b") is None
    again.close()


def test_an_answer_from_the_future_is_not_served(tmp_path: Path) -> None:
    ours, theirs = Clock(), Clock(1e9 + 5.0)
    lifetime = Lifetime(100.0)
    here, there = (
        ResponseCache(SqliteStore(tmp_path / "a", clock=clock), lifetime=lifetime, clock=clock)
        for clock in (ours, theirs)
    )
    there.keep(Asked(), GOOD)
    assert here.lookup("a").age_s == 0.0  # type: ignore[union-attr]
    theirs.now = 1e9 + 3600.0
    there.keep(Asked("b"), GOOD)
    assert here.lookup("b") is None
    assert here.peek("b") is None
    assert here.keep(Asked("b"), GOOD), "it is replaced"
    assert here.lookup("b") is not None
    here.close()
    there.close()


def test_jitter_takes_off_at_most_its_share() -> None:
    cache = ResponseCache(None, lifetime=Lifetime(100.0, jitter=0.2), clock=Clock())
    lives = set()
    for number in range(200):
        cache.keep(Asked(str(number)), GOOD)
        found = cache.peek(str(number))
        assert found is not None
        lives.add(found.response.expires - 1e9)
    assert 80.0 <= min(lives) < 85.0
    assert 95.0 < max(lives) <= 100.0


def test_rules_decide_before_the_default() -> None:
    texts = ("tag:NEWS=5m,stale=60", "prompt:*[uw]eather*=10s", "model:llama*=1d", "prompt:*=7", "prompt:*=8")
    cases = {"news": (300.0, 60.0), "weather": (10.0, 0.0), "llama": (86400.0, 0.0), "": (7.0, 0.0)}
    cache = ResponseCache(None, lifetime=Lifetime(1.0), rules=[*map(parse_rule, texts)], clock=Clock())
    for word, lives in cases.items():
        model, prompt = ("llama-3" if word == "llama" else "m"), ("The WEATHER?" if word == "weather" else "x")
        asked = Asked(word, model=model, prompt=prompt)
        assert cache.keep(asked, GOOD, tags=("a", "news") if word == "news" else ())
        found = cache.peek(word)
        assert found is not None
        assert (found.response.expires - 1e9, found.response.stale_until - found.response.expires) == lives
    default = ResponseCache(None, lifetime=Lifetime(1.0), rules=[parse_rule("model:llama*=1d")], clock=Clock())
    assert default.keep(Asked(), GOOD)
    assert default.peek("a").response.expires == 1e9 + 1.0  # type: ignore[union-attr]
    assert parse_rule("model:a=5,jitter=0.1").lifetime == Lifetime(5.0, 0.0, 0.1)
    assert parse_rule("prompt:a=b=inf").pattern == "a=b"
    assert parse_rule("prompt:*=0").lifetime.ttl_s == 0
    assert parse_rule("model:/models/*=5").fits("x", "/models/llama")


@pytest.mark.parametrize(
    "text",
    "|news=5|tag:=5|tag:x|tag:x=|tag:x=5w|tag:x=-5|tag:x=nan|tag:x=5,stale=x|tag:x=5,jitter=2|tag:x=5,bogus"
    "|user:x=5".split("|"),
)
def test_wrong_rules_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_rule(text)


# -- memory -------------------------------------------------------------------------------------------------------


def test_memory_is_bounded_in_bytes_as_the_interpreter_counts_them() -> None:
    cache = ResponseCache(None, max_bytes=1 << 20)
    for number in range(3000):
        assert cache.keep(Asked(f"{number:064}", prompt="ü" * 50), payload("stop", x="y" * 300))
    sizes = cache.sizes()
    assert sizes["memory_bytes"] <= 1 << 20
    assert sizes["memory_entries"] + cache.counts()["evicted"] == 3000
    assert cache.peek(f"{2999:064}") is not None
    assert cache.peek(f"{0:064}") is None


# -- invalidation -------------------------------------------------------------------------------------------------


def test_every_replica_heeds_an_invalidation_within_the_poll(tmp_path: Path) -> None:
    caches = [ResponseCache(SqliteStore(tmp_path / "a"), poll_s=0.1) for _ in range(3)]
    caches[0].keep(Asked("a"), GOOD)
    caches[0].keep(Asked("b", partition="you"), GOOD)
    for cache in caches:
        assert cache.lookup("a") is not None
        assert cache.lookup("b") is not None
    since = caches[2].begin()
    assert caches[1].invalidate(Selector(partition="tenant"), dry_run=True) == 1
    assert caches[2].peek("a") is not None
    assert caches[1].invalidate(Selector(partition="tenant")) == 1
    assert caches[1].peek("a") is None
    wait_until(lambda: all(cache.peek("a") is None for cache in caches))
    assert all(cache.lookup("a") is None for cache in caches)
    assert all(cache.peek("b") is not None for cache in caches)
    assert not caches[2].keep(Asked("a"), GOOD, since=since)
    for cache in caches:
        cache.close()


def test_a_value_read_before_an_invalidation_does_not_enter_memory_after_it(tmp_path: Path) -> None:
    class Slow(SqliteStore):
        held = threading.Event()
        go = threading.Event()

        def get(self, key: str) -> Any:
            found = super().get(key)
            self.held.set()
            assert self.go.wait(120)
            return found

    cache = ResponseCache(Slow(tmp_path / "a"), max_bytes=1 << 20)
    cache.keep(Asked("b"), GOOD)
    cache._memory.invalidate(Selector())
    reader = threading.Thread(target=cache.lookup, args=("b",))
    reader.start()
    assert Slow.held.wait(120)
    cache.invalidate(Selector(key="b"))
    Slow.go.set()
    reader.join()
    assert cache.peek("b") is None
    cache.close()


# -- faults -------------------------------------------------------------------------------------------------------


class Broken(MemoryStore):
    """A store that fails when told to, and counts how often it was asked."""

    broken, asked = False, 0

    def get(self, key: str) -> Any:
        self._fail()
        return super().get(key)

    def put(self, response: Any, since: str = "") -> bool:
        self._fail()
        return super().put(response, since)

    def news(self, cursor: str) -> Any:
        self._fail()
        return super().news(cursor)

    def _fail(self) -> None:
        self.asked += 1
        if self.broken:
            raise StoreError("down")


def test_a_store_that_is_down_is_left_alone_counted_and_taken_up_again() -> None:
    store = Broken()
    cache = ResponseCache(store, poll_s=60.0, pause_s=3.0)
    store.broken, store.asked = True, 0
    for number in range(100):
        assert cache.lookup(str(number)) is None
        assert cache.keep(Asked(f"x{number}"), GOOD)  # memory has it
    assert store.asked == 2  # one read, one write
    assert cache.peek("x5") is not None
    assert cache.counts()["fault:store get"] == 1
    store.broken = False
    wait_until(lambda: cache.keep(Asked("y"), GOOD) and store.get("y") is not None)
    assert cache.lookup("none") is None
    cache.close()


def test_a_full_redis_is_still_read(tmp_path: Path) -> None:
    import redis

    server = RedisServer(tmp_path)
    cache = ResponseCache(RedisStore(server.url, timeout_s=2.0), max_bytes=2000, pause_s=0.05)
    client = redis.Redis(port=server.port)
    try:
        for number in range(20):
            assert cache.keep(Asked(str(number)), GOOD)
        client.config_set("maxmemory", 1)  # with Redis's default policy, which refuses writes
        for number in range(20):
            cache.keep(Asked(f"x{number}"), GOOD)
            assert cache.lookup(str(number)) is not None
        assert cache.counts()["fault:store put"] >= 1
        client.config_set("maxmemory", 0)
        time.sleep(0.1)
        assert cache.keep(Asked("y"), GOOD)
        assert RedisStore(server.url).get("y") is not None
    finally:
        cache.close()
        server.kill()


def test_memory_is_not_served_when_the_store_was_unheard_of_for_long() -> None:
    store = Broken()
    cache = ResponseCache(store, poll_s=0.05, unheard_s=2.0, pause_s=0.05)
    cache.keep(Asked(), GOOD)
    assert cache.peek("a") is not None
    store.broken = True
    wait_until(lambda: cache.peek("a") is None)
    store.invalidate(Selector(key="a"))  # by another replica, which reaches the store
    store.broken = False
    time.sleep(0.3)
    assert cache.peek("a") is None
    assert cache.lookup("a") is None
    cache.close()


def test_what_was_begun_before_the_store_was_heard_of_does_not_reach_it() -> None:
    store = Broken()
    store.broken = True
    cache = ResponseCache(store, poll_s=60.0, pause_s=0.0)
    since = cache.begin()
    store.broken = False
    store.invalidate(Selector(key="a"))  # by another replica, and no cursor says whether before or after
    assert cache.keep(Asked(), GOOD, since=since)
    assert store.get("a") is None
    cache.follow()
    assert cache.keep(Asked(), GOOD, since=cache.begin())
    assert store.get("a") is not None
    cache.close()


def test_invalidation_says_so_when_the_store_is_down(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a")
    cache = ResponseCache(store, poll_s=60.0)
    cache.keep(Asked(), GOOD)
    store.close()
    with pytest.raises(StoreError):
        cache.invalidate(Selector(key="a"))
    assert cache.lookup("a") is None
    cache.close()
