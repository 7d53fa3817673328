"""One host memory for KV blocks and fusion states: one bound, one line, and nobody's bytes but one's own."""

from __future__ import annotations

import gc
import logging
import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from semkv.errors import ConfigError
from semkv.stores import host_pool
from semkv.stores.bounds import Bounds
from semkv.stores.fusion import FusionState, FusionStore
from semkv.stores.host_memory import HostBuffer, HostMemories
from semkv.stores.host_pool import HostPool
from semkv.stores.host_states import HeldState, HostStates

ROW = 256


def buffer(nbytes: int) -> HostBuffer:
    return HostBuffer(np.zeros(nbytes, np.uint8))


def state(name: str, tokens: int = 20) -> FusionState:
    values = np.random.default_rng(list(name.encode())).standard_normal((tokens, 8), dtype=np.float32)
    return FusionState.from_array(name, values)


def content(held: HeldState | None) -> bytes | None:
    return None if held is None else b"".join(part.tobytes() for part in held.parts)


def put_block(pool: HostPool, name: bytes) -> None:
    taken, found = pool.reserve([name])
    if taken:
        pool.view(found[0])[:] = name[-1]
        pool.publish([name])
        pool.release([name])


# -- fusion states in rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 12, 20, 61])  # below, at and above the ends of rows
def test_a_state_comes_back_bit_by_bit(tokens: int) -> None:
    states, one = HostStates(HostPool(buffer(10 * ROW).memory, ROW), "ns"), state("a", tokens)
    states.put("a", one)
    held = states.get("a")
    assert held is not None
    assert (held.shape, held.dtype, held.nbytes) == (one.shape, one.dtype, len(one.data))
    assert content(held) == one.data.tobytes()
    again = pickle.loads(pickle.dumps(held))
    assert (again.shape, again.dtype, content(again)) == (one.shape, one.dtype, one.data.tobytes())
    assert HostStates(states.pool, "other model").get("a") is None


def test_what_does_not_fit_is_not_kept() -> None:
    pool = HostPool(buffer(3 * ROW).memory, ROW)
    HostStates(pool, "ns").put("a", state("a", 200))
    assert len(pool) == 0
    tiny = HostPool(buffer(100).memory, 4)  # rows without room for the head
    HostStates(tiny, "ns").put("a", state("a", 1))
    assert HostStates(tiny, "ns").get("a") is None


def test_a_state_that_lost_a_row_is_a_miss_and_can_be_put_again() -> None:
    pool = HostPool(buffer(4 * ROW).memory, ROW)
    states = HostStates(pool, "ns")
    states.put("a", state("a"))  # three rows
    put_block(pool, b"x")
    put_block(pool, b"y")  # one of the state's rows goes
    assert states.get("a") is None
    states.put("a", state("a"))
    assert content(states.get("a")) == state("a").data.tobytes()


def test_a_state_outlives_what_is_put_later_while_somebody_has_it() -> None:
    pool = HostPool(buffer(4 * ROW).memory, ROW)
    states = HostStates(pool, "ns")
    states.put("a", state("a"))
    held = states.get("a")
    for name in (b"v", b"w", b"x", b"y", b"z"):
        put_block(pool, name)
    assert content(held) == state("a").data.tobytes()
    assert content(states.get("a")) == state("a").data.tobytes()
    del held
    for name in (b"v", b"w", b"x", b"y", b"z"):
        put_block(pool, name)
    assert states.get("a") is None


def test_too_old_a_state_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(host_pool.time, "time", lambda: now[0])
    states = HostStates(HostPool(buffer(4 * ROW).memory, ROW), "ns")
    states.put("a", state("a"), ends=1010.0)
    assert states.get("a") is not None
    now[0] = 1010.0
    assert states.get("a") is None
    states.put("a", state("a"), ends=1020.0)
    assert states.get("a") is not None


def test_blocks_and_states_share_one_bound_and_one_line() -> None:
    """Random use by two models and both kinds: every value is its own, and never is there more than fits."""
    rng, pool = random.Random(5), HostPool(buffer(24 * ROW).memory, ROW)
    models = {name: HostStates(pool, name) for name in ("one", "two")}
    held: list[tuple[str, HeldState]] = []
    hits = {"state": 0, "block": 0}
    for _ in range(4000):
        name = rng.choice("abcdefgh")
        model = rng.choice(sorted(models))
        if rng.random() < 0.4:
            key = f"{model}{name}".encode()
            put_block(pool, key)
            if (loan := pool.lend([key])) is not None:
                hits["block"] += 1
                assert (loan.parts[0] == key[-1]).all()
            del loan
        elif (found := models[model].get(name)) is None:
            models[model].put(name, state(model + name, rng.choice([3, 20])))
        else:
            hits["state"] += 1
            held.append((model + name, found))
        for which, one in held:
            sizes = {n: state(which, n).data.tobytes() for n in (3, 20)}
            assert content(one) == sizes[one.shape[0]]
        if len(held) > 3:
            held.pop(0)
        assert len(pool) <= 24
    assert min(hits.values()) > 200


