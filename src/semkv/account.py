"""What each tier costs and saves, and which tiers are asked.

A lookup costs the seconds that it takes, whether it finds something or not. A hit saves what its request would have
taken without it: the median of the latest misses of its size. A tier that has cost more than it saved is asked for a
small sample of requests until it pays again: `Gate` says when. With ``auto`` off every tier is asked, and the account
says what would have been left out.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import replace
from statistics import median

from semkv_stores.ledger import TierFigures

logger = logging.getLogger("semkv")

EMBEDDING = "embedding"
"""The name of the tier that all layers of embeddings make."""
JUDGE = "judge"
"""The tier of hits that a judge's yes made."""

SAMPLE = 32  # one in so many requests asks a tier that does not pay
# A tier is left out once it has lost what so many hits would save, and so many seconds in sum.
_ALLOWED_HITS = 3
_ALLOWED_S = 1.0
# No fewer lookups than these lose all of that: one that was cold, or waited for a processor, says nothing of the next.
_LEAST_LOOKUPS = 8
_LATEST = 32  # misses of one size of which the median counts


class Typical:
    """How long requests take that find nothing, by their size. Any thread may call any method.

    Sizes are alike where each of their amounts, such as tokens and images, lies between the same powers of two. Of a
    size that was not seen yet, the nearest one tells.
    """

    def __init__(self) -> None:
        self._latest: dict[tuple[int, ...], deque[float]] = {}
        self._lock = threading.Lock()

    def measured(self, seconds: float, *amounts: int) -> None:
        """A request of this size took so long."""
        size = _rounded(amounts)
        with self._lock:
            if size not in self._latest:
                self._latest[size] = deque(maxlen=_LATEST)
            self._latest[size].append(seconds)

    def seconds(self, *amounts: int) -> float | None:
        """How long a request of this size takes; None where nothing was measured."""
        size = _rounded(amounts)
        with self._lock:
            if not self._latest:
                return None
            if size not in self._latest:
                size = min(self._latest, key=lambda other: _distance(size, other))
            return median(self._latest[size])


def _rounded(amounts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(0, amount).bit_length() for amount in amounts)


def _distance(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True))


class Gate:
    """Whether a tier pays: what its hits saved less what its lookups cost, bounded at both ends by the allowance.

    At the lower end the tier is left out. It is asked again once what it saves has brought it back to zero. So one
    hit more or less changes nothing, good times of long ago do not count, and nothing is assumed of how dear lookups
    or how frequent hits are. No single measurement decides: a lookup counts for an eighth of the allowance at most.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._balance = 0.0
        self._passed = 0

    def move(self, seconds: float, allowance: float) -> bool:
        """Count what was saved, or less than zero for what was spent; whether the gate opened or closed."""
        self._balance = min(max(self._balance + seconds, -allowance), allowance)
        before = self.is_open
        if self._balance <= -allowance:
            self.is_open = False
        elif self._balance >= 0.0:
            self.is_open = True
        return self.is_open != before

    def draw(self) -> bool:
        """Whether the next request asks the tier."""
        if self.is_open:
            return True
        self._passed = (self._passed + 1) % SAMPLE
        return self._passed == 0


class Account:
    """The figures of all tiers by their names. Any thread may call any method.

    Args:
        auto: leave out tiers that do not pay.
    """

    def __init__(self, *, auto: bool = False) -> None:
        self.auto = auto
        self._figures: dict[str, TierFigures] = {}
        self._taken: dict[str, TierFigures] = {}
        self._gates: dict[str, Gate] = {}
        self._misses: deque[float] = deque(maxlen=_LATEST)
        self._allowance = 0.0  # by these; 0 where there was none
        self._lock = threading.Lock()

    def pays(self, tier: str) -> bool:
        """Whether ``auto`` asks a tier for the next request. Call it once for each request."""
        with self._lock:
            if self._gates.setdefault(tier, Gate()).draw():
                return True
            self._of(tier).left_out += 1
            return False

    def spent(self, tier: str, seconds: float, *, counts: bool = True) -> None:
        """A lookup took so long. ``counts``: ``auto`` asks for it, too."""
        with self._lock:
            figures = self._of(tier)
            figures.asked += 1
            figures.spent_s += seconds
            if counts:
                self._move(tier, -min(seconds, self._allowance / _LEAST_LOOKUPS))

    def saved(
        self,
        tier: str,
        seconds: float,
        *,
        hits: int = 1,
        counts: bool = True,
    ) -> None:
        """A hit of a tier, or several in sum, saved so many seconds."""
        with self._lock:
            figures = self._of(tier)
            figures.hits += hits
            figures.saved_s += seconds
            if counts:
                self._move(tier, seconds)
            else:
                figures.lost_hits += hits

    def missed(self, seconds: float) -> None:
        """A request that found nothing took so long."""
        with self._lock:
            self._misses.append(seconds)
            self._allowance = max(_ALLOWED_S, _ALLOWED_HITS * median(self._misses))

    def _of(self, tier: str) -> TierFigures:
        return self._figures.setdefault(tier, TierFigures())

    def _move(self, tier: str, seconds: float) -> None:
        gate = self._gates.get(tier)  # without one a tier is asked always
        if gate is None or not self._allowance:
            return
        changed = gate.move(seconds, self._allowance)
        if changed and self.auto:
            self._say(tier, gate)

    def _say(self, tier: str, gate: Gate) -> None:
        figures = self._of(tier)
        often = "every request" if gate.is_open else f"one request in {SAMPLE}"
        why = "pays again" if gate.is_open else "costs more than it saves"
        logger.warning(
            "the tier %s %s: from now on %s asks it. Since the start its lookups took %.3f s and its hits saved %.3f s",
            tier,
            why,
            often,
            figures.spent_s,
            figures.saved_s,
        )

    def figures(self) -> dict[str, TierFigures]:
        """Since the start, by tier."""
        with self._lock:
            return {tier: replace(figures) for tier, figures in self._figures.items()}

    def take(self) -> dict[str, TierFigures]:
        """What is new since this was called last, by tier; tiers without anything new are left out."""
        with self._lock:
            found = {}
            for tier, figures in self._figures.items():
                before = self._taken.get(tier, TierFigures())
                if figures != before:
                    found[tier] = figures.less(before)
                    self._taken[tier] = replace(figures)
            return found

    def asked_share(self) -> dict[str, float]:
        """The share of requests for which each tier is asked now."""
        with self._lock:
            return {
                tier: 1.0 if gate.is_open or not self.auto else 1.0 / SAMPLE
                for tier, gate in self._gates.items()
            }


def name_of(status: str) -> str:
    """The name in the account of the tier with this status key."""
    return EMBEDDING if status.startswith(f"{EMBEDDING}:") else status
