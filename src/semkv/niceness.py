"""Threads of low scheduling priority."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress


def set_niceness(nice: int) -> None:
    """Raise the niceness of this thread, which on Linux belongs to a thread; where that is refused it stays."""
    if nice and sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            before = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, max(nice, before))
