"""The worker half on its own, over a paged cache of a few layers on the CPU: the path that a GPU takes."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semkv.connectors.kv_keys import rank_namespace
from semkv.connectors.kv_plan import CapturePlan, KVStep, LoadPlan, PrefetchPlan
from semkv.connectors.settings import KVSettings
from semkv.stores import host_pool
from semkv.stores.blocks import KVStore
from semkv.stores.bounds import Bounds
from semkv.stores.cachedir import purge_directory
from semkv.stores.extents import ExtentStore
from semkv.stores.host_memory import HostMemories

torch = pytest.importorskip("torch")
BLOCKS = 64


def caches() -> dict[str, Any]:
    """Layers of three layouts: permuted, two kernel blocks in one, and an odd number of bytes."""
    return {
        "a": torch.zeros(BLOCKS, 4, 2, 8, dtype=torch.bfloat16).permute(0, 2, 1, 3),
        "b": torch.zeros(2 * BLOCKS, 3, dtype=torch.float32),
        "c": torch.zeros(BLOCKS, 5, dtype=torch.uint8),
    }


def block_hash(i: int) -> bytes:
    return i.to_bytes(4, "big") * 8


def fill(cache: dict[str, Any], block: int, number: int) -> None:
    """What the engine computes for the block of this number."""
    for tensor in cache.values():
        ratio = len(tensor) // BLOCKS
        rows = tensor[block * ratio : (block + 1) * ratio]
        rows.copy_(torch.arange(rows.numel()).reshape(rows.shape) % 3 + number % 50)


Maker = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Maker]:
    from semkv.connectors.kv_transfer import PagedTransfer
    from semkv.connectors.kv_worker import KVWorker

    made: list[KVWorker] = []

    def worker(
        cache: dict[str, Any],
        *,
        staging_rows: int = 100,
        host_rows: int = 100,
        engine: str = "e",
        memories: HostMemories | None = None,
        **settings: Any,
    ) -> KVWorker:
        row = PagedTransfer(cache, BLOCKS, 16).layout.row_bytes
        transfer = PagedTransfer(cache, BLOCKS, 16, staging_bytes=8 * row * staging_rows)
        given = KVSettings(tmp_path, host_bytes=host_rows * row, break_even=False, **settings)
        extents = ExtentStore(tmp_path / "kv", "kv", Bounds(max_age_s=given.max_age_s), engine)
        memories = HostMemories() if memories is None else memories
        made.append(KVWorker(given, extents, transfer, engine=engine, rank=0, memories=memories))
        return made[-1]

    yield worker
    for one in made:
        if len(one._memories):
            one.close()


def capture(worker: Any, plans: list[tuple[list[int], list[int]]], step: int = 1) -> None:
    """Plans as (engine's blocks, numbers)."""
    captures = [CapturePlan(ids, [block_hash(n) for n in numbers], 0) for ids, numbers in plans]
    worker.capture(KVStep("ns", step, captures=captures))
    assert worker.flush(60)


def load(worker: Any, plans: list[tuple[list[int], list[int]]], step: int = 2) -> set[int]:
    """Load and return the blocks that failed."""
    loads = [LoadPlan(str(i), ids, [block_hash(n) for n in numbers]) for i, (ids, numbers) in enumerate(plans)]
    worker.load(KVStep("ns", step, loads=loads))
    return worker.take_failed_blocks()


def same(cache: dict[str, Any], block: int, number: int) -> bool:
    want = caches()
    fill(want, block, number)
    return all(
        torch.equal(tensor[block * r : (block + 1) * r], want[name][block * r : (block + 1) * r])
        for name, tensor in cache.items()
        for r in [len(tensor) // BLOCKS]
    )


@pytest.mark.parametrize("staging_rows", [1, 2, 5, 100])
@pytest.mark.parametrize("host", [True, False])
def test_a_steps_requests_travel_together_and_each_gets_its_own(make: Maker, staging_rows: int, host: bool) -> None:
    """Twelve requests of one to four blocks, to shuffled places, through staging that cuts them anywhere."""
    rng = random.Random(staging_rows)
    source, target = caches(), caches()
    one = make(source, staging_rows=staging_rows)
    places = rng.sample(range(BLOCKS), 30)
    requests: list[tuple[list[int], list[int]]] = []
    while len(places) > 4:
        count = rng.randint(1, 4)
        ids = [places.pop() for _ in range(count)]
        requests.append((ids, [100 + i for i in ids]))
        for i in ids:
            fill(source, i, 100 + i)
    capture(one, requests)
    if not host:
        one.pool.clear()
    calls: list[int] = []
    # The same rows through another engine's cache: same directory, own host memory where it is the disk's turn.
    two = one if host else make(target, staging_rows=staging_rows)
    if host:
        for tensor in source.values():
            tensor.zero_()
    where = source if host else target
    free = rng.sample(range(BLOCKS), 30)
    moved = [([free.pop() for _ in ids], numbers) for ids, numbers in requests]
    real = two.transfer.copy_in
    two.transfer.copy_in = lambda jobs, after=None: calls.append(len(jobs)) or real(jobs, after)
    assert load(two, moved) == set()
    assert calls == [len(requests)]
    for ids, numbers in moved:
        assert all(same(where, i, n) for i, n in zip(ids, numbers, strict=True))
    assert all(not where["b"][2 * i : 2 * i + 2].any() for i in free)  # and nobody else's blocks were written
    assert two.finished(KVStep()) == set()  # on the CPU a load is done when it was asked for


def test_one_request_without_its_file_fails_alone(make: Maker, tmp_path: Path) -> None:
    source = caches()
    worker = make(source)
    for i in range(6):
        fill(source, i, i)
    capture(worker, [([0, 1], [0, 1])])
    capture(worker, [([2, 3], [2, 3])])
    capture(worker, [([4, 5], [4, 5])])
    worker.pool.clear()
    middle = sorted((tmp_path / "kv").rglob("*.safetensors"), key=lambda p: p.stat().st_mtime_ns)[1]
    middle.unlink()
    failed = load(worker, [([10, 11], [0, 1]), ([12, 13], [2, 3]), ([14, 15], [4, 5])])
    assert failed == {12, 13}
    assert [same(source, 10 + i, i) for i in range(6)] == [True, True, False, False, True, True]
    fill(source, 20, 20)
    capture(worker, [([20], [20])])  # of the same epoch: what was computed may rest on the missing blocks
    assert worker.available("r", "ns", [block_hash(20)]) == 0


def test_what_an_engine_is_about_to_read_is_not_let_go_by_another(
    make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both call their request alike, and the second is through with it first."""
    source = caches()
    one, two = make(source), make(caches(), engine="f")
    fill(source, 0, 1)
    capture(one, [([0], [1])])
    one.pool.clear()
    gate, real = threading.Event(), one._fetch
    monkeypatch.setattr(one, "_fetch", lambda *args: (gate.wait(), real(*args)))
    monkeypatch.setattr(one.transfer, "asynchronous", True)
    assert one.available("r", "ns", [block_hash(1)]) is None  # found, and held until it has been read
    assert two.available("r", "ns", [block_hash(1)]) == 1
    small = KVStore.open(tmp_path / "kv", rank_namespace("ns", 0), one.transfer.layout, Bounds(max_blocks=1))
    row = np.zeros((1, one.transfer.layout.row_bytes), np.uint8)
    refused = small.save_rows([block_hash(2)], row) is None
    gate.set()
    assert refused
    one._fetches["r"].result()
    assert one.available("r", "ns", [block_hash(1)]) == 1
    assert small.save_rows([block_hash(2)], row) is not None


def test_more_than_host_memory_holds_is_loaded_all_the_same(make: Maker) -> None:
    source = caches()
    worker = make(source, host_rows=4)
    for first in range(0, 12, 4):
        for i in range(first, first + 4):
            fill(source, i, i)
        capture(worker, [(list(range(first, first + 4)), list(range(first, first + 4)))])
    worker.pool.clear()
    assert load(worker, [(list(range(20, 32)), list(range(12)))]) == set()
    assert all(same(source, 20 + i, i) for i in range(12))


def test_what_is_read_ahead_is_loaded_from_host_memory(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with several ranks, whose workers the scheduler cannot ask. A load waits for the reading under way."""
    source = caches()
    worker = make(source)
    for i in range(4):
        fill(source, i, i)
    capture(worker, [([0, 1], [0, 1]), ([2, 3], [2, 3])])
    worker.pool.clear()
    monkeypatch.setattr(worker.transfer, "asynchronous", True)
    gate, real, reads = threading.Event(), worker._fetch, []

    def fetch(request_id: str, *rest: Any) -> None:
        reads.append(request_id)
        gate.wait()
        real(request_id, *rest)

    monkeypatch.setattr(worker, "_fetch", fetch)
    plans = [PrefetchPlan(str(i), [block_hash(2 * i), block_hash(2 * i + 1)]) for i in range(2)]
    worker.load(KVStep("ns", 1, prefetches=plans))
    load(worker, [([10, 11], [0, 1])])
    gate.set()
    while not worker.finished(KVStep("ns", 2)):
        pass
    worker._prefetches["1"].result()
    load(worker, [([12, 13], [2, 3])])
    while worker._loads or worker._coming:
        worker.finished(KVStep("ns", 3))
    assert [same(source, 10 + i, i) for i in range(4)] == [True] * 4
    assert sorted(reads) == ["0", "1"]  # each once
    assert not worker.take_failed_blocks()


def test_nothing_is_served_beyond_its_age(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """From host memory as from the disk; what is read from the disk into host memory is not younger for that."""
    now = [2_000_000_000.0]
    monkeypatch.setattr(host_pool.time, "time", lambda: now[0])  # one clock for all modules
    source = caches()
    worker = make(source, max_age_s=100.0)
    for i in range(4):
        fill(source, i, i)
    capture(worker, [([0, 1], [0, 1])])
    hashes = [block_hash(0), block_hash(1)]
    now[0] += 60
    worker.pool.clear()
    assert worker.available("r", "ns", hashes) == 2  # from the disk
    worker.forget("r")
    assert worker.pool.ready(worker._keys("ns", hashes)) == 2
    now[0] += 41
    assert worker.available("s", "ns", hashes) == 0
    assert not worker.holds("ns", hashes[0])
    assert worker.available("s", "another model", hashes) == 0
    capture(worker, [([0, 1], [0, 1])])  # computed again
    assert worker.available("t", "ns", hashes) == 2


def test_a_purge_reaches_host_memory_and_what_is_on_its_way_to_the_disk(make: Maker, tmp_path: Path) -> None:
    """Purged by another process: one block is in host memory, one waits for the disk, one was promised already."""
    source = caches()
    worker = make(source)
    for i in range(3):
        fill(source, i, i)
    capture(worker, [([0], [0])])
    hashes = [block_hash(i) for i in range(3)]
    assert worker.available("r", "ns", hashes[:1]) == 1
    assert worker.holds("ns", hashes[0])
    gate = threading.Event()
    worker._writer.submit(gate.wait, 1)
    worker.capture(KVStep("ns", 1, captures=[CapturePlan([1], hashes[1:2], 0)]))
    command = [sys.executable, "-m", "semkv", "purge", "--cache-dir", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    gate.set()
    assert worker.flush(60)
    assert load(worker, [([10], [0])]) == {10}  # computed again
    assert not same(source, 10, 0)
    assert [worker.available("s", "ns", [h]) for h in hashes] == [0, 0, 0]
    assert not any(worker.holds("ns", h) for h in hashes)
    assert not list((tmp_path / "kv").rglob("*.safetensors"))
    captures = [CapturePlan([0, 1], hashes[:2], 0)]
    worker.capture(KVStep("ns", 3, epoch=1, captures=captures))  # the same prompts, asked again later
    assert worker.flush(60)
    worker.pool.clear()
    assert worker.available("t", "ns", hashes) == 2
    assert load(worker, [([20, 21], [0, 1])]) == set()
    assert [same(source, 20 + i, i) for i in range(2)] == [True, True]


def test_what_an_engine_takes_back_is_in_nobody_elses_host_memory(make: Maker) -> None:
    source = caches()
    one = make(source)
    two = make(source, engine="f", memories=one._memories)
    assert one.pool is two.pool
    fill(source, 0, 1)
    capture(one, [([0], [1])])
    assert one._store("ns").disown()
    assert two.available("r", "ns", [block_hash(1)]) == 0


@pytest.mark.parametrize("asked", ["before a promise", "by the load"])
def test_a_purge_is_seen_by_whoever_asks_first(make: Maker, tmp_path: Path, asked: str) -> None:
    source = caches()
    worker = make(source)
    fill(source, 0, 1)
    capture(worker, [([0], [1])])
    purge_directory(tmp_path)
    if asked == "by the load":  # as with several ranks: the scheduler asks the index alone
        assert load(worker, [([10], [1])]) == {10}
    else:
        assert worker.available("r", "ns", [block_hash(1)]) == 0


def test_host_memory_of_a_store_that_is_off_serves_and_takes_nothing(make: Maker, tmp_path: Path) -> None:
    """It would not hear of a purge."""
    source = caches()
    worker = make(source)
    fill(source, 0, 1)
    capture(worker, [([0], [1])])
    assert worker.available("r", "ns", [block_hash(1)]) == 1

    def broken(_: object) -> None:
        raise sqlite3.DatabaseError("malformed")

    worker._extents._index.ask(broken, None)
    assert not worker._extents.on
    assert worker.available("s", "ns", [block_hash(1)]) == 0
    assert not worker.holds("ns", block_hash(1))
    assert load(worker, [([10], [1])]) == {10}
    assert not same(source, 10, 1)
    held, dropped = len(worker.pool), worker.counters.totals().get("dropped", 0)
    worker.capture(KVStep("ns", 3, epoch=1, captures=[CapturePlan([0], [block_hash(2)], 0)]))
    assert worker.flush(60)
    assert len(worker.pool) == held
    assert worker.counters.totals()["dropped"] == dropped + 1


def test_host_memory_is_given_back(make: Maker) -> None:
    worker = make(caches())
    memories = worker._memories
    assert len(memories) == 1
    worker.close()
    assert len(memories) == 0
