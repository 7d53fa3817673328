"""A lost index: it is built of the headers of the block files, and the bounds hold."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from block_helpers import files, flip_last, found, lose_index, open_store, right, save
from semkv.stores.blocks import Bounds


@pytest.fixture(autouse=True)
def four_files(tmp_path: Path) -> None:
    """Four files of two blocks, and no index."""
    store = open_store(tmp_path)
    for i in range(4):
        save(store, 2 * i, 2)
    store.close()
    lose_index(tmp_path)


def test_all_blocks_are_found_and_their_bytes_count(tmp_path: Path) -> None:
    size = sum(f.stat().st_size for f in files(tmp_path))
    store = open_store(tmp_path, Bounds(max_bytes=size))
    assert store.totals() == (4, 8, size)
    assert right(store, 0, 8) == 8
    assert save(store, 100, 2)  # one of the others went for it
    assert sum(f.stat().st_size for f in files(tmp_path)) <= size
    assert right(store, 0, 8) == 6
    assert store.counters.get("corrupt", 0) == store.counters.get("missing", 0) == 0


def test_a_bound_on_blocks_holds(tmp_path: Path) -> None:
    store = open_store(tmp_path, Bounds(max_bytes=0, max_blocks=8))
    save(store, 100, 2)
    assert store.totals()[:2] == (4, 8)
    assert right(store, 0, 8) == 6


def test_who_opens_at_once_builds_one_index(tmp_path: Path) -> None:
    stores = []
    threads = [threading.Thread(target=lambda: stores.append(open_store(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [right(store, 0, 8) for store in stores] == [8] * 4
    assert {store.last_purge() for store in stores} == {stores[0].last_purge()}


def test_damage_is_counted_and_deleted(tmp_path: Path) -> None:
    head, body, swapped, cut = files(tmp_path)
    raw = head.read_bytes()
    swapped.write_bytes(raw)
    head.write_bytes(raw[:200] + bytes([raw[200] ^ 1]) + raw[201:])
    flip_last(body)
    cut.write_bytes(raw[:-1])
    store = open_store(tmp_path)
    assert store.counters["corrupt"] == 3  # a flipped byte of a row is noticed when it is read
    assert right(store, 2, 2) == 1
    assert store.counters["corrupt"] == 4
    assert found(store, 0, 8) == len(files(tmp_path)) == 0
