"""What a cache records and removes, for the caches of other directories, and theirs for it.

A thread sends what was recorded here to a log, and brings what others sent into the catalog, from where it goes the way
of all entries: every process of the directory indexes it. Of the processes of a directory one at a time reads the log.
How far it is read lies in the catalog. A log that cannot be reached is a counted fault: what waits is sent later.

The log is two streams in Redis, and a name:

    {semkv:<name>}:entries    what was recorded, and what was removed, in order: the latest 8,192, of one day
    {semkv:<name>}:removals   the latest 1,000 removals again, under the same ids, for who was away for longer
    {semkv:<name>}:begun      names the log: another name tells who read it before that it was emptied

Gateways that share a directory need no log: they read the catalog's rows.
"""

from __future__ import annotations

import base64
import hmac
import json
import math
import re
import sqlite3
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from semkv.stores.responses import is_redis
from semkv.stores.responses.redis import asking, connect, root_of
from semkv.types import Entry, MediaSegment, Namespace
from semkv_stores.files import lock

FORMAT = 1
LOCK = "entry-log.lock"
_LARGEST = 32 * 1024  # bytes of an entry that is shared, so that a whole log has 256 MiB at most
_WAITING = 1024  # entries that wait for the log
_POLL_S, _PAUSE_S = 0.25, 1.0
_CHECKSUM = 32
_KINDS = {"tag": str, "entry_id": str, "space": str, "before": (int, float), "tenants": list}
_ENTRIES, _KEPT_S = 8192, 86_400
_REMOVALS = 1000
_BATCH = 256

# KEYS: entries, removals. ARGV: a removal, how many are kept. A full Redis refuses XADD, but not in a script that has
# written before: so make room first.
_REMOVE = """
redis.call('XTRIM', KEYS[2], 'MAXLEN', ARGV[2] - 1)
local id = redis.call('XADD', KEYS[1], '*', 'removal', ARGV[1])
redis.call('XADD', KEYS[2], id, 'removal', ARGV[1])
return id
"""


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
        self._thread = threading.Thread(target=self._work, name="semkv-sharing", daemon=True)
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


class EntryLog:
    """Entries and removals, of any form. Every method blocks and may raise `StoreError` (unreachable, full).

    Args:
        url: of Redis.
        timeout_s: longest wait for a connection and for an answer.
        name: deployments with different names share nothing.

    Raises:
        ConfigError: as `RedisStore`.
    """

    def __init__(self, url: str, *, timeout_s: float = 0.25, name: str = "log") -> None:
        self._db: Any = connect(url, timeout_s)
        root = root_of(name)
        self._entries = f"{root}:entries"
        self._removals = f"{root}:removals"
        self._begun = f"{root}:begun"
        self._remove = self._db.register_script(_REMOVE)

    def add(self, entry: bytes) -> None:
        """Append an entry."""
        with asking():
            pipe = self._db.pipeline()  # one transaction, which a full Redis refuses as a whole
            pipe.xadd(self._entries, {"entry": entry}, maxlen=_ENTRIES, approximate=True)
            pipe.xtrim(self._entries, minid=int((time.time() - _KEPT_S) * 1000), approximate=True)
            pipe.expire(self._entries, _KEPT_S)
            pipe.execute()

    def remove(self, removal: bytes, concerns: Callable[[bytes], bool]) -> None:
        """Append a removal, and delete the entries before it that it concerns."""
        with asking():
            last = self._remove(keys=[self._entries, self._removals], args=[removal, _REMOVALS])
            start = "-"
            while rows := self._db.xrange(self._entries, min=start, max=last, count=_BATCH):
                gone = [
                    name
                    for name, fields in rows
                    if b"entry" in fields and concerns(fields[b"entry"])
                ]
                if gone:
                    self._db.xdel(self._entries, *gone)
                start = f"({rows[-1][0].decode()}"

    def read(self, cursor: str) -> LogBatch:
        """What comes after a cursor; an empty one asks for all that there is. At most `_BATCH` entries at once."""
        name, _, place = cursor.rpartition(" ")
        with asking():
            begun = self._name()
            emptied = bool(name) and name != begun
            after = f"({place}" if place and not emptied else "-"
            pipe = self._db.pipeline(
                transaction=False
            )  # a full Redis refuses a transaction, even one that only reads
            pipe.xrange(self._removals, min=after)
            pipe.xrange(self._entries, min=after, count=_BATCH)
            removals, rows = pipe.execute()
        if after == "-":
            removals = []
        lost = emptied or len(removals) >= _REMOVALS
        found = dict(rows)
        last = _place(rows[-1][0]) if len(rows) == _BATCH else None
        found |= {name: fields for name, fields in removals if last is None or _place(name) <= last}
        names = sorted(found, key=_place)
        place = names[-1].decode() if names else "" if emptied else place
        told = [
            (b"removal" in found[name], next(iter(found[name].values()), b"")) for name in names
        ]
        return LogBatch(f"{begun} {place}", tuple(told), lost)

    def _name(self) -> str:
        """What this log is called since it was last empty."""
        name = self._db.get(self._begun)
        if name is None:
            self._db.set(self._begun, uuid.uuid4().hex, nx=True)
            name = self._db.get(self._begun)
        return str((name or b"").decode())

    def close(self) -> None:
        """Let go of connections."""
        self._db.close()


def open_entry_log(where: str, timeout_s: float, secret: bytes) -> EntryLog | None:
    """The log in the store that a setting names, for those who know a secret; None where that is no Redis. Raises as
    `EntryLog`."""
    if not is_redis(where):
        return None
    return EntryLog(
        where,
        timeout_s=timeout_s,
        name=f"log:{hmac.digest(secret, b'entry log', 'sha256').hex()[:16]}",
    )


def _place(name: bytes) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(b"-"))


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
        words = [body[name] for name in ("id", "tenant", "model", "chunk_text", "response")]
        segments = load_segments(body["segments"])
        tags = tuple(body["tags"])
        created = float(body["created"])
        texts = [s.media_id if isinstance(s, MediaSegment) else s.text for s in segments]
        images = [s for s in segments if isinstance(s, MediaSegment)]
        "".join(
            [*words, *texts, *(s.name for s in images), *tags]
        ).encode()  # texts, and no half of a character
        if not segments or not all(re.fullmatch(r"[0-9a-f]{64}", s.media_id) for s in images):
            raise ValueError("no segments, or no digest of an image")
        if not math.isfinite(created):
            raise ValueError("no time")
        vectors = {
            str(layer): base64.b64decode(text, validate=True)
            for layer, text in body["vectors"].items()
        }
        entry_id, tenant, model, chunk_text, response = words
        return Entry(
            entry_id, Namespace(tenant, model), segments, chunk_text, response, tags=tags,
            created=min(created, time.time()), metadata=dict(body["metadata"]),
        ), vectors  # fmt: skip


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
