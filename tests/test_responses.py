"""The response tier: what is kept, for how long, and what happens when the store fails."""

from __future__ import annotations

import json
import sqlite3
import threading
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gateway_helpers import Held
from semkv.errors import ConfigError, StoreError
from semkv_gateway.response_cache import Lifetime, ResponseCache, parse_rule
from semkv_gateway.responses.opening import open_store
from semkv_gateway.responses.sqlite import SqliteStore
from semkv_gateway.responses.store import MemoryStore, Selector, SteadyClock
from semkv_gateway.routes import ROUTES


@dataclass(frozen=True)
class Asked:
    key: str = "a"
    partition: str = "tenant"
    model: str = "model"
    prompt: str = "What is the weather?"
    sampled: bool = False
    choices: int = 1

    def refusal(self, payload: bytes, status: int) -> str:
        return ROUTES["/v1/chat/completions"].refusal(payload, status, {"n": self.choices})


class Clock:
    def __init__(self, now: float = 1e9) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def payload(*reasons: Any, **fields: Any) -> bytes:
    choices = [
        {"index": i, "message": {"content": "x"}, "finish_reason": reason}
        for i, reason in enumerate(reasons)
    ]
    return json.dumps({"choices": choices, **fields}).encode()


GOOD = payload("stop")


# -- what is kept -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (GOOD, 200, ""),
        (payload("tool_calls"), 200, "empty"),
        (payload("stop", "stop"), 200, "not as many as asked"),
        (GOOD, 500, "status"),
        (payload("stop", "length"), 200, "unfinished"),
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
    cache = ResponseCache(None)
    assert cache.keep(Asked(), body, status=status) is not bool(why)
    assert (cache.peek("a") is None) is bool(why)
    assert cache.counts().get(f"refused:{why}" if why else "kept") == 1


def test_an_answer_comes_back_byte_for_byte(tmp_path: Path) -> None:
    body = payload("stop", "stop", usage={"total_tokens": 3}, system_fingerprint="é").replace(
        b": ", b" :  "
    )
    cache = ResponseCache(SqliteStore(tmp_path / "a"))
    assert cache.keep(Asked(choices=2), body, tags=("x",))
    cache.close()
    again = ResponseCache(SqliteStore(tmp_path / "a"))
    assert again.peek("a") is None
    found = again.lookup("a")
    assert found is not None
    assert (found.response.payload, found.response.tags) == (body, ("x",))
    assert again.peek("a") is not None
    assert again.lookup("b") is None
    assert [again.counts()[name] for name in ("hit:store", "hit:memory", "miss")] == [1, 1, 1]
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
        assert (found and found.stale) is seen
        assert found is None or found.age_s == pytest.approx(after)


@pytest.mark.parametrize("back", [0.0, 50.0, 1e9])
def test_a_clock_that_goes_back_lengthens_no_life(tmp_path: Path, back: float) -> None:
    wall, passed = Clock(), Clock()
    clock = SteadyClock(wall, passed)
    cache = ResponseCache(
        open_store("", tmp_path / "a", clock=clock), lifetime=Lifetime(100.0), clock=clock
    )
    cache.keep(Asked(), GOOD)
    wall.now, passed.now = 1e9 + 60.0 - back, 1e9 + 60.0
    assert cache.lookup("a") is not None
    assert cache.keep(Asked("b"), GOOD)
    wall.now, passed.now = 1e9 + 101.0 - back, 1e9 + 101.0
    assert cache.lookup("a") is None
    assert cache.peek("a") is None
    assert cache.lookup("b").age_s == pytest.approx(41.0)  # type: ignore[union-attr]
    cache.close()


def test_an_answer_from_the_future_is_not_served(tmp_path: Path) -> None:
    clocks = ours, theirs = Clock(), Clock(1e9 + 5.0)
    caches = here, there = [
        ResponseCache(
            SqliteStore(tmp_path / "a", clock=clock), lifetime=Lifetime(100.0), clock=clock
        )
        for clock in clocks
    ]
    there.keep(Asked(), GOOD)
    assert here.lookup("a").age_s == 0.0  # type: ignore[union-attr]
    theirs.now = ours.now + 3600.0
    there.keep(Asked("b"), GOOD)
    assert here.lookup("b") is None
    assert here.peek("b") is None
    assert here.keep(Asked("b"), GOOD), "it is replaced"
    assert here.lookup("b") is not None
    for cache in caches:
        cache.close()


