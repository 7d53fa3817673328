"""The gateway before several upstreams: which one a request goes to, and what happens when one is killed."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gateway_helpers import Pair, Served, chat, kind, said, wait_until
from ports import free_port
from scripted_upstream import Scripted
from semkv_gateway import http, upstreams
from semkv_gateway.gateway import Gateway
from semkv_gateway.http import Call
from semkv_gateway.kv_hints import Conversation, conversation_of, hinted
from semkv_gateway.upstreams import Member, _beginnings
from test_server_tenants import Strict

LONG = "You sort the letters of a museum of the history of the post. " * 8


class Several(Pair):
    """A gateway before a scripted upstream and others."""

    def __init__(self, folder: Path, *urls: str, **more: Any) -> None:
        first = Scripted()
        self.first = Served(first)
        super().__init__(folder, upstream=first, upstreams=(self.first.url, *urls), **more)
        self.behind = self.first

    def member(self, number: int) -> Member:
        return self.app.gateway.upstreams.members[number]

    def say(self, *texts: str, **more: Any) -> httpx.Response:
        """A conversation of these turns."""
        roles = ("user", "assistant")
        turns = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
        messages = [{"role": "system", "content": LONG}, *turns]
        return httpx.post(
            f"{self.url}/v1/chat/completions",
            json={**chat(""), "messages": messages, **more},
            timeout=120,
        )


@contextmanager
def served(folder: Path, *others: Scripted) -> Iterator[Several]:
    """A gateway before one upstream and these others."""
    with ExitStack() as stack:
        urls = [stack.enter_context(Served(other)).url for other in others]
        yield stack.enter_context(Several(folder, *urls))


class Killed:
    """A scripted upstream in a process of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "uvicorn", "--app-dir", str(Path(__file__).parent)]
        command += ["scripted_upstream:app", "--port", str(self.port), "--log-level", "critical"]
        self._process = subprocess.Popen(command)
        wait_until(self._answers)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def doomed() -> Iterator[Killed]:
    process = Killed()
    yield process
    process.kill()


def test_a_conversation_stays_where_it_was_unless_that_is_much_busier(tmp_path: Path) -> None:
    other = Scripted()
    with served(tmp_path, other) as several:
        each = (several.upstream, other)
        several.say("Where is the first stamp?")
        home, away = sorted(each, key=lambda upstream: -upstream.total)
        assert (home.total, away.total) == (1, 0)
        several.say("Where is the first stamp?", "Here.", "And the second one?")
        assert (home.total, away.total) == (2, 0)
        several.post("short, and nothing like it")
        assert (home.total, away.total) == (2, 1), "the one that had nothing for longer"
        home.gate.clear()
        waiting = [
            several._pool.submit(several.say, "Where is the first stamp?", "Here.", f"No {number}")
            for number in range(5)
        ]
        wait_until(lambda: home.total == 7)
        assert several.say("Where is the first stamp?", "Here.", "At last?").status_code == 200
        assert (home.total, away.total) == (7, 2)
        assert several.metric("semkv_upstream_requests") == 5
        home.gate.set()
        assert {answer.result().status_code for answer in waiting} == {200}
        wait_until(lambda: several.metric("semkv_upstream_requests") == 0)
        key = f'semkv_upstream_sent_total{{upstream="{several.member(0).name}"}}'
        assert several.metric(key) == several.upstream.total
        beginnings = several.app.gateway.upstreams._sent_last
        assert 0 < len(beginnings) < 40


