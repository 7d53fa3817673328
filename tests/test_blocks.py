"""The KV store: what comes back is what went in, or nothing."""

from __future__ import annotations

import errno
import json
import logging
import multiprocessing
import os
import sqlite3
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from semkv.errors import ConfigError, CorruptValue, StoreError
from semkv.stores import container
from semkv.stores.blocks import KVChunk, KVLayout, KVStore, LayerLayout
from semkv.stores.bounds import Bounds
from semkv.stores.eviction import ExtentUse, Ghosts, adapt, victims
from semkv.stores.extents import SWEEP_SECONDS, ExtentStore

LAYOUT = KVLayout(
    tuple(LayerLayout(f"layer{i}", "bfloat16", (1, 2, 32, 8), (512, 256, 8, 1), 1024) for i in range(3)), 32, "TEST"
)
UNEVEN = KVLayout((*LAYOUT.layers, LayerLayout("indexer", "uint8", (1, 32, 5), (160, 5, 1), 160)), 32, "TEST")


def hashes(n: int, start: int = 0) -> list[bytes]:
    return [bytes([i]) * 32 for i in range(start, start + n)]


def rows(n: int, layout: KVLayout = LAYOUT, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, layout.row_bytes), dtype=np.uint8)


def store(path: Path, namespace: str = "ns", layout: KVLayout = LAYOUT, bounds: Bounds | None = None) -> KVStore:
    return KVStore.open(path / "kv", namespace, layout, bounds)


def files(path: Path) -> list[Path]:
    return sorted((path / "kv" / "extents").glob("*/*"), key=lambda p: p.stat().st_mtime_ns)


@pytest.mark.parametrize("layout", [LAYOUT, UNEVEN])
def test_round_trip_bit_for_bit(tmp_path: Path, layout: KVLayout) -> None:
    kv, data = store(tmp_path, layout=layout), rows(5, layout)
    chunk_id = kv.save(KVChunk.from_rows(data, hashes(5), layout, block_ids=[9, 8, 7, 6, 5]))
    assert chunk_id is not None
    assert kv.lookup(hashes(7)) == 5
    assert np.array_equal(kv.read_rows(hashes(7)), data)
    chunk = kv.load(chunk_id)
    assert chunk is not None
    assert chunk.num_tokens == 160
    assert chunk.block_hashes == tuple(hashes(5))
    assert np.array_equal(chunk.rows(), data)
    assert chunk.typed("layer1").shape == (5, 1, 2, 32, 8)
    assert chunk.typed("layer1").dtype == np.uint16


def test_file_is_plain_safetensors(tmp_path: Path) -> None:
    kv, data = store(tmp_path), rows(4)
    kv.save_rows(hashes(4), data)
    with safe_open(files(tmp_path)[0], "np") as file:
        tensor = file.get_tensor("blocks")
        header = json.loads(file.metadata()["semkv"])
    assert tensor.shape == (4, 3, 1024)  # block-major
    assert np.array_equal(tensor.reshape(4, -1), data)
    assert header["version"] == container.FORMAT_VERSION
    assert header["hashes"] == [h.hex() for h in hashes(4)]


@settings(max_examples=25, deadline=None)
@given(parts=st.lists(st.integers(1, 4), min_size=1, max_size=5), ask=st.integers(0, 20), start=st.integers(0, 5))
def test_runs_across_extents(tmp_path_factory: pytest.TempPathFactory, parts: list[int], ask: int, start: int) -> None:
    kv, n = store(tmp_path_factory.mktemp("s")), sum(parts)
    data, done = rows(n), 0
    for part in parts:
        kv.save_rows(hashes(n)[done : done + part], data[done : done + part], position=done)
        done += part
    want = hashes(40)[start : start + ask]
    assert np.array_equal(kv.read_rows(want), data[start : start + ask])
    assert kv.lookup(want) == max(0, min(n - start, ask))


