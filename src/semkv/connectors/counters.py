"""Counts that several threads add to and vLLM fetches once a step."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping


class Counters:
    """Named counts: `totals` since the start, and `take` what came since the last `take`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._taken: Counter[str] = Counter()

    def add(self, name: str, n: int = 1) -> None:
        with self._lock:
            self._totals[name] += n

    def merge(self, totals: Mapping[str, int]) -> None:
        """Take over totals that are counted elsewhere, such as a store's."""
        with self._lock:
            for name, n in totals.items():
                self._totals[name] = n

    def totals(self) -> dict[str, int]:
        with self._lock:
            return dict(self._totals)

    def take(self) -> dict[str, int]:
        with self._lock:
            new = {k: n - self._taken[k] for k, n in self._totals.items() if n != self._taken[k]}
            self._taken = self._totals.copy()
        return new
