"""``semkv report``: the logs of sweeps as one page. An HTML page holds its figures; a Markdown page links to them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from matplotlib.figure import Figure

from semkv import __version__
from semkv_lab import metrics, worth
from semkv_lab.console import keep_apart, percent, seconds, shown, writing
from semkv_lab.metrics import Estimate, given, read_estimate, without, wrong_hit
from semkv_lab.results import Experiment, Point, Wrong, points, read_logs, wrong_hits
from semkv_lab.samples import at

Row = Mapping[str, str]
_WORST = 12  # wrong hits that are shown


class Section(NamedTuple):
    """A part of the page: what it says, a table of rows with equal keys, and a figure with the name of its file."""

    title: str
    text: str
    rows: Sequence[Row] = ()
    figure: Figure | None = None
    name: str = ""


def write_report(logs: Sequence[Path], out: Path) -> None:
    """Write the page; equal logs give equal bytes.

    Args:
        logs: ``.csv`` or ``.jsonl`` files of sweeps.
        out: the page. Where its name ends in ``.md``, the figures go to a folder of its name without the suffix.
    """
    read = {f"LOG {log.name}": log for log in logs}
    read |= {f"the JSON lines of {log.name}": log.with_suffix(".jsonl") for log in logs}
    keep_apart({"--out": out}, read)
    experiments = read_logs(logs)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(("html.j2",)),  # all that comes from the logs
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["cell"] = _markdown_cell
    kind = "md" if out.suffix == ".md" else "html"
    with mpl.rc_context(STYLE), writing("--out", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        sections = _sections(experiments)
        page = environment.get_template(f"report.{kind}.j2").render(
            logs=", ".join(log.name for log in logs),
            version=__version__,
            counts=_counts(experiments),
            sections=sections,
            pictures={
                s.name: (_png if kind == "md" else _svg)(s, out)
                for s in sections
                if s.figure is not None
            },
        )
        out.write_text(page, encoding="utf-8", errors="replace")


def _markdown_cell(text: str) -> str:
    for character, escaped in (
        ("&", "&amp;"),
        ("<", "&lt;"),
        ("|", "\\|"),
        ("`", "\\`"),
        ("\n", " "),
    ):
        text = text.replace(character, escaped)
    return text


def _counts(experiments: Sequence[Experiment]) -> str:
    done = [e for e in experiments if e.summary]
    requests = sum(e.estimate("hit_share").n for e in done)
    return f"experiments: {len(done)} finished, {len(experiments) - len(done)} failed; requests: {requests:,}"


def _sections(experiments: Sequence[Experiment]) -> list[Section]:
    plane = points(experiments)
    colors = dict(zip(dict.fromkeys(e.group for e in experiments), cycle(SERIES), strict=False))
    figures = [_tradeoff(plane, colors), _tiers(experiments, colors)]
    found = [*figures, _worth(experiments), *_table(experiments)]
    return [
        *filter(None, found),
        _wrong(experiments),
        Section("Environment", "", _environments(experiments)),
    ]


# -- the table of experiments ------------------------------------------------------------


class Column(NamedTuple):
    """A column of the table of experiments."""

    meaning: str
    text: Callable[[Experiment], str]


def _figure(column: metrics.Column) -> Column:
    meaning = f"{column.meaning} [95% interval]"
    return Column(meaning, lambda e: shown(e.estimate(column.path), column.unit))


COLUMNS: Mapping[str, Column] = {
    "experiment": Column("its name", lambda e: e.name),
    "status": Column("ok or failed", lambda e: e.status),
    **{column.name: _figure(column) for column in metrics.COLUMNS if column.meaning},
    "lookup": Column(
        "median time of the lookup", lambda e: seconds(at(e.summary, "lookup", "p50_s"))
    ),
    "requests": Column(
        "requests answered", lambda e: f"{e.estimate('hit_share').n:,}" if e.summary else "-"
    ),
    "tiers": Column("tiers that are on", lambda e: e.tiers if e.settings else "-"),
    "thresholds": Column("least cosine by tier or layer", lambda e: e.thresholds or "-"),
    "group": Column("preset or model, and what else differs", lambda e: e.group),
    "took": Column(
        "the whole experiment, s", lambda e: "-" if e.seconds is None else f"{e.seconds:,.0f}"
    ),
    "note": Column("error or note", lambda e: e.error.strip() or e.notes or "-"),
}
"""Every column by its title."""


def _worth(experiments: Sequence[Experiment]) -> Section | None:
    """What each tier cost and saved in each experiment."""
    rows = [
        {"experiment": e.name, **dict(zip(worth.COLUMNS, row, strict=True))}
        for e in experiments
        for row in worth.rows((e.summary or {}).get("worth", {}))
    ]
    said = (
        "Spent is the time of a tier's lookups, hits or misses. A hit saves what the first token of a miss of its size "
        "takes longer than its own; below zero it took longer. The last columns count the requests for which --tiers "
        "auto would not have asked a tier, and the hits that would have been lost."
    )
    return Section("Time that looking cost and hits saved", said, rows) if rows else None


def _table(experiments: Sequence[Experiment]) -> list[Section]:
    """All experiments, and what the columns say; a column that nothing fills is left out."""
    rows = [{name: column.text(e) for name, column in COLUMNS.items()} for e in experiments]
    filled = [name for name in COLUMNS if any(row[name] != "-" for row in rows)]
    said = "Without semkv is the engine alone: vLLM with its prefix and encoder caches, transformers with no cache."
    meanings = [{"column": name, "meaning": COLUMNS[name].meaning} for name in filled]
    return [
        Section("All experiments", said, [{name: row[name] for name in filled} for row in rows]),
        Section("What the columns mean", "", meanings),
    ]


def _environments(experiments: Sequence[Experiment]) -> list[Row]:
    """Every environment that occurs, with the names of its experiments."""
    found: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    for e in experiments:
        found.setdefault(repr(sorted(e.environment.items())), (e.environment, []))[1].append(e.name)
    keys = dict.fromkeys(key for values, _ in found.values() for key in values)
    return [
        {key: str(values.get(key, "-")) for key in keys} | {"experiments": ", ".join(names)}
        for values, names in found.values()
    ]


# -- wrong hits ------------------------------------------------------------


def _wrong(experiments: Sequence[Experiment]) -> Section:
    sampled = sum(bool(e.records) for e in experiments)
    judged = [wrong_hit(r) is not None for e in experiments for r in e.records if r.hit]
    hits = f"{sum(judged):,} of {len(judged):,} hits that a baseline judges"
    found = wrong_hits(experiments)
    if not sampled:
        said = "The logs name no file of samples that is there, so single answers cannot be shown."
    elif not found:
        said = f"None among {hits}. Only a run with --baseline can tell them from the model's own mistakes."
    else:
        said = (
            f"{len(found):,} different ones among {hits}, the {min(_WORST, len(found))} with the highest scores here. "
            "The request was answered as if it had been the donor's."
        )
    return Section("The worst wrong hits", said, [_wrong_row(wrong) for wrong in found[:_WORST]])


def _wrong_row(wrong: Wrong) -> Row:
    record = wrong.record
    names = [e.name for e in wrong.experiments]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return {
        "asked": record.question,
        "of image": record.image,
        "answered as if asked": record.donor_question or "its own question",
        "of the donor's image": record.donor_image or "the same",
        "answer given": (given(record) or "").strip() or "(empty)",
        "right answer": "-" if record.answer is None else record.answer,
        "without semkv": (without(record) or "").strip() or "-",
        "matched by": f"{record.provenance}, {wrong.score:.4f}",
        "sample": f"{record.sample_id} {record.variant}".strip(),
        "in": ", ".join(names[:3]) + more,
    }


# -- figures ------------------------------------------------------------

INK = "#1b2026"
# Told apart on white and on black.
SERIES = (
    "#2b7fd6",
    "#d65a1f",
    "#2a9d57",
    "#a05ccb",
    "#b07d1a",
    "#d6408a",
)
MARKERS = "osD^vPX*"
STYLE: Any = {
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    "svg.hashsalt": "semkv",
    "text.parse_math": False,
    "font.size": 9.5,
    "axes.facecolor": "none",
    "grid.color": INK,
    "grid.alpha": 0.15,
}
_WIDTH = 10.6  # inches
_INTERVAL = "95% intervals by bootstrap over images"


def _svg(section: Section, _: Path) -> str:
    """The figure as it stands in a page, in the page's own color of text."""
    assert section.figure is not None
    out = io.StringIO()
    section.figure.savefig(
        out,
        format="svg",
        transparent=True,
        metadata={"Date": None, "Creator": None},
    )
    text = out.getvalue()
    return text[text.index("<svg") :].replace(INK, "currentColor")


