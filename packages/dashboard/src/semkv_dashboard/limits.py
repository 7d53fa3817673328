"""Rate limits by name or address."""

from __future__ import annotations

import time
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address

from semkv.latest import Latest

_NAMES = 10_000
_NETWORK = 64  # bits of an IPv6 address that one site has


class Buckets:
    """Lets each name do something ``burst`` times at once, and once more every ``seconds``.

    The latest 10,000 names are known. Used on the event loop only.
    """

    def __init__(
        self, burst: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst = burst
        self._seconds = seconds
        self._clock = clock
        self._free: Latest[str, float] = Latest(_NAMES)  # when the bucket is full again

    def wait(self, name: str) -> float:
        """Seconds until a name may do it; 0 where it may now."""
        behind = self._free.get(name, 0.0) - self._clock()
        return max(0.0, behind - (self._burst - 1) * self._seconds)

    def take(self, name: str) -> None:
        """A name has done it."""
        self._free[name] = max(self._free.get(name, 0.0), self._clock()) + self._seconds


def site_of(address: str) -> str:
    """An address as it is counted: the network of one that is IPv6, since a site has many."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if isinstance(found, IPv6Address) and found.ipv4_mapped is None:
        return str(IPv6Address(int(found) >> _NETWORK << _NETWORK))
    return str(found)
