"""Sweeps: what a spec may hold, what a row says, and that a killed sweep ends as an unbroken one."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import semkv_lab
from command_line import Result, allow_ctrl_c, invoke
from semkv.errors import ConfigError, DatasetError, SemkvError
from semkv.tiers.policies import FEATURES, Calibration
from semkv_lab.inputs import inputs
from semkv_lab.settings import resolve
from semkv_lab.sweep import SweepLog, locked, read_spec
from vllm_forks import prepare

REPO = Path(__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data set of a few questions, and nothing else."""
    rows = [
        {"id": f"q{i}", "question": f"What is number {i % 150}?", "answer": "x"} for i in range(400)
    ]
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    return tmp_path


def spec(folder: Path, experiments: list[dict[str, Any]], **defaults: Any) -> Path:
    base = {"preset": "opt-125m", "engine": "scripted", "dataset": str(folder / "data.jsonl")}
    document = {
        "defaults": {**base, "disable-semantic-cache": True, **defaults},
        "experiments": experiments,
    }
    path = folder / "spec.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


FORKS = str(prepare() / "python")


def command(folder: Path, *flags: str, python: str = FORKS) -> list[str]:
    run = [python, "-m", "semkv", "sweep", "--specs", str(folder / "spec.json")]
    return [
        *run,
        "--log-file",
        str(folder / "log.csv"),
        "--samples-dir",
        str(folder / "samples"),
        *flags,
    ]


def sweep(folder: Path, *flags: str) -> Result:
    return invoke(command(folder, *flags)[3:])


