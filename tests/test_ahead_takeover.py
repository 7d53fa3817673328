"""A running process brings to the store what others left in their logs, whenever it comes to lie there."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway_helpers import wait_until
from semkv.stores.responses import ahead
from semkv.stores.responses.ahead import AheadLog, records
from semkv.stores.responses.sqlite import SqliteStore
from semkv.tiers.response import ResponseCache
from test_responses import Asked, payload
from test_responses_ahead import Gate, answer, left_behind, logs

Opened = Callable[[Gate], AheadLog]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Opens the log of the folder, which looks often for what others leave."""
    monkeypatch.setattr(ahead, "_LOOK_S", 0.05)
    monkeypatch.setattr(ahead, "_PAUSE_S", 0.05)
    made: list[AheadLog] = []

    def open_log(gate: Gate) -> AheadLog:
        made.append(AheadLog(tmp_path, gate))
        return made[-1]

    yield open_log
    for log in made:
        log.close()


def test_a_log_that_a_purge_held_at_the_start_is_taken_over_after_it(tmp_path: Path, opened: Opened) -> None:
    left_behind(tmp_path, answer("b", 2.0), answer("a", 1.0))
    gate = Gate()
    with (tmp_path / f"{0:016x}.log").open("rb") as purging:
        fcntl.flock(purging, fcntl.LOCK_EX)
        log = opened(gate)
        wait_until(lambda: gate.brought == ["a"])
    wait_until(lambda: gate.brought == ["a", "b"])
    wait_until(lambda: len(logs(tmp_path)) == 1)  # its own
    assert log.append(answer("own"), "1")
    wait_until(lambda: gate.brought == ["a", "b", "own"])


def test_answers_under_steady_writing_do_not_put_it_off(tmp_path: Path, opened: Opened) -> None:
    gate = Gate()
    log = opened(gate)
    left_behind(tmp_path, answer("left"))

    def busy() -> bool:
        log.append(answer("own"), "1")
        return "left" in gate.brought

    wait_until(busy)


def test_what_the_store_does_not_take_stays_in_its_file(tmp_path: Path, opened: Opened) -> None:
    gate = Gate()
    log = opened(gate)
    gate.reached = False
    left_behind(tmp_path, answer("left"))
    assert log.append(answer("own"), "1")
    log.close(0.2)
    assert sorted(r.key for path in logs(tmp_path) for r, _ in records(path.read_bytes())) == ["left", "own"]
    opened(there := Gate())
    wait_until(lambda: sorted(there.brought) == ["left", "own"])


def test_two_running_processes_share_what_is_left_and_leave_each_other_alone(tmp_path: Path, opened: Opened) -> None:
    first, second, stuck = Gate(), Gate(), Gate(is_open=False)
    theirs = opened(stuck)
    assert theirs.append(answer("theirs"), "1")
    opened(first), opened(second)
    left_behind(tmp_path, *(answer(str(number), number) for number in range(8)))
    wait_until(lambda: len(first.brought) + len(second.brought) == 8)
    wait_until(lambda: len(logs(tmp_path)) == 3)
    assert sorted(first.brought + second.brought) == sorted(map(str, range(8)))
    stuck.open()


def test_a_file_that_cannot_be_read_costs_one_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Opened
) -> None:
    """As while the process has no file descriptor left, or the disk fails."""
    gate, real = Gate(), ahead._claim
    failed: list[Path] = []
    log = opened(gate)

    def claim(path: Path, flags: int = 0) -> int | None:
        if not failed:
            failed.append(path)
            raise OSError(errno.EMFILE, "scripted")
        return real(path, flags)

    monkeypatch.setattr(ahead, "_claim", claim)
    left_behind(tmp_path, answer("left"))
    wait_until(lambda: gate.brought == ["left"])
    assert failed
    assert log.append(answer("own"), "1")
    wait_until(lambda: gate.brought == ["left", "own"])


KILLED = """
import sys
from pathlib import Path
from semkv.stores.responses.sqlite import SqliteStore
from semkv.tiers.response import ResponseCache
sys.path.insert(0, sys.argv[2])
from test_responses import Asked, payload

class Stuck(SqliteStore):
    def put(self, response, since=""):
        sys.stdin.read()

folder = Path(sys.argv[1])
cache = ResponseCache(Stuck(folder / "a"), ahead=folder / "ahead")
for number in range(20):
    assert cache.try_keep(Asked(str(number)), payload("stop", number=number), since=cache.begin())
print("kept", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_gateway_had_kept_is_served_by_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_LOOK_S", 0.05)
    cache = ResponseCache(SqliteStore(tmp_path / "a"), ahead=tmp_path / "ahead")
    command = [sys.executable, "-c", KILLED, str(tmp_path), os.fspath(Path(__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"kept\n"
        assert cache.lookup("19") is None
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: cache.lookup("19") is not None)
    for number in range(20):
        found = cache.lookup(str(number))
        assert found is not None
        assert found.response.payload == payload("stop", number=number)
    assert cache.try_keep(Asked("own"), payload("stop"), since=cache.begin())
    cache.close()
    assert not logs(tmp_path / "ahead")
