"""Cache directories: whose they are, of which version, and what a purge removes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from block_helpers import open_store, save
from maintenance_helpers import left
from semkv.errors import StoreError
from semkv.stores.blocks import BlockStore
from semkv.stores.maintenance import prepare, purge_directory
from semkv_lab.settings import resolve


def config(root: Path, **flags: Any) -> Any:
    return resolve(preset="opt-125m", cache_dir=root, **flags).cache


def test_a_purge_removes_what_semkv_wrote_and_nothing_else(tmp_path: Path) -> None:
    root, fusion, outside = tmp_path / "cache", tmp_path / "fusion", tmp_path / "outside"
    prepare(config(root))
    for store in (open_store(root / "kv"), BlockStore(root / "fusion", "fusion"), BlockStore(fusion, "fusion")):
        assert save(store, 0, 2)
        store.close()
    ours = ["catalog.sqlite.damaged", "media/ab/" + "ab" * 32, "policy.json"]
    ours += ["kv/extents/0a/0a11.safetensors", f"weights/{'0a' * 32}.json", f"weights/{'0a' * 32}.json.0a11.tmp"]
    theirs = [
        "notes.txt",
        "secret",
        "kv/notes.txt",
        "media/notes.txt",
        "thesis/catalog.sqlite.damaged",
        "weights/config.json",
    ]
    for name in ours + theirs:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    outside.mkdir()
    (outside / "precious").write_text("x")
    (root / "media" / "cd").symlink_to(outside, target_is_directory=True)
    assert purge_directory(root, dry_run=True) == len(ours) + 2
    assert len(left(root)) == len(ours + theirs) + 2
    prepare(config(root, fusion_cache_dir=fusion), purge=True)
    assert left(root) == sorted(theirs)
    assert left(fusion) == []
    assert (outside / "precious").exists()
    assert purge_directory(root) == 0


def test_a_purge_refuses_a_directory_that_is_not_a_cache(tmp_path: Path) -> None:
    (tmp_path / "catalog.sqlite").write_text("mine", encoding="utf-8")
    with pytest.raises(StoreError, match="is not a semkv cache"):
        prepare(config(tmp_path), purge=True)
    with pytest.raises(StoreError, match="holds files that are not semkv's"):
        prepare(config(tmp_path))
    assert (tmp_path / "catalog.sqlite").read_text(encoding="utf-8") == "mine"
    assert purge_directory(tmp_path / "none") == 0
    with pytest.raises(StoreError, match="is a file"):
        prepare(config(tmp_path / "catalog.sqlite"))


def test_what_is_made_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    prepare(config(tmp_path / "a" / "cache"))
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "a").rglob("*")} == {0}
