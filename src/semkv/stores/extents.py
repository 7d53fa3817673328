"""A directory of extents with its index: what the KV store and the fusion store have in common.

Reading and writing never raise for what happened to the disk: a damaged or vanished file is a counted miss, a full
or read-only disk turns writing off with one warning.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from semkv.errors import CorruptValue
from semkv.stores import container, host_policy
from semkv.stores.adoption import BATCH, adopt
from semkv.stores.block_index import BlockIndex, BlockRef, NewExtent
from semkv.stores.bounds import Bounds
from semkv.stores.container import Bytes, ExtentHeader
from semkv.stores.directory import ExtentDirectory, inside, new_extent
from semkv.stores.shared_index import SharedIndex

log = logging.getLogger("semkv.stores")

SWEEP_SECONDS = 600.0
"""How often a store that is written to looks for files that nobody knows and for what is too old."""

HOLD_SECONDS = 60.0
"""How long a lookup keeps what it found from being evicted, where its reader says nothing more."""

_NO_WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT)


class ExtentStore:
    """Extents on disk. Safe to use from several threads; several processes may share a directory.

    Attributes:
        files: the directory's files.
        counters: ``stored_blocks``, ``stored_bytes``, ``read_blocks``, ``corrupt``, ``missing``, ``evicted_extents``,
            ``evicted_blocks``, ``rejected`` (too large for the bounds, or disowned), ``errors``.
        swept: how many extents and stray files went when the directory was opened.
        writer: the engine on whose behalf extents are written.
    """

    def __init__(self, root: Path, kind: str, bounds: Bounds, writer: str = "") -> None:
        """Open or create a directory.

        Args:
            root: the directory.
            kind: ``kv`` or ``fusion``.
            bounds: of the directory.
            writer: the engine on whose behalf extents are written, in any of its processes; see `disown`.

        Raises:
            StoreError: ``root`` is a file, or was written by another format version or for another kind.
        """
        self.root, self.kind, self.bounds, self.writer = root, kind, bounds, writer
        self._disowned: set[str] = set()
        self.files = ExtentDirectory(root, kind)
        self.counters: Counter[str] = Counter()
        self._swept_at, self.swept = 0.0, 0
        self._adopting, self._adopted, self._closing = threading.Lock(), False, threading.Event()
        self._adopter: threading.Thread | None = None
        self._index = SharedIndex(self.files, self.counters, self._opened)
        if (index := self._index.get()) is not None:
            self._index.ask(self._opened, None, index)

    @property
    def on(self) -> bool:
        """Whether anything can be read; False after a fault that put the store out of use."""
        return self._index.on

    @property
    def writable(self) -> bool:
        """Whether anything is still written; False after the disk was full or turned out read-only."""
        return self._index.writable

    @property
    def generation(self) -> str:
        """See `SharedIndex.generation`."""
        return self._index.generation

    def renew(self) -> str:
        """See whether the index is still the one in use, open the directory anew where it is not; the generation."""
        self._index.get()
        return self.generation

    def _opened(self, index: BlockIndex) -> None:
        for namespace in list(self._disowned):
            self._disown(index, namespace)
        self.swept = self.sweep()
        self._adopted = not index.unread(1)
        if not self._adopted:
            self._adopter = threading.Thread(target=self.adopt, name="semkv-adopter", daemon=True)
            self._adopter.start()

    def adopt(self) -> None:
        """Read the headers of all extents that were found without an index; on return their blocks are found.

        A thread does so from the start on; until it has come to an extent, its blocks are misses.
        """
        self._index.get()  # another one may be in its place by now, with other extents to read
        with self._adopting:
            while not self._adopted and not self._closing.is_set() and self._adopt_some():
                pass

    def _adopt_some(self) -> bool:
        """Whether a batch was adopted, so that it is worth going on."""

        def some(index: BlockIndex) -> bool:
            batch = index.unread(BATCH) if self.writable else []
            if batch:
                found = adopt(index, self.files, batch)
                for extent in (*found.useless, *found.corrupt):
                    self._unlink(extent)
                self.counters["corrupt"] += len(found.corrupt)
            self._adopted = not batch and self._index.current(index)
            return bool(batch)

        return self._index.ask(some, False)

    def sweep(self) -> int:
        """Remove what is too old, and files that no index names; returns how many extents and files went.

        An extent is in the index before its file is made, so a file that is not there was left by a writer that died.
        """
        self._swept_at = time.monotonic()
        files = list(self.files.listed(self._inside))

        def sweep(index: BlockIndex) -> int:
            if not self.writable:
                return 0
            oldest = time.time() - self.bounds.max_age_s if self.bounds.max_age_s else 0.0
            expired = index.expired(oldest)
            self._remove(index, expired)
            gone, known = len(expired), set(index.extents())
            if not self._index.current(index):  # it knows nothing of what is there now
                return gone
            for path in files:
                if path.name.partition(".")[0] not in known:
                    with contextlib.suppress(OSError):
                        path.unlink()
                        gone += 1
            return gone

        return self._index.ask(sweep, 0)

    def _inside(self, folder: Path) -> list[Path]:
        """What is in a folder; nothing, counted, where it cannot be read."""
        try:
            return inside(folder)
        except OSError as error:
            log.warning("semkv: cannot read %s: %s", folder, error)
            self.counters["errors"] += 1
            return []

    def find_prefix(self, namespace: str, hashes: Sequence[bytes], holder: str = "") -> list[BlockRef]:
        """Where the longest stored leading run of ``hashes`` is.

        Args:
            holder: keeps it from being evicted, by any process, until `release` or for `HOLD_SECONDS`.
        """
        refs = self._index.ask(lambda index: self._fresh(index, namespace, hashes), list[BlockRef]())
        if refs and holder and self.writable:
            found = {ref.extent for ref in refs}
            held = self._index.ask(lambda index: index.hold(found, holder, HOLD_SECONDS), set[str]())
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

        def first(index: BlockIndex) -> float:
            extents = {ref.extent for ref in index.find(namespace, hashes) if ref is not None}
            written = [created for e in extents if (created := index.created(e)) is not None]
            ends = (host_policy.until(at, self.bounds.max_age_s) for at in written)
            return min(ends, default=host_policy.FOREVER)

        return self._index.ask(first, host_policy.FOREVER) if self.bounds.max_age_s else host_policy.FOREVER

    def release(self, holder: str) -> None:
        """End what a lookup of ``holder`` holds."""
        if self.writable:
            self._index.ask(lambda index: index.release(holder), None)

    def stored(self, namespace: str, hashes: Sequence[bytes]) -> list[bool]:
        """Which of ``hashes`` are stored; what is there counts as used now."""

        def stored(index: BlockIndex) -> list[bool]:
            refs = list(index.find(namespace, hashes))
            if found := {r.extent for r in refs if r is not None}:
                index.touch(found)
            return [r is not None for r in refs]

        return self._index.ask(stored, [False] * len(hashes))

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
        if done and self.writable:
            self._index.ask(lambda index: index.touch({ref.extent for ref in refs[:done]}, again=True), None)
        return done

    def _read_run(self, namespace: str, layout: Any, hashes: Sequence[bytes], first: BlockRef, out: Bytes) -> bool:
        try:
            self.files.read_run(first, namespace, layout, hashes, out)
            return True
        except FileNotFoundError:
            self.counters["missing"] += 1
        except CorruptValue as error:
            log.warning("semkv: dropped a damaged extent: %s", error)
            self.reject(first.extent)
            return False
        except OSError as error:
            log.warning("semkv: cannot read %s: %s", self.files.path(first.extent), error)
            self.counters["errors"] += 1
            return False
        self.drop([first.extent])
        return False

    def write(
        self,
        namespace: str,
        layout: Any,
        hashes: Sequence[bytes],
        parts: Sequence[Bytes],
        *,
        position: int = 0,
        shape: tuple[int, ...] | None = None,
        generation: str | None = None,
        owner: str = "",
    ) -> str | None:
        """Store rows, one for each hash (uint8 ``[n, row_bytes]`` in each part), and return the new extent's id.

        None when nothing was kept: all blocks were there already, the rows exceed the bounds, the disk failed, or the
        directory is not of ``generation`` any more, or the namespace was disowned. The file is durable before the index
        names it.
        """
        index = self._index.get()
        if not self.writable or index is None or not len(hashes):
            return None
        if generation is not None and generation != index.generation:
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
            owner=owner,
            writer=self.writer,
        )
        head = container.encode_head(header, shape or (len(hashes), nbytes // len(hashes)))
        new = new_extent(header, len(head) + nbytes)
        if not self._make_room(index, new):
            return None
        # A purge removes the index first and then what is there, so a file that it did not see is seen here.
        if (
            not self._write_file(index, self.files.path(new.extent), head, parts)
            or not self._index.current(index)
            or not self._index.ask(lambda index: index.commit(new, hashes), 0, index)
        ):
            self.drop([new.extent])
            return None
        self.counters["stored_blocks"] += len(hashes)
        self.counters["stored_bytes"] += new.nbytes
        return new.extent

    def _make_room(self, index: BlockIndex, new: NewExtent) -> bool:
        """Reserve what ``new`` needs and delete the files that went for it."""
        found = self._index.ask(lambda index: index.reserve(new, self.bounds, self._unlink), None, index)
        if found is None:
            return False
        self.counters["evicted_extents"] += len(found.evicted)
        self.counters["evicted_blocks"] += sum(use.blocks for use in found.evicted)
        self.counters["rejected"] += not found.granted
        return found.granted

    def _write_file(self, index: BlockIndex, path: Path, head: bytes, parts: Sequence[Bytes]) -> bool:
        try:
            path.parent.mkdir(exist_ok=True)
            container.write_extent(path, head, parts)
            return True
        except OSError as error:
            if not self._index.current(index):  # a purge took the folder away
                self.counters["errors"] += 1
            elif error.errno in _NO_WRITING:
                self._index.read_only(error)
            else:
                log.warning("semkv: cannot write %s: %s", path, error)
                self.counters["errors"] += 1
            return False

    def _remove(self, index: BlockIndex, extents: Sequence[str]) -> None:
        index.remove(extents)  # first the rows, so that nobody finds a file that is going
        for extent in extents:
            self._unlink(extent)

    def _unlink(self, extent: str) -> None:
        with contextlib.suppress(OSError):
            self.files.path(extent).unlink()

    def drop(self, extents: Sequence[str]) -> None:
        """Delete extents and their index rows."""
        self._index.ask(lambda index: self._remove(index, extents), None)

    def reject(self, extent: str) -> None:
        """Count an extent as damaged and delete it."""
        self.counters["corrupt"] += 1
        self.drop([extent])

    def disown(self, namespace: str) -> bool:
        """Delete what this store's writer, in any process, stored under a namespace.

        What it has under way there, or comes with later, is not stored; what others stored stays. An index that takes
        this one's place is told too.

        Returns:
            False where the index could not be told now: it must be tried again.
        """
        self._disowned.add(namespace)
        return self._index.ask(lambda index: self._disown(index, namespace), False)

    def _disown(self, index: BlockIndex, namespace: str) -> bool:
        for extent in index.disown(namespace, self.writer):
            self._unlink(extent)
        return True

    def owned(self, owner: str) -> list[str]:
        """Ids of a tenant's extents, of all namespaces; see `container.owner_of`."""
        return self._index.ask(lambda index: index.owned(owner), list[str]())

    def purge(self, namespace: str | None = None) -> int:
        """Delete all extents of a namespace, or of the directory; returns how many."""
        self.adopt()
        extents = self._index.ask(lambda index: index.extents(namespace), list[str]())
        self.drop(extents)
        return len(extents)

    def totals(self, namespace: str | None = None) -> tuple[int, int, int]:
        """Extents, blocks and bytes stored, of one namespace or of the directory."""
        return self._index.ask(lambda index: index.totals(namespace), (0, 0, 0))

    def extents(self) -> list[str]:
        """Ids of all extents of the directory."""
        return self._index.ask(lambda index: index.extents(), list[str]())

    def ages(self, owners: Sequence[str] | None = None) -> dict[str, tuple[int, int, int, float, float]]:
        """By namespace: extents, blocks, bytes, when the oldest was written and the latest used; of some tenants."""
        return self._index.ask(lambda index: index.ages(owners), {})

    def put_layout(self, engine: str, rank: int, layout: str) -> None:
        """A worker tells the scheduler of its engine how its blocks look."""
        self._index.put_layout(engine, rank, layout)

    def layouts(self, engine: str) -> dict[int, str]:
        """What the workers of an engine told, by rank."""
        return self._index.ask(lambda index: index.layouts(engine), {})

    def close(self) -> None:
        self._closing.set()
        if self._adopter is not None:
            self._adopter.join()
        self._index.close()
