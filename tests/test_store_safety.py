"""Nothing lost, nothing wrong, nothing over its bound: crashes, damage, churn and many processes on one directory."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from semkv.errors import CorruptValue
from semkv.stores import block_index
from semkv.stores.blocks import KVLayout, KVStore, LayerLayout
from semkv.stores.bounds import Bounds
from semkv.stores.container import ExtentFile, ExtentHeader, checksum, encode_head

ROW = 512
LAYOUT = KVLayout(tuple(LayerLayout(f"layer{i}", "bfloat16", (1, 128), (128, 1), 256) for i in range(2)), 16, "TEST")
OTHER = KVLayout(LAYOUT.layers, 32, "TEST")
SPAWN = multiprocessing.get_context("spawn")


def key(i: int) -> bytes:
    return struct.pack(">Q", i) * 4


def value(i: int) -> np.ndarray:
    """The one right content of block ``i``."""
    return np.random.default_rng(i).integers(0, 256, ROW, dtype=np.uint8)


def save(kv: KVStore, first: int, count: int) -> str | None:
    blocks = range(first, first + count)
    return kv.save_rows([key(i) for i in blocks], np.stack([value(i) for i in blocks]))


def right(kv: KVStore, first: int, count: int) -> int:
    """How many blocks are served, each of them checked."""
    rows = kv.read_rows([key(i) for i in range(first, first + count)])
    for i, row in enumerate(rows):
        assert np.array_equal(row, value(first + i)), f"block {first + i}"
    return len(rows)


def on_disk(root: Path) -> int:
    total = 0
    for path in (root / "extents").glob("??/*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def open_store(root: Path, bounds: Bounds | None = None, layout: KVLayout = LAYOUT) -> KVStore:
    return KVStore.open(root, "ns", layout, bounds)


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
    kv, rng, faults = open_store(root, bounds), random.Random(seed), 0
    for number in range(rounds):
        first = 8 * rng.randrange(400)
        holder = f"{seed}-{number}"
        found = kv.lookup([key(i) for i in range(first, first + 8)], holder)
        if found:
            faults += right(kv, first, found) != found  # what a lookup promised and holds must be there
        else:
            save(kv, first, 8)
        kv.release(holder)
    sink.send((faults, dict(kv.stats().counters)))


def test_bounds_hold_at_every_moment_and_no_load_is_evicted_under_churn(memory: Path) -> None:
    """Four processes write ten times what fits, on one directory, while its size is read all the time."""
    bounds = Bounds(max_bytes=300_000)
    open_store(memory / "kv", bounds).close()
    pipes = [SPAWN.Pipe(duplex=False) for _ in range(4)]
    writers = [
        SPAWN.Process(target=_churn, args=(memory / "kv", bounds, seed, 250, sink))
        for seed, (_, sink) in enumerate(pipes)
    ]
    for writer in writers:
        writer.start()
    most = 0
    with contextlib.closing(sqlite3.connect(memory / "kv" / "index.sqlite", isolation_level=None, timeout=30)) as db:
        while any(writer.is_alive() for writer in writers):
            db.execute("BEGIN IMMEDIATE")  # the size of one moment: nobody evicts while the files are counted
            most = max(most, on_disk(memory / "kv"))
            db.execute("ROLLBACK")
            time.sleep(0.002)
    results = [source.recv() for source, _ in pipes]
    written = sum(counters["stored_bytes"] for _, counters in results)
    assert 150_000 < most <= bounds.max_bytes
    assert written > 10 * bounds.max_bytes
    assert sum(faults for faults, _ in results) == 0
    assert sum(counters["evicted_extents"] for _, counters in results) > 100
    kv = open_store(memory / "kv", bounds)
    assert kv.stats().nbytes == on_disk(memory / "kv") <= bounds.max_bytes


def test_a_walk_through_many_extents_does_not_push_out_what_is_used_again(tmp_path: Path) -> None:
    bounds = Bounds(max_bytes=60_000)
    kv = open_store(tmp_path / "kv", bounds)
    for _ in range(2):
        for first in range(0, 32, 8):
            if not right(kv, first, 8):
                save(kv, first, 8)
    for first in range(1000, 1800, 8):  # each once
        save(kv, first, 8)
    assert [right(kv, first, 8) for first in range(0, 32, 8)] == [8, 8, 8, 8]


# -- crashes --------------------------------------------------------------------------------------------------------


def write_until_killed(root: Path, bounds: Bounds, seed: int) -> None:
    """Store and read for ever; what is acknowledged is a line on the standard output."""
    kv, rng = open_store(root, bounds), random.Random(seed)
    os.write(1, b"ready\n")
    while True:
        first = 8 * rng.randrange(2000)
        if save(kv, first, rng.randint(1, 8)):
            os.write(1, b"%d\n" % first)
        right(kv, 8 * rng.randrange(2000), 8)


# A process that has everything imported and forks one writer for each line: the seed. It tells the writer's id first,
# and its end.
FORKS_WRITERS = """
import os, sys
from pathlib import Path
from semkv.stores.bounds import Bounds
from test_store_safety import write_until_killed
for line in sys.stdin:
    if pid := os.fork():
        os.waitpid(pid, 0)
        os.write(1, b"dead\\n")
    else:
        os.write(1, b"%d\\n" % os.getpid())
        write_until_killed(Path(sys.argv[1]), Bounds(max_bytes=int(sys.argv[2])), int(line))
