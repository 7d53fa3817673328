"""Every command says that the database cannot be read, does not touch it, and does the rest."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from maintenance_helpers import files_of, make_used, store_kv
from semkv.cli import EXIT_ERROR, main
from semkv.cli.store import EXIT_DAMAGED
from semkv.stores.block_file import tenant_tag
from semkv.stores.database import CATALOG
from semkv.stores.maintenance import inspect
from semkv.stores.responses.base import StoredResponse
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
def test_a_database_that_cannot_be_read_is_named_and_not_touched(
    used: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    harm: Callable[[Path], None],
    command: str,
) -> None:
    store_kv(used, 9, tenant_tag("alice"))
    with closing(SqliteStore(used / CATALOG)) as store:
        for i in range(50):
            store.put(StoredResponse(str(i), "alice", "model", b"x" * 1000, time.time()))
    inspect(used)  # the other stores' own files are there now
    harm(used / CATALOG)
    before = files_of(used)
    monkeypatch.setattr("sys.argv", ["semkv", *command.split(), "--cache-dir", str(used)])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    damaged = command.startswith("verify") and harm in (break_whole, break_page)
    lines = [
        line for line in said.err.splitlines() if line.strip() and not line.startswith(("left: ", "not counted: "))
    ]
    if not damaged:
        assert ended.value.code == EXIT_ERROR
        assert len(lines) == 1
        assert str(used / CATALOG) in lines[0]
    elif harm is break_whole:
        assert ended.value.code == EXIT_DAMAGED
    if damaged:
        assert "catalog: " in said.out
        assert "1 damaged" in said.out
    after = files_of(used)
    assert after[CATALOG] == before[CATALOG]
    assert [name for name in after if CATALOG in name] == [name for name in before if CATALOG in name]
    if command.startswith("purge"):
        assert "0 entries, 0 answers and 1 files deleted" in said.out, "the rest is done all the same"
    if command == "stats":
        assert sorted(after) == sorted(before)
        assert all(word in said.out for word in ("kv", "fusion", "media"))
