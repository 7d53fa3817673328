"""How fast extents come from a disk into host memory: the ways to read, and what the store's own path gives. JSON.

    python bench/disk.py --dir /a/folder/on/the/disk --out bench/results/disk.json

Files of rows of Qwen2.5-7B's size, dropped from the page cache before every reading (``posix_fadvise``, DONTNEED):

    buffered    ``preadv``                       ahead       the same after ``posix_fadvise`` WILLNEED of the whole part
    direct      ``preadv`` with O_DIRECT         store       `KVStore.read_rows`, every row checked
    store through the cache                      the same without direct reading

by threads and by the bytes of one reading. GB/s, the median of ``--repeats``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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

from semkv.connectors.host import allocate
from semkv.stores import container
from semkv.stores.blocks import KVLayout, KVStore, LayerLayout
from semkv.stores.bounds import Bounds

LAYOUT = KVLayout(tuple(LayerLayout(f"layer{i}", "bfloat16", (1, 16384), (16384, 1), 32768) for i in range(28)), 16)
ROW = LAYOUT.row_bytes
WAYS = ("buffered", "ahead", "direct", "store through the cache", "store")
EXTENT = 256  # rows, as the connector writes them


def block_hash(i: int) -> bytes:
    return i.to_bytes(8, "big") * 4


def fill(root: Path, rows: int) -> None:
    store, rng = KVStore.open(root, "ns", LAYOUT, Bounds(0)), np.random.default_rng(0)
    for first in range(0, rows, EXTENT):
        count = min(EXTENT, rows - first)
        data = rng.integers(0, 256, (count, ROW), dtype=np.uint8)
        store.save_rows([block_hash(i) for i in range(first, first + count)], data, position=first)
    store.close()


def drop(files: list[Path]) -> None:
    os.sync()
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


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
    store, most = KVStore.open(root, "ns", LAYOUT, Bounds(0)), max(1, size // ROW)
    target = memory[: rows * ROW].reshape(rows, ROW)

    def one(first: int) -> int:
        wanted = [block_hash(i) for i in range(first, min(first + most, rows))]
        return len(store.read_rows(wanted, target[first : first + len(wanted)]))

    def read(pool: ThreadPoolExecutor) -> int:
        with contextlib.nullcontext() if direct else patch.object(container, "_read_direct", lambda *how: how[-1]):
            assert sum(pool.map(one, range(0, rows, most))) == rows
        return rows * ROW

    return read


def rate(files: list[Path], read: Callable[[ThreadPoolExecutor], int], threads: int, repeats: int) -> float:
    found = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            drop(files)
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
        files = sorted((root / "extents").glob("??/*"))
        memory = allocate(options.rows * ROW + (len(files) << 20)).memory
        memory[:] = 0  # its pages are there, as in an engine's host memory
        for size in options.sizes:
            found = ways(files, memory, size << 20)
            for name, direct in (("store through the cache", False), ("store", True)):
                found[name] = through_store(root, memory, options.rows, size << 20, direct=direct)
            for threads in options.threads:
                gb_s = {way: rate(files, found[way], threads, options.repeats) for way in options.ways}
                rows.append({"mib": size, "threads": threads, "gb_s": gb_s})
                print(rows[-1], flush=True)
                if options.out:
                    write(options.out, rows, options)


if __name__ == "__main__":
    main()
