"""The optional second stage: two texts read side by side, for what a cosine cannot tell.

A sentence encoder sees the texts one at a time. A cross-encoder, or the served model itself, sees both, and costs
milliseconds to seconds for it; so it is off unless asked for, and its time is counted.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from typing import Any, Protocol

from semkv.errors import ConfigError

JUDGE_PROMPT = (
    "Do these two questions ask for exactly the same thing, so that one answer serves both? Reply yes or no.\n"
    "1: {request}\n2: {donor}\n"
)


class Reranker(Protocol):
    """Has a say on approximate matches that the policy accepted. Called from any thread."""

    def same(self, request: str, donor: str) -> bool:
        """Whether one answer serves both texts. May raise anything: that counts as a refusal."""
        ...


class CrossEncoderReranker:
    """A sentence-transformers cross-encoder with one output: the higher, the closer in meaning.

    Args:
        model: directory or hub id.
        threshold: least output that passes.

    Raises:
        ConfigError: the extra is not installed, there is no such model, or it has several outputs.
    """

    def __init__(self, model: str, threshold: float = 0.5) -> None:
        if importlib.util.find_spec("sentence_transformers") is None:
            raise ConfigError("--reranker", model, "an installed sentence-transformers: pip install 'semkv[encoders]'")
        from sentence_transformers import CrossEncoder

        try:
            self._model: Any = CrossEncoder(model, device="cpu")
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError("--reranker", model, f"a cross-encoder's directory or hub id ({reason})") from error
        if self._model.num_labels != 1:
            raise ConfigError(
                "--reranker", model, f"a cross-encoder with one output; this has {self._model.num_labels}"
            )
        self._threshold = threshold
        self._lock = threading.Lock()

    def same(self, request: str, donor: str) -> bool:
        with self._lock:  # a tokenizer serves one thread at a time
            scores = self._model.predict([(request, donor)], show_progress_bar=False)
        return float(scores[0]) >= self._threshold


class JudgeReranker:
    """Asks a language model, such as the one that is served.

    Args:
        ask: takes a prompt, returns the model's reply.
        prompt: with the fields ``request`` and ``donor``; the reply must begin with yes to pass.
    """

    def __init__(self, ask: Callable[[str], str], prompt: str = JUDGE_PROMPT) -> None:
        self._ask, self._prompt = ask, prompt

    def same(self, request: str, donor: str) -> bool:
        reply = self._ask(self._prompt.format(request=request, donor=donor))
        return reply.strip().lower().startswith("yes")
