"""What one tenant has: stats and purge by its name."""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from command_line import invoke
from gateway_helpers import SECRET as GATEWAYS_SECRET
from gateway_helpers import Pair, wait_until
from maintenance_helpers import SECRET, block_files, call, files_of, make_used, store_kv
from semkv.engines.base import EnginePrompt
from semkv.server.tenancy import tenant_salt
from semkv.stores.block_file import tenant_tag
from semkv.stores.database import CATALOG
from semkv.stores.fusion import FusionState, FusionStore
from semkv.stores.maintenance import inspect
from semkv.stores.responses.base import StoredResponse
from semkv.stores.responses.sqlite import SqliteStore


@pytest.fixture
def used(tmp_path: Path) -> Path:
    return make_used(tmp_path)


def store_for_tenants(root: Path) -> None:
    """For each tenant a KV block and a fusion state with each of its salts: its name, that of `semkv run`, and the
    gateway's."""
    fusion = FusionStore.open(root / "fusion", "ns")
    salts = [
        salt
        for tenant in ("alice", "bob")
        for salt in (tenant, EnginePrompt((), tenant).cache_salt, tenant_salt(SECRET, tenant, None))
    ]
    for i, salt in enumerate(salts):
        store_kv(root, i + 9, tenant_tag(salt))
        fusion.save(FusionState.from_array(str(salt), np.zeros((2, 3), np.float32)), owner=tenant_tag(salt))
    fusion.close()


