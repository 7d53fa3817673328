"""What a policy is, and the plain one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from semkv.config import CacheConfig
from semkv.keys import digest
from semkv.types import Entry, Match, Request

_TEXTS = 65_536


@dataclass(frozen=True, slots=True)
class Decision:
    """Yes or no, and what it rests on.

    Attributes:
        accept: whether the donor may be used.
        reason: why, in a few words for the log.
        risk: the chance of a wrong answer, where the policy knows one.
        check: the least chance with which this hit should be checked.
    """

    accept: bool
    reason: str = ""
    risk: float | None = None
    check: float = 0.0


class Decider(Protocol):
    """Judges approximate matches; exact and normalised ones are not asked about. Called from any thread.

    Attributes:
        weighs_vetoes: whether matches that a guard objects to (``match.veto``) are asked about; otherwise a veto is
            final.
        learns: whether `observe` has any effect, so that comparisons are worth making.
        floor: least score worth asking about; None leaves it to the tiers' thresholds.
    """

    @property
    def weighs_vetoes(self) -> bool: ...

    @property
    def learns(self) -> bool: ...

    @property
    def floor(self) -> float | None: ...

    def arrived(self) -> None:
        """A request came in."""
        ...

    def accept(self, request: Request, donor: Entry, match: Match) -> Decision:
        """Whether the donor may be used: a match is no better than the worst of `Match.scores`."""
        ...

    def observe(self, match: Match, *, correct: bool, served: bool) -> None:
        """The outcome of a comparison: of a hit that was served, or of a match that was refused and ran cold."""
        ...

    def state(self) -> Mapping[str, Any] | None:
        """What to keep across restarts, as JSON values; None where there is nothing to keep."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a kept state. Raises `ValueError` for one that is damaged."""
        ...


class ServedTexts:
    """The texts that an approximate hit has answered: one that comes again is worth a check, since after it the text
    has an answer of its own. Bounded; not safe for threads by itself."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, None] = OrderedDict()

    def again(self, request: Request) -> bool:
        """Whether a text was served before; remembers that it is now."""
        media = (segment.media_id for segment in request.media)
        text = digest("text", request.namespace.tenant, request.namespace.model, request.chunk_text, *media)
        again = text in self._texts
        self._texts[text] = None
        self._texts.move_to_end(text)
        if len(self._texts) > _TEXTS:
            self._texts.popitem(last=False)
        return again


class Stateless:
    """The part of a `Decider` that learns nothing."""

    weighs_vetoes = False
    learns = False
    floor: float | None = None

    def arrived(self) -> None:
        pass

    def observe(self, match: Match, *, correct: bool, served: bool) -> None:
        pass

    def state(self) -> None:
        return None

    def restore(self, state: Mapping[str, Any]) -> None:
        pass


class FixedThreshold(Stateless):
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
        least = [(score.cosine, self._thresholds.get(score.tier, 0.0)) for score in match.scores]
        reason = ", ".join(f"{cosine:.3f} against {threshold:.3f}" for cosine, threshold in least)
        return Decision(all(cosine >= threshold for cosine, threshold in least), reason)
