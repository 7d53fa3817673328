"""The directory of one block store.

<root>/semkv.json               format version and kind
<root>/open.lock                held by the one process that opens, repairs or empties the directory
<root>/index.sqlite             which file holds which block
<root>/extents/ab/ab12....safetensors
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from semkv.errors import CorruptValue, StoreError
from semkv.stores.block_file import FORMAT_VERSION, BlockFile, part_of
from semkv.stores.block_index import INDEX_FAULTS, BlockIndex, NewFile, Selection, is_damage
from semkv.stores.files import FileId, check_private, check_regular, file_id, lock, make_folder, open_file, replace_text

log = logging.getLogger("semkv.stores")

MARKER = "semkv.json"
LOCK = "open.lock"
INDEX = "index.sqlite"
FILES = "extents"
_SUFFIX = ".safetensors"
_HEX = set("0123456789abcdef")


def path_of(root: Path, file: str) -> Path:
    """Where a block file lies. Ids are drawn by the index: 16 hex digits."""
    return root / FILES / file[:2] / f"{file}{_SUFFIX}"


def listed(root: Path) -> Iterator[tuple[str, Path, os.stat_result]]:
    """All that lies where block files do, with the id in its name, which is empty for any other name. No link is
    followed.

    Raises:
        OSError: a folder cannot be read.
    """
    for folder in _entries(root / FILES):
        for entry in _entries(Path(folder.path)) if folder.is_dir(follow_symlinks=False) else ():
            file, path = entry.name.removesuffix(_SUFFIX), Path(entry.path)
            ours = len(file) == 16 and set(file) <= _HEX and path == path_of(root, file)
            with contextlib.suppress(FileNotFoundError):
                yield file if ours else "", path, entry.stat(follow_symlinks=False)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):  # a purge, or somebody else, took it away
        return []


def unlink(root: Path, file: str) -> None:
    """Delete a block file, also one that is being written, where that is possible; what stays is swept later."""
    path = path_of(root, file)
    for name in (path, part_of(path)):
        with contextlib.suppress(OSError):
            name.unlink()


def _found(root: Path, kind: str, counters: Counter[str]) -> Iterator[NewFile]:
    """The block files that are there, by their headers, the youngest first. Damaged ones are deleted, and counted as
    ``corrupt``.

    Raises:
        OSError: a folder cannot be read, or the process has no descriptor or memory left.
    """
    there = sorted((-status.st_mtime, file) for file, _, status in listed(root) if file)
    for mtime, file in there:
        try:
            with BlockFile.open(path_of(root, file), kind, file) as opened:
                head, created = opened.header, min(max(0.0, -mtime), 1e11)
                yield NewFile(
                    file, opened.nbytes, created, head.namespace, opened.keys, owner=head.owner, writer=head.writer
                )
        except CorruptValue as error:
            counters["corrupt"] += 1
            log.warning("semkv: dropped a damaged block file of %s: %s", root, error)
            unlink(root, file)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # the file is not to blame
                raise
            unlink(root, file)


@contextlib.contextmanager
def opening(root: Path, *, wait_s: float, make: bool = True) -> Iterator[None]:
    """One process at a time opens, repairs or empties a directory; see `files.lock`.

    Raises:
        StoreError: it is a file.
        OSError: see `files.lock`.
    """
    if root.is_file():
        raise StoreError(f"{root} is a file, not a directory: choose another cache directory")
    with lock(root / LOCK, make=make, wait_s=wait_s):
        yield


def prepare(root: Path, kind: str, *, read_only: bool = False) -> None:
    """Mark a directory as ours, or see that it is of this format and kind; in `opening` where it can be written.

    One of an older format is emptied: it is a cache.

    Raises:
        StoreError: it is of a newer format or another kind, others can write into it, or there are links in it.
        OSError: it cannot be read or written.
    """
    check_private(root)
    for suffix in ("", "-wal", "-shm"):
        check_regular(root / f"{INDEX}{suffix}")
    if (root / FILES).is_symlink():
        raise StoreError(f"{root / FILES} is a link: delete it, or choose another cache directory")
    marker = read_marker(root)
    version = FORMAT_VERSION if marker is None else marker.get("format")
    if marker and isinstance(version, int) and version > FORMAT_VERSION:
        raise StoreError(
            f"{root} has format {version}, this version of semkv reads {FORMAT_VERSION}: update semkv, "
            "empty the directory with 'semkv run --purge', or choose another cache directory"
        )
    if marker and "kind" in marker and marker["kind"] != kind:
        raise StoreError(f"{root} is a store of kind {marker['kind']!r}, not {kind!r}: choose another cache directory")
    if read_only:
        if marker is None or version != FORMAT_VERSION:
            raise OSError(errno.EROFS, f"nothing of format {FORMAT_VERSION} is there, and the disk is read-only")
        return
    if version != FORMAT_VERSION:
        gone = discard_files(root)
        log.warning(
            "semkv: %s had format %s and is emptied for format %s: %d files", root, version, FORMAT_VERSION, gone
        )
    make_folder(root / FILES)
    if marker is None or version != FORMAT_VERSION:
        replace_text(root / MARKER, json.dumps({"format": FORMAT_VERSION, "kind": kind}), private=True)


def read_marker(root: Path) -> dict[str, Any] | None:
    """What the marker says; None where there is none, empty where it is damaged.

    Raises:
        StoreError: it is a link, a folder, a device or a pipe.
        OSError: it cannot be read.
    """
    try:
        with os.fdopen(open_file(root / MARKER, os.O_RDONLY), "rb") as file:
            found = json.loads(file.read(1 << 16))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def discard_files(root: Path) -> int:
    """Delete the index and all block files, of any format; how many files that were."""
    discard_index(root)
    gone = 0
    for _, path, _ in listed(root):
        with contextlib.suppress(OSError):
            path.unlink()
            gone += 1
    return gone


def discard_index(root: Path) -> None:
    """Delete the index. The next process that opens the directory builds it again. Call it in `opening`."""
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(OSError):
            (root / f"{INDEX}{suffix}").unlink()


def open_index(root: Path, kind: str, counters: Counter[str], *, damaged: FileId | None, wait_s: float) -> BlockIndex:
    """Prepare a directory and open its index, which is built anew where it is missing or damaged.

    A read-only directory is opened as it is, with a warning.

    Args:
        root, kind: see `prepare`.
        counters: where damaged block files are counted, as ``corrupt``.
        damaged: an index that is known to be damaged.
        wait_s: how long to wait for another process that opens the directory.

    Raises:
        StoreError: see `prepare`.
        BlockingIOError: another process is still at it.
        OSError, sqlite3.Error: the disk fails.
    """
    path, unlink_file = root / INDEX, partial(unlink, root)

    def opened() -> BlockIndex:
        if not check_regular(path):  # SQLite gives the files beside it the same mode
            os.close(open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        return BlockIndex(path, lambda: _found(root, kind, counters), unlink_file)

    try:
        with opening(root, wait_s=wait_s):
            prepare(root, kind)
            if damaged is not None and file_id(path) == damaged:
                discard_index(root)
            try:
                return opened()
            except INDEX_FAULTS as error:
                if not is_damage(error):
                    raise
                log.warning("semkv: rebuilding the index of %s (%s)", root, error)
                discard_index(root)
                return opened()
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        prepare(root, kind, read_only=True)
        log.warning("semkv: nothing is written to %s (%s); what is there is used", root, error)
        return BlockIndex(path, lambda: (), unlink_file, read_only=True)


def empty_index(root: Path) -> bool:
    """Purge everything from the index, in `opening`; the files must go.

    Returns:
        Whether another process has the index open, so that it must stay.
    """
    index = root / INDEX
    try:
        if read_marker(root) and check_regular(index):
            opened = BlockIndex(index, lambda: (), partial(unlink, root))
            try:
                opened.purge(Selection())
            finally:
                opened.close()
            # The last connection takes the log along.
            if index.with_name(f"{INDEX}-wal").exists() and file_id(index):
                return True
    except (OSError, StoreError, *INDEX_FAULTS):
        pass  # of no use to anybody
    discard_index(root)
    return False
