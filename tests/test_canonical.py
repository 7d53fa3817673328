"""Canonical requests: what changes the answer changes the key, what cannot be keyed is not, plans map one to one."""

from __future__ import annotations

import base64
import contextlib
import copy
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv.keys import media_id
from semkv.stores.media import MediaStore
from semkv.types import Plan
from semkv_gateway.request_key import CanonicalRequest, Deployment, canonicalise, loads
from semkv_gateway.routes import ROUTES, Unkeyable

SECRET = b"s" * 32
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def image(color: int) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (8, 8), (color, 0, 0)).save(out, "PNG")
    return out.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def picture(data: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}, **more}


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    own = messages or ({"role": "user", "content": "What color is the car?"},)
    return {"model": "m", "messages": list(own), "temperature": 0, **fields}


def canonical(body: dict[str, Any], endpoint: str = CHAT, **more: Any) -> CanonicalRequest:
    return canonicalise(
        body, Deployment(**{"endpoint": endpoint, "tenant": "t", "secret": SECRET, **more})
    )


# -- keys -----------------------------------------------------------------------------------------------------------

# Another value than the base body has; every one of these changes what the model answers or what is returned of it.
CHANGES: dict[str, Any] = {
    "model": "m-lora",
    "messages": [{"role": "user", "content": "What color is the bus?"}],
    "temperature": 0.5,
    **dict.fromkeys(
        ("seed", "n", "max_tokens", "max_completion_tokens", "min_tokens", "top_k", "top_logprobs"),
        2,
    ),
    **dict.fromkeys(
        ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"), 0.9
    ),
    "stop": ["x"],
    "bad_words": ["x"],
    **dict.fromkeys(
        ("logprobs", "ignore_eos", "continue_final_message", "return_token_ids", "echo"), True
    ),
    **dict.fromkeys(
        (
            "skip_special_tokens",
            "parallel_tool_calls",
            "add_generation_prompt",
            "include_reasoning",
        ),
        False,
    ),
    **dict.fromkeys(("prompt_logprobs", "truncate_prompt_tokens"), 5),
    **dict.fromkeys(("chat_template", "reasoning_effort", "cache_salt", "tool_choice"), "low"),
    "stop_token_ids": [1],
    "logit_bias": {"1": 2.0},
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "response_format": {"type": "json_object"},
    "structured_outputs": {"choice": ["a"]},
    "chat_template_kwargs": {"thinking": True},
    "mm_processor_kwargs": {"size": 1},
    "media_io_kwargs": {"image": {"mode": "L"}},
    "documents": [{"text": "x"}],
    "vllm_xargs": {"a": 1},
    "metadata": {"tags": ["cheap"]},  # by which a proxy may choose a model
}


def test_every_field_that_changes_the_answer_changes_the_key() -> None:
    keys = {canonical(chat()).key}
    for name, value in CHANGES.items():
        keys.add(canonical(chat(**{name: value})).key)
    assert len(keys) == len(CHANGES) + 1


