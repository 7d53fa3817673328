"""The operator's rules: what passes by the cache, what is not kept, who gets no near-repeats."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway_helpers import NEAR, ONE, OTHER, Pair, kind
from semkv.errors import ConfigError
from semkv_gateway.request_key import CanonicalRequest, Deployment, canonicalise
from semkv_gateway.routes import texts_in
from semkv_gateway.rules import OFF, Rules
from semkv_gateway.settings import ServerSettings

SKIP = (
    "text:*passport*",
    "prompt:*horoscope*",
    "model:*-live",
    "tool:book_*",
    "answer:*i cannot help*",
)


def twice(pair: Pair, text: str, **more: Any) -> list[str]:
    return [kind(pair.post(text, **more)) for _ in range(2)]


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


class TestSkipped:
    @pytest.fixture(scope="class")
    def pair(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
        with Pair(tmp_path_factory.mktemp("skip"), skip_rules=SKIP) as made:
            yield made

    @pytest.mark.parametrize(
        ("text", "more"),
        [
            ("my Passport is 123", {}),
            ("a HOROSCOPE for today", {}),
            ("news", {"model": "scripted-live"}),
            ("a flight", {"tools": [tool("weather"), tool("book_flight")]}),
            ("earlier turn", {"messages": [
                {"role": "system", "content": "The passport of the user is 123."},
                {"role": "user", "content": "What is it?"},
            ]}),
            ("in a part", {"messages": [
                {"role": "user", "content": [{"type": "text", "text": "passport 7"}]},
            ]}),
            ("a tool's name", {"tools": [{"type": "custom", "custom": {"name": "book_flight"}}]}),
            ("PA\u00adSSPORT \uff50\u00adassport", {}),
            ("since then", {"messages": [
                {"role": "user", "content": "a horoscope"},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "the stars"},
            ]}),
            ("escaped", {"messages": [
                {"role": "assistant", "tool_calls": [CALL | {"function": {
                    "name": "f", "arguments": '{"a": "p\\u0061ssport"}',
                }}]},
                {"role": "user", "content": "What is it?"},
            ]}),
            ("a parameter", {"tools": [tool("x") | {"parameters": {"properties": {"passport": {}}}}]}),
            ("a file", {"messages": [{"role": "user", "content": [
                {"type": "file", "file": {"file_data": "bXkgcGFzc3BvcnQ="}},
                {"type": "text", "text": "Sum it up"},
            ]}]}),
            ("a tool's text", {"tools": [tool("x") | {"description": "reads a passport"}]}),
        ],
        ids=str,
    )  # fmt: skip
    def test_neither_looked_up_nor_kept(self, text: str, more: dict[str, Any], pair: Pair) -> None:
        answers = [pair.post(text, **more) for _ in range(2)]
        assert [answer.headers["x-semkv"] for answer in answers] == ["pass reason=rule"] * 2

    @pytest.mark.parametrize(
        ("text", "more"),
        [
            ("a pass and a port", {}),
            ("the weather", {"tools": [tool("weather")]}),
            ("live", {"model": "scripted-live-2"}),
        ],
        ids=str,
    )
    def test_all_else_is_kept(self, text: str, more: dict[str, Any], pair: Pair) -> None:
        assert twice(pair, text, **more) == ["miss", "hit"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_answer_with_such_a_text_is_not_kept(self, stream: bool, pair: Pair) -> None:
        text = f"I cannot help with that. {stream}"  # the server repeats it
        assert twice(pair, text, stream=stream) == ["miss", "miss"]

    def test_a_stream_without_readable_texts_is_not_kept(self, pair: Pair) -> None:
        assert twice(pair, "unknown [odd]", stream=True) == ["miss", "miss"]

    def test_the_counter_names_the_rule(self, pair: Pair) -> None:
        pair.post("my passport")
        assert pair.metric('semkv_uncacheable_total{reason="rule"}') > 0


def asked(body: dict[str, Any], endpoint: str = "/v1/chat/completions") -> CanonicalRequest:
    return canonicalise(body, Deployment(endpoint, "a tenant", b"secret"))


@pytest.mark.parametrize(
    ("endpoint", "body", "skipped"),
    [
        ("/v1/completions", {"prompt": [1, 2]}, True),
        ("/v1/completions", {"prompt": ["one", "a horoscope"]}, True),
        ("/v1/embeddings", {"input": ["one", "a horoscope"]}, True),
        ("/v1/embeddings", {"input": ["one", "two"]}, False),
    ],
)
def test_other_routes(endpoint: str, body: dict[str, Any], skipped: bool) -> None:
    rules = Rules.of(ServerSettings(skip_rules=SKIP))
    assert rules.skips(asked({"model": "m", **body}, endpoint)) is skipped


def test_a_label_by_a_rule_and_a_deep_body() -> None:
    settings = ServerSettings(skip_rules=("tag:stars",), tag_rules=("prompt:*horoscope*=stars",))
    rules = Rules.of(settings)
    chat = {"model": "m", "messages": [{"role": "user", "content": "a horoscope"}]}
    assert rules.skips(asked(chat))
    assert rules.least_cosine(asked(chat)) == OFF
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    assert list(texts_in([deep, "last"])) == ["last"]


AFTER_A_TOOL = {"messages": [
    {"role": "user", "content": [{"type": "text", "text": "a horoscope"}]},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "the stars"},
]}  # fmt: skip


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", AFTER_A_TOOL),
        ("/v1/completions", {"prompt": ["one", "a horoscope"]}),
        ("/v1/completions", {"prompt": [1, 2]}),
    ],
)
def test_rules_of_lifetimes_and_labels_read_what_a_user_said_last(
    endpoint: str, body: dict[str, Any]
) -> None:
    rules = Rules.of(ServerSettings(tag_rules=("prompt:*horoscope*=stars",)))
    assert rules.tags(asked({"model": "m", **body}, endpoint)) == ["stars"]


class TestNearRepeats:
    def test_a_donor_from_before_a_rule(self, tmp_path: Path) -> None:
        with Pair(tmp_path, **NEAR) as pair:
            pair.post(ONE)
            pair.settle()
        with Pair(tmp_path, skip_rules=(f"prompt:{ONE}",), **NEAR) as pair:
            assert pair.post(OTHER).headers["x-semkv"] == "miss"

    def test_off_for_some(self, tmp_path: Path) -> None:
        rules = ("prompt:*sourdough*=off",)
        with Pair(tmp_path, near_rules=rules, **NEAR) as pair:
            assert [kind(pair.post(text)) for text in (ONE, ONE, OTHER)] == ["miss", "hit", "miss"]
            pair.settle()
            bread = [text.replace("sourdough", "rye") for text in (ONE, OTHER)]
            assert kind(pair.post(bread[0])) == "miss"
            pair.settle()
            near = pair.post(bread[1]).headers["x-semkv"]
            assert near.startswith("hit tier=text:semantic")

    def test_nearer_than_elsewhere(self, tmp_path: Path) -> None:
        with Pair(tmp_path, near_rules=("model:scripted=1",), **NEAR) as pair:
            assert kind(pair.post(ONE)) == "miss"
            pair.settle()
            assert pair.post(OTHER).headers["x-semkv"] == "miss"
            assert kind(pair.post(OTHER)) == "hit"

    def test_off_for_a_tenant(self, tmp_path: Path) -> None:
        keys = {name: {"Authorization": f"Bearer {name}"} for name in ("one", "other")}
        with Pair(tmp_path / "first", **NEAR) as pair:
            for name in keys:
                pair.post(ONE, headers=keys[name])
            pair.settle()
            assert kind(pair.post(ONE, headers=keys["one"])) == "hit"
            digits = pair.admin("recent").json()["hits"][0]["tenant"]
        with Pair(tmp_path / "first", near_rules=(f"tenant:{digits}=off",), **NEAR) as pair:
            found = {name: kind(pair.post(OTHER, headers=keys[name])) for name in keys}
        assert found == {"one": "miss", "other": "hit"}


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ("skip_rules", "passport"),
        ("skip_rules", "header:x"),
        ("skip_rules", "prompt:"),
        ("near_rules", "prompt:*x*"),
        ("near_rules", "prompt:*x*=0.5"),
        ("near_rules", "prompt:*x*=1.5"),
        ("near_rules", "prompt:*x*=0.9.9"),
        ("near_rules", "answer:*x*=off"),
    ],
)
def test_a_malformed_rule_is_an_error_that_names_it(
    setting: str, rule: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        Pair(tmp_path, **{setting: (rule,)})
    assert setting.replace("_rules", "-rule") in str(error.value)
    assert rule in str(error.value)
    assert ServerSettings().skip_rules == ()
