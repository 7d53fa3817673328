"""stats, verify and purge over what a gateway keeps, and beside one that runs."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway_helpers import SECRET, Pair, wait_until
from semkv.cli import app
from semkv.stores.catalog import Catalog
from semkv.stores.responses.base import StoredResponse
from semkv.stores.responses.open import FILE
from semkv.stores.responses.sqlite import SqliteStore
from semkv.stores.responses.use import examine

PROXY = {"trusted_proxies": ("127.0.0.1",)}


def call(*words: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result.stdout


def answers(folder: Path) -> int:
    found = json.loads(call("stats", "--cache-dir", str(folder), "--json"))
    return sum(use["answers"] for use in found["answers"])


def tier(pair: Pair, text: str, tenant: str) -> str:
    return pair.post(text, headers={"X-Semkv-Tenant": tenant}).headers["x-semkv"].split(" age")[0]


def fill(folder: Path, count: int = 600) -> None:
    with closing(SqliteStore(folder / FILE)) as store:
        for i in range(count):
            store.put(StoredResponse(f"{i:064x}", "alice", "model", b'{"a": %d}' % i, time.time()))


def test_hits_of_a_gateways_entries_are_counted_while_it_runs(tmp_path: Path) -> None:
    def hits() -> list[int]:
        found = json.loads(call("stats", "--cache-dir", str(tmp_path), "--json"))
        return [use["hits"] for use in found["entries"]]

    with Pair(tmp_path, semantic=True) as pair:
        pair.post("What is the capital of Italy?")
        wait_until(lambda: hits() == [0])
        for text in ("what is  the capital of Italy?", "What is the  capital of Italy?"):
            assert "text:normalised" in pair.post(text).headers["x-semkv"]
        wait_until(lambda: hits() == [2])
        assert pair.post("what is  the  capital of Italy?").headers["x-semkv"].startswith("hit")
    assert hits() == [3], "the last one was written at the end"


def test_hits_that_cannot_be_written_wait_for_the_next_write(tmp_path: Path) -> None:
    with Pair(tmp_path, semantic=True) as pair:
        pair.post("What is the capital of Italy?")
        wait_until(lambda: json.loads(call("stats", "--cache-dir", str(tmp_path), "--json"))["entries"])
        with closing(sqlite3.connect(tmp_path / "catalog.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert "text:normalised" in pair.post("what is  the capital of Italy?").headers["x-semkv"]
            time.sleep(0.1)
            other.execute("ROLLBACK")
    with closing(Catalog(tmp_path / "catalog.sqlite")) as catalog:
        assert [use.hits for use in catalog.by_namespace()] == [1]


@pytest.mark.parametrize(
    "harm",
    [
        "UPDATE answers SET payload='{}' WHERE rowid IN (1, 300, 600)",
        "UPDATE answers SET payload=CAST(payload || ' ' AS BLOB) WHERE rowid IN (1, 300, 600)",
        "UPDATE answers SET head=CAST(head || ' ' AS BLOB) WHERE rowid IN (1, 300, 600)",
        "UPDATE answers SET head=7 WHERE rowid IN (1, 300, 600)",
        "UPDATE answers SET key=CAST(x'ff' || substr(key, 2) AS TEXT) WHERE rowid IN (1, 300, 600)",
    ],
)
def test_verify_finds_answers_that_fail_and_repair_deletes_those_alone(tmp_path: Path, harm: str) -> None:
    fill(tmp_path)
    assert "0 files and 600 answers checked, 0 damaged" in call("verify", "--cache-dir", str(tmp_path))
    with closing(sqlite3.connect(tmp_path / FILE)) as db, db:
        db.execute(harm)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    said = call("verify", "--cache-dir", str(tmp_path), exit_code=1)
    assert "600 answers checked, 3 damaged" in said
    assert said.count("answers: ") == 3
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert "600 answers checked, 3 deleted" in call("verify", "--cache-dir", str(tmp_path), "--repair")
    assert "597 answers checked, 0 damaged" in call("verify", "--cache-dir", str(tmp_path))
    with closing(SqliteStore(tmp_path / FILE)) as store:
        assert store.usage()[0] == 597
        assert store.get(f"{1:064x}") is not None


def test_verify_counts_up_to_what_there_is(tmp_path: Path) -> None:
    fill(tmp_path)
    assert list(examine(tmp_path / FILE)) == [""] * 600


def test_verify_and_repair_beside_a_running_gateway(tmp_path: Path) -> None:
    with Pair(tmp_path, **PROXY) as pair:
        for i in range(3):
            pair.post(f"question {i}")
        wait_until(lambda: answers(tmp_path) == 3)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert "3 answers checked, 0 damaged" in call("verify", "--cache-dir", str(tmp_path))
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        with closing(sqlite3.connect(tmp_path / FILE)) as db, db:
            db.execute("UPDATE answers SET payload=CAST('{}' AS BLOB) WHERE rowid=2")
        assert "3 answers checked, 1 deleted" in call("verify", "--cache-dir", str(tmp_path), "--repair")
        assert answers(tmp_path) == 2
        assert pair.post("another").headers["x-semkv"] == "miss"
        wait_until(lambda: answers(tmp_path) == 3)
        assert pair.metric("semkv_faults_total") == 0


def test_purge_of_a_tenant_reaches_a_running_gateway_and_outlives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEMKV_SECRET", SECRET)
    purge = ("purge", "--cache-dir", str(tmp_path), "--tenant", "alice")
    with Pair(tmp_path, **PROXY) as pair:
        for tenant in ("alice", "bob"):
            for text in ("one", "two"):
                assert tier(pair, text, tenant) == "miss"
        wait_until(lambda: answers(tmp_path) == 4)
        assert "0 entries, 2 answers and 0 files would" in call(*purge, "--dry-run")
        assert tier(pair, "one", "alice") == "hit tier=exact"
        assert "0 entries, 2 answers and 0 files deleted" in call(*purge)
        assert answers(tmp_path) == 2
        wait_until(lambda: tier(pair, "one", "alice") == "miss")  # from memory until it has heard of it
        assert tier(pair, "two", "alice") == "miss"
        assert tier(pair, "one", "bob") == tier(pair, "two", "bob") == "hit tier=exact"
        wait_until(lambda: answers(tmp_path) == 4)
    assert "2 answers" in call(*purge)
    with Pair(tmp_path, **PROXY) as pair:
        assert tier(pair, "one", "alice") == "miss"
        assert tier(pair, "one", "bob") == "hit tier=exact"


def test_purge_by_digest_and_by_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEMKV_SECRET", raising=False)
    purge = ("purge", "--cache-dir", str(tmp_path))
    with closing(SqliteStore(tmp_path / FILE)) as store:
        for i, tenant in enumerate(("a" * 32, "a" * 32, "b" * 32, "b" * 32)):
            store.put(StoredResponse(str(i), tenant, "model", b"{}", time.time(), tags=("even",) * (i % 2 == 0)))
        cursor = store.news("").cursor
        assert "1 answers" in call(*purge, "--tenant", "a" * 32, "--tag", "even")
        assert [store.get(str(i)) is None for i in range(4)] == [True, False, False, False]
        assert len(store.news(cursor).selectors or ()) == 1
        assert "1 answers" in call(*purge, "--tag", "even")
        assert "1 answers" in call(*purge, "--tenant", "a" * 32)
        assert [store.get(str(i)) is None for i in range(4)] == [True, True, True, False]
        result = CliRunner().invoke(app, [*purge, "--tenant", "nobody"])
        assert "0 answers" in result.stdout
        assert "its --store" in result.stderr
        assert "set SEMKV_SECRET" in result.stderr
    (tmp_path / f"{FILE}.damaged").write_bytes(b"what was put aside")
    assert f"{FILE}.damaged" in CliRunner().invoke(app, [*purge, "--tenant", "nobody"]).stderr


def test_purge_of_a_gateways_whole_directory(tmp_path: Path) -> None:
    """It has no sign as a cache of engines has: what the gateway has open is emptied, and it goes on."""
    (tmp_path / f"{FILE}.damaged").write_bytes(b"what was put aside")
    mine = tmp_path / "notes.txt"
    mine.write_text("a user's own file")
    purge = ("purge", "--cache-dir", str(tmp_path))
    with Pair(tmp_path, semantic=True) as pair:
        pair.post("What is the capital of Italy?")
        wait_until(lambda: "1 entries, 1 answers and 1 files would" in call(*purge, "--dry-run"))
        assert "1 entries, 1 answers and 1 files deleted" in call(*purge)
        wait_until(lambda: pair.post("What is the capital of Italy?").headers["x-semkv"] == "miss")
        wait_until(lambda: "1 entries, 1 answers and 0 files would" in call(*purge, "--dry-run"))
        assert pair.post("what is  the capital of Italy?").headers["x-semkv"].startswith("hit tier=text:normalised")
    assert mine.exists()