def test_what_leaves_the_answer_alone_is_not_in_the_key() -> None:
    key = canonical(chat()).key
    same: dict[str, Any] = {
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    same |= {"store": True, "priority": 3, "temperature": -0.0}
    same |= dict.fromkeys(("user", "request_id", "prompt_cache_key", "safety_identifier"), "x")
    for name, value in same.items():
        assert canonical(chat(**{name: value})).key == key
    streamed = canonical(chat(**same))
    assert streamed.stream
    assert streamed.include_usage


def test_tenant_version_secret_and_endpoint_are_in_the_key() -> None:
    ways: list[dict[str, Any]] = [{}, {"tenant": "u"}, {"version": "2"}, {"secret": b"other"}]
    ways += [{"endpoint": "/v1/messages"}, {"tenant": "", "version": "t"}]
    assert len({canonical(chat(), **way).key for way in ways}) == len(ways)


def test_of_a_token_that_is_biased_under_two_names_the_last_one_counts() -> None:
    twice = [
        {"5": -100, "05": 100},
        {"05": 100, "5": -100},
    ]
    keys = {canonical(chat(*TURNS, logit_bias=bias)).key for bias in twice}
    assert len(keys) == 2


def test_media_are_keyed_by_their_bytes() -> None:
    def body(data: bytes, kind: str = "image/png", **more: Any) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": data_url(data, kind), **more}}
        return chat({"role": "user", "content": [part, {"type": "text", "text": "What?"}]})

    one = canonical(body(image(1)))
    assert one.key == canonical(body(image(1), "image/x-png")).key
    assert one.key != canonical(body(image(2))).key
    assert one.key != canonical(body(image(1), detail="low")).key
    assert one.request is not None
    assert one.request.media[0].media_id == media_id(image(1))

    def spoken(data: str) -> CanonicalRequest:
        audio = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
        return canonical(chat({"role": "user", "content": [audio, {"type": "text", "text": "?"}]}))

    assert spoken("AAAA").key != spoken("AAAB").key
    assert spoken("AAAA").request is None


def said(*messages: dict[str, Any], **fields: Any) -> CanonicalRequest:
    """A chat that ends with a question."""
    return canonical(chat(*messages, {"role": "user", "content": "And then?"}, **fields))


ROBIN = {"role": "assistant", "content": "A robin."}
CALL = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": "{}"}}
EPHEMERAL = {"type": "ephemeral"}
SAME_MESSAGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(
        (ROBIN, {**ROBIN, name: None})
        for name in ("refusal", "audio", "function_call", "reasoning", "of_next_year")
    ),
    *(
        (ROBIN, {**ROBIN, name: []})
        for name in ("annotations", "tool_calls", "reasoning_details", "thinking_blocks")
    ),
    (ROBIN, {**ROBIN, "provider_specific_fields": {}}),
    (ROBIN, {**ROBIN, "cache_control": EPHEMERAL}),
    (ROBIN, {**ROBIN, "content": [{"type": "text", "text": "A robin."}]}),
    (
        ROBIN,
        {
            **ROBIN,
            "content": [
                {"type": "text", "text": "A robin.", "cache_control": {**EPHEMERAL, "ttl": "1h"}}
            ],
        },
    ),
    (
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
    ),
]


