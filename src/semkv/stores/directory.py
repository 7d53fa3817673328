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
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from semkv.errors import CorruptValue, StoreError
from semkv.stores import container
from semkv.stores.block_index import FoundFile, NewExtent
from semkv.stores.container import ExtentFile, ExtentHeader


def valid_id(extent: str) -> bool:
    """Whether this is an id we could have drawn: nothing else becomes part of a path."""
    return len(extent) == 32 and set(extent) <= set("0123456789abcdef")


def new_extent(header: ExtentHeader, nbytes: int) -> NewExtent:
    """An extent as the index knows it."""
    first = bytes.fromhex(header.hashes[0])
    return NewExtent(header.extent, header.namespace, len(header.hashes), nbytes, header.position, first)


@dataclass(frozen=True, slots=True)
class ExtentDirectory:
    """Where the extents of one kind live. Iterating gives all files there, temporary ones too."""

    root: Path
    kind: str

    def path(self, extent: str) -> Path:
        return self.root / "extents" / extent[:2] / f"{extent}.safetensors"

    @property
    def index(self) -> Path:
        return self.root / "index.sqlite"

    def discard_index(self) -> None:
        """Delete the index, so that whoever opens the directory next builds it again."""
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                self.index.with_name(self.index.name + suffix).unlink()

    def __iter__(self) -> Iterator[Path]:
        return (self.root / "extents").glob("??/*")

    def create(self) -> None:
        """Make the directory, or check that it is of this format and kind.

        Raises:
            StoreError: it is a file, or was written by another format version or for another kind.
            OSError: it cannot be made or read.
        """
        if self.root.exists() and not self.root.is_dir():
            raise StoreError(f"{self.root} is not a directory")
        (self.root / "extents").mkdir(parents=True, exist_ok=True)
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

    @contextlib.contextmanager
    def one_opener(self) -> Iterator[None]:
        """One process at a time opens or repairs a directory."""
        with (self.root / "open.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def found(self) -> Iterator[FoundFile]:
        """The extents' files, by name, size and time alone; nothing is read."""
        for path in self:
            extent, _, suffix = path.name.partition(".")
            if suffix == "safetensors" and path == self.path(extent) and valid_id(extent):
                with contextlib.suppress(OSError):
                    status = path.stat()
                    yield FoundFile(extent, status.st_size, status.st_mtime)

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