def test_rules_decide_before_the_default() -> None:
    texts = (
        "tag:NEWS=5m,stale=60",
        "prompt:*[uw]eather*=10s",
        "model:llama*=1d,jitter=0.2",
        "prompt:*=7",
        "model:*=8",
    )
    cache = ResponseCache(
        None, lifetime=Lifetime(1.0), rules=[*map(parse_rule, texts)], clock=Clock()
    )

    def lives(key: str, *tags: str, **asked: str) -> tuple[float, float]:
        assert cache.keep(Asked(key, **{"model": "m", "prompt": "x", **asked}), GOOD, tags=tags)
        found = cache.peek(key)
        assert found is not None
        return found.response.expires - 1e9, found.response.stale_until - found.response.expires

    assert lives("a", "a", "news") == (300.0, 60.0)
    assert lives("b", prompt="The WEATHER?") == (10.0, 0.0)
    assert lives("c") == (7.0, 0.0)
    drawn = [lives(f"{number}", model="llama-3")[0] / 86_400 for number in range(200)]
    assert 0.8 <= min(drawn) < 0.85 < 0.95 < max(drawn) <= 1.0, "jitter takes off at most its share"
    default = ResponseCache(
        None, lifetime=Lifetime(1.0), rules=[parse_rule("model:llama*=1d")], clock=Clock()
    )
    assert default.keep(Asked(), GOOD)
    assert default.peek("a").response.expires == 1e9 + 1.0  # type: ignore[union-attr]
    assert parse_rule("prompt:a=b=inf")[0].pattern == "a=b"
    assert parse_rule("prompt:*=0")[1].ttl_s == 0
    assert parse_rule("model:/models/*=5")[0].fits("x", "/models/llama")


@pytest.mark.parametrize(
    "text",
    "|news=5|tag:=5|tag:x|tag:x=|tag:x=5w|tag:x=-5|tag:x=nan|tag:x=5,stale=x|tag:x=5,jitter=2|tag:x=5,bogus"
    "|user:x=5".split("|"),
)
def test_wrong_rules_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_rule(text)


# -- invalidation and faults --------------------------------------------------------------------------------------


