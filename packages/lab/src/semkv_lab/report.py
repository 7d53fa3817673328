"""``semkv report``: from the logs of sweeps one HTML page that needs nothing else, and a markdown file."""

from __future__ import annotations

import base64
import difflib
import io
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from semkv import __version__
from semkv.errors import ConfigError
from semkv_lab import metrics
from semkv_lab.console import keep_apart, percent, seconds, shown, writing
from semkv_lab.figures import Drawing, draw_all
from semkv_lab.metrics import number, wrong_hit
from semkv_lab.records import at
from semkv_lab.results import Experiment, Wrong, facts, group_names, points, read_logs, worst, wrong_hits
from semkv_lab.settings import arguments

_SPECIAL = re.compile(r"([\\`*_<>|#~&$]|\](?=[(\[:]))")  # "[" needs no escape unless "](" could make it a link


def write_report(logs: Sequence[Path], out: Path, *, markdown: Path | None = None, title: str = "") -> list[Path]:
    """Write the page, its figures as PNG, and the markdown file where one is asked for.

    Args:
        logs: ``.csv`` or ``.jsonl`` files of sweeps.
        out: the page; the PNG files go to ``<page>_files`` beside it.
        markdown: the markdown file.
        title: of page and markdown.

    Returns:
        What was written.

    Raises:
        DatasetError: a log cannot be read; names file and line.
        ConfigError: a file cannot be written, or is one that is read.
    """
    read = {f"LOG {log.name}": log for log in logs}
    read |= {f"the JSON lines of {log.name}": log.with_suffix(".jsonl") for log in logs}
    keep_apart({"--out": out, "--markdown": markdown}, read)
    experiments = read_logs(logs)
    drawings = draw_all(experiments)
    folder = out.with_name(f"{out.stem}_files")
    shown = _shown(experiments, drawings) | {
        "title": title or "What each tier is worth",
        "logs": [log.name for log in logs],
    }
    files: dict[Path, bytes] = {out: _render("report.html.j2", shown).encode()}
    files |= {folder / f"{d.name}.png": d.png for d in drawings}
    if markdown is not None:
        place = Path(os.path.relpath(folder, markdown.parent)).as_posix()
        files[markdown] = _render("report.md.j2", {**shown, "folder": place}).encode()
    for path, data in files.items():
        with writing("semkv report", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return list(files)


def _shown(experiments: Sequence[Experiment], drawings: Sequence[Drawing]) -> dict[str, Any]:
    """All that the templates show of the experiments."""
    rows = [(e, group, cells(e, group)) for e, group in zip(experiments, group_names(experiments), strict=True)]
    wrong = wrong_hits(experiments)
    return {
        "version": __version__,
        "facts": facts(experiments),
        "drawings": drawings,
        "front": sorted((p for p in points(experiments) if p.front), key=lambda p: p.front),
        "columns": COLUMNS,
        "in_markdown": _IN_MARKDOWN,
        "groups": {
            group: [[row[name].text for name in _IN_MARKDOWN] for e, g, row in rows if g == group and e.summary]
            for group in dict.fromkeys(g for e, g, _ in rows if e.summary)
        },
        "unfinished": [e for e in experiments if e.status != "ok"],
        "rows": rows,
        "wrong": wrong,
        "cards": [_card(w) for w in worst(wrong)],
        "sampled": sum(bool(e.records) for e in experiments),
        "hits": _judged(experiments),
        "environments": environments(experiments),
        "commands": [(e.name, command) for e in experiments if (command := _command(e))],
    }


def _command(experiment: Experiment) -> str:
    """The run that an experiment is; empty where the log is another version's."""
    try:
        return shlex.join(["semkv", "run", *arguments(experiment.given)]) if experiment.given else ""
    except ConfigError:
        return ""


def _render(name: str, shown: Mapping[str, Any]) -> str:
    """A template filled in; in the page all that comes from the logs is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        percent=percent, md=escape, row=_row, head=_head, uri=lambda svg: _uri("image/svg+xml", svg.encode())
    )
    return environment.get_template(name).render(shown)


def escape(value: str) -> str:
    """Text that markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(value.split()))


def _row(texts: Iterable[object]) -> str:
    """A row of a markdown table; every cell is escaped."""
    return f"| {' | '.join(escape(str(text)) for text in texts)} |"


