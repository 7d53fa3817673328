"""Nothing lost, nothing wrong, nothing over its bound: crashes, damage, churn and many processes on one directory."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from block_helpers import (
    ROW,
    file_ids,
    files,
    found,
    lose_index,
    open_store,
    restamp,
    rewrite,
    right,
    save,
    totals,
)
from semkv.errors import CorruptValue, StoreError
from semkv.stores.catalog import CATALOG, Catalog
from semkv.stores.maintenance import inspect, purge, purge_directory, verify
from semkv_gateway.responses.sqlite import SqliteStore
from semkv_gateway.responses.store import StoredResponse
from semkv_stores import block_index
from semkv_stores.block_file import BlockFile, LocalSource, room
from semkv_stores.blocks import Bounds
from test_catalog import record

PROCESSES = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module", autouse=True)
def _forkserver() -> None:
    """It imports this module once, and not every process anew: for that it must find it, and Python 3.11 gives it no
    path of ours but the variable's."""
    PROCESSES.set_forkserver_preload([__name__])
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()


def on_disk(root: Path) -> int:
    total = 0
    for path in (root / "extents").glob("??/*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: kill -9 loses no page of either, and nothing waits for a disk."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shm) as folder:
        yield Path(folder)


# -- bounds ---------------------------------------------------------------------------------------------------------


def _churn(root: Path, bounds: Bounds, seed: int, rounds: int, sink: Connection) -> None:
    store, rng = open_store(root, bounds), random.Random(seed)
    for _ in range(rounds):
        first = 8 * rng.randrange(400)
        if not right(store, first, 8):
            save(store, first, 8)
    sink.send(dict(store.counters))


def test_bounds_hold_at_every_moment_under_churn(memory: Path) -> None:
    """Four processes write ten times what fits, on one directory, while its size is read all the time."""
    bounds = Bounds(max_bytes=300_000)
    open_store(memory / "kv", bounds).close()
    pipes = [PROCESSES.Pipe(duplex=False) for _ in range(4)]
    writers = [
        PROCESSES.Process(target=_churn, args=(memory / "kv", bounds, seed, 250, sink))
        for seed, (_, sink) in enumerate(pipes)
    ]
    for writer in writers:
        writer.start()
    most = 0
    with contextlib.closing(
        sqlite3.connect(memory / "kv" / "index.sqlite", isolation_level=None, timeout=60)
    ) as db:
        while any(writer.is_alive() for writer in writers):
            db.execute(
                "BEGIN IMMEDIATE"
            )  # the size of one moment: nobody evicts while the files are counted
            most = max(most, on_disk(memory / "kv"))
            db.execute("ROLLBACK")
            time.sleep(0.002)
    results = [source.recv() for source, _ in pipes]
    most = max(most, on_disk(memory / "kv"))
    assert 150_000 < most <= bounds.max_bytes
    assert sum(counters["stored_bytes"] for counters in results) > 10 * bounds.max_bytes
    assert sum(counters.get("corrupt", 0) for counters in results) == 0
    assert sum(counters["evicted_files"] for counters in results) > 100
    assert (
        totals(open_store(memory / "kv", bounds))[2] == on_disk(memory / "kv") <= bounds.max_bytes
    )


# -- crashes --------------------------------------------------------------------------------------------------------


def write_until_killed(root: Path, bounds: Bounds, seed: int, sink: Connection) -> None:
    """Store and read for ever; what is acknowledged is sent."""
    store, rng = open_store(root, bounds), random.Random(seed)
    sink.send("ready")
    while True:
        first = 8 * rng.randrange(2000)
        if save(store, first, rng.randint(1, 8)):
            sink.send(first)
        right(store, 8 * rng.randrange(2000), 8)


