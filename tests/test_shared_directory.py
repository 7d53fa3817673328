"""Two engines and four front ends on one cache directory, all at once; two gateways on one."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway_helpers import NEAR, ONE, OTHER, Pair, wait_until
from kv_engines import in_child
from semkv.config import get_preset
from semkv.engines import EnginePrompt
from semkv.stores.maintenance import inspect, verify
from semkv.types import Role, TextSegment
from semkv_lab.vllm_engine import ConnectorOptions, VllmEngine, VllmOptions
from vllm_forks import prepare


def prompt(number: int) -> EnginePrompt:
    context = f"Document {number}. " + "The red cube stands left of the small sphere. " * 12
    return EnginePrompt(
        (TextSegment(context, Role.CONTEXT), TextSegment("What color is the cube?")), max_tokens=6
    )


def computed() -> list[list[int]]:
    """The answers without the connectors."""
    with closing(VllmEngine(VllmOptions(get_preset("minigqa").model, max_model_len=512))) as engine:
        return [list(engine.generate(prompt(i)).token_ids) for i in range(8)]


def reused(folder: str) -> dict[str, Any]:
    """The answers with them, three times, and how many tokens were loaded."""
    connectors = ConnectorOptions(Path(folder), max_blocks=60)
    engine = VllmEngine(
        VllmOptions(get_preset("minigqa").model, max_model_len=512, connectors=connectors)
    )
    rounds, loaded = [], 0
    for _ in range(3):
        results = [engine.generate(prompt(i)) for i in range(8)]
        rounds.append([list(result.token_ids) for result in results])
        loaded += sum(result.loaded_tokens or 0 for result in results)
        assert engine._llm.reset_prefix_cache()
    engine.close()
    return {"rounds": rounds, "loaded": loaded}


FRONT_END = """
import json, random, sqlite3, sys
from pathlib import Path
from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.types import Namespace, Request, TextSegment

real = sqlite3.connect  # on a busy machine another's write may take any time
sqlite3.connect = lambda *args, **fields: real(*args, **{**fields, "timeout": 3600.0})
folder, seed = Path(sys.argv[1]), int(sys.argv[2])
rng, hits = random.Random(seed), 0
with SemanticCache(CacheConfig(folder, semantic=False, max_entries=150)) as cache:
    for n in range(300):
        number, tenant = rng.randrange(200), rng.choice("ab")
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


def front_end(folder: Path, seed: int) -> dict[str, int]:
    command = [prepare() / "python", "-c", FRONT_END, str(folder), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.engine
def test_two_engines_and_four_front_ends_share_a_directory(tmp_path: Path) -> None:
    folder, expected = tmp_path / "cache", in_child(computed)
    with ThreadPoolExecutor(6) as pool:  # all open the new directory at about the same time
        engines = [pool.submit(in_child, reused, folder) for _ in range(2)]
        front_ends = [pool.submit(front_end, folder, seed) for seed in range(4)]
        found = [one.result() for one in front_ends]
        answers = [one.result() for one in engines]
    assert all(one["hits"] > 50 for one in found)
    assert not any(one["faults"] for one in found)
    for one in answers:
        assert one["rounds"] == [expected] * 3
        assert one["loaded"] > 0
    assert verify(folder).damaged == []
    used = inspect(folder)
    assert sum(entry.entries for entry in used.entries) <= 150
    assert sum(store.blocks for store in used.stores if store.store == "kv") <= 60


def test_a_near_repeat_hits_at_another_gateway_on_the_directory(tmp_path: Path) -> None:
    with Pair(tmp_path, **NEAR) as one, Pair(tmp_path, **NEAR) as other:
        first = one.post(ONE)
        wait_until(lambda: other.entries == 1)
        second = other.post(OTHER)
        assert second.headers["x-semkv"].split()[:2] == ["hit", "tier=text:semantic"]
        assert second.content == first.content
        assert other.upstream.total == 0
        (entry_id,) = other.semantic._similar.layers["semantic_text"].items
        assert one.semantic.invalidate(entry_id=entry_id) == 1
        wait_until(lambda: not other.semantic._similar.layers["semantic_text"].items)
