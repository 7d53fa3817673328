"""What the logs of sweeps hold: read, handed to pandas and MLflow, and grouped and ranked for a report."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from semkv.errors import DatasetError
from semkv_lab.metrics import Estimate, read_estimate, wrong_hit
from semkv_lab.samples import NonEmpty, SampleRecord, at, read_jsonl, read_rows

if TYPE_CHECKING:
    import pandas as pd

Object = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """One row of a log, as the sweep wrote it.

    Attributes:
        name: unique on a page; where several logs use it, the log's name stands before it.
        summary: of the run; None where the experiment failed.
        samples: the file of its samples, from the log's folder; empty for none.
        records: what is in that file; empty where it is gone.
        group: of experiments that differ in their tiers and thresholds only (`grouped`).
    """

    name: NonEmpty
    status: Literal["ok", "failed"]
    error: str = ""
    notes: str = ""
    seconds: float | None = None
    settings: Object = field(default_factory=dict)
    environment: Object = field(default_factory=dict)
    summary: Object | None = None
    samples: str | None = None
    records: tuple[SampleRecord, ...] = ()
    group: str = ""

    def estimate(self, path: str) -> Estimate:
        """A figure of the summary with its interval, by its dotted path; empty where the summary has none."""
        return read_estimate(self.summary or {}, path)

    def setting(self, *path: str) -> Any:
        """What the settings hold at this path of keys, or None."""
        return at(self.settings, *path)

    @property
    def base(self) -> str:
        """The preset's name, else the last part of the model's."""
        return str(self.setting("preset") or Path(str(self.setting("model") or "no model")).name)

    @property
    def tiers(self) -> str:
        """The tiers that are on: ``exact``, ``semantic + fusion`` ...; ``none`` where none is."""
        tiers = {
            "exact": "exact",
            "semantic": "semantic",
            "embedding": "embedding_layers",
            "fusion": "fusion",
        }
        on = [name for name, setting in tiers.items() if self.setting("cache", setting)]
        return "none" if not on or self.setting("cache", "mode") == "off" else " + ".join(on)

    @property
    def thresholds(self) -> str:
        """The least cosine of each layer and of the text tier, where it is on: ``prompt 0.8, vision 0.9``."""
        layers = self.setting("cache", "embedding_layers") or []
        found = {layer["name"]: layer["threshold"] for layer in layers}
        if self.setting("cache", "semantic"):
            found["semantic"] = self.setting("cache", "similarity_threshold")
        return ", ".join(f"{name} {value:g}" for name, value in found.items())

    @property
    def accuracy(self) -> Estimate:
        """Accuracy on hits; where nothing was expected, agreement with the cold answer, in dry-run mode the donor's."""
        found = self.estimate("accuracy_on_hits")
        dry = self.setting("cache", "mode") == "dry-run"
        other = "donor_agreement" if dry else "against_cold.agreement"
        return found if found.value is not None else self.estimate(other)


def read_logs(paths: Sequence[Path]) -> list[Experiment]:
    """The experiments of all logs, in order, with their groups."""
    logs = [(path, _read_log(path)) for path in paths]
    uses = Counter(e.name for _, experiments in logs for e in experiments)
    found = [
        replace(e, name=f"{path.stem}: {e.name}") if uses[e.name] > 1 else e
        for path, experiments in logs
        for e in experiments
    ]
    if not found:
        raise DatasetError(f"{', '.join(map(str, paths))}: no experiment is logged there")
    return grouped(found)


def _read_log(path: Path) -> list[Experiment]:
    lines = path.with_suffix(".jsonl")
    if path.suffix not in (".csv", ".jsonl") or not path.is_file():
        raise DatasetError(
            f"{path}: no log of a sweep, which is a file that ends in .csv or .jsonl"
        )
    # A later row is a later try.
    found = {e.name: e for e in read_rows(lines, Experiment, cut_off=True)}
    for e in found.values():
        if e.samples and (file := path.parent / e.samples).is_file():
            found[e.name] = replace(e, records=tuple(read_rows(file, SampleRecord, cut_off=True)))
    return list(found.values())


# What differs between the experiments of one group: thresholds, tiers, places. All other settings make groups.
_INSIDE = (
    "preset", "baseline", "purge", "samples_out", "summary_out", "cache.cache_dir", "cache.fusion_cache_dir",
    "cache.exact", "cache.semantic", "cache.fusion", "cache.embedding_hook", "cache.embedding_layers",
    "cache.similarity_threshold", "data.data_dir", "cache.image_roots", "reuse", "blend_share",
)  # fmt: skip


def grouped(experiments: Sequence[Experiment]) -> list[Experiment]:
    """The experiments with the names of their groups: preset or model, and the settings in which groups differ."""
    outer = [
        {key: _short(value) for key, value in flatten(e.settings) if key not in _INSIDE}
        for e in experiments
    ]
    found = []
    for experiment, own in zip(experiments, outer, strict=True):
        others = [o for e, o in zip(experiments, outer, strict=True) if e.base == experiment.base]
        differs = [key for key in own if len({other[key] for other in others if key in other}) > 1]
        group = ", ".join(
            [experiment.base, *(f"{key.split('.')[-1]} {own[key]}" for key in differs)]
        )
        found.append(replace(experiment, group=group))
    return found


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    text = "none" if value is None else str(value)
    text = Path(text).name if text.startswith("/") else text  # a place on one machine says nothing
    return text if len(text) <= 24 else f"…{text[-22:]}"


