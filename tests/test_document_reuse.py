"""The bound on answers that change where documents are reused, before a real vLLM.

The model has one layer, in which keys and values depend on token and position alone. So what is reused gives the
computed answer, unless keys are rotated wrongly.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from broken_rotation import SIGN
from document_engines import WORKER
from gateway_helpers import PATIENT, SECRET, Served, a_tenant, kind, wait_until
from kv_engines import connector, token_ids
from semkv.errors import ConfigError
from semkv.tiers.bounded import Bounded
from semkv_gateway.app import app_of
from semkv_gateway.document_reuse import (
    _MATCH,
    FILE,
    DocumentReuse,
    may_have_reused,
    without_spans,
)
from semkv_gateway.request_key import Deployment, canonicalise
from semkv_gateway.settings import ServerSettings
from tiny_models import Checkpoint
from vllm_forks import prepare
from vllm_server import VllmServer

RATE = 0.2
PATH = "/v1/completions"
SIZES = (131, 160, 97)
SEPARATOR = [11, 12, 11]
SEPARATED_WISH = {"kv_transfer_params": {"semkv": {"spans": "separated"}}}


class Front:
    """A gateway with the bound, and one tenant's documents behind it."""

    def __init__(self, served: Served, server: VllmServer) -> None:
        self._client = httpx.Client(
            timeout=300
        )  # a new one for each request would take most of the time
        self._url = served.url
        self._server = server
        self._dice = random.Random(4)
        self._headers = a_tenant()
        self._documents = [token_ids(self._dice, size) for size in SIZES]
        for document in self._documents:
            self.post({"prompt": document, "max_tokens": 1})

    def post(self, body: dict[str, Any], **headers: str) -> httpx.Response:
        whole = {"model": "tiny", "temperature": 0, "max_tokens": 6, "ignore_eos": True, **body}
        sent = {**self._headers, **headers}
        answer = self._client.post(self._url + PATH, json=whole, headers=sent)
        answer.raise_for_status()
        return answer

    def separated(self) -> dict[str, Any]:
        """The same for a client that says nothing of documents."""
        prompt = token_ids(self._dice, self._dice.randint(20, 60))
        for document in self._dice.sample(self._documents, 3):
            prompt += [*SEPARATOR, *document]
        return {"prompt": [*prompt, *SEPARATOR, *token_ids(self._dice, 9)]}

    def body(self) -> dict[str, Any]:
        """Documents in another order behind a text that is new."""
        prompt = token_ids(self._dice, self._dice.randint(20, 60))
        spans = []
        for document in self._dice.sample(self._documents, 3):
            spans.append([len(prompt), len(prompt) + len(document)])
            prompt += document
        prompt += token_ids(self._dice, 9)
        wish = {"semkv": {"spans": spans, "repair": 0}}
        return {"prompt": prompt, "kv_transfer_params": wish}

    def exact(self, body: dict[str, Any]) -> str:
        """The answer by vLLM alone."""
        plain = {name: value for name, value in body.items() if name != "kv_transfer_params"}
        asked = {"model": "tiny", "temperature": 0, "max_tokens": 6, "ignore_eos": True, **plain}
        answer = self._client.post(self._server.url + PATH, json=asked).json()
        return str(answer["choices"][0]["text"])

    def counts(self) -> dict[str, float]:
        """What the gateway has counted, by outcome."""
        found = {}
        for line in self._client.get(f"{self._url}/metrics").text.splitlines():
            if line.startswith("semkv_document_reuse_total{"):
                name, _, value = line.rpartition(" ")
                found[name.split('"')[1]] = float(value)
        return found

    def since(self, before: dict[str, float]) -> dict[str, float]:
        now = self.counts()
        return {name: now[name] - before.get(name, 0.0) for name in now}

    def asked(self, count: int) -> dict[str, Any]:
        """Ask so many new things one after the other: what came of it."""
        before = self.counts()
        wrong = 0
        reused = []
        for _ in range(count):
            body = self.body()
            answer = self.post(body).json()
            reused.append(tokens_of(answer) > 0)
            wrong += answer["choices"][0]["text"] != self.exact(body)
            wait_until(lambda: self.are_checked(sum(reused), before))
        return {"wrong": wrong, "reused": reused, "counts": self.since(before)}

    def are_checked(self, count: int, before: dict[str, float]) -> bool:
        """Whether so many answers were reused since, and all of them are checked, as is done until 5,000 requests."""
        found = self.since(before)
        checks = sum(value for name, value in found.items() if "checked" in name)
        return found.get("reused", 0.0) == checks == count


