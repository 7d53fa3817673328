"""Routes beside chats and completions, through the vendors' own clients: what is kept, kept apart, passed on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from gateway_helpers import Pair, kind
from scripted_routes import ROUTES as SCRIPTED
from semkv_gateway.request_key import Deployment, canonicalise
from semkv_gateway.routes import ROUTES, Unkeyable
from test_server_odd_upstreams import Odd

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
GENERATES = [RESPONSES, MESSAGES]
NEW = [path for path in ROUTES if path in SCRIPTED]


def body_for(path: str, text: str = "a", **more: Any) -> dict[str, Any]:
    """A request that is answered from the cache the second time."""
    own: dict[str, Any]
    if path == RESPONSES:
        own = {"input": text, "store": False, "temperature": 0}
    elif path == MESSAGES:
        own = {"messages": [{"role": "user", "content": text}], "max_tokens": 99, "temperature": 0}
    elif "embeddings" in path:
        own = {"input": text}
    elif "rerank" in path:
        own = {"query": text, "documents": ["one", "another"]}
    else:
        own = {"text_1": text, "text_2": ["one", "another"]}
    return {"model": "scripted", **own, **more}


def post(pair: Pair, path: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(f"{pair.url}{path}", json=body, headers=headers, timeout=120)


def responses(pair: Pair, text: str, *, stream: bool, key: str = "key") -> tuple[list[Any], str]:
    """The events of a stream, or the one answer, as OpenAI's client reads them; and what the cache said."""
    create = pair.client(key).responses.with_raw_response.create
    raw = create(model="scripted", input=text, store=False, temperature=0, stream=stream)
    return list(raw.parse()) if stream else [raw.parse()], raw.headers["x-semkv"]


def messages(pair: Pair, text: str, *, stream: bool, key: str = "key") -> tuple[list[Any], str]:
    """The same of Anthropic's."""
    client = anthropic.Anthropic(base_url=pair.url, api_key=key, max_retries=0, timeout=120)
    said: list[dict[str, Any]] = [{"role": "user", "content": text}]
    raw = client.messages.with_raw_response.create(  # type: ignore[call-overload]
        model="scripted", messages=said, max_tokens=99, stream=stream, extra_body={"temperature": 0}
    )
    return list(raw.parse()) if stream else [raw.parse()], raw.headers["x-semkv"]


Ask = Callable[..., tuple[list[Any], str]]
ASKS = pytest.mark.parametrize("ask", [responses, messages])
STREAM = pytest.mark.parametrize("stream", [False, True])


@ASKS
@STREAM
def test_a_hit_is_to_the_vendors_clients_what_the_miss_was(
    pair: Pair, ask: Ask, stream: bool
) -> None:
    for form in ("plain", "[think] aloud", "[tool] to call", "[think] and [tool]"):
        text, before = f"{form} {stream} {ask.__name__}", len(pair.upstream.calls)
        answers = [ask(pair, text, stream=stream, key=key) for key in ("one", "one", "two")]
        assert [said.split(" age")[0] for _, said in answers] == ["miss", "hit tier=exact", "miss"]
        assert answers[0][0] == answers[1][0] != answers[2][0]
        assert len(answers[0][0]) > 5 or not stream
        assert len(pair.upstream.calls) == before + 2


@pytest.mark.parametrize("path", NEW)
def test_every_route_is_answered_byte_for_byte_on_its_own(pair: Pair, path: str) -> None:
    text = f"on {path}"
    first, again = (post(pair, path, body_for(path, text)) for _ in range(2))
    assert (kind(first), kind(again), again.content) == ("miss", "hit", first.content)
    assert kind(post(pair, path, body_for(path, text, dimensions=3))) == "miss", (
        "every parameter counts"
    )
    assert kind(post(pair, path, body_for(path, text.upper()))) == "miss"
    assert kind(post(pair, path, body_for(path, text), Authorization="Bearer other")) == "miss"
    assert {"stream", "stream_options"}.isdisjoint(pair.upstream.calls[-1]), (
        "what is sent on is what came"
    )
    assert pair.metric("semkv_faults_total") == 0


@pytest.mark.parametrize("path", GENERATES)
@STREAM
def test_what_is_not_whole_is_not_kept(pair: Pair, path: str, stream: bool) -> None:
    for how in (
        "[length]",
        "[fail]",
        "[cancel]",
        "[status=500]",
        "[status=429]",
        *["[error]"] * stream,
    ):
        for _ in range(2):
            answer = post(pair, path, body_for(path, f"{how} {path} {stream}", stream=stream))
            assert kind(answer) == "miss"
            assert answer.status_code == (int(how[8:11]) if "status" in how else 200)
            assert how != "[error]" or "event: error" in answer.text


