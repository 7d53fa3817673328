"""``semkv sweep``: many experiments from a file, a row each in a log.

The file is JSON or TOML and is checked as a whole before anything starts:

    {"defaults": {"preset": "minigqa", "max-samples": 128},
     "experiments": [{"name": "exact-only", "disable-semantic-cache": true, "notes": "the floor"}, ...]}

A key is a flag of ``semkv run``, with ``-`` or ``_``; an experiment's own key wins over the default.

The log is ``<name>.jsonl``, a row an experiment, and ``<name>.csv``, the same flattened. Both are replaced as a whole
after every experiment, so that a crash leaves the rows before it.
"""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from semkv.errors import ConfigError, DatasetError, SemkvError
from semkv.stores.maintenance import prepare
from semkv.user_files import read_json, read_toml
from semkv_lab.console import keep_apart, writing
from semkv_lab.datasets import load_samples
from semkv_lab.inputs import Input, Source, inputs, sources
from semkv_lab.results import flatten
from semkv_lab.samples import as_row, read_jsonl
from semkv_lab.settings import RunSettings, SweepFlags, resolve
from semkv_stores.files import lock, replace_text
from semkv_stores.settings import typed

# -- the file of experiments ------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,99}")
_OURS = {"samples_out", "summary_out", "purge"}  # the sweep's own business


@dataclass(frozen=True)
class Experiment:
    """One run of a sweep.

    Attributes:
        names_a_cache: whether the file says where its cache is.
        settings: with everything filled in and checked.
        samples, summary: the files that it writes.
        baseline: the samples of an experiment whose cold answers it takes.
    """

    name: str
    notes: str
    names_a_cache: bool
    settings: RunSettings
    samples: Path = Path()
    summary: Path = Path()
    baseline: Path | None = None


@dataclass(frozen=True)
class _Spec:
    """A file of experiments: flags of all, and those of each with its name."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    experiments: Annotated[list[dict[str, Any]], Field(min_length=1)]
    defaults: dict[str, Any] = field(default_factory=dict)


def read_spec(path: Path) -> list[Experiment]:
    """The experiments of a file."""
    try:
        document = read_toml(path) if path.suffix == ".toml" else read_json(path)
    except DatasetError as error:
        raise ConfigError(
            "--specs", str(path), f"valid JSON, or TOML in a file named .toml ({error})"
        ) from error
    spec = as_row(document, _Spec, str(path))
    found = dict[str, Experiment]()
    for number, row in enumerate(spec.experiments, 1):
        name = row.get("name")
        key = f"{path.name}: name of experiment {number}"
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(
                key,
                name,
                "up to 100 letters, digits and . _ = + -, beginning with a letter or digit",
            )
        if name in found:
            raise ConfigError(key, name, "a name that no other experiment has")
        defaults = _flags(spec.defaults, f"{path.name}: defaults")
        found[name] = _experiment(
            name, {**defaults, **_flags(row, f"{path.name}: experiment {name}")}
        )
    return list(found.values())


def _flags(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Flags by one form of their names, which a file may write with ``-`` or ``_``, and layers in the plural."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("-", "_").replace("_layers", "_layer")
        if name in found:
            raise ConfigError(where, key, f"one name for {name}, which is given twice")
        found[name] = value
    return found


def _experiment(name: str, row: Mapping[str, Any]) -> Experiment:
    given = {key: value for key, value in row.items() if key not in ("name", "notes")}
    notes = typed(f"experiment {name}: notes", row.get("notes", ""), str)
    if ours := sorted(_OURS & given.keys()):
        raise ConfigError(
            f"experiment {name}", ours[0], "a flag of semkv run; this one is the sweep's own"
        )
    try:
        return Experiment(
            name=name,
            notes=notes,
            names_a_cache="cache_dir" in given,
            settings=resolve(given),
        )
    except SemkvError as error:
        raise SemkvError(f"experiment {name}: {error}") from error


# -- the log ------------------------------------------------------------

OK, FAILED = "ok", "failed"
_LOG_FILE = "--log-file"
_FIRST = ("name", "status", "error", "notes", "started", "seconds")
_PATHS = {"samples_out", "summary_out"}  # where things lie changes no result


class SweepLog:
    """The finished rows of a sweep, in a ``.csv`` file and a ``.jsonl`` file, in the order in which they finished."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        if path.suffix != ".csv":
            raise ConfigError(_LOG_FILE, str(path), "a name that ends in .csv")
        self.path = path
        self.lines = path.with_suffix(".jsonl")
        if not resume and (self.lines.exists() or path.exists()):
            raise ConfigError(
                _LOG_FILE, str(path), "a new file, or --resume to go on with this one"
            )
        try:
            rows = (
                [row for _, row in read_jsonl(self.lines, cut_off=True)]
                if self.lines.exists()
                else []
            )
        except DatasetError as error:
            raise ConfigError("--resume", str(path), f"a log of a sweep ({error})") from None
        if not all({"name", "status", "settings"} <= row.keys() for row in rows):
            raise ConfigError(
                "--resume", str(path), "a log of a sweep: a row has no name, status or settings"
            )
        self.rows = {row["name"]: row for row in rows}

    def made_from(self) -> dict[Source, tuple[str, str]]:
        """By source, the first experiment that was made from it and the digest of what it held."""
        found: dict[Source, tuple[str, str]] = {}
        for name, row in self.rows.items():
            for one in _inputs_of(row, f"{self.lines}: {name}") if row["status"] == OK else ():
                found.setdefault(one.source, (name, one.digest))
        return found

    def write(self) -> None:
        """Put the rows in place of what the files hold."""
        flat = [
            {
                key: json.dumps(value) if isinstance(value, list) else value
                for key, value in flatten(row)
            }
            for row in self.rows.values()
        ]
        columns = [*_FIRST, *sorted({key for row in flat for key in row} - set(_FIRST))]
        out = io.StringIO()
        writer = csv.DictWriter(
            out,
            columns,
            restval="",
            lineterminator="\n",
        )
        writer.writeheader()
        writer.writerows(flat)
        with writing(_LOG_FILE, self.path):
            replace_text(self.lines, "".join(json.dumps(row) + "\n" for row in self.rows.values()))
            replace_text(self.path, out.getvalue())


