"""The gateway as its clients see it: the stock OpenAI client in front, a scripted server behind."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import fastapi
import httpx
import openai
import pytest

from gateway_helpers import ADMIN, SECRET, Held, Pair, Served, beside, chat, kind, said, wait_until
from semkv_gateway import Middleware
from semkv_gateway.singleflight import InFlight, SingleFlight
from semkv_gateway.sse import Assembler, Recorder
from test_server_attacks import Line, request


def calls(pair: Pair, text: str) -> int:
    """How often the upstream was asked this."""
    return sum(json.dumps(body).count(json.dumps(text)) > 0 for body in pair.upstream.calls)


def bare(value: Any) -> Any:
    """What an answer says, without what the client's own assembly of a stream adds or leaves empty."""
    if isinstance(value, list):
        return [bare(one) for one in value]
    if isinstance(value, dict):
        return {
            name: bare(one)
            for name, one in value.items()
            if one and name not in ("index", "parsed_arguments")
        }
    return value


class TestReplay:
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_hit_has_the_form_of_the_miss_and_no_usage_that_nobody_asked_for(
        self, pair: Pair, stream: bool
    ) -> None:
        first, second = (pair.post(f"twice {stream}", stream=stream) for _ in range(2))
        assert second.headers["x-semkv"].startswith("hit tier=exact age=")
        assert second.headers["content-type"] == first.headers["content-type"]
        assert second.content == first.content or stream
        for answer in (first, second) if stream else ():
            assert answer.text.endswith("data: [DONE]\n\n")
            assert '"usage":{' not in answer.text.replace(" ", "")

    @pytest.mark.parametrize(
        "form", ["plain ü 漢字 🙂", "[tool] calls", "[think] first", "[think][tool] both"]
    )
    def test_every_form_of_an_answer_survives_both_directions(self, pair: Pair, form: str) -> None:
        """The client's own library puts the streams together."""
        completions = pair.client().chat.completions

        def streamed(body: dict[str, Any]) -> Any:
            with completions.stream(**body, stream_options={"include_usage": True}) as stream:
                return bare(stream.get_final_completion().model_dump())

        def whole(body: dict[str, Any]) -> Any:
            return bare(completions.create(**body).model_dump())

        for more in ({}, {"n": 3}, {"logprobs": True}):
            for first, second in ((streamed, whole), (whole, streamed)):
                text = f"{form} {more} {first.__name__}"
                body = chat(text, **more)
                answer = first(body)
                assert second(body) == answer
                assert len(answer["choices"]) == more.get("n", 1)
                assert calls(pair, text) == 1

    def test_completions_of_plain_prompts(self, pair: Pair) -> None:
        create, ask = (
            pair.client().completions.create,
            {"model": "scripted", "prompt": "old style", "temperature": 0},
        )
        first, again, streamed = create(**ask), create(**ask), create(**ask, stream=True)
        assert first == again
        assert (
            "".join(piece.choices[0].text for piece in streamed)
            == first.choices[0].text
            == "You said: old style"
        )
        assert calls(pair, "old style") == 1

    def test_a_stream_passes_as_it_comes(self, pair: Pair) -> None:
        pair.upstream.hold_at = 2
        pair.upstream.gate.clear()
        try:
            body = chat("slowly [events=4]", stream=True)
            with httpx.stream("POST", f"{pair.url}/v1/chat/completions", json=body) as answer:
                lines = (line for line in answer.iter_lines() if line.startswith("data:"))
                assert next(lines), "while the upstream has more to say"
                pair.upstream.gate.set()
                assert len(list(lines)) > 3
        finally:
            pair.upstream.hold_at = 0
            pair.upstream.gate.set()

    def test_what_the_upstream_is_sent_means_the_same(self, pair: Pair) -> None:
        headers = {"Authorization": "Bearer k", "Connection": "x-odd", "X-Odd": "1"}
        pair.post("sent on", top_p=0.5, headers=headers)
        body, headers = pair.upstream.calls[-1], pair.upstream.headers[-1]
        assert body["top_p"] == 0.5
        assert body["messages"] == chat("sent on")["messages"]
        assert headers["authorization"] == "Bearer k"
        assert "x-odd" not in headers
        assert pair.client().models.list().data[0].id == "scripted", "other routes pass through"


