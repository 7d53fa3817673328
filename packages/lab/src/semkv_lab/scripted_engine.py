"""A deterministic engine without a model, for tests, demos and dry configuration checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from semkv import keys
from semkv.engines import EnginePrompt, EngineResult, media_bytes
from semkv.types import MediaSegment, Segment, Status, TextSegment
from semkv_stores.digests import digest

IMAGE_TOKENS = 16

Answer = Callable[[tuple[Segment, ...]], str]


@dataclass
class ScriptedEngine:
    """Words are its tokens. It answers from ``answers`` (by question text), else by ``answer``, else with a digest of
    the prompt: equal prompts get equal answers and unequal ones unequal, so a wrong substitution shows.

    Attributes:
        answers: question text to answer.
        answer: called with the canonical segments when ``answers`` has none.
        block_size: tokens per block of the simulated prefix cache.
        check_media: read every image and check its bytes, as a real engine does.
        store: block keys that "our KV store" holds; pass the same set to two engines to simulate a restart. None
            for an engine without connectors.
        name: part of the fingerprint.
        accepts_images: False to stand for a text model.
        prompts: every prompt it was given, in order.
    """

    answers: Mapping[str, str] = field(default_factory=dict)
    answer: Answer | None = None
    block_size: int = 4
    check_media: bool = False
    store: set[str] | None = None
    name: str = "scripted"
    accepts_images: bool = True
    prompts: list[EnginePrompt] = field(default_factory=list)
    closed: bool = False
    _prefix: set[str] = field(default_factory=set)

    def generate(self, prompt: EnginePrompt) -> EngineResult:
        start = time.perf_counter()
        self.prompts.append(prompt)
        media = [segment for segment in prompt.segments if isinstance(segment, MediaSegment)]
        for item in media if self.check_media else ():
            media_bytes(item)
        tokens = _tokens(prompt)
        blocks = self._blocks(prompt, tokens)
        local = _leading(blocks, self._prefix)
        stored = _leading(blocks, self.store or ())
        loaded = max(0, stored - local) * self.block_size
        cached = local * self.block_size + loaded
        self._prefix.update(blocks)
        if self.store is not None:
            self.store.update(blocks)
        text = self._text(prompt)
        elapsed = time.perf_counter() - start
        return EngineResult(
            text=text,
            token_ids=tuple(int(digest(word)[:6], 16) for word in text.split()),
            prompt_tokens=len(tokens),
            cached_tokens=cached,
            loaded_tokens=None if self.store is None else loaded,
            kv=Status.SKIP
            if self.store is None or local == len(blocks)
            else Status.HIT
            if loaded
            else Status.MISS,
            fusion=Status.MISS if media and self.store is not None and not cached else Status.SKIP,
            ttft_s=elapsed,
            latency_s=elapsed,
            finish_reason="stop",
        )

    def fingerprint(self) -> str:
        return keys.model_fingerprint({"engine": "scripted", "name": self.name})

    def close(self) -> None:
        self.closed = True

    def _text(self, prompt: EnginePrompt) -> str:
        questions = [s.text for s in prompt.segments if isinstance(s, TextSegment)]
        if questions and questions[-1] in self.answers:
            return self.answers[questions[-1]]
        if self.answer is not None:
            return self.answer(prompt.segments)
        return keys.chain_keys(prompt.segments, normalised=False)[-1][:8] if prompt.segments else ""

    def _blocks(self, prompt: EnginePrompt, tokens: list[str]) -> list[str]:
        """Chained keys of the full blocks, the last token left to compute."""
        parent, found = prompt.cache_salt or "", []
        for start in range(
            0, (len(tokens) - 1) // self.block_size * self.block_size, self.block_size
        ):
            parent = digest(parent, *tokens[start : start + self.block_size])
            found.append(parent)
        return found


def _tokens(prompt: EnginePrompt) -> list[str]:
    tokens: list[str] = []
    for segment in prompt.segments:
        if isinstance(segment, MediaSegment):
            tokens += [prompt.uuid(segment)] * IMAGE_TOKENS
        else:
            tokens += segment.text.split()
    return tokens


def _leading(blocks: list[str], known: Collection[str]) -> int:
    return len(list(takewhile(known.__contains__, blocks)))
