"""What a request is about: its messages or its prompt, taken apart into segments and put together again.

A slot is a place in the messages that a segment stands for; they map one to one, by position. Everything that is no
slot (roles, names, tool calls, other parts) makes up the template, which donor and request share.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from semkv.encoders.hooks import read_media
from semkv.keys import media_id
from semkv.types import MediaSegment, Role, Segment, TextSegment

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

Slot = tuple[int, int | None]  # message, and part where its content is a list


class Unkeyable(Exception):  # noqa: N818
    """The content has something that cannot be keyed. The message is one of a few fixed texts."""


@dataclass(frozen=True, slots=True)
class Content:
    """One request's content in its forms.

    Attributes:
        name: of its field, such as ``messages`` or ``prompt``.
        value: as it came.
        keyed: ``value`` with every media item by the digest of its bytes.
        slots: where the segments stand; empty where the request is exact-only.
        segments: in prompt order; images without a file.
        media: bytes of the images by media id.
        prompt: text of the last user turn.
    """

    name: str
    value: Any
    keyed: Any
    slots: tuple[Slot, ...] = ()
    segments: tuple[Segment, ...] = ()
    media: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    prompt: str = ""

    def with_segments(self, segments: Sequence[Segment]) -> Content | None:
        """The same with other texts and images at its slots; None where they are not as many, or of other kinds."""
        if len(segments) != len(self.segments) or not segments:
            return None
        new: list[str | None] = []  # text or data URL at each slot; None for what is there
        for own, other in zip(self.segments, segments, strict=True):
            if isinstance(own, TextSegment) and isinstance(other, TextSegment) and own.role is other.role:
                new.append(None if own.text == other.text else other.text)
            elif isinstance(own, MediaSegment) and isinstance(other, MediaSegment):
                same = own.media_id == other.media_id
                data = None if same else read_media(other, ())
                if data is None and not same:
                    return None
                new.append(None if data is None else _data_url(data))
            else:
                return None
        if self.name == "prompt":
            return read_prompt(self.value if new[0] is None else new[0])
        changed = [(slot, text) for slot, text in zip(self.slots, new, strict=True) if text is not None]
        value = _edited(self.value, [slot for slot, _ in changed], lambda n, part: _filled(part, changed[n][1]))
        return read_messages(value, remote=False)

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
    """A completion's prompt: a text is a question, anything else (token ids, several prompts) is exact-only.

    Raises:
        Unkeyable: there is none.
    """
    if isinstance(prompt, str):
        return Content("prompt", prompt, prompt, ((0, None),), (TextSegment(prompt),), prompt=prompt)
    if isinstance(prompt, list) and prompt:
        return Content("prompt", prompt, prompt)
    raise Unkeyable("no prompt")


def read_messages(messages: object, *, remote: bool) -> Content:
    """A chat's messages.

    System texts are system segments, the last text of the last user turn is the question, everything before it context.
    A chat that does not end with a user's text is exact-only, as is one with media other than inline images.

    Raises:
        Unkeyable: a message or a part of unknown form, or media that is not in the request.
    """
    if not isinstance(messages, list) or not messages:
        raise Unkeyable("no messages")
    reader = _Reader(remote=remote, last=len(messages) - 1)
    keyed = [reader.message(i, message) for i, message in enumerate(messages)]
    question = reader.question(messages[-1])
    if question is None or not reader.inline:
        return Content("messages", messages, keyed, prompt=reader.prompt)
    segments = list(reader.segments)
    segments[question] = TextSegment(reader.texts[question])
    return Content("messages", messages, keyed, tuple(reader.slots), tuple(segments), reader.media, reader.prompt)


class _Reader:
    """Reads messages in order, and notes slots and segments."""

    def __init__(self, *, remote: bool, last: int) -> None:
        self._remote, self._last = remote, last
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
            if not self._remote or not url.startswith(("http://", "https://")):
                raise Unkeyable("media that is not in the request")
            self.inline = False
            return {**rest, "url": url}
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


def _edited(messages: Sequence[Any], slots: Sequence[Slot], edit: Callable[[int, Any], Any]) -> list[Any]:
    """Messages with another text or part at each of some slots, ``edit``'s of its number and of what is there. The rest
    is shared."""
    edited = list(messages)
    for number, (i, j) in enumerate(slots):
        own = edited[i]["content"]
        new = edit(number, own) if j is None else [*own[:j], edit(number, own[j]), *own[j + 1 :]]
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
