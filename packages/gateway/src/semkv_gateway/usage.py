"""The ``usage`` of an answer, in whatever form the answer was kept: read, and set to zero.

It is looked for in the bytes. Within a text of JSON a quote is escaped, so these bytes are a name and a value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

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
            said = json.loads(payload[start : start + length])
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
    parts = []
    at = 0
    for start, end, said in _found(payload):
        usage = {**_zero(said), WITHOUT_CACHE: said}
        parts += [payload[at:start], json.dumps(usage, separators=(",", ":")).encode()]
        at = end
    return b"".join((*parts, payload[at:]))


def _zero(value: Any) -> Any:
    """With 0 in place of each number: counts of tokens, and costs."""
    if isinstance(value, dict):
        return {name: _zero(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_zero(inner) for inner in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return 0 if is_number else value
