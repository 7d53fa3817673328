"""The routes whose answers are cached, one row of `ROUTES` for each: what is read of a request, how a stream ends, when
an answer is whole.

Chats and completions put a stream together to the answer it amounts to where all of it is understood, so both forms
share an entry. Their texts may be matched by similarity: a slot is a place in the messages that a segment stands for.
All else (roles, names, tool calls, other parts) is the template, which donor and request share. The answers of other
routes are kept as they came, streams event by event and apart from whole answers, and only for byte-equal content.

A field that is not known here may name what the server holds, whatever it is called: such a request passes. An answer
that a client sends back is the exception: what stands beside its text is in the key as it came, and the request is
exact-only. Left out of a key is what is known to say nothing: null, empty lists of what a client sends back, and hints
for a provider's prompt cache. The body that goes upstream has all of it.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
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
# A message's fields whose meaning is known: all of it is in the request.
_MESSAGE = frozenset(
    "role content name tool_calls tool_call_id function_call refusal reasoning reasoning_content".split()
)
# Labels, and numbers that say how a picture is read: all of it is in the request, which is exact-only with them.
_LABELS = frozenset("id created created_at createdAt timestamp weight".split())
_SIZES = frozenset(
    "min_pixels max_pixels total_pixels resized_height resized_width fps nframes".split()
)
# What clients send back of an answer, as the server gave it, and labels; they may hold links that nobody follows.
_ECHOED = frozenset(
    "annotations citations metadata provider_specific_fields reasoning_details thinking_blocks".split()
)
# Mean the same as leaving an echoed field or `tool_calls` out.
_EMPTY: tuple[object, ...] = (
    [],
    {},
)
# Content parts whose whole meaning is in the request: type -> the fields they have.
_VERBATIM = {
    "text": frozenset(("type", "text")),
    "input_text": frozenset(("type", "text")),
    "output_text": frozenset(("type", "text")),
    "refusal": frozenset(("type", "refusal")),
    "thinking": frozenset(("type", "thinking", "closed")),
    "tool_reference": frozenset(("type", "name")),
}
_MEDIA = {
    "image_url": frozenset(("url", "detail", "format")),
    "audio_url": frozenset(("url",)),
    "video_url": frozenset(("url",)),
}
UNKNOWN = "field that is not known"
HINT = "cache_control"  # asks a provider to keep a prefix; it does not change the answer
# Any other field of it may name what the server holds.
_OF_HINTS = frozenset(("type", "ttl", "scope"))
_DATA_URL = re.compile(r"(?i:data:)(?P<media>[^,;]*)(?P<parameters>(?:;[^,]*)?);base64,")
# Parameters of a media type that say nothing of bytes that are no text.
_UNSAID = re.compile(r"(?:;(?:charset|name|filename)=[^;]*)*", re.IGNORECASE)
# The first block of a system prompt of Claude Code. Its last field differs from request to request, so vLLM takes the
# block out before it renders a prompt. Only in this very form: anything else in it may be meant for the model.
_BILLING = "x-anthropic-billing-header:"
_BILLED = re.compile(
    rf"{_BILLING}(?: *(?:cc_version=[\w.-]{{1,40}}|cc_entrypoint=[\w-]{{1,20}}|cch=\w{{1,16}});?)+"
)
_KINDS = (
    (b"\xff\xd8\xff", "jpeg"),
    (b"\x89PNG", "png"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tiff"),
)

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
# Items and parts that only an answer has, which a client sends back.
_ANSWERED = frozenset(
    "function_call custom_tool_call reasoning tool_use thinking redacted_thinking".split()
)
# A tool's fields whose meaning is known: what it is called, what it takes, and how a provider shows it to the model.
_TOOL = frozenset(
    "type function custom name description parameters input_schema strict format return returns cache_control"
    " defer_loading allowed_callers input_examples eager_input_streaming".split()
)
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
_TEXTS = (
    "input",
    "query",
    "queries",
    "text_1",
    "data_1",
    "documents",
    "items",
    "text_2",
    "data_2",
    "messages",
)
_NOTHING: tuple[object, ...] = (None, False, [])

# Below these stand names that a client chose.
_NAMED_BY_CLIENTS = ("properties", "input", "arguments")

Slot = tuple[int, int | None]  # message, and part where its content is a list


class Unkeyable(Exception):  # noqa: N818
    """The content has something that cannot be keyed. The message is one of a few fixed texts."""


@dataclass(frozen=True, slots=True)
class Content:
    """One request's content in its forms."""

    name: str  # of its field, such as `messages` or `prompt`
    value: Any  # as it came
    keyed: Any  # what of it is in the key: every media item by the digest of its bytes
    slots: tuple[Slot, ...] = ()  # where the segments stand; empty where the request is exact-only
    segments: tuple[Segment, ...] = ()  # in prompt order; images without a file
    # Bytes of the images by media id.
    media: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    prompt: str = ""  # text of the last user turn
    # What of other fields of the body is in the key.
    beside: Mapping[str, Any] = field(default_factory=dict)

    def with_segments(self, segments: Sequence[Segment]) -> Content | None:
        """The same with other texts and images at its slots; None where they are not as many, or of other kinds."""
        if len(segments) != len(self.segments) or not segments:
            return None
        new: dict[Slot, str] = {}
        for slot, own, other in zip(self.slots, self.segments, segments, strict=True):
            if (
                isinstance(own, TextSegment)
                and isinstance(other, TextSegment)
                and own.role is other.role
            ):
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
        return (
            ""
            if self.name == "prompt"
            else _edited(self.keyed, self.slots, lambda _, part: _emptied(part))
        )

    def with_uuids(self, uuid: Callable[[str], str] | None) -> Any:
        """``value`` with vLLM's ``uuid`` on every image, in place of what the client gave; None: with none at all."""
        if self.keyed is self.value:  # it is in the key as it came
            return self.value
        messages = []
        for i, message in enumerate(self.value):
            parts = message.get("content")
            keyed = self.keyed[i].get("content")
            if isinstance(parts, list) and isinstance(keyed, list):
                parts = [
                    _named(part, known, uuid) for part, known in zip(parts, keyed, strict=True)
                ]
                message = {**message, "content": parts}
            messages.append(message)
        return messages


