"""What the logs of sweeps hold, and what a report shows of it: groups, Pareto front, grids, headlines, wrong hits."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from semkv.errors import DatasetError
from semkv_lab.console import milliseconds, percent
from semkv_lab.metrics import Estimate, given, number, read_estimate, without, wrong_hit
from semkv_lab.records import SampleRecord, at
from semkv_lab.samples import read_jsonl

if TYPE_CHECKING:
    import pandas as pd

STATUSES = ("ok", "failed", "interrupted")


@dataclass(frozen=True)
class Experiment:
    """One row of a log.

    Attributes:
        name: unique on the page; where several logs use it, the log's name stands before it.
        status: ``ok``, ``failed`` or ``interrupted``.
        given, settings, environment: as the sweep wrote them; ``given`` are the flags that the spec has.
        summary: `Summary.to_json`, or empty where the experiment failed.
        records: its samples; empty where the log names no file of samples or the file is gone.
        missing: the file of samples that the log names and that is not there.
    """

    name: str
    status: str
    error: str
    notes: str
    seconds: float | None
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    records: tuple[SampleRecord, ...] = ()
    missing: Path | None = None
    given: Mapping[str, Any] = field(default_factory=dict)

    def estimate(self, *path: str) -> Estimate:
        """A figure of the summary with its interval; empty where the summary has none."""
        return read_estimate(self.summary, *path)

    def value(self, *path: str) -> Any:
        """Whatever the summary holds at this path of keys, or None."""
        return at(self.summary, *path)

    def setting(self, *path: str) -> Any:
        """Whatever the settings hold at this path of keys, or None."""
        return at(self.settings, *path)


def read_logs(paths: Sequence[Path]) -> list[Experiment]:
    """The experiments of all logs, in order.

    Raises:
        DatasetError: a log or a file of samples cannot be read, or is none; names file and line.
    """
    logs = [(path, _read_log(path)) for path in paths]
    uses = Counter(e.name for _, experiments in logs for e in experiments)
    found = [
        replace(e, name=f"{path.stem}: {e.name}") if uses[e.name] > 1 else e
        for path, experiments in logs
        for e in experiments
    ]
    if not found:
        raise DatasetError(f"{', '.join(map(str, paths))}: no experiment is logged there")
    return found


def _read_log(path: Path) -> list[Experiment]:
    if path.suffix not in (".csv", ".jsonl"):
        raise DatasetError(f"{path}: a log of a sweep ends in .csv or .jsonl")
    lines = path.with_suffix(".jsonl")
    if not path.is_file():
        raise DatasetError(f"{path}: no such file")
    if not lines.is_file():
        raise DatasetError(f"{lines}: no such file; a report reads the .jsonl that the sweep writes beside {path.name}")
    experiments = [_experiment(row, lines, line) for line, row in read_jsonl(lines, cut_off=True)]
    return list({e.name: e for e in experiments}.values())  # a later row is a later try


def _experiment(row: Mapping[str, Any], path: Path, line: int) -> Experiment:
    where = f"{path}, line {line}"
    # Halves of surrogate pairs, as in the name of a file, become question marks.
    row = json.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
    name, status = row.get("name"), row.get("status")
    if not isinstance(name, str) or not name:
        raise DatasetError(f"{where}: no 'name': not a log of a sweep")
    if status not in STATUSES:
        raise DatasetError(f"{where}: 'status' is {status!r}; expected one of {', '.join(STATUSES)}")
    objects = {key: row.get(key) or {} for key in ("given", "settings", "environment", "summary")}
    for key, value in objects.items():
        if not isinstance(value, Mapping):
            raise DatasetError(f"{where}: {key!r} must be an object, found {type(value).__name__}")
    samples = path.parent / str(row["samples"]) if row.get("samples") else None
    there = samples is not None and os.path.isfile(samples)  # noqa: PTH113 - False for what is no name of a file, too
    return Experiment(
        name=name,
        status=status,
        error=str(row.get("error") or ""),
        notes=str(row.get("notes") or ""),
        seconds=number(row.get("seconds")),
        **objects,
        records=read_samples(samples) if samples and there else (),
        missing=None if there else samples,
    )


def listed(value: Any) -> list[Any]:
    """The value where it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def read_samples(path: Path) -> tuple[SampleRecord, ...]:
    """The records of a ``--samples-out`` file. A last line that was cut off, as by a kill, is left out."""
    records = []
    for line, row in read_jsonl(path, cut_off=True):
        try:
            records.append(SampleRecord.from_json(row))
        except (ValueError, TypeError, AttributeError, KeyError) as e:
            raise DatasetError(f"{path}, line {line}: not a record of a sample ({e})") from e
    return tuple(records)


