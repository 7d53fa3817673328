"""The benches' engines: a process that hangs, dies or refuses is a row with its reason, and never ends the bench."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import engines
import identity
import kv_chat
import kv_load
from engines import Answer, Engine, EngineError

# An engine's process: starts, then does what it is told.
CHILD = """
import json, os, sys, time
spec = json.loads(sys.argv[2])
def answer(found): os.write(spec["answers"], json.dumps(found).encode() + b"\\n")
if spec["engine"] == "refuses":
    print("ValueError: no such device", flush=True)
    answer({"error": "RuntimeError: engine core"})
    sys.exit(1)
answer({"start_s": 1})
for line in sys.stdin:
    do = json.loads(line)["do"]
    if do == "die":
        os._exit(7)
    if do == "hang":
        time.sleep(600)
    answer({"did": do})
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(sys, "argv", [str(script)])
    return lambda name: Engine(name, {"engine": name}, tmp_path / f"{name}.log")


def test_commands_are_answered_in_order(start: Any) -> None:
    engine = start("good")
    assert engine.answer("start", 60) == {"start_s": 1}
    assert [engine.ask(do, 60)["did"] for do in ("one", "two")] == ["one", "two"]
    engine.close()
    assert engine.process.returncode == 0


@pytest.mark.parametrize(
    ("do", "limit", "why"), [("die", 60, "ended with status 7"), ("hang", 1, "no answer within 1 s")]
)
def test_a_process_that_does_not_answer_is_stopped(start: Any, do: str, limit: float, why: str) -> None:
    engine = start("good")
    engine.answer("start", 60)
    with pytest.raises(EngineError, match=f"good: {do}: .*{why}"):
        engine.ask(do, limit)
    assert engine.process.returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(engine.process.pid, 0)


def test_a_refusal_comes_with_the_log(start: Any) -> None:
    with pytest.raises(EngineError, match=r"refuses: start: RuntimeError: engine core\nValueError: no such device"):
        start("refuses").answer("start", 60)


def test_a_failed_engine_is_a_row_and_the_next_goes_on(start: Any, tmp_path: Path) -> None:
    load = {"users": 1, "rounds": 1, "rate": 1.0, "seed": 0}
    row = kv_chat.measure(start("refuses"), load, tmp_path)
    assert row["engine_died"]
    assert "no such device" in row["error"]
    assert kv_chat.line({"engine": "offload", "run": 0, **row}).endswith("refuses: start: RuntimeError: engine core")


def test_requests_start_at_the_given_rate_round_by_round() -> None:
    load = {"users": 40, "rounds": 5, "rate": 10.0, "seed": 0, "arrivals": "uniform"}
    starts = kv_chat.schedule(load)
    assert sorted(time for row in starts for time in row) == pytest.approx([i / 10 for i in range(200)])
    assert all(max(a) < min(b) for a, b in itertools.pairwise(starts))
    assert starts[0] != sorted(starts[0])
    poisson = kv_chat.schedule(load | {"arrivals": "poisson"})
    assert poisson == kv_chat.schedule(load | {"arrivals": "poisson"})
    assert max(max(row) for row in poisson) == pytest.approx(20, rel=0.3)


def test_the_summary_tells_rounds_apart_and_adds_up() -> None:
    def answer(ttft: float, cached: int) -> Answer:
        report = {"loaded_tokens": cached, "sources": {"host": cached}}
        return Answer(0.0, ttft, ttft + 0.3, 100, cached, [1, 2, 3, 4], report)

    row = kv_chat.summary({(0, 0): answer(1.0, 0), (0, 1): answer(0.1, 60), (1, 1): answer(0.2, 80)}, 2.0)
    assert row["first_ms"]["p50"] == 1000
    assert row["later_ms"] == {"p50": 100, "p95": 200, "p99": 200, "mean": 150}
    assert (row["prompt_tokens"], row["computed_tokens"], row["hit_tokens"]) == (300, 160, 140)
    assert (row["decoded_per_s"], row["token_gap_ms"]["p50"]) == (6.0, 100)
    assert row["sources"] == {"loaded": 140, "host": 140}


