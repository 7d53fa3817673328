"""What `scripted_upstream` says on the routes that are no chats and completions: answers, and the events of streams.

Each function takes the body, the text of its last turn, and the directives in it.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

Said = dict[str, str]
CREATED = 1_700_000_000


def _pieces(text: str, parts: int) -> list[str]:
    size = -(-len(text) // parts)
    return [text[start : start + size] for start in range(0, len(text), size)]


def text_of(text: str, said: Said) -> str:
    return "x" * int(said["big"]) if "big" in said else f"You said: {text}"


# -- Responses ---------------------------------------------------------------------------------------------------------


def _items(text: str, said: Said) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if "think" in said:
        thought = {"type": "reasoning_text", "text": "Let me think."}
        items.append(
            {
                "id": "rs_1",
                "type": "reasoning",
                "summary": [],
                "content": [thought],
                "status": "completed",
            }
        )
    if "tool" in said:
        call = {
            "name": "look",
            "arguments": json.dumps({"text": text}),
            "call_id": f"call_{time.time_ns()}",
        }
        return [*items, {"id": "fc_1", "type": "function_call", "status": "completed", **call}]
    part = {"type": "output_text", "text": text_of(text, said), "annotations": [], "logprobs": []}
    return [
        *items,
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [part],
        },
    ]


def response(body: dict[str, Any], text: str, said: Said) -> dict[str, Any]:
    """``[length]``, ``[fail]`` and ``[cancel]`` end it early."""
    early = {"length": "incomplete", "fail": "failed", "cancel": "cancelled"}
    status = next((status for word, status in early.items() if word in said), "completed")
    usage = {"input_tokens": 7, "output_tokens": len(text), "total_tokens": 7 + len(text)}
    return {
        "id": f"resp_{time.time_ns()}", "object": "response", "created_at": CREATED, "status": status,
        "error": {"code": "server_error", "message": "scripted"} if "fail" in said else None,
        "model": body.get("model", "scripted"), "output": _items(text, said), "usage": usage,
    }  # fmt: skip


def response_events(body: dict[str, Any], text: str, said: Said) -> Iterator[dict[str, Any]]:
    whole = response(body, text, said)
    numbers = itertools.count()

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(numbers), **fields}

    for kind in ("created", "in_progress"):
        yield event(
            kind,
            response={**whole, "status": "in_progress", "output": [], "usage": None, "error": None},
        )
    for index, item in enumerate(whole["output"]):
        at, calls = {"item_id": item["id"], "output_index": index}, item["type"] == "function_call"
        empty = {"arguments": ""} if calls else {"content": []}
        yield event(
            "output_item.added", output_index=index, item={**item, "status": "in_progress", **empty}
        )
        if calls:
            kind, content = "function_call_arguments", item["arguments"]
        else:
            kind, content = item["content"][0]["type"], item["content"][0]["text"]
        for piece in _pieces(content, int(said.get("events", 3))):
            yield event(f"{kind}.delta", content_index=0, delta=piece, logprobs=[], **at)
        yield event("output_item.done", output_index=index, item=item)
    yield event(whole["status"], response=whole)


# -- Messages ----------------------------------------------------------------------------------------------------------


def message(body: dict[str, Any], text: str, said: Said) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if "think" in said:
        content.append({"type": "thinking", "thinking": "Let me think.", "signature": "signed"})
    if "tool" in said:
        content.append(
            {
                "type": "tool_use",
                "id": f"toolu_{time.time_ns()}",
                "name": "look",
                "input": {"text": text},
            }
        )
    else:
        content.append({"type": "text", "text": text_of(text, said)})
    early = {"length": "max_tokens", "cancel": "pause_turn", "fail": "refusal", "tool": "tool_use"}
    reason = next((reason for word, reason in early.items() if word in said), "end_turn")
    return {
        "id": f"msg_{time.time_ns()}", "type": "message", "role": "assistant", "model": body.get("model", "scripted"),
        "content": content, "stop_reason": reason,
        "stop_sequence": None, "usage": {"input_tokens": 7, "output_tokens": len(text)},
    }  # fmt: skip


def message_events(body: dict[str, Any], text: str, said: Said) -> Iterator[dict[str, Any]]:
    whole = message(body, text, said)
    usage = {"input_tokens": 7, "output_tokens": 0}
    yield {
        "type": "message_start",
        "message": {**whole, "content": [], "stop_reason": None, "usage": usage},
    }
    for index, block in enumerate(whole["content"]):
        kind, field, delta = {
            "text": ("text", "text", "text_delta"),
            "thinking": ("thinking", "thinking", "thinking_delta"),
            "tool_use": ("input", "partial_json", "input_json_delta"),
        }[block["type"]]
        empty: Any = {} if kind == "input" else ""
        yield {
            "type": "content_block_start",
            "index": index,
            "content_block": {**block, kind: empty},
        }
        yield {"type": "ping"}
        said_whole = json.dumps(block[kind]) if kind == "input" else block[kind]
        for piece in _pieces(said_whole, int(said.get("events", 3))):
            yield {
                "type": "content_block_delta",
                "index": index,
                "delta": {"type": delta, field: piece},
            }
        yield {"type": "content_block_stop", "index": index}
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield {
        "type": "message_delta",
        "delta": end,
        "usage": {"output_tokens": whole["usage"]["output_tokens"]},
    }
    yield {"type": "message_stop"}


# -- numbers -----------------------------------------------------------------------------------------------------------


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def embeddings(body: dict[str, Any], text: str, said: Said) -> dict[str, Any]:
    """A vector of the text's length."""
    data = [
        {"object": "embedding", "index": i, "embedding": [0.5, float(len(str(one)))]}
        for i, one in enumerate(_several(body["input"]))
    ]
    usage = {"prompt_tokens": 7, "total_tokens": 7}
    return {
        "id": f"embd-{time.time_ns()}",
        "object": "list",
        "model": body.get("model"),
        "data": data,
        "usage": usage,
    }


def rerank(body: dict[str, Any], text: str, said: Said) -> dict[str, Any]:
    """The longest document first."""
    ranked = sorted(enumerate(_several(body["documents"])), key=lambda one: -len(one[1]))
    found = [
        {"index": i, "document": {"text": one}, "relevance_score": float(len(one))}
        for i, one in ranked
    ]
    return {
        "id": f"score-{time.time_ns()}",
        "model": body.get("model"),
        "results": found,
        "usage": {"total_tokens": 7},
    }


def score(body: dict[str, Any], text: str, said: Said) -> dict[str, Any]:
    others = _several(body.get("text_2") or body.get("documents"))
    data = [
        {"index": i, "object": "score", "score": float(len(one))} for i, one in enumerate(others)
    ]
    return {
        "id": f"score-{time.time_ns()}",
        "object": "list",
        "model": body.get("model"),
        "data": data,
        "usage": {},
    }


Whole = Callable[[dict[str, Any], str, Said], dict[str, Any]]
Events = Callable[[dict[str, Any], str, Said], Iterator[dict[str, Any]]]
ROUTES: dict[str, tuple[Whole, Events | None]] = {
    "/v1/responses": (response, response_events),
    "/v1/messages": (message, message_events),
    "/v1/embeddings": (embeddings, None),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), (rerank, None)),
    **dict.fromkeys(("/score", "/v1/score"), (score, None)),
}
