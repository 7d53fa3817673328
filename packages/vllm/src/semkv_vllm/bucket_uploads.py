"""Puts the files of a directory into a bucket, ahead of the records that name them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from semkv_stores import bucket_index
from semkv_stores.block_file import check_file, path_of
from semkv_stores.blocks import BUSY_S, BlockStore
from semkv_vllm.bucket import Address, BucketAwayError, Objects
from semkv_vllm.bucket_records import object_name

log = logging.getLogger("semkv.connectors")

_AT_ONCE = 4
_MOST = 1000  # files that wait for a record


class Uploads:
    """The index says what is still to be put, so nothing is lost where a process ends. Safe to use from several
    threads.

    Attributes:
        bucket: the name of the log that files are put for; empty while it is not known.
    """

    def __init__(self, store: BlockStore, address: Address) -> None:
        self.bucket = ""
        self.objects = Objects(address, "uploads")
        self._store = store
        self._waiting: dict[str, str] = {}  # files without a record, each with its log
        self._threads = ThreadPoolExecutor(_AT_ONCE, "semkv-upload")

    def begin(self, bucket: str) -> None:
        """Put files for a log from now on."""
        self.bucket = bucket
        self.forget([file for file, name in list(self._waiting.items()) if name != bucket])

    def waiting(self) -> list[str]:
        """Files that were put for this log and have no record yet."""
        return [file for file, name in list(self._waiting.items()) if name == self.bucket]

    def forget(self, files: Iterable[str]) -> None:
        """They have a record, or need none."""
        for file in files:
            self._waiting.pop(file, None)

    def step(self) -> bool:
        """Put the next files; whether there were any, and all went well."""
        if not self.bucket or self.objects.away_s():
            return False
        files = self._pending()
        if not files or len(self._waiting) >= _MOST:
            return False
        self._store.ask(lambda db: bucket_index.mark_twins(db, files), None, write_s=BUSY_S)
        wanted = set(self._pending()).intersection(files)
        return all(list(self._threads.map(self._upload, sorted(wanted))))

    def _pending(self) -> list[str]:
        most = len(self._waiting) + 4 * _AT_ONCE
        found = self._store.ask(lambda db: bucket_index.pending(db, most), None) or []
        return [file for file in found if file not in self._waiting]

    def _upload(self, file: str) -> bool:
        path = path_of(self._store.root, file)
        bucket = self.bucket
        if not path.exists():  # evicted meanwhile
            return True
        try:
            self.objects.put(object_name(bucket, file), path)
        except BucketAwayError:
            self._store.counters["bucket_errors"] += 1
            self._see_to(file)
            return False
        self._waiting[file] = bucket
        return True

    def _see_to(self, file: str) -> None:
        """Drop a file that cannot be read here, which would hold up all others."""
        try:
            reason = check_file(self._store.root, file)
        except OSError as error:
            reason = str(error)
        if reason:
            log.warning("semkv: a block file is not put into the bucket: %s", reason)
            self._store.reject(file)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
