"""Figures as text, the same on the page and in markdown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from semkv_lab.html.log import Experiment, number
from semkv_lab.html.view import family, thresholds
from semkv_lab.metrics import Estimate


def plain(value: Estimate, factor: float = 1.0, digits: int = 1, unit: str = "") -> str:
    """``12.3 ms [11.0, 14.1]``; a dash for no figure."""
    if value.value is None:
        return "-"
    text = f"{factor * value.value:.{digits}f}{unit}"
    if value.low is None or value.high is None:
        return text
    return f"{text} [{factor * value.low:.{digits}f}, {factor * value.high:.{digits}f}]"


def percent(value: Estimate) -> str:
    return plain(value, 100, 1, "%")


def milliseconds(value: Estimate) -> str:
    return plain(value, 1000, 1, " ms")


@dataclass(frozen=True)
class Cell:
    """A cell of the table of experiments: its text, and for a figure the number it is sorted by (None sorts last)."""

    text: str
    number: bool = False
    key: float | None = None


COLUMNS: Mapping[str, str] = {
    "experiment": "its name",
    "status": "ok, failed or interrupted",
    "hit rate": "% of requests [95% interval]",
    "accuracy on hits": "% of hits that are right; of a dry run what the donor answered [95% interval]",
    "wrong hits": "hits that spoiled a right answer, % of the requests that can be judged [95% interval]",
    "same as cold": "% of hits with the answer that vLLM alone gave [95% interval]",
    "accuracy": "% of all answers that are right [95% interval]",
    "consistency": "GQA's: of right answers, the share of entailed questions right too, % [95% interval]",
    "P-CHR AUC": "precision averaged over cache-hit ratios up to the hit rate, % [95% interval]",
    "tokens saved": "prompt tokens a request over vLLM's prefix cache, mean [95% interval]",
    "ms saved": "a request over vLLM's prefix and encoder cache, lookup paid for, mean [95% interval]",
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
    limits = thresholds(experiment)
    note = experiment.error or experiment.notes
    if experiment.missing is not None:
        note = "; ".join(x for x in (note, f"its samples are gone: {experiment.missing.name}") if x)
    found = {
        "experiment": Cell(experiment.name),
        "status": Cell(experiment.status),
        "hit rate": _share(experiment.estimate("hit_share")),
        "accuracy on hits": _share(experiment.estimate("accuracy_on_hits")),
        "wrong hits": _share(experiment.estimate("wrong_hit_share")),
        "same as cold": _share(experiment.estimate("against_cold", "agreement")),
        "accuracy": _share(experiment.estimate("accuracy")),
        "consistency": _share(experiment.estimate("consistency")),
        "P-CHR AUC": _share(experiment.estimate("chr_area", "area")),
        "tokens saved": _figure(experiment.estimate("saved", "tokens")),
        "ms saved": _figure(experiment.estimate("saved", "latency_s"), 1000),
        "lookup": _number(number(experiment.value("lookup", "p50_s")), 1000, 1),
        "requests": _number(number(experiment.value("samples")), 1, 0),
        "tiers": Cell(family(experiment) if experiment.settings else "-"),
        "thresholds": Cell(", ".join(f"{name} {value:g}" for name, value in limits.items()) or "-"),
        "group": Cell(group),
        "took": _number(experiment.seconds, 1, 0),
        "note": Cell(note or "-"),
    }
    return {name: found[name] for name in COLUMNS}


def judged(hits: int, of_them: int) -> str:
    """``12 hits``, or how many of them there is anything to judge by."""
    return f"{hits:,} hits" if of_them == hits else f"{of_them:,} of {hits:,} hits that anything judges"


def _share(value: Estimate) -> Cell:
    return _figure(value, 100)


def _figure(value: Estimate, factor: float = 1.0) -> Cell:
    return Cell(plain(value, factor), True, value.value)


def _number(value: float | None, factor: float, digits: int) -> Cell:
    return Cell("-" if value is None else f"{factor * value:,.{digits}f}", True, value)


def environments(experiments: list[Experiment]) -> list[tuple[dict[str, str], list[str]]]:
    """Every environment that occurs, as text, with the names of its experiments."""
    found: dict[str, tuple[dict[str, str], list[str]]] = {}
    for experiment in experiments:
        values = {k: _value(v) for k, v in sorted(experiment.environment.items())}
        if values:
            found.setdefault(repr(values), (values, []))[1].append(experiment.name)
    return list(found.values())


def traces(experiments: list[Experiment]) -> list[tuple[str, int]]:
    """Every workload trace that occurs, as text, with the number of its experiments."""
    found: dict[str, int] = {}
    for experiment in experiments:
        if experiment.trace:
            text = ", ".join(f"{k} {_value(v)}" for k, v in experiment.trace.items())
            found[text] = found.get(text, 0) + 1
    return list(found.items())


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_value(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(_value(v) for v in value)
    return "-" if value is None else str(value)
