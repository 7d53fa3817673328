"""A LlamaIndex model whose answers are cached by semkv's tiers and guards.

LlamaIndex has no interface for a cache of answers, so this wraps a model:

>>> from llama_index.llms.openai_like import OpenAILike  # doctest: +SKIP
>>> model = OpenAILike(model="NAME", is_chat_model=True)  # doctest: +SKIP
>>> llm = CachedLLM(inner=model).use(SemanticCache(CacheConfig()))  # doctest: +SKIP

``chat``, ``complete`` and their ``a`` forms are cached, and with them query engines and agents that call them. Streams
go to the model, and so do requests with tools: their answers hold objects of the client, which cannot be written and
read back.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.llms import LLM
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from pydantic import PrivateAttr

from semkv.cache import SemanticCache
from semkv.frameworks.answers import (
    AnswerCache,
    ChatRequest,
    chat_request,
    ends_whole,
    fault_is_miss,
)

_OUTSIDE_PROMPTS = frozenset({"callback_manager", "rate_limiter"})
"""What models leave out of their dictionary without its shaping an answer."""


class CachedLLM(FunctionCallingLLM):
    """A model behind a cache.

    Attributes:
        inner: the model that is asked on a miss. All its settings separate, its API key among them. With a function of
            your own that makes prompts it is not cached: nothing tells two such functions apart. Nor do two HTTP
            clients of your own separate.
    """

    inner: LLM
    _answers: AnswerCache | None = PrivateAttr(default=None)

    def use(
        self, cache: SemanticCache, *, tenant: str = "", lifetime_s: float | None = None
    ) -> CachedLLM:
        """Cache answers from now on. See `AnswerCache` for the arguments."""
        self._answers = AnswerCache(
            cache,
            tenant=tenant,
            lifetime_s=lifetime_s,
        )
        return self

    @classmethod
    def class_name(cls) -> str:
        return "CachedLLM"

    @property
    def metadata(self) -> LLMMetadata:
        return self.inner.metadata

    # -- cached ---------------------------------------------------------------------------------

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        asked = self._asked(messages, kwargs)
        answer = self._find(asked)
        if answer is None:
            answer = self.inner.chat(messages, **kwargs)
            self._keep(asked, answer)
        return answer

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        asked = self._asked(messages, kwargs)
        answer = await asyncio.to_thread(self._find, asked)
        if answer is None:
            answer = await self.inner.achat(messages, **kwargs)
            await asyncio.to_thread(self._keep, asked, answer)
        return answer

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        asked = self._asked_text(prompt, formatted, kwargs)
        answer = self._find(asked)
        if answer is not None:
            return CompletionResponse(text=answer.message.content or "", raw=answer.raw)
        computed = self.inner.complete(prompt, formatted=formatted, **kwargs)
        self._keep(asked, _as_chat(computed))
        return computed

    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        asked = self._asked_text(prompt, formatted, kwargs)
        answer = await asyncio.to_thread(self._find, asked)
        if answer is not None:
            return CompletionResponse(text=answer.message.content or "", raw=answer.raw)
        computed = await self.inner.acomplete(prompt, formatted=formatted, **kwargs)
        await asyncio.to_thread(self._keep, asked, _as_chat(computed))
        return computed

    @fault_is_miss
    def _find(self, asked: ChatRequest | None) -> ChatResponse | None:
        found = None if self._answers is None else self._answers.find(asked)
        if found is None:
            return None
        message = ChatMessage.model_validate(json.loads(found.answer))
        return ChatResponse(message=message, raw={"semkv": found.note})

    @fault_is_miss
    def _keep(self, asked: ChatRequest | None, answer: ChatResponse) -> None:
        """Keep an answer that is whole, and that is read back as it was."""
        if self._answers is None or answer.logprobs or not _is_whole(answer):
            return
        try:
            written = json.dumps(answer.message.model_dump(mode="json"))
        except (TypeError, ValueError):
            return
        if ChatMessage.model_validate(json.loads(written)) == answer.message:
            self._answers.keep(asked, written)

    @fault_is_miss
    def _asked(
        self, messages: Sequence[ChatMessage], arguments: Mapping[str, Any]
    ) -> ChatRequest | None:
        settings = {"model": _settings(self.inner), "arguments": dict(arguments)}
        return chat_request([_message(message) for message in messages], settings)

    @fault_is_miss
    def _asked_text(
        self, prompt: str, formatted: bool, arguments: Mapping[str, Any]
    ) -> ChatRequest | None:
        settings = {
            "model": _settings(self.inner),
            "arguments": dict(arguments),
            "formatted": formatted,
        }
        return chat_request(
            [
                {
                    "role": "user",
                    "content": prompt,
                    "complete": True,
                }
            ],
            settings,
        )

    # -- the model's own ------------------------------------------------------------------------

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self.inner.stream_chat(messages, **kwargs)

    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        return await self.inner.astream_chat(messages, **kwargs)

    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        return self.inner.stream_complete(prompt, formatted=formatted, **kwargs)

    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        return await self.inner.astream_complete(prompt, formatted=formatted, **kwargs)

    def chat_with_tools(self, *args: Any, **kwargs: Any) -> ChatResponse:
        return _with_tools(self.inner).chat_with_tools(*args, **kwargs)

    async def achat_with_tools(self, *args: Any, **kwargs: Any) -> ChatResponse:
        return await _with_tools(self.inner).achat_with_tools(*args, **kwargs)

    def get_tool_calls_from_response(self, *args: Any, **kwargs: Any) -> list[ToolSelection]:
        calls: list[ToolSelection] = _with_tools(self.inner).get_tool_calls_from_response(
            *args, **kwargs
        )
        return calls

    def _prepare_chat_with_tools(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Asked for by the base class, whose callers are overridden above."""
        raise NotImplementedError


