"""Server-sent events: a stream as the answer that is kept of it, and the reverse.

A stream is always fit for streams: its events are kept as they came. A stream of a chat or a completion is put together
to a whole answer where every field of every chunk is understood (`Assembler`); then streams and others share one entry,
and a whole answer of which every field is understood is replayed as a stream (`replay`). What is not understood is a
part of the answer that would be lost: such a stream is for streams only, and says so (`Assembler.whole`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from semkv_gateway import answers, strict_json
from semkv_gateway.answers import count_objects, has_error, is_json_object, says_something

DONE = b"data: [DONE]\n\n"
_MARK = b"\xef\xbb\xbf"  # a byte order mark, which is no part of the first line
# characters of text in one replayed event, and how many of these there are at most
_PIECE = 240
_PIECES = 1000

_TOP = (
    "id",
    "created",
    "model",
    "system_fingerprint",
    "service_tier",
    "prompt_token_ids",
    "prompt_text",
)
# Fields at the top of a chunk or an answer that say nothing of it: left out where one form is made of the other.
_ASIDE = (
    "metrics",  # vLLM: times of the request
    "obfuscation",  # OpenAI: padding against who counts bytes
    "provider",  # OpenRouter: the provider that computed it
    "time_info",  # Cerebras: times of the request
    "timings",  # llama.cpp: times of the request
    "x_groq",  # Groq: id and usage of the request
)
_TOP_KNOWN = frozenset((*_TOP, *_ASIDE, "object", "choices", "usage"))
_CHOICE_KNOWN = frozenset(
    (
        "index",
        "delta",
        "text",
        "logprobs",
        "finish_reason",
        "stop_reason",
        "token_ids",
        "prompt_token_ids",
    )
)
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")
_DELTA_KNOWN = frozenset(("role", "tool_calls", *_TEXTS))
_ANSWER_CHOICE_KNOWN = (_CHOICE_KNOWN | {"message"}) - {"delta"}
# Lists that a stream brings piece by piece.
_LOGPROBS_KNOWN = frozenset(
    "content refusal tokens token_logprobs top_logprobs text_offset".split()
)
_CALL_KNOWN = frozenset(("index", "id", "type", "function"))
_FUNCTION_KNOWN = frozenset(("name", "arguments"))
_CHUNKS = ("chat.completion.chunk", "text_completion")
_ANSWERS = ("chat.completion", "text_completion")
_BLOCK_TEXTS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "input_json_delta": "partial_json",
}


class NotKeepable(Exception):  # noqa: N818
    """A stream that must not be kept, or an answer of which no stream can be made. The message is one of few texts."""


class _NotUnderstood(Exception):  # noqa: N818
    """What a stream or an answer says is more than its other form can say."""


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
        chunk = strict_json.read(data)
    except (ValueError, RecursionError):
        return None
    return chunk if isinstance(chunk, dict) else None


def is_usage_only(chunk: Mapping[str, Any]) -> bool:
    """Whether a chunk is the closing one that brings the usage and nothing else."""
    return chunk.get("usage") is not None and not chunk.get("choices")


def without_usage(events: bytes) -> bytes:
    """The events of a stream without the closing one that brings the usage, for a client that did not ask for it."""
    if b'"usage"' not in events:
        return events
    each = Splitter().feed(events)
    return b"".join(raw for raw in each if not is_usage_only(read_chunk(data_of(raw)) or {}))


def _says_error(event: bytes, chunk: object) -> bool:
    """Whether an event is named an error, or has a field that is one (`has_error`), at whatever depth."""
    if any(line.startswith(b"event:") and b"error" in line.lower() for line in event.split(b"\n")):
        return True
    return (b"rror" in event or b"RROR" in event or b"\\u" in event) and _holds_error(chunk)


def _holds_error(value: object) -> bool:
    if isinstance(value, dict):
        if has_error(value) or "error" in (value.get("type"), value.get("object")):
            return True
        return any(map(_holds_error, value.values()))
    return isinstance(value, list) and any(map(_holds_error, value))


def _check_known(values: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise where there is a field of another name. One that is null or empty says nothing."""
    if any(name not in known and value not in (None, [], {}, "") for name, value in values.items()):
        raise _NotUnderstood


def _check_same(values: dict[str, Any], name: str, value: object) -> None:
    """Note the value of a field that is said once, or again and again."""
    if values.setdefault(name, value) != value:
        raise _NotUnderstood


