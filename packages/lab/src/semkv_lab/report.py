"""``semkv report``: from the logs of sweeps one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import difflib
import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from semkv import __version__
from semkv_lab import metrics
from semkv_lab.console import keep_apart, percent, seconds, shown, writing
from semkv_lab.metrics import Estimate, given, read_estimate, without, wrong_hit
from semkv_lab.results import Experiment, Point, Wrong, facts, points, read_logs, wrong_hits
from semkv_lab.samples import at

_WORST = 12  # wrong hits that are shown


def write_report(logs: Sequence[Path], out: Path, *, title: str = "") -> None:
    """Write the page.

    Args:
        logs: ``.csv`` or ``.jsonl`` files of sweeps.
        out: the page.
        title: its heading.
    """
    read = {f"LOG {log.name}": log for log in logs}
    read |= {f"the JSON lines of {log.name}": log.with_suffix(".jsonl") for log in logs}
    keep_apart({"--out": out}, read)
    experiments = read_logs(logs)
    wrong = wrong_hits(experiments)
    shown = {
        "title": title or "What each tier is worth",
        "logs": [log.name for log in logs],
        "version": __version__,
        "facts": facts(experiments),
        "drawings": draw_all(experiments),
        "front": sorted((p for p in points(experiments) if p.front), key=lambda p: p.front),
        "columns": COLUMNS,
        "experiments": experiments,
        "wrong": wrong,
        "cards": [_card(w) for w in wrong[:_WORST]],
        "sampled": sum(bool(e.records) for e in experiments),
        "hits": _judged(experiments),
        "environments": environments(experiments),
    }
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # all that comes from the logs
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=percent, uri=lambda svg: _uri("image/svg+xml", svg.encode()))
    page = environment.get_template("report.html.j2").render(shown)
    with writing("semkv report", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page, encoding="utf-8", errors="replace")


# -- the table of experiments ------------------------------------------------------------


class Column(NamedTuple):
    """A column of the table of experiments; ``key`` is the number that a figure is sorted by, None of texts."""

    meaning: str
    text: Callable[[Experiment], str]
    key: Callable[[Experiment], float | None] | None = None


def _figure(column: metrics.Column) -> Column:
    def text(e: Experiment) -> str:
        return shown(e.estimate(column.path), column.unit)

    return Column(f"{column.meaning} [95% interval]", text, lambda e: e.estimate(column.path).value)


def _lookup(experiment: Experiment) -> float | None:
    found: float | None = at(experiment.summary, "lookup", "p50_s")
    return found


def _note(experiment: Experiment) -> str:
    gone = f"its samples are gone: {experiment.samples}" if experiment.samples and not experiment.records else ""
    return "; ".join(filter(None, (experiment.error or experiment.notes, gone))) or "-"


_SHOWN = [column for column in metrics.COLUMNS if column.meaning]
COLUMNS: Mapping[str, Column] = {
    "experiment": Column("its name", lambda e: e.name),
    "status": Column("ok or failed", lambda e: e.status),
    **{column.name: _figure(column) for column in _SHOWN},
    "lookup": Column("median time of the lookup", lambda e: seconds(_lookup(e)), _lookup),
    "requests": Column(
        "requests answered",
        lambda e: f"{e.summary['samples']:,}" if e.summary else "-",
        lambda e: at(e.summary, "samples"),
    ),
    "tiers": Column("tiers that are on", lambda e: e.tiers if e.settings else "-"),
    "thresholds": Column("least cosine by tier or layer", lambda e: e.thresholds or "-"),
    "group": Column("preset or model, and what else differs", lambda e: e.group),
    "took": Column(
        "the whole experiment, s",
        lambda e: "-" if e.seconds is None else f"{e.seconds:,.0f}",
        lambda e: e.seconds,
    ),
    "note": Column("error or note", _note),
}
"""Every column by its title."""


def _judged(experiments: Sequence[Experiment]) -> str:
    """How many hits the samples have, and how many of them anything judges."""
    judged = [wrong_hit(r) is not None for e in experiments for r in e.records if r.hit]
    hits, of_them = len(judged), sum(judged)
    return f"{hits:,} hits" if of_them == hits else f"{of_them:,} of {hits:,} hits that a baseline judges"


def environments(experiments: Sequence[Experiment]) -> list[tuple[dict[str, Any], list[str]]]:
    """Every environment that occurs, with the names of its experiments."""
    found: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for e in experiments:
        if e.environment:
            found.setdefault(repr(sorted(e.environment.items())), (e.environment, []))[1].append(e.name)
    return list(found.values())


# -- wrong hits ------------------------------------------------------------

_THUMBNAIL = (240, 240)
_WORD = re.compile(r"(\w+|[^\w\s]+)(\s*)")


def _uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _card(wrong: Wrong) -> dict[str, Any]:
    """A wrong hit as the page shows it; the questions are cut into (text, whether it differs)."""
    record = wrong.record
    own, donor = differing(record.question, record.donor_question)
    files = {r.image: Path(r.image_file) for e in wrong.experiments for r in e.records if r.image_file}

    def picture(name: str) -> dict[str, str]:
        return {"name": name, "uri": _thumbnail(files.get(name))}

    return {
        "record": record,
        "score": wrong.score,
        "given": given(record) or "",
        "without": without(record),
        "experiments": [e.name for e in wrong.experiments],
        "question": own,
        "donor_question": donor if record.donor_question else (),
        "picture": picture(record.image),
        "donor_picture": picture(record.donor_image) if record.donor_image not in ("", record.image) else None,
        "thresholds": wrong.experiments[0].thresholds,
    }


def differing(a: str, b: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Two texts in pieces, each with whether the other one lacks it; white space and case aside."""
    texts = _WORD.findall(a), _WORD.findall(b)
    one, other = ([word.casefold() for word, _ in text] for text in texts)
    own, donor = list[tuple[str, bool]](), list[tuple[str, bool]]()
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        own += [("".join(pair), kind != "equal") for pair in texts[0][i1:i2]]
        donor += [("".join(pair), kind != "equal") for pair in texts[1][j1:j2]]
    return own, donor


