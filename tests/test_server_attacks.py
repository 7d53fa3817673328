"""The gateway under clients that mean harm, or do not know better."""

from __future__ import annotations

import gzip
import json
import socket
import time
from typing import Any

import httpx
import pytest

from gateway_helpers import Pair, chat, wait_until

CHAT = "/v1/chat/completions"


class Line:
    """A TCP connection to a gateway."""

    def __init__(self, pair: Pair) -> None:
        url = httpx.URL(pair.url)
        self.socket = socket.create_connection((url.host, url.port or 80), timeout=120)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> Line:
        self.socket.sendall(data)
        return self

    def flood(self, piece: bytes, most: int, pause: float = 0.0) -> int:
        """Send the same over and over; how many bytes it took until the other side had enough."""
        for sent in range(0, most, len(piece)):
            time.sleep(pause)
            try:
                self.send(piece)
            except OSError:
                return sent
        return most

    def until(self, mark: bytes) -> bytes:
        """What comes, up to and with ``mark``, or to the end."""
        found = b""
        while mark not in found and (data := self.socket.recv(65536)):
            found += data
        return found

    def rest(self) -> bytes:
        """What comes until the other side closes."""
        return self.until(b"\0 never \0")


def request(body: Any = b"", *headers: str, method: str = "POST", target: str = CHAT) -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"{method} {target} HTTP/1.1", "Host: x", f"Content-Length: {len(raw)}", *headers]
    if not any(line.lower().startswith("content-type") for line in headers):
        lines.append("Content-Type: application/json")
    return "\r\n".join([*lines, "", ""]).encode() + raw


def ask(pair: Pair, data: bytes) -> tuple[int, bytes]:
    """Status and everything that came, on a connection of its own."""
    with Line(pair) as line:
        answer = line.send(
            data.replace(b"\r\nHost: x\r\n", b"\r\nHost: x\r\nConnection: close\r\n", 1)
        ).rest()
    return int(answer[9:12] or 0), answer


