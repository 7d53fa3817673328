"""The block store: what comes back is what went in, or nothing."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import sqlite3
import struct
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from block_helpers import (
    LAYOUT,
    file_ids,
    files,
    flip_last,
    found,
    header,
    key,
    keys,
    open_store,
    restamp,
    rewrite,
    right,
    save,
    served,
    totals,
    value,
)
from semkv.errors import ConfigError, StoreError
from semkv.stores.maintenance import purge_directory
from semkv_stores import block_file, block_index, blocks
from semkv_stores.block_file import PAGE, room
from semkv_stores.blocks import Bounds


def test_only_new_blocks_are_stored(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert save(store, 2, 2)
    assert save(store, 2, 2) is None
    assert save(store, 0, 6)
    assert header(files(tmp_path)[1])["keys"].split() == [key(i).hex() for i in (0, 1, 4, 5)]
    assert totals(store)[:2] == (2, 6)
    assert right(store, 0, 6) == 6
    assert found(store, 0, 6, namespace="another") == 0


def raw_junk(content: bytes) -> Any:
    return lambda path: path.write_bytes(content)


def to_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "flipped byte": flip_last,
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-100]),
    "garbage": raw_junk(os.urandom(4096)),
    "huge header": raw_junk(struct.pack("<Q", 1 << 60) + b"{}"),
    "deep JSON": raw_junk(struct.pack("<Q", 100_000) + b"[" * 100_000),
    "other namespace": lambda p: rewrite(p, namespace="x"),
    "other tenant": lambda p: rewrite(p, owner="x"),
    "other keys": lambda p: rewrite(p, keys=" ".join(k.hex() for k in keys(50, 3))),
    "other layout": lambda p: rewrite(p, layout="[]"),
    "link": to_link,
    "pipe": to_pipe,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_a_counted_miss_and_the_file_goes(tmp_path: Path, damage: str) -> None:
    store = open_store(tmp_path)
    save(store, 0, 3)
    save(store, 3, 3)
    bad = files(tmp_path)[1]
    DAMAGE[damage](bad)
    assert served(store, range(6)) == ([0, 1, 2, 3, 4] if damage == "flipped byte" else [0, 1, 2])
    assert store.counters["corrupt"] == 1
    assert not os.path.lexists(bad)
    assert found(store, 0, 6) == 3
    assert save(store, 0, 6)  # and it can be stored again
    assert right(store, 0, 6) == 6


def test_bounds_hold_and_the_oldest_goes(tmp_path: Path) -> None:
    store = open_store(tmp_path, Bounds(max_bytes=0, max_blocks=6))
    for first in (0, 2, 4):
        save(store, first, 2)
    assert right(store, 0, 2) == 2  # the first is now the youngest
    save(store, 6, 2)
    assert [found(store, first, 2) for first in (0, 2, 4, 6)] == [2, 0, 2, 2]
    assert (store.counters["evicted_files"], store.counters["evicted_blocks"]) == (1, 2)
    assert len(files(tmp_path)) == 3
    assert save(store, 100, 7) is None  # larger than the store
    assert store.counters["rejected"] == 1


def test_a_walk_through_many_files_does_not_push_out_what_is_used_again(tmp_path: Path) -> None:
    store = open_store(tmp_path, Bounds(max_bytes=60_000))
    for _ in range(2):
        for first in range(0, 32, 8):
            if not right(store, first, 8):
                save(store, first, 8)
    for first in range(1000, 1800, 8):  # each once
        save(store, first, 8)
    assert right(store, 0, 32) == 32
    for first in range(2000, 2160, 8):  # what is used now pushes out what was used once
        save(store, first, 8)
        right(store, first, 8)
    assert right(store, 0, 32) < 32


def test_what_is_too_old_is_neither_served_nor_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path, Bounds(max_age_s=1000))
    save(store, 0, 2)
    assert found(store, 0, 2) == 2
    with pytest.MonkeyPatch.context() as patch:
        later = time.time() + 1001
        patch.setattr(time, "time", lambda: later)
        assert found(store, 0, 2) == 0
        assert save(store, 0, 2)  # stored anew
        assert found(store, 0, 2) == 2
    assert len(files(tmp_path)) == 1


def test_two_blocks_of_one_key_or_rows_that_do_not_fit(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.write("ns", LAYOUT, [key(1)] * 2, [value(1)] * 2)
    assert totals(store)[1] == 1
    for rows in (
        [value(2)],
        [value(2), value(3, 100)],
        [np.zeros((2, 2), np.uint8)] * 2,
        [np.zeros(3, np.int32)] * 2,
    ):
        with pytest.raises(ValueError, match=r"row|shorter"):
            store.write("ns", LAYOUT, keys(2, 2), rows)
    with pytest.raises(ConfigError, match="max_blocks"):
        Bounds(max_blocks=-1)


def test_a_tenant_at_his_bound_gives_up_his_own(tmp_path: Path) -> None:
    store = open_store(tmp_path, Bounds(max_bytes=0, tenant_bytes=8 * 1024))
    assert save(store, 0, 4, owner="b")
    for first in range(10, 60, 2):
        assert save(store, first, 2, owner="a")
        assert store.ask(lambda db: block_index.held(db, {"owner": "a"}), 0) <= 8 * 1024
    assert right(store, 0, 4) == 4, "nobody else pays for it"
    assert right(store, 58, 2) == 2
    assert right(store, 10, 2) == 0
    assert save(store, 100, 30, owner="a") is None, "one file is larger than the bound"
    assert store.counters["rejected"] == 1
    both = open_store(tmp_path, Bounds(max_bytes=12 * 1024, tenant_bytes=8 * 1024))
    for first in range(200, 240, 2):
        assert save(both, first, 2, owner="ab"[first // 2 % 2])
        assert totals(both)[2] <= 12 * 1024
    with pytest.raises(ConfigError, match="max_age_s"):
        Bounds(max_age_s=10**400)


# -- the directory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "application", "said"),
    [(9, 0x73656D6B, "was written by format version 9"), (0, 0, "is not a semkv database")],
)
def test_an_index_of_a_later_format_or_of_another_program_is_refused(
    tmp_path: Path, version: int, application: int, said: str
) -> None:
    store = open_store(tmp_path)
    save(store, 0)
    store.close()
    restamp(tmp_path / "index.sqlite", version, application)
    before = (tmp_path / "index.sqlite").read_bytes(), files(tmp_path)
    with pytest.raises(StoreError, match=f"index.sqlite {said}"):
        open_store(tmp_path)
    assert ((tmp_path / "index.sqlite").read_bytes(), files(tmp_path)) == before


def test_an_engine_whose_index_a_later_semkv_replaced_says_so_once_and_leaves_it_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = open_store(tmp_path)
    save(older, 0)
    with monkeypatch.context() as patch:
        patch.setattr(block_index, "SCHEMA", replace(block_index.SCHEMA, version=9))
        newer = open_store(tmp_path)
        assert save(newer, 1)
    monkeypatch.setattr(blocks, "_WARN_S", 3600.0)
    caplog.clear()
    for _ in range(3):
        assert found(older, 1) == 0
        assert not save(older, 2)
    assert caplog.text.count("written by format version 9, this semkv reads version 8") == 1
    assert right(newer, 1, 1) == 1


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (".", "file"),
        *itertools.product(
            ["index.sqlite.lock", "index.sqlite", "index.sqlite-wal"], ["folder", "pipe"]
        ),
        *itertools.product(
            ["index.sqlite.lock", "index.sqlite", "index.sqlite-wal", "extents"],
            ["theirs", "nowhere"],
        ),
    ],
)
def test_what_is_no_regular_file_is_refused_and_left_alone(
    tmp_path: Path, name: str, what: str
) -> None:
    (tmp_path / "kv").mkdir(0o700)
    theirs, place = tmp_path / "theirs", tmp_path / "kv" / name
    theirs.write_text("precious")
    if what == "file":
        (tmp_path / "kv").rmdir()
        (tmp_path / "kv").touch()
    elif what == "folder":
        place.mkdir()
    elif what == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(tmp_path / what)
    with pytest.raises(StoreError, match=r"choose another cache directory"):
        open_store(tmp_path / "kv")
    assert theirs.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


def test_a_sweep_deletes_what_no_index_names_and_a_folder_that_cannot_be_read_ends_no_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    save(store, 0, 2)
    (known,) = files(tmp_path)
    for name in ("0" * 16 + ".safetensors", "1" * 16 + ".safetensors.12.tmp", "anything"):
        known.with_name(name).write_bytes(b"half a file")

    def listed(root: Path) -> Any:
        raise OSError(errno.EIO, "a bad disk")

    with monkeypatch.context() as patch:
        patch.setattr("semkv_stores.block_file.listed", listed)
        assert store.sweep() == 0
    assert store.counters["errors"] == 1
    assert store.sweep() == 3
    assert files(tmp_path) == [known]
    known.unlink()
    assert (right(store, 0, 2), found(store, 0, 2), store.counters["missing"]) == (0, 0, 1)
    assert save(store, 0, 2)


def test_a_link_in_the_place_of_the_files_is_not_followed_by_what_deletes(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    precious = tmp_path / "theirs" / "ab" / "precious"
    precious.parent.mkdir(parents=True)
    precious.write_text("")
    (tmp_path / "kv" / "extents").rmdir()
    (tmp_path / "kv" / "extents").symlink_to(tmp_path / "theirs")
    store.sweep()
    with pytest.raises(StoreError, match="is a link"):
        purge_directory(tmp_path / "kv")
    assert precious.exists()


def test_nobody_else_can_read_or_write_what_is_stored(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = open_store(tmp_path / "cache" / "kv")
        save(store, 0)
        made = [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]
        assert {f"index.sqlite{suffix}" for suffix in ("", "-wal", "-shm")} < {
            path.name for path in made
        }
        assert {path.stat().st_mode & 0o777 for path in made} == {0o700, 0o600}
    finally:
        os.umask(before)
    root = tmp_path / "theirs"
    root.mkdir()
    root.chmod(0o770)
    with pytest.raises(StoreError, match=f"chmod 700 {root}"):
        open_store(root)
    root.chmod(0o755)
    assert open_store(root).on
    assert root.stat().st_mode & 0o777 == 0o700


def test_unusable_directory_turns_the_store_off(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        store = open_store(Path("/proc/semkv-cannot-be-made"))
    assert len(caplog.records) == 1
    assert not store.on
    assert save(store, 0) is None
    assert found(store, 0) == 0
    assert totals(store) == (0, 0, 0)
    assert store.last_purge() == 0
    assert (
        store.purges_after(store.last_purge())[0].owner is None
    )  # nothing kept in memory is to be used


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_full_disk_stops_writing_for_a_while_and_reads_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    store, now = open_store(tmp_path), [time.monotonic()]
    save(store, 0, 2)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def full(_: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(block_file.os, "fdatasync", full)
        for attempt in range(3):
            assert save(store, 10 + attempt) is None
            assert not store.writable
            assert store.counters["errors"] == attempt + 1
            assert save(store, 20) is None  # not even tried
            now[0] += blocks.RETRY_S
    assert len(caplog.records) == 1
    assert len(files(tmp_path)) == 1  # no half-written file stays
    assert right(store, 0, 2) == 2
    assert store.writable
    assert save(store, 10)
    assert totals(store)[:2] == (2, 3)


# -- purge and disown -----------------------------------------------------------------------------------------------


def test_a_purge_takes_what_is_chosen_and_others_hear_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = open_store(tmp_path), open_store(tmp_path)
    start = other.last_purge()
    for i, (namespace, owner) in enumerate([("a", ""), ("a", "x"), ("b", "x"), ("b", "y")]):
        assert save(store, i, namespace=namespace, owner=owner)

    def left() -> list[int]:
        return [found(other, i, namespace=namespace) for i, namespace in enumerate("aabb")]

    assert other.purges_after(start) == []
    assert left() == [1, 1, 1, 1]
    assert store.purge("x") == 2
    assert left() == [1, 0, 0, 1]
    assert store.purge("y") == 1
    assert left() == [1, 0, 0, 0]
    assert len(files(tmp_path)) == 1
    assert save(other, 1)
    heard = other.purges_after(start)
    assert [(p.owner, p.namespace) for p in heard] == [("x", None), ("y", None)]
    assert other.purges_after(heard[-1].id) == []
    assert other.last_purge() == heard[-1].id > heard[0].id > start
    monkeypatch.setattr(block_index, "MOST_PURGES", 2)
    store.purge("z")
    (unknown,) = other.purges_after(start)  # too old to be on record
    assert (unknown.owner, unknown.id) == (None, other.last_purge())
    assert not save(store, 1, since=start)
    assert not save(store, 1, since=0), "a moment that is not known"


def test_a_writer_may_take_back_what_it_wrote_and_has_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, same, yours = (open_store(tmp_path, writer=writer) for writer in ("me", "me", "you"))
    for i, store in enumerate((mine, same, yours)):
        assert save(store, i)
    assert save(mine, 3, namespace="other")
    since = mine.last_purge()
    assert mine.disown("ns")
    assert len(files(tmp_path)) == 2
    assert (found(mine, 0, 3), found(mine, 3, namespace="other")) == (1, 1)
    assert not save(same, 4, since=since)
    assert save(yours, 5, since=since)

    def begun(*args: Any) -> None:
        yours.disown("ns")  # when its room is reserved
        write(*args)

    write = block_file.write_file
    with monkeypatch.context() as patch:
        patch.setattr(block_file, "write_file", begun)
        assert not save(yours, 7)
    assert len(files(tmp_path)) == len(file_ids(mine)) == 1
    assert mine.disown("other")
    assert not files(tmp_path)
    assert not save(mine, 8, since=since)


def test_another_writer_holds_up_no_find_and_a_taking_back_says_that_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BUSY_S", 0.0)
    store = open_store(tmp_path, writer="me")
    assert save(store, 0)
    with closing(sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)) as writing:
        writing.execute("BEGIN IMMEDIATE")
        writing.execute("UPDATE files SET again=1")
        assert not store.disown("ns")
        assert not store.disown()
        assert found(store, 0) == 1
        assert store.purges_after(store.last_purge()) == []
        writing.execute("ROLLBACK")
    assert store.disown()
    assert found(store, 0) == 0


# -- reading past the page cache --------------------------------------------------------------------------------------

COUNT = 5


def refuse(code: int) -> Callable[..., Any]:
    def fault(*_: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fault


def refuse_direct(real: Callable[..., int]) -> Callable[..., int]:
    """A file system that takes O_DIRECT and cannot do it."""

    def call(fd: int, buffers: Any, at: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not here")
        return real(fd, buffers, at)

    return call


@pytest.mark.parametrize("fault", ["", "flag", "direct"])
@pytest.mark.parametrize(("row_bytes", "offset"), [(64 * PAGE, 0), (64 * PAGE, 16), (1000, 0)])
def test_the_same_bytes_with_and_without_direct_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_bytes: int, offset: int, fault: str
) -> None:
    if fault == "direct":
        for name in ("preadv", "pwritev"):
            monkeypatch.setattr(block_file.os, name, refuse_direct(getattr(os, name)))
    if fault == "flag":
        monkeypatch.setattr(block_file.fcntl, "fcntl", refuse(errno.EINVAL))
    store = open_store(tmp_path)
    rows = np.random.default_rng(1).integers(0, 256, (COUNT, row_bytes), dtype=np.uint8)
    assert store.write("ns", LAYOUT, keys(0, COUNT), list(rows))
    (file,) = files(tmp_path)
    memory = room(1, COUNT * row_bytes + offset)[0][offset:].reshape(COUNT, row_bytes)

    def read(target: np.ndarray) -> list[bool]:
        refs = store.find("ns", keys(0, COUNT))
        return store.read(LAYOUT, "ns", keys(0, COUNT), refs, list(target))  # type: ignore[arg-type]

    for target in (memory, memory[::-1]):  # the last: rows that lie apart
        memory[:] = 0
        assert all(read(target))
        assert np.array_equal(target, rows)
    with safe_open(file, "np") as opened:  # the file is plain safetensors
        assert np.array_equal(opened.get_tensor("blocks"), rows)
    assert row_bytes % PAGE or (file.stat().st_size - rows.nbytes) % PAGE == 0, (
        "rows begin at a page"
    )
    with monkeypatch.context() as patch:  # a disk that fails is a miss, and the file stays
        patch.setattr(block_file.os, "preadv", refuse(errno.EIO))
        assert not any(read(memory))
    assert (store.counters["errors"], store.counters["corrupt"]) == (1, 0)
    assert all(read(memory))
