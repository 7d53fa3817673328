"""A lost index: the directory opens at once, its bounds hold, and its blocks come back as their headers are read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from semkv.stores import adoption, extents
from semkv.stores.blocks import KVStore
from semkv.stores.bounds import Bounds
from test_blocks import files, flip_last, hashes, rows, store


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Headers are read when this is set."""
    event = threading.Event()

    def wait(*args: object) -> object:
        event.wait()
        return adoption.adopt(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(extents, "adopt", wait)
    yield event
    event.set()


def lose_index(path: Path) -> None:
    for file in (path / "kv").glob("index.sqlite*"):
        file.unlink()


def filled(path: Path, count: int = 4) -> None:
    """``count`` extents of two blocks."""
    kv = store(path)
    for i in range(count):
        kv.save_rows(hashes(2, 2 * i), rows(2, seed=i))
    kv.close()
    lose_index(path)


def found(kv: KVStore, count: int = 4) -> list[int]:
    for i in range(count):
        assert np.array_equal(kv.read_rows(hashes(2, 2 * i)), rows(2, seed=i)[: kv.lookup(hashes(2, 2 * i))])
    return [kv.lookup(hashes(2, 2 * i)) for i in range(count)]


def test_what_was_not_read_yet_is_a_miss_and_its_bytes_count(tmp_path: Path, gate: threading.Event) -> None:
    filled(tmp_path)
    size = sum(f.stat().st_size for f in files(tmp_path))
    kv = store(tmp_path, bounds=Bounds(max_bytes=size))
    assert found(kv) == [0, 0, 0, 0]
    assert kv._extents.totals() == (4, 0, size)
    assert kv.save_rows(hashes(2, 100), rows(2)) is not None  # an unread one went for it
    assert sum(f.stat().st_size for f in files(tmp_path)) <= size
    gate.set()
    kv.adopt()
    assert sum(found(kv)) == 6
    assert kv.lookup(hashes(2, 100)) == 2
    assert kv.stats().counters.get("corrupt", 0) == kv.stats().counters.get("missing", 0) == 0


def test_a_bound_on_blocks_waits_for_the_headers(tmp_path: Path) -> None:
    filled(tmp_path)
    kv = store(tmp_path, bounds=Bounds(max_bytes=0, max_blocks=8))
    kv.save_rows(hashes(2, 100), rows(2))
    assert kv._extents.totals()[:2] == (4, 8)
    assert sum(found(kv)) == 6


def test_blocks_stored_meanwhile_are_kept_once(tmp_path: Path, gate: threading.Event) -> None:
    filled(tmp_path)
    kv = store(tmp_path)
    kv.save_rows(hashes(2), rows(2, seed=0))
    gate.set()
    kv.adopt()
    assert found(kv) == [2, 2, 2, 2]
    assert kv._extents.totals()[:2] == (4, 8)
    assert len(files(tmp_path)) == 4


def test_two_processes_may_adopt_what_one_began(tmp_path: Path, gate: threading.Event) -> None:
    filled(tmp_path)
    one, two = store(tmp_path), store(tmp_path)  # the second finds an index, with unread extents
    gate.set()
    threads = [threading.Thread(target=kv.adopt) for kv in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found(one) == found(two) == [2, 2, 2, 2]
    assert two._extents.totals()[:2] == (4, 8)


def test_closed_before_the_end_the_rest_is_adopted_later(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extents, "BATCH", 1)
    filled(tmp_path)
    kv = store(tmp_path)
    kv._extents._closing.set()  # the adopter stops after the extent it is at
    gate.set()
    kv.close()
    kv = store(tmp_path)
    kv.adopt()
    assert found(kv) == [2, 2, 2, 2]


def test_damage_is_counted_and_deleted(tmp_path: Path) -> None:
    filled(tmp_path, 5)
    head, body, swapped, cut = files(tmp_path)[:4]
    raw = head.read_bytes()
    head.write_bytes(raw[:200] + bytes([raw[200] ^ 1]) + raw[201:])
    flip_last(body)
    swapped.write_bytes(files(tmp_path)[4].read_bytes())
    cut.write_bytes(raw[:-1])
    kv = store(tmp_path)
    kv.adopt()
    assert kv.stats().counters["corrupt"] == 3  # a flipped byte of a row is noticed when it is read
    assert len(kv.read_rows(hashes(2, 2))) == 0
    assert kv.stats().counters["corrupt"] == 4
    assert sum(kv.lookup(hashes(2, 2 * i)) for i in range(5)) == 2
    assert len(files(tmp_path)) == 1
