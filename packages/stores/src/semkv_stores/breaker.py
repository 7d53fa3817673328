"""Leaves a service alone that fails several times in a row."""

from __future__ import annotations

import time

_IN_A_ROW = 3  # failures, after which a service is left alone
_PAUSE_S = 15.0  # at first; twice as long each time it fails again
_LONGEST_PAUSE_S = 600.0


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
