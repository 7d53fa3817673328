"""Sharing of entries and removals between caches that have directories of their own.

A thread sends this directory's new entries and removals to a log, and writes those of others into the catalog, where
every process of the directory finds them. One process of a directory at a time reads the log, and notes its place in
the catalog. A log that cannot be reached is a counted fault: what waits is sent later.

Gateways that share a directory need no log: they read the catalog's rows.
"""

from __future__ import annotations

import base64
import json
import math
import re
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import xxhash

from semkv.counting import Tally
from semkv.errors import CorruptValue, StoreError
from semkv.keys import namespace_key
from semkv.stores.catalog import (
    Catalog,
    Criteria,
    Record,
    Removed,
    dump_segments,
    load_segments,
    pack,
)
from semkv.types import Entry, MediaSegment, Namespace
from semkv_stores.files import lock

FORMAT = 1
LOCK = "entry-log.lock"
_LARGEST = 32 * 1024  # bytes of an entry that is shared, so that a whole log has 256 MiB at most
_WAITING = 1024  # entries that wait for the log
_POLL_S, _PAUSE_S = 0.25, 1.0
_CHECKSUM = 32
_KINDS = {"tag": str, "entry_id": str, "space": str, "before": (int, float), "tenants": list}


class Sharing:
    """Follows a log until it is closed. Any thread may call any method.

    Args:
        to_record: makes a record of an entry and its packed vectors, as `Matching.shared_record`.
        add: brings a record into the catalog and the indexes; whether it is new.
        removed: forgets what was removed from the catalog.
    """

    def __init__(
        self,
        log: EntryLog,
        catalog: Catalog,
        to_record: Callable[[Entry, Mapping[str, bytes]], Record],
        add: Callable[[Record], bool],
        removed: Callable[[Removed], None],
        tally: Tally,
    ) -> None:
        self._log = log
        self._catalog = catalog
        self._tally = tally
        self._to_record = to_record
        self._add_record = add
        self._removed = removed
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._some = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._work,
            name="semkv-sharing",
            daemon=True,
        )
        self._thread.start()

    def add(self, record: Record) -> None:
        """Share what was recorded. Never waits."""
        data = dump(record)
        if len(data) > _LARGEST or len(self._waiting) >= _WAITING:
            self._tally.add(
                "not shared: too large" if len(data) > _LARGEST else "not shared: too many wait"
            )
            return
        self._waiting.append((record.entry.entry_id, data))
        self._some.set()

    def close(self) -> None:
        """Send what waits, where the log can be reached, and stop."""
        self._closing.set()
        self._some.set()
        self._thread.join(5.0)
        self._log.close()

    def _work(self) -> None:
        closing = False
        while not closing:
            self._some.wait(_POLL_S)
            self._some.clear()
            closing = self._closing.is_set()
            pause_s = _PAUSE_S
            with self._tally.boundary("entry log"):
                self._exchange()
                pause_s = 0.0
            self._closing.wait(pause_s)

    def _exchange(self) -> None:
        with suppress(BlockingIOError), lock(self._catalog.path.with_name(LOCK), 0.0):
            self._send_removals()  # first, so that nothing removed is read again
            while self._read() and not self._closing.is_set():
                pass
        while self._waiting:
            entry_id, data = self._waiting[0]
            if not self._catalog.missing([entry_id]):  # else it was removed meanwhile
                self._log.add(data)
                self._tally.add("shared out")
            self._waiting.popleft()

    def _send_removals(self) -> None:
        for number, text in self._catalog.removals():
            self._log.remove(text.encode(), partial(_concerns, read_criteria(text.encode())))
            self._catalog.sent(number)

    def _read(self) -> bool:
        """Bring the next rows of the log into the catalog; whether there were any."""
        cursor = self._catalog.read_from()
        batch = self._log.read(cursor)
        if batch.lost:
            self._remove({})
        for removes, data in batch.rows:
            try:
                if removes:
                    self._remove(read_criteria(data))
                else:
                    self._add(data)
            except Exception as error:
                # A row that others wrote must not keep this one from reading on; what our file has must be tried again.
                ours = isinstance(error, OSError | StoreError | sqlite3.DatabaseError)
                if ours and not isinstance(
                    error, CorruptValue | sqlite3.ProgrammingError | sqlite3.DataError
                ):
                    raise
                self._tally.fault("shared entry", error)
        if batch.cursor != cursor:
            self._catalog.read_to(batch.cursor)
        return batch.cursor != cursor

    def _add(self, data: bytes) -> None:
        entry, packed = load(data)
        if self._catalog.missing([entry.entry_id]):
            record = self._to_record(entry, packed)
            if packed and not record.vectors and not record.media_vectors:
                self._tally.add("shared entry of another encoder")
            self._add_record(record)
            self._tally.add("shared in")

    def _remove(self, criteria: Criteria) -> None:
        removed = self._catalog.apply_removal(criteria)
        self._tally.add("shared removals")
        if removed.entry_ids:
            self._removed(removed)


