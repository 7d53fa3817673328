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

import httpx
import pytest

import vllm_forks
from gateway_helpers import SECRET, Served
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
from semkv_gateway.app import app_of
from semkv_gateway.settings import ServerSettings
from semkv_stores.block_file import tenant_tag
from tiny_models import Checkpoint
from vllm_server import MODULE, VllmServer

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

    def anew(self, ids: list[int], params: Any = None) -> Answer:
        """What is answered where nothing of the tenant is stored here."""
        self.settle()
        self.shared.store.purge(tenant_tag(SALT))
        assert self.llm.reset_prefix_cache()
        return self.say(ids, params)

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
    {"remote_kv_source": 5},
    {"remote_kv_source": {"kv_request_id": 5, "remote_host": [1], "remote_port": "x"}},
    {"semkv": {"hints": {"peer": f"{HOST}:9"}}},
    {"semkv": {"hints": {"peer": 5}}},
    {"semkv": {"hints": [f"{HOST}:9"]}},
    {"semkv": 5, "remote_prefiller": "x", "remote_decoder": {"kv_request_id": 1}},
]


_KEPT: list[Engine] = []
"""Engines that are not closed: vLLM would wait for the peer that was killed."""


def second(model: str, folder: str, port: int, other: int, pid: int) -> dict[str, Any]:
    """The engine that conversations move to."""
    found: dict[str, Any] = {}
    real = {"kv_request_id": "a", "remote_host": HOST, "remote_port": other}
    hostile = [*HOSTILE, {"remote_kv_source": real}, {"remote_prefiller": real}]
    engine = Peer(model, folder, port, other)
    _KEPT.append(engine)
    asked = prompts()
    answers = []
    for params in hostile:
        answers.append(engine.anew(asked[0], params))
    found["hostile"] = [answer["loaded"] for answer in answers]
    found["hostile, differs"] = [differs(answer, answers[0]) for answer in answers[1:]]
    engine.anew(asked[0][:8])
    moved = [engine.moved(ids, other) for ids in asked[:2]]
    found["moved"] = [[answer["loaded"], answer["sources"], answer] for answer in moved]
    engine.settle()
    assert engine.llm.reset_prefix_cache()
    again = engine.say(asked[1])
    found["again"] = again["loaded"]
    found["purged"] = engine.anew(asked[1])["loaded"]
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


ROOT = Path(__file__).parents[1]
MODEL = "minigqa-vlm"


def server(folder: Path, name: str, port: int, *others: int) -> VllmServer:
    """vLLM's own server with a p2p tier on a port."""
    tiers = [{"type": "semkv"}, {"type": "p2p", "host": HOST, "port": port}]
    peers = [f"{HOST}:{other}" for other in (port, *others)]
    settings = {"fixed_weights": True, "secondary_tiers": tiers, "peers": peers}
    kv = connector(folder / name, **settings)
    run = [str(vllm_forks.prepare() / "python"), *MODULE]
    run += ["--model", str(ROOT / "src/semkv/assets/minigqa-vlm"), "--served-model-name", MODEL]
    run += ["--max-model-len", "512", "--block-size", str(BLOCK)]
    run += ["--kv-transfer-config", json.dumps(kv)]
    return VllmServer(run, folder / f"{name}.log")


def say(url: str, *turns: str, **more: Any) -> dict[str, Any]:
    """The answer to a conversation of these turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]
    body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, **more}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300.0)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.engine
@pytest.mark.skipif(find_spec("nixl") is None, reason="vLLM's p2p needs nixl")
def test_the_gateway_moves_a_conversation(tmp_path: Path) -> None:
    port, other = free_port(), free_port()
    servers = [server(tmp_path, "one", port, other), server(tmp_path, "other", other, port)]
    first = "is there a large red cube near the small blue sphere ? " * 25
    try:
        urls = tuple(each.ready().url for each in servers)
        settings = ServerSettings(
            upstreams=urls,
            peers=(f"{HOST}:{port}", f"{HOST}:{other}"),
            kv_hints=True,
            semantic=False,
            cache_dir=tmp_path / "gateway",
        )
        with Served(app_of(settings, {"SEMKV_SECRET": SECRET})) as gateway:
            named = {"prompt_cache_key": "a tour"}
            said = say(gateway.url, first, **named)["choices"][0]["message"]["content"]
            members = gateway.app.gateway.upstreams.members
            home = max(members, key=lambda member: member.turn)
            home.running += 100
            turns = (first, said, "and is it red ?")
            moved = say(gateway.url, *turns, **named)
            home.running -= 100
            report = moved["kv_transfer_params"]["semkv"]
            assert report["loaded_tokens"] > 200
            assert report["sources"] == {"p2p": report["loaded_tokens"]}
            skip = {"kv_transfer_params": {"semkv": {"skip": True}}}
            away = next(member for member in members if member is not home)
            plain = say(f"http://{away.name}", *turns, cache_salt="nobody", **skip)
            assert plain["choices"][0]["message"] == moved["choices"][0]["message"]
            real = {"kv_request_id": "a", "remote_host": HOST, "remote_port": port}
            for hostile in (
                {"remote_kv_source": real},
                {"remote_kv_source": 5},
                {"semkv": {"hints": {"peer": f"{HOST}:{port}", "session": "a", "keep_s": 1e9}}},
            ):
                asked = say(gateway.url, first, "no", "a new one ?", kv_transfer_params=hostile)
                assert "p2p" not in asked["kv_transfer_params"]["semkv"]["sources"]
            for url in urls:
                assert httpx.get(f"{url}/health").status_code == 200
    finally:
        for each in servers:
            each.stop()
