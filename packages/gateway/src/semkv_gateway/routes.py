"""The routes whose answers are cached, one row of `ROUTES` for each: what is read of a request, how a stream ends, when
an answer is whole.

Chats and completions put a stream together to the answer it amounts to where all of it is understood, so both forms
share an entry. Their texts may be matched by similarity: a slot is a place in the messages that a segment stands for.
All else (roles, names, tool calls, other parts) is the template, which donor and request share. The answers of other
routes are kept as they came, streams event by event and apart from whole answers, and only for byte-equal content.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from semkv.encoders import read_media
from semkv.keys import media_id
from semkv.types import MediaSegment, Role, Segment, TextSegment
from semkv_gateway import answers
from semkv_gateway.answers import Rule
from semkv_gateway.sse import Assembler, Recorder, events_fault, read_answer

_ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
_MESSAGE = frozenset(
    "role content name tool_calls tool_call_id function_call refusal reasoning reasoning_content".split()
)
# Content parts whose whole meaning is in the request: type -> the fields it may have.
_VERBATIM = {
    "text": frozenset(("type", "text")),
    "refusal": frozenset(("type", "refusal")),
    "thinking": frozenset(("type", "thinking", "closed")),
}
_MEDIA = {"image_url": frozenset(("url", "detail")), "audio_url": frozenset(("url",)), "video_url": frozenset(("url",))}
_DATA = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,")
_KINDS = ((b"\xff\xd8\xff", "jpeg"), (b"\x89PNG", "png"), (b"GIF8", "gif"), (b"BM", "bmp"), (b"II*\0", "tiff"))

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

Slot = tuple[int, int | None]  # message, and part where its content is a list


class Unkeyable(Exception):  # noqa: N818
    """The content has something that cannot be keyed. The message is one of a few fixed texts."""


@dataclass(frozen=True, slots=True)
class Content:
    """One request's content in its forms."""

    name: str  # of its field, such as `messages` or `prompt`
    value: Any  # as it came
    keyed: Any  # with every media item by the digest of its bytes
    slots: tuple[Slot, ...] = ()  # where the segments stand; empty where the request is exact-only
    segments: tuple[Segment, ...] = ()  # in prompt order; images without a file
    media: Mapping[str, bytes] = field(default_factory=dict, repr=False)  # bytes of the images by media id
    prompt: str = ""  # text of the last user turn

    def with_segments(self, segments: Sequence[Segment]) -> Content | None:
        """The same with other texts and images at its slots; None where they are not as many, or of other kinds."""
        if len(segments) != len(self.segments) or not segments:
            return None
        new: dict[Slot, str] = {}
        for slot, own, other in zip(self.slots, self.segments, segments, strict=True):
            if isinstance(own, TextSegment) and isinstance(other, TextSegment) and own.role is other.role:
                new[slot] = other.text
            elif not isinstance(own, MediaSegment) or not isinstance(other, MediaSegment):
                return None
            elif own.media_id != other.media_id:
                if (data := read_media(other, ())) is None:
                    return None
                new[slot] = _data_url(data)
        if self.name == "prompt":
            return read_prompt(new[self.slots[0]])
        return read_messages(_edited(self.value, new, lambda slot, part: _filled(part, new[slot])))

    def template(self) -> Any:
        """``keyed`` with every slot empty: what a donor must share."""
        return "" if self.name == "prompt" else _edited(self.keyed, self.slots, lambda _, part: _emptied(part))

    def with_uuids(self, uuid: Callable[[str], str] | None) -> Any:
        """``value`` with vLLM's ``uuid`` on every image, in place of what the client gave; None: with none at all."""
        if self.keyed is self.value:  # it is in the key as it came
            return self.value
        messages = []
        for i, message in enumerate(self.value):
            parts = message.get("content")
            if isinstance(parts, list):
                keyed = self.keyed[i]["content"]
                parts = [_named(part, known, uuid) for part, known in zip(parts, keyed, strict=True)]
                message = {**message, "content": parts}
            messages.append(message)
        return messages


