"""Server-sent events: a stream as the answer that is kept of it, and the reverse.

Of chats and completions the store holds whole answers only, so that a request with ``stream`` and one without share
them (`Assembler`, `replay`). What a stream brings beyond the fields known here makes the answer impossible to put
together faithfully: it is passed on and not kept. Of all others it holds the events as they came (`Recorder`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

DONE = b"data: [DONE]\n\n"
_MARK = b"\xef\xbb\xbf"  # a byte order mark, which is no part of the first line
_PIECE = 240  # characters of text in one replayed event

_TOP = ("id", "created", "model", "system_fingerprint", "service_tier", "prompt_token_ids", "prompt_text")
_TOP_KNOWN = frozenset((*_TOP, "object", "choices", "usage", "metrics"))
_CHOICE_KNOWN = frozenset(
    ("index", "delta", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids")
)
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")
_DELTA_KNOWN = frozenset(("role", "tool_calls", *_TEXTS))
_MESSAGE_KNOWN = frozenset(("role", "tool_calls", *_TEXTS))
_ANSWER_CHOICE_KNOWN = (_CHOICE_KNOWN | {"message"}) - {"delta"}
_CALL_KNOWN = frozenset(("index", "id", "type", "function"))
_FUNCTION_KNOWN = frozenset(("name", "arguments"))
_USAGE = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}  # as chats and as all others say it
# Events that say something of the answer as a whole: their type, and the field that says it.
_SUMMARIES = {"response.completed": "response", "message_start": "message", "message_delta": "delta"}


class NotKeepable(Exception):  # noqa: N818
    """A stream or an answer that cannot be turned into the other faithfully. The message says why, in a word or two."""


class Splitter:
    """Cuts bytes into events, each with its blank line, whatever the pieces they came in. Lines may end in CR, LF or
    both. Each byte is looked at once: an event may be as long as the answer, and come in very small pieces.

    Attributes:
        rest: what came after the last whole event.
    """

    def __init__(self) -> None:
        self.rest = bytearray()
        self._begun = self._returned = False  # `_returned`: the last byte was a CR, and an LF may belong to it

    def feed(self, data: bytes) -> list[bytes]:
        """The events that ``data`` completes."""
        if not self._begun:
            data, self.rest = bytes(self.rest) + data, bytearray()
            if len(data) < len(_MARK) and _MARK.startswith(data):
                self.rest += data
                return []
            data, self._begun = data.removeprefix(_MARK), True
        if self._returned:
            data = data.removeprefix(b"\n")
        self._returned = data.endswith(b"\r")
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        looked_at = max(0, len(self.rest) - 1)
        self.rest += data
        if self.rest.find(b"\n\n", looked_at) < 0:
            return []
        *events, rest = bytes(self.rest).split(b"\n\n")
        self.rest = bytearray(rest)
        return [event + b"\n\n" for event in events if event.strip()]


def data_of(event: bytes) -> bytes:
    """The data of one event; empty for a comment."""
    lines = (line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(lines)


def read_chunk(data: bytes) -> dict[str, Any] | None:
    """The JSON object in an event's data; None where there is none."""
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return chunk if isinstance(chunk, dict) else None


def is_usage_only(chunk: Mapping[str, Any]) -> bool:
    """Whether a chunk is the closing one that brings the usage and nothing else."""
    return chunk.get("usage") is not None and not chunk.get("choices")


