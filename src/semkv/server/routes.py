"""The routes whose answers are cached, one row for each: what is read of a request, how a stream ends, what is whole.

Chats and completions put a stream together to the answer it amounts to, so both forms share an entry, and their texts
may be matched by similarity. All others are kept as they came, streams event by event and apart from whole answers,
and only for byte-equal content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from semkv.server.content import Content, Unkeyable, read_messages, read_prompt
from semkv.server.sse import Assembler, Recorder, read_answer

_COMPLETE = frozenset(("stop", "tool_calls"))
_ENDED = frozenset(("end_turn", "stop_sequence", "tool_use"))

# Items and parts whose whole meaning is in the request: type -> the fields they may have.
_RESPONSES = {
    "message": frozenset(("type", "role", "content", "id", "status", "phase")),
    "input_text": frozenset(("type", "text")),
    "output_text": frozenset(("type", "text", "annotations", "logprobs")),
    "refusal": frozenset(("type", "refusal")),
    "input_image": frozenset(("type", "image_url", "detail")),
    "input_file": frozenset(("type", "filename", "file_data")),
    "function_call": frozenset(("type", "id", "call_id", "name", "arguments", "status")),
    "function_call_output": frozenset(("type", "id", "call_id", "output", "status")),
    "custom_tool_call": frozenset(("type", "id", "call_id", "name", "input", "status")),
    "custom_tool_call_output": frozenset(("type", "id", "call_id", "output", "status")),
    "reasoning": frozenset(("type", "id", "summary", "content", "encrypted_content", "status")),
    "reasoning_text": frozenset(("type", "text")),
}
_MESSAGES = {
    "message": frozenset(("role", "content")),
    "text": frozenset(("type", "text", "citations", "cache_control")),
    "image": frozenset(("type", "source", "cache_control")),
    "document": frozenset(("type", "source", "title", "context", "citations", "cache_control")),
    "tool_use": frozenset(("type", "id", "name", "input", "cache_control")),
    "tool_result": frozenset(("type", "tool_use_id", "content", "is_error", "cache_control")),
    "thinking": frozenset(("type", "thinking", "signature")),
    "redacted_thinking": frozenset(("type", "data")),
}
_TEXTS = ("input", "query", "queries", "text_1", "data_1", "documents", "items", "text_2", "data_2", "messages")
_NOTHING: tuple[object, ...] = (None, False, [])


@dataclass(frozen=True, slots=True)
class Route:
    """A path whose answers are cached.

    Attributes:
        read: takes the content out of a body; the flag: media may be remote. Raises `Unkeyable`.
        whole: whether an answer came to its own end.
        stream: reads a streamed answer.
        converts: a stream and a whole answer are made of each other. Else they are different answers.
        fixed_by: fields that keep an answer from being drawn at random; none where it never is.
        repeated: fields that the answer repeats, so they are in the key.
    """

    read: Callable[[Mapping[str, Any], bool], Content]
    whole: Callable[[Mapping[str, Any]], bool]
    stream: Callable[[], Assembler | Recorder] = Recorder
    converts: bool = False
    fixed_by: tuple[str, ...] = ()
    repeated: frozenset[str] = frozenset()

    def refusal(self, payload: bytes, status: int = 200) -> str:
        """Why an answer must not be kept, in a word or two; empty for a complete one."""
        if status != 200:
            return "status"
        try:
            answer = read_answer(payload)
        except (ValueError, RecursionError):
            return "no JSON"
        if not isinstance(answer, dict) or answer.get("error") is not None:
            return "error"
        return "" if self.whole(answer) else "unfinished"


# -- what is whole -----------------------------------------------------------------------------------------------------


def _has_finished_choices(answer: Mapping[str, Any]) -> bool:
    """Every choice ended by itself (``stop``) or with a tool call."""
    choices = answer.get("choices")
    return isinstance(choices, list) and bool(choices) and all(map(_is_finished, choices))


def _is_finished(choice: Any) -> bool:
    reason = choice.get("finish_reason") if isinstance(choice, dict) else None
    return isinstance(reason, str) and reason in _COMPLETE


def _is_completed(answer: Mapping[str, Any]) -> bool:
    return answer.get("object") == "response" and answer.get("status") == "completed"


def _has_ended(answer: Mapping[str, Any]) -> bool:
    reason = answer.get("stop_reason")
    return answer.get("type") == "message" and isinstance(reason, str) and reason in _ENDED


def _holds(name: str, fields: frozenset[str], answer: Mapping[str, Any]) -> bool:
    """Whether an answer has a list of objects, each with a value for one of the fields."""
    found = answer.get(name)
    items = found if isinstance(found, list) else []
    return bool(items) and all(isinstance(i, dict) and any(i.get(f) is not None for f in fields) for i in items)


# -- what is read ------------------------------------------------------------------------------------------------------


def _read_responses(body: Mapping[str, Any], remote: bool) -> Content:
    """The input of a response that depends on nothing that the server keeps.

    Raises:
        Unkeyable: it does, or has something of unknown form.
    """
    _refuse_state(body, "previous_response_id", "conversation", "background", "prompt")
    if body.get("store") is not False:
        raise Unkeyable("stateful")
    _check_tools(body.get("tools"), ("function", "custom"))
    return _verbatim("input", body.get("input"), _RESPONSES, remote)


def _read_anthropic(body: Mapping[str, Any], remote: bool) -> Content:
    """The messages of a request to Anthropic's API. Raises as `_read_responses` does."""
    _refuse_state(body, "container", "mcp_servers")
    _check_tools(body.get("tools"), (None, "custom"))
    if not isinstance(system := body.get("system"), str | None):
        _check(system, _MESSAGES, remote)
    if not isinstance(messages := body.get("messages"), list):
        raise Unkeyable("no messages")
    return _verbatim("messages", messages, _MESSAGES, remote)


