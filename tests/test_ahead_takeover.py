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
from semkv.stores.responses.ahead import AheadLog, held
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
    wait_until(lambda: len(logs(tmp_path)) == 2)  # its own
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
    wait_until(lambda: log.count(ahead.Selector()) == 1)
    assert log.append(answer("own"), "1")
    log.close(0.2)
    assert sorted(r.key for _, found in held(tmp_path) for r in found) == ["left", "own"]
    opened(there := Gate())
    wait_until(lambda: sorted(there.brought) == ["left", "own"])


def test_two_running_processes_share_what_is_left_and_leave_each_other_alone(tmp_path: Path, opened: Opened) -> None:
    first, second, stuck = Gate(), Gate(), Gate(is_open=False)
    theirs = opened(stuck)
    assert theirs.append(answer("theirs"), "1")
    opened(first), opened(second)
    left_behind(tmp_path, *(answer(str(number), number) for number in range(8)))
    wait_until(lambda: len(first.brought) + len(second.brought) == 8)
    wait_until(lambda: len(logs(tmp_path)) == 6)
    assert sorted(first.brought + second.brought) == sorted(map(str, range(8)))
    stuck.open()


def test_a_disk_that_cannot_be_read_costs_one_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Opened
) -> None:
    gate, real, failed = Gate(), ahead._File.content, []

    def content(file: ahead._File) -> bytes:
        if not failed:
            failed.append(file)
            raise OSError("scripted")
        return real(file)

    monkeypatch.setattr(ahead._File, "content", content)
    opened(gate)
    left_behind(tmp_path, answer("left"))
    wait_until(lambda: gate.brought == ["left"])
    assert failed


def test_a_folder_that_cannot_be_listed_costs_one_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Opened
) -> None:
    """As while the process has no file descriptor left."""
    gate, real, failed = Gate(), ahead._logs, []
    log = opened(gate)

    def listed(folder: Path) -> list[Path]:
        if not failed:
            failed.append(folder)
            raise OSError(errno.EMFILE, "scripted")
        return real(folder)

    monkeypatch.setattr(ahead, "_logs", listed)
    wait_until(lambda: failed)
    left_behind(tmp_path, answer("left"))
    wait_until(lambda: gate.brought == ["left"])
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
