"""Answers on their way to a store: in a log of this process first, which takes one system call.

What was written to the log survives the end of the process, however it ends: whoever opens the folder next brings it to
the store. A power cut may cost the last moments, as with the store itself (`sqlite`). There are two files, so that one
is written while the other is brought to the store. A file belongs to the process that holds its lock.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import xxhash

from semkv.errors import CorruptValue
from semkv.stores.responses.base import StoredResponse
from semkv.stores.responses.codec import decode, encode

FOLDER = "ahead"  # below the cache directory
PATTERN = "*.log"
_FRAME = struct.Struct("<QIIII")  # checksum of the rest; bytes of its cursor, key, head and payload
_STAND_BACK_S = 0.005  # before the store is written: it shares the interpreter with the answer that goes out
_SLOW_S = 0.05  # a write that takes longer was not one to memory
_PAUSE_S = 1.0  # without the log, after such a write or one that failed

Bring = Callable[[StoredResponse, str], bool]


class AheadLog:
    """The log of one process, and the thread that empties it.

    Args:
        folder: of the logs of all processes; made when missing.
        bring: hands an answer, and the cursor when it began, to the store; False where that could not be reached. It
            must not raise. Called by one thread at a time, and first, for what ended processes left, by this one.
        max_bytes: bound on what is on its way.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, bring: Bring, *, max_bytes: int = 16 << 20) -> None:
        self._bring, self._most = bring, max_bytes
        folder.mkdir(parents=True, exist_ok=True)
        _adopt(folder, bring)
        self._files = [_File.new(folder), _File.new(folder)]
        self._turn = threading.Lock()  # held while a batch is brought to the store
        self._lock = threading.Lock()  # held for moments
        self._waiting: list[tuple[StoredResponse, str]] = []  # written to the first of the files
        self._size = self._held = 0  # bytes of the first file, and of both
        self._quick_from = float("-inf")
        self._some = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="semkv-answers", daemon=True)
        self._thread.start()

    @property
    def quick(self) -> bool:
        """Whether the last write took no longer than one to memory does."""
        return time.monotonic() >= self._quick_from

    def append(self, response: StoredResponse, since: str) -> bool:
        """Write an answer; False where the log is full, closed or cannot be written. Does not wait for the store.

        Args:
            response: the answer.
            since: the store's cursor when it began to be computed.
        """
        record = _record(response, since)
        with self._lock:
            if self._closing or self._held + len(record) > self._most:
                return False
            start = time.monotonic()
            written = self._write(record)
            if not written or time.monotonic() - start > _SLOW_S:
                self._quick_from = time.monotonic() + _PAUSE_S
            if not written:
                return False
            self._size += len(record)
            self._held += len(record)
            self._waiting.append((response, since))
        self._some.set()
        return True

    def _write(self, record: bytes) -> bool:
        """The whole record, or nothing of it: what came after a torn one would not be read again."""
        file = self._files[0].descriptor
        with suppress(OSError):
            if os.pwrite(file, record, self._size) == len(record):
                return True
        with suppress(OSError):
            os.ftruncate(file, self._size)
        return False

    def _work(self) -> None:
        """Bring to the store what is written, batch by batch, until closed."""
        while not self._closing:
            self._some.wait()
            time.sleep(_STAND_BACK_S)
            self.flush()

    def flush(self) -> None:
        """Bring what is written to the store. Blocks as the store does."""
        with self._turn:
            with self._lock:
                self._some.clear()
                batch, size = self._waiting, self._size
                self._waiting, self._size = [], 0
                self._files.reverse()
            for response, since in batch:
                self._bring(response, since)
            with self._lock:
                with suppress(OSError):
                    os.ftruncate(self._files[1].descriptor, 0)
                self._held -= size

    def close(self, timeout_s: float = 5.0) -> None:
        """Bring what is left to the store. What it does not take in time stays for the next who opens the folder."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._some.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return  # the files stay open, and their locks held, until the process ends
        self.flush()
        for file in self._files:
            file.remove()


@dataclass(frozen=True, slots=True)
class _File:
    """A log that this process has locked."""

    path: Path
    descriptor: int

    @classmethod
    def new(cls, folder: Path) -> _File:
        """Another process may take a file that is not locked yet for one left behind; then there is a next."""
        while True:
            path = folder / f"{token_hex(8)}.log"
            file = cls._locked(path, os.O_CREAT | os.O_EXCL)
            if file is not None:
                return file

    @classmethod
    def left(cls, path: Path) -> _File | None:
        """A log that no process holds; None where one does, or it is gone."""
        try:
            return cls._locked(path, 0)
        except OSError:
            return None

    @classmethod
    def _locked(cls, path: Path, flags: int) -> _File | None:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        if os.fstat(descriptor).st_nlink:
            return cls(path, descriptor)
        os.close(descriptor)
        return None

    def close(self) -> None:
        os.close(self.descriptor)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self.close()


def _adopt(folder: Path, bring: Bring) -> None:
    """Bring to the store what ended processes left; where it cannot be reached the logs stay for the next."""
    files = [file for path in sorted(folder.glob(PATTERN)) if (file := _File.left(path)) is not None]
    found = [record for file in files for record in records(_content(file.descriptor))]
    brought = [bring(*record) for record in sorted(found, key=lambda record: record[0].created)]
    for file in files:
        if all(brought):
            file.remove()
        else:
            file.close()


def _content(descriptor: int) -> bytes:
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


def _record(response: StoredResponse, since: str) -> bytes:
    parts = (since.encode(), response.key.encode(), *encode(response))
    body = b"".join(parts)
    return _FRAME.pack(xxhash.xxh3_64_intdigest(body), *map(len, parts)) + body


def records(data: bytes) -> Iterator[tuple[StoredResponse, str]]:
    """The answers in a log, with their cursors, up to the first that is not whole."""
    at = 0
    while len(data) - at >= _FRAME.size:
        checksum, *sizes = _FRAME.unpack_from(data, at)
        at += _FRAME.size
        end = at + sum(sizes)
        if end > len(data) or xxhash.xxh3_64_intdigest(data[at:end]) != checksum:
            return
        parts = []
        for size in sizes:
            parts.append(data[at : at + size])
            at += size
        since, key, head, payload = parts
        try:
            yield decode(key.decode(), head, payload), since.decode()
        except (CorruptValue, UnicodeDecodeError):
            return
