"""What came of a request. The header ``X-Semkv``, the access log, spans and the dashboard are written from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Outcome:
    """What came of one request.

    Attributes:
        kind: ``hit``, ``miss``, ``joined`` or ``pass``; empty where the client hung up before that was known.
        reason: why it was no hit.
        tier: the tier that found an entry.
        score: how similar that entry is; None where it is the same.
        donor: id of that entry.
        age_s: age of a stored answer.
        stale: whether that answer's time to live is over.
        judged: whether a judge said that the donor's answer will do.
        joined: whether the client waited for an answer to another request, which is stored now.
        steadied: whether the request was given the temperature 0.
        reordered: whether its documents were sent in another order than they came in.
        zeroed: whether its usage says that nothing was spent.
        tenant: the beginning of the digest of its tenant.
        tenant_name: what people call that tenant; empty for nothing.
        model: as the client named it; empty where the body was not read.
        payload: reads the whole answer; None until there is one.
        details: what operators are shown of a miss, once it is over.
    """

    kind: str
    reason: str = ""
    tier: str = ""
    score: float | None = None
    donor: str = ""
    age_s: float | None = None
    stale: bool = False
    judged: bool = False
    joined: bool = False
    steadied: bool = False
    reordered: bool = False
    zeroed: bool = False
    tenant: str = ""
    tenant_name: str = ""
    model: str = ""
    payload: Callable[[], bytes | None] = lambda: None
    details: Callable[[], dict[str, Any]] = dict

    @property
    def text(self) -> str:
        """The header's value."""
        words = [self.kind]
        if self.tier:
            words.append(f"{'tier' if self.kind == 'hit' else 'reuse'}={self.tier}")
        if self.score is not None:
            words.append(f"score={self.score:.3f}")
        if self.age_s is not None:
            words.append(f"age={self.age_s:.0f}")
        if self.stale:
            words.append("stale")
        if self.judged:
            words.append("judged")
        if self.joined:
            words.append("joined")
        if self.zeroed:
            words.append("usage=zero")
        if self.reordered:
            words.append("reordered")
        if self.steadied:
            words.append("temperature=0")
        if self.reason:
            words.append(f"reason={self.reason.replace(' ', '_')}")
        return " ".join(words)
