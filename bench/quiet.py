"""What benches measure under: a lock that other work may heed, the machine's load, this process's memory."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any


@contextmanager
def quiet(lock: Path | None, row: dict[str, Any], load: float = 0.0) -> Iterator[None]:
    """Hold ``lock`` (as ``flock`` does) for the block; note in ``row`` the load before and after, and our priority.

    The load is the number of processes that ran or waited to, over the last minute. ``chrt -r 1`` before a bench makes
    the others wait, those that heed no lock too. With ``load`` wait, holding the lock, until it is below that.
    """
    with lock.open("a") if lock else nullcontext() as held:
        if held is not None:
            fcntl.flock(held, fcntl.LOCK_EX)
        while load and os.getloadavg()[0] >= load:
            time.sleep(1.0)
        row["nice"], row["real_time"] = os.nice(0), os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)
        row["load_before"] = round(os.getloadavg()[0], 2)
        yield
        row["load_after"] = round(os.getloadavg()[0], 2)


def resident() -> int:
    """Bytes of this process in memory that are no file's (Linux)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
