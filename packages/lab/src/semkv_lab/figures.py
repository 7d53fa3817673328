"""The figures of a report. Every axis has its unit, marks have 95% intervals."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from semkv_lab.metrics import Estimate, read_estimate
from semkv_lab.results import Experiment, Point, group_names, points

INK, MUTED, GRID, SURFACE = "#1b2026", "#5a6470", "#d8dde2", "#fefefe"
SERIES = ("#0b68c7", "#c2430d", "#16803c", "#8a3ab5", "#9a6206", "#bd1a5e")
# The same colors in the dark. The finished SVG names each color by a variable, and a style sheet in it has both values.
_DARK = {
    INK: "#e7eaee", MUTED: "#a0aab5", GRID: "#363e48", SURFACE: "#161a20",
    **dict(zip(SERIES, ("#62b0ff", "#ff9d66", "#52d685", "#cf9bf5", "#e3be6a", "#ff80ba"), strict=True)),
}  # fmt: skip
MARKERS = "osD^vPX*"
STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "svg.hashsalt": "semkv",
    "svg.fonttype": "path",
    "font.size": 9.5,
    "axes.titlesize": 10.0,
    "axes.facecolor": "none",
    "grid.color": GRID,
}
_PNG_DPI = 150
_WIDTH = 10.6  # inches
_INTERVAL = "95% intervals by bootstrap over images"


class Drawing(NamedTuple):
    """A finished figure: ``name`` is a file name without suffix, ``caption`` says how to read it.

    The SVG is light or dark, as its reader prefers; the PNG is light.
    """

    name: str
    title: str
    caption: str
    svg: str
    png: bytes


def draw_all(experiments: Sequence[Experiment]) -> list[Drawing]:
    """Every figure that the experiments have data for."""
    groups = group_names(experiments)
    colors = dict(zip(dict.fromkeys(groups), cycle(SERIES), strict=False))
    drawings = []
    if plane := points(experiments):
        drawings.append(_tradeoff(plane, colors))
    if tiers := tier_points(experiments, groups):
        drawings.append(_tiers(tiers, colors))
    if samples := _latencies(experiments, groups):
        drawings.append(_latency(samples))
    return drawings


def render(name: str, title: str, caption: str, height: float, draw: Callable[[Figure], None]) -> Drawing:
    """Draw a figure; equal data gives equal bytes. Matplotlib's global state stays as it is."""
    svg, png = io.StringIO(), io.BytesIO()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure)
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        figure.savefig(png, format="png", dpi=_PNG_DPI, facecolor="white", metadata={"Software": None})
    return Drawing(name, title, caption, _with_variables(svg.getvalue()), png.getvalue())


def _with_variables(svg: str) -> str:
    """The picture with a variable for each color, and a style sheet that sets them as its reader prefers."""
    light = dark = ""
    for number, (color, in_the_dark) in enumerate(_DARK.items()):
        svg = svg.replace(color, f"var(--c{number})")
        light, dark = f"{light}--c{number}:{color};", f"{dark}--c{number}:{in_the_dark};"
    style = f"<style>:root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}</style>"
    return svg.replace("<defs>", f"{style}<defs>", 1)


def _bars(value: Estimate, factor: float) -> Any:
    """Distances from value to interval, [2, 1]; none where there is no interval."""
    middle = value.value or 0.0
    low, high = (middle if end is None else end for end in (value.low, value.high))
    return np.array([[factor * max(0.0, middle - low)], [factor * max(0.0, high - middle)]])