def read_prompt(prompt: object) -> Content:
    """A completion's prompt: a text is a question, anything else (token ids, several prompts) is exact-only."""
    if isinstance(prompt, str):
        return Content("prompt", prompt, prompt, ((0, None),), (TextSegment(prompt),), prompt=prompt)
    if isinstance(prompt, list) and prompt:
        return Content("prompt", prompt, prompt)
    raise Unkeyable("no prompt")


def read_messages(messages: object) -> Content:
    """A chat's messages.

    System texts are system segments, the last text of the last user turn is the question, everything before it context.
    A chat that does not end with a user's text is exact-only, as is one with media other than inline images.
    """
    if not isinstance(messages, list) or not messages:
        raise Unkeyable("no messages")
    reader = _Reader(last=len(messages) - 1)
    keyed = [reader.message(i, message) for i, message in enumerate(messages)]
    question = reader.question(messages[-1])
    if question is None or not reader.inline:
        return Content("messages", messages, keyed, prompt=reader.prompt)
    segments = list(reader.segments)
    segments[question] = TextSegment(reader.texts[question])
    return Content("messages", messages, keyed, tuple(reader.slots), tuple(segments), reader.media, reader.prompt)


class _Reader:
    """Reads messages in order, and notes slots and segments."""

    def __init__(self, last: int) -> None:
        self._last = last
        self.inline = True  # no media but inline images
        self.slots: list[Slot] = []
        self.segments: list[Segment] = []
        self.texts: dict[int, str] = {}  # by position among the segments: texts of the last message
        self.media: dict[str, bytes] = {}

    @property
    def prompt(self) -> str:
        """Texts of the last message, where it is a user's."""
        return "\n".join(self.texts.values())

    def question(self, last: Mapping[str, Any]) -> int | None:
        """Which segment is the question."""
        return (
            max(self.texts) if self.texts and last["role"] == "user" and self.texts[max(self.texts)].strip() else None
        )

    def message(self, i: int, message: object) -> dict[str, Any]:
        """The keyed form of one message."""
        if not isinstance(message, dict) or message.get("role") not in _ROLES or not message.keys() <= _MESSAGE:
            raise Unkeyable("message of unknown form")
        content, role = message.get("content"), message["role"]
        if isinstance(content, str):
            self._text((i, None), role, content)
            return message
        if content is None:
            return message
        if not isinstance(content, list):
            raise Unkeyable("message of unknown form")
        return {**message, "content": [self._part((i, j), role, part) for j, part in enumerate(content)]}

    def _text(self, slot: Slot, role: str, text: str) -> None:
        if role == "user" and slot[0] == self._last:
            self.texts[len(self.segments)] = text
        self.slots.append(slot)
        self.segments.append(TextSegment(text, Role.SYSTEM if role in ("system", "developer") else Role.CONTEXT))

    def _part(self, slot: Slot, role: str, part: object) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str):
            raise Unkeyable("content part of unknown form")
        if kind in _VERBATIM and part.keys() <= _VERBATIM[kind]:
            if kind == "text":
                if not isinstance(part.get("text"), str):
                    raise Unkeyable("content part of unknown form")
                self._text(slot, role, part["text"])
            return part
        if kind in _MEDIA and part.keys() <= {"type", "uuid", kind}:
            return {"type": kind, kind: self._source(slot, kind, part.get(kind))}
        if kind == "input_audio" and part.keys() <= {"type", "uuid", kind} and isinstance(part.get(kind), dict):
            return {"type": kind, kind: self._audio(part[kind])}
        raise Unkeyable("content part of unknown form")

    def _source(self, slot: Slot, kind: str, source: object) -> dict[str, Any]:
        if source is None:
            raise Unkeyable("media that is not in the request")
        if isinstance(source, str):
            source = {"url": source}
        if not isinstance(source, dict) or not source.keys() <= _MEDIA[kind] or not isinstance(source.get("url"), str):
            raise Unkeyable("content part of unknown form")
        url = source["url"]
        found = _DATA.match(url)
        rest = {name: value for name, value in source.items() if name != "url"}
        if found is None:
            raise Unkeyable("media that is not in the request")
        data = _decoded(url[found.end() :])
        name = media_id(data)
        if kind != "image_url":  # the media type says how these are read
            self.inline = False
            return {**rest, "type": found[1], "sha256": name}
        self.media[name] = data
        self.slots.append(slot)
        self.segments.append(MediaSegment(name))
        return {**rest, "sha256": name}

    def _audio(self, audio: Mapping[str, Any]) -> dict[str, Any]:
        if not audio.keys() <= {"data", "format"} or not isinstance(audio.get("data"), str):
            raise Unkeyable("content part of unknown form")
        self.inline = False
        return {"format": audio.get("format"), "sha256": media_id(_decoded(audio["data"]))}