@pytest.mark.parametrize(("one", "other"), SAME_MESSAGES)
def test_a_message_that_a_client_sends_back_says_what_it_said(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    first, second = said(one), said(other)
    assert first.key == second.key
    assert first.request is not None
    assert second.request is not None
    assert first.request.namespace == second.request.namespace
    assert first.request.segments == second.request.segments
    assert second.body()["messages"][0] == other, "it goes on as it came"
    planned = second.with_plan(Plan(first.request.segments, len(first.request.segments)))
    assert planned is not None
    assert planned.key == first.key


OTHER_MESSAGES: list[dict[str, Any]] = [
    ROBIN,
    {
        **ROBIN,
        "annotations": [{"type": "url_citation", "url_citation": {"url": "https://example.org"}}],
    },
    {**ROBIN, "reasoning_details": [{"type": "reasoning.encrypted", "data": "AAAA", "id": "rs_1"}]},
    {**ROBIN, "provider_specific_fields": {"a": 1}},
    {**ROBIN, "metadata": {"seen_at": "https://example.org"}},
    {**ROBIN, "reasoning": ""},
    {**ROBIN, "name": "bob"},
    {**ROBIN, "mood": "happy"},
    {**ROBIN, "mood": "sad"},
    {**ROBIN, "mood": []},
    {**ROBIN, "id": "msg_1"},
    {**ROBIN, "role": "wizard"},
    {**ROBIN, "cache_control": {"type": "forever"}},
    {**ROBIN, "content": [{"type": "text", "text": "A robin.", "weight": 1}]},
    {**ROBIN, "content": [{"type": "text", "text": "A rob"}, {"type": "text", "text": "in."}]},
    {**ROBIN, "content": [{"type": "input_text", "text": "A robin."}]},
    {"role": "tool", "content": "A robin.", "tool_call_id": None},
    {"role": "tool", "content": "A robin."},
]


def test_what_is_not_known_of_a_message_is_in_the_key_and_in_no_near_repeat() -> None:
    every = [said(message) for message in OTHER_MESSAGES]
    assert len({one.key for one in every}) == len(every)
    spaces = [one.request.namespace for one in every if one.request is not None]
    assert len({*spaces}) == len(spaces)
    exact = [one.key for one in every if one.request is None]
    assert exact == [said(message).key for message in OTHER_MESSAGES if unknown_to_us(message)]


def unknown_to_us(message: dict[str, Any]) -> bool:
    content = message["content"] if isinstance(message["content"], list) else []
    return (
        message["role"] == "wizard"
        or not message.keys().isdisjoint(("mood", "id", "cache_control"))
        or any("weight" in part for part in content)
    )


LABELLED = {"id": "msg_1", "createdAt": "2026-11-28T05:00:00Z"}


def test_labels_of_a_message_are_in_the_key_and_in_no_near_repeat() -> None:
    plain = canonical(chat({"role": "user", "content": "What?"}))
    labelled = canonical(chat({"role": "user", "content": "What?", **LABELLED}))
    assert labelled.key != plain.key
    assert labelled.request is None
    sized = canonical(chat({"role": "user", "content": [{**picture(image(1)), "max_pixels": 99}]}))
    assert sized.key != canonical(chat({"role": "user", "content": [picture(image(1))]})).key
    assert sized.request is None


def test_an_operator_names_a_field_that_is_in_the_request_whole() -> None:
    known = {"known_fields": frozenset(("tone",))}
    plain, one, other = (
        canonical(chat(**more), **known) for more in ({}, {"tone": 1}, {"tone": 2})
    )
    assert len({plain.key, one.key, other.key}) == 3
    assert canonical(chat()).key == plain.key
    with pytest.raises(Unkeyable):
        canonical(chat(tone=1, mood=1), **known)
    for stateful in ("session_id", "user_id", "conversation_id", "thread_id"):
        with pytest.raises(Unkeyable):
            canonical(chat(**{stateful: "x"}))
    with pytest.raises(Unkeyable):
        canonical(
            chat(kv_transfer_params={"a": 1}), known_fields=frozenset(("kv_transfer_params",))
        )


def test_a_hint_is_one_only_where_it_stands_as_one() -> None:
    """In a schema it is the name of a value, and vLLM shows all of a tool to the model."""
    schema = {"type": "object", "properties": {"cache_control": EPHEMERAL}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    plain = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
    }
    ways: list[dict[str, Any]] = [{}, {"tools": [tool]}, {"tools": [plain]}]
    ways += [{"tools": [{**plain, "cache_control": EPHEMERAL}]}, {"cache_control": "none"}]
    assert len({said(ROBIN, **way).key for way in ways}) == len(ways)
    assert said(ROBIN, cache_control=EPHEMERAL).key == said(ROBIN).key
    with pytest.raises(Unkeyable):
        said({"role": "user", "content": "x", "cache_control": {**EPHEMERAL, "key": "handbook"}})


def in_order(value: Any, *, reverse: bool) -> Any:
    """The same JSON with the names of every object sorted."""
    if isinstance(value, list):
        return [in_order(item, reverse=reverse) for item in value]
    if not isinstance(value, dict):
        return value
    return {name: in_order(value[name], reverse=reverse) for name in sorted(value, reverse=reverse)}


SCHEMA = {"type": "object", "properties": {"reason": {}, "verdict": {}}}
SHOWN: list[dict[str, Any]] = [
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"chat_template_kwargs": {"persona": {"name": "Ann", "age": 7}}},
    {"documents": [{"title": "a", "text": "b"}]},
]


@pytest.mark.parametrize("fields", SHOWN)
def test_an_order_of_names_that_a_model_is_shown_counts(fields: dict[str, Any]) -> None:
    one = canonical(chat(**in_order(fields, reverse=False)))
    other = canonical(chat(**in_order(fields, reverse=True)))
    assert one.key != other.key
    assert one.request is not None
    assert other.request is not None
    assert one.request.namespace != other.request.namespace


def test_an_order_of_names_that_says_nothing_does_not_count() -> None:
    body = chat(*TURNS, logit_bias={"7": 1, "5": -1, "10": 2}, seed=1, n=1)
    one, other = (canonical(in_order(body, reverse=reverse)) for reverse in (False, True))
    assert one.key == other.key == canonical(body).key
    assert one.request is not None
    assert other.request is not None
    assert one.request.namespace == other.request.namespace


