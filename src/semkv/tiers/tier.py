"""What a tier proposes, and what a user's own tier must implement.

A tier or index of the user's own never decides alone. A donor must agree with the request on everything but the
question, in its tenant and model; guards and policy have the last word. A fault in either is a counted miss.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from semkv.types import Entry, Request, Score

EXACT, SEMANTIC = "exact_text", "semantic_text"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A donor that a tier proposes. The texts of the run are the same but for typing, except the ``similar`` one."""

    donor: Entry
    run: int  # how many of its leading segments stand in for as many of the request's
    tier: str  # status key of what decided
    score: float  # cosine of what decided; 1.0 for an exact or normalised match
    agreed: tuple[str, ...]  # status keys that say ``hit`` when this candidate is taken
    others: tuple[Score, ...] = ()  # see `Match.others`
    similar: int | None = None  # position of the text that was found similar


class Tier(Protocol):
    """A way of matching, asked after the built-in tiers. Any thread may call any method.

    An entry that shares a key with a request, and all of the prompt but the question, is a candidate. Keys lie in the
    catalog, by tenant and model, so the tier itself keeps nothing.

    Attributes:
        name: its status key, such as ``stems``.
    """

    @property
    def name(self) -> str: ...

    def keys(self, request: Request) -> Collection[str]:
        """The keys of a prompt; none where the tier has no say. An entry keeps those it was recorded with."""
        ...

    def score(self, request: Request, donor: Entry) -> float:
        """How alike they are, above 0 and at most 1; 0 for no candidate."""
        ...


def status_of(layer: str) -> str:
    """The key of a layer's status."""
    return SEMANTIC if layer == SEMANTIC else f"embedding:{layer}"
