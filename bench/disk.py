"""How fast blocks go to a disk and come back: the ways to read, and what the store's own paths give. JSON.

    python bench/disk.py --dir /a/folder/on/the/disk --out bench/results/disk.json

Files of rows of Qwen2.5-7B's size (896 KiB, 16 tokens), dropped from the page cache before every reading:

    buffered    ``preadv``                       ahead       the same after ``posix_fadvise`` WILLNEED of the whole part
    direct      ``preadv`` with O_DIRECT         store       `BlockStore.read`, every row checked
    store through the cache                      the same without direct reading

by threads and by the bytes of one reading. GB/s, the median of ``--repeats``. ``write`` is `BlockStore.write`, a file
of 256 rows at a time, by threads, down to the disk; ``plain write`` the same bytes by ``pwritev`` and ``fdatasync``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from engines import drop_pages, files_of

from semkv.stores import block_file
from semkv.stores.blocks import BlockStore, Bounds

LAYOUT = {"layers": 28, "bytes": 32768}
ROW = 28 * 32768
WAYS = ("buffered", "ahead", "direct", "store through the cache", "store")
FILE = 256  # rows


def block_hash(i: int) -> bytes:
    return i.to_bytes(8, "big") * 4


def pages(count: int) -> np.ndarray:
    """Bytes that begin at a page, as vLLM's host memory does; all of them are there."""
    memory = np.frombuffer(mmap.mmap(-1, count), np.uint8)
    memory[:] = 0
    return memory


def store_in(root: Path) -> BlockStore:
    return BlockStore(root, "kv", Bounds(max_bytes=1 << 50))


def write_rates(folder: Path, rows: int, threads: int) -> dict[str, float]:
    """GB/s of ``rows`` new rows in files of `FILE`."""
    data = pages(FILE * ROW).reshape(FILE, ROW)
    data[:] = np.random.default_rng(0).integers(0, 256, (FILE, ROW), dtype=np.uint8)
    starts = range(0, rows, FILE)

    def plain_write(first: int) -> None:
        fd = os.open(folder / f"plain{first}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwritev(fd, list(data), 0)
        os.fdatasync(fd)
        os.close(fd)

    with tempfile.TemporaryDirectory(dir=folder) as root, ThreadPoolExecutor(threads) as pool:
        store = store_in(Path(root) / "kv")

        def write(first: int) -> None:
            assert store.write("ns", LAYOUT, [block_hash(i) for i in range(first, first + FILE)], list(data))

        found = {}
        for name, way in (("write", write), ("plain write", plain_write)):
            start = time.perf_counter()
            list(pool.map(way, starts))
            found[name] = round(len(starts) * FILE * ROW / (time.perf_counter() - start) / 1e9, 2)
        store.close()
    for path in folder.glob("plain*"):
        path.unlink()
    return found


def fill(root: Path, rows: int) -> None:
    store, rng = store_in(root), np.random.default_rng(0)
    for first in range(0, rows, FILE):
        count = min(FILE, rows - first)
        data = rng.integers(0, 256, (count, ROW), dtype=np.uint8)
        assert store.write("ns", LAYOUT, [block_hash(i) for i in range(first, first + count)], list(data))
    store.close()


Part = tuple[Path, int, memoryview]


def plain(part: Part, *, ahead: bool = False, direct: bool = False) -> None:
    path, at, out = part
    fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    if ahead:
        os.posix_fadvise(fd, at, len(out), os.POSIX_FADV_WILLNEED)
    done = 0
    while done < len(out):
        got = os.preadv(fd, [out[done:]], at + done)
        if got <= 0:
            break
        done += got
    os.close(fd)


def ways(files: list[Path], memory: np.ndarray, size: int) -> dict[str, Callable[[ThreadPoolExecutor], int]]:
    parts: list[Part] = []
    at, flat = 0, memory.data.cast("B")
    for path in files:
        length = path.stat().st_size // 4096 * 4096
        for first in range(0, length, size):
            count = min(size, length - first)
            parts.append((path, first, flat[at : at + count]))
            at += count

    def way(**how: bool) -> Callable[[ThreadPoolExecutor], int]:
        def read(pool: ThreadPoolExecutor) -> int:
            list(pool.map(lambda part: plain(part, **how), parts))
            return at

        return read

    return {"buffered": way(), "ahead": way(ahead=True), "direct": way(direct=True)}


def through_store(
    root: Path, memory: np.ndarray, rows: int, size: int, *, direct: bool
) -> Callable[[ThreadPoolExecutor], int]:
    store, most = store_in(root), max(1, size // ROW)
    target = memory[: rows * ROW].reshape(rows, ROW)

    def one(first: int) -> int:
        wanted = [block_hash(i) for i in range(first, min(first + most, rows))]
        refs = [ref for ref in store.find("ns", wanted) if ref is not None]
        return sum(store.read(LAYOUT, "ns", wanted, refs, list(target[first : first + len(wanted)])))

    def read(pool: ThreadPoolExecutor) -> int:
        with contextlib.nullcontext() if direct else patch.object(block_file, "_read_direct", lambda *how: how[-1]):
            assert sum(pool.map(one, range(0, rows, most))) == rows
        return rows * ROW

    return read


def rate(folder: Path, read: Callable[[ThreadPoolExecutor], int], threads: int, repeats: int) -> float:
    found = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            drop_pages(folder)
            start = time.perf_counter()
            nbytes = read(pool)
            found.append(nbytes / (time.perf_counter() - start) / 1e9)
    return round(statistics.median(found), 2)


def write(out: Path, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """The rows so far, in one piece: a run that is cut off leaves what it measured."""
    result = {
        "rows": rows, "settings": {"rows": options.rows, "row_bytes": ROW, "repeats": options.repeats},
        "python": platform.python_version(), "cores": os.cpu_count(), "load_average": os.getloadavg(),
    }  # fmt: skip
    part = out.with_name(f"{out.name}.tmp")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16], help="MiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=[*WAYS])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        root = Path(folder) / "kv"
        fill(root, options.rows)
        files = [path for path in sorted(files_of(root)) if path.stat().st_size >= ROW]
        memory = pages(options.rows * ROW + (len(files) << 20))
        for threads in options.threads:
            rows.append({"threads": threads, "gb_s": write_rates(Path(folder), options.rows, threads)})
            print(rows[-1], flush=True)
        for size in options.sizes:
            found = ways(files, memory, size << 20)
            for name, direct in (("store through the cache", False), ("store", True)):
                found[name] = through_store(root, memory, options.rows, size << 20, direct=direct)
            for threads in options.threads:
                gb_s = {way: rate(root, found[way], threads, options.repeats) for way in options.ways}
                rows.append({"mib": size, "threads": threads, "gb_s": gb_s})
                print(rows[-1], flush=True)
                if options.out:
                    write(options.out, rows, options)


if __name__ == "__main__":
    main()
