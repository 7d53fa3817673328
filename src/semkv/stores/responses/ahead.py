"""Answers on their way to a store: in a log of this process first, which takes one system call.

What was written to the log survives the end of the process, however it ends: whoever opens the folder next, or has it
open, brings it to the store. A power cut may cost the last moments, as with the store itself (`sqlite`). There are two
files, so that one is written while the other is brought to the store. A file belongs to the process that holds its
lock.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

import xxhash

from semkv.errors import CorruptValue
from semkv.stores.responses.base import Selector, StoredResponse
from semkv.stores.responses.codec import decode, encode

FOLDER = "ahead"  # below the cache directory
PATTERN = f"{'[0-9a-f]' * 16}.log"
_FRAME = struct.Struct("<QIIII")  # checksum of what follows; bytes of its cursor, key, head and payload
_LARGEST = 256 << 20  # bytes of a log that another process left; a larger one is none
_STAND_BACK_S = 0.005  # before the store is written: it shares the interpreter with the answer that goes out
_SLOW_S = 0.05  # a write that takes longer was not one to memory
_LOOK_S = 5.0  # between two looks for what ended processes left
_PAUSE_S = 1.0  # without the log after such a write or one that failed, and before a store is tried again

log = logging.getLogger("semkv")

Pending = tuple[StoredResponse, str]
Bring = Callable[[StoredResponse, str], bool]


class AheadLog:
    """The log of one process, and the thread that empties it.

    Args:
        folder: of the logs of all processes; made when missing.
        bring: hands an answer, and the cursor when it began, to the store; False where that could not be reached: it is
            tried again. It must not raise. Called by one thread at a time.
        max_bytes: bound on what is on its way; a store that falls behind is waited for then.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, bring: Bring, *, max_bytes: int = 1 << 20) -> None:
        self._folder, self._bring, self._most = folder, bring, max_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._left = list(_left_behind(folder))
        self._files: list[_File] = []
        try:
            self._files += [_new(folder)]
            self._files += [_new(folder)]
        except OSError:
            for file in (*self._left, *self._files):
                file.close()
            raise
        self._batch = _in_order(self._left)  # being brought, from the second file
        self._waiting: deque[Pending] = deque()  # written to the first file
        self._size = self._held = 0  # bytes of the first file, and of both
        self._lock = threading.Lock()  # of the four above; held for moments
        self._quick_from = float("-inf")
        self._some, self._closing = threading.Event(), threading.Event()
        self._until = float("inf")  # when closing gives up
        if not self._empty():
            self._some.set()
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
        start = time.monotonic()
        with self._lock:
            fits = not self._closing.is_set() and self._held + len(record) <= self._most
            written = fits and self._files[0].write(record, self._size)
            if written:
                self._size += len(record)
                self._held += len(record)
                self._waiting.append((response, since))
        if written != fits or time.monotonic() - start > _SLOW_S:
            self._quick_from = time.monotonic() + _PAUSE_S
        if written:
            self._some.set()
        return written

    def count(self, selector: Selector) -> int:
        """How many answers on their way a selector names."""
        with self._lock:
            return sum(selector.matches(response) for response, _ in (*self._batch, *self._waiting))

    def _empty(self) -> bool:
        """Bring everything to the store; False where it cannot be reached."""
        while True:
            while self._batch:
                if not self._bring(*self._batch[0]) or time.monotonic() > self._until:
                    return False
                with self._lock:
                    self._batch.popleft()
            while self._left:
                self._left.pop().remove()
            self._files[1].clear()
            with self._lock:
                self._held = self._size
                if not self._waiting:
                    self._some.clear()
                    return True
                self._files.reverse()
                self._batch, self._waiting, self._size = self._waiting, deque(), 0

    def _take_over(self) -> None:
        """Take what a process that ended meanwhile has left, or a purge held when this one began."""
        left: list[_File] = []
        try:
            left += _left_behind(self._folder)
            found = _in_order(left)
        except OSError:  # of the disk, or no descriptor left: another time
            for file in left:
                file.close()
            return
        with self._lock:
            self._batch = found
        self._left = left
        if left:
            self._some.set()

    def _work(self) -> None:
        looked = time.monotonic()
        while not self._closing.is_set():
            self._some.wait(_LOOK_S)
            time.sleep(_STAND_BACK_S)
            if not self._empty():
                self._closing.wait(_PAUSE_S)
            elif time.monotonic() - looked >= _LOOK_S:
                self._take_over()
                looked = time.monotonic()
        done = self._empty()
        for file in (*self._left, *self._files):
            if done:
                file.remove()
            else:
                file.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """Bring what is left to the store. What it does not take in time stays for the next who opens the folder."""
        with self._lock:  # nothing is written after this
            self._closing.set()
        self._until = time.monotonic() + timeout_s
        self._some.set()
        self._thread.join(timeout_s + _STAND_BACK_S)