class _Calls:
    """The calls of one choice while their fragments come in. Some servers repeat id and name in every fragment."""

    def __init__(self) -> None:
        self._calls: list[dict[str, Any]] = []
        self._latest: dict[int, dict[str, Any]] = {}  # by index

    def add(self, call: Mapping[str, Any]) -> None:
        """Take a fragment. Another id begins another call, also under the same index, once the call before it is whole.
        A call without an index comes in one fragment."""
        function = call.get("function") or {}
        _check_known(call, _CALL_KNOWN)
        _check_known(function, _FUNCTION_KNOWN)
        arguments = function.get("arguments") or ""
        if not isinstance(arguments, str):
            raise _NotUnderstood
        index = call.get("index")
        if type(index) not in (int, type(None)):  # true and 0.0 are equal to other numbers
            raise _NotUnderstood
        latest = None if index is None else self._latest.get(index)
        if latest is None or (call.get("id") or latest["id"]) != latest["id"]:
            self._begin(call, latest, function.get("name"), arguments)
        else:
            repeats_head = call.get("id") and function.get("name") == latest["name"]
            if function.get("name") and not repeats_head:  # it goes on, or is another's
                raise _NotUnderstood
            if (call.get("type") or "function") != "function":
                raise _NotUnderstood
            latest["arguments"].append(arguments)

    def _begin(
        self, call: Mapping[str, Any], before: dict[str, Any] | None, name: object, arguments: str
    ) -> None:
        index = call.get("index")
        number = call.get("id")
        named = isinstance(number, str) and number and isinstance(name, str) and name
        if not named or (call.get("type") or "function") != "function":
            raise _NotUnderstood
        if any(other["id"] == number for other in self._calls):
            raise _NotUnderstood
        if before is not None and not is_json_object("".join(before["arguments"])):
            raise _NotUnderstood
        _check_index(index, arguments)
        begun = {"index": index, "id": number, "name": name, "arguments": [arguments]}
        self._calls.append(begun)
        if index is not None:
            self._latest[index] = begun

    def whole(self) -> list[dict[str, Any]]:
        """The calls as a whole answer lists them: by index."""
        calls = self._calls
        indices = [call["index"] for call in calls]
        if None not in indices:
            calls = sorted(calls, key=lambda call: call["index"])
            if set(indices) != set(range(len(set(indices)))):
                raise _NotUnderstood
            if len(set(indices)) < len(indices) and calls != self._calls:
                raise _NotUnderstood
        elif any(index is not None for index in indices):
            raise _NotUnderstood
        return [_whole_call(call) for call in calls]


def _check_index(index: object, arguments: str) -> None:
    """Raise where an index is no place in a list; a call without one must be whole."""
    if index is None and not is_json_object(arguments):
        raise _NotUnderstood
    if isinstance(index, int) and index < 0:
        raise _NotUnderstood


def _whole_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": "".join(call["arguments"])}
    return {"id": call["id"], "type": "function", "function": function}


