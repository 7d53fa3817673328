"""The figures of a report. Every axis has its unit, every figure its 95% intervals."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from semkv_lab.console import interval
from semkv_lab.metrics import Estimate, resamples, split
from semkv_lab.results import Experiment, Grid, Point, TierPoint, grids, group_names, points, tier_points

INK, MUTED, GRID, SURFACE = "#1b2026", "#5a6470", "#d8dde2", "#fefefe"
SERIES = ("#0b68c7", "#c2430d", "#16803c", "#8a3ab5", "#9a6206", "#bd1a5e")
# The same colors in the dark. The finished SVG names each color by a variable, and a style sheet in it has both values.
_DARK = {
    INK: "#e7eaee", MUTED: "#a0aab5", GRID: "#363e48", SURFACE: "#161a20",
    "#0b68c7": "#62b0ff", "#c2430d": "#ff9d66", "#16803c": "#52d685", "#8a3ab5": "#cf9bf5", "#9a6206": "#e3be6a",
    "#bd1a5e": "#ff80ba",
}  # fmt: skip
# Text on a heat map's cell, whose color is the same in both palettes.
ON_LIGHT, ON_DARK = "#0a0a0a", "#fafafa"
MARKERS = "osD^vPX*"

_PNG_DPI = 150
_WIDTH = 10.6  # inches
STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 9.0),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "svg.hashsalt": "semkv",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.labelsize": 9.5,
    "axes.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
}


class Drawing(NamedTuple):
    """A finished figure: ``name`` is a file name without suffix, ``caption`` says how to read it.

    The SVG is light or dark, as its reader prefers; the PNG is light.
    """

    name: str
    title: str
    caption: str
    svg: str
    png: bytes


def render(name: str, title: str, caption: str, draw: Callable[[Figure], None]) -> Drawing:
    """Draw a figure; equal data gives equal bytes. Matplotlib's global state stays as it is."""
    svg, png = io.StringIO(), io.BytesIO()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, 4), layout="constrained")
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


