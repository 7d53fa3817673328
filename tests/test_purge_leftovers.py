"""After a purge no file below the cache directory has a byte of what was asked, answered or shown."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cache_helpers import Bench
from gateway_helpers import SECRET, Pair, wait_until
from maintenance_helpers import call
from semkv.stores.maintenance import inspect, purge

LEDGER = " ".join(f"The {word} ledger of the eastern harbour was audited." for word in ("red", "green", "blue"))


@pytest.fixture(autouse=True)
def without_secure_delete(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a build of SQLite that leaves deleted content in the file; some builds overwrite it of themselves."""
    real = sqlite3.connect

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        db = real(*arguments, **options)
        db.execute("PRAGMA secure_delete=OFF")
        return db

    monkeypatch.setattr(sqlite3, "connect", connect)


def files_with(folder: Path, *needles: bytes) -> list[str]:
    """The files that have any of these bytes."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(f.name for f in files if any(needle in f.read_bytes() for needle in needles))


@pytest.mark.parametrize(("how", "running"), [("tenant", True), ("tag", False)])
def test_of_entries_nothing_is_left(tmp_path: Path, running: bool, how: str) -> None:
    bench = Bench(tmp_path)
    cache_dir = bench.cache.config.cache_dir
    for number in range(40):  # so that pages are full, some are freed, and some are shared with others
        for tenant in ("alice", "bob"):
            question = f"{tenant} asks {number} {'x' * (97 * number % 1500)}"
            picture, context = f"{tenant} picture {number}", f"{LEDGER} {tenant} {number}"
            report = bench.cache.try_reuse(bench.request(question, picture, context=context, tenant=tenant))
            bench.cache.add_observation(report, f"{tenant} is answered", tags=(f"of {tenant}",))
    needle = b"alice"  # in the text, the name, the tag and the bytes of a picture
    if not running:
        bench.cache.close()
    assert len(files_with(cache_dir, needle)) > 40
    chosen: dict[str, Any] = {"tenants": ["alice"]} if how == "tenant" else {"tag": "of alice"}
    assert purge(cache_dir, **chosen).unread == []
    assert files_with(cache_dir, needle) == []
    if running:
        bench.cache.close()
        assert files_with(cache_dir, needle) == []
    assert "catalog.sqlite" in files_with(cache_dir, b"bob asks 39")
    assert [(use.tenant, use.entries) for use in inspect(cache_dir).entries] == [("bob", 40)]


def test_while_somebody_reads_a_purge_says_that_the_log_still_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("semkv.stores.maintenance._WAIT_S", 0.1)
    bench = Bench(tmp_path)
    bench.ask("a secret question", "picture", tenant="alice")
    cache_dir = bench.cache.config.cache_dir
    with closing(sqlite3.connect(cache_dir / "catalog.sqlite", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT COUNT(*) FROM entries").fetchone() == (1,)
        (told,) = purge(cache_dir, tenants=["alice"]).unread
        assert "purge again" in told
    assert purge(cache_dir, tenants=["alice"]).unread == []
    assert files_with(cache_dir, b"a secret question") == []
    bench.cache.close()


def test_of_a_gateways_tenant_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEMKV_SECRET", SECRET)

    def kept() -> int:
        found = json.loads(call("stats", "--cache-dir", str(tmp_path), "--json"))
        return min(sum(use["answers"] for use in found["answers"]), sum(use["entries"] for use in found["entries"]))

    with Pair(tmp_path, semantic=True, trusted_proxies=("127.0.0.1",)) as pair:
        for number in range(12):
            for tenant in ("alice", "bob"):
                text = f"What is the code of {tenant}house number {number}? {'y' * 300 * number}"
                assert pair.post(text, headers={"X-Semkv-Tenant": tenant}).status_code == 200
        wait_until(lambda: kept() == 24)
        assert "catalog.sqlite" in {f.removesuffix("-wal") for f in files_with(tmp_path, b"alicehouse")}
        call("purge", "--cache-dir", str(tmp_path), "--tenant", "alice")
        assert files_with(tmp_path, b"alicehouse") == []
        assert files_with(tmp_path, b"bobhouse")
    assert files_with(tmp_path, b"alicehouse") == []
