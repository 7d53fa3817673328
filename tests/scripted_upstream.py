"""An OpenAI-compatible server that does what the prompt says, for tests and benches of the gateway.

The last user text may hold directives in brackets: ``[delay=0.2]`` seconds before the answer,
``[status=500]``, whose error ``says`` more,
``[length]`` for an answer cut off, ``[cut]`` for a stream that breaks, ``[error]`` for an error event in the stream,
``[odd]`` for a field in it that nobody knows,
``[tool]`` for a tool call, ``[think]`` for reasoning, ``[big=100000]`` for that many characters, ``[events=N]`` for the
number of content events, ``[gap=0.1]`` seconds between them. The answer is the text itself, so that every test can tell
whose answer it got. Other routes are in `scripted_routes`.

    python -m uvicorn --app-dir tests scripted_upstream:app --port 9000
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from scripted_routes import CREATED, ROUTES, text_of

_DIRECTIVE = re.compile(r"\[(\w+)(?:=([\d.]+))?\]")
_ANSWERS = 128  # to one request; a fuzzer asks for milliards
EVENTS = b"text/event-stream; charset=utf-8"


class Scripted:
    """The ASGI application. ``calls`` holds every body it was sent, ``running`` and ``aborted`` count.

    ``script`` adds directives to a text that does not hold them itself. While ``gate`` is closed (cleared), no answer
    begins; with ``hold_at`` streams begin and wait before the event with that number. ``says`` gives an answer further
    headers, by the scope of its request.
    """

    def __init__(self, keep: int = 10_000) -> None:
        self.script: dict[str, dict[str, str]] = {}
        self.says: Callable[[Any], list[tuple[bytes, bytes]]] = lambda _: []
        self.gate, self.hold_at = threading.Event(), 0
        self.gate.set()
        self.calls: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.keep, self.total, self.running, self.aborted = keep, 0, 0, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        send = partial(self._send, scope, send)
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"]
        if path == "/health":
            await self._json(send, 200, {})
        elif path == "/v1/models":
            await self._json(
                send, 200, {"object": "list", "data": [{"id": "scripted", "object": "model"}]}
            )
        else:
            await self._answer(scope, body, receive, send)

    async def _send(self, scope: Any, send: Any, message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *self.says(scope)]}
        await send(message)

    def _note(self, scope: Any, body: dict[str, Any]) -> None:
        if len(self.calls) < self.keep:
            self.calls.append(body)
            self.headers.append({k.decode(): v.decode("latin-1") for k, v in scope["headers"]})

    async def _json(self, send: Any, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Any, raw: bytes, receive: Any, send: Any) -> None:
        self.total += 1
        try:
            body = json.loads(raw)
            text = prompt_of(body)
            if (body.get("n") or 1) > _ANSWERS:
                raise ValueError("too many answers")
            said = dict(_DIRECTIVE.findall(text)) | self.script.get(text, {})
            whole, stream = ROUTES.get(scope["path"], (answer, chunks))
            streams = stream is not None and body.get("stream")
            content = list(stream(body, text, said)) if streams else whole(body, text, said)
        except Exception:
            await self._json(
                send,
                400,
                {"error": {"message": "no request", "type": "BadRequestError", "code": 400}},
            )
            return
        self._note(scope, body)
        self.running += 1
        gone = asyncio.ensure_future(self._gone(receive))
        work = asyncio.ensure_future(self._work(content, said, send))
        try:
            await asyncio.wait((gone, work), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.aborted += 1
        finally:
            self.running -= 1
            gone.cancel()
            work.cancel()

    async def _gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _work(self, content: Any, said: dict[str, str], send: Any) -> None:
        if "delay" in said:
            await asyncio.sleep(float(said["delay"]))
        if not (self.hold_at and isinstance(content, list)):
            await self._opened()
        if "status" in said:
            status = int(said["status"])
            message = f"scripted {said.get('says', '')}".rstrip()
            await self._json(
                send, status, {"error": {"message": message, "type": "Scripted", "code": status}}
            )
        elif isinstance(content, list):
            await self._stream(content, said, send)
        else:
            await self._json(send, 200, content)

    async def _opened(self) -> None:
        while not self.gate.is_set():
            await asyncio.sleep(0.01)

    async def _stream(self, content: list[Any], said: dict[str, str], send: Any) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-type", EVENTS)]}
        )
        for number, chunk in enumerate(content):
            if number == self.hold_at:
                await self._opened()
            if number == 0 and "odd" in said:
                chunk = {**chunk, "odd": "a field that nobody knows"}
            if number == 2 and "cut" in said:
                raise RuntimeError("scripted break")
            if number == 2 and "error" in said:
                error = {"message": "scripted", "type": "Scripted", "code": 500}
                chunk = {"error": error} | ({"type": "error"} if "type" in chunk else {})
            named = b"event: " + chunk["type"].encode() + b"\n" if "type" in chunk else b""
            data = named + b"data: " + json.dumps(chunk).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})
            if "gap" in said:
                await asyncio.sleep(float(said["gap"]))
        end = b"" if "type" in content[0] else b"data: [DONE]\n\n"
        await send({"type": "http.response.body", "body": end})


def prompt_of(body: dict[str, Any]) -> str:
    for name in ("prompt", "input", "query", "text_1", "queries"):
        if isinstance(body.get(name), str):
            return str(body[name])
    if "messages" not in body and not isinstance(body.get("input"), list):
        return str(body["prompt"])
    last = body.get("messages", body.get("input"))[-1]
    content = last.get("content") if isinstance(last, dict) else str(last)
    if isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content if part["type"] in ("text", "input_text"))


def _usage(text: str) -> dict[str, int]:
    return {"prompt_tokens": 7, "completion_tokens": len(text), "total_tokens": 7 + len(text)}


def _finish(said: dict[str, str]) -> str:
    return "length" if "length" in said else "tool_calls" if "tool" in said else "stop"


def _calls(text: str) -> list[dict[str, Any]]:
    arguments = json.dumps({"text": text})
    return [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, name in enumerate(("look", "tell"))
    ]


def answer(body: dict[str, Any], text: str, said: dict[str, str]) -> dict[str, Any]:
    out = text_of(text, said)
    top: dict[str, Any] = {
        "id": f"id-{time.time_ns()}",
        "created": CREATED,
        "model": body.get("model", "scripted"),
    }
    choices: list[dict[str, Any]] = []
    for index in range(body.get("n") or 1):
        if "messages" not in body:
            choices.append(
                {"index": index, "text": out, "logprobs": None, "finish_reason": _finish(said)}
            )
            continue
        message: dict[str, Any] = {"role": "assistant", "content": out}
        if "think" in said:
            message["reasoning"] = "Let me think."
        if "tool" in said:
            message |= {"content": None, "tool_calls": _calls(text)}
        logprobs = _logprobs(out) if body.get("logprobs") else None
        choices.append(
            {
                "index": index,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": _finish(said),
            }
        )
    kind = "chat.completion" if "messages" in body else "text_completion"
    return {**top, "object": kind, "choices": choices, "usage": _usage(out)}


def _logprobs(text: str) -> dict[str, Any]:
    return {
        "content": [
            {"token": c, "logprob": -0.5, "bytes": [*c.encode()], "top_logprobs": []} for c in text
        ]
    }


def chunks(body: dict[str, Any], text: str, said: dict[str, str]) -> Iterator[dict[str, Any]]:
    out = text_of(text, said)
    chat = "messages" in body
    kind = "chat.completion.chunk" if chat else "text_completion"
    top = {
        "id": f"id-{time.time_ns()}",
        "created": CREATED,
        "model": body.get("model", "scripted"),
        "object": kind,
    }
    parts = int(said.get("events", 3))
    size = -(-len(out) // parts)
    numbers = range(body.get("n") or 1)

    def chunk(
        index: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        fields = {"delta": delta} if chat else {"text": delta.get("content", "")}
        return {
            **top,
            "choices": [{"index": index, **fields, "logprobs": logprobs, "finish_reason": finish}],
        }

    if chat:
        yield from (chunk(i, {"role": "assistant", "content": ""}) for i in numbers)
    if "think" in said:
        yield from (
            chunk(i, {"reasoning": piece}) for piece in ("Let me", " think.") for i in numbers
        )
    if "tool" in said:
        for i in numbers:
            for at, call in enumerate(_calls(text)):
                head = {**call, "function": {"name": call["function"]["name"], "arguments": ""}}
                yield chunk(i, {"tool_calls": [{"index": at, **head}]})
                for start in range(0, len(call["function"]["arguments"]), 5):
                    piece = call["function"]["arguments"][start : start + 5]
                    yield chunk(
                        i, {"tool_calls": [{"index": at, "function": {"arguments": piece}}]}
                    )
    else:
        for start in range(0, len(out), size):
            piece = out[start : start + size]
            logprobs = _logprobs(piece) if body.get("logprobs") else None
            yield from (chunk(i, {"content": piece}, logprobs=logprobs) for i in numbers)
    yield from (chunk(i, {}, _finish(said)) for i in numbers)
    if (body.get("stream_options") or {}).get("include_usage"):
        yield {**top, "choices": [], "usage": _usage(out)}


app = Scripted(keep=0)
