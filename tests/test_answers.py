"""Which answers are complete, on every route."""

from __future__ import annotations

import json
from typing import Any

import pytest

from semkv_gateway.routes import ROUTES

CALL = {"id": "a", "type": "function", "function": {"name": "read", "arguments": '{"a": 1}'}}
TEXT = {"type": "output_text", "text": "x"}
DOCUMENTS = ["x", "yy", "zzz"]


def chat(*messages: dict[str, Any], finish: Any = "stop") -> dict[str, Any]:
    return {
        "choices": [
            {"index": i, "message": m, "finish_reason": finish} for i, m in enumerate(messages)
        ]
    }


def called(**function: Any) -> dict[str, Any]:
    return {"content": None, "tool_calls": [{**CALL, "function": {**CALL["function"], **function}}]}  # type: ignore[dict-item]


def response(*items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"object": "response", "status": "completed", "output": list(items), **more}


def item(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "status": "completed", **more}


def message(*blocks: dict[str, Any], stop: Any = "end_turn") -> dict[str, Any]:
    return {"type": "message", "content": list(blocks), "stop_reason": stop}


def use(given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "name": "read", "input": given}


def vectors(*vectors: Any) -> dict[str, Any]:
    return {"data": [{"index": i, "embedding": vector} for i, vector in enumerate(vectors)]}


def scores(*numbers: Any) -> dict[str, Any]:
    return {"data": [{"index": i, "score": number} for i, number in enumerate(numbers)]}


def ranked(*numbers: Any, name: str = "relevance_score") -> list[dict[str, Any]]:
    return [{"index": i, name: number} for i, number in enumerate(numbers)]