def load_table(path: Path) -> pd.DataFrame:
    """See `semkv_lab.load`."""
    import pandas as pd

    first = {} if path.suffix == ".csv" else next((row for _, row in read_jsonl(path, cut_off=True)), {})
    if "sample_id" in first:
        return pd.json_normalize([record.to_json() for record in read_samples(path)])
    shown = ("name", "status", "error", "notes", "seconds", "settings", "environment", "summary")
    return pd.json_normalize([{key: getattr(e, key) for key in shown} for e in read_logs([path])])


# -- what is shown ------------------------------------------------------------

# What differs between the experiments of one group: thresholds, tiers, places. All other settings make groups.
_INSIDE = (
    "preset", "baseline", "purge", "samples_out", "summary_out", "cache.cache_dir", "cache.fusion_cache_dir",
    "cache.exact", "cache.semantic", "cache.fusion", "cache.embedding_hook", "cache.embedding_layers",
    "cache.similarity_threshold", "data.data_dir", "cache.image_roots", "baseline_from", "reuse", "blend_share",
)  # fmt: skip
_WORST = 12


def flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, plain value) for every leaf; lists are leaves."""
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from flatten(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def family(experiment: Experiment) -> str:
    """The tiers that are on: ``exact``, ``semantic + fusion`` ...; ``none`` where none is."""
    tiers = {"exact": "exact", "semantic": "semantic", "embedding": "embedding_layers", "fusion": "fusion"}
    on = [name for name, setting in tiers.items() if experiment.setting("cache", setting)]
    return "none" if not on or experiment.setting("cache", "mode") == "off" else " + ".join(on)


def thresholds(experiment: Experiment) -> dict[str, float]:
    """Thresholds by tier that are in force: ``semantic``, ``prompt``, ``vision`` ..."""
    found = {}
    for layer in listed(experiment.setting("cache", "embedding_layers")):
        if isinstance(layer, Mapping) and (value := number(layer.get("threshold"))) is not None:
            found[str(layer.get("name"))] = value
    least = number(experiment.setting("cache", "similarity_threshold"))
    if experiment.setting("cache", "semantic") and least is not None:
        found["semantic"] = least
    return found


def base_name(experiment: Experiment) -> str:
    """The preset's name, else the last part of the model's."""
    return str(experiment.setting("preset") or Path(str(experiment.setting("model") or "no model")).name)


def group_names(experiments: Sequence[Experiment]) -> list[str]:
    """The group of each experiment: its preset or model, and the settings in which its groups differ.

    Experiments of one group differ in their tiers and thresholds alone.
    """
    outer = [{k: _short(v) for k, v in flatten(e.settings) if k not in _INSIDE} for e in experiments]
    names = [base_name(e) for e in experiments]

    own: dict[str, list[dict[str, str]]] = {}
    for name, settings in zip(names, outer, strict=True):
        own.setdefault(name, []).append(settings)
    told = {
        name: [key for key in dict.fromkeys(key for o in of for key in o) if len({o.get(key) for o in of}) > 1]
        for name, of in own.items()
    }
    return [
        ", ".join([name, *(f"{key.split('.')[-1]} {settings.get(key, '-')}" for key in told[name])])
        for name, settings in zip(names, outer, strict=True)
    ]


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    text = "none" if value is None else str(value)
    text = Path(text).name if text.startswith("/") else text  # a place on one machine says nothing
    return text if len(text) <= 24 else f"…{text[-22:]}"


class Point(NamedTuple):
    """An experiment on the plane of hit rate and accuracy on hits; ``front`` numbers those on the Pareto front."""

    experiment: Experiment
    group: str
    family: str
    rate: Estimate
    accuracy: Estimate
    front: int = 0


def accuracy_on_hits(experiment: Experiment) -> Estimate:
    """Accuracy on hits; where nothing was expected, agreement with the cold answer, in dry-run mode the donor's."""
    found = experiment.estimate("accuracy_on_hits")
    other = ("donor_agreement",) if _dry(experiment) else ("against_cold", "agreement")
    return found if found.value is not None else experiment.estimate(*other)


