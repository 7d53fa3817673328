"""The log of answers on their way to a store: nothing is lost, torn, or kept after an invalidation."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_helpers import Held, wait_until
from semkv.errors import StoreError
from semkv.stores.responses import Selector, StoredResponse, ahead
from semkv.stores.responses.ahead import AheadLog, records
from semkv.stores.responses.sqlite import SqliteStore
from semkv_gateway.response_cache import ResponseCache
from test_responses import GOOD, Asked, payload


class Gate:
    """A store that takes nothing until it is opened, or cannot be reached."""

    def __init__(self, *, is_open: bool = True, reached: bool = True) -> None:
        self.brought: list[str] = []
        self.reached, self._may = reached, threading.Event()
        if is_open:
            self._may.set()

    def __call__(self, response: StoredResponse, since: str) -> bool:
        self._may.wait(120)
        if self.reached:
            self.brought.append(response.key)
        return self.reached

    def open(self) -> None:
        self._may.set()


def answer(key: str, created: float = 1.0, content: bytes = GOOD) -> StoredResponse:
    return StoredResponse(key, "", "model", content, created)


@contextmanager
def opened(folder: Path, gate: Gate, **more: int) -> Iterator[AheadLog]:
    log = AheadLog(folder, gate, **more)
    try:
        yield log
    finally:
        gate.open()
        log.close()


def logs(folder: Path) -> list[Path]:
    return sorted(folder.glob(ahead.PATTERN))


@given(st.lists(st.tuples(st.text(), st.binary(max_size=60)), max_size=6), st.data())
def test_a_torn_or_damaged_log_gives_what_comes_before(given: list[tuple[str, bytes]], data: st.DataObject) -> None:
    written = [(answer(key, number, content), str(number)) for number, (key, content) in enumerate(given)]
    pieces = [ahead._record(*record) for record in written]
    whole = b"".join(pieces)
    assert list(records(whole)) == written
    if whole:
        at = data.draw(st.integers(0, len(whole) - 1))
        before = sum(len(b"".join(pieces[: n + 1])) <= at for n in range(len(pieces)))
        assert list(records(whole[:at])) == written[:before]
        flipped = bytearray(whole)
        flipped[at] ^= 1 << data.draw(st.integers(0, 7))
        assert list(records(bytes(flipped))) == written[:before]


def test_the_log_of_a_running_process_is_left_to_it(tmp_path: Path) -> None:
    busy, other = Gate(is_open=False), Gate()
    with opened(tmp_path, busy) as first:
        assert first.append(answer("a"), "1")
        held = logs(tmp_path)
        with opened(tmp_path, other):
            assert set(held) < set(logs(tmp_path))
        assert other.brought == []
        assert logs(tmp_path) == held
        busy.open()
        wait_until(lambda: busy.brought == ["a"])


def left_behind(folder: Path, *left: tuple[StoredResponse, str]) -> None:
    """What processes that were killed leave: answers, and the news that their stores had when they were asked for."""
    folder.mkdir(exist_ok=True)
    for number, record in enumerate(left):
        (folder / f"{number:016x}.log").write_bytes(ahead._record(*record))


@pytest.mark.parametrize("stuck", [True, False])
def test_what_a_store_does_not_take_by_the_end_is_left_for_the_next(tmp_path: Path, stuck: bool) -> None:
    gate = Gate(is_open=not stuck, reached=False)
    log = AheadLog(tmp_path, gate)
    for number in range(5):
        assert log.append(answer(str(number), number), "1")
    log.close(0.2)
    assert not log.append(answer("late"), "1")
    gate.open()
    wait_until(lambda: not log._thread.is_alive())
    for left in (1, 0):
        there = Gate(reached=not left)
        AheadLog(tmp_path, there).close()
        assert there.brought == [] if left else list("01234")
        assert len(logs(tmp_path)) == left


def test_what_is_late_gives_way_to_a_newer_answer(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a")
    cursor, now = store.news("").cursor, time.time()
    new, old = answer("a", now, payload("stop", new=True)), answer("a", now - 60)
    store.put(new)
    over = replace(answer("b", now - 60), expires=now - 1, stale_until=now - 1)
    left_behind(tmp_path, (old, cursor), (over, cursor))
    cache = ResponseCache(store, ahead=tmp_path)
    found = cache.lookup("a")
    assert found is not None
    assert found.response == new
    assert store.usage()[0] == 1
    cache.close()


def test_what_was_invalidated_since_or_was_on_its_way_to_another_store_is_not_kept(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a")
    store.invalidate(Selector(key="another"))
    cursor = store.news("").cursor
    left_behind(
        tmp_path, (answer("0", time.time()), "1700000000000-0"), *((answer(key, time.time()), cursor) for key in "12")
    )
    store.invalidate(Selector(key="1"))
    cache = ResponseCache(store, ahead=tmp_path)
    assert [cache.lookup(key) is None for key in "012"] == [True, True, False]
    assert len(logs(tmp_path)) == 1  # its own
    cache.close()


def test_what_is_no_log_is_left_alone(tmp_path: Path) -> None:
    names = [tmp_path / f"{number:016x}.log" for number in range(3)]
    os.mkfifo(names[0])
    names[1].mkdir()
    record = ahead._record(answer("a"), "1")
    (tmp_path / "elsewhere").write_bytes(record)
    names[2].symlink_to(tmp_path / "elsewhere")
    (tmp_path / "nginx.log").write_bytes(record)
    there, gate = sorted(tmp_path.iterdir()), Gate()
    AheadLog(tmp_path, gate).close()
    assert sorted(tmp_path.iterdir()) == there
    assert not gate.brought


def test_a_full_log_refuses_and_goes_on_when_the_store_does(tmp_path: Path) -> None:
    gate = Gate(is_open=False)
    with opened(tmp_path, gate, max_bytes=2000) as log:
        kept = [str(n) for n in range(20) if log.append(answer(str(n)), "1")]
        assert 1 < len(kept) < 20
        assert sum(file.stat().st_size for file in logs(tmp_path)) <= 2000
        gate.open()
        wait_until(lambda: gate.brought == kept)
        wait_until(lambda: log.append(answer("x"), "1"))
        wait_until(lambda: sum(file.stat().st_size for file in logs(tmp_path)) == 0)


def test_a_disk_that_is_full_costs_the_log_and_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path, Gate(is_open=False)) as log:
        assert log.append(answer("a"), "1")
        real = os.pwrite
        monkeypatch.setattr(os, "pwrite", lambda file, data, at: real(file, data[:10], at))
        assert not log.append(answer("b"), "1")
        monkeypatch.setattr(os, "pwrite", real)
        assert log.append(answer("c"), "1")
        (content,) = [file.read_bytes() for file in logs(tmp_path)]
        assert [response.key for response, _ in records(content)] == ["a", "c"]


def test_what_another_replica_invalidates_meanwhile_is_not_served(tmp_path: Path) -> None:
    store, other = SqliteStore(tmp_path / "a"), SqliteStore(tmp_path / "a")
    cache = ResponseCache(store, ahead=tmp_path / "ahead", poll_s=300.0, unheard_s=300.0)
    with Held(store, "put"):
        assert cache.try_keep(Asked(), GOOD, since=cache.begin())
        other.invalidate(Selector(model="model"))
        assert cache.peek("a") is not None  # not heard of yet
    wait_until(lambda: cache.peek("a") is None)
    assert store.get("a") is None
    cache.close()
    other.close()


def test_an_invalidation_counts_what_is_on_its_way_and_does_not_wait_for_it(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "a")
    cache = ResponseCache(store, ahead=tmp_path / "ahead")
    with Held(store, "put"):
        assert cache.try_keep(Asked(), GOOD, since=cache.begin())
        assert cache.invalidate(Selector(), dry_run=True) == 1
        assert cache.invalidate(Selector(tag="other")) == 0
        assert cache.invalidate(Selector()) == 1
        assert cache.peek("a") is None
    cache.close()
    assert SqliteStore(tmp_path / "a").get("a") is None


@pytest.mark.parametrize("fault", [StoreError("down"), KeyError("scripted")])
def test_a_store_that_is_down_or_broken_costs_no_answer_of_the_log(tmp_path: Path, fault: Exception) -> None:
    class Faulty(SqliteStore):
        down = True

        def put(self, response: StoredResponse, since: str = "") -> bool:
            if self.down:
                raise fault
            return super().put(response, since)

    store = Faulty(tmp_path / "a")
    cache = ResponseCache(store, ahead=tmp_path / "ahead", poll_s=60.0, pause_s=0.1)
    assert cache.try_keep(Asked(), GOOD, since=cache.begin())
    wait_until(lambda: cache.counts().get("fault:store put", 0) >= 1)
    assert cache.peek("a") is not None
    store.down = False
    assert cache.try_keep(Asked("b"), GOOD, since=cache.begin())
    wait_until(lambda: store.get("b") is not None)
    assert (store.get("a") is not None) == isinstance(fault, StoreError), "what broke the store is not tried again"
    cache.close()
