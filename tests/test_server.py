"""The gateway as its clients see it: the stock OpenAI client in front, a scripted server behind."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path

import aiohttp
import httpx
import openai
import pytest

from gateway_helpers import Pair, chat, reached, wait_until
from semkv.server.cache_client import Pool
from semkv.server.tenancy import Tenants


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("gateway")) as running:
        yield running


def calls(pair: Pair, text: str) -> int:
    """How often the upstream was asked this."""
    return sum(json.dumps(body).count(json.dumps(text)) > 0 for body in pair.upstream.calls)


class TestReplay:
    def test_the_second_answer_is_the_first_one_byte_for_byte(self, pair: Pair) -> None:
        first, second = pair.post("twice"), pair.post("twice")
        assert (first.headers["x-semkv"], calls(pair, "twice")) == ("miss", 1)
        assert second.headers["x-semkv"].startswith("hit tier=exact age=")
        assert second.content == first.content
        assert second.headers["content-type"] == "application/json"

    @pytest.mark.parametrize(
        "text", ["plain", "[tool] calls", "[think] first", "[think][tool] both", "umlaut äöü 漢字 🙂"]
    )
    @pytest.mark.parametrize("more", [{}, {"n": 3}, {"logprobs": True}])
    def test_every_form_of_an_answer_survives_both_directions(self, pair: Pair, text: str, more: dict) -> None:
        client = pair.client()
        for first_streams in (True, False):
            said = f"{text} {more} {first_streams}"
            body = chat(said, **more)
            forms = {}
            for stream in (first_streams, not first_streams):
                if stream:
                    options = {"stream_options": {"include_usage": True}}
                    forms[stream] = whole(list(client.chat.completions.create(**body, stream=True, **options)))
                else:
                    forms[stream] = flat(client.chat.completions.create(**body))
            assert forms[True] == forms[False]
            assert len(forms[True]["choices"]) == more.get("n", 1)
            assert calls(pair, said) == 1

    def test_a_stream_that_was_kept_is_replayed_as_a_stream(self, pair: Pair) -> None:
        body = chat("stream twice", stream=True)
        first, second = (httpx.post(f"{pair.url}/v1/chat/completions", json=body) for _ in range(2))
        assert first.headers["x-semkv"] == "miss"
        assert second.headers["x-semkv"].startswith("hit")
        assert second.headers["content-type"].startswith("text/event-stream")
        for answer in (first, second):
            assert answer.text.endswith("data: [DONE]\n\n")
            assert '"usage":{' not in answer.text.replace(" ", ""), "usage was not asked for"

    def test_completions_of_plain_prompts(self, pair: Pair) -> None:
        client = pair.client()
        ask = {"model": "scripted", "prompt": "old style", "temperature": 0}
        first = client.completions.create(**ask)
        assert client.completions.create(**ask) == first
        pieces = list(client.completions.create(**ask, stream=True))
        assert "".join(p.choices[0].text for p in pieces) == first.choices[0].text == "You said: old style"
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
        pair.post(
            "sent on",
            top_p=0.5,
            headers={"Authorization": "Bearer k", "X-Request-Id": "7", "Connection": "x-odd", "X-Odd": "1"},
        )
        (at,) = [i for i, body in enumerate(pair.upstream.calls) if json.dumps(body).count('"sent on"')]
        body, headers = pair.upstream.calls[at], pair.upstream.headers[at]
        assert body["top_p"] == 0.5
        assert body["messages"] == chat("sent on")["messages"]
        assert (headers["authorization"], headers["x-request-id"]) == ("Bearer k", "7")
        assert "x-odd" not in headers


class TestNotKept:
    @pytest.mark.parametrize(
        ("text", "status"),
        [("[length] cut off", 200), ("[status=500] fails", 500), ("[status=429] busy", 429), ("[status=400] bad", 400)],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_incomplete_answers_and_errors(self, pair: Pair, text: str, status: int, stream: bool) -> None:
        said = f"{text} {stream}"
        answers = [pair.post(said, stream=stream) for _ in range(2)]
        assert [a.status_code for a in answers] == [status] * 2
        assert [a.headers["x-semkv"] for a in answers] == ["miss"] * 2
        if status != 200:
            assert answers[0].json()["error"]["message"] == "scripted"
        assert calls(pair, said) == 2

    @pytest.mark.parametrize("how", ["cut", "error"])
    def test_a_stream_that_breaks(self, pair: Pair, how: str) -> None:
        said = f"[{how}] in the middle"
        for _ in range(2):
            with pytest.raises(openai.APIError):
                for _piece in pair.client().chat.completions.create(**chat(said), stream=True):
                    pass
        assert calls(pair, said) == 2

    def test_what_is_drawn_at_random(self, pair: Pair) -> None:
        bodies = [{**chat("drawn"), "temperature": 0.7} for _ in range(2)]
        answers = [httpx.post(f"{pair.url}/v1/chat/completions", json=body) for body in bodies]
        assert not any("hit" in a.headers["x-semkv"] for a in answers)
        assert calls(pair, "drawn") == 2

    def test_no_json_is_refused_as_there_is_no_place_for_a_salt(self, pair: Pair) -> None:
        for raw in (b"{", b"[]", b"[" * 100_000, b"\xff\xfe", b""):
            answer = httpx.post(f"{pair.url}/v1/chat/completions", content=raw)
            assert answer.status_code == 400
            assert answer.json()["error"]["type"] == "invalid_request_error"
        answer = httpx.post(f"{pair.url}/v1/chat/completions", content=b'{"a": NaN}')
        assert answer.json()["error"]["message"] == "no request", "the upstream's own words"

    def test_other_routes_pass_through(self, pair: Pair) -> None:
        assert pair.client().models.list().data[0].id == "scripted"


class TestControls:
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
    def test_a_client_may_ask_for_less(self, pair: Pair, headers: dict, second: str, third: str) -> None:
        said = f"controls {headers}"
        pair.post(said)
        assert pair.post(said, headers=headers).headers["x-semkv"].split()[0] == second
        assert pair.post(said).headers["x-semkv"].split()[0] == third

    def test_no_cache_brings_a_fresh_answer_to_all(self, pair: Pair) -> None:
        first, fresh = pair.post("renew"), pair.post("renew", headers={"Cache-Control": "no-cache"})
        assert first.json()["id"] != fresh.json()["id"] == pair.post("renew").json()["id"]


class TestTenants:
    def test_two_keys_never_share(self, pair: Pair) -> None:
        one, two = (pair.client(key).chat.completions.create(**chat("whose?")) for key in ("one", "two"))
        assert one.id != two.id
        assert pair.client("one").chat.completions.create(**chat("whose?")).id == one.id

    def test_a_client_cannot_name_its_tenant(self, pair: Pair) -> None:
        """Somebody counts on the name, so it is not ignored: what cannot be told apart is not cached."""
        for name in ("a", "b", "a"):
            answer = pair.post("named", headers={"X-Semkv-Tenant": name})
            assert answer.headers["x-semkv"] == "pass reason=tenant"
        assert pair.post("named").headers["x-semkv"] == "miss"

    def test_a_trusted_proxy_can(self, tmp_path: Path) -> None:
        with Pair(tmp_path, trusted_proxies=("127.0.0.0/8",)) as pair:
            ids = [pair.post("x", headers={"X-Semkv-Tenant": name}).json()["id"] for name in ("a", "b", "a")]
            assert ids[0] == ids[2] != ids[1]

    @pytest.mark.parametrize(
        ("client", "believed"),
        [(("10.0.0.1", 5), True), (("::ffff:10.0.0.1", 5), True), (("10.0.0.1", 0), False), (None, False),
         (("11.0.0.1", 5), False), (("somewhere", 5), False)],
    )  # fmt: skip
    def test_whose_word_counts(self, client: tuple[str, int] | None, believed: bool) -> None:
        """Port 0 is what uvicorn writes where it took the address from a header, which anybody may send."""
        tenants = Tenants(b"secret", trusted=(ip_network("10.0.0.0/8"),))
        scope = {"client": client, "headers": [(b"x-semkv-tenant", b"a"), (b"authorization", b"k")]}
        other = {"client": client, "headers": [(b"x-semkv-tenant", b"a"), (b"authorization", b"other")]}
        asks = tenants.client(scope)
        assert asks.believed is believed
        assert (asks.tenant == tenants.client(other).tenant) is believed
        assert asks.tenant != tenants.client({**scope, "headers": scope["headers"][1:]}).tenant

    def test_a_key_that_is_refused_reads_no_more(self, pair: Pair) -> None:
        revoked = {"Authorization": "Bearer revoked"}
        assert pair.post("before", headers=revoked).headers["x-semkv"] == "miss"
        assert pair.post("before", headers=revoked).headers["x-semkv"].startswith("hit")
        assert pair.post("after [status=401]", headers=revoked).status_code == 401
        assert pair.post("before", headers=revoked).headers["x-semkv"] == "miss reason=key"
        assert pair.post("before", headers=revoked).headers["x-semkv"].startswith("hit"), "accepted again"

    @pytest.mark.parametrize("status", [429, 400, 503])
    def test_only_a_success_lets_a_key_in(self, tmp_path: Path, status: int) -> None:
        with Pair(tmp_path, single_tenant=True) as pair:
            assert pair.post("common", headers={"Authorization": "Bearer a"}).headers["x-semkv"] == "miss reason=key"
            stranger = {"Authorization": "Bearer stranger"}
            assert pair.post(f"x [status={status}]", headers=stranger).status_code == status
            assert pair.post("common", headers=stranger).headers["x-semkv"] == "miss reason=key"

    def test_one_tenant_for_all_keys_still_lets_the_upstream_refuse(self, tmp_path: Path) -> None:
        with Pair(tmp_path, single_tenant=True) as pair:
            kinds = []
            for key in ("a", "b", "b"):
                answer = pair.post("common", headers={"Authorization": f"Bearer {key}"})
                kinds.append(answer.headers["x-semkv"].split()[0])
            assert kinds == ["miss", "miss", "hit"], "a key counts once the upstream has accepted it"


class TestSingleFlight:
    @pytest.mark.parametrize(
        ("text", "stream", "end"),
        [("stampede", False, "}"), ("of streams", True, "[DONE]\n\n"), ("that fails [status=503]", False, "}")],
    )
    def test_500_equal_requests_reach_the_upstream_once(self, pair: Pair, text: str, stream: bool, end: str) -> None:
        joins = pair.metric("semkv_single_flight_joins_total")

        async def story() -> list[Reply]:
            pair.upstream.gate.clear()
            asking = asyncio.create_task(many(pair, 500 * [chat(text, stream=stream)]))
            try:
                await reached(lambda: pair.readers == 500)
            finally:
                pair.upstream.gate.set()
            return await asking

        answers = asyncio.run(story())
        assert len(set(answers)) == 1
        assert answers[0].status == (503 if "status" in text else 200)
        assert answers[0].text.endswith(end)
        assert calls(pair, text) == 1
        assert pair.metric("semkv_single_flight_joins_total") == joins + 499

    def test_the_first_caller_hangs_up_and_the_others_are_served(self, pair: Pair) -> None:
        async def story() -> httpx.Response:
            async with httpx.AsyncClient(timeout=300) as client:
                asking = []
                pair.upstream.gate.clear()
                try:
                    for count in (1, 2):
                        body = chat("hang up", stream=True)
                        asking.append(asyncio.create_task(client.post(f"{pair.url}/v1/chat/completions", json=body)))
                        await reached(lambda count=count: pair.readers == count)
                    asking[0].cancel()
                    await reached(lambda: pair.readers == 1)
                finally:
                    pair.upstream.gate.set()
                return await asking[1]

        assert asyncio.run(story()).text.endswith("[DONE]\n\n")
        assert calls(pair, "hang up") == 1

    @pytest.mark.parametrize("stream", [False, True])
    def test_when_nobody_is_left_the_upstream_is_told(self, pair: Pair, stream: bool) -> None:
        before = pair.upstream.aborted

        async def leave() -> None:
            async with httpx.AsyncClient(timeout=120) as client:
                body = chat(f"[delay=600] {stream}", stream=stream)
                asking = asyncio.create_task(client.post(f"{pair.url}/v1/chat/completions", json=body))
                await reached(lambda: pair.upstream.running)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

        asyncio.run(leave())
        wait_until(lambda: pair.upstream.aborted == before + 1)
        wait_until(lambda: pair.upstream.running == 0)


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

    def test_bodies(self, tmp_path: Path) -> None:
        with Pair(tmp_path, max_body_mib=11) as pair:
            large = "[big=10]" + "x" * 10_000_000
            assert pair.post(large).headers["x-semkv"] == "miss"
            assert pair.post(large).headers["x-semkv"].startswith("hit")
            refused = pair.post("x" * 12_000_000)
            assert refused.status_code == 413
            assert "11 MiB" in refused.json()["error"]["message"]

            def pieces() -> Iterator[bytes]:
                for _ in range(12):
                    yield b"x" * (1 << 20)

            refused = httpx.post(f"{pair.url}/v1/chat/completions", content=pieces(), timeout=120)
            assert refused.status_code == 413

    def test_an_answer_too_large_to_hold_is_passed_on_and_not_kept(self, tmp_path: Path) -> None:
        with Pair(tmp_path) as pair:
            for stream in (False, True):
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
            for name in ("get", "put"):
                monkeypatch.setattr(store, name, lambda *a, **k: ended.wait())
            assert pair.post("slow store").status_code == 200
            assert pair.post("slow store").headers["x-semkv"].startswith("hit")  # from memory
            assert pair.post("[big=100000] too large for the log").status_code == 200
            assert pair.metric("semkv_faults_total") >= 2
            monkeypatch.undo()
            ended.set()
            wait_until(lambda: pair.post("later").status_code == 200)
            assert pair.post("later").headers["x-semkv"].startswith("hit")

    def test_a_fault_of_ours_does_not_cost_the_answer(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with Pair(tmp_path) as pair:
            gateway = pair.app.gateway
            for target, name in (
                (gateway, "_canonicalise"),
                (gateway.cache, "look_up"),
                (gateway.flights, "join"),
            ):

                def broken(*_: object, **__: object) -> None:
                    raise RuntimeError("scripted fault")

                with monkeypatch.context() as patch:
                    patch.setattr(target, name, broken)
                    assert pair.post(f"with a broken {name}").json()["choices"]


@pytest.mark.parametrize("drops", [True, False])
def test_late_questions_are_dropped_and_late_orders_are_carried_out(drops: bool) -> None:
    pool, go, done = Pool("test", threads=1, queued=1), threading.Event(), []
    do = pool.run if drops else pool.complete

    async def story() -> None:
        first = asyncio.ensure_future(pool.run(None, go.wait))
        await asyncio.sleep(0)
        await reached(lambda: not pool._work_queue.qsize())  # the thread has begun with it
        with pytest.raises(TimeoutError):
            await do(0.05, done.append, "late")
        if not drops:
            with pytest.raises(TimeoutError, match="too much"):
                await do(None, done.append, "one too many")
        go.set()
        await first
        await reached(lambda: not pool._work_queue.qsize())
        await do(None, done.append, "last")

    asyncio.run(story())
    pool.shutdown()
    assert done == (["last"] if drops else ["late", "last"])


def flat(answer: openai.types.chat.ChatCompletion) -> dict:
    """A whole answer as `whole` puts a stream."""
    choices = []
    for choice in answer.choices:
        message = choice.message
        tools = [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ()]
        logprobs = [t.token for t in choice.logprobs.content] if choice.logprobs else []
        thought = getattr(message, "reasoning", None) or ""
        choices.append((message.content or "", thought, tools, logprobs, choice.finish_reason))
    return {"choices": choices, "usage": answer.usage.model_dump(), "id": answer.id, "created": answer.created}


def whole(chunks: list[openai.types.chat.ChatCompletionChunk]) -> dict:
    """A stream put together by hand, independently of the gateway's own code."""
    found: dict[int, list] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text = found.setdefault(choice.index, ["", "", {}, [], None])
            text[0] += choice.delta.content or ""
            text[1] += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or ():
                known = text[2].setdefault(call.index, [None, "", ""])
                known[0] = call.id or known[0]
                known[1] += call.function.name or ""
                known[2] += call.function.arguments or ""
            text[3] += [t.token for t in choice.logprobs.content] if choice.logprobs else []
            text[4] = choice.finish_reason or text[4]
    choices = [(t[0], t[1], [tuple(c) for c in t[2].values()], t[3], t[4]) for _, t in sorted(found.items())]
    return {"choices": choices, "usage": usage.model_dump(), "id": chunks[0].id, "created": chunks[0].created}


@dataclass(frozen=True)
class Reply:
    status: int
    text: str


async def many(pair: Pair, bodies: list[dict]) -> list[Reply]:
    """All at once, through a client that is quick enough for it."""

    async def post(client: aiohttp.ClientSession, body: dict) -> Reply:
        async with client.post(f"{pair.url}/v1/chat/completions", json=body) as answer:
            return Reply(answer.status, await answer.text())

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        return list(await asyncio.gather(*(post(client, body) for body in bodies)))
