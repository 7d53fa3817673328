"""Server-sent events: a stream as the answer that is kept of it, and the reverse.

Of chats and completions the store holds whole answers only, so that a request with ``stream`` and one without share
them (`Assembler`, `replay`). What a stream brings beyond the fields known here makes the answer impossible to put
together faithfully: it is passed on and not kept. Of all others it holds the events as they came (`Recorder`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

DONE = b"data: [DONE]\n\n"
_MARK = b"\xef\xbb\xbf"  # a byte order mark, which is no part of the first line
_PIECE, _PIECES = 240, 1000  # characters of text in one replayed event, and how many of these there are at most

_TOP = ("id", "created", "model", "system_fingerprint", "service_tier", "prompt_token_ids", "prompt_text")
_TOP_KNOWN = frozenset((*_TOP, "object", "choices", "usage", "metrics"))
_CHOICE_KNOWN = frozenset(
    ("index", "delta", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids")
)
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")
_DELTA_KNOWN = frozenset(("role", "tool_calls", *_TEXTS))
_ANSWER_CHOICE_KNOWN = (_CHOICE_KNOWN | {"message"}) - {"delta"}
_CALL_KNOWN = frozenset(("index", "id", "type", "function"))
_FUNCTION_KNOWN = frozenset(("name", "arguments"))
_USAGE = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}  # as chats and as all others say it
# Events that say something of the answer as a whole: their type, and the field that says it.
_SUMMARIES = {"response.completed": "response", "message_start": "message", "message_delta": "delta"}


class NotKeepable(Exception):  # noqa: N818
    """A stream or an answer that cannot be turned into the other faithfully. The message is one of few fixed texts."""


class Splitter:
    """Cuts bytes into events, each with its blank line, whatever the pieces they came in. Lines end in LF or CRLF. Each
    byte is looked at once: an event may be as long as the answer, and come in very small pieces. ``rest``: what came
    after the last whole event."""

    def __init__(self) -> None:
        self.rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The events that ``data`` completes."""
        looked_at = max(0, len(self.rest) - 2)
        self.rest += data
        if b"\r" in (tail := self.rest[looked_at:]):
            self.rest[looked_at:] = tail.replace(b"\r\n", b"\n")
        if self.rest.find(b"\n\n", looked_at) < 0:
            return []
        *events, rest = bytes(self.rest).split(b"\n\n")
        self.rest = bytearray(rest)
        return [event + b"\n\n" for event in events if event.strip()]


def data_of(event: bytes) -> bytes:
    """The data of one event; empty for a comment."""
    lines = event.removeprefix(_MARK).split(b"\n")
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))


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


def _refuse_unknown(values: Mapping[str, Any], known: frozenset[str]) -> None:
    if any(name not in known and value not in (None, [], {}, "") for name, value in values.items()):
        raise NotKeepable("stream with an unknown field")


class _Choice:
    """One choice while its deltas come in: texts and lists grow, of all else the latest value counts."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls: dict[int, dict[str, Any]] = {}
        self._logprobs: dict[str, Any] | None = None
        self._rest: dict[str, Any] = {}

    def add(self, choice: Mapping[str, Any]) -> None:
        _refuse_unknown(choice, _CHOICE_KNOWN)
        delta = choice.get("delta") or {}
        _refuse_unknown(delta, _DELTA_KNOWN)
        for name, value in {**choice, **delta}.items():
            if name in ("index", "delta") or value is None:
                continue
            if name in _TEXTS or name == "text":
                self._texts.setdefault(name, []).append(value)
            elif name == "tool_calls":
                for call in value:
                    self._add_call(call)
            elif name == "logprobs":
                self._add_logprobs(value)
            elif name == "token_ids":
                self._rest.setdefault(name, []).extend(value)
            else:
                self._rest[name] = value

    def _add_call(self, call: Mapping[str, Any]) -> None:
        _refuse_unknown(call, _CALL_KNOWN)
        function = call.get("function") or {}
        _refuse_unknown(function, _FUNCTION_KNOWN)
        index = call.get("index", len(self._calls))
        empty: dict[str, Any] = {"id": None, "type": "function", "name": [], "arguments": []}
        whole = self._calls.setdefault(index, empty)
        whole.update({name: call[name] for name in ("id", "type") if call.get(name)})
        for name in _FUNCTION_KNOWN:
            whole[name].append(function.get(name) or "")

    def _add_logprobs(self, logprobs: Mapping[str, Any]) -> None:
        """Chat: ``content`` and ``refusal`` lists. Completions: four parallel lists."""
        whole = self._logprobs = self._logprobs or {}
        for name, values in logprobs.items():
            if not isinstance(values, list | None):
                raise NotKeepable("stream with an unknown field")
            if values is None:
                whole.setdefault(name, None)
            else:
                whole[name] = whole.get(name) or []
                whole[name] += values

    def whole(self, index: int, *, chat: bool) -> dict[str, Any]:
        """The choice as a whole answer has it. Raises `TypeError` where a text was none."""
        texts, rest = {name: "".join(pieces) for name, pieces in self._texts.items()}, dict(self._rest)
        ends = {"logprobs": self._logprobs, "finish_reason": None}
        role = rest.pop("role", None) or "assistant"
        if not chat:
            return {"index": index, "text": texts.get("text", ""), **ends, **rest}
        message: dict[str, Any] = {"role": role, "content": None, **texts}
        if self._calls:
            message["tool_calls"] = [_call(self._calls[at]) for at in sorted(self._calls)]
            message["content"] = message["content"] or None
        return {"index": index, "message": message, **ends, **rest}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = {name: "".join(call[name]) for name in ("name", "arguments")}
    return {"id": call["id"], "type": call["type"], "function": function}


class Assembler:
    """Puts the chunks of a stream together. ``chat``: those of chats; else of ``/v1/completions``."""

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._top: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None
        self._choices: dict[int, _Choice] = {}

    def take(self, event: bytes, chunk: dict[str, Any] | None) -> bytes | None:
        """Take one event, and what `read_chunk` reads of it. Returns the whole answer with its last event. Raises
        `NotKeepable` where it cannot be put together."""
        data = data_of(event) if chunk is None else b""
        try:
            if data == b"[DONE]":
                return json.dumps(self._answer(), separators=(",", ":")).encode()
            if data or chunk is not None:
                self._add(chunk)
        except (AttributeError, TypeError, KeyError):
            raise NotKeepable("stream of unknown form") from None
        return None

    def _add(self, chunk: dict[str, Any] | None) -> None:
        if not chunk:
            raise NotKeepable("stream of unknown form")
        if "error" in chunk:
            raise NotKeepable("stream with an error")
        _refuse_unknown(chunk, _TOP_KNOWN)
        for name in _TOP:
            if chunk.get(name) is not None:
                self._top.setdefault(name, chunk[name])
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            self._choices.setdefault(choice["index"], _Choice()).add(choice)

    def _answer(self) -> dict[str, Any]:
        if self._usage is None or not self._choices:
            raise NotKeepable("stream without usage")
        choices = [self._choices[i].whole(i, chat=self._chat) for i in sorted(self._choices)]
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._top, "object": kind, "choices": choices, "usage": self._usage}

    @staticmethod
    def broken(error: Mapping[str, Any]) -> bytes:
        """The event that tells a client that its stream broke off."""
        return event({"error": error})


class Recorder:
    """Keeps the events of a stream as they came. ``ends``: type of the event that ends a whole answer."""

    def __init__(self, ends: str = "") -> None:
        self._ends = ends
        self._events: list[bytes] | None = []

    def take(self, event: bytes, chunk: dict[str, Any] | None) -> bytes | None:
        """Take one event, and what `read_chunk` reads of it. Returns the whole answer with its last event. Raises
        `NotKeepable` where it cannot be put together."""
        kind = None if chunk is None else chunk.get("type")
        if kind == "error" or (chunk is not None and chunk.get("error") is not None):
            raise NotKeepable("stream with an error")
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
    """What was kept as JSON; of the events of a stream, what they say of the answer as a whole."""
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


def text_of(payload: bytes) -> str:
    """The text of an answer's first choice; its tool calls as JSON; empty where there is neither."""
    try:
        choice = json.loads(payload)["choices"][0]
        message = choice.get("message")
        if message is None:
            return str(choice.get("text") or "")
        if calls := message.get("tool_calls"):
            return json.dumps([call["function"] for call in calls], sort_keys=True)
        return str(message.get("content") or "")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""


