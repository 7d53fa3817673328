"""The media store: bytes under their digest, whole or not at all, within a bound."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from semkv.errors import StoreError
from semkv.keys import media_id
from semkv.stores.media import MediaStore


def test_bytes_come_back_under_their_digest(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    name = store.put(b"picture")
    assert name == media_id(b"picture")
    assert store.get(name) == b"picture"
    file = store.path(name)
    assert file is not None
    assert file.read_bytes() == b"picture"
    assert store.nbytes == len(b"picture")


def test_a_picture_is_stored_once(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    assert store.put(b"picture") == store.put(b"picture")
    assert store.nbytes == len(b"picture")
    assert len([f for f in (tmp_path / "media").rglob("*") if f.is_file()]) == 1


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


def test_an_item_beyond_the_bound_is_not_stored(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media", max_bytes=10)
    assert store.get(store.put(b"x" * 11)) is None
    assert store.nbytes == 0


@pytest.mark.parametrize("name", ["../../etc/passwd", "A" * 64, "a" * 63, "", "a" * 64 + "\n"])
def test_only_a_digest_becomes_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="media id"):
        MediaStore(tmp_path).path(name)


def test_what_is_there_is_counted_when_opened(tmp_path: Path) -> None:
    MediaStore(tmp_path).put(b"x" * 100)
    assert MediaStore(tmp_path).nbytes == 100


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "media").write_text("")
    with pytest.raises(StoreError, match="media"):
        MediaStore(tmp_path / "media")