@pytest.mark.parametrize("stream", [False, True])
def test_incomplete_answers_and_errors_are_not_kept(pair: Pair, stream: bool) -> None:
    for how, status in (
        ("length", 200),
        ("status=500", 500),
        ("status=429", 429),
        ("status=400", 400),
    ):
        text = f"[{how}] {stream}"
        answers = [pair.post(text, stream=stream) for _ in range(2)]
        assert [(a.status_code, a.headers["x-semkv"]) for a in answers] == [(status, "miss")] * 2
        assert status == 200 or answers[0].json()["error"]["message"] == "scripted"
        assert calls(pair, text) == 2
    for how in ("cut", "error") if stream else ():
        for _ in range(2):
            with pytest.raises(openai.APIError):
                list(
                    pair.client().chat.completions.create(
                        **chat(f"[{how}] in the middle"), stream=True
                    )
                )
        assert calls(pair, f"[{how}] in the middle") == 2


@pytest.mark.parametrize(
    ("headers", "second", "third"),
    [
        ({"Cache-Control": "no-cache"}, "miss", "hit"),
        ({"Cache-Control": "max-age=0"}, "miss", "hit"),
        ({"Cache-Control": "max-age=60"}, "hit", "hit"),
        ({"Cache-Control": "no-store"}, "hit", "hit"),
        ({"X-Semkv-Bypass": "1"}, "pass", "hit"),
        ({"Cache-Control": "no-cache, no-store"}, "pass", "hit"),
    ],
)
def test_a_client_may_ask_for_less(
    pair: Pair, headers: dict[str, str], second: str, third: str
) -> None:
    text = f"controls {headers}"
    answers = [pair.post(text), pair.post(text, headers=headers), pair.post(text)]
    assert [kind(answer) for answer in answers[1:]] == [second, third]
    first, asked, last = (answer.json()["id"] for answer in answers)
    assert (asked == first) == (second == "hit")
    assert last == (asked if second == "miss" else first), "a fresh answer is for all"
    unheard = f"never heard {headers}"
    kept = [pair.post(unheard, headers=headers), pair.post(unheard)]
    assert kind(kept[1]) == ("miss" if "no-store" in str(headers) or second == "pass" else "hit")


def test_a_client_that_wants_a_stored_answer_or_none_gets_none(pair: Pair) -> None:
    only, asked = {"Cache-Control": "only-if-cached"}, pair.upstream.total
    with beside(pair, "not stored yet"):
        for text, more in (
            ("not stored yet", {}),
            ("never asked", {"stream": True}),
            ("drawn", {"temperature": 1}),
            (5, {}),
        ):
            answer = pair.post(text, headers=only, **more)
            assert (answer.status_code, kind(answer)) == (504, "pass" if text == 5 else "miss")
    assert pair.upstream.total == asked + 1
    assert kind(pair.post("not stored yet", headers=only)) == "hit"
    assert 'status="504"' not in httpx.get(f"{pair.url}/metrics").text, (
        "an alert looks at what failed"
    )


def test_an_answer_may_be_too_old_or_stale(tmp_path: Path) -> None:
    with Pair(tmp_path, ttl=1000.0, stale=1000.0) as pair:
        responses = pair.app.gateway.cache.responses

        def ask(after: float, **headers: str) -> tuple[str, str]:
            responses._clock = lambda: time.time() + after
            answer = pair.post("aging", headers=headers)
            return re.sub(r"age=\d+", "age=N", answer.headers["x-semkv"]), answer.json()["id"]

        _, first = ask(0)
        assert ask(100, **{"Cache-Control": "max-age=200"}) == ("hit tier=exact age=N", first)
        why, fresh = ask(100, **{"Cache-Control": "max-age=60"})
        assert why == "miss reason=too-old"
        assert ask(1500) == ("hit tier=exact age=N stale", fresh)
        wait_until(lambda: ask(1500)[1] != fresh)  # it was fetched meanwhile
        assert ask(1500)[0] == "hit tier=exact age=N"
        assert len(pair.asked) == 3


