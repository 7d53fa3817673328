"""Files that other processes read, replace and delete meanwhile."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

STRAY_S = 3600.0
"""Age at which a temporary file is a dead writer's."""


def fsync_directory(path: Path) -> None:
    """Make a rename or deletion in ``path`` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path``, in full and durably, when the block ends without an exception.

    Until then it has a name that nobody else draws. Of several writers the last one's file stays.

    Raises:
        OSError: the disk is full or read-only; the temporary file is gone.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        fsync_directory(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write a file by `replacing`, in UTF-8."""
    with replacing(path) as file:
        file.write(text.encode())


def matching(root: Path, pattern: str) -> list[Path]:
    """What is there of a form; looked for again where another process took a folder away meanwhile."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return list(root.glob(pattern))


def described(paths: Iterable[Path]) -> list[tuple[Path, os.stat_result]]:
    """Files with the status of each, but for those that vanished meanwhile."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found.append((path, path.stat()))
    return found


def remove_strays(root: Path, pattern: str) -> int:
    """Delete the temporary files of a form that dead writers left; how many that were."""
    gone = 0
    for path, status in described(matching(root, pattern)):
        if time.time() - status.st_mtime > STRAY_S:
            with contextlib.suppress(OSError):
                path.unlink()
                gone += 1
    return gone
