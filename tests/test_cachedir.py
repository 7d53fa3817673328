"""Cache directories: whose they are, of which version, and what a purge removes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from semkv.errors import StoreError
from semkv.experiments.settings import RunFlags, resolve
from semkv.stores.cachedir import prepare, purge_directory


def config(root: Path, **flags: Any) -> Any:
    return resolve(RunFlags(preset="opt-125m", cache_dir=root, **flags)).cache


def test_a_purge_removes_what_semkv_wrote_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    prepare(config(root))
    ours = ["catalog.sqlite", "catalog.sqlite-wal", "media/ab/" + "ab" * 32, "kv/semkv.json", "kv/index.sqlite"]
    ours += ["kv/extents/0a/0a11.safetensors", "fusion/semkv.json", "fusion/extents/0b/0b11.safetensors"]
    theirs = ["notes.txt", "kv/notes.txt", "thesis/catalog.sqlite"]
    for name in ours + theirs:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text('{"format": 1}' if name.endswith(".json") else "x", encoding="utf-8")
    prepare(config(root), purge=True)
    (root / "semkv.json").unlink()
    assert sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()) == sorted(theirs)


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


def test_a_purge_follows_no_link_out(tmp_path: Path) -> None:
    root, outside = tmp_path / "cache", tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x", encoding="utf-8")
    prepare(config(root))
    (root / "media").mkdir()
    (root / "media" / "ab").symlink_to(outside, target_is_directory=True)
    purge_directory(root)
    assert (outside / "precious").exists()


@pytest.mark.parametrize("where", ["semkv.json", "kv/semkv.json", "fusion/semkv.json"])
@pytest.mark.parametrize("content", ['{"format": 99}', "not json", "[]"])
def test_a_directory_of_another_version_is_refused_and_can_be_purged(tmp_path: Path, where: str, content: str) -> None:
    root = tmp_path / "cache"
    prepare(config(root))
    (root / where).parent.mkdir(exist_ok=True)
    (root / where).write_text(content, encoding="utf-8")
    with pytest.raises(StoreError, match="another version"):
        prepare(config(root))
    prepare(config(root), purge=True)
    assert json.loads((root / "semkv.json").read_text(encoding="utf-8"))["format"] == 1


def test_a_fusion_directory_elsewhere_is_purged_too(tmp_path: Path) -> None:
    root, fusion = tmp_path / "cache", tmp_path / "fusion"
    (fusion / "extents" / "0b").mkdir(parents=True)
    (fusion / "semkv.json").write_text('{"format": 1}', encoding="utf-8")
    (fusion / "extents" / "0b" / "0b.safetensors").write_text("x", encoding="utf-8")
    prepare(config(root, fusion_cache_dir=fusion), purge=True)
    assert list(fusion.rglob("*")) == []
