"""What stays in host memory: pure functions over rows.

Promoted is what was captured from the engine and what was read from the disk and checked; the disk keeps its copy, so
what goes is forgotten and nothing is written. Rows of KV blocks and of fusion states stand in one line: what is too old
goes first, then what was used longest ago, and never what is in use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence

FOREVER = math.inf


def until(written: float, max_age_s: float) -> float:
    """When a value written at this moment is too old to be served, in seconds since the epoch."""
    return written + max_age_s if max_age_s else FOREVER


def until_from_now(max_age_s: float) -> float:
    """`until` of what is computed now."""
    return until(time.time(), max_age_s)


def victims(
    line: Iterable[tuple[bytes, int]], users: Sequence[int], ends: Sequence[float], now: float, *, aging: bool
) -> Iterator[bytes]:
    """The keys in the order in which they go.

    Args:
        line: keys with their rows, the one used longest ago first.
        users: of each row; one that has any stays.
        ends: when each row is too old.
        now: in seconds since the epoch.
        aging: whether any row may be too old.
    """
    free = [(key, row) for key, row in line if not users[row]] if aging else ()
    old = {key for key, row in free if ends[row] <= now}
    yield from (key for key, _ in free if key in old)
    yield from (key for key, row in line if not users[row] and key not in old)
