"""Processes that end with the test run, however that ends: a run that is killed cannot clean up.

A watcher starts the command and holds the reading end of a pipe whose other end only the test run has, and none of its
forks. When that is closed, by `Bound.stop` or with the process that held it, the watcher ends the command and all that
it started.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any

_GRACE_S = 60.0  # between SIGTERM and SIGKILL
_held: set[IO[bytes]] = set()  # the pipes' writing ends


def _let_go() -> None:
    for end in _held:
        end.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


class Bound:
    """A running command.

    Args:
        command: what to run; it has no input, and is in a process group of its own.
        options: of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self._watcher = subprocess.Popen(
            [sys.executable, __file__, *command], stdin=subprocess.PIPE, start_new_session=True, **options
        )
        assert self._watcher.stdin is not None
        self._end = self._watcher.stdin
        _held.add(self._end)

    @property
    def running(self) -> bool:
        return self._watcher.poll() is None

    def stop(self) -> None:
        """End it; on return it is gone, with all that it started."""
        _held.discard(self._end)
        self._end.close()
        self._watcher.wait(_GRACE_S + 10)


def _watch(command: Sequence[str]) -> None:
    with contextlib.suppress(OSError):  # there is no such command
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while started.poll() is None and not select.select([sys.stdin], [], [], 0.1)[0]:
            pass
        started.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(_GRACE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _watch(sys.argv[1:])
