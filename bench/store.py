"""How long a store directory takes to open, with its index and without: prints JSON.

python bench/store.py --files 10000 --out bench/results/store.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import struct
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from rich.progress import track

from semkv.stores.blocks import BlockStore

BLOCKS = 8
LAYOUT = {"row": 4096}


def blocks(file: int) -> list[bytes]:
    return [struct.pack(">QQ", file, i) * 2 for i in range(BLOCKS)]


def fill(root: Path, files: int) -> float:
    """Seconds to write ``files`` files of 8 blocks."""
    rows = list(np.zeros((BLOCKS, LAYOUT["row"]), np.uint8))
    store, start = BlockStore(root, "kv"), time.perf_counter()
    for file in track(range(files), "Writing"):
        store.write("ns", LAYOUT, blocks(file), rows)
    seconds = time.perf_counter() - start
    store.close()
    return seconds


def opened(root: Path) -> float:
    """Seconds until every block is found."""
    start = time.perf_counter()
    store = BlockStore(root, "kv")
    answered = time.perf_counter() - start
    assert all(store.find("ns", blocks(0)))
    store.close()
    return answered


def median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        root = Path(folder) / "kv"
        written = fill(root, args.files)
        with_index = [opened(root) for _ in range(5)]
        without = []
        for _ in range(3):
            for path in root.glob("index.sqlite*"):
                path.unlink()
            without.append(opened(root))
        found = {
            "files": args.files,
            "write_ms_per_file": round(1000 * written / args.files, 3),
            "open_s": median(with_index),
            "open_without_index_s": median(without),
            "load_average": os.getloadavg(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
        }
    print(json.dumps(found, indent=1))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