def test_stats_of_a_tenant_say_what_it_holds_in_which_stores(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_for_tenants(used)
    answers = SqliteStore(used / CATALOG, clock=lambda: 0.0)  # so that what is stale now can be put
    for tenant in ("alice", "alice", "bob"):
        answers.put(StoredResponse(os.urandom(32).hex(), tenant, "model", b"{}", time.time()))
    answers.put(StoredResponse("stale", "alice", "model", b"{}", 1.0, 2.0, 3.0))
    answers.close()

    def held(tenant: str) -> tuple[list[tuple[str, int]], dict[str, tuple[int, int]]]:
        found = json.loads(call("stats", "--cache-dir", str(used), "--tenant", tenant, "--json"))
        assert found["tenants"][0] == tenant
        entries = [(e["tenant"], e["entries"]) for e in found["entries"]]
        return entries, {s["store"]: (s["items"], s["blocks"]) for s in found["stores"]}

    monkeypatch.delenv("SEMKV_SECRET", raising=False)
    rest = {"media": (1, 0), "answers": (3, 0)}  # what has run out lies there too
    assert held("alice") == ([("alice", 3)], {"kv": (2, 2), "fusion": (2, 2), **rest})
    words = ("stats", "--cache-dir", str(used), "--tenant", "alice")
    assert "set SEMKV_SECRET" in invoke(words).stderr
    monkeypatch.setenv("SEMKV_SECRET", SECRET.decode())
    assert held("alice") == ([("alice", 3)], {"kv": (3, 3), "fusion": (3, 3), **rest})
    assert "set SEMKV_SECRET" not in invoke(words).stderr
    bobs = ([("bob", 3)], {"kv": (3, 3), "fusion": (3, 3), **rest, "answers": (1, 0)})
    assert held("bob") == bobs
    assert held("nobody") == ([], {})
    everything = {s.store: s for s in inspect(used).stores}
    assert {name: s.items for name, s in everything.items()} == {"kv": 8, "fusion": 7, "media": 2, "answers": 4}
    alices = {s.store: s.nbytes for s in inspect(used, tenants=["alice"]).stores}
    assert alices["media"] == len(b"the picture of alice")
    assert "kv" not in alices, "nobody said which salts were hers"
    assert "tenant alice" in call(*words)
    counted = call("purge", "--cache-dir", str(used), "--tenant", "alice", "--dry-run")
    assert "3 entries, 3 answers and 7 files" in counted
    assert call("purge", "--cache-dir", str(used), "--tenant", "alice").split()[:7] == counted.split()[:7]
    assert held("alice") == ([], {}), "a purge finds what stats find"
    assert held("bob") == bobs


def test_stats_beside_a_running_gateway_find_its_tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the digests that stats list, and with the secret by the name that the proxy gave; not by an API key."""

    def held(*words: str) -> tuple[list[tuple[str, int]], int]:
        found = json.loads(call("stats", "--cache-dir", str(tmp_path), "--json", *words))
        listed = [(use["tenant"], use["answers"]) for use in found["answers"]]
        return listed, sum(use["items"] for use in found["stores"] if use["store"] == "answers")

    with Pair(tmp_path, trusted_proxies=("127.0.0.1",)) as pair:
        for name, questions in (("alice", 2), ("ü", 1)):
            for i in range(questions):
                assert pair.post(f"question {i}", headers={"X-Semkv-Tenant": name.encode()}).status_code == 200
        pair.post("question", headers={"Authorization": "Bearer carol"})
        wait_until(lambda: held()[1] == 4)
        before = files_of(tmp_path)
        listed, _ = held()
        assert sorted(files_of(tmp_path)) == sorted(before)
    monkeypatch.delenv("SEMKV_SECRET", raising=False)
    assert sorted(count for _, count in listed) == [1, 1, 2]
    assert listed[0][0] in call("stats", "--cache-dir", str(tmp_path))
    for tenant, count in listed:
        assert held("--tenant", tenant) == ([(tenant, count)], count)
    assert held("--tenant", "alice") == ([], 0)
    monkeypatch.setenv("SEMKV_SECRET", GATEWAYS_SECRET)
    assert held("--tenant", "alice") == ([listed[0]], 2)
    assert held("--tenant", "ü")[1] == 1
    assert held("--tenant", "carol") == ([], 0)
    result = invoke(["stats", "--cache-dir", str(tmp_path), "--tenant", "alice"])
    assert "elsewhere than in catalog.sqlite" in result.stderr


@pytest.mark.parametrize("name", ["[/x]", "[bold]b", ":smile:", "a\x1b[31mb\n", "a' OR 1=1 --"])
def test_a_tenant_may_have_any_name(tmp_path: Path, name: str) -> None:
    with closing(SqliteStore(tmp_path / CATALOG)) as store:
        store.put(StoredResponse("key", name, "model", b"{}", time.time()))
    shown = name.replace("\x1b", "\\x1b").replace("\n", "\\n")
    for words in ((), ("--tenant", name)):
        out = call("stats", "--cache-dir", str(tmp_path), *words)
        assert "\x1b" not in out
        assert f"│ {shown} " in out
    assert f"tenant {shown}:" in out


@pytest.mark.parametrize("command", ["stats", "purge"])
def test_a_name_that_is_no_text_is_refused(used: Path, command: str) -> None:
    result = invoke([command, "--cache-dir", str(used), "--tenant", "\udcff"])
    assert result.exit_code == 2
    assert "UTF-8" in result.stderr


def test_purge_of_a_tenant_finds_its_blocks_and_encoder_outputs(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the salt of `semkv run`, by the gateway's, which takes the secret, and by one that a client sent itself."""
    store_for_tenants(used)
    for path in (used / "kv").glob("index.sqlite*"):  # whose they are stands in the files too
        path.unlink()

    def left() -> list[int]:
        return [len(block_files(used, store)) for store in ("kv", "fusion")]

    words = ("purge", "--cache-dir", str(used), "--tenant", "alice")
    assert left() == [8, 7]
    monkeypatch.delenv("SEMKV_SECRET", raising=False)
    assert "3 entries, 0 answers and 5 files" in call(*words)  # a picture, and two of each store
    assert "set SEMKV_SECRET" in invoke(words).stderr
    monkeypatch.setenv("SEMKV_SECRET", SECRET.decode())
    assert "0 entries, 0 answers and 2 files would" in call(*words, "--dry-run")
    assert "set SEMKV_SECRET" not in (said := invoke(words).stderr)
    assert "none has the salt" not in said
    assert "none has the salt" in invoke(words).stderr
    assert left() == [5, 4]
    monkeypatch.delenv("SEMKV_SECRET")
    (used / "secret").write_bytes(SECRET)
    call("purge", "--cache-dir", str(used), "--tenant", "bob", "--tag", "t")  # blocks have no tags
    assert left() == [5, 4]
    call("purge", "--cache-dir", str(used), "--tenant", "bob")
    assert left() == [2, 1]


def test_purge_of_the_one_tenant_of_a_single_tenant_gateway(used: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is empty; what came without any salt is nobody's, and stays."""
    store_kv(used, 99, tenant_tag(tenant_salt(b"secret", "", None)))
    monkeypatch.setenv("SEMKV_SECRET", "secret")
    result = invoke(["purge", "--cache-dir", str(used), "--tenant", ""])
    assert "0 entries, 0 answers and 1 files deleted" in result.stdout
    assert "without a salt" in result.stderr
    assert len(block_files(used, "kv")) == 2
