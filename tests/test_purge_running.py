"""A purge, or another index in the place of the one in use, reaches processes that have the directory open."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from other_process import Other, obey
from semkv.stores import extents as extents_module
from semkv.stores.blocks import KVLayout, KVStore, LayerLayout
from semkv.stores.cachedir import purge_directory
from semkv.stores.directory import ExtentDirectory

LAYOUT = KVLayout((LayerLayout("layer0", "float32", (64,), (64,), 256),), 16)


def key(i: int) -> bytes:
    return i.to_bytes(4, "big") * 8


def value(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, (1, 256), dtype=np.uint8)


def open_store(cache: Path) -> KVStore:
    return KVStore.open(cache / "kv", "ns", LAYOUT)


def save(kv: KVStore, i: int) -> bool:
    return kv.save_rows([key(i)], value(i)) is not None


def served(kv: KVStore, *blocks: int) -> list[int]:
    """Which blocks are served, each of them checked."""
    found = []
    for i in blocks:
        rows = kv.read_rows([key(i)])
        assert not len(rows) or np.array_equal(rows, value(i))
        found += [i] * len(rows)
    return found


def files(cache: Path) -> set[str]:
    return {path.name for path in (cache / "kv" / "extents").glob("??/*")}


def purge(cache: Path) -> None:
    """As an operator does it, in a process of its own."""
    command = [sys.executable, "-m", "semkv", "purge", "--cache-dir", str(cache)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)


def _serve(cache: Path, pipe: Connection) -> None:
    """A process that has the store open and does what it is told."""
    kv = open_store(cache)
    does: dict[str, Callable[..., Any]] = {
        "save": lambda i: save(kv, i),
        "served": lambda *blocks: served(kv, *blocks),
        "sweep": lambda: kv._extents.sweep(),
        "damage": lambda: kv._extents._index._failed(kv._extents._index._index, _damage()),  # type: ignore[arg-type]
        "close": kv.close,
    }
    obey(pipe, does)


def _damage() -> Exception:
    import sqlite3

    return sqlite3.DatabaseError("malformed")


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    process = Other(_serve, tmp_path)
    yield process
    process.end()


def lose_index(cache: Path) -> None:
    for path in (cache / "kv").glob("index.sqlite*"):
        path.unlink()


def test_an_index_replaced_by_another_process_is_taken_up(tmp_path: Path, other: Other) -> None:
    """Deleted and built again beside it: what it saves is found here, nothing of ours is swept, and the reverse."""
    assert other("save", 1)
    lose_index(tmp_path)
    kv = open_store(tmp_path)
    kv.adopt()
    assert save(kv, 2)
    assert served(kv, 1, 2) == [1, 2]
    there = files(tmp_path)
    assert other("sweep") == 0
    assert files(tmp_path) == there
    assert other("served", 1, 2) == [1, 2]
    assert other("save", 3)
    assert not other("save", 2)
    assert served(kv, 1, 2, 3) == [1, 2, 3]
    # The old index's end takes nothing of the new one with it.
    other("close")
    assert (tmp_path / "kv" / "index.sqlite-wal").exists()
    again = open_store(tmp_path)
    assert served(again, 1, 2, 3) == [1, 2, 3]
    assert kv.stats().extents == again.stats().extents == len(files(tmp_path)) == 3


def test_damage_seen_late_does_not_cost_the_others_their_index(tmp_path: Path, other: Other) -> None:
    assert other("save", 1)
    lose_index(tmp_path)
    kv = open_store(tmp_path)
    kv.adopt()
    other("damage")  # of the index that is gone
    assert save(kv, 2)
    again = open_store(tmp_path)
    assert served(again, 1, 2) == [1, 2]
    assert again._extents.renew() == kv._extents.renew()


def test_a_purge_empties_what_others_have_open_and_they_go_on(tmp_path: Path, other: Other) -> None:
    kv = open_store(tmp_path)
    assert save(kv, 1)
    assert other("served", 1) == [1]
    before = kv._extents.generation
    purge(tmp_path)
    assert not files(tmp_path)
    assert other("served", 1) == []
    assert other("save", 2)
    assert served(kv, 1, 2) == [2]
    assert kv._extents.generation != before
    purge(tmp_path)
    assert not list(tmp_path.iterdir())
    assert save(kv, 3)
    assert other("served", 1, 2, 3) == [3]


@pytest.mark.parametrize("moment", ["before the file", "while it is written", "before the commit"])
def test_what_is_being_written_during_a_purge_is_not_kept(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kv = open_store(tmp_path)
    assert save(kv, 1)
    real_reserve, container = kv._extents._make_room, extents_module.container
    real_write = container.write_extent

    def reserve(*args: Any) -> bool:
        granted = real_reserve(*args)
        if moment == "before the file":
            purge_directory(tmp_path)
        return granted

    def write(path: Path, head: bytes, parts: Any) -> None:
        if moment == "while it is written":
            part = path.with_name(path.name + f".{os.getpid()}.tmp")
            part.write_bytes(head)
            purge_directory(tmp_path)
            part.rename(path)  # which fails
        real_write(path, head, parts)
        if moment == "before the commit":
            hidden = tmp_path.with_name("hidden")
            path.rename(hidden)  # as if it came after the purge had looked
            purge_directory(tmp_path)
            path.parent.mkdir(parents=True)
            hidden.rename(path)

    with monkeypatch.context() as m:
        m.setattr(kv._extents, "_make_room", reserve)
        m.setattr(container, "write_extent", write)
        assert not save(kv, 2)
    assert files(tmp_path) == set()
    assert served(kv, 1, 2) == []
    assert save(kv, 3)  # and it goes on
    assert "nothing more is written" not in caplog.text
    assert served(open_store(tmp_path), 1, 2, 3) == [3]


def test_purges_and_openers_at_once_leave_one_index(tmp_path: Path) -> None:
    """Whoever waits for the lock of a directory that is purged meanwhile gets the lock of the new one."""
    faults: list[BaseException] = []
    over = threading.Event()

    def open_and_save(seed: int) -> None:
        try:
            number = seed * 10_000
            while not over.is_set():
                kv = open_store(tmp_path)
                assert kv.on
                number += 1
                save(kv, number)
                served(kv, number)
                kv.close()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=open_and_save, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for _ in range(60):
        if (tmp_path / "kv" / "semkv.json").exists():
            purge_directory(tmp_path)
    over.set()
    for thread in threads:
        thread.join()
    assert not faults
    first, second = open_store(tmp_path), open_store(tmp_path)
    assert save(first, 1)
    assert served(second, 1) == [1]
    assert {p.name.partition(".")[0] for p in (tmp_path / "kv" / "extents").glob("??/*")} == set(
        first._extents.extents()
    )


def test_who_waits_for_the_lock_of_a_purged_directory_gets_the_new_ones(tmp_path: Path) -> None:
    directory, entered = ExtentDirectory(tmp_path / "kv", "kv"), threading.Event()
    lock = tmp_path / "kv" / "open.lock"

    def wait() -> None:
        with directory.one_opener(make=True):
            found.append(lock.exists())  # the one that whoever comes next waits for
            entered.set()

    found: list[bool] = []
    with directory.one_opener(make=True):
        waiter = threading.Thread(target=wait)
        waiter.start()
        while not any(f" {lock.stat().st_ino} " in line.replace(":", " ") for line in _waiting()):
            time.sleep(0.01)
        lock.unlink()
        (tmp_path / "kv").rmdir()
    waiter.join()
    assert found == [True]


def test_a_purge_between_two_looks_of_an_opener_is_no_fault(tmp_path: Path) -> None:
    """Both whether the folder is one and what is in it are asked in several steps."""
    root = tmp_path / "kv"

    def gone(patch: pytest.MonkeyPatch, name: str, at: Path) -> None:
        real, once = getattr(Path, name), [at]

        def look(path: Path) -> Any:
            found = real(path) if name == "is_dir" else list(real(path))
            if path == at and once:
                once.clear()
                shutil.rmtree(root)
                return real(path) if name == "is_dir" else found
            return found

        patch.setattr(Path, name, look)

    for name, at in (("is_dir", root), ("iterdir", root / "extents")):
        kv = open_store(tmp_path)
        assert save(kv, 1)
        kv.close()
        with pytest.MonkeyPatch.context() as patch:
            gone(patch, name, at)
            again = open_store(tmp_path)
            assert again._extents.on
            assert save(again, 2)
            assert served(again, 1, 2) == [2]
            again.close()


class Asker:
    """Does something in another thread; ``done`` once it has come back, whatever that takes."""

    def __init__(self, what: Callable[[], Any]) -> None:
        self._what, self.result = what, None
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        self.result = self._what()

    def done(self) -> bool:
        self._thread.join(20)
        return not self._thread.is_alive()


@pytest.mark.parametrize("link", ["kv", "."])
def test_a_folder_on_a_disk_that_is_not_there_is_no_reason_to_wait(tmp_path: Path, link: str) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    place = cache if link == "." else cache / link
    if link == ".":
        cache.rmdir()
    place.symlink_to(tmp_path / "not mounted")
    asker = Asker(lambda: open_store(cache).on)
    assert asker.done()
    assert asker.result is False


def test_nobody_waits_for_a_purge_that_goes_on(tmp_path: Path) -> None:
    """What is asked meanwhile is a counted miss, and what is computed meanwhile is not found; then it goes on."""
    kv = open_store(tmp_path)
    assert save(kv, 1)
    before = kv._extents.generation
    directory = ExtentDirectory(tmp_path / "kv", "kv")
    with directory.one_opener():
        directory.discard_index()
        asker = Asker(lambda: (served(kv, 1), save(kv, 2), kv._extents.renew(), kv._extents.renew()))
        assert asker.done()
        found, saved, *meanwhile = asker.result  # type: ignore[misc]
        assert (found, saved) == ([], False)
        assert len({before, *meanwhile}) == 3
        assert kv._extents.counters["errors"] >= 3
        assert kv.on
        for path in (tmp_path / "kv" / "extents").glob("??/*"):
            path.unlink()
    generation = kv._extents.generation  # what is captured now is kept
    assert save(kv, 3)
    assert served(kv, 1, 2, 3) == [3]
    assert kv._extents.renew() == generation
    kv.close()


def test_who_else_opens_the_directory_after_a_purge_costs_nobody_a_capture(tmp_path: Path) -> None:
    """The ranks of an engine all open it in the same moment."""
    kv = open_store(tmp_path)
    directory, held = ExtentDirectory(tmp_path / "kv", "kv"), threading.Event()

    def other() -> None:
        with directory.one_opener():
            directory.discard_index()
            held.set()
            time.sleep(0.2)

    opener = threading.Thread(target=other)
    opener.start()
    assert held.wait(20)
    assert save(kv, 1)
    opener.join()
    assert served(kv, 1) == [1]
    kv.close()


def test_nobody_waits_to_switch_off(tmp_path: Path) -> None:
    """An index found damaged while another process has the lock goes when the store is closed."""
    kv = open_store(tmp_path)
    assert save(kv, 1)
    index = kv._extents._index
    damaged = index.get()
    assert damaged is not None
    with ExtentDirectory(tmp_path / "kv", "kv").one_opener():
        assert Asker(lambda: index._failed(damaged, _damage())).done()
        assert not kv.on
        assert served(kv, 1) == []
    assert (tmp_path / "kv" / "index.sqlite").exists()
    kv.close()
    assert not (tmp_path / "kv" / "index.sqlite").exists()
    again = open_store(tmp_path)
    again._extents.adopt()
    assert served(again, 1) == [1]


def test_a_damaged_index_is_told_from_a_new_one_while_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards a new file may have its inode."""
    kv = open_store(tmp_path)
    assert save(kv, 1)
    index = kv._extents._index
    damaged, order = index.get(), []
    assert damaged is not None
    real, close = ExtentDirectory.index_file, damaged.close
    monkeypatch.setattr(ExtentDirectory, "index_file", lambda d: (order.append("compared"), real(d))[1])
    monkeypatch.setattr(damaged, "close", lambda: (order.append("closed"), close()))
    index._failed(damaged, _damage())
    assert order == ["compared", "closed"]
    assert not (tmp_path / "kv" / "index.sqlite").exists()