def _with_tools(model: LLM) -> FunctionCallingLLM:
    if isinstance(model, FunctionCallingLLM):
        return model
    raise TypeError(f"{type(model).__name__} calls no tools")


def _settings(model: LLM) -> dict[str, Any]:
    """All that shapes a model's answers, with what it leaves out of its own dictionary."""
    left_out = {
        name: _name_of(getattr(model, name))
        for name, field in type(model).model_fields.items()
        if field.exclude and name not in _OUTSIDE_PROMPTS
    }
    return {"settings": model.to_dict(), "left out": left_out}


def _name_of(value: Any) -> Any:
    """The name of a function of LlamaIndex's own; else the value, which only JSON makes cacheable."""
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '<none>')}"
    return name if name.startswith("llama_index.") and "<" not in name else value


def _message(message: ChatMessage) -> dict[str, Any]:
    written = message.model_dump(mode="json")
    parts = [_part(block) for block in written.pop("blocks")]
    is_text = len(parts) == 1 and parts[0].keys() == {"type", "text"} and parts[0]["type"] == "text"
    return {**written, "content": parts[0]["text"] if is_text else parts}


def _part(block: dict[str, Any]) -> dict[str, Any]:
    """A block in the form that `chat_request` reads; one that is only named stays unknown to it."""
    kind = block["block_type"]
    filled = {
        name: value for name, value in block.items() if value is not None and name != "block_type"
    }
    if kind == "image" and set(filled) <= {"image", "image_mimetype"}:
        return {
            "type": "image",
            "base64": filled.get("image"),
            "mime_type": filled.get("image_mimetype"),
        }
    return {"type": f"unread {kind}" if kind == "image" else kind, **filled}


def _as_chat(answer: CompletionResponse) -> ChatResponse:
    message = ChatMessage(role="assistant", content=answer.text)
    return ChatResponse(
        message=message,
        raw=answer.raw,
        logprobs=answer.logprobs,
    )


def _is_whole(answer: ChatResponse) -> bool:
    return ends_whole(answer.raw) and bool((answer.message.content or "").strip())
