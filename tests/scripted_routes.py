"""What `scripted_upstream` says on the routes that are no chats and completions: answers, and the events of streams.

Each function takes the body, the text of its last turn, and the directives in it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

Said = dict[str, str]
CREATED = 1_700_000_000


def _pieces(text: str, parts: int) -> list[str]:
    size = -(-len(text) // parts)
    return [text[start : start + size] for start in range(0, len(text), size)]


def _text(text: str, said: Said) -> str:
    return "x" * int(said["big"]) if "big" in said else f"You said: {text}"


# -- Responses ---------------------------------------------------------------------------------------------------------


def _items(text: str, said: Said) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if "think" in said:
        thought = {"type": "reasoning_text", "text": "Let me think."}
        items.append({"id": "rs_1", "type": "reasoning", "summary": [], "content": [thought], "status": "completed"})
    if "tool" in said:
        call = {"name": "look", "arguments": json.dumps({"text": text}), "call_id": f"call_{time.time_ns()}"}
        return [*items, {"id": "fc_1", "type": "function_call", "status": "completed", **call}]
    part = {"type": "output_text", "text": _text(text, said), "annotations": [], "logprobs": []}
    return [*items, {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}]


def response(body: dict[str, Any], text: str, said: Said) -> dict[str, Any]:
    """``[length]``, ``[fail]`` and ``[cancel]`` end it early."""
    status = (
        "incomplete" if "length" in said else "failed" if "fail" in said else "cancelled" if "cancel" in said else ""
    )
    error = {"code": "server_error", "message": "scripted"} if "fail" in said else None
    usage = {
        "input_tokens": 7, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": len(text),
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 7 + len(text),
    }  # fmt: skip
    details = {"reason": "max_output_tokens"} if "length" in said else None
    repeated = ("temperature", "metadata", "user", "previous_response_id", "instructions", "store")
    return {
        "id": f"resp_{time.time_ns()}", "object": "response", "created_at": CREATED, "error": error,
        "status": status or "completed", "incomplete_details": details,
        "model": body.get("model", "scripted"), "output": _items(text, said), "parallel_tool_calls": True,
        "tool_choice": "auto", "tools": body.get("tools") or [], "top_p": 1.0, "usage": usage,
        **{name: body.get(name) for name in repeated},
    }  # fmt: skip


def response_events(body: dict[str, Any], text: str, said: Said) -> Iterator[dict[str, Any]]:
    whole, number = response(body, text, said), 0
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "error": None, "incomplete_details": None}

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        nonlocal number
        number += 1
        return {"type": f"response.{kind}", "sequence_number": number - 1, **fields}

    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        at = {"item_id": item["id"], "output_index": index}
        bare = {**item, "status": "in_progress", **({"content": []} if "content" in item else {"arguments": ""})}
        yield event("output_item.added", output_index=index, item=bare)
        if item["type"] == "function_call":
            for piece in _pieces(item["arguments"], 3):
                yield event("function_call_arguments.delta", delta=piece, **at)
            yield event("function_call_arguments.done", arguments=item["arguments"], name=item["name"], **at)
        else:
            (part,) = item["content"]
            name = part["type"]
            yield event("content_part.added", content_index=0, part={**part, "text": ""}, **at)
            for piece in _pieces(part["text"], int(said.get("events", 3))):
                yield event(f"{name}.delta", content_index=0, delta=piece, logprobs=[], **at)
            yield event(f"{name}.done", content_index=0, text=part["text"], logprobs=[], **at)
            yield event("content_part.done", content_index=0, part=part, **at)
        yield event("output_item.done", output_index=index, item=item)
    yield event(whole["status"], response=whole)


# -- Messages ----------------------------------------------------------------------------------------------------------


def message(body: dict[str, Any], text: str, said: Said) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if "think" in said:
        content.append({"type": "thinking", "thinking": "Let me think.", "signature": "signed"})
    if "tool" in said:
        content.append({"type": "tool_use", "id": f"toolu_{time.time_ns()}", "name": "look", "input": {"text": text}})
    else:
        content.append({"type": "text", "text": _text(text, said)})
    reason = (
        "max_tokens" if "length" in said else "pause_turn" if "cancel" in said else "refusal" if "fail" in said else ""
    )
    return {
        "id": f"msg_{time.time_ns()}", "type": "message", "role": "assistant", "model": body.get("model", "scripted"),
        "content": content, "stop_reason": reason or ("tool_use" if "tool" in said else "end_turn"),
        "stop_sequence": None, "usage": {"input_tokens": 7, "output_tokens": len(text)},
    }  # fmt: skip


def message_events(body: dict[str, Any], text: str, said: Said) -> Iterator[dict[str, Any]]:
    whole = message(body, text, said)
    usage = {"input_tokens": 7, "output_tokens": 0}
    yield {"type": "message_start", "message": {**whole, "content": [], "stop_reason": None, "usage": usage}}
    for index, block in enumerate(whole["content"]):
        kind, field, delta = {
            "text": ("text", "text", "text_delta"),
            "thinking": ("thinking", "thinking", "thinking_delta"),
            "tool_use": ("input", "partial_json", "input_json_delta"),
        }[block["type"]]
        empty: Any = {} if kind == "input" else ""
        yield {"type": "content_block_start", "index": index, "content_block": {**block, kind: empty}}
        yield {"type": "ping"}
        said_whole = json.dumps(block[kind]) if kind == "input" else block[kind]
        for piece in _pieces(said_whole, int(said.get("events", 3))):
            yield {"type": "content_block_delta", "index": index, "delta": {"type": delta, field: piece}}
        yield {"type": "content_block_stop", "index": index}
    end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": end, "usage": {"output_tokens": whole["usage"]["output_tokens"]}}
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
    return {"id": f"embd-{time.time_ns()}", "object": "list", "model": body.get("model"), "data": data, "usage": usage}


def rerank(body: dict[str, Any], text: str, said: Said) -> dict[str, Any]:
    """The longest document first."""
    ranked = sorted(enumerate(_several(body["documents"])), key=lambda one: -len(one[1]))
    found = [{"index": i, "document": {"text": one}, "relevance_score": float(len(one))} for i, one in ranked]
    return {"id": f"score-{time.time_ns()}", "model": body.get("model"), "results": found, "usage": {"total_tokens": 7}}


def score(body: dict[str, Any], text: str, said: Said) -> dict[str, Any]:
    others = _several(body.get("text_2") or body.get("documents"))
    data = [{"index": i, "object": "score", "score": float(len(one))} for i, one in enumerate(others)]
    return {"id": f"score-{time.time_ns()}", "object": "list", "model": body.get("model"), "data": data, "usage": {}}


Whole = Callable[[dict[str, Any], str, Said], dict[str, Any]]
Events = Callable[[dict[str, Any], str, Said], Iterator[dict[str, Any]]]
ROUTES: dict[str, tuple[Whole, Events | None]] = {
    "/v1/responses": (response, response_events),
    "/v1/messages": (message, message_events),
    "/v1/embeddings": (embeddings, None),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), (rerank, None)),
    **dict.fromkeys(("/score", "/v1/score"), (score, None)),
}
