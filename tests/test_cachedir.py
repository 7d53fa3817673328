"""Cache directories: whose they are, of which version, and what a purge removes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from block_helpers import found, open_store, right, save
from semkv.errors import StoreError
from semkv.stores import cachedir
from semkv.stores.cachedir import BLOCK_FILES, prepare, purge_directory
from semkv.stores.fusion import FusionStore
from semkv_lab.flags import RunFlags
from semkv_lab.settings import resolve


def config(root: Path, **flags: Any) -> Any:
    return resolve(RunFlags(preset="opt-125m", cache_dir=root, **flags)).cache


def test_a_purge_removes_what_semkv_wrote_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    prepare(config(root))
    ours = ["catalog.sqlite", "catalog.sqlite-wal", "media/ab/" + "ab" * 32, "kv/semkv.json", "kv/index.sqlite"]
    ours += ["kv/extents/0a/0a11.safetensors", "fusion/semkv.json", "fusion/extents/0b/0b11.safetensors"]
    ours += [f"weights/{'0a' * 32}.json", f"weights/{'0a' * 32}.json.0a11.tmp"]
    theirs = ["notes.txt", "kv/notes.txt", "thesis/catalog.sqlite", "weights/config.json"]
    for name in ours + theirs:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text('{"format": 1}' if name.endswith(".json") else "x", encoding="utf-8")
    (root / "kv/extents/0c").mkdir()  # as a repair leaves it
    prepare(config(root), purge=True)
    assert not (root / "kv/extents").exists()
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


class CutOff(Exception):  # noqa: N818
    """The purge ends here."""


class Steps:
    """Something happens before step ``at`` of what deletes files and folders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, happens: Callable[[], object]) -> None:
        self.done, self._at, self._happens, self._running = 0, at, happens, False
        for name in ("unlink", "rmdir"):
            monkeypatch.setattr(Path, name, self._before(getattr(Path, name)))

    def _before(self, real: Callable[..., None]) -> Callable[..., None]:
        def step(path: Path, *args: Any, **kwargs: Any) -> None:
            if not self._running:
                self._running = True
                try:
                    if self.done == self._at:
                        self._happens()
                    self.done += 1
                finally:
                    self._running = False
            real(path, *args, **kwargs)

        return step


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_who_opens_a_store_at_any_step_of_a_purge_has_a_whole_one(
    tmp_path: Path, elsewhere: bool, running: bool
) -> None:
    """An engine that runs, or one that starts before step 0, 1, 2 ... of a purge, stores something where it may."""
    at = 0
    while True:
        cache = tmp_path / str(at)
        root = cache if elsewhere else cache / "kv"  # a folder of blocks alone is a store itself
        engine = open_store(root)
        assert save(engine, 0)
        if not running:
            engine.close()

        def happens(engine: Any = engine, root: Path = root) -> None:
            store = engine if running else open_store(root)
            save(store, 1)
            if not running:
                store.close()

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr("semkv.stores.blocks._OPEN_S", 0.0)
            steps = Steps(monkeypatch, at, happens)
            purge_directory(cache, BLOCK_FILES) if elsewhere else purge_directory(cache)
        assert (root / "semkv.json").exists() == (root / "index.sqlite").exists() == (root / "open.lock").exists()
        assert not running or (root / "index.sqlite").exists()
        for store in (engine, open_store(root)) if running else (open_store(root),):
            assert found(store, 0) == 0
            save(store, 1)
            assert right(store, 1, 1) == 1
            store.close()
        purge_directory(cache, BLOCK_FILES) if elsewhere else purge_directory(cache)
        assert not any(cache.rglob("*"))
        if steps.done <= at:
            break
        at += 1
    assert at > 2


def test_a_purge_that_was_cut_off_at_any_step_can_be_repeated(tmp_path: Path) -> None:
    def cut() -> None:
        raise CutOff

    at = 0
    while True:
        cache = tmp_path / str(at)
        prepare(config(cache))
        open_store(cache / "kv").close()
        FusionStore.open(cache / "fusion", "ns").close()
        with pytest.MonkeyPatch.context() as monkeypatch, contextlib.suppress(CutOff):
            steps = Steps(monkeypatch, at, cut)
            purge_directory(cache)
        prepare(config(cache), purge=True)
        assert not (cache / "kv" / "semkv.json").exists()
        prepare(config(cache))
        if steps.done < at:
            break
        at += 1
    assert at > 5


def test_a_store_that_is_made_beside_a_purge_stays_whole(tmp_path: Path) -> None:
    """The purge does not hold its lock."""
    FusionStore.open(tmp_path / "fusion", "ns").close()
    engines, real = [], cachedir.empty_index

    def beside(root: Path) -> bool:
        engines.append(open_store(tmp_path / "kv"))
        assert save(engines[0], 1)
        return real(root)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cachedir, "empty_index", beside)
        purge_directory(tmp_path)
    assert not [path for path in (tmp_path / "fusion").rglob("*") if path.is_file()]
    for store in (*engines, open_store(tmp_path / "kv")):
        assert right(store, 1, 1) == 1
        store.close()


@pytest.mark.parametrize("where", ["kv", "fusion"])
def test_a_store_of_an_older_format_is_taken_and_empties_itself(tmp_path: Path, where: str) -> None:
    prepare(config(tmp_path))
    (tmp_path / where).mkdir(0o700)
    (tmp_path / where / "semkv.json").write_text(json.dumps({"format": 1, "kind": where}), encoding="utf-8")
    prepare(config(tmp_path))
    opened = open_store(tmp_path / where) if where == "kv" else FusionStore.open(tmp_path / where, "ns")
    opened.close()
    assert json.loads((tmp_path / where / "semkv.json").read_text(encoding="utf-8"))["format"] == 2
    prepare(config(tmp_path))


def test_what_is_made_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    prepare(config(tmp_path / "a" / "cache"))
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "a").rglob("*")} == {0}


@pytest.mark.parametrize("look", ["_empty", "is_ours"])
def test_a_purge_beside_another_is_no_fault(tmp_path: Path, look: str) -> None:
    """The other one takes everything before or after this one looks whether there is anything."""
    prepare(config(tmp_path))
    FusionStore.open(tmp_path / "fusion", "ns").close()
    real = getattr(cachedir, look)

    def late(root: Path) -> bool:
        monkeypatch.undo()
        found: bool = real(root)
        purge_directory(root)
        return found

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(cachedir, look, late)
    purge_directory(tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
