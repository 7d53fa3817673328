"""The file under KV blocks and fusion states: one safetensors file, checked block by block.

A file holds one tensor ``blocks`` of bytes ``[n_blocks, row_bytes]``, one row per block. The header's metadata carries
one JSON document under the key ``semkv`` and its checksum. Nothing is pickled, and no path comes out of a file.

    <root>/index.sqlite                     which file holds which block
    <root>/extents/ab/ab12....safetensors

The document says what the file was written for: ``version``, ``kind`` (kv or fusion), ``file`` (its own id, so that two
exchanged files are noticed), ``namespace``, ``layout`` (of `layout_text`), ``owner`` (`tenant_tag`), ``writer`` (an
engine), and of each row the ``keys`` and the ``checksums`` (xxh3_128), as hex separated by spaces.

Layout of a safetensors file: https://github.com/huggingface/safetensors#format (8 bytes little-endian header length,
JSON header, then the tensors' bytes).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from semkv_stores.database import is_ours
from semkv_stores.digests import digest
from semkv_stores.errors import CorruptValue, StoreError
from semkv_stores.files import check_private, delete_all, matching, open_file

FORMAT_VERSION = 2

PAGE = 4096
"""What direct reading wants places to be a multiple of, in the file and in memory."""

INDEX = "index.sqlite"
FILES = "extents"

Bytes = npt.NDArray[np.uint8]

_SUFFIX = ".safetensors"
_TENSOR = "blocks"
_MAX_HEADER = 4 << 20  # an honest header has some hundred bytes a block
_IOV_MAX = 1024
_DIRECT = getattr(os, "O_DIRECT", 0)


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


# -- writing ----------------------------------------------------------------------------------------------------------


def encode_head(
    about: Mapping[str, str],
    keys: Sequence[bytes],
    rows: Sequence[Bytes],
) -> Bytes:
    """What stands before the rows in a file, ``about`` being all but keys and checksums, in memory as of `room`.

    KV rows of whole pages begin at a page, for O_DIRECT. Others do not: encoder outputs have no host memory above them,
    so the page cache serves them.
    """
    document = {
        "version": FORMAT_VERSION,
        **about,
        "keys": " ".join(key.hex() for key in keys),
        "checksums": " ".join(map(checksum, rows)),
    }
    text = json.dumps(document)
    tensor = _tensor(len(rows), len(rows[0]))
    metadata = {"semkv": text, "checksum": _head_checksum(text, tensor)}
    head = json.dumps({"__metadata__": metadata, _TENSOR: tensor}).encode()
    direct = about["kind"] == "kv" and len(rows[0]) % PAGE == 0
    head += b" " * (-(8 + len(head)) % (PAGE if direct else 8))
    memory: Bytes = room(1, 8 + len(head))[0]
    memory[:] = np.frombuffer(struct.pack("<Q", len(head)) + head, np.uint8)
    return memory


def _tensor(count: int, row_bytes: int) -> dict[str, Any]:
    return {
        "dtype": "U8",
        "shape": [count, row_bytes],
        "data_offsets": [0, count * row_bytes],
    }


def _head_checksum(text: str, tensor: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([text, tensor]).encode())


def _part_of(path: Path) -> Path:
    """The name of a block file while it is being written."""
    return path.with_name(f"{path.name}.tmp")


def write_file(path: Path, head: Bytes, rows: Sequence[Bytes]) -> None:
    """Write a file from where its rows are in memory.

    Its two folders are made where they are missing, not those above it. It gets its name when all of it is on the disk:
    the name may be lost in a power cut, the content may not.
    """
    for folder in (path.parent.parent, path.parent):  # a purge may have deleted both
        folder.mkdir(0o700, exist_ok=True)
    part = _part_of(path)
    try:
        descriptor = open_file(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            _transfer(os.pwritev, descriptor, [head, *rows], 0)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        part.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _transfer(
    call: Callable[..., int],
    descriptor: int,
    parts: Sequence[Bytes],
    at: int,
) -> None:
    """Read or write from a place of a file on, as far as it goes.

    Whole pages come and go with O_DIRECT: a copy of what host memory holds is of no use in the page cache. Without it,
    writing takes less memory bandwidth from vLLM's copies, and one thread writes as fast as the disk is.
    """
    views, done = [part.data for part in parts], 0
    if not (at % PAGE or any((len(part) | part.ctypes.data) % PAGE for part in parts)):
        with contextlib.suppress(OSError):  # a file system that cannot do that
            fcntl.fcntl(descriptor, fcntl.F_SETFL, _DIRECT)
    while rest := _rest(views, done):
        try:
            if (moved := call(descriptor, rest, at + done)) == 0:
                return
            done += moved
        except OSError as error:  # of a file system that takes O_DIRECT and cannot do it here
            if error.errno != errno.EINVAL or not fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT:
                raise
            fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)


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


# -- reading ----------------------------------------------------------------------------------------------------------


def _read(descriptor: int, length: int, at: int) -> bytes:
    """So many bytes from a place of a file on, fewer only where it ends: one call may give a part of what is there."""
    found = b""
    while len(found) < length and (
        more := os.pread(descriptor, length - len(found), at + len(found))
    ):
        found += more
    return found


class Source(Protocol):
    """Where the bytes of a block file come from: a file here, or an object in a bucket.

    Attributes:
        nbytes: of all of it.
    """

    nbytes: int

    def read(self, length: int, at: int) -> bytes:
        """So many bytes from a place on, fewer only where it ends."""
        ...

    def fill(self, rows: Sequence[Bytes], at: int) -> None:
        """Fill rows with what follows a place, as far as it goes."""
        ...

    def close(self) -> None: ...


class LocalSource:
    """A file of this machine.

    Raises:
        CorruptValue: it is a link, a folder, a device or a pipe.
        OSError: it cannot be read, or (FileNotFoundError) was evicted.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._fd = open_file(path, os.O_RDONLY)
        except StoreError as error:
            raise CorruptValue(str(error)) from error
        self.nbytes = os.fstat(self._fd).st_size

    def read(self, length: int, at: int) -> bytes:
        return _read(self._fd, length, at)

    def fill(self, rows: Sequence[Bytes], at: int) -> None:
        _transfer(os.preadv, self._fd, rows, at)

    def close(self) -> None:
        os.close(self._fd)


