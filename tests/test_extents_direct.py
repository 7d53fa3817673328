"""Large rows come past the page cache where that is possible: the same bytes, however they are read."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from semkv.connectors.host import allocate
from semkv.errors import CorruptValue
from semkv.stores import container
from semkv.stores.blocks import KVLayout, KVStore, LayerLayout
from semkv.stores.container import PAGE, ExtentFile
from semkv.stores.fusion import FusionState, FusionStore

pytest.importorskip("torch")


def layout(row_bytes: int) -> KVLayout:
    return KVLayout((LayerLayout("a", "uint8", (row_bytes,), (row_bytes,), row_bytes),), 16)


def hashes(n: int) -> list[bytes]:
    return [bytes([i]) * 32 for i in range(n)]


def saved(folder: Path, row_bytes: int, count: int = 5) -> tuple[KVStore, np.ndarray, Path]:
    store = KVStore.open(folder, "ns", layout(row_bytes))
    rows = np.random.default_rng(1).integers(0, 256, (count, row_bytes), dtype=np.uint8)
    assert store.save_rows(hashes(count), rows)
    (file,) = (folder / "extents").glob("??/*")
    return store, rows, file


def drop(file: Path) -> None:
    """From the page cache."""
    os.sync()
    fd = os.open(file, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each direct reading ended at."""
    calls: list[int] = []
    real = container._read_direct

    def counted(fd: int, out: memoryview, at: int, done: int) -> int:
        calls.append(real(fd, out, at, done))
        return calls[-1]

    monkeypatch.setattr(container, "_read_direct", counted)
    return calls


@pytest.mark.parametrize("row_bytes", [64 * PAGE, 64 * PAGE + 8, 1000])
@pytest.mark.parametrize("offset", [0, 16])
@pytest.mark.parametrize("cached", [True, False])
def test_the_same_bytes_from_cache_and_disk(
    tmp_path: Path, direct: list[int], row_bytes: int, offset: int, cached: bool
) -> None:
    store, rows, file = saved(tmp_path, row_bytes)
    memory = allocate(5 * row_bytes + offset).memory[offset:].reshape(5, row_bytes)
    if not cached:
        drop(file)
    assert np.array_equal(store.read_rows(hashes(5), memory), rows)
    assert all(done % PAGE == 0 for done in direct)
    if offset or 5 * row_bytes < container._PADDED_BYTES:
        assert not direct
    assert np.array_equal(store.read_rows(hashes(5)[:2], memory), rows[:2])
    assert not store.stats().counters.get("corrupt")


@pytest.mark.parametrize("tokens", [40, 600])
def test_a_fusion_state_of_any_size_comes_back(tmp_path: Path, tokens: int) -> None:
    store = FusionStore.open(tmp_path, "ns")
    state = FusionState.from_array("k", np.random.default_rng(2).standard_normal((tokens, 1001), dtype=np.float32))
    store.save(state)
    (file,) = (tmp_path / "extents").glob("??/*")
    for _ in range(2):
        drop(file)
        found = store.load("k")
        assert found is not None
        assert np.array_equal(found.data, state.data)


def test_rows_begin_at_a_page_and_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    _, rows, file = saved(tmp_path, 64 * PAGE)
    assert (file.stat().st_size - rows.nbytes) % PAGE == 0
    with safe_open(file, "np") as opened:
        assert np.array_equal(opened.get_tensor("blocks").reshape(rows.shape), rows)


def test_what_is_half_in_the_cache_is_whole(tmp_path: Path) -> None:
    store, rows, file = saved(tmp_path, 64 * PAGE)
    drop(file)
    with file.open("rb") as f:
        f.read(3 * 64 * PAGE + 1000)
    memory = allocate(rows.nbytes).memory.reshape(rows.shape)
    assert np.array_equal(store.read_rows(hashes(5), memory), rows)


def refuse(code: int) -> Callable[..., Any]:
    def fault(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fault


@pytest.mark.parametrize("what", ["no direct reading", "no telling of the cache", "neither"])
def test_file_systems_without_either_are_read_as_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    store, rows, file = saved(tmp_path, 64 * PAGE)
    drop(file)
    real = os.preadv

    def preadv(fd: int, buffers: Any, at: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(fd, buffers, at)

    if what != "no telling of the cache":
        monkeypatch.setattr(container.fcntl, "fcntl", refuse(errno.EINVAL))
    if what != "no direct reading":
        monkeypatch.setattr(container.os, "preadv", preadv)
    memory = allocate(rows.nbytes).memory.reshape(rows.shape)
    assert np.array_equal(store.read_rows(hashes(5), memory), rows)


def test_a_disk_that_fails_in_the_middle_of_it_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, rows, file = saved(tmp_path, 64 * PAGE)
    drop(file)
    real, calls = os.preadv, [0]

    def preadv(fd: int, buffers: Any, at: int, flags: int = 0) -> int:
        if flags:
            return 0
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(errno.EINVAL, "not at this place")
        return real(fd, [buffers[0][: 16 * PAGE]], at)

    monkeypatch.setattr(container.os, "preadv", preadv)
    memory = allocate(rows.nbytes).memory.reshape(rows.shape)
    assert np.array_equal(store.read_rows(hashes(5), memory), rows)
    assert calls[0] == 21  # pieces of 16 pages, one of them twice


def test_a_damaged_row_is_noticed_past_the_cache_too(tmp_path: Path) -> None:
    store, rows, file = saved(tmp_path, 64 * PAGE)
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    drop(file)
    with ExtentFile.open(file) as opened:
        memory = allocate(rows.nbytes).memory.reshape(rows.shape)
        os.truncate(file, len(raw) - 10)
        with pytest.raises(CorruptValue):
            opened.read_rows(0, memory)
    assert len(store.read_rows(hashes(5), memory)) == 0
    assert store.stats().counters["corrupt"] == 1
