"""The ``usage`` of an answer, in whatever form the answer was kept: read, and set to zero.

It is looked for in the bytes. Within a text of JSON a quote is escaped, so these bytes are a name and a value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from semkv_gateway import strict_json

WITHOUT_CACHE = "without_cache"
"""The field that has the usage as the upstream said it, in one that was set to zero."""

_USAGE = re.compile(rb'(?<!\\)"usage"\s*:\s*(?=\{)')
_LONGEST = 16_384  # bytes of one usage
_END = 4096  # bytes at both ends of a large answer that are looked through
_LARGE = 65_536
_TOKENS = {
    "input": ("prompt_tokens", "input_tokens"),  # as chats say it, and as all others do
    "output": ("completion_tokens", "output_tokens"),
}
_DATA = b"data:"
_ANSWERS = ("message", "response")  # where an event has an answer
_MOST = 1 << 31  # tokens; what says more is no count
_decoder = json.JSONDecoder()


def _found(payload: bytes) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Where each usage begins and ends, and what it says."""
    for name in _USAGE.finditer(payload):
        start = name.end()
        try:
            # In Latin-1 the place of a character is that of its byte.
            text = payload[start : start + _LONGEST].decode("latin-1")
            length = _decoder.raw_decode(text)[1]
            said = strict_json.read(payload[start : start + length])
        except (ValueError, RecursionError):
            continue
        if isinstance(said, dict):
            yield start, start + length, said


def tokens_of(payload: bytes) -> tuple[int, int]:
    """Tokens of the prompt and of the answer; 0 where the answer does not say. Of a stream that says them several times
    the last ones count."""
    if len(payload) > _LARGE:
        payload = payload[:_END] + b"\n" + payload[-_END:]
    said: dict[str, Any] = {}
    for _, _, usage in _found(payload):
        said |= usage
    return _count(said, "input"), _count(said, "output")


def _count(said: dict[str, Any], kind: str) -> int:
    for name in _TOKENS[kind]:
        count = said.get(name)
        if type(count) is int and 0 < count < _MOST:
            return count
    return 0


def zeroed(payload: bytes) -> bytes:
    """The same answer, whose usage says that nothing was spent, and what was spent when it was computed."""
    if payload.lstrip()[:1] == b"{":
        return _zeroed(payload)
    lines = payload.splitlines(keepends=True)
    return b"".join(_zeroed(line, _DATA) if line.startswith(_DATA) else line for line in lines)


def _zeroed(said: bytes, head: bytes = b"") -> bytes:
    """One JSON object behind ``head``, with its usage set to zero; what a tool is called with may be named so, too."""
    own = _own(said[len(head) :]) if b'"usage"' in said else []
    parts = []
    at = 0
    for start, end, usage in _found(said):
        if usage not in own:
            continue
        zero = {**_zero(usage), WITHOUT_CACHE: usage}
        parts += [said[at:start], json.dumps(zero, separators=(",", ":")).encode()]
        at = end
    return b"".join((*parts, said[at:]))


def _own(text: bytes) -> list[Any]:
    """The usage of an answer or of an event, which is at its top, or at that of the answer in the event."""
    try:
        answer = strict_json.read(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(answer, dict):
        return []
    owners = [answer, *(answer.get(name) for name in _ANSWERS)]
    return [owner.get("usage") for owner in owners if isinstance(owner, dict)]


def _zero(value: Any) -> Any:
    """With 0 in place of each number: counts of tokens, and costs."""
    if isinstance(value, dict):
        return {name: _zero(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_zero(inner) for inner in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return 0 if is_number else value
