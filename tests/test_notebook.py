"""The notebook under examples/ runs, and real engines of one sweep share a baseline."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from vllm_forks import prepare

nbformat = pytest.importorskip("nbformat", reason="needs Jupyter: pip install 'semkv[dev]'")

NOTEBOOK = Path(__file__).parents[1] / "examples" / "sweep.ipynb"


@pytest.mark.engine
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient import NotebookClient

    monkeypatch.setenv("PATH", f"{prepare()}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    start = notebook.cells[1]
    for long, short in (("80, (0.6, 0.75, 0.9)", "24, (0.6, 0.9)"), ("Path(tempfile.mkdtemp())", repr(str(tmp_path)))):
        assert long in start.source
        start.source = start.source.replace(long, short if "(" in short else f"Path({short})")
    NotebookClient(notebook, timeout=900).execute()
    said = [str(output.get("data", {})) for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("summary.hit_share.value" in text and "cosine-0.6" in text for text in said)
    assert any("text:semantic" in text and "lookup_s" in text for text in said)
    assert any("image/png" in text for text in said)
    logged = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["status"], row["baseline_from"]) for row in logged] == [("ok", ""), ("ok", "cosine-0.6")]
    samples = [(tmp_path / row["samples"]).read_text(encoding="utf-8").splitlines() for row in logged]
    first, second = ([json.loads(line)["cold"] for line in lines] for lines in samples)
    assert first == second, "times and all: measured once"
