"""Whether reading a prompt's blocks from disk is faster than computing them, from what was measured in this engine."""

from __future__ import annotations

import time
from collections import deque

_LEAST = 4  # measurements before a rate counts
_WEIGHT = 0.2  # of the newest measurement
_RETRY = 32  # refusals after which one load is done all the same, to measure again
_BIG_STEP = 256  # tokens from which on a step's time says something of the rate


class Rate:
    """A moving average of ``amount`` per second."""

    def __init__(self) -> None:
        self._rate, self._count = 0.0, 0

    def measured(self, amount: int, seconds: float) -> None:
        if seconds > 0 and amount > 0:
            self._count += 1
            self._rate += max(_WEIGHT, 1 / self._count) * (amount / seconds - self._rate)

    def seconds(self, amount: int) -> float | None:
        """How long ``amount`` takes; None while too little was measured."""
        return amount / self._rate if self._count >= _LEAST else None


class BreakEven:
    """For the scheduler's thread.

    Attributes:
        disk: bytes a second, from the request for them until they are checked in host memory.
        prefill: tokens a second that the engine computes in steps of many tokens.
    """

    def __init__(self) -> None:
        self.disk, self.prefill = Rate(), Rate()
        self._steps: deque[tuple[int, float]] = deque(maxlen=2)  # vLLM has at most two under way
        self._last_end = 0.0
        self._refused = 0

    def step_begins(self, tokens: int) -> None:
        """The scheduler hands out a step of so many tokens."""
        if tokens:
            self._steps.append((tokens, time.perf_counter()))

    def step_ends(self) -> None:
        """The oldest step under way has ended. A step begins no earlier than the one before it ends."""
        now = time.perf_counter()
        if self._steps:
            tokens, begun = self._steps.popleft()
            if tokens >= _BIG_STEP:
                self.prefill.measured(tokens, now - max(begun, self._last_end))
        self._last_end = now

    def worth(self, tokens: int, nbytes: int) -> bool:
        """Whether to read ``nbytes`` from disk rather than to compute ``tokens``: yes while a rate is not known, and
        once in a while all the same."""
        compute, read = self.prefill.seconds(tokens), self.disk.seconds(nbytes)
        if compute is None or read is None or read <= compute:
            return True
        self._refused = (self._refused + 1) % _RETRY
        return self._refused == 0