def test_what_a_body_says_by_null_or_by_a_default() -> None:
    key = canonical(chat()).key
    for name in (
        "tools",
        "response_format",
        "stop",
        "seed",
        "logit_bias",
        "n",
        "frequency_penalty",
        "stream",
    ):
        assert canonical(chat(**{name: None})).key == key
    for one in (1, 1.0):
        assert canonical(chat(n=one)).key == key
    for other in (
        {"n": True},
        {"max_tokens": None},
        {"top_logprobs": None},
        {"a_field_of_next_year": None},
    ):
        assert canonical(chat(**other)).key != key


def test_of_a_data_url_only_names_and_charsets_are_left_out() -> None:
    def asked(url: str, kind: str = "image_url") -> str:
        return canonical(
            chat({"role": "user", "content": [{"type": kind, kind: {"url": url}}]})
        ).key

    code = base64.b64encode(image(1)).decode()
    pictures = (
        "data:image/png;base64",
        "data:image/png;charset=utf-8;base64",
        "DATA:;name=a b;base64",
    )
    assert len({asked(f"{head},{code}") for head in pictures}) == 1
    assert asked(f"data:image/png;page=2;base64,{code}") != asked(f"{pictures[0]},{code}")
    spoken = ("data:audio/wav", "data:audio/wav;name=a", "data:audio/wav;rate=8", "data:audio/ogg")
    assert len({asked(f"{head};base64,AAAA", "audio_url") for head in spoken}) == 3


# -- what has no key --------------------------------------------------------------------------------------------------

NESTED: list[Any] = []
for _ in range(100_000):
    NESTED = [NESTED]

PARTS: list[Any] = [
    1,
    {},
    {"type": "hologram"},
    {"type": ["text"]},
    {"type": "text"},
    {"type": "text", "text": 1},
    {"image_url": {"url": data_url(b"x")}},
    {"type": "image_url", "image_url": None, "uuid": "x"},
    {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}},
    {"type": "image_embeds", "image_embeds": "AAAA"},
    {"type": "input_audio", "input_audio": {"data": 1}},
    {"type": "image_url", "image_url": {"url": "data:image/png,AAAA"}},
    {"type": "image_url", "image_url": {"url": "data:base64,AAAA"}},
    {"type": "image_url", "image_url": {"url": "data:image/png;BASE64,AAAA"}},
    {"type": "image_url", "image_url": {"url": data_url(b"x"), "fileId": "f"}},
    {"type": "file", "file": {"file_id": "x"}},
    {"type": "file", "file": {"file_data": "AAAA", "file_id": "x"}},
    {"type": "file", "file": {"file_data": "https://example.org/a.pdf"}},
    {"type": "text", "text": "x", "file_id": "f"},
    {"type": "text", "text": "x", "source": {"link": "s3://bucket/key"}},
    {"type": "text", "text": "x", "more": [{"url": "a"}]},
    {"type": "text", "text": "x", "corpus": "handbook"},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav", "voice": 7}},
    {**picture(b"x"), "album": 7},
]
MESSAGES: list[Any] = [
    1,
    {"content": "x"},
    {"role": ["user"], "content": "x"},
    {"role": "user", "content": 5},
    {"role": "user", "content": "\udfff"},
    {"role": "assistant", "audio": {"id": "audio_1"}},
    {"role": "assistant", "id": "msg_1"},
    {"role": "user", "content": "x", "attachments": [{"file_id": "f"}]},
    {"role": "user", "content": "x", "file_ids": [17]},
    {"role": "user", "content": "x", "container": {"id": "c"}},
    {"role": "user", "content": "x", "look": "gs://bucket/key"},
    *(
        {"role": role, "content": "x", name: value}
        for role in ("user", "system", "tool", "wizard")
        for name, value in {"memory": "hr", "recall": True, "shelf": 7, "mood": []}.items()
    ),
    {"role": "user", "id": "msg_1"},
    {"role": "assistant", "content": "", "thread": "t"},
    *({"role": "user", "content": [part]} for part in PARTS),
]
FIELDS: list[dict[str, Any]] = [
    {"temperature": float("nan")},
    {"logit_bias": float("inf")},
    {"logit_bias": 10**5000},
    {"logit_bias": "\ud800"},
    {"logit_bias": NESTED},
    {"logit_bias": {1, 2}},
    {"stream": "yes"},
    {"stream": 1},
    {"stream_options": []},
    {"stream_options": {"continuous_usage_stats": True}},
    {"model": 5},
    {"kv_transfer_params": {"a": 1}},
    {"previous_response_id": "r"},
    {"thread": {"id": "t"}},
    {"prompt": {"id": "p"}},
    {"background": True},
    {"data_sources": [{"parameters": {"endpoint": "https://search.example"}}]},
    *(
        {"a_field_of_next_year": value}
        for value in (5, 0, "x", "", True, False, [], {}, ["x"], {"mode": "on"})
    ),
    {"enable_search": True},
    {"search_parameters": {"mode": "on"}},
    {"use_memory": "project"},
    {"plugins": [{"kind": "web"}]},
    {"web_search_options": {}},
    {"tools": [{"type": "web_search"}]},
    {"tools": [{"type": "function", "function": {"name": "f"}, "vector_store_ids": ["vs_1"]}]},
    {"tools": [{"type": "function", "function": {"name": "f", "server": "s"}}]},
    {"functions": [{"name": "f", "corpus": "handbook"}]},
    {"messages": []},
    {"messages": "x"},
]


