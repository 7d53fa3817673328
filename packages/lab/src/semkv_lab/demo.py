"""``semkv demo``: the same questions with vLLM alone, and in two processes on one cache directory, and what changed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semkv.errors import SemkvError
from semkv_lab.report import make_console

if TYPE_CHECKING:
    from rich.table import Table

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
    from rich.table import Table

    cold, warm = results["cold"], results["warm"]
    table = Table(title="the same questions three times", title_justify="left", title_style="bold")
    for name in ("", "vLLM alone", "semkv, empty cache", "semkv, new process"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for row in _rows(cold, warm):
        table.add_row(*row)
    table.add_row("answers with the same tokens as before", "", "", f"{same[0]} of {same[1]}")
    return table


def _rows(cold: Mapping[str, Any], warm: Mapping[str, Any]) -> list[tuple[str, ...]]:
    both = (cold, warm)
    names = sorted({row["tier"] for result in both for row in result["tiers"]} - {"all", "miss"})
    rows: list[tuple[str, ...]] = [("questions", str(cold["samples"]), str(cold["samples"]), str(warm["samples"]))]
    rows.append(("hits", "", *(f"{r['hits']} ({r['hit_rate']:.0%})" for r in both)))
    rows += [(f"  {name}", "", *(_tier_count(r, name) for r in both)) for name in names]
    base = cold["tokens"]
    alone = base["baseline_not_computed"], base["baseline_prompt"]
    rows.append(("prompt tokens not computed", _part(*alone), *(_part(*_not_computed(r)) for r in both)))
    rows.append(("  loaded from disk", "", *(f"{r['tokens']['from_store']:,}" for r in both)))
    for key, name in (("kv_cache", "requests that loaded KV"), ("fusion", "requests that loaded an encoder output")):
        rows.append((name, "", *(str(r["statuses"].get(key, {}).get("hit", 0)) for r in both)))
    rows.append(
        ("latency p50", _ms(cold["baseline_latency"]["p50_s"]), *(_ms(_all(r)["latency"]["p50_s"]) for r in both))
    )
    rows.append(
        ("latency p95", _ms(cold["baseline_latency"]["p95_s"]), *(_ms(_all(r)["latency"]["p95_s"]) for r in both))
    )
    rows.append(("  of it lookup, p50", "", *(_ms(r["lookup"]["p50_s"]) for r in both)))
    rows.append(("TTFT p50", _ms(cold["baseline_ttft"]["p50_s"]), *(_ms(_all(r)["ttft"]["p50_s"]) for r in both)))
    rows.append(("accuracy", _percent(cold["baseline_accuracy"]), *(_percent(r["accuracy"]) for r in both)))
    return rows


def _all(result: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = next(row for row in result["tiers"] if row["tier"] == "all")
    return row


def _tier_count(result: Mapping[str, Any], name: str) -> str:
    return str(next((row["n"] for row in result["tiers"] if row["tier"] == name), 0))


def _not_computed(result: Mapping[str, Any]) -> tuple[int, int]:
    return result["tokens"]["not_computed"], result["tokens"]["prompt"]


def _part(count: int, total: int) -> str:
    return f"{count:,} ({count / total:.0%})" if total else "-"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


def _percent(share: Mapping[str, Any] | None) -> str:
    return "-" if share is None or share["value"] is None else f"{share['value']:.1%}"
