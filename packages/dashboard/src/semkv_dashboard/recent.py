"""The latest hits and misses, with their prompts: in memory, for operators."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from semkv.types import MediaSegment, ReuseReport, Segment
from semkv_guards import veto

_SHOWN = 100  # latest hits, as many approximate ones, and as many near misses
_MISSES = 300
_TEXT = 4_000  # characters of one text that are shown
_TEXTS = 8_000  # of all texts of a prompt, each counted with the fields around it
_SHORT = 500  # of the question of a miss
_FIELDS = 100
_PAYLOAD = 64 * 1024  # bytes of an answer that is shown

Parts = list[dict[str, str]]


@dataclass(slots=True, eq=False)
class Hit:
    """One hit.

    Attributes:
        number: the id that the client has of it.
        request_id: of its request.
        hit_id: by which the semantic cache knows it; empty for an exact one.
        at: seconds since the epoch.
        tier, score: what found it.
        seconds: until the answer began.
        age_s: of the answer.
        tenant: first digits of its digest.
        key, model, prompt, payload: of the answer.
        asked, donor: the two prompts of an approximate hit.
    """

    number: str
    request_id: str
    tier: str
    score: float | None
    seconds: float
    age_s: float
    tenant: str
    key: str
    model: str
    prompt: str
    payload: bytes
    hit_id: str = ""
    at: float = field(default_factory=time.time)
    asked: Parts | None = None
    donor: Parts | None = None


class Recent:
    """Keeps the latest hits and misses; approximate hits are not pushed out by exact ones, nor near misses by others.
    Used only on the event loop, but for `view`.

    Args:
        text_of: reads the text of an answer; empty where it has another form.
    """

    def __init__(self, text_of: Callable[[bytes], str]) -> None:
        self._text_of = text_of
        self._hits: dict[bool, deque[Hit]] = {kind: deque(maxlen=_SHOWN) for kind in (True, False)}
        self._misses: deque[dict[str, Any]] = deque(maxlen=_MISSES)
        self._near: deque[dict[str, Any]] = deque(maxlen=_SHOWN)

    def shown(self, payload: bytes) -> str:
        """The text of an answer, or what was kept where it has another form."""
        answer = self._text_of(payload) or payload.decode(errors="replace")
        return answer[:_TEXT]

    def hit(self, hit: Hit, report: ReuseReport | None, asked: Sequence[Segment]) -> None:
        """Note a hit, in no more memory than is shown of it. ``report`` is of the lookup that found a donor, ``asked``
        what the client sent then."""
        if len(hit.payload) > _PAYLOAD:
            hit.payload = b""
        if len(hit.prompt) > _TEXT:
            hit.prompt = hit.prompt[:_TEXT]
        if report is not None:
            hit.hit_id = report.hit_id
            hit.asked = parts(asked)
            hit.donor = parts(report.plan.segments)
        self._hits[report is None].append(hit)

    def missed(self, near: Near | None = None, **row: Any) -> None:
        """Note a request that was no hit, now that it is over."""
        row |= {
            "at": time.time(),
            "prompt": row.get("prompt", "")[:_SHORT],
        }
        if near is None:
            self._misses.append(row)
            return
        row["near"] = near
        self._near.append(row)

    def view(self) -> dict[str, list[dict[str, Any]]]:
        """All of them, as JSON. Any thread may call it."""
        hits = [self._view(hit) for kind in (True, False) for hit in self._hits[kind].copy()]
        near = list(self._near.copy())
        for row in near:
            _ask_guard(row["near"])
        return {
            "hits": hits,
            "near": near,
            "misses": list(self._misses.copy()),
        }

    def _view(self, hit: Hit) -> dict[str, Any]:
        own = [
            {
                "role": "question",
                "text": hit.prompt,
            }
        ]
        shown = ("request_id", "at", "tier", "score", "seconds", "age_s", "tenant", "key", "model")
        return {
            "id": hit.number,
            "answer": self.shown(hit.payload),
            **{name: getattr(hit, name) for name in shown},
            "asked": hit.asked or own,
            "donor": hit.donor or own,
        }

    def find(self, number: str) -> Hit | None:
        """A hit by its id, if it is still known: the latest one that has it."""
        hits = [hit for kind in (True, False) for hit in self._hits[kind] if hit.number == number]
        return max(
            hits,
            key=lambda hit: hit.at,
            default=None,
        )


Near = dict[str, Any]
"""What was nearly a hit, as JSON."""


def _ask_guard(near: Near) -> None:
    """Say whether a guard would have turned down what lay below the threshold: it was not asked."""
    if "guard" not in near:
        near["guard"] = veto(near["asked"], near["donor"]) or ""


def near_of(report: ReuseReport | None) -> Near | None:
    """What a lookup found that may not be used."""
    if report is None or report.near is None:
        return None
    match, donor = report.near[:2]
    return {
        "tier": match.tier,
        "score": match.score,
        "reason": report.near[2],
        "donor_id": donor.entry_id,
        "asked": report.request.chunk_text[:_TEXT],
        "donor": donor.chunk_text[:_TEXT],
    }


def parts(segments: Sequence[Segment]) -> Parts:
    """The segments as they are shown: a long conversation from its end, as far as there is room."""
    shown: Parts = []
    room = _TEXTS
    for segment in reversed(segments):
        if isinstance(segment, MediaSegment):
            part = {
                "role": "image",
                "text": segment.media_id,
            }
        else:
            part = {
                "role": str(segment.role),
                "text": segment.text[:_TEXT],
            }
        room -= len(part["text"]) + _FIELDS
        if room < 0:
            shown.append(
                {
                    "role": "earlier",
                    "text": f"({len(segments) - len(shown)} more)",
                }
            )
            break
        shown.append(part)
    return shown[::-1]
