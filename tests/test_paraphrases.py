"""Requests that ask the same in other words while the first is being answered: who joins, and who must not."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import pytest

from gateway_helpers import (
    ONE,
    OTHER,
    Pair,
    a_tenant,
    beside,
    chat,
    later,
    near_pair,
    picture,
    reached,
    said,
    wait_until,
    words,
)
from semkv.tiers.bounded import Bounded
from semkv.tiers.response import parse_rule

STARTS = ("How do I", "How can I", "How could I", "How would I", "How should I")
THINGS = ("sourdough bread", "a sourdough bread", "a loaf of sourdough bread", "my sourdough bread")
ENDS = ("at home?", "at home", "in my home?", "at my home?", "at home, please?")
HUNDRED = [f"{a} bake {b} {c}" for a, b, c in itertools.product(STARTS, THINGS, ENDS)]
NOT = "How do I not bake sourdough bread at home?"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with near_pair(tmp_path_factory.mktemp("paraphrases")) as pair:
        yield pair


@pytest.fixture
def pair(running: Pair) -> Iterator[Pair]:
    running.app.gateway.cache.found_share = 1.0
    yield running
    running.settle()


async def at_once(pair: Pair, texts: list[str], headers: dict[str, str]) -> list[tuple[str, str]]:
    """Header and body of each; every second one is a stream."""

    async def post(client: aiohttp.ClientSession, number: int, text: str) -> tuple[str, str]:
        body = chat(text, stream=number % 2 == 1)
        async with client.post(f"{pair.url}/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
            return answer.headers["x-semkv"], await answer.text()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        return list(await asyncio.gather(*(post(client, i, text) for i, text in enumerate(texts))))


class TestJoining:
    @pytest.mark.parametrize("delay", ["0", "3"])
    def test_100_paraphrases_at_once_reach_the_upstream_once(self, pair: Pair, delay: str) -> None:
        """A quick upstream has answered before the last of them is looked up, a slow one has not."""
        pair.upstream.script = {text: {"delay": delay} for text in HUNDRED}
        assert len(set(HUNDRED)) == 100
        answers = asyncio.run(at_once(pair, HUNDRED, a_tenant()))
        assert len(pair.asked) == 1
        own = f"You said: {pair.asked[0]}"
        assert {said(httpx.Response(200, text=text)) for _, text in answers} == {own}
        kinds = sorted({header.split(" score=")[0] for header, _ in answers})
        assert kinds == ["hit tier=text:semantic", "miss"]
        assert sum(header == "miss" for header, _ in answers) == 1

    @pytest.mark.parametrize("stream", [(False, False), (True, False), (False, True), (True, True)])
    def test_each_in_its_own_form(self, pair: Pair, stream: tuple[bool, bool]) -> None:
        tenant, joins = a_tenant(), pair.metric("semkv_single_flight_joins_total")
        with beside(pair, stream=stream[0], headers=tenant) as first:
            answer = later(pair, OTHER, waits=True, stream=stream[1], headers=tenant)
        assert pair.asked == [ONE]
        assert said(answer) == said(first.result()) == f"You said: {ONE}"
        assert answer.text.startswith("data:") == stream[1]
        tier, score, *_ = answer.headers["x-semkv"].removeprefix("hit ").split()
        assert tier == "tier=text:semantic"
        assert 0.8 <= float(score.removeprefix("score=")) < 1.0
        assert answer.headers["x-semkv"].endswith(" joined")
        assert pair.metric("semkv_single_flight_joins_total") == joins + 1
        text = httpx.get(f"{pair.url}/metrics").text
        assert 'semkv_single_flight_joins_total{kind="similar"}' in text

    def test_a_stream_is_passed_on_while_it_runs(self, pair: Pair) -> None:
        tenant, body = a_tenant(), chat(OTHER, stream=True)
        pair.upstream.hold_at = 3
        with (
            beside(pair, stream=True, headers=tenant),
            httpx.stream("POST", f"{pair.url}/v1/chat/completions", json=body, headers=tenant, timeout=120) as answer,
        ):
            lines = answer.iter_lines()
            first = next(line for line in lines if "You said" in line)
            assert not pair.upstream.gate.is_set(), "the answer is not complete"
            pair.upstream.gate.set()
            rest = list(lines)
        assert first.startswith("data:")
        assert rest[-2] == "data: [DONE]"
        assert pair.asked == [ONE]

    def test_the_same_words_typed_in_another_way_are_no_approximation(self, pair: Pair) -> None:
        tenant = a_tenant()
        with beside(pair, headers=tenant):
            answer = later(pair, ONE.replace("How do", "how  do"), waits=True, headers=tenant)
        header = re.sub(r"age=\d+", "age=N", answer.headers["x-semkv"])
        assert header == "hit tier=text:normalised score=1.000 age=N joined"

    def test_about_the_same_image_but_not_about_another(self, pair: Pair) -> None:
        tenant = a_tenant()
        with beside(pair, [picture((1,) * 3), words(ONE)], headers=tenant):
            assert len(pair.upstream.calls) == 1
            answer = later(pair, [picture((1,) * 3), words(OTHER)], waits=True, headers=tenant)
        assert answer.headers["x-semkv"].startswith("hit tier=text:semantic")
        pair.upstream.calls.clear()
        tenant = a_tenant()
        with beside(pair, [picture((1,) * 3), words(ONE)], headers=tenant):
            later(pair, [picture((2,) * 3), words(OTHER)], waits=False, headers=tenant)
        assert len(pair.upstream.calls) == 2

    def test_the_later_text_gets_no_entry_of_its_own(self, pair: Pair) -> None:
        tenant = a_tenant()
        with beside(pair, headers=tenant):
            later(pair, OTHER, waits=True, headers=tenant)
        wait_until(lambda: not len(pair.app.gateway.pending))
        assert pair.post(OTHER, headers=tenant).headers["x-semkv"].startswith("hit tier=text:semantic")
        assert pair.post(ONE, headers=tenant).headers["x-semkv"].startswith("hit tier=exact")
        hits = pair.admin("hits").json()["hits"]
        shown = [hit for hit in hits if hit["asked"][0]["text"] == OTHER and hit["donor"][0]["text"] == ONE]
        assert len(shown) >= 2, "the one that joined is among the latest hits"

    def test_a_joined_answer_is_checked_as_any_approximate_hit(
        self, pair: Pair, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        semantic = pair.semantic
        monkeypatch.setattr(semantic._checking, "_rate", 1.0)
        monkeypatch.setattr(semantic, "same_answer", lambda first, second: first == second)
        for stream in (False, True):
            tenant, checked = a_tenant(), semantic.stats().checked_wrong
            pair.upstream.calls.clear()
            with beside(pair, headers=tenant, stream=stream):
                later(pair, OTHER, waits=True, headers=tenant, stream=stream)
            wait_until(lambda before=checked: semantic.stats().checked_wrong == before + 1)
            assert pair.asked == [ONE, OTHER], "the scripted server says what it was asked, so the answers differ"
            own = pair.post(OTHER, headers=tenant)
            assert own.headers["x-semkv"].startswith("hit tier=exact")
            assert said(own) == f"You said: {OTHER}"


class TestKeptApart:
    @pytest.mark.parametrize(
        ("text", "more"),
        [
            (NOT, {}),
            ("Who was the first emperor of Rome?", {}),
            (OTHER, {"max_tokens": 7}),
            (OTHER, {"model": "another"}),
            (OTHER, {"temperature": 0.7}),
            (OTHER, {"tools": [{"type": "function", "function": {"name": "look"}}]}),
            (OTHER, {"headers": {"Cache-Control": "no-cache"}}),
            (OTHER, {"headers": {"Cache-Control": "no-store"}}),
            (OTHER, {"headers": {"Authorization": "of a stranger"}}),
        ],
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_what_differs_in_more_than_words(self, pair: Pair, text: str, more: dict, stream: bool) -> None:
        tenant = a_tenant()
        headers = a_tenant() if "Authorization" in more.get("headers", {}) else tenant | more.get("headers", {})
        own: dict[str, Any] = {"stream": stream, **more, "headers": headers}
        with beside(pair, headers=tenant, stream=stream):
            answer = later(pair, text, waits=False, **own)
        assert pair.asked == [ONE, text]
        assert said(answer) == f"You said: {text}"

    @pytest.mark.parametrize("rule", ["prompt:How can*=0", "prompt:How do*=0"])
    def test_a_text_whose_answers_are_not_kept(self, pair: Pair, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
        """Neither joins it, nor is it joined: its rule says that no answer is good for a second time."""
        monkeypatch.setattr(pair.app.gateway.cache.responses, "_rules", [parse_rule(rule)])
        tenant = a_tenant()
        with beside(pair, headers=tenant, stream=True):
            later(pair, OTHER, waits=False, headers=tenant, stream=True)
        assert pair.asked == [ONE, OTHER]

    def test_the_policy_has_the_last_word(self, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pair.semantic._planner, "_decider", Bounded(0.01))
        tenant = a_tenant()
        with beside(pair, headers=tenant):
            later(pair, OTHER, waits=False, headers=tenant)
        assert pair.asked == [ONE, OTHER], "a budget of 1% covers no hit among the first requests"

    def test_what_was_found_wrong_before(self, pair: Pair) -> None:
        tenant, semantic = a_tenant(), pair.semantic
        with beside(pair, headers=tenant, max_tokens=9):
            (pending,) = pair.app.gateway.pending._running
            later(pair, OTHER, waits=True, headers=tenant, max_tokens=9)
        wait_until(lambda: not len(pair.app.gateway.pending))
        (shown,) = [h for h in pair.admin("hits").json()["hits"] if h["asked"][0]["text"] == OTHER][:1]
        assert pair.admin("wrong", {"id": shown["id"]}).json() == {"removed": 1}
        semantic.invalidate(namespace=pending.entry.donor.namespace)
        pair.upstream.calls.clear()
        with beside(pair, headers=tenant, max_tokens=9):
            later(pair, OTHER, waits=False, headers=tenant, max_tokens=9)
        assert pair.asked == [ONE, OTHER]

    def test_after_an_invalidation_nobody_joins_what_began_before(self, pair: Pair) -> None:
        tenant = a_tenant()
        with beside(pair, headers=tenant):
            pair.admin("invalidate", {"prefix": "How", "dry_run": False})
            later(pair, ONE, waits=False, headers=tenant)
        assert pair.asked == [ONE, ONE]
        pair.upstream.calls.clear()
        tenant = a_tenant()
        with beside(pair, headers=tenant):
            pair.admin("invalidate", {"prefix": "How", "dry_run": False})
            later(pair, OTHER, waits=False, headers=tenant)
        assert pair.asked == [ONE, OTHER]


class TestWhenTheFirstFails:
    @pytest.mark.parametrize(
        "how", [{"status": "500"}, {"status": "429"}, {"length": ""}, {"big": "9000000", "events": "90"}]
    )
    @pytest.mark.parametrize("stream", [False, True])
    def test_who_has_had_nothing_goes_himself(self, pair: Pair, how: dict[str, str], stream: bool) -> None:
        """The first is no stream, so nothing of its answer is passed on before it is known to be no good."""
        tenant, parted = a_tenant(), pair.metric("semkv_single_flight_parted_total")
        pair.upstream.script = {ONE: how}
        with beside(pair, headers=tenant):
            answer = later(pair, OTHER, waits=True, stream=stream, headers=tenant)
        assert (answer.headers["x-semkv"], answer.status_code) == ("miss", 200)
        assert said(answer) == f"You said: {OTHER}"
        assert pair.asked == [ONE, OTHER]
        assert pair.metric("semkv_single_flight_parted_total") == parted + 1
        assert pair.post(OTHER, headers=tenant).headers["x-semkv"].startswith("hit tier=exact")

    @pytest.mark.parametrize("how", [{"cut": ""}, {"error": ""}, {"length": ""}])
    def test_a_whole_answer_from_a_stream_that_is_no_good(self, pair: Pair, how: dict[str, str]) -> None:
        tenant = a_tenant()
        pair.upstream.script = {ONE: how}
        with beside(pair, stream=True, headers=tenant):
            answer = later(pair, OTHER, waits=True, headers=tenant)
        assert said(answer) == f"You said: {OTHER}"
        assert pair.asked == [ONE, OTHER]

    @pytest.mark.parametrize("stream", [False, True])
    def test_nobody_waits_for_a_stream_that_cannot_be_kept(self, pair: Pair, stream: bool) -> None:
        """It shows in the first event; the first one's answer is not complete when the other asks."""
        tenant = a_tenant()
        pair.upstream.script, pair.upstream.hold_at = {ONE: {"odd": ""}}, 2
        with beside(pair, stream=True, headers=tenant) as first:
            (flight,) = pair.app.gateway.flights.running
            wait_until(lambda: not flight.storable)
            answer = later(pair, OTHER, waits=False, stream=stream, headers=tenant)
        assert said(answer) == f"You said: {OTHER}"
        assert said(first.result()) == f"You said: {ONE}"

    def test_many_at_once_go_at_once(self, pair: Pair) -> None:
        """Not one after the other, each behind the next that fails: the upstream answers none before it has all."""
        tenant = a_tenant()
        pair.upstream.script = {text: {"status": "503", "together": "10"} for text in HUNDRED[1:11]}
        pair.upstream.script[ONE] = {"status": "503"}
        with beside(pair, headers=tenant):
            others = [pair.soon(text, headers=tenant) for text in HUNDRED[1:11]]
            wait_until(lambda: pair.readers == 11)
            pair.upstream.gate.set()
            assert {other.result().status_code for other in others} == {503}

    def test_a_stream_that_has_begun_ends_as_the_first_ones(self, pair: Pair) -> None:
        for how, end in (({"length": ""}, '"finish_reason": "length"'), ({"error": ""}, '"scripted"')):
            tenant = a_tenant()
            pair.upstream.script, pair.upstream.hold_at = {ONE: how}, 2
            pair.upstream.calls.clear()
            with beside(pair, stream=True, headers=tenant):
                answer = later(pair, OTHER, waits=True, stream=True, headers=tenant)
            assert end in answer.text
            assert pair.asked == [ONE]
            pair.upstream.script = {}
            assert pair.post(OTHER, headers=tenant).headers["x-semkv"] == "miss", "nothing of it was kept"

    @pytest.mark.parametrize("stream", [False, True])
    def test_the_first_hangs_up(self, pair: Pair, stream: bool) -> None:
        async def story(first: asyncio.Task, second: asyncio.Task, flight: Any) -> httpx.Response:
            first.cancel()
            await reached(lambda: len(flight.readers) == 1)
            pair.upstream.gate.set()
            return await second

        answer = asyncio.run(two(pair, stream, story))
        assert said(answer) == f"You said: {ONE}"
        assert pair.asked == [ONE]

    def test_when_nobody_is_left_the_upstream_is_told(self, pair: Pair) -> None:
        aborted = pair.upstream.aborted

        async def story(first: asyncio.Task, second: asyncio.Task, flight: Any) -> None:
            second.cancel()
            await reached(lambda: len(flight.readers) == 1)
            assert pair.upstream.aborted == aborted, "the first still waits"
            first.cancel()
            await reached(lambda: pair.upstream.aborted == aborted + 1)

        asyncio.run(two(pair, False, story))