class BlockFile:
    """An open file whose header (``head``) has been read, and says what is ``expected``. Use as a context manager.

    Raises:
        CorruptValue: it is another file than expected, or damaged, or of another version, or cut short.
        OSError: it cannot be read.
    """

    def __init__(self, source: Source, name: str, **expected: str) -> None:
        self._source = source
        try:
            self._parse(expected)
        except OSError:
            source.close()
            raise
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
            CorruptValue,
        ) as error:
            source.close()
            raise CorruptValue(f"{name}: {error}") from error

    def _parse(self, expected: Mapping[str, str]) -> None:
        nbytes = self._source.nbytes
        (length,) = struct.unpack("<Q", self._source.read(8, 0).ljust(8, b"\xff"))
        if length > min(_MAX_HEADER, nbytes):
            raise CorruptValue(f"a header of {length} bytes")
        document = json.loads(self._source.read(length, 8))
        text = document["__metadata__"]["semkv"]
        tensor = document[_TENSOR]
        if document["__metadata__"]["checksum"] != _head_checksum(text, tensor):
            raise CorruptValue("checksum of the header")
        self.head: dict[str, Any] = json.loads(text)
        for name, value in {"version": FORMAT_VERSION, **expected}.items():
            if self.head[name] != value:
                raise CorruptValue(f"written for another {name}")
        self.keys = tuple(map(bytes.fromhex, self.head["keys"].split(" ")))
        self._checksums = self.head["checksums"].split(" ")
        self._start = 8 + length
        self.row_bytes, rest = divmod(nbytes - self._start, len(self.keys))
        if (
            rest
            or len(self._checksums) != len(self.keys)
            or tensor != _tensor(len(self.keys), self.row_bytes)
        ):
            raise CorruptValue("its length does not fit its header")

    def __enter__(self) -> BlockFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._source.close()

    def read(self, first: int, rows: Sequence[Bytes]) -> list[bool]:
        """Fill ``rows`` (uint8 ``[row_bytes]`` each) with those from ``first`` on; which of them are right."""
        if not 0 <= first <= len(self.keys) - len(rows) or any(
            len(row) != self.row_bytes for row in rows
        ):
            return [False] * len(rows)
        self._source.fill(rows, self._start + first * self.row_bytes)
        sums = self._checksums[first : first + len(rows)]
        return [checksum(row) == right for row, right in zip(rows, sums, strict=True)]


def check_file(root: Path, file: str) -> str:
    """Read a block file from end to end: what is wrong with it, or an empty string.

    Raises:
        OSError: it cannot be read, which says nothing of what is in it.
    """
    try:
        with BlockFile(LocalSource(path_of(root, file)), file, file=file) as opened:
            row = room(1, opened.row_bytes)[0]
            whole = all(opened.read(number, [row])[0] for number in range(len(opened.keys)))
            return "" if whole else f"{file}: a row is damaged"
    except FileNotFoundError:  # it was evicted
        return ""
    except CorruptValue as error:
        return f"{file}: {error}"


# -- the directory of a store ------------------------------------------------------------------------------------------


def path_of(root: Path, file: str) -> Path:
    """Where a block file lies. Ids are drawn by the index: 16 hex digits."""
    return root / FILES / file[:2] / f"{file}{_SUFFIX}"


def listed(root: Path) -> Iterator[Path]:
    """All that lies where block files do, but for folders. No link is followed."""
    for folder in () if (root / FILES).is_symlink() else matching(root / FILES, "*"):
        if not folder.is_symlink():
            yield from (
                path for path in matching(folder, "*") if path.is_symlink() or not path.is_dir()
            )


def unlink(root: Path, file: str) -> None:
    """Delete a block file, also one that is being written, where that is possible; what stays is swept later."""
    path = path_of(root, file)
    for name in (path, _part_of(path)):
        with contextlib.suppress(OSError):
            name.unlink()


def is_store(root: Path) -> bool:
    """Whether a directory was made by `make_store`, also where its index was lost or damaged. It is not where the index
    is another program's database."""
    if is_ours(root / INDEX) is False:
        return False
    files = [root / INDEX, root / f"{INDEX}.lock"]
    return os.path.isdir(root / FILES) and any(map(os.path.isfile, files))  # noqa: PTH112 (False where it cannot be read)


def make_store(root: Path) -> None:
    """Make the directory of a store where it is missing, in one that is there.

    Raises:
        StoreError: it is a file, others can write into it, or there is a link in it.
        OSError: it cannot be read or written.
    """
    if root.is_file():
        raise StoreError(f"{root} is a file, not a directory: choose another cache directory")
    root.mkdir(0o700, exist_ok=True)
    check_private(root)
    if (root / FILES).is_symlink():
        raise StoreError(f"{root / FILES} is a link: delete it, or choose another cache directory")
    (root / FILES).mkdir(0o700, exist_ok=True)


def discard_blocks(root: Path) -> list[str]:
    """Delete all block files, of any format. Returns a line for each that cannot be deleted."""
    return delete_all(listed(root))
