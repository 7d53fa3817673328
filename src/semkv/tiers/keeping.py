"""What answers may be kept, and for how long: decided here alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

from semkv.stores.responses.base import StoredResponse
from semkv.tiers.base import Tally
from semkv.tiers.freshness import Freshness, Lifetime, Subject

_COMPLETE = frozenset(("stop", "tool_calls"))


class Answerable(Protocol):
    """What an answer is kept by; `server.request_key.CanonicalRequest` is one."""

    @property
    def key(self) -> str: ...
    @property
    def partition(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def sampled(self) -> bool: ...


def refusal(payload: bytes, status: int = 200) -> str:
    """Why an answer must not be kept, in a word or two; empty for a complete one.

    Complete: status 200, no error, and every choice ended by itself (``stop``) or with a tool call.
    """
    if status != 200:
        return "status"
    try:
        answer = json.loads(payload)
    except (ValueError, RecursionError):
        return "no JSON"
    if not isinstance(answer, dict) or answer.get("error") is not None:
        return "error"
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices:
        return "no choices"
    return "" if all(_finished(choice) for choice in choices) else "unfinished"


def _finished(choice: Any) -> bool:
    reason = choice.get("finish_reason") if isinstance(choice, dict) else None
    return isinstance(reason, str) and reason in _COMPLETE


class Keeping:
    """Makes what is kept of an answer.

    Args:
        freshness: how long answers live.
        sampled: keep answers that were drawn at random too.
        clock: seconds since the epoch.
        tally: where a rule that fails is counted.
    """

    def __init__(self, freshness: Freshness, *, sampled: bool, clock: Callable[[], float], tally: Tally) -> None:
        self._freshness, self._sampled, self._clock, self._tally = freshness, sampled, clock, tally

    def stored(self, request: Answerable, payload: bytes, status: int, tags: tuple[str, ...]) -> StoredResponse | str:
        """What to keep, or why nothing."""
        reason = "sampled" if request.sampled and not self._sampled else refusal(payload, status)
        if reason:
            return reason
        lifetime = self._lifetime(request, tags)
        if lifetime is None or not lifetime.ttl_s:
            return "no lifetime"
        now, ttl = self._clock(), lifetime.draw()
        return StoredResponse(
            key=request.key,
            partition=request.partition,
            model=request.model,
            payload=payload,
            created=now,
            expires=now + ttl,
            stale_until=now + ttl + lifetime.stale_s,
            slide_s=ttl if lifetime.sliding and ttl != float("inf") else 0.0,
            tags=tags,
            prompt=request.prompt,
        )

    def keeps(self, request: Answerable, tags: tuple[str, ...]) -> bool:
        """Whether a complete answer to a request would be kept."""
        lifetime = self._lifetime(request, tags) if self._sampled or not request.sampled else None
        return lifetime is not None and bool(lifetime.ttl_s)

    def _lifetime(self, request: Answerable, tags: tuple[str, ...]) -> Lifetime | None:
        try:
            return self._freshness.lifetime(Subject(request.prompt, request.model, tags))
        except Exception as error:  # a rule may be the user's own
            self._tally.fault("freshness rule", error)
            return None