def test_hole_ends_the_run(tmp_path: Path) -> None:
    kv, data = store(tmp_path), rows(5)
    kv.save_rows([hashes(5)[i] for i in (0, 1, 3, 4)], data[[0, 1, 3, 4]])
    assert kv.lookup(hashes(5)) == 2
    kv.save_rows([hashes(5)[2]], data[2:3])
    assert np.array_equal(kv.read_rows(hashes(5)), data)


def test_only_new_blocks_are_stored(tmp_path: Path) -> None:
    kv, data = store(tmp_path), rows(6)
    kv.save_rows(hashes(4), data[:4])
    assert kv.save_rows(hashes(4), data[:4]) is None
    kv.save_rows(hashes(6), data)
    assert kv.stats().blocks == 6
    assert kv.stats().extents == 2
    assert np.array_equal(kv.read_rows(hashes(6)), data)


def test_rows_may_come_in_parts_of_which_some_are_known(tmp_path: Path) -> None:
    kv, data = store(tmp_path), rows(9)
    kv.save_rows([hashes(9)[i] for i in (2, 3, 6)], data[[2, 3, 6]])
    kv.save_rows(hashes(9), data[:3], data[3:4], data[4:], position=0)
    assert [f["hashes"] for f in (json.loads(safe_open(f, "np").metadata()["semkv"]) for f in files(tmp_path))] == [
        [hashes(9)[i].hex() for i in (2, 3, 6)],
        [hashes(9)[i].hex() for i in (0, 1, 4, 5, 7, 8)],
    ]
    assert np.array_equal(kv.read_rows(hashes(9)), data)
    with pytest.raises(ValueError, match="shape"):
        kv.save_rows(hashes(9), data[:3], data[4:])


def test_namespaces_and_layouts_share_nothing(tmp_path: Path) -> None:
    store(tmp_path).save_rows(hashes(3), rows(3))
    assert store(tmp_path, namespace="other").lookup(hashes(3)) == 0
    other = KVLayout(tuple(reversed(LAYOUT.layers)), 32, "TEST")
    assert store(tmp_path, layout=other).lookup(hashes(3)) == 0
    assert store(tmp_path, layout=KVLayout(LAYOUT.layers, 32, "ANOTHER")).lookup(hashes(3)) == 0
    assert store(tmp_path).lookup(hashes(3)) == 3


def _header(path: Path) -> tuple[dict, bytes]:
    raw = path.read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + n]), raw[8 + n :]