@dataclass(frozen=True, slots=True)
class _File:
    """A log that this process has locked."""

    path: Path
    descriptor: int

    def write(self, record: bytes, at: int) -> bool:
        """Whether the whole record was written; what is left of a torn one is written over by the next."""
        try:
            return os.pwrite(self.descriptor, record, at) == len(record)
        except OSError:
            return False

    def content(self) -> bytes:
        with open(self.descriptor, "rb", closefd=False) as file:
            return file.read()

    def rewrite(self, data: bytes) -> None:
        if not self.write(data, 0):
            raise OSError(f"{self.path} cannot be written")
        os.ftruncate(self.descriptor, len(data))

    def clear(self) -> None:
        with suppress(OSError):  # what is brought twice does no harm
            os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        os.close(self.descriptor)

    def remove(self) -> None:
        with suppress(OSError):
            self.path.unlink()
        self.close()


def discard(folder: Path, selector: Selector, *, dry_run: bool = False) -> int:
    """Delete what a selector names from the logs that ended processes left, or only count it.

    Raises:
        OSError: a log cannot be written.
    """
    gone = 0
    for file in _left_behind(folder):
        found = list(records(file.content()))
        kept = [record for record in found if not selector.matches(record[0])]
        gone += len(found) - len(kept)
        if dry_run:
            file.close()
        elif not kept:
            file.remove()
        else:
            file.rewrite(b"".join(_record(*record) for record in kept))  # without what comes after damage, too
            file.close()
    return gone


def held(folder: Path) -> list[tuple[os.stat_result, list[StoredResponse]]]:
    """The logs of a folder that have anything in them, those of running processes too, and their whole answers."""
    found = []
    for path in _logs(folder):
        with suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and 0 < status.st_size <= _LARGEST:
                found.append((status, [response for response, _ in records(path.read_bytes(), told=False)]))
    return found


def _logs(folder: Path) -> list[Path]:
    """What is behind a link is somebody else's."""
    return [] if folder.is_symlink() else sorted(folder.glob(PATTERN))


def _in_order(files: Iterable[_File]) -> deque[Pending]:
    found = (record for file in files for record in records(file.content()))
    return deque(sorted(found, key=lambda record: record[0].created))


def _locked(path: Path, flags: int) -> _File | None:
    """None where another process holds it, or has removed it.

    Raises:
        OSError: it cannot be opened or locked.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(descriptor)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    if found.st_nlink and stat.S_ISREG(found.st_mode) and found.st_size <= _LARGEST:
        return _File(path, descriptor)
    os.close(descriptor)
    return None


def _new(folder: Path) -> _File:
    """Another process may take a file that is not locked yet for one left behind; then there is a next."""
    while True:
        path = folder / f"{token_hex(8)}.log"
        try:
            file = _locked(path, os.O_CREAT | os.O_EXCL)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        if file is not None:
            return file


def _left_behind(folder: Path) -> Iterator[_File]:
    """The logs that no process holds any more. What is no log is somebody else's."""
    for path in _logs(folder):
        with suppress(OSError):
            if (file := _locked(path, 0)) is not None:
                yield file


def _record(response: StoredResponse, since: str) -> bytes:
    parts = (since.encode(), response.key.encode(), *encode(response))
    body = b"".join(parts)
    return _FRAME.pack(xxhash.xxh3_64_intdigest(body), *map(len, parts)) + body


def records(data: bytes, *, told: bool = True) -> Iterator[Pending]:
    """The answers in a log, with their cursors, up to the first that is not whole, of which there is a warning."""
    at = 0
    while len(data) - at >= _FRAME.size:
        checksum, *sizes = _FRAME.unpack_from(data, at)
        start = at + _FRAME.size
        end = start + sum(sizes)
        if end > len(data) or xxhash.xxh3_64_intdigest(data[start:end]) != checksum:
            break
        parts = []
        for size in sizes:
            parts.append(data[start : start + size])
            start += size
        since, key, head, payload = parts
        try:
            record = decode(key.decode(), head, payload), since.decode()
        except (CorruptValue, UnicodeDecodeError):
            break
        yield record
        at = end
    if at < len(data) and told:
        log.warning("a log of answers ends in %d bytes that are no whole answer: left out", len(data) - at)
