"""Graphs of the vector index on disk, which spare a start the minutes in which they are built.

They are never the only copy of anything and never believed: an index takes a row from here only where it equals the
catalog's vector. So an old or foreign file costs time and no answer. An index writes nothing before it has
applied the catalog's last purge, so what a purge deleted does not come back.

    graphs/<namespace>/<layer>-<partition>.graph      all digests

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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from semkv.errors import CorruptValue, SemkvError
from semkv.keys import digest
from semkv.stores.catalog import Catalog
from semkv.stores.files import make_folder, matching, open_file, remove_strays, replacing

if TYPE_CHECKING:
    import numpy.typing as npt

    Hashes = npt.NDArray[np.uint64]
    Write = Callable[[bytes], int]

FOLDER = "graphs"
_MAGIC = b"semkv graph 1\n"
_ROWS = struct.Struct("<Q")
_CHECKSUM = 16


class KeptGraphs:
    """The graphs of one layer. Any thread may call, one at a time; nothing here raises.

    Args:
        folder: of all graphs of a cache directory.
        layer: whose vectors they are, named with the encoder's fingerprint.
        purge: returns the mark of the last purge of the catalog that the vectors come from, or None where it cannot be
            asked.
        fault: called with the error of every file that is damaged or cannot be written.
    """

    def __init__(
        self, folder: Path, layer: str, purge: Callable[[], str | None], fault: Callable[[Exception], None]
    ) -> None:
        self._folder, self._layer, self._fault = folder, layer, fault
        self._purge_now, self._applied = purge, purge()
        self._prefix = digest("layer", layer)[:16]
        # Those of the start, by partition.
        self._found = {file.stem.partition("-")[2]: file for file in matching(folder, f"*/{self._prefix}-*.graph")}

    def read(self, partition: str) -> memoryview | None:
        """The checked bytes of the graph that a partition had at the start; a damaged one is deleted."""
        file = self._found.pop(_short(partition), None)
        if file is None:
            return None
        try:
            return _checked(file, self._head(partition))
        except FileNotFoundError:
            return None
        except (OSError, SemkvError) as error:
            self._fault(error)
            _delete(file)
            return None

    def save(self, namespace: str, partition: str, write: Callable[[Write], None]) -> None:
        """Write a graph in the place of the partition's last one.

        Args:
            write: calls its argument with the graph's bytes.
        """
        applied = self._applied
        if applied is None or self._purge_now() != applied:
            return
        file, checksum = self._file(namespace, partition), xxhash.xxh3_128()
        try:
            make_folder(file.parent)
            with replacing(file, private=True) as out:

                def put(data: bytes) -> int:
                    checksum.update(data)
                    return out.write(data)

                put(self._head(partition))
                write(put)
                out.write(checksum.digest())
        except (OSError, RuntimeError) as error:  # the second from FAISS, when a write fails
            self._fault(error)
        if self._purge_now() != applied:  # a purge marks the catalog before it deletes graphs: it may have missed this
            _delete(file)
            _delete_empty(file.parent, self._folder)

    def apply_purges(self, purge: str) -> None:
        """Say that the index holds nothing any more of what this purge, and those before, deleted."""
        self._applied = purge

    def has(self, namespace: str, partition: str) -> bool:
        """Whether a partition's graph is there."""
        return self._file(namespace, partition).is_file()

    def drop(self, namespace: str, partition: str) -> None:
        """Delete a graph. Its folder stays, into which another index may be about to write."""
        _delete(self._file(namespace, partition))

    def reject(self, namespace: str, partition: str, error: Exception) -> None:
        """Delete a graph that is of no use, and count it."""
        self._fault(error)
        self.drop(namespace, partition)

    def drop_unread(self) -> None:
        """Delete the graphs of the start whose partitions nobody asked for: nothing is left of them."""
        for file in self._found.values():
            _delete(file)
        self._found.clear()

    def _head(self, partition: str) -> bytes:
        return _MAGIC + json.dumps({"layer": self._layer, "partition": partition}).encode() + b"\n"

    def _file(self, namespace: str, partition: str) -> Path:
        return self._folder / folder_of(namespace) / f"{self._prefix}-{_short(partition)}.graph"


def kept_beside(catalog: Catalog, layer: str, fault: Callable[[Exception], None]) -> KeptGraphs:
    """The graphs of one layer in the folder of an open catalog."""

    def purge() -> str | None:
        try:
            catalog.database.version()  # opens the file that took the place of one that was deleted
            return catalog.purge()
        except (OSError, sqlite3.Error):  # closed, for one
            return None

    return KeptGraphs(catalog.path.parent / FOLDER, layer, purge, fault)


def forget_graphs(catalog: Catalog, namespaces: Iterable[str]) -> None:
    """Delete the graphs beside a catalog of some namespaces, in which are vectors of entries that were deleted."""
    for file in kept_files(catalog.path.parent / FOLDER, namespaces):
        _delete(file)


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


def read_graph(body: memoryview, like: Any) -> tuple[Any, Hashes]:
    """The FAISS index behind `write_graph` and the hashes of its rows' items.

    Args:
        body: the bytes. A checksum is no signature, so anyone who can write the folder may have made them: FAISS
            refuses a graph whose links or entry lead out of it (1.15.1 does; the floor in pyproject.toml).
        like: an index of the right kind, dimension and metric.

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
    if form != (type(like), like.d, like.metric_type, len(hashes)) or not len(hashes):
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
