"""The time by which responses expire."""

from __future__ import annotations

import time
from collections.abc import Callable


class SteadyClock:
    """Seconds since the epoch that do not go back when the machine's clock does: nothing lives longer for that.

    Args:
        wall: the machine's clock.
        passed: seconds since any moment, which never go back.
    """

    def __init__(self, wall: Callable[[], float] = time.time, passed: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._passed = wall, passed
        self._start = float("-inf")  # the largest difference of the two so far

    def __call__(self) -> float:
        passed = self._passed()
        self._start = max(self._start, self._wall() - passed)
        return self._start + passed

    def at_least(self, seen: float) -> None:
        """A time was written down before; it is at least that late."""
        self._start = max(self._start, seen - self._passed())
