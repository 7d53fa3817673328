"""The end of a gateway, workers that hang, and clients that do not read."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from gateway_helpers import Pair, Served, Started, chat, wait_until
from scripted_upstream import Scripted
from semkv_gateway import serve, singleflight
from semkv_gateway.serve import Protocol
from semkv_gateway.singleflight import InFlight, SingleFlight
from semkv_gateway.sse import Assembler
from test_serve import ask, workers_of

MESSAGES = {
    "model": "m",
    "max_tokens": 9,
    "temperature": 0,
    "messages": [{"role": "user", "content": "held"}],
}


def held_stream(
    upstream: Scripted, url: str, path: str, body: dict[str, Any]
) -> tuple[threading.Thread, list[Any]]:
    """A request whose answer has begun and does not go on; what its client gets."""
    got: list[Any] = []

    def read() -> None:
        with httpx.stream("POST", url + path, json=body, timeout=120) as answer:
            got.append(answer.status_code)
            got.append("".join(answer.iter_text()))

    before = upstream.running
    reading = threading.Thread(target=read)
    reading.start()
    wait_until(lambda: upstream.running > before)
    return reading, got


@pytest.mark.parametrize("workers", ["1", "2"])
def test_what_is_open_at_the_end_is_told_so(tmp_path: Path, workers: str) -> None:
    upstream = Scripted()
    upstream.hold_at = 1
    with (
        Served(upstream) as behind,
        Started(behind.url, tmp_path, "--drain-timeout=1", f"--workers={workers}") as gateway,
    ):
        upstream.gate.clear()
        passed = chat("passed on", stream=True, stream_options={"odd": 1})
        streams = [
            held_stream(upstream, gateway.url, "/v1/chat/completions", chat("held", stream=True)),
            held_stream(upstream, gateway.url, "/v1/chat/completions", passed),
            held_stream(upstream, gateway.url, "/v1/messages", {**MESSAGES, "stream": True}),
            held_stream(upstream, gateway.url, "/v1/chat/completions", chat("not begun")),
        ]
        wait_until(lambda: all(got for _, got in streams[:3]))
        gateway.stop()
        for reading, _ in streams:
            reading.join()
        upstream.gate.set()
    said = gateway.log.read_text()
    assert "Traceback" not in said
    assert '"error"' not in "".join(line for line in said.splitlines() if '"level"' in line)
    assert [got[0] for _, got in streams] == [200, 200, 200, 503]
    for (_, got), named in zip(streams[:3], (False, False, True), strict=True):
        *_, name, data = got[1].strip().splitlines()
        error = json.loads(data.removeprefix("data: "))
        assert "stops" in error["error"]["message"]
        assert (name == "event: error", error.get("type") == "error") == (named, named)
    assert "stops" in json.loads(streams[3][1][1])["error"]["message"]


def test_a_worker_that_hangs_is_replaced(tmp_path: Path) -> None:
    upstream = Scripted()
    with Served(upstream) as behind, Started(behind.url, tmp_path, "--workers=2") as gateway:
        wait_until(lambda: gateway.log.read_text().count("startup complete") == 2)
        before = workers_of(gateway)
        figures = (
            Path(f"/proc/{before[0]}/environ")
            .read_text()
            .split("PROMETHEUS_MULTIPROC_DIR=")[1]
            .split("\0")[0]
        )
        wait_until(lambda: all((Path(figures) / f"{pid}.beat").exists() for pid in before))
        os.kill(before[0], signal.SIGSTOP)
        wait_until(lambda: before[0] not in workers_of(gateway) and len(workers_of(gateway)) == 2)
        assert before[1] in workers_of(gateway)
        wait_until(lambda: gateway.log.read_text().count("startup complete") == 3)
        assert all(ask(gateway, f"question {number}").status_code == 200 for number in range(10))
        assert gateway.stop() == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    cut: list[bool] = []
    monkeypatch.setattr(serve, "_UNREAD_S", 0.5)
    monkeypatch.setattr(Protocol, "cut", staticmethod(lambda: cut.append(True)))
    with Pair(tmp_path) as pair:
        body = json.dumps(chat("[big=20000000] to read", stream=stream)).encode()
        port = httpx.URL(pair.url).port
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: cut)
        wait_until(lambda: not pair.app.gateway.flights.running)
        wait_until(lambda: not pair.app.gateway.flights.held_bytes)
        assert pair.post("others go on").status_code == 200


def test_who_reads_too_slowly_holds_up_no_other_reader_of_one_large_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(singleflight, "_BEHIND_S", 0.2)
    chunk = b'data: {"choices": [], "x": "' + b"x" * 100_000 + b'"}\n\n'

    class Reply:
        status, headers, aclose = 200, [(b"content-type", b"text/event-stream")], AsyncMock()

        async def pieces(self) -> AsyncIterator[bytes]:
            for _ in range(20):
                yield chunk

    class Flight(InFlight):
        async def send(self) -> Any:
            return Reply()

    async def story() -> None:
        flights = SingleFlight(print, lambda _: None)
        flights.max_answer_bytes = 300_000
        flight = Flight(flights, "key", Assembler(chat=True))
        quick, slow = flights.start(flight), flight.reader(joined=True)
        slow_pieces = slow.pieces()
        async with asyncio.timeout(60):
            assert await anext(slow_pieces) == chunk
            assert [piece async for piece in quick.pieces()] == [chunk] * 20
            *_, last = [piece async for piece in slow_pieces]
        assert b"too slowly" in last
        quick.leave()
        slow.leave()
        assert flights.held_bytes == 0

    asyncio.run(story())