def apart(folder: Path, *flags: str, python: str = FORKS) -> Result:
    """The same in a process of its own; ``-m`` puts the working directory on the path of the experiments, too."""
    done = subprocess.run(
        command(folder, *flags, python=python),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        cwd=folder,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def hits(folder: Path, name: str = "a") -> int:
    lines = (folder / "samples" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return sum(json.loads(line)["hit"] for line in lines)


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / "log.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("experiment", "words"),
    [
        (
            {"name": "a", "similarity-treshold": 0.5},
            ("experiment a", "similarity-treshold", "similarity-threshold"),
        ),
        (
            {"name": "a", "similarity-threshold": 1.5},
            ("experiment a", "--similarity-threshold", "1.5", "from 0 to 1"),
        ),
        ({"name": "a", "max-samples": [5]}, ("experiment a", "--max-samples", "[5]", "a number")),
        ({"name": "a", "samples-out": "x"}, ("experiment a", "samples_out")),
        ({"name": "../a"}, ("name of experiment 2", "letters")),
        ({"preset": "minigqa"}, ("name of experiment 2", "None")),
        (
            {"name": "a", "max-samples": 1, "max_samples": 2},
            ("experiment a", "max_samples", "given twice"),
        ),
        (
            {"name": "a", "embedding-layer": [], "embedding_layers": []},
            ("experiment a", "given twice"),
        ),
        ({"name": "first"}, ("name of experiment 2", "'first'", "no other")),
    ],
)
def test_a_wrong_spec_names_experiment_key_and_what_is_allowed(
    folder: Path, experiment: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(SemkvError) as caught:
        read_spec(spec(folder, [{"name": "first"}, experiment]))
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("text", ["[]", '{"experiments": []}', '{"runs": []}', '{"a":' * 99_999])
def test_a_file_that_is_no_spec_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(SemkvError, match=r"x\.json"):
        read_spec(tmp_path / "x.json")


def test_the_specs_of_the_repository_are_ones() -> None:
    assert all(read_spec(path) for path in (REPO / "specs").iterdir())


def test_toml_says_the_same_as_json(folder: Path) -> None:
    given = [
        {"name": "a", "similarity_threshold": 0.5, "notes": "half", "embedding-layer": []},
        {"name": "b"},
    ]
    from_json = read_spec(spec(folder, given))
    (folder / "spec.toml").write_text(
        'defaults = {preset = "opt-125m", engine = "scripted", disable-semantic-cache = true, dataset = "%s"}\n'
        '[[experiments]]\nname = "a"\nsimilarity_threshold = 0.5\nnotes = "half"\nembedding-layer = []\n'
        '[[experiments]]\nname = "b"\n' % (folder / "data.jsonl"),
        encoding="utf-8",
    )
    assert read_spec(folder / "spec.toml") == from_json


def test_a_failure_is_a_row_and_the_sweep_goes_on(folder: Path) -> None:
    crash = "import os, sys, time; os.fork() or time.sleep(900)  # it outlives its parent, and holds what that held\n"
    crash += "sys.stderr.write('the end is near'); sys.stderr.flush(); os.kill(os.getpid(), 11)"
    (folder / "crashing.py").write_text(crash, encoding="utf-8")
    crashing = {"embedding-hook": "crashing:Hook", "embedding-layer": ["x:2:0.9"]}
    missing = {"dataset": str(folder / "gone.jsonl")}
    names = [
        {"name": "lost", **missing},
        {"name": "crash", **crashing},
        {"name": "fine", "baseline": True},
    ]
    spec(folder, [*names, {"name": "also-fine", "baseline": True, "cache-mode": "off"}])
    done = apart(folder, python=sys.executable)  # a fork ends with all that it has started
    assert done.exit_code == 1, done.stderr
    found = {row["name"]: row for row in rows(folder)}
    assert "Traceback" not in done.stderr
    assert {name: row["status"] for name, row in found.items()} == {
        "lost": "failed", "crash": "failed", "fine": "ok", "also-fine": "ok",
    }  # fmt: skip
    assert "gone.jsonl" in found["lost"]["error"]
    assert "exit code -11: the end is near" in found["crash"]["error"]
    assert found["fine"]["summary"]["samples"] == 400
    assert found["fine"]["environment"]["python"]
    assert found["fine"]["settings"]["cache"]["exact"] is True
    assert found["also-fine"]["baseline_from"] == "fine"
    assert (
        found["fine"]["summary"]["baseline_accuracy"]
        == found["also-fine"]["summary"]["baseline_accuracy"]
    )
    flat = table(folder)
    assert sorted(row["name"] for row in flat) == sorted(found)
    assert all(
        None not in row and None not in row.values() for row in flat
    )  # as many cells as columns
    assert "--resume" in sweep(folder).stderr
    log = semkv_lab.load(folder / "log.csv").set_index("name")
    assert log.equals(semkv_lab.load(str(folder / "log.jsonl")).set_index("name"))
    assert log["settings.cache.mode"][["fine", "also-fine"]].tolist() == ["live", "off"]
    samples = semkv_lab.load(folder / "samples" / "fine.jsonl")
    assert len(samples) == 400
    assert samples["hit"].mean() == log["summary.hit_share.value"]["fine"]
    assert set(samples["statuses.exact_text"]) == {"hit", "miss"}
    assert samples["latency_s"].dtype == float
    with pytest.raises(DatasetError, match="line 1: name"):
        semkv_lab.load(folder / "data.jsonl")
    with pytest.raises(DatasetError, match="no log of a sweep"):
        semkv_lab.load(folder / "gone.csv")


def test_a_killed_sweep_resumes_to_the_rows_of_an_unbroken_one(folder: Path) -> None:
    names = [f"e{i}" for i in range(5)]
    spec(folder, [{"name": name, "max-samples": 160} for name in names])
    samples = folder / "samples"
    for seen in (folder / "log.lock", samples / "e0.jsonl", samples / "e2.jsonl"):
        while not seen.exists():  # a killed run's lock may be let go a moment later
            with subprocess.Popen(
                command(folder, "--resume"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ) as run:
                _until(lambda seen=seen, run=run: seen.exists() or run.poll() is not None)
                run.kill()
        if (folder / "log.jsonl").exists():
            whole = (folder / "log.jsonl").read_bytes().rpartition(b"\n")[0]
            assert len({json.loads(line)["name"] for line in whole.splitlines()}) == len(
                whole.splitlines()
            )
    last = sweep(folder, "--resume")
    assert last.exit_code == 0, last.stderr
    assert [row["name"] for row in rows(folder)] == names
    assert [row["name"] for row in table(folder)] == names
    assert {row["status"] for row in rows(folder)} == {"ok"}
    for row in rows(folder):
        lines = (folder / row["samples"]).read_text(encoding="utf-8").splitlines()
        assert len({json.loads(line)["sample_id"] for line in lines}) == len(lines) == 160
        assert sum(json.loads(line)["hit"] for line in lines) == 10, (
            "it met what a killed try had left"
        )


CURVE = Calibration("any", 24.0, dict.fromkeys(FEATURES, 0.0), 0.05)
OWN = "from semkv_lab.samples import Sample\n\ndef make(options):\n    return [Sample('1', 'q?', '%s')]\n"


@pytest.mark.parametrize(
    "changed", ["question file", "picture", "own function", "official file", "calibration"]
)
def test_a_sweep_does_not_go_on_over_data_that_has_changed(folder: Path, changed: str) -> None:
    """Neither with the other experiments of its spec, nor with only some of them."""
    rows_of = '{"question": "q?", "answer": "%s", "image": "p.png"}\n'
    (folder / "p.png").write_bytes(b"one picture")
    (folder / "data.jsonl").write_text(rows_of % "a", encoding="utf-8")
    (folder / "owndata.py").write_text(OWN % "a", encoding="utf-8")
    official = folder / "val_balanced_questions.json"
    official.write_text('{"1": {"question": "q?", "answer": "a"}}', encoding="utf-8")
    CURVE.save(folder / "c.json")
    given: dict[str, Any] = {
        "own function": {"dataset": "owndata:make"},
        "official file": {"dataset": "gqa", "dataset-root": str(folder)},
        "calibration": {
            "calibration": str(folder / "c.json"),
            "policy": "calibrated",
            "cache-mode": "off",
        },
    }.get(changed, {})
    spec(folder, [{"name": "a"}, {"name": "b"}], **given)
    assert apart(folder, "--only", "a").exit_code == 0
    before = (folder / "log.jsonl").read_bytes()
    if changed == "question file":
        (folder / "data.jsonl").write_text(rows_of % "b", encoding="utf-8")
    elif changed == "picture":
        (folder / "p.png").write_bytes(b"two picture")
    elif changed == "own function":
        (folder / "owndata.py").write_text(OWN % "b", encoding="utf-8")
        shutil.rmtree(
            folder / "__pycache__", ignore_errors=True
        )  # its source has the old size, and may have the old time
    elif changed == "official file":
        official.write_text('{"1": {"question": "q?", "answer": "b"}}', encoding="utf-8")
    else:
        replace(CURVE, bias=CURVE.bias + 1).save(folder / "c.json")
    for flags in (["--resume"], ["--resume", "--only", "b"]):
        done = apart(folder, *flags)
        assert done.exit_code == 2, flags
        assert "what a in" in done.stderr
        assert "has changed since" in done.stderr
        assert (folder / "log.jsonl").read_bytes() == before, (
            "nothing ran, and nothing is forgotten"
        )


def test_own_code_is_named_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    settings = resolve(
        engine="ownengine:Make", embedding_hook="ownhook:Make", **{"embedding-layer": "x:2:0.9"}
    )
    found = []
    for text in ("1", "2", "1"):
        for name in ("ownengine", "ownhook"):
            (tmp_path / f"{name}.py").write_text(
                text if name == "ownhook" else "", encoding="utf-8"
            )
        found.append({one.source.flag: one.digest for one in inputs(settings, [])})
    assert found[0] == found[2]
    assert [flag for flag in found[0] if found[0][flag] != found[1][flag]] == ["--embedding-hook"]
    assert {"--engine", "--dataset"} < found[0].keys()


def test_data_that_lies_elsewhere_or_was_only_touched_is_the_same(folder: Path) -> None:
    spec(folder, [{"name": "a", "max-samples": 5}, {"name": "b", "max-samples": 5}])
    assert sweep(folder, "--only", "a").exit_code == 0
    (folder / "data.jsonl").touch()
    assert sweep(folder, "--resume").exit_code == 0
    assert {row["name"]: row["status"] for row in rows(folder)} == {"a": "ok", "b": "ok"}
    assert rows(folder)[0]["inputs"] == rows(folder)[1]["inputs"]


def test_data_that_cannot_be_read_any_more_is_named(folder: Path) -> None:
    spec(folder, [{"name": "a", "max-samples": 5}, {"name": "b", "max-samples": 5}])
    assert sweep(folder, "--only", "a").exit_code == 0
    (folder / "data.jsonl").unlink()
    said = sweep(folder, "--resume")
    assert said.exit_code == 2
    assert "which cannot be read" in said.stderr
    assert "data.jsonl: No such file" in said.stderr


def test_data_that_changes_during_a_sweep_fails_the_experiments_behind_it(folder: Path) -> None:
    (folder / "owndata.py").write_text(
        "import pathlib\nfrom semkv_lab.samples import Sample\n\ndef make(options):\n"
        "    file = pathlib.Path('times'); file.write_text(file.read_text() + 'x' if file.exists() else 'x')\n"
        "    return [Sample('1', file.read_text())]\n",
        encoding="utf-8",
    )
    spec(folder, [{"name": "a"}, {"name": "b"}], dataset="owndata:make")
    assert apart(folder).exit_code == 1
    first, second = rows(folder)
    assert (first["status"], second["status"]) == ("ok", "failed")
    assert second["error"] == "--dataset owndata:make has changed since a was made from it"


def test_a_log_that_does_not_note_its_data_is_refused(folder: Path) -> None:
    spec(folder, [{"name": "a", "max-samples": 5}])
    assert sweep(folder).exit_code == 0
    (row,) = rows(folder)
    del row["inputs"]
    (folder / "log.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    assert "begin another log" in sweep(folder, "--resume").stderr


def test_ctrl_c_leaves_a_log_to_go_on_with(folder: Path) -> None:
    spec(folder, [{"name": "short", "max-samples": 5}, {"name": "long", "trace-requests": 200_000}])
    samples = folder / "samples" / "long.jsonl"
    with subprocess.Popen(
        command(folder, python=sys.executable),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=allow_ctrl_c,
    ) as run:
        _until(lambda: samples.exists() and samples.stat().st_size > 0)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=900)
    assert run.returncode == 130, err
    assert "Traceback" not in err
    assert [row["name"] for row in rows(folder) if row["status"] == "ok"] == ["short"]
    assert {row["name"] for row in table(folder)} == {row["name"] for row in rows(folder)}
    size = samples.stat().st_size
    time.sleep(0.5)
    assert samples.stat().st_size == size


def _until(true: Any, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def test_a_damaged_log_is_named_and_another_sweeps_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    log = SweepLog(path, resume=False)
    row = {"name": "a", "status": "ok", "settings": {}}
    with locked(path):
        log.rows = {"a": row}
        log.write()
        with pytest.raises(ConfigError, match="no other sweep"), locked(path):
            pass
    assert SweepLog(path, resume=True).rows == {"a": row}
    assert table(tmp_path)[0]["name"] == "a"
    for text in ("{}\n", "nonsense\n", '{"a":' * 99_999 + "\n"):
        (tmp_path / "log.jsonl").write_text(text)
        with pytest.raises(ConfigError, match=r"--resume.*a log of a sweep"):
            SweepLog(path, resume=True)


def test_a_cache_that_the_spec_names_is_emptied_where_the_user_says_so(folder: Path) -> None:
    names = [{"name": "a"}, {"name": "b"}]
    spec(folder, names, **{"cache-dir": str(folder / "mine"), "max-samples": 160})
    assert sweep(folder).exit_code == 0
    assert [hits(folder, name) for name in "ab"] == [10, 160]
    for lacks in ("a.jsonl", "a.json"):
        other = sweep(folder, "--log-file", str(folder / "other.csv"))
        assert (other.exit_code, f"a folder without {lacks}\n" in other.stderr) == (2, True), (
            "another sweep's stay"
        )
        (folder / "samples" / lacks).unlink()
    for name in ("log.csv", "log.jsonl"):
        (folder / name).unlink()
    shutil.rmtree(folder / "samples")
    assert sweep(folder, "--purge-cache-between-runs").exit_code == 0
    assert [hits(folder, name) for name in "ab"] == [10, 10]


def test_a_sweep_on_ray_says_what_it_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec(folder, [{"name": "a", "cache-dir": str(folder / "mine")}])
    said = sweep(folder, "--ray", "local")
    assert said.exit_code == 2
    assert "experiment a: cache-dir" in said.stderr
    spec(folder, [{"name": "a"}])
    monkeypatch.setitem(sys.modules, "ray", None)
    said = sweep(folder, "--ray", "local")
    assert said.exit_code == 2
    assert "packages/lab[ray]" in said.stderr
    assert "--ray-cpus" in sweep(folder, "--ray", "local", "--ray-cpus", "0").stderr


def test_only_what_was_chosen_and_failed_is_tried_again(folder: Path) -> None:
    gone = {"dataset": str(folder / "gone.jsonl")}
    chosen = [{"name": "fine", "max-samples": 5}, {"name": "f1", **gone}, {"name": "f2", **gone}]
    spec(folder, chosen)
    assert sweep(folder).exit_code == 1
    before = (folder / "log.jsonl").read_bytes()
    sweep(folder, "--resume", "--only", "fine")
    assert (folder / "log.jsonl").read_bytes() == before
    spec(folder, [{"name": "f1", "max-samples": 5}, {"name": "fine", "max-samples": 6}])
    assert "experiment fine" in sweep(folder, "--resume").stderr
    assert (folder / "log.jsonl").read_bytes() == before, "nothing ran, and nothing is forgotten"
    assert sweep(folder, "--resume", "--only", "f1").exit_code == 1  # f2 is still there
    assert {row["name"]: row["status"] for row in rows(folder)} == {
        "fine": "ok",
        "f2": "failed",
        "f1": "ok",
    }
