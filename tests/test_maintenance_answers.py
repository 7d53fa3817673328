"""A store of answers that cannot be read is told by every command, and not touched."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from maintenance_helpers import files_of, make_used
from semkv.cli import EXIT_ERROR, main
from semkv.maintenance import inspect
from semkv.stores.responses.base import StoredResponse
from semkv.stores.responses.open import FILE
from semkv.stores.responses.sqlite import SqliteStore


@pytest.fixture
def used(tmp_path: Path) -> Path:
    return make_used(tmp_path)


def break_whole(path: Path) -> None:
    path.write_bytes(b"garbage" * 1000)


def break_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in range(4096, len(data), 4096):
        data[at : at + 100] = b"\xff" * 100
    path.write_bytes(data)


def make_foreign(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE mine (x)")


def make_newer(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version=99")


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("harm", [break_whole, break_page, make_foreign, make_newer, make_folder])
@pytest.mark.parametrize("command", ["stats", "verify", "verify --repair", "purge --tenant alice"])
def test_answers_that_cannot_be_read_are_told_and_not_touched(
    used: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    harm: Callable[[Path], None],
    command: str,
) -> None:
    with closing(SqliteStore(used / FILE)) as store:
        for i in range(50):
            store.put(StoredResponse(str(i), "alice", "model", b"x" * 1000, time.time()))
    inspect(used)  # the other stores' own files are there now
    harm(used / FILE)
    before = files_of(used)
    monkeypatch.setattr("sys.argv", ["semkv", *command.split(), "--cache-dir", str(used)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == EXIT_ERROR
    told = [line for line in said.err.splitlines() if line.strip() and not line.startswith("left: ")]
    assert len(told) == 1
    assert str(used / FILE) in told[0]
    after = files_of(used)
    assert after[FILE] == before[FILE]
    if command.startswith("purge"):
        assert "3 entries, 0 answers and 1 files deleted" in said.out, "the rest is done all the same"
    assert [name for name in after if FILE in name] == [name for name in before if FILE in name]
    if command == "stats":
        assert sorted(after) == sorted(before)
        assert all(word in said.out for word in ("alice", "kv", "fusion", "media"))
