"""The catalog at several sizes: adding, finding, opening, bytes; and an exact hit of a short request. Prints JSON.

python bench/catalog.py --sizes 100000 1000000 > bench/results/catalog.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.stores.catalog import Catalog
from semkv.stores.catalog_rows import Record
from semkv.tiers.keying import Keyed
from semkv.tiers.record import make_record
from semkv.types import Namespace, Plan, Request, ReuseReport, Role, TextSegment

HERE = Namespace("tenant", "model")
console = Console(stderr=True)


def request(number: int) -> Request:
    system = TextSegment("You are a helpful assistant.", Role.SYSTEM)
    return Request(str(number), HERE, (system, TextSegment(f"What color is the car with number {number}?")))


def record(number: int, vector: np.ndarray) -> Record:
    report = ReuseReport(request(number), Plan(request(number).segments), {}, {"semantic_text": vector})
    return make_record(report, "red", {"semantic_text": vector}, {"semantic_text": "semantic_text@1"}, (), {}, number)


def microseconds(act: Callable[[int], object], numbers: Iterable[int]) -> dict[str, float]:
    taken = []
    for number in numbers:
        start = time.perf_counter()
        act(number)
        taken.append(1e6 * (time.perf_counter() - start))
    p50, p99 = np.percentile(taken, [50, 99])
    return {"p50_us": round(float(p50), 1), "p99_us": round(float(p99), 1)}


def one_size(folder: Path, count: int) -> dict[str, Any]:
    file = folder / "catalog.sqlite"
    vector = np.full(384, 384**-0.5, dtype=np.float32)
    catalog = Catalog(file, max_entries=2 * count)
    for number in track(range(count), f"{count:,} entries", console=console):
        catalog.add(record(number, vector))
    ready = [record(count + n, vector) for n in range(500)]
    row: dict[str, Any] = {"entries": count}
    row["add"] = microseconds(lambda n: catalog.add(ready[n]), range(500))
    catalog.close()
    with sqlite3.connect(file) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    row["bytes_per_entry"] = round(file.stat().st_size / count)
    start = time.perf_counter()
    catalog = Catalog(file, max_entries=2 * count)
    row["open_ms"] = round(1e3 * (time.perf_counter() - start), 2)
    some = np.random.default_rng(0).integers(0, count, 500).tolist()
    keys = {n: (k := Keyed.of(HERE, request(n).segments)).whole(k.exact, "exact") for n in some}
    row["find_first"] = microseconds(lambda n: catalog.find(keys[n]), some)
    row["find_again"] = microseconds(lambda n: catalog.find(keys[n]), some)
    start = time.perf_counter()
    after = 0
    while rows := catalog.vectors(["semantic_text@1"], after, 4096):
        after = rows[-1].number
    row["read_all_vectors_s"] = round(time.perf_counter() - start, 2)
    catalog.close()
    with SemanticCache(CacheConfig(folder, semantic=False, max_entries=2 * count)) as cache:
        asked = {n: replace(request(n)) for n in some}
        row["exact_hit_first"] = microseconds(lambda n: cache.try_reuse(asked[n]), some)
        row["exact_hit_again"] = microseconds(lambda n: cache.try_reuse(asked[n]), some * 4)
        assert all(cache.try_reuse(asked[n]).hit for n in some)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000])
    options = parser.parse_args()
    rows = []
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(one_size(Path(folder), size))
    machine = {"arch": platform.machine(), "python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    print(json.dumps({"machine": machine, "sizes": rows}, indent=1))


if __name__ == "__main__":
    main()
