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
from semkv_lab.console import make_console, part, seconds, table
from semkv_lab.records import at

_PASSES: Mapping[str, tuple[str, list[str]]] = {
    "cold": ("an empty cache, after a run without semkv", ["--purge", "--baseline"]),
    "warm": ("a new process: all comes from disk", []),
}


def run_demo(directory: Path, *, samples: int, verbose: bool = False) -> None:
    """Run both passes and print the comparison. The folder gets ``cache/``, which is emptied first, ``data/``, and per
    pass ``<pass>.jsonl`` and ``<pass>.json``.
    """
    console = make_console()
    for name, (title, extra) in _PASSES.items():
        console.rule(f"{name}: {title}")
        command = [sys.executable, "-m", "semkv", "run", "--preset", "minigqa", "--max-samples", str(samples)]
        command += ["--cache-dir", str(directory / "cache"), "--data-dir", str(directory / "data")]
        command += ["--samples-out", str(directory / f"{name}.jsonl"), "--summary-out", str(directory / f"{name}.json")]
        done = subprocess.run([*command, *extra, *(["--verbose"] if verbose else [])], check=False)
        if done.returncode:
            raise SemkvError(f"the {name} pass of the demo ended with exit code {done.returncode}")
    cold, warm = (json.loads((directory / f"{n}.json").read_text(encoding="utf-8"))["summary"] for n in _PASSES)
    console.print(comparison(cold, warm, same_answers(directory)))
    console.print(f"settings and figures: {directory}/cold.json, {directory}/warm.json", highlight=False)
    console.print(f"every sample:         {directory}/cold.jsonl, {directory}/warm.jsonl", highlight=False)
    console.print(f"the cache:            {directory}/cache", highlight=False)


def same_answers(directory: Path) -> tuple[int, int]:
    """How many samples of the warm pass gave the tokens of the cold pass, and how many there were."""
    tokens: list[dict[str, list[int]]] = []
    for name in _PASSES:
        lines = (directory / f"{name}.jsonl").read_bytes().splitlines()  # of bytes: U+2028 ends no line
        tokens.append({row["sample_id"]: row["token_ids"] for row in map(json.loads, lines)})
    cold, warm = tokens
    return sum(cold.get(key) == value for key, value in warm.items()), len(warm)


def comparison(cold: Mapping[str, Any], warm: Mapping[str, Any], same: tuple[int, int]) -> Table:
    """Three columns: vLLM alone, semkv with an empty cache, semkv after a restart; of two summaries as JSON."""
    rows: list[tuple[str, ...]] = []

    def add(name: str, of: Callable[[Mapping[str, Any]], str], alone: str = "") -> None:
        rows.append((name, alone, of(cold), of(warm)))

    def tier(summary: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        return next((row for row in summary["tiers"] if row["tier"] == name), {"n": 0})

    def hits(summary: Mapping[str, Any], tier: str) -> str:
        return str(at(summary, "statuses", tier, "hit") or 0)

    def saved(count: int, total: int) -> str:
        return f"{count:,} ({part(count, total)})"

    def add_times(name: str, kind: str, quantile: str) -> None:
        add(name, lambda s: seconds(tier(s, "all")[kind][quantile]), seconds(cold[f"baseline_{kind}"][quantile]))

    add("questions", lambda s: str(s["samples"]), str(cold["samples"]))
    add("hits", lambda s: f"{s['hits']} ({s['hit_rate']:.0%})")
    for name in sorted({row["tier"] for s in (cold, warm) for row in s["tiers"]} - {"all", "miss"}):
        add(f"  {name}", lambda s, name=name: str(tier(s, name)["n"]))  # type: ignore[misc]
    alone = saved(cold["tokens"]["baseline_not_computed"], cold["tokens"]["baseline_prompt"])
    add("prompt tokens not computed", lambda s: saved(s["tokens"]["not_computed"], s["tokens"]["prompt"]), alone)
    add("  loaded from disk", lambda s: f"{s['tokens']['from_store']:,}")
    add("requests that loaded KV", lambda s: hits(s, "kv_cache"))
    add("requests that loaded an encoder output", lambda s: hits(s, "fusion"))
    add_times("latency p50", "latency", "p50_s")
    add_times("latency p95", "latency", "p95_s")
    add("  of it lookup, p50", lambda s: seconds(s["lookup"]["p50_s"]))
    add_times("TTFT p50", "ttft", "p50_s")
    add("accuracy", lambda s: _percent(s["accuracy"]), _percent(cold["baseline_accuracy"]))
    rows.append(("answers with the same tokens as before", "", "", f"{same[0]} of {same[1]}"))
    return table("the same questions three times", ("", "vLLM alone", "semkv, empty cache", "semkv, new process"), rows)


def _percent(share: Mapping[str, Any] | None) -> str:
    return "-" if share is None or share["value"] is None else f"{share['value']:.1%}"
