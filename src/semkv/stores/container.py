"""The file under a KV extent and a fusion state: one safetensors file, checked block by block.

A file holds one tensor ``blocks`` of bytes, one row per block: ``[n_blocks, row_bytes]``, or ``[n_blocks, n_layers,
block_bytes]`` where the layers are alike (the bytes are the same). The header's metadata carries one JSON document
under the key ``semkv`` (see `ExtentHeader`) and its checksum. Nothing is pickled.

Layout of a safetensors file: https://github.com/huggingface/safetensors#format (8 bytes little-endian header length,
JSON header, then the tensors' bytes).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from semkv.errors import CorruptValue
from semkv.keys import digest
from semkv.stores.files import replacing

FORMAT_VERSION = 1
"""Version of the files; a directory of another version is refused when it is opened."""

Bytes = npt.NDArray[np.uint8]

PAGE = 4096
"""What direct reading wants places to be a multiple of, in the file and in memory."""

_PADDED_BYTES = 1 << 20  # where rows are worth a page of padding, so that they begin at a page
_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_WAIT = getattr(os, "RWF_NOWAIT", 0)
_TENSOR = "blocks"
_MAX_HEADER = 64 << 20  # an honest header is some hundred bytes a block


@dataclass(frozen=True, slots=True)
class ExtentHeader:
    """What a file says of itself.

    Attributes:
        version: `FORMAT_VERSION` of the writer.
        kind: ``kv`` or ``fusion``.
        extent: the file's own id, so that two exchanged files are noticed.
        namespace: digest of the model, its settings and the rank that wrote it.
        layout: a JSON value that describes a row (layer names, shapes, dtypes).
        hashes: lowercase hex of the key of each row.
        checksums: lowercase hex of xxh3_128 over each row.
        position: index of the first row's block in its prompt.
        owner: `owner_of` the tenant.
        writer: the engine that computed it.
    """

    version: int
    kind: str
    extent: str
    namespace: str
    layout: Any
    hashes: tuple[str, ...]
    checksums: tuple[str, ...]
    position: int = 0
    owner: str = ""
    writer: str = ""


def owner_of(salt: str | None) -> str:
    """The tag of a tenant's extents, by which its data is found: of the ``cache_salt`` of its requests. It says nothing
    to who does not know the salt."""
    return digest("owner", salt)[:32] if salt else ""


def checksum(row: Bytes) -> str:
    """xxh3_128 of one row of bytes, as hex: about 20 GB/s on one core, where the disk gives 2 to 7."""
    return xxhash.xxh3_128_hexdigest(row.data)


def room(rows: int, row_bytes: int) -> Bytes:
    """Memory to read rows into, uint8 ``[rows, row_bytes]``, that begins at a page."""
    nbytes = rows * row_bytes
    memory = np.empty(nbytes + PAGE, np.uint8)
    start = -memory.ctypes.data % PAGE
    return memory[start : start + nbytes].reshape(rows, row_bytes)


def _head_checksum(text: str, tensor: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps([text, tensor]).encode())


def encode_head(header: ExtentHeader, shape: tuple[int, ...]) -> bytes:
    """What stands before the rows in a file; the file is as long as this and the rows together.

    Args:
        header: checksums filled in.
        shape: of the tensor of bytes that the rows are.
    """
    nbytes = math.prod(shape)
    tensor = {"dtype": "U8", "shape": list(shape), "data_offsets": [0, nbytes]}
    text = json.dumps(asdict(header))
    document = {"__metadata__": {"semkv": text, "checksum": _head_checksum(text, tensor)}, _TENSOR: tensor}
    head = json.dumps(document).encode()
    head += b" " * (-(8 + len(head)) % (PAGE if nbytes >= _PADDED_BYTES else 8))
    return struct.pack("<Q", len(head)) + head


def write_extent(path: Path, head: bytes, parts: Sequence[Bytes]) -> None:
    """Write a file so that it is there in full or not at all; see `files.replacing`.

    Args:
        path: the final name; its parent exists.
        head: of `encode_head`.
        parts: the rows in order, uint8 ``[n, row_bytes]`` each, C-contiguous.

    Raises:
        OSError: the disk is full or read-only; the temporary file is gone.
    """
    with replacing(path) as f:
        f.write(head)
        for rows in parts:
            f.write(rows.data.cast("B"))


@dataclass(slots=True)
class ExtentFile:
    """An open file whose header has been read. Use as a context manager."""

    header: ExtentHeader
    row_bytes: int
    _fd: int
    _data: int

    @property
    def nbytes(self) -> int:
        """Length of the whole file."""
        return self._data + self.row_bytes * len(self.header.hashes)

    @classmethod
    def open(cls, path: Path) -> ExtentFile:
        """Open a file and check that it is whole.

        Raises:
            CorruptValue: not a file of ours, of another version, or cut short.
            FileNotFoundError: it was evicted.
            OSError: it cannot be read.
        """
        fd = os.open(path, os.O_RDONLY)
        try:
            header, begin, end, data = _parse(fd, path)
            if header.version != FORMAT_VERSION:
                raise CorruptValue(f"{path.name}: format {header.version}, expected {FORMAT_VERSION}")
            n = len(header.hashes)
            size = end - begin
            if n == 0 or len(header.checksums) != n or size % n or os.fstat(fd).st_size != data + end:
                raise CorruptValue(f"{path.name}: length does not fit its header")
            return cls(header, size // n, fd, data + begin)
        except BaseException:
            os.close(fd)
            raise

    def __enter__(self) -> ExtentFile:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._fd)

    def read_rows(self, start: int, out: Bytes) -> None:
        """Fill ``out`` (uint8 ``[n, row_bytes]``, C-contiguous) with rows from ``start`` on, and check each.

        Raises:
            CorruptValue: a row is missing or differs from its checksum.
        """
        n = len(out)
        if start < 0 or start + n > len(self.header.hashes) or out.shape[1] != self.row_bytes:
            raise CorruptValue("rows outside the extent")
        view, at = out.data.cast("B"), self._data + start * self.row_bytes
        done, whole = _read_cached(self._fd, view, at), len(view) // PAGE * PAGE
        if done < whole and not (at | out.ctypes.data) % PAGE:
            done = _read_direct(self._fd, view[:whole], at, done // PAGE * PAGE)
        while done < len(view):
            got = os.preadv(self._fd, [view[done:]], at + done)
            if got <= 0:
                raise CorruptValue("file ends early")
            done += got
        for i in range(n):
            if checksum(out[i]) != self.header.checksums[start + i]:
                raise CorruptValue(f"checksum of row {start + i}")


def _read_cached(fd: int, out: memoryview, at: int) -> int:
    """Fill ``out`` as far as the file's bytes are in the system's page cache; returns how many came."""
    done = 0
    with contextlib.suppress(OSError):  # not cached, or a file system that does not tell
        if _NO_WAIT and os.preadv(fd, [out[:PAGE]], at, _NO_WAIT) == min(PAGE, len(out)):
            while done < len(out) and (got := os.preadv(fd, [out[done:]], at + done, _NO_WAIT)) > 0:
                done += got
    return done


def _read_direct(fd: int, out: memoryview, at: int, done: int) -> int:
    """Go on past the page cache, which would cost a copy, where the file system can; returns how many bytes are there.

    Nothing else is read from ``fd`` meanwhile.
    """
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT)
    except OSError:
        return done
    try:
        while done < len(out) and (got := os.preadv(fd, [out[done:]], at + done)) > 0:
            done += got
    except OSError:
        return done  # tried again through the page cache
    finally:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return done


def _parse(fd: int, path: Path) -> tuple[ExtentHeader, int, int, int]:
    """Header, the tensor's begin and end within the data section, and where that section starts."""
    prefix = os.pread(fd, 8, 0)
    if len(prefix) != 8:
        raise CorruptValue(f"{path.name}: empty")
    (length,) = struct.unpack("<Q", prefix)
    if length > _MAX_HEADER:
        raise CorruptValue(f"{path.name}: header of {length} bytes")
    try:
        document = json.loads(os.pread(fd, length, 8))
        text, tensor = document["__metadata__"]["semkv"], document[_TENSOR]
        if document["__metadata__"]["checksum"] != _head_checksum(text, tensor):
            raise CorruptValue(f"{path.name}: checksum of the header")
        fields = json.loads(text)
        fields["hashes"], fields["checksums"] = tuple(fields["hashes"]), tuple(fields["checksums"])
        # What a later version adds says nothing about the rows.
        header = ExtentHeader(**{k: v for k, v in fields.items() if k in ExtentHeader.__dataclass_fields__})
        _check_types(header)
        begin, end = tensor["data_offsets"]
        return header, int(begin), int(end), 8 + length
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptValue(f"{path.name}: {error}") from error


def _check_types(header: ExtentHeader) -> None:
    """A header may be another program's, so nothing in it is taken on trust.

    Raises:
        ValueError, TypeError: a field is not what it should be.
    """
    words = (header.kind, header.extent, header.namespace, header.owner, header.writer, *header.checksums)
    numbers = (header.version, header.position)
    if not all(isinstance(w, str) for w in words) or not all(type(n) is int for n in numbers):
        raise TypeError("a field has the wrong type")
    for h in header.hashes:
        bytes.fromhex(h)