def _decoded(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError):
        raise Unkeyable("media that is no base64") from None


def _data_url(data: bytes) -> str:
    """An image as a data URL. vLLM looks at the bytes, not at the type that the URL names."""
    kind = next((name for magic, name in _KINDS if data.startswith(magic)), "webp")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _edited(messages: Sequence[Any], slots: Iterable[Slot], edit: Callable[[Slot, Any], Any]) -> list[Any]:
    """Messages with another text or part at each of some slots: what ``edit`` makes of slot and part. The rest is
    shared."""
    edited = list(messages)
    for i, j in slots:
        own = edited[i]["content"]
        new = edit((i, j), own) if j is None else [*own[:j], edit((i, j), own[j]), *own[j + 1 :]]
        edited[i] = {**edited[i], "content": new}
    return edited


def _filled(part: Any, new: str) -> Any:
    """A text or a part with another text or data URL."""
    if isinstance(part, str):
        return new
    if part["type"] == "text":
        return {**part, "text": new}
    own = part["image_url"]
    return {**part, "image_url": {**own, "url": new} if isinstance(own, dict) else {"url": new}}


def _emptied(part: Any) -> Any:
    """A keyed text or part without what a segment stands for."""
    if isinstance(part, str) or part["type"] == "text":
        return _filled(part, "")
    return {**part, "image_url": {name: value for name, value in part["image_url"].items() if name != "sha256"}}


def _named(part: dict[str, Any], keyed: dict[str, Any], uuid: Callable[[str], str] | None) -> dict[str, Any]:
    kind = part["type"]
    bare = {name: value for name, value in part.items() if name != "uuid"}
    if uuid is None or kind != "image_url" or "sha256" not in keyed[kind]:
        return bare
    return {**bare, "uuid": uuid(keyed[kind]["sha256"])}


# -- other routes ------------------------------------------------------------------------------------------------------


def _read_responses(body: Mapping[str, Any]) -> Content:
    """The input of a response that depends on nothing that the server keeps."""
    _refuse_state(body, "previous_response_id", "conversation", "background", "prompt")
    if body.get("store") is not False:
        raise Unkeyable("stateful")
    _check_tools(body.get("tools"), ("function", "custom"))
    return _verbatim("input", body.get("input"), _RESPONSES)


def _read_anthropic(body: Mapping[str, Any]) -> Content:
    """The messages of a request to Anthropic's API. Raises as `_read_responses` does."""
    _refuse_state(body, "container", "mcp_servers")
    _check_tools(body.get("tools"), (None, "custom"))
    if not isinstance(system := body.get("system"), str | None):
        _check(system, _MESSAGES)
    if not isinstance(messages := body.get("messages"), list):
        raise Unkeyable("no messages")
    return _verbatim("messages", messages, _MESSAGES)


def _read_texts(body: Mapping[str, Any]) -> Content:
    """Texts or token ids that are embedded or compared."""
    held = {name: body[name] for name in _TEXTS if body.get(name) is not None}
    if not held or not all(map(_is_plain, held.values())):
        raise Unkeyable("input of unknown form")
    name, value = next(iter(held.items()))
    return Content(name, value, value, prompt=value if isinstance(value, str) else "")