def _inputs_of(row: Mapping[str, Any], where: str) -> list[Input]:
    if "inputs" not in row:
        raise ConfigError(
            "--resume", where, "a row that notes the data it was made from; begin another log"
        )
    return as_row(row["inputs"], list[Input], where)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other sweeps off a log. Raises `ConfigError` where one is writing it."""
    with ExitStack() as held:
        with writing(_LOG_FILE, path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                # Given up with the process, however it ends.
                held.enter_context(lock(path.with_suffix(".lock"), 0))
            except BlockingIOError:
                raise ConfigError(
                    _LOG_FILE, str(path), "a log that no other sweep is writing"
                ) from None
        yield


# -- the sweep ------------------------------------------------------------


def run_sweep(flags: SweepFlags, console: Console) -> int:
    """Run what is not in the log yet; returns how many experiments failed."""
    planned = _planned(flags)
    with locked(flags.log_file):
        log = SweepLog(flags.log_file, resume=flags.resume)
        with console.status("reading what the log was made from"):
            left = _left(planned, log)
        if len(left) < len(planned):
            console.print(
                f"{len(planned) - len(left)} of {len(planned)} experiments are in {log.path}"
            )
        _make_samples_folder(flags, left)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(TextColumn("{task.description}"), *columns, console=console) as bar:
            task = bar.add_task(
                "Experiments",
                total=len(planned),
                completed=len(planned) - len(left),
            )

            def begin(e: Experiment) -> Experiment:
                bar.update(task, description=e.name)
                return replace(e, baseline=_cold_answers(e, log))

            for e, error in _started(flags, left, begin):
                log.rows[e.name] = _row(e, error, log)
                log.write()
                bar.advance(task)
    errors = {name: str(row["error"]) for name, row in log.rows.items() if row["status"] == FAILED}
    for name, error in errors.items():
        console.print(f"failed: {name}: {error.strip().splitlines()[-1]}", markup=False)
    console.print(
        f"log: {log.path} and {log.lines.name}; samples: {flags.samples_dir}", markup=False
    )
    return len(errors)


def _left(planned: Sequence[Experiment], log: SweepLog) -> list[Experiment]:
    """The experiments that are to be run; what failed is tried again, and has no row any more.

    Raises:
        ConfigError: the log has been made from other settings or other data.
    """
    done = {name for name, row in log.rows.items() if row["status"] == OK}
    for e in planned:
        if e.name in done:
            _check_same(e, log)
    _check_inputs(planned, log)
    left = [e for e in planned if e.name not in done]
    for e in left:
        log.rows.pop(e.name, None)
    if log.rows:
        log.write()  # a kill may have left the table without the last of them
    return left


def _make_samples_folder(flags: SweepFlags, left: Sequence[Experiment]) -> None:
    """Raises `ConfigError` where another sweep has left files there. What this one left has no row, and may go."""
    with writing("--samples-dir", flags.samples_dir):
        flags.samples_dir.mkdir(parents=True, exist_ok=True)
    if flags.resume:
        return
    for e in left:
        for path in (e.samples, e.summary):
            if path.exists():
                raise ConfigError(
                    "--samples-dir", str(flags.samples_dir), f"a folder without {path.name}"
                )


Begin = Callable[[Experiment], Experiment]
"""Says that an experiment begins, and gives it the cold answers that the log has by now."""


def _started(
    flags: SweepFlags, left: Sequence[Experiment], begin: Begin
) -> Iterator[tuple[Experiment, str]]:
    """Run experiments, here in their order or on a Ray cluster; each as it ends, with what `run_one` returns."""
    if flags.ray:
        from semkv_lab.ray_cluster import run_on_ray

        yield from run_on_ray(flags.ray, left, begin, cpus=flags.ray_cpus)
        return
    for e in left:
        begun = begin(e)
        yield begun, run_one(begun)


def _planned(flags: SweepFlags) -> list[Experiment]:
    """The chosen experiments, each with files of its own, and a cache beside the log unless the spec names one."""
    found = {e.name: e for e in read_spec(flags.specs)}
    for name in flags.only:
        if name not in found:
            raise ConfigError("--only", name, list(found))
    read = {
        "--specs": flags.specs,
        "--log-file": flags.log_file,
        "its lines": flags.log_file.with_suffix(".jsonl"),
    }
    planned = []
    for e in found.values():
        if flags.only and e.name not in flags.only:
            continue
        cache = e.settings.cache
        if flags.ray and e.names_a_cache:
            allowed = "no cache of its own: with --ray experiments run at once, on several machines"
            raise ConfigError(f"experiment {e.name}: cache-dir", str(cache.cache_dir), allowed)
        if not e.names_a_cache:
            cache = replace(cache, cache_dir=flags.log_file.parent / "cache")
        samples = flags.samples_dir / f"{e.name}.jsonl"
        summary = flags.samples_dir / f"{e.name}.json"
        settings = replace(
            e.settings,
            cache=cache,
            samples_out=samples,
            summary_out=summary,
            purge=flags.purge_cache_between_runs,
        )
        keep_apart({f"the {path.name} of {e.name}": path for path in (samples, summary)}, read)
        planned.append(replace(e, settings=settings, samples=samples, summary=summary))
    return planned


def _check_same(experiment: Experiment, log: SweepLog) -> None:
    before = log.rows[experiment.name]["settings"]
    now = experiment.settings.to_json()
    if changed := sorted(
        key for key in (before.keys() | now.keys()) - _PATHS if before.get(key) != now.get(key)
    ):
        raise ConfigError(
            f"experiment {experiment.name}",
            ", ".join(changed),
            f"the settings it has in {log.path}; give it another name, or begin another log",
        )


def _check_inputs(planned: Sequence[Experiment], log: SweepLog) -> None:
    """Refuse to go on over a data set, calibration or model that rows of the log were made from, where it has changed.

    What the rows do not name is not read.
    """
    noted = log.made_from()
    read: set[Source] = set()
    for e in planned:
        own = {*sources(e.settings)} & noted.keys() - read
        if not own:
            continue
        read |= own
        found, error = _apart(planned, e.settings)
        for source in sorted(own):
            made, before = noted[source]
            if error:
                why = f"which cannot be read ({error}); --only leaves an experiment out"
            elif found[source] != before:
                why = "which has changed since; begin another log"
            else:
                continue
            allowed = f"what {made} in {log.path} was made from, {why}"
            raise ConfigError(f"experiment {e.name}: {source.flag}", source.value, allowed)


def _apart(planned: Sequence[Experiment], settings: RunSettings) -> tuple[dict[Source, str], str]:
    """What `read_inputs` returns in a process of its own, since a data set may be the user's own function."""
    try:
        with ProcessPoolExecutor(1, mp_context=_forkserver(planned)) as pool:
            return pool.submit(read_inputs, settings).result()
    except BrokenProcessPool:
        return {}, "the process that read it has crashed"