class _Choice:
    """One choice while its deltas come in: texts and lists grow, all else is said once."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls = _Calls()
        self._logprobs: dict[str, Any] | None = None
        self._token_ids: list[int] | None = None
        self._rest: dict[str, Any] = {}

    def add(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or {}
        _check_known(choice, _CHOICE_KNOWN)
        _check_known(delta, _DELTA_KNOWN)
        has_ended = "finish_reason" in self._rest
        for name, value in {**choice, **delta}.items():
            if name in ("index", "delta") or value is None:
                continue
            if has_ended and value not in ("", [], {}) and self._rest.get(name) != value:
                raise _NotUnderstood
            self._take(name, value)

    def _take(self, name: str, value: Any) -> None:
        if name in _TEXTS or name == "text":
            if not isinstance(value, str):
                raise _NotUnderstood
            self._texts.setdefault(name, []).append(value)
        elif name == "tool_calls":
            for call in value:
                self._calls.add(call)
        elif name == "logprobs":
            self._add_logprobs(value)
        elif name == "token_ids":
            self._token_ids = [*(self._token_ids or ()), *value]
        else:
            _check_same(self._rest, name, value)

    def _add_logprobs(self, logprobs: Mapping[str, Any]) -> None:
        """Chat: ``content`` and ``refusal`` lists. Completions: four parallel lists."""
        whole = self._logprobs = self._logprobs or {}
        for name, values in logprobs.items():
            if name not in _LOGPROBS_KNOWN or not isinstance(values, list | None):
                raise _NotUnderstood
            if values is None:
                whole.setdefault(name, None)
            else:
                whole[name] = whole.get(name) or []
                whole[name] += values

    def whole(self, index: int, *, chat: bool) -> dict[str, Any]:
        """The choice as a whole answer has it."""
        texts = {name: "".join(pieces) for name, pieces in self._texts.items()}
        rest = dict(self._rest)
        if self._token_ids is not None:
            rest["token_ids"] = self._token_ids
        ends = {"logprobs": self._logprobs, "finish_reason": None}
        role = rest.pop("role", None) or "assistant"
        calls = self._calls.whole()
        if not chat:
            if calls or texts.keys() - {"text"}:
                raise _NotUnderstood
            return {"index": index, "text": texts.get("text", ""), **ends, **rest}
        if "text" in texts:
            raise _NotUnderstood
        message: dict[str, Any] = {"role": role, "content": None, **texts}
        if calls:
            message["tool_calls"] = calls
            message["content"] = message["content"] or None
        return {"index": index, "message": message, **ends, **rest}


class Assembler:
    """Reads a stream of chats (``chat``) or of ``/v1/completions``, and puts it together as far as it understands.

    Attributes:
        understood: a whole answer can be made of what has come so far.
    """

    def __init__(self, *, chat: bool) -> None:
        self._chat = chat
        self._top: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None
        self._choices: dict[int, _Choice] = {}
        self.understood = True

    def take(self, event: bytes, chunk: dict[str, Any] | None) -> bool:
        """Take one event, and what `read_chunk` reads of it; whether it ends the stream. Raises `NotKeepable` where
        nothing of the stream may be kept."""
        data = data_of(event) if chunk is None else b""
        if data.strip() == b"[DONE]":
            return True
        if _says_error(event, chunk):
            raise NotKeepable("stream with an error")
        if chunk is None and not data:
            return False
        if chunk is None or not _is_chunk(chunk):
            raise NotKeepable("stream of unknown form")
        if self.understood:
            try:
                _check_name(event)
                self._add(chunk)
            except (_NotUnderstood, AttributeError, TypeError, KeyError):
                self.understood = False
                self._choices.clear()
        return False

    def _add(self, chunk: dict[str, Any]) -> None:
        _check_known(chunk, _TOP_KNOWN)
        if chunk.get("object") not in (None, "", *_CHUNKS):
            raise _NotUnderstood
        for name in _TOP:
            if chunk.get(name) not in (None, ""):
                self._take_top(name, chunk[name])
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            index = choice["index"]
            if type(index) is not int:
                raise _NotUnderstood
            self._choices.setdefault(index, _Choice()).add(choice)

    def _take_top(self, name: str, value: Any) -> None:
        """Note what a chunk says at its top. Of two answers in one stream no whole one can be made."""
        if name == "created":  # some servers give each chunk a time of its own
            self._top.setdefault(name, value)
        else:
            _check_same(self._top, name, value)

    def whole(self) -> bytes | None:
        """The whole answer; None where the stream is for streams only. To be called after the last event."""
        if not self.understood or self._usage is None or not self._choices:
            return None
        try:
            choices = [self._choices[i].whole(i, chat=self._chat) for i in sorted(self._choices)]
        except _NotUnderstood:
            return None
        kind = "chat.completion" if self._chat else "text_completion"
        answer = {**self._top, "object": kind, "choices": choices, "usage": self._usage}
        return json.dumps(answer, separators=(",", ":")).encode()

    @staticmethod
    def broken(error: Mapping[str, Any]) -> bytes:
        """The event that tells a client that its stream broke off."""
        return event({"error": error})


def _check_name(event: bytes) -> None:
    """Raise where an event has a name of its own: a whole answer has no place for it."""
    lines = () if event.startswith(b"data:") else event.split(b"\n")
    names = (line[6:].strip() for line in lines if line.startswith(b"event:"))
    if any(name not in (b"", b"message") for name in names):
        raise _NotUnderstood


def _is_chunk(chunk: Mapping[str, Any]) -> bool:
    """Whether an event has what every chunk has: choices, if only an empty list, or the usage."""
    choices = chunk.get("choices")
    return isinstance(choices, list) or (choices is None and isinstance(chunk.get("usage"), dict))


class Recorder:
    """Reads a stream whose events are kept as they came. ``ends``: type of the event that ends a whole answer."""

    understood = False

    def __init__(self, ends: str = "") -> None:
        self._ends = ends

    def take(self, event: bytes, chunk: dict[str, Any] | None) -> bool:
        """As `Assembler.take`."""
        if chunk is None:
            if (data := data_of(event)) and data.strip() != b"[DONE]":
                raise NotKeepable("stream of unknown form")
            return False
        kind = chunk.get("type")
        if kind == "error" or has_error(chunk):
            raise NotKeepable("stream with an error")
        return bool(kind) and kind == self._ends

    def whole(self) -> None:
        """These streams are for streams only."""

    @staticmethod
    def broken(error: Mapping[str, Any]) -> bytes:
        """The event that tells a client that its stream broke off, as both OpenAI and Anthropic word it."""
        return b"event: error\n" + event({**error, "type": "error", "error": error})


# -- what was kept of a stream -----------------------------------------------------------------------------------------


class _SeenChoice:
    """What tells whether a choice is complete, also where its chunks are not wholly understood."""

    def __init__(self) -> None:
        self.reasons: list[object] = []
        self.says = False
        self.calls = 0
        self.arguments: dict[Any, list[str]] = {}  # by index, as are ids and names
        self.ids: dict[Any, set[object]] = {}
        self.names: dict[Any, list[object]] = {}

    def add(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or {}
        if choice.get("finish_reason") is not None:
            self.reasons.append(choice["finish_reason"])
        said = (choice.get("text"), delta.get("content"), delta.get("refusal"))
        self.says = self.says or any(map(says_something, said))
        for call in delta.get("tool_calls") or ():
            self.calls += 1
            custom = call.get("custom")
            function = call["function"] if custom is None else custom
            self.names.setdefault(call.get("index"), []).append(function.get("name"))
            if custom is not None:  # its input is any text
                continue
            arguments = function.get("arguments") or ""
            text = json.dumps(arguments) if isinstance(arguments, dict) else arguments
            self.arguments.setdefault(call.get("index"), []).append(text)
            self.ids.setdefault(call.get("index"), set()).add(call.get("id") or "")

    def fault(self) -> str:
        if not self.reasons or not all(map(answers.is_finished, self.reasons)):
            return answers.UNFINISHED
        if not all(map(any, self.names.values())):
            return answers.BROKEN
        for index, pieces in self.arguments.items():
            found = count_objects("".join(pieces))
            begun = len(self.ids[index] - {""})
            if not found or (begun and found != begun):
                return answers.BROKEN
        if not self.calls and (not self.says or "tool_calls" in self.reasons):
            return answers.EMPTY
        return ""


def events_fault(events: bytes, asked: int) -> str:
    """Why the events of a chat or a completion are no complete answer with ``asked`` choices, as the rules of
    `semkv_gateway.answers` say it."""
    choices: dict[Any, _SeenChoice] = {}
    try:
        for raw in Splitter().feed(events):
            data = data_of(raw)
            if data.strip() == b"[DONE]":
                break
            for choice in (read_chunk(data) or {}).get("choices") or ():
                choices.setdefault(choice.get("index", 0), _SeenChoice()).add(choice)
        faults = [choice.fault() for choice in choices.values()]
    except (TypeError, AttributeError, KeyError):
        return answers.UNKNOWN
    if not choices:
        return answers.UNFINISHED
    found = next(filter(None, faults), "")
    return found or ("" if answers.is_complete_range(choices, asked) else answers.COUNT)


def _check_order(is_in_order: bool) -> None:
    """Raise where an event does not follow from those before it."""
    if not is_in_order:
        raise LookupError("events out of order")


class _Message:
    """Puts a stream of Anthropic's messages together, to tell whether it is complete."""

    def __init__(self) -> None:
        self._answer: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._blocks: dict[Any, dict[str, Any]] = {}
        self._open: set[Any] = set()

    def add(self, chunk: Mapping[str, Any]) -> None:
        kind = chunk.get("type")
        if kind == "message_start":
            _check_order(not self._answer)
            self._answer |= chunk["message"]
            self._usage |= chunk["message"].get("usage") or {}
        elif kind == "message_delta":
            self._answer |= chunk["delta"]
            self._usage |= chunk.get("usage") or {}
        elif kind == "content_block_start":
            _check_order(chunk["index"] not in self._blocks)
            self._blocks[chunk["index"]] = {**chunk["content_block"], "partial_json": ""}
            self._open.add(chunk["index"])
        elif kind == "content_block_delta":
            _check_order(chunk["index"] in self._open)
            name = _BLOCK_TEXTS.get(chunk["delta"]["type"])
            if name is not None:
                block = self._blocks[chunk["index"]]
                block[name] = (block.get(name) or "") + chunk["delta"][name]
        elif kind == "content_block_stop":
            self._open.remove(chunk["index"])

    def whole(self) -> dict[str, Any]:
        """The message; without a reason to stop where a block has no end."""
        blocks = [self._blocks[index] for index in sorted(self._blocks)]
        for block in blocks:
            text = block.pop("partial_json")
            if text:
                block["input"] = strict_json.read(text) if is_json_object(text) else None
        more = {"stop_reason": None} if self._open else {}
        return {**self._answer, **more, "content": blocks, "usage": self._usage}