def _refuse_unknown(values: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    for name, value in values.items():
        if name not in known and value not in (None, [], {}, ""):
            raise NotKeepable(f"unknown {where} field {name}")


class _Choice:
    """One choice while its deltas come in."""

    def __init__(self) -> None:
        self.role: str | None = None
        self.texts: dict[str, list[str]] = {}
        self.calls: dict[int, dict[str, Any]] = {}
        self.called: dict[int, dict[str, list[str]]] = {}  # pieces of the name and the arguments of each call
        self.logprobs: dict[str, Any] | None = None
        self.rest: dict[str, Any] = {}
        self.token_ids: list[int] | None = None

    def add(self, choice: Mapping[str, Any]) -> None:
        _refuse_unknown(choice, _CHOICE_KNOWN, "choice")
        delta = choice.get("delta") or {}
        _refuse_unknown(delta, _DELTA_KNOWN, "delta")
        self.role = delta.get("role") or self.role
        for name in _TEXTS:
            if isinstance(text := delta.get(name), str):
                self.texts.setdefault(name, []).append(text)
        for call in delta.get("tool_calls") or ():
            self._add_call(call)
        if isinstance(text := choice.get("text"), str):
            self.texts.setdefault("text", []).append(text)
        if choice.get("logprobs") is not None:
            self._add_logprobs(choice["logprobs"])
        if choice.get("token_ids") is not None:
            self.token_ids = self.token_ids or []
            self.token_ids += choice["token_ids"]
        for name in ("finish_reason", "stop_reason", "prompt_token_ids"):
            if choice.get(name) is not None:
                self.rest[name] = choice[name]

    def _add_call(self, call: Mapping[str, Any]) -> None:
        _refuse_unknown(call, _CALL_KNOWN, "tool call")
        index = call.get("index", len(self.calls))
        whole = self.calls.setdefault(index, {"id": None, "type": "function"})
        texts = self.called.setdefault(index, {"name": [], "arguments": []})
        for name in ("id", "type"):
            if call.get(name):
                whole[name] = call[name]
        function = call.get("function") or {}
        _refuse_unknown(function, _FUNCTION_KNOWN, "function")
        for name in ("name", "arguments"):
            if not isinstance(piece := function.get(name) or "", str):
                raise TypeError
            texts[name].append(piece)

    def _function(self, index: int) -> dict[str, str]:
        return {name: "".join(pieces) for name, pieces in self.called[index].items()}

    def _add_logprobs(self, logprobs: Mapping[str, Any]) -> None:
        """Chat: ``content`` and ``refusal`` lists. Completions: four parallel lists."""
        whole = self.logprobs if self.logprobs is not None else {}
        for name, values in logprobs.items():
            if isinstance(values, list):
                whole[name] = whole.get(name) or []
                whole[name] += values
            elif values is None:
                whole.setdefault(name, None)
            else:
                raise NotKeepable(f"unknown logprobs field {name}")
        self.logprobs = whole

    def text(self, name: str) -> str | None:
        return "".join(self.texts[name]) if name in self.texts else None

    def whole(self, index: int, *, chat: bool) -> dict[str, Any]:
        out: dict[str, Any] = {"index": index}
        if chat:
            message: dict[str, Any] = {"role": self.role or "assistant", "content": self.text("content")}
            message.update({name: text for name in _TEXTS[1:] if (text := self.text(name)) is not None})
            if self.calls:
                message["tool_calls"] = [{**self.calls[i], "function": self._function(i)} for i in sorted(self.calls)]
                message["content"] = message["content"] or None
            out["message"] = message
        else:
            out["text"] = self.text("text") or ""
        out["logprobs"] = self.logprobs
        out["finish_reason"] = self.rest.get("finish_reason")
        out.update({name: value for name, value in self.rest.items() if name != "finish_reason"})
        if self.token_ids is not None:
            out["token_ids"] = self.token_ids
        return out


class Assembler:
    """Puts the chunks of a stream together.

    Args:
        chat: chat chunks; else those of ``/v1/completions``.
    """

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._top: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None
        self._choices: dict[int, _Choice] = {}

    def take(self, event: bytes, chunk: dict[str, Any] | None) -> bytes | None:
        """Take one event, and what `read_chunk` reads of it.

        Returns:
            JSON of the whole answer, once ``[DONE]`` came.

        Raises:
            NotKeepable: it is no chunk, an error, or has fields that are not known here; or see `answer`.
        """
        data = data_of(event) if chunk is None else b""
        if data == b"[DONE]":
            return json.dumps(self.answer(), separators=(",", ":")).encode()
        if data or chunk is not None:
            self.add(chunk)
        return None

    def add(self, chunk: dict[str, Any] | None) -> None:
        """Put one chunk to the others. Raises as `take` does."""
        if not chunk or "error" in chunk:
            raise NotKeepable("no chunk, or an error in the stream")
        _refuse_unknown(chunk, _TOP_KNOWN, "chunk")
        try:
            for name in _TOP:
                if chunk.get(name) is not None:
                    self._top.setdefault(name, chunk[name])
            self._usage = chunk.get("usage") or self._usage
            for choice in chunk.get("choices") or ():
                self._choices.setdefault(choice["index"], _Choice()).add(choice)
        except (AttributeError, TypeError, KeyError):
            raise NotKeepable("no chunk") from None

    def answer(self) -> dict[str, Any]:
        """The whole answer, once ``[DONE]`` came.

        Raises:
            NotKeepable: the stream brought no usage, or had no numbers as indices.
        """
        if self._usage is None or not self._choices:
            raise NotKeepable("no usage")
        try:
            choices = [self._choices[i].whole(i, chat=self._chat) for i in sorted(self._choices)]
        except TypeError:
            raise NotKeepable("no index") from None
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._top, "object": kind, "choices": choices, "usage": self._usage}

    @staticmethod
    def broken(error: Mapping[str, Any]) -> bytes:
        """The event that tells a client that its stream broke off."""
        return event({"error": error})


class Recorder:
    """Keeps the events of a stream as they came.

    Args:
        ends: type of the event that ends a whole answer; empty where there are no streams.
    """

    def __init__(self, ends: str = "") -> None:
        self._ends = ends
        self._events: list[bytes] | None = []

    def take(self, event: bytes, chunk: dict[str, Any] | None) -> bytes | None:
        """Take one event, and what `read_chunk` reads of it.

        Returns:
            All events, with the one that ends the answer.

        Raises:
            NotKeepable: it is an error.
        """
        kind = None if chunk is None else chunk.get("type")
        if kind == "error" or (chunk is not None and chunk.get("error") is not None):
            raise NotKeepable("an error in the stream")
        if self._events is None:
            return None
        self._events.append(event)
        if not kind or kind != self._ends:
            return None
        recording, self._events = b"".join(self._events), None
        return recording

    @staticmethod
    def broken(error: Mapping[str, Any]) -> bytes:
        """The event that tells a client that its stream broke off, as both OpenAI and Anthropic word it."""
        return b"event: error\n" + event({**error, "type": "error", "error": error})


