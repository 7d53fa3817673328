"""The benches' engines: a process that hangs, dies or refuses is a row with its reason, and never ends the bench."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import invoke
from semkv_lab import conformance
from vllm_forks import prepare

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import identity
import kv
from common import Child, ChildError, run_child

# A child: starts, then does what it is told.
CHILD = f"""
import json, os, sys, time
sys.path.insert(0, {str(Path(kv.__file__).parent)!r})
import common
def work(spec, answer):
    if spec["engine"] == "refuses":
        raise ValueError("no such device")
    answer({{"start_s": spec.get("answers", 1)}})
    for line in sys.stdin:
        do = json.loads(line)["do"]
        if do == "die":
            os._exit(7)
        if do == "hang":
            time.sleep(600)
        answer({{"did": do}})
common.serve(sys.argv[2], work)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(sys, "argv", [str(script)])
    return lambda name: Child(name, {"engine": name}, tmp_path / f"{name}.log", {})


@pytest.mark.parametrize(
    ("do", "limit", "why"),
    [("die", 60, "ended with status 7"), ("hang", 1, "no answer within 1 s")],
)
def test_a_process_that_does_not_answer_is_stopped(
    start: Any, do: str, limit: float, why: str
) -> None:
    engine = start("good")
    engine.answer("start", 60)
    with pytest.raises(ChildError, match=f"good: {do}: .*{why}"):
        engine.ask(do, limit)
    assert engine.process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(engine.process.pid, 0)


def test_a_failed_engine_is_named_with_its_reason_and_the_others_go_on(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "kv.json"
    fields = {
        **kv.TINY_OPTIONS,
        "tiny": True,
        "tp": 1,
        "shape": {},
        "engine_args": {"enforce_eager": True},
    }
    run = kv.Run(argparse.Namespace(**fields, document=None, rounds_of_chats=1, out=out), tmp_path)
    monkeypatch.setattr(run, "make", start)
    run.start(["refuses", "good"])
    run.guard("refuses", run.warm)
    assert list(run.up) == ["good"]
    run.close()
    found = json.loads(out.read_text())
    assert found["engines"]["refuses"]["error"].startswith(
        "refuses: start: ValueError: no such device\n"
    )
    assert "Traceback" in found["engines"]["refuses"]["error"], "the log"
    assert kv.table(found).endswith("refuses: refuses: start: ValueError: no such device")


def test_the_one_answer_of_a_process_or_why_there_is_none(start: Any, tmp_path: Path) -> None:
    found = [
        run_child("once", {"engine": name, "answers": 2}, tmp_path / "log", 60, {})
        for name in ("good", "refuses")
    ]
    assert found[0] == {"start_s": 2}, "what was specified"
    assert found[1]["error"].startswith("once: run: ValueError: no such device")


def passed(*tokens: int, loaded: int = 0, logprob: float = -1.0) -> list[dict[str, Any]]:
    """A pass over one sample."""
    logprobs = [{str(token): logprob} for token in tokens]
    fields = {
        "prompt_tokens": 9,
        "cached_tokens": loaded,
        "loaded_tokens": loaded,
        "sources": {},
        "fusion_loaded": 1,
    }
    return [{"tokens": list(tokens), "logprobs": logprobs, **fields}]


def test_a_loaded_pass_has_the_tokens_of_a_computed_one() -> None:
    passes = {"cold": passed(1, 2), "hot": passed(1, 3), "first": passed(1, 2)}

    def wrong(*, exact: bool = False, **more: list[dict[str, Any]]) -> list[str]:
        return list(identity.judge(passes | more, exact=exact)["wrong"])

    assert wrong(loaded=passed(1, 3, loaded=8)) == []
    other = "loaded: other tokens than computed ones and than vLLM's own prefix cache"
    assert wrong(loaded=passed(1, 4, loaded=8)) == [other]
    assert wrong(restarted=passed(1, 2)) == ["restarted: nothing was loaded for 1 of 1"]
    passes["hot"] = passed(1, 2)  # the same shapes, so they agree to the last bit
    assert wrong(loaded=passed(1, 2, loaded=8), exact=True) == []
    close = passed(1, 2, loaded=8, logprob=-1.001)
    assert wrong(loaded=close, exact=True) == ["loaded vs hot: 0 of 1 bit-exact"]
    assert wrong(loaded=close) == []


@pytest.mark.engine
def test_a_connector_that_loads_across_salts_fails_and_ours_does_not(tmp_path: Path) -> None:
    out, names = tmp_path / "found.json", ["SemKVConnector", "ExampleConnector"]
    command = [prepare() / "semkv", "bench", "connector", "--only", "salt", "--out", str(out)]
    done = subprocess.run(
        [*command, *(f"--connector={name}" for name in names)], capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr[-2000:]
    found = json.loads(out.read_text())["connectors"]
    assert [found[name]["salt"]["verdict"] for name in names] == ["pass", "fail"]
    assert "544 tokens of one cache_salt" in found["ExampleConnector"]["salt"]["detail"]
    assert done.stdout.endswith("| another `cache_salt` loads nothing | pass | fail |\n")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("", "lmcache is not installed: pip install lmcache"),
        ("0.5.6", conformance.NO_CPU["LMCacheConnectorV1"]),
    ],
)
def test_a_connector_that_cannot_run_here_is_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, version: str, why: str
) -> None:
    platforms = pytest.importorskip(
        "vllm.platforms", reason="needs vLLM: pip install 'semkv[cpu]' or 'semkv[gpu]'"
    )
    if version and not platforms.current_platform.is_cpu():
        pytest.skip("vLLM is not its CPU build")
    monkeypatch.setattr(conformance, "version", lambda name: version)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    found = conformance.run(["LMCacheConnectorV1"], ["salt"], None, print)
    case = found["connectors"]["LMCacheConnectorV1"]["salt"]
    assert (case["verdict"], case["detail"]) == ("cannot", why)
    assert "lmcache.chunk_size" in found["settings"]["LMCacheConnectorV1"]


@pytest.mark.parametrize("flags", [["--connector", "Other"], ["--only", "none"], ["--extra", "[1"]])
def test_what_the_command_does_not_know_is_named(flags: list[str]) -> None:
    done = invoke(["bench", "connector", *flags])
    assert done.exit_code != 0
    assert flags[0] in done.output
    assert flags[1] in done.output
