"""The vector index at several sizes: search, recall, writes, memory. Prints JSON.

One partition of clustered unit vectors: questions through the real encoder are the centers, and the rows lie about them
at cosines of 0.6 to 0.97, in directions drawn with the centers' own covariance. A query lies at a cosine of 0.8 to 0.99
from a row. The nearest row by brute force is the truth. Each measurement runs in a process of its own, for its memory.
``--against`` names the source tree of another version, which is measured in turn with this one, ``--rounds`` times: on
a shared machine only such pairs can be compared, and the processor's time more than the clock's.

    python bench/index.py --sizes 20000 100000 500000 --against ../before/src --rounds 2 --out bench/results/index.json
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, alone, machine, resident, times, write_json
from rich.console import Console
from rich.progress import Progress

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
    "Where can I buy a {a} with a {b} in {c}?",
    "Who made the first {a} for a {b} in {c}?",
    "How do I repair a {a} that hit a {b}?",
    "Can a {a} carry a {b} to {c}?",
)
PLACES = "Norway Lima Texas Cairo Kyoto".split()
console = Console(stderr=True)


def centers(encoder: SentenceEncoder) -> np.ndarray:
    texts = [
        t.format(a=a, b=b, c=PLACES[(len(a) + i) % 5]) for i, a in enumerate(THINGS) for b in THINGS for t in ASKED
    ]
    with Progress(console=console) as progress:
        parts = [encoder.encode(texts[s : s + 64]) for s in progress.track(range(0, len(texts), 64), None, 0)]
    return np.concatenate(parts)


class Draw:
    """Rows about centres, drawn once into a file and read in pages: what they take is no memory of the index."""

    def __init__(self, middles: np.ndarray, count: int, file: Path) -> None:
        self.count, self._middles = count, middles
        spread = np.cov(middles.T) + 1e-5 * np.eye(middles.shape[1])
        self._shape = np.linalg.cholesky(spread).astype(np.float32).T
        self._rows = np.lib.format.open_memmap(file, "w+", np.float32, (count, middles.shape[1]))
        for start in range(0, count, PAGE):
            random = np.random.default_rng(start + 1)
            about = middles[random.integers(len(middles), size=min(PAGE, count - start))]
            self._rows[start : start + PAGE] = self.near(about, 0.6, 0.97, random)

    def near(self, points: np.ndarray, low: float, high: float, random: np.random.Generator) -> np.ndarray:
        """A unit vector per point, at a cosine between ``low`` and ``high`` from it."""
        aside = random.normal(size=points.shape).astype(np.float32) @ self._shape
        aside -= np.sum(aside * points, axis=1, keepdims=True) * points
        aside /= np.linalg.norm(aside, axis=1, keepdims=True)
        cosine = random.uniform(low, high, size=(len(points), 1)).astype(np.float32)
        return cosine * points + np.sqrt(1 - cosine**2) * aside

    def pages(self) -> Iterator[np.ndarray]:
        for start in range(0, self.count, PAGE):
            yield np.asarray(self._rows[start : start + PAGE])

    def queries(self) -> np.ndarray:
        random = np.random.default_rng(0)
        rows = np.asarray(self._rows[np.sort(random.integers(self.count, size=QUERIES))])
        return self.near(rows, 0.8, 0.99, random)


def searched(find: Callable[[np.ndarray], int], queries: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    for query in queries[:50]:
        find(query)
    found: list[int] = []
    row = times(lambda q: found.append(find(q)), queries)
    return row | {"recall_at_1": round(float(np.mean(np.array(found) == truth)), 4)}


def measured(draw: Draw, queries: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    def find(query: np.ndarray) -> int:
        near = index.search("p", query, 1)
        return int(near[0].item[-32:], 16)

    index = VectorIndex(queries.shape[1])
    index.extend([Row("first", "p", queries[0])])  # what is loaded once is no part of an entry
    index.search("p", queries[0])
    index.remove(["first"])
    before, start = resident(), time.perf_counter()
    for number, page in enumerate(draw.pages()):
        index.extend(Row(f"{number * PAGE + i:032x}", "p", vector) for i, vector in enumerate(page))
    row: dict[str, Any] = {"load_s": round(time.perf_counter() - start, 2)}
    row["search_before_graph"] = searched(find, queries[:50], truth[:50])
    during, most = [], resident()
    while not index.settle(1.0):
        most = max(most, resident())
        during += [times(find, [query])["p50_ms"] for query in queries[:20]]
    row |= {
        "graph_ready_s": round(time.perf_counter() - start, 1),
        "processor_s": round(time.process_time(), 1),
        "bytes_per_entry": round((resident() - before) / draw.count),
        "bytes_per_entry_at_most": round((most - before) / draw.count),
    }
    if during:
        row["search_while_building_ms"] = {q: round(float(np.percentile(during, q)), 2) for q in (50, 99)}
    row["search"] = searched(find, queries, truth)
    row["search_k4"] = times(lambda q: index.search("p", q, 4), queries)
    fresh = [Row(f"new{i}", "p", vector) for i, vector in enumerate(queries)]
    row["add_one"] = times(lambda r: index.extend([r]), fresh)
    row["remove_one"] = times(lambda r: index.remove([r.item]), fresh)
    done = threading.Event()

    def write() -> None:
        turn = 0
        while not done.is_set():
            index.extend(Row(f"{turn}-{i:032x}", "p", -vector) for i, vector in enumerate(queries))
            turn += 1
            if turn % 4 == 0:
                index.remove(f"{t}-{i:032x}" for t in range(turn - 4, turn) for i in range(len(queries)))
            done.wait(0.05)

    writer = threading.Thread(target=write)
    writer.start()
    row["search_while_writing"] = searched(find, np.tile(queries, (4, 1)), np.tile(truth, 4))
    done.set()
    writer.join()
    index.remove([item for item in index.items() if len(item) > 32])
    index.settle()
    index.remove([f"{i:032x}" for i in range(0, draw.count, 10)])
    left = np.flatnonzero(truth % 10)
    row["search_with_a_tenth_removed"] = searched(find, queries[left], truth[left])
    start = time.perf_counter()
    index.close()
    row["close_s"] = round(time.perf_counter() - start, 2)
    return row


def many_partitions(queries: np.ndarray, count: int) -> dict[str, Any]:
    """As of entries about ``count`` images: partitions of one to eight rows."""
    index = VectorIndex(queries.shape[1])
    before, start, made = resident(), time.perf_counter(), 0
    for number in range(count):
        rows = [Row(f"{made + i:032x}", f"{number:032x}", queries[(made + i) % QUERIES]) for i in range(number % 8 + 1)]
        for row in rows:
            index.extend([row])
        made += len(rows)
    found: dict[str, Any] = {"rows": made, "load_s": round(time.perf_counter() - start, 2)}
    found["bytes_per_entry"] = round((resident() - before) / made)
    found["search"] = times(lambda i: index.search(f"{i:032x}", queries[i], 4), range(QUERIES))
    index.close()
    return found


def one(middles: np.ndarray, folder: Path, count: int) -> dict[str, Any]:
    draw = Draw(middles, count, folder / "rows.npy")
    queries = draw.queries()
    best, truth = np.full(QUERIES, -2.0, np.float32), np.zeros(QUERIES, np.int64)
    for number, page in enumerate(draw.pages()):
        cosines = queries @ page.T
        top = cosines.argmax(1)
        better = cosines[np.arange(QUERIES), top] > best
        truth[better], best[better] = number * PAGE + top[better], cosines[better, top[better]]
    row = measured(draw, queries, truth)
    gc.collect()  # the next part measures memory
    return row | {"partitions_20000": many_partitions(queries, 20_000)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[20_000, 100_000, 500_000])
    parser.add_argument("--against", type=Path, help="the src folder of another version, measured in turn")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--centers", type=Path, help="a .npy of unit vectors instead of encoded questions")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    middles = np.load(options.centers) if options.centers else centers(SentenceEncoder())
    with tempfile.TemporaryDirectory() as folder:
        if options.one:
            print(json.dumps(one(middles, Path(folder), options.one)))
            return
        file = Path(folder) / "centers.npy"
        np.save(file, middles)
        trees = {"before": options.against} if options.against else {}
        rows: list[dict[str, Any]] = []
        for size, _, (name, tree) in product(
            options.sizes, range(options.rounds), (trees | {"this": ROOT / "src"}).items()
        ):
            found = alone(__file__, "--centers", str(file), "--one", str(size), PYTHONPATH=str(tree))
            rows.append({"entries": size, "version": name, **found})
            console.print(rows[-1])
    result = {"dim": int(middles.shape[1]), "centers": len(middles), "queries": QUERIES}
    write_json(options.out, result | {"machine": machine("faiss-cpu", "numpy"), "measured": rows})


if __name__ == "__main__":
    main()