@ASKS
def test_a_stream_that_breaks_is_an_error_to_its_client(pair: Pair, ask: Ask) -> None:
    for _ in range(2):
        with pytest.raises((openai.APIError, anthropic.APIError), match="upstream"):
            ask(pair, f"[cut] short {ask.__name__}", stream=True)


@pytest.mark.parametrize("path", [*GENERATES, "/v1/embeddings"])
def test_an_answer_in_the_form_that_was_not_asked_for(tmp_path: Path, path: str) -> None:
    """It goes on as it came; kept, it would come back to others in a form that they cannot read."""
    whole, stream = SCRIPTED[path][0], SCRIPTED[path][1] or SCRIPTED[RESPONSES][1]
    body = body_for(path)
    events = b"".join(
        f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in stream(body, "a", {})
    )
    forms = {
        b"application/json": json.dumps(whole(body, "a", {})).encode(),
        b"text/event-stream": events,
    }
    with Odd(tmp_path) as odd:
        for form, said in forms.items():
            odd.says(said, kind=form)
            for _ in range(2):
                answer = post(odd, path, {**body, "stream": form == b"application/json"})
                assert (answer.content, answer.headers["content-type"], kind(answer)) == (
                    said,
                    form.decode(),
                    "miss",
                )


ITEM = {"role": "user", "content": [{"type": "input_text", "text": "a"}]}
UNKNOWN, ELSEWHERE = "content part of unknown form", "media that is not in the request"
NOT_KNOWN = "field that is not known"


def user(kind: str, **fields: Any) -> dict[str, Any]:
    """A message of one part."""
    return {"role": "user", "content": [{"type": kind, **fields}]}


PASSED: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"store": True}, "store"),
    (RESPONSES, {"store": None}, "store"),
    (RESPONSES, {"previous_response_id": "resp_1"}, NOT_KNOWN),
    (RESPONSES, {"conversation": {"id": "conv_1"}}, NOT_KNOWN),
    (RESPONSES, {"background": True}, "stateful"),
    (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "stateful"),
    (
        RESPONSES,
        {"tools": [{"type": "mcp", "server_url": "https://example.org"}]},
        "tool of unknown form",
    ),
    (RESPONSES, {"tools": {"type": "function"}}, "tool of unknown form"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}, UNKNOWN),
    (RESPONSES, {"input": [{"type": "web_search_call", "id": "1"}, ITEM]}, UNKNOWN),
    (RESPONSES, {"input": [{"id": "msg_1"}, ITEM]}, UNKNOWN),
    (RESPONSES, {"input": [user("input_file", file_id="f")]}, ELSEWHERE),
    (RESPONSES, {"input": [user("input_file", file_data="https://a.example/x.pdf")]}, "no base64"),
    (RESPONSES, {"input": [{"type": "message", "role": "assistant", "id": "msg_1"}]}, "message"),
    (RESPONSES, {"input": [{**ITEM, "shelf": 7}]}, NOT_KNOWN),
    (MESSAGES, {"messages": [{"role": "user", "content": "a", "memory": "hr"}]}, NOT_KNOWN),
    *((path, {"search": True}, NOT_KNOWN) for path in NEW),
    (RESPONSES, {"input": [user("input_image", file_id="f")]}, ELSEWHERE),
    (RESPONSES, {"input": [user("input_text", text="a", file_id="f")]}, NOT_KNOWN),
    (RESPONSES, {"input": [user("input_image", image_url="https://a.example/x.png")]}, ELSEWHERE),
    (RESPONSES, {"input": []}, "no prompt"),
    (RESPONSES, {"input": None}, "no prompt"),
    (MESSAGES, {"container": "c"}, NOT_KNOWN),
    (MESSAGES, {"mcp_servers": [{"type": "url", "url": "https://example.org"}]}, NOT_KNOWN),
    (
        MESSAGES,
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tool of unknown form",
    ),
    (MESSAGES, {"system": [{"type": "file"}]}, UNKNOWN),
    (MESSAGES, {"system": {"type": "text"}}, UNKNOWN),
    (MESSAGES, {"messages": "a"}, "no messages"),
    (MESSAGES, {"messages": [user("text", text="a", source={"file_id": "f"})]}, NOT_KNOWN),
    (
        MESSAGES,
        {"messages": [user("image", source={"type": "url", "url": "https://a.example/x"})]},
        ELSEWHERE,
    ),
    (
        MESSAGES,
        {"messages": [user("document", source={"type": "file", "file_id": "f"})]},
        ELSEWHERE,
    ),
    (MESSAGES, {"messages": [user("document", source=None)]}, ELSEWHERE),
    (
        "/v1/embeddings",
        {"input": None, "messages": [{"role": "user", "content": "a"}]},
        "input of unknown form",
    ),
    ("/v1/embeddings", {"input": [{"role": "user", "content": "a"}]}, "input of unknown form"),
    ("/v1/embeddings", {"input": [[["a"]]]}, "input of unknown form"),
    ("/v1/rerank", {"documents": [{"content": [{"type": "image_url"}]}]}, "input of unknown form"),
    ("/v1/score", {"text_2": {"content": []}}, "input of unknown form"),
    *[(path, {"kv_transfer_params": {"a": 1}}, "state of another server") for path in NEW],
    *[(path, {"model": 3}, "model is no string") for path in NEW],
]


