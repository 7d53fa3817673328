"""A directory of extents with its index: what the KV store and the fusion store have in common.

Reading and writing never raise for what happened to the disk: a damaged or vanished file is a counted miss, a full
or read-only disk turns writing off with one warning.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import sqlite3
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from semkv.errors import CorruptValue
from semkv.stores import container, host_policy
from semkv.stores.adoption import BATCH, adopt
from semkv.stores.block_index import BlockIndex, BlockRef, NewExtent
from semkv.stores.bounds import Bounds
from semkv.stores.container import Bytes, ExtentFile, ExtentHeader
from semkv.stores.directory import ExtentDirectory, new_extent

log = logging.getLogger("semkv.stores")

SWEEP_SECONDS = 600.0
"""How often a store that is written to looks for files that nobody knows and for what is too old."""

HOLD_SECONDS = 60.0
"""How long a lookup keeps what it found from being evicted, where its reader says nothing more."""

_NO_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT)


class ExtentStore:
    """Extents on disk. Safe to use from several threads; several processes may share a directory.

    Attributes:
        counters: ``stored_blocks``, ``stored_bytes``, ``read_blocks``, ``corrupt``, ``missing``, ``evicted_extents``,
            ``evicted_blocks``, ``rejected`` (too large for the bounds), ``errors``.
        swept: how many extents and stray files went when the directory was opened.
    """

    def __init__(self, root: Path, kind: str, bounds: Bounds) -> None:
        """Open or create a directory.

        Raises:
            StoreError: ``root`` is a file, or was written by another format version or for another kind.
        """
        self.root, self.kind, self.bounds = root, kind, bounds
        self._files = ExtentDirectory(root, kind)
        self.counters: Counter[str] = Counter()
        self._swept_at, self.swept = 0.0, 0
        self._index: BlockIndex | None = None
        self._writable = False
        self._adopting, self._adopted, self._closing = threading.Lock(), False, threading.Event()
        self._adopter = threading.Thread(target=self.adopt, name="semkv-adopter", daemon=True)
        try:
            self._open()
        except (OSError, sqlite3.Error) as error:
            self._switch_off("cannot be used", error)

    @property
    def on(self) -> bool:
        """Whether anything can be read; False after a fault that put the store out of use."""
        return self._index is not None

    @property
    def writable(self) -> bool:
        """Whether anything is still written; False after the disk was full or turned out read-only."""
        return self._writable

    def _open(self) -> None:
        self._files.create()
        with self._files.one_opener():
            self._index = self._open_index(self._files.index)
            self._writable = True
            self.swept = self.sweep()
            self._adopted = not self._index.unread(1)
        if not self._adopted:
            self._adopter.start()

    def _open_index(self, path: Path) -> BlockIndex:
        try:
            return BlockIndex(path, self._files.found)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            log.warning("semkv: rebuilding the index %s (%s)", path, error)
            self._files.discard_index()
            return BlockIndex(path, self._files.found)

    def adopt(self) -> None:
        """Read the headers of all extents that were found without an index; on return their blocks are found.

        A thread does so from the start on; until it has come to an extent, its blocks are misses.
        """
        with self._adopting:
            while not self._adopted and not self._closing.is_set() and self._adopt_some():
                pass

    def _adopt_some(self) -> bool:
        """Whether a batch was adopted, so that it is worth going on."""
        batch: list[str] = []
        with self._guard():
            if self._index is not None and self._writable and (batch := self._index.unread(BATCH)):
                found = adopt(self._index, self._files, batch)
                for extent in (*found.useless, *found.corrupt):
                    self._unlink(extent)
                self.counters["corrupt"] += len(found.corrupt)
            self._adopted = not batch
            return bool(batch)
        return False  # type: ignore[unreachable]  # the guard took a fault of the index

    def sweep(self) -> int:
        """Remove what is too old, and files that no index names; returns how many extents and files went.

        An extent is in the index before its file is made, so a file that is not there was left by a writer that died.
        """
        self._swept_at, gone = time.monotonic(), 0
        files = list(self._files)
        with self._guard():
            if self._index is None or not self._writable:
                return 0
            oldest = time.time() - self.bounds.max_age_s if self.bounds.max_age_s else 0.0
            expired = self._index.expired(oldest)
            self._remove(self._index, expired)
            gone += len(expired)
            known = set(self._index.extents())
            for path in files:
                if path.name.partition(".")[0] not in known:
                    with contextlib.suppress(OSError):
                        path.unlink()
                        gone += 1
        return gone

    def _switch_off(self, what: str, error: Exception) -> None:
        log.warning("semkv: the %s store in %s %s (%s); requests go on without it", self.kind, self.root, what, error)
        self.counters["errors"] += 1
        index, self._index, self._writable = self._index, None, False
        if index is not None:
            with contextlib.suppress(sqlite3.Error):
                index.close()

    def _read_only(self, error: Exception) -> None:
        if self._writable:
            log.warning("semkv: nothing more is written to %s (%s); what is there is still used", self.root, error)
        self.counters["errors"] += 1
        self._writable = False

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """A fault of the index puts the store out of use; `sqlite3.Error` goes no further."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:  # another process writes for long: this once
                self.counters["errors"] += 1
            else:
                self._read_only(error)
        except sqlite3.Error as error:
            self._switch_off("has a damaged index; it is rebuilt at the next start", error)
            self._files.discard_index()

    def find_prefix(self, namespace: str, hashes: Sequence[bytes], holder: str = "") -> list[BlockRef]:
        """Where the longest stored leading run of ``hashes`` is.

        Args:
            holder: keeps it from being evicted, by any process, until `release` or for `HOLD_SECONDS`.
        """
        refs: list[BlockRef] = []
        with self._guard():
            if self._index is not None:
                refs = self._fresh(self._index, namespace, hashes)
                if refs and holder and self._writable:
                    held = self._index.hold({ref.extent for ref in refs}, holder, HOLD_SECONDS)
                    refs = list(itertools.takewhile(lambda ref: ref.extent in held, refs))
        return refs

    def _fresh(self, index: BlockIndex, namespace: str, hashes: Sequence[bytes]) -> list[BlockRef]:
        oldest = time.time() - self.bounds.max_age_s
        known: dict[str, bool] = {}
        refs: list[BlockRef] = []
        for ref in index.find(namespace, hashes):
            if ref is None:
                break
            if self.bounds.max_age_s and ref.extent not in known:
                created = index.created(ref.extent)
                known[ref.extent] = created is not None and created >= oldest
            if not known.get(ref.extent, True):
                break
            refs.append(ref)
        return refs

    def ends(self, namespace: str, hashes: Sequence[bytes]) -> float:
        """When the first of the stored ``hashes`` is too old to be served, in seconds since the epoch."""
        first = host_policy.FOREVER
        with self._guard():
            if self._index is not None and self.bounds.max_age_s:
                extents = {ref.extent for ref in self._index.find(namespace, hashes) if ref is not None}
                written = [created for e in extents if (created := self._index.created(e)) is not None]
                first = min((host_policy.until(at, self.bounds.max_age_s) for at in written), default=first)
        return first

    def release(self, holder: str) -> None:
        """End what a lookup of ``holder`` holds."""
        with self._guard():
            if self._index is not None and self._writable:
                self._index.release(holder)

    def stored(self, namespace: str, hashes: Sequence[bytes]) -> list[bool]:
        """Which of ``hashes`` are stored; what is there counts as used now."""
        with self._guard():
            if self._index is not None:
                refs = list(self._index.find(namespace, hashes))
                if found := {r.extent for r in refs if r is not None}:
                    self._index.touch(found)
                return [r is not None for r in refs]
        return [False] * len(hashes)

    def read(self, namespace: str, layout: Any, hashes: Sequence[bytes], refs: Sequence[BlockRef], out: Bytes) -> int:
        """Fill rows of ``out`` (uint8 ``[len(refs), row_bytes]``) and return how many leading rows are good.

        Each row is checked: format version, namespace, layout, block hash, length, checksum. A file that fails is
        deleted with its index rows.
        """
        done = 0
        while done < len(refs):
            end = done + 1
            while end < len(refs) and refs[end] == BlockRef(refs[done].extent, refs[done].row + end - done):
                end += 1
            if not self._read_run(namespace, layout, hashes[done:end], refs[done], out[done:end]):
                break
            done = end
        self.counters["read_blocks"] += done
        if done and self._writable:
            with self._guard():
                if self._index is not None:
                    self._index.touch({ref.extent for ref in refs[:done]}, again=True)
        return done

    def _read_run(self, namespace: str, layout: Any, hashes: Sequence[bytes], first: BlockRef, out: Bytes) -> bool:
        path = self._files.path(first.extent)
        try:
            with ExtentFile.open(path) as file:
                self._check(file.header, first, namespace, layout, hashes)
                file.read_rows(first.row, out)
            return True
        except FileNotFoundError:
            self.counters["missing"] += 1
        except CorruptValue as error:
            log.warning("semkv: dropped a damaged extent: %s", error)
            self.reject(first.extent)
            return False
        except OSError as error:
            log.warning("semkv: cannot read %s: %s", path, error)
            self.counters["errors"] += 1
            return False
        self.drop([first.extent])
        return False

    def _check(
        self, header: ExtentHeader, first: BlockRef, namespace: str, layout: Any, hashes: Sequence[bytes]
    ) -> None:
        mine = [h.hex() for h in hashes]
        if (header.kind, header.extent, header.namespace) != (self.kind, first.extent, namespace):
            raise CorruptValue(f"{first.extent}: another file's content")
        if layout is not None and header.layout != layout:
            raise CorruptValue(f"{first.extent}: another layout")
        if list(header.hashes[first.row : first.row + len(mine)]) != mine:
            raise CorruptValue(f"{first.extent}: other blocks")

    def describe(self, extent: str) -> tuple[ExtentHeader, int] | None:
        """The header of an extent and the bytes of one row; None when it is gone or damaged."""
        try:
            with ExtentFile.open(self._files.path(extent)) as file:
                return file.header, file.row_bytes
        except (CorruptValue, OSError):
            return None

    def write(
        self,
        namespace: str,
        layout: Any,
        hashes: Sequence[bytes],
        parts: Sequence[Bytes],
        *,
        position: int = 0,
        shape: tuple[int, ...] | None = None,
    ) -> str | None:
        """Store rows, one for each hash (uint8 ``[n, row_bytes]`` in each part), and return the new extent's id.

        None when nothing was kept: all blocks were there already, the rows exceed the bounds, or the disk failed.
        The file is durable before the index names it.
        """
        if not self._writable or self._index is None or not len(hashes):
            return None
        if time.monotonic() - self._swept_at > SWEEP_SECONDS:
            self.sweep()
        if self.bounds.max_blocks:  # how many there are is known when all headers have been read
            self.adopt()
        parts = [np.ascontiguousarray(rows) for rows in parts]
        nbytes = sum(rows.nbytes for rows in parts)
        header = ExtentHeader(
            version=container.FORMAT_VERSION,
            kind=self.kind,
            extent=uuid.uuid4().hex,
            namespace=namespace,
            layout=layout,
            hashes=tuple(h.hex() for h in hashes),
            checksums=tuple(container.checksum(row) for rows in parts for row in rows),
            position=position,
        )
        head = container.encode_head(header, shape or (len(hashes), nbytes // len(hashes)))
        new = new_extent(header, len(head) + nbytes)
        if not self._make_room(new):
            return None
        if not self._write_file(self._files.path(new.extent), head, parts) or not self._commit(new, hashes):
            self.drop([new.extent])
            return None
        self.counters["stored_blocks"] += len(hashes)
        self.counters["stored_bytes"] += new.nbytes
        return new.extent

    def _make_room(self, new: NewExtent) -> bool:
        """Reserve what ``new`` needs and delete the files that went for it."""
        found = None
        with self._guard():
            if self._index is not None:
                found = self._index.reserve(new, self.bounds, self._unlink)
        if found is None:
            return False
        self.counters["evicted_extents"] += len(found.evicted)
        self.counters["evicted_blocks"] += sum(use.blocks for use in found.evicted)
        self.counters["rejected"] += not found.granted
        return found.granted

    def _write_file(self, path: Path, head: bytes, parts: Sequence[Bytes]) -> bool:
        try:
            path.parent.mkdir(exist_ok=True)
            container.write_extent(path, head, parts)
            return True
        except OSError as error:
            if error.errno in _NO_WRITING:
                self._read_only(error)
            else:
                log.warning("semkv: cannot write %s: %s", path, error)
                self.counters["errors"] += 1
            return False

    def _commit(self, new: NewExtent, hashes: Sequence[bytes]) -> bool:
        with self._guard():
            if self._index is not None:
                return self._index.commit(new, hashes) > 0
        return False

    def _remove(self, index: BlockIndex, extents: Sequence[str]) -> None:
        index.remove(extents)  # first the rows, so that nobody finds a file that is going
        for extent in extents:
            self._unlink(extent)

    def _unlink(self, extent: str) -> None:
        with contextlib.suppress(OSError):
            self._files.path(extent).unlink()

    def drop(self, extents: Sequence[str]) -> None:
        """Delete extents and their index rows."""
        with self._guard():
            if self._index is not None:
                self._remove(self._index, extents)

    def reject(self, extent: str) -> None:
        """Count an extent as damaged and delete it."""
        self.counters["corrupt"] += 1
        self.drop([extent])

    def purge(self, namespace: str | None = None) -> int:
        """Delete all extents of a namespace, or of the directory; returns how many."""
        self.adopt()
        with self._guard():
            if self._index is not None:
                extents = self._index.extents(namespace)
                self._remove(self._index, extents)
                return len(extents)
        return 0

    def totals(self, namespace: str | None = None) -> tuple[int, int, int]:
        """Extents, blocks and bytes stored, of one namespace or of the directory."""
        with self._guard():
            if self._index is not None:
                return self._index.totals(namespace)
        return 0, 0, 0

    def extents(self) -> list[str]:
        """Ids of all extents of the directory."""
        with self._guard():
            if self._index is not None:
                return self._index.extents()
        return []

    def ages(self) -> dict[str, tuple[int, int, int, float, float]]:
        """By namespace: extents, blocks, bytes, and when the oldest was written and the latest was used."""
        with self._guard():
            if self._index is not None:
                return self._index.ages()
        return {}

    def damage(self, extent: str) -> str:
        """What is wrong with an extent's file, read from end to end; empty where it is whole."""
        try:
            with ExtentFile.open(self._files.path(extent)) as file:
                if (file.header.kind, file.header.extent) != (self.kind, extent):
                    return f"{extent}: another file's content"
                row = np.empty((1, file.row_bytes), np.uint8)
                for number in range(len(file.header.hashes)):
                    file.read_rows(number, row)
        except (CorruptValue, OSError) as error:
            return f"{extent}: {error}"
        return ""

    def put_layout(self, engine: str, rank: int, layout: str) -> None:
        """A worker tells the scheduler of its engine how its blocks look."""
        with self._guard():
            if self._index is not None:
                self._index.put_layout(engine, rank, layout)

    def layouts(self, engine: str) -> dict[int, str]:
        """What the workers of an engine told, by rank."""
        with self._guard():
            if self._index is not None:
                return self._index.layouts(engine)
        return {}

    def close(self) -> None:
        self._closing.set()
        if self._adopter.is_alive():
            self._adopter.join()
        index, self._index, self._writable = self._index, None, False
        if index is not None:
            index.close()