def _read_texts(body: Mapping[str, Any], remote: bool) -> Content:
    """Texts or token ids that are embedded or compared.

    Raises:
        Unkeyable: there are none, or something else in their place.
    """
    held = {name: body[name] for name in _TEXTS if body.get(name) is not None}
    if not held or not all(map(_is_plain, held.values())):
        raise Unkeyable("input of unknown form")
    name, value = next(iter(held.items()))
    return Content(name, value, value, prompt=value if isinstance(value, str) else "")


def _is_plain(value: object, depth: int = 2) -> bool:
    """A text or number, or lists of them."""
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    return isinstance(value, str | int)


def _refuse_state(body: Mapping[str, Any], *names: str) -> None:
    if any(body.get(name) not in _NOTHING for name in names):
        raise Unkeyable("stateful")


def _check_tools(tools: object, kinds: tuple[str | None, ...]) -> None:
    """Tools that the client runs; those of the server look at the world."""
    listed = [] if tools is None else tools
    if not isinstance(listed, list) or any(not isinstance(t, dict) or t.get("type") not in kinds for t in listed):
        raise Unkeyable("tool of unknown form")


def _verbatim(name: str, value: object, forms: Mapping[str, frozenset[str]], remote: bool) -> Content:
    """Content that is in the key as it came: a text, or items of known forms."""
    if isinstance(value, str):
        return Content(name, value, value, prompt=value)
    if not isinstance(value, list) or not value:
        raise Unkeyable("no prompt")
    _check(value, forms, remote)
    last = value[-1]
    said = last.get("content") if last.get("role") == "user" else None
    parts = [{"text": said}] if isinstance(said, str) else said or []
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return Content(name, value, value, prompt="\n".join(texts))


def _check(parts: object, forms: Mapping[str, frozenset[str]], remote: bool) -> None:
    """Every item, and every part of one, is of a known form, and holds all that it stands for."""
    if not isinstance(parts, list):
        raise Unkeyable("content part of unknown form")
    for part in parts:
        kind = part.get("type", "message") if isinstance(part, dict) else None
        if not isinstance(kind, str) or not part.keys() <= forms.get(kind, frozenset()):
            raise Unkeyable("content part of unknown form")
        if kind == "message" and not isinstance(part.get("role"), str):  # {"id": ...} refers to an item of the server
            raise Unkeyable("content part of unknown form")
        for name in ("content", "output"):
            if not isinstance(inner := part.get(name), str | None):
                _check(inner, forms, remote)
        if kind in ("image", "document", "input_image") and not _is_there(part, remote):
            raise Unkeyable("media that is not in the request")


def _is_there(part: Mapping[str, Any], remote: bool) -> bool:
    """Whether a request holds the bytes of a picture or a document, or an address that may stand for them."""
    source = part.get("source", part.get("image_url"))
    if isinstance(source, dict):
        if source.get("type") in ("base64", "text"):
            return source.keys() <= {"type", "media_type", "data"}
        source = source.get("url") if source.keys() == {"type", "url"} else None
    return isinstance(source, str) and source.startswith(("data:", "http://", "https://") if remote else "data:")


# -- the table ---------------------------------------------------------------------------------------------------------

_EMBEDDED = Route(_read_texts, partial(_holds, "data", frozenset(("embedding", "score"))))
_RANKED = Route(_read_texts, partial(_holds, "results", frozenset(("relevance_score",))))

ROUTES = {
    "/v1/chat/completions": Route(
        lambda body, remote: read_messages(body.get("messages"), remote=remote),
        _has_finished_choices,
        partial(Assembler, chat=True),
        converts=True,
        fixed_by=("temperature", "seed"),
    ),
    "/v1/completions": Route(
        lambda body, remote: read_prompt(body.get("prompt")),
        _has_finished_choices,
        partial(Assembler, chat=False),
        converts=True,
        fixed_by=("temperature", "seed"),
    ),
    "/v1/responses": Route(
        _read_responses,
        _is_completed,
        partial(Recorder, "response.completed"),
        fixed_by=("temperature", "seed"),
        repeated=frozenset(("user", "safety_identifier", "metadata", "prompt_cache_key")),
    ),
    "/v1/messages": Route(_read_anthropic, _has_ended, partial(Recorder, "message_stop"), fixed_by=("temperature",)),
    "/v1/embeddings": _EMBEDDED,
    "/v1/score": _EMBEDDED,
    "/score": _EMBEDDED,
    "/v1/rerank": _RANKED,
    "/v2/rerank": _RANKED,
    "/rerank": _RANKED,
}
