"""Blocks on disk: opaque rows of bytes, found by namespace and key. KV blocks and fusion states lie in such stores.

`BlockStore.write` reserves room in the index (`block_index`), writes a file (`block_file`) and commits it.
`BlockStore.find` asks the index, `BlockStore.read` opens the files and checks every row.

Reading and writing never raise for what happened to the disk. A damaged or vanished block is a counted miss. On a full
disk writing pauses, a read-only disk is only read. Where the index was deleted or damaged, `Database` begins another;
while it cannot be opened, everything is a miss.
"""

from __future__ import annotations

import errno
import json
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from semkv_stores import block_file, block_index
from semkv_stores.block_file import (
    INDEX,
    BlockFile,
    Bytes,
    LocalSource,
    Source,
    layout_text,
    path_of,
    room,
)
from semkv_stores.block_index import BlockRef, NewFile, Purge, new_file_id
from semkv_stores.database import Database, is_transient, is_useless
from semkv_stores.errors import ConfigError, CorruptValue, StoreError
from semkv_stores.files import delete_all, in_short

log = logging.getLogger("semkv.stores")

KV_MAX_BYTES = 32 << 30

SWEEP_S = 600.0
"""How often a store that is written to looks for files that no index names and for what is too old."""

RETRY_S = 5.0
"""How long nothing is written after the disk was full or failed."""

BUSY_S = 10.0
"""How long a writer waits for another process's transaction."""

