"""Circuit breakers: a service that failed several times in a row, or a part that just failed, gets a pause."""

from __future__ import annotations

import time
from collections.abc import Hashable

_IN_A_ROW = 3  # failures, after which a service is left alone
_PAUSE_S = 15.0  # at first; twice as long each time it fails again
_LONGEST_PAUSE_S = 600.0
_REST = 4  # seconds of a rest to one of the failure
_SHORTEST_REST_S = 0.1
_LONGEST_REST_S = 1.0


class Breaker:
    """Opens after some failures in a row, and lets tries pass again after a pause."""

    def __init__(self) -> None:
        self._failures = 0
        self._pause_s = _PAUSE_S
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the service is to be left alone."""
        return time.monotonic() < self._until

    def failed(self) -> None:
        self._failures += 1
        if self._failures >= _IN_A_ROW:
            self._until = time.monotonic() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def succeeded(self) -> None:
        self._failures = 0
        self._pause_s = _PAUSE_S
        self._until = 0.0


class Rests:
    """Leaves each part of a service alone after a failure, four times as long as the failure took.

    So a part that does not answer costs a fifth of the time at most, and one that refuses at once is asked again soon
    after it is back. Any thread may call any method.
    """

    def __init__(self) -> None:
        self._until: dict[Hashable, float] = {}

    def has(self, part: Hashable) -> bool:
        """Whether a part is to be left alone."""
        return time.monotonic() < self._until.get(part, 0.0)

    def failed(self, part: Hashable, began: float) -> float:
        """Note a failure of what began at a time of the monotonic clock; until when the part rests."""
        until = rest_from(began)
        self._until[part] = until
        return until


def rest_from(began: float) -> float:
    """Until when to leave alone what has failed now, and was begun at a time of the monotonic clock."""
    now = time.monotonic()
    rest_s = _REST * (now - began)
    return now + min(max(rest_s, _SHORTEST_REST_S), _LONGEST_REST_S)
