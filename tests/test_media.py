"""The media store: bytes under their digest, whole or not at all, within a bound."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from semkv.stores.media import MediaStore


def test_damaged_bytes_are_deleted_and_not_returned(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    name = store.put(b"picture")
    file = store.path(name)
    assert file is not None
    file.write_bytes(b"picturE")
    assert store.get(name) is None
    assert not file.exists()
    assert store.put(b"picture") == name
    assert store.get(name) == b"picture"


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media", max_bytes=3000)
    names = [store.put(bytes([i]) * 1000) for i in range(3)]
    for age, name in enumerate(names):
        file = store.path(name)
        assert file is not None
        os.utime(file, (1000 + age, 1000 + age))
    assert store.get(names[0]) is not None
    last = store.put(b"x" * 1000)
    assert store.get(last) is not None
    assert store.get(names[0]) is not None
    assert store.get(names[1]) is None
    assert store.nbytes <= 3000


@pytest.mark.parametrize("name", ["../../etc/passwd", "A" * 64, "a" * 63, "", "a" * 64 + "\n"])
def test_only_a_digest_becomes_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="media id"):
        MediaStore(tmp_path).path(name)


def test_several_writers_keep_near_the_bound_and_a_purge_ends_none(tmp_path: Path) -> None:
    stores = [MediaStore(tmp_path / "media", max_bytes=32_000) for _ in range(4)]
    for number in range(200):
        stores[number % 4].put(number.to_bytes(1000, "big"))
    assert MediaStore(tmp_path / "media").nbytes <= 32_000 * (1 + 4 / 16)
    shutil.rmtree(tmp_path / "media")
    assert stores[0].get(stores[1].put(b"picture")) == b"picture"


def test_what_a_killed_writer_left_counts_and_goes(tmp_path: Path) -> None:
    store = MediaStore(tmp_path, max_bytes=3000)
    name = store.put(b"x" * 100)
    (tmp_path / name[:2] / "mine.txt").write_bytes(b"x" * 5000)  # nobody asked for that
    old = tmp_path / name[:2] / "old.tmp"
    old.write_bytes(b"x" * 1000)
    os.utime(old, (1, 1))
    assert MediaStore(tmp_path).nbytes == 1100
    for byte in b"ab":
        store.put(bytes([byte]) * 1000)  # together too much
    assert MediaStore(tmp_path).nbytes == store.nbytes == 2100
    assert not old.exists()
    assert (tmp_path / name[:2] / "mine.txt").exists()


def test_a_file_of_another_user_is_served_and_stops_no_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MediaStore(tmp_path, max_bytes=3000)
    names = [store.put(bytes([i]) * 1000) for i in range(3)]
    for age, name in enumerate(names):
        os.utime(tmp_path / name[:2] / name, (1000 + age, 1000 + age))
    unlink, theirs = Path.unlink, store.path(names[0])

    def refuse(path: Path, *_: object, **__: object) -> None:
        if path == theirs:
            raise PermissionError(1, "Operation not permitted")
        unlink(path)

    monkeypatch.setattr(os, "utime", lambda path: path == theirs and refuse(path))
    monkeypatch.setattr(Path, "unlink", refuse)
    assert store.get(names[0]) is not None
    last = store.put(b"x" * 1000)
    assert [store.path(name) is not None for name in (*names, last)] == [True, False, False, True]
