"""Opening and emptying a cache directory.

A directory belongs to semkv when one of the places where a store lives has a ``semkv.json``. A purge removes files
that semkv writes, by their form, and nothing else: files that a user put there stay.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from semkv.config import CacheConfig
from semkv.errors import StoreError
from semkv.stores import database
from semkv.stores.block_file import FORMAT_VERSION
from semkv.stores.block_folder import INDEX, LOCK, MARKER, empty_index, opening
from semkv.stores.files import make_folder as make_private
from semkv.stores.files import matching, replace_text
from semkv.stores.responses.ahead import replay
from semkv.stores.schema import CATALOG, RESPONSES_1

FORMAT = 1
_STORES = ("kv", "fusion")
_LOCK_S = 60.0  # for processes that open a store

# What semkv writes into a cache directory, and into a directory of fusion states alone.
BLOCK_FILES = (MARKER, LOCK, INDEX, f"{INDEX}-*", "extents/??/*", f"{MARKER}.*.tmp")
CACHE_FILES = (
    MARKER,
    CATALOG,
    f"{CATALOG}.damaged",
    *(f"{RESPONSES_1[0]}{suffix}" for suffix in ("", "-wal", "-shm", ".lock", ".damaged")),
    "media/??/*",
    "graphs/*/*.graph",
    "graphs/*/*.tmp",
    "policy.json",
    "policy.json.*.tmp",
    f"weights/{'?' * 64}.json",  # what the connectors noted of checkpoints
    f"weights/{'?' * 64}.json.*.tmp",
    *(f"{store}/{pattern}" for store in _STORES for pattern in BLOCK_FILES),
)


def prepare(config: CacheConfig, *, purge: bool = False) -> None:
    """Make the cache directory ready: empty it where asked, check its version, mark it as ours.

    Raises:
        StoreError: it is no directory, cannot be written, holds something else, or was written by another version.
    """
    roots = [(config.cache_dir, CACHE_FILES)]
    if config.fusion_cache_dir is not None:
        roots.append((config.fusion_cache_dir, BLOCK_FILES))
    ours = is_ours(config.cache_dir)
    for root, patterns in roots:
        if root.exists() and not root.is_dir():
            raise StoreError(f"{root} is a file; a cache lives in a directory of its own")
        if purge:
            purge_directory(root, patterns)
        _check(root)
    _mark(config.cache_dir, ours=ours)


def purge_directory(root: Path, patterns: tuple[str, ...] = CACHE_FILES, *, dry_run: bool = False) -> int:
    """Remove what semkv wrote below ``root``; an empty or missing directory is left as it is.

    The database goes as a whole: a process that has it open begins a new one, which tells it of the purge. Block stores
    are emptied under the lock of whoever opens them. An index that a running engine has open is emptied and stays, with
    its sign and lock: the engine hears of the purge, and goes on. Elsewhere the lock goes last, when everything it
    guards is gone: whoever opens the directory after that makes a new one, and a whole store.

    Args:
        root: the directory.
        patterns: the forms of what goes.
        dry_run: only count.

    Returns:
        How many files were removed, or with ``dry_run`` would be.

    Raises:
        StoreError: the directory holds files and no sign that they are semkv's.
    """
    ours = is_ours(root)  # before the other look: another purge takes the sign first
    if not root.is_dir() or _empty(root):
        return 0
    if not ours:
        raise StoreError(f"{root} is not a semkv cache (no {MARKER}): it is not purged")
    # Of the catalog's name, another program's database is left.
    has_database = CATALOG in patterns and database.is_ours(root / CATALOG) is not False
    patterns = tuple(pattern for pattern in patterns if pattern != CATALOG)
    files = _files(root, patterns)
    count = len(files) + (has_database and (root / CATALOG).exists())
    if dry_run:
        return count
    markers = set(_markers(root))
    if not any(marker.exists() for marker in markers):  # the database is the sign, which goes first
        _mark(root, ours=True)
    with contextlib.ExitStack() as held:
        stores = _stores(root, patterns)
        locked = {store for store in stores if _inside(files, store)}
        staying = set()
        for store in sorted(locked):
            held.enter_context(opening(store, wait_s=_LOCK_S))  # which another purge may have deleted meanwhile
            if empty_index(store):
                staying.add(store)
                files -= {store / MARKER, store / LOCK, *store.glob(f"{INDEX}*")}
        if has_database:
            database.delete_database(root / CATALOG)  # without it no graphs are written
            for folder in matching(root, "ahead*"):  # responses on their way to this store, or to another
                replay(folder, lambda response, since: True, discard=True)
                _remove_empty({folder})
        found = _files(root, patterns)  # also what a running engine wrote until then, and the locks
        files |= found.difference(*(_inside(found, store) for store in stores - locked | staying))  # those are new
        locks = {file for file in files if file.name == LOCK}
        # The sign goes last but for the locks, so that a purge that was cut off can be repeated.
        for file in sorted(files - markers - locks) + sorted(files & markers):
            file.unlink(missing_ok=True)
        empty = {folder for store in locked for folder in matching(store, "extents/??") if not folder.is_symlink()}
        _remove_empty(empty | {parent for path in files | empty for parent in _parents(path, root)})
        for lock in sorted(locks):
            lock.unlink(missing_ok=True)
        _remove_empty({parent for lock in locks for parent in _parents(lock, root)})
    return count


def _stores(root: Path, patterns: tuple[str, ...]) -> set[Path]:
    """The folders of extents; each has a lock."""
    return {(root / pattern).parent for pattern in patterns if Path(pattern).name == LOCK}


def _inside(files: set[Path], store: Path) -> set[Path]:
    return {file for file in files if file.is_relative_to(store)}


def _remove_empty(folders: set[Path]) -> None:
    for folder in sorted(folders, reverse=True):
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()


def _empty(root: Path) -> bool:
    """Whether nothing is anywhere below but what a purge may leave: empty folders, and locks where it was cut off."""
    locks = {root / LOCK, root / f"{CATALOG}.lock", *(root / store / LOCK for store in _STORES)}
    return all(path in locks or _is_folder(path) for path in matching(root, "**/*"))


def _is_folder(path: Path) -> bool:
    """Whether it is one, no link, or is gone by now."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return True


