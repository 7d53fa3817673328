"""What the benches share: the machine and its versions, results in one piece, work in a process of its own.

A `Child` is this script again in a new process. It takes commands (a line of JSON on its standard input) and answers
each through a pipe. One that does not answer in time, or ends, is stopped with all its children, and the caller gets a
`ChildError` with the end of its log.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
LOG_TAIL = 1500


def machine(*packages: str) -> dict[str, Any]:
    """What times depend on, the load of the moment included."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(names, platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
        "versions": {name: version(name) for name in packages},
    }


def version(package: str) -> str:
    """Empty where it is not installed; vLLM's CPU build has a name of its own."""
    for name in (package, f"{package}-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def write_json(out: Path | None, found: Any) -> None:
    """Write in one piece, so that a run that is cut off leaves what it had; print without ``out``."""
    text = json.dumps(found, indent=1) + "\n"
    if out is None:
        print(text, end="")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    part = out.with_name(f"{out.name}.tmp")
    part.write_text(text, encoding="utf-8")
    part.replace(out)


# ------------------------------------------------------------------ processes


class ChildError(Exception):
    """A process ended, hung or refused; the text says which, and how its log ends."""


class Child:
    """A process, seen from outside.

    Args:
        name: for messages.
        spec: what its `serve` gets.
        log: where its output goes.
        environment: variables that are not set here already.
    """

    def __init__(
        self, name: str, spec: Mapping[str, Any], log: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = log
        self.rest = b""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.answers, write = os.pipe()
        command = [
            sys.executable,
            sys.argv[0],
            "--child",
            json.dumps({**spec, "answer_pipe": write}),
        ]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, pass_fds=[write],
                start_new_session=True, env=ENVIRONMENT | environment | os.environ,
            )  # fmt: skip
        os.close(write)
        atexit.register(self.kill)

    def ask(self, do: str, limit_s: float, **given: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: `answer` says how
            self.process.stdin.write(json.dumps({"do": do, **given}).encode() + b"\n")
            self.process.stdin.flush()
        return self.answer(do, limit_s)

    def answer(self, what: str, limit_s: float) -> dict[str, Any]:
        """The next answer."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self.rest:
            ready, _, _ = select.select([self.answers], [], [], 0.5)
            got = os.read(self.answers, 1 << 20) if ready else b""
            self.rest += got
            if not got and (ready or self.process.poll() is not None):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(5)
                self._fail(f"{what}: the process ended with status {self.process.returncode}")
            if not got and time.monotonic() > deadline:
                self._fail(f"{what}: no answer within {limit_s:.0f} s")
        line, _, self.rest = self.rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            self._fail(f"{what}: {found['error']}")
        return found

    def _fail(self, why: str) -> None:
        self.kill()
        raise ChildError(f"{self.name}: {why}\n{log_tail(self.log)}")

    def close(self, limit_s: float = 60) -> None:
        """Let it end by itself, so that what it has begun to store is stored; then by force."""
        with contextlib.suppress(Exception):
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(limit_s)
        self.kill()

    def kill(self) -> None:
        atexit.unregister(self.kill)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its own children too
        self.process.wait()


def run_child(
    name: str, spec: Mapping[str, Any], log: Path, limit_s: float, environment: Mapping[str, str]
) -> dict[str, Any]:
    """The one answer of a process; ``error`` instead if it fails, hangs or dies."""
    child = Child(name, spec, log, environment)
    try:
        return child.answer("run", limit_s)
    except ChildError as error:
        return {"error": str(error)}
    finally:
        child.kill()


Answer = Callable[[Mapping[str, Any]], None]


def serve(text: str, work: Callable[[dict[str, Any], Answer], None]) -> None:
    """The other side of `Child`: ``work`` gets what was specified, and answers."""
    spec = json.loads(text)
    pipe = os.fdopen(spec.pop("answer_pipe"), "w")

    def answer(found: Mapping[str, Any]) -> None:
        print(json.dumps(found), file=pipe, flush=True)

    try:
        work(spec, answer)
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {str(error)[:400]}"})
        sys.exit(1)


def options_of(
    parser: argparse.ArgumentParser, work: Callable[[dict[str, Any], Answer], None]
) -> argparse.Namespace:
    """The options of a bench: its own, where the result and the logs go. In a `Child`, do the work and end."""
    name = Path(sys.argv[0]).stem.replace("_", "-")
    parser.add_argument("--out", type=Path, default=Path(f"{name}.json"))
    parser.add_argument(
        "--logs", type=Path, help="folder of the engines' logs; beside the result by default"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    options = parser.parse_args()
    if options.child:
        serve(options.child, work)
        sys.exit()
    options.logs = options.logs or options.out.parent / "logs"
    stop_on_signals()
    return options


def log_tail(log: Path) -> str:
    """The last lines that name an error (vLLM's own process says only that another failed), and the log's end."""
    text = log.read_text(errors="replace") if log.exists() else ""
    named = [line for line in text.splitlines() if re.search(r"\w(Error|Exception)\b", line)]
    causes = [line[-300:] for line in named if "core initialization failed" not in line]
    return "\n".join([*dict.fromkeys(causes[-4:]), "...", text[-LOG_TAIL:]])


def stop_on_signals() -> None:
    """A call that is cut off ends its processes: the caller's ``finally`` runs."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))


# ------------------------------------------------------------------ files


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def folder_bytes(folder: Path) -> int:
    total = 0
    for path in files_of(folder):
        with contextlib.suppress(OSError):  # it may go meanwhile
            total += path.stat().st_size
    return total


def wait_until_written(folder: Path, quiet_s: float) -> None:
    """Until a folder's files have not grown for so long."""
    size = -1
    while size != (size := folder_bytes(folder)):
        time.sleep(quiet_s)


def drop_pages(folder: Path) -> None:
    """Have the files read from the disk again: written back, then out of the page cache."""
    os.sync()
    for path in files_of(folder):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
