"""Whether loading blocks is faster than computing them, from what was measured in this engine."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

_LEAST = 4  # measurements before a rate counts
_WEIGHT = 0.2  # of the newest measurement
_RETRY = 32  # refusals after which one load is done all the same, to measure again
_UNREPORTED = 64  # measurements of one rate that wait to be reported; the newest count

Measured = dict[str, list[tuple[int, float]]]
"""By a rate's name (``host``, ``disk``, ``prefill``): amounts, and the seconds that they took."""


class Rate:
    """Moving averages of ``amount`` per second, one per power of two: small amounts pay more for the way there."""

    def __init__(self) -> None:
        self._measured: dict[int, tuple[float, int]] = {}  # per second, and from how many measurements
        self._new: deque[tuple[int, float]] = deque(maxlen=_UNREPORTED)

    def take(self) -> list[tuple[int, float]]:
        """What was measured since the last call."""
        return [self._new.popleft() for _ in range(len(self._new))]

    def measured(self, amount: int, seconds: float) -> None:
        if seconds > 0 and amount > 0:
            self._new.append((amount, seconds))
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
        prefill: tokens a second that the engine computes, or each of its ``stages``.
    """

    def __init__(self, stages: int = 1) -> None:
        """``stages``: of the pipeline; a prompt is computed by one after the other and loaded by all at once."""
        self.host, self.disk, self.prefill = Rate(), Rate(), Rate()
        self._refused, self._stages = 0, stages

    def take(self) -> Measured:
        """What was measured since the last call, for `learn` elsewhere; empty where that is nothing."""
        rates = {"host": self.host, "disk": self.disk, "prefill": self.prefill}
        return {name: new for name, rate in rates.items() if (new := rate.take())}

    def learn(self, measured: Measured) -> None:
        """Take over what workers in other processes measured."""
        for name, rate in (("host", self.host), ("disk", self.disk), ("prefill", self.prefill)):
            for amount, seconds in measured.get(name, ()):
                rate.measured(amount, seconds)
            rate.take()

    def worth(self, tokens: int, nbytes: int, from_disk: int) -> bool:
        """Whether to load ``tokens`` tokens of ``nbytes`` bytes, ``from_disk`` of which are on the disk only.

        Yes while a rate that matters is not known, and once in a while all the same, so that rates are kept up to date.
        """
        compute, copy = self.prefill.seconds(tokens), self.host.seconds(nbytes)
        read = self.disk.seconds(from_disk) if from_disk else 0.0
        if compute is None or copy is None or read is None or copy + read <= compute * self._stages:
            return True
        self._refused += 1
        if self._refused < _RETRY:
            return False
        self._refused = 0
        return True


class RanksGate:
    """The same for several ranks, whose host memories the scheduler cannot see.

    Rates are the mean of what the ranks report. All of them load and capture the same blocks in the same order, so what
    is in their host memories is what they were told last, as far as the memory reaches. A wrong guess costs time only.

    Attributes:
        rates: what the ranks measured.
    """

    def __init__(self, host_bytes: int, stages: int = 1) -> None:
        """``host_bytes``: bound of each rank's host memory; ``stages``: of the pipeline."""
        self.rates = BreakEven(stages)
        self._host_bytes = host_bytes
        self._told: OrderedDict[bytes, None] = OrderedDict()

    def told(self, hashes: Iterable[bytes], row_bytes: int) -> None:
        """These blocks, of ``row_bytes`` bytes in one rank, come to be in host memory, or are used there."""
        for h in hashes:
            self._told[h] = None
            self._told.move_to_end(h)
        while len(self._told) > self._host_bytes // row_bytes:
            self._told.popitem(last=False)

    def forget(self) -> None:
        """Nothing is known of what is in host memory any more."""
        self._told.clear()

    def worth(self, hashes: Sequence[bytes], block_size: int, row_bytes: int) -> int:
        """How many leading ones of stored blocks to load: all, those in host memory, or none.

        Args:
            hashes: of the blocks.
            block_size: tokens of a block.
            row_bytes: bytes of a block in one rank.
        """
        here = next((i for i, h in enumerate(hashes) if h not in self._told), len(hashes))
        for count in (len(hashes), here):
            if not count or self.rates.worth(count * block_size, count * row_bytes, (count - here) * row_bytes):
                return count
        return 0
