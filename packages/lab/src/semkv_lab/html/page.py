"""The page: one HTML file that needs nothing else, no network either."""

from __future__ import annotations

import base64
import difflib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semkv import __version__
from semkv.errors import ConfigError
from semkv_lab.datasets import DATASETS, DatasetOptions, locate_images
from semkv_lab.html import text
from semkv_lab.html.canvas import Drawing
from semkv_lab.html.log import Experiment
from semkv_lab.html.view import Wrong, count_hits, facts, group_names, points, thresholds, worst, wrong_hits
from semkv_lab.settings import run_command

_FOLDER = Path(__file__).parent
_THUMBNAIL = (240, 240)
_WORD = re.compile(r"(\w+|[^\w\s]+)(\s*)")


@dataclass(frozen=True)
class Picture:
    """A thumbnail as a data URI, empty where the image has no file."""

    name: str
    uri: str


@dataclass(frozen=True)
class WrongCard:
    """A wrong hit as the page shows it; the questions are cut into (text, whether it differs)."""

    wrong: Wrong
    question: tuple[tuple[str, bool], ...]
    donor_question: tuple[tuple[str, bool], ...]
    picture: Picture
    donor_picture: Picture | None
    thresholds: str


def render_page(experiments: list[Experiment], drawings: Sequence[Drawing], title: str, logs: Sequence[str]) -> str:
    """The whole page. All that comes from the logs is escaped.

    Raises:
        ConfigError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError as e:
        raise ConfigError("semkv report", "jinja2", "to be installed: pip install 'semkv[report]'") from e
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=text.percent)
    groups = group_names(experiments)
    wrong = wrong_hits(experiments)
    return environment.get_template("page.html.j2").render(
        title=title,
        version=__version__,
        css=(_FOLDER / "page.css").read_text(encoding="utf-8"),
        js=(_FOLDER / "page.js").read_text(encoding="utf-8"),
        logs=logs,
        facts=facts(experiments, text.percent, text.milliseconds),
        figures=[{"drawing": d, "sources": sources(d)} for d in drawings],
        front=sorted((p for p in points(experiments) if p.front), key=lambda p: p.front),
        columns=text.COLUMNS,
        unfinished=[e for e in experiments if e.status != "ok"],
        rows=[(e, text.cells(e, g)) for e, g in zip(experiments, groups, strict=True)],
        wrong=wrong,
        cards=[_card(w) for w in worst(wrong)],
        sampled=sum(bool(e.records) for e in experiments),
        hits=text.judged(*count_hits(experiments)),
        environments=text.environments(experiments),
        traces=text.traces(experiments),
        commands=[(e.name, run_command(e.settings)) for e in experiments if e.settings],
    )


def sources(drawing: Drawing) -> dict[str, str]:
    """The four versions of a figure as data URIs, by ``wide`` or ``narrow``, with ``_dark``."""
    return {
        f"{'wide' if wide else 'narrow'}{'_dark' if dark else ''}": _uri("image/svg+xml", svg.encode())
        for (wide, dark), svg in drawing.svg.items()
    }


def _uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _card(wrong: Wrong) -> WrongCard:
    record, settings = wrong.record, wrong.experiments[0].settings
    own, donor = differing(record.question, record.donor_question)
    names = {record.image, record.donor_image} - {""}
    files = image_files(settings, names)
    other = record.donor_image not in ("", record.image)
    return WrongCard(
        wrong=wrong,
        question=own,
        donor_question=donor if record.donor_question else (),
        picture=_picture(record.image, files),
        donor_picture=_picture(record.donor_image, files) if other else None,
        thresholds=", ".join(f"{k} {v:g}" for k, v in thresholds(wrong.experiments[0]).items()),
    )


def differing(a: str, b: str) -> tuple[tuple[tuple[str, bool], ...], tuple[tuple[str, bool], ...]]:
    """Two texts in pieces, each with whether the other one lacks it; white space and case aside."""
    words = _WORD.findall(a), _WORD.findall(b)
    one, other = ([word.casefold() for word, _ in text] for text in words)
    pieces: tuple[list[tuple[str, bool]], list[tuple[str, bool]]] = ([], [])
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        for found, out in zip((words[0][i1:i2], words[1][j1:j2]), pieces, strict=True):
            piece = "".join(word + space for word, space in found)
            out += (
                [(piece.rstrip(), kind != "equal"), (" ", False)]
                if piece != piece.rstrip()
                else [(piece, kind != "equal")]
            )
    return tuple(p for p in pieces[0] if p[0]), tuple(p for p in pieces[1] if p[0])


def image_files(settings: Mapping[str, Any], names: set[str]) -> dict[str, Path]:
    """Files of images, looked for where the settings say the data set is."""
    data, dataset = settings.get("data"), str(settings.get("dataset") or "")
    if not isinstance(data, Mapping) or not (dataset in DATASETS or dataset.endswith(".jsonl")):
        return {}
    known = {k: v for k, v in data.items() if k in DatasetOptions.__dataclass_fields__}
    known["data_dir"] = Path(str(data.get("data_dir") or "."))
    known["root"] = Path(str(data["root"])) if data.get("root") else None
    try:
        return locate_images(dataset, DatasetOptions(**known), names)
    except (ConfigError, TypeError, OSError):
        return {}  # settings of another version: the page does without pictures


def _picture(name: str, files: Mapping[str, Path]) -> Picture:
    from PIL import Image, ImageOps

    if name not in files:
        return Picture(name, "")
    try:
        with Image.open(files[name]) as image:
            small = ImageOps.contain(image.convert("RGB"), _THUMBNAIL)
    except (OSError, ValueError, Image.DecompressionBombError):
        return Picture(name, "")
    data = io.BytesIO()
    small.save(data, "JPEG", quality=85)
    return Picture(name, _uri("image/jpeg", data.getvalue()))
