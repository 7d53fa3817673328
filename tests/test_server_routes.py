"""Routes beside chats and completions, through the vendors' own clients: what is kept, kept apart, passed on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from hypothesis import strategies as st

from gateway_helpers import Pair
from scripted_routes import ROUTES as SCRIPTED
from semkv.server.request_key import CanonicalRequest, canonicalise
from semkv.server.routes import ROUTES, Unkeyable
from test_server_odd_upstreams import Odd

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
GENERATES = [RESPONSES, MESSAGES]
EVENTS = b"text/event-stream"
NEW = [path for path in ROUTES if path in SCRIPTED]
FORMS = ["plain", "[think] aloud", "[tool] to call", "[think] and [tool]"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("routes")) as running:
        yield running


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


def kind(answer: httpx.Response) -> str:
    return str(answer.headers["x-semkv"])


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


class TestTheVendorsClients:
    @ASKS
    @STREAM
    @pytest.mark.parametrize("form", FORMS)
    def test_a_hit_is_what_the_miss_was_event_by_event(self, pair: Pair, ask: Ask, stream: bool, form: str) -> None:
        text, before = f"{form} {stream} {ask.__name__}", len(pair.upstream.calls)
        (first, said), (again, repeated) = (ask(pair, text, stream=stream) for _ in range(2))
        assert (said, repeated.split()[:2]) == ("miss", ["hit", "tier=exact"])
        assert again == first
        assert len(again) > 5 or not stream
        assert len(pair.upstream.calls) == before + 1

    @ASKS
    @STREAM
    def test_two_keys_never_share(self, pair: Pair, ask: Ask, stream: bool) -> None:
        text = f"whose {ask.__name__} {stream}?"
        answers = [ask(pair, text, stream=stream, key=key) for key in ("one", "two", "one")]
        assert [said.split()[0] for _, said in answers] == ["miss", "miss", "hit"]
        assert answers[0][0] == answers[2][0] != answers[1][0]


@pytest.mark.parametrize("path", NEW)
def test_every_route_is_answered_byte_for_byte_on_its_own(pair: Pair, path: str) -> None:
    first, again = (post(pair, path, body_for(path, f"on {path}")) for _ in range(2))
    assert (kind(first), kind(again).split()[0], again.content) == ("miss", "hit", first.content)
    assert kind(post(pair, path, body_for(path, f"on {path}", dimensions=3))) == "miss", "every parameter counts"
    assert kind(post(pair, path, body_for(path, f"On {path}"))) == "miss"
    assert kind(post(pair, path, body_for(path, f"on {path}"), Authorization="Bearer other")) == "miss"
    assert {"stream", "stream_options"}.isdisjoint(pair.upstream.calls[-1]), "what is sent on is what came"
    assert pair.metric("semkv_faults_total") == 0


class TestNotKept:
    @pytest.mark.parametrize("path", GENERATES)
    @STREAM
    @pytest.mark.parametrize("how", ["[length]", "[fail]", "[cancel]", "[status=500]", "[status=429]", "[error]"])
    def test_what_is_not_whole(self, pair: Pair, path: str, stream: bool, how: str) -> None:
        if how == "[error]" and not stream:
            return
        text = f"{how} {path} {stream}"
        for _ in range(2):
            answer = post(pair, path, body_for(path, text, stream=stream))
            assert kind(answer) == "miss"
            assert answer.status_code == int(how[8:11]) if "status" in how else 200
            assert how.strip("[]") != "error" or "event: error" in answer.text

    @ASKS
    def test_a_stream_that_breaks_is_an_error_to_its_client(self, pair: Pair, ask: Ask) -> None:
        for _ in range(2):
            with pytest.raises((openai.APIError, anthropic.APIError), match="upstream"):
                ask(pair, f"[cut] short {ask.__name__}", stream=True)

    @pytest.mark.parametrize("path", [*GENERATES, "/v1/embeddings"])
    def test_an_answer_in_the_form_that_was_not_asked_for(self, tmp_path: Path, path: str) -> None:
        """It goes on as it came; kept, it would come back to others in a form that they cannot read."""
        _, stream = SCRIPTED[path if path in GENERATES else RESPONSES]
        body = body_for(path)
        answer = SCRIPTED[path][0](body, "a", {})
        events = b"".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in stream(body, "a", {}))
        with Odd(tmp_path) as odd:
            for asked, said, kind_of in (
                (True, json.dumps(answer).encode(), b"application/json"),
                (False, events, EVENTS),
            ):
                odd.says(said, kind=kind_of)
                answers = [post(odd, path, {**body, "stream": asked}) for _ in range(2)]
                assert [a.content for a in answers] == [said] * 2
                assert [a.headers["content-type"] for a in answers] == [kind_of.decode()] * 2
                assert [kind(a) for a in answers] == ["miss"] * 2


ITEM = {"role": "user", "content": [{"type": "input_text", "text": "a"}]}
STATEFUL: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"store": True}, "stateful"),
    (RESPONSES, {"store": None}, "stateful"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "stateful"),
    (RESPONSES, {"conversation": "conv_1"}, "stateful"),
    (RESPONSES, {"conversation": {"id": "conv_1"}}, "stateful"),
    (RESPONSES, {"background": True}, "stateful"),
    (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "stateful"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tool of unknown form"),
    (RESPONSES, {"tools": [{"type": "mcp", "server_url": "https://example.org"}]}, "tool of unknown form"),
    (RESPONSES, {"tools": {"type": "function"}}, "tool of unknown form"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "content part of unknown form"),
    (RESPONSES, {"input": [{"type": "web_search_call", "id": "1"}, ITEM]}, "content part of unknown form"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "content part"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "content part"),
    (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "https://a.example/x.png"}]}]},
        "media that is not in the request",
    ),
    (RESPONSES, {"input": [{"id": "msg_1"}, ITEM]}, "content part of unknown form"),
    (RESPONSES, {"input": []}, "no prompt"),
    (RESPONSES, {"input": None}, "no prompt"),
    (MESSAGES, {"container": "c"}, "stateful"),
    (MESSAGES, {"mcp_servers": [{"type": "url", "url": "https://example.org"}]}, "stateful"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tool of unknown form"),
    (MESSAGES, {"system": [{"type": "file"}]}, "content part of unknown form"),
    (MESSAGES, {"system": {"type": "text"}}, "content part of unknown form"),
    (MESSAGES, {"messages": "a"}, "no messages"),
    *[
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": where, "source": source}]}]},
            "media that is not in the request",
        )
        for where in ("image", "document")
        for source in ({"type": "url", "url": "https://a.example/x"}, {"type": "file", "file_id": "f"}, None, "x")
    ],
    ("/v1/embeddings", {"input": None, "messages": [{"role": "user", "content": "a"}]}, "input of unknown form"),
    ("/v1/embeddings", {"input": [{"role": "user", "content": "a"}]}, "input of unknown form"),
    ("/v1/embeddings", {"input": [[["a"]]]}, "input of unknown form"),
    ("/v1/rerank", {"documents": [{"content": [{"type": "image_url"}]}]}, "input of unknown form"),
    ("/v1/score", {"text_2": {"content": []}}, "input of unknown form"),
    *[(path, {"kv_transfer_params": {"a": 1}}, "state of another server") for path in NEW],
    *[(path, {"model": 3}, "model is no string") for path in NEW],
]


def canonical(path: str, body: dict[str, Any], **more: Any) -> CanonicalRequest:
    return canonicalise(path, body, tenant="t", secret=b"secret", **more)


def key(path: str, body: dict[str, Any], **more: Any) -> str:
    return canonical(path, body, **more).key


class TestPassed:
    @pytest.mark.parametrize(("path", "more", "why"), STATEFUL, ids=str)
    def test_what_depends_on_more_than_the_request(self, path: str, more: dict[str, Any], why: str) -> None:
        with pytest.raises(Unkeyable, match=why):
            canonical(path, body_for(path, **more))

    @pytest.mark.parametrize(("path", "more"), [(RESPONSES, {"store": True}), (MESSAGES, {"container": "c"})], ids=str)
    @STREAM
    def test_says_why_and_goes_on_as_it_came(self, pair: Pair, path: str, more: dict[str, Any], stream: bool) -> None:
        body = body_for(path, "stateful", stream=stream, **more)
        answers = [post(pair, path, body) for _ in range(2)]
        assert [kind(answer) for answer in answers] == ["pass reason=stateful"] * 2
        assert answers[0].content != answers[1].content
        assert {k: v for k, v in pair.upstream.calls[-1].items() if k != "cache_salt"} == body
        assert 'semkv_uncacheable_total{reason="stateful"}' in httpx.get(f"{pair.url}/metrics").text


class TestKeys:
    @pytest.mark.parametrize("path", GENERATES)
    @pytest.mark.parametrize(
        "more",
        [
            {"stream": True},
            {"stream": True, "stream_options": {"include_obfuscation": False}},
            {"tools": [{"type": "custom", "name": "look"}]},
            {"top_p": 0.5},
            {"cache_salt": "mine"},
            {"something_new": 1},
        ],
        ids=str,
    )
    def test_what_changes_the_answer_is_in_it(self, path: str, more: dict[str, Any]) -> None:
        streams = {name: more[name] for name in ("stream",) if len(more) > 1}
        assert key(path, body_for(path, **more)) != key(path, body_for(path, **streams))

    def test_what_a_response_repeats_is_in_it(self) -> None:
        for name in ("user", "safety_identifier", "metadata", "prompt_cache_key", "instructions"):
            assert key(RESPONSES, body_for(RESPONSES, **{name: "x"})) != key(RESPONSES, body_for(RESPONSES))
        assert key(MESSAGES, body_for(MESSAGES, metadata={"user_id": "x"})) == key(MESSAGES, body_for(MESSAGES))


# -- hostile bodies ----------------------------------------------------------------------------------------------------

NAMES = (
    "model input messages system tools store stream stream_options temperature seed metadata conversation prompt query"
    " documents text_1 text_2 role content type text image_url source url data output cache_salt max_tokens"
).split()
WORDS = [
    "user",
    "message",
    "input_text",
    "text",
    "image",
    "input_image",
    "base64",
    "tool_result",
    "function",
    "data:",
    "",
]
PARAMETERS = (
    "instructions include truncation tool_choice reasoning text service_tier max_output_tokens top_logprobs user"
    " cache_control thinking stop_sequences top_k encoding_format dimensions truncate_prompt_tokens top_n n stop echo"
).split()
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=12,
)
