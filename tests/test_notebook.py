"""The notebook under examples/ runs, real engines of one sweep share a baseline, and its results go to MLflow."""

from __future__ import annotations

import json
import os
from functools import partialmethod
from pathlib import Path
from threading import Thread

import pytest

from vllm_forks import prepare

nbformat = pytest.importorskip("nbformat", reason="needs Jupyter: pip install 'semkv[dev]'")
mlflow = pytest.importorskip("mlflow", reason="needs MLflow: pip install 'semkv-lab[mlflow]'")

NOTEBOOK = Path(__file__).parents[1] / "examples" / "sweep.ipynb"


@pytest.mark.engine
def test_the_notebook_runs_and_its_results_go_to_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jupyter_client.channels import HBChannel
    from nbclient import NotebookClient

    from semkv_lab.results import to_mlflow

    # A daemon that may wait for ever for a kernel that has ended.
    monkeypatch.setattr(HBChannel, "join", partialmethod(Thread.join, 10), raising=False)
    monkeypatch.setenv("PATH", f"{prepare()}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    start = notebook.cells[1]
    for long, short in (
        ("80, (0.6, 0.75, 0.9)", "24, (0.6, 0.9)"),
        ("Path(tempfile.mkdtemp())", repr(str(tmp_path))),
    ):
        assert long in start.source
        start.source = start.source.replace(long, short if "(" in short else f"Path({short})")
    NotebookClient(notebook, timeout=900).execute()
    said = [
        str(output.get("data", {})) for cell in notebook.cells for output in cell.get("outputs", ())
    ]
    assert any("summary.hit_share.value" in text and "cosine-0.6" in text for text in said)
    assert any("text:semantic" in text and "lookup_s" in text for text in said)
    assert any("image/png" in text for text in said)
    logged = [
        json.loads(line)
        for line in (tmp_path / "sweep.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [(row["status"], row["baseline_from"]) for row in logged] == [
        ("ok", ""),
        ("ok", "cosine-0.6"),
    ]
    samples = [
        (tmp_path / row["samples"]).read_text(encoding="utf-8").splitlines() for row in logged
    ]
    first, second = ([json.loads(line)["cold"] for line in lines] for lines in samples)
    assert first == second, "times and all: measured once"

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlflow").as_uri()
    for _ in range(2):
        assert to_mlflow(tmp_path / "sweep.jsonl", uri=uri) == 2
    client = mlflow.MlflowClient(tracking_uri=uri)
    (place,) = (e.experiment_id for e in client.search_experiments() if e.name == "semkv")
    runs = client.search_runs([place])
    run = next(run for run in runs if run.info.run_name == "cosine-0.6")
    assert (len(runs), run.info.status) == (4, "FINISHED")
    assert run.data.params["cache.similarity_threshold"] == "0.6"
    assert 0 < run.data.metrics["hit_share.value"] < 1
    assert run.data.tags["environment.vllm"]