def read_answer(payload: bytes) -> Any:
    """What was kept as JSON; of the events of a stream, what they say of the answer as a whole.

    Raises:
        ValueError: it is neither.
        RecursionError: it is nested too deeply.
    """
    try:
        return json.loads(payload)
    except ValueError:
        answer: dict[str, Any] = {}
        for raw in Splitter().feed(payload):
            chunk = read_chunk(data_of(raw)) or {}
            kind = chunk.get("type")
            summary = chunk.get(_SUMMARIES.get(kind, "")) if isinstance(kind, str) else None
            if isinstance(summary, dict):
                usage = [one["usage"] for one in (answer, summary, chunk) if isinstance(one.get("usage"), dict)]
                answer |= {**summary, "usage": {name: n for counts in usage for name, n in counts.items()}}
        if not answer:
            raise
        return answer


def usage_of(payload: bytes) -> dict[str, int]:
    """The tokens that an answer speaks of, as ``input_tokens`` and ``output_tokens``; without what it does not say."""
    try:
        usage = read_answer(payload)["usage"]
        named = {_USAGE.get(name, name): count for name, count in usage.items() if isinstance(count, int)}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return {name: named[name] for name in _USAGE.values() if name in named}


def event(chunk: Mapping[str, Any]) -> bytes:
    """One chunk as an event."""
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def _pieces(text: str) -> list[str]:
    return [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]


def _chat_choice(choice: Mapping[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
    """The events of one choice: role, texts, tool calls, then what finishes it."""
    index, message = choice.get("index", 0), choice.get("message") or {}
    first = {"role": message.get("role", "assistant")}
    if message.get("content") is not None:
        first["content"] = ""
    opening = {name: choice[name] for name in ("prompt_token_ids",) if choice.get(name) is not None}
    send({"index": index, "delta": first, "logprobs": None, "finish_reason": None, **opening})
    for name in ("reasoning", "reasoning_content", "refusal"):
        for piece in _pieces(message.get(name) or ""):
            send({"index": index, "delta": {name: piece}, "logprobs": None, "finish_reason": None})
    logprobs = choice.get("logprobs")
    content = message.get("content") or ""
    for piece in [content] if logprobs and content else _pieces(content):
        send({"index": index, "delta": {"content": piece}, "logprobs": logprobs, "finish_reason": None})
    last: dict[str, Any] = {}
    if calls := message.get("tool_calls"):
        last["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    if last:
        send({"index": index, "delta": last, "logprobs": None, "finish_reason": None})
    tail = {name: choice[name] for name in ("stop_reason", "token_ids") if choice.get(name) is not None}
    rest = None if content else logprobs
    send({"index": index, "delta": {}, "logprobs": rest, "finish_reason": choice.get("finish_reason"), **tail})


def _text_choice(choice: Mapping[str, Any], send: Callable[[dict[str, Any]], None]) -> None:
    index, logprobs, text = choice.get("index", 0), choice.get("logprobs"), choice.get("text") or ""
    for piece in [text] if logprobs else _pieces(text):
        send({"index": index, "text": piece, "logprobs": logprobs, "finish_reason": None})
    tail = {n: choice[n] for n in ("stop_reason", "token_ids", "prompt_token_ids") if choice.get(n) is not None}
    send({"index": index, "text": "", "logprobs": None, "finish_reason": choice.get("finish_reason"), **tail})


def replay(answer: Mapping[str, Any], *, include_usage: bool) -> bytes:
    """A stored answer as the stream that a client asked for, ``[DONE]`` included.

    With ``include_usage`` every chunk has a ``usage`` field, null but in the closing one, as the API describes it.

    Raises:
        NotKeepable: the answer has fields that a stream of it would lose.
    """
    _refuse_unknown(answer, _TOP_KNOWN, "answer")
    chat = answer.get("object") != "text_completion"
    kind = "chat.completion.chunk" if chat else "text_completion"
    top = {name: answer[name] for name in _TOP if answer.get(name) is not None} | {"object": kind}
    null = {"usage": None} if include_usage else {}
    out: list[bytes] = []

    def send(choice: dict[str, Any]) -> None:
        out.append(event({**top, "choices": [choice], **null}))

    for choice in answer.get("choices") or ():
        _refuse_unknown(choice, _ANSWER_CHOICE_KNOWN, "choice")
        _refuse_unknown(choice.get("message") or {}, _MESSAGE_KNOWN, "message")
        (_chat_choice if chat else _text_choice)(choice, send)
    if include_usage:
        out.append(event({**top, "choices": [], "usage": answer.get("usage")}))
    return b"".join((*out, DONE))
