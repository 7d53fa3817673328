"""LiteLLM's cache interface over semkv's tiers and guards, for its Python library.

>>> import litellm  # doctest: +SKIP
>>> litellm.cache = LiteLLMCache(SemanticCache(CacheConfig()))  # doctest: +SKIP
>>> litellm.completion(model="openai/NAME", messages=[...], caching=True)  # doctest: +SKIP

Only chats are cached. LiteLLM's own key is made of the arguments that it knows; here every argument separates that is
not known to be harmless, the API key among them. In front of or behind LiteLLM's proxy, use the gateway.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from litellm.caching.caching import Cache
from litellm.types.caching import LiteLLMCacheType
from pydantic import BaseModel

from semkv.cache import SemanticCache
from semkv.frameworks.answers import (
    AnswerCache,
    ChatRequest,
    chat_request,
    ends_whole,
    fault_is_miss,
)

HARMLESS = frozenset(
    {
        "cache",  # LiteLLM's own instructions to the cache
        "caching",  # whether to ask the cache
        "litellm_call_id",  # random
        "litellm_logging_obj",  # of this process
        "litellm_params",  # made from the other arguments
        "messages",  # compared apart
        "num_retries",  # says what happens before there is an answer
        "parent_otel_span",  # of this process
    }
)
"""Arguments of a call that do not shape its answer."""


class LiteLLMCache(Cache):
    """Answers of ``completion`` and ``acompletion``. See `AnswerCache` for the arguments.

    LiteLLM's instructions hold: ``cache={"no-cache": True}``, ``"no-store"``, ``"ttl"``, ``"s-maxage"``.
    """

    def __init__(
        self, cache: SemanticCache, *, tenant: str = "", lifetime_s: float | None = None
    ) -> None:
        super().__init__(
            type=LiteLLMCacheType.LOCAL, supported_call_types=["completion", "acompletion"]
        )
        self._answers = AnswerCache(
            cache,
            tenant=tenant,
            lifetime_s=lifetime_s,
        )

    @fault_is_miss
    def get_cache(self, dynamic_cache_object: Any = None, **kwargs: Any) -> Any:
        """The answer as LiteLLM keeps it, a dictionary; None on a miss."""
        if self.should_use_cache(**kwargs) is not True:
            return None
        found = self._answers.find(_asked(kwargs))
        if found is None:
            return None
        dated = json.loads(found.answer)
        control = kwargs.get("cache") or {}
        oldest = control.get("s-maxage", control.get("s-max-age"))
        if oldest is not None and time.time() - dated["timestamp"] > float(oldest):
            return None
        return dated["response"]

    async def async_get_cache(self, dynamic_cache_object: Any = None, **kwargs: Any) -> Any:
        """The same, in a thread."""
        return await asyncio.to_thread(self.get_cache, **kwargs)

    @fault_is_miss
    def add_cache(self, result: Any, **kwargs: Any) -> None:
        """Keep an answer that is whole."""
        if self.should_use_cache(**kwargs) is not True:
            return
        answer = json.loads(result.model_dump_json() if isinstance(result, BaseModel) else result)
        if not _is_whole(answer):
            return
        control = kwargs.get("cache") or {}
        lifetime = control.get("ttl", kwargs.get("ttl"))
        dated = {"timestamp": time.time(), "response": answer}
        self._answers.keep(
            _asked(kwargs),
            json.dumps(dated),
            lifetime_s=None if lifetime is None else float(lifetime),
        )

    async def async_add_cache(
        self, result: Any, dynamic_cache_object: Any = None, **kwargs: Any
    ) -> None:
        """The same, in a thread."""
        await asyncio.to_thread(self.add_cache, result, **kwargs)


def _asked(arguments: dict[str, Any]) -> ChatRequest | None:
    messages = arguments.get("messages")
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
        return None
    settings = {name: value for name, value in arguments.items() if name not in HARMLESS}
    return chat_request(messages, settings)


def _is_whole(answer: Any) -> bool:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not choices:
        return False
    return all(
        ends_whole({"finish_reason": choice.get("finish_reason")})
        and ((choice.get("message") or {}).get("content") or choice["message"].get("tool_calls"))
        for choice in choices
    )
