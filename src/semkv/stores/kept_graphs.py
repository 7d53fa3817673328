"""Graphs of the vector index on disk, which spare a start the minutes in which they are built.

They are never the only copy of anything and never believed: an index takes a row from here only where it equals the
catalog's vector. So an old or foreign file costs time and no answer. Nothing is written unless the catalog is still the
one of the start, and the index has heeded its last purge: what a purge deleted is not written back.

    graphs/<namespace>/<layer>-<partition>-<number>.graph      all digests

A file is a magic word, one JSON line (layer, with its encoder's fingerprint; partition), the number of rows (8 bytes),
a hash of each row's item (uint64, 0 for a removed row), FAISS's own format, and xxh3_128 of all before. Nothing is
parsed before the checksum fits. Several processes may share the folder: the last one's file stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from semkv.errors import CorruptValue, SemkvError
from semkv.keys import digest
from semkv.stores.catalog import Catalog
from semkv.stores.files import described, file_id, make_folder, matching, open_file, remove_strays, replacing

if TYPE_CHECKING:
    import numpy.typing as npt

    Hashes = npt.NDArray[np.uint64]
    Write = Callable[[bytes], int]

FOLDER = "graphs"
_MAGIC = b"semkv graph 1\n"
_ROWS = struct.Struct("<Q")
_CHECKSUM = 16
_MAX_BYTES = 4 << 30  # of a folder: more than four million rows of 384 numbers


class KeptGraphs:
    """The graphs of one layer. Any thread may call, one at a time; nothing here raises.

    Args:
        folder: of all graphs of a cache directory.
        layer: whose vectors they are, named with the encoder's fingerprint.
        purge: returns the mark of the last purge of the catalog that the vectors come from, or None where that catalog
            is gone or cannot be asked.
        fault: called with the error of every file that is damaged or cannot be written.
        max_bytes: bound on all files of the folder; the least recently used go first.
    """

    def __init__(
        self,
        folder: Path,
        layer: str,
        purge: Callable[[], str | None],
        fault: Callable[[Exception], None],
        *,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        self._folder, self._layer, self._fault, self._max_bytes = folder, layer, fault, max_bytes
        self._purge_now, self._heeded = purge, purge()
        self._prefix = digest("layer", layer)[:16]
        self._found: dict[str, list[Path]] = defaultdict(list)  # those of the start, by partition
        for file in sorted(matching(folder, f"*/{self._prefix}-*.graph")):
            self._found[file.name.split("-")[1]].append(file)

    def read(self, partition: str) -> Iterator[tuple[int, memoryview]]:
        """The number and checked bytes of each graph that a partition had at the start; a damaged one is deleted."""
        for file in self._found.pop(_short(partition), ()):
            try:
                yield int(file.stem.split("-")[2]), _checked(file, self._head(partition))
                os.utime(file)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, SemkvError) as error:
                self._fault(error)
                _delete(file)

    def save(self, namespace: str, partition: str, number: int, write: Callable[[Write], None]) -> bool:
        """Write a graph in the place of the one with that number; returns whether it is there now.

        Args:
            write: calls its argument with the graph's bytes.
        """
        heeded = self._heeded
        if heeded is None or self._purge_now() != heeded:
            return False
        saved, file, checksum = False, self._file(namespace, partition, number), xxhash.xxh3_128()
        try:
            make_folder(file.parent)
            with replacing(file, private=True) as out:

                def put(data: bytes) -> int:
                    checksum.update(data)
                    return out.write(data)

                put(self._head(partition))
                write(put)
                out.write(checksum.digest())
            saved = self._trim(file)
        except (OSError, RuntimeError) as error:  # the second from FAISS, when a write fails
            self._fault(error)
        if self._purge_now() != heeded:  # a purge marks the catalog before it deletes graphs: it may have missed this
            saved = False
            _delete(file)
            _delete_empty(file.parent, self._folder)
        return saved

    def heed(self, purge: str) -> None:
        """Say that the index holds nothing any more of what this purge, and those before, deleted."""
        self._heeded = purge

    def drop(self, namespace: str, partition: str, number: int) -> None:
        """Delete a graph. Its folder stays, into which another index may be about to write."""
        _delete(self._file(namespace, partition, number))

    def reject(self, namespace: str, partition: str, number: int, error: Exception) -> None:
        """Delete a graph that is of no use, and count it."""
        self._fault(error)
        self.drop(namespace, partition, number)

    def drop_unread(self) -> None:
        """Delete the graphs of the start whose partitions nobody asked for: nothing is left of them."""
        for file in (file for files in self._found.values() for file in files):
            _delete(file)
        self._found.clear()

    def _head(self, partition: str) -> bytes:
        return _MAGIC + json.dumps({"layer": self._layer, "partition": partition}).encode() + b"\n"

    def _file(self, namespace: str, partition: str, number: int) -> Path:
        return self._folder / folder_of(namespace) / f"{self._prefix}-{_short(partition)}-{number}.graph"

    def _trim(self, newest: Path) -> bool:
        """Delete the least recently used files above the bound; returns whether the newest stays."""
        found = described(kept_files(self._folder))
        total = sum(status.st_size for _, status in found)
        for file, status in sorted(found, key=lambda f: (f[0] == newest, f[1].st_mtime)):
            if total > self._max_bytes:
                _delete(file)
                total -= status.st_size
        return newest.exists()


def kept_beside(catalog: Catalog, layer: str, fault: Callable[[Exception], None]) -> KeptGraphs:
    """The graphs of one layer in the folder of an open catalog."""
    opened = file_id(catalog.path)

    def purge() -> str | None:
        try:
            return catalog.purge() if file_id(catalog.path) == opened else None
        except (OSError, sqlite3.Error):  # closed, for one
            return None

    return KeptGraphs(catalog.path.parent / FOLDER, layer, purge, fault)


def faiss_module() -> Any:
    """FAISS, whose stubs lack what its classes have; imported when the first partition is large enough for a graph."""
    import faiss

    return faiss


def name_hashes(items: Iterable[str | None]) -> Hashes:
    """xxh3_64 of each item's name, 0 for None."""
    return np.array([0 if item is None else xxhash.xxh3_64_intdigest(item.encode()) for item in items], dtype=np.uint64)