def _thumbnail(file: Path | None) -> str:
    """An image as a small data URI; empty where it has no file."""
    from PIL import Image, ImageOps

    if file is None:
        return ""
    data = io.BytesIO()
    try:
        with Image.open(file) as image:
            ImageOps.contain(image.convert("RGB"), _THUMBNAIL).save(data, "JPEG", quality=85)
    except (OSError, ValueError, Image.DecompressionBombError):
        return ""
    return _uri("image/jpeg", data.getvalue())


# -- figures ------------------------------------------------------------

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
_WIDTH = 10.6  # inches
_INTERVAL = "95% intervals by bootstrap over images"


class Drawing(NamedTuple):
    """A finished figure: ``name`` is a file name without suffix, ``caption`` says how to read it.

    The SVG is light or dark, as its reader prefers.
    """

    name: str
    title: str
    caption: str
    svg: str


def draw_all(experiments: Sequence[Experiment]) -> list[Drawing]:
    """Every figure that the experiments have data for."""
    colors = dict(zip(dict.fromkeys(e.group for e in experiments), cycle(SERIES), strict=False))
    drawn = (_tradeoff(points(experiments), colors), _tiers(experiments, colors))
    return [drawing for drawing in drawn if drawing is not None]


def render(name: str, title: str, caption: str, height: float, draw: Callable[[Figure], None]) -> Drawing:
    """Draw a figure; equal data gives equal bytes. Matplotlib's global state stays as it is."""
    svg = io.StringIO()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure)
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text, light, dark = svg.getvalue(), "", ""
    for number, (color, in_the_dark) in enumerate(_DARK.items()):
        text = text.replace(color, f"var(--c{number})")
        light, dark = f"{light}--c{number}:{color};", f"{dark}--c{number}:{in_the_dark};"
    style = f"<style>:root{{{light}}}@media (prefers-color-scheme: dark){{:root{{{dark}}}}}</style>"
    return Drawing(name, title, caption, text.replace("<defs>", f"{style}<defs>", 1))


def _bars(value: Estimate, factor: float) -> Any:
    """Distances from value to interval, [2, 1]; none where there is no interval."""
    middle = value.value or 0.0
    low, high = (middle if end is None else end for end in (value.low, value.high))
    return np.array([[factor * max(0.0, middle - low)], [factor * max(0.0, high - middle)]])