COMPLETE: list[tuple[str, Any, dict[str, Any]]] = [
    ("/v1/chat/completions", chat({"content": "x"}), {}),
    ("/v1/chat/completions", chat({"content": "x"}), {"n": None}),
    ("/v1/chat/completions", chat({"content": "x"}, {"content": "y"}), {"n": 2}),
    ("/v1/chat/completions", chat({"content": None, "refusal": "no"}), {}),
    ("/v1/chat/completions", chat(called(), finish="tool_calls"), {}),
    ("/v1/chat/completions", chat(called()), {}),
    (
        "/v1/completions",
        {"choices": [{"index": 0, "text": "x", "finish_reason": "stop"}]},
        {"prompt": [1, 2, 3]},
    ),
    (
        "/v1/completions",
        {"choices": [{"text": "x", "finish_reason": "stop"}] * 2},
        {"prompt": ["a", "b"]},
    ),
    ("/v1/responses", response(item("reasoning"), item("message", content=[TEXT])), {}),
    ("/v1/responses", response(item("function_call", name="read", arguments="{}")), {}),
    ("/v1/responses", response(item("custom_tool_call", name="read", input="x")), {}),
    ("/v1/messages", message({"type": "thinking"}, {"type": "text", "text": "x"}), {}),
    ("/v1/messages", message(use({}), stop="tool_use"), {}),
    ("/v1/embeddings", vectors([0.5, 1]), {"input": "x"}),
    ("/v1/embeddings", vectors("AAAA"), {"input": [1, 2, 3]}),
    ("/v1/embeddings", vectors([0.5], [1.5]), {"input": [[1, 2], [3]]}),
    ("/score", scores(0.5), {"text_1": "x", "text_2": "y"}),
    ("/v1/score", scores(0.5, 1, 2), {"text_1": "x", "text_2": DOCUMENTS}),
    ("/rerank", {"results": ranked(1, 2, 3)}, {"documents": DOCUMENTS}),
    ("/rerank", {"results": ranked(1, 2)}, {"documents": DOCUMENTS, "top_n": 2}),
    ("/rerank", {"results": ranked(1, 2, 3)}, {"documents": DOCUMENTS, "top_n": 9}),
    ("/v1/rerank", ranked(1, 2, 3, name="score"), {"texts": DOCUMENTS}),
    (
        "/v2/rerank",
        {"data": ranked(1, 2, 3)},
        {"documents": [{"text": text} for text in DOCUMENTS]},
    ),
]
INCOMPLETE: list[tuple[str, Any, dict[str, Any], str]] = [
    ("/v1/chat/completions", chat({"content": "x"}), {"n": 2}, "not as many as asked"),
    ("/v1/chat/completions", chat({"content": "x"}, {"content": "y"}), {}, "not as many as asked"),
    ("/v1/chat/completions", {"choices": [*chat({"content": "x"})["choices"]] * 2}, {"n": 2}, "not as many as asked"),
    ("/v1/chat/completions", chat({"content": ""}), {}, "empty"),
    ("/v1/chat/completions", chat({"content": None, "reasoning": "x"}), {}, "empty"),
    ("/v1/chat/completions", chat({"content": "x"}, {"content": ""}), {"n": 2}, "empty"),
    ("/v1/chat/completions", chat({"content": "x", "tool_calls": []}, finish="tool_calls"), {}, "empty"),
    ("/v1/chat/completions", chat({"content": "x"}, finish="content_filter"), {}, "unfinished"),
    ("/v1/chat/completions", chat({"content": "x"}, finish="eos"), {}, "unfinished"),
    ("/v1/chat/completions", chat({"content": "x"}, finish=["stop"]), {}, "unfinished"),
    ("/v1/chat/completions", {"choices": [{"finish_reason": "stop", "error": {"code": 1}}]}, {}, "error"),
    ("/v1/chat/completions", {**chat({"content": "x"}), "error": "x"}, {}, "error"),
    ("/v1/chat/completions", chat(called(arguments='{"a": ')), {}, "broken call"),
    ("/v1/chat/completions", chat(called(arguments="")), {}, "broken call"),
    ("/v1/chat/completions", chat(called(arguments="[]")), {}, "broken call"),
    ("/v1/chat/completions", chat(called(arguments='{"a": NaN}')), {}, "broken call"),
    ("/v1/chat/completions", chat(called(arguments="{}{}")), {}, "broken call"),
    ("/v1/chat/completions", chat(called(arguments='{"a": 1, "a": 2}')), {}, "broken call"),
    ("/v1/chat/completions", chat({"content": " \n"}), {}, "empty"),
    ("/v1/chat/completions", chat({"content": "\xa0\u200b\x07\u3164\ufe0f"}), {}, "empty"),
    ("/v1/chat/completions", {**chat({"content": "x"}), "Errors": ["x"]}, {}, "error"),
    ("/v1/chat/completions", chat({"content": [{"type": "text", "text": ""}]}), {}, "empty"),
    ("/v1/chat/completions", chat(called(arguments={})), {}, "broken call"),
    ("/v1/chat/completions", chat(called(name="")), {}, "broken call"),
    ("/v1/chat/completions", chat({"content": "x", "tool_calls": [5]}), {}, "unknown form"),
    ("/v1/completions", {"choices": [{"text": "", "finish_reason": "stop"}]}, {"prompt": "a"}, "empty"),
    ("/v1/completions", {"choices": [{"text": "x", "finish_reason": "stop"}]}, {"prompt": ["a", "b"]},
     "not as many as asked"),
    ("/v1/responses", response(), {}, "empty"),
    ("/v1/responses", response(item("reasoning")), {}, "empty"),
    ("/v1/responses", response(item("message", content=[{**TEXT, "text": ""}])), {}, "empty"),
    ("/v1/responses", response(item("message", content=[TEXT], status="incomplete")), {}, "unfinished"),
    ("/v1/responses", response(item("message", content=[TEXT]), status="incomplete"), {}, "unfinished"),
    ("/v1/responses", response(item("message", content=[TEXT]), incomplete_details={"reason": "x"}), {}, "unfinished"),
    ("/v1/responses", response(item("function_call", name="read", arguments="{")), {}, "broken call"),
    ("/v1/responses", response(item("message", content=[TEXT]), item("web_search_call")), {}, "unknown form"),
    ("/v1/messages", message(), {}, "empty"),
    ("/v1/messages", message({"type": "text", "text": ""}), {}, "empty"),
    ("/v1/messages", message({"type": "text", "text": "x"}, stop="tool_use"), {}, "empty"),
    ("/v1/messages", message({"type": "text", "text": "x"}, stop="max_tokens"), {}, "unfinished"),
    ("/v1/messages", message({"type": "text", "text": "x"}, stop=None), {}, "unfinished"),
    ("/v1/messages", message(use("{"), stop="tool_use"), {}, "broken call"),
    ("/v1/embeddings", vectors([0.5]), {"input": ["x", "y"]}, "not as many as asked"),
    ("/v1/embeddings", vectors([]), {"input": "x"}, "unfinished"),
    ("/v1/embeddings", vectors([0.5, None]), {"input": "x"}, "unfinished"),
    ("/v1/embeddings", vectors([float("nan")]), {"input": "x"}, "no JSON"),
    ("/v1/embeddings", vectors(""), {"input": "x"}, "unfinished"),
    ("/score", scores(0.5), {"text_1": "x", "text_2": DOCUMENTS}, "not as many as asked"),
    ("/score", scores(None), {"text_1": "x", "text_2": "y"}, "unfinished"),
    ("/rerank", {"results": ranked(1, 2)}, {"documents": DOCUMENTS}, "not as many as asked"),
    ("/rerank", {"results": ranked(1, 2, 3)}, {"documents": DOCUMENTS, "top_n": 2}, "not as many as asked"),
    ("/rerank", {"results": ranked(1)[:1] * 3}, {"documents": DOCUMENTS}, "not as many as asked"),
    ("/rerank", [], {"documents": DOCUMENTS}, "not as many as asked"),
    ("/rerank", {"results": ranked(1, None, 3)}, {"documents": DOCUMENTS}, "unfinished"),
    ("/rerank", {"message": "x"}, {"documents": DOCUMENTS}, "unfinished"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "answer", "body"), COMPLETE)
