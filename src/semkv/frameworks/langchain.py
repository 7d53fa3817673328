"""LangChain's cache interface over semkv's tiers and guards.

>>> from langchain_core.globals import set_llm_cache  # doctest: +SKIP
>>> set_llm_cache(LangChainCache(SemanticCache(CacheConfig())))  # doctest: +SKIP

LangChain asks its cache for every request, also for answers drawn at random (``temperature``): give such a model
``cache=False``. It does not tell the cache which API key a request has: make one cache object for each user
(``tenant``), nor which HTTP client of your own it goes through. A model whose settings LangChain writes as the name of
an object (a class as ``response_format``) is not cached: two such objects may have one name.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.caches import BaseCache
from langchain_core.messages import message_to_dict, messages_from_dict
from langchain_core.outputs import ChatGeneration, Generation

from semkv.cache import SemanticCache
from semkv.frameworks.answers import (
    AnswerCache,
    ChatRequest,
    chat_request,
    ends_whole,
    fault_is_miss,
)

_NAMED = '"not_implemented"'
"""What LangChain writes with the name of an object that it cannot write out."""


class LangChainCache(BaseCache):
    """Answers of chat models and of text models. See `AnswerCache` for the arguments.

    An answer from the cache has ``response_metadata["semkv"]``: provenance, score, hit id.
    """

    def __init__(
        self, cache: SemanticCache, *, tenant: str = "", lifetime_s: float | None = None
    ) -> None:
        self._answers = AnswerCache(
            cache,
            tenant=tenant,
            lifetime_s=lifetime_s,
        )

    @fault_is_miss
    def lookup(self, prompt: str, llm_string: str) -> Sequence[Generation] | None:
        """The answers to an equal or similar prompt; None on a miss."""
        found = self._answers.find(_asked(prompt, llm_string))
        if found is None:
            return None
        generations = _read(found.answer)
        for generation in generations:
            if isinstance(generation, ChatGeneration):
                generation.message.response_metadata["semkv"] = found.note
        return generations

    @fault_is_miss
    def update(self, prompt: str, llm_string: str, return_val: Sequence[Generation]) -> None:
        """Keep answers that are whole, and that are read back as they were."""
        if return_val and all(_is_whole(generation) for generation in return_val):
            try:
                written = json.dumps([_written(generation) for generation in return_val])
            except (TypeError, ValueError):
                return
            if _read(written) == list(return_val):
                self._answers.keep(_asked(prompt, llm_string), written)

    def clear(self, **_: Any) -> None:
        """Delete this tenant's answers."""
        self._answers.clear()


def _asked(prompt: str, llm_string: str) -> ChatRequest | None:
    """A chat model's prompt is the JSON of its messages; a text model's is the text."""
    try:
        read = json.loads(prompt)
    except (ValueError, RecursionError):
        read = prompt
    messages: list[Any] = [{"role": "user", "content": prompt}]
    if isinstance(read, list):
        messages = [message.get("kwargs") for message in read if isinstance(message, Mapping)]
        if len(messages) < len(read) or not all(isinstance(one, Mapping) for one in messages):
            return None
    if _NAMED in prompt or not _is_written_out(llm_string):
        return None
    return chat_request(messages, {"model": llm_string})


def _is_written_out(llm_string: str) -> bool:
    """Whether settings hold no object that is only named. They are JSON, Python literals, or the one and the other."""
    literals = llm_string
    try:
        if llm_string.startswith("{"):
            end = json.JSONDecoder().raw_decode(llm_string)[1]
            literals = llm_string[end:].removeprefix("---")
        ast.literal_eval(literals)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return _NAMED not in llm_string


def _is_whole(generation: Generation) -> bool:
    details: list[Any] = [generation.generation_info]
    has_calls = False
    if isinstance(generation, ChatGeneration):
        details.append(generation.message.response_metadata)
        has_calls = bool(getattr(generation.message, "tool_calls", None))
        if getattr(generation.message, "invalid_tool_calls", None):
            return False
    return ends_whole(details) and (has_calls or bool(generation.text.strip()))


def _written(generation: Generation) -> dict[str, Any]:
    if isinstance(generation, ChatGeneration):
        return {
            "message": message_to_dict(generation.message),
            "info": generation.generation_info,
        }
    return {"text": generation.text, "info": generation.generation_info}


def _read(written: str) -> list[Generation]:
    generations: list[Generation] = []
    for one in json.loads(written):
        if "message" in one:
            (message,) = messages_from_dict([one["message"]])
            generations.append(ChatGeneration(message=message, generation_info=one["info"]))
        else:
            generations.append(Generation(text=one["text"], generation_info=one["info"]))
    return generations
