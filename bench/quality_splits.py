"""The curves of ``bench/quality.py`` on the question pairs, over several ways to split them; writes JSON and a figure.

One split puts half of the clusters into the streams, and where few answers are wrong a single pair of them moves the
curve. So the pairs are split at random several times, each half serves once to fit and once for ten streams, and what
the calibrated curve has beyond the static one is told as the mean over all splits, with its spread. No row is written.

    python bench/quality_splits.py --pairs ../shared/data/question_pairs_dev.jsonl.gz
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import quality
from quality_curves import above
from quality_streams import draw_stream, halves

from semkv.encoders.text import DEFAULT_MODEL
from semkv.guards import veto
from semkv_lab.evaluate import figure, fit
from semkv_lab.quality import Replay, build_corpus, clusters, read_pairs

# Both as dense at the far end as the lists that they extend are at the near one.
COSINES = sorted({*quality.COSINES, 0.72, 0.74, 0.76, 0.78, 0.82, 0.83, 0.85, 0.87, 0.89})
LIMITS = sorted({*quality.LIMITS, 0.06, 0.085, 0.12, 0.135, 0.175, 0.225, 0.25, 0.275, 0.35, 0.4, 0.45, 0.6})
OURS = {"calibrated with guards": 0.0, "calibrated with guards and checks": quality.CHECKS}


def split(file: Path, vectors: Path | None, streams: int, which: tuple[int, bool]) -> dict[str, Any]:
    """Hits beyond the static thresholds' at equal error, on the streams from one half."""
    seed, swapped = which
    encoder = quality.Remembering(vectors)
    fitting, asking = halves(read_pairs(file), seed)[:: -1 if swapped else 1]
    fitted = fit(fitting, build_corpus(list(clusters(fitting)), encoder, veto), encoder.fingerprint)
    bare, guarded = quality.both(list(clusters(asking)), encoder)
    drawn = [draw_stream(asking, number) for number in range(streams)]
    sizes = [len(stream) for stream in drawn]
    static = quality.sweep([Replay(stream, bare) for stream in drawn], quality.fixed, 0.0, COSINES)
    replays, make = [Replay(stream, guarded) for stream in drawn], quality.calibrated_by(fitted.calibration)
    ours = {name: quality.sweep(replays, make, checks, LIMITS) for name, checks in OURS.items()}
    more = {name: above(rows, static, sizes) for name, rows in ours.items()}
    return {"seed": seed, "swapped": swapped, "more hits than static at equal error, with 95% interval": more}


def summary(splits: list[dict[str, Any]], name: str) -> dict[str, dict[str, float]]:
    """By share of wrong answers, over the splits that reach it."""
    rows = [each["more hits than static at equal error, with 95% interval"][name] for each in splits]
    found = {}
    for share in rows[0]:
        values = [row[share][0] for row in rows if share in row]
        figures = {"mean": np.mean(values), "deviation": np.std(values), "least": min(values), "most": max(values)}
        found[share] = {"splits": len(values), **{label: round(float(value), 5) for label, value in figures.items()}}
    return found


def draw(summaries: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    with figure(path, "wrong answers, % of requests", "more hits than the static threshold, points") as axes:
        for (name, rows), color in zip(summaries.items(), ("tab:green", "tab:orange"), strict=True):
            at = [100 * float(share) for share in rows]
            mean, off = (np.array([100 * row[label] for row in rows.values()]) for label in ("mean", "deviation"))
            axes.plot(at, mean, "o-", color=color, markersize=4, label=name)
            axes.fill_between(at, mean - off, mean + off, color=color, alpha=0.15, linewidth=0)
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_title("question pairs: mean over splits, one standard deviation")
        axes.legend(frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    root = quality.ROOT
    parser.add_argument("--pairs", type=Path, default=root.parent / "shared" / "data" / "question_pairs_dev.jsonl.gz")
    parser.add_argument("--seeds", type=int, default=3, help="ways to split; each gives two")
    parser.add_argument("--streams", type=int, default=10, help="of each half")
    parser.add_argument("--vectors", type=Path, help="an .npz of vectors that bench/quality.py kept")
    parser.add_argument("--out", type=Path, default=root / "bench" / "results" / "quality_splits.json")
    parser.add_argument("--picture", type=Path, default=root / "docs" / "pictures" / "quality-splits.png")
    options = parser.parse_args()
    start = time.perf_counter()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        work = partial(split, options.pairs, options.vectors, options.streams)
        splits = list(pool.map(work, product(range(options.seeds), (False, True))))
    summaries = {name: summary(splits, name) for name in OURS}
    result = {"encoder": DEFAULT_MODEL, "streams": options.streams, "over all splits": summaries, "splits": splits}
    result["seconds"] = round(time.perf_counter() - start, 1)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(summaries, options.picture)
    for name, rows in summaries.items():
        print(name, {share: round(100 * row["mean"], 2) for share, row in rows.items()}, flush=True)


if __name__ == "__main__":
    main()