"""


@contextlib.contextmanager
def writers(root: Path, bounds: Bounds) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", FORKS_WRITERS, str(root), str(bounds.max_bytes)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, bufsize=1, **pipes) as parent:  # type: ignore[call-overload]
        yield parent
        parent.stdin.close()


def test_killed_at_any_moment_the_store_opens_and_serves_only_what_is_right(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 at 200 random moments of capture, eviction and commit; every tenth time with the index thrown away."""
    root, bounds, rng = memory / "kv", Bounds(max_bytes=400_000), random.Random(7)
    kept = 0
    with writers(root, bounds) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for number in range(200):
            parent.stdin.write(f"{number}\n")
            pid = int(parent.stdout.readline())
            assert parent.stdout.readline() == "ready\n"
            saved = [int(parent.stdout.readline()) for _ in range(rng.randrange(4))]
            time.sleep(rng.uniform(0, 0.01))
            os.kill(pid, signal.SIGKILL)
            saved += [int(line) for line in iter(parent.stdout.readline, "dead\n")]
            if number % 10 == 9:
                (root / "index.sqlite").unlink()
                for suffix in ("-wal", "-shm"):
                    (root / f"index.sqlite{suffix}").unlink(missing_ok=True)
            kv = open_store(root, bounds)
            assert kv.on
            named = set(kv._extents.extents())
            there = {path.name.partition(".")[0] for path in (root / "extents").glob("??/*")}
            assert there <= named  # no file that nobody knows outlives a start
            assert on_disk(root) <= bounds.max_bytes
            kv.adopt()
            kept += sum(right(kv, first, 1) for first in saved[-8:])
            assert not kv.stats().counters.get("corrupt")
            kv.close()
    assert kept > 200  # the latest acknowledged values survive the kill
    monkeypatch.setattr(block_index, "PENDING_SECONDS", 0.0)  # dead writers' reservations are given up in time
    kv = open_store(root, bounds)
    assert kv.stats().extents == len(list((root / "extents").glob("??/*.safetensors")))
    assert not list((root / "extents").glob("??/*.tmp"))


# -- damage ---------------------------------------------------------------------------------------------------------