def panels(figure: Figure, count: int, height: float) -> list[Axes]:
    """So many panels, three in a row; ``height`` of a panel in inches."""
    columns = min(count, 3)
    rows = -(-count // columns)
    figure.set_size_inches(_WIDTH, rows * height)
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = list(grid.ravel())
    for unused in axes[count:]:
        unused.set_axis_off()
    return axes[:count]


# -- the figures ------------------------------------------------------------

_ECDF_POINTS = 100
_INTERVAL = "95% intervals by bootstrap over images"


def draw_all(experiments: Sequence[Experiment]) -> list[Drawing]:
    """Every figure that the experiments have data for."""
    colors = dict(zip(dict.fromkeys(group_names(experiments)), cycle(SERIES), strict=False))
    drawings = []
    if plane := points(experiments):
        drawings.append(_tradeoff(plane, colors))
    if tiers := tier_points(experiments):
        drawings.append(_tiers(tiers, colors))
    if samples := _latencies(experiments):
        drawings.append(_latency(samples))
    return drawings + [_grid(number, grid) for number, grid in enumerate(grids(experiments), start=1)]


def _bars(value: Estimate, factor: float) -> Any:
    """Distances from value to interval, [2, 1]; none where there is no interval."""
    middle = value.value or 0.0
    low, high = (middle if end is None else end for end in (value.low, value.high))
    return np.array([[factor * max(0.0, middle - low)], [factor * max(0.0, high - middle)]])


# -- accuracy against hit rate ----------------------------------------------------------------------------------


def _tradeoff(plane: Sequence[Point], colors: dict[str, str]) -> Drawing:
    def draw(figure: Figure) -> None:
        figure.set_size_inches(_WIDTH, 5.2)
        ax = figure.subplots()
        families = sorted({p.family for p in plane})
        for p in plane:
            x, y = 100 * (p.rate.value or 0), 100 * (p.accuracy.value or 0)
            color = colors[p.group]
            bars = {"xerr": _bars(p.rate, 100), "yerr": _bars(p.accuracy, 100)}
            ax.errorbar(x, y, **bars, color=color, linewidth=0.8, alpha=0.35)
            marker = MARKERS[families.index(p.family) % len(MARKERS)]
            ax.plot(x, y, marker, color=color, markersize=6.5, markeredgecolor=SURFACE, markeredgewidth=0.7)
        _front(ax, plane)
        ax.set_xlabel("hit rate (% of requests)")
        ax.set_ylabel("accuracy on hits (%)")
        ax.set_xlim(left=0)
        low, high = ax.get_ylim()
        ax.set_ylim(max(-2.0, low), 108.0 if high > 95 else high)
        ax.set_yticks([t for t in ax.get_yticks() if -2 <= t <= 100])
        _legend(figure, colors, {p.group for p in plane}, families)

    return render(
        "tradeoff",
        "Accuracy on hits against hit rate",
        "One mark an experiment whose hits can be judged. The line is the Pareto front: no other one has more hits and "
        f"more of them right; its numbers are in the table below. Bars are {_INTERVAL}.",
        draw,
    )


def _front(ax: Axes, plane: Sequence[Point]) -> None:
    """The line and its numbers; these stand above and right of the points, where by definition nothing is."""
    front = sorted((p for p in plane if p.front), key=lambda p: p.rate.value or 0)
    x = [100 * (p.rate.value or 0) for p in front]
    y = [100 * (p.accuracy.value or 0) for p in front]
    ax.plot([0, *x], [y[0], *y], drawstyle="steps-pre", color=INK, linewidth=1.1, zorder=1.5)
    level, last = 0, (-1e9, 0.0)
    for px, py, p in zip(x, y, front, strict=True):
        level = level + 1 if px - last[0] < 2.5 and abs(py - last[1]) < 4 else 0
        ax.annotate(
            str(p.front), (px, py), xytext=(4, 3 + 10 * level), textcoords="offset points", color=INK, fontweight="bold"
        )
        last = (px, py)


def _legend(figure: Figure, colors: dict[str, str], groups: set[str], families: Sequence[str]) -> None:
    """Groups below the panels, tiers above them."""
    named = [g for g in colors if g in groups]
    longest = max(map(len, named))
    handles = [Line2D([], [], marker="o", linestyle="", color=colors[g], label=_wrap(g)) for g in named]
    figure.legend(handles=handles, loc="outside lower left", ncols=4 if longest < 28 else 3 if longest < 38 else 2)
    marks = [
        Line2D([], [], marker=marker, linestyle="", color=MUTED, label=name)
        for name, marker in zip(families, cycle(MARKERS), strict=False)
    ]
    if marks:
        figure.legend(handles=marks, loc="outside upper left", ncols=4)


def _wrap(text: str, width: int = 60) -> str:
    return "\n".join(textwrap.wrap(text, width))


# -- tiers ------------------------------------------------------------------------------------------------------


def _tiers(found: Sequence[TierPoint], colors: dict[str, str]) -> Drawing:
    names = sorted({p.tier for p in found}, key=lambda t: (t == "miss", t))
    timed = any(p.saved.value is not None for p in found)

    def draw(figure: Figure) -> None:
        height = 1.0 + 0.085 * sum(_rows(found, name) for name in names)
        axes = panels(figure, 2 if timed else 1, height + 0.4)
        hits = [n for n in names if n != "miss"]
        _strip(axes[0], [p for p in found if p.tier != "miss"], hits, colors, "rate", 100)
        axes[0].set_xlabel("requests served by the tier (%)")
        axes[0].set_xlim(left=0)
        if timed:
            _strip(axes[1], found, names, colors, "saved", 1000)
            axes[1].axvline(0, color=INK, linewidth=0.9)
            axes[1].set_xlim(*_room([1000 * p.saved.value for p in found if p.saved.value is not None]))
            axes[1].set_xlabel("median time saved a request (ms)")
        _legend(figure, colors, {p.group for p in found}, ())

    return render(
        "tiers",
        "Hit rate and saved time by tier",
        "One mark an experiment in which the tier was on and hit. Saved is the time the same request took on vLLM with "
        "its own prefix cache and encoder cache, less the time with semkv, lookup included; left of zero semkv was "
        f"slower. Bars are {_INTERVAL}; what leaves the panel is cut.",
        draw,
    )


def _room(values: Sequence[float]) -> tuple[float, float]:
    """Limits around the values and 0, so that one interval over a few samples does not flatten all the others."""
    low, high = min(0.0, *values), max(0.0, *values)
    margin = 0.35 * (high - low) or 1.0
    return low - margin, high + margin


def _strip(
    ax: Axes, found: Sequence[TierPoint], names: Sequence[str], colors: dict[str, str], what: str, factor: float
) -> None:
    """A band a tier; its marks stand one below the other, so that their bars do not cover each other."""
    top, middles = 0, []
    for name in names:
        members = [p for p in found if p.tier == name and getattr(p, what).value is not None]
        rows = _rows(found, name)
        middles.append(top + rows / 2)
        for number, p in enumerate(members):
            value: Estimate = getattr(p, what)
            ax.errorbar(
                factor * (value.value or 0), top + (rows - len(members) + 1) / 2 + number, xerr=_bars(value, factor),
                fmt="o", markersize=3.4, color=colors[p.group], elinewidth=0.9, alpha=0.9,
            )  # fmt: skip
        top += rows
        if name != names[-1]:
            ax.axhline(top, color=GRID, linewidth=0.7)
    ax.set_yticks(middles, names)
    ax.set_ylim(top, 0)
    ax.grid(visible=False, axis="y")


def _rows(found: Sequence[TierPoint], name: str) -> int:
    """How many rows of marks a tier's band has."""
    return max(4, 2 + sum(p.tier == name for p in found))


# -- latency ----------------------------------------------------------------------------------------------------


_Kinds = dict[str, dict[str, list[tuple[str, float]]]]


def _latencies(experiments: Sequence[Experiment]) -> _Kinds:
    """(image, seconds) by group and kind: hits, misses, and the same requests without semkv, each once."""
    found: _Kinds = {}
    cold: dict[str, dict[str, tuple[str, float]]] = {}
    for experiment, group in zip(experiments, group_names(experiments), strict=True):
        for record in experiment.records:
            kinds = found.setdefault(group, {"hits": [], "misses": []})
            kinds["hits" if record.hit else "misses"].append((record.image, record.latency_s))
            if record.cold is not None:
                cold.setdefault(group, {})[record.sample_id] = (record.image, record.cold.latency_s)
    return {group: {**kinds, "without semkv": list(cold.get(group, {}).values())} for group, kinds in found.items()}


def _latency(found: _Kinds) -> Drawing:
    kinds: dict[str, tuple[str, Literal["-", "--"]]] = {
        "hits": (SERIES[2], "-"), "misses": (SERIES[1], "-"), "without semkv": (MUTED, "--")
    }  # fmt: skip

    def draw(figure: Figure) -> None:
        for ax, (group, samples) in zip(panels(figure, len(found), 3.7), found.items(), strict=True):
            for kind, (color, style) in kinds.items():
                if samples[kind]:
                    x, y, low, high = _ecdf(samples[kind])
                    ax.plot(x, y, color=color, linewidth=1.6, linestyle=style)
                    ax.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
            ax.set_xscale("log")
            left, right = ax.get_xlim()
            ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if right < 500 * left else (1,), numticks=8))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            ax.xaxis.set_minor_formatter(NullFormatter())
            ax.set_xlabel("latency, lookup included (ms, log)")
            ax.set_ylabel("answered by then (%)")
            ax.set_ylim(0, 101)
            counts = ", ".join(f"{len(samples[kind]):,} {kind}" for kind in ("hits", "misses"))
            ax.set_title(f"{_wrap(group, 38)}\n{counts}", fontsize="medium")
        handles = [Line2D([], [], color=color, linestyle=style, label=kind) for kind, (color, style) in kinds.items()]
        figure.legend(handles=handles, loc="outside lower left", ncols=3)

    return render(
        "latency",
        "Latency of hits and misses",
        "Share of requests that were answered within a time: the further left, the faster. All experiments of a model "
        "together; without semkv each request counts once. Bands are pointwise " + _INTERVAL + ".",
        draw,
    )


