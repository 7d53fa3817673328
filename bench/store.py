"""What the block store gives on a disk: writing, reading, opening. Prints JSON.

    python bench/store.py --dir /a/folder/on/the/disk --out bench/results/disk.json

Rows of Qwen2.5-7B's size (896 KiB, 16 tokens) in files of 256, dropped from the page cache before every reading. GB/s,
the median of ``--repeats``, by threads and by the bytes of one reading: ``store`` is `BlockStore.read`, every row
checked, ``plain`` the same files by ``preadv`` with O_DIRECT; ``write`` is `BlockStore.write` down to the disk, ``plain
write`` the same bytes by ``pwritev`` and ``fdatasync``. ``open`` are the seconds until ``--files`` small files are
found, with their index and without.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, write_json
from engines import drop_pages
from kv_load import read_rate

from semkv.stores.blocks import BlockStore, Bounds

LAYOUT, SMALL = {"layers": 28, "bytes": 32768}, {"row": 4096}
ROW = 28 * 32768
FILE = 256  # rows
BLOCKS = 8  # of a small file


def hashes(first: int, count: int) -> list[bytes]:
    return [i.to_bytes(8, "big") * 4 for i in range(first, first + count)]


def pages(rows: int) -> np.ndarray:
    """Rows that begin at a page, as vLLM's host memory does; all of it is there."""
    memory = np.frombuffer(mmap.mmap(-1, rows * ROW), np.uint8)
    memory[:] = 0
    return memory.reshape(rows, ROW)


def store_in(root: Path) -> BlockStore:
    return BlockStore(root, "kv", Bounds(max_bytes=1 << 50))


def rate(act: Callable[[int], object], starts: range, threads: int, nbytes: int) -> float:
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(act, starts))
    return round(nbytes / (time.perf_counter() - start) / 1e9, 2)


def write_rates(folder: Path, rows: int, threads: int) -> dict[str, float]:
    """GB/s of new rows."""
    data = pages(FILE)
    data[:] = np.random.default_rng(0).integers(0, 256, (FILE, ROW), dtype=np.uint8)

    def plain(first: int) -> None:
        fd = os.open(folder / f"plain{first}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.pwritev(fd, list(data), 0)
        os.fdatasync(fd)
        os.close(fd)

    with tempfile.TemporaryDirectory(dir=folder) as root:
        store, starts = store_in(Path(root) / "kv"), range(0, rows, FILE)
        ways = {"write": lambda first: store.write("ns", LAYOUT, hashes(first, FILE), list(data)), "plain write": plain}
        found = {name: rate(way, starts, threads, len(starts) * FILE * ROW) for name, way in ways.items()}
        store.close()
    for path in folder.glob("plain*"):
        path.unlink()
    return found


def fill(root: Path, rows: int) -> None:
    store, rng = store_in(root), np.random.default_rng(0)
    for first in range(0, rows, FILE):
        count = min(FILE, rows - first)
        data = rng.integers(0, 256, (count, ROW), dtype=np.uint8)
        assert store.write("ns", LAYOUT, hashes(first, count), list(data))
    store.close()


def store_rate(root: Path, target: np.ndarray, size: int, threads: int) -> float:
    """GB/s of all rows, ``size`` bytes at a time."""
    store, rows, most = store_in(root), len(target), max(1, size // ROW)

    def read(first: int) -> None:
        wanted = hashes(first, min(most, rows - first))
        refs = [ref for ref in store.find("ns", wanted) if ref is not None]
        assert sum(store.read(LAYOUT, "ns", wanted, refs, list(target[first : first + len(wanted)]))) == len(wanted)

    drop_pages(root)
    found = rate(read, range(0, rows, most), threads, rows * ROW)
    store.close()
    return found


def open_times(root: Path, files: int) -> dict[str, Any]:
    """Seconds until a store of small files answers; medians."""
    rows, store = list(np.zeros((BLOCKS, SMALL["row"]), np.uint8)), store_in(root)
    start = time.perf_counter()
    for file in range(files):
        store.write("ns", SMALL, hashes(file * BLOCKS, BLOCKS), rows)
    found: dict[str, Any] = {"files": files, "write_ms_per_file": round(1e3 * (time.perf_counter() - start) / files, 3)}
    store.close()

    def opened(*, index: bool) -> float:
        for path in root.glob("index.sqlite*") if not index else ():
            path.unlink()
        start = time.perf_counter()
        store = store_in(root)
        seconds = time.perf_counter() - start
        assert all(store.find("ns", hashes(0, BLOCKS)))
        store.close()
        return seconds

    for name, index in (("open_s", True), ("open_without_index_s", False)):
        found[name] = round(statistics.median(opened(index=index) for _ in range(3)), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16], help="MiB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--files", type=int, default=10_000, help="of the opening")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    result = {"machine": machine(), "row_bytes": ROW, "rows_read": options.rows, "rows": rows}
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder, root = Path(name), Path(name) / "kv"
        fill(root, options.rows)
        target = pages(options.rows)
        for threads in options.threads:
            gb_s = write_rates(folder, options.rows, threads) | {"plain": read_rate(root, threads)}
            rows.append({"threads": threads, "gb_s": gb_s})
            for size in options.sizes:
                found = [store_rate(root, target, size << 20, threads) for _ in range(options.repeats)]
                gb_s[f"store, {size} MiB"] = round(statistics.median(found), 2)
            print(rows[-1], flush=True)
        result["open"] = open_times(folder / "small", options.files)
    write_json(options.out, result)


if __name__ == "__main__":
    main()