def _waiting() -> list[str]:
    return [line for line in Path("/proc/locks").read_text().splitlines() if "->" in line]


def test_the_cache_directory_may_be_gone_for_good(tmp_path: Path) -> None:
    kv = open_store(tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache")
    assert not save(kv, 1)
    assert not kv.on
    assert not (tmp_path / "cache").exists()


def test_an_encoder_output_that_waits_for_the_disk_is_not_stored_after_a_purge(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    from semkv.connectors.ec import ECWorker, SemECMetadata
    from semkv.connectors.host import SharedPool
    from semkv.connectors.settings import ECSettings
    from semkv.stores.bounds import Bounds
    from semkv.stores.extents import ExtentStore
    from semkv.stores.fusion import FusionStore
    from semkv.stores.host_memory import HostMemories

    extents = ExtentStore(tmp_path / "fusion", "fusion", Bounds())
    host = SharedPool(tmp_path, 0, HostMemories())
    worker, store = ECWorker(ECSettings(tmp_path), extents, "cpu", saves=True, host=host), FusionStore(extents, "ns")
    gate, step = threading.Event(), SemECMetadata("ns", saves={"before": "before", "after": "after"})
    worker._writer.submit(gate.wait, 1)
    worker.save(step, {"before": torch.zeros(2, 3)}, "before")
    purge_directory(tmp_path)
    worker.save(step, {"after": torch.zeros(2, 3)}, "after")
    gate.set()
    assert worker.flush(60)
    assert ("before" in store, "after" in store) == (False, True)
    worker.close()


def test_states_in_host_memory_are_not_served_by_a_store_that_is_off(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    from semkv.connectors.ec import ECScheduler, ECWorker, SemECMetadata
    from semkv.connectors.host import SharedPool
    from semkv.connectors.settings import ECSettings
    from semkv.stores.bounds import Bounds
    from semkv.stores.extents import ExtentStore
    from semkv.stores.fusion import FusionStore
    from semkv.stores.host_memory import HostMemories

    extents = ExtentStore(tmp_path / "fusion", "fusion", Bounds())
    host, settings = SharedPool(tmp_path, 1 << 22, HostMemories()), ECSettings(tmp_path)
    worker = ECWorker(settings, extents, "cpu", saves=True, host=host)
    scheduler = ECScheduler(settings, FusionStore(extents, "ns"), "ns", host)
    step = SemECMetadata("ns", saves={"before": "before", "after": "after"})
    worker.save(step, {"before": torch.zeros(2, 3)}, "before")
    assert worker.flush(60)
    assert scheduler._read("before") is not None
    index = extents._index.get()
    assert index is not None
    extents._index._failed(index, _damage())
    assert scheduler._read("before") is None
    pool = host.get()
    assert pool is not None
    held = len(pool)
    worker.save(step, {"after": torch.zeros(2, 3)}, "after")
    assert worker.flush(60)
    assert len(pool) == held
    worker.close()