def _files(root: Path, patterns: tuple[str, ...]) -> set[Path]:
    found = (file for pattern in patterns for file in matching(root, pattern) if file.is_file() or file.is_symlink())
    return {file for file in found if not any(p.is_symlink() for p in _parents(file, root))}


def _parents(file: Path, root: Path) -> Iterator[Path]:
    for parent in file.parents:
        if parent == root:
            return
        yield parent


def _markers(root: Path) -> list[Path]:
    return [root / MARKER, *(root / store / MARKER for store in _STORES)]


def is_ours(root: Path) -> bool:
    """Whether there is a sign that `purge_directory` goes by: a marker, or a database of ours."""
    files = (root / CATALOG, root / RESPONSES_1[0])
    return any(marker.is_file() for marker in _markers(root)) or any(database.is_ours(file) for file in files)


def _check(root: Path) -> None:
    """Refuse a directory of another version, before an engine is started on it."""
    for marker in _markers(root):
        try:
            found = json.loads(marker.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _unusable(root, error) from error
        except ValueError:
            found = None
        found = found if isinstance(found, dict) else {}
        version, is_store = found.get("format"), found.get("kind") in _STORES or marker.parent != root
        # Of an older format a block store empties itself.
        if not isinstance(version, int) or not (1 if is_store else FORMAT) <= version <= (
            FORMAT_VERSION if is_store else FORMAT
        ):
            raise StoreError(
                f"{root} was written by another version of semkv (format {version}, this one reads {FORMAT}): "
                "empty it with --purge or choose another --cache-dir"
            )


def _mark(root: Path, *, ours: bool) -> None:
    marker = root / MARKER
    if marker.exists():
        return
    if not ours and root.is_dir() and not _empty(root):
        raise StoreError(f"{root} holds files that are not semkv's; choose an empty or new --cache-dir")
    make_folder(root)
    try:
        replace_text(marker, json.dumps({"format": FORMAT, "kind": "cache"}), private=True)
    except OSError as error:
        raise _unusable(root, error) from error


def make_folder(root: Path) -> None:
    """The folder of a cache, with those above it.

    Raises:
        StoreError: it cannot be made.
    """
    try:
        make_private(root)
    except OSError as error:
        raise _unusable(root, error) from error


def _unusable(root: Path, error: OSError) -> StoreError:
    reason = os.strerror(errno.ENOTDIR) if isinstance(error, FileExistsError) else error.strerror or error
    return StoreError(f"{root} cannot be written ({reason}); choose another --cache-dir")