def test_one_that_is_killed_under_load_loses_no_answer(tmp_path: Path, doomed: Killed) -> None:
    with Several(tmp_path, doomed.url) as several:
        statuses: list[int] = []
        stop = threading.Event()

        def ask(name: str) -> None:
            number = 0
            while not stop.is_set():
                number += 1
                text = f"{name} {number}"
                answer = several.post(text, stream=number % 2 == 0)
                right = answer.status_code != 200 or said(answer).endswith(text)
                statuses.append(answer.status_code if right else 0)

        def more() -> None:
            until = len(statuses) + 50
            wait_until(lambda: len(statuses) >= until)

        threads = [threading.Thread(target=ask, args=(f"thread {at}",)) for at in range(4)]
        for thread in threads:
            thread.start()
        more()
        doomed.kill()
        more()
        wait_until(lambda: several.member(1).down)
        assert several.metric("semkv_upstream_up") == 1
        ready = httpx.get(f"{several.url}/readyz")
        assert ready.status_code == 200
        assert [one["up"] for one in ready.json()["upstreams"]] == [True, False]
        assert [one["up"] for one in several.admin("stats").json()["upstreams"]] == [True, False]
        doomed.start()
        wait_until(lambda: not several.member(1).down)
        before = several.member(1).turn
        wait_until(lambda: several.member(1).turn > before)
        stop.set()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200}
        assert several.metric("semkv_upstream_up") == 2