def _legend(figure: Figure, colors: dict[str, str], groups: set[str], families: Sequence[str] = ()) -> None:
    """Groups below the panels, tiers above them."""
    named = {group: color for group, color in colors.items() if group in groups}
    handles = [
        Line2D([], [], marker="o", linestyle="", color=color, label=textwrap.fill(group, 60))
        for group, color in named.items()
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=max(1, 110 // max(map(len, named))))
    marks = zip(families, cycle(MARKERS), strict=False)
    if shapes := [Line2D([], [], marker=mark, linestyle="", color=MUTED, label=name) for name, mark in marks]:
        figure.legend(handles=shapes, loc="outside upper left", ncols=4)


# -- accuracy against hit rate ------------------------------------------------------------


def _tradeoff(plane: Sequence[Point], colors: dict[str, str]) -> Drawing:
    families = sorted({p.experiment.tiers for p in plane})
    front = sorted((p for p in plane if p.front), key=lambda p: p.rate.value or 0)

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        for p in plane:
            x, y, color = 100 * (p.rate.value or 0), 100 * (p.accuracy.value or 0), colors[p.group]
            bars = {"xerr": _bars(p.rate, 100), "yerr": _bars(p.accuracy, 100)}
            ax.errorbar(x, y, **bars, color=color, linewidth=0.8, alpha=0.35)
            marker = MARKERS[families.index(p.experiment.tiers) % len(MARKERS)]
            ax.plot(x, y, marker, color=color, markersize=6.5, markeredgecolor=SURFACE, markeredgewidth=0.7)
        xs, ys = ([100 * (value or 0) for value in axis] for axis in zip(*map(_place, front), strict=True))
        ax.plot([0, *xs], [ys[0], *ys], drawstyle="steps-pre", color=INK, linewidth=1.1, zorder=1.5)
        for x, y, p in zip(xs, ys, front, strict=True):  # above and right of a point of the front is nothing
            style: Any = {"xytext": (4, 3), "textcoords": "offset points", "color": INK, "fontweight": "bold"}
            ax.annotate(str(p.front), (x, y), **style)
        ax.set(xlabel="hit rate (% of requests)", ylabel="accuracy on hits (%)", xlim=(0, None))
        ax.set_ylim(max(-2.0, ax.get_ylim()[0]), min(108.0, ax.get_ylim()[1] + 5))
        _legend(figure, colors, {p.group for p in plane}, families)

    return render(
        "tradeoff",
        "Accuracy on hits against hit rate",
        "One mark an experiment whose hits can be judged. The line is the Pareto front: no other one has more hits and "
        f"more of them right; its numbers are in the table below. Bars are {_INTERVAL}.",
        5.2,
        draw,
    )


def _place(point: Point) -> tuple[float | None, float | None]:
    return point.rate.value, point.accuracy.value


# -- tiers ------------------------------------------------------------


class TierPoint(NamedTuple):
    """One tier of one experiment: the share of requests it served, and what each of them saved in seconds."""

    tier: str
    group: str
    rate: Estimate
    saved: Estimate


def tier_points(experiments: Sequence[Experiment], groups: Sequence[str]) -> list[TierPoint]:
    """Every tier of every experiment that hit, misses too."""
    return [
        TierPoint(row["tier"], group, read_estimate(row, "share"), read_estimate(row, "saved", "latency_p50_s"))
        for experiment, group in zip(experiments, groups, strict=True)
        for row in experiment.summary.get("tiers", ())
        if row["tier"] != "all" and row["n"]
    ]


def _tiers(found: Sequence[TierPoint], colors: dict[str, str]) -> Drawing:
    names = sorted({p.tier for p in found}, key=lambda tier: (tier == "miss", tier))
    ordered = sorted(found, key=lambda p: names.index(p.tier))
    saved = [1000 * p.saved.value for p in found if p.saved.value is not None]

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, 2 if saved else 1, squeeze=False, sharey=True)[0]
        for row, p in enumerate(ordered):  # one below the other, so that bars do not cover each other
            values = [(p.rate, 100.0), (p.saved, 1000.0)]
            for ax, (value, factor) in zip(axes, values, strict=False):
                if value.value is not None:
                    bars, style = _bars(value, factor), {"fmt": "o", "markersize": 3.4, "elinewidth": 0.9}
                    ax.errorbar(factor * value.value, row, xerr=bars, color=colors[p.group], **style)
        rows = [[n for n, p in enumerate(ordered) if p.tier == name] for name in names]
        for ax in axes:
            ax.set_yticks([sum(own) / len(own) for own in rows], names)
            ax.set_ylim(len(ordered) - 0.5, -0.5)
            ax.grid(visible=False, axis="y")
            for own in rows[1:]:
                ax.axhline(own[0] - 0.5, color=GRID, linewidth=0.7)
        axes[0].set(xlabel="requests served (%)", xlim=(0, None))
        if saved:
            low, high = min(0.0, *saved), max(0.0, *saved)
            margin = 0.35 * (high - low) or 1.0  # one interval over a few samples shall not flatten all the others
            axes[1].set(xlabel="median time saved a request (ms)", xlim=(low - margin, high + margin))
            axes[1].axvline(0, color=INK, linewidth=0.9)
        _legend(figure, colors, {p.group for p in found})

    return render(
        "tiers",
        "Hit rate and saved time by tier",
        "One mark an experiment in which the tier was on and hit. Saved is the time the same request took on vLLM with "
        "its own prefix cache and encoder cache, less the time with semkv, lookup included; left of zero semkv was "
        f"slower. Bars are {_INTERVAL}; what leaves the panel is cut.",
        1.6 + 0.25 * len(names) + 0.085 * len(found),
        draw,
    )


# -- latency ------------------------------------------------------------

_Kinds = dict[str, dict[str, list[float]]]
_LINES: dict[str, tuple[str, Literal["-", "--"]]] = {
    "hits": (SERIES[2], "-"), "misses": (SERIES[1], "-"), "without semkv": (MUTED, "--")
}  # fmt: skip


def _latencies(experiments: Sequence[Experiment], groups: Sequence[str]) -> _Kinds:
    """Seconds by group and kind: hits, misses, and the same requests without semkv, each once."""
    found: _Kinds = {}
    seen: set[tuple[str, str]] = set()
    for experiment, group in zip(experiments, groups, strict=True):
        for record in experiment.records:
            kinds = found.setdefault(group, {kind: [] for kind in _LINES})
            kinds["hits" if record.hit else "misses"].append(record.latency_s)
            if record.cold is not None and (group, record.sample_id) not in seen:
                seen.add((group, record.sample_id))
                kinds["without semkv"].append(record.cold.latency_s)
    return found


def _latency(found: _Kinds) -> Drawing:
    rows = -(-len(found) // 3)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(rows, min(len(found), 3), squeeze=False).ravel()
        for unused in grid[len(found) :]:
            unused.set_axis_off()
        for ax, (group, samples) in zip(grid, found.items(), strict=False):
            for kind, (color, style) in _LINES.items():
                if samples[kind]:
                    ax.ecdf([1000 * seconds for seconds in samples[kind]], color=color, linestyle=style)
            ax.set(xlabel="latency, lookup included (ms, log)", ylabel="answered by then (share)", xscale="log")
            ax.xaxis.set_major_formatter("{x:g}")
            counts = ", ".join(f"{len(samples[kind]):,} {kind}" for kind in ("hits", "misses"))
            ax.set_title(f"{textwrap.fill(group, 38)}\n{counts}", fontsize="medium", loc="left")
        lines = [Line2D([], [], color=color, linestyle=style, label=kind) for kind, (color, style) in _LINES.items()]
        figure.legend(handles=lines, loc="outside lower left", ncols=3)

    return render(
        "latency",
        "Latency of hits and misses",
        "Share of requests that were answered within a time: the further left, the faster. All experiments of a model "
        "together; without semkv each request counts once.",
        3.7 * rows,
        draw,
    )
