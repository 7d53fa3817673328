"""The vector indexes' graphs on disk: what spares a start the minutes in which they are built.

Never the only copy of anything, and never believed: an index takes a row from here only where it equals the catalog's
vector. So a file that is old, or of another catalog, costs time and no answer. Nothing is written unless the catalog
beside the folder is the one of the start, and its last purge one that the index has heeded: what a purge took away is
not written back.

    graphs/<namespace>/<layer>-<partition>-<number>.graph      all digests

A file is a magic word, one JSON line (layer, with its encoder's fingerprint; partition), the index's own bytes, and
xxh3_128 of all before, which finds what a disk did and not what a person did. It is written to a temporary name, synced
and renamed. Several processes may share the folder: the last one's file stays.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path

import xxhash

from semkv.errors import CorruptValue
from semkv.keys import digest
from semkv.stores.catalog_rows import last_purge
from semkv.stores.files import FileId, described, file_id, fsync_directory, matching, open_file, remove_strays

FOLDER = "graphs"
_MAGIC = b"semkv graph 1\n"
_CHECKSUM = 16
_MAX_BYTES = 4 << 30  # of a folder: more than four million rows of 384 numbers


class GraphFiles:
    """The graphs of one layer. Any thread may call, one at a time.

    Args:
        folder: of all graphs of a cache directory; the catalog whose vectors they are is open, beside it.
        layer: whose vectors they are, named with the encoder's fingerprint.
        fault: told of every file that is damaged or cannot be written.
        max_bytes: bound on all files of the folder once a new one is in its place; those used longest ago go first.
    """

    def __init__(
        self, folder: Path, layer: str, fault: Callable[[Exception], None], *, max_bytes: int = _MAX_BYTES
    ) -> None:
        self._folder, self._layer, self._fault, self._max_bytes = folder, layer, fault, max_bytes
        self._catalog_file = folder.with_name("catalog.sqlite")
        self._catalog = self._catalog_now()
        self._purge = self._purge_now()
        self._prefix = digest("layer", layer)[:16]
        self._found: dict[str, list[Path]] = defaultdict(list)  # those of the start, by partition
        for file in sorted(folder.glob(f"*/{self._prefix}-*.graph")):
            self._found[file.name.split("-")[1]].append(file)

    def read(self, partition: str) -> Iterator[tuple[int, memoryview]]:
        """The number and bytes of each graph that a partition had at the start, checked; a damaged one is deleted."""
        for file in self._found.pop(_short(partition), ()):
            try:
                yield int(file.stem.split("-")[2]), _checked(file, self._head(partition))
                os.utime(file)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, CorruptValue) as error:
                self._fault(error)
                _delete(file)

    def save(self, namespace: str, partition: str, number: int, pour: Callable[[Callable[[bytes], int]], None]) -> bool:
        """Write a graph in the place of the one with that number; whether it is there now.

        Args:
            namespace, partition, number: of the graph.
            pour: hands its bytes, as they are when it is called, to a function.
        """
        heeded = self._purge
        if self._purged(heeded):
            return False
        saved = False
        file = self._file(namespace, partition, number)
        part = file.with_suffix(f".{secrets.token_hex(8)}.tmp")
        checksum = xxhash.xxh3_128()
        try:
            self._folder.mkdir(0o700, exist_ok=True)
            file.parent.mkdir(0o700, exist_ok=True)
            with os.fdopen(open_file(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as out:

                def write(data: bytes) -> int:
                    checksum.update(data)
                    return out.write(data)

                write(self._head(partition))
                pour(write)
                out.write(checksum.digest())
                out.flush()
                os.fsync(out.fileno())
            if self._make_room(part, file):
                part.replace(file)
                fsync_directory(file.parent)
                saved = True
        except (OSError, RuntimeError) as error:  # the second from FAISS, when a write of its own fails
            self._fault(error)
        finally:
            _delete(part)
        if self._purged(heeded):  # a purge empties the catalog before it looks for graphs: what it missed is seen here
            saved = False
            _delete(file)
            _delete_empty(file.parent)
            _delete_empty(self._folder)
        return saved

    def heed(self, purge: str) -> None:
        """Say that the index holds nothing any more of what a purge (`Catalog.purge`), and those before, took away."""
        self._purge = purge

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

    def _catalog_now(self) -> FileId | None:
        try:
            return file_id(self._catalog_file)
        except OSError:
            return None

    def _purge_now(self) -> str | None:
        """The catalog's last purge; None where that cannot be said."""
        try:
            with closing(sqlite3.connect(f"{self._catalog_file.absolute().as_uri()}?mode=ro", uri=True)) as db:
                return last_purge(db)
        except sqlite3.Error as error:
            return "" if "no such table" in str(error) else None

    def _purged(self, heeded: str | None) -> bool:
        """Whether the catalog of the start is gone, another one in its place, or purged since one that was heeded."""
        now = self._catalog_now()
        return now is None or now != self._catalog or heeded is None or self._purge_now() != heeded

    def _head(self, partition: str) -> bytes:
        return _MAGIC + json.dumps({"layer": self._layer, "partition": partition}).encode() + b"\n"

    def _file(self, namespace: str, partition: str, number: int) -> Path:
        return self._folder / folder_of(namespace) / f"{self._prefix}-{_short(partition)}-{number}.graph"

    def _make_room(self, part: Path, file: Path) -> bool:
        """Delete what was used longest ago until ``part`` fits in the place of ``file``; False where it never does."""
        room = self._max_bytes - part.stat().st_size
        others = [(s.st_mtime, s.st_size, path) for path, s in _files(self._folder) if path not in (part, file)]
        room -= sum(size for _, size, _ in others)
        for _, size, path in sorted(others):
            if room >= 0:
                break
            _delete(path)
            room += size
        return room >= 0