def test_what_may_have_begun_is_asked_of_no_other(
    tmp_path: Path, doomed: Killed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a completion that was under way for longer than is tried again, nor a POST that is passed on, nor a
    stream that the client has a part of."""
    monkeypatch.setattr(http, "_RETRY_S", -1.0)
    monkeypatch.setattr(upstreams, "_LOOK_S", 1000.0)
    with Several(tmp_path, doomed.url) as several:
        several.member(0).down = True  # so that all go to the other
        slow = "[delay=600] slow"
        jobs = [
            several.soon(slow),
            several.soon(f"{slow} too", headers={"Cache-Control": "no-cache, no-store"}),
        ]
        begun = {**chat("[events=9][gap=600] begun"), "stream": True}
        stream = httpx.stream("POST", f"{several.url}/v1/chat/completions", json=begun, timeout=120)
        with stream as answer:
            pieces = answer.iter_text()
            first = next(pieces)
            wait_until(lambda: several.member(1).running == 3)
            several.member(0).down = False
            doomed.kill()
            assert "upstream_error" in "".join(pieces)
            assert first
        assert {job.result().status_code for job in jobs} == {502}
        assert several.upstream.total == 0
        assert kind(several.post("new")) == "miss"


@contextmanager
def ending_with_a_completion() -> Iterator[str]:
    """A server that is gone once somebody has posted anything to it."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def serve() -> None:
        is_posted = False
        while not is_posted:
            connection, _ = listener.accept()
            with connection:
                is_posted = connection.recv(65_536).startswith(b"POST")
                if is_posted:
                    listener.close()

    threading.Thread(target=serve, daemon=True).start()
    yield url


def test_a_request_that_ends_its_server_is_asked_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the second try finds nobody."""
    monkeypatch.setattr(http, "_RETRY_S", 60.0)
    monkeypatch.setattr(upstreams, "_LOOK_S", 1000.0)
    with ending_with_a_completion() as url, Several(tmp_path, url) as several:
        several.member(0).down = True  # so that it goes to the other
        assert several.post("deadly").status_code == 502
        assert several.upstream.total == 0


def test_each_upstream_takes_salts_or_not_and_has_its_models(tmp_path: Path) -> None:
    other = Strict()
    with served(tmp_path, other) as several:
        for number in range(6):
            several.post(f"question {number}")
        assert [several.member(at).salts.refused for at in (0, 1)] == [False, True]
        assert all("cache_salt" in body for body in several.upstream.calls)
        assert not any("cache_salt" in body for body in other.calls)
        assert several.metric("semkv_salt_refused") == 1
        wait_until(lambda: several.member(1).models == {"scripted"})
        several.member(1).models = frozenset(["another"])
        before = other.total
        for number in range(4):
            several.post(f"later question {number}")
        assert other.total == before
        several.member(0).down = True
        several.post("while the one that has it is down")
        assert other.total == before, "a server without the model would say that there is none"
        several.post("of neither", model="unknown")
        several.post("of neither, again", model="unknown")
        assert other.total == before + 1, "whoever has it says so"


PEERS = ("10.0.0.1:5710", "10.0.0.2:5711")


def hints(body: dict[str, Any]) -> dict[str, Any]:
    """What an upstream was told of a request's conversation, whatever stands around it."""
    params = body.get("kv_transfer_params")
    said = params.get("semkv") if isinstance(params, dict) else None
    found = said.get("hints") if isinstance(said, dict) else None
    return dict(found or {})


def test_an_upstream_hears_of_a_conversation_and_of_who_had_it(tmp_path: Path) -> None:
    other = Scripted()
    with (
        Served(other) as away,
        Several(tmp_path, away.url, kv_hints=True, peers=PEERS) as several,
    ):
        several.say("Where is the first stamp?", prompt_cache_key="tour")
        home, there = sorted((several.upstream, other), key=lambda upstream: -upstream.total)
        several.say("Where is the first stamp?", "Here.", "And then?", prompt_cache_key="tour")
        one, two = map(hints, home.calls)
        assert one == two
        assert one["keep_s"] == 300
        assert "tour" not in one["session"]
        key = {"Authorization": "Bearer another"}
        several.post("tour", prompt_cache_key="tour", headers=key)
        several.post("tour", prompt_cache_key="another", prompt_cache_retention="24h")
        several.post("nothing of a conversation, but long enough to have a beginning", seed=1)
        told = [hints(body) for body in (*home.calls, *there.calls)]
        names = {said.get("session") for said in told}
        assert len(names) == 4, "the tour, the stranger's tour, another one, and none"
        assert 86_400 in [said.get("keep_s") for said in told]
        assert not any("peer" in said for said in told)
        # One that moves is told of the server that has its beginning.
        number = 0 if several.upstream is home else 1
        several.member(number).running += 100
        several.say("Where is the first stamp?", "Here.", "At last?", prompt_cache_key="tour")
        moved = hints(there.calls[-1])
        assert moved == {**one, "peer": PEERS[number]}
        assert several.metric("semkv_upstream_moved_total") == 1
        several.member(number).running -= 100
        # Not of one that is down, and of none by a client.
        several.member(1 - number).down = True
        hostile = {"semkv": {"hints": {"peer": PEERS[0], "keep_s": 1e9}, "skip": True}}
        for said in (hostile, {"remote_kv_source": 5, **hostile}, 5, [hostile], {"semkv": 5}):
            before = len(home.calls)
            several.say("Where is it?", kv_transfer_params=said, prompt_cache_key="tour")
            assert hints(home.calls[before]) == {}
        assert home.calls[-5]["kv_transfer_params"] == {"semkv": {"skip": True}}
        # A client may have its own conversation brought back, or let go of.
        for wish, hint in (("prefetch", {"prefetch": True}), ("let go", {"keep_s": 0})):
            said = {"semkv": {"conversation": wish, "hints": {"keep_s": 5}}}
            several.post("hello", kv_transfer_params=said, prompt_cache_key="tour")
            assert hints(home.calls[-1]) == {**one, **hint}


def test_hints_stand_beside_what_a_request_says_of_its_documents() -> None:
    spans = {"spans": [[0, 9]], "repair": 0}
    body = {"prompt": "kv_transfer_params", "kv_transfer_params": {"semkv": spans}}
    call = Call({}, json.dumps(body).encode())
    made = hinted(lambda _: call, Conversation("tour", keep_s=300), "")
    said = json.loads(made(True).body)["kv_transfer_params"]["semkv"]
    assert said == {**spans, "hints": {"session": "tour", "keep_s": 300}}
    assert made(False) is call


def test_an_upstream_that_refuses_hints_gets_none(tmp_path: Path) -> None:
    other = Strict()
    with Served(other) as strict, Several(tmp_path, strict.url, kv_hints=True) as several:
        several.member(0).down = True
        answer = several.post("hello", prompt_cache_key="tour")
        assert answer.status_code == 200
        assert "kv_transfer_params" not in other.calls[-1]


class Ill(Scripted):
    """A server whose engine has died: it takes requests, and says that it is not well."""

    ill = True

    async def _json(self, send: Any, status: int, value: Any) -> None:
        await super()._json(send, 503 if self.ill and not value else status, value)


def test_one_that_is_ill_is_left_out_until_it_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstreams, "_LOOK_S", 0.02)
    other = Ill()
    with served(tmp_path, other) as several:
        several.post("first")
        wait_until(lambda: several.member(1).down)
        before = other.total
        assert {several.post(f"while it is ill {at}").status_code for at in range(4)} == {200}
        assert other.total == before
        other.ill = False
        wait_until(lambda: not several.member(1).down)
        for at in range(2):
            several.post(f"while it is well {at}")
        assert other.total == before + 1


