"""Whether loading blocks is faster than computing them, from what was measured in this engine."""

from __future__ import annotations

_LEAST = 4  # measurements before a rate counts
_WEIGHT = 0.2  # of the newest measurement
_RETRY = 32  # refusals after which one load is done all the same, to measure again


class Rate:
    """Moving averages of ``amount`` per second, one per power of two: small amounts pay more for the way there."""

    def __init__(self) -> None:
        self._measured: dict[int, tuple[float, int]] = {}  # per second, and from how many measurements

    def measured(self, amount: int, seconds: float) -> None:
        if seconds > 0 and amount > 0:
            rate, count = self._measured.get(amount.bit_length(), (0.0, 0))
            weight = max(_WEIGHT, 1 / (count + 1))
            self._measured[amount.bit_length()] = rate + weight * (amount / seconds - rate), count + 1

    def seconds(self, amount: int) -> float | None:
        """How long ``amount`` takes; None while too little of that size was measured."""
        rate, count = self._measured.get(amount.bit_length(), (0.0, 0))
        return amount / rate if count >= _LEAST else None


class BreakEven:
    """A load is worth it where the bytes come faster than the tokens are computed.

    Attributes:
        host: bytes a second from host memory into the engine.
        disk: bytes a second from the disk, checked, into host memory.
        prefill: tokens a second that the engine computes.
    """

    def __init__(self) -> None:
        self.host, self.disk, self.prefill = Rate(), Rate(), Rate()
        self._refused = 0

    def worth(self, tokens: int, nbytes: int, from_disk: int) -> bool:
        """Whether to load ``tokens`` tokens of ``nbytes`` bytes, ``from_disk`` of which are on the disk only.

        Yes while a rate that matters is not known, and once in a while all the same, so that rates are kept up to date.
        """
        compute, copy = self.prefill.seconds(tokens), self.host.seconds(nbytes)
        read = self.disk.seconds(from_disk) if from_disk else 0.0
        if compute is None or copy is None or read is None or copy + read <= compute:
            return True
        self._refused += 1
        if self._refused < _RETRY:
            return False
        self._refused = 0
        return True