def read_inputs(settings: RunSettings) -> tuple[dict[Source, str], str]:
    """The digests of what a run would read now, and why they cannot be had; empty where they can."""
    try:
        found = inputs(settings, load_samples(settings.dataset, settings.data))
    except SemkvError as error:
        return {}, str(error)
    return {one.source: one.digest for one in found}, ""


# Cold answers depend on all settings but these.
_CACHED = {
    "cache",
    "preset",
    "purge",
    "chunk_source",
    "chunk_window",
    "reuse",
    "blend_share",
} | _PATHS


def _cold_answers(experiment: Experiment, log: SweepLog) -> Path | None:
    """The samples of an experiment that has asked the same without semkv, and had an answer for each."""

    def cold(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in settings.items() if key not in _CACHED}

    own = cold(experiment.settings.to_json())
    for row in log.rows.values():
        if row["status"] == OK and own["baseline"] and own == cold(row["settings"]):
            samples = log.path.parent / str(row["samples"])
            if samples.is_file() and not row["summary"]["faults"].get("failed samples"):
                return samples
    return None


def _row(
    e: Experiment,
    error: str,
    log: SweepLog,
) -> dict[str, Any]:
    """A row of the log, from the summary that the run has left."""
    found: Mapping[str, Any] = {} if error else read_json(e.summary, nan_is_null=True)
    if not error and (changed := _changed(found, log)):
        found, error = {}, changed
    return {
        "name": e.name,
        "status": FAILED if error else OK,
        "error": error,
        "notes": e.notes,
        "started": found.get("started", ""),
        "seconds": found.get("seconds"),
        "settings": e.settings.to_json(),
        "environment": found.get("environment", {}),
        "inputs": found.get("inputs", []),
        "summary": found.get("summary"),
        "samples": "" if error else os.path.relpath(e.samples.resolve(), log.path.parent.resolve()),
        "baseline_from": e.baseline.stem if e.baseline else "",
    }


