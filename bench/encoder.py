"""Sentence encoders: one short text, a batch, many threads at once; and how far apart the backends are. Prints JSON.

python bench/encoder.py --out bench/results/encoder.json
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, times, write_json
from rich.console import Console
from rich.progress import track

from semkv.encoders import text
from semkv.encoders.text import BACKENDS, DEFAULT_MODEL, SentenceEncoder, few_threads, load_sentence_transformer
from semkv.encoders.text import resolve_model as path_of

SHORT = "What color is the car number {} near the house?"
THREADS = 64
console = Console(stderr=True)


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


def seconds(act: Callable[[], object]) -> float:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--count", type=int, default=110)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    present = importlib.util.find_spec("onnxruntime") is not None
    names = [options.model, *(f"{options.model}@{backend}" for backend in BACKENDS if present)]
    texts = [SHORT.format(n) for n in range(options.count)]
    result: dict[str, Any] = {"machine": machine("torch", "sentence-transformers", "transformers", "onnxruntime")}
    with tempfile.TemporaryDirectory() as folder:
        text._EXPORTS = folder  # so that the first start exports
        result["sentence_transformers_alone"] = plain(options.model, texts)
        result["encoders"] = {name: one_encoder(name, texts) for name in names}
        result["from_the_plain_one"] = {name: distance(options.model, name, texts) for name in names[1:]}
    write_json(options.out, result)


if __name__ == "__main__":
    main()
