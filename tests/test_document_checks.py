"""What the gateway does of requests that reuse documents, before a scripted upstream that knows nothing of documents.

`test_document_reuse` has the bound itself, before a real vLLM.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import httpx

from gateway_helpers import Pair, chat, wait_until
from semkv_gateway.cache_client import _agree
from semkv_gateway.document_reuse import DocumentReuse, Reuse
from semkv_gateway.request_key import Deployment, canonicalise

RATE = 0.2
SPANS = {"semkv": {"spans": [[0, 16]]}}


def count(pair: Pair, outcome: str) -> float:
    """How often this became of a request with spans, or of a check."""
    return pair.metric(f'semkv_document_reuse_total{{outcome="{outcome}"}}')


def ask_until_reused(pair: Pair, **more: Any) -> dict[str, Any]:
    """New things until one is sent with its spans: its body, as the upstream got it."""
    for number in range(20):
        pair.post(f"about documents {number}", kv_transfer_params=SPANS, **more)
        if count(pair, "reused"):
            wait_until(lambda: count(pair, "checked, same"), 30)
            return next(body for body in pair.upstream.calls if "spans" in json.dumps(body))
    raise AssertionError("the budget never fills")


def test_spans_and_hints_go_together(tmp_path: Path) -> None:
    with Pair(tmp_path, kv_hints=True, document_error_rate=RATE) as pair:
        sent = ask_until_reused(pair, prompt_cache_key="tour")
        told = sent["kv_transfer_params"]["semkv"]
        assert told["spans"] == SPANS["semkv"]["spans"]
        assert told["hints"]["keep_s"] == 300
        exact = pair.upstream.calls[-1]["kv_transfer_params"]["semkv"]
        assert exact == {"hints": told["hints"]}, "the check is of the same conversation"


def test_what_passes_by_the_cache_is_read_as_json(tmp_path: Path) -> None:
    with Pair(tmp_path, kv_hints=True, document_error_rate=RATE) as pair:
        body = chat("passed", prompt_cache_key="tour", kv_transfer_params=SPANS)
        hidden = json.dumps(body).replace("spans", r"sp\u0061ns")
        assert "spans" in json.dumps(json.loads(hidden))
        headers = {"X-Semkv-Bypass": "1", "Content-Type": "application/json"}
        for path in ("chat/completions", "of/another/server"):
            httpx.post(f"{pair.url}/v1/{path}", content=hidden, headers=headers)
            assert "spans" not in json.dumps(pair.upstream.calls[-1])
        pair.post("What are kv_transfer_params?", prompt_cache_key="tour", headers=headers)
        assert pair.upstream.calls[-1]["kv_transfer_params"]["semkv"]["hints"]["keep_s"] == 300


def test_an_outage_costs_no_budget(tmp_path: Path) -> None:
    with Pair(tmp_path, document_error_rate=0.1) as pair:
        ask_until_reused(pair)
        pair.behind.stop()
        for number in range(4):
            lost = pair.post(f"while nobody answers {number}", kv_transfer_params=SPANS)
            assert lost.status_code == 502
        assert count(pair, "nothing reused") == 4
        assert count(pair, "not checked") == 0


def test_answers_without_text_are_compared_or_are_not() -> None:
    def payload(**message: Any) -> bytes:
        choices = [{"index": 0, "message": {"role": "assistant", "content": None, **message}}]
        return json.dumps({"id": secrets.token_hex(), "choices": choices}).encode()

    def agree(own: bytes, given: bytes) -> bool | None:
        return _agree(None, own, given)

    assert agree(payload(), payload()) is True
    assert agree(payload(reasoning="one"), payload(reasoning="two")) is None
    assert agree(payload(content="a text"), b"data: a stream as it came") is None
    assert agree(payload(content="a text"), payload()) is False
    assert agree(payload(content="A text."), payload(content="a text")) is True


def test_a_tenant_with_many_models_forgets_its_own(tmp_path: Path) -> None:
    outcomes: list[str] = []
    faults: list[str] = []
    reuse = DocumentReuse(0.5, outcomes.append, tmp_path / "counts.json", faults.append)

    def accept(tenant: str, model: str) -> Reuse | None:
        body = chat("hello", model=model, kv_transfer_params=SPANS)
        deployment = Deployment("/v1/chat/completions", tenant, b"secret", reuses_documents=True)
        return reuse.accept(canonicalise(body, deployment))

    assert accept("one", "m") is None, "the budget begins empty"
    for number in range(300):
        assert accept("many", f"m{number}") is None
    assert accept("one", "m") is not None
    assert accept("many", "m0") is None, "forgotten"
    assert accept("many", "m299") is not None
    assert outcomes == ["beyond the bound"] * 302
    assert not faults
