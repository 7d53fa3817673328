"""What a step's loads cost: the requests of a step in one copy, or one copy after the other. Prints JSON.

    python bench/transfer.py --out bench/results/transfer.json                   (any machine: the processor's work)
    python bench/transfer.py --layers 28 --layer-bytes 32768 --out ...           (on a GPU: Qwen2.5-7B's blocks)

Times are medians, in milliseconds, for ``--requests`` requests of ``--blocks`` blocks each whose rows are in host
memory: ``plan`` is what asking for them costs (keys, lookups, pins), ``submit`` until the calls return, ``land`` until
the bytes are there. On a CPU ``submit`` is everything; with small blocks it is the cost of the calls.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semkv.connectors.kv_transfer import Job, Landing, PagedTransfer
from semkv.connectors.kv_worker import KVWorker
from semkv.connectors.settings import KVSettings
from semkv.stores.bounds import Bounds
from semkv.stores.extents import ExtentStore
from semkv.stores.host_memory import HostMemories

NAMESPACE = "n" * 64


def hashes(request: int, blocks: int) -> list[bytes]:
    return [struct.pack(">QQ", request, i) * 2 for i in range(blocks)]


def filled(options: argparse.Namespace, folder: str) -> tuple[KVWorker, PagedTransfer]:
    """A worker whose host memory holds every block."""
    total = options.requests * options.blocks
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width = options.layer_bytes // 2
    caches = {
        f"layer{i:03}": torch.zeros(total + 1, width, dtype=torch.bfloat16, device=device)
        for i in range(options.layers)
    }
    transfer = PagedTransfer(caches, total + 1, 16, "bench", options.staging_mib << 20)
    settings = KVSettings(Path(folder), host_bytes=(total + 1) * transfer.layout.row_bytes)
    worker = KVWorker(
        settings,
        ExtentStore(Path(folder) / "kv", "kv", Bounds()),
        transfer,
        engine="e",
        rank=0,
        memories=HostMemories(),
    )
    for request in range(options.requests):
        keys = worker._keys(NAMESPACE, hashes(request, options.blocks))
        worker.pool.reserve(keys)
        worker.pool.publish(keys)
        worker.pool.release(keys)
    return worker, transfer


def measure(options: argparse.Namespace, worker: KVWorker, transfer: PagedTransfer) -> dict[str, dict[str, float]]:
    ids = np.random.default_rng(0).permutation(options.requests * options.blocks).tolist()
    ways: dict[str, Callable[[list[Job]], list[Landing]]] = {
        "together": transfer.copy_in,
        "one by one": lambda jobs: [transfer.copy_in([job])[0] for job in jobs],
    }
    times: dict[str, dict[str, list[float]]] = {way: {"plan": [], "submit": [], "land": []} for way in ways}
    for number in range(options.repeats + 1):
        for way, copy in ways.items():
            start = time.perf_counter()
            jobs, pinned = [], []
            for request in range(options.requests):
                wanted = hashes(request, options.blocks)
                assert worker.available(str(request), NAMESPACE, wanted) == options.blocks
                keys = worker._keys(NAMESPACE, wanted)
                rows = [worker.pool.view(run) for run in worker.pool.pin(keys)]
                jobs.append(Job(rows, ids[request * options.blocks : (request + 1) * options.blocks]))
                pinned.append(keys)
            planned = time.perf_counter()
            landings = copy(jobs)
            submitted = time.perf_counter()
            for landing in landings:
                landing.wait()
            landed = time.perf_counter()
            for keys in pinned:
                worker.pool.release(keys)
            if number:
                times[way]["plan"].append(planned - start)
                times[way]["submit"].append(submitted - planned)
                times[way]["land"].append(landed - planned)
    return {
        way: {name: round(1e3 * statistics.median(values), 3) for name, values in parts.items()}
        for way, parts in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--layer-bytes", type=int, default=64)
    parser.add_argument("--staging-mib", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # the calls are what is measured, and threads of a busy machine wait for each other
    rows: list[dict[str, Any]] = []
    for blocks in options.blocks:
        options.blocks = blocks
        with tempfile.TemporaryDirectory() as folder:
            worker, transfer = filled(options, folder)
            nbytes = options.requests * blocks * transfer.layout.row_bytes
            rows.append({"blocks": blocks, "bytes": nbytes, "ms": measure(options, worker, transfer)})
            worker.close()
        print(rows[-1], flush=True)
    found = {
        "settings": {name: getattr(options, name) for name in ("requests", "layers", "layer_bytes", "staging_mib")},
        "rows": rows,
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
    }
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
