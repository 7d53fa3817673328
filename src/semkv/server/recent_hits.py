"""The latest hits, for operators' eyes, and what hits have saved."""

from __future__ import annotations

import json
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from semkv.server.metrics import Metrics
from semkv.tiers.response import Found
from semkv.types import MediaSegment, Request, ReuseReport, Segment

_SHOWN = 200
_KNOWN = 4_096
_TEXT = 4_000  # characters of one text that are shown
_TEXTS = 8_000  # of all texts of a prompt, each counted with the fields around it
_FIELDS = 100
_PAYLOAD = 64 * 1024  # bytes of an answer that is shown


@dataclass(frozen=True, slots=True)
class HitView:
    """One hit, in no more memory than is shown of it.

    Attributes:
        number: names it in the admin routes; cannot be guessed.
        at: when, in seconds since the epoch.
        tier: ``exact``, or the provenance of the donor.
        score: of the match; None for an exact hit.
        seconds: from the whole request to the answer.
        age_s: of the answer.
        tenant: the start of its digest.
        key: what the answer is stored under.
        model: as the client named it.
        prompt: the last user turn that the answer was computed from.
        payload: the answer; empty where it is large.
        asked: the newest segments of the request that came; None for an exact hit.
        donor: the same of what the answer was computed from; None for an exact hit.
        hit_id: the semantic cache's name for the hit.
    """

    number: str
    at: float
    tier: str
    score: float | None
    seconds: float
    age_s: float
    tenant: str
    key: str
    model: str
    prompt: str
    payload: bytes
    asked: list[dict[str, str]] | None
    donor: list[dict[str, str]] | None
    hit_id: str

    def view(self) -> dict[str, Any]:
        """As JSON."""
        own = [{"role": "question", "text": self.prompt}]
        out = {
            name: getattr(self, name) for name in ("at", "tier", "score", "seconds", "age_s", "tenant", "model", "key")
        }
        return {
            **out,
            "id": self.number,
            "asked": self.asked or own,
            "donor": self.donor or own,
            "answer": answer_of(self.payload),
        }


class RecentHits:
    """Keeps the latest hits; approximate ones are not pushed out by exact ones. Used only on the event loop."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._hits: dict[bool, deque[HitView]] = {kind: deque(maxlen=_SHOWN) for kind in (True, False)}
        self._seconds: OrderedDict[str, float] = OrderedDict()
        self._tokens: OrderedDict[str, int] = OrderedDict()
        self._mean_s = 0.0

    def computed(self, key: str, seconds: float) -> None:
        """The upstream has answered in so many seconds."""
        self._mean_s = seconds if not self._mean_s else 0.95 * self._mean_s + 0.05 * seconds
        _put(self._seconds, key, seconds)

    def hit(
        self,
        *,
        tier: str,
        score: float | None,
        seconds: float,
        tenant: str,
        found: Found,
        asked: Request | None,
        report: ReuseReport | None,
    ) -> None:
        """Note a hit and what it saved: the seconds its answer took, or where that is not known the mean of misses."""
        response = found.response
        exact = report is None or tier == "exact"
        small = len(response.payload) <= _PAYLOAD
        shown = HitView(
            number=secrets.token_hex(8),
            at=time.time(),
            tier=tier,
            score=score,
            seconds=seconds,
            age_s=found.age_s,
            tenant=tenant[:8],
            key=response.key,
            model=response.model,
            prompt=response.prompt[:_TEXT],
            payload=response.payload if small else b"",
            asked=None if exact or asked is None else _parts(asked.segments),
            donor=None if exact or report is None else _parts(report.plan.segments),
            hit_id=report.hit_id if report is not None else "",
        )
        self._hits[exact].append(shown)
        tokens = self._tokens.get(response.key)
        if tokens is None:
            tokens = tokens_of(response.payload)
            _put(self._tokens, response.key, tokens)
        self._metrics.tokens.inc(tokens)
        self._metrics.saved.inc(max(0.0, self._seconds.get(response.key, self._mean_s) - seconds))

    def recent(self, most: int) -> list[HitView]:
        """The latest hits, newest first."""
        every = [shown for hits in self._hits.values() for shown in hits]
        return sorted(every, key=lambda shown: -shown.at)[:most]

    def find(self, number: str) -> HitView | None:
        """A hit by its id, if it is still known."""
        return next((shown for shown in self.recent(2 * _SHOWN) if shown.number == number), None)


def _put(values: OrderedDict[str, Any], key: str, value: Any) -> None:
    values[key] = value
    if len(values) > _KNOWN:
        values.popitem(last=False)


def tokens_of(payload: bytes) -> int:
    """Completion tokens of an answer; 0 where it does not say."""
    try:
        tokens = json.loads(payload)["usage"]["completion_tokens"]
    except (ValueError, LookupError, TypeError):
        return 0
    return tokens if isinstance(tokens, int) and tokens > 0 else 0


def _parts(segments: Sequence[Segment]) -> list[dict[str, str]]:
    """The segments as they are shown: a long conversation from its end, as far as there is room."""
    parts: list[dict[str, str]] = []
    room = _TEXTS
    for place in reversed(range(len(segments))):
        part = _part(segments[place])
        room -= len(part["text"]) + _FIELDS
        if room < 0:
            parts.append({"role": "earlier", "text": f"({place + 1} more)"})
            break
        parts.append(part)
    return parts[::-1]


def _part(segment: Segment) -> dict[str, str]:
    if isinstance(segment, MediaSegment):
        return {"role": "image", "text": segment.media_id}
    return {"role": str(segment.role), "text": segment.text[:_TEXT]}


def answer_of(payload: bytes) -> str:
    """The choices of an answer for display."""
    try:
        choices = json.loads(payload)["choices"]
        texts = [choice.get("text") or _message(choice.get("message") or {}) for choice in choices]
    except (ValueError, LookupError, TypeError, AttributeError):
        return ""
    return "\n---\n".join(texts)[:_TEXT]


def _message(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls")
    return str(message.get("content") or "") + ("" if not calls else json.dumps(calls, indent=1))