def _changed(found: Mapping[str, Any], log: SweepLog) -> str:
    """What has changed since another experiment of the log was made from it; empty where nothing has."""
    noted = log.made_from()
    for one in _inputs_of(found, "the summary"):
        made, before = noted.get(one.source, ("", one.digest))
        if before != one.digest:
            return f"{one.source.flag} {one.source.value} has changed since {made} was made from it"
    return ""


# -- the experiments as processes ------------------------------------------------------------

# Imports that start no thread and touch no GPU, so that a fork is clean; one that is not installed is left out.
_PRELOADED = (
    "torch",
    "transformers",
    "sentence_transformers",
    "faiss",
    "vllm",
    "vllm.entrypoints.llm",
)
_TAIL = 2_000  # characters of an experiment's output that go into the log where it failed


def _forkserver(experiments: Sequence[Experiment]) -> ForkServerContext:
    """Forks a process that has imported the libraries which experiments need; the first call decides which."""
    context = multiprocessing.get_context("forkserver")
    preloaded = ["semkv_lab.run"]
    if any(e.settings.engine not in ("scripted", "labels") for e in experiments):
        from semkv_lab.vllm_engine import set_environment

        set_environment()  # what the libraries read when they are loaded
        preloaded += _PRELOADED
    context.set_forkserver_preload(preloaded)
    return context


def run_one(e: Experiment) -> str:
    """Run an experiment on this machine. Returns why it ended without a summary; empty where it has one."""
    if not e.names_a_cache:
        # What another experiment, or a killed try of this one, left would be its hits.
        prepare(replace(e.settings.cache, fusion_cache_dir=None), purge=True)
    e.summary.unlink(missing_ok=True)
    error = _run(e)
    if not error and not e.summary.is_file():
        error = "the process ended before the run did"
    return error


def _run(e: Experiment) -> str:
    """Run it in a process of its own, forked from one that has imported the heavy libraries.

    Returns why that failed; empty where it did not.
    """
    process = _forkserver([e]).Process(
        target=run_apart,
        args=(e,),
        name=e.name,
    )
    process.start()
    try:
        process.join()
    finally:
        # Nothing left, or not yet a group: itself, or what a crash left of its engine.
        with suppress(OSError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()
    if not process.exitcode:
        return ""
    output = e.samples.with_suffix(".log")
    tail = (
        output.read_text(encoding="utf-8", errors="replace")[-_TAIL:].strip()
        if output.exists()
        else ""
    )
    if process.exitcode == 1 and tail:  # it ended by itself
        return tail
    return f"the process ended with exit code {process.exitcode}: {tail}"


def run_apart(experiment: Experiment) -> None:
    """Run it in this process, whose output goes to a file; the summary is left where the settings say.

    It leads a process group, and the group ends when the sweep is gone: a killed sweep that is resumed would meet it in
    the same files.
    """
    from semkv_lab.run import execute

    sweep = multiprocessing.parent_process()
    assert sweep is not None

    def end_with_the_sweep() -> None:
        sweep.join()
        os.killpg(0, signal.SIGKILL)

    os.setsid()
    with experiment.samples.with_suffix(".log").open("wb") as file:
        for number in (1, 2):  # what libraries print below Python goes there, too
            os.dup2(file.fileno(), number)
    threading.Thread(target=end_with_the_sweep, daemon=True).start()
    try:
        if execute(experiment.settings, quiet=True, baseline=experiment.baseline)["interrupted"]:
            sys.exit("interrupted")
    except SemkvError as error:
        sys.exit(str(error))
