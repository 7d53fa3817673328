"""The bytes of images, under the digest of their content.

A donor's image must still be there when it stands in for another one, so recorded prompts leave their images here.
"""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from pathlib import Path

from semkv.errors import StoreError
from semkv.keys import media_id as digest_of
from semkv_stores.files import delete_all, described, make_folder, matching, read_bytes, replacing

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NEW = ".tmp"  # ends the name of a file that is being written


class MediaStore:
    """Content-addressed files below one directory, bounded in bytes; the least recently used go first.

    Files are written under a temporary name and renamed, so a reader sees a whole file or none. Several processes may
    share a directory: each may go beyond the bound by a sixteenth of it. Paths come from digests alone.

    Args:
        root: the directory; made when missing.
        max_bytes: bound on what is stored; a single larger item is not stored.

    Attributes:
        nbytes: stored or being written, as far as this process knows.

    Raises:
        StoreError: the directory cannot be made.
    """

    def __init__(self, root: Path, *, max_bytes: int = 4 << 30) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        try:
            make_folder(root)
            self.nbytes = sum(status.st_size for _, status in self._files())
            self._written = 0
        except OSError as error:
            raise StoreError(f"media store {root}: {error.strerror or error}") from error

    def _where(self, media_id: str) -> Path:
        if not _DIGEST.fullmatch(media_id):
            raise ValueError("a media id is a lowercase hex SHA-256")
        return self.root / media_id[:2] / media_id

    def put(self, data: bytes) -> str:
        """Store bytes and return their id.

        Raises:
            OSError: the file cannot be written.
        """
        media_id = digest_of(data)
        target = self._where(media_id)
        if target.exists() or len(data) > self.max_bytes:
            return media_id
        make_folder(target.parent)
        with replacing(target, private=True, durable=False) as file:
            file.write(data)
        with self._lock:
            self.nbytes += len(data)
            self._written += len(data)
            if self.nbytes > self.max_bytes or self._written > self.max_bytes // 16:
                self._keep_bound()
        return media_id

    def path(self, media_id: str) -> Path | None:
        """The stored file, unverified, or None."""
        file = self._where(media_id)
        return file if file.exists() else None

    def get(self, media_id: str) -> bytes | None:
        """The stored bytes, or None where they are missing or no longer what their name says.

        A file that fails its digest is deleted.
        """
        file = self._where(media_id)
        try:
            data = read_bytes(file)
        except (OSError, StoreError):
            return None
        with suppress(OSError):  # another user's, or a read-only disk
            os.utime(file)  # recently used
        if digest_of(data) == media_id:
            return data
        self.delete(media_id)
        return None

    def delete(self, media_id: str) -> None:
        """Forget an item; nothing happens where it is not stored."""
        file = self._where(media_id)
        try:
            size = file.stat().st_size
            file.unlink()
        except OSError:
            return
        with self._lock:
            self.nbytes -= size

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        found = described(matching(self.root, "??/*"))
        return [
            (file, s)
            for file, s in found
            if _DIGEST.fullmatch(file.name) or file.name.endswith(_NEW)
        ]

    def _keep_bound(self) -> None:
        """Count anew, with what other processes wrote, and bring what is over the bound down to nine tenths of it."""
        found = self._files()
        self.nbytes = sum(status.st_size for _, status in found)
        self._written = 0
        if self.nbytes <= self.max_bytes:
            return
        for file, status in sorted(found, key=lambda row: row[1].st_mtime):
            if self.nbytes <= self.max_bytes * 9 // 10:
                return
            if not delete_all([file]):
                self.nbytes -= status.st_size


def check_image(file: Path) -> str:
    """Read an item from end to end: what is wrong with it, or an empty string.

    Raises:
        OSError: it cannot be read, which says nothing of what is in it.
    """
    try:
        return (
            ""
            if digest_of(read_bytes(file)) == file.name
            else f"{file.name} is not what its name says"
        )
    except FileNotFoundError:  # it was evicted
        return ""
