"""The files of one store directory.

<root>/semkv.json               format version and kind
<root>/open.lock                held by the one process that opens or repairs the directory
<root>/index.sqlite             which extent holds which block
<root>/extents/ab/ab12....safetensors
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semkv.errors import CorruptValue, StoreError
from semkv.stores import container
from semkv.stores.block_index import BlockRef, FoundFile, NewExtent
from semkv.stores.container import Bytes, ExtentFile, ExtentHeader
from semkv.stores.files import replace_text

_LOCK_POLL_S = 0.002


def valid_id(extent: str) -> bool:
    """Whether this is an id we could have drawn: nothing else becomes part of a path."""
    return len(extent) == 32 and set(extent) <= set("0123456789abcdef")


def new_extent(header: ExtentHeader, nbytes: int) -> NewExtent:
    """An extent as the index knows it."""
    first = bytes.fromhex(header.hashes[0])
    return NewExtent(
        header.extent,
        header.namespace,
        len(header.hashes),
        nbytes,
        header.position,
        first,
        header.owner,
        header.writer,
    )


FileId = tuple[int, int]
"""Device and inode: two files that are there at the same time never have the same. One that is open is there."""


def file_id(path: Path) -> FileId | None:
    """Which file has this name at this moment, at the price of one ``stat``; None where there is none.

    Raises:
        OSError: that cannot be said.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def inside(folder: Path) -> list[Path]:
    """What is in a folder; nothing where a purge took it away, or it is none.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


@dataclass(frozen=True, slots=True)
class ExtentDirectory:
    """Where the extents of one kind live."""

    root: Path
    kind: str

    def path(self, extent: str) -> Path:
        return self.root / "extents" / extent[:2] / f"{extent}.safetensors"

    @property
    def index(self) -> Path:
        return self.root / "index.sqlite"

    def index_file(self) -> FileId | None:
        """Which file the index is at this moment; see `file_id`."""
        return file_id(self.index)

    def discard_index(self) -> None:
        """Delete the index, so that whoever opens the directory next builds it again."""
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                self.index.with_name(self.index.name + suffix).unlink()

    def listed(self, inside: Callable[[Path], list[Path]] = inside) -> Iterator[Path]:
        """All files there, temporary ones too; ``inside`` says what is in a folder. Raises what that raises."""
        for folder in inside(self.root / "extents"):
            if len(folder.name) == 2:
                yield from inside(folder)

    def create(self) -> None:
        """Make the directory, or check that it is of this format and kind; in `one_opener`.

        Raises:
            StoreError: it was written by another format version or for another kind.
            OSError: it cannot be made or read.
        """
        (self.root / "extents").mkdir(parents=True, exist_ok=True)
        path = self.root / "semkv.json"
        mine = {"format": container.FORMAT_VERSION, "kind": self.kind}
        try:
            theirs = json.loads(path.read_text())
        except FileNotFoundError:
            replace_text(path, json.dumps(mine))
            return
        except ValueError:
            theirs = None
        if theirs != mine:
            raise StoreError(
                f"{self.root} holds {theirs}, this version reads {mine}: "
                "empty it with 'semkv run --purge' or choose another cache directory"
            )

    @contextlib.contextmanager
    def one_opener(self, *, make: bool = False, wait_s: float | None = None) -> Iterator[None]:
        """One process at a time opens, repairs, closes or purges a directory; not twice in one thread.

        Args:
            make: make the directory where it is not there, or was purged meanwhile.
            wait_s: how long to wait while another process does; None for as long as that takes.

        Raises:
            StoreError: it is a file.
            BlockingIOError: another process still does after ``wait_s``.
            OSError: it is not there, or cannot be made or written.
        """
        path, until = self.root / "open.lock", time.monotonic() + (wait_s or 0)
        if self.root.is_file():
            raise StoreError(f"{self.root} is not a directory")
        while True:
            if make:
                with contextlib.suppress(FileExistsError):  # it was purged between pathlib's two looks
                    self.root.mkdir(parents=True, exist_ok=True)
            try:
                lock = path.open("w")
            except FileNotFoundError:
                if make and not any(p.is_symlink() and not p.exists() for p in (self.root, *self.root.parents)):
                    continue
                raise
            with lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX if wait_s is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() >= until:
                        raise
                    time.sleep(_LOCK_POLL_S)
                    continue
                ours = False
                with contextlib.suppress(FileNotFoundError):
                    ours = os.path.samestat(os.fstat(lock.fileno()), path.stat())
                if ours:  # else a purge took the file away while this waited
                    yield
                    return

    def found(self) -> Iterator[FoundFile]:
        """The extents' files, by name, size and time alone; nothing is read.

        Raises:
            OSError: a folder cannot be read: what is there would be taken for nobody's.
        """
        for path in self.listed():
            extent, _, suffix = path.name.partition(".")
            if suffix == "safetensors" and path == self.path(extent) and valid_id(extent):
                with contextlib.suppress(OSError):
                    status = path.stat()
                    yield FoundFile(extent, status.st_size, status.st_mtime)

    def read_run(self, first: BlockRef, namespace: str, layout: Any, hashes: Sequence[bytes], out: Bytes) -> None:
        """Fill ``out`` (uint8 ``[len(hashes), row_bytes]``) with neighbouring rows from ``first`` on, all checked.

        Raises:
            CorruptValue: the file, or a row, is not what was asked for.
            OSError: it is gone or cannot be read.
        """
        with ExtentFile.open(self.path(first.extent)) as file:
            header, mine = file.header, [h.hex() for h in hashes]
            if (header.kind, header.extent, header.namespace) != (self.kind, first.extent, namespace):
                raise CorruptValue(f"{first.extent}: another file's content")
            if layout is not None and header.layout != layout:
                raise CorruptValue(f"{first.extent}: another layout")
            if list(header.hashes[first.row : first.row + len(mine)]) != mine:
                raise CorruptValue(f"{first.extent}: other blocks")
            file.read_rows(first.row, out)

    def describe(self, extent: str) -> tuple[ExtentHeader, int] | None:
        """The header of an extent and the bytes of one row; None when it is gone or damaged."""
        try:
            with ExtentFile.open(self.path(extent)) as file:
                return file.header, file.row_bytes
        except (CorruptValue, OSError):
            return None

    def damage(self, extent: str) -> str:
        """What is wrong with an extent's file, read from end to end; empty where it is whole."""
        try:
            with ExtentFile.open(self.path(extent)) as file:
                if (file.header.kind, file.header.extent) != (self.kind, extent):
                    return f"{extent}: another file's content"
                row = np.empty((1, file.row_bytes), np.uint8)
                for number in range(len(file.header.hashes)):
                    file.read_rows(number, row)
        except (CorruptValue, OSError) as error:
            return f"{extent}: {error}"
        return ""

    def read_head(self, extent: str) -> tuple[NewExtent, tuple[bytes, ...]]:
        """What a file says of itself: the extent, and the hashes of its blocks.

        Raises:
            CorruptValue: it is damaged, or not what its name says.
            OSError: it is gone or cannot be read.
        """
        path = self.path(extent)
        with ExtentFile.open(path) as file:
            header, nbytes = file.header, file.nbytes
        if (header.kind, header.extent) != (self.kind, extent):
            raise CorruptValue(f"{path.name}: another file's content")
        return new_extent(header, nbytes), tuple(bytes.fromhex(h) for h in header.hashes)
