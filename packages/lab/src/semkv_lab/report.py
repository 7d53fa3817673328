"""``semkv report``: from the logs of sweeps one HTML page that needs nothing else, and a markdown file."""

from __future__ import annotations

import base64
import difflib
import io
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from semkv import __version__
from semkv.errors import ConfigError
from semkv_lab.console import interval, keep_apart, percent, writing
from semkv_lab.figures import Drawing, draw_all
from semkv_lab.metrics import number
from semkv_lab.results import (
    Experiment,
    Wrong,
    count_hits,
    facts,
    family,
    group_names,
    points,
    read_logs,
    thresholds,
    worst,
    wrong_hits,
)
from semkv_lab.settings import arguments

_SPECIAL = re.compile(r"([\\`*_<>|#~&$]|\](?=[(\[:]))")  # "[" needs no escape unless "](" could make it a link
# Of the wide table of experiments; the other columns are on the page and in the log.
_IN_MARKDOWN = (
    "experiment", "thresholds", "requests", "hit rate", "accuracy on hits", "wrong hits", "same as cold", "consistency",
    "P-CHR AUC", "tokens saved", "ms saved",
)  # fmt: skip


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
        "hits": judged(*count_hits(experiments)),
        "environments": environments(experiments),
        "traces": traces(experiments),
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


# -- figures as text ------------------------------------------------------------


class Cell(NamedTuple):
    """A cell of the table of experiments: its text, and for a figure the number it is sorted by (None sorts last)."""

    text: str
    number: bool = False
    key: float | None = None


# Title of each column that is a figure of the summary: its meaning, its place there, the factor it is shown with.
_FIGURES: Mapping[str, tuple[str, str, float]] = {
    "hit rate": ("% of requests", "hit_share", 100),
    "accuracy on hits": ("% of hits that are right; of a dry run what the donor answered", "accuracy_on_hits", 100),
    "wrong hits": ("hits that spoiled a right answer, % of requests; needs --baseline", "wrong_hit_share", 100),
    "same as cold": ("% of hits with the answer that vLLM alone gave", "against_cold.agreement", 100),
    "same tokens": ("% of hits with the tokens that vLLM alone gave", "against_cold.same_tokens", 100),
    "hit tokens": ("prompt tokens that a hit saved over the cold run, mean", "against_cold.saved_tokens", 1),
    "hit speed": ("cold time to first token over a hit's without the lookup, median", "against_cold.first_token", 1),
    "accuracy": ("% of all answers that are right", "accuracy", 100),
    "consistency": ("GQA's: of right answers, the share of entailed questions right too, %", "consistency", 100),
    "P-CHR AUC": ("precision averaged over cache-hit ratios up to the hit rate, %", "chr_area.area", 100),
    "tokens saved": ("prompt tokens a request over vLLM's prefix cache, mean", "saved.tokens", 1),
    "ms saved": ("a request over vLLM's prefix and encoder cache, lookup paid for, mean", "saved.latency_s", 1000),
}
COLUMNS: Mapping[str, str] = {
    "experiment": "its name",
    "status": "ok, failed or interrupted",
    **{name: f"{meaning} [95% interval]" for name, (meaning, _, _) in _FIGURES.items()},
    "lookup": "median time of the lookup, ms",
    "requests": "requests answered",
    "tiers": "tiers that are on",
    "thresholds": "least cosine by tier or layer",
    "group": "preset or model, and what else differs",
    "took": "the whole experiment, s",
    "note": "error or note",
}
"""Title and meaning of every column."""


def cells(experiment: Experiment, group: str) -> dict[str, Cell]:
    """One row of the table by column, in the order of `COLUMNS`."""
    note = experiment.error or experiment.notes
    if experiment.missing is not None:
        note = "; ".join(x for x in (note, f"its samples are gone: {experiment.missing.name}") if x)
    found = {
        "experiment": Cell(experiment.name),
        "status": Cell(experiment.status),
        "lookup": _number(number(experiment.value("lookup", "p50_s")), 1000, 1),
        "requests": _number(number(experiment.value("samples")), 1, 0),
        "tiers": Cell(family(experiment) if experiment.settings else "-"),
        "thresholds": Cell(_limits(experiment) or "-"),
        "group": Cell(group),
        "took": _number(experiment.seconds, 1, 0),
        "note": Cell(note or "-"),
    }
    for name, (_, path, factor) in _FIGURES.items():
        value = experiment.estimate(*path.split("."))
        found[name] = Cell(interval(value, factor=factor), True, value.value)
    return {name: found[name] for name in COLUMNS}


def _limits(experiment: Experiment) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in thresholds(experiment).items())


def judged(hits: int, of_them: int) -> str:
    """``12 hits``, or how many of them there is anything to judge by."""
    return f"{hits:,} hits" if of_them == hits else f"{of_them:,} of {hits:,} hits that a baseline judges"


def _number(value: float | None, factor: float, digits: int) -> Cell:
    return Cell("-" if value is None else f"{factor * value:,.{digits}f}", True, value)


def environments(experiments: Sequence[Experiment]) -> list[tuple[dict[str, str], list[str]]]:
    """Every environment that occurs, as text, with the names of its experiments."""
    found: dict[str, tuple[dict[str, str], list[str]]] = {}
    for experiment in experiments:
        values = {k: _value(v) for k, v in sorted(experiment.environment.items())}
        if values:
            found.setdefault(repr(values), (values, []))[1].append(experiment.name)
    return list(found.values())


def traces(experiments: Sequence[Experiment]) -> list[tuple[str, int]]:
    """Every workload trace that occurs, as text, with the number of its experiments."""
    found = [e.setting("trace") for e in experiments]
    return list(Counter(_value(trace) for trace in found if isinstance(trace, Mapping)).items())


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_value(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(_value(v) for v in value)
    return "-" if value is None else str(value)


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
        "thresholds": _limits(wrong.experiments[0]),
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
