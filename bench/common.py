"""What the benches share: the machine and its versions, results in one piece."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


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
