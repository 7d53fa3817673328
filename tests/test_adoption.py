"""A lost index: the directory opens at once, its bounds hold, and its blocks come back as their headers are read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from block_helpers import files, flip_last, found, lose_index, open_store, right, save
from semkv.stores.blocks import BlockStore, Bounds


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Headers are read when this is set."""
    event, real = threading.Event(), BlockStore._adopt_some

    def wait(store: BlockStore, index: object) -> bool:
        event.wait()
        return real(store, index)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockStore, "_adopt_some", wait)
    yield event
    event.set()


def filled(root: Path, count: int = 4) -> None:
    """``count`` files of two blocks, and no index."""
    store = open_store(root)
    for i in range(count):
        save(store, 2 * i, 2)
    store.close()
    lose_index(root)


@pytest.fixture(autouse=True)
def four_files(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    filled(tmp_path)


def test_what_was_not_read_yet_is_a_miss_and_its_bytes_count(tmp_path: Path, gate: threading.Event) -> None:
    size = sum(f.stat().st_size for f in files(tmp_path))
    store = open_store(tmp_path, Bounds(max_bytes=size))
    assert right(store, 0, 8) == 0
    assert store.totals() == (4, 0, size)
    assert save(store, 100, 2)  # an unread one went for it
    assert sum(f.stat().st_size for f in files(tmp_path)) <= size
    gate.set()
    store.adopt()
    assert right(store, 0, 8) == 6
    assert found(store, 100, 2) == 2
    assert store.counters.get("corrupt", 0) == store.counters.get("missing", 0) == 0


def test_a_bound_on_blocks_waits_for_the_headers(tmp_path: Path) -> None:
    store = open_store(tmp_path, Bounds(max_bytes=0, max_blocks=8))
    save(store, 100, 2)
    assert store.totals()[:2] == (4, 8)
    assert right(store, 0, 8) == 6


def test_blocks_stored_meanwhile_are_kept_once(tmp_path: Path, gate: threading.Event) -> None:
    store = open_store(tmp_path)
    save(store, 0, 2)
    gate.set()
    store.adopt()
    assert right(store, 0, 8) == 8
    assert store.totals()[:2] == (4, 8)
    assert len(files(tmp_path)) == 4


def test_two_processes_may_adopt_what_one_began(tmp_path: Path, gate: threading.Event) -> None:
    one, two = open_store(tmp_path), open_store(tmp_path)  # the second finds an index, with unread files
    gate.set()
    threads = [threading.Thread(target=store.adopt) for store in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right(one, 0, 8) == right(two, 0, 8) == 8
    assert two.totals()[:2] == (4, 8)


def test_closed_before_the_end_the_rest_is_adopted_later(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semkv.stores.blocks._BATCH", 1)
    store = open_store(tmp_path)
    store._closing.set()  # the helper stops after the file it is at
    gate.set()
    store.close()
    store = open_store(tmp_path)
    store.adopt()
    assert right(store, 0, 8) == 8


def test_damage_is_counted_and_deleted(tmp_path: Path) -> None:
    head, body, swapped, cut = files(tmp_path)
    raw = head.read_bytes()
    swapped.write_bytes(raw)
    head.write_bytes(raw[:200] + bytes([raw[200] ^ 1]) + raw[201:])
    flip_last(body)
    cut.write_bytes(raw[:-1])
    store = open_store(tmp_path)
    store.adopt()
    assert store.counters["corrupt"] == 3  # a flipped byte of a row is noticed when it is read
    assert right(store, 2, 2) == 1
    assert store.counters["corrupt"] == 4
    assert found(store, 0, 8) == len(files(tmp_path)) == 0
