"""The file under KV blocks and fusion states: one safetensors file, checked block by block.

A file holds one tensor ``blocks`` of bytes ``[n_blocks, row_bytes]``, one row per block. The header's metadata carries
one JSON document under the key ``semkv`` (see `BlockHeader`) and its checksum. Nothing is pickled, no path comes out of
a file, and nothing in a header is taken on trust.

    <root>/semkv.json               format version and kind of the store
    <root>/index.sqlite             which file holds which block
    <root>/extents/ab/ab12....safetensors

Layout of a safetensors file: https://github.com/huggingface/safetensors#format (8 bytes little-endian header length,
JSON header, then the tensors' bytes).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from semkv.errors import CorruptValue, StoreError
from semkv.keys import digest
from semkv.stores.database import delete_files
from semkv.stores.files import check_private, make_folder, open_file, replace_text

FORMAT_VERSION = 2
"""Version of the files. The store empties a directory of an older version, and refuses one of a newer version."""

MAX_ROWS = 8192
"""Blocks in one file at most."""

PAGE = 4096
"""What direct reading wants places to be a multiple of, in the file and in memory."""

MARKER = "semkv.json"
INDEX = "index.sqlite"
FILES = "extents"

Bytes = npt.NDArray[np.uint8]

log = logging.getLogger("semkv.stores")

_SUFFIX = ".safetensors"
_HEX = set("0123456789abcdef")
_TENSOR = "blocks"
_MAX_HEADER = 4 << 20  # an honest header has some hundred bytes a block
_IOV_MAX = 1024
_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_WAIT = getattr(os, "RWF_NOWAIT", 0)


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a file says of itself.

    Attributes:
        version: `FORMAT_VERSION` of the writer.
        kind: ``kv`` or ``fusion``.
        file: the file's own id, so that two exchanged files are noticed.
        namespace: digest of the model, its settings and the rank that wrote it.
        layout: of `layout_text`.
        keys: hex of the key of each row, separated by spaces.
        checksums: hex of xxh3_128 over each row, separated by spaces.
        owner: `tenant_tag` the tenant.
        writer: the engine that computed it.
    """

    version: int
    kind: str
    file: str
    namespace: str
    layout: str
    keys: str
    checksums: str
    owner: str = ""
    writer: str = ""


def tenant_tag(salt: str | None) -> str:
    """The tag of a tenant's blocks, by which they are found: of the ``cache_salt`` of its requests. It says nothing to
    somebody who does not know the salt."""
    return digest("owner", salt)[:32] if salt else ""


def layout_text(layout: Any) -> str:
    """What a row means (a JSON value: names, shapes, dtypes), as the text that headers are compared by."""
    return json.dumps(layout, sort_keys=True)


def checksum(row: Bytes) -> str:
    """xxh3_128 of one row of bytes, as hex: about 20 GB/s on one core, where the disk gives 2 to 7."""
    return xxhash.xxh3_128_hexdigest(row.data)


def room(rows: int, row_bytes: int) -> Bytes:
    """Memory to read rows into, uint8 ``[rows, row_bytes]``, that begins at a page."""
    nbytes = rows * row_bytes
    memory = np.empty(nbytes + PAGE, np.uint8)
    start = -memory.ctypes.data % PAGE
    return memory[start : start + nbytes].reshape(rows, row_bytes)


def encode_head(header: BlockHeader, count: int, row_bytes: int) -> bytes:
    """What stands before the rows in a file; rows of whole pages begin at a page."""
    tensor = _tensor(count, row_bytes)
    text = json.dumps(asdict(header))
    document = {"__metadata__": {"semkv": text, "checksum": _head_checksum(text, tensor)}, _TENSOR: tensor}
    head = json.dumps(document).encode()
    head += b" " * (-(8 + len(head)) % (8 if row_bytes % PAGE else PAGE))
    return struct.pack("<Q", len(head)) + head


def _tensor(count: int, row_bytes: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [count, row_bytes], "data_offsets": [0, count * row_bytes]}


def _head_checksum(text: str, tensor: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([text, tensor]).encode())


def part_of(path: Path) -> Path:
    """The name of a block file while it is being written."""
    return path.with_name(f"{path.name}.tmp")