def test_killed_at_any_moment_the_store_opens_and_serves_only_what_is_right(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 at 24 random moments of capture, eviction and commit; every eighth time with the index thrown away."""
    root, bounds, rng = memory / "kv", Bounds(max_bytes=400_000), random.Random(7)
    kept = 0
    for number in range(24):
        source, sink = PROCESSES.Pipe(duplex=False)
        writer = PROCESSES.Process(target=write_until_killed, args=(root, bounds, number, sink))
        writer.start()
        sink.close()
        assert source.recv() == "ready"
        saved = [source.recv() for _ in range(rng.randrange(4))]
        time.sleep(rng.uniform(0, 0.01))
        writer.kill()
        with contextlib.suppress(EOFError):
            while True:
                saved.append(source.recv())
        writer.join()
        if number % 8 == 7:
            lose_index(root)
        store = open_store(root, bounds)
        assert store.on
        store.sweep()
        assert {path.name.partition(".")[0] for path in files(root)} <= set(file_ids(store))
        assert on_disk(root) <= bounds.max_bytes
        kept += sum(right(store, first, 1) for first in saved[-8:])
        assert not store.counters.get("corrupt")
        store.close()
    assert kept > 24  # the latest acknowledged values survive the kill
    monkeypatch.setattr(
        block_index, "PENDING_S", 0.0
    )  # dead writers' reservations are given up in time
    store = open_store(root, bounds)
    store.sweep()
    assert totals(store)[0] >= len(list((root / "extents").glob("??/*.safetensors")))
    assert not list((root / "extents").glob("??/*.tmp"))


# -- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pristine(memory: Path) -> Path:
    """Three files of four blocks, closed."""
    store = open_store(memory / "pristine")
    for first in (0, 4, 8):
        assert save(store, first, 4)
    store.close()
    return memory / "pristine"


def test_any_flipped_bit_of_the_index_stops_nothing(memory: Path, pristine: Path) -> None:
    """The store opens, serves nothing wrong, takes new blocks, purges and is looked after, without an exception. Not of
    the bits that say whose and of which format the file is."""
    rng, root, size = random.Random(5), memory / "kv", (pristine / "index.sqlite").stat().st_size
    logging.disable(logging.WARNING)
    try:
        for _ in range(100):
            shutil.copytree(pristine, root)
            data = bytearray((root / "index.sqlite").read_bytes())
            used = [i for i in range(size) if data[i] and not 60 <= i < 72]  # most of it is empty
            data[rng.choice(used)] ^= 1 << rng.randrange(8)
            (root / "index.sqlite").write_bytes(data)
            store = open_store(root)
            right(store, 0, 12)
            save(store, 20, 2)
            right(store, 0, 22)
            store.purges_after(0), store.last_purge(), store.disown("other"), store.sweep()
            inspect(memory), inspect(memory, tenants=["x"], salts=["x"]), verify(memory)
            store.purge("x")
            purge_directory(root)
            assert found(store, 0, 12) == 0
            assert store.on
            assert save(store, 0, 4)
            assert right(store, 0, 4) == 4
            store.close()
            shutil.rmtree(root)
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    "harm",
    [
        lambda file: file.write_bytes(b"?" + file.read_bytes()[1:]),
        lambda file: restamp(file, version=6),
    ],
    ids=["a damaged header", "an earlier format"],
)
def test_a_store_whose_index_cannot_be_read_begins_anew_with_one_warning(
    pristine: Path, harm: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    harm(pristine / "index.sqlite")
    store = open_store(pristine)
    assert (right(store, 0, 12), files(pristine)) == (0, [])
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert save(store, 0)
    assert right(open_store(pristine), 0, 1) == 1


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (sqlite3.DatabaseError("malformed"), 0),
        (sqlite3.OperationalError("no such column"), 4),
        (sqlite3.ProgrammingError("closed"), 4),
        (TypeError("a fault of ours"), 4),
    ],
)
def test_an_index_damaged_while_open_is_begun_anew_by_one_of_those_who_use_it_and_a_fault_of_ours_empties_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kept: int
) -> None:
    store, late = open_store(tmp_path), open_store(tmp_path)
    if isinstance(error, sqlite3.OperationalError):
        error.sqlite_errorcode = sqlite3.SQLITE_ERROR

    def broken(*_: object) -> None:
        raise error

    assert save(store, 0, 4)
    with contextlib.suppress(type(error)), late._index:
        with monkeypatch.context() as patch:
            patch.setattr(block_index, "find", broken)
            assert found(store, 0) == 0
        assert (right(store, 0, 4), store.counters["errors"], len(files(tmp_path))) == (
            kept,
            1,
            kept // 4,
        )
        monkeypatch.setattr(store, "_write_after", 0.0)
        assert save(store, 8)
        raise error  # the file that it finds damaged is no longer there
    assert right(late, 8, 1) == right(store, 8, 1) == 1


JUNK = st.recursive(
    st.none()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=8)
    | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3),
)
ANY_FILE = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@ANY_FILE
@given(
    field=st.sampled_from(["version", "layout", "keys", "checksums", "owner", "tensor"]), junk=JUNK
)
def test_the_reader_takes_any_header(pristine: Path, field: str, junk: object) -> None:
    path = files(pristine)[0]
    raw = path.read_bytes()
    try:
        rewrite(path, **{field: junk})
        source = LocalSource(path)
        with contextlib.suppress(CorruptValue), BlockFile(source, path.name, kind="kv") as opened:
            opened.read(0, list(room(4, ROW)))
    finally:
        path.write_bytes(raw)


# -- a disk that fails ----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 320 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=320k", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"needs the right to mount a file system (run as root): {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_purge_frees_a_disk_that_is_full_under_running_processes(small_disk: Path) -> None:
    cache = small_disk / "cache"
    blocks = open_store(cache / "kv")
    assert save(blocks, 0, 4)
    with contextlib.closing(SqliteStore(cache / CATALOG)) as store:

        def put(key: str) -> bool:
            return store.put(
                StoredResponse(key, "tenant", "model", b"secret words " * 500, time.time())
            )

        with pytest.raises(StoreError, match="full"):
            all(put(str(number)) for number in range(100))
        with contextlib.suppress(OSError), (small_disk / "other").open("wb", 0) as other:
            while other.write(bytes(512)):
                pass
        heard = blocks.last_purge()
        purge_directory(cache)
        (small_disk / "other").unlink()
        assert (store.get("0"), right(blocks, 0, 4), files(cache / "kv")) == (None, 0, [])
        assert [purge.owner for purge in blocks.purges_after(heard)] == [None]
        assert put("later")
        assert save(blocks, 0, 4)
        left = b"".join(path.read_bytes() for path in cache.iterdir() if path.is_file())
        assert left.count(b"secret words") <= 1000


def test_a_purge_of_a_tenant_makes_its_own_room_on_a_full_disk(small_disk: Path) -> None:
    with closing(Catalog(small_disk / "cache" / CATALOG)) as catalog:
        with pytest.raises(sqlite3.OperationalError, match="full"):
            all(catalog.add(record(str(number))) for number in range(1000))
        assert purge(small_disk / "cache", tenants=["here"]).unread == []
        assert len(catalog) == 0


# One that may read the directory and not write it, whatever it was started as.
READER = """
import logging, os, sys
from pathlib import Path
import numpy.random
from block_helpers import open_store, right, save, totals
from semkv.errors import StoreError
from semkv.stores.maintenance import purge_directory
logging.basicConfig(level=logging.WARNING, format="%(levelname)s")
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
store = open_store(Path(sys.argv[1]))
store.purge("x"), store.sweep()
print(store.on, store.writable, right(store, 0, 4), save(store, 9), totals(store)[1])
store.close()
try:
    purge_directory(Path(sys.argv[1]))
except StoreError:
    print("told")
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_directory_without_the_right_to_write_serves_what_is_there(
    memory: Path, killed: bool
) -> None:
    """Also where a writer was killed, and its log lies there."""
    root = memory / "kv"
    store = open_store(root)
    save(store, 0, 4)
    if not killed:
        store.close()
    copy = memory / "copy"
    shutil.copytree(root, copy)
    for path in (memory, copy, *copy.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])
    }
    done = subprocess.run(
        [sys.executable, "-c", READER, copy], env=environment, capture_output=True, text=True
    )
    memory.chmod(0o700)
    assert done.stdout.split() == ["True", "False", "4", "None", "4", "told"], done.stderr
    assert done.stderr.split() == ["WARNING"]


@pytest.mark.parametrize("whole", [False, True])
def test_a_directory_deleted_underneath_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    """It is begun again, but not where the whole cache directory is gone: a disk may have been taken off there."""
    (tmp_path / "cache").mkdir(0o700)
    store = open_store(tmp_path / "cache" / "kv")
    save(store, 0, 4)
    before = store.last_purge()
    shutil.rmtree(tmp_path / "cache" if whole else tmp_path / "cache" / "kv")
    for first in range(8, 80, 8):
        assert (save(store, first, 8) is None) == whole
        assert right(store, 0, 4) == 0
    assert right(store, 8, 72) == (0 if whole else 72)
    assert store.purges_after(before)[0].owner is None
    assert store.last_purge() != before
    assert (tmp_path / "cache").exists() != whole
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == whole
