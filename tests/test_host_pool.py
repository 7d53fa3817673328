"""The host level: rows in use stay, the least recently used go, and nothing is read before it is there."""

from __future__ import annotations

import random

import numpy as np
import pytest

from semkv.stores import host_pool
from semkv.stores.host_policy import FOREVER
from semkv.stores.host_pool import HostPool, Run, runs


def keys(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def fill(pool: HostPool, names: list[bytes], ends: float = FOREVER) -> None:
    taken, found = pool.reserve(names)
    at = 0
    for run in found:
        for row in pool.view(run):
            row[:] = names[taken[at]][0]
            at += 1
    pool.publish((names[i] for i in taken), ends)
    pool.release(names[i] for i in taken)


def test_neighbours_become_runs() -> None:
    assert runs([]) == []
    assert runs([3, 4, 5, 9, 1, 2]) == [Run(3, 3), Run(9, 1), Run(1, 2)]


def test_what_is_reserved_is_not_read_before_it_is_published() -> None:
    pool = HostPool(np.zeros(45, np.uint8), 10)
    assert len(pool.rows) == 4
    names = keys("a", "b")
    taken, found = pool.reserve(names)
    assert (taken, found) == ([0, 1], [Run(0, 2)])
    assert pool.reserve(names) == ([], [])
    assert names[0] in pool
    assert (pool.ready(names), pool.pin(names)) == (0, [])
    pool.publish(names[:1])
    pool.release(names)
    assert pool.ready(names) == 1
    assert names[1] not in pool  # never filled


def test_least_recently_used_goes_and_what_is_in_use_stays() -> None:
    pool = HostPool(np.zeros(40, np.uint8), 10)
    fill(pool, keys("a", "b", "c", "d"))
    held = pool.pin(keys("b"))
    pool.release(keys(*"a")) if pool.pin(keys("a")) else None  # used now
    fill(pool, keys("e", "f"))
    assert [name for name in keys(*"abcdef") if name in pool] == keys("a", "b", "e", "f")
    assert (pool.view(held[0]) == ord("b")).all()
    assert len(pool.reserve(keys("v", "w", "x", "y", "z"))[0]) == 3  # b is in use
    assert pool.counters["host_evicted"] == 5
    pool.clear()
    assert len(pool) == 4


def test_random_use_keeps_every_row_its_own() -> None:
    rng, pool = random.Random(0), HostPool(np.zeros(80, np.uint8), 10)
    names = [bytes([n]) for n in range(65, 85)]
    held: list[list[bytes]] = []
    for _ in range(3000):
        some = rng.sample(names, rng.randint(1, 5))
        if rng.random() < 0.5:
            fill(pool, some)
        elif (found := pool.pin(some)) and len(held) < 3:
            held.append(some[: sum(run.count for run in found)])
        elif found:
            pool.release(some[: sum(run.count for run in found)])
        if held and rng.random() < 0.4:
            mine = held.pop(0)
            again = pool.pin(mine)
            assert b"".join(pool.view(run).tobytes() for run in again) == b"".join(name * 10 for name in mine)
            pool.release(mine)
            pool.release(mine)
        assert len(pool) <= 8


def test_what_is_too_old_is_not_read_and_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(host_pool.time, "time", lambda: now[0])
    pool = HostPool(np.zeros(40, np.uint8), 10)
    fill(pool, keys("a"))
    fill(pool, keys("b"), ends=1010.0)
    assert pool.ready(keys("b", "a")) == 2
    held = pool.lend(keys("b"))
    now[0] = 1011.0
    assert pool.ready(keys("a", "b")) == 1
    assert pool.lend(keys("b")) is None
    assert b"b" not in pool
    assert pool.reserve(keys("b"))[0] == []  # still in use by who got it in time
    del held
    fill(pool, keys("c", "d"), ends=1020.0)
    now[0] = 1021.0
    fill(pool, keys("e", "f"))  # c and d go before a, which was used longer ago; b was too old already
    assert pool.ready(keys("a", "e", "f")) == 3
    fill(pool, keys("b"))  # a new copy is as good as any
    assert pool.ready(keys("b")) == 1


def test_a_loan_ends_when_it_is_dropped() -> None:
    pool = HostPool(np.zeros(20, np.uint8), 10)
    fill(pool, keys("a", "b"))
    loan = pool.lend(keys("a", "b"))
    assert loan is not None
    assert [part.shape for part in loan.parts] == [(2, 10)]
    assert pool.lend(keys("a", "x")) is None
    assert pool.reserve(keys("c"))[0] == []
    del loan
    assert pool.reserve(keys("c"))[0] == [0]


def test_rows_of_one_value_come_and_go_together() -> None:
    pool = HostPool(np.zeros(40, np.uint8), 10)
    assert pool.reserve_all(keys("1", "2", "3", "4", "5")) is None
    assert len(pool) == 0
    fill(pool, keys("1", "2"))
    assert pool.reserve_all(keys("2", "3", "4")) is not None  # what is left of an older copy goes
    assert pool.ready(keys("2")) == 0
    assert pool.reserve_all(keys("2", "3", "4")) is None  # another thread fills it
    assert pool.ready(keys("1")) == 1
    pool.release(keys("2", "3", "4"))
    assert len(pool) == 1