def test_a_complete_answer_is_kept(path: str, answer: Any, body: dict[str, Any]) -> None:
    assert ROUTES[path].refusal(json.dumps(answer).encode(), 200, body) == ""


@pytest.mark.parametrize(("path", "answer", "body", "why"), INCOMPLETE)
def test_any_other_is_not(path: str, answer: Any, body: dict[str, Any], why: str) -> None:
    assert ROUTES[path].refusal(json.dumps(answer).encode(), 200, body) == why


def events(*chunks: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)


def test_a_stream_of_messages_is_put_together_to_be_judged() -> None:
    start = {
        "type": "message_start",
        "message": {**message(stop=None), "usage": {"input_tokens": 1}},
    }
    block = {"type": "content_block_start", "index": 0, "content_block": {**use({}), "id": "a"}}
    pieces = [
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "input_json_delta", "partial_json": piece},
        }
        for piece in ('{"a"', ": 1}")
    ]
    stop = {"type": "content_block_stop", "index": 0}
    end = [
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use"},
            "usage": {"output_tokens": 2},
        },
        {"type": "message_stop"},
    ]
    refusal = ROUTES["/v1/messages"].refusal
    assert refusal(events(start, block, *pieces, stop, *end)) == ""
    assert refusal(events(start, block, stop, *end)) == "", "the API sends nothing for no arguments"
    assert refusal(events(start, block, pieces[0], stop, *end)) == "broken call"
    assert refusal(events(start, block, *pieces, *end)) == "unfinished"
    assert refusal(events(start, *end)) == "empty"
    assert refusal(events(start, *pieces, *end)) == "no JSON"
    for out_of_order in (
        (start, start, block, *pieces, stop, *end),
        (start, block, block, *pieces, stop, *end),
        (start, block, stop, *pieces, *end),
        (start, block, *pieces, stop, stop, *end),
    ):
        assert refusal(events(*out_of_order)) == "no JSON"


def test_an_answer_that_readers_read_differently_is_not_kept() -> None:
    whole = json.dumps(chat({"content": "x"}))
    for odd in (
        whole.replace('"content"', '"content": "y", "content"'),
        whole[:-1] + ', "a": NaN}',
    ):
        assert ROUTES["/v1/chat/completions"].refusal(odd.encode()) == "no JSON"