def _is_plain(value: object, depth: int = 2) -> bool:
    """A text or number, or lists of them; ``{"text": ...}`` is a text, too."""
    if isinstance(value, dict):
        return value.keys() == {"text"} and isinstance(value["text"], str)
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


def _verbatim(name: str, value: object, forms: Mapping[str, frozenset[str]]) -> Content:
    """Content that is in the key as it came: a text, or items of known forms."""
    if isinstance(value, str):
        return Content(name, value, value, prompt=value)
    if not isinstance(value, list) or not value:
        raise Unkeyable("no prompt")
    _check(value, forms)
    last = value[-1]
    said = last.get("content") if last.get("role") == "user" else None
    parts = [{"text": said}] if isinstance(said, str) else said or []
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return Content(name, value, value, prompt="\n".join(texts))


def _check(parts: object, forms: Mapping[str, frozenset[str]]) -> None:
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
                _check(inner, forms)
        if kind in ("image", "document", "input_image") and not _is_there(part):
            raise Unkeyable("media that is not in the request")


def _is_there(part: Mapping[str, Any]) -> bool:
    """Whether a request holds the bytes of a picture or a document."""
    source = part.get("source", part.get("image_url"))
    if isinstance(source, dict):
        if source.get("type") in ("base64", "text"):
            return source.keys() <= {"type", "media_type", "data"}
        source = source.get("url") if source.keys() == {"type", "url"} else None
    return isinstance(source, str) and source.startswith("data:")


# -- routes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route:
    """A path whose answers are cached."""

    read: Callable[[Mapping[str, Any]], Content]  # the content of a body
    fault: Rule  # why an answer is not complete
    stream: Callable[[], Assembler | Recorder] = Recorder  # reads a streamed answer
    converts: bool = False  # a stream and a whole answer are made of each other
    fixed_by: tuple[str, ...] = ()  # fields that keep an answer from being drawn at random; none where it never is
    repeated: frozenset[str] = frozenset()  # fields that the answer repeats, so they are in the key

    def refusal(self, payload: bytes, status: int = 200, body: Mapping[str, Any] = MappingProxyType({})) -> str:
        """Why an answer to a body must not be kept, in a few words; empty for a complete one."""
        if status != 200:
            return "status"
        if self.converts and b"data:" in payload and not payload.lstrip().startswith(b"{"):
            return events_fault(payload, answers.choices_asked(body))
        try:
            answer = read_answer(payload)
        except (ValueError, RecursionError):
            return "no JSON"
        if isinstance(answer, dict) and answers.is_error(answer.get("error")):
            return answers.ERROR
        return self.fault(answer, body)


# -- the table ---------------------------------------------------------------------------------------------------------

_SCORED = Route(_read_texts, answers.scores)
_RANKED = Route(_read_texts, answers.ranking)

ROUTES = {
    "/v1/chat/completions": Route(
        lambda body: read_messages(body.get("messages")),
        answers.chat,
        partial(Assembler, chat=True),
        converts=True,
        fixed_by=("temperature", "seed"),
    ),
    "/v1/completions": Route(
        lambda body: read_prompt(body.get("prompt")),
        answers.completion,
        partial(Assembler, chat=False),
        converts=True,
        fixed_by=("temperature", "seed"),
    ),
    "/v1/responses": Route(
        _read_responses,
        answers.response,
        partial(Recorder, "response.completed"),
        fixed_by=("temperature", "seed"),
        repeated=frozenset(("user", "safety_identifier", "metadata", "prompt_cache_key")),
    ),
    "/v1/messages": Route(
        _read_anthropic, answers.message, partial(Recorder, "message_stop"), fixed_by=("temperature",)
    ),
    "/v1/embeddings": Route(_read_texts, answers.embeddings),
    "/v1/score": _SCORED,
    "/score": _SCORED,
    "/v1/rerank": _RANKED,
    "/v2/rerank": _RANKED,
    "/rerank": _RANKED,
}
