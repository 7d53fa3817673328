"""The catalog at several sizes: adding, finding, bytes; an exact hit of a short request; a cache opened on it.

Each size runs in a process of its own, for its memory. The file is filled before the lock is taken, where one is given;
what is timed afterwards holds it. A cache is opened twice, without the graphs that were kept and with them. With
``--folder`` the files stay, and ``--restart`` only opens them, with ``--load`` once the machine is as quiet as that.
Prints JSON.

    python bench/catalog.py --sizes 100000 1000000 > bench/results/catalog.json
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from quiet import quiet, resident
from rich.console import Console
from rich.progress import track

from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.stores.catalog import Catalog
from semkv.stores.catalog_rows import Record
from semkv.tiers.matching import make_record
from semkv.tiers.prompt_keys import Keyed
from semkv.types import Namespace, Plan, Request, ReuseReport, Role, TextSegment

HERE = Namespace("tenant", "model")
console = Console(stderr=True)


class Drawn:
    """Takes the place of a text encoder: some unit vector for every text, at once."""

    dim, fingerprint = 384, "drawn"

    def fits(self, text: str) -> bool:
        return True

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.stack([np.random.default_rng(len(text)).normal(size=self.dim) for text in texts])
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


LAYER = f"semantic_text@{Drawn.fingerprint}"


def request(number: int) -> Request:
    system = TextSegment("You are a helpful assistant.", Role.SYSTEM)
    return Request(str(number), HERE, (system, TextSegment(f"What color is the car with number {number}?")))


def record(number: int, vector: np.ndarray) -> Record:
    report = ReuseReport(request(number), Plan(request(number).segments), {}, {"semantic_text": vector})
    return make_record(report, "red", {"semantic_text": vector}, {"semantic_text": LAYER}, (), {}, number)


def vectors(count: int) -> Iterable[np.ndarray]:
    random = np.random.default_rng(0)
    for start in range(0, count, 1000):
        page = random.normal(size=(min(1000, count - start), Drawn.dim)).astype(np.float32)
        yield from page / np.linalg.norm(page, axis=1, keepdims=True)


def microseconds(act: Callable[[int], object], numbers: Iterable[int]) -> dict[str, float]:
    taken = []
    for number in numbers:
        start = time.perf_counter()
        act(number)
        taken.append(1e6 * (time.perf_counter() - start))
    p50, p99 = np.percentile(taken, [50, 99])
    return {"p50_us": round(float(p50), 1), "p99_us": round(float(p99), 1)}


def one_size(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = {"entries": options.one}
    if not options.restart:
        row |= filled(folder, options.one, options.lock)
    with quiet(options.lock, again := {}, options.load):
        row["opened"] = again
        kept, aside = folder / "graphs", folder / "aside"
        kept.rename(aside)
        again["without_kept_graphs"] = opened(folder, options.one)
        shutil.rmtree(kept, ignore_errors=True)  # what was built in that time
        aside.rename(kept)
        again["with_kept_graphs"] = opened(folder, options.one)
    return row


def filled(folder: Path, count: int, lock: Path | None) -> dict[str, Any]:
    file = folder / "catalog.sqlite"
    row: dict[str, Any] = {}
    start = time.perf_counter()
    catalog = Catalog(file, max_entries=2 * count)
    filling = track(vectors(count), f"{count:,} entries", count, console=console)
    for number, vector in enumerate(filling):
        catalog.add(record(number, vector))
    row["filled_s"] = round(time.perf_counter() - start, 1)
    with quiet(lock, row):
        ready = [record(count + n, vector) for n, vector in enumerate(vectors(500))]
        row["add"] = microseconds(lambda n: catalog.add(ready[n]), range(500))
        catalog.close()
        with sqlite3.connect(file) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        row["file_bytes_per_entry"] = round(file.stat().st_size / count)
        row |= read(file, count)
        row["exact"] = exact_hits(folder, count)
        row["add_when_full"] = make_room(file, count)
    start = time.perf_counter()
    with SemanticCache(CacheConfig(folder, max_entries=2 * count), text_encoder=Drawn()) as cache:
        for index in cache._matching._similar.indexes():
            index.settle()
        row["graphs_built_s"] = round(time.perf_counter() - start, 1)
        start = time.perf_counter()
    row["closed_s"] = round(time.perf_counter() - start, 2)
    graphs = sum(file.stat().st_size for file in folder.glob("graphs/*/*"))
    row["graph_bytes_per_entry"] = round(graphs / count)
    return row


def make_room(file: Path, count: int) -> dict[str, Any]:
    """Adding to a full catalog, where every so often an addition takes away what was used least recently."""
    ready = [record(2 * count + n, vector) for n, vector in enumerate(vectors(4000))]
    catalog = Catalog(file, max_entries=count)
    catalog.add(ready.pop())  # takes away what the additions before were too many
    taken, went = [], 0
    for one in ready:
        start = time.perf_counter()
        went += len(catalog.add(one)[1].entry_ids)
        taken.append(time.perf_counter() - start)
    catalog.close()
    return {
        "p50_us": round(1e6 * float(np.median(taken)), 1),
        "mean_us": round(1e6 * float(np.mean(taken)), 1),
        "longest_ms": round(1e3 * max(taken), 1),
        "added": len(ready),
        "removed": went,
    }


def read(file: Path, count: int) -> dict[str, Any]:
    before = resident()
    start = time.perf_counter()
    catalog = Catalog(file, max_entries=2 * count)
    row: dict[str, Any] = {"open_ms": round(1e3 * (time.perf_counter() - start), 2)}
    some = np.random.default_rng(0).integers(0, count, 500).tolist()
    keys = {n: (k := Keyed.of(HERE, request(n).segments)).whole(k.exact, "exact") for n in some}
    row["find_first"] = microseconds(lambda n: catalog.find(keys[n]), some)
    row["find_again"] = microseconds(lambda n: catalog.find(keys[n]), some)
    row["memory_mb"] = round((resident() - before) / 1e6, 1)
    start = time.perf_counter()
    after = 0
    while rows := catalog.vectors([LAYER], after, 4096):
        after = rows[-1].number
    row["read_all_vectors_s"] = round(time.perf_counter() - start, 2)
    catalog.close()
    return row


def exact_hits(folder: Path, count: int) -> dict[str, Any]:
    """Whole lookups of short requests that are stored word for word, without the semantic tiers."""
    some = np.random.default_rng(1).integers(0, count, 500).tolist()
    asked = {n: request(n) for n in some}
    with SemanticCache(CacheConfig(folder, semantic=False, max_entries=2 * count)) as cache:
        row = {
            "first": microseconds(lambda n: cache.try_reuse(asked[n]), some),
            "again": microseconds(lambda n: cache.try_reuse(asked[n]), some * 4),
        }
        assert all(cache.try_reuse(asked[n]).hit for n in some)
    return row


def opened(folder: Path, count: int) -> dict[str, Any]:
    """A cache with the semantic tier on a catalog that is there: until it answers, and how it does at first."""
    start = time.perf_counter()
    cache = SemanticCache(CacheConfig(folder, max_entries=2 * count), text_encoder=Drawn())
    row: dict[str, Any] = {"ready_s": round(time.perf_counter() - start, 2)}
    with cache:
        row["exact_hits"] = microseconds(lambda n: cache.try_reuse(request(n)), range(0, count, count // 50))
        row["misses"] = microseconds(lambda n: cache.try_reuse(request(-n)), range(1, 501))
        assert not cache.stats().faults
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--lock", type=Path, help="a file to lock while times are taken")
    parser.add_argument("--folder", type=Path, help="where the files stay")
    parser.add_argument("--restart", action="store_true", help="only open what is in --folder")
    parser.add_argument("--load", type=float, default=0.0, help="wait until the machine's load is below this")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.folder or Path(temporary)) / str(options.one)
            folder.mkdir(parents=True, exist_ok=True)
            print(json.dumps(one_size(folder, options)))
        return
    rows = []
    for size in options.sizes:
        again = [sys.executable, __file__, *sys.argv[1:], "--one", str(size)]
        rows.append(json.loads(subprocess.run(again, check=True, stdout=subprocess.PIPE, text=True).stdout))
    machine = {"arch": platform.machine(), "python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    print(json.dumps({"machine": machine, "sizes": rows}, indent=1))


if __name__ == "__main__":
    main()
