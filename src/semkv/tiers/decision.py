"""Whether an approximate match may be used: the last word before a donor is substituted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from semkv.config import CacheConfig
from semkv.types import Entry, Match, Request


@dataclass(frozen=True, slots=True)
class Decision:
    """Yes or no, and why, in a few words for the log."""

    accept: bool
    reason: str = ""


class Decider(Protocol):
    """Judges approximate matches; exact and normalised ones are not asked about. Called from any thread."""

    def accept(self, request: Request, donor: Entry, match: Match) -> Decision: ...


class FixedThreshold:
    """Accepts a match whose score reaches the threshold of its tier.

    Args:
        thresholds: least cosine by status key (``semantic_text``, ``embedding:<layer>``); a tier that is not named
            has none.
    """

    def __init__(self, thresholds: Mapping[str, float]) -> None:
        self._thresholds = dict(thresholds)

    @classmethod
    def of(cls, config: CacheConfig) -> FixedThreshold:
        layers = {f"embedding:{layer.name}": layer.threshold for layer in config.embedding_layers}
        return cls({"semantic_text": config.similarity_threshold, **layers})

    def accept(self, request: Request, donor: Entry, match: Match) -> Decision:
        least = self._thresholds.get(match.tier, 0.0)
        return Decision(match.score >= least, f"{match.score:.3f} against {least:.3f}")
