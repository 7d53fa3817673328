"""Requests that ask the same in other words while the first is being answered: who joins, and who must not."""

from __future__ import annotations

import asyncio
import itertools
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
    said,
    wait_until,
    words,
)

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
        tenant = a_tenant()
        pair.upstream.script = {ONE: how}
        with beside(pair, headers=tenant):
            answer = later(pair, OTHER, waits=True, stream=stream, headers=tenant)
        assert (answer.headers["x-semkv"], answer.status_code) == ("miss", 200)
        assert said(answer) == f"You said: {OTHER}"
        assert pair.asked == [ONE, OTHER]
        assert pair.post(OTHER, headers=tenant).headers["x-semkv"].startswith("hit tier=exact")


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
