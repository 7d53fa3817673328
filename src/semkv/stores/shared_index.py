"""The index of a store directory as it is now, whatever other processes do to it, and what faults of it mean.

Whoever asks for anything sees first, by one ``stat``, whether the index is still the file that was opened. A purge, or
a process that found the index damaged, puts another in its place; then the directory is opened anew. While another
process purges or opens it, that is tried again at the next question: nobody who asks waits for long. A faulty disk
never raises: it turns writing off, or the store, with one warning.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from semkv.errors import StoreError
from semkv.stores.block_index import BlockIndex
from semkv.stores.directory import ExtentDirectory, FileId

log = logging.getLogger("semkv.stores")

_T = TypeVar("_T")
_PATIENCE_S = 1.0  # once after a purge: engines and their ranks, which all open the directory then, take milliseconds


class SharedIndex:
    """The index of one directory. Safe to use from several threads.

    Attributes:
        writable: whether anything is still written.
    """

    def __init__(self, files: ExtentDirectory, counters: Counter[str], opened: Callable[[BlockIndex], None]) -> None:
        """Open or create the directory.

        Args:
            files: the directory.
            counters: where ``errors`` are counted.
            opened: called with each index that was opened, the first one excepted.

        Raises:
            StoreError: it is a file, or was written by another format version or for another kind.
        """
        self._files, self._counters, self._opened = files, counters, opened
        self._index: BlockIndex | None = None
        self._file: FileId | None = None
        self._opening = threading.RLock()
        self._layouts: dict[tuple[str, int], str] = {}
        self._damaged: BlockIndex | None = None  # not let go of yet
        self._off = self.writable = False
        try:
            self._open(wait_s=None)
        except (OSError, sqlite3.Error) as error:
            self._switch_off("cannot be used", error)

    @property
    def on(self) -> bool:
        """Whether anything can be read; False after a fault that put the store out of use."""
        return not self._off

    @property
    def generation(self) -> str:
        """`BlockIndex.generation` of the index in use: what was kept in memory under another one's may be purged.

        Without an index nobody hears of a purge. Then each question gets another answer, so that nothing kept is found.
        """
        index = self._index or self.get()
        return uuid.uuid4().hex if index is None else index.generation

    def _open(self, *, wait_s: float | None) -> BlockIndex:
        with self._files.one_opener(make=True, wait_s=wait_s):
            self._files.create()
            index = self._open_file(self._files.index)
            self._file = self._files.index_file()
        self._index, self.writable = index, True
        return index

    def _open_file(self, path: Path) -> BlockIndex:
        try:
            return BlockIndex(path, self._files.found)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            log.warning("semkv: rebuilding the index %s (%s)", path, error)
            self._files.discard_index()
            return BlockIndex(path, self._files.found)

    def current(self, index: BlockIndex) -> bool:
        """Whether ``index`` is the directory's at this moment."""
        if index is not self._index:
            return False
        try:
            found = self._files.index_file()
        except OSError:  # a disk that does not answer has no other index
            return True
        return found is not None and found == self._file

    def get(self) -> BlockIndex | None:
        """The directory's index; None after a fault that put the store out of use, or while a purge goes on."""
        index = self._index
        if self._off or (index is not None and self.current(index)):
            return index
        with self._opening:
            if self._index is index and not self._off:
                self._open_anew(index)
        return self._index

    def _open_anew(self, old: BlockIndex | None) -> None:
        self._index, self.writable = None, False
        try:
            root = self._files.root
            if not root.parent.is_dir():  # the whole cache directory, or the disk it was on, is gone
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(root.parent))
            index = self._open(wait_s=0 if old is None else _PATIENCE_S)
            log.warning("semkv: %s was purged, or its index replaced: opened anew", root)
            for (engine, rank), layout in self._layouts.items():
                self.ask(partial(BlockIndex.put_layout, engine=engine, rank=rank, layout=layout), None, index)
            self.ask(self._opened, None, index)  # which may be purged again meanwhile
        except BlockingIOError:
            self._counters["errors"] += 1
        except (OSError, sqlite3.Error, StoreError) as error:
            self._switch_off("cannot be used", error)
        if old is not None:
            with contextlib.suppress(sqlite3.Error):
                old.close()

    def ask(self, what: Callable[[BlockIndex], _T], otherwise: _T, index: BlockIndex | None = None) -> _T:
        """What the index says (that of now, or the one given), or ``otherwise`` where there is none or it fails."""
        if (index := index or self.get()) is None:
            return otherwise
        try:
            return what(index)
        except sqlite3.Error as error:
            self._failed(index, error)
            return otherwise

    def _failed(self, index: BlockIndex, error: sqlite3.Error) -> None:
        if index is not self._index:  # the directory was opened anew, or closed, under this call
            self._counters["errors"] += 1
        elif not isinstance(error, sqlite3.OperationalError):
            self._switch_off("has a damaged index; it is rebuilt at the next start", error)
            self._damaged = index
            self._let_go(index, wait=False)
        elif error.sqlite_errorcode == sqlite3.SQLITE_BUSY:  # another process writes for long: this once
            self._counters["errors"] += 1
        else:
            self.read_only(error)

    def _switch_off(self, what: str, error: Exception) -> None:
        kind, root = self._files.kind, self._files.root
        log.warning("semkv: the %s store in %s %s (%s); requests go on without it", kind, root, what, error)
        self._counters["errors"] += 1
        self._index, self._off, self.writable = None, True, False

    def read_only(self, error: Exception) -> None:
        """The disk is full or read-only: nothing more is written."""
        if self.writable:
            root = self._files.root
            log.warning("semkv: nothing more is written to %s (%s); what is there is still used", root, error)
        self._counters["errors"] += 1
        self.writable = False

    def put_layout(self, engine: str, rank: int, layout: str) -> None:
        """`BlockIndex.put_layout`, told again to every index that takes this one's place."""
        self._layouts[engine, rank] = layout
        self.ask(lambda index: index.put_layout(engine, rank, layout), None)

    def close(self) -> None:
        """Nothing more is asked. Waits while another process purges or opens the directory."""
        index, self._index, self._off, self.writable = self._index, None, True, False
        if (last := index or self._damaged) is not None:
            self._let_go(last, wait=True)

    def _let_go(self, index: BlockIndex, *, wait: bool) -> None:
        """Close an index; a damaged one's file goes, where no other process has built it again.

        SQLite looks whether the file was moved and then deletes its log by name: in one step with that.
        """
        with contextlib.ExitStack() as lock:
            try:
                lock.enter_context(self._files.one_opener(wait_s=None if wait else 0))
                if index is self._damaged and self._files.index_file() == self._file:
                    self._files.discard_index()
            except BlockingIOError:  # left to `close`
                return
            except (OSError, StoreError):  # the directory is gone
                pass
            with contextlib.suppress(sqlite3.Error):
                index.close()
            self._damaged = None