# -- other programs ------------------------------------------------------------


def flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, plain value) for every leaf; lists are leaves."""
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from flatten(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner


def load_table(path: Path) -> "pd.DataFrame":
    """See `semkv_lab.load`."""
    import pandas as pd

    first = (
        {}
        if path.suffix == ".csv"
        else next((row for _, row in read_jsonl(path, cut_off=True)), {})
    )
    if "sample_id" in first:
        return pd.json_normalize([r.to_json() for r in read_rows(path, SampleRecord, cut_off=True)])
    names = ("name", "status", "error", "notes", "seconds", "settings", "environment", "summary")
    return pd.json_normalize(
        [{name: getattr(e, name) for name in names} for e in read_logs([path])]
    )


def to_mlflow(
    path: str | Path,
    *,
    uri: str | None = None,
    experiment: str = "semkv",
) -> int:
    """Log a sweep's log to MLflow: a run for each of its experiments, with settings as parameters, figures as metrics.

    Names have dots, as in `semkv_lab.load`. The machine and its versions are tags. A log that is handed in again makes
    its runs again. Returns how many.

    Args:
        path: the log.
        uri: of the MLflow server; by default MLFLOW_TRACKING_URI.
        experiment: in MLflow; made where it is not there.

    Raises:
        DatasetError: the file is no log of a sweep, or cannot be read.
        ImportError: MLflow is not installed: the extra ``mlflow`` of ``packages/lab`` brings it.
    """
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag

    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    place = found.experiment_id if found is not None else client.create_experiment(experiment)
    logs = read_logs([Path(path)])
    for log in logs:
        run = client.create_run(place, run_name=log.name)
        leaves = flatten(log.summary or {})
        said = {"environment": log.environment, "notes": log.notes}
        figures = [
            Metric(name, value, 0, 0) for name, value in leaves if type(value) in (int, float)
        ]
        params = [
            Param(name, str(value)[:_MLFLOW_LONGEST]) for name, value in flatten(log.settings)
        ]
        tags = [
            RunTag(name, str(value)[:_MLFLOW_LONGEST])
            for name, value in flatten({**said, "error": log.error})
        ]
        client.log_batch(run.info.run_id, figures, params, tags)
        client.set_terminated(run.info.run_id, "FINISHED" if log.status == "ok" else "FAILED")
    return len(logs)


_MLFLOW_LONGEST = 5000  # bytes of a tag


# -- ranks ------------------------------------------------------------


class Point(NamedTuple):
    """An experiment on the plane of hit rate and accuracy on hits; ``front`` numbers those on the Pareto front."""

    experiment: Experiment
    rate: Estimate
    accuracy: Estimate
    front: int = 0


def points(experiments: Sequence[Experiment]) -> list[Point]:
    """The experiments that have hits and an accuracy, the Pareto front numbered by falling accuracy.

    On the front is what no other experiment beats in one of the two without losing in the other; of equal ones the
    first.
    """
    every = [Point(e, e.estimate("hit_share"), e.accuracy) for e in experiments]
    found = [p for p in every if p.rate.value and p.accuracy.value is not None]
    best, front = -1.0, list[int]()
    for n in sorted(
        range(len(found)),
        key=lambda n: (-(found[n].rate.value or 0), -(found[n].accuracy.value or 0)),
    ):
        if (found[n].accuracy.value or 0) > best:
            best = found[n].accuracy.value or 0
            front.insert(0, n)
    return [p._replace(front=front.index(n) + 1 if n in front else 0) for n, p in enumerate(found)]


class Wrong(NamedTuple):
    """A hit that gave a wrong answer, and the experiments in which it did."""

    record: SampleRecord
    experiments: tuple[Experiment, ...]

    @property
    def score(self) -> float:
        return 1.0 if self.record.score is None else self.record.score


def wrong_hits(experiments: Sequence[Experiment]) -> list[Wrong]:
    """Wrong hits, the most certain first: by the highest score, then by how many experiments made them.

    The same request with the same donor is one wrong hit, however many experiments made it.
    """
    found: dict[tuple[str, ...], tuple[SampleRecord, dict[str, Experiment]]] = {}
    for experiment in experiments:
        for record in filter(wrong_hit, experiment.records):
            key = (
                experiment.base,
                record.question,
                record.image,
                record.donor_question,
                record.donor_image,
            )
            found.setdefault(key, (record, {}))[1][experiment.name] = experiment
    every = [Wrong(record, tuple(where.values())) for record, where in found.values()]
    return sorted(every, key=lambda w: (-w.score, -len(w.experiments), w.record.sample_id))