def read_prompt(prompt: object) -> Content:
    """A completion's prompt: a text is a question, anything else (token ids, several prompts) is exact-only."""
    if isinstance(prompt, str):
        return Content(
            "prompt", prompt, prompt, ((0, None),), (TextSegment(prompt),), prompt=prompt
        )
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
    return Content(
        "messages",
        messages,
        keyed,
        slots=tuple(reader.slots),
        segments=tuple(segments),
        media=reader.media,
        prompt=reader.prompt,
    )


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
            max(self.texts)
            if self.texts and last["role"] == "user" and self.texts[max(self.texts)].strip()
            else None
        )

    def message(self, i: int, message: object) -> dict[str, Any]:
        """The keyed form of one message."""
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Unkeyable("message of unknown form")
        role = message["role"]
        said = _saying(message)
        unknown = said.keys() - _MESSAGE - _ECHOED
        if role not in _ROLES or unknown:
            self.inline = False
        is_here = bool(said.get("content") or said.get("tool_calls"))
        is_answer = is_here and role == "assistant"
        if not is_answer:
            _refuse(unknown - _LABELS if is_here else unknown)
        content = said.get("content")
        if isinstance(content, str):
            self._text((i, None), role, content)
            said["content"] = _unbilled(content) if role == "system" else content
        elif isinstance(content, list):
            said["content"] = _lone_text(
                [self._part((i, j), role, part) for j, part in enumerate(content)]
            )
        elif content is not None:
            raise Unkeyable("message of unknown form")
        return said

    def _text(self, slot: Slot, role: str, text: str) -> None:
        if role == "user" and slot[0] == self._last:
            self.texts[len(self.segments)] = text
        self.slots.append(slot)
        self.segments.append(
            TextSegment(text, Role.SYSTEM if role in ("system", "developer") else Role.CONTEXT)
        )

    def _part(self, slot: Slot, role: str, part: object) -> Any:
        """The keyed form of one part. Of a type that is not known here it is not known whether all of it is in the
        request."""
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str):
            raise Unkeyable("content part of unknown form")
        said = _saying(part)
        if kind in _VERBATIM:
            unknown = said.keys() - _VERBATIM[kind]
            if unknown:
                self.inline = False
            if role != "assistant":
                _refuse(unknown)
            return self._text_part(slot, role, said) if kind == "text" else said
        read = self._source if kind in _MEDIA else _HELD.get(kind)
        if read is None:
            raise Unkeyable("content part of unknown form")
        rest = {name: value for name, value in said.items() if name not in ("type", "uuid", kind)}
        _refuse(rest.keys() - _SIZES)
        if rest or kind != "image_url":
            self.inline = False
        return {**rest, "type": kind, kind: read(slot, kind, part.get(kind))}

    def _text_part(self, slot: Slot, role: str, said: dict[str, Any]) -> dict[str, Any]:
        text = said.get("text")
        if not isinstance(text, str):
            raise Unkeyable("content part of unknown form")
        self._text(slot, role, text)
        return {**said, "text": _unbilled(text) if role == "system" else text}

    def _source(self, slot: Slot, kind: str, source: object) -> dict[str, Any]:
        """The keyed form of what stands behind a URL."""
        if source is None:
            raise Unkeyable("media that is not in the request")
        if isinstance(source, str):
            source = {"url": source}
        if not isinstance(source, dict) or not isinstance(source.get("url"), str):
            raise Unkeyable("content part of unknown form")
        keyed = _saying(source)
        _refuse(keyed.keys() - _MEDIA[kind])
        del keyed["url"]
        head, data = _of_data_url(source["url"])
        name = media_id(data)
        if not _UNSAID.fullmatch(head["parameters"]):  # such as a rate or a page
            keyed["parameters"] = head["parameters"]
            self.inline = False
        if kind != "image_url":  # the media type says how these are read
            return {**keyed, "type": head["media"], "sha256": name}
        self.media[name] = data
        self.slots.append(slot)
        self.segments.append(MediaSegment(name))
        return {**keyed, "sha256": name}


