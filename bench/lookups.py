"""Processor time of guards and lookups, of this checkout and of another, in turns.

    python bench/lookups.py --before /path/to/other/checkout --out bench/results/cpu/lookups.json

Each round is a process of each checkout. It takes the traps and paraphrases of ``bench/data``: the guards compare each
pair once, after pairs of another kind have warmed them up; then the first text of each is stored, and requests are
looked up. A vector counts the beginnings of a text's words, so what is measured is all of a lookup but the encoder.
Given are microseconds of processor time for a call, the median of the rounds, and the ratio with the least and the
largest of a round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import ENVIRONMENT, ROOT, machine, write_json
from gateway import sources

DATA = ROOT / "bench" / "data"
STORED = 400  # paraphrases whose first text is in the cache
WARM_UP = 200  # pairs


class WordCounts:
    """A text encoder that costs next to nothing: a vector of how often words with some beginning occur."""

    dim = 256
    fingerprint = "word counts"

    def fits(self, text: str) -> bool:
        return True

    def encode(self, texts: Sequence[str]) -> Any:
        """Unit vectors, float32 [len(texts), 256]."""
        rows = np.full((len(texts), self.dim), 1e-3, np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in text.lower().split():
                row[zlib.crc32(word[:5].encode()) % self.dim] += 1.0
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def rows_of(name: str) -> list[dict[str, Any]]:
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def spent(work: Callable[[Any], object], items: Iterable[Any]) -> float:
    """Microseconds of processor time for each item."""
    count = 0
    begin = time.process_time()
    for item in items:
        work(item)
        count += 1
    return 1e6 * (time.process_time() - begin) / count


def one_round() -> dict[str, float]:
    """What this process's code takes, by what it does."""
    try:
        from semkv_guards import veto
    except ImportError:  # before the guards were a distribution of their own
        from semkv.guards import veto  # type: ignore[no-redef]

    traps = rows_of("traps.jsonl")
    paraphrases = rows_of("paraphrases.jsonl")
    for row in rows_of("classes.jsonl")[:WARM_UP]:
        veto(row["a"], row["b"])
    return {
        "guards, a trap": spent(lambda row: veto(row["a"], row["b"]), traps),
        "guards, a paraphrase": spent(lambda row: veto(row["a"], row["b"]), paraphrases),
        **_lookups(paraphrases, traps),
    }


def _lookups(paraphrases: Sequence[dict[str, Any]], traps: Sequence[dict[str, Any]]) -> Any:
    from semkv.cache import SemanticCache
    from semkv.config import CacheConfig
    from semkv.types import Namespace, Request, TextSegment

    def request(text: str) -> Request:
        return Request("", Namespace(), (TextSegment(text),))

    known = paraphrases[:STORED]
    asked = {
        "lookup, the same words in other typing": [f" {row['a'].upper()} " for row in known],
        "lookup, other words": [row["b"] for row in known],
        "lookup, nothing like it": [row["a"] for row in traps[:STORED]],
    }
    with tempfile.TemporaryDirectory() as folder:
        config = CacheConfig(Path(folder), similarity_threshold=0.6)
        with SemanticCache(config, text_encoder=WordCounts()) as cache:
            for row in known:
                cache.add_observation(cache.try_reuse(request(row["a"])), "answer")
            cache.try_reuse(request("warm up"))
            return {
                name: spent(lambda text: cache.try_reuse(request(text)), texts)
                for name, texts in asked.items()
            }


def measured(checkout: Path) -> dict[str, float]:
    """A round in a process that runs a checkout's code."""
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": sources(checkout)}
    printed = subprocess.check_output(
        [sys.executable, __file__, "--one-round"],
        env=environment,
        text=True,
        timeout=300,
    )
    found: dict[str, float] = json.loads(printed.splitlines()[-1])
    return found


def compared(before: Path, rounds: int) -> dict[str, Any]:
    """By what is measured: microseconds of both, and this one's share of the other's."""
    own = []
    other = []
    for number in range(rounds):
        other.append(measured(before))
        own.append(measured(ROOT))
        print(f"round {number + 1} of {rounds}", flush=True)
    found: dict[str, Any] = {}
    for name in own[0]:
        ratios = [now[name] / then[name] for now, then in zip(own, other, strict=True)]
        found[name] = {
            "before_us": round(median(row[name] for row in other), 1),
            "now_us": round(median(row[name] for row in own), 1),
            "ratio": round(median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--before", type=Path, default=ROOT, help="another checkout; by default this one, for noise"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one-round", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_round:
        print(json.dumps(one_round()))
        return
    found = {"machine": machine("numpy", "faiss-cpu"), **compared(options.before, options.rounds)}
    write_json(options.out, found)


if __name__ == "__main__":
    main()