def write_file(path: Path, head: bytes, rows: Sequence[Bytes]) -> None:
    """Write a file from where its rows are in memory.

    Its two folders are made where they are missing, not those above. It gets its name when all of it is on the disk:
    the name may be lost in a power cut, the content may not.

    Raises:
        OSError: the disk is full or read-only; the temporary file is gone.
    """
    for folder in (path.parent.parent, path.parent):  # a purge may have deleted both
        folder.mkdir(0o700, exist_ok=True)
    part = part_of(path)
    try:
        descriptor = open_file(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            views, done = [_past_the_page_cache(descriptor, head, rows), *(row.data for row in rows)], 0
            while rest := _rest(views, done):
                done += os.pwritev(descriptor, rest, done)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        part.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _past_the_page_cache(descriptor: int, head: bytes, rows: Sequence[Bytes]) -> memoryview:
    """Have a file of whole pages written with O_DIRECT, where the file system can; returns the head to write.

    A copy of what host memory holds is of no use in the page cache. Without it, writing takes less memory bandwidth
    from vLLM's copies, and one thread writes as fast as the disk is.
    """
    if len(head) % PAGE or any(len(row) % PAGE or row.ctypes.data % PAGE for row in rows):
        return memoryview(head)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | _DIRECT)
    except OSError:
        return memoryview(head)
    aligned = room(1, len(head))[0]
    aligned[:] = np.frombuffer(head, np.uint8)
    return aligned.data


@dataclass(slots=True)
class BlockFile:
    """An open file whose header has been read and checked. Use as a context manager.

    Attributes:
        keys: of the rows.
        row_bytes: length of each row.
        nbytes: length of the whole file.
    """

    header: BlockHeader
    keys: tuple[bytes, ...]
    row_bytes: int
    nbytes: int
    _checksums: list[str]
    _fd: int

    @classmethod
    def open(cls, path: Path, kind: str, file: str) -> BlockFile:
        """Open a file.

        Raises:
            CorruptValue: it is not the file of ours that its name says, or of another version, or cut short.
            FileNotFoundError: it was evicted.
            OSError: it cannot be read.
        """
        try:
            descriptor = open_file(path, os.O_RDONLY)
        except StoreError as error:  # a link, a folder, a device or a pipe
            raise CorruptValue(str(error)) from error
        try:
            return cls._parse(descriptor, kind, file)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            os.close(descriptor)
            raise CorruptValue(f"{path.name}: {error}") from error
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def _parse(cls, descriptor: int, kind: str, file: str) -> BlockFile:
        nbytes = os.fstat(descriptor).st_size
        (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0).ljust(8, b"\xff"))
        if length > min(_MAX_HEADER, nbytes):
            raise CorruptValue(f"{file}: a header of {length} bytes")
        document = json.loads(os.pread(descriptor, length, 8))
        text, tensor = document["__metadata__"]["semkv"], document[_TENSOR]
        if document["__metadata__"]["checksum"] != _head_checksum(text, tensor):
            raise CorruptValue(f"{file}: checksum of the header")
        fields = json.loads(text)
        if type(fields["version"]) is not int or fields["version"] != FORMAT_VERSION:
            raise CorruptValue(f"{file}: another format than {FORMAT_VERSION}")
        # What a later version adds says nothing about the rows.
        header = BlockHeader(**{name: fields[name] for name in BlockHeader.__dataclass_fields__})
        words = (header.kind, header.file, header.namespace, header.layout, header.owner, header.writer)
        for word in (*words, header.keys, header.checksums):
            word.encode()  # text that can be stored: no lone surrogates
        if (header.kind, header.file) != (kind, file):
            raise CorruptValue(f"{file}: another file's content")
        keys = tuple(map(bytes.fromhex, header.keys.split(" ", MAX_ROWS)))
        checksums = header.checksums.split(" ", MAX_ROWS)
        row_bytes, rest = divmod(nbytes - 8 - length, len(keys))
        if not 0 < len(keys) == len(checksums) <= MAX_ROWS or rest or tensor != _tensor(len(keys), row_bytes):
            raise CorruptValue(f"{file}: its length does not fit its header")
        return cls(header, keys, row_bytes, nbytes, checksums, descriptor)

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def check(self, namespace: str, layout: str | None, owner: str) -> None:
        """See that the file holds what the index says.

        Raises:
            CorruptValue: it is of another namespace, layout or tenant.
        """
        if (self.header.namespace, self.header.owner) != (namespace, owner):
            raise CorruptValue(f"{self.header.file}: another namespace or tenant")
        if layout is not None and self.header.layout != layout:
            raise CorruptValue(f"{self.header.file}: another layout")

    def read(self, first: int, rows: Sequence[Bytes]) -> list[bool]:
        """Fill ``rows`` (uint8 ``[row_bytes]`` each) with those from ``first`` on; which of them are right.

        What the page cache has is copied from there. The rest comes past it, without a copy, where all begins at pages.

        Raises:
            OSError: the disk fails.
        """
        if not 0 <= first <= len(self.keys) - len(rows) or any(len(row) != self.row_bytes for row in rows):
            return [False] * len(rows)
        views, at = [row.data for row in rows], self.nbytes - self.row_bytes * (len(self.keys) - first)
        nbytes = self.row_bytes * len(rows)
        done = _read_cached(self._fd, views, at)
        if done < nbytes and not any((at | self.row_bytes | row.ctypes.data) % PAGE for row in rows):
            done = _read_direct(self._fd, views, at, done // PAGE * PAGE)
        while done < nbytes and (got := os.preadv(self._fd, _rest(views, done), at + done)) > 0:
            done += got
        sums = self._checksums[first : first + len(rows)]
        return [checksum(row) == right for row, right in zip(rows, sums, strict=True)]


def _rest(views: Sequence[memoryview], done: int) -> list[memoryview]:
    """What of ``views`` is left after ``done`` bytes, as far as one call of the system takes it."""
    rest: list[memoryview] = []
    for view in views:
        if done < len(view):
            rest.append(view[done:])
            if len(rest) == _IOV_MAX:
                break
        done = max(0, done - len(view))
    return rest


def _read_cached(fd: int, views: Sequence[memoryview], at: int) -> int:
    """Fill ``views`` as far as the file's bytes are in the system's page cache; returns how many came."""
    done = 0
    with contextlib.suppress(OSError):  # not cached, or a file system that does not tell
        while _NO_WAIT and (rest := _rest(views, done)) and (got := os.preadv(fd, rest, at + done, _NO_WAIT)) > 0:
            done += got
    return done


def _read_direct(fd: int, views: Sequence[memoryview], at: int, done: int) -> int:
    """Go on past the page cache where the file system can; returns how many bytes are there.

    Nothing else is read from ``fd`` meanwhile.
    """
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT)
    except OSError:
        return done
    try:
        while (rest := _rest(views, done)) and (got := os.preadv(fd, rest, at + done)) > 0:
            done += got
    except OSError:
        return done  # tried again through the page cache
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return done


