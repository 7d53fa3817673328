"""Blocks on disk: opaque rows of bytes, found by namespace and key. KV blocks and fusion states lie in such stores.

Reading and writing never raise for what happened to the disk. A damaged or vanished block is a counted miss. On a full
disk writing pauses, a read-only disk is only read, a store that cannot be used at all is off: each with one warning.

Any thread may call. `BlockStore.find`, `purges_after`, `last_purge` and ``generation`` are for a thread that must not
wait: they ask by a connection of their own, and where the directory has to be opened anew, another thread does it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from semkv.errors import ConfigError, CorruptValue, StoreError
from semkv.stores import block_file, block_folder
from semkv.stores.block_file import BlockFile, BlockHeader, Bytes, checksum, encode_head, layout_text
from semkv.stores.block_folder import path_of
from semkv.stores.block_index import (
    INDEX_FAULTS,
    BlockIndex,
    BlockRef,
    NewFile,
    Purge,
    Reservation,
    is_damage,
    is_transient,
    new_file_id,
)
from semkv.stores.files import FileId, file_id

log = logging.getLogger("semkv.stores")

KV_MAX_BYTES = 32 << 30

SWEEP_S = 600.0
"""How often a store that is written to looks for files that no index names and for what is too old."""

RETRY_S = 5.0
"""How long nothing is written after the disk was full or failed."""

_LOOK_S = 0.2  # between two looks of `find` whether the index is still the one in use
_FLUSH_S = 1.0  # between two notes of what was read, unless something is written
_OPEN_S, _OPEN_ANEW_S = 60.0, 1.0  # how long to wait for another process that opens the directory
_REBUILD_S = 60.0  # an index that is damaged again so soon is not rebuilt
_BATCH = 128  # files whose blocks are named in one transaction
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much a store directory may hold, over all models and ranks that share it. 0: no bound of this kind.

    Attributes:
        max_bytes: of all block files, headers included.
        max_blocks: of all block files.
        max_age_s: seconds after which what was stored is neither served nor kept.
    """

    max_bytes: int = KV_MAX_BYTES
    max_blocks: int = 0
    max_age_s: float = 0.0

    def __post_init__(self) -> None:
        for key in ("max_bytes", "max_blocks", "max_age_s"):
            if not 0 <= getattr(self, key) < 2**63:  # what SQLite and a clock can hold
                raise ConfigError(key, getattr(self, key), "0 (no bound) or a positive number below 2**63")


