"""The same results as a markdown file, with links to the PNG files. The same log gives the same file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from semkv_lab.html import text
from semkv_lab.html.canvas import Drawing
from semkv_lab.html.log import Experiment
from semkv_lab.html.view import Wrong, count_hits, facts, group_names, points, worst, wrong_hits

_SPECIAL = re.compile(r"([\\`*_<>|#~&$]|\](?=[(\[:]))")  # a bracket alone is text, a link needs more
# Of the wide table of experiments; the other columns are on the page and in the log.
_COLUMNS = (
    "experiment", "thresholds", "requests", "hit rate", "accuracy on hits", "wrong hits", "same as cold", "consistency",
    "P-CHR AUC", "tokens saved", "ms saved",
)  # fmt: skip


def render_markdown(
    experiments: list[Experiment], drawings: Sequence[Drawing], title: str, logs: Sequence[str], folder: str
) -> str:
    """The file's text.

    Args:
        folder: where the PNG files are, as a relative URL.
        logs: names of the logs.
    """
    parts = [
        f"# {escape(title)}",
        f"Made from {escape(', '.join(logs))} by `semkv report`; to change it, run that again. Brackets hold 95% "
        "intervals by bootstrap over images, of a share of 0% or 100% Wilson's with as many trials as images. Saved is "
        "measured against vLLM with its own prefix cache and encoder cache, the lookup paid for.",
        "\n".join(
            f"- {escape(f.what)}: **{escape(f.figure)}** ({escape(f.where)})"
            for f in facts(experiments, text.percent, text.milliseconds)
        ),
    ]
    for drawing in drawings:
        parts += [f"## {escape(drawing.title)}", escape(drawing.caption)]
        parts.append(f"![{escape(drawing.title)}]({quote(f'{folder}/{drawing.name}.png')})")
        if drawing.name == "tradeoff":
            parts.append(_front(experiments))
    parts += ["## All experiments", *_experiments(experiments)]
    if failed := [e for e in experiments if e.status != "ok"]:
        parts += [
            "## Not finished",
            table(("experiment", "status", "error"), ((e.name, e.status, e.error) for e in failed)),
        ]
    parts += ["## The worst wrong hits", _wrong(experiments)]
    parts += ["## Environment", *_environment(experiments)]
    return "\n\n".join(parts) + "\n"


def escape(value: str) -> str:
    """Text that markdown shows as it is, on one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(value.split()))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table; every cell is escaped."""
    lines = [header, ["---"] * len(header)]
    escaped = [[escape(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [[escape(h) for h in lines[0]], lines[1], *escaped])


def _front(experiments: list[Experiment]) -> str:
    front = sorted((p for p in points(experiments) if p.front), key=lambda p: p.front)
    return table(
        ("no.", "on the front", "tiers", "hit rate", "accuracy on hits"),
        ((str(p.front), p.experiment.name, p.family, text.percent(p.rate), text.percent(p.accuracy)) for p in front),
    )


def _experiments(experiments: list[Experiment]) -> Iterable[str]:
    groups = group_names(experiments)
    for group in dict.fromkeys(groups):
        members = [e for e, g in zip(experiments, groups, strict=True) if g == group and e.summary]
        if members:
            yield f"### {escape(group)}"
            rows = [text.cells(e, group) for e in members]
            yield table(_COLUMNS, ([row[name].text for name in _COLUMNS] for row in rows))
    yield "\n".join(f"- {escape(name)}: {escape(text.COLUMNS[name])}" for name in _COLUMNS[1:])


def _wrong(experiments: list[Experiment]) -> str:
    sampled = [e for e in experiments if e.records]
    hits = text.judged(*count_hits(sampled))
    every = wrong_hits(experiments)
    if not sampled:
        return "The log names no samples that are there."
    if not every:
        return f"No wrong hit among {hits}."
    header = ("asked", "answered as if asked", "picture", "given", "right", "matched by", "score", "experiments")
    return f"{len(every):,} different ones among {hits}; the page shows their pictures.\n\n" + table(
        header, (_wrong_row(w) for w in worst(every))
    )


def _wrong_row(wrong: Wrong) -> tuple[str, ...]:
    r = wrong.record
    other = r.donor_image not in ("", r.image)
    right = wrong.without if r.answer is None else r.answer
    return (
        r.question,
        r.donor_question or "its own question",
        f"{r.donor_image} for {r.image}" if other else "same",
        wrong.given,
        "-" if right is None else right,
        r.provenance,
        f"{wrong.score:.4f}",
        str(len(wrong.experiments)),
    )


def _environment(experiments: list[Experiment]) -> Iterable[str]:
    for values, names in text.environments(experiments):
        yield table(("", ""), [*values.items(), ("experiments", str(len(names)))])
    for trace, count in text.traces(experiments):
        yield f"Order of requests in {count} experiments: {escape(trace)}."
