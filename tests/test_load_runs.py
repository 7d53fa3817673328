"""The load benches' runner: several short calls make one result, and a call that was cut off has lost nothing."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import load_runs
from load_runs import Cell

SETTINGS = {"shape": {"layers": 2}, "budget": "any"}
# An engine's process: measures what it is asked for, but no more than two sizes and not the size of 13.
ENGINE = """
import json, sys
from pathlib import Path
spec = json.loads(sys.argv[2])
rows = []
for size, requests in spec["cells"][:2]:
    if size == 13:
        sys.exit(3)
    rows.append({"size": size, "requests": requests, "median_ms": {"cold": size / spec["repeats"]}})
    Path(spec["part"]).write_text(json.dumps({"facts": {"engine": spec["engine"]}, "rows": rows, "skipped": []}))
"""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    monkeypatch.setattr(sys, "argv", [str(script)])
    parser = argparse.ArgumentParser()
    load_runs.add_arguments(parser, ("a", "b"), str(tmp_path / "out.json"))
    parsed = parser.parse_args(["--engines", "a"])
    parsed.repeats = 2
    return parsed


def call(options: argparse.Namespace, *sizes: int, settings: dict[str, Any] = SETTINGS) -> dict[str, Any]:
    cells = [Cell(size) for size in sizes]
    load_runs.run(options, settings, cells, estimate=lambda engine, cell: 1.0, tables=lambda result: "")
    return json.loads(options.out.read_text()) if options.out.exists() else {}


def sizes(result: dict[str, Any], engine: str = "a") -> list[int]:
    return [row["size"] for row in result["engines"][engine]["rows"]]


def test_calls_add_up_and_newer_rows_take_the_place_of_older(options: argparse.Namespace) -> None:
    assert sizes(call(options, 1, 2, 3)) == [1, 2]
    options.missing = True
    assert sizes(call(options, 1, 2, 3)) == [1, 2, 3]
    options.missing, options.repeats = False, 1
    result = call(options, 3)
    assert [row["median_ms"]["cold"] for row in result["engines"]["a"]["rows"]] == [0.5, 1.0, 3.0]
    options.engines = ["b"]
    result = call(options, 2)
    assert (sizes(result), sizes(result, "b"), result["settings"]) == ([1, 2, 3], [2], SETTINGS)
    assert result["engines"]["b"]["rows"][0]["run"] == {"engine": "b"}
    options.fresh = True
    assert list(call(options, 1)["engines"]) == ["b"]


def test_an_engine_that_fails_keeps_what_it_had(options: argparse.Namespace) -> None:
    result = call(options, 1, 13)
    assert sizes(result) == [1]
    assert result["engines"]["a"]["failure"] == "exit status 3"
    assert not list(options.out.parent.glob("*.part"))
    assert "failure" not in call(options, 2)["engines"]["a"]


def test_a_part_of_a_call_that_was_cut_off_is_taken_over(options: argparse.Namespace) -> None:
    row = {"size": 7, "requests": 16, "median_ms": {}}
    load_runs.part(options.out, "b").write_text(json.dumps({"facts": {}, "rows": [row]}))
    assert load_runs.sizes(load_runs.load(options.out), 16) == [7]  # in a table too
    result = call(options, 1)
    assert (sizes(result), sizes(result, "b")) == ([1], [7])
    assert not list(options.out.parent.glob("*.part"))


def test_other_settings_are_not_mixed(options: argparse.Namespace) -> None:
    call(options, 1)
    with pytest.raises(SystemExit, match="other settings"):
        call(options, 1, settings={"shape": {}})


def test_a_plan_runs_nothing(options: argparse.Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    options.dry_run, options.budget = True, 76
    assert call(options, 1, 2) == {}
    assert "about 77 s, over its budget of 76 s" in capsys.readouterr().out


def test_the_budget_leaves_out_what_comes_last(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM: pip install 'semkv[cpu]'")

    class Slow:
        def measure(self, cell: Cell, repeats: int, in_time: Any) -> dict[str, Any]:
            spec["budget"] = 0  # now it is used up
            return {"median_ms": {"cold": float(in_time())}}

        def facts(self) -> dict[str, Any]:
            return {"done": True}

    spec = {"engine": "a", "cells": [[1, 1], [2, 1]], "repeats": 1, "budget": 1000, "part": str(tmp_path / "part")}
    load_runs.child(spec, lambda spec: Slow())
    found = json.loads((tmp_path / "part").read_text())
    assert [row["median_ms"] for row in found["rows"]] == [{"cold": 0.0}]
    assert found["skipped"] == [[2, 1]]
    assert found["facts"]["done"]


def test_results_of_the_first_form_make_tables_too(tmp_path: Path) -> None:
    import fusion_load

    row = {"side": 256, "prompt_tokens": 88, "median_ms": {"encoder": 22.7, "gpu": 9.1}}
    (tmp_path / "fusion.json").write_text(json.dumps({"settings": {}, "engines": {"plain": {"rows": [row]}}}))
    result = load_runs.load(tmp_path / "fusion.json")
    assert "| 256 x 256 | 88 | 22.7 | 9.1 | - |" in fusion_load.tables(result)
