"""A cache that was really used, and the commands that look after it."""

from __future__ import annotations

import hashlib
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vllm_forks
from command_line import invoke
from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.stores.maintenance import prepare
from semkv.types import MediaSegment, Namespace, Request, TextSegment
from semkv_stores.blocks import BlockStore
from semkv_stores.fusion import FusionState, FusionStore

SECRET = b"a secret of the deployment"


def call(*words: str, exit_code: int = 0) -> str:
    result = invoke(list(words))
    assert result.exit_code == exit_code, result.output
    return result.stdout


def purge(cache_dir: Path, *selection: str) -> None:
    """As an operator does it, in a process of its own."""
    python = vllm_forks.prepare() / "python"  # in which all is imported already
    command = [python, "-m", "semkv", "purge", "--cache-dir", str(cache_dir), *selection]
    subprocess.run(command, check=True, capture_output=True)


def refused(*words: str) -> str:
    """What a command that cannot be done says."""
    result = invoke(list(words))
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


def make_used(tmp_path: Path) -> Path:
    """Two tenants with three entries and a picture each, two KV block files, one fusion state."""
    root = tmp_path / "cache"
    config = CacheConfig(root, semantic=False)
    prepare(config)
    cache = SemanticCache(config)
    for tenant in ("alice", "bob"):
        namespace = Namespace(tenant, "model")
        picture = tmp_path / f"{tenant}.jpg"
        picture.write_bytes(f"the picture of {tenant}".encode())
        media = MediaSegment(digest_of(picture), picture, tenant)
        for i in range(3):
            segments = (media, TextSegment(f"question {i}"))
            report = cache.try_reuse(
                Request(f"{tenant}{i}", namespace, segments, tags=("t",) * (i > 0))
            )
            cache.add_observation(
                report, "yes", metadata={"model": "a-model"} if tenant == "bob" else None
            )
    cache.close()
    for i in range(2):
        store_kv(root, i)
    fusion = FusionStore.open(root / "fusion", "ns")
    fusion.save(FusionState.from_array("key", np.zeros((2, 3), np.float32)))
    fusion.close()
    return root


def store_kv(root: Path, i: int, owner: str = "") -> None:
    with closing(BlockStore(root / "kv", "kv")) as kv:
        assert kv.write("ns", {}, [bytes([i]) * 32], [np.full(256, i, np.uint8)], owner=owner)


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def block_files(root: Path, store: str) -> list[Path]:
    return sorted((root / store / "extents").glob("??/*.safetensors"))


def files_of(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes() if p.is_file() else b"" for p in root.rglob("*")
    }


def left(root: Path) -> list[str]:
    """The files that are there, but for those in which an empty store consists."""
    stays = ("index.sqlite", "catalog.sqlite", ".lock", "-wal", "-shm")
    return sorted(
        str(p.relative_to(root))
        for p in root.rglob("*")
        if p.is_file() and not p.name.endswith(stays)
    )


def files_with(folder: Path, *needles: bytes) -> list[str]:
    """The files that have any of these bytes."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(f.name for f in files if any(needle in f.read_bytes() for needle in needles))


def without_secure_delete(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a build of SQLite that leaves deleted content in the file; some builds overwrite it of themselves."""
    real = sqlite3.connect

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        db = real(*arguments, **options)
        db.execute("PRAGMA secure_delete=OFF")
        return db

    monkeypatch.setattr(sqlite3, "connect", connect)
