"""The demo, as `make demo` runs it: real vLLM, the bundled model, two processes on one cache directory."""

from __future__ import annotations

import io
import json
import os
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from lab_helpers import record
from semkv_lab.metrics import summarise
from semkv_lab.run import comparison
from semkv_lab.samples import Cold
from vllm_forks import prepare

SAMPLES = 24


def test_the_comparison_has_a_column_for_vllm_alone() -> None:
    cold = [Cold("a", "red", True, 0.05, 0.09, 10, 4), Cold("b", "blue", False, 0.05, 0.09, 10, 4)]
    records = [
        record(cached_tokens=6, cold=cold[0]),
        record(image="b", cached_tokens=6, cold=cold[1]),
    ]
    first, second = summarise(records, cold), summarise([record(cached_tokens=9)])
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(comparison(first, second, (1, 1)))
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in console.export_text().splitlines()
    ]
    rows = {row[0]: row[1:] for row in cells if row}
    assert rows["not computed"] == ["8 (40.0%)", "12 (60.0%)", "9 (90.0%)"]
    assert rows["latency p50 / p95"][0] == "50.0 ms / 50.0 ms"
    assert rows["accuracy"] == ["50.0%", "100.0%", "100.0%"]
    assert rows["answers with the tokens of before"] == ["", "", "1 of 1"]


@pytest.mark.engine
def test_the_demo_finds_on_disk_what_it_left(tmp_path: Path) -> None:
    command = [
        prepare() / "python",
        "-m",
        "semkv",
        "demo",
        "--dir",
        str(tmp_path),
        "--samples",
        str(SAMPLES),
    ]
    out = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "160"}
    )
    assert out.returncode == 0, out.stderr[-2000:]
    assert "Traceback" not in out.stderr
    lines = [line for line in out.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == 2 * SAMPLES
    assert "vLLM only" in out.stdout
    assert all(
        " | latency=" in line and "kv_cache=" in line and "fusion=" in line for line in lines
    )
    assert (
        f"{SAMPLES} of {SAMPLES}" in out.stdout
    )  # the warm pass answered every question with the same tokens

    cold, warm = (
        json.loads((tmp_path / f"{n}.json").read_text(encoding="utf-8"))["summary"]
        for n in ("cold", "warm")
    )
    assert cold["baseline_accuracy"]["value"] > 0.8  # the model answers
    assert cold["tokens"]["from_store"] == 0  # nothing was there
    assert cold["against_cold"]["identical_tokens"]["value"] == 1.0
    assert warm["hits"] == SAMPLES
    assert warm["tokens"]["from_store"] > 0
    assert warm["statuses"]["kv_cache"]["hit"] > 0
    assert warm["statuses"]["fusion"]["hit"] > 0
    assert warm["faults"] == {}
