"""The one reader of JSON: requests, answers, chunks of streams and arguments of calls have one meaning, or none.

JSON readers disagree about an object that has a name twice, and about NaN and infinities. Such a text is refused: a
client may read in it something else than what was looked at here.
"""

from __future__ import annotations

import json
from typing import Any


def read(raw: bytes | str) -> Any:
    """The value that a text stands for, in UTF-8 where it is bytes.

    Raises:
        ValueError: it is no JSON, or means several things.
        RecursionError: it is nested too deeply.

    >>> read('{"a": 1}')
    {'a': 1}
    >>> read('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: a name comes twice in one object
    """
    text = raw if isinstance(raw, str) else raw.decode("utf-8-sig")
    return _DECODER.decode(text)


def read_objects(text: str) -> list[dict[str, Any]]:
    """The objects that a text is a row of. Raises as `read` does, also where something else is in the row."""
    found = []
    at = len(text) - len(text.lstrip())
    while at < len(text):
        value, end = _DECODER.raw_decode(text, at)
        if not isinstance(value, dict):
            raise ValueError("a value that is no object")
        found.append(value)
        at = len(text) - len(text[end:].lstrip())
    return found


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice in one object")
    return found


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
