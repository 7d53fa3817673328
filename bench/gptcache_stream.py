"""GPTCache's lookup as a black box, on the streams of question pairs of ``bench/quality.py``; writes JSON.

GPTCache runs in a virtual environment of its own (``pip install gptcache faiss-cpu sqlalchemy``), with SQLite and
FAISS, its distance evaluation and its ``put`` and ``get``. It is handed our vectors through its embedding hook, so that
its lookup alone decides. Its store is made large enough to evict nothing, and its log of hits and token counter are
off. As in the replay, a miss is stored and a hit is not; an answer is wrong when it comes from another cluster.

    python bench/gptcache_stream.py --python venv/bin/python
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
THRESHOLDS = (0.8, 0.9, 0.95, 0.96)  # the first is GPTCache's default
_ROOMY = 100_000  # entries, so that nothing is evicted


def play(texts: list[str], answers: list[str], known: dict[str, Any], threshold: float, folder: Path) -> dict[str, Any]:
    """One stream through a new GPTCache. Runs where GPTCache is installed."""
    from gptcache import Cache, Config
    from gptcache.adapter.api import get, put
    from gptcache.manager import manager_factory
    from gptcache.processor.pre import get_prompt
    from gptcache.similarity_evaluation import SearchDistanceEvaluation

    cache = Cache()
    dim = len(next(iter(known.values())))
    cache.init(
        pre_embedding_func=get_prompt,
        embedding_func=lambda text, **_: known[text],
        data_manager=manager_factory(
            "sqlite,faiss", str(folder), vector_params={"dimension": dim}, eviction_params={"max_size": _ROOMY}
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
    return {
        "threshold": threshold,
        "cosine": round(2 * threshold - 1, 4),  # 4 - squared distance >= 4 x threshold, of unit vectors
        "requests": len(texts),
        "hits": hits,
        "exact": exact,
        "wrong": wrong,
        "stored_but_not_found": lost,
        "lookup_ms_p50": round(1e3 * statistics.median(seconds), 3),
        "lookup_ms_p99": round(1e3 * float(np.percentile(seconds, 99)), 3),
    }


def worker(folder: Path) -> None:
    """Play every stream at every threshold and print a line of JSON for each; the versions first."""
    from importlib.metadata import version

    names = ("gptcache", "faiss-cpu", "SQLAlchemy", "numpy")
    print(json.dumps({"python": platform.python_version(), **{name: version(name) for name in names}}), flush=True)
    kept = np.load(folder / "vectors.npz")
    known = dict(zip(kept["texts"].tolist(), kept["vectors"], strict=True))
    for seed, (texts, answers) in enumerate(json.loads((folder / "streams.json").read_text(encoding="utf-8"))):
        for threshold in THRESHOLDS:
            place = folder / f"{threshold}-{seed}"
            place.mkdir()
            print(json.dumps({"seed": seed, **play(texts, answers, known, threshold, place)}), flush=True)


def prepare(pairs: Path, seeds: int, folder: Path) -> None:
    """The streams and their vectors, for the worker."""
    from quality_streams import draw_stream, halves

    from semkv.encoders.text import SentenceEncoder
    from semkv_lab.quality import encode, read_pairs

    _, second = halves(read_pairs(pairs), 0)
    streams = [draw_stream(second, seed) for seed in range(seeds)]
    texts = sorted({asked.text for stream in streams for asked in stream}, key=lambda text: (len(text), text))
    vectors, _ = encode(texts, SentenceEncoder(), lambda _: None)
    np.savez(folder / "vectors.npz", texts=np.array(texts), vectors=vectors)
    rows = [[[a.text for a in stream], [a.answer for a in stream]] for stream in streams]
    (folder / "streams.json").write_text(json.dumps(rows), encoding="utf-8")


def means(rows: list[dict[str, Any]]) -> dict[str, Any]:
    def share(name: str) -> float:
        return round(statistics.mean(row[name] / row["requests"] for row in rows), 6)

    return {
        "threshold": rows[0]["threshold"],
        "cosine": rows[0]["cosine"],
        "hits": share("hits"),
        "wrong": share("wrong"),
        "wrong_worst": round(max(row["wrong"] / row["requests"] for row in rows), 6),
        "lookup_ms_p50": statistics.median(row["lookup_ms_p50"] for row in rows),
        "lookup_ms_p99": max(row["lookup_ms_p99"] for row in rows),
        "streams": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", type=Path, help="interpreter of the environment with GPTCache")
    parser.add_argument("--pairs", type=Path, default=ROOT.parent / "shared" / "data" / "question_pairs_dev.jsonl.gz")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "gptcache.json")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    if options.python is None:
        parser.error("--python is needed")
    with tempfile.TemporaryDirectory() as folder:
        prepare(options.pairs, options.seeds, Path(folder))
        command = [str(options.python), __file__, "--worker", folder]
        versions: dict[str, str] = {}
        rows: list[dict[str, Any]] = []
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if not versions:
                    versions = json.loads(line)
                    continue
                rows.append(json.loads(line))
                print(rows[-1], flush=True)
                by_threshold = [[row for row in rows if row["threshold"] == t] for t in THRESHOLDS]
                result = {
                    "encoder": "all-MiniLM-L6-v2",
                    "machine": platform.machine(),
                    "versions": versions,
                    "thresholds": [means(group) for group in by_threshold if group],
                }
                options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if process.returncode:
            sys.exit(f"GPTCache's side failed with status {process.returncode}")


if __name__ == "__main__":
    main()