def _rewrite(path: Path, **fields: object) -> None:
    document, data = _header(path)
    inner = json.loads(document["__metadata__"]["semkv"]) | fields
    document["__metadata__"]["semkv"] = json.dumps(inner)
    head = json.dumps(document).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def flip_last(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


DAMAGE = {
    "flipped byte": flip_last,
    "truncated": lambda p: p.write_bytes(p.read_bytes()[:-100]),
    "cut in header": lambda p: p.write_bytes(p.read_bytes()[:50]),
    "empty": lambda p: p.write_bytes(b""),
    "longer": lambda p: p.write_bytes(p.read_bytes() + b"x"),
    "garbage": lambda p: p.write_bytes(os.urandom(4096)),
    "huge header": lambda p: p.write_bytes(struct.pack("<Q", 1 << 60) + b"{}"),
    "other version": lambda p: _rewrite(p, version=99),
    "other layout": lambda p: _rewrite(p, layout={"layers": []}),
    "other namespace": lambda p: _rewrite(p, namespace="x"),
    "other kind": lambda p: _rewrite(p, kind="fusion"),
    "other hashes": lambda p: _rewrite(p, hashes=[h.hex() for h in hashes(3, 50)]),
    "not hex": lambda p: _rewrite(p, hashes=["zz"] * 3),
    "not a number": lambda p: _rewrite(p, position="0"),
    "not a list": lambda p: _rewrite(p, hashes=7),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_a_counted_miss_and_the_file_goes(tmp_path: Path, damage: str) -> None:
    kv, data = store(tmp_path), rows(6)
    kv.save_rows(hashes(3), data[:3])
    kv.save_rows(hashes(3, 3), data[3:], position=3)
    bad = files(tmp_path)[1]
    DAMAGE[damage](bad)
    assert np.array_equal(kv.read_rows(hashes(6)), data[:3])
    assert kv.stats().counters["corrupt"] == 1
    assert not bad.exists()
    assert kv.lookup(hashes(6)) == 3
    kv.save_rows(hashes(6), data)  # and it can be stored again
    assert np.array_equal(kv.read_rows(hashes(6)), data)


def test_swapped_files_are_noticed(tmp_path: Path) -> None:
    kv, data = store(tmp_path), rows(6)
    kv.save_rows(hashes(3), data[:3])
    kv.save_rows(hashes(3, 3), data[3:])
    a, b = files(tmp_path)
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    assert len(kv.read_rows(hashes(6))) == 0
    assert kv.stats().counters["corrupt"] == 1


def test_vanished_file_is_a_miss(tmp_path: Path) -> None:
    kv = store(tmp_path)
    chunk = kv.save_rows(hashes(3), rows(3))
    files(tmp_path)[0].unlink()
    assert kv.load(str(chunk)) is None
    assert kv.load("../../semkv.json") is None
    assert len(kv.read_rows(hashes(3))) == 0
    assert kv.stats().counters["missing"] == 1
    assert kv.lookup(hashes(3)) == 0


def test_bounds_hold_and_the_oldest_goes(tmp_path: Path) -> None:
    kv = store(tmp_path, bounds=Bounds(max_bytes=0, max_blocks=6))
    for i in range(3):
        kv.save_rows(hashes(2, 2 * i), rows(2, seed=i))
    assert len(kv.read_rows(hashes(2))) == 2  # the first is now the youngest
    kv.save_rows(hashes(2, 6), rows(2))
    assert kv.stats().blocks == 6
    assert [kv.lookup(hashes(2, 2 * i)) for i in range(4)] == [2, 0, 2, 2]
    assert kv.stats().counters["evicted_blocks"] == 2
    assert len(files(tmp_path)) == 3
    assert kv.save_rows(hashes(7, 100), rows(7)) is None  # larger than the store
    assert kv.stats().counters["rejected"] == 1


def test_byte_bound_counts_the_whole_directory(tmp_path: Path) -> None:
    one = store(tmp_path, bounds=Bounds(max_bytes=30_000))
    two = store(tmp_path, namespace="other", bounds=Bounds(max_bytes=30_000))
    for i in range(6):
        (one if i % 2 else two).save_rows(hashes(2, 2 * i), rows(2, seed=i))
    assert sum(f.stat().st_size for f in files(tmp_path)) <= 30_000
    assert one.stats().nbytes + two.stats().nbytes <= 30_000
    assert one.lookup(hashes(2, 10)) == 2


def test_recent_extents_go_until_they_keep_their_share_then_frequent_ones() -> None:
    recent = [ExtentUse(name, 10, 1) for name in "abc"]
    frequent = [ExtentUse(name, 10, 1, frequent=True) for name in "xyz"]
    assert "".join(v.extent for v in victims(recent, frequent, 30, 15)) == "abxyzc"
    assert "".join(v.extent for v in victims(recent, [], 30, 100)) == "abc"
    assert "".join(v.extent for v in victims([], frequent, 0, 0)) == "xyz"


def test_a_ghost_moves_the_share_of_its_list() -> None:
    assert adapt(50, 100, 10, Ghosts(recent=10, frequent=20), frequent=False) == 70
    assert adapt(50, 100, 10, Ghosts(recent=10, frequent=20), frequent=True) == 40
    assert adapt(95, 100, 10, Ghosts(recent=10, frequent=10), frequent=False) == 100
    assert adapt(5, 100, 10, Ghosts(recent=10, frequent=10), frequent=True) == 0


def test_what_a_lookup_holds_is_evicted_by_no_process(tmp_path: Path) -> None:
    kv, other = (store(tmp_path, bounds=Bounds(max_bytes=0, max_blocks=4)) for _ in range(2))
    kv.save_rows(hashes(2), rows(2))
    kv.save_rows(hashes(2, 2), rows(2))
    assert kv.lookup(hashes(2), holder="request 1") == 2
    other.save_rows(hashes(2, 4), rows(2))
    assert (other.lookup(hashes(2)), other.lookup(hashes(2, 2))) == (2, 0)
    assert kv.lookup(hashes(2, 4), holder="request 2") == 2
    assert other.save_rows(hashes(2, 6), rows(2)) is None  # everything is held
    assert other.stats().counters["rejected"] == 1
    kv.release("request 1")
    assert other.save_rows(hashes(2, 6), rows(2)) is not None
    assert (other.lookup(hashes(2)), other.lookup(hashes(2, 4))) == (0, 2)


def test_what_is_too_old_is_neither_served_nor_kept(tmp_path: Path) -> None:
    kv = store(tmp_path, bounds=Bounds(max_age_s=0.2))
    kv.save_rows(hashes(2), rows(2))
    assert kv.lookup(hashes(2)) == 2
    time.sleep(0.25)
    assert kv.lookup(hashes(2)) == 0
    assert len(kv.read_rows(hashes(2))) == 0
    kv.save_rows(hashes(2, 2), rows(2))
    assert kv._extents.sweep() == 1
    assert len(files(tmp_path)) == 1
    assert kv.lookup(hashes(2, 2)) == 2


@pytest.mark.parametrize("how", ["missing", "garbage"])
def test_index_is_built_again_from_the_headers(tmp_path: Path, how: str) -> None:
    kv, data = store(tmp_path), rows(5)
    kv.save_rows(hashes(3), data[:3])
    kv.save_rows(hashes(2, 3), data[3:], position=3)
    kv.close()
    index = tmp_path / "kv" / "index.sqlite"
    for suffix in ("-wal", "-shm"):
        index.with_name(index.name + suffix).unlink(missing_ok=True)
    if how == "missing":
        index.unlink()
    else:
        index.write_bytes(b"not a database, but long enough to look at" * 100)
    again = store(tmp_path)
    again.adopt()
    assert np.array_equal(again.read_rows(hashes(5)), data)


def test_index_damaged_while_open_turns_the_store_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = store(tmp_path)
    kv.save_rows(hashes(2), rows(2))

    def broken(*_: object) -> None:
        raise sqlite3.DatabaseError("file is not a database")

    monkeypatch.setattr(kv._extents._index.get(), "find", broken)
    assert kv.lookup(hashes(2)) == 0
    assert not kv.on
    assert kv.save_rows(hashes(2, 2), rows(2)) is None
    assert kv.lookup(hashes(2)) == 0
    again = store(tmp_path)
    again.adopt()
    assert again.lookup(hashes(2)) == 2


def test_files_that_no_index_names_are_swept(tmp_path: Path) -> None:
    kv = store(tmp_path)
    kv.save_rows(hashes(2), rows(2))
    known = files(tmp_path)[0]
    strange, temporary = (known.with_name(n) for n in ("0" * 32 + ".safetensors", "1" * 32 + ".safetensors.1.tmp"))
    for path in (strange, temporary):
        path.write_bytes(b"half a file")
    assert len(store(tmp_path).read_rows(hashes(2))) == 2
    assert files(tmp_path) == [known]


def test_a_folder_that_cannot_be_read_ends_no_writing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kv = store(tmp_path)
    kv.save_rows(hashes(2), rows(2))
    stray = files(tmp_path)[0].with_name("0" * 32 + ".safetensors")
    stray.write_bytes(b"half a file")
    (tmp_path / "kv" / "extents" / "zz").symlink_to("zz")  # ELOOP, as EIO and ESTALE of a disk
    kv._extents._swept_at = -SWEEP_SECONDS
    assert kv.save_rows(hashes(2, 2), rows(2)) is not None
    assert kv._extents.counters["errors"] == 1
    assert not stray.exists(), "the other folders are swept"
    again = store(tmp_path)
    assert again.save_rows(hashes(2, 4), rows(2)) is not None
    assert again.lookup(hashes(6)) == 6
    assert "cannot read" in caplog.text


def test_no_index_is_built_of_a_part_of_what_is_there(tmp_path: Path) -> None:
    kv = store(tmp_path)
    kv.save_rows(hashes(2), rows(2))
    kv.close()
    for file in (tmp_path / "kv").glob("index.sqlite*"):
        file.unlink()
    strange = tmp_path / "kv" / "extents" / "zz"
    strange.symlink_to("zz")
    assert not store(tmp_path).on
    strange.unlink()
    again = store(tmp_path)
    again.adopt()
    assert again.lookup(hashes(2)) == 2


def test_other_format_version_is_refused_at_open(tmp_path: Path) -> None:
    store(tmp_path)
    (tmp_path / "kv" / "semkv.json").write_text(json.dumps({"format": 0, "kind": "kv"}))
    with pytest.raises(StoreError, match=r"purge.*or choose another cache directory"):
        store(tmp_path)


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("")
    with pytest.raises(StoreError, match="not a directory"):
        store(tmp_path)


def test_unusable_directory_turns_the_store_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        kv = KVStore.open(Path("/proc/semkv-cannot-be-made"), "ns", LAYOUT)
    assert len(caplog.records) == 1
    assert not kv.on
    assert kv.save_rows(hashes(1), rows(1)) is None
    assert kv.lookup(hashes(1)) == 0
    assert kv.stats().blocks == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_full_disk_stops_writing_and_reads_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    kv, data = store(tmp_path), rows(2)
    kv.save_rows(hashes(2), data)

    def full(_: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(container.os, "fsync", full)
        for i in range(3):
            assert kv.save_rows(hashes(2, 10 + i), rows(2)) is None
    assert len(caplog.records) == 1
    assert np.array_equal(kv.read_rows(hashes(2)), data)
    assert len(files(tmp_path)) == 1  # no half-written file stays


def test_purge_takes_one_namespace(tmp_path: Path) -> None:
    one, two = store(tmp_path), store(tmp_path, namespace="other")
    one.save_rows(hashes(2), rows(2))
    two.save_rows(hashes(2), rows(2))
    assert one.purge() == 1
    assert (one.lookup(hashes(2)), two.lookup(hashes(2))) == (0, 2)
    assert len(files(tmp_path)) == 1


def test_a_writer_may_take_back_what_it_wrote_and_has_under_way(tmp_path: Path) -> None:
    mine, same, yours = (
        KVStore(ExtentStore(tmp_path / "kv", "kv", Bounds(), writer), "ns", LAYOUT) for writer in ("me", "me", "you")
    )
    other = KVStore(mine._extents, "other", LAYOUT)
    for i, kv in enumerate((mine, same, yours, other)):
        assert kv.save_rows(hashes(1, i), rows(1))
    assert mine.disown()
    assert len(files(tmp_path)) == 2
    assert [kv.lookup(hashes(1, i)) for i, kv in enumerate((mine, same, yours, other))] == [0, 0, 1, 1]
    assert not same.save_rows(hashes(1, 4), rows(1))
    assert yours.save_rows(hashes(1, 5), rows(1))
    assert other.save_rows(hashes(1, 6), rows(1))

    def begun(*args: Any) -> bool:
        yours.disown()  # when its room is reserved
        return write(*args)

    write, yours._extents._write_file = yours._extents._write_file, begun  # type: ignore[method-assign]
    assert not yours.save_rows(hashes(1, 7), rows(1))
    assert len(files(tmp_path)) == len(other._extents.extents()) == 2
    for path in (tmp_path / "kv").glob("index.sqlite*"):  # who wrote it stands in the files too
        path.unlink()
    with mine._extents._adopting:  # before their heads are read
        assert mine._extents.disown(other.namespace)
    mine._extents.adopt()
    assert not files(tmp_path)
    assert not mine.save_rows(hashes(1, 8), rows(1))  # what was said to the index that is gone still holds


def test_taking_back_is_one_step_and_says_where_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = KVStore(ExtentStore(tmp_path / "kv", "kv", Bounds(), "me"), "ns", LAYOUT)
    assert kv.save_rows(hashes(1), rows(1))
    index = kv._extents._index.get()
    assert index is not None
    index._db.execute("PRAGMA busy_timeout=0")
    writer = sqlite3.connect(tmp_path / "kv" / "index.sqlite", isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    assert not kv.disown()
    assert kv.lookup(hashes(1)) == 1
    writer.execute("COMMIT")

    def killed(extent: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kv._extents, "_unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        kv.disown()
    assert files(tmp_path)
    assert store(tmp_path).lookup(hashes(1)) == 0
    assert not files(tmp_path)  # nobody's file is swept


def test_wrong_calls_are_refused(tmp_path: Path) -> None:
    kv = store(tmp_path)
    with pytest.raises(ValueError, match="layout"):
        kv.save(KVChunk.from_rows(rows(1, UNEVEN), hashes(1), UNEVEN))
    with pytest.raises(ValueError, match="shape"):
        kv.save_rows(hashes(2), rows(1))
    with pytest.raises(ConfigError, match="max_blocks"):
        Bounds(max_blocks=-1)
    with pytest.raises(ConfigError, match="max_age_s"):
        Bounds(max_age_s=10**400)
    with pytest.raises(CorruptValue):
        KVLayout.parse({"layers": 3})
    assert KVLayout.parse(LAYOUT.document()) == LAYOUT


def test_threads_share_a_store(tmp_path: Path) -> None:
    kv, errors = store(tmp_path, bounds=Bounds(max_bytes=0, max_blocks=40)), []

    def work(seed: int) -> None:
        data = rows(4, seed=seed)
        mine = [bytes([seed, i]) * 16 for i in range(4)]
        for _ in range(10):
            kv.save_rows(mine, data)
            got = kv.read_rows(mine)
            if not np.array_equal(got, data[: len(got)]):
                errors.append(seed)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert kv.stats().blocks <= 40 + 4 * 16  # bound plus what was being written at the same moment
    assert kv.stats().counters.get("corrupt", 0) == 0


def _process(path: str, seed: int) -> None:
    kv = store(Path(path), bounds=Bounds(max_bytes=0, max_blocks=30))
    for i in range(10):
        mine = [bytes([seed, i, j]) + bytes(29) for j in range(3)]
        kv.save_rows(mine, rows(3, seed=seed * 100 + i))
        got = kv.read_rows(mine)
        assert np.array_equal(got, rows(3, seed=seed * 100 + i)[: len(got)])
    common = hashes(3, 200)
    kv.save_rows(common, rows(3, seed=7))
    got = kv.read_rows(common)
    assert np.array_equal(got, rows(3, seed=7)[: len(got)])


def test_processes_share_a_directory(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_process, args=(str(tmp_path), s)) for s in range(3)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert [w.exitcode for w in workers] == [0, 0, 0]
    kv = store(tmp_path, bounds=Bounds(max_bytes=0, max_blocks=30))
    assert np.array_equal(kv.read_rows(hashes(3, 200)), rows(3, seed=7)[: kv.lookup(hashes(3, 200))])
    assert kv.stats().blocks <= 36


def test_what_a_later_version_adds_to_a_header_is_ignored(tmp_path: Path) -> None:
    @dataclass(frozen=True, slots=True)
    class Later(container.ExtentHeader):
        added: str = "later"

    kv, real = store(tmp_path), container.encode_head
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            container,
            "encode_head",
            lambda header, shape: real(Later(**{f: getattr(header, f) for f in header.__dataclass_fields__}), shape),
        )
        kv.save_rows(hashes(2), rows(2))
    assert b"later" in files(tmp_path)[0].read_bytes()
    assert np.array_equal(kv.read_rows(hashes(2)), rows(2))