# -- the directory of a store ------------------------------------------------------------------------------------------


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


def found(root: Path, kind: str, counters: Counter[str]) -> Iterator[tuple[str, float, BlockFile]]:
    """The block files that are there, with their ids and when they were written, the youngest first. Damaged ones are
    deleted, and counted as ``corrupt``.

    Raises:
        OSError: a folder cannot be read, or the process has no descriptor or memory left.
    """
    there = sorted((-status.st_mtime, file) for file, _, status in listed(root) if file)
    for mtime, file in there:
        try:
            with BlockFile.open(path_of(root, file), kind, file) as opened:
                yield file, min(max(0.0, -mtime), 1e11), opened
        except CorruptValue as error:
            counters["corrupt"] += 1
            log.warning("semkv: dropped a damaged block file of %s: %s", root, error)
            unlink(root, file)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # the file is not to blame
                raise
            unlink(root, file)


def prepare(root: Path, kind: str, *, read_only: bool = False) -> None:
    """Mark a directory as ours, or see that it is of this format and kind.

    One of an older format is emptied: it is a cache.

    Raises:
        StoreError: it is of a newer format or another kind, others can write into it, or there are links in it.
        OSError: it cannot be read or written.
    """
    check_private(root)
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
    """Delete the index and all block files, of any format, in `database.opening`; how many files that were."""
    with contextlib.suppress(OSError):
        delete_files(root / INDEX)
    gone = 0
    for _, path, _ in listed(root):
        with contextlib.suppress(OSError):
            path.unlink()
            gone += 1
    return gone