def test_what_depends_on_more_than_the_request_has_no_key() -> None:
    for path, more, why in PASSED:
        with pytest.raises(Unkeyable, match=why):
            key(path, body_for(path, **more))


def key(path: str, body: dict[str, Any]) -> str:
    return canonicalise(body, Deployment(path, "t", b"secret")).key


def test_what_is_not_known_of_an_item_is_in_the_key() -> None:
    text = {"type": "text", "text": "a"}
    block = {"role": "user", "content": [text]}
    said = {"role": "assistant", "content": [text]}
    reply = {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
    hinted = {
        "role": "user",
        "content": [{**text, "cache_control": {"type": "ephemeral"}, "citations": None}],
    }
    system = "You write code."
    same: list[dict[str, Any]] = [{"messages": [block]}, {"messages": [hinted]}]
    assert {key(MESSAGES, body_for(MESSAGES, **way)) for way in same} == {
        key(MESSAGES, body_for(MESSAGES))
    }
    told = {"system": [{**text, "text": system, "cache_control": {"type": "ephemeral"}}]}
    assert key(MESSAGES, body_for(MESSAGES, **told)) == key(
        MESSAGES, body_for(MESSAGES, system=system)
    )
    item = {"type": "message", **ITEM, "status": None}
    assert key(RESPONSES, body_for(RESPONSES, input=[item])) != key(
        RESPONSES, body_for(RESPONSES, input=[ITEM])
    )
    assert key(RESPONSES, body_for(RESPONSES, input=[{**ITEM, "status": None}])) == key(
        RESPONSES, body_for(RESPONSES, input=[ITEM])
    )
    moods = [key(path, body_for(path, **{name: [{**message, "mood": mood}]})) for mood in ("happy", "sad")
             for path, name, message in ((MESSAGES, "messages", said), (RESPONSES, "input", reply))]  # fmt: skip
    assert len({*moods}) == 4


BILLED = "x-anthropic-billing-header: cc_version=2.1.1.abc; cc_entrypoint=cli; cch="
CHAT = "/v1/chat/completions"


def billed(path: str, text: str) -> str:
    """The key of a request whose system prompt begins with a block."""
    system = [{"type": "text", "text": text}, {"type": "text", "text": "You write code."}]
    if path == CHAT:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "a"}]
        return key(path, {"messages": messages, "temperature": 0})
    return key(path, body_for(path, system=system))


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_the_block_that_vllm_takes_out_of_a_system_prompt_separates_nothing(path: str) -> None:
    assert billed(path, f"{BILLED}aaaaa;") == billed(path, f"{BILLED}bbbbb;")
    others = [
        f"{BILLED}aaaaa; Speak French.",
        f"{BILLED}aaaaa;\nSpeak French.",
        f"{BILLED}aaaaa; cc_x=French;",
    ]
    assert len({billed(path, text) for text in (f"{BILLED}aaaaa;", *others)}) == 4


@pytest.mark.parametrize(
    ("path", "more", "why"),
    [(RESPONSES, {"store": True}, "store"), (MESSAGES, {"container": "c"}, NOT_KNOWN)],
    ids=str,
)
@STREAM
def test_it_says_why_and_goes_on_as_it_came(
    pair: Pair, path: str, more: dict[str, Any], why: str, stream: bool
) -> None:
    numbers = {"big": 12345678901234567890, "small": 1e-7}
    body = body_for(path, "stateful", stream=stream, vllm_xargs=numbers, **more)
    answers = [post(pair, path, body) for _ in range(2)]
    assert [answer.headers["x-semkv"] for answer in answers] == [
        f"pass reason={why.replace(' ', '_')}"
    ] * 2
    assert answers[0].content != answers[1].content
    assert {k: v for k, v in pair.upstream.calls[-1].items() if k != "cache_salt"} == body


@pytest.mark.parametrize("path", GENERATES)
def test_what_changes_the_answer_is_in_the_key(path: str) -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"stream": True},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"tools": [{"type": "custom", "name": "look"}]},
        {"top_p": 0.5},
        {"cache_salt": "mine"},
        {"chat_template": "x"},
    ]
    repeated = ("user", "safety_identifier", "metadata", "prompt_cache_key")  # by a response
    ways += [{name: "x"} for name in repeated if path == RESPONSES]
    assert len({key(path, body_for(path, **way)) for way in ways}) == len(ways)
    if path == MESSAGES:
        assert key(path, body_for(path, metadata={"user_id": "x"})) == key(path, body_for(path))