class TestBodies:
    def test_a_compressed_body_is_refused_where_a_salt_belongs(self, pair: Pair) -> None:
        asked, raw = pair.upstream.total, gzip.compress(json.dumps(chat("packed")).encode())
        for target in (CHAT, "/classify"):
            assert ask(pair, request(raw, "Content-Encoding: gzip", target=target))[0] == 415
        assert pair.upstream.total == asked
        assert ask(pair, request(chat("packed"), "Content-Encoding: identity"))[0] == 200
        ask(pair, request(raw, "Content-Encoding: gzip", target="/v1/files"))
        assert pair.upstream.total == asked + 2, "it goes on as it came"

    def test_a_body_that_comes_too_slowly(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("semkv_gateway.http._BODY_S", 0.2)
        asked, head = pair.upstream.total, request(b"{" + b" " * 99).removesuffix(b" " * 99)
        with Line(pair) as line, Line(pair) as trickle:
            trickle.send(head)
            assert line.send(head).until(b"\r\n\r\n")[9:12] == b"408"
            trickle.flood(b" ", 90, pause=0.01)  # a byte now and then buys no time
            assert trickle.until(b"\r\n\r\n")[9:12] == b"408"
        assert pair.upstream.total == asked

    def test_unfinished_bodies_have_so_much_room_together(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun = request(b"{" + b" " * 280_000).removesuffix(b" " * 80_000)
        bodies = pair.app._bodies
        monkeypatch.setattr(bodies, "_most", 300_000)
        with Line(pair) as first, Line(pair) as second:
            first.send(begun)
            wait_until(lambda: bodies._unfinished > 190_000)
            second.send(begun)
            assert second.until(b"\r\n\r\n")[9:12] == b"503"
            assert pair.metric('semkv_turned_away_total{what="bodies"}') == 1
            assert pair.post("others").status_code == 200
            first.send(b" " * 80_000)
            assert first.until(b"\r\n\r\n")[9:12] == b"400"
            assert bodies._unfinished == 0


class TestHeads:
    def test_no_request_target_leads_to_another_server(self, pair: Pair) -> None:
        """The target goes behind the upstream's host and port as it stands."""
        for target in (
            "@127.0.0.1:1/v1/models",
            ".example/v1/models",
            ":1/v1/models",
            "*",
            "x",
            "?a",
            "#a",
        ):
            for method in ("GET", "OPTIONS"):
                assert ask(pair, request(method=method, target=target))[0] == 400
        total = pair.upstream.total
        assert ask(pair, request(method="GET", target="http://other.example/v1/models"))[0] == 200
        assert ask(pair, request(chat("a"), target="//127.0.0.1:1/v1/chat/completions"))[0] in (
            200,
            400,
        )
        assert pair.upstream.total == total + 1, "both were asked of the upstream"

    @pytest.mark.parametrize(
        "head",
        [
            b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}    ",
            b"Content-Length: -5\r\n\r\n{}",
            b"Content-Length: 99999999999999999999999\r\n\r\n{}",
            b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"X-Odd : a\r\n\r\n",
            b"X\x00: a\r\n\r\n",
            b"X: a\x00b\r\n\r\n",
        ],
    )
    def test_what_two_servers_may_read_differently_is_refused(
        self, pair: Pair, head: bytes
    ) -> None:
        total = pair.upstream.total
        status, _ = ask(pair, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + head)
        assert status in (400, 413)
        assert pair.upstream.total == total

    def test_what_is_no_body_is_cut_off(self, pair: Pair) -> None:
        chunked = request(chat("in chunks")).replace(
            b"Content-Length: ", b"Transfer-Encoding: chunked\r\nX: "
        )
        body = chunked[chunked.index(b"{") :]
        chunked = chunked.removesuffix(body) + b"%x\r\n%s\r\n0\r\n" % (len(body), body)
        for start in (b"GET /healthz HTTP/1.1\r\nX-Large: ", b"GET /", chunked + b"X-Trailer: "):
            with Line(pair) as line:
                line.send(start)
                assert line.flood(b"a" * 65536, 130 << 20) < 130 << 20
        with Line(pair) as line:
            line.send(chunked + b"Authorization: Bearer another's\r\n\r\n").until(b"}]")
            assert "authorization" not in pair.upstream.headers[-1], (
                "a proxy looks at the head alone"
            )

    @pytest.mark.parametrize("begun", [b"", b"GET /healthz HTTP/1.1\r\nHost:", b"\r\n"])
    def test_a_connection_without_a_head_ends(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch, begun: bytes
    ) -> None:
        monkeypatch.setattr("semkv_gateway.serve._HEAD_S", 0.2)
        monkeypatch.setattr(pair.front.server.config, "timeout_keep_alive", 0.2)
        with Line(pair) as line:
            assert line.send(begun).rest() == b""
        with Line(pair) as line:
            assert b"}]" in line.send(request(chat("slow [delay=0.6]"))).until(b"}]"), (
                "an answer may take longer"
            )
            line.send(begun).rest()

    def test_header_values_go_on_byte_for_byte(self, pair: Pair) -> None:
        for value in ("ü", "漢字", "a\tb"):
            pair.post(f"header {value!r}", headers={"X-Name": value.encode()})
            assert pair.upstream.headers[-1]["x-name"].encode("latin-1") == value.encode()

    @pytest.mark.parametrize(
        "wish", ["h2c\r\nHTTP2-Settings: AAEAAEAA", "websocket\r\nSec-WebSocket-Version: 13"]
    )
    def test_a_wish_for_another_protocol_costs_nothing(self, pair: Pair, wish: str) -> None:
        """Java's client has it in its first request; httptools then reads no body."""
        asked = request(chat(wish), "Connection: Upgrade, HTTP2-Settings", f"Upgrade: {wish}")
        with Line(pair) as whole, Line(pair) as parts:
            assert b"You said: " in whole.send(asked + asked).until(b"}]")
            whole.until(b"}]")
            for piece in (asked[:40], asked[40:-9], asked[-9:]):
                parts.send(piece)
                time.sleep(0.05)
            assert b"x-semkv: hit" in parts.until(b"}]")
        assert {"upgrade", "http2-settings"}.isdisjoint(pair.upstream.headers[-1])
        assert b"x-semkv: hit" in ask(pair, asked)[1], "also with Connection: close"

    @pytest.mark.parametrize(
        "wish", [("Upgrade: h2c", "Connection: Upgrade", "Connection: keep-alive"), ()]
    )
    def test_one_request_has_one_answer(self, pair: Pair, wish: tuple[str, ...]) -> None:
        """A proxy in front would give the second to somebody else."""
        asked = (
            request(chat("once"), *wish) if wish else request(method="CONNECT", target="/v1/models")
        )
        with Line(pair) as line:
            line.send(asked + request(method="GET", target="/healthz"))
            answers = line.until(b'"ok"' if wish else b"received.")
        assert [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]] == (
            [b"200", b"200"] if wish else [b"400"]
        )

    def test_many_wishes_at_once_are_read_one_after_another(self, pair: Pair) -> None:
        wish = request(b"", "Connection: Upgrade", "Upgrade: h2c", method="GET", target="/healthz")
        with Line(pair) as line:
            line.send(wish * 600 + request(method="GET", target="/semkv/x"))
            assert line.until(b"not found").count(b"200 OK") == 600


def test_a_client_that_does_not_read_does_not_fill_memory(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    flights = pair.app.gateway.flights
    monkeypatch.setattr(flights, "max_answer_bytes", 1 << 20)
    with Line(pair) as line:
        line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.send(request(chat("[big=60000000][events=600]", stream=True)))
        wait_until(lambda: flights.held_bytes > 0)
        most = last = still = 0
        while still < 100:  # for a second nothing comes in
            held = flights.held_bytes
            still, last, most = still + 1 if held == last else 0, held, max(most, held)
            time.sleep(0.01)
        assert 0 < last <= most < 4 << 20
    wait_until(lambda: flights.held_bytes == 0 and pair.upstream.running == 0)