class TestSingleFlight:
    @pytest.mark.parametrize(
        ("text", "stream", "end"),
        [
            ("stampede", False, "}"),
            ("of streams", True, "[DONE]\n\n"),
            ("that fails [status=503]", False, "}"),
        ],
    )
    def test_100_equal_requests_reach_the_upstream_once(
        self, pair: Pair, text: str, stream: bool, end: str
    ) -> None:
        joins = pair.metric("semkv_single_flight_joins_total")
        with beside(pair, text, stream=stream) as first:
            others = [pair.soon(text, stream=stream) for _ in range(99)]
            wait_until(lambda: pair.readers == 100)
        ((status, said),) = {
            (answer.result().status_code, answer.result().text) for answer in (first, *others)
        }
        assert status == (503 if "status" in text else 200)
        assert said.endswith(end)
        assert calls(pair, text) == 1
        assert pair.metric("semkv_single_flight_joins_total") == joins + 99

    @pytest.mark.parametrize("stream", [False, True])
    def test_who_hangs_up_takes_nobody_along_and_the_last_one_the_upstream(
        self, pair: Pair, stream: bool
    ) -> None:
        aborted, text = pair.upstream.aborted, f"hang up {stream}"
        lines: list[Line] = []

        def ask(readers: int) -> None:
            lines.append(Line(pair).send(request(chat(text, stream=stream))))
            wait_until(lambda: pair.readers == readers)

        def hang_up(readers: int) -> None:
            lines.pop(0).socket.close()
            wait_until(lambda: pair.readers == readers)

        pair.upstream.gate.clear()
        try:
            ask(1)
            ask(2)
            hang_up(1)
            assert pair.upstream.aborted == aborted
            ask(2)
            hang_up(1)
            hang_up(0)
            wait_until(lambda: pair.upstream.aborted == aborted + 1 and not pair.upstream.running)
            ask(1)
        finally:
            pair.upstream.gate.set()
        with lines[0] as last:
            assert b"You" in last.until(b"You")
        assert calls(pair, text) == 2

    @pytest.mark.parametrize("stream", [False, True])
    def test_nobody_has_the_end_before_the_cache_has_the_whole(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch, stream: bool
    ) -> None:
        cache, asked, stored = pair.app.gateway.cache, threading.Event(), threading.Event()
        store = cache.store

        async def slow(*given: Any) -> bool:
            asked.set()
            await asyncio.to_thread(stored.wait)
            return await store(*given)

        monkeypatch.setattr(cache, "store", slow)
        answer = pair.soon(f"acknowledged {stream}", stream=stream)
        wait_until(asked.is_set)
        try:
            (flight,) = pair.app.gateway.flights.running
            assert not answer.done()
            assert not any(b"[DONE]" in chunk for chunk in flight._chunks)
        finally:
            stored.set()
        assert answer.result().status_code == 200

    def test_a_lookup_that_began_before_an_invalidation_is_not_joined(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = pair.post("from before").json()["id"]
        responses = pair.app.gateway.cache.responses
        key = next(reversed(responses._memory._entries))
        wait_until(lambda: responses._store.get(key) is not None)
        responses._memory._drop(key)
        monkeypatch.setattr(
            responses, "_clock", lambda: time.time() + 1000
        )  # it is no answer to these lookups
        cache, looks = pair.app.gateway.cache, []
        look_up = cache._look_up
        monkeypatch.setattr(
            cache, "_look_up", lambda *given: looks.append(given) or look_up(*given)
        )
        with Held(cache._reads, "_do", after=True) as held:  # the store's reply is on its way
            early = pair.soon("from before")
            wait_until(held.waiting.is_set)
            assert (
                pair.admin("invalidate", {"prefix": "from before", "dry_run": False}).json()[
                    "count"
                ]
                == 1
            )
            late = pair.soon("from before")
            wait_until(lambda: len(looks) == 2)
        early.result()
        assert late.result().json()["id"] != old


def test_who_wants_the_other_form_of_what_has_none_asks_once(pair: Pair) -> None:
    """Streams of this upstream have a field that nobody knows, so no other answer can be made of them."""
    text = "[odd] in two forms"
    with beside(pair, text, stream=True) as first:
        calls = len(pair.upstream.calls)
        others = [pair.soon(text) for _ in range(5)]
        wait_until(lambda: pair.readers == 6)
        pair.upstream.gate.set()
        answers = [other.result() for other in others]
    assert len(pair.upstream.calls) == calls + 1
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert pair.post(text, stream=True).content == first.result().content
    assert pair.post(text).content == answers[0].content
    pair.admin("invalidate", {"prefix": "[odd]", "dry_run": False})


def test_a_flight_that_is_canceled_before_its_first_step_has_an_end() -> None:
    class Unanswered(InFlight):
        async def send(self) -> Any:
            await asyncio.Event().wait()

    async def story() -> None:
        flights = SingleFlight(print, print)
        flight = Unanswered(flights, "key", Assembler(chat=True))
        flights.start(flight)
        flights.close()
        async with asyncio.timeout(60):
            await flight.until(lambda: False)
            await flight.task
        assert not flights.running

    asyncio.run(story())


def test_a_flight_that_goes_on_without_readers_has_an_end() -> None:
    """As where it is canceled at the moment in which the store has its answer, and Python 3.11 forgets that."""

    class Reply:
        status, headers, aclose = 200, [(b"content-type", b"text/event-stream")], AsyncMock()

        async def pieces(self) -> AsyncIterator[bytes]:
            yield b'data: {"type": "end"}\n\n'
            yield b"data: " + b"x" * 300_000 + b"\n\n"

    class Left(InFlight):
        async def send(self) -> Any:
            return Reply()

        async def on_whole(self) -> None:
            for reader in list(self.readers):
                reader.leave()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    async def story() -> None:
        flights = SingleFlight(print, print)
        flight = Left(flights, "key", Recorder("end"))
        flights.start(flight)
        async with asyncio.timeout(60):
            await asyncio.wait((flight.task,))
        assert (flights.running, flights.held_bytes) == (set(), 0)

    asyncio.run(story())


class TestFaults:
    def test_the_upstream_is_down(self, tmp_path: Path) -> None:
        with Pair(tmp_path) as pair:
            kept = pair.post("kept")
            pair.behind.stop()
            assert pair.post("kept").content == kept.content
            lost = pair.post("lost")
            assert (lost.status_code, lost.json()["error"]["type"]) == (502, "upstream_error")
            with pytest.raises(openai.InternalServerError, match="cannot be reached"):
                pair.client().models.list()
            assert httpx.get(f"{pair.url}/healthz").status_code == 200
            assert httpx.get(f"{pair.url}/readyz").status_code == 503

    def test_bodies_are_bounded(self, tmp_path: Path) -> None:
        with Pair(tmp_path, max_body_mib=11) as pair:
            large = "[big=10]" + "x" * 10_000_000
            assert [kind(pair.post(large)) for _ in range(2)] == ["miss", "hit"]

            def pieces() -> Iterator[bytes]:
                for _ in range(12):
                    yield b"x" * (1 << 20)

            for content in (b"x" * 12_000_000, pieces()):
                refused = httpx.post(
                    f"{pair.url}/v1/chat/completions", content=content, timeout=120
                )
                assert refused.status_code == 413
                assert "11 MiB" in refused.json()["error"]["message"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_answer_too_large_to_hold_is_passed_on_and_not_kept(
        self, pair: Pair, stream: bool
    ) -> None:
        for _ in range(2):
            answer = pair.post("[big=9000000][events=90]", stream=stream)
            assert answer.text.count("x") >= 9_000_000
            assert answer.headers["x-semkv"] == "miss"
        wait_until(lambda: pair.app.gateway.flights.held_bytes == 0)

    def test_a_store_that_hangs_costs_its_time_limit_and_recovers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ended = threading.Event()
        with Pair(tmp_path, store_timeout=0.1) as pair:
            store = pair.app.gateway.cache.responses._store
            for name, real in (("get", store.get), ("put_all", store.put_all)):
                monkeypatch.setattr(store, name, lambda *a, real=real: ended.wait() and real(*a))
            assert pair.post("slow store").status_code == 200
            assert kind(pair.post("slow store")) == "hit"  # from memory
            assert pair.post("[big=100000] too large for the log").status_code == 200
            assert pair.metric("semkv_faults_total") >= 2
            monkeypatch.undo()
            ended.set()
            wait_until(lambda: kind(pair.post("later")) == "hit")
            wait_until(lambda: store.usage()[0] == 3)  # what was late is written all the same

    def test_a_fault_of_ours_does_not_cost_the_answer(self, tmp_path: Path) -> None:
        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("scripted fault")

        with Pair(tmp_path) as pair:
            gateway = pair.app.gateway
            for target, name, stream in (
                (gateway, "_canonicalise", False),
                (gateway.cache, "look_up", False),
                (gateway.cache, "store", False),
                (gateway.flights, "join", False),
                (Assembler, "_add", True),
            ):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(target, name, broken)
                    assert (
                        said(pair.post(f"with a broken {name}", stream=stream))
                        == f"You said: with a broken {name}"
                    )


# -- the middleware below a path, vLLM's ``--root-path`` ------------------------------------------------------------


def test_proxies_that_take_the_path_off_and_others_share_one_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "CACHE_DIR": str(tmp_path),
        "SECRET": SECRET,
        "ADMIN_KEY": ADMIN,
        "SEMANTIC": "0",
    }.items():
        monkeypatch.setenv(f"SEMKV_{name}", value)
    seen: list[dict[str, Any]] = []
    app = fastapi.FastAPI(root_path="/api")

    @app.post("/v1/chat/completions")
    async def answer(asked: fastapi.Request) -> dict[str, Any]:
        seen.append(await asked.json())
        return {
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": "yes"},
                }
            ]
        }

    app.add_middleware(Middleware)  # type: ignore[arg-type]
    with Served(app) as served:
        replies = [
            httpx.post(f"{served.url}{at}/v1/chat/completions", json=chat("a"))
            for at in ("/api", "", "/api")
        ]
        assert [kind(reply) for reply in replies] == ["miss", "hit", "hit"]
        for prefix in ("/api", ""):
            assert "semkv_requests_total" in httpx.get(f"{served.url}{prefix}/semkv/metrics").text
        assert httpx.get(f"{served.url}/apiary/semkv/metrics").status_code == 404
    (body,) = seen
    assert len(body["cache_salt"]) == 64