def tokens_of(answer: Any) -> int:
    """How many tokens were reused at another position."""
    said = (answer.get("kv_transfer_params") or {}).get("semkv") or {}
    return int(said.get("approximate_tokens", 0))


@pytest.fixture(scope="module")
def server(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("server")
    sign = folder / "broken"
    kv = connector(
        folder / "cache",
        document_tokens=0,
        document_rows=1000,
        document_separator=SEPARATOR,
        report_loads=True,
    )
    command = [str(prepare() / "python"), "-m", "broken_rotation"]
    command += ["--model", str(checkpoint("llama3")), "--served-model-name", "tiny"]
    command += ["--dtype", "float32", "--max-model-len", "1024", "--block-size", "32"]
    command += ["--worker-cls", WORKER, "--kv-transfer-config", json.dumps(kv)]
    with VllmServer(command, folder / "log", **{SIGN: str(sign)}) as running:
        yield running, sign


@pytest.fixture(scope="module")
def gateway(server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = ServerSettings(
        upstreams=(server[0].url,),
        cache_dir=tmp_path_factory.mktemp("front"),
        semantic=False,
        document_error_rate=RATE,
        **PATIENT,
    )
    with Served(app_of(settings, {"SEMKV_SECRET": SECRET})) as served:
        yield served


@pytest.mark.engine
def test_right_answers_are_reused_on(gateway: Served, server: Any) -> None:
    front = Front(gateway, server[0])
    found = front.asked(14)
    assert found["wrong"] == 0
    assert not any(found["reused"][:4]), "the budget begins empty"
    assert all(found["reused"][6:])
    counts = found["counts"]
    assert counts["checked, same"] == counts["reused"] == sum(found["reused"])
    assert counts.get("checked, other", 0) == 0

    before = front.counts()
    # What is cut off, or empty, is not kept.
    ends = {"min_tokens": 8, "max_tokens": 400, "stop": list("aeo ")}
    body = {**front.body(), **ends}
    first = front.post(body)
    assert first.headers["x-semkv"] == "miss reason=approximate"
    wait_until(lambda: front.are_checked(1, before))
    again = front.post(body)
    assert kind(again) == "hit", again.headers  # of the exact answer, which the check brought
    assert tokens_of(again.json()) == 0
    pieces = front.post({**front.body(), "stream": True}).text
    assert pieces.rstrip().endswith("data: [DONE]")
    wait_until(lambda: front.are_checked(2, before))  # a stream says nothing of reuse, and counts
    for left_out, headers in (({"temperature": 1}, {}), ({}, {"X-Semkv-Bypass": "1"})):
        answer = front.post({**front.body(), **left_out}, **headers)
        assert tokens_of(answer.json()) == 0, "nobody could tell whether it is right"


@pytest.mark.engine
def test_a_broken_rotation_ends_reuse_within_the_bound(gateway: Served, server: Any) -> None:
    front = Front(gateway, server[0])
    server[1].touch()
    try:
        found = front.asked(20)
    finally:
        server[1].unlink()
    assert 0 < found["wrong"] <= RATE * 20
    assert found["counts"]["checked, other"] == found["wrong"]
    assert sum(found["reused"]) < 10, "after each one that changed the budget must fill again"


@pytest.mark.engine
def test_separated_documents_are_reused_for_clients_that_do_not_ask(
    server: Any,
    tmp_path: Path,
) -> None:
    settings = ServerSettings(
        upstreams=(server[0].url,),
        cache_dir=tmp_path,
        semantic=False,
        document_error_rate=RATE,
        reuse_separated_documents=True,
        **PATIENT,
    )
    with Served(app_of(settings, {"SEMKV_SECRET": SECRET})) as served:
        front = Front(served, server[0])
        before = front.counts()
        reused = 0
        for _ in range(8):
            body = front.separated()
            answer = front.post(body).json()
            reused += tokens_of(answer) > 0
            assert answer["choices"][0]["text"] == front.exact(body)
            wait_until(partial(front.are_checked, reused, before))
        assert reused >= 2
        # Of several prompts vLLM reports on the first one alone.
        plain = token_ids(front._dice, 40)
        front.post({"prompt": [plain, front.separated()["prompt"]]})
        wait_until(partial(front.are_checked, reused + 1, before))
        # Drawn answers differ without any reuse, also where they may be kept.
        unused = front.since(before)
        drawn = {"temperature": 1, **front.separated()}
        answer = front.post(drawn, **{"Cache-Control": "max-age=60"})
        assert tokens_of(answer.json()) == 0
        assert front.since(before) == {**unused, "cannot be compared": 1}
        # What says that nothing was reused is kept.
        for _ in range(6):
            ends = {"min_tokens": 8, "max_tokens": 400, "stop_token_ids": list(range(0, 512, 2))}
            alone = {"prompt": token_ids(front._dice, 40), **ends}
            assert front.post(alone).headers["x-semkv"] == "miss"
            assert kind(front.post(alone)) == "hit"
        assert front.since(before)["nothing reused"] > 0
        own = {"kv_transfer_params": {"do_remote_decode": False}}
        answer = front.post({**front.separated(), **own})
        assert tokens_of(answer.json()) == 0, "the client's own word counts"


@pytest.mark.parametrize("choices", [1, 2])
def test_one_report_says_nothing_of_several_choices(choices: int) -> None:
    """vLLM reports on the first prompt of a batch, and on the choice of several that ends last."""
    said = {"semkv": {"loaded_tokens": 0, "sources": {}}}
    answer = {"choices": [{}] * choices, "kv_transfer_params": said}
    assert may_have_reused(json.dumps(answer).encode()) is (choices > 1)


def test_no_spans_reach_the_engine_by_another_way() -> None:
    wish = {"kv_transfer_params": {"semkv": {"spans": "separated"}}}
    for asked in (wish, {"sampling_params": {"extra_args": wish}}):
        assert b"spans" not in without_spans(json.dumps(asked).encode())
    plain = b'{ "prompt": "spans" }'
    assert without_spans(plain) is plain


def test_drawn_answers_are_known_and_an_order_keeps_the_spans() -> None:
    deployment = Deployment("/v1/completions", "", b"secret", reuses_documents=True)
    body = {"prompt": "a", "temperature": 1, **SEPARATED_WISH}
    drawn = canonicalise(body, deployment)
    assert drawn.kept.is_drawn
    assert drawn.reordered_as(drawn.given).spans == drawn.spans is not None
    assert not canonicalise({**body, "temperature": 0}, deployment).is_drawn


def learned(file: Path, faults: list[str]) -> DocumentReuse:
    return DocumentReuse(RATE, lambda outcome: None, file, faults.append)


def test_what_was_learned_outlives_a_restart(tmp_path: Path) -> None:
    """The budget does not; a damaged file counts as none, and somebody hears of it."""
    file = tmp_path / FILE
    faults = list[str]()
    reuse = learned(file, faults)
    bound = reuse._bound_of("tenant", "model", RATE)
    for _ in range(200):
        bound.arrived()
    for _ in range(20):
        bound.observe(_MATCH, correct=False, served=None)
        reuse.outcomes += 1
    assert reuse.is_due
    reuse.save()
    assert not reuse.is_due
    assert file.stat().st_mode & 0o777 == 0o600
    again = learned(file, faults)
    assert again._bound_of("tenant", "model", RATE).state() == bound.state()
    empty = Bounded(RATE, texts=1).state()
    assert again._bound_of("other", "model", RATE).state() == empty
    assert again._bound_of("tenant", "model", RATE)._left == 0
    assert not faults
    file.write_text(file.read_text()[:-9])
    assert learned(file, faults)._bound_of("tenant", "model", RATE).state() == empty
    assert faults == ["documents"]
    file.unlink()
    os.mkfifo(file)  # a reader would wait for a writer
    assert learned(file, faults)._bound_of("tenant", "model", RATE).state() == empty
    assert faults == ["documents"] * 2


def test_settings() -> None:
    for wrong in (0.0, 1.0, -0.1):
        with pytest.raises(ConfigError, match="--document-error-rate"):
            ServerSettings(document_error_rate=wrong)
    with pytest.raises(ConfigError, match="--document-error-rate"):
        ServerSettings(reuse_separated_documents=True)