def points(experiments: Sequence[Experiment]) -> list[Point]:
    """The experiments that have hits and an accuracy, the Pareto front numbered by falling accuracy.

    On the front is what no other experiment beats in one of the two without losing in the other; of equal ones the
    first.
    """
    found = []
    for experiment, group in zip(experiments, group_names(experiments), strict=True):
        rate, accuracy = experiment.estimate("hit_share"), accuracy_on_hits(experiment)
        if rate.value and accuracy.value is not None:
            found.append(Point(experiment, group, family(experiment), rate, accuracy))
    best, front = -1.0, list[int]()
    for n in sorted(range(len(found)), key=lambda n: (-(found[n].rate.value or 0), -(found[n].accuracy.value or 0))):
        if (found[n].accuracy.value or 0) > best:
            best = found[n].accuracy.value or 0
            front.insert(0, n)
    return [p._replace(front=front.index(n) + 1 if n in front else 0) for n, p in enumerate(found)]


class Grid(NamedTuple):
    """Experiments that differ in the thresholds of the ``prompt`` and the ``vision`` layer alone."""

    name: str
    prompt: tuple[float, ...]
    vision: tuple[float, ...]
    cells: Mapping[tuple[float, float], Experiment]


def grids(experiments: Sequence[Experiment]) -> list[Grid]:
    """Every threshold grid of at least two experiments."""
    found: dict[tuple[str, str, Any], dict[tuple[float, float], Experiment]] = {}
    for experiment, name in zip(experiments, group_names(experiments), strict=True):
        limits = thresholds(experiment)
        if {"prompt", "vision"} <= limits.keys() and experiment.summary:
            key = limits.pop("prompt"), limits.pop("vision")
            found.setdefault((name, family(experiment), tuple(sorted(limits.items()))), {})[key] = experiment
    several = {key: cells for key, cells in found.items() if len(cells) > 1}
    uses = Counter(name for name, _, _ in several)
    return [
        Grid(
            name=name if uses[name] == 1 else ", ".join([name, tiers, *(f"{k} {v:g}" for k, v in rest)]),
            prompt=tuple(sorted({p for p, _ in cells})),
            vision=tuple(sorted({v for _, v in cells})),
            cells=cells,
        )
        for (name, tiers, rest), cells in several.items()
    ]


class TierPoint(NamedTuple):
    """One tier of one experiment: the share of requests it served, and what each of them saved in seconds."""

    tier: str
    group: str
    rate: Estimate
    saved: Estimate


def tier_points(experiments: Sequence[Experiment]) -> list[TierPoint]:
    """Every tier of every experiment, misses too; ``all`` left out."""
    found = []
    for experiment, group in zip(experiments, group_names(experiments), strict=True):
        for row in listed(experiment.value("tiers")):
            tier = at(row, "tier")
            if isinstance(tier, str) and tier != "all" and row.get("n"):
                part = replace(experiment, summary=row)
                found.append(TierPoint(tier, group, part.estimate("share"), part.estimate("saved", "latency_p50_s")))
    return found


class Wrong(NamedTuple):
    """A hit that gave a wrong answer, and the experiments in which it did."""

    record: SampleRecord
    experiments: tuple[Experiment, ...]

    @property
    def score(self) -> float:
        return 1.0 if self.record.score is None else self.record.score

    @property
    def given(self) -> str:
        return given(self.record) or ""

    @property
    def without(self) -> str | None:
        return without(self.record)