def _png(section: Section, page: Path) -> str:
    """Written to a folder beside the page; its place seen from there."""
    assert section.figure is not None
    file = page.with_suffix("") / f"{section.name}.png"
    file.parent.mkdir(exist_ok=True)
    section.figure.savefig(file, dpi=110, metadata={"Software": None})
    return f"{file.parent.name}/{file.name}"


def _error_bar(
    axes: Any,
    x: Estimate,
    y: Estimate | float,
    factor: float,
    **style: Any,
) -> Any:
    """A mark with its intervals; a plain number is a place and has none."""
    places, bars = [], []
    for one in (x, y if isinstance(y, Estimate) else Estimate(1, y / factor)):
        middle = one.value or 0.0
        ends = (middle if end is None else end for end in (one.low, one.high))
        places.append(factor * middle)
        bars.append([[factor * abs(end - middle)] for end in ends])
    return axes.errorbar(*places, xerr=bars[0], yerr=bars[1], elinewidth=0.8, **style)


def _legend(
    figure: Figure,
    marks: Mapping[str, Any],
    height: float,
) -> None:
    """Below axes of this height, in inches."""
    names = [shorten(name, 130, placeholder=" ...") for name in marks]
    columns = max(1, 110 // max(map(len, names)))
    figure.legend(list(marks.values()), names, loc="outside lower left", ncols=columns)
    figure.set_size_inches(_WIDTH, height + 0.22 * -(-len(names) // columns))


def _tradeoff(plane: Sequence[Point], colors: Mapping[str, str]) -> Section | None:
    """Accuracy against hit rate, and a table of the Pareto front."""
    if not plane:
        return None
    figure, marks = Figure(layout="constrained"), dict[str, Any]()
    axes = figure.subplots()
    tiers = sorted({p.experiment.tiers for p in plane})
    for p in plane:
        e = p.experiment
        style = {
            "fmt": MARKERS[tiers.index(e.tiers) % len(MARKERS)],
            "color": colors[e.group],
            "markersize": 6,
        }
        marks[f"{e.group}: {e.tiers}"] = _error_bar(axes, p.rate, p.accuracy, 100, **style)
    front = sorted((p for p in plane if p.front), key=lambda p: p.front)
    xs, ys = ([100 * (getattr(p, name).value or 0) for p in front] for name in ("rate", "accuracy"))
    axes.plot([0, *xs], [ys[0], *ys], drawstyle="steps-pre", color=INK, linewidth=1.1, zorder=1.5)
    for number, place in enumerate(zip(xs, ys, strict=True), 1):
        axes.annotate(
            str(number),
            place,
            xytext=(4, 3),
            textcoords="offset points",
            fontweight="bold",
        )
    axes.set(xlabel="hit rate (% of requests)", ylabel="accuracy on hits (%)", xlim=(0, None))
    _legend(figure, marks, 4.9)
    rows = [
        {
            "no.": str(p.front),
            "on the front": p.experiment.name,
            "tiers": p.experiment.tiers,
            "hit rate": percent(p.rate),
            "accuracy on hits": percent(p.accuracy),
        }
        for p in front
    ]
    said = (
        "One mark an experiment whose hits can be judged. The line is the Pareto front: no other one has more hits and "
        f"more of them right; its numbers are in the table below. Bars are {_INTERVAL}."
    )
    return Section(
        title="Accuracy on hits against hit rate",
        text=said,
        rows=rows,
        figure=figure,
        name="tradeoff",
    )


def _middles(names: Sequence[str]) -> tuple[list[float], list[str]]:
    """The middle place of each name's rows, and the names."""
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    return [float(np.mean(own)) for own in places.values()], list(places)


def _limits(times: Sequence[float]) -> tuple[float, float]:
    """Ends of an axis: one interval over a few samples shall not flatten all the others."""
    low = min(0.0, *times) if times else 0.0
    high = max(0.0, *times) if times else 0.0
    margin = 0.35 * (high - low) or 1.0
    return low - margin, high + margin


def _tiers(experiments: Sequence[Experiment], colors: Mapping[str, str]) -> Section | None:
    """The share of requests that every tier served, misses too, and what each of them saved."""
    rows = [
        (
            row["tier"],
            e.group,
            read_estimate(row, "share"),
            read_estimate(row, "saved.latency_p50_s"),
        )
        for e in experiments
        for row in (e.summary or {}).get("tiers", ())
        if row["tier"] != "all" and row["n"]
    ]
    if not rows:
        return None
    rows.sort(key=lambda row: (row[0] == "miss", row[0]))
    names = [row[0] for row in rows]
    figure, marks = Figure(layout="constrained"), dict[str, Any]()
    served, saved = figure.subplots(1, 2, sharey=True)
    # One below the other: bars do not cover each other.
    for place, (_, group, share, time) in enumerate(rows):
        style = {
            "fmt": "o",
            "markersize": 3.4,
            "color": colors[group],
        }
        marks[group] = _error_bar(served, share, place, 100, **style)
        if time.value is not None:
            _error_bar(saved, time, place, 1000, **style)
    served.set_yticks(*_middles(names))
    served.set_ylim(len(rows) - 0.5, -0.5)
    served.set(xlabel="requests served (%)", xlim=(0, None))
    saved.set(xlabel="median time saved a request (ms)")
    saved.axvline(0, color=INK, linewidth=0.9)
    saved.set_xlim(*_limits([1000 * time.value for *_, time in rows if time.value is not None]))
    _legend(figure, marks, 1.7 + 0.1 * len(rows))
    said = (
        "One mark an experiment in which the tier was on and hit. Saved is the time of the same request without semkv, "
        "less its time with semkv, lookup included; left of zero semkv was slower. "
        f"Bars are {_INTERVAL}; what leaves the panel is cut."
    )
    return Section(
        title="Hit rate and saved time by tier",
        text=said,
        rows=(),
        figure=figure,
        name="tiers",
    )