def folder_of(namespace: str) -> str:
    """The name of a namespace's folder, from the catalog's name for it."""
    return digest("graphs", namespace)[:32]


def graph_files(folder: Path, namespaces: Iterable[str] | None = None) -> list[Path]:
    """Every whole graph of a folder, or those of some namespaces."""
    places = None if namespaces is None else {folder_of(namespace) for namespace in namespaces}
    return sorted(file for file in matching(folder, "*/*.graph") if places is None or file.parent.name in places)


def damage_of(file: Path) -> str:
    """What is wrong with a graph's file; empty where nothing is, or it is gone."""
    try:
        _checked(file, _MAGIC)
    except FileNotFoundError:
        return ""
    except (OSError, CorruptValue) as error:
        return str(error)
    return ""


def sweep(folder: Path, namespaces: Iterable[str]) -> int:
    """Delete the graphs of all other namespaces, and what dead writers left; how many files that were."""
    living = {folder_of(namespace) for namespace in namespaces}
    gone = remove_strays(folder, "*/*.tmp")
    for file, _ in list(_files(folder)):
        if file.parent.name not in living:
            _delete(file)
            gone += 1
    for place in matching(folder, "*/"):
        if place.name not in living:
            _delete_empty(place)
    return gone


def _short(partition: str) -> str:
    return digest("partition", partition)[:32]


def _checked(file: Path, head: bytes) -> memoryview:
    """A file's bytes behind ``head``.

    Raises:
        CorruptValue: it begins otherwise, or does not fit its checksum.
    """
    whole = memoryview(file.read_bytes())  # not mapped: an error of the disk would end the process
    if len(whole) < len(head) + _CHECKSUM:
        raise CorruptValue(f"graph {file.name}: cut off")
    body = whole[:-_CHECKSUM]
    if xxhash.xxh3_128_digest(body) != whole[-_CHECKSUM:]:
        raise CorruptValue(f"graph {file.name}: does not fit its checksum")
    if body[: len(head)] != head:
        raise CorruptValue(f"graph {file.name}: of another format, layer or partition")
    return body[len(head) :]


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for pattern in ("*/*.graph", "*/*.tmp"):
        yield from described(matching(folder, pattern))


def _delete(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError:  # it costs room, and the next sweep tries again
        return


def _delete_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:  # others are in it
        return