def read_answer(payload: bytes) -> Any:
    """What was kept as JSON; of the events of a stream, what they say of the answer as a whole. Raises a `ValueError`
    where it is neither."""
    try:
        return strict_json.read(payload)
    except ValueError:
        if b"data:" not in payload:
            raise
    answer: dict[str, Any] = {}
    message = _Message()
    try:
        for raw in Splitter().feed(payload):
            chunk = read_chunk(data_of(raw)) or {}
            message.add(chunk)
            if chunk.get("type") == "response.completed":
                answer = chunk["response"]
        return answer or message.whole()
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError("a stream of unknown form") from error


def text_of(payload: bytes) -> str:
    """The text of an answer's first choice; its tool calls as JSON; empty where there is neither."""
    try:
        choice = strict_json.read(payload)["choices"][0]
        message = choice.get("message")
        if message is None:
            return str(choice.get("text") or "")
        if calls := message.get("tool_calls"):
            return json.dumps([call["function"] for call in calls], sort_keys=True)
        return str(message.get("content") or "")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""


def choices_of(payload: bytes) -> list[Any] | None:
    """An answer's choices; None where there are none."""
    try:
        choices = strict_json.read(payload)["choices"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return choices if isinstance(choices, list) and choices else None


def event(chunk: Mapping[str, Any]) -> bytes:
    """One chunk as an event."""
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


def _pieces(text: str) -> list[str]:
    size = max(_PIECE, len(text) // _PIECES)
    return [text[start : start + size] for start in range(0, len(text), size)]


def _chat_choice(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one choice: role, texts, tool calls, then what finishes it."""
    message = choice.get("message") or {}
    logprobs = choice.get("logprobs")
    content = message.get("content")
    first = {"role": message.get("role", "assistant")} | (
        {} if content is None else {"content": ""}
    )
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
    try:
        _check_answer(answer)
    except (_NotUnderstood, AttributeError, TypeError, KeyError, IndexError):
        raise NotKeepable("no stream of it") from None
    choices = answer["choices"]
    chat = "message" in choices[0]
    kind = "chat.completion.chunk" if chat else "text_completion"
    top = {name: answer[name] for name in _TOP if answer.get(name) is not None} | {"object": kind}
    usage = answer.get("usage") if include_usage else None
    null = {} if usage is None else {"usage": None}
    out: list[bytes] = []
    for choice in choices:
        own = {"index": choice.get("index", 0), "logprobs": None, "finish_reason": None}
        parts = (_chat_choice if chat else _text_choice)(choice)
        out.extend(event({**top, "choices": [{**own, **part}], **null}) for part in parts)
    if usage is not None:
        out.append(event({**top, "choices": [], "usage": usage}))
    return b"".join((*out, DONE))


def _check_answer(answer: Mapping[str, Any]) -> None:
    """Raise where a whole answer says more than a stream of it would."""
    _check_known(answer, _TOP_KNOWN)
    if answer.get("object") not in (None, "", *_ANSWERS) or not answer["choices"]:
        raise _NotUnderstood
    chat = "message" in answer["choices"][0]
    for choice in answer["choices"]:
        _check_known(choice, _ANSWER_CHOICE_KNOWN)
        said = choice["message"] if chat else {"content": choice["text"]}
        if chat == ("text" in choice):
            raise _NotUnderstood
        _check_known(said, _DELTA_KNOWN)
        if not all(isinstance(said.get(name), str | None) for name in _TEXTS):
            raise _NotUnderstood
        for call in said.get("tool_calls") or ():
            _check_known(call, _CALL_KNOWN)
            _check_known(call["function"], _FUNCTION_KNOWN)
