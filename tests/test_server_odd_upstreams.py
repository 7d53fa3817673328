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

from gateway_helpers import PATIENT, SECRET, Pair, Served, chat, kind, reached, wait_until
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
    top = {
        "id": "a",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": choices,
        **more,
    }
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
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
}


WHOLE_STREAMS = {
    "plain": HELLO,
    "one byte at a time, CRLF": [bytes([c]) for c in STREAM.replace(b"\n", b"\r\n")],
    "byte order mark": [b"\xef", b"\xbb\xbf" + STREAM],
    "comments and fields": [
        b": ping\n\n",
        b"event: message\nid: 3\nretry: 5\n",
        HELLO[0],
        b":\n\n",
        *HELLO[1:],
    ],
    "no space": [STREAM.replace(b"data: ", b"data:")],
    "data in lines": [STREAM.replace(b'"object"', b'\ndata: "object"')],
    "empty data": [*HELLO[:1], b"data\n\n", b"data:\n\n", b"\n\n\n", *HELLO[1:]],
    "more after the end": [*HELLO, chunk("MORE")],
}
TORN_STREAMS = {
    "no end": (HELLO[:-1], "without end"),
    "no blank line at the end": ([STREAM[:-2]], "without end"),
    "an empty object": ([*HELLO[:2], b"data: {}\n\n", *HELLO[3:]], "of unknown form"),
    "no object": ([HELLO[0], b"data: 5\n\n", *HELLO[1:]], "of unknown form"),
    "no JSON": ([HELLO[0], b"data: {\n\n", *HELLO[1:]], "of unknown form"),
    "a name twice": ([HELLO[0], HELLO[1].replace(b'"content"', b'"content": "x", "content"'), *HELLO[2:]],
                     "of unknown form"),
    "a number that is none": ([HELLO[0], chunk("x", created=float("nan")), *HELLO[1:]], "of unknown form"),
    "an error": ([HELLO[0], chunk("x", error={"message": "x"}), *HELLO[1:]], "with an error"),
    "an error in an old form": ([HELLO[0], b'data: {"object": "error", "message": "x"}\n\n', DONE], "with an error"),
    "an error in a field": ([chunk("x", x_groq={"error": "x"}), *HELLO], "with an error"),
    "an error in other letters": ([HELLO[0], chunk("x", Errors=[{"message": "x"}]), *HELLO[1:]], "with an error"),
    "an error by name": ([HELLO[0], b"event: error\n" + HELLO[1], *HELLO[2:]], "with an error"),
    "an error without a name": ([HELLO[0], b'data: {"detail": "x"}\n\n', *HELLO[1:]], "of unknown form"),
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
def test_one_that_is_not_passes_as_it_came_and_is_not_kept_and_counted(
    odd: Odd, which: str
) -> None:
    pieces, why = TORN_STREAMS[which]
    counter = f'semkv_uncacheable_total{{reason="stream {why}"}}'
    odd.says(*pieces)
    before = odd.metric(counter)
    answers = odd.ask(True, True, False)
    assert odd.metric(counter) == before + 3
    assert odd.upstream.asked == 3, "once for each"
    for answer in answers:
        assert (answer.status_code, answer.headers["x-semkv"]) == (200, "miss")
        assert (
            answer.content.replace(USAGE, b"").split()
            == b"".join(pieces).replace(USAGE, b"").split()
        )


def piece(*calls: Any, **delta: Any) -> bytes:
    return chunk(
        choices=[{"index": 0, "delta": {**delta, **({"tool_calls": calls} if calls else {})}}]
    )


def call(number: str | None, name: str | None, arguments: Any, **more: Any) -> dict[str, Any]:
    return {
        "id": number,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
        **more,
    }


CALLED = [chunk(finish="tool_calls"), USAGE, DONE]
FOR_STREAMS = {
    "no usage": [*HELLO[:3], DONE],
    "an unknown field of the chunk": [chunk("x", citations=["u"]), *HELLO],
    "an unknown field of the delta": [piece(content="x", annotations=[{"url": "u"}]), *HELLO],
    "an unknown field of the choice": [chunk("x"), chunk(choices=[{"index": 0, "filter": {"hate": 1}}]), *HELLO],
    "an event with a name": [b"event: x\n" + HELLO[0], *HELLO[1:]],
    "another form of a thought": [piece(reasoning_details=[{"type": "reasoning.text", "text": "x"}]), *HELLO],
    "a list beside the probabilities": [
        chunk(choices=[{"index": 0, "delta": {"content": "x"}, "logprobs": {"content": [], "other": [1]}}]), *HELLO],
    "parts of a text": [piece(content=[{"type": "text", "text": "x"}]), *HELLO],
    "text after the end": [*HELLO[:3], chunk("x"), USAGE, DONE],
    "another kind of object": [chunk("x", object="chat.completion.extra"), *HELLO],
    "two answers": [chunk("x", id="one"), chunk("y", id="other"), *HELLO],
    "two models": [chunk("x", model="one"), chunk("y", model="other"), *HELLO],
    "a call of the client's own kind": [piece({"index": 0, "id": "a", "type": "custom", "custom": {
        "name": "look", "input": "ab"}}), piece({"index": 0, "custom": {"input": "cd"}}), *CALLED],
    "a name that goes on": [piece(call("a", "re", "", index=0)), piece(call("a", "ad", "{}", index=0)), *CALLED],
    "no id": [piece(call(None, "read", "{}", index=0)), *CALLED],
    "one id twice": [piece(call("a", "read", "{}", index=0), call("a", "read", "{}", index=1)), *CALLED],
    "the second index alone": [piece(call("a", "read", "{}", index=1)), *CALLED],
    "an index of another kind": [
        piece(call("a", "read", "", index=0)), piece(call(None, None, "{}", index=False)), *CALLED],
    "some without index": [piece(call("a", "read", "{}", index=0), call("b", "read", "{}", index=None)), *CALLED],
    "arguments that are an object": [piece(call("a", "read", {"a": 1}, index=0)), *CALLED],
    "a call of another kind": [piece({"index": 0, "id": "a", "type": "function", "function": {
        "name": "read", "arguments": "{}", "strict": True}}), *CALLED],
}  # fmt: skip
NOT_COMPLETE = {
    "two ends": [*HELLO[:2], DONE, *HELLO[2:]],
    "cut off": [*HELLO[:2], chunk(finish="length"), USAGE, DONE],
    "cut off, for streams": [chunk("x", odd=1), *HELLO[:2], chunk(finish="length"), USAGE, DONE],
    "filtered": [*HELLO[:2], chunk(finish="content_filter"), USAGE, DONE],
    "two reasons": [*HELLO[:2], chunk(finish="length"), *HELLO[2:]],
    "empty": [chunk(""), chunk(finish="stop"), USAGE, DONE],
    "empty, for streams": [chunk("", odd=1), chunk(finish="stop"), USAGE, DONE],
    "blank": [chunk(" "), chunk("\n"), chunk(finish="stop"), USAGE, DONE],
    "nothing that one sees": [chunk("\u200b\U000e0041"), chunk(finish="stop"), USAGE, DONE],
    "a call without a name, for streams": [
        piece(call("a", "read", "{}", index=0)), piece(call("b", None, "{}", index=1)), *CALLED],
    "blank, for streams": [chunk(" ", odd=1), chunk(finish="stop"), USAGE, DONE],
    "speech alone": [piece(audio={"id": "a", "data": "AAAA"}), chunk(finish="stop"), USAGE, DONE],
    "a call of the old form": [piece(function_call={"name": "read", "arguments": "{}"}),
                               chunk(finish="function_call"), USAGE, DONE],
    "arguments with a name twice": [piece(call("a", "read", '{"a": 1, "a": 2}', index=0)), *CALLED],
    "a message in place of its pieces": [
        chunk(choices=[{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]), USAGE, DONE],
    "reasoning alone": [piece(reasoning="x"), chunk(finish="stop"), USAGE, DONE],
    "no choice": [USAGE, DONE],
    "another choice": [chunk(choices=[{"index": 1, "delta": {"content": "x"}, "finish_reason": "stop"}]), USAGE, DONE],
    "more choices": [chunk(choices=[{"index": 1, "delta": {"content": "x"}, "finish_reason": "stop"}]), *HELLO],
    "an index that is no number": [chunk("x", choices=[{"index": "0", "delta": {"content": "x"}}]), *HELLO],
    "no call": [chunk("x"), *CALLED],
    "half of the arguments": [piece(call("a", "read", '{"a": ', index=0)), *CALLED],
    "half of the arguments, for streams": [piece(call(None, "read", '{"a": ', index=0)), *CALLED],
    "no arguments, for streams": [piece(call("a", "read", "", index=0), call("b", "re", "{}", index=0)), *CALLED],
    "no arguments": [piece(call("a", "read", "", index=0)), *CALLED],
    "arguments that are no object": [piece(call("a", "read", "5", index=0)), *CALLED],
    "two calls cut into each other": [
        piece(call("a", "read", '{"a": ', index=0)), piece(call("b", "read", '{"b": ', index=0)),
        piece(call("a", None, "1}", index=0)), *CALLED,
    ],
}  # fmt: skip


@pytest.mark.parametrize("which", FOR_STREAMS)
def test_a_stream_that_cannot_be_put_together_is_kept_for_streams(odd: Odd, which: str) -> None:
    odd.says(*FOR_STREAMS[which])
    first, again, whole, last = odd.ask(True, True, False, True)
    assert [kind(answer) for answer in (first, again, whole, last)] == [
        "miss",
        "hit",
        "miss",
        "hit",
    ]
    assert odd.upstream.asked == 2
    assert first.content == again.content == last.content
    assert first.content == b"".join(FOR_STREAMS[which]).replace(USAGE, b""), (
        "nobody asked for the usage"
    )
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    assert odd.post(f"question {odd.number}", **asked).content == b"".join(FOR_STREAMS[which])


def test_a_stale_stream_for_streams_only_is_fetched_anew_as_one(tmp_path: Path) -> None:
    with Pair(tmp_path, upstream=Fixed(), ttl=3600.0, stale=3600.0) as pair:
        upstream, responses = pair.upstream, pair.app.gateway.cache.responses
        upstream.headers = [(b"content-type", b"text/event-stream")]
        upstream.pieces = [chunk("old", odd=1), chunk(finish="stop"), DONE]
        assert [kind(pair.post("a", stream=True)) for _ in range(2)] == ["miss", "hit"]
        now = responses._clock()
        responses._clock = lambda: now + 5000.0
        upstream.pieces = [chunk("new", odd=1), chunk(finish="stop"), DONE]
        stale = pair.post("a", stream=True)
        assert "stale" in stale.headers["x-semkv"]
        assert "old" in stale.text
        wait_until(lambda: "new" in pair.post("a", stream=True).text)
        assert upstream.asked == 2


@pytest.mark.parametrize("which", NOT_COMPLETE)
def test_a_stream_that_is_not_complete_is_not_kept(odd: Odd, which: str) -> None:
    odd.says(*NOT_COMPLETE[which])
    assert [kind(answer) for answer in odd.ask(True, True, False)] == ["miss"] * 3


@pytest.mark.parametrize(
    ("fragments", "names"),
    [
        ([call("a", "read", "{}", index=0), call("b", "list", '{"b": 1}', index=0)], ["read", "list"]),
        ([call("a", "read", "{}"), call("b", "read", "{}")], ["read", "read"]),
        ([call("b", "list", "{", index=1), call("a", "read", "{}", index=0), call("", "", "}", index=1)], ["read", "list"]),  # noqa: E501
        ([call("a", "read", "{", index=0), call("a", "read", "", index=0), call("a", "read", "}", index=0)], ["read"]),
    ],
)  # fmt: skip
def test_calls_are_put_together(odd: Odd, fragments: list[Any], names: list[str]) -> None:
    odd.says(*(piece(fragment) for fragment in fragments), *CALLED)
    first, again, whole = odd.ask(True, True, False)
    assert [kind(answer) for answer in (first, again, whole)] == ["miss", "hit", "hit"]
    calls = whole.json()["choices"][0]["message"]["tool_calls"]
    assert [one["function"]["name"] for one in calls] == names
    assert all(isinstance(json.loads(one["function"]["arguments"]), dict) for one in calls)


@pytest.mark.parametrize(
    "field",
    [
        {"obfuscation": "x"},
        {"provider": "x"},
        {"timings": {"a": 1}},
        {"x_groq": {"id": "x"}},
        {"error": None},
    ],
)
def test_what_says_nothing_of_the_answer_keeps_no_form_from_being_made(
    odd: Odd, field: dict[str, Any]
) -> None:
    odd.says(
        *(chunk(text, **field) for text in ("Hel", "lo")),
        chunk(finish="stop", **field),
        USAGE,
        DONE,
    )
    assert [kind(answer) for answer in odd.ask(True, True, False)] == ["miss", "hit", "hit"]
    odd.says(json.dumps({**WHOLE, **field}).encode(), kind=b"application/json")
    assert [kind(answer) for answer in odd.ask(False, False, True)] == ["miss", "hit", "hit"]


@pytest.mark.parametrize(
    "more",
    [
        {"citations": ["u"]},
        {"choices": [{**WHOLE["choices"][0], "filter": {"a": 1}}]},
        {
            "choices": [
                {**WHOLE["choices"][0], "message": {"content": "x", "annotations": [{"a": 1}]}}
            ]
        },
        {
            "choices": [
                {**WHOLE["choices"][0], "message": {"content": [{"type": "text", "text": "x"}]}}
            ]
        },
    ],
)
def test_an_answer_of_which_no_stream_can_be_made_is_for_others_only(
    odd: Odd, more: dict[str, Any]
) -> None:
    odd.says(json.dumps({**WHOLE, **more}).encode(), kind=b"application/json")
    assert [kind(answer) for answer in odd.ask(False, False)] == ["miss", "hit"]
    odd.says(*HELLO[:3], DONE)
    question = f"question {odd.number}"
    assert [kind(odd.post(question, stream=stream)) for stream in (True, True, False)] == [
        "miss",
        "hit",
        "hit",
    ]


ODD_ANSWERS = {
    "html": b"<html>",
    "empty": b"",
    "no answer": b'{"choices": 5}',
    "no choices": json.dumps({**WHOLE, "choices": []}).encode(),
    "nested": b'{"choices": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    "an unknown field": json.dumps(
        {**WHOLE, "choices": [{"index": 0, "message": {"odd": {"a": 1}}}]}
    ).encode(),
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
    first, again = (
        httpx.post(f"{odd.url}/v1/completions", json={**body, "stream": s}) for s in (False, True)
    )
    assert (kind(first), kind(again)) == ("miss", "hit")
    assert '"text":"Hello"' in again.text


def test_an_answer_with_half_a_character_is_shown(odd: Odd) -> None:
    odd.says(json.dumps(WHOLE).replace("Hello", "x\\ud800").encode(), kind=b"application/json")
    assert kind(odd.ask(False, False)[1]) == "hit"
    assert odd.admin("recent", None).json()["hits"][0]["answer"] == "x\ud800"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_events_are_the_same_in_whatever_pieces_they_come(end: str) -> None:
    events = [
        b"event: a\ndata: one\ndata: two\n\n",
        b": ping\n\n",
        b"data: \xef\xbb\xbfthree\n\n",
        b"id: 4\n\n",
    ]
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
                    lines = [
                        b"content-type: application/json",
                        b"connection: close, x-hop",
                        b"x-hop: 1",
                        *headers,
                    ]
                    head = b"\r\n".join(
                        [b"HTTP/1.1 " + status, *lines, b"content-length: %d" % len(body), b"", b""]
                    )
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
    [
        ("POST", "/v1/chat/completions?a=b", True),
        ("GET", "/v1/models", True),
        ("POST", "/v1/files", False),
    ],
)
def test_what_may_have_had_an_effect_is_sent_once(
    tmp_path: Path, method: str, path: str, again: bool
) -> None:
    with closing_once() as (url, asked):
        settings = ServerSettings(upstreams=(url,), semantic=False, cache_dir=tmp_path, **PATIENT)
        with Served(app_of(settings, {"SEMKV_SECRET": SECRET})) as front:
            body = chat("once") if method == "POST" else None
            answer = httpx.request(method, f"{front.url}{path}", json=body, timeout=120)
        assert answer.status_code == (200 if again else 502)
        assert asked == [f"{method} {path}"] * (2 if again else 1)


@pytest.mark.parametrize(
    ("status", "passed"),
    [(b"103 Early\r\n\r\nHTTP/1.1 200 OK", 200), (b"101 Other", 502), (b"600 Odd", 502)],
)
def test_what_no_server_may_answer_ends_no_request(
    tmp_path: Path, status: bytes, passed: int
) -> None:
    with closing_once(status, b"x-odd: a\x01b") as (url, _):
        settings = ServerSettings(upstreams=(url,), semantic=False, cache_dir=tmp_path, **PATIENT)
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
            await send(
                {"type": "http.response.body", "body": b"more than is read", "more_body": True}
            )
            await asyncio.sleep(0)
        heard.append((await receive())["type"])

    async def hang_up() -> None:
        reply: Any = await AppUpstream(app).send(Call({"type": "http", "headers": []}, b"{}"))
        await reached(lambda: listens or reply._messages.full())
        await reply.aclose()
        await asyncio.wait((reply._task,))

    asyncio.run(hang_up())
    assert heard == ["http.disconnect"] * listens
