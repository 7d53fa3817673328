"""The vector index at several sizes: search, recall, writes, memory. Prints JSON.

    python bench/index.py --sizes 20000 100000 500000 --out bench/results/index.json

One partition of clustered unit vectors: questions through the real encoder are the centers, and the rows lie about them
at cosines of 0.6 to 0.97, in directions drawn with the centers' own covariance. A query lies at a cosine of 0.8 to 0.99
from a row; the nearest row by brute force is the truth. Each size runs in a process of its own, for its memory. On a
shared machine the processor's time (``cpu_``) says more than the clock's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, write_json

from semkv.encoders.text import SentenceEncoder
from semkv.index import Row, VectorIndex

PAGE = 10_000
QUERIES = 500
THINGS = "car dog house tree boat lamp table cup horse phone bridge train bottle clock chair river".split()
ASKED = (
    "What color is the {a} next to the {b}?",
    "How many {a}s are behind the {b}?",
    "Is the {a} larger than the {b}?",
    "Why would a {a} need a {b}?",
    "Who made the first {a} for a {b}?",
    "How do I repair a {a} that hit a {b}?",
)


def spread(centers: np.ndarray) -> np.ndarray:
    """What makes normal numbers have the covariance of the centers."""
    _, scale, directions = np.linalg.svd(centers - centers.mean(0), full_matrices=False)
    return (scale[:, None] * directions).astype(np.float32)


def near(
    points: np.ndarray, low: float, high: float, random: np.random.Generator, directions: np.ndarray
) -> np.ndarray:
    """A unit vector per point, at a cosine between ``low`` and ``high`` from it."""
    aside = random.normal(size=(len(points), len(directions))).astype(np.float32) @ directions
    aside -= np.sum(aside * points, axis=1, keepdims=True) * points
    aside /= np.linalg.norm(aside, axis=1, keepdims=True)
    cosine = random.uniform(low, high, size=(len(points), 1)).astype(np.float32)
    return cosine * points + np.sqrt(1 - cosine**2) * aside


def draw(centers: np.ndarray, count: int, file: Path) -> np.ndarray:
    """Rows about the centers, in a file: what they take is no memory of the index."""
    rows = np.lib.format.open_memmap(file, "w+", np.float32, (count, centers.shape[1]))
    directions = spread(centers)
    for start in range(0, count, PAGE):
        random = np.random.default_rng(start + 1)
        about = centers[random.integers(len(centers), size=min(PAGE, count - start))]
        rows[start : start + PAGE] = near(about, 0.6, 0.97, random, directions)
    return rows


def nearest(rows: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """The number of the nearest row to each query, by brute force."""
    best = np.full(len(queries), -2.0, np.float32)
    number = np.zeros(len(queries), np.int64)
    for start in range(0, len(rows), PAGE):
        cosines = queries @ rows[start : start + PAGE].T
        top = cosines.argmax(1)
        found = cosines[np.arange(len(queries)), top]
        better = found > best
        number[better], best[better] = start + top[better], found[better]
    return number


def resident() -> int:
    """Bytes of this process in memory that are no file's (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def times(act: Callable[[Any], object], values: Iterable[Any]) -> dict[str, float]:
    """Milliseconds of one call per value, by the clock and of the processor."""
    taken, worked = [], []
    for value in values:
        start, busy = time.perf_counter(), time.thread_time()
        act(value)
        taken.append(time.perf_counter() - start)
        worked.append(time.thread_time() - busy)
    return {
        f"{name}p{q}_ms": round(1e3 * float(np.percentile(seconds, q)), 4)
        for name, seconds in (("", taken), ("cpu_", worked))
        for q in (50, 99)
    }


def settle(index: VectorIndex) -> None:
    """Wait until nothing is being built: the one worker has done what was asked of it before."""
    while index._worker.submit(int).result() or any(
        part.building for part in list(index._partitions.values())
    ):
        pass


def measured(rows: np.ndarray, queries: np.ndarray) -> dict[str, Any]:
    truth = nearest(rows, queries)
    index = VectorIndex(queries.shape[1])

    def searched(which: Any = slice(None)) -> dict[str, float]:
        found: list[int] = []
        row = times(
            lambda query: found.append(int(index.search("p", query, 1)[0].item)), queries[which]
        )
        return row | {"recall_at_1": round(float(np.mean(np.array(found) == truth[which])), 4)}

    before, start = resident(), time.perf_counter()
    for first in range(0, len(rows), PAGE):
        index.extend(
            Row(str(first + i), "p", vector) for i, vector in enumerate(rows[first : first + PAGE])
        )
    row: dict[str, Any] = {
        "load_s": round(time.perf_counter() - start, 2),
        "search_before_graph": searched(),
    }
    settle(index)
    row |= {
        "graph_ready_s": round(time.perf_counter() - start, 1),
        "processor_s": round(time.process_time(), 1),
    }
    row["bytes_per_entry"] = round((resident() - before) / len(rows))
    row["search"] = searched()
    fresh = [Row(f"-{i + 1}", "p", vector) for i, vector in enumerate(queries)]
    row["add_one"] = times(lambda new: index.extend([new]), fresh)
    row["remove_one"] = times(lambda old: index.remove([old.item]), fresh)
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            index.extend(Row(new.item, "p", -new.vector) for new in fresh)
            index.remove(new.item for new in fresh)
            done.wait(0.05)

    writer = threading.Thread(target=write)
    writer.start()
    row["search_while_writing"] = searched()
    done.set()
    writer.join()
    index.remove(str(i) for i in range(0, len(rows), 10))
    row["search_with_a_tenth_removed"] = searched(np.flatnonzero(truth % 10))
    index.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[20_000, 100_000, 500_000])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("SIZE", "CENTERS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.one:
            centers = np.load(options.one[1])
            rows = draw(centers, int(options.one[0]), Path(folder) / "rows.npy")
            random = np.random.default_rng(0)
            asked = rows[np.sort(random.integers(len(rows), size=QUERIES))]
            queries = near(asked, 0.8, 0.99, random, spread(centers))
            print(json.dumps(measured(rows, queries)))
            return
        file = Path(folder) / "centers.npy"
        texts = [text.format(a=a, b=b) for a in THINGS for b in THINGS for text in ASKED]
        np.save(file, SentenceEncoder().encode(texts))
        found = []
        for size in options.sizes:
            command = [sys.executable, __file__, "--one", str(size), str(file)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            found.append({"entries": size, **json.loads(done.stdout)})
    write_json(
        options.out,
        {"machine": machine("faiss-cpu", "numpy"), "queries": QUERIES, "measured": found},
    )


if __name__ == "__main__":
    main()
