"""stats, verify and purge over what a gateway keeps, and beside one that runs."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from command_line import invoke
from gateway_helpers import SECRET, Pair, wait_until
from maintenance_helpers import call, files_with, left, without_secure_delete
from semkv.config import CacheConfig
from semkv.stores.catalog import CATALOG
from semkv.stores.maintenance import prepare
from semkv_gateway.responses.sqlite import SqliteStore
from semkv_gateway.responses.store import StoredResponse
from semkv_stores.blocks import BlockStore, Bounds

PROXY = {"trusted_proxies": ("127.0.0.1",)}


def answers(folder: Path) -> int:
    found = json.loads(call("stats", "--cache-dir", str(folder), "--json"))
    return sum(use["items"] for use in found["stores"] if use["store"] == "answers")


def tier(pair: Pair, text: str, tenant: str) -> str:
    return pair.post(text, headers={"X-Semkv-Tenant": tenant}).headers["x-semkv"].split(" age")[0]


def fill(folder: Path, count: int) -> None:
    with closing(SqliteStore(folder / CATALOG)) as store:
        for i in range(count):
            store.put(StoredResponse(f"{i:064x}", "alice", "model", b'{"a": %d}' % i, time.time()))


@pytest.mark.parametrize(
    "harm",
    [
        "UPDATE responses SET payload='{}' WHERE rowid IN (1, 150, 300)",
        "UPDATE responses SET head=1<<60, used='late', nbytes=1e308 WHERE rowid IN (1, 150, 300)",
        "UPDATE responses SET payload='' WHERE rowid IN (1, 150, 300); UPDATE totals SET nbytes='many'",
        "UPDATE responses SET key=CAST(x'ff' || substr(key, 2) AS TEXT) WHERE rowid IN (1, 150, 300)",
    ],
)
def test_verify_finds_answers_that_fail_and_repair_deletes_those_alone(
    tmp_path: Path, harm: str
) -> None:
    fill(tmp_path, 300)
    verify = ("verify", "--cache-dir", str(tmp_path))
    assert "0 files, 0 entries and 300 answers checked, 0 damaged" in call(*verify)
    with closing(sqlite3.connect(tmp_path / CATALOG)) as db, db:
        db.executescript(harm)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    said = call(*verify, exit_code=1)
    assert "300 answers checked, 3 damaged" in said
    assert said.count("answers: ") == 3
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert "3 damaged, 3 of them deleted" in call(*verify, "--repair")
    assert "297 answers checked, 0 damaged" in call(*verify)
    with closing(SqliteStore(tmp_path / CATALOG)) as store:
        assert store.usage()[0] == 297
        assert store.get(f"{1:064x}") is not None


def test_purge_of_a_tenant_reaches_a_running_gateway_and_outlives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file has a byte of it any more."""
    without_secure_delete(monkeypatch)
    monkeypatch.setenv("SEMKV_SECRET", SECRET)
    purge = ("purge", "--cache-dir", str(tmp_path), "--tenant", "alice")
    texts = [
        f"What is the code of the house number {number}? {'y' * 300 * number}"
        for number in range(12)
    ]

    def ask(pair: Pair, number: int, tenant: str) -> str:
        return tier(pair, texts[number].replace("the house", f"{tenant}house"), tenant)

    def kept() -> int:
        found = json.loads(call("stats", "--cache-dir", str(tmp_path), "--json"))
        answers = sum(use["items"] for use in found["stores"] if use["store"] == "answers")
        return min(answers, sum(use["entries"] for use in found["entries"]))

    with Pair(tmp_path, semantic=True, **PROXY) as pair:
        for number in range(12):
            assert [ask(pair, number, tenant) for tenant in ("alice", "bob")] == ["miss"] * 2
        wait_until(lambda: kept() == 24)
        assert files_with(tmp_path, b"alicehouse")
        for dry, done in ((["--dry-run"], "would"), ([], "deleted")):
            assert ask(pair, 0, "alice") == "hit tier=exact"
            assert f"12 entries, 12 answers and 0 files {done}" in call(*purge, *dry)
        assert files_with(tmp_path, b"alicehouse") == []
        wait_until(lambda: ask(pair, 0, "alice") == "miss")  # from memory until it has heard of it
        assert ask(pair, 1, "alice") == "miss"
        assert ask(pair, 0, "bob") == ask(pair, 1, "bob") == "hit tier=exact"
    call(*purge)
    assert files_with(tmp_path, b"alicehouse") == []
    assert files_with(tmp_path, b"bobhouse")
    with Pair(tmp_path, semantic=True, **PROXY) as pair:
        assert ask(pair, 0, "alice") == "miss"
        assert ask(pair, 0, "bob") == "hit tier=exact"