# -- the log ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogBatch:
    """What a log has after a cursor. Where removals are ``lost``, any entry may have been removed meanwhile."""

    cursor: str  # the log's name and the place of the last row; hand it in next time
    rows: tuple[tuple[bool, bytes], ...] = ()  # in order, each with whether it is a removal
    lost: bool = False


class EntryLog(Protocol):
    """Entries and removals, of any form. Every method blocks and may raise `StoreError` (unreachable, full)."""

    def add(self, entry: bytes) -> None:
        """Append an entry."""

    def remove(self, removal: bytes, concerns: Callable[[bytes], bool]) -> None:
        """Append a removal, and delete the entries before it that it concerns."""

    def read(self, cursor: str) -> LogBatch:
        """What comes after a cursor; an empty one asks for all that there is."""

    def close(self) -> None:
        """Let go of connections."""


# -- the form of what is shared -----------------------------------------------------------------------------------


def dump(record: Record) -> bytes:
    """A checksum, and JSON of an entry and its vectors by layer and encoder."""
    entry = record.entry
    vectors = {layer: pack(vector) for layer, vector in record.vectors.items()}
    media = [segment.media_id for segment in entry.segments if isinstance(segment, MediaSegment)]
    for layer in {layer for layer, _ in record.media_vectors}:
        if all((layer, item) in record.media_vectors for item in media):
            vectors[layer] = pack(np.stack([record.media_vectors[layer, item] for item in media]))
    body = {
        "format": FORMAT,
        "id": entry.entry_id,
        "tenant": entry.namespace.tenant,
        "model": entry.namespace.model,
        "segments": dump_segments(entry.segments),
        "chunk_text": entry.chunk_text,
        "response": entry.response,
        "tags": entry.tags,
        "created": entry.created,
        "metadata": dict(entry.metadata),
        "vectors": {layer: base64.b64encode(data).decode() for layer, data in vectors.items()},
    }
    text = json.dumps(body, default=str).encode()
    return xxhash.xxh3_128_hexdigest(text).encode() + text


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """What others wrote; whatever is wrong with it is a `CorruptValue`."""
    try:
        yield
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise CorruptValue(f"{what}: {error!r}") from error


def load(data: bytes) -> tuple[Entry, dict[str, bytes]]:
    """The reverse of `dump`: an entry, and its packed vectors.

    Raises:
        CorruptValue: the checksum, the format or a value is not what it should be.
    """
    text = data[_CHECKSUM:]
    if len(data) > _LARGEST or data[:_CHECKSUM] != xxhash.xxh3_128_hexdigest(text).encode():
        raise CorruptValue("shared entry: too large, or it fails its checksum")
    with _reading("shared entry"):
        body: Mapping[str, Any] = json.loads(text)
        if body["format"] != FORMAT:
            raise ValueError("of another format")
        words = {name: body[name] for name in ("id", "tenant", "model", "chunk_text", "response")}
        segments = load_segments(body["segments"])
        tags = tuple(body["tags"])
        created = float(body["created"])
        texts = [s.media_id if isinstance(s, MediaSegment) else s.text for s in segments]
        images = [s for s in segments if isinstance(s, MediaSegment)]
        names = [image.name for image in images]
        "".join([*words.values(), *texts, *names, *tags]).encode()  # refuses half of a character
        if not segments or not all(re.fullmatch(r"[0-9a-f]{64}", s.media_id) for s in images):
            raise ValueError("no segments, or no digest of an image")
        if not math.isfinite(created):
            raise ValueError("no time")
        vectors = {
            str(layer): base64.b64decode(text, validate=True)
            for layer, text in body["vectors"].items()
        }
        entry = Entry(
            words["id"],
            Namespace(words["tenant"], words["model"]),
            segments,
            chunk_text=words["chunk_text"],
            response=words["response"],
            tags=tags,
            created=min(created, time.time()),
            metadata=dict(body["metadata"]),
        )
        return entry, vectors


def read_criteria(data: bytes) -> Criteria:
    """The criteria of a removal.

    Raises:
        CorruptValue: they are none. So nothing is removed, rather than too much.
    """
    with _reading("shared removal"):
        criteria: Criteria = json.loads(data)
        right = all(isinstance(value, _KINDS[name]) for name, value in criteria.items())  # type: ignore[arg-type]
        if not right or not math.isfinite(criteria.get("before", 0.0)):  # type: ignore[arg-type]
            raise ValueError("a criterion of another type")
        return criteria


def _concerns(criteria: Criteria, data: bytes) -> bool:
    """Whether a removal is one of a shared entry, or that cannot be said."""
    try:
        entry, _ = load(data)
    except CorruptValue:
        return True
    own = {"entry_id": entry.entry_id, "space": namespace_key(entry.namespace)}
    tests: dict[str, Callable[[Any], bool]] = {
        "tag": lambda tag: tag in entry.tags,
        "before": lambda before: entry.created < before,
        "tenants": lambda tenants: entry.namespace.tenant in tenants,
    }
    return all(
        tests[name](value) if name in tests else own[name] == value
        for name, value in criteria.items()
    )
