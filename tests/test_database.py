"""The helper that opens the database of a cache: modes, formats, damage, several processes, a disk that fails."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from semkv.errors import StoreError
from semkv.stores.catalog import CATALOG, SCHEMA, Catalog
from semkv_gateway.responses.sqlite import SqliteStore
from semkv_gateway.responses.store import StoredResponse
from semkv_stores.database import Database
from test_catalog import id_of, record


def response(key: str, payload: bytes = b"{}") -> StoredResponse:
    return StoredResponse(key, "tenant", "model", payload, time.time())


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with closing(Catalog(folder / CATALOG)) as catalog:
        catalog.add(record("a"))
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert modes(folder) == {0o600}
    (folder / CATALOG).chmod(0o644)
    with closing(Catalog(folder / CATALOG)) as catalog:
        catalog.add(record("b"))
        assert modes(folder) == {0o600}, (
            "a file of an older version gets the mode when it is opened"
        )


def test_who_has_a_purged_database_open_hears_of_it_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / CATALOG
    catalog, other, responses = Catalog(path), Catalog(path), SqliteStore(path)
    for number in range(100):
        catalog.add(record(f"a{number}"))
        responses.put(response(f"a{number}", b"x" * 10_000))
    assert other.changed()
    before, cursor = other.vectors(["text@1"], 0, 1000)[-1], responses.news("").cursor
    Database(path, schema=SCHEMA, anew=True).close()
    assert other.changed()
    assert other.find("shared") == []
    assert responses.usage() == (0, 0)
    assert responses.news(cursor).selectors is None, "anything in memory may have been purged"
    assert not responses.put(response("a"), cursor), "it was computed before the purge"
    catalog.add(record("b"))
    (row,) = other.vectors(["text@1"], before.number, 10)
    assert row.entry_id == id_of("b"), "its number is above those that a reader has seen"
    for store in (catalog, other, responses):
        store.close()


def test_a_database_whose_folder_is_gone_is_a_fault_and_not_made_again(tmp_path: Path) -> None:
    database = Database(tmp_path / "cache" / CATALOG, schema=SCHEMA)
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    for _ in range(2):
        with (
            pytest.raises(sqlite3.OperationalError, match="cannot be opened anew"),
            database.write(),
        ):
            pass
    assert not (tmp_path / "cache").exists()
    (tmp_path / "elsewhere").rename(tmp_path / "cache")
    with database.write():
        pass
    database.close()
    with pytest.raises(sqlite3.ProgrammingError):
        database.version()


def test_a_catalog_that_is_damaged_while_open_is_put_aside_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / CATALOG
    one, two = Catalog(path), Catalog(path)
    for number in range(50):
        one.add(record(str(number)))
    mark = two.purge()
    one.database.truncate_log()
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (len(data) - 4096))
    for number in range(3):
        for catalog in (one, two):
            try:
                catalog.add(record(f"new {number}"))
            except sqlite3.DatabaseError:
                continue
    assert one.get(id_of("new 2")) is not None
    assert two.get(id_of("new 2")) is not None
    assert two.purge() != mark
    assert caplog.text.count("put aside") == 1
    assert (tmp_path / f"{CATALOG}.damaged").exists()
    for catalog in (one, two):
        catalog.close()


OPENER = """
import sys, time
from pathlib import Path
from semkv_gateway.responses.store import StoredResponse
from semkv_gateway.responses.sqlite import SqliteStore
store = SqliteStore(Path(sys.argv[1]), timeout_s=60.0)
print("open", flush=True)
sys.stdin.readline()
for number in range(20):
    assert store.put(StoredResponse(f"{sys.argv[2]} {number}", "t", "m", b"{}", time.time()))
store.close()
"""


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_processes_that_open_at_once_have_one_database(tmp_path: Path, harm: str) -> None:
    path = tmp_path / CATALOG
    if harm == "damaged":
        path.write_bytes(b"garbage" * 1000)
    commands = [[sys.executable, "-c", OPENER, str(path), str(number)] for number in range(4)]
    started = [
        subprocess.Popen(c, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for c in commands
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
    for process in started:
        process.communicate("\n")
        assert process.returncode == 0
    with closing(SqliteStore(path)) as store:
        assert store.usage()[0] == 80
    expected = {CATALOG, f"{CATALOG}.lock", *[f"{CATALOG}.damaged"] * (harm == "damaged")}
    assert {p.name for p in tmp_path.iterdir()} == expected


FULL = """
import resource, signal, sys, time
from pathlib import Path
from semkv.errors import StoreError
from semkv_gateway.responses.store import StoredResponse
from semkv_gateway.responses.sqlite import SqliteStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = SqliteStore(Path(sys.argv[1]))
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, limit[1]))
for number in range(1000):
    try:
        store.put(StoredResponse(str(number), "t", "m", b"x" * 20_000, time.time()))
    except StoreError:
        break
    print(number, flush=True)
assert store.get("0") is not None
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
assert store.put(StoredResponse("late", "t", "m", b"x", time.time()))
print("late", flush=True)
"""


def test_a_full_disk_is_a_fault_and_loses_nothing_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / CATALOG
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kept = done.stdout.split()
    assert 10 < len(kept) < 1000
    with closing(SqliteStore(path)) as store:
        assert [key for key in kept if store.get(key) is None] == []
        assert not path.with_name(f"{CATALOG}.damaged").exists()
        store.database.check()


def test_a_file_that_is_no_database_is_put_aside_only_where_it_has_the_catalogs_name(
    tmp_path: Path,
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes, of more than a header's hundred bytes" * 10)
    with pytest.raises(StoreError, match="is not a database"):
        SqliteStore(notes)
    assert notes.read_text().startswith("my notes")
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "notes.txt.lock"}
