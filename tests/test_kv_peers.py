"""A conversation that moves loads its beginning from the other engine, over vLLM's ``p2p``. Needs nixl."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kv_engines import (
    BLOCK,
    Answer,
    Engine,
    command,
    connector,
    differs,
    in_child,
    prompt,
    token_ids,
)
from ports import free_port
from semkv_stores.block_file import tenant_tag
from tiny_models import Checkpoint

SALT = "a tenant"
HOST = "127.0.0.1"


class Peer(Engine):
    """An engine with vLLM's p2p tier below ours."""

    def __init__(self, model: str, folder: str, port: int, *others: int) -> None:
        tiers = [{"type": "semkv"}, {"type": "p2p", "host": HOST, "port": port}]
        peers = [f"{HOST}:{other}" for other in (port, *others)]
        kv = connector(folder, fixed_weights=True, secondary_tiers=tiers, peers=peers)
        super().__init__(model, kv)
        self.shared = self.connectors()[0].shared

    def settle(self) -> None:
        """Step for a while: with this tier an engine always has something to do."""
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            self.core.step_fn()
            time.sleep(0.002)

    def say(self, ids: list[int], params: Any = None) -> Answer:
        extra = {"kv_transfer_params": params} if params is not None else None
        (answer,) = self.ask([{**prompt(ids), "cache_salt": SALT}], extra_args=extra)
        return answer

    def moved(self, ids: list[int], port: int) -> Answer:
        """What is answered where another engine is said to have the beginning."""
        return self.say(ids, {"semkv": {"hints": {"peer": f"{HOST}:{port}"}}})


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [token_ids(rng, size) for size in (110, 300, 170, 200)]


def first(model: str, folder: str, port: int) -> None:
    """The engine that has answered before: it says what, and goes on until it is killed."""
    engine = Peer(model, folder, port)
    print("ANSWERS " + json.dumps([engine.say(ids) for ids in prompts()]), flush=True)
    while True:
        engine.settle()


HOSTILE: list[Any] = [
    5,
    "x",
    {"remote_kv_source": 5},
    {"remote_kv_source": {"kv_request_id": 5, "remote_host": [1], "remote_port": "x"}},
    {"semkv": {"hints": {"peer": f"{HOST}:9"}}},
    {"semkv": {"hints": {"peer": 5}}},
    {"semkv": {"hints": [f"{HOST}:9"]}},
    {"semkv": 5, "remote_prefiller": "x", "remote_decoder": {"kv_request_id": 1}},
]


def second(model: str, folder: str, port: int, other: int, pid: int) -> dict[str, Any]:
    """The engine that conversations move to."""
    found: dict[str, Any] = {}
    real = {"kv_request_id": "a", "remote_host": HOST, "remote_port": other}
    hostile = [*HOSTILE, {"remote_kv_source": real}, {"remote_prefiller": real}]
    with Peer(model, folder, port, other) as engine:
        asked = prompts()
        answers = []
        for params in hostile:
            assert engine.llm.reset_prefix_cache()
            answers.append(engine.say(asked[0][:40], params))
        found["hostile"] = [answer["loaded"] for answer in answers]
        found["hostile, differs"] = [differs(answer, answers[0]) for answer in answers[1:]]
        moved = [engine.moved(ids, other) for ids in asked[:2]]
        found["moved"] = [[answer["loaded"], answer["sources"], answer] for answer in moved]
        engine.settle()
        assert engine.llm.reset_prefix_cache()
        again = engine.say(asked[1])
        found["again"] = again["loaded"]
        engine.shared.store.purge(tenant_tag(SALT))
        assert engine.llm.reset_prefix_cache()
        found["purged"] = engine.say(asked[1])["loaded"]
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        found["killed"] = engine.moved(asked[2], other)
        found["waited"] = time.monotonic() - started
        started = time.monotonic()
        found["left alone"] = engine.moved(asked[3], other)
        found["waited again"] = time.monotonic() - started
        found["errors"] = engine.shared.counters["errors"]
    return found


@pytest.mark.engine
@pytest.mark.skipif(find_spec("nixl") is None, reason="vLLM's p2p needs nixl")
def test_a_conversation_that_moves_takes_its_kv_along(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    model = checkpoint("llama")
    port, other = free_port(), free_port()
    run = command(first, model, tmp_path / "first", other)
    producer = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert producer.stdout is not None
        lines = (line for line in producer.stdout if line.startswith("ANSWERS "))
        reference = json.loads(next(lines).removeprefix("ANSWERS "))
        found = in_child(second, model, tmp_path / "second", port, other, producer.pid)
    finally:
        producer.kill()
        producer.wait()
    assert set(found["hostile"]) == {0}
    assert not any(found["hostile, differs"])
    for (loaded, sources, answer), right in zip(found["moved"], reference, strict=False):
        whole = (answer["length"] - 1) // BLOCK * BLOCK
        assert (loaded, sources) == (whole, {"p2p": whole})
        assert not differs(answer, right)
    assert found["again"] == 288, "what came is stored here too"
    assert found["purged"] == 0
    assert not differs(found["killed"], reference[2])
    assert not differs(found["left alone"], reference[3])
    assert found["errors"] == 0
    print(found["waited"], found["waited again"])
