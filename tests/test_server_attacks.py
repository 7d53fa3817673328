"""The gateway under clients that mean harm, or do not know better."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway_helpers import Pair, chat, wait_until

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("gateway")) as running:
        yield running


@pytest.fixture(scope="module")
def semantic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("semantic"), semantic=True) as running:
        yield running


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
        answer = line.send(data.replace(b"\r\nHost: x\r\n", b"\r\nHost: x\r\nConnection: close\r\n", 1)).rest()
    return int(answer[9:12] or 0), answer


class TestBodies:
    def test_a_compressed_body_is_read(self, pair: Pair) -> None:
        raw = gzip.compress(json.dumps(chat("packed")).encode())
        status, answer = ask(pair, request(raw, "Content-Encoding: gzip"))
        assert status == 200
        assert b"x-semkv: miss" in answer
        assert "content-encoding" not in pair.upstream.headers[-1]
        assert pair.post("packed").headers["x-semkv"].startswith("hit tier=exact")
        assert b"x-semkv: hit" in ask(pair, request(raw, "Content-Encoding: GZIP"))[1]
        plain = request(chat("packed"), "Content-Encoding: identity")
        assert b"x-semkv: hit" in ask(pair, plain)[1]
        assert ask(pair, request(raw, "Content-Encoding: gzip", target="/classify"))[0] != 400, (
            "it has a place for a salt"
        )

    @pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: raw + raw, lambda _: b"{}"])
    def test_what_is_no_gzip_is_refused(self, pair: Pair, damage: Callable[[bytes], bytes]) -> None:
        asked = pair.upstream.total
        raw = damage(gzip.compress(json.dumps(chat("packed")).encode()))
        assert ask(pair, request(raw, "Content-Encoding: gzip"))[0] == 400
        assert pair.upstream.total == asked

    @pytest.mark.parametrize("encoding", ["br", "zstd", "deflate", "gzip, gzip"])
    def test_another_encoding_is_refused_by_name(self, pair: Pair, encoding: str) -> None:
        status, answer = ask(pair, request(chat("packed"), f"Content-Encoding: {encoding}"))
        assert status == 415
        assert b"accept-encoding: gzip" in answer
        assert f"the content encoding '{encoding}' is not read".encode() in answer

    def test_a_body_that_is_large_when_unpacked(self, tmp_path: Path) -> None:
        with Pair(tmp_path, max_body_mib=1) as small:
            bomb = gzip.compress(b" " * 50_000_000)
            assert ask(small, request(bomb, "Content-Encoding: gzip"))[0] == 413
            raw = gzip.compress(json.dumps(chat("x" * 900_000)).encode())
            small.upstream.gate.clear()
            held = [
                ThreadPoolExecutor(16).submit(ask, small, request(raw, "Content-Encoding: gzip")) for _ in range(12)
            ]
            wait_until(lambda: sum(one.done() for one in held) >= 3)
            small.upstream.gate.set()
            statuses = [one.result(120)[0] for one in held]
            assert statuses.count(503) >= 3, "they take room until there is an answer"
            assert statuses.count(200) >= 1
            assert ask(small, request(raw, "Content-Encoding: gzip"))[0] == 200

    def test_a_body_that_comes_too_slowly(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("semkv.server.http._BODY_S", 0.2)
        head = request(b"{" + b" " * 99).removesuffix(b" " * 99)
        with Pair(tmp_path) as hasty, Line(hasty) as line, Line(hasty) as trickle:
            assert line.send(head).until(b"\r\n\r\n")[9:12] == b"408"
            trickle.send(head)
            for _ in range(90):  # a byte now and then buys no time
                time.sleep(0.01)
                try:
                    trickle.send(b" ")
                except OSError:
                    break
            assert trickle.until(b"\r\n\r\n")[9:12] == b"408"
            assert hasty.upstream.total == 0
            assert hasty.post("others").status_code == 200

    def test_unfinished_bodies_have_so_much_room_together(self, tmp_path: Path) -> None:
        begun = request(b"{" + b" " * 280_000).removesuffix(b" " * 80_000)
        with Pair(tmp_path) as pair, Line(pair) as first, Line(pair) as second:
            pair.app._room.most = 300_000
            first.send(begun)
            wait_until(lambda: pair.app._room.used > 190_000)
            second.send(begun)
            assert second.until(b"\r\n\r\n")[9:12] == b"503"
            assert pair.metric("semkv_turned_away_total") == 1
            assert pair.post("others").status_code == 200
            first.send(b" " * 80_000)
            assert first.until(b"\r\n\r\n")[9:12] == b"400"
            assert pair.app._room.used == 0


class TestHeads:
    def test_no_request_target_leads_to_another_server(self, pair: Pair) -> None:
        """The target goes behind the upstream's host and port as it stands."""
        for target in ("@127.0.0.1:1/v1/models", ".example/v1/models", ":1/v1/models", "*", "x", "?a", "#a"):
            for method in ("GET", "OPTIONS"):
                assert ask(pair, request(method=method, target=target))[0] == 400
        total = pair.upstream.total
        assert ask(pair, request(method="GET", target="http://other.example/v1/models"))[0] == 200
        assert ask(pair, request(chat("a"), target="//127.0.0.1:1/v1/chat/completions"))[0] in (200, 400)
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
    def test_what_two_servers_may_read_differently_is_refused(self, pair: Pair, head: bytes) -> None:
        total = pair.upstream.total
        status, _ = ask(pair, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + head)
        assert status in (400, 413)
        assert pair.upstream.total == total

    def test_a_head_without_end_is_cut_off(self, pair: Pair) -> None:
        for start in (b"GET /healthz HTTP/1.1\r\nX-Large: ", b"GET /"):
            with Line(pair) as line:
                line.send(start)
                assert line.flood(b"a" * 65536, 130 << 20) < 130 << 20

    @pytest.mark.parametrize("begun", [b"", b"GET /healthz HTTP/1.1\r\nHost:", b"\r\n"])
    def test_a_connection_without_a_head_ends(self, pair: Pair, monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
        monkeypatch.setattr("semkv.server.serve._HEAD_S", 0.3)
        with Line(pair) as line:
            assert line.send(begun).rest() == b""
        with Line(pair) as line:
            line.send(request(chat("slow [delay=1]"))).until(b"}]")
            line.send(begun).rest()
        assert pair.upstream.calls[-1]["messages"][0]["content"] == "slow [delay=1]"

    @pytest.mark.parametrize("value", ["ü", "漢字", "a\tb"])
    def test_header_values_go_on_byte_for_byte(self, pair: Pair, value: str) -> None:
        pair.post(f"header {value!r}", headers={"X-Name": value.encode()})
        assert pair.upstream.headers[-1]["x-name"].encode("latin-1") == value.encode()

    def test_a_websocket_is_closed(self, pair: Pair) -> None:
        upgrade = (
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {'a' * 22}==",
        )
        with Line(pair) as line:
            assert (
                line.send(request(b"", *upgrade, method="GET", target="/v1/realtime")).until(b"\r\n\r\n")[9:12]
                == b"403"
            )
        assert pair.post("still there").status_code == 200


class TestConnections:
    def test_a_client_that_does_not_read_does_not_fill_memory(self, tmp_path: Path) -> None:
        with Pair(tmp_path) as small:
            flights = small.app.gateway.flights
            flights.max_answer_bytes = 1 << 20
            with Line(small) as line:
                line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                line.send(request(chat("[big=60000000][events=600]", stream=True)))
                wait_until(lambda: flights.held_bytes > 0)
                most = last = still = 0
                while still < 100:  # for a second nothing comes in
                    held = flights.held_bytes
                    still, last, most = still + 1 if held == last else 0, held, max(most, held)
                    time.sleep(0.01)
                assert 0 < last <= most < 4 << 20
            wait_until(lambda: flights.held_bytes == 0 and small.upstream.running == 0)
