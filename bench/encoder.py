"""The sentence encoder: one short text, a batch, many threads at once. Prints JSON.

python bench/encoder.py --out bench/results/encoder.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import machine, times, write_json
from rich.console import Console
from rich.progress import track

from semkv.encoders.text import DEFAULT_MODEL, SentenceEncoder, few_threads, load_sentence_transformer
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--count", type=int, default=110)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    texts = [SHORT.format(n) for n in range(options.count)]
    result: dict[str, Any] = {"machine": machine("torch", "sentence-transformers", "transformers")}
    result["sentence_transformers_alone"] = plain(options.model, texts)
    result["encoders"] = {options.model: one_encoder(options.model, texts)}
    write_json(options.out, result)


if __name__ == "__main__":
    main()