def _legend(figure: Figure, colors: Mapping[str, str], groups: set[str], tiers: Sequence[str] = ()) -> None:
    """Groups below the panels, tiers above them."""
    named = {group: color for group, color in colors.items() if group in groups}
    handles = [
        Line2D([], [], marker="o", linestyle="", color=color, label=textwrap.fill(group, 60))
        for group, color in named.items()
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=max(1, 110 // max(map(len, named))))
    marks = zip(tiers, cycle(MARKERS), strict=False)
    if shapes := [Line2D([], [], marker=mark, linestyle="", color=MUTED, label=name) for name, mark in marks]:
        figure.legend(handles=shapes, loc="outside upper left", ncols=4)


def _tradeoff(plane: Sequence[Point], colors: Mapping[str, str]) -> Drawing | None:
    """Accuracy against hit rate."""
    if not plane:
        return None
    tiers = sorted({p.experiment.tiers for p in plane})

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        front = []
        for p in plane:
            x, y, color = 100 * (p.rate.value or 0), 100 * (p.accuracy.value or 0), colors[p.experiment.group]
            bars = {"xerr": _bars(p.rate, 100), "yerr": _bars(p.accuracy, 100)}
            ax.errorbar(x, y, **bars, color=color, linewidth=0.8, alpha=0.35)
            marker = MARKERS[tiers.index(p.experiment.tiers) % len(MARKERS)]
            ax.plot(x, y, marker, color=color, markersize=6.5, markeredgecolor=SURFACE, markeredgewidth=0.7)
            if p.front:
                front.append((x, y))
                style: Any = {"xytext": (4, 3), "textcoords": "offset points", "color": INK, "fontweight": "bold"}
                ax.annotate(str(p.front), (x, y), **style)
        xs, ys = zip(*sorted(front), strict=True)
        ax.plot([0, *xs], [ys[0], *ys], drawstyle="steps-pre", color=INK, linewidth=1.1, zorder=1.5)
        ax.set(xlabel="hit rate (% of requests)", ylabel="accuracy on hits (%)", xlim=(0, None))
        ax.set_ylim(max(-2.0, ax.get_ylim()[0]), min(108.0, ax.get_ylim()[1] + 5))
        _legend(figure, colors, {p.experiment.group for p in plane}, tiers)

    return render(
        "tradeoff",
        "Accuracy on hits against hit rate",
        "One mark an experiment whose hits can be judged. The line is the Pareto front: no other one has more hits and "
        f"more of them right; its numbers are in the table below. Bars are {_INTERVAL}.",
        5.2,
        draw,
    )


def _tiers(experiments: Sequence[Experiment], colors: Mapping[str, str]) -> Drawing | None:
    """The share of requests that every tier served, misses too, and what each of them saved."""
    rows = [
        (row["tier"], e.group, read_estimate(row, "share"), read_estimate(row, "saved.latency_p50_s"))
        for e in experiments
        for row in (e.summary or {}).get("tiers", ())
        if row["tier"] != "all" and row["n"]
    ]
    if not rows:
        return None
    rows.sort(key=lambda row: (row[0] == "miss", row[0]))
    places: dict[str, list[int]] = {}
    for place, (tier, *_) in enumerate(rows):
        places.setdefault(tier, []).append(place)
    saved = [1000 * row[3].value for row in rows if row[3].value is not None]

    def draw(figure: Figure) -> None:
        axes = figure.subplots(1, 2 if saved else 1, squeeze=False, sharey=True)[0]
        for place, (_, group, *values) in enumerate(rows):  # one below the other: bars do not cover each other
            for ax, value, factor in zip(axes, values, (100.0, 1000.0), strict=False):
                if value.value is not None:
                    bars, style = _bars(value, factor), {"fmt": "o", "markersize": 3.4, "elinewidth": 0.9}
                    ax.errorbar(factor * value.value, place, xerr=bars, color=colors[group], **style)
        for ax in axes:
            ax.set_yticks([sum(own) / len(own) for own in places.values()], list(places))
            ax.set_ylim(len(rows) - 0.5, -0.5)
            ax.grid(visible=False, axis="y")
            for own in list(places.values())[1:]:
                ax.axhline(own[0] - 0.5, color=GRID, linewidth=0.7)
        axes[0].set(xlabel="requests served (%)", xlim=(0, None))
        if saved:
            low, high = min(0.0, *saved), max(0.0, *saved)
            margin = 0.35 * (high - low) or 1.0  # one interval over a few samples shall not flatten all the others
            axes[1].set(xlabel="median time saved a request (ms)", xlim=(low - margin, high + margin))
            axes[1].axvline(0, color=INK, linewidth=0.9)
        _legend(figure, colors, {row[1] for row in rows})

    return render(
        "tiers",
        "Hit rate and saved time by tier",
        "One mark an experiment in which the tier was on and hit. Saved is the time the same request took on vLLM with "
        "its own prefix cache and encoder cache, less the time with semkv, lookup included; left of zero semkv was "
        f"slower. Bars are {_INTERVAL}; what leaves the panel is cut.",
        1.6 + 0.25 * len(places) + 0.085 * len(rows),
        draw,
    )
