"""The gateway before upstreams that do not say what they should: odd streams, odd answers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway_helpers import PATIENT, SECRET, Pair, Served, chat, kind, reached
from semkv_gateway.app import app_of
from semkv_gateway.http import AppUpstream, Call
from semkv_gateway.settings import ServerSettings
from semkv_gateway.sse import Splitter


class Fixed:
    """An upstream that says one thing, whatever it is asked."""

    def __init__(self) -> None:
        self.asked, self.status = 0, 200
        self.headers: list[tuple[bytes, bytes]] = []
        self.pieces: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":  # uvicorn does without
            raise RuntimeError
        while (await receive()).get("more_body"):
            pass
        self.asked += 1
        if self.asked > 20:
            raise AssertionError("asked without end")
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        for piece in self.pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Odd(Pair):
    """A gateway in front of `Fixed`."""

    number = 0

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, upstream=Fixed())

    def ask(self, *streams: bool) -> list[httpx.Response]:
        """The same new question, as often as told, in these forms."""
        self.number, self.upstream.asked = self.number + 1, 0
        return [self.post(f"question {self.number}", stream=stream) for stream in streams]

    def says(self, *pieces: bytes, kind: bytes = b"text/event-stream", **more: bytes) -> None:
        headers = [(name.replace("_", "-").encode(), value) for name, value in more.items()]
        self.upstream.status, self.upstream.headers = 200, [(b"content-type", kind), *headers]
        self.upstream.pieces = list(pieces)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Odd]:
    with Odd(tmp_path_factory.mktemp("odd")) as running:
        yield running


def chunk(text: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    delta = {} if text is None else {"role": "assistant", "content": text}
    choices = [{"index": 0, "delta": delta, "finish_reason": finish}]
    top = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}
    return b"data: " + json.dumps(top).encode() + b"\n\n"


USAGE = chunk(choices=[], usage={"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3})
DONE = b"data: [DONE]\n\n"
HELLO = [chunk("Hel"), chunk("lo"), chunk(finish="stop"), USAGE, DONE]
STREAM = b"".join(HELLO)
WHOLE = {
    "id": "a",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
}


WHOLE_STREAMS = {
    "plain": HELLO,
    "one byte at a time, CRLF": [bytes([c]) for c in STREAM.replace(b"\n", b"\r\n")],
    "byte order mark": [b"\xef", b"\xbb\xbf" + STREAM],
    "comments and fields": [b": ping\n\n", b"event: x\nid: 3\nretry: 5\n", HELLO[0], b":\n\n", *HELLO[1:]],
    "no space": [STREAM.replace(b"data: ", b"data:")],
    "data in lines": [STREAM.replace(b'"object"', b'\ndata: "object"')],
    "empty data": [*HELLO[:1], b"data\n\n", b"data:\n\n", b"\n\n\n", *HELLO[1:]],
    "more after the end": [*HELLO, chunk("MORE")],
}
TORN_STREAMS = {
    "no end": (HELLO[:-1], "without end"),
    "no blank line at the end": ([STREAM[:-2]], "without end"),
    "two ends": ([*HELLO[:2], DONE, *HELLO[2:]], "without usage"),
    "no usage": ([*HELLO[:3], DONE], "without usage"),
    "an empty object": ([*HELLO[:2], b"data: {}\n\n", *HELLO[3:]], "of unknown form"),
    "an index that is no number": (
        [chunk("x", choices=[{"index": "0", "delta": {"content": "x"}}]), *HELLO], "of unknown form"
    ),
    "no object": ([HELLO[0], b"data: 5\n\n", *HELLO[1:]], "of unknown form"),
    "no JSON": ([HELLO[0], b"data: {\n\n", *HELLO[1:]], "of unknown form"),
    "an unknown field": ([chunk("x", odd={"a": 1}), *HELLO], "with an unknown field"),
    "nothing": ([], "without end"),
}  # fmt: skip


@pytest.mark.parametrize("which", WHOLE_STREAMS)
def test_a_stream_that_is_whole_is_kept_whole(odd: Odd, which: str) -> None:
    odd.says(*WHOLE_STREAMS[which])
    first, again, whole = odd.ask(True, True, False)
    assert odd.upstream.asked == 1
    assert [kind(answer) for answer in (first, again, whole)] == ["miss", "hit", "hit"]
    assert whole.json()["choices"][0]["message"]["content"] == "Hello"
    assert '"content":"Hello"' in again.text


@pytest.mark.parametrize("which", TORN_STREAMS)
def test_one_that_is_not_passes_as_it_came_and_is_not_kept_and_counted(odd: Odd, which: str) -> None:
    pieces, why = TORN_STREAMS[which]
    counter = f'semkv_uncacheable_total{{reason="stream {why}"}}'
    odd.says(*pieces)
    before = odd.metric(counter)
    answers = odd.ask(True, True, False)
    assert odd.metric(counter) == before + 3
    assert odd.upstream.asked == 3, "once for each"
    for answer in answers:
        assert (answer.status_code, answer.headers["x-semkv"]) == (200, "miss")
        assert answer.content.replace(USAGE, b"").split() == b"".join(pieces).replace(USAGE, b"").split()


ODD_ANSWERS = {
    "html": b"<html>",
    "empty": b"",
    "no answer": b'{"choices": 5}',
    "no choices": json.dumps({**WHOLE, "choices": []}).encode(),
    "nested": b'{"choices": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    "an unknown field": json.dumps({**WHOLE, "choices": [{"index": 0, "message": {"odd": {"a": 1}}}]}).encode(),
}


@pytest.mark.parametrize("which", ODD_ANSWERS)
def test_who_does_not_stream_as_asked_is_asked_once(odd: Odd, which: str) -> None:
    odd.says(ODD_ANSWERS[which], kind=b"application/json")
    (answer,) = odd.ask(True)
    assert (answer.status_code, answer.content, odd.upstream.asked) == (200, ODD_ANSWERS[which], 1)


def test_an_answer_that_does_not_name_its_kind_is_streamed_as_what_it_is(odd: Odd) -> None:
    whole = {"choices": [{"index": 0, "text": "Hello", "finish_reason": "stop"}]}
    odd.says(json.dumps(whole).encode(), kind=b"application/json")
    body = {"model": "m", "prompt": "which kind?", "temperature": 0}
    first, again = (httpx.post(f"{odd.url}/v1/completions", json={**body, "stream": s}) for s in (False, True))
    assert (kind(first), kind(again)) == ("miss", "hit")
    assert '"text":"Hello"' in again.text


def test_an_answer_with_half_a_character_is_shown(odd: Odd) -> None:
    odd.says(json.dumps(WHOLE).replace("Hello", "\\ud800").encode(), kind=b"application/json")
    assert kind(odd.ask(False, False)[1]) == "hit"
    assert odd.admin("hits", None).json()["hits"][0]["answer"] == "\ud800"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_events_are_the_same_in_whatever_pieces_they_come(end: str) -> None:
    events = [b"event: a\ndata: one\ndata: two\n\n", b": ping\n\n", b"data: \xef\xbb\xbfthree\n\n", b"id: 4\n\n"]
    data = b"".join(events).replace(b"\n", end.encode())
    for cut in range(len(data)):
        splitter = Splitter()
        assert [*splitter.feed(data[:cut]), *splitter.feed(data[cut:])] == events
        assert not splitter.rest.strip()


@contextmanager
def closing_once(status: bytes = b"200 OK", *headers: bytes) -> Iterator[tuple[str, list[str]]]:
    """A server that takes its first request and closes the connection, then answers; its URL and what it was asked."""
    asked: list[str] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as file:
                request = file.readline().decode().split(" HTTP")[0]
                health = request == "GET /health"  # at the gateway's start
                asked.extend([request] * (not health))
                head = dict(line.lower().split(b": ", 1) for line in iter(file.readline, b"\r\n"))
                file.read(int(head.get(b"content-length", 0)))
                if health or len(asked) > 1:
                    body = json.dumps(WHOLE).encode()
                    lines = [b"content-type: application/json", b"connection: close, x-hop", b"x-hop: 1", *headers]
                    head = b"\r\n".join([b"HTTP/1.1 " + status, *lines, b"content-length: %d" % len(body), b"", b""])
                    connection.sendall(head + body)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", asked
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(120)


@pytest.mark.parametrize(
    ("method", "path", "again"),
    [("POST", "/v1/chat/completions?a=b", True), ("GET", "/v1/models", True), ("POST", "/v1/files", False)],
)
def test_what_may_have_had_an_effect_is_sent_once(tmp_path: Path, method: str, path: str, again: bool) -> None:
    with closing_once() as (url, asked):
        settings = ServerSettings(upstream=url, semantic=False, cache_dir=tmp_path, **PATIENT)
        with Served(app_of(settings, {"SEMKV_SECRET": SECRET})) as front:
            body = chat("once") if method == "POST" else None
            answer = httpx.request(method, f"{front.url}{path}", json=body, timeout=120)
        assert answer.status_code == (200 if again else 502)
        assert asked == [f"{method} {path}"] * (2 if again else 1)


@pytest.mark.parametrize(
    ("status", "passed"), [(b"103 Early\r\n\r\nHTTP/1.1 200 OK", 200), (b"101 Other", 502), (b"600 Odd", 502)]
)
def test_what_no_server_may_answer_ends_no_request(tmp_path: Path, status: bytes, passed: int) -> None:
    with closing_once(status, b"x-odd: a\x01b") as (url, _):
        settings = ServerSettings(upstream=url, semantic=False, cache_dir=tmp_path, **PATIENT)
        with Served(app_of(settings, {"SEMKV_SECRET": SECRET})) as front:
            answer = httpx.post(f"{front.url}/v1/chat/completions", json=chat("odd"), timeout=120)
    assert answer.status_code == passed
    assert "x-hop" not in answer.headers
    assert answer.headers.get("x-odd", "a b") == "a b"


@pytest.mark.parametrize("listens", [True, False])
def test_an_application_inside_ends_when_the_client_hangs_up(listens: bool) -> None:
    """vLLM aborts a generation by the message alone: being canceled does not reach the task that generates."""
    heard = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not listens:
            await send({"type": "http.response.body", "body": b"more than is read", "more_body": True})
            await asyncio.sleep(0)
        heard.append((await receive())["type"])

    async def hang_up() -> None:
        reply: Any = await AppUpstream(app).send(Call({"type": "http", "headers": []}, b"{}"))
        await reached(lambda: listens or reply._messages.full())
        await reply.aclose()
        await asyncio.wait((reply._task,))

    asyncio.run(hang_up())
    assert heard == ["http.disconnect"] * listens
