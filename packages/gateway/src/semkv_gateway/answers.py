"""When an answer is complete: for each route a rule that names what a complete answer has.

What a rule does not recognise is not kept. A rule takes the parsed answer and the body of its request. It says in a few
words why the answer is not complete; an empty text stands for a complete one.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from semkv_gateway.strict_json import read_objects

Body = Mapping[str, Any]
Rule = Callable[[Any, Body], str]

ERROR = "error"
UNFINISHED = "unfinished"
EMPTY = "empty"
BROKEN = "broken call"
COUNT = "not as many as asked"
UNKNOWN = "unknown form"

FINISHED = frozenset(("stop", "tool_calls"))
_ENDED = frozenset(("end_turn", "stop_sequence", "tool_use"))
_UNSEEN = frozenset(" \u115f\u1160\u2800\u3164\uffa0")
"""Blanks that are letters or signs by name: fillers of Hangul, a cell of Braille without dots."""
_SCORE_INPUTS = ("text_1", "data_1", "queries", "text_2", "data_2", "items", "documents")


def has_error(fields: Mapping[str, Any]) -> bool:
    """Whether a field ``error`` or ``errors``, in whatever case, says that something went wrong."""
    return any(
        name.lower() in ("error", "errors") and value not in (None, False, "", [])
        for name, value in fields.items()
    )


def is_json_object(text: object) -> bool:
    """Whether a text is one whole JSON object, as the arguments of a call are."""
    return isinstance(text, str) and count_objects(text) == 1


def count_objects(text: str) -> int:
    """How many JSON objects a text is a row of; 0 where something else is in it."""
    try:
        return len(read_objects(text))
    except (ValueError, RecursionError):
        return 0


def _first(faults: Iterable[str]) -> str:
    """The first fault that there is."""
    return next(filter(None, faults), "")


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _is_text(value: object) -> bool:
    """Whether a value is a text with more in it than blanks and characters that nobody sees."""
    return isinstance(value, str) and any(map(_is_seen, value))


def _is_seen(sign: str) -> bool:
    """Whether a character shows by itself: a mark, such as a variation selector, belongs to the one before it."""
    is_mark = unicodedata.category(sign).startswith("M")
    return sign.isprintable() and not is_mark and sign not in _UNSEEN


# -- chats and completions ---------------------------------------------------------------------------------------------


def choices_asked(body: Body) -> int:
    """How many choices a complete answer has: ``n`` for each prompt."""
    number = body.get("n")
    prompt = body.get("prompt")
    prompts = _count_inputs(prompt) if "messages" not in body else 1
    return prompts * (1 if type(number) is not int else number)


def _count_inputs(value: object) -> int:
    """How many texts a value is: a list of token ids is one."""
    return len(value) if isinstance(value, list) and value and type(value[0]) is not int else 1


def says_something(value: object) -> bool:
    """Whether the value of a field is a text that is not blank, or has a part that is none."""
    if isinstance(value, list):
        return any(map(_is_saying_part, value))
    return _is_text(value)


def _is_saying_part(part: object) -> bool:
    """Whether a part of a content says something; only texts are looked at."""
    return not isinstance(part, dict) or "text" not in part or _is_text(part["text"])


def chat(answer: Any, body: Body) -> str:
    """``/v1/chat/completions``."""
    return _choices_fault(answer, body, _message_fault)


def completion(answer: Any, body: Body) -> str:
    """``/v1/completions``."""
    return _choices_fault(
        answer, body, lambda choice: "" if _is_text(choice.get("text")) else EMPTY
    )


def _choices_fault(answer: Any, body: Body, fault: Callable[[Body], str]) -> str:
    """Every choice that was asked for is there, ended by itself or with a call, and says something."""
    if not isinstance(answer, dict):
        return ERROR
    choices = answer.get("choices")
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, dict) for choice in choices)
    ):
        return UNFINISHED
    if any(map(has_error, choices)):
        return ERROR
    if not all(is_finished(choice.get("finish_reason")) for choice in choices):
        return UNFINISHED
    if not is_complete_range(
        (choice.get("index", at) for at, choice in enumerate(choices)), choices_asked(body)
    ):
        return COUNT
    return _first(fault(choice) for choice in choices)


def is_finished(reason: object) -> bool:
    """Whether a ``finish_reason`` is one of a choice that ended by itself or with a call."""
    return isinstance(reason, str) and reason in FINISHED


def is_complete_range(indices: Iterable[object], count: int) -> bool:
    """Whether numbers are 0, 1, ... below ``count``, each once, in any order."""
    found = list(indices)
    return all(type(index) is int for index in found) and sorted(found) == list(range(count))  # type: ignore[type-var]


def _message_fault(choice: Body) -> str:
    message = choice.get("message")
    if not isinstance(message, dict):
        return EMPTY
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        return UNKNOWN
    if not calls and (choice["finish_reason"] == "tool_calls" or not _has_text(message)):
        return EMPTY
    return _first(map(_call_fault, calls))


def _has_text(message: Body) -> bool:
    return says_something(message.get("content")) or says_something(message.get("refusal"))


def _call_fault(call: object) -> str:
    if not isinstance(call, dict):
        return UNKNOWN
    custom = call.get("custom")
    if call.get("type") == "custom" and isinstance(custom, dict):
        whole = _is_text(custom.get("name")) and isinstance(custom.get("input"), str)
        return "" if whole else BROKEN
    function = call.get("function")
    if call.get("type", "function") != "function" or not isinstance(function, dict):
        return UNKNOWN
    whole = _is_text(function.get("name")) and is_json_object(function.get("arguments"))
    return "" if whole else BROKEN


# -- Responses and Messages --------------------------------------------------------------------------------------------


def response(answer: Any, _: Body) -> str:
    """``/v1/responses``."""
    if not isinstance(answer, dict):
        return ERROR
    if (
        answer.get("object") != "response"
        or answer.get("status") != "completed"
        or answer.get("incomplete_details")
    ):
        return UNFINISHED
    items = answer.get("output")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        return UNKNOWN
    if all(item.get("type") == "reasoning" for item in items):
        return EMPTY
    return _first(map(_item_fault, items))


def _item_fault(item: Body) -> str:
    if item.get("status") not in (None, "completed"):
        return UNFINISHED
    kind = item.get("type")
    if kind == "reasoning":
        return ""
    if kind == "message":
        return _parts_fault(item.get("content"))
    if kind == "function_call":
        return (
            "" if _is_text(item.get("name")) and is_json_object(item.get("arguments")) else BROKEN
        )
    if kind == "custom_tool_call":
        return "" if _is_text(item.get("name")) and isinstance(item.get("input"), str) else BROKEN
    return UNKNOWN


def _parts_fault(parts: object) -> str:
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return UNKNOWN
    said = any(_is_text(part.get("text")) or _is_text(part.get("refusal")) for part in parts)
    return "" if said else EMPTY


def message(answer: Any, _: Body) -> str:
    """``/v1/messages``."""
    if not isinstance(answer, dict):
        return ERROR
    reason = answer.get("stop_reason")
    if answer.get("type") != "message" or not isinstance(reason, str) or reason not in _ENDED:
        return UNFINISHED
    return _blocks_fault(answer.get("content"), reason)


def _blocks_fault(blocks: object, reason: str) -> str:
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        return UNKNOWN
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    texts = [
        block for block in blocks if block.get("type") == "text" and _is_text(block.get("text"))
    ]
    if not calls and (reason == "tool_use" or not texts):
        return EMPTY
    whole = all(
        _is_text(call.get("name")) and isinstance(call.get("input"), dict) for call in calls
    )
    return "" if whole else BROKEN


# -- numbers -----------------------------------------------------------------------------------------------------------


def embeddings(answer: Any, body: Body) -> str:
    """``/v1/embeddings``: a vector for each input."""
    return _items_fault(
        answer, lambda item: _is_vector(item.get("embedding")), _count_inputs(body.get("input"))
    )


def _is_vector(value: object) -> bool:
    """Numbers, or their bytes in base64."""
    if isinstance(value, str):
        return bool(value)
    try:
        return isinstance(value, list) and bool(value) and math.isfinite(sum(value))
    except (TypeError, OverflowError):
        return False


def scores(answer: Any, body: Body) -> str:
    """``/score``: a number for each pair, where one side may stand against many."""
    given = [_count_inputs(body[name]) for name in _SCORE_INPUTS if body.get(name) is not None]
    return _items_fault(answer, lambda item: _is_number(item.get("score")), max(given, default=1))


def _items_fault(answer: Any, is_whole: Callable[[Body], bool], count: int) -> str:
    if not isinstance(answer, dict):
        return ERROR
    items = answer.get("data")
    if not isinstance(items, list) or not all(
        isinstance(item, dict) and is_whole(item) for item in items
    ):
        return UNFINISHED
    indices = (item.get("index", at) for at, item in enumerate(items))
    return "" if is_complete_range(indices, count) else COUNT


def ranking(answer: Any, body: Body) -> str:
    """``/rerank``: a number for each document, or for the best ``top_n``. Some servers answer with the bare list."""
    items = answer.get("results", answer.get("data")) if isinstance(answer, dict) else answer
    if not isinstance(items, list) or not all(
        isinstance(item, dict) and _is_ranked(item) for item in items
    ):
        return UNFINISHED
    documents = body.get("documents", body.get("texts"))
    total = len(documents) if isinstance(documents, list) else 1
    best = body.get("top_n") or body.get("top_k")
    wanted = min(total, best) if type(best) is int and best > 0 else total
    indices = {item["index"] for item in items}
    whole = len(indices) == len(items) == wanted
    return "" if whole and all(index < total for index in indices) else COUNT


def _is_ranked(item: Body) -> bool:
    index = item.get("index")
    return (
        type(index) is int
        and index >= 0
        and _is_number(item.get("relevance_score", item.get("score")))
    )
