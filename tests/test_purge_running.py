"""A purge, or another index in the place of the one in use, reaches processes that have the directory open."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from block_helpers import file_ids, files, open_store, save, served, totals
from maintenance_helpers import purge
from other_process import Other, obey
from semkv.stores.maintenance import purge_directory
from semkv_stores import block_file, block_index
from semkv_stores.block_file import is_store


def _serve(cache: Path, pipe: Connection) -> None:
    """A process that has the store open and does what it is told."""
    store = open_store(cache / "kv")
    does: dict[str, Callable[..., Any]] = {
        "save": lambda i: save(store, i) is not None,
        "served": lambda *blocks: (store.sweep(), served(store, blocks))[1],
        "sweep": store.sweep,
        "last_purge": store.last_purge,
        "heard": lambda i: [(p.owner, p.namespace) for p in store.purges_after(i)],
        "close": store.close,
    }
    obey(pipe, does)


def read_only_disk(root: Path) -> None:
    raise OSError(errno.EROFS, "read-only")


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    process = Other(_serve, tmp_path)
    yield process
    process.end()


def test_a_purge_empties_what_others_have_open_and_they_go_on(
    tmp_path: Path, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "kv")
    assert save(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(block_index, "SCHEMA", replace(block_index.SCHEMA, prepare=read_only_disk))
        reader = open_store(tmp_path / "kv")
    assert (reader.writable, served(reader, [1])) == (False, [1])
    reader_heard = reader.last_purge()
    assert other("served", 1) == [1]
    before, heard = store.last_purge(), other("last_purge")
    purge(tmp_path)
    assert not files(tmp_path / "kv")
    assert other("heard", heard) == [(None, None)]
    assert [(p.owner, p.namespace) for p in reader.purges_after(reader_heard)] == [(None, None)]
    assert other("served", 1) == []
    assert other("save", 2)
    assert served(store, [1, 2]) == [2]
    assert store.last_purge() != before


@pytest.mark.parametrize("how", ["a tenant", "everything"])
@pytest.mark.parametrize("moment", ["before the file", "while it is written", "before the commit"])
def test_what_is_being_written_during_a_purge_is_not_kept(
    tmp_path: Path,
    moment: str,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, other = open_store(tmp_path / "kv"), open_store(tmp_path / "kv")
    assert save(store, 1, owner="x")
    real_reserve, real_write = store._reserve, block_file.write_file

    def purge() -> None:
        if how == "everything":
            purge_directory(tmp_path)
            return
        assert other.purge("x")
        assert totals(other)[2] > 0, "the room of what is being written is nobody else's"

    def reserve(*args: Any) -> bool:
        granted = real_reserve(*args)
        if moment == "before the file":
            purge()
        return granted

    def write(path: Path, head: Any, rows: Any) -> None:
        if moment == "while it is written":
            rename = Path.rename

            def late(part: Path, target: Path) -> Path:
                purge()
                return rename(part, target)

            monkeypatch.setattr(Path, "rename", late)
        real_write(path, head, rows)
        if moment == "before the commit":
            purge()

    with monkeypatch.context() as patch:
        patch.setattr(store, "_reserve", reserve)
        patch.setattr(block_file, "write_file", write)
        assert not save(store, 2, owner="x")
    monkeypatch.undo()
    assert files(tmp_path / "kv") == []
    assert served(store, [1, 2]) == []
    assert save(store, 3)  # and it goes on
    assert "cannot write" not in caplog.text
    assert served(open_store(tmp_path / "kv"), [1, 2, 3]) == [3]


def test_a_purge_is_heard_of_where_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = open_store(tmp_path / "kv"), time.time_ns
    heard = store.last_purge()
    monkeypatch.setattr(time, "time_ns", lambda: now() - 3600 * 10**9)
    purge_directory(tmp_path)
    assert not save(store, 1, since=heard)
    (told,) = store.purges_after(heard)
    assert told == (store.last_purge(), None, None, None)
    assert save(store, 1, since=told.id)


def test_purges_and_openers_at_once_leave_one_index(tmp_path: Path) -> None:
    """Nobody finds a directory half emptied."""
    open_store(tmp_path / "kv").close()  # a purge does not begin beside the very first opener
    over = threading.Event()

    def open_and_save(number: int) -> None:
        while not over.is_set():
            store = open_store(tmp_path / "kv")
            assert store.on
            number += 1
            save(store, number)
            served(store, [number])
            store.close()

    with ThreadPoolExecutor(3) as pool:
        openers = [pool.submit(open_and_save, first) for first in (10_000, 20_000, 30_000)]
        try:
            for _ in range(40):
                if is_store(tmp_path / "kv"):
                    purge_directory(tmp_path)
        finally:
            over.set()
        for opener in openers:
            opener.result()
    first, second = open_store(tmp_path / "kv"), open_store(tmp_path / "kv")
    assert save(first, 1)
    assert served(second, [1]) == [1]
    assert {path.name.partition(".")[0] for path in files(tmp_path / "kv")} == set(file_ids(first))