def _head(names: Sequence[str]) -> str:
    return f"{_row(names)}\n| {' | '.join('---' for _ in names)} |"


# -- the table of experiments ------------------------------------------------------------


class Cell(NamedTuple):
    """A cell of the table of experiments: its text, and for a figure the number it is sorted by (None sorts last)."""

    text: str
    number: bool = False
    key: float | None = None


_SHOWN = [column for column in metrics.COLUMNS if column.meaning]
COLUMNS: Mapping[str, str] = {
    "experiment": "its name",
    "status": "ok, failed or interrupted",
    **{column.name: f"{column.meaning} [95% interval]" for column in _SHOWN},
    "lookup": "median time of the lookup",
    "requests": "requests answered",
    "tiers": "tiers that are on",
    "thresholds": "least cosine by tier or layer",
    "group": "preset or model, and what else differs",
    "took": "the whole experiment, s",
    "note": "error or note",
}
"""Title and meaning of every column."""
_IN_MARKDOWN = [
    "experiment", "thresholds", "requests", *(c.name for c in _SHOWN if c.path not in ("accuracy", "saved.tokens"))
]  # fmt: skip


def cells(experiment: Experiment, group: str) -> dict[str, Cell]:
    """One row of the table by column, in the order of `COLUMNS`."""
    gone = f"its samples are gone: {experiment.missing.name}" if experiment.missing is not None else ""
    lookup, requests = number(at(experiment.summary, "lookup", "p50_s")), number(experiment.summary.get("samples"))
    values = [(column, experiment.estimate(column.path)) for column in _SHOWN]
    found = {
        "experiment": Cell(experiment.name),
        "status": Cell(experiment.status),
        **{column.name: Cell(shown(value, column.unit), True, value.value) for column, value in values},
        "lookup": Cell(seconds(lookup), True, lookup),
        "requests": Cell("-" if requests is None else f"{requests:,.0f}", True, requests),
        "tiers": Cell(experiment.tiers if experiment.settings else "-"),
        "thresholds": Cell(experiment.thresholds or "-"),
        "group": Cell(group),
        "took": Cell("-" if experiment.seconds is None else f"{experiment.seconds:,.0f}", True, experiment.seconds),
        "note": Cell("; ".join(filter(None, (experiment.error or experiment.notes, gone))) or "-"),
    }
    return {name: found[name] for name in COLUMNS}


def _judged(experiments: Sequence[Experiment]) -> str:
    """How many hits the samples have, and how many of them anything judges."""
    judged = [wrong_hit(r) is not None for e in experiments for r in e.records if r.hit]
    hits, of_them = len(judged), sum(judged)
    return f"{hits:,} hits" if of_them == hits else f"{of_them:,} of {hits:,} hits that a baseline judges"


def environments(experiments: Sequence[Experiment]) -> list[tuple[dict[str, str], list[str]]]:
    """Every environment that occurs, as text, with the names of its experiments."""
    found: dict[str, tuple[dict[str, str], list[str]]] = {}
    for experiment in experiments:
        values = {key: "-" if value is None else str(value) for key, value in experiment.environment.items()}
        if values:
            found.setdefault(repr(sorted(values.items())), (values, []))[1].append(experiment.name)
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
        "wrong": wrong,
        "question": own,
        "donor_question": donor if record.donor_question else (),
        "picture": picture(record.image),
        "donor_picture": picture(record.donor_image) if record.donor_image not in ("", record.image) else None,
        "thresholds": wrong.experiments[0].thresholds,
    }


def differing(a: str, b: str) -> tuple[tuple[tuple[str, bool], ...], tuple[tuple[str, bool], ...]]:
    """Two texts in pieces, each with whether the other one lacks it; white space and case aside."""
    texts = _WORD.findall(a), _WORD.findall(b)
    one, other = ([word.casefold() for word, _ in text] for text in texts)
    pieces: tuple[list[tuple[str, bool]], ...] = ([], [])
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        for found, out in zip((texts[0][i1:i2], texts[1][j1:j2]), pieces, strict=True):
            piece = "".join(word + space for word, space in found)
            out += [(piece.rstrip(), kind != "equal"), (" " * (piece != piece.rstrip()), False)]
    own, donor = (tuple(p for p in text if p[0]) for text in pieces)
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