def test_a_state_read_from_the_disk_is_not_younger_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from semkv.connectors.ec import ECScheduler
    from semkv.connectors.host import SharedPool
    from semkv.connectors.settings import ECSettings

    now = [2_000_000_000.0]
    monkeypatch.setattr(host_pool.time, "time", lambda: now[0])  # one clock for all modules
    store = FusionStore.open(tmp_path / "fusion", "ns", Bounds(max_age_s=100.0))
    assert store.save(state("a"))
    memory = SharedPool(tmp_path, 1 << 20, HostMemories())
    ec = ECScheduler(ECSettings(tmp_path, max_age_s=100.0), store, "ns", memory)
    now[0] += 60
    assert content(ec._read("a")) == state("a").data.tobytes()
    store.purge()
    now[0] += 39
    assert content(ec._read("a")) == state("a").data.tobytes()  # from host memory alone
    now[0] += 2
    assert ec._read("a") is None
    memory.close()


# -- who shares what ------------------------------------------------------------------------------------------------


def test_a_memory_is_made_for_the_first_and_freed_after_the_last(tmp_path: Path) -> None:
    freed: list[int] = []

    def allocate(nbytes: int) -> HostBuffer:
        return HostBuffer(np.zeros(nbytes, np.uint8), lambda: freed.append(nbytes))

    memories = HostMemories()
    kv = memories.acquire(tmp_path / "cache", 1000, allocate, row_bytes=100)
    fusion = memories.acquire(tmp_path / "x" / ".." / "cache", 5000, allocate)
    assert fusion is kv
    assert len(kv.rows) == 10  # the first one's bound
    other = memories.acquire(tmp_path / "other", 2000, allocate, row_bytes=100)
    assert other is not kv
    memories.release(kv)
    assert not freed
    memories.release(fusion)
    assert freed == [1000]
    memories.release(other)
    assert freed == [1000, 2000]
    assert len(memories) == 0
    assert memories.acquire(tmp_path / "cache", 1 << 20, allocate).row_bytes == 1 << 18


def test_rows_of_another_size_are_another_pool(tmp_path: Path) -> None:
    memories = HostMemories()
    a, b = (memories.acquire(tmp_path, 1000, buffer, row_bytes=size) for size in (100, 200))
    assert a is not b
    assert memories.acquire(tmp_path, 1000, buffer) is a
    assert memories.acquire(tmp_path, 1000, buffer, row_bytes=200) is b


def test_a_shared_pool_is_taken_late_and_once(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from semkv.connectors.host import SharedPool

    memories = HostMemories()
    shared, none = SharedPool(tmp_path, 1 << 20, memories), SharedPool(tmp_path, 0, memories)
    assert len(memories) == 0
    pool = memories.acquire(tmp_path, 4096, buffer, row_bytes=ROW)
    assert shared.get() is shared.get() is pool
    assert none.get() is None
    memories.release(pool)
    assert len(memories) == 1
    shared.close()
    shared.close()
    assert (len(memories), shared.get()) == (0, None)


def test_memory_that_cannot_be_had_is_a_warning_for_states_and_an_error_for_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch")
    from semkv.connectors.host import SharedPool, allocate

    assert allocate(10_000).memory.ctypes.data % 4096 == 0
    with pytest.raises(ConfigError, match="host_bytes"):
        allocate(1 << 62)
    with caplog.at_level(logging.WARNING):
        shared = SharedPool(tmp_path, 1 << 62, HostMemories())
        assert shared.get() is shared.get() is None
    assert len(caplog.records) == 1


def test_a_loan_in_a_cycle_is_collected_without_a_lock() -> None:
    pool = HostPool(buffer(2 * ROW).memory, ROW)
    put_block(pool, b"a")
    cycle: list[object] = [pool.lend([b"a"])]
    cycle.append(cycle)
    with pool._lock:  # as where the collector runs inside the pool
        del cycle
        gc.collect()
    assert pool.reserve([b"b", b"c"])[0] == [0, 1]