def test_what_cannot_be_keyed_is_refused_without_an_exception() -> None:
    for body in ({}, *map(chat, MESSAGES), *(chat(**fields) for fields in FIELDS)):
        with pytest.raises(Unkeyable) as refused:
            canonical(body)
        assert len(str(refused.value)) < 40


@pytest.mark.parametrize(
    "raw",
    [
        *(
            b'{"a": 1, "a": 2}',
            b'{"x": [{"b": 1, "b": 1}]}',
            b'{"a": NaN}',
            b"[-Infinity]",
            b'"\\ud800"',
            b"{",
            b"",
        ),
        *(b"\xff\xfe\x00", b"[" * 100_000, b"1" * 5000),
    ],
)
def test_json_that_readers_disagree_on_is_refused(raw: bytes) -> None:
    with pytest.raises(Unkeyable):
        loads(raw)


NAMES = st.sampled_from(["role", "content", "type", "text", "image_url", "url"]) | st.text()
WILD = st.recursive(
    st.none() | st.floats() | st.text(), lambda v: st.lists(v) | st.dictionaries(NAMES, v)
)


FIELD = st.sampled_from(["messages", "prompt", "input", "query", "system", "tools"])


@given(
    st.binary(max_size=60)
    | st.dictionaries(FIELD, WILD).map(lambda v: json.dumps(v | {"store": False}).encode())
)
@settings(max_examples=100, deadline=None)
def test_no_body_raises(raw: bytes) -> None:
    for endpoint in ROUTES:
        with contextlib.suppress(Unkeyable):
            canonicalise(loads(raw), Deployment(endpoint, "t", SECRET))


def test_what_is_nested_as_deeply_as_has_a_key_raises_nothing() -> None:
    def deeper(frames: int, one: CanonicalRequest) -> object:
        return deeper(frames - 1, one) if frames else one.request

    nested: list[Any] = []
    with contextlib.suppress(Unkeyable):
        while True:
            nested = [nested]
            deeper(50, canonical(chat(tools=nested)))


def test_which_requests_are_drawn_at_random() -> None:
    fixed = [{"temperature": 0}, {"temperature": 0.0}, {"temperature": 0.7, "seed": 0}]
    drawn = [
        *({"temperature": value} for value in (0.7, None, False, "0")),
        {"temperature": 1, "seed": True},
    ]
    assert [canonical(chat(**fields)).sampled for fields in (*fixed, *drawn)] == [False] * 3 + [
        True
    ] * 5


# -- segments and plans -----------------------------------------------------------------------------------------------

