"""Reads the logs of sweeps: ``sweep.csv`` or the ``sweep.jsonl`` beside it, and the samples that its rows name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from semkv.errors import DatasetError
from semkv_lab.datasets.base import NO_JSON
from semkv_lab.metrics import HUGE, Estimate, SampleRecord

STATUSES = ("ok", "failed", "interrupted")
_OBJECTS = ("settings", "environment", "trace")


@dataclass(frozen=True)
class Experiment:
    """One row of a log.

    Attributes:
        name: unique on the page; where several logs use it, the log's name stands before it.
        status: ``ok``, ``failed`` or ``interrupted``.
        settings, environment, trace: as the sweep wrote them.
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
    trace: Mapping[str, Any]
    summary: Mapping[str, Any]
    records: tuple[SampleRecord, ...] = ()
    missing: Path | None = None

    def estimate(self, *path: str) -> Estimate:
        """A figure of the summary with its interval; empty where the summary has none."""
        found = self.value(*path)
        if not isinstance(found, Mapping):
            return Estimate(0, None)
        n, value, low, high = (number(found.get(key)) for key in ("n", "value", "low", "high"))
        return Estimate(int(n or 0), value, low, high)

    def value(self, *path: str) -> Any:
        """Whatever the summary holds at this path of keys, or None."""
        found: Any = self.summary
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def setting(self, *path: str) -> Any:
        """Whatever the settings hold at this path of keys, or None."""
        found: Any = self.settings
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found


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
    if not path.is_file():
        raise DatasetError(f"{path}: no such file")
    lines = path.with_suffix(".jsonl")
    if not lines.is_file():
        raise DatasetError(f"{lines}: no such file; a report reads the .jsonl that the sweep writes beside {path.name}")
    rows: dict[str, Experiment] = {}
    for line, row in _whole_lines(lines):
        experiment = _experiment(row, lines, line)
        rows[experiment.name] = experiment  # a later row is a later try
    return list(rows.values())


def _whole_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line number, object) of every line of JSON lines; a last line that was cut off, as by a kill, is left out.

    Raises:
        DatasetError: the file cannot be read, or a line is no JSON object; names file and line.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as e:
        raise DatasetError(f"{path}: {e.strerror or e}") from e
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if b"\\ud" in line.lower():  # halves of surrogate pairs, as in the name of a file, become question marks
                row = json.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
        except NO_JSON as e:
            if number == len(lines):
                return
            reason = e.msg if isinstance(e, json.JSONDecodeError) else str(e)
            raise DatasetError(f"{path}, line {number}: not valid JSON ({reason})") from e
        if not isinstance(row, dict):
            raise DatasetError(f"{path}, line {number}: expected an object, found {type(row).__name__}")
        yield number, row


def _experiment(row: Mapping[str, Any], path: Path, line: int) -> Experiment:
    where = f"{path}, line {line}"
    name, status = row.get("name"), row.get("status")
    if not isinstance(name, str) or not name:
        raise DatasetError(f"{where}: no 'name': not a log of a sweep")
    if status not in STATUSES:
        raise DatasetError(f"{where}: 'status' is {status!r}; expected one of {', '.join(STATUSES)}")
    for key in (*_OBJECTS, "summary"):
        if row.get(key) is not None and not isinstance(row[key], Mapping):
            raise DatasetError(f"{where}: {key!r} must be an object, found {type(row[key]).__name__}")
    samples = path.parent / str(row["samples"]) if row.get("samples") else None
    there = samples is not None and _is_file(samples)
    return Experiment(
        name=name,
        status=status,
        error=str(row.get("error") or ""),
        notes=str(row.get("notes") or ""),
        seconds=number(row.get("seconds")),
        settings=row.get("settings") or {},
        environment=row.get("environment") or {},
        trace=row.get("trace") or {},
        summary=row.get("summary") or {},
        records=read_samples(samples) if samples is not None and there else (),
        missing=samples if samples is not None and not there else None,
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # no name of a file at all
        return False


def listed(value: Any) -> list[Any]:
    """The value where it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """The value where it is a number that can be drawn, else None."""
    there = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < HUGE
    return float(value) if there else None


def read_samples(path: Path) -> tuple[SampleRecord, ...]:
    """The records of a ``--samples-out`` file. A last line that was cut off, as by a kill, is left out.

    Raises:
        DatasetError: a line is no record; names file and line.
    """
    records = []
    for line, row in _whole_lines(path):
        try:
            records.append(SampleRecord.from_json(row))
        except (ValueError, TypeError, AttributeError, KeyError) as e:
            raise DatasetError(f"{path}, line {line}: not a record of a sample ({e})") from e
    return tuple(records)