class BlockStore:
    """Block files in one directory. Safe to use from several threads; several processes may share a directory.

    Attributes:
        counters: ``stored_blocks``, ``stored_bytes``, ``read_blocks``; ``corrupt`` and ``missing`` files;
            ``evicted_files``, ``evicted_blocks``; ``rejected`` (larger than the bounds, purged or disowned meanwhile);
            ``errors``.
        swept: how many files went when the directory was opened.
        writer: the engine on whose behalf blocks are written, in any of its processes; see `disown`.
    """

    def __init__(self, root: Path, kind: str, bounds: Bounds = Bounds(), writer: str = "") -> None:
        """Open or create a directory for blocks of a kind (``kv`` or ``fusion``).

        Raises:
            StoreError: ``root`` is a file, can be written by others, has links in the place of files, is of a newer
                format or of another kind.
        """
        self.root, self.kind, self.bounds, self.writer = root, kind, bounds, writer
        self.counters: Counter[str] = Counter()
        self.swept = 0
        self._index: BlockIndex | None = None
        self._file: FileId | None = None  # of the index
        self._stale: BlockIndex | None = None  # the one before, not closed yet
        self._damaged: FileId | None = None  # whose file must go
        self._rebuilt_at = -_REBUILD_S
        self._off, self._opening, self._looked_at = False, threading.RLock(), 0.0
        self._failing, self._resume_at = False, 0.0
        self._used: dict[str, tuple[float, bool]] = {}  # noted in the index later: see `BlockIndex.touch`
        self._flushed_at = self._swept_at = self._warned_at = self._helped_at = 0.0
        self._disowned: set[str] = set()
        self._adopting, self._closing = threading.Lock(), threading.Event()
        self._helper: threading.Thread | None = None
        self._open(_OPEN_S)

    # -- the index as it is now -----------------------------------------------------------------------------------

    @property
    def on(self) -> bool:
        """Whether anything can be read; False after a fault that put the store out of use."""
        return not self._off

    @property
    def writable(self) -> bool:
        """Whether anything is written at this moment; False on a read-only disk, and for a while where it failed."""
        index = self._index
        return index is not None and not index.read_only and time.monotonic() >= self._resume_at

    @property
    def generation(self) -> str:
        """A name that changes when everything is purged or another index takes this one's place.

        Without an index nobody hears of a purge. Then each question gets another answer, so that nothing kept is found.
        """
        return self._ask(lambda index: index.generation, "", wait=False) or secrets.token_hex(16)

    def _open(self, wait_s: float) -> bool:
        """Whether `_index` is the directory's now; else the store is off, or another process opens it."""
        try:
            try:
                with block_folder.opening(self.root, wait_s=wait_s):
                    self._let_go()
                    block_folder.prepare(self.root, self.kind)
                    index = self._open_or_rebuild()
            except OSError as error:
                if error.errno not in _READ_ONLY:
                    raise
                block_folder.prepare(self.root, self.kind, read_only=True)
                index = block_folder.open_read_only(self.root)
                log.warning("semkv: nothing is written to %s (%s); what is there is used", self.root, error)
            self._file = file_id(self.root / block_folder.INDEX)
        except BlockingIOError:
            self.counters["errors"] += 1
            return False
        except (OSError, *INDEX_FAULTS) as error:
            self._switch_off("cannot be used", error)
            return False
        self._index = index
        self._ask(self._opened, None, index)
        return True

    def _open_or_rebuild(self) -> BlockIndex:
        try:
            return block_folder.open_index(self.root)
        except INDEX_FAULTS as error:
            if not is_damage(error):
                raise
            log.warning("semkv: rebuilding the index of %s (%s)", self.root, error)
            block_folder.discard_index(self.root)
            return block_folder.open_index(self.root)

    def _let_go(self) -> None:
        """Close the index before this one; a damaged one's file goes where no other process has built it again."""
        if self._damaged is not None and file_id(self.root / block_folder.INDEX) == self._damaged:
            block_folder.discard_index(self.root)
        if self._stale is not None:
            self._stale.close()
        self._stale = self._damaged = None

    def _opened(self, index: BlockIndex) -> None:
        for namespace in list(self._disowned):
            self._disown(index, namespace)
        self.swept = self.sweep()
        if index.unread(1) and not index.read_only:
            self._help()

    def _help(self) -> None:
        """Open the directory anew where that is due, and adopt its files, in another thread."""
        if not self._closing.is_set() and (self._helper is None or not self._helper.is_alive()):
            self._helper = threading.Thread(target=self.adopt, name="semkv-blocks", daemon=True)
            self._helper.start()

    def _current(self, *, now: bool = True) -> bool:
        """Whether the index is the directory's, as of a fifth of a second ago unless ``now``."""
        if not now and time.monotonic() - self._looked_at < _LOOK_S:
            return True
        try:
            current = file_id(self.root / block_folder.INDEX) == self._file
        except OSError:  # a disk that does not answer has no other index
            current = True
        self._looked_at = time.monotonic() if current else 0.0
        return current

    def _get(self, *, wait: bool = True) -> BlockIndex | None:
        """The directory's index; None after a fault that put the store out of use, or until it is opened anew."""
        index = self._index
        if self._off or (index is not None and self._current(now=wait)):
            return index
        if not wait:
            if time.monotonic() - self._helped_at > _LOOK_S:
                self._helped_at = time.monotonic()
                self._help()
            return None
        with self._opening:
            if self._index is index and not self._off:
                self._open_anew(index)
        return self._index

    def _open_anew(self, old: BlockIndex | None) -> None:
        self._index, self._stale = None, old or self._stale
        if self.root.parent.is_dir():
            if self._open(_OPEN_ANEW_S if old is not None else 0.0):
                log.warning("semkv: the index of %s was deleted or replaced: opened anew", self.root)
        else:  # the whole cache directory, or the disk it was on, is gone
            self._switch_off("is gone", FileNotFoundError(errno.ENOENT, "no such directory", str(self.root.parent)))

    def _ask(
        self, what: Callable[[BlockIndex], _T], otherwise: _T, index: BlockIndex | None = None, *, wait: bool = True
    ) -> _T:
        """What the index says (that of now, or the one given), or ``otherwise`` where there is none or it fails.

        This is the one place where faults of the index are handled.
        """
        try:
            if (index := index or self._get(wait=wait)) is None:
                return otherwise
            return what(index)
        except StoreError as error:  # of a directory that has to be opened anew
            self._switch_off("cannot be used", error)
        except INDEX_FAULTS as error:
            self.counters["errors"] += 1
            if index is not self._index or is_transient(error):  # closed under this call, or another process is busy
                pass
            elif not is_damage(error):
                if self.writable:
                    self._pause(error)
            elif index is None or index.read_only or time.monotonic() - self._rebuilt_at < _REBUILD_S:
                self._switch_off("has a damaged index", error)
            else:
                log.warning("semkv: the index of %s is damaged (%s): it is rebuilt", self.root, error)
                self._rebuilt_at = time.monotonic()
                self._index, self._stale, self._damaged = None, index, self._file
        return otherwise

    def _switch_off(self, what: str, error: Exception) -> None:
        if not self._off:
            log.warning(
                "semkv: the %s store in %s %s (%s); requests go on without it", self.kind, self.root, what, error
            )
        self.counters["errors"] += 1
        self._stale, self._index, self._off = self._index or self._stale, None, True

    def _pause(self, error: Exception) -> None:
        """The disk is full or fails: nothing is written for a while."""
        if not self._failing:
            log.warning(
                "semkv: cannot write to %s (%s); tried again every %g s, what is there is used",
                *(self.root, error, RETRY_S),
            )
        self._failing, self._resume_at = True, time.monotonic() + RETRY_S

    # -- finding and reading --------------------------------------------------------------------------------------

    def find(self, namespace: str, keys: Sequence[bytes]) -> list[BlockRef | None]:
        """Where each block is, None for what is not stored or too old. Waits for nobody."""
        refs = self._ask(lambda index: index.find(namespace, keys), None, wait=False)
        if refs is None:
            return [None] * len(keys)
        if self.bounds.max_age_s:
            oldest = time.time() - self.bounds.max_age_s
            return [ref if ref is not None and ref.created >= oldest else None for ref in refs]
        return refs

    def read(
        self, layout: Any, namespace: str, keys: Sequence[bytes], refs: Sequence[BlockRef], rows: Sequence[Bytes]
    ) -> list[bool]:
        """Fill each of ``rows`` (uint8 ``[row_bytes]``) with the block that a ref leads to; which of them are right.

        Each block is checked: format, namespace, tenant, layout, key, length, checksum. A file that fails is deleted,
        and what else is right in it still comes.

        Args:
            layout: a JSON value that says what a row means; None for any.
            namespace, keys, refs: as given to `find`, and what it found.
            rows: memory to fill; what is in it where the answer is False is not to be used.
        """
        good, wanted = [False] * len(refs), dict[str, list[int]]()
        for i in range(len(refs)):
            wanted.setdefault(refs[i].file, []).append(i)
        text = None if layout is None else layout_text(layout)
        for file, which in wanted.items():
            which.sort(key=lambda i: refs[i].row)
            try:
                with BlockFile.open(path_of(self.root, file), self.kind, file) as opened:
                    opened.check(namespace, text, refs[which[0]].owner)
                    for run in _runs(which, [refs[i].row for i in which]):
                        first = refs[run[0]].row
                        right = opened.read(first, [rows[i] for i in run])
                        stored = opened.keys[first : first + len(run)]
                        for i, key, is_right in zip(run, stored, right, strict=False):
                            good[i] = is_right and key == keys[i]
                if not all(good[i] for i in which):
                    raise CorruptValue(f"{file}: a row is damaged")
            except FileNotFoundError:
                self.counters["missing"] += 1
                self.drop([file])
            except CorruptValue as error:
                log.warning("semkv: dropped a damaged block file of %s: %s", self.root, error)
                self.reject(file)
            except OSError as error:
                self._complain("read", error)
            else:
                self._used[file] = time.time(), True
        self.counters["read_blocks"] += sum(good)
        if self._used and time.monotonic() - self._flushed_at > _FLUSH_S:
            self._flush()
        return good

    def layout(self, ref: BlockRef) -> tuple[str, int] | None:
        """The `block_file.layout_text` of the file that a ref leads to, and the length of its rows; None where it is
        gone or damaged."""
        with contextlib.suppress(CorruptValue, OSError), self._block_file(ref.file) as opened:
            return opened.header.layout, opened.row_bytes
        return None

    def _block_file(self, file: str) -> BlockFile:
        return BlockFile.open(path_of(self.root, file), self.kind, file)

    def _complain(self, what: str, error: OSError) -> None:
        """Count a failure of the disk; one warning a minute."""
        self.counters["errors"] += 1
        if not self._warned_at or time.monotonic() - self._warned_at > 60:
            self._warned_at = time.monotonic()
            log.warning("semkv: cannot %s %s: %s", what, self.root, error)

    def _flush(self) -> None:
        used, self._used, self._flushed_at = self._used, {}, time.monotonic()
        if self.writable:
            self._ask(lambda index: index.touch(used), None)

    # -- writing --------------------------------------------------------------------------------------------------

    def write(
        self,
        namespace: str,
        layout: Any,
        keys: Sequence[bytes],
        rows: Sequence[Bytes],
        *,
        owner: str = "",
        generation: str | None = None,
        since: int | None = None,
    ) -> str | None:
        """Store the blocks that are not stored yet in one file, from where they are in memory; returns the file's id.

        None when nothing was kept: all blocks were there already, they exceed the bounds, the disk failed, or they were
        purged or disowned meanwhile. The content is durable before the index names it.

        Args:
            layout: a JSON value that says what a row means.
            rows: uint8 ``[row_bytes]`` each, one for each key; they must not change meanwhile.
            owner: `block_file.owner_of` the tenant.
            generation: of the store when the blocks were computed; after a purge of everything nothing is stored.
            since: `last_purge` when the blocks were computed; after a purge of everything, or of this tenant, nothing
                is stored.

        Raises:
            ValueError: the rows differ in length, are no bytes, or are not as many as the keys.
        """
        if len({len(row) for row in rows}) > 1 or any(row.ndim != 1 or row.dtype.itemsize != 1 for row in rows):
            raise ValueError("rows of different lengths, or not of bytes")
        index = self._get()
        if index is None or not self.writable or not keys:
            return None
        if time.monotonic() - self._swept_at > SWEEP_S:
            self.sweep()
        if self.bounds.max_blocks:  # how many there are is known when all headers have been read
            self.adopt()
        new = self._not_stored(index, namespace, dict(zip(keys, rows, strict=True)))
        if not new:
            return None
        file, row_bytes = new_file_id(), len(rows[0])
        header = BlockHeader(
            version=block_file.FORMAT_VERSION,
            kind=self.kind,
            file=file,
            namespace=namespace,
            layout=layout_text(layout),
            keys=" ".join(key.hex() for key in new),
            checksums=" ".join(map(checksum, new.values())),
            owner=owner,
            writer=self.writer,
        )
        head = encode_head(header, len(new), row_bytes)
        entry = NewFile(
            file, len(head) + len(new) * row_bytes, time.time(), namespace, tuple(new), owner=owner, writer=self.writer
        )
        if not self._reserve(index, entry, generation, since):
            return None
        if not self._write_file(file, head, list(new.values())):
            self.drop([file])
            return None
        committed = self._ask(lambda index: index.commit(entry), None, index)
        if not committed:
            if committed is None:  # a fault of the index
                self.drop([file])
            return None
        self._failing = False
        self.counters["stored_blocks"] += len(new)
        self.counters["stored_bytes"] += entry.nbytes
        return file

    def _not_stored(self, index: BlockIndex, namespace: str, rows: dict[bytes, Bytes]) -> dict[bytes, Bytes]:
        """What of ``rows`` is not stored; what is counts as used now."""

        def find() -> list[BlockRef | None]:
            return self._ask(lambda index: index.find(namespace, list(rows)), [None] * len(rows), index)

        refs, oldest = find(), time.time() - self.bounds.max_age_s
        if self.bounds.max_age_s and any(ref is not None and ref.created < oldest for ref in refs):
            self.sweep()
            refs = find()
        for ref in refs:
            if ref is not None and ref.file not in self._used:
                self._used[ref.file] = time.time(), False
        return {key: row for (key, row), ref in zip(rows.items(), refs, strict=True) if ref is None}

    def _reserve(self, index: BlockIndex, new: NewFile, generation: str | None, since: int | None) -> bool:
        used, self._used = self._used, {}
        bounds = self.bounds.max_bytes, self.bounds.max_blocks
        none = Reservation(False)
        made = self._ask(lambda index: index.reserve(new, *bounds, used, generation, since), none, index)
        self.counters["evicted_files"] += made.files
        self.counters["evicted_blocks"] += made.blocks
        self.counters["rejected"] += not made.granted and made is not none
        return made.granted

    def _write_file(self, file: str, head: bytes, rows: Sequence[Bytes]) -> bool:
        try:
            block_file.write_file(path_of(self.root, file), head, rows)
            return True
        except OSError as error:
            self.counters["errors"] += 1
            if error.errno != errno.ENOENT:  # a purge took the file, or somebody the folder, away
                self._pause(error)
            return False

    # -- deleting -------------------------------------------------------------------------------------------------

    def drop(self, files: Iterable[str]) -> None:
        """Delete files and forget their blocks."""
        files = list(files)
        if self._ask(lambda index: index.remove(files), False):
            return
        for file in files:  # without an index nothing else says that they are useless
            block_folder.unlink(self.root, file)

    def reject(self, file: str) -> None:
        """Count a file as damaged and delete it."""
        self.counters["corrupt"] += 1
        self.drop([file])

    def purge(
        self,
        *,
        owner: str | None = None,
        namespace: str | None = None,
        before: float | None = None,
        dry_run: bool = False,
    ) -> int:
        """Delete the files of a tenant, of a namespace, written before a moment, or that meet all that is given; where
        nothing is, all. Works beside running engines, which hear of it by `purges_after`.

        Returns:
            How many files went, or with ``dry_run`` would go.
        """
        for _ in range(2):  # an index that turns out damaged is built anew for the second time
            self.adopt()
            if dry_run:
                gone = self._ask(lambda index: len(index.files(owner=owner, namespace=namespace, before=before)), None)
            else:
                gone = self._ask(lambda index: index.purge(owner, namespace, before), None)
            if gone is not None:
                break
        if not dry_run and owner is None and namespace is None and before is None:
            self.sweep()  # what is being written
        return gone or 0

    def purges_after(self, id: int) -> list[Purge]:  # noqa: A002
        """What was purged after a purge, by any process. Where the index does not answer that is not known, and all
        counts as purged. Waits for nobody."""
        return self._ask(lambda index: index.purges_after(id), [Purge(self._never(), None, None)], wait=False)

    def last_purge(self) -> int:
        """Id of the last purge. Waits for nobody."""
        return self._ask(lambda index: index.last_purge(), 0, wait=False) or self._never()

    @staticmethod
    def _never() -> int:
        """An id between those of the purges before and after now."""
        return time.time_ns() // 1000

    def disown(self, namespace: str) -> bool:
        """Delete what this store's writer, in any process, stored under a namespace.

        What it has under way there, or comes with later, is not stored; what others stored stays. An index that takes
        this one's place is told too.

        Returns:
            False where the index could not be told now: it must be tried again.
        """
        self._disowned.add(namespace)
        return self._ask(lambda index: self._disown(index, namespace), False)

    def _disown(self, index: BlockIndex, namespace: str) -> bool:
        index.disown(namespace, self.writer)
        return True

    # -- looking after it -----------------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Read the headers of all files that were found without an index; on return their blocks are found.

        A thread does so from the start on. Until it has come to a file, its blocks are misses.
        """
        with self._adopting:
            while not self._closing.is_set() and self._ask(self._adopt_some, False):
                pass

    def _adopt_some(self, index: BlockIndex) -> bool:
        batch = [] if index.read_only else index.unread(_BATCH)
        read: list[NewFile] = []
        useless: list[str] = []
        for file in batch:
            try:
                with self._block_file(file) as opened:
                    head = opened.header
                    read.append(NewFile(file, 0, 0.0, head.namespace, opened.keys, head.owner, head.writer))
            except CorruptValue as error:
                useless.append(file)
                self.counters["corrupt"] += 1
                log.warning("semkv: dropped a damaged block file of %s: %s", self.root, error)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # the file is not to blame
                    self._complain("read", error)
                    return False
                useless.append(file)
        if batch:
            index.adopt(read, useless)
        return bool(batch)

    def sweep(self) -> int:
        """Remove what is too old, and files that no index names; returns how many.

        A file is in the index before it is made, so one that is not there was left by a writer that died.
        """
        self._swept_at = time.monotonic()
        there: list[tuple[str, Path]] = []
        try:
            there += ((file, path) for file, path, _ in block_folder.listed(self.root))
        except OSError as error:
            self._complain("list", error)

        def sweep(index: BlockIndex) -> int:
            if index.read_only:
                return 0
            gone = index.expire(time.time() - self.bounds.max_age_s if self.bounds.max_age_s else 0.0)
            known = set(index.files())
            if self._current():  # else it knows nothing of what is there now
                for _, path in there:
                    if path.name.partition(".")[0] not in known:
                        with contextlib.suppress(OSError):
                            path.unlink()
                            gone += 1
            return gone

        return self._ask(sweep, 0)

    def files(self) -> list[str]:
        """Ids of all files."""
        return self._ask(lambda index: index.files(), list[str]())

    def owned(self, owner: str) -> list[str]:
        """Ids of a tenant's files, of all namespaces; see `block_file.owner_of`."""
        return self._ask(lambda index: index.files(owner=owner), list[str]())

    def totals(self, namespace: str | None = None) -> tuple[int, int, int]:
        """Files, blocks and bytes stored, of one namespace or of the directory."""
        return self._ask(lambda index: index.totals(namespace), (0, 0, 0))

    def ages(self, owners: Sequence[str] | None = None) -> dict[str, tuple[int, int, int, float, float]]:
        """By namespace: files, blocks, bytes, when the oldest was written and the latest used; of some tenants."""
        return self._ask(lambda index: index.ages(owners), {})

    def damage(self, file: str) -> str:
        """What is wrong with a file, read from end to end; empty where it is whole."""
        try:
            with self._block_file(file) as opened:
                row = block_file.room(1, opened.row_bytes)[0]
                whole = all(opened.read(number, [row])[0] for number in range(len(opened.keys)))
                return "" if whole else f"{file}: a row is damaged"
        except (CorruptValue, OSError) as error:
            return f"{file}: {error}"

    def close(self) -> None:
        """Nothing more is asked or written."""
        self._closing.set()
        if self._helper is not None:
            self._helper.join()
        self._flush()
        with self._opening:
            self._stale, self._index, self._off = self._index or self._stale, None, True
            with contextlib.suppress(OSError, StoreError), block_folder.opening(self.root, wait_s=0, make=False):
                self._let_go()
            if self._stale is not None:
                self._stale.close()


def _runs(which: Sequence[int], rows: Sequence[int]) -> Iterator[list[int]]:
    """Pieces of ``which`` whose rows follow one another in the file."""
    start = 0
    for end in range(1, len(which) + 1):
        if end == len(which) or rows[end] != rows[end - 1] + 1:
            yield list(which[start:end])
            start = end