TURNS = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello", "tool_calls": []},
    {
        "role": "user",
        "content": [
            picture(image(1)),
            {"type": "text", "text": "A page."},
            {"type": "text", "text": "What?"},
        ],
    },
)


def test_an_answer_that_shows_the_prompt_is_of_no_other() -> None:
    assert canonical(chat(*TURNS)).prompt == "A page.\nWhat?"
    assert canonical(chat(*TURNS)).request is not None
    for shows in (
        {"echo": True},
        {"prompt_logprobs": 0},
        {"return_token_ids": True},
        {"suffix": "x"},
    ):
        assert canonical(chat(*TURNS, **shows)).request is None


def test_a_namespace_is_everything_but_texts_images_and_sampling() -> None:
    def space(*turns: Any, **fields: Any) -> Any:
        more = {name: fields.pop(name) for name in ("tenant", "version") if name in fields}
        request = canonical(chat(*(turns or TURNS), **fields), **more).request
        assert request is not None
        return request.namespace

    base, turns, named = space(), copy.deepcopy(TURNS), copy.deepcopy(TURNS)
    turns[0]["content"], turns[3]["content"][0] = "Be long.", picture(image(2))  # type: ignore[index]
    named[1]["name"] = "bob"
    for same in (
        {"temperature": 0.3, "seed": 1},
        {"max_tokens": 9},
        {"stop": ["x"]},
        {"stream": True},
    ):
        assert space(*turns, **same) == base
    fields = (
        "model",
        "tools",
        "tool_choice",
        "response_format",
        "chat_template_kwargs",
        "cache_salt",
    )
    found = [space(**{name: CHANGES[name]}) for name in fields]
    found += [space(tenant="u"), space(version="2"), space(*TURNS[1:]), space(*named)]
    assert len({base, *found}) == len(found) + 1


def test_a_plan_gives_the_donors_request(tmp_path: Path) -> None:
    donor_body = copy.deepcopy(chat(*TURNS, max_tokens=7))
    donor_body["messages"][3]["content"][0] = picture(image(2))
    donor_body["messages"][3]["content"][2]["text"] = "What is it?"
    donor, mine = canonical(donor_body), canonical(chat(*TURNS, max_tokens=7))
    donor_request = donor.with_media(MediaStore(tmp_path))
    assert donor_request is not None
    assert mine.request is not None
    planned, own = (
        mine.with_plan(Plan(donor_request.segments, 6)),
        mine.with_plan(Plan(mine.request.segments)),
    )
    assert planned is not None
    assert own is not None
    assert (planned.key, planned.body()) == (donor.key, donor.body())
    assert own.key == mine.key != planned.key


# -- what goes upstream -----------------------------------------------------------------------------------------------


def test_the_body_is_the_clients_own_with_salts_and_uuids_of_its_tenant() -> None:
    def seen(body: dict[str, Any], **more: Any) -> tuple[str, str]:
        """The salt, and the name of the image; all else is as it came."""
        before, out = copy.deepcopy(body), canonical(body, **more).body()
        parts = [sent["messages"][3]["content"][0] for sent in (before, out)]
        found = out.pop("cache_salt"), parts[1].pop("uuid", "")
        assert body == before
        before.pop("cache_salt", None)
        parts[0].pop("uuid", None)
        assert out == before
        return found

    base = seen(chat(*TURNS, user="bob", stream=True))
    assert [*map(len, base)] == [64, 32]
    assert seen(chat(*TURNS, max_tokens=3)) == base
    for other in (seen(chat(*TURNS), tenant="u"), seen(chat(*TURNS), secret=b"other")):
        assert other[0] != base[0]
        assert other[1] != base[1]
    assert seen(chat(*TURNS, cache_salt="mine"))[0] not in ("mine", base[0])
    read_in_another_way = chat(*TURNS, media_io_kwargs={"image": {"mode": "L"}})
    assert seen(read_in_another_way)[1] == ""
    assert canonical(read_in_another_way).request is None
    liar = copy.deepcopy(TURNS)
    liar[3]["content"][0]["uuid"] = "another image's"  # type: ignore[index]
    assert seen(chat(*liar)) == base
    assert canonical(chat(*liar)).key == canonical(chat(*TURNS)).key
