"""Figures of calibrations, pairs and streams, with matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from semkv.errors import ConfigError
from semkv_lab.quality.calibrate import Fit
from semkv_lab.quality.judge import Judgement
from semkv_lab.quality.replay import Outcome


def check_plot(path: Path | None) -> None:
    """Fail before the work, not after it. Raises `ConfigError`."""
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot", str(path), "an installed matplotlib: pip install 'semkv[report]'")
    if path.suffix not in (".png", ".svg", ".pdf") or not path.parent.is_dir():
        raise ConfigError("--plot", str(path), "a .png, .svg or .pdf file in a folder that exists")


@contextmanager
def figure(path: Path, x: str, y: str) -> Iterator[Any]:
    """One set of axes, written to ``path``. No global state of matplotlib is touched."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    drawn.savefig(path, dpi=144)


def plot_fit(fitted: Fit, path: Path) -> None:
    """The share of wrong answers among lookups against the estimated chance."""
    curve = fitted.calibration
    with figure(path, "estimated chance of a wrong answer", "share of wrong answers") as axes:
        axes.plot([0, 1], [0, 1], color="gray", linewidth=1)
        for veto, color, label in ((False, "black", "no veto"), (True, "tab:red", "a guard objects")):
            rows = [(curve.risk(r.score, r.veto, r.wording), r.wrong) for r in fitted.lookups if bool(r.veto) is veto]
            points = [_shares([row for row in rows if low <= row[0] < low + _BAND]) for low in _LOWS]
            shown = [point for point in points if point is not None]
            axes.plot(*zip(*shown, strict=True), "o", color=color, label=label) if shown else None
        axes.axvline(curve.limit, color="gray", linestyle="--", label=f"limit {curve.limit:.2f}")
        axes.legend(frameon=False)


_BAND = 0.1
_LOWS = [_BAND * n for n in range(10)]


def _shares(rows: Sequence[tuple[float, bool]]) -> tuple[float, float] | None:
    """Mean estimate and share of wrong answers of a band that has some lookups."""
    if len(rows) < 5:
        return None
    return sum(risk for risk, _ in rows) / len(rows), sum(wrong for _, wrong in rows) / len(rows)


def plot_pairs(judged: Judgement, path: Path) -> None:
    """Precision against hit ratio."""
    with figure(path, "hit ratio", "precision") as axes:
        axes.plot(*zip(*judged.curve, strict=True), label=f"area {judged.area:.3f}")
        if judged.precision is not None:
            axes.plot(judged.accepted / judged.pairs, judged.precision, "o", color="black", label="the policy")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.legend(frameon=False)


def plot_stream(outcome: Outcome, bound: float | None, path: Path) -> None:
    """Wrong answers per request along the stream, with the bound where there is one."""
    with figure(path, "requests", "wrong answers per request, %") as axes:
        axes.plot([n for n, _, _ in outcome.curve], [100 * wrong / n for n, _, wrong in outcome.curve], color="tab:red")
        if bound is not None:
            axes.axhline(100 * bound, color="gray", linestyle="--", label="bound")
            axes.legend(frameon=False)
        hits = axes.twinx()
        hits.plot([n for n, _, _ in outcome.curve], [100 * h / n for n, h, _ in outcome.curve], color="tab:blue")
        hits.set_ylabel("hits, % of requests", color="tab:blue")
        axes.set_ylim(bottom=0)
