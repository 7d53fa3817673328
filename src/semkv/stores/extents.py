"""A directory of extents with its index: what the KV store and the fusion store have in common.

    <root>/semkv.json               format version and kind
    <root>/index.sqlite             which extent holds which block
    <root>/extents/ab/ab12....safetensors

Reading and writing never raise for what happened to the disk: a damaged or vanished file is a counted miss, a full
or read-only disk turns writing off with one warning.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sqlite3
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semkv.errors import ConfigError, CorruptValue, StoreError
from semkv.stores import container
from semkv.stores.block_index import BlockIndex, BlockRef
from semkv.stores.container import Bytes, ExtentFile, ExtentHeader
from semkv.stores.eviction import ExtentUse, choose_victims

log = logging.getLogger("semkv.stores")

KV_MAX_BYTES = 32 << 30

ORPHAN_GRACE_S = 600.0
"""A file no index knows is removed when it is older than this: a younger one may be about to be committed."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much a store directory may hold, over all models and ranks that share it. 0: no bound of this kind."""

    max_bytes: int = KV_MAX_BYTES
    max_blocks: int = 0

    def __post_init__(self) -> None:
        for key in ("max_bytes", "max_blocks"):
            if getattr(self, key) < 0:
                raise ConfigError(key, getattr(self, key), "0 (no bound) or a positive number")


def valid_id(extent: str) -> bool:
    """Whether this is an id we could have drawn: nothing else becomes part of a path."""
    return len(extent) == 32 and set(extent) <= set("0123456789abcdef")


