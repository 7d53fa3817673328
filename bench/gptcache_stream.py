"""GPTCache's lookup as a black box, on the streams of question pairs of ``bench/quality.py``; writes JSON.

GPTCache runs in a virtual environment of its own (``pip install gptcache faiss-cpu sqlalchemy``), with SQLite and
FAISS, its distance evaluation and its ``put`` and ``get``. It gets our vectors through its embedding hook, so that only
its lookup decides. Its store is large enough to evict nothing; its log of hits and its token counter are off. As in
the replay, a miss is stored and a hit is not; an answer is wrong when it comes from another cluster.

    python bench/gptcache_stream.py --python venv/bin/python
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, SHARED, machine, quantiles, write_json

THRESHOLDS = (0.8, 0.9, 0.95, 0.96)  # the first is GPTCache's default
ROOMY = 100_000  # entries, so that nothing is evicted


def play(texts: list[str], answers: list[str], known: dict[str, Any], threshold: float, folder: Path) -> dict[str, Any]:
    """One stream through a new GPTCache. Runs where GPTCache is installed."""
    from gptcache import Cache, Config
    from gptcache.adapter.api import get, put
    from gptcache.manager import manager_factory
    from gptcache.processor.pre import get_prompt
    from gptcache.similarity_evaluation import SearchDistanceEvaluation

    cache, dim = Cache(), len(next(iter(known.values())))
    folder.mkdir()
    cache.init(
        pre_embedding_func=get_prompt,
        embedding_func=lambda text, **_: known[text],
        data_manager=manager_factory(
            "sqlite,faiss", str(folder), vector_params={"dimension": dim}, eviction_params={"max_size": ROOMY}
        ),
        similarity_evaluation=SearchDistanceEvaluation(),
        config=Config(similarity_threshold=threshold, enable_token_counter=False, disable_report=True),
    )
    stored: set[str] = set()
    hits = exact = wrong = lost = 0
    seconds = []
    for text, answer in zip(texts, answers, strict=True):
        start = time.perf_counter()
        found = get(text, cache_obj=cache)
        seconds.append(time.perf_counter() - start)
        if found is None:
            lost += text in stored
            put(text, answer, cache_obj=cache)
            stored.add(text)
            continue
        hits += 1
        exact += text in stored
        wrong += found != answer
    row = {"threshold": threshold, "requests": len(texts), "hits": hits, "exact": exact, "wrong": wrong}
    row["cosine"] = round(2 * threshold - 1, 4)  # 4 - squared distance >= 4 x threshold, of unit vectors
    return row | {"stored_but_not_found": lost} | quantiles(seconds, "lookup_")


def worker(folder: Path) -> None:
    """Play every stream at every threshold and print a line of JSON for each; the machine first."""
    print(json.dumps(machine("gptcache", "faiss-cpu", "SQLAlchemy", "numpy")), flush=True)
    kept = np.load(folder / "vectors.npz")
    known = dict(zip(kept["texts"].tolist(), kept["vectors"], strict=True))
    for seed, (texts, answers) in enumerate(json.loads((folder / "streams.json").read_text(encoding="utf-8"))):
        for threshold in THRESHOLDS:
            row = play(texts, answers, known, threshold, folder / f"{threshold}-{seed}")
            print(json.dumps({"seed": seed, **row}), flush=True)


def prepare(pairs: Path, seeds: int, requests: int, folder: Path) -> None:
    """The streams and their vectors, for the worker."""
    from streams import halves, questions

    from semkv.encoders.text import SentenceEncoder
    from semkv_lab.quality import encode, read_pairs

    _, asking = halves(read_pairs(pairs), 0)
    streams = [questions(asking, seed, requests=requests) for seed in range(seeds)]
    texts = sorted({asked.text for stream in streams for asked in stream}, key=lambda text: (len(text), text))
    vectors, _ = encode(texts, SentenceEncoder(), lambda _: None)
    np.savez(folder / "vectors.npz", texts=np.array(texts), vectors=vectors)
    rows = [[[a.text for a in stream], [a.answer for a in stream]] for stream in streams]
    (folder / "streams.json").write_text(json.dumps(rows), encoding="utf-8")


def means(rows: list[dict[str, Any]]) -> dict[str, Any]:
    shares = {name: [row[name] / row["requests"] for row in rows] for name in ("hits", "wrong")}
    found = {name: rows[0][name] for name in ("threshold", "cosine")}
    found |= {name: round(statistics.mean(values), 6) for name, values in shares.items()}
    return found | {"wrong_worst": round(max(shares["wrong"]), 6), "streams": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help="interpreter of the environment with GPTCache")
    parser.add_argument("--pairs", type=Path, default=SHARED / "question_pairs_dev.jsonl.gz")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=RESULTS / "gptcache.json")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    if options.python is None:
        parser.error("--python is needed")
    with tempfile.TemporaryDirectory() as folder:
        prepare(options.pairs, options.seeds, options.requests, Path(folder))
        command = [str(options.python), __file__, "--worker", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first, *lines = map(json.loads, process.stdout)
        if process.returncode:
            sys.exit(f"GPTCache's side failed with status {process.returncode}")
    groups = [[row for row in lines if row["threshold"] == threshold] for threshold in THRESHOLDS]
    write_json(options.out, {"machine": first, "thresholds": [means(group) for group in groups]})
    for group in groups:
        print({name: value for name, value in means(group).items() if name != "streams"})


if __name__ == "__main__":
    main()