def wrong_hits(experiments: Sequence[Experiment]) -> list[Wrong]:
    """Wrong hits, the most certain first: by the highest score, then by how many experiments made them.

    The same request with the same donor is one wrong hit, however many experiments made it.
    """
    found: dict[tuple[str, ...], tuple[SampleRecord, list[Experiment]]] = {}
    for experiment in experiments:
        for record in experiment.records:
            if wrong_hit(record):
                key = (base_name(experiment), record.question, record.image, record.donor_question, record.donor_image)
                found.setdefault(key, (record, []))[1].append(experiment)
    every = [Wrong(record, tuple({e.name: e for e in where}.values())) for record, where in found.values()]
    return sorted(every, key=lambda w: (-w.score, -len(w.experiments), w.record.sample_id))


def count_hits(experiments: Sequence[Experiment]) -> tuple[int, int]:
    """How many hits the samples have, and how many of them something judges."""
    judged = [wrong_hit(r) is not None for e in experiments for r in e.records if r.hit]
    return len(judged), sum(judged)


def worst(every: Sequence[Wrong]) -> list[Wrong]:
    """Those that are shown: the highest scores, at most two with one donor question."""
    donors: Counter[str] = Counter()
    shown = []
    for wrong in every:
        donors[wrong.record.donor_question] += 1
        if donors[wrong.record.donor_question] <= 2 or not wrong.record.donor_question:
            shown.append(wrong)
    return shown[:_WORST]


def _clean(experiment: Experiment) -> bool:
    """Whether it had hits, each of them was judged, and none was wrong."""
    wrong, hits = experiment.estimate("wrong_hit_share"), experiment.estimate("hit_share")
    judged = wrong.n == hits.n and accuracy_on_hits(experiment).value is not None
    return bool(hits.value) and wrong.value == 0 and judged


def _dry(experiment: Experiment) -> bool:
    return str(experiment.setting("cache", "mode")) == "dry-run"


class Fact(NamedTuple):
    """A headline: a figure, what it is, and where it is from."""

    figure: str
    what: str
    where: str


def facts(experiments: Sequence[Experiment]) -> list[Fact]:
    """What a reader should know first."""

    def most(among: Sequence[Experiment], *path: str) -> Experiment | None:
        """The experiment with the largest figure above 0."""
        having = [e for e in among if (e.estimate(*path).value or 0) > 0]
        return max(having, key=lambda e: e.estimate(*path).value or 0, default=None)

    def first(*path: str) -> Experiment | None:
        return next((e for e in done if e.estimate(*path).value is not None), None)

    done = [e for e in experiments if e.summary]
    finished, failed = (sum(e.status == status for e in experiments) for status in ("ok", "failed"))
    requests = sum(int(number(e.value("samples")) or 0) for e in done)
    counts = f"{finished} finished, {failed} failed, {requests:,} requests in all"
    found = [Fact(str(len(experiments)), "experiments", counts)]
    clean = [e for e in done if _clean(e)]
    if best := most(clean, "hit_share"):
        found.append(Fact(percent(best.estimate("hit_share")), "most hits without a wrong one", best.name))
    if top := most(done, "hit_share"):
        what = f"most hits at all, wrong hits a request: {percent(top.estimate('wrong_hit_share'))}"
        found.append(Fact(percent(top.estimate("hit_share")), what, top.name))
    # A dry run sends every request unchanged: what it saves is not its hits'.
    if fastest := most([e for e in clean if not _dry(e)], "saved", "latency_s"):
        saved = milliseconds(fastest.estimate("saved", "latency_s"))
        found.append(Fact(saved, "most time saved a request without a wrong hit", fastest.name))
    if cold := first("baseline_accuracy"):
        found.append(Fact(percent(cold.estimate("baseline_accuracy")), "accuracy without semkv", base_name(cold)))
    if noisy := first("noise_floor", "tokens"):
        noise = noisy.estimate("noise_floor", "tokens")
        what = "noise floor: the same prompt twice, other tokens"
        found.append(Fact(percent(noise), what, f"{noise.n} prompts, {noisy.name}"))
    return found