def test_all_are_down(tmp_path: Path) -> None:
    with Several(tmp_path, f"http://127.0.0.1:{free_port()}") as several:
        kept = several.post("kept")
        several.first.stop()
        lost = several.post("lost")
        assert lost.status_code == 502
        assert several.post("kept").content == kept.content
        assert httpx.get(f"{several.url}/readyz").status_code == 503
        assert several.app.gateway.upstreams.view()[0]["running"] == 0


def test_an_answer_that_comes_as_the_client_leaves_is_closed() -> None:
    closed: list[str] = []

    class Head:
        async def aclose(self) -> None:
            closed.append("closed")

    async def leave() -> None:
        arrived = asyncio.get_running_loop().create_future()

        async def ask() -> Head:
            await arrived
            return Head()

        gateway: Any = SimpleNamespace(stopping=asyncio.Event())
        waiting = asyncio.ensure_future(Gateway._unless_stopping(gateway, ask()))
        await asyncio.sleep(0.01)
        arrived.set_result(None)
        await asyncio.sleep(0)  # the head is there, and nobody has taken it
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(leave())
    assert closed == ["closed"]


def test_beginnings_of_tenants_are_apart_and_few() -> None:
    body = bytes(10_000_000)
    assert len(set(_beginnings("one", body))) < 30
    assert not set(_beginnings("one", body)) & set(_beginnings("two", body))
    assert list(_beginnings("one", body[:300])) == list(_beginnings("one", body))[:1]
    assert not list(_beginnings("one", b"short"))


def test_a_conversation_is_what_a_client_calls_one() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    user = {"role": "user", "content": "Where is it?"}
    later = [user, {"role": "assistant", "content": "Here."}, {"role": "user", "content": "And?"}]
    part = {"type": "text", "text": "Here."}

    def of(body: dict[str, Any], tenant: str = "one") -> Any:
        return conversation_of({"model": "m", "messages": [user], **body}, tenant, b"secret")

    assert of({}) is None
    assert of({"prompt_cache_key": 5}) is None
    assert of({"prompt_cache_key": ""}) is None
    assert of({"cache_control": {"type": "forever"}}) is None
    named = of({"prompt_cache_key": "tour \ud800"})
    assert named.keep_s == 300
    assert of({"prompt_cache_key": "tour \ud800"}, "two").name != named.name
    marked = of(mark)
    assert of({"messages": later, **mark}) == marked
    assert of({"messages": [later[0], {**later[1], "content": [{**part, **hour}]}]}).keep_s == 3600
    assert of({"tools": [{"name": "t", **mark}]}) == marked
    assert of({"messages": [{**user, "content": "Who?"}], **mark}).name != marked.name
    assert of({"prompt_cache_key": "tour", **hour}).keep_s == 3600
    odd = {"messages": [5, {"content": 5}, {"content": [5]}], "system": 5, "tools": "x", **mark}
    assert of(odd).keep_s == 300
