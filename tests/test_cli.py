"""The command line, as a user meets it: in a process of its own where that matters."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import Result, allow_ctrl_c, invoke, read_lines, write_questions
from semkv import __version__

FLAGS = (
    "--preset --model --dataset --dataset-root --dataset-config --split --max-samples --shuffle-seed --chunk-source "
    "--chunk-window --similarity-threshold --embedding-layer --embedding-hook --vision-encoder --index-encoder "
    "--disable-semantic-cache --disable-exact-cache --disable-normalised-hits --enable-fusion-cache "
    "--disable-fusion-cache --max-cached-blocks --cache-dir --fusion-cache-dir --cache-mode --match --scope --tenant "
    "--max-entries --media-mib --max-tokens --baseline --purge --samples-out --summary-out --trust-remote-code --quiet "
    "--verbose"
)


def semkv(*arguments: str) -> subprocess.CompletedProcess[str]:
    command, environment = (
        [sys.executable, "-m", "semkv", *arguments],
        {**os.environ, "COLUMNS": "160"},
    )
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    questions = (
        "What is the capital of France?",
        "what is the  capital of France?",
        "Who wrote Faust?",
    )
    return write_questions(tmp_path / "prompts.jsonl", *questions)


def run_arguments(tmp_path: Path, prompts: Path) -> list[str]:
    return [
        "run", "--preset", "opt-125m", "--engine", "scripted", "--dataset", str(prompts),
        "--cache-dir", str(tmp_path / "cache"), "--disable-semantic-cache",
    ]  # fmt: skip


def test_help_lists_every_flag() -> None:
    text = invoke(["run", "--help"], columns=200).output
    assert [flag for flag in FLAGS.split() if flag not in text] == []
    assert "Examples:" in text
    summaries = invoke(["--help"], columns=80).output
    assert "…" not in summaries
    assert "..." not in summaries
    assert semkv("--version").stdout == f"semkv {__version__}\n"


def test_without_the_lab_its_commands_say_how_to_get_it() -> None:
    hidden = "import sys; sys.modules['semkv_lab'] = None; from semkv.cli import main; main()"
    out = subprocess.run(
        [sys.executable, "-c", hidden, "run", "--max-samples", "4"], capture_output=True, text=True
    )
    assert (out.returncode, out.stdout) == (2, "")
    assert out.stderr == (
        "semkv: semkv run is part of semkv-lab, which is not installed: from the repository, "
        "pip install ./packages/lab\n"
    )
    text = subprocess.run(
        [sys.executable, "-c", hidden, "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert {"serve", "run", "demo", "sweep", "report", "eval-pairs"} <= {
        line.split()[1] for line in text.splitlines() if line.startswith("│ ")
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "--preset gpt-9",
            "--preset: 'gpt-9' is not allowed; expected one of internvl3.5-2b, minigqa, opt-125m",
        ),
        (
            "--similarity-threshold 1.5",
            "--similarity-threshold: 1.5 is not allowed; expected a number from 0 to 1",
        ),
        ("--cache-mode maybe", "expected 'off', 'dry-run' or 'live'"),
        ("--model /no/such/model", "model '/no/such/model' is not a directory"),
        # No data set is looked for before the model is there: this one would be a download.
        (
            "--model nobody/no-such-model",
            "copy the cache here (HF_HOME), or give its directory with --model",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, arguments: str, expected: str
) -> None:
    usual = ["run", "--dataset", "gqa", "--disable-semantic-cache", "--cache-dir", str(tmp_path)]
    out = invoke([*usual, *arguments.split()])
    assert (out.exit_code, out.stdout) == (2, "")
    assert len(out.stderr.splitlines()) == 1
    assert out.stderr.startswith("semkv: ")
    assert expected in out.stderr


def test_a_run_prints_and_writes(tmp_path: Path, prompts: Path) -> None:
    files = ["--samples-out", str(tmp_path / "s.jsonl"), "--summary-out", str(tmp_path / "s.json")]
    out = invoke([*run_arguments(tmp_path, prompts), "--baseline", *files])
    assert out.exit_code == 0, out.stderr
    lines = [line for line in out.stdout.splitlines() if line.startswith("[")]
    tiers = "exact_text={}, semantic_text=skip, kv_cache=skip, fusion=skip"
    assert [re.sub(r"latency=\d+\.\d{3}s", "latency=T", line) for line in lines] == [
        "[0] miss | latency=T | answer match=False | " + tiers.format("miss"),
        "[1] hit (text:normalised) | latency=T | answer match=False | " + tiers.format("hit"),
        "[2] miss | latency=T | answer match=False | " + tiers.format("miss"),
    ]
    assert "saved beyond it" in out.stdout
    assert [row["provenance"] for row in read_lines(tmp_path / "s.jsonl")] == [
        "",
        "text:normalised",
        "",
    ]
    summary = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert summary["summary"]["hits"] == 1
    assert summary["settings"]["dataset"] == str(prompts)


def test_a_second_process_finds_what_the_first_one_left(tmp_path: Path, prompts: Path) -> None:
    def hits(output: str) -> list[str]:
        return re.findall(r"\] (hit \(.*?\)|miss) ", output)

    arguments, normalised = run_arguments(tmp_path, prompts), "hit (text:normalised)"
    first = semkv(*arguments)
    assert (first.returncode, hits(first.stdout)) == (0, ["miss", normalised, "miss"]), first.stderr
    exact = hits(invoke([*arguments, "--disable-normalised-hits"]).stdout)
    assert exact == ["hit (text:exact)", "miss", "hit (text:exact)"]
    for anew in (["--tenant", "other"], ["--purge"]):
        assert hits(invoke([*arguments, *anew]).stdout) == ["miss", normalised, "miss"]


class Hook:
    dims, fingerprint = {"prompt": 8}, "h"

    def __init__(self, config: Any) -> None: ...

    def __call__(self, request: Any) -> dict[str, np.ndarray]:
        return {"prompt": np.ones(8, np.float32)}


def test_a_hook_of_the_users_own_and_its_dimension(tmp_path: Path, prompts: Path) -> None:
    def run(hook: str, layer: str) -> Result:
        arguments = [*run_arguments(tmp_path, prompts), "--embedding-hook", f"{__name__}:{hook}"]
        return invoke([*arguments, "--embedding-layer", layer])

    fits, wrong, unknown = (
        run("Hook", "prompt:8:0.9"),
        run("Hook", "prompt:9:0.9"),
        run("Gone", "prompt:8"),
    )
    assert fits.exit_code == 0, fits.stderr
    assert "embedding:prompt=" in fits.stdout
    assert (wrong.exit_code, unknown.exit_code) == (2, 2)
    assert "--embedding-layer: 'prompt:9' is not allowed; expected prompt:8" in wrong.stderr
    assert f"--embedding-hook: '{__name__}:Gone' is not allowed" in unknown.stderr


def test_ctrl_c_ends_with_a_summary(tmp_path: Path) -> None:
    path, samples = (
        write_questions(tmp_path / "many.jsonl", *map(str, range(100_000))),
        tmp_path / "s.jsonl",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "semkv", *run_arguments(tmp_path, path), "--samples-out", str(samples), "--quiet"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=allow_ctrl_c,
    )  # fmt: skip
    while process.poll() is None and (not samples.exists() or samples.stat().st_size < 10_000):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert "interrupted" in out
    assert f"{len(read_lines(samples))} samples answered so far" in out
    assert "Traceback" not in err