def test_own_connectors_get_their_folder() -> None:
    added = {"mine": {"kv_connector": "X", "kv_connector_extra_config": {"dir": "$DIR", "bytes": "$HOST"}}}
    found = engines.transfer_config("mine", "/f", 7, 8, added)
    assert found == {"kv_connector": "X", "kv_connector_extra_config": {"dir": "/f", "bytes": 7}}
    assert engines.transfer_config("none", "/f", 7, 8, added) is None
    options = argparse.Namespace(add=[("mine", {})], engines="mine,mine-disk,other", logs=None, out=Path("x"))
    with pytest.raises(SystemExit, match="unknown engines other"):
        engines.finish_arguments(options, {})


def test_a_table_of_kv_loads_has_the_floor() -> None:
    rows = [
        {"engine": "none", "level": "prefix", "size": 1000, "count": 1, "ms": ms} for ms in (9.0, 10.0, 99.0)
    ] + [{"engine": "semkv-disk", "level": "disk", "size": 1000, "count": 1, "ms": 30.0, "gb_s": 2.0,
          "gb_s_beyond_prefix": 3.0}]  # fmt: skip
    result = {"medians": kv_load.medians(rows), "copy_gb_s": 57.344, "settings": {"shape": engines.QWEN_7B}}
    result["engines"] = {"semkv-disk": {"disk_gb_s": {"1 threads": 2.3}}}
    assert "| 1 x 1000 | 11.0 | 10.0 | 30.0 | 2.0 | 3.0 |" in kv_load.table(result)


def test_a_plain_rate_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(9 << 20))
    assert kv_load.read_rate(tmp_path, 2) >= 0


def passed(*tokens: int, loaded: int = 0, logprob: float = -1.0) -> list[dict[str, Any]]:
    """A pass over one sample."""
    logprobs = [{str(token): logprob} for token in tokens]
    fields = {"prompt_tokens": 9, "cached_tokens": loaded, "loaded_tokens": loaded, "sources": {}, "fusion_loaded": 1}
    return [{"tokens": list(tokens), "logprobs": logprobs, **fields}]


def test_a_loaded_pass_has_the_tokens_of_a_computed_one() -> None:
    passes = {"cold": passed(1, 2), "hot": passed(1, 3), "first": passed(1, 2)}
    good = identity.judge(passes | {"loaded": passed(1, 3, loaded=8)}, exact=False)
    assert good["wrong"] == []
    bad = identity.judge(passes | {"loaded": passed(1, 4, loaded=8)}, exact=False)
    assert bad["wrong"] == ["loaded: other tokens than computed ones and than vLLM's own prefix cache"]
    nothing = identity.judge(passes | {"restarted": passed(1, 2)}, exact=False)
    assert nothing["wrong"] == ["restarted: nothing was loaded for 1 of 1"]
    json.dumps(nothing)


def test_passes_on_the_same_shapes_agree_to_the_last_bit() -> None:
    passes = {"cold": passed(1, 2), "hot": passed(1, 2), "first": passed(1, 2), "loaded": passed(1, 2, loaded=8)}
    assert identity.judge(passes, exact=True)["wrong"] == []
    passes["loaded"] = passed(1, 2, loaded=8, logprob=-1.001)
    assert identity.judge(passes, exact=True)["wrong"] == ["loaded vs hot: 0 of 1 bit-exact"]
    assert identity.judge(passes, exact=False)["wrong"] == []


def test_a_script_of_passes_that_fails_or_hangs_gives_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "child.py"
    script.write_text(f"""
import sys, time
sys.path.insert(0, {str(Path(engines.__file__).parent)!r})
import engines
def work(spec):
    time.sleep(spec.get("sleep", 0))
    return {{"twice": 2 * spec["number"]}}
engines.child(sys.argv[2], work)
""")
    monkeypatch.setattr(sys, "argv", [str(script)])
    log = tmp_path / "logs" / "child.log"
    assert engines.run_child({"number": 2}, log, 60, {}) == {"twice": 4}
    failed = engines.run_child({}, log, 60, {})
    assert failed["error"] == "KeyError: 'number'"
    assert "KeyError" in failed["log"]
    assert engines.run_child({"sleep": 600}, log, 2, {})["error"] == "more than 2 s"
