"""Sweeps on a real Ray cluster on this machine, one of whose workers is killed.

Ray is in no default installation. To run this file: pip install './packages/lab[ray]'
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from test_sweep import apart, folder, hits, rows, spec

pytest.importorskip("ray", reason="needs Ray: pip install './packages/lab[ray]'")

__all__ = ["folder"]  # a fixture

# Its first caller takes its Ray worker with it. The experiment that it runs in ends with the worker.
KILLING = """
import multiprocessing, os, signal, time
from pathlib import Path
from semkv_lab.samples import Sample


def make(options):
    try:
        Path("killed").touch(exist_ok=False)
    except FileExistsError:
        return [Sample(str(i), f"What is number {i % 20}?", "x") for i in range(40)]
    os.kill(multiprocessing.parent_process().pid, signal.SIGKILL)
    time.sleep(900)
"""


def test_a_lost_worker_costs_a_sweep_nothing(folder: Path) -> None:
    (folder / "owndata.py").write_text(KILLING, encoding="utf-8")
    names = [{"name": "a"}, {"name": "lost", "dataset": str(folder / "gone.jsonl")}]
    spec(folder, names, dataset="owndata:make", baseline=True)
    done = apart(folder, "--ray", "local", python=sys.executable)
    assert done.exit_code == 1, done.stderr
    assert (folder / "killed").exists()
    found = {row["name"]: row for row in rows(folder)}
    assert {name: row["status"] for name, row in found.items()} == {"a": "ok", "lost": "failed"}
    assert "gone.jsonl" in found["lost"]["error"]
    assert found["a"]["summary"]["samples"] == 40
    assert hits(folder, "a") == 20
    assert found["a"]["samples"] == "samples/a.jsonl"