_FLUSH_S = 1.0  # between two notes of what was read, unless something is written
_WARN_S = 60.0
_INDEX_FAULTS = (sqlite3.Error, ValueError, TypeError, ArithmeticError)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much a store directory may hold, over all models and ranks that share it, headers included, and for how many
    seconds; ``tenant_bytes`` is of one tenant. 0: no bound of this kind."""

    max_bytes: int = KV_MAX_BYTES
    max_blocks: int = 0
    max_age_s: float = 0.0
    tenant_bytes: int = 0

    def __post_init__(self) -> None:
        for key in ("max_bytes", "max_blocks", "max_age_s", "tenant_bytes"):
            if not 0 <= getattr(self, key) < 2**63:  # what SQLite and a clock can hold
                raise ConfigError(
                    key, getattr(self, key), "0 (no bound) or a positive number below 2**63"
                )


class BlockStore:
    """Block files in one directory. Safe to use from several threads; several processes may share a directory.

    `find`, `purges_after` and `last_purge` wait for no other process.

    Attributes:
        counters: ``stored_blocks``, ``stored_bytes``, ``read_blocks``; ``corrupt`` and ``missing`` files;
            ``evicted_files``, ``evicted_blocks``; ``rejected`` (larger than the bounds); ``errors``.
        writer: the engine on whose behalf blocks are written, in any of its processes; see `disown`.
        finds_far: whether `find` also names blocks that are in the bucket only.
        open_far: opens the object of a block file. It raises OSErrors, FileNotFoundError where there is none.
    """

    def __init__(
        self,
        root: Path,
        kind: str,
        bounds: Bounds = Bounds(),
        writer: str = "",
    ) -> None:
        """Open or create a directory for blocks of a kind (``kv`` or ``fusion``).

        Raises:
            StoreError: see `make_store` and `Database`; not for what the disk keeps from being opened.
        """
        self.root = root
        self.kind = kind
        self.bounds = bounds
        self.writer = writer
        self.counters: Counter[str] = Counter()
        self.finds_far = False
        self.open_far: Callable[[str], Source] | None = None
        self._read_only = self._closed = False
        self._write_after = self._warn_after = self._flushed_at = 0.0
        self._swept_at = float("-inf")
        # Namespaces that are still to be purged of what this writer wrote.
        self._disowned: list[str] = []
        self._open()

    # -- the index as it is now -----------------------------------------------------------------------------------

    @property
    def on(self) -> bool:
        """Whether anything can be read at this moment."""
        return self._index.file is not None

    @property
    def writable(self) -> bool:
        """Whether anything is written at this moment; False on a read-only disk, and for a while where it failed."""
        return self.on and not self._read_only and time.monotonic() >= self._write_after

    def _open(self) -> None:
        """Open the index, of a read-only directory as it is. One that the disk keeps from being opened is opened by the
        first use that can. Only `Database.write` waits later on, for as long as its caller says."""
        file, schema = self.root / INDEX, block_index.SCHEMA
        try:
            self._index = Database(
                file,
                schema=schema,
                timeout_s=0.0,
            )
        except StoreError as error:
            if (cause := error.__cause__) is None:
                raise
            self._read_only = isinstance(cause, OSError) and cause.errno in (
                errno.EROFS,
                errno.EACCES,
                errno.EPERM,
            )
            self._index = Database(
                file,
                schema=schema,
                timeout_s=0.0,
                lazy=True,
                replace=not self._read_only,
            )
            self.ask(lambda db: None, None)  # logs why the index cannot be opened
            if self.on and self._read_only:
                log.warning(
                    "semkv: %s cannot be written (%s); stored blocks are still read",
                    self.root,
                    cause,
                )

    def ask(
        self,
        what: Callable[[sqlite3.Connection], _T],
        otherwise: _T,
        *,
        write_s: float | None = None,
    ) -> _T:
        """What the index says, or ``otherwise`` where it cannot be read. Faults of the index are counted here.

        Args:
            write_s: in a transaction, for which to wait so long.
        """
        if self._closed or (write_s is not None and self._read_only):
            return otherwise
        try:
            with self._index if write_s is None else self._index.write(write_s) as db:
                return what(db)
        except _INDEX_FAULTS as error:
            if not self._closed:
                self._fail(error)
            return otherwise

    def _fail(self, error: BaseException) -> None:
        """Count a fault. Where the disk is full or fails nothing is written for a while. Nothing is
        logged of another process in the way, a damaged index, which has begun anew, or a file that a purge took."""
        self.counters["errors"] += 1
        if is_transient(error) or is_useless(error) or isinstance(error, FileNotFoundError):
            return
        if not self.on:
            self._warn("semkv: %s cannot be used (%s); requests go on without it", self.root, error)
        elif self.writable:
            text = "semkv: cannot write to %s (%s); tried again every %g s, stored blocks are still read"
            self._warn(text, self.root, error, RETRY_S)
            self._write_after = time.monotonic() + RETRY_S

    def _warn(self, text: str, *values: object) -> None:
        """At most once a minute."""
        if time.monotonic() >= self._warn_after:
            self._warn_after = time.monotonic() + _WARN_S
            log.warning(text, *values)

    # -- finding and reading --------------------------------------------------------------------------------------

    def find(self, namespace: str, keys: Sequence[bytes]) -> list[BlockRef | None]:
        """Where each block is, None for what is not stored or too old."""
        none: list[BlockRef | None] = [None] * len(keys)
        oldest = time.time() - self.bounds.max_age_s if self.bounds.max_age_s else 0.0
        refs = self.ask(lambda db: block_index.find(db, namespace, keys), none)
        return [ref if ref is not None and self._may_use(ref, oldest) else None for ref in refs]

    def _may_use(self, ref: BlockRef, oldest: float) -> bool:
        return ref.created >= oldest and (ref.here or self.finds_far)

    def read(
        self,
        layout: Any,
        namespace: str,
        keys: Sequence[bytes],
        refs: Sequence[BlockRef],
        rows: Sequence[Bytes],
    ) -> list[bool]:
        """Fill each of ``rows`` (uint8 ``[row_bytes]``) with the block that a ref of `find` leads to. Returns for each
        whether it is right; a row that is not may hold anything.

        Each block is checked: format, namespace, tenant, ``layout`` (a JSON value), key, length, checksum. A file that
        fails is deleted, but its right blocks are still returned.
        """
        good, wanted = [False] * len(refs), dict[str, list[int]]()
        for i in range(len(refs)):
            wanted.setdefault(refs[i].file, []).append(i)
        expected = {"namespace": namespace, "layout": layout_text(layout)}
        for file, which in wanted.items():
            which.sort(key=lambda i: refs[i].row)
            first_ref = refs[which[0]]
            try:
                with self._block_file(first_ref, owner=first_ref.owner, **expected) as opened:
                    # Rows that follow one another in the file are read at once.
                    for _, pairs in groupby(
                        enumerate(which), lambda pair: refs[pair[1]].row - pair[0]
                    ):
                        run = [i for _, i in pairs]
                        first = refs[run[0]].row
                        right = opened.read(first, [rows[i] for i in run])
                        stored = opened.keys[first : first + len(run)]
                        for i, key, is_right in zip(run, stored, right, strict=False):
                            good[i] = is_right and key == keys[i]
                if not all(good[i] for i in which):
                    raise CorruptValue(f"{file}: a row is damaged")
            except (CorruptValue, OSError) as error:
                self._not_read(first_ref, error)
            else:
                self._note_use(file)
        self.counters["read_blocks"] += sum(good)
        if self.writable and time.monotonic() - self._flushed_at > _FLUSH_S:
            self._flushed_at = time.monotonic()
            self.ask(lambda db: None, None, write_s=0.0)  # writes the notes of use with it
        return good

    def layout(self, ref: BlockRef) -> tuple[str, int] | None:
        """The `block_file.layout_text` of the file that a ref leads to, and the length of its rows; None where it
        cannot be read. A damaged one is deleted."""
        try:
            with self._block_file(ref) as opened:
                return str(opened.head["layout"]), opened.row_bytes
        except (CorruptValue, OSError) as error:
            self._not_read(ref, error)
            return None

    def bring(
        self, namespace: str, keys: Sequence[bytes], refs: Sequence[BlockRef], since: int
    ) -> list[bool]:
        """Copy blocks of one file from the bucket into a file of this directory; which of them are right."""
        found = self.layout(refs[0])
        if found is None:
            return [False] * len(keys)
        layout = json.loads(found[0])
        rows = list(room(len(keys), found[1]))
        good = self.read(layout, namespace, keys, refs, rows)
        if all(good):
            self.write(namespace, layout, keys, rows, owner=refs[0].owner, since=since)
        return good

    def _block_file(self, ref: BlockRef, **expected: str) -> BlockFile:
        if ref.here:
            source: Source = LocalSource(path_of(self.root, ref.file))
        elif self.open_far is not None:
            source = self.open_far(ref.file)
        else:
            raise OSError("no bucket is open")
        return BlockFile(
            source,
            ref.file,
            kind=self.kind,
            file=ref.file,
            **expected,
        )

    def _not_read(self, ref: BlockRef, error: CorruptValue | OSError) -> None:
        """Count why a file was not read. Only what was read and is damaged, and what is gone, is forgotten: another
        fault (no descriptor left, no memory, a disk or a bucket that fails) says nothing of the file."""
        if isinstance(error, FileNotFoundError):
            self.counters["missing"] += 1
            self.drop([ref.file], far=not ref.here)
        elif isinstance(error, CorruptValue):
            where = self.root if ref.here else "the bucket"
            log.warning("semkv: dropped a damaged block file of %s: %s", where, error)
            self.reject(ref.file, far=not ref.here)
        elif ref.here:
            self._cannot_read(error)
        else:  # the bucket has told
            self.counters["errors"] += 1

    def _cannot_read(self, error: OSError) -> None:
        self.counters["errors"] += 1
        self._warn("semkv: cannot read %s: %s", self.root, error)

    def _note_use(self, file: str) -> None:
        self._index.later(*block_index.touch(file, time.time()))

    # -- writing --------------------------------------------------------------------------------------------------

    def write(
        self,
        namespace: str,
        layout: Any,
        keys: Sequence[bytes],
        rows: Sequence[Bytes],
        *,
        owner: str = "",
        since: int | None = None,
    ) -> str | None:
        """Store the blocks that are not stored yet in one file, from where they are in memory; returns the file's id.

        None when nothing was kept: all blocks were there already, they exceed the bounds, the disk failed, or they were
        purged meanwhile. The content is durable before the index names it.

        Args:
            layout: a JSON value that says what a row means.
            rows: uint8 ``[row_bytes]`` each, one for each key; they must not change meanwhile.
            owner: `tenant_tag` of the tenant.
            since: `last_purge` when the blocks were computed; None for now. What was purged after that is not stored.

        Raises:
            ValueError: the rows differ in length, are no bytes, or are not as many as the keys.
        """
        _check_rows(rows)
        given = dict(zip(keys, rows, strict=True))
        if not given or self._read_only or time.monotonic() < self._write_after:
            return None
        if time.monotonic() - self._swept_at > SWEEP_S:
            self.sweep()
        new = self._not_stored(namespace, given)
        if not new or not self.on:
            return None
        file = new_file_id()
        about = {
            "kind": self.kind,
            "file": file,
            "namespace": namespace,
            "layout": layout_text(layout),
        }
        head = block_file.encode_head(
            about | {"owner": owner, "writer": self.writer}, list(new), list(new.values())
        )
        nbytes = len(head) + len(new) * len(rows[0])
        entry = NewFile(
            file,
            nbytes,
            time.time(),
            namespace=namespace,
            keys=tuple(new),
            owner=owner,
            writer=self.writer,
        )
        since = self.last_purge() if since is None else since
        if not self._reserve(entry):
            return None
        kept = False
        try:
            block_file.write_file(path_of(self.root, file), head, list(new.values()))
            kept = self.ask(
                lambda db: block_index.commit(db, self.root, entry, since), False, write_s=BUSY_S
            )
        except OSError as error:
            self._fail(error)
        if not kept:
            self.drop([file])
            return None
        self.counters["stored_blocks"] += len(new)
        self.counters["stored_bytes"] += nbytes
        return file

    def _not_stored(self, namespace: str, rows: dict[bytes, Bytes]) -> dict[bytes, Bytes]:
        """What of ``rows`` is not stored here; what is counts as used now."""
        refs = [
            ref if ref is not None and ref.here else None
            for ref in self.find(namespace, list(rows))
        ]
        for file in {ref.file for ref in refs if ref is not None}:
            self._note_use(file)
        return {key: row for (key, row), ref in zip(rows.items(), refs, strict=True) if ref is None}

    def _reserve(self, new: NewFile) -> bool:
        oldest = new.created - self.bounds.max_age_s if self.bounds.max_age_s else 0.0

        def reserve(db: sqlite3.Connection) -> bool:
            if oldest:
                block_index.expire(db, self.root, oldest)
            gone = block_index.reserve(
                db,
                self.root,
                new,
                max_bytes=self.bounds.max_bytes,
                max_blocks=self.bounds.max_blocks,
                tenant_bytes=self.bounds.tenant_bytes,
            )
            if gone is None:
                self.counters["rejected"] += 1
                return False
            self.counters["evicted_files"] += gone[0]
            self.counters["evicted_blocks"] += gone[1]
            return True

        return self.ask(reserve, False, write_s=BUSY_S)

    # -- deleting -------------------------------------------------------------------------------------------------

    def drop(self, files: Iterable[str], *, far: bool = False) -> None:
        """Delete files and forget their blocks; with ``far`` those in the bucket, too."""
        files = list(files)
        how = block_index.delete if far else block_index.let_go
        if self.ask(lambda db: how(db, self.root, files), False, write_s=BUSY_S):
            return
        for file in files:  # without an index they are named nowhere else
            block_file.unlink(self.root, file)

    def reject(self, file: str, *, far: bool = False) -> None:
        """Count a file as damaged and delete it; ``far``: see `drop`."""
        self.counters["corrupt"] += 1
        self.drop([file], far=far)

    def purge(self, owner: str) -> int:
        """Delete the files of a tenant; how many went. Running engines notice it by `purges_after`."""
        gone = self.ask(
            lambda db: block_index.purge(db, self.root, {"owner": owner}), 0, write_s=BUSY_S
        )
        self.sweep()  # deletes the files of writers that died and of an index that was lost
        return gone

    def purges_after(self, purge_id: int) -> list[Purge]:
        """What was purged after a purge, by any process; everything, where that is not known."""
        return self.ask(lambda db: block_index.purges_after(db, purge_id), [Purge()])

    def last_purge(self) -> int:
        """Id of the last purge; 0 where that is not known, which no purge has."""
        return self.ask(block_index.last_purge, 0)

    def disown(self, *namespaces: str) -> bool:
        """Delete what this store's writer, in any process, stored under some namespaces, and has under way there.

        A namespace where that fails is tried again with each later call, which need not name any and then waits for
        nobody. Returns whether nothing is left to be tried again.
        """
        self._disowned += namespaces
        wait_s = BUSY_S if namespaces else 0.0
        while self._disowned:
            mine = {"writer": self.writer, "namespace": self._disowned[0]}
            if (
                self.ask(lambda db: block_index.purge(db, self.root, mine), None, write_s=wait_s)  # noqa: B023
                is None
            ):
                return False
            del self._disowned[0]
        return True

    # -- looking after it -----------------------------------------------------------------------------------------

    def sweep(self) -> int:
        """Delete what is too old, and files that no index names. Returns how many went.

        A file is in the index before it is made, so one that is not there was left by a writer that died, or with an
        index that was lost.
        """
        self._swept_at = time.monotonic()
        if self._read_only:
            return 0
        oldest = time.time() - self.bounds.max_age_s if self.bounds.max_age_s else 0.0
        gone = self.ask(lambda db: block_index.expire(db, self.root, oldest), 0, write_s=BUSY_S)
        try:
            there = [(path.name.partition(".")[0], path) for path in block_file.listed(self.root)]
        except OSError as error:
            self._cannot_read(error)
            return gone
        known = self.ask(lambda db: set(block_index.file_ids(db, {})), None)
        unknown = [path for file, path in there if known is not None and file not in known]
        if left := delete_all(unknown):
            self.counters["errors"] += len(left)
            self._warn("semkv: %s", in_short(left))
        return gone + len(unknown) - len(left)

    def close(self) -> None:
        """Nothing more is asked or written."""
        self._closed = True
        self._index.close()


def _check_rows(rows: Sequence[Bytes]) -> None:
    of_bytes = all(row.ndim == 1 and row.dtype.itemsize == 1 for row in rows)
    if not of_bytes or len({len(row) for row in rows}) > 1:
        raise ValueError("rows of different lengths, or not of bytes")
