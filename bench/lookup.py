"""What a lookup costs: the encoder of a new text, and the catalog at several sizes. Prints JSON.

    python bench/lookup.py encoder                          (results/encoder.json)
    python bench/lookup.py catalog --sizes 100000 1000000   (results/catalog.json)

The vector index is measured by ``bench/index.py``.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import alone, commands, machine, resident, times, write_json
from rich.console import Console
from rich.progress import track

from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.encoders import text
from semkv.encoders.text import BACKENDS, DEFAULT_MODEL, SentenceEncoder, few_threads, load_sentence_transformer
from semkv.encoders.text import resolve_model as path_of
from semkv.stores.catalog import Catalog
from semkv.stores.catalog_rows import Record
from semkv.tiers.keying import Keyed
from semkv.tiers.record import make_record
from semkv.types import Namespace, Plan, Request, ReuseReport, Role, TextSegment

SHORT = "What color is the car number {} near the house?"
THREADS = 64
HERE = Namespace("tenant", "model")
console = Console(stderr=True)
app = commands(__doc__)


# -- encoder ------------------------------------------------------------


def plain(model: str, texts: list[str]) -> dict[str, float]:
    """`SentenceTransformer.encode` as it comes, on one thread."""
    loaded = load_sentence_transformer("--model", path_of(model))
    with few_threads(1):
        loaded.encode(texts[:10], normalize_embeddings=True, show_progress_bar=False)
        return times(lambda t: loaded.encode([t], normalize_embeddings=True, show_progress_bar=False), texts[10:])


def one_encoder(name: str, texts: list[str]) -> dict[str, Any]:
    encoder = SentenceEncoder(name)
    row: dict[str, Any] = {"start_s": seconds(lambda: encoder.encode(["warm up"])), "fingerprint": encoder.fingerprint}
    row["start_again_s"] = seconds(lambda: SentenceEncoder(name).encode(["warm up"]))
    encoder.encode(texts[:10])
    row["one_short_text"] = times(lambda t: encoder.encode([t]), track(texts[10:], name, console=console))
    row["remembered"] = times(lambda t: encoder.encode([t]), texts)
    batch = [SHORT.format(n) for n in range(10_000, 10_000 + 4 * len(texts))]
    row["batch_ms_per_text"] = round(1e3 * seconds(lambda: encoder.encode(batch)) / len(batch), 2)
    asked = [SHORT.format(n) for n in range(20_000, 20_000 + 4 * len(texts))]
    with ThreadPoolExecutor(THREADS) as pool:
        taken = seconds(lambda: list(pool.map(lambda t: encoder.encode([t]), asked)))
    return row | {"threads": THREADS, "texts_per_s_of_all_threads": round(len(asked) / taken)}


def seconds(act: Any) -> float:
    start = time.perf_counter()
    act()
    return round(time.perf_counter() - start, 4)


def distance(model: str, other: str, texts: list[str]) -> dict[str, float]:
    """How far the vectors of two backends are apart."""
    first, second = (SentenceEncoder(name).encode(texts) for name in (model, other))
    pairs = np.abs(first @ first.T - second @ second.T)
    return {
        "least_cosine_of_a_text": round(float(np.sum(first * second, axis=1).min()), 5),
        "mean_shift_of_a_pairs_cosine": round(float(pairs.mean()), 5),
        "largest_shift_of_a_pairs_cosine": round(float(pairs.max()), 5),
    }


@app.command(name="encoder")
def measure_encoder(*, model: str = DEFAULT_MODEL, count: int = 110, out: Path | None = None) -> None:
    """One short text, a batch, many threads at once, for every backend that is installed."""
    present = importlib.util.find_spec("onnxruntime") is not None
    names = [model, *(f"{model}@{backend}" for backend in BACKENDS if present)]
    packages = ("torch", "sentence-transformers", "transformers", *(("onnxruntime",) if present else ()))
    texts = [SHORT.format(n) for n in range(count)]
    result = {"machine": machine(*packages)}
    with tempfile.TemporaryDirectory() as folder:
        text._EXPORTS = folder  # so that the first start exports
        result["sentence_transformers_alone"] = plain(model, texts)
        result["encoders"] = {name: one_encoder(name, texts) for name in names}
        result["from_the_plain_one"] = {name: distance(model, name, texts) for name in names[1:]}
    write_json(out, result)


# -- catalog ------------------------------------------------------------


class Drawn:
    """Takes the place of a text encoder: some unit vector for every text, at once."""

    dim, fingerprint = 384, "drawn"

    def fits(self, text: str) -> bool:
        return True

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        vectors = np.stack([np.random.default_rng(len(text)).normal(size=self.dim) for text in texts])
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def request(number: int) -> Request:
    system = TextSegment("You are a helpful assistant.", Role.SYSTEM)
    return Request(str(number), HERE, (system, TextSegment(f"What color is the car with number {number}?")))


def record(number: int, vector: np.ndarray) -> Record:
    report = ReuseReport(request(number), Plan(request(number).segments), {}, {"semantic_text": vector})
    layer = f"semantic_text@{Drawn.fingerprint}"
    return make_record(report, "red", {"semantic_text": vector}, {"semantic_text": layer}, (), {}, number)


def vectors(count: int) -> Iterable[np.ndarray]:
    random = np.random.default_rng(0)
    for start in range(0, count, 1000):
        page = random.normal(size=(min(1000, count - start), Drawn.dim)).astype(np.float32)
        yield from page / np.linalg.norm(page, axis=1, keepdims=True)


def one_size(folder: Path, count: int) -> dict[str, Any]:
    file, row = folder / "catalog.sqlite", dict[str, Any](entries=count)
    catalog = Catalog(file, max_entries=2 * count)
    for number, vector in enumerate(track(vectors(count), f"{count:,} entries", count, console=console)):
        catalog.add(record(number, vector))
    ready = [record(count + n, vector) for n, vector in enumerate(vectors(500))]
    row["add"] = times(catalog.add, ready)
    catalog.close()
    with sqlite3.connect(file) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    row["file_bytes_per_entry"] = round(file.stat().st_size / count)
    some = np.random.default_rng(0).integers(0, count, 500).tolist()
    keys = {n: (key := Keyed.of(HERE, request(n).segments)).whole(key.exact, "exact") for n in some}
    before = resident()
    row["open_s"] = seconds(lambda: Catalog(file, max_entries=2 * count).close())
    catalog = Catalog(file, max_entries=2 * count)
    row["find_first"] = times(lambda n: catalog.find(keys[n]), some)
    row["find_again"] = times(lambda n: catalog.find(keys[n]), some)
    row["memory_mb"] = round((resident() - before) / 1e6, 1)
    catalog.close()
    asked = {n: request(n) for n in some}
    with SemanticCache(CacheConfig(folder, semantic=False, max_entries=2 * count)) as cache:
        row["exact_hits"] = times(lambda n: cache.try_reuse(asked[n]), some)
        row["exact_hits_again"] = times(lambda n: cache.try_reuse(asked[n]), some * 4)
        assert all(cache.try_reuse(asked[n]).hit for n in some)
    shutil.rmtree(folder / "graphs", ignore_errors=True)
    for name in ("opened_without_kept_graphs", "opened_with_kept_graphs"):
        row[name] = opened(folder, count)
    return row


def opened(folder: Path, count: int) -> dict[str, Any]:
    """A cache with the semantic tier on a catalog that is there: until it answers, and how it does at first."""
    start = time.perf_counter()
    with SemanticCache(CacheConfig(folder, max_entries=2 * count), text_encoder=Drawn()) as cache:
        row: dict[str, Any] = {"ready_s": round(time.perf_counter() - start, 2)}
        row["exact_hits"] = times(lambda n: cache.try_reuse(request(n)), range(0, count, count // 50))
        row["misses"] = times(lambda n: cache.try_reuse(request(-n)), range(1, 501))
        assert not cache.stats().faults
        assert cache._matching._semantic is not None
        cache._matching._semantic._index.settle()
        row["graphs_built_s"] = round(time.perf_counter() - start, 1)
        start = time.perf_counter()
    return row | {"close_s": round(time.perf_counter() - start, 2)}


@app.command(name="catalog")
def measure_catalog(*, sizes: Sequence[int] = (100_000, 1_000_000), out: Path | None = None) -> None:
    """Adding, finding, bytes, exact hits, and a cache opened on it. Each size in a process of its own."""
    rows = [alone(__file__, "one", str(size)) for size in sizes]
    write_json(out, {"machine": machine() | {"sqlite": sqlite3.sqlite_version}, "sizes": rows})


@app.command(show=False)
def one(size: int) -> None:
    """What ``catalog`` measures of one size."""
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(one_size(Path(folder), size)))


if __name__ == "__main__":
    app()
