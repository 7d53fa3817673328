"""What a key holds no word of, vLLM holds no word of either: its own readers of requests are asked."""

from __future__ import annotations

import copy
import json
from typing import Any, get_args

import pytest

pytest.importorskip("vllm")

from vllm.config import ModelConfig
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.multimodal.media import MediaConnector
from vllm.renderers.chat_utils import MM_PARSER_MAP, parse_chat_messages

from semkv.config import MINIGQA_VLM
from semkv_gateway import request_key, routes
from test_canonical import SAME_MESSAGES, data_url, image
from test_server_routes import BILLED

FORMATS = pytest.mark.parametrize("form", ["string", "openai"])


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return ModelConfig(model=str(MINIGQA_VLM), max_model_len=64)


def rendered(model: ModelConfig, message: dict[str, Any], form: Any) -> Any:
    """What vLLM hands to a chat template."""
    asked = ChatCompletionRequest(model="m", messages=[copy.deepcopy(message)])
    (turn,) = parse_chat_messages(asked.messages, model, form)[0]
    parts = turn.get("content")
    for part in parts if isinstance(parts, list) else []:
        part.pop("cache_control", None)  # templates show of a text part its text
    return turn


@FORMATS
@pytest.mark.parametrize(("one", "other"), SAME_MESSAGES)
def test_messages_of_one_key_are_one_to_a_template(
    model: ModelConfig, one: dict, other: dict, form: str
) -> None:
    assert rendered(model, one, form) == rendered(model, other, form)


@FORMATS
def test_the_billed_block_is_not_shown(model: ModelConfig, form: str) -> None:
    plain = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    for ending in ("aaaaa;", "bbbbb;"):
        block = {"type": "text", "text": BILLED + ending}
        assert rendered(model, {**plain, "content": [block, *plain["content"]]}, form) == rendered(
            model, plain, form
        )


def test_the_billed_block_is_not_shown_to_anthropics_route_either() -> None:
    def shown(**fields: Any) -> Any:
        asked = AnthropicMessagesRequest(
            model="m", max_tokens=9, **{"messages": [{"role": "user", "content": "a"}], **fields}
        )
        return AnthropicServingMessages.to_chat_completion_request(asked).model_dump(
            exclude={"request_id"}
        )

    text: dict[str, Any] = {"type": "text", "text": "You write code."}
    hinted = {**text, "cache_control": {"type": "ephemeral"}}
    billed = {"type": "text", "text": f"{BILLED}aaaaa;"}
    ways: list[Any] = ["You write code.", [text], [hinted], [billed, hinted]]
    every = [shown(system=way) for way in ways]
    assert every == [every[0]] * len(ways)
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "citations": None}
    assert shown(messages=[{"role": "user", "content": [part]}]) == shown()
    tool = {"name": "f", "input_schema": {"type": "object"}}
    assert shown(tools=[{**tool, "cache_control": {"type": "ephemeral"}}]) == shown(tools=[tool])


def test_names_in_a_schema_are_shown_in_their_order() -> None:
    """So this order is in the key; that of a `logit_bias` is not."""

    def shown(*names: str) -> list[str]:
        schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
        asked = ChatCompletionRequest(
            model="m",
            messages=[{"role": "user", "content": "a"}],
            logit_bias={str(len(name)): 1.0 for name in names},
            tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}],
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        )
        params = asked.to_sampling_params(5, {})
        assert params.structured_outputs is not None
        assert asked.tools
        assert params.logit_bias == {1: 1.0, 2: 1.0}
        return [json.dumps(params.structured_outputs.json), asked.tools[0].model_dump_json()]

    one, other = shown("a", "bb"), shown("bb", "a")
    assert one[0] != other[0]
    assert one[1] != other[1]


BODIES: list[tuple[type[Any], dict[str, Any]]] = [
    (ChatCompletionRequest, {"model": "m", "messages": [{"role": "user", "content": "a"}]}),
    (CompletionRequest, {"model": "m", "prompt": "a"}),
    (ResponsesRequest, {"model": "m", "input": "a"}),
    (
        AnthropicMessagesRequest,
        {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]},
    ),
]


@pytest.mark.parametrize(("kind", "body"), BODIES)
def test_null_says_what_absence_says(kind: type[Any], body: dict[str, Any]) -> None:
    """Where vLLM has another default than null, the two are sampled alike."""
    for name in sorted(request_key._NULL_IS_ABSENT & kind.model_fields.keys() - body.keys()):
        field = kind.model_fields[name]
        if field.default is None:
            continue
        if type(None) not in get_args(field.annotation):
            with pytest.raises(ValueError, match=name):
                kind(**body, **{name: None})
            continue
        one, other = (kind(**body, **more).to_sampling_params(5, {}) for more in ({}, {name: None}))
        assert repr(one) == repr(other), name


@pytest.mark.parametrize(("kind", "_"), BODIES)
def test_no_field_of_vllms_own_passes_unread(kind: type[Any], _: object) -> None:
    reviewed = request_key._KNOWN | request_key._SAMPLING | request_key._NOT_IN_KEY
    unkeyable = {*request_key._UNKEYABLE, "previous_response_id", "session_id"}
    assert kind.model_fields.keys() <= reviewed | unkeyable


def test_every_part_that_vllm_reads_was_looked_at() -> None:
    """Of a part that is not listed here nobody has looked whether all of it is in the request."""
    elsewhere = {
        "image_embeds",
        "audio_embeds",
        "video_embeds",
        "prompt_embeds",
        "image_pil",
        "input_image",
    }
    assert (
        MM_PARSER_MAP.keys()
        == routes._VERBATIM.keys() | routes._MEDIA.keys() | {"input_audio"} | elsewhere
    )


HEADS = ["data:image/png;charset=utf-8;base64", "DATA:image/png;a=b;c=d;base64", "data:;base64"]


@pytest.mark.parametrize("head", HEADS)
def test_a_data_url_holds_the_bytes_that_vllm_reads(head: str) -> None:
    url = f"{head},{data_url(image(1)).partition(',')[2]}"
    assert routes._of_data_url(url)[1] == image(1)
    assert MediaConnector().fetch_image(url).getpixel((0, 0)) == (1, 0, 0)
