"""Responses on their way to a store: one file of this process, to which appending takes one system call.

What was appended survives the end of the process, however it ends: the next process that opens the folder brings it to
the store. A power cut may cost the last moments, as with the store itself. A file belongs to the process that holds its
lock; one that nobody holds was left by a process that ended.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

import xxhash

from semkv.errors import CorruptValue, StoreError
from semkv.stores.responses import ResponseStore, Selector, StoredResponse, decode, encode
from semkv_stores.files import make_folder, open_file

PATTERN = f"{'[0-9a-f]' * 16}.log"
_FRAME = struct.Struct("<QQ")  # checksum and length of what follows: cursor, head and payload, a line break after each
_STAND_BACK_S = 0.005  # before the store is written: it shares the interpreter with the response that goes out
_RETRY_S = 1.0  # before a store that could not be reached is tried again
_LATE_S = 1.0  # a response that comes to the store so long after it was made may have been followed by another

log = logging.getLogger("semkv")

Bring = Callable[[StoredResponse, str], bool]


def folder_of(cache_dir: Path, store: str = "") -> Path:
    """The folder for what is on its way to a store (``--store``; empty for the database of the cache directory)."""
    return cache_dir / (f"ahead-{hashlib.sha256(store.encode()).hexdigest()[:16]}" if store else "ahead")


class AheadLog:
    """The file of one process, and the thread that empties it into the store.

    What ended processes left is brought to the store before this returns, where the store can be reached.

    Args:
        folder: of the files of all processes; made when missing.
        bring: hands a response, and the cursor when it began, to the store; False where it is to be tried again. Called
            by one thread at a time; it must not raise.
        max_bytes: bound on the file, which begins anew whenever the store has everything.

    Raises:
        OSError: the folder cannot be written, or files in it cannot be locked.
    """

    def __init__(self, folder: Path, bring: Bring, *, max_bytes: int = 16 << 20) -> None:
        self._bring, self._max_bytes = bring, max_bytes
        make_folder(folder)
        self._path = folder / f"{token_hex(8)}.log"
        new = self._path.with_suffix(".new")  # another process may take a log without a lock for one left behind
        self._file = open_file(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(self._path)
        except OSError:
            os.close(self._file)
            new.unlink(missing_ok=True)
            raise
        replay(folder, bring)
        self._waiting: deque[tuple[StoredResponse, str]] = deque()  # written to the file, and not in the store
        self._size = 0
        self._lock = threading.Lock()  # of the two above; held for moments
        self._some, self._closing = threading.Event(), threading.Event()
        self._until = float("inf")  # when closing gives up
        self._thread = threading.Thread(target=self._work, name="semkv-answers", daemon=True)
        self._thread.start()

    def append(self, response: StoredResponse, since: str) -> bool:
        """Write a response that was begun at a cursor of the store, without waiting for the store; False where the file
        is full or closed, or the disk cannot be written."""
        record, written = _record(response, since), False
        with self._lock:
            if self._closing.is_set() or self._size + len(record) > self._max_bytes:
                return False
            with suppress(OSError):
                written = os.pwrite(self._file, record, self._size) == len(record)
            if written:  # else the next one is written over it
                self._size += len(record)
                self._waiting.append((response, since))
                self._some.set()
        return written

    def count(self, selector: Selector) -> int:
        """How many responses on their way a selector names."""
        with self._lock:
            return sum(selector.matches(response) for response, _ in self._waiting)

    def _empty(self) -> bool:
        """Bring everything to the store; False where it cannot be reached."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._some.clear()
                    self._size = 0
                    with suppress(OSError):  # what is brought twice does no harm
                        os.ftruncate(self._file, 0)
                    return True
                response, since = self._waiting[0]
            if not self._bring(response, since) or time.monotonic() > self._until:
                return False
            with self._lock:
                self._waiting.popleft()

    def _work(self) -> None:
        while not self._closing.is_set():
            self._some.wait()
            time.sleep(_STAND_BACK_S)
            if not self._empty():
                self._closing.wait(_RETRY_S)
        if self._empty():
            self._path.unlink(missing_ok=True)
        os.close(self._file)

    def close(self, timeout_s: float = 5.0) -> None:
        """Bring what is left to the store. What it does not take in time stays for the next that opens the folder."""
        with self._lock:  # nothing is written after this
            self._closing.set()
        self._until = time.monotonic() + timeout_s
        self._some.set()
        self._thread.join(timeout_s + _STAND_BACK_S)


def deliver(store: ResponseStore, response: StoredResponse, since: str, now: float) -> bool:
    """Bring a response to a store that may have a newer one; False where it was invalidated since that cursor."""
    if response.stale_until <= now:
        return True
    if now - response.created > _LATE_S:
        with suppress(CorruptValue):
            stored = store.get(response.key)
            if stored is not None and stored.created >= response.created:
                return True
    return store.put(response, since)


def replay(folder: Path, bring: Bring) -> None:
    """Bring to the store what ended processes left in a folder, and delete their files. What cannot be read or brought
    stays for another time."""
    if folder.is_symlink():  # what is behind it is somebody else's
        return
    for path in sorted(folder.glob(PATTERN)):
        with suppress(OSError, StoreError):  # running, gone, or no regular file
            file = open_file(path, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if all(bring(*record) for record in records(os.pread(file, os.fstat(file).st_size, 0))):
                    path.unlink()
            finally:
                os.close(file)


def _record(response: StoredResponse, since: str) -> bytes:
    body = b"\n".join((since.encode(), *encode(response)))
    return _FRAME.pack(xxhash.xxh3_64_intdigest(body), len(body)) + body


def records(data: bytes) -> Iterator[tuple[StoredResponse, str]]:
    """The responses in a file, with their cursors, up to the first that is not whole, of which there is a warning."""
    at = 0
    while len(data) - at >= _FRAME.size:
        checksum, size = _FRAME.unpack_from(data, at)
        body = data[at + _FRAME.size : at + _FRAME.size + size]
        if len(body) < size or xxhash.xxh3_64_intdigest(body) != checksum:
            break
        try:
            since, head, payload = body.split(b"\n", 2)
            record = decode(None, head, payload), since.decode()
        except (CorruptValue, ValueError):
            break
        yield record
        at += _FRAME.size + size
    if at < len(data):
        log.warning("a log of answers ends in %d bytes that are no whole answer: left out", len(data) - at)