def test_purge_by_digest_and_by_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEMKV_SECRET", raising=False)
    purge = ("purge", "--cache-dir", str(tmp_path))
    with closing(SqliteStore(tmp_path / CATALOG)) as store:
        for i, tenant in enumerate(("a" * 32, "a" * 32, "b" * 32, "b" * 32)):
            store.put(
                StoredResponse(
                    str(i), tenant, "model", b"{}", time.time(), tags=("even",) * (i % 2 == 0)
                )
            )
        cursor = store.news("").cursor
        assert "1 answers" in call(*purge, "--tenant", "a" * 32, "--tag", "even")
        assert [store.get(str(i)) is None for i in range(4)] == [True, False, False, False]
        assert len(store.news(cursor).selectors or ()) == 1
        assert "1 answers" in call(*purge, "--tag", "even")
        assert "1 answers" in call(*purge, "--tenant", "a" * 32)
        assert [store.get(str(i)) is None for i in range(4)] == [True, True, True, False]
        result = invoke([*purge, "--tenant", "nobody"])
        assert "0 answers" in result.stdout
        assert "its --store" in result.stderr
        assert "set SEMKV_SECRET" in result.stderr
    (tmp_path / f"{CATALOG}.damaged").write_bytes(b"what was put aside")
    assert f"{CATALOG}.damaged" in invoke([*purge, "--tenant", "nobody"]).stderr


def test_purge_of_a_directory_that_engines_share_with_a_running_gateway(tmp_path: Path) -> None:
    """It serves nothing of before, and goes on recording what comes."""
    prepare(CacheConfig(tmp_path))
    BlockStore(tmp_path / "kv", "kv", Bounds(max_bytes=0)).close()
    purge = ("purge", "--cache-dir", str(tmp_path))
    with Pair(tmp_path, semantic=True) as pair:
        pair.post("What is the capital of Italy?")
        wait_until(lambda: "1 entries, 1 answers" in call(*purge, "--dry-run"))
        counted = call(*purge, "--dry-run").split()
        assert call(*purge).split()[:6] == counted[:6]
        wait_until(lambda: pair.post("What is the capital of Italy?").headers["x-semkv"] == "miss")
        assert pair.upstream.calls[-1]["messages"][-1]["content"] == "What is the capital of Italy?"
        wait_until(lambda: call(*purge, "--dry-run").startswith("1 entries"))
        assert call(*purge).startswith("1 entries")
        assert "reuse" not in pair.post("what is  the capital of Italy?").headers["x-semkv"]
        # An answer that was on its way when the gateway heard of the purge is not recorded.
        texts = ("what is  the capital of Italy?", "Who wrote Faust?")
        wait_until(
            lambda: all(map(pair.post, texts)) and call(*purge, "--dry-run").startswith("2 entries")
        )
    prepare(CacheConfig(tmp_path))  # engines may come back
    with Pair(tmp_path, semantic=True) as pair:
        assert "text:normalised" in pair.post("who wrote  Faust?").headers["x-semkv"]
    call(*purge)
    assert left(tmp_path) in ([], ["secret"])


def test_purge_takes_what_earlier_versions_had_on_its_way_to_a_store(tmp_path: Path) -> None:
    with closing(SqliteStore(tmp_path / CATALOG)):
        pass
    for name in ("ahead", "ahead-of-redis"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{'0' * 16}.log").write_bytes(b"words")
    call("purge", "--cache-dir", str(tmp_path))
    assert (left(tmp_path), answers(tmp_path)) == ([], 0)
