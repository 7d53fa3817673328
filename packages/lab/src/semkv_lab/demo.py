"""``semkv demo``: the same questions with vLLM alone, and in two processes on one cache directory, and what changed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from semkv.errors import SemkvError
from semkv_lab.console import make_console, table

_PASSES = ("cold", "warm")


def run_demo(directory: Path, *, samples: int, verbose: bool = False, engine: str = "vllm") -> None:
    """Run both passes and print the comparison.

    Args:
        directory: gets ``cache/``, ``data/``, and per pass ``<pass>.jsonl`` and ``<pass>.json``; the cache in it is
            emptied first.
        samples: how many questions.
        verbose: vLLM's own log, too.
        engine: ``vllm`` or ``scripted``.

    Raises:
        SemkvError: a pass failed; it has said why.
    """
    console = make_console()
    for name in _PASSES:
        cold = name == "cold"
        title = "an empty cache, after a run without semkv" if cold else "a new process: all comes from disk"
        console.rule(f"{name}: {title}")
        _run_pass(directory, name, samples, ["--purge", "--baseline"] if cold else [], verbose=verbose, engine=engine)
    results = {name: _read(directory / f"{name}.json") for name in _PASSES}
    console.print(comparison(results, same_answers(directory)))
    console.print(f"settings and figures: {directory}/cold.json, {directory}/warm.json", highlight=False)
    console.print(f"every sample:         {directory}/cold.jsonl, {directory}/warm.jsonl", highlight=False)
    console.print(f"the cache:            {directory}/cache", highlight=False)


def _run_pass(directory: Path, name: str, samples: int, extra: list[str], *, verbose: bool, engine: str) -> None:
    command = [sys.executable, "-m", "semkv", "run", "--preset", "minigqa", "--engine", engine]
    command += ["--max-samples", str(samples), "--cache-dir", str(directory / "cache")]
    command += ["--data-dir", str(directory / "data"), "--samples-out", str(directory / f"{name}.jsonl")]
    command += ["--summary-out", str(directory / f"{name}.json"), *extra, *(["--verbose"] if verbose else [])]
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise SemkvError(f"the {name} pass of the demo ended with exit code {done.returncode}")


def _read(path: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["summary"]
    return summary


def same_answers(directory: Path) -> tuple[int, int]:
    """How many samples of the warm pass gave the tokens of the cold pass, and how many there were."""
    tokens: list[dict[str, list[int]]] = []
    for name in _PASSES:
        lines = (directory / f"{name}.jsonl").read_bytes().splitlines()  # of bytes: U+2028 ends no line
        rows = [json.loads(line) for line in lines]
        tokens.append({row["sample_id"]: row["token_ids"] for row in rows})
    cold, warm = tokens
    return sum(cold.get(key) == value for key, value in warm.items()), len(warm)


def comparison(results: Mapping[str, Mapping[str, Any]], same: tuple[int, int]) -> Table:
    """Three columns: vLLM alone, semkv with an empty cache, semkv after a restart."""
    cold, warm = results["cold"], results["warm"]
    rows: list[tuple[str, ...]] = []

    def add(name: str, of: Callable[[Mapping[str, Any]], str], alone: str = "") -> None:
        rows.append((name, alone, of(cold), of(warm)))

    def add_times(name: str, kind: str, at: str) -> None:
        add(name, lambda r: _ms(_tier(r, "all")[kind][at]), _ms(cold[f"baseline_{kind}"][at]))

    add("questions", lambda r: str(r["samples"]), str(cold["samples"]))
    add("hits", lambda r: f"{r['hits']} ({r['hit_rate']:.0%})")
    for name in sorted({row["tier"] for r in (cold, warm) for row in r["tiers"]} - {"all", "miss"}):
        add(f"  {name}", lambda r, name=name: str(_tier(r, name)["n"]))  # type: ignore[misc]
    alone = cold["tokens"]
    add(
        "prompt tokens not computed",
        lambda r: _part(r["tokens"]["not_computed"], r["tokens"]["prompt"]),
        _part(alone["baseline_not_computed"], alone["baseline_prompt"]),
    )
    add("  loaded from disk", lambda r: f"{r['tokens']['from_store']:,}")
    add("requests that loaded KV", lambda r: _hits(r, "kv_cache"))
    add("requests that loaded an encoder output", lambda r: _hits(r, "fusion"))
    add_times("latency p50", "latency", "p50_s")
    add_times("latency p95", "latency", "p95_s")
    add("  of it lookup, p50", lambda r: _ms(r["lookup"]["p50_s"]))
    add_times("TTFT p50", "ttft", "p50_s")
    add("accuracy", lambda r: _percent(r["accuracy"]), _percent(cold["baseline_accuracy"]))
    rows.append(("answers with the same tokens as before", "", "", f"{same[0]} of {same[1]}"))
    names = ("", "vLLM alone", "semkv, empty cache", "semkv, new process")
    return table("the same questions three times", names, rows)


def _tier(result: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return next((row for row in result["tiers"] if row["tier"] == name), {"n": 0})


def _hits(result: Mapping[str, Any], tier: str) -> str:
    return str(result["statuses"].get(tier, {}).get("hit", 0))


def _part(count: int, total: int) -> str:
    return f"{count:,} ({count / total:.0%})" if total else "-"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


def _percent(share: Mapping[str, Any] | None) -> str:
    return "-" if share is None or share["value"] is None else f"{share['value']:.1%}"
