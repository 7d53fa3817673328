"""Objects in a bucket: S3, Google Cloud Storage, Azure or a shared directory, through obstore.

Only the disk process imports this module, and only where a bucket is configured.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, from_url

from semkv_stores.block_file import Bytes

log = logging.getLogger("semkv.connectors")

_REQUEST_S = 10  # of one request with its answer
_CONNECT_S = 3
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_HEAD_BYTES = 1 << 16  # holds the head of most block files

_T = TypeVar("_T")


class BucketAwayError(OSError):
    """A bucket did not do what it was asked for, or is left alone for a while since it did not before."""


class Listed(NamedTuple):
    """An object: its name, its length, and when the bucket says that it came, in seconds since the epoch."""

    name: str
    nbytes: int
    stored: float


@dataclass(frozen=True)
class Address:
    """Where a bucket is.

    Attributes:
        url: as it was configured.
        kind: of the blocks; they have a folder of their own there.
    """

    url: str
    kind: str

    @property
    def folder(self) -> Path | None:
        """The folder that a bucket is."""
        parts = urlsplit(self.url)
        return Path(unquote(parts.path)) if parts.scheme == "file" else None

    def check(self) -> None:
        """Raise an OSError where the folder is not there: of a disk that is not mounted another one would be made."""
        if self.folder is not None and not self.folder.is_dir():
            raise NotADirectoryError(f"there is no folder {self.folder}")

    def open(self) -> Any:
        """obstore's store, with what it reads from the environment."""
        if self.folder is not None:
            own = self.folder / self.kind
            own.mkdir(0o700, exist_ok=True)
            return LocalStore(own)
        options: Any = {
            "timeout": f"{_REQUEST_S}s",
            "connect_timeout": f"{_CONNECT_S}s",
            "allow_http": True,  # for a server that the operator names so
        }
        retries: Any = {"max_retries": 1, "retry_timeout": timedelta(seconds=_REQUEST_S)}
        return from_url(
            f"{self.url.rstrip('/')}/{self.kind}",
            client_options=options,
            retry_config=retries,
        )


class Objects:
    """One use of a bucket. Where a request fails, the next ones fail at once for a while, which doubles each time.

    All methods raise a BucketAwayError, and those that read a FileNotFoundError. Safe to use from several threads.
    """

    def __init__(self, address: Address, use: str) -> None:
        """``use`` is for log lines, such as "uploads"."""
        self._address = address
        self._use = use
        self._store: Any = None
        self._lock = threading.Lock()
        self._wait_s = 0.0  # of the last failure; 0 after a request that went well
        self._until = 0.0

    def away_s(self) -> float:
        """For how long the bucket is left alone from now on."""
        return max(0.0, self._until - time.monotonic())

    def fail(self, reason: object) -> BucketAwayError:
        """Leave the bucket alone for a while; returns what to raise."""
        text = str(reason).partition("\n")[0]
        with self._lock:
            first = not self._wait_s
            self._wait_s = min(_LONGEST_WAIT_S, self._wait_s * 2 or _FIRST_WAIT_S)
            self._until = time.monotonic() + self._wait_s
        if first:
            log.warning(
                "semkv: the bucket %s cannot be used for %s (%s); requests go on without it, and it is tried again",
                self._address.url,
                self._use,
                text,
            )
        return BucketAwayError(text)

    def _worked(self) -> None:
        with self._lock:
            again = self._wait_s > 0
            self._wait_s = self._until = 0.0
        if again:
            log.warning("semkv: the bucket %s can be used for %s", self._address.url, self._use)

    def _do(self, what: Callable[[Any], _T], *, may_miss: bool = False) -> _T:
        """``may_miss``: that there is no such object is an answer. Else it says that there is no such bucket."""
        if self.away_s():
            raise BucketAwayError("it failed a short while ago")
        try:
            self._address.check()
            if self._store is None:
                self._store = self._address.open()
            found = what(self._store)
        except FileNotFoundError as error:
            if not may_miss:
                raise self.fail(error) from error
            self._worked()
            raise
        except (BaseError, OSError, ValueError) as error:
            raise self.fail(error) from error
        self._worked()
        return found

    def get(self, name: str) -> tuple[bytes, float]:
        """An object, and when it came."""

        def get(store: Any) -> tuple[bytes, float]:
            result = obstore.get(store, name)
            return bytes(result.bytes()), result.meta["last_modified"].timestamp()

        return self._do(get, may_miss=True)

    def get_range(self, name: str, at: int, length: int) -> tuple[memoryview, int]:
        """Bytes of an object from a place on, fewer only where it ends, and the length of the whole object."""

        def get(store: Any) -> tuple[memoryview, int]:
            try:
                result = obstore.get(store, name, options={"range": (at, at + length)})
                return memoryview(result.bytes()), int(result.meta["size"])
            except BaseError:  # also where the object ends before
                nbytes = int(obstore.head(store, name)["size"])
                if nbytes > at:
                    raise
                return memoryview(b""), nbytes

        return self._do(get, may_miss=True)

    def put(self, name: str, content: bytes | Path) -> None:
        self._do(lambda store: obstore.put(store, name, content))

    def create(self, name: str, content: bytes) -> bool:
        """Put an object, unless there is one of this name; whether there was none."""

        def create(store: Any) -> bool:
            try:
                obstore.put(store, name, content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

        return self._do(create)

    def listed(self, folder: str, after: str = "") -> list[Listed]:
        """The objects of a folder, or those behind a name, by name."""

        def every(store: Any) -> list[Listed]:
            offset = f"{folder}/{after}" if after else None
            return [
                Listed(each["path"], each["size"], each["last_modified"].timestamp())
                for batch in obstore.list(store, folder, offset=offset)
                for each in batch
            ]

        return sorted(self._do(every))

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects in this order, also those that are gone."""

        def delete(store: Any) -> None:
            for name in names:
                try:
                    obstore.delete(store, name)
                except FileNotFoundError:
                    continue

        self._do(delete)


class FarSource:
    """The object of a block file; see `semkv_stores.block_file.Source`."""

    def __init__(self, objects: Objects, name: str) -> None:
        self._objects = objects
        self._name = name
        self._head, self.nbytes = objects.get_range(name, 0, _HEAD_BYTES)

    def read(self, length: int, at: int) -> bytes:
        if at + length <= len(self._head):
            return bytes(self._head[at : at + length])
        length = min(length, self.nbytes - at)
        return bytes(self._objects.get_range(self._name, at, length)[0]) if length > 0 else b""

    def fill(self, rows: Sequence[Bytes], at: int) -> None:
        wanted = sum(len(row) for row in rows)
        found, _ = self._objects.get_range(self._name, at, wanted)
        content = np.frombuffer(found, np.uint8)
        for row in rows:
            part = content[: len(row)]
            row[: len(part)] = part
            content = content[len(row) :]

    def close(self) -> None:
        return
