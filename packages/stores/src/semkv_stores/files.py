"""Files that other processes read, replace and delete meanwhile; folders and files that only their owner can read."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from semkv_stores.errors import StoreError

FileId = tuple[int, int]
"""Device and inode: two files that are there at the same time never have the same. One that is open is there."""

_FOLDER, _FILE = 0o700, 0o600
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LOCK_POLL_S = 0.002


def file_id(path: Path) -> FileId | None:
    """Which file has this name at this moment; None where there is none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, which only this user can enter."""
    for part in (*reversed(folder.parents), folder):
        if not part.is_dir():
            part.mkdir(_FOLDER, exist_ok=True)


def check_private(folder: Path) -> None:
    """See that nobody else can write into a folder, and that nobody else can read it where that is ours to say.

    Raises:
        StoreError: others can write into it.
        OSError: it is not there.
    """
    status = folder.stat()
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o022:
        raise StoreError(
            f"{folder} can be written by other users (mode {mode:03o}): run 'chmod 700 {folder}' "
            "if you trust what is in it, or choose another cache directory"
        )
    if mode & 0o055 and status.st_uid == os.geteuid():
        with contextlib.suppress(OSError):  # a read-only disk
            folder.chmod(_FOLDER)


def open_file(path: Path, flags: int, mode: int = _FILE) -> int:
    """Open a regular file, made for its owner only where ``flags`` say so; a link is not followed.

    Raises:
        StoreError: it is a link, a folder, a device or a pipe.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | _OPEN, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _strange(path) from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise _strange(path)


def read_bytes(path: Path, most: int = -1) -> bytes:
    """What is in a regular file, or its first bytes. Raises as `open_file`."""
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        return file.read(most)


def check_regular(path: Path) -> bool:
    """Whether a file is there. Raises a StoreError where it is a link, a folder, a device or a pipe."""
    try:
        regular = stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False
    if not regular:
        raise _strange(path)
    return True


def _strange(path: Path) -> StoreError:
    return StoreError(f"{path} is not a regular file: delete it, or choose another cache directory")


@contextmanager
def lock(path: Path, wait_s: float) -> Iterator[None]:
    """One process, and one thread of it, at a time. The file is made where it is missing, and stays.

    Raises:
        StoreError: it is not a regular file.
        BlockingIOError: another one still holds it after ``wait_s``.
    """
    until = time.monotonic() + wait_s
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def replacing(
    path: Path,
    *,
    private: bool = False,
    durable: bool = True,
) -> Iterator[BinaryIO]:
    """A file to write that takes the place of ``path``, in full, when the block ends without an exception.

    Of several writers the last one's file stays. ``private``: only its owner can read it. ``durable``: after a power
    cut too there is the old one or the new one.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        mode = _FILE if private else 0o666
        with os.fdopen(open_file(part, flags, mode), "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file by `replacing`, in UTF-8."""
    with replacing(path, private=private) as file:
        file.write(text.encode())


def matching(root: Path, pattern: str) -> list[Path]:
    """What is there of a form; looked for again where another process took a folder away meanwhile."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return list(root.glob(pattern))


def described(paths: Iterable[Path]) -> list[tuple[Path, os.stat_result]]:
    """The regular files among some paths, with the status of each, but for those that vanished meanwhile or lie in a
    folder that is closed to this user."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            if stat.S_ISREG((status := path.lstat()).st_mode):
                found.append((path, status))
    return found


def delete_all(paths: Iterable[Path]) -> list[str]:
    """Delete files, also those that vanished meanwhile. Returns a line for each that cannot be deleted."""
    left = []
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            left.append(f"{path} cannot be deleted ({error.strerror or error})")
    return left


def in_short(lines: Sequence[str]) -> str:
    """The first ten of some lines, and how many more there are."""
    return "; ".join(lines[:10]) + f"; and {len(lines) - 10} more" * (len(lines) > 10)