def _ecdf(values: Sequence[tuple[str, float]]) -> tuple[Any, Any, Any, Any]:
    """Milliseconds, the percentage of values up to there, and its interval, pointwise."""
    groups, seconds = split(values)
    x = np.geomspace(max(seconds.min(), 1e-5), max(seconds.max(), 2e-5), _ECDF_POINTS)
    images = int(groups.max()) + 1
    below = np.zeros((images, len(x)))
    np.add.at(below, groups, seconds[:, None] <= x * (1 + 1e-12))
    total = np.bincount(groups).astype(np.float64)
    drawn = np.concatenate([counts @ below / (counts @ total)[:, None] for counts in resamples(images)])
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    return 1000 * x, 100 * below.sum(axis=0) / total.sum(), 100 * low, 100 * high


# -- threshold grids --------------------------------------------------------------------------------------------

_PANELS = (
    ("hit rate (% of requests)", ("hit_share",), 100.0),
    ("accuracy on hits (%)", ("accuracy_on_hits",), 100.0),
    ("time saved a request, mean (ms)", ("saved", "latency_s"), 1000.0),
)


def _grid(number: int, grid: Grid) -> Drawing:
    def draw(figure: Figure) -> None:
        shown = [p for p in _PANELS if any(e.estimate(*p[1]).value is not None for e in grid.cells.values())]
        rows = 0.62 * len(grid.prompt) + 1.5
        for ax, panel in zip(panels(figure, len(shown), rows), shown, strict=True):
            _heat(ax, grid, *panel)

    return render(
        f"grid-{number}",
        f"Thresholds of the embedding tier: {grid.name}",
        f"Least cosine of the prompt and of the vision layer. In brackets {_INTERVAL}; a dash: no hits.",
        draw,
    )


