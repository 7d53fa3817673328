"""The vector index at several sizes: search, recall, writes, memory by part; beside FAISS by itself. Prints JSON.

One partition of clustered unit vectors: questions through the real encoder are the centres, and the rows lie about them
at cosines of .6 to .97, in directions drawn with the centres' own covariance. A query lies at a cosine of .8 to .99
from a row. The nearest row by brute force is the truth. Each size runs in a process of its own, for its memory. Graphs
are built before the lock is taken, where one is given; what is timed afterwards holds it. Last come restarts: an index
that takes up the first one's graphs, and one without. With ``--folder`` the rows and graphs stay, and
``--restart`` does the last part alone on them, with ``--load`` once the machine is as quiet as that.

    python bench/index.py --sizes 100000 300000 1000000 > bench/results/index.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from quiet import quiet, resident
from rich.console import Console
from rich.progress import Progress

from semkv.encoders.text import SentenceEncoder
from semkv.indexes.base import Row
from semkv.indexes.faiss import FaissIndex
from semkv.stores.graphs import GraphFiles

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


def centres(encoder: SentenceEncoder) -> np.ndarray:
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


def by_part(index: FaissIndex) -> dict[str, int]:
    """Bytes an entry of what the index is made of, counted object by object."""
    partitions, table = index._partitions.values(), index._table
    graphs = [graph for partition in partitions for graph in partition.graphs]
    blocks = [block for partition in partitions for block in partition.blocks]
    hnsw = [graph.index.hnsw for graph in graphs]
    found = {
        "float16_vectors": sum(2 * index.dim * graph.count for graph in graphs),
        "links": sum(4 * h.neighbors.size() + 8 * h.offsets.size() + 4 * h.levels.size() for h in hnsw),
        "plain_rows": sum(block.vectors.nbytes + block.slots.nbytes for block in blocks),
        "rows_of_graphs": sum(graph.slots.nbytes + graph._alive.nbytes for graph in graphs),
        "item_names": sum(sys.getsizeof(item) for item in table._items if item is not None),
        "slot_of_item": sys.getsizeof(table._slot_of) + 32 * len(table),
        "columns_by_slot": sys.getsizeof(table._items)
        + sys.getsizeof(table._home)
        + table._part.nbytes
        + table._row.nbytes
        + table._named_in.nbytes,
    }
    sizes = {name: round(size / len(index)) for name, size in found.items()}
    return sizes | {"together": sum(sizes.values())}


def times(act: Callable[[Any], object], values: Any) -> dict[str, float]:
    """Milliseconds of one call per value, by the clock and of the processor (which other work delays less)."""
    taken, worked = [], []
    for value in values:
        start, busy = time.perf_counter(), time.thread_time()
        act(value)
        taken.append(1e3 * (time.perf_counter() - start))
        worked.append(1e3 * (time.thread_time() - busy))
    found = {f"p{q}_ms": round(float(np.percentile(taken, q)), 4) for q in (50, 99)}
    return found | {f"cpu_p{q}_ms": round(float(np.percentile(worked, q)), 4) for q in (50, 99)}


def searched(find: Callable[[np.ndarray], int], queries: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    for query in queries[:50]:
        find(query)
    found: list[int] = []
    row = times(lambda q: found.append(find(q)), queries)
    return row | {"recall_at_1": round(float(np.mean(np.array(found) == truth)), 4)}


def raised(error: Exception) -> None:
    raise error


def ours(
    draw: Draw, queries: np.ndarray, truth: np.ndarray, progress: Progress, lock: Path | None, folder: Path
) -> dict[str, Any]:
    def find(query: np.ndarray) -> int:
        return int(index.search("p", query, 1)[0].item, 16)

    index = FaissIndex(queries.shape[1], store=GraphFiles(folder, "bench", raised))
    index.loaded()
    index.extend([Row("first", "p", queries[0])])  # what is loaded once is no part of an entry
    index.search("p", queries[0])
    index.remove(["first"])
    before = resident()
    start = time.perf_counter()
    for number, page in enumerate(draw.pages()):
        index.extend(Row(f"{number * PAGE + i:032x}", "p", vector) for i, vector in enumerate(page))
    loaded = time.perf_counter() - start
    early = searched(find, queries[:50], truth[:50])
    task = progress.add_task(f"graph of {draw.count:,}", total=draw.count)
    during, most = [], resident()
    while not index.settle(2.0):
        most = max(most, resident())
        progress.update(task, completed=index.sizes().graph)
        during.append(times(find, queries[:20])["p50_ms"])
    progress.update(task, completed=draw.count)
    built = time.perf_counter() - start
    row: dict[str, Any] = {
        "load_s": round(loaded, 2),
        "graph_ready_s": round(built, 1),
        "bytes_per_entry": round((resident() - before) / draw.count),
        "bytes_per_entry_at_most": round((most - before) / draw.count),
        "bytes_per_entry_by_part": by_part(index),
        "search_before_graph": early,
        "search_while_building_p50_ms": [round(x, 2) for x in during[:: max(1, len(during) // 8)]],
    }
    with quiet(lock, row):
        row["search"] = searched(find, queries, truth)
        row["search_k4"] = times(lambda q: index.search("p", q, 4), queries)
        fresh = [Row(f"new{i}", "p", vector) for i, vector in enumerate(queries)]
        row["add_one"] = times(lambda r: index.extend([r]), fresh)
        row["remove_one"] = times(lambda r: index.remove([r.item]), fresh)
        gone = [f"{i:032x}" for i in range(0, draw.count, 10)]
        index.remove(gone)
        left = np.flatnonzero(truth % 10)
        row["search_with_a_tenth_removed"] = searched(find, queries[left], truth[left])
    start = time.perf_counter()
    index.close()
    row["close_s"] = round(time.perf_counter() - start, 2)
    return row


def restarted(
    draw: Draw, queries: np.ndarray, truth: np.ndarray, lock: Path | None, folder: Path | None, load: float
) -> dict[str, Any]:
    """Until an index has all rows again but the removed tenth, and how it answers; kept graphs lie in ``folder``."""

    def find(query: np.ndarray) -> int:
        return int(index.search("p", query, 1)[0].item, 16)

    row: dict[str, Any] = {}
    left = np.flatnonzero(truth % 10)
    queries, truth = queries[left], truth[left]
    gone = {f"{i:032x}" for i in range(0, draw.count, 10)}
    files = [] if folder is None else list(folder.glob("*/*.graph"))
    if files:
        row["kept_bytes_per_entry"] = round(sum(file.stat().st_size for file in files) / draw.count)
    with quiet(lock, row, load):
        before, start = resident(), time.perf_counter()
        index = FaissIndex(queries.shape[1], store=GraphFiles(folder, "bench", raised) if folder else None)
        for number, page in enumerate(draw.pages()):
            names = (f"{number * PAGE + i:032x}" for i in range(len(page)))
            index.extend(Row(name, "p", vector) for name, vector in zip(names, page, strict=True) if name not in gone)
        index.loaded()
        row["load_s"] = round(time.perf_counter() - start, 2)
        row["bytes_per_entry"] = round((resident() - before) / draw.count)
        row["plain_rows"] = index.sizes().flat
        most = len(queries) if folder else 50
        row["search"] = searched(find, queries[:most], truth[:most])
        if folder:
            row["search_k4"] = times(lambda q: index.search("p", q, 4), queries)
    index.close()
    return row


def faiss_alone(draw: Draw, queries: np.ndarray, truth: np.ndarray, graph: bool, lock: Path | None) -> dict[str, Any]:
    import faiss

    faiss.omp_set_num_threads(1)
    dim = queries.shape[1]
    index = faiss.IndexHNSWFlat(dim, 16, faiss.METRIC_INNER_PRODUCT) if graph else faiss.IndexFlatIP(dim)
    if graph:
        index.hnsw.efConstruction, index.hnsw.efSearch = 80, 96
    before, start = resident(), time.perf_counter()
    for page in draw.pages():
        index.add(page)
    built = time.perf_counter() - start
    row: dict[str, Any] = {"build_s": round(built, 1), "bytes_per_entry": round((resident() - before) / draw.count)}
    with quiet(lock, row):
        row["search"] = searched(lambda q: int(index.search(q[None], 1)[1][0, 0]), queries, truth)
    return row


def one_size(middles: np.ndarray, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    count, lock = options.one, options.lock
    draw = Draw(middles, count, folder / "rows.npy")
    queries = draw.queries()
    best, truth = np.full(QUERIES, -2.0, np.float32), np.zeros(QUERIES, np.int64)
    for number, page in enumerate(draw.pages()):
        cosines = queries @ page.T
        top = cosines.argmax(1)
        better = cosines[np.arange(QUERIES), top] > best
        truth[better], best[better] = number * PAGE + top[better], cosines[better, top[better]]
    row: dict[str, Any] = {"entries": count}
    if not options.restart:
        with Progress(console=console) as progress:
            row["semkv"] = ours(draw, queries, truth, progress, lock, folder / "graphs")
    row["restarted"] = restarted(draw, queries, truth, lock, folder / "graphs", options.load)
    row["restarted_without_kept_graphs"] = restarted(draw, queries, truth, lock, None, 0.0)
    if count <= options.alone_up_to and not options.restart:
        row["faiss_flat"] = faiss_alone(draw, queries, truth, graph=False, lock=lock)
        row["faiss_hnsw_float32"] = faiss_alone(draw, queries, truth, graph=True, lock=lock)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--alone-up-to", type=int, default=100_000, help="largest size at which FAISS alone is run too")
    parser.add_argument("--centres", type=Path, help="a .npy of unit vectors instead of encoded questions")
    parser.add_argument("--lock", type=Path, help="a file to lock while times are taken")
    parser.add_argument("--folder", type=Path, help="where rows and graphs stay")
    parser.add_argument("--restart", action="store_true", help="only start again on what is in --folder")
    parser.add_argument("--load", type=float, default=0.0, help="wait until the machine's load is below this")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    middles = np.load(options.centres) if options.centres else centres(SentenceEncoder())
    if options.one:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.folder or Path(temporary)) / str(options.one)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "catalog.sqlite").touch()  # graphs are kept only beside one
            print(json.dumps(one_size(middles, folder, options)))
        return
    rows = []
    for size in options.sizes:
        again = [sys.executable, __file__, *sys.argv[1:], "--one", str(size)]
        rows.append(json.loads(subprocess.run(again, check=True, stdout=subprocess.PIPE, text=True).stdout))
    result = {
        "dim": int(middles.shape[1]),
        "centres": len(middles),
        "queries": QUERIES,
        "machine": {"arch": platform.machine(), "python": platform.python_version()},
        "versions": {name: importlib.metadata.version(name) for name in ("faiss-cpu", "numpy")},
        "sizes": rows,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
