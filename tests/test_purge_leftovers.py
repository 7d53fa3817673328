"""After a purge no file below the cache directory has a byte of what was asked, answered or shown."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cache_helpers import Bench
from maintenance_helpers import files_with, without_secure_delete
from semkv.stores.maintenance import inspect, purge

LEDGER = " ".join(
    f"The {word} ledger of the eastern harbour was audited." for word in ("red", "green", "blue")
)


@pytest.mark.parametrize(("how", "running"), [("tenant", True), ("tag", False)])
def test_of_entries_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: bool, how: str
) -> None:
    without_secure_delete(monkeypatch)
    bench = Bench(tmp_path)
    cache_dir = bench.cache.config.cache_dir
    for number in range(
        40
    ):  # so that pages are full, some are freed, and some are shared with others
        for tenant in ("alice", "bob"):
            question = f"{tenant} asks {number} {'x' * (97 * number % 1500)}"
            picture, context = f"{tenant} picture {number}", f"{LEDGER} {tenant} {number}"
            report = bench.cache.try_reuse(
                bench.request(question, picture, context=context, tenant=tenant)
            )
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
