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

from block_helpers import LAYOUT, files, flip_last, keys, open_store
from semkv.stores import block_file
from semkv.stores.block_file import PAGE, BlockFile, room
from semkv.stores.blocks import BlockStore

COUNT = 5


def saved(root: Path, row_bytes: int) -> tuple[BlockStore, np.ndarray, Path]:
    store = open_store(root)
    rows = np.random.default_rng(1).integers(0, 256, (COUNT, row_bytes), dtype=np.uint8)
    assert store.write("ns", LAYOUT, keys(0, COUNT), list(rows))
    (file,) = files(root)
    return store, rows, file


def read(store: BlockStore, memory: np.ndarray) -> list[bool]:
    refs = store.find("ns", keys(0, COUNT))
    return store.read(LAYOUT, "ns", keys(0, COUNT), refs, list(memory))  # type: ignore[arg-type]


def drop(file: Path) -> None:
    """From the page cache."""
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.parametrize("row_bytes", [64 * PAGE, 64 * PAGE + 8, 1000])
@pytest.mark.parametrize("offset", [0, 16])
@pytest.mark.parametrize("cached", [True, False])
def test_the_same_bytes_from_cache_and_disk(tmp_path: Path, row_bytes: int, offset: int, cached: bool) -> None:
    store, rows, file = saved(tmp_path, row_bytes)
    memory = room(1, COUNT * row_bytes + offset)[0][offset:].reshape(COUNT, row_bytes)
    if not cached:
        drop(file)
    assert all(read(store, memory))
    assert np.array_equal(memory, rows)
    backwards = memory[::-1]  # rows that lie apart in memory
    backwards[:] = 0
    drop(file)
    assert all(read(store, backwards))
    assert np.array_equal(backwards, rows)
    assert not store.counters.get("corrupt")


def test_rows_begin_at_a_page_and_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    _, rows, file = saved(tmp_path, PAGE)
    assert (file.stat().st_size - rows.nbytes) % PAGE == 0
    with safe_open(file, "np") as opened:
        assert np.array_equal(opened.get_tensor("blocks"), rows)


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
        monkeypatch.setattr(block_file.fcntl, "fcntl", refuse(errno.EINVAL))
    if what != "no direct reading":
        monkeypatch.setattr(block_file.os, "preadv", preadv)
    memory = room(COUNT, 64 * PAGE)
    assert all(read(store, memory))
    assert np.array_equal(memory, rows)


def test_a_disk_that_fails_for_good_is_a_miss_and_the_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _, file = saved(tmp_path, PAGE)
    with monkeypatch.context() as patch:
        patch.setattr(block_file.os, "preadv", refuse(errno.EIO))
        assert not any(read(store, room(COUNT, PAGE)))
    assert store.counters["errors"] == 1
    assert file.exists()
    assert all(read(store, room(COUNT, PAGE)))


def test_a_damaged_row_is_noticed_past_the_cache_too(tmp_path: Path) -> None:
    store, rows, file = saved(tmp_path, 64 * PAGE)
    flip_last(file)
    drop(file)
    memory = room(COUNT, 64 * PAGE)
    with BlockFile.open(file, "kv", file.name.partition(".")[0]) as opened:
        os.truncate(file, file.stat().st_size - 10 - rows[0].nbytes)
        assert opened.read(0, list(memory)) == [True] * 3 + [False] * 2
    assert not any(read(store, memory))  # it was cut off
    assert store.counters["corrupt"] == 1
