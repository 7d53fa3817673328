"""How the work of a function grows, told from the processor time of its own thread."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

_FACTOR = 10
_MOST = 40.0  # times as long for ten times as much: linear is 10, quadratic 100
_SLACK_S = 1.0  # for what is too short to compare; quadratic work at these sizes takes far longer


def assert_linear(make: Callable[[int], Callable[[], object]], size: int) -> None:
    """``make(n)`` prepares a piece of work of size n; at ten times ``size`` it may not have grown quadratically.

    Other threads do not count, nor does a garbage collection.
    """
    small, large = _seconds(make(size)), _seconds(make(_FACTOR * size))
    assert large < _MOST * small + _SLACK_S


def _seconds(work: Callable[[], object]) -> float:
    gc.disable()
    try:
        start = time.thread_time()
        work()
        return time.thread_time() - start
    finally:
        gc.enable()