def write_graph(index: Any, items: Sequence[str | None], write: Write) -> None:
    """Call ``write`` with the bytes of a FAISS index and of the hashes of its rows' items."""
    faiss = faiss_module()
    write(_ROWS.pack(len(items)) + name_hashes(items).astype("<u8", copy=False).tobytes())
    faiss.write_index(index, faiss.PyCallbackIOWriter(write))


def read_graph(body: memoryview, like: Any, room: int) -> tuple[Any, Hashes]:
    """The FAISS index behind `write_graph` and the hashes of its rows' items.

    Args:
        body: the bytes. A checksum is no signature, so anyone who can write the folder may have made them: FAISS
            refuses a graph whose links or entry lead out of it (1.15.1 does; the floor in pyproject.toml).
        like: an index of the right kind, dimension and metric.
        room: most rows.

    Raises:
        CorruptValue: it is of another kind, dimension or size.
    """
    faiss = faiss_module()
    if len(body) < _ROWS.size or len(body) < (start := _ROWS.size + 8 * _ROWS.unpack_from(body)[0]):
        raise CorruptValue("a graph without the names of its rows")
    hashes = np.frombuffer(body[_ROWS.size : start], dtype="<u8").astype(np.uint64)
    place = start

    def read(most: int) -> bytes:
        nonlocal place
        data = bytes(body[place : place + most])
        place += len(data)
        return data

    try:
        index = faiss.read_index(faiss.PyCallbackIOReader(read))
    except RuntimeError as error:
        raise CorruptValue(f"a graph that FAISS cannot read: {error}") from error
    form = (type(index), index.d, index.metric_type, index.ntotal)
    if form != (type(like), like.d, like.metric_type, len(hashes)) or not 0 < len(hashes) <= room:
        raise CorruptValue("a graph of another kind, dimension or size")
    return index, hashes


def folder_of(namespace: str) -> str:
    """The name of a namespace's folder, from the catalog's name for it."""
    return digest("graphs", namespace)[:32]


def kept_files(folder: Path, namespaces: Iterable[str] | None = None) -> list[Path]:
    """Every whole graph of a folder, or those of some namespaces."""
    places = None if namespaces is None else {folder_of(namespace) for namespace in namespaces}
    return sorted(file for file in matching(folder, "*/*.graph") if places is None or file.parent.name in places)


def damage_of(file: Path) -> str:
    """What is wrong with a graph's file; empty where nothing is, or it is gone."""
    try:
        _checked(file, _MAGIC)
    except FileNotFoundError:
        return ""
    except (OSError, SemkvError) as error:
        return str(error)
    return ""


def forget_kept(folder: Path, namespaces: Iterable[str]) -> int:
    """Delete the graphs of all other namespaces, and the files of crashed writers; returns how many files went."""
    living = {folder_of(namespace) for namespace in namespaces}
    gone = remove_strays(folder, "*/*.tmp")
    for file in (*matching(folder, "*/*.graph"), *matching(folder, "*/*.tmp")):
        if file.parent.name not in living:
            _delete(file)
            gone += 1
    _delete_empty(*(place for place in matching(folder, "*/") if place.name not in living))
    return gone


def _short(partition: str) -> str:
    return digest("partition", partition)[:32]


def _checked(file: Path, head: bytes) -> memoryview:
    """A file's bytes behind ``head``.

    Raises:
        CorruptValue: it begins otherwise, or does not fit its checksum.
        StoreError: it is not a regular file.
        OSError: it cannot be read.
    """
    with os.fdopen(open_file(file, os.O_RDONLY), "rb") as opened:  # a pipe would block, a link lead elsewhere
        whole = memoryview(opened.read())  # not mapped: an error of the disk would end the process
    if len(whole) < len(head) + _CHECKSUM:
        raise CorruptValue(f"graph {file.name}: cut off")
    body = whole[:-_CHECKSUM]
    if xxhash.xxh3_128_digest(body) != whole[-_CHECKSUM:]:
        raise CorruptValue(f"graph {file.name}: does not fit its checksum")
    if body[: len(head)] != head:
        raise CorruptValue(f"graph {file.name}: of another format, layer or partition")
    return body[len(head) :]


def _delete(file: Path) -> None:
    with contextlib.suppress(OSError):  # it costs room, and the next sweep tries again
        file.unlink(missing_ok=True)


def _delete_empty(*folders: Path) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # others are in it
            folder.rmdir()
