"""Which answers are kept though a request leaves them to chance: by the operator's settings and the client's word."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway_helpers import NEAR, ONE, OTHER, Pair, kind, said
from scripted_upstream import Scripted
from semkv.errors import ConfigError
from semkv_gateway.request_key import Deployment, canonicalise
from semkv_gateway.sampling import Sampling
from semkv_gateway.settings import ServerSettings
from semkv_gateway.tenancy import Controls

OPEN = {"temperature": None}  # as most clients leave it
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("steady"), default_temperature=0.0) as pair:
        yield pair


def twice(pair: Pair, text: str, **more: Any) -> list[str]:
    return [pair.post(text, **more).headers["x-semkv"] for _ in range(2)]


def post(pair: Pair, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(pair.url + path, json=body, headers=headers, timeout=120)


class TestDefaultTemperature:
    def test_a_request_that_leaves_it_open_is_sent_and_kept_with_0(self, steady: Pair) -> None:
        body = {"model": "scripted", "messages": [{"role": "user", "content": "left open"}]}
        first, second = (post(steady, "/v1/chat/completions", body) for _ in range(2))
        assert first.headers["x-semkv"] == "miss temperature=0"
        assert second.headers["x-semkv"].startswith("hit tier=exact age=")
        assert second.headers["x-semkv"].endswith(" temperature=0")
        assert first.content == second.content
        assert steady.upstream.calls[-1]["temperature"] == 0
        own = steady.post("left open")  # which names it
        assert kind(own) == "hit"
        assert "temperature" not in own.headers["x-semkv"]

    def test_a_stream_and_a_whole_answer_share_it(self, steady: Pair) -> None:
        whole, stream = (steady.post("both forms", stream=s, **OPEN) for s in (False, True))
        assert (kind(whole), kind(stream)) == ("miss", "hit")
        assert said(whole) == said(stream)

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/completions", {"prompt": "once upon a time"}),
            (MESSAGES, {"max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}),
            (RESPONSES, {"store": False, "input": "hello"}),
        ],
        ids=str,
    )
    def test_on_every_route_that_draws(self, path: str, body: dict[str, Any], steady: Pair) -> None:
        answers = [post(steady, path, {"model": "scripted", **body}) for _ in range(2)]
        assert [kind(answer) for answer in answers] == ["miss", "hit"]
        assert steady.upstream.calls[-1]["temperature"] == 0

    def test_embeddings_have_none(self, steady: Pair) -> None:
        body = {"model": "scripted", "input": "embedded"}
        answers = [post(steady, "/v1/embeddings", body) for _ in range(2)]
        assert [kind(answer) for answer in answers] == ["miss", "hit"]
        assert "temperature" not in steady.upstream.calls[-1]

    @pytest.mark.parametrize(
        "choice",
        [
            {"temperature": 0.7},
            {"top_p": 0.9},
            {"top_k": 40},
            {"min_p": 0.1},
            {"n": 3},
            {"best_of": 2},
            {"use_beam_search": True},
            {"seed": -1},
            {"vllm_xargs": {"sampler": "mirostat"}},
            {"typical_p": 0.3},  # a sampler's field that nobody has reviewed
            {"mirostat": 2},
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        ],
        ids=str,
    )
    def test_who_chooses_how_to_draw_gets_what_was_asked_for(
        self, choice: dict[str, Any], steady: Pair
    ) -> None:
        text = f"chosen {choice}"
        assert twice(steady, text, **{**OPEN, **choice}) == ["miss reason=sampled"] * 2
        sent = steady.upstream.calls[-1]
        assert sent.get("temperature") == choice.get("temperature")
        assert sent[next(iter(choice))] == next(iter(choice.values()))

    def test_it_is_off_unless_given_and_only_0(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="--default-temperature"):
            ServerSettings(default_temperature=0.2)
        with Pair(tmp_path) as pair:
            assert twice(pair, "left open", **OPEN) == ["miss reason=sampled"] * 2
            assert pair.upstream.calls[-1]["temperature"] is None

    def test_near_repeats_too(self, tmp_path: Path) -> None:
        with Pair(tmp_path, default_temperature=0.0, **NEAR) as pair:
            assert kind(pair.post(ONE, **OPEN)) == "miss"
            pair.settle()
            near = pair.post(OTHER, **OPEN)
            assert near.headers["x-semkv"].startswith("hit tier=text:semantic")
            assert near.headers["x-semkv"].endswith(" temperature=0")


class Refusing(Scripted):
    """A server whose models take no temperature; those called ``strict`` know no ``cache_salt`` either."""

    words = "Unsupported value: 'temperature' does not support 0 with this model."

    async def _answer(self, scope: Any, raw: bytes, receive: Any, send: Any) -> None:
        body = json.loads(raw)
        refused = ""
        if body.get("temperature") is not None and body["model"] != "takes it":
            refused = self.words
        if "cache_salt" in body and body["model"] == "strict":
            refused = "Unrecognized request argument supplied: cache_salt"
        if refused:
            self._note(scope, body)
            await self._json(send, 400, {"error": {"message": refused, "code": 400}})
            return
        await super()._answer(scope, raw, receive, send)


class TestRefusedTemperature:
    def test_it_is_said_once_for_a_model_and_the_requests_go_on(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING)
        with Pair(tmp_path, upstream=Refusing(), default_temperature=0.0) as pair:
            for text in ("one", "two"):
                answer = pair.post(text, model="o9", **OPEN)
                assert (answer.status_code, answer.headers["x-semkv"]) == (
                    200,
                    "miss reason=sampled",
                )
            tried = [body.get("temperature") for body in pair.upstream.calls]
            assert tried == [0, None, None]
            (line,) = [
                r.getMessage() for r in caplog.records if "takes no temperature" in r.message
            ]
            assert "--sampled-rule 'model:o9=keep'" in line
            assert [text.split()[0] for text in twice(pair, "other", model="takes it", **OPEN)] == [
                "miss",
                "hit",
            ]

    def test_a_stream_goes_on_as_well(self, tmp_path: Path) -> None:
        with Pair(tmp_path, upstream=Refusing(), default_temperature=0.0) as pair:
            answer = pair.post("streamed", model="o9", stream=True, **OPEN)
            assert said(answer) == "You said: streamed"

    def test_with_a_salt_that_is_refused_too(self, tmp_path: Path) -> None:
        with Pair(tmp_path, upstream=Refusing(), default_temperature=0.0) as pair:
            answers = [pair.post(f"both {n}", model="strict", **OPEN) for n in range(3)]
            assert [answer.status_code for answer in answers] == [200] * 3
            pair.upstream.calls.clear()
            pair.post("both are known", model="strict", **OPEN)
            assert len(pair.upstream.calls) == 1

    def test_an_error_in_other_words_costs_a_request_and_no_answer(self, tmp_path: Path) -> None:
        upstream = Refusing()
        upstream.words = "unsupported parameter"
        with Pair(tmp_path, upstream=upstream, default_temperature=0.0) as pair:
            answers = [pair.post(f"other words {n}", model="o9", **OPEN) for n in range(2)]
            assert [answer.status_code for answer in answers] == [200, 200]

    def test_an_error_too_large_to_hold_costs_no_answer(self, tmp_path: Path) -> None:
        upstream = Refusing()
        upstream.words = f"temperature {'x' * 4000}"
        with Pair(tmp_path, upstream=upstream, default_temperature=0.0) as pair:
            pair.app.gateway.flights.max_total_bytes = 2000
            answer = pair.post("large", model="o9", **OPEN)
            assert (answer.status_code, said(answer)) == (200, "You said: large")
            pair.settle()

    def test_an_error_of_the_clients_own_says_nothing_of_the_model(self, steady: Pair) -> None:
        steady.upstream.script["mine"] = {"status": "400", "says": "your 'temperature' is odd"}
        assert steady.post("mine", **OPEN).status_code == 400
        assert twice(steady, "not mine", **OPEN)[0] == "miss temperature=0"

    def test_a_rule_keeps_what_such_a_model_draws(self, tmp_path: Path) -> None:
        rules = ("model:o9=keep",)
        with Pair(
            tmp_path, upstream=Refusing(), default_temperature=0.0, sampled_rules=rules
        ) as pair:
            first, second = twice(pair, "kept", model="o9", **OPEN)
            assert (first, second.split()[0]) == ("miss", "hit")
            assert len(pair.upstream.calls) == 1


class TestRules:
    def test_the_first_that_fits_decides(self, tmp_path: Path) -> None:
        rules = ("prompt:*poem*=draw", "model:keeps=keep")
        with Pair(tmp_path, default_temperature=0.0, sampled_rules=rules) as pair:
            assert twice(pair, "a Poem", model="keeps", **OPEN) == ["miss reason=sampled"] * 2
            assert pair.upstream.calls[-1]["temperature"] is None
            kept = twice(pair, "a fact", model="keeps", temperature=0.9)
            assert [text.split()[0] for text in kept] == ["miss", "hit"]
            assert "temperature=0" not in kept[1]
            assert twice(pair, "a fact", **OPEN)[0] == "miss temperature=0"

    def test_sampled_keeps_all_others(self, tmp_path: Path) -> None:
        with Pair(tmp_path, sampled=True, sampled_rules=("prompt:*poem*=draw",)) as pair:
            assert twice(pair, "a fact", temperature=0.9)[1].split()[0] == "hit"
            assert twice(pair, "a poem", temperature=0.9) == ["miss reason=sampled"] * 2

    def test_a_near_repeat_of_what_was_drawn_is_answered_by_it(self, tmp_path: Path) -> None:
        with Pair(tmp_path, sampled=True, **NEAR) as pair:
            drawn = pair.post(ONE, temperature=0.9)
            pair.settle()
            near = pair.post(OTHER, temperature=0.9)
            assert near.headers["x-semkv"].startswith("hit tier=text:semantic")
            assert said(near) == said(drawn)
            assert pair.asked == []

    @pytest.mark.parametrize("rule", ["model:x", "tag:x=keep", "model:=keep", "model:x=0", ""])
    def test_another_form_ends_the_start(self, rule: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="--sampled-rule"):
            Pair(tmp_path, sampled_rules=(rule,))


class TestMaxAge:
    def test_a_client_that_takes_an_older_answer_gets_one_that_was_drawn(
        self, tmp_path: Path
    ) -> None:
        with Pair(tmp_path, sampled_rules=("prompt:*poem*=draw",)) as pair:
            for text in ("a fact", "a poem"):
                aged = {"Cache-Control": "max-age=600"}
                assert twice(pair, text, temperature=0.9, headers=aged)[1].split()[0] == "hit"
                assert twice(pair, text, temperature=0.9) == ["miss reason=sampled"] * 2
                other = {**aged, "Authorization": "Bearer another"}
                assert pair.post(text, temperature=0.9, headers=other).headers["x-semkv"] == "miss"

    @pytest.mark.parametrize("said", ["max-age=0", "max-age=x", "max-age=-1", "s-maxage=60", ""])
    def test_other_words_do_not(self, said: str, steady: Pair) -> None:
        headers = {"Cache-Control": said}
        for answer in twice(steady, f"aged {said}", temperature=0.9, headers=headers):
            assert answer in ("miss reason=sampled", "miss reason=no-cache")


class TestStatelessResponses:
    BODY: dict[str, Any] = {"model": "scripted", "input": "hello", "temperature": 0}  # noqa: RUF012

    @pytest.fixture(scope="class")
    def pair(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
        with Pair(tmp_path_factory.mktemp("stateless"), stateless_responses=True) as pair:
            yield pair

    def test_a_request_may_leave_store_out(self, pair: Pair) -> None:
        for left_out in ({}, {"store": None}, {"background": False}):
            body = {**self.BODY, "input": f"left out {left_out}", **left_out}
            assert [kind(post(pair, RESPONSES, body)) for _ in range(2)] == ["miss", "hit"]

    @pytest.mark.parametrize(
        "state",
        [
            {"store": True},
            {"previous_response_id": "resp_1"},
            {"conversation": "conv_1"},
            {"background": True},
            {"prompt": {"id": "pmpt_1"}},
        ],
        ids=str,
    )
    def test_what_names_state_passes(self, state: dict[str, Any], pair: Pair) -> None:
        answers = [post(pair, RESPONSES, {**self.BODY, **state}) for _ in range(2)]
        assert {kind(answer) for answer in answers} == {"pass"}

    def test_it_shares_nothing_with_one_that_says_store_false(self, pair: Pair) -> None:
        """An answer may repeat the field."""
        body = {**self.BODY, "input": "said or not"}
        bodies = (body, {**body, "store": False})
        assert [kind(post(pair, RESPONSES, one)) for one in bodies] == ["miss", "miss"]

    def test_the_reason_is_said_without_it(self, steady: Pair) -> None:
        assert post(steady, RESPONSES, self.BODY).headers["x-semkv"] == "pass reason=store"


class TestAdvice:
    def lines(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "semkv_dashboard.advice"]

    def test_after_twenty_requests_that_are_not_kept_it_says_what_to_type(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Pair(tmp_path) as pair:
            for n in range(19):
                pair.post(f"left open {n}", **OPEN)
            assert (self.lines(caplog), pair.admin("stats").json()["advice"]) == ([], "")
            pair.post("left open, too", **OPEN)
            (line,) = self.lines(caplog)
            assert line == pair.admin("stats").json()["advice"]
            assert line.startswith("20 of the latest 20 requests could not be kept, 20 as sampled")
            assert "--default-temperature 0" in line
            for n in range(20):
                pair.post(f"left open {n}", **OPEN)
            assert self.lines(caplog) == [line]
            for n in range(20):
                pair.post(f"named {n}")
            assert pair.admin("stats").json()["advice"] == ""

    def test_each_reason_has_its_remedy(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Pair(tmp_path, default_temperature=0.0) as pair:
            for n in range(20):
                pair.post(f"warm {n}", temperature=0.9)
            for _ in range(20):
                post(pair, RESPONSES, {"model": "m", "input": "hello"})
            drawn, stored = self.lines(caplog)
            assert "--sampled-rule" in drawn
            assert "--default-temperature 0 sends" not in drawn
            assert "--stateless-responses" in stored

    def test_half_of_them_are_no_reason(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with Pair(tmp_path) as pair:
            for n in range(20):
                pair.post(f"half {n}", **(OPEN if n % 2 else {}))
            assert self.lines(caplog) == []


FIELDS = st.dictionaries(
    st.sampled_from(
        ["temperature", "top_p", "seed", "n", "max_tokens", "stop", "tools", "mirostat"]
    ),
    st.none() | st.integers(-1, 2) | st.just("x"),
)


@given(FIELDS)
def test_no_request_that_names_how_to_draw_is_changed(fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], **fields, "tools": None}
    asked = canonicalise(body, Deployment("/v1/chat/completions", "t", b"s" * 16))
    sampling = Sampling(steady=True, keep=False, rules=[])
    settled = sampling.settled(asked, Controls())
    named = [
        name
        for name in ("temperature", "top_p", "seed", "mirostat")
        if fields.get(name) is not None
    ]
    if settled.steadied:
        assert not named
        assert fields.get("n") in (None, 1)
        assert settled.body(salted=False) == {**asked.body(salted=False), "temperature": 0}
        assert settled.key != asked.key
    else:
        assert settled is asked