def event(chunk: Mapping[str, Any]) -> bytes:
    """One chunk as an event."""
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def _pieces(text: str) -> list[str]:
    size = max(_PIECE, len(text) // _PIECES)
    return [text[start : start + size] for start in range(0, len(text), size)]


def _chat_choice(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one choice: role, texts, tool calls, then what finishes it."""
    message, logprobs = choice.get("message") or {}, choice.get("logprobs")
    content = message.get("content")
    first = {"role": message.get("role", "assistant")} | ({} if content is None else {"content": ""})
    yield {"delta": first, **_named(choice, "prompt_token_ids")}
    for name in ("reasoning", "reasoning_content", "refusal"):
        for piece in _pieces(message.get(name) or ""):
            yield {"delta": {name: piece}}
    if content and logprobs:
        yield {"delta": {"content": content}, "logprobs": logprobs}
    else:
        for piece in _pieces(content or ""):
            yield {"delta": {"content": piece}}
    if calls := message.get("tool_calls"):
        yield {"delta": {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}}
    last: dict[str, Any] = {
        "delta": {},
        "logprobs": None if content else logprobs,
        "finish_reason": choice.get("finish_reason"),
    }
    yield {**last, **_named(choice, "stop_reason", "token_ids")}


def _text_choice(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    logprobs, text = choice.get("logprobs"), choice.get("text") or ""
    for piece in [text] if logprobs else _pieces(text):
        yield {"text": piece, "logprobs": logprobs}
    last = {"text": "", "finish_reason": choice.get("finish_reason")}
    yield {**last, **_named(choice, "stop_reason", "token_ids", "prompt_token_ids")}


def _named(choice: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: choice[name] for name in names if choice.get(name) is not None}


def replay(answer: Mapping[str, Any], *, include_usage: bool) -> bytes:
    """A stored answer as the stream that a client asked for, ``[DONE]`` included. Raises `NotKeepable` where a stream
    would lose something.

    With ``include_usage`` every chunk has a ``usage`` field, null but in the closing one, as the API describes it.
    """
    _refuse_unknown(answer, _TOP_KNOWN)
    choices = answer["choices"]
    if not choices:
        raise NotKeepable("no choices")
    chat = "message" in choices[0]
    kind = "chat.completion.chunk" if chat else "text_completion"
    top = {name: answer[name] for name in _TOP if answer.get(name) is not None} | {"object": kind}
    null = {"usage": None} if include_usage else {}
    out: list[bytes] = []
    for choice in choices:
        _refuse_unknown(choice, _ANSWER_CHOICE_KNOWN)
        _refuse_unknown(choice.get("message") or {}, _DELTA_KNOWN)
        own = {"index": choice.get("index", 0), "logprobs": None, "finish_reason": None}
        parts = (_chat_choice if chat else _text_choice)(choice)
        out.extend(event({**top, "choices": [{**own, **part}], **null}) for part in parts)
    if include_usage:
        out.append(event({**top, "choices": [], "usage": answer.get("usage")}))
    return b"".join((*out, DONE))