def _flip(path: Path, rng: random.Random, _: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _truncate(path: Path, rng: random.Random, _: list[Path]) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def _grow(path: Path, rng: random.Random, _: list[Path]) -> None:
    with path.open("ab") as f:
        f.write(rng.randbytes(rng.randint(1, 4096)))


def _zero(path: Path, rng: random.Random, _: list[Path]) -> None:
    data = bytearray(path.read_bytes())
    start = rng.randrange(len(data) - 64)
    data[start : start + 64] = bytes(64)
    path.write_bytes(data)


def _swap(path: Path, rng: random.Random, every: list[Path]) -> None:
    other = rng.choice([p for p in every if p != path])
    shelf = path.with_suffix(".shelf")
    path.rename(shelf)
    other.rename(path)
    shelf.rename(other)


def _relabel(path: Path, rng: random.Random, _: list[Path]) -> None:
    """A well-formed file of another layout, model, kind, version or set of blocks."""
    with ExtentFile.open(path) as file:
        header, rows = file.header, np.empty((len(file.header.hashes), file.row_bytes), np.uint8)
        file.read_rows(0, rows)
    other = {f: getattr(header, f) for f in header.__slots__}
    field = rng.choice(["version", "kind", "namespace", "layout", "hashes", "extent", "checksums"])
    changes = {
        "version": header.version + 1,
        "kind": "fusion",
        "namespace": "another model",
        "layout": OTHER.document(),
        "hashes": header.hashes[::-1],
        "extent": "f" * 32,
        "checksums": header.checksums[::-1],
    }
    path.write_bytes(encode_head(ExtentHeader(**{**other, field: changes[field]}), rows.shape) + rows.tobytes())


def _remove(path: Path, rng: random.Random, _: list[Path]) -> None:
    path.unlink()


FAULTS = [_flip, _truncate, _grow, _zero, _swap, _relabel, _remove]


def test_a_thousand_faults_are_a_thousand_counted_misses(memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    pristine, rng = memory / "pristine", random.Random(3)
    kv = open_store(pristine)
    for first in (0, 4, 8):
        assert save(kv, first, 4)
    kv.close()
    logging.disable(logging.WARNING)
    try:
        for number in range(1000):
            root = memory / "kv"
            shutil.copytree(pristine, root)
            every = sorted((root / "extents").glob("??/*.safetensors"))
            FAULTS[number % len(FAULTS)](rng.choice(every), rng, every)
            kv = open_store(root)
            served = right(kv, 0, 4) + right(kv, 4, 4) + right(kv, 8, 4)
            counters = kv.stats().counters
            assert served < 12, FAULTS[number % len(FAULTS)].__name__
            assert counters.get("corrupt", 0) + counters.get("missing", 0) >= 1
            if number % 20 == 0:  # and the place is free again
                assert save(kv, 0, 4) or right(kv, 0, 4) == 4
            kv.close()
            shutil.rmtree(root)
    finally:
        logging.disable(logging.NOTSET)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=st.binary(max_size=300), length=st.integers(0, 2**64 - 1), text=st.text(max_size=80))
def test_the_reader_takes_any_bytes(tmp_path: Path, junk: bytes, length: int, text: str) -> None:
    document = json.dumps({"__metadata__": {"semkv": text, "checksum": ""}, "blocks": text}).encode()
    path = tmp_path / "file"
    for data in (
        junk,
        struct.pack("<Q", length) + junk,
        struct.pack("<Q", len(junk)) + junk,
        struct.pack("<Q", len(document)) + document + junk,
    ):
        path.write_bytes(data)
        with pytest.raises(CorruptValue):
            ExtentFile.open(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    field=st.sampled_from(sorted(ExtentHeader.__slots__)),
    junk=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8), lambda x: st.lists(x, max_size=3)
    ),
)
def test_the_reader_takes_any_header(tmp_path: Path, field: str, junk: object) -> None:
    rows = np.zeros((2, 8), np.uint8)
    good = {
        "version": 1,
        "kind": "kv",
        "extent": "e" * 32,
        "namespace": "n",
        "layout": 1,
        "hashes": ("00", "01"),
        "checksums": tuple(checksum(r) for r in rows),
        "position": 0,
    }
    path = tmp_path / "file"
    path.write_bytes(encode_head(ExtentHeader(**{**good, field: junk}), rows.shape) + rows.tobytes())  # type: ignore[arg-type]
    out = np.empty((2, 8), np.uint8)
    with contextlib.suppress(CorruptValue), ExtentFile.open(path) as file:
        file.read_rows(0, out)
        assert not out.any()