def _audio(_slot: Slot, _kind: str, source: object) -> dict[str, Any]:
    said = _with_data(source, "data", "format")
    return {"format": said.get("format"), "sha256": media_id(_decoded(said["data"]))}


def _file(_slot: Slot, _kind: str, source: object) -> dict[str, Any]:
    said = _with_data(source, "file_data", "filename")
    _held(said["file_data"])
    return said


_HELD = {"input_audio": _audio, "file": _file}  # readers of parts that hold bytes without a URL


def _with_data(source: object, data: str, more: str) -> dict[str, Any]:
    """What a part holds, with its data."""
    if not isinstance(source, dict) or not isinstance(source.get(data), str):
        raise Unkeyable("content part of unknown form")
    said = _saying(source)
    _refuse(said.keys() - {data, more})
    return said


def _saying(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Of a message or part the fields that say more than their absence does, in one order."""
    said = {name: value for name, value in fields.items() if not _says_nothing(name, value)}
    return by_name(said)


def by_name(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same fields in one order, whatever order they came in; what is below them keeps its own."""
    return dict(sorted(fields.items()))


def _says_nothing(name: str, value: object) -> bool:
    """Whether a field of a message or part says what its absence says. A template may show a tool's id that is null."""
    if value is None:
        return name != "tool_call_id"
    if name == HINT:
        return is_hint(value)
    return value in _EMPTY and (name in _ECHOED or name == "tool_calls")


def is_hint(value: object) -> bool:
    """Whether ``cache_control`` only says how long a provider should keep a prompt."""
    if not isinstance(value, dict) or not value.keys() <= _OF_HINTS:
        return False
    return value.get("type") == "ephemeral"


def _refuse(unknown: Set[str]) -> None:
    """Of fields that are not known here nobody knows whether all of it is in the request."""
    if unknown:
        raise Unkeyable(UNKNOWN)


def _lone_text(parts: list[Any]) -> Any:
    """A text that is the only part is the same to vLLM, and by OpenAI's and Anthropic's words, as the text alone."""
    if len(parts) == 1 and parts[0].keys() == {"type", "text"} and parts[0]["type"] == "text":
        return parts[0]["text"] or parts  # of an empty one Anthropic's route makes no message
    return parts


def _unbilled(text: str) -> str:
    """A system text with a line by which an agent's requests are billed made the same for all requests."""
    first = text.partition("\n")[0]
    return _BILLING + text[len(first) :] if _BILLED.fullmatch(first) else text


def _of_data_url(url: str) -> tuple[re.Match[str], bytes]:
    """What `_DATA_URL` finds, and the bytes. vLLM looks at no parameter."""
    if url[:5].lower() != "data:":
        raise Unkeyable("media that is not in the request")
    head = _DATA_URL.match(url)
    if head is None:
        raise Unkeyable("media that is no base64")
    return head, _decoded(url[head.end() :])


def _decoded(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError):
        raise Unkeyable("media that is no base64") from None


def _held(data: str) -> bytes:
    """The bytes of a file that a data URL holds, or that stand there without one."""
    return _of_data_url(data)[-1] if data[:5].lower() == "data:" else _decoded(data)


def _data_url(data: bytes) -> str:
    """An image as a data URL. vLLM looks at the bytes, not at the type that the URL names."""
    kind = next((name for magic, name in _KINDS if data.startswith(magic)), "webp")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _edited(
    messages: Sequence[Any], slots: Iterable[Slot], edit: Callable[[Slot, Any], Any]
) -> list[Any]:
    """Messages with another text or part at each of some slots: what ``edit`` makes of slot and part. The rest is
    shared."""
    edited = list(messages)
    for i, j in slots:
        own = edited[i]["content"]
        at = None if isinstance(own, str) else j  # a lone part is keyed as its text
        new = (
            edit((i, j), own) if at is None else [*own[:at], edit((i, j), own[at]), *own[at + 1 :]]
        )
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
    return {
        **part,
        "image_url": {name: value for name, value in part["image_url"].items() if name != "sha256"},
    }


def _named(
    part: dict[str, Any], keyed: dict[str, Any], uuid: Callable[[str], str] | None
) -> dict[str, Any]:
    kind = part["type"]
    bare = {name: value for name, value in part.items() if name != "uuid"}
    if uuid is None or kind != "image_url" or "sha256" not in keyed[kind]:
        return bare
    return {**bare, "uuid": uuid(keyed[kind]["sha256"])}


# -- other routes ------------------------------------------------------------------------------------------------------


def _read_chat(body: Mapping[str, Any]) -> Content:
    """The messages of a chat."""
    _refuse_state(body, "background", "prompt")
    _check_tools(body.get("tools"), (None, "function", "custom"))
    _check_tools(body.get("functions"), (None,))
    return read_messages(body.get("messages"))


def _read_responses(body: Mapping[str, Any]) -> Content:
    """The input of a response that depends on nothing that the server keeps."""
    _refuse_state(body, "background", "prompt")
    _check_tools(body.get("tools"), ("function", "custom"))
    return _verbatim("input", body.get("input"), _RESPONSES)


def _read_anthropic(body: Mapping[str, Any]) -> Content:
    """The messages of a request to Anthropic's API. Raises as `_read_responses` does."""
    tools = body.get("tools")
    _check_tools(tools, (None, "custom"))
    beside: dict[str, Any] = {}
    if isinstance(system := body.get("system"), str):
        beside["system"] = _unbilled(system)
    elif system is not None:
        blocks = _keyed(system, _MESSAGES)
        beside["system"] = _lone_text([_unbilled_block(block) for block in blocks])
    if tools:
        beside["tools"] = [_saying(tool) for tool in tools]
    metadata = body.get("metadata")
    beside["metadata"] = None if _names_a_user(metadata) else metadata
    if not isinstance(messages := body.get("messages"), list):
        raise Unkeyable("no messages")
    content = _verbatim("messages", messages, _MESSAGES)
    return replace(content, beside=beside)


def _names_a_user(metadata: object) -> bool:
    """Whether ``metadata`` only names the end user to a provider that looks for abuse."""
    return isinstance(metadata, dict) and metadata.keys() == {"user_id"}


def _unbilled_block(block: dict[str, Any]) -> dict[str, Any]:
    return (
        {**block, "text": _unbilled(block["text"])} if isinstance(block.get("text"), str) else block
    )


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


def tool_names(body: Mapping[str, Any]) -> tuple[str, ...]:
    """A name for each tool that a request offers; empty for one whose form is not known.

    >>> tool_names({"tools": [{"type": "function", "function": {"name": "weather"}}, 7]})
    ('weather', '')
    """
    names: list[str] = []
    for listing in ("tools", "functions"):
        offered = body.get(listing)
        if offered:
            names.extend(map(_tool_name, offered if isinstance(offered, list) else [offered]))
    return tuple(names)


def _tool_name(tool: Any) -> str:
    if not isinstance(tool, Mapping):
        return ""
    kinds = (tool.get("function"), tool.get("custom"))
    named = next((kind for kind in kinds if isinstance(kind, Mapping)), tool)
    return str(named.get("name") or tool.get("type") or "")


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a JSON value, also those in a text that is JSON itself, such as a tool's arguments. What a client
    names itself is a text, too: parameters of tools."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            yield item
            left.append(_read_within(item))
        elif isinstance(item, Mapping):
            left.extend(item.values())
            named = (item.get(name) for name in _NAMED_BY_CLIENTS)
            left.extend(list(names) for names in named if isinstance(names, Mapping))
        elif isinstance(item, list):
            left.extend(item)


def _read_within(text: str) -> Any:
    """Names and values of a text that is JSON, where they may be written in another way than they read."""
    if "\\" not in text or text.lstrip()[:1] not in ("{", "[", '"'):
        return None
    try:
        return json.loads(
            text, object_pairs_hook=lambda pairs: [part for pair in pairs for part in pair]
        )
    except (ValueError, RecursionError):
        return None


def has_unread_texts(body: Mapping[str, Any]) -> bool:
    """Whether a request has texts that nobody reads here: as numbers, or in a file."""
    return _holds_token_ids(body) or any(map(_is_file, objects_in(body)))


def objects_in(value: Any) -> Iterator[Mapping[str, Any]]:
    """All objects of a JSON value, itself among them."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, Mapping):
            yield item
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)


def _is_file(item: Mapping[str, Any]) -> bool:
    """Whether an object has the bytes of a file that is no picture."""
    is_picture = str(item.get("media_type")).startswith("image/")
    return "file_data" in item or (item.get("type") == "base64" and not is_picture)


def _holds_token_ids(body: Mapping[str, Any]) -> bool:
    listed = (body.get(name) for name in ("prompt", *_TEXTS))
    return any(
        isinstance(item, int | list)
        for items in listed
        if isinstance(items, list)
        for item in items
    )


def last_turn(body: Mapping[str, Any]) -> Iterator[str]:
    """Texts of a user's last turn, also where a tool or the assistant has spoken since."""
    yield from texts_in(_parts_of_last_turn(body))


def last_words(body: Mapping[str, Any]) -> str:
    """The texts of the user's last turn, without files and results of tools."""
    parts = _parts_of_last_turn(body) or ()
    parts = parts if isinstance(parts, list) else [parts]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return "\n".join(text for text in texts if isinstance(text, str))


def _parts_of_last_turn(body: Mapping[str, Any]) -> Any:
    said = next((body[name] for name in ("prompt", *_TEXTS) if body.get(name) is not None), None)
    turns = said if isinstance(said, list) else [said]
    of_users = [turn for turn in turns if isinstance(turn, Mapping) and turn.get("role") == "user"]
    with_text = [turn for turn in of_users if any(map(_is_text, _parts(turn)))]
    return _parts(with_text[-1]) if with_text else said if not of_users else None


def _parts(turn: Mapping[str, Any]) -> list[Any]:
    content = turn.get("content")
    return content if isinstance(content, list) else [content]


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (
        isinstance(part, Mapping) and isinstance(part.get("text"), str)
    )


def _check_tools(tools: object, kinds: tuple[str | None, ...]) -> None:
    """Tools that the client runs, with fields that are known; those of the server look at the world."""
    listed = [] if tools is None else tools
    if not isinstance(listed, list):
        raise Unkeyable("tool of unknown form")
    for tool in listed:
        if not isinstance(tool, dict) or tool.get("type") not in kinds:
            raise Unkeyable("tool of unknown form")
        for fields in (tool, tool.get("function"), tool.get("custom")):
            if isinstance(fields, dict):
                _refuse({name for name, value in fields.items() if value is not None} - _TOOL)


def _verbatim(name: str, value: object, forms: Mapping[str, frozenset[str]]) -> Content:
    """Content that is in the key as it came: a text, or items of known forms."""
    if isinstance(value, str):
        return Content(name, value, value, prompt=value)
    if not isinstance(value, list) or not value:
        raise Unkeyable("no prompt")
    keyed = _keyed(value, forms)
    last = keyed[-1]
    said = last.get("content") if last.get("role") == "user" else None
    parts = [{"text": said}] if isinstance(said, str) else said or []
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return Content(name, value, keyed, prompt="\n".join(texts))


def _keyed(
    parts: object, forms: Mapping[str, frozenset[str]], *, answered: bool = False
) -> list[dict[str, Any]]:
    """The keyed form of items and their parts: each is of a known type, and holds all that it stands for. ``answered``:
    they are of an answer."""
    if not isinstance(parts, list):
        raise Unkeyable("content part of unknown form")
    return [_keyed_item(part, forms, answered=answered) for part in parts]


def _keyed_item(
    part: object, forms: Mapping[str, frozenset[str]], *, answered: bool
) -> dict[str, Any]:
    kind = _kind_of(part)
    if not isinstance(part, dict) or kind not in forms:
        raise Unkeyable("content part of unknown form")
    if kind in ("image", "document", "input_image") and not _is_there(part):
        raise Unkeyable("media that is not in the request")
    if kind == "input_file":
        _file_of(part)
    said = _saying(part)
    if kind == "message" and "content" not in said:
        raise Unkeyable("message of unknown form")
    answered = answered or kind in _ANSWERED or said.get("role") == "assistant"
    if not answered:
        _refuse(said.keys() - forms[kind])
    for name in ("content", "output"):
        inner = said.get(name)
        if not isinstance(inner, str | None):
            said[name] = _keyed(inner, forms, answered=answered)
    if kind == "message" and isinstance(said.get("content"), list):
        said["content"] = _lone_text(said["content"])
    return said


def _kind_of(part: object) -> str:
    """The type of an item or part; a message may leave it out. Empty where it has none, as one that refers to an item
    of the server: ``{"id": ...}``."""
    if not isinstance(part, dict):
        return ""
    kind = part.get("type", "message")
    is_message = kind == "message" and isinstance(part.get("role"), str)
    return kind if isinstance(kind, str) and (is_message or kind != "message") else ""


def _file_of(part: Mapping[str, Any]) -> None:
    """Refuse a file whose bytes are not in the request."""
    if not isinstance(part.get("file_data"), str):
        raise Unkeyable("media that is not in the request")
    _held(part["file_data"])


def _is_there(part: Mapping[str, Any]) -> bool:
    """Whether a request holds the bytes of a picture or a document."""
    source = part.get("source", part.get("image_url"))
    if isinstance(source, dict):
        if source.get("type") in ("base64", "text"):
            return source.keys() <= {"type", "media_type", "data"}
        source = source.get("url") if source.keys() == {"type", "url"} else None
    return isinstance(source, str) and source[:5].lower() == "data:"


# -- routes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Route:
    """A path whose answers are cached."""

    read: Callable[[Mapping[str, Any]], Content]  # the content of a body
    fault: Rule  # why an answer is not complete
    stream: Callable[[], Assembler | Recorder] = Recorder  # reads a streamed answer
    converts: bool = False  # a stream and a whole answer are made of each other
    # Fields that keep an answer from being drawn at random; none where it never is.
    fixed_by: tuple[str, ...] = ()
    repeated: frozenset[str] = frozenset()  # fields that the answer repeats, so they are in the key
    stores: bool = (
        False  # the server may keep an answer, under an id that it names, unless `store` is false
    )

    def refusal(
        self, payload: bytes, status: int = 200, body: Mapping[str, Any] = MappingProxyType({})
    ) -> str:
        """Why an answer to a body must not be kept, in a few words; empty for a complete one."""
        if status != 200:
            return "status"
        if self.converts and b"data:" in payload and not payload.lstrip().startswith(b"{"):
            return events_fault(payload, answers.choices_asked(body))
        try:
            answer = read_answer(payload)
        except (ValueError, RecursionError):
            return "no JSON"
        if isinstance(answer, dict) and answers.has_error(answer):
            return answers.ERROR
        return self.fault(answer, body)


# -- the table ---------------------------------------------------------------------------------------------------------

_SCORED = Route(_read_texts, answers.scores)
_RANKED = Route(_read_texts, answers.ranking)

ROUTES = {
    "/v1/chat/completions": Route(
        _read_chat,
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
        repeated=frozenset(
            "user safety_identifier metadata store prompt_cache_key prompt_cache_retention".split()
        ),
        stores=True,
    ),
    "/v1/messages": Route(
        _read_anthropic,
        answers.message,
        partial(Recorder, "message_stop"),
        fixed_by=("temperature",),
    ),
    "/v1/embeddings": Route(_read_texts, answers.embeddings),
    "/v1/score": _SCORED,
    "/score": _SCORED,
    "/v1/rerank": _RANKED,
    "/v2/rerank": _RANKED,
    "/rerank": _RANKED,
}
