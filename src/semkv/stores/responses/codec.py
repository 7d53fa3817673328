"""The stored form of an answer: a JSON head with the payload's checksum, and the payload as it came."""

from __future__ import annotations

import json
import math
from typing import Any

import xxhash

from semkv.errors import CorruptValue
from semkv.stores.responses.base import StoredResponse

FORMAT = 1
CHECKSUM = 32  # bytes of the head before its JSON
_TIMES = ("created", "expires", "stale_until", "slide_s")


def encode(response: StoredResponse) -> tuple[bytes, bytes]:
    """Head and payload. The head begins with its own checksum, and holds that of the payload."""
    times = {name: None if math.isinf(value := getattr(response, name)) else value for name in _TIMES}
    head = {
        "format": FORMAT,
        "key": response.key,
        "partition": response.partition,
        "model": response.model,
        "tags": response.tags,
        "prompt": response.prompt,
        "sum": xxhash.xxh3_128_hexdigest(response.payload),
        **times,
    }
    text = json.dumps(head).encode()
    return xxhash.xxh3_128_hexdigest(text).encode() + text, response.payload


def decode(key: str, head: bytes, payload: bytes) -> StoredResponse:
    """The reverse of `encode`.

    Raises:
        CorruptValue: a checksum, the format or the key is not what it should be.
    """
    values = _read(key, head)
    if values["sum"] != xxhash.xxh3_128_hexdigest(payload):
        raise CorruptValue(f"answer {key}: the payload fails its checksum")
    return _response(values, payload)


def decode_head(key: str, head: bytes) -> StoredResponse:
    """An answer without its payload, for selection alone.

    Raises:
        CorruptValue: as `decode`.
    """
    return _response(_read(key, head), b"")


def _read(key: str, head: bytes) -> dict[str, Any]:
    text = head[CHECKSUM:]
    if head[:CHECKSUM] != xxhash.xxh3_128_hexdigest(text).encode():
        raise CorruptValue(f"answer {key}: the head fails its checksum")
    try:
        values: dict[str, Any] = json.loads(text)
        known = values["format"] == FORMAT and values["key"] == key
    except (ValueError, LookupError, TypeError) as error:
        raise CorruptValue(f"answer {key}: {error}") from error
    if not known:
        raise CorruptValue(f"answer {key}: of another format, or under another key")
    return values


def _response(values: dict[str, Any], payload: bytes) -> StoredResponse:
    try:
        times = {name: math.inf if values[name] is None else float(values[name]) for name in _TIMES}
        return StoredResponse(
            key=values["key"],
            partition=values["partition"],
            model=values["model"],
            payload=payload,
            tags=tuple(values["tags"]),
            prompt=values["prompt"],
            **times,
        )
    except (LookupError, TypeError, ValueError) as error:
        raise CorruptValue(f"answer {values['key']}: {error!r}") from error
