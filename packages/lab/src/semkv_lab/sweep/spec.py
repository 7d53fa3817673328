"""What a sweep runs, read from JSON or TOML and checked as a whole before anything starts.

    {"defaults": {"preset": "minigqa", "max-samples": 128},
     "experiments": [{"name": "exact-only", "disable-semantic-cache": true, "notes": "the floor"}, ...]}

A key is a flag of ``semkv run``, with ``-`` or ``_``; an experiment's own key wins over the default.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semkv.errors import ConfigError
from semkv_lab.settings import RunSettings, is_unicode, resolve

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,99}")
_OURS = ("samples_out", "summary_out", "purge", "baseline_from")  # the sweep's own business


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
    document = _parse(path)
    unknown = sorted(set(document) - {"defaults", "experiments"})
    if unknown:
        raise ConfigError(f"--specs {path.name}", unknown[0], ["defaults", "experiments"])
    defaults, rows = document.get("defaults", {}), document.get("experiments")
    if not isinstance(defaults, dict):
        raise ConfigError(f"{path.name}: defaults", defaults, "an object of flags")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path.name}: experiments", type(rows).__name__, "a list with at least one object")
    experiments: list[Experiment] = []
    for number, row in enumerate(rows, 1):
        name = row.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            allowed = "up to 100 letters, digits and . _ = + -, beginning with a letter or digit"
            raise ConfigError(f"{path.name}: name of experiment {number}", name, allowed)
        if name in {e.name for e in experiments}:
            raise ConfigError(f"{path.name}: name of experiment {number}", name, "a name that no other experiment has")
        experiments.append(_experiment(name, {**defaults, **row}))
    return experiments


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        document = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError("--specs", str(path), f"a file that can be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("--specs", str(path), f"valid JSON, or TOML in a file named .toml ({error})") from error
    if not isinstance(document, dict):
        raise ConfigError("--specs", str(path), "an object with defaults and experiments")
    return document


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
