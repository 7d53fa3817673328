"""Curves of hits against wrong answers, from the sweeps of ``bench/quality.py``; no program of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from quality_labels import REACH

from semkv_lab.evaluate import figure

SHARES = (0.0003, 0.0004, 0.0005, 0.0006, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1)
DRAWS = 400  # of streams, for the intervals of the curves
FAR, HIGH = {"question pairs": 2, "minigqa": 5}, {"question pairs": (74, 81), "minigqa": (0, 55)}  # of the figures


def curve(
    rows: Sequence[dict[str, Any]], sizes: Sequence[int], drawn: Sequence[int] | None = None
) -> list[tuple[float, float]]:
    """Mean (wrong answers, hits) per request over all streams or the ``drawn`` ones, by rising error."""
    n = np.array(sizes, dtype=float)
    chosen = list(range(len(sizes))) if drawn is None else list(drawn)
    shares = [np.array(row["streams"])[chosen] / n[chosen, None] for row in rows]
    return sorted((float(wrong), float(hits)) for hits, wrong in (share.mean(axis=0) for share in shares))


def above(
    rows: Sequence[dict[str, Any]], static: Sequence[dict[str, Any]], sizes: Sequence[int], most: float = 1.0
) -> dict[str, list[float]]:
    """Hits beyond those of the static threshold on the same streams, interpolated at equal shares of wrong answers up
    to ``most``; with the interval that 95% of draws of as many streams from these fall into.
    """
    reach = min(most, curve(rows, sizes)[-1][0], curve(static, sizes)[-1][0])
    shares = [share for share in SHARES if share <= reach]

    def more(drawn: Sequence[int] | None = None) -> Any:
        ours, theirs = (np.array(curve(each, sizes, drawn)).T for each in (rows, static))
        return np.interp(shares, ours[0], ours[1]) - np.interp(shares, theirs[0], theirs[1])

    random = np.random.default_rng(0)
    draws = [more(random.integers(len(sizes), size=len(sizes)).tolist()) for _ in range(DRAWS)]
    low, high = np.quantile(draws, (0.025, 0.975), axis=0)
    return {
        str(share): [round(float(x), 5) for x in found] for share, *found in zip(shares, more(), low, high, strict=True)
    }


def draw_low_end(result: dict[str, Any], path: Path) -> None:
    """The curves by the labels as they are, and by the reader's word."""
    with figure(path, "wrong answers, % of requests", "hits, % of requests") as axes:
        for label, color in (("static", "tab:blue"), ("calibrated with guards", "tab:green")):
            for source, style, by in ((result, "o-", "by the labels"), (result["labels read"], "s:", "read again")):
                points = [(100 * wrong, 100 * hits) for wrong, hits in curve(source[label], result["requests"])]
                axes.plot(*zip(*points, strict=True), style, color=color, markersize=3, label=f"{label}, {by}")
        axes.set_xlim(-0.005, 100 * REACH)
        axes.set_ylim(74.5, 78)
        axes.set_title("question pairs, the low end")
        axes.legend(frameon=False)


def draw(name: str, result: dict[str, Any], path: Path) -> None:
    """Hits against wrong answers: a curve per policy over its thresholds, a point per bound."""
    with figure(path, "wrong answers, % of requests", "hits, % of requests") as axes:
        styles = {"static": "o-", "fixed with guards": "s:", "calibrated with guards": "^--"}
        styles["calibrated with guards and checks"] = "v-"
        for label, style in styles.items():
            points = [(100 * wrong, 100 * hits) for wrong, hits in curve(result[label], result["requests"])]
            axes.plot(*zip(*points, strict=True), style, markersize=4, label=label)
        points = [(100 * row["wrong"], 100 * row["hits"]) for row in result["bounded"]]
        axes.plot(*zip(*points, strict=True), "*", color="black", markersize=11, label="bounded (1%, 0.5%, 0.2%)")
        axes.set_xlim(0, FAR[name])
        axes.set_ylim(*HIGH[name])
        axes.set_title(name)
        axes.legend(frameon=False)


if __name__ == "__main__":
    print(__doc__)
