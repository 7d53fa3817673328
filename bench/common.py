"""What the benches share: places, machine and versions, results in one piece, times, a process of its own."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
SHARED = ROOT.parent / "shared" / "data"


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


def times(act: Callable[[Any], object], values: Iterable[Any]) -> dict[str, float]:
    """Milliseconds of one call per value, by the clock and of the processor (which other work delays less)."""
    taken, worked = [], []
    for value in values:
        start, busy = time.perf_counter(), time.thread_time()
        act(value)
        taken.append(time.perf_counter() - start)
        worked.append(time.thread_time() - busy)
    return quantiles(taken, "") | quantiles(worked, "cpu_")


def quantiles(seconds: Sequence[float], name: str) -> dict[str, float]:
    import numpy as np

    return {f"{name}p{q}_ms": round(1e3 * float(np.percentile(seconds, q)), 4) for q in (50, 99)}


def resident() -> int:
    """Bytes of this process in memory that are no file's (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def alone(script: str, *arguments: str, **environment: str) -> Any:
    """What a script prints as JSON in a process of its own, so that its memory is its own too."""
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    return json.loads(done.stdout.splitlines()[-1])