def test_equal_requests_keep_what_is_their_own(pair: Pair) -> None:
    """They are looked up once, and each goes upstream with its own fields beside the key."""
    names, headers = [f"request {i}" for i in range(5)], {**a_tenant(), "Cache-Control": "no-store"}

    async def ask() -> None:
        async with httpx.AsyncClient(timeout=120, headers=headers) as client:
            url = f"{pair.url}/v1/chat/completions"
            await asyncio.gather(*(client.post(url, json=chat(ONE, request_id=name)) for name in names))

    asyncio.run(ask())
    assert sorted(body["request_id"] for body in pair.upstream.calls) == names


async def two(pair: Pair, stream: bool, story: Any) -> Any:
    """What a story makes of a request at the closed gate, one that has joined it, and the flight."""
    pair.upstream.gate.clear()
    async with httpx.AsyncClient(timeout=300, headers=a_tenant()) as client:

        def ask(text: str) -> asyncio.Task:
            return asyncio.create_task(client.post(f"{pair.url}/v1/chat/completions", json=chat(text, stream=stream)))

        first = ask(ONE)
        await reached(lambda: pair.upstream.calls)
        (flight,) = pair.app.gateway.flights.running
        second = ask(OTHER)
        await reached(lambda: len(flight.readers) == 2)
        return await story(first, second, flight)


def test_no_store_keeps_no_picture(pair: Pair) -> None:
    """A look for similar pictures would write this one for later donors."""
    folder = pair.app.gateway.settings.cache_dir / "media"

    def pictures(**headers: str) -> int:
        content = [picture("red", (8, 9)), words("What color is it?")]  # no other test's
        assert pair.post(content, headers=headers).headers["x-semkv"] == "miss"
        return sum(file.is_file() for file in folder.rglob("*"))

    before = sum(file.is_file() for file in folder.rglob("*"))
    assert pictures(**{"Cache-Control": "no-store"}) == before
    assert pictures() == before + 1