def test_a_value_read_before_an_invalidation_does_not_enter_memory_after_it(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a")
    cache = ResponseCache(store)
    cache.keep(Asked("b"), GOOD)
    cache._memory.invalidate(Selector())
    with Held(store, "get", after=True) as held:
        reader = threading.Thread(target=cache.lookup, args=("b",))
        reader.start()
        held.waiting.wait()
        cache.invalidate(Selector(key="b"))
    reader.join()
    assert cache.peek("b") is None
    cache.close()


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
    cache = ResponseCache(store, poll_s=60.0, pause_s=60.0)
    store.broken, store.asked = True, 0
    for number in range(100):
        assert cache.lookup(str(number)) is None
        assert cache.keep(Asked(f"x{number}"), GOOD)  # memory has it
    assert store.asked == 1  # what cannot be read is not written to
    assert cache.peek("x5") is not None
    assert cache.counts()["fault:store get"] == 1
    store.broken, cache._pause_s = False, 0.0
    cache._quiet_until = dict.fromkeys(cache._quiet_until, 1.0)  # the pause is over
    assert cache.lookup("y") is None
    assert cache.keep(Asked("y"), GOOD)
    assert store.get("y") is not None
    cache.close()


def test_an_answer_that_is_computed_after_an_invalidation_elsewhere_is_kept() -> None:
    """Nothing is waited for: what finds no answer hears of the invalidations before it is computed."""
    store = MemoryStore()
    cache = ResponseCache(store, poll_s=600.0)
    begun_before = cache.begin()
    store.invalidate(Selector())  # by another gateway
    assert cache.lookup("a") is None
    assert not cache.keep(Asked("b"), GOOD, since=begun_before)
    assert cache.keep(Asked(), GOOD, since=cache.begin())
    assert cache.lookup("a") is not None
    cache.close()


def test_a_store_that_lost_its_log_while_it_could_not_be_read_refuses_nothing_new() -> None:
    store = Broken()
    cache = ResponseCache(store, poll_s=600.0, pause_s=600.0)
    since = cache.begin()
    store.broken = True
    assert cache.lookup("a") is None
    store.broken = False
    for number in range(1001):  # more than its log holds
        store.invalidate(Selector(key=f"x{number}"))
    assert cache.keep(Asked(), GOOD, since=since), "memory has it until the store is heard of again"
    assert cache.peek("a") is not None
    cache._quiet_until[False] = 1.0  # the pause is over
    cache._tend()
    assert cache.lookup("a") is None
    cache.close()


def test_what_a_full_store_does_not_take_is_counted_and_written_once_there_is_room(
    tmp_path: Path,
) -> None:
    store = SqliteStore(tmp_path / "a")
    cache = ResponseCache(store, poll_s=600.0, pause_s=0.0)
    since = cache.begin()
    assert cache.keep(Asked("before"), GOOD, since=since)
    assert (cache.store_state, cache.sizes()["store_writable"]) == ("up", 1)
    with store.database as db:
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count={pages}")  # SQLite then says what it says of a full disk
    large = payload("stop", padding="x" * 100_000)
    for number in range(40):
        assert cache.keep(Asked(f"x{number}"), large, since=since), "memory has it"
    assert cache.counts()["unwritten:full"] == 40
    sizes = cache.sizes()
    assert (cache.store_state, sizes["store_writable"], sizes["unwritten_entries"]) == (
        "full",
        0,
        40,
    )
    assert cache.store_up
    assert cache.lookup("before") is not None
    assert cache.lookup("x5") is not None
    cache.invalidate(Selector(key="x7"))  # needs no room
    other = SqliteStore(tmp_path / "a")
    cache._tend()
    assert cache.store_state == "full"
    with store.database as db:
        db.execute("PRAGMA max_page_count=1000000")
    newer = replace(cache.lookup("x3").response, created=cache.lookup("x3").response.created + 1)  # type: ignore[union-attr]
    assert other.put(newer), "of another gateway"
    cache._tend()
    assert (cache.store_state, cache.sizes()["unwritten_entries"]) == ("up", 0)
    assert [n for n in range(40) if other.get(f"x{n}") is None] == [7], "invalidated meanwhile"
    assert other.get("x3") == newer
    assert cache.counts()["written late"] == 38
    cache.close()
    other.close()


def test_one_answer_that_there_is_no_room_for_costs_those_beside_and_behind_it_nothing(
    tmp_path: Path,
) -> None:
    store = SqliteStore(tmp_path / "a")
    cache = ResponseCache(store, poll_s=600.0, pause_s=600.0)
    since = cache.begin()
    with store.database as db:
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count={pages + 10}")
    sizes = {"large": 300_000, "a": 1, "b": 1_000}
    prepared = [
        cache.prepared(Asked(key), payload("stop", padding="x" * size))
        for key, size in sizes.items()
    ]
    several = [(one, since) for one in prepared if one is not None]
    assert cache.keep_all(several) == [True] * 3, "memory has the large one"
    assert [store.get(key) is not None for key in sizes] == [False, True, True]
    assert cache.counts()["unwritten:full"] == 1
    assert cache.keep(Asked("next"), GOOD, since=since)
    assert store.get("next") is not None
    cache._bring()
    assert cache.store_state == "full"
    assert cache.keep(Asked("later"), GOOD, since=since)
    assert store.get("later") is not None, "what was tried again has not stopped it"
    cache.close()


def test_of_several_that_the_store_does_not_take_each_is_counted_and_brought_later(
    tmp_path: Path,
) -> None:
    store = SqliteStore(tmp_path / "a", timeout_s=0.05)
    cache = ResponseCache(store, poll_s=600.0, pause_s=0.0)
    since = cache.begin()
    prepared = [cache.prepared(Asked(key), GOOD) for key in "abc"]
    several = [(one, since) for one in prepared if one is not None]
    with closing(sqlite3.connect(tmp_path / "a", isolation_level=None)) as blocker:
        blocker.execute("BEGIN IMMEDIATE")
        assert cache.keep_all(several) == [True] * 3, "memory has them"
    assert cache.counts()["unwritten:busy"] == 3
    assert cache.sizes()["unwritten_entries"] == 3
    cache._tend()
    assert store.usage()[0] == 3
    assert cache.sizes()["unwritten_entries"] == 0
    cache.close()


def test_what_waits_for_the_store_reaches_it_at_the_end() -> None:
    store = Broken()
    cache = ResponseCache(store, poll_s=600.0, pause_s=0.0)
    store.broken = True
    assert cache.keep(Asked(), GOOD, since=cache.begin())
    assert cache.counts()["unwritten:failed"] == 1
    store.broken, store.close = False, lambda: None  # type: ignore[method-assign]
    cache.close()
    assert store.get("a") is not None


def test_what_was_begun_before_the_store_was_heard_of_does_not_reach_it() -> None:
    store = Broken()
    store.broken = True
    cache = ResponseCache(store, poll_s=60.0, pause_s=0.0)
    since = cache.begin()
    store.broken = False
    store.invalidate(
        Selector(key="a")
    )  # by another replica, and no cursor says whether before or after
    assert cache.keep(Asked(), GOOD, since=since)
    assert store.get("a") is None
    cache.follow()
    assert cache.keep(Asked(), GOOD, since=cache.begin())
    assert store.get("a") is not None
    cache.close()


def test_memory_is_not_served_where_the_stores_log_does_not_reach_back() -> None:
    store = MemoryStore()
    cache = ResponseCache(store, poll_s=60.0)
    cache.keep(Asked(), GOOD)
    for _ in range(1001):
        store.invalidate(Selector(key="another"))
    assert cache.peek("a") is not None
    store.invalidate(Selector(key="a"))
    cache.follow()
    assert cache.peek("a") is None
    cache.close()