def _heat(ax: Axes, grid: Grid, title: str, path: tuple[str, ...], factor: float) -> None:
    found = {key: e.estimate(*path) for key, e in grid.cells.items()}
    none = Estimate(0, None)
    cells = [[found.get((p, v), none) for v in grid.vision] for p in grid.prompt]
    values = np.array([[np.nan if e.value is None else factor * e.value for e in row] for row in cells])
    high = float(np.nanmax(values))
    span = max(high - float(np.nanmin(values)), 1.0 if factor == 100.0 else 1e-9)
    columns, rows = np.arange(len(grid.vision) + 1), np.arange(len(grid.prompt) + 1)
    ax.pcolormesh(columns, rows, values, cmap="viridis", vmin=high - span, vmax=high, edgecolors="none")
    for row, column in np.ndindex(values.shape):
        value = cells[row][column]
        bright = (values[row, column] - high + span) / span > 0.55
        color = INK if value.value is None else ON_LIGHT if bright else ON_DARK
        text = interval(value, factor=factor).replace(" [", "\n[")
        ax.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=color, fontsize=8.5)
    ax.set_xticks(columns[:-1] + 0.5, [f"{v:g}" for v in grid.vision])
    ax.set_yticks(rows[:-1] + 0.5, [f"{p:g}" for p in grid.prompt])
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.set(title=title, xlabel="vision threshold (cosine)", ylabel="prompt threshold (cosine)")
