"""``semkv demo``: the same questions with vLLM alone, and in two processes on one cache directory, and what changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from semkv.errors import SemkvError
from semkv_lab.console import figures, make_console, table

_PASSES = {
    "cold": ("an empty cache, after a run without semkv", ["--purge", "--baseline"]),
    "warm": ("a new process: all comes from disk", []),
}


_COMPARED = (
    *("hits", "not computed", "  loaded from the KV store", "vLLM's prefix cache alone", "latency p50 / p95"),
    *("lookup p50 / p95", "cold: latency p50 / p95", "accuracy", "cold: accuracy", "kv_cache", "fusion"),
)


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
    cold, warm = (
        dict(figures(json.loads((directory / f"{name}.json").read_text(encoding="utf-8"))["summary"]))
        for name in _PASSES
    )
    same, asked = same_answers(directory)
    rows = [(name, cold.get(name, ""), warm.get(name, "")) for name in _COMPARED]
    rows.append(("answers with the same tokens as before", "", f"{same} of {asked}"))
    title = "the same questions again; rows that say cold, or alone, are vLLM without semkv"
    console.print(table(title, ("", "empty cache", "new process"), rows))
    console.print(f"settings, figures, samples and the cache: {directory}", highlight=False)


def same_answers(directory: Path) -> tuple[int, int]:
    """How many samples of the warm pass gave the tokens of the cold pass, and how many there were."""
    tokens: list[dict[str, list[int]]] = []
    for name in _PASSES:
        lines = (directory / f"{name}.jsonl").read_bytes().splitlines()  # of bytes: U+2028 ends no line
        tokens.append({row["sample_id"]: row["token_ids"] for row in map(json.loads, lines)})
    cold, warm = tokens
    return sum(cold.get(key) == value for key, value in warm.items()), len(warm)
