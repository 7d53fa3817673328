"""Run by test_frameworks.py, where LangChain, LiteLLM and LlamaIndex are installed. The server is the scripted one."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from langchain_core.load import dumps
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.outputs import ChatGeneration, Generation
from langchain_openai import ChatOpenAI
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from gateway_helpers import ONE, OTHER, Served
from scripted_upstream import Scripted
from semkv import CacheConfig, SemanticCache
from semkv.frameworks.answers import AnswerCache, chat_request
from semkv.frameworks.langchain import LangChainCache
from semkv.frameworks.litellm import LiteLLMCache
from semkv.frameworks.llama_index import CachedLLM

SAID = f"You said: {ONE}"
PICTURE = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with Served(Scripted()) as served:
        yield served


@pytest.fixture
def upstream(server: Served) -> Served:
    server.app.calls.clear()
    return server


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SemanticCache]:
    folder = tmp_path_factory.mktemp("cache")
    with SemanticCache(CacheConfig(folder, similarity_threshold=0.8)) as made:
        yield made


@pytest.fixture(autouse=True)
def _emptied(cache: SemanticCache) -> Iterator[None]:
    yield
    for tenant in ("", "one", "other"):
        AnswerCache(cache, tenant=tenant).clear()
    assert cache.stats().faults == {}


def chat(upstream: Served, cache: Any, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="m",
        base_url=f"{upstream.url}/v1",
        api_key="k",
        cache=cache,
        max_retries=0,
        **settings,
    )


# -- LangChain ----------------------------------------------------------------------------------


def test_langchain_repeats_and_near_repeats(upstream: Served, cache: SemanticCache) -> None:
    model = chat(upstream, LangChainCache(cache), temperature=0)
    first = model.invoke(ONE)
    again = model.invoke(ONE)
    assert (first.content, again.content) == (SAID, SAID)
    assert again.response_metadata["semkv"]["provenance"] == "text:exact"
    near = model.invoke(OTHER)
    assert near.content == SAID
    assert near.response_metadata["semkv"]["provenance"] == "text:semantic"
    opposite = model.invoke(ONE.replace("bake", "not bake"))
    assert "semkv" not in opposite.response_metadata
    assert len(upstream.app.calls) == 2


def test_langchain_async_reports_a_wrong_hit(upstream: Served, cache: SemanticCache) -> None:
    model = chat(upstream, LangChainCache(cache))

    async def asked() -> list[AIMessage]:
        answers = [await model.ainvoke(ONE), await model.ainvoke(OTHER)]
        assert cache.report_wrong(answers[1].response_metadata["semkv"]["hit_id"])
        return [*answers, await model.ainvoke(OTHER)]

    answers = asyncio.run(asked())
    assert [answer.content for answer in answers] == [SAID, SAID, f"You said: {OTHER}"]


@pytest.mark.parametrize(
    "other",
    [
        {"temperature": 0.5},
        {"model_kwargs": {"seed": 7}},
        {"max_tokens": 9},
        {"extra_body": {"top_k": 3}},
        {"stop": ["x"]},
    ],
    ids=str,
)
def test_langchain_settings_separate(
    other: dict[str, Any], upstream: Served, cache: SemanticCache
) -> None:
    kept = LangChainCache(cache)
    chat(upstream, kept).invoke(ONE)
    assert "semkv" not in chat(upstream, kept, **other).invoke(ONE).response_metadata


def test_langchain_histories_tools_and_tenants_separate(
    upstream: Served, cache: SemanticCache
) -> None:
    model = chat(upstream, LangChainCache(cache, tenant="one"))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked = [SystemMessage("Be brief."), HumanMessage("Hello"), AIMessage("Hi"), HumanMessage(ONE)]
    model.invoke(asked)
    others = [
        model.invoke(asked[1:]),
        model.invoke([SystemMessage("Be long."), *asked[1:]]),
        model.invoke([*asked[:2], AIMessage("Hello"), asked[3]]),
        model.bind_tools([tool]).invoke(asked),
        chat(upstream, LangChainCache(cache, tenant="other")).invoke(asked),
    ]
    assert [("semkv" in answer.response_metadata) for answer in others] == [False] * 5
    assert "semkv" in model.invoke(asked).response_metadata


def test_langchain_keeps_no_cut_answer_and_no_named_picture(
    upstream: Served, cache: SemanticCache
) -> None:
    model = chat(upstream, LangChainCache(cache))
    for content in (
        "What is it? [length]",
        [
            {"type": "text", "text": ONE},
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
        ],
        [{"type": "text", "text": ONE}, {"type": "file", "file": {"file_id": "f"}}],
    ):
        for _ in range(2):
            answer = model.invoke([HumanMessage(content)])
            assert "semkv" not in answer.response_metadata
    whole = [{"type": "text", "text": ONE}, {"type": "image_url", "image_url": {"url": PICTURE}}]
    model.invoke([HumanMessage(whole)])
    assert "semkv" in model.invoke([HumanMessage(whole)]).response_metadata
    whole[1]["image_url"]["url"] += "AA"
    assert "semkv" not in model.invoke([HumanMessage(whole)]).response_metadata


def test_langchain_tool_calls_come_back_equal(upstream: Served, cache: SemanticCache) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    model = chat(upstream, LangChainCache(cache)).bind_tools([tool])
    first = model.invoke("Call it [tool]")
    again = model.invoke("Call it [tool]")
    assert first.tool_calls
    assert again.tool_calls == first.tool_calls
    assert len(upstream.app.calls) == 1


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ({"finish_reason": "STOP"}, True),
        ({"stopReason": "end_turn"}, True),
        ({"status": "completed", "incomplete_details": None}, True),
        ({"stopReason": "max_tokens"}, False),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, False),
        ({"details": {"finish_reason": "length"}}, False),
        ({"finish_reason": ["stop"]}, False),
        ({}, False),
    ],
    ids=str,
)
def test_langchain_keeps_what_is_known_to_be_whole(
    told: dict[str, Any], kept: bool, cache: SemanticCache
) -> None:
    answers = LangChainCache(cache)
    message = AIMessage("an answer", response_metadata=told)
    answers.update("a question", "[]", [ChatGeneration(message=message)])
    assert (answers.lookup("a question", "[]") is not None) is kept


def test_langchain_caches_nothing_that_is_only_named(cache: SemanticCache) -> None:
    answers = LangChainCache(cache)
    whole = [Generation(text="x", generation_info={"finish_reason": "stop"})]
    named = f"[('response_format', {AnswerCache!r})]"
    unwritten = dumps([HumanMessage(ONE), object()])
    for prompt, settings in (
        (ONE, named),
        (ONE, dumps(object()) + "---[]"),
        (unwritten, "[]"),
        (json.dumps([ONE]), "[]"),
    ):
        answers.update(prompt, settings, whole)
        assert answers.lookup(prompt, settings) is None
    deep = "[" * 100_000
    answers.update(deep, "[]", whole)
    assert answers.lookup(deep, "[]") is not None


# -- LiteLLM ------------------------------------------------------------------------------------


@pytest.fixture
def complete(upstream: Served, cache: SemanticCache) -> Iterator[Any]:
    litellm.cache = LiteLLMCache(cache)

    def call(text: str, **settings: Any) -> str:
        answer = litellm.completion(
            model="openai/m",
            messages=[{"role": "user", "content": text}],
            api_base=f"{upstream.url}/v1",
            **{"caching": True, "api_key": "k", **settings},
        )
        if not settings.get("stream"):
            return str(answer.choices[0].message.content)
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer)

    yield call
    litellm.cache = None


def test_litellm_repeats_and_near_repeats(complete: Any, upstream: Served) -> None:
    assert [complete(ONE), complete(ONE), complete(OTHER)] == [SAID] * 3
    assert len(upstream.app.calls) == 1
    streamed = [complete(ONE, stream=True) for _ in range(2)]
    assert streamed == [SAID] * 2
    assert len(upstream.app.calls) == 2


def test_litellm_async(complete: Any, upstream: Served, cache: SemanticCache) -> None:
    async def call() -> str:
        answer = await litellm.acompletion(
            model="openai/m",
            messages=[{"role": "user", "content": ONE}],
            api_base=f"{upstream.url}/v1",
            api_key="k",
            caching=True,
        )
        return str(answer.choices[0].message.content)

    async def twice() -> list[str]:
        before = cache.stats().entries
        first = await call()
        while cache.stats().entries == before:  # LiteLLM keeps the answer after it has returned it
            await asyncio.sleep(0.05)
        return [first, await call()]

    assert asyncio.run(twice()) == [SAID] * 2
    assert len(upstream.app.calls) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"api_key": "other"},
        {"temperature": 1},
        {"user": "u"},
        {"top_k": 3},
        {"extra_headers": {"X-Tenant": "u"}},
        {"cache": {"no-cache": True}},
        {"a_setting_of_tomorrow": 1},
    ],
    ids=str,
)
def test_litellm_arguments_separate(other: dict[str, Any], complete: Any, upstream: Served) -> None:
    complete(ONE)
    complete(ONE, **other)
    assert len(upstream.app.calls) == 2


def test_litellm_keeps_what_is_whole_as_long_as_it_may(complete: Any, upstream: Served) -> None:
    for _ in range(2):
        complete("What is it? [length]")
        complete(ONE, cache={"ttl": 0})
        complete(OTHER, cache={"ttl": "soon"})
    assert len(upstream.app.calls) == 6


# -- LlamaIndex ---------------------------------------------------------------------------------


def model_of(upstream: Served, cache: SemanticCache, **settings: Any) -> CachedLLM:
    inner = OpenAILike(
        model="m",
        api_base=f"{upstream.url}/v1",
        is_chat_model=True,
        is_function_calling_model=True,
        **{"api_key": "k", **settings},
    )
    return CachedLLM(inner=inner).use(cache)


def test_llama_index_repeats_and_near_repeats(upstream: Served, cache: SemanticCache) -> None:
    model = model_of(upstream, cache)
    texts = [ONE, ONE, OTHER]
    answers = [model.chat([ChatMessage(role="user", content=text)]) for text in texts]
    assert [answer.message.content for answer in answers] == [SAID] * 3
    assert answers[2].raw["semkv"]["provenance"] == "text:semantic"
    assert [model.complete(ONE).text, asyncio.run(model.acomplete(ONE)).text] == [SAID] * 2
    assert len(upstream.app.calls) == 2
    streamed = [piece.delta for piece in model.stream_chat([ChatMessage("a stream")])]
    assert "".join(filter(None, streamed)) == "You said: a stream"


def test_llama_index_settings_separate(upstream: Served, cache: SemanticCache) -> None:
    asked = [ChatMessage(role="user", content=ONE)]
    model_of(upstream, cache).chat(asked)
    model_of(upstream, cache, temperature=0.9).chat(asked)
    model_of(upstream, cache, api_key="other").chat(asked)
    model_of(upstream, cache).chat(asked, seed=7)
    named = ImageBlock(url="https://example.org/a.png")
    for _ in range(2):
        pictured = ChatMessage(role="user", blocks=[TextBlock(text=ONE), named])
        model_of(upstream, cache).chat([pictured])
    assert len(upstream.app.calls) == 6


def test_llama_index_unknown_functions_and_objects_are_not_cached(
    upstream: Served, cache: SemanticCache
) -> None:
    for ending in ("", " in verse"):
        model = model_of(upstream, cache, completion_to_prompt=lambda text, e=ending: text + e)
        assert model.complete(ONE).raw is not None
    odd = ChatMessage(role="user", content=ONE, additional_kwargs={"x": object()})
    for _ in range(2):
        assert model_of(upstream, cache).chat([odd]).message.content == SAID
    assert len(upstream.app.calls) == 4


def test_llama_index_asks_the_model_for_calls_of_tools(
    upstream: Served, cache: SemanticCache
) -> None:
    def weather(city: str) -> str:
        return city

    model = model_of(upstream, cache)
    tools = [FunctionTool.from_defaults(weather)]
    found = []
    for _ in range(2):
        answer = model.chat_with_tools(tools, user_msg="Call it [tool]")
        found.append(
            [(c.tool_name, c.tool_kwargs) for c in model.get_tool_calls_from_response(answer)]
        )
    assert found[0]
    assert found[0] == found[1]
    assert len(upstream.app.calls) == 2


# -- the part they share ------------------------------------------------------------------------


def test_an_answer_lives_as_long_as_it_may(cache: SemanticCache) -> None:
    asked = chat_request([{"role": "user", "content": ONE}], {})
    short = AnswerCache(cache, lifetime_s=-1)
    short.keep(asked, "old")
    assert short.find(asked) is None
    fresh = AnswerCache(cache, lifetime_s=60)
    fresh.keep(asked, "new")
    found = fresh.find(asked)
    assert found is not None
    assert found.answer == "new"
    assert fresh.clear() == 1
    assert fresh.find(asked) is None


def test_what_is_no_json_is_not_cached(cache: SemanticCache) -> None:
    assert chat_request([{"role": "user", "content": ONE}], {"x": object()}) is None
    assert chat_request([{"role": "user", "content": ONE}], {"x": float("nan")}) is None
    assert chat_request([], {}) is None
    assert chat_request([{"role": "user", "content": [{"type": "text"}]}], {}) is None


def test_names_that_a_model_is_shown_count_in_their_order() -> None:
    asked = [{"role": "user", "content": ONE}]
    turned = [{"content": ONE, "role": "user"}]
    first, second = {"a": {}, "b": {}}, {"b": {}, "a": {}}
    plain = chat_request(asked, {"model": "m", "tools": [first]})
    assert chat_request(turned, {"tools": [first], "model": "m"}) == plain
    assert chat_request(asked, {"model": "m", "tools": [second]}) != plain


def test_a_closed_cache_is_a_miss(tmp_path: Path) -> None:
    closed = SemanticCache(CacheConfig(tmp_path, semantic=False))
    closed.close()
    answers = AnswerCache(closed)
    asked = chat_request([{"role": "user", "content": ONE}], {})
    answers.keep(asked, "x")
    assert answers.find(asked) is None
