"""Opening and emptying a cache directory.

A directory belongs to semkv when one of the places where a store lives has a ``semkv.json``, or when it has a database
of ours. A purge empties the databases and the block stores in place, so that processes that have them open hear of it
and go on, and deletes the other files that semkv writes, by their form. Files that a user put there stay.
"""

from __future__ import annotations

import errno
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

from semkv.config import CacheConfig
from semkv.errors import StoreError
from semkv.stores import database
from semkv.stores.block_file import FILES, FORMAT_VERSION, INDEX, MARKER, discard_files, read_marker
from semkv.stores.blocks import BlockStore, Bounds
from semkv.stores.database import CATALOG
from semkv.stores.files import make_folder as make_private
from semkv.stores.files import matching, replace_text
from semkv.stores.responses.ahead import replay

FORMAT = 1
_STORES = ("kv", "fusion")
_WAIT_S = 5.0  # for processes that write to the database
_MARK = json.dumps({"format": FORMAT, "kind": "cache"})

# What semkv writes into a cache directory besides databases and block stores.
CACHE_FILES = (
    f"{CATALOG}.damaged",
    "media/??/*",
    "policy.json",
    "policy.json.*.tmp",
    f"weights/{'?' * 64}.json",  # what the connectors noted of checkpoints
    f"weights/{'?' * 64}.json.*.tmp",
    f"{MARKER}.*.tmp",
)


def prepare(config: CacheConfig, *, purge: bool = False) -> None:
    """Make the cache directory ready: empty it where asked, check its version, mark it as ours.

    Raises:
        StoreError: it is no directory, cannot be written, holds something else, or was written by another version.
    """
    root, fusion = config.cache_dir, config.fusion_cache_dir
    for folder in (root,) if fusion is None else (root, fusion):
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"{folder} is a file; a cache lives in a directory of its own")
        if purge:
            purge_directory(folder)
        _check(folder)
    if (root / MARKER).exists():
        return
    if not is_ours(root) and root.is_dir() and not _has_no_files(root):
        raise StoreError(f"{root} holds files that are not semkv's; choose an empty or new --cache-dir")
    make_folder(root)
    try:
        replace_text(root / MARKER, _MARK, private=True)
    except OSError as error:
        raise _unusable(root, error) from error


def purge_directory(root: Path, *, dry_run: bool = False) -> int:
    """Delete what semkv wrote below ``root``, a cache directory or that of a block store alone.

    Returns:
        How many files of images, KV, encoder outputs and so on went, or with ``dry_run`` would go.

    Raises:
        StoreError: the directory holds files and no sign that they are semkv's, or not all could be deleted.
    """
    if not root.is_dir() or _has_no_files(root):
        return 0
    if not is_ours(root):
        raise StoreError(f"{root} is not a semkv cache (no {MARKER}): it is not purged")
    stores = _stores(root)
    files = {file for pattern in CACHE_FILES for file in _files(root, pattern)}
    blocks = {file for store in stores for file in _files(root, f"{store.relative_to(root)}/{FILES}/??/*")}
    if dry_run:
        return len(files | blocks)
    # Files first: it may be a full disk that is purged.
    for store in stores:
        _empty_store(store)
    for file in files:
        file.unlink(missing_ok=True)
    left = _empty_database(root / CATALOG)
    for folder in matching(root, "ahead*"):  # responses on their way to this store, or to another
        replay(folder, lambda response, since: True)
    for pattern in CACHE_FILES:  # what was written until then, and a damaged database that was put aside
        for file in _files(root, pattern):
            file.unlink(missing_ok=True)
    marker = read_marker(root)
    if marker is not None and marker.get("format") != FORMAT and root not in stores:
        replace_text(root / MARKER, _MARK, private=True)
    if left:
        raise StoreError(left)
    return len(files | blocks)


def _empty_store(root: Path) -> None:
    """Delete all blocks; one that this version cannot read goes as a whole."""
    marker = read_marker(root) or {}
    version, kind = marker.get("format"), marker.get("kind")
    if kind in _STORES and isinstance(version, int) and version <= FORMAT_VERSION:
        with closing(BlockStore(root, kind, Bounds(max_bytes=0))) as store:
            store.purge()
            if store.counters["errors"] or not store.writable:
                raise StoreError(f"{root}: not all could be deleted, purge again")
        return
    with database.opening(root / INDEX):
        discard_files(root)
    (root / MARKER).unlink(missing_ok=True)


def _empty_database(file: Path) -> str:
    """What is left, for people. Another program's stays. One that cannot be emptied, since it is damaged, of a newer
    format, or the disk is full, goes as a whole: processes that have it open begin a new one."""
    if not database.is_filled(file) or database.is_ours(file) is False:
        return ""
    try:
        with closing(database.Database(file, timeout_s=_WAIT_S)) as opened:
            opened.truncate_log()  # which makes room on a full disk
            if opened.empty():
                return ""
        return f"{file} is being read: its write-ahead log has what was deleted, purge again"
    except sqlite3.Error as error:
        if database.is_transient(error):
            return f"{file} cannot be emptied ({error}), purge again"
    except StoreError as error:
        if error.__cause__ is not None:
            return str(error)
    with database.opening(file):
        database.delete_files(file)
    return ""


def _stores(root: Path) -> list[Path]:
    """The block stores that are, or were, in a directory, which may be one itself."""
    alone = [root] if (root / FILES).is_dir() and (root / MARKER).is_file() else []
    below = (root / name for name in _STORES)
    return alone + [store for store in below if (store / MARKER).is_file() and not store.is_symlink()]


def _has_no_files(root: Path) -> bool:
    return all(path.is_dir() and not path.is_symlink() for path in matching(root, "**/*"))


def _files(root: Path, pattern: str) -> set[Path]:
    """What is there of a form, but nothing behind a link."""
    found = (file for file in matching(root, pattern) if file.is_file() or file.is_symlink())
    within = len(root.parents) + 1
    return {file for file in found if not any(part.is_symlink() for part in file.parents[:-within])}


def is_ours(root: Path) -> bool:
    """Whether there is a sign that `purge_directory` goes by: a marker, or a database of ours."""
    markers = (root / MARKER, *(root / store / MARKER for store in _STORES))
    return any(marker.is_file() for marker in markers) or bool(database.is_ours(root / CATALOG))


def _check(root: Path) -> None:
    """Refuse a directory of another version, before an engine is started on it."""
    for folder in (root, *(root / store for store in _STORES)):
        try:
            marker = read_marker(folder)
        except OSError as error:
            raise _unusable(folder, error) from error
        # Of an older format a block store empties itself.
        known = range(1, FORMAT_VERSION + 1) if folder in _stores(root) else (FORMAT,)
        if marker is not None and marker.get("format") not in known:
            raise StoreError(
                f"{root} was written by another version of semkv (format {marker.get('format')}, this one reads "
                f"{FORMAT}): empty it with --purge or choose another --cache-dir"
            )


def make_folder(root: Path) -> None:
    """Make the folder of a cache, with those above it, or raise a StoreError."""
    try:
        make_private(root)
    except OSError as error:
        raise _unusable(root, error) from error


def _unusable(root: Path, error: OSError) -> StoreError:
    reason = os.strerror(errno.ENOTDIR) if isinstance(error, FileExistsError) else error.strerror or error
    return StoreError(f"{root} cannot be written ({reason}); choose another --cache-dir")