class ExtentStore:
    """Extents on disk. Safe to use from several threads; several processes may share a directory.

    Attributes:
        counters: ``stored_blocks``, ``stored_bytes``, ``read_blocks``, ``corrupt``, ``missing``, ``evicted_extents``,
            ``evicted_blocks``, ``rejected`` (too large for the bounds), ``errors``.
    """

    def __init__(self, root: Path, kind: str, bounds: Bounds) -> None:
        """Open or create a directory.

        Raises:
            StoreError: ``root`` is a file, or was written by another format version or for another kind.
        """
        self.root, self.kind, self.bounds = root, kind, bounds
        self.counters: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._index: BlockIndex | None = None
        self._writable = False
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
        if self.root.exists() and not self.root.is_dir():
            raise StoreError(f"{self.root} is not a directory")
        (self.root / "extents").mkdir(parents=True, exist_ok=True)
        self._check_format()
        path = self.root / "index.sqlite"
        fresh = not path.exists()
        try:
            self._index = BlockIndex(path)
        except sqlite3.DatabaseError as error:
            log.warning("semkv: rebuilding the damaged index %s (%s)", path, error)
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            self._index, fresh = BlockIndex(path), True
        self._writable = True
        if fresh:
            self._rebuild(self._index)
        self._sweep(self._index)

    def _check_format(self) -> None:
        path = self.root / "semkv.json"
        mine = {"format": container.FORMAT_VERSION, "kind": self.kind}
        try:
            theirs = json.loads(path.read_text())
        except FileNotFoundError:
            temporary = path.with_name(f"{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
            temporary.write_text(json.dumps(mine))
            temporary.replace(path)
            return
        except ValueError:
            theirs = None
        if theirs != mine:
            raise StoreError(
                f"{self.root} holds {theirs}, this version reads {mine}: "
                "empty it with 'semkv run --purge' or choose another cache directory"
            )

    def _path(self, extent: str) -> Path:
        return self.root / "extents" / extent[:2] / f"{extent}.safetensors"

    def _files(self) -> Iterator[Path]:
        return (self.root / "extents").glob("??/*")

    def _rebuild(self, index: BlockIndex) -> None:
        """Fill a new index from the files' own headers."""
        for path in self._files():
            try:
                with ExtentFile.open(path) as file:
                    header = file.header
            except (CorruptValue, OSError):
                continue
            if header.kind == self.kind and path == self._path(header.extent):
                hashes = [bytes.fromhex(h) for h in header.hashes]
                index.add(header.namespace, header.extent, hashes, path.stat().st_size, header.position)

    def _sweep(self, index: BlockIndex) -> None:
        """Remove files that no commit will ever name."""
        limit = time.time() - ORPHAN_GRACE_S
        for path in self._files():
            with contextlib.suppress(FileNotFoundError):
                known = path.suffix == ".safetensors" and index.has_extent(path.stem)
                if not known and path.stat().st_mtime < limit:
                    path.unlink()

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
            self._read_only(error)
        except sqlite3.Error as error:
            self._switch_off("has a damaged index; it is rebuilt at the next start", error)

    def find_prefix(self, namespace: str, hashes: Sequence[bytes]) -> list[BlockRef]:
        """Where the longest stored leading run of ``hashes`` is."""
        with self._guard():
            if self._index is not None:
                return self._index.find_prefix(namespace, hashes)
        return []

    def stored(self, namespace: str, hashes: Sequence[bytes]) -> list[bool]:
        """Which of ``hashes`` are stored; what is there counts as used now."""
        with self._guard():
            if self._index is not None:
                refs = self._index.find(namespace, hashes)
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
        extents = [r.extent for r in refs]
        with self._hold(extents):
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
                    self._index.touch(set(extents[:done]))
        return done

    def _read_run(self, namespace: str, layout: Any, hashes: Sequence[bytes], first: BlockRef, out: Bytes) -> bool:
        path = self._path(first.extent)
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
            with ExtentFile.open(self._path(extent)) as file:
                return file.header, file.row_bytes
        except (CorruptValue, OSError):
            return None

    def write(
        self,
        namespace: str,
        layout: Any,
        hashes: Sequence[bytes],
        rows: Bytes,
        *,
        position: int = 0,
        shape: tuple[int, ...] | None = None,
    ) -> str | None:
        """Store rows (uint8 ``[len(hashes), row_bytes]``) and return the new extent's id.

        None when nothing was kept: all blocks were there already, the rows exceed the bounds, or the disk failed.
        The file is durable before the index names it.
        """
        if not self._writable or self._index is None or not len(hashes):
            return None
        if not self._make_room(rows.nbytes, len(hashes)):
            self.counters["rejected"] += 1
            return None
        extent = uuid.uuid4().hex
        rows = np.ascontiguousarray(rows)
        header = ExtentHeader(
            version=container.FORMAT_VERSION,
            kind=self.kind,
            extent=extent,
            namespace=namespace,
            layout=layout,
            hashes=tuple(h.hex() for h in hashes),
            checksums=tuple(container.checksum(row) for row in rows),
            position=position,
        )
        path = self._path(extent)
        try:
            path.parent.mkdir(exist_ok=True)
            nbytes = container.write_extent(path, header, rows, shape)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
                self._read_only(error)
            else:
                log.warning("semkv: cannot write %s: %s", path, error)
                self.counters["errors"] += 1
            return None
        new = 0
        with self._guard():
            new = self._index.add(namespace, extent, hashes, nbytes, position)
        if not new:
            path.unlink(missing_ok=True)
            return None
        self.counters["stored_blocks"] += len(hashes)
        self.counters["stored_bytes"] += nbytes
        return extent

    def _make_room(self, nbytes: int, blocks: int) -> bool:
        """Evict until ``nbytes`` and ``blocks`` more fit; False when they never will."""
        limit, most = self.bounds.max_bytes, self.bounds.max_blocks
        if (limit and nbytes > limit) or (most and blocks > most):
            return False
        freed: list[ExtentUse] = []
        over_bytes = over_blocks = 1
        with self._guard(), self._lock:
            index = self._index
            if index is None:
                return False
            _, have_blocks, have_bytes = index.totals()
            over_bytes = have_bytes + nbytes - limit if limit else 0
            over_blocks = have_blocks + blocks - most if most else 0
            if over_bytes <= 0 and over_blocks <= 0:
                return True
            uses = {u.extent: u for u in index.uses()}
            victims = choose_victims(uses.values(), nbytes=over_bytes, blocks=over_blocks, held=self._held.keys())
            freed = [uses[v] for v in victims]
            self._remove(index, victims)
            self.counters["evicted_extents"] += len(freed)
            self.counters["evicted_blocks"] += sum(u.blocks for u in freed)
        return sum(u.nbytes for u in freed) >= over_bytes and sum(u.blocks for u in freed) >= over_blocks

    @contextlib.contextmanager
    def _hold(self, extents: Sequence[str]) -> Iterator[None]:
        """Keep these from being evicted by this process. In another, a vanished file is a miss."""
        with self._lock:
            self._held.update(extents)
        try:
            yield
        finally:
            with self._lock:
                self._held.subtract(extents)
                self._held += Counter()  # drops what is no longer held

    def _remove(self, index: BlockIndex, extents: Sequence[str]) -> None:
        index.remove(extents)  # first the rows, so that nobody finds a file that is going
        for extent in extents:
            with contextlib.suppress(OSError):
                self._path(extent).unlink()

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
        with self._guard():
            if self._index is not None:
                extents = [u.extent for u in self._index.uses(namespace)]
                self._remove(self._index, extents)
                return len(extents)
        return 0

    def totals(self, namespace: str | None = None) -> tuple[int, int, int]:
        """Extents, blocks and bytes stored, of one namespace or of the directory."""
        with self._guard():
            if self._index is not None:
                return self._index.totals(namespace)
        return 0, 0, 0

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
        index, self._index, self._writable = self._index, None, False
        if index is not None:
            index.close()
