"""What a test run started ends with it, also when the run is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bound import Bound
from gateway_helpers import wait_until

# A server with a process of its own, as vLLM's has: each writes its number into a file.
SERVER = """
import os, subprocess, sys, time
folder = sys.argv[1]
worker = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
worker += f"; open({folder!r} + '/worker', 'w').write(str(os.getpid())); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", worker])
while not os.path.exists(folder + "/worker"):
    time.sleep(0.01)
open(folder + "/server", "w").write(str(os.getpid()))
time.sleep(600)
"""
RUN = """
import os, sys, time
sys.path.insert(0, {tests!r})
from bound import Bound
server = Bound([sys.executable, "-c", {server!r}, {folder!r}])
if not os.fork():
    open({folder!r} + "/fork", "w").write(str(os.getpid()))
time.sleep(600)
"""


def gone(process: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def number(file: Path) -> int:
    wait_until(lambda: file.exists() and file.read_text())
    return int(file.read_text())


def numbers(folder: Path) -> list[int]:
    return [number(folder / name) for name in ("server", "worker")]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_nothing_behind(tmp_path: Path, how: signal.Signals) -> None:
    program = RUN.format(tests=str(Path(__file__).parent), server=SERVER, folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", program]) as run:
        started, fork = numbers(tmp_path), number(tmp_path / "fork")
        assert not any(map(gone, started))
        run.send_signal(how)
    try:
        wait_until(lambda: all(map(gone, started)))
        assert not gone(fork), "its parent's death alone ends the server"
    finally:
        os.kill(fork, signal.SIGKILL)


def test_what_is_stopped_is_gone_with_all_that_it_started(tmp_path: Path) -> None:
    process = Bound([sys.executable, "-c", SERVER, str(tmp_path)])
    started = numbers(tmp_path)
    assert process.running
    process.stop()
    assert not process.running
    wait_until(lambda: all(map(gone, started)))


def test_a_command_that_ends_or_is_none_is_seen() -> None:
    for command in ([sys.executable, "-c", "pass"], ["no-such-command"]):
        process = Bound(command)
        wait_until(lambda process=process: not process.running)
        process.stop()
