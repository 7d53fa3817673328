"""Results in MLflow, for who keeps all experiments there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from semkv_lab.metrics import number
from semkv_lab.results import flatten, read_logs


def to_mlflow(path: str | Path, *, uri: str | None = None, experiment: str = "semkv") -> int:
    """Log a sweep's log to MLflow: a run for each of its experiments, with settings as parameters, figures as metrics.

    Names have dots, as in `semkv_lab.load`: ``cache.similarity_threshold``, ``hit_share.value``. The machine and its
    versions are tags. A log that is handed in again makes its runs again.

    Args:
        path: what ``semkv sweep --log`` wrote.
        uri: of the MLflow server, such as ``http://127.0.0.1:5000``; by default MLFLOW_TRACKING_URI.
        experiment: in MLflow; made where it is not there.

    Returns:
        How many runs were logged.

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
        figures = {name: number(value) for name, value in flatten(log.summary)}
        metrics = [Metric(name, value, 0, 0) for name, value in figures.items() if value is not None]
        params = [Param(name, _text(value)) for name, value in flatten(log.settings)]
        tags = [RunTag(f"environment.{name}", _text(value)) for name, value in flatten(log.environment)]
        tags += [RunTag("notes", log.notes), RunTag("error", log.error)]
        for start in range(0, max(len(metrics), len(params), len(tags)), _BATCH):
            part = slice(start, start + _BATCH)
            client.log_batch(run.info.run_id, metrics[part], params[part], tags[part])
        client.set_terminated(run.info.run_id, "FINISHED" if log.status == "ok" else "FAILED")
    return len(logs)


_BATCH = 100  # parameters, and tags, that MLflow takes at once
_LONGEST = 5000  # bytes of a tag


def _text(value: Any) -> str:
    return str(value)[:_LONGEST]
