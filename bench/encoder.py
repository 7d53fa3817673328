"""Sentence encoders: one short text, a batch, many threads at once; and how far apart the backends are. Prints JSON.

python bench/encoder.py > bench/results/encoder.json
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from quiet import quiet
from rich.console import Console
from rich.progress import track

from semkv.encoders import text
from semkv.encoders.text import BACKENDS, DEFAULT_MODEL, SentenceEncoder, few_threads, load_sentence_transformer
from semkv.encoders.text import resolve_model as path_of

SHORT = "What color is the car number {} near the house?"
THREADS = 64
console = Console(stderr=True)


def quantiles(taken: list[float]) -> dict[str, float]:
    p50, p95 = np.percentile(taken, [50, 95])
    return {"p50_ms": round(1e3 * float(p50), 2), "p95_ms": round(1e3 * float(p95), 2)}


def plain(model: str, texts: list[str]) -> dict[str, float]:
    """`SentenceTransformer.encode` as it comes, on one thread."""
    loaded = load_sentence_transformer("--model", path_of(model))
    taken, worked = [], []
    with few_threads(1):
        for text in track(texts, "sentence-transformers alone", console=console):
            start, busy = time.perf_counter(), time.thread_time()
            loaded.encode([text], normalize_embeddings=True, show_progress_bar=False)
            taken.append(time.perf_counter() - start)
            worked.append(time.thread_time() - busy)
    return quantiles(taken[10:]) | {f"cpu_{name}": value for name, value in quantiles(worked[10:]).items()}


def one(name: str, count: int) -> dict[str, Any]:
    encoder = SentenceEncoder(name)
    start = time.perf_counter()
    encoder.encode(["warm up"])
    row: dict[str, Any] = {"start_s": round(time.perf_counter() - start, 2), "fingerprint": encoder.fingerprint}
    start = time.perf_counter()
    SentenceEncoder(name).encode(["warm up"])
    row["start_again_s"] = round(time.perf_counter() - start, 2)
    taken, worked = [], []
    for number in track(range(count), name, console=console):
        start, busy = time.perf_counter(), time.thread_time()
        encoder.encode([SHORT.format(number)])
        taken.append(time.perf_counter() - start)
        worked.append(time.thread_time() - busy)
    row["one_short_text"] = quantiles(taken[10:])
    row["one_short_text"] |= {f"cpu_{name}": value for name, value in quantiles(worked[10:]).items()}
    again = []
    for number in range(count):
        start = time.perf_counter()
        encoder.encode([SHORT.format(number)])
        again.append(time.perf_counter() - start)
    row["remembered_p50_us"] = round(1e6 * float(np.median(again)), 1)
    batch = [SHORT.format(n) for n in range(10_000, 10_000 + 4 * count)]
    start = time.perf_counter()
    encoder.encode(batch)
    row["batch_ms_per_text"] = round(1e3 * (time.perf_counter() - start) / len(batch), 2)
    passes = 0
    run = encoder._run

    def counted(texts: list[str]) -> list[Any]:
        nonlocal passes
        passes += 1
        return run(texts)

    encoder._run = counted  # type: ignore[method-assign]
    asked = [SHORT.format(n) for n in range(20_000, 20_000 + 4 * count)]
    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda text: encoder.encode([text]), asked))
    seconds = time.perf_counter() - start
    # The same number of texts as the batch, so that the two rates compare.
    row["threads"] = {
        "count": THREADS,
        "texts_per_s": round(len(asked) / seconds),
        "passes_per_text": passes / len(asked),
    }
    return row


def distance(model: str, other: str, count: int) -> dict[str, float]:
    texts = [SHORT.format(n) for n in range(count)]
    texts += [
        f"How many {a} are {b} the {c}?" for a in ("cups", "cats") for b in ("on", "near") for c in ("bed", "car")
    ]
    first, second = (SentenceEncoder(name).encode(texts) for name in (model, other))
    same = np.sum(first * second, axis=1)
    pairs = np.abs(first @ first.T - second @ second.T)
    return {
        "least_cosine_of_a_text": round(float(same.min()), 5),
        "mean_shift_of_a_pairs_cosine": round(float(pairs.mean()), 5),
        "largest_shift_of_a_pairs_cosine": round(float(pairs.max()), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--count", type=int, default=110)
    parser.add_argument("--lock", type=Path, help="a file to lock while times are taken")
    options = parser.parse_args()
    present = importlib.util.find_spec("onnxruntime") is not None
    names = [options.model, *(f"{options.model}@{b}" for b in BACKENDS if present)]
    packages = ("torch", "sentence-transformers", "transformers", *(("onnxruntime",) if present else ()))
    result: dict[str, Any] = {
        "machine": {"arch": platform.machine(), "python": platform.python_version(), "cores": os.cpu_count()},
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }
    with tempfile.TemporaryDirectory() as folder, quiet(options.lock, result):
        text._EXPORTS = folder  # so that the first start exports
        result["sentence_transformers_alone"] = plain(options.model, [SHORT.format(n) for n in range(options.count)])
        result["encoders"] = {name: one(name, options.count) for name in names}
        result["from_the_plain_one"] = {name: distance(options.model, name, options.count) for name in names[1:]}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
