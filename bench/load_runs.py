"""What the load benches share: an engine in a process of its own, a budget of time for each, parts that add up.

A run measures some engines at some sizes and adds what it found to the result file, so that several short calls make
one table. Each finished size is on disk at once, in a file beside the result (``<out>.<engine>.part``): a call that was
cut off has lost nothing, and the next one takes its part over.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

START_S = 75  # of an engine on a GPU, compilation included, roughly
GRACE_S = 60  # beyond its budget an engine may take so long to end
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Cell:
    """What is measured at a time: ``requests`` at once of this size (tokens of a prompt, or pixels of a side)."""

    size: int
    requests: int = 1


class Bench(Protocol):
    """One engine in this process."""

    def measure(self, cell: Cell, repeats: int, in_time: Callable[[], bool]) -> dict[str, Any]:
        """Medians by level; stops after a repetition where ``in_time`` says so."""
        ...

    def facts(self) -> dict[str, Any]:
        """What belongs to the engine as a whole; asked at the end."""
        ...


def whole_numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser, engines: Sequence[str], out: str) -> None:
    """The lines that both benches have."""

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := set(chosen) - set(engines):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose from {', '.join(engines)}")
        return chosen

    parser.add_argument("--engines", type=names, default=list(engines), help=f"of {','.join(engines)}")
    parser.add_argument("--budget", type=int, default=600, help="seconds for each engine, its start included")
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--missing", action="store_true", help="leave out what the result file has already")
    parser.add_argument("--fresh", action="store_true", help="forget what the result file has")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU, to see that all of it runs")
    parser.add_argument("--dry-run", action="store_true", help="print the plan with rough times")
    parser.add_argument("--table", type=Path, help="print the tables of a result instead")
    parser.add_argument("--child", help=argparse.SUPPRESS)


# ------------------------------------------------------------------ the engine's process


def child(spec: Mapping[str, Any], make: Callable[[Mapping[str, Any]], Bench]) -> None:
    """Measure one engine's cells until its budget is used up; every finished one is on disk."""
    import torch
    import vllm

    start, out = time.perf_counter(), Path(spec["part"])
    found: dict[str, Any] = {"facts": {"vllm": vllm.__version__, "torch": torch.__version__}, "rows": [], "skipped": []}
    facts = found["facts"]
    facts |= {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
    facts["device"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"

    def in_time() -> bool:
        return time.perf_counter() - start < spec["budget"]

    def write() -> None:
        temporary = out.with_name(out.name + ".tmp")
        temporary.write_text(json.dumps(found))
        temporary.replace(out)

    bench = make(spec)
    facts["start_s"] = round(time.perf_counter() - start, 1)
    for size, requests in spec["cells"]:
        if not in_time():
            found["skipped"].append([size, requests])
            continue
        row = bench.measure(Cell(size, requests), spec["repeats"], in_time)
        found["rows"].append(row | {"size": size, "requests": requests, "load_average": os.getloadavg()})
        print(spec["engine"], size, requests, row["median_ms"], flush=True)
        write()
    facts |= bench.facts()
    write()


# ------------------------------------------------------------------ the calling process


def run(
    options: argparse.Namespace,
    settings: Mapping[str, Any],
    cells: Sequence[Cell],
    *,
    estimate: Callable[[str, Cell], float],
    tables: Callable[[Mapping[str, Any]], str],
    environment: Mapping[str, str] = ENVIRONMENT,
    place: Mapping[str, Any] | None = None,
) -> None:
    """Measure the engines one after the other and print the tables.

    Args:
        options: of `add_arguments`, and ``repeats``.
        settings: what shapes the figures; results of others are not added to.
        cells: what each engine is asked for.
        estimate: seconds that a cell takes, roughly.
        place: more for the engine's process to know, that shapes no figure.
    """
    if options.table:
        print(tables(load(options.table)))
        return
    result = {"settings": dict(settings), "engines": {}} if options.fresh else load(options.out, settings)
    for engine in options.engines:
        mine = [cell for cell in cells if not (options.missing and has(result, engine, cell))]
        seconds = [estimate(engine, cell) for cell in mine]
        if options.dry_run:
            print_plan(engine, mine, seconds, options.budget)
        elif mine:
            measure(engine, mine, options, dict(settings) | dict(place or {}), environment)
            result = load(options.out, settings, result)
            save(options.out, result)
    if not options.dry_run:
        print(tables(result))


def measure(
    engine: str,
    cells: Sequence[Cell],
    options: argparse.Namespace,
    given: Mapping[str, Any],
    environment: Mapping[str, str],
) -> None:
    """Run one engine in a process of its own; what it found is in its part."""
    out = part(options.out, engine)
    out.parent.mkdir(parents=True, exist_ok=True)
    spec = dict(given) | {
        "engine": engine, "cells": [[cell.size, cell.requests] for cell in cells], "repeats": options.repeats,
        "budget": options.budget, "part": str(out.resolve()),
    }  # fmt: skip
    command = [sys.executable, sys.argv[0], "--child", json.dumps(spec)]
    failure = ""
    try:
        done = subprocess.run(
            command, env=dict(environment) | os.environ, timeout=options.budget + GRACE_S, check=False
        )
        failure = f"exit status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"more than {options.budget + GRACE_S} s"
    if failure:
        found = json.loads(out.read_text()) if out.exists() else {"facts": {}, "rows": []}
        out.write_text(json.dumps(found | {"failure": failure}))


def part(out: Path, engine: str) -> Path:
    return out.with_name(f"{out.name}.{engine}.part")


def load(out: Path, settings: Mapping[str, Any] | None = None, result: dict[str, Any] | None = None) -> dict[str, Any]:
    """A result file with the parts beside it taken over.

    Args:
        settings: refuse a file of others; None takes any.
        result: add to this instead of the file.
    """
    if result is None:
        result = json.loads(out.read_text()) if out.exists() else {"settings": dict(settings or {}), "engines": {}}
    for engine in result["engines"].values():
        facts = {key: value for key, value in engine.items() if key != "rows"}
        for row in engine.get("rows", []):  # of the first form of these files
            row.setdefault("size", row.get("tokens", row.get("side")))
            row.setdefault("requests", 1)
            row.setdefault("run", facts)
    if settings is not None and result["settings"] != json.loads(json.dumps(dict(settings))):
        sys.exit(f"{out} holds results of other settings ({result['settings']}): use --fresh or another --out")
    for file in sorted(out.parent.glob(f"{out.name}.*.part")):
        add(result, file.name.removeprefix(f"{out.name}.").removesuffix(".part"), json.loads(file.read_text()))
    return result


def add(result: dict[str, Any], engine: str, found: Mapping[str, Any]) -> None:
    """A row takes the place of an older one of its size; each keeps the facts of the run that it comes from."""
    mine = result["engines"].setdefault(engine, {"rows": []})
    new = {(row["size"], row["requests"]): row | {"run": found["facts"]} for row in found["rows"]}
    kept = [row for row in mine["rows"] if (row["size"], row["requests"]) not in new]
    mine["rows"] = sorted([*kept, *new.values()], key=lambda row: (row["requests"], row["size"]))
    for key in ("failure", "skipped"):
        mine.pop(key, None)
        if found.get(key):
            mine[key] = found[key]


def save(out: Path, result: Mapping[str, Any]) -> None:
    """Write the file; its parts are in it now."""
    temporary = out.with_name(out.name + ".tmp")
    temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    temporary.replace(out)
    for file in out.parent.glob(f"{out.name}.*.part"):
        file.unlink()


def has(result: Mapping[str, Any], engine: str, cell: Cell) -> bool:
    rows = result["engines"].get(engine, {}).get("rows", [])
    return any((row["size"], row["requests"]) == (cell.size, cell.requests) for row in rows)


def print_plan(engine: str, cells: Sequence[Cell], seconds: Sequence[float], budget: int) -> None:
    total = START_S + sum(seconds)
    late = "" if total <= budget else f", over its budget of {budget} s: the last ones are left out"
    print(f"{engine}: about {total:.0f} s{late}")
    for cell, each in zip(cells, seconds, strict=True):
        print(f"    {cell.requests} x {cell.size}: {each:.0f} s")


def cell_of(result: Mapping[str, Any], engine: str, size: int, requests: int) -> dict[str, Any]:
    """One row of a result; empty where it was not measured."""
    rows = result["engines"].get(engine, {}).get("rows", [])
    return next((row for row in rows if (row["size"], row["requests"]) == (size, requests)), {})


def sizes(result: Mapping[str, Any], requests: int) -> list[int]:
    rows = [row for engine in result["engines"].values() for row in engine.get("rows", [])]
    return sorted({row["size"] for row in rows if row["requests"] == requests})


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
