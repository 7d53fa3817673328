"""Two engines and four front ends on one cache directory, all at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from semkv.stores.maintenance import inspect, verify

ENGINE = """
import json, sys
from pathlib import Path
from semkv.engines.base import EnginePrompt
from semkv.engines.vllm import ConnectorOptions, VllmEngine, VllmOptions
from semkv.presets import get_preset
from semkv.types import Role, TextSegment

folder, first = Path(sys.argv[1]), sys.argv[2] == "first"
def prompt(i):
    context = f"Document {i}. " + "The red cube stands left of the small sphere. " * 12
    return EnginePrompt((TextSegment(context, Role.CONTEXT), TextSegment("What color is the cube?")), max_tokens=6)

def main():
    if first:  # what the answers are without the connectors
        engine = VllmEngine(VllmOptions(get_preset("minigqa").model, max_model_len=512))
        computed = [engine.generate(prompt(i)).token_ids for i in range(8)]
        engine.close()
        print(json.dumps(computed), flush=True)
    connectors = ConnectorOptions(folder, max_blocks=60)
    engine = VllmEngine(VllmOptions(get_preset("minigqa").model, max_model_len=512, connectors=connectors))
    answers, loaded = {}, 0
    for _ in range(3):
        for i in range(8):
            result = engine.generate(prompt(i))
            answers.setdefault(i, result.token_ids)
            assert result.token_ids == answers[i], i
            loaded += result.loaded_tokens or 0
        assert engine._llm.reset_prefix_cache()
    engine.close()
    print(json.dumps({"answers": list(answers.values()), "loaded": loaded}))

if __name__ == "__main__":
    main()
"""

FRONT_END = """
import json, random, sys
from pathlib import Path
from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.types import Namespace, Request, TextSegment

folder, seed = Path(sys.argv[1]), int(sys.argv[2])
rng, hits = random.Random(seed), 0
with SemanticCache(CacheConfig(folder, semantic=False, max_entries=300)) as cache:
    for n in range(600):
        number, tenant = rng.randrange(400), rng.choice("ab")
        text = f"How many are {number}?" if rng.random() < 0.5 else f"how many  are {number}?"
        report = cache.try_reuse(Request(str(n), Namespace(tenant, "m"), (TextSegment(text),)))
        right = f"{tenant}{number}"
        if report.hit:
            hits += 1
            assert report.donor_response == right, (report.donor_response, right)
        if rng.random() < 0.02:
            cache.invalidate(entry_id=report.plan.match.entry_id if report.hit else "none")
        cache.add_observation(report, right)
    faults = cache.stats().faults
print(json.dumps({"hits": hits, "faults": sum(faults.values())}))
"""


def start(code: str, *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, words)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def result(process: subprocess.Popen[str]) -> dict[str, object]:
    out, err = process.communicate()
    assert process.returncode == 0, err[-2000:]
    found: dict[str, object] = json.loads(out.splitlines()[-1])
    return found


@pytest.mark.engine
def test_two_engines_and_four_front_ends_share_a_directory(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM: pip install 'semkv[cpu]' or 'semkv[gpu]'")
    folder = tmp_path / "cache"
    first = start(ENGINE, folder, "first")
    assert first.stdout is not None
    lines = iter(first.stdout.readline, "")
    expected = next((json.loads(line) for line in lines if line.startswith("[[")), None)
    engines = [first, start(ENGINE, folder, "second")]  # both open the new directory at about the same time
    front_ends = [start(FRONT_END, folder, seed) for seed in range(4)]
    found = [result(process) for process in front_ends]
    assert all(int(f["hits"]) > 100 for f in found)  # type: ignore[call-overload]
    assert sum(int(f["faults"]) for f in found) == 0  # type: ignore[call-overload]
    for process in engines:
        answers = result(process)
        assert answers["answers"] == expected
        assert int(answers["loaded"]) > 0  # type: ignore[call-overload]
    assert verify(folder).damaged == ()
    used = inspect(folder)
    assert sum(entry.entries for entry in used.entries) <= 300
    assert sum(store.blocks for store in used.stores if store.store == "kv") <= 60