# -- a disk that fails ----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no right to mount a file system here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_ends_writing_with_one_warning(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    kv = open_store(small_disk / "kv")
    assert save(kv, 0, 4)
    for first in range(8, 2000, 8):
        save(kv, first, 8)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    assert kv.on
    assert not kv._extents.writable
    assert right(kv, 0, 4) == 4


def test_a_read_only_file_system_is_one_warning(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    kv = open_store(small_disk / "kv")
    save(kv, 0, 4)
    kv.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    kv = open_store(small_disk / "kv")
    for first in range(8, 80, 8):
        assert save(kv, first, 8) is None
        assert right(kv, 0, 4) in (0, 4)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


@pytest.mark.parametrize("whole", [False, True])
def test_a_directory_deleted_underneath_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    """It is begun again, but not where the whole cache directory is gone: a disk may have been taken off there."""
    (tmp_path / "cache").mkdir()
    kv = open_store(tmp_path / "cache" / "kv")
    save(kv, 0, 4)
    shutil.rmtree(tmp_path / "cache" if whole else tmp_path / "cache" / "kv")
    for first in range(8, 80, 8):
        assert (save(kv, first, 8) is None) == whole
        assert right(kv, 0, 4) == 0
    assert right(kv, 8, 72) == (0 if whole else 72)
    assert (tmp_path / "cache").exists() != whole
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


# -- against a model ------------------------------------------------------------------------------------------------


class AgainstModel(RuleBasedStateMachine):
    """The store beside a dictionary: it may forget, it may not invent, exceed its bound or lose what is held."""

    runs = Bundle("runs")

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.root, self.bounds = Path(self.folder.name) / "kv", Bounds(max_bytes=12_000, max_blocks=14)
        self.kv = open_store(self.root, self.bounds)
        self.saved: set[int] = set()
        self.held: dict[str, tuple[int, int]] = {}

    def teardown(self) -> None:
        self.kv.close()
        self.folder.cleanup()

    @rule(target=runs, first=st.integers(0, 30), count=st.integers(1, 6))
    def save(self, first: int, count: int) -> tuple[int, int]:
        save(self.kv, first, count)
        self.saved |= set(range(first, first + count))
        return first, count

    @rule(run=runs)
    def read(self, run: tuple[int, int]) -> None:
        found = self.kv.lookup([key(i) for i in range(run[0], run[0] + run[1])])
        assert right(self.kv, *run) == found

    @rule(run=runs, holder=st.sampled_from("ab"))
    def hold(self, run: tuple[int, int], holder: str) -> None:
        self.let_go(holder)
        found = self.kv.lookup([key(i) for i in range(run[0], run[0] + run[1])], holder)
        self.held[holder] = (run[0], found)

    @rule(holder=st.sampled_from("ab"))
    def let_go(self, holder: str) -> None:
        self.kv.release(holder)
        self.held.pop(holder, None)

    @rule()
    def open_again(self) -> None:
        self.kv.close()
        self.kv = open_store(self.root, self.bounds)

    @rule()
    def purge(self) -> None:
        self.kv.purge()
        self.saved.clear()
        self.held.clear()

    @invariant()
    def bounded_and_right(self) -> None:
        if not hasattr(self, "kv"):
            return
        stats = self.kv.stats()
        assert stats.blocks <= 14
        assert stats.nbytes == on_disk(self.root) <= 12_000
        for first, count in self.held.values():
            assert right(self.kv, first, count) == count
        for i in range(37):
            assert right(self.kv, i, 1) <= (i in self.saved)


AgainstModel.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestAgainstModel = AgainstModel.TestCase


if __name__ == "__main__":
    sys.exit(pytest.main([__file__]))
