"""Commands that end with all that they started, and with the test run, however that ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import Any

_GRACE_S = 60.0  # between SIGTERM and SIGKILL
_SET_PDEATHSIG = 1


def _end_with_the_run() -> None:
    """The kernel sends SIGTERM when the run was killed; what runs in `vllm_forks` ends with the run by itself."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGTERM)


class Bound:
    """A running command, without input and in a process group of its own. ``options`` are of `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_the_run,
            **options,
        )

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End it; on return it is gone, with all that it started."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, number)
                self._process.wait(_GRACE_S)
