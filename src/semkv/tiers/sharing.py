"""Sharing of entries between caches that have directories of their own, by partition.

A near-repeat matches only behind the same history, so a partition holds all that a request may match. A thread sends
this directory's new entries, and pairs found wrong, to their partitions in a `DonorStore`. A lookup brings the rows of
its partitions that are not here yet into the catalog, where every process of the directory finds them.

A store may search: then a partition with more rows than are read is asked for those nearest to a request's vector. They
are brought, and compared like all others.

The bytes of a donor's image, where images are compared, are a partition of their own. They are brought when the donor
is to stand in for another one.

Removals go through logs, one for each part of the store, which fails by itself. Each has every removal. A row says up
to which place of its part's log its writer had followed it, so a reader knows the removals that came after the row, and
leaves it out where one of them concerns it. Pairs that clients found wrong have logs of their own, so that they push no
removal out. One process of a directory at a time follows the logs, and notes its places in the catalog. A store that
cannot be reached is a counted fault: what waits is sent later, and lookups go on with what is here.

Gateways that share a directory need no store: they read the catalog's rows.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import xxhash

from semkv.counting import Tally
from semkv.errors import CorruptValue, StoreError
from semkv.keys import media_id as digest_of
from semkv.keys import namespace_key
from semkv.latest import Latest
from semkv.niceness import set_niceness
from semkv.stores.catalog import (
    Catalog,
    Criteria,
    Record,
    Removed,
    dump_segments,
    load_segments,
    pack,
)
from semkv.stores.media import MediaStore
from semkv.types import Entry, MediaSegment, Namespace
from semkv_stores.breaker import Rests, rest_from
from semkv_stores.digests import digest
from semkv_stores.files import lock

if TYPE_CHECKING:
    from semkv.types import Vector

FORMAT = 1
LOCK = "entry-log.lock"
LARGEST = 32 * 1024  # bytes of an entry that is shared
_LARGEST_IMAGE = 1 << 20
MOST = 4096  # rows of a partition that are read and kept, the latest
_NEAREST = 8  # entries that a search brings: more than a lookup compares
_WAITING = 1024  # rows that wait for the store
_POLL_S = 0.25
_PAUSE_S = 1.0  # for which nothing is brought after a wait in vain
_FRESH_S = 0.25  # for which a partition that was read is not asked for again
_AGAIN_S = (
    600.0  # after which one is read from its start, where a full catalog may have dropped rows
)
_KNOWN = 4096  # partitions of which it is known how far they were read
_IMAGES_SENT = 4096  # images that are not sent again
_IMAGE_S = 3600.0  # for which they are not
_READERS = 2
AWAY = "away"  # `StoreError.reason`
_FAILURES = 3  # one after the other, at which a store is left alone
_NICE = 5  # niceness of what is brought and swept, so that requests go on
_IMAGE = "image:"
_CHECKSUM = 32
_KINDS = {
    "tag": str,
    "entry_id": str,
    "space": str,
    "before": (int, float),
    "tenants": list,
    "wrong": str,
}


# -- the store ----------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A place in the log of removals. Later ones are larger, within one log."""

    log: str = ""  # its name: a log that was emptied gets another
    at: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        if not self.log:
            return ""
        first, second = self.at
        return f"{self.log} {first}-{second}"

    @classmethod
    def of(cls, text: str) -> Place:
        """The reverse of `str`. Raises a ValueError."""
        log = text.rpartition(" ")[0]
        at = text.rpartition(" ")[2]
        return cls(log, numbers(at)) if log else cls()


def numbers(text: str) -> tuple[int, int]:
    """The numbers of a place, as Redis writes it: ``1-0``. Raises a ValueError."""
    first = text.partition("-")[0]
    second = text.partition("-")[2]
    return int(first or 0), int(second or 0)


@dataclass(frozen=True, slots=True)
class SharedRow:
    """One row of a partition: ``at`` is its place there, ``since`` that of its writer in the log of removals."""

    at: str
    since: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Removals:
    """The removals of a log after a place, in order, each with its place. They are all that came after ``after``, which
    is later where the log does not reach back to the place. ``end`` is the log's."""

    after: Place
    rows: tuple[tuple[Place, bytes], ...]
    end: Place

    def reach(self, place: Place) -> bool:
        """Whether every removal after a place is among them."""
        return place.log == self.after.log and place >= self.after


class Reached(NamedTuple):
    """How far both logs of a part were followed."""

    removals: Place = Place()
    reports: Place = Place()

    def __str__(self) -> str:
        return f"{self.removals};{self.reports};"  # which earlier versions cannot read


class Logs(NamedTuple):
    """What both logs of a part have after a place in each."""

    removals: Removals
    reports: Removals

    @property
    def end(self) -> Reached:
        return Reached(self.removals.end, self.reports.end)


def read_reached(text: str, parts: int) -> list[Reached] | None:
    """How far the logs of each part were followed, from a catalog's note; None where it is of another store."""
    if not text:
        return [Reached()] * parts
    notes = text.split(",")
    if len(notes) != parts:
        return None
    found = []
    try:
        for note in notes:
            removals, reports = note.removesuffix(";").split(";")
            found.append(Reached(Place.of(removals), Place.of(reports)))
    except ValueError:
        return None
    return found


class DonorStore(Protocol):
    """Rows of any form, by partition, and logs. Every method blocks and may raise `StoreError` (unreachable, full). A
    partition's name has its tenant's (`tenant_name`) before a colon. Its pairs found wrong are rows of their own
    (``wrong``), and go with it.

    Attributes:
        parts: in how many parts the partitions lie. Each has a log of removals, and one of reports: pairs that were
            found wrong where the entry is not known.
    """

    parts: int

    def part_of(self, partition: str) -> int:
        """The part in which a partition lies."""

    def search_by(self, encoder: str) -> bool:
        """Let searches be by vectors of this encoder, from now on; whether the store searches at all."""

    def add(self, partition: str, data: bytes, since: str, *, most: int = MOST) -> None:
        """Append a row. Where the partition has more than ``most``, or the store too many, the oldest go."""

    def add_wrong(self, partition: str, data: bytes, since: str) -> None:
        """The same for a pair found wrong."""

    def add_item(
        self, partition: str, data: bytes, since: str, item: str, vector: Vector | None
    ) -> None:
        """Append the row of an item, which `nearest` finds by its unit vector, float32 [dim]. A store that searches
        keeps more than `MOST`."""

    def read(
        self, partition: str, after: str, before: str, *, wrong: bool = False
    ) -> Sequence[SharedRow]:
        """The latest rows between two places, both excluded, the latest first; empty places for no bound. None are left
        where it returns none."""

    def is_large(self, partition: str) -> bool:
        """Whether a partition is to be searched, since it has more than `MOST` rows."""

    def nearest(self, partition: str, vector: Vector, most: int) -> Sequence[str]:
        """Items of a partition whose vectors are about the nearest to a unit vector, best first."""

    def rows_of(self, partition: str, items: Sequence[str]) -> Sequence[SharedRow]:
        """The latest rows of items, of those that have one."""

    def remove(self, part: int, removal: bytes, *, is_report: bool = False) -> bool:
        """Append to a part's log of removals, or of reports. False where the store may lose it."""

    def removals(self, part: int, after: Place) -> Removals:
        """A part's removals after a place, or what the log has where it does not reach back to the place."""

    def logs(self, part: int, after: Reached) -> Logs:
        """The same of both logs."""

    def sweep(
        self, concerns: Callable[[bytes], bool], among: Callable[[str], bool] | Sequence[str]
    ) -> None:
        """Delete the rows that a removal concerns, of these partitions or of those that a test chooses."""

    def close(self) -> None:
        """Let go of connections."""


def tenant_name(tenant: str) -> str:
    """What the names of a tenant's partitions begin with."""
    return digest("partitions of", tenant)[:16]


# -- a directory's part -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Waiting:
    """A row that waits for the store, and the entry without which it is not sent."""

    entry: Entry
    partitions: Sequence[str]
    data: bytes
    wrong: bool
    vector: Vector | None


@dataclass(slots=True)
class _Partition:
    """How far a partition was read."""

    cursor: str = ""
    cursor_wrong: str = ""
    begun: float = math.inf  # when it was read from its start, by the monotonic clock
    is_large: bool = False
    looked: float = -math.inf  # when, by the monotonic clock
    job: Future[None] | None = None


@dataclass(slots=True)
class _Arrival:
    """A row that was read, as what it holds."""

    since: Place
    row: Shared

    @property
    def entry_id(self) -> str:
        return self.row.entry.entry_id


class Sharing:
    """Shares entries until it is closed. Any thread may call any method.

    Args:
        partitions: the names of the partitions of an entry.
        to_record: makes a record of an entry and its packed vectors, as `Matching.shared_record`.
        add: brings records into the catalog and the indexes.
        removed: forgets what was removed from the catalog.
        media: the images of this directory; None where none is compared.
        encoder: the layer by whose vectors the store may search; empty where none is compared.
        reads_all: whether partitions that are searched are read, too: other layers compare what is here.
        limit_s: longest wait of a lookup.
    """

    def __init__(
        self,
        store: DonorStore,
        catalog: Catalog,
        *,
        partitions: Callable[[Entry], Sequence[str]],
        to_record: Callable[[Entry, Mapping[str, bytes]], Record],
        add: Callable[[Sequence[Record]], None],
        removed: Callable[[Removed], None],
        media: MediaStore | None,
        encoder: str,
        reads_all: bool,
        tally: Tally,
        limit_s: float,
    ) -> None:
        self._store = store
        self._encoder = encoder
        self._searches = bool(encoder) and store.search_by(encoder)
        self._reads_all = reads_all
        self._catalog = catalog
        self._tally = tally
        self._partitions_of = partitions
        self._to_record = to_record
        self._add_records = add
        self._removed = removed
        self._media = media
        self._limit_s = limit_s
        self._waiting: deque[_Waiting] = deque()
        self._some = threading.Event()
        self._closing = threading.Event()
        self._followed = threading.Event()  # whether any part's logs were read, by any process
        self._reached = [Reached()] * store.parts  # how far they were
        self._follow_at = 0.0  # when they are to be read again, by the monotonic clock
        self._rests = Rests()  # of parts
        self._unsent: dict[int, Sequence[int]] = {}  # parts whose logs lack a removal
        self._known: Latest[str, _Partition] = Latest(_KNOWN)
        self._knowing = threading.Lock()
        self._quiet_until = 0.0  # no partition is read after several faults, by the monotonic clock
        self._failures = 0  # of reads, one after the other
        self._sought: Latest[str, Sequence[str]] = Latest(_WAITING)  # partitions of removed entries
        self._removals: deque[Criteria] = deque()  # whose rows are to be deleted
        self._images_sent: Latest[str, float] = Latest(_IMAGES_SENT)  # when
        be_nice = partial(set_niceness, _NICE)
        self._readers = ThreadPoolExecutor(_READERS, "semkv-donors", be_nice)
        self._sweeper = ThreadPoolExecutor(1, "semkv-sweep", be_nice)
        self._thread = threading.Thread(target=self._work, name="semkv-sharing", daemon=True)
        self._thread.start()

    def add(self, record: Record) -> None:
        """Share what was recorded. Never waits."""
        vector = record.vectors.get(self._encoder)
        self._wait(record.entry, dump(record), vector=vector)

    def add_wrong(self, pair: str, entry_id: str) -> None:
        """Share that an entry was found wrong for a text. Raises `sqlite3.Error`."""
        entry = self._catalog.get(entry_id)
        if (
            entry is None
        ):  # another gateway gave the hit: nothing here says in which partitions it lies
            self._catalog.tell_wrong(pair, entry_id)
        else:
            self._wait(entry, dump_wrong(pair, entry), wrong=True)

    def removing(self, entry_id: str) -> None:
        """An entry is about to be removed by its id. Raises `sqlite3.Error`."""
        entry = self._catalog.get(entry_id)
        if entry is not None:
            self._sought[entry_id] = self._partitions_of(entry)

    def _wait(
        self, entry: Entry, data: bytes, *, wrong: bool = False, vector: Vector | None = None
    ) -> None:
        if len(data) > LARGEST:
            self._tally.add("not shared: too large")
            return
        if len(self._waiting) >= _WAITING:
            self._tally.add("not shared: too many wait")
            return
        partitions = self._partitions_of(entry)
        self._waiting.append(_Waiting(entry, partitions, data, wrong=wrong, vector=vector))
        self._some.set()

    def close(self) -> None:
        """Send what waits, where the store can be reached, and stop."""
        self._closing.set()
        self._some.set()
        self._thread.join(5.0)
        self._readers.shutdown(cancel_futures=True)  # they end with their page
        self._sweeper.shutdown(wait=False, cancel_futures=True)
        self._store.close()

    def _work(self) -> None:
        closing = False
        while not closing:
            self._some.wait(_POLL_S)
            self._some.clear()
            closing = self._closing.is_set()
            began = time.monotonic()
            until = began
            with self._tally.boundary("shared entries"):
                try:
                    self._exchange()
                except Exception:
                    until = rest_from(began)
                    raise
            self._closing.wait(max(0.0, until - time.monotonic()))

    # -- to the store -------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        with suppress(BlockingIOError), lock(self._catalog.path.with_name(LOCK), 0.0):
            self._send_removals()
            if time.monotonic() >= self._follow_at:
                self._follow()
                self._follow_at = time.monotonic() + _POLL_S
        self._reached = self._reached_by_all() or self._reached
        if any(place.removals.log for place in self._reached):
            self._followed.set()
        self._send_rows()

    def _reached_by_all(self) -> list[Reached] | None:
        return read_reached(self._catalog.read_from(), self._store.parts)

    def _is_followed(self, partition: str) -> bool:
        """Whether the logs of a partition's part were read."""
        return bool(self._reached[self._store.part_of(partition)].removals.log)

    def _send_rows(self) -> None:
        """Send what waits. A row that fails is sent again later, behind the others; so are those of a part that rests.
        Where several fail one after the other for another reason, the rest waits, too. Raises the last `StoreError`."""
        failed: StoreError | None = None
        failures = 0
        for _ in range(len(self._waiting)):
            self._reached = self._reached_by_all() or self._reached
            if failures == _FAILURES or not self._followed.is_set():
                break
            row = self._waiting.popleft()
            if any(map(self._rests_of, row.partitions)):
                self._wait_again(row)
                continue
            try:
                self._send(row)
                failures = 0
            except StoreError as error:
                self._wait_again(row)
                if error.reason == AWAY:
                    self._tally.fault("shared entries", error)
                else:
                    failed = error
                    failures += 1
        if failed is not None:
            raise failed

    def _rests_of(self, partition: str) -> bool:
        """Whether a partition's part is left alone."""
        return self._rests.has(self._store.part_of(partition))

    def _wait_again(self, row: _Waiting) -> None:
        """What cannot be sent takes half of the places at most, or nothing else would be sent."""
        if len(self._waiting) < _WAITING // 2:
            self._waiting.append(row)
        else:
            self._tally.add("not shared: too many wait")

    @contextmanager
    def _asking(self, part: int) -> Iterator[None]:
        """A block that asks for something of a part, which is left alone for a while where it is away."""
        began = time.monotonic()
        try:
            yield
        except StoreError as error:
            if error.reason == AWAY:
                self._rests.failed(part, began)
            raise

    def _send(self, row: _Waiting) -> None:
        # It is looked for after the places were read, so that a removal after a place concerns the row.
        if self._catalog.missing([row.entry.entry_id]):
            return
        self._send_images(row.entry)  # first: who finds the row looks for them
        for partition in row.partitions:
            with self._asking(self._store.part_of(partition)):
                self._send_to(partition, row)
        self._tally.add("shared out")

    def _since(self, partition: str) -> str:
        """Up to where the log of a partition's part was followed. Raises a `StoreError` where it was not."""
        place = self._reached[self._store.part_of(partition)].removals
        if not place.log:
            error = StoreError("the log of removals was not read yet")
            error.reason = AWAY
            raise error
        return str(place)

    def _send_to(self, partition: str, row: _Waiting) -> None:
        since = self._since(partition)
        if row.wrong:
            self._store.add_wrong(partition, row.data, since)
            return
        self._store.add_item(partition, row.data, since, row.entry.entry_id, row.vector)

    def _send_images(self, entry: Entry) -> None:
        if self._media is None:
            return
        for media_id in _media_of(entry):
            name = _image(entry.namespace.tenant, media_id)
            now = time.monotonic()
            if now - self._images_sent.get(name, -math.inf) < _IMAGE_S:
                continue
            data = self._media.get(media_id)
            if data is not None and len(data) <= _LARGEST_IMAGE:
                with self._asking(self._store.part_of(name)):
                    self._store.add(name, data, self._since(name), most=1)
                self._images_sent[name] = now

    def _send_removals(self) -> None:
        """Send removals to the log of each part, and again to those that were away."""
        are_sent = True  # those so far, in all parts
        for number, text in self._catalog.removals():
            data = text.encode()
            criteria = read_criteria(data)
            is_report = "wrong" in criteria
            missing = self._unsent.get(number, range(self._store.parts))
            parts = [part for part in missing if not self._send_removal(part, data, is_report)]
            is_news = number not in self._unsent or (missing and not parts)
            if is_news and not is_report:  # once at once, and once when no row comes any more
                self._removals.append(criteria)
            self._unsent[number] = parts
            are_sent = are_sent and not parts
            if are_sent:
                self._unsent.pop(number)
                self._catalog.sent(number)
        if self._removals:
            self._images_sent.clear()
            self._sweeper.submit(self._sweep)

    def _send_removal(self, part: int, data: bytes, is_report: bool) -> bool:
        """Whether a part has a removal now."""
        if self._rests.has(part):
            return False
        try:
            with self._asking(part):
                is_safe = self._store.remove(part, data, is_report=is_report)
        except StoreError as error:
            self._tally.fault("shared entries", error)
            return False
        if not is_safe:
            self._tally.add("shared removal, not replicated")
        return True

    def _sweep(self) -> None:
        """Delete the rows that removals concern, in one pass. No gateway uses them meanwhile, nor where this fails."""
        removals = [self._removals.popleft() for _ in range(len(self._removals))]
        with self._tally.boundary("shared entries"):
            for criteria in removals:
                if "entry_id" in criteria:
                    known = self._sought.pop(str(criteria["entry_id"]), ())
                    self._store.sweep(partial(_concerns_data, [criteria]), known)
            others = [criteria for criteria in removals if "entry_id" not in criteria]
            if others:
                self._store.sweep(partial(_concerns_data, others), partial(_may_concern, others))

    # -- removals of others -------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Apply what the logs have since the last time, those of each part that can be reached."""
        text = self._catalog.read_from()
        reached = read_reached(text, self._store.parts)
        if reached is None:  # of another version, or another store
            reached = [Reached()] * self._store.parts
            self._start_anew()
        seen: set[bytes] = set()  # every part has the same
        for part, place in enumerate(reached):
            if self._rests.has(part):
                continue
            try:
                with self._asking(part):
                    logs = self._store.logs(part, place)
            except StoreError as error:
                self._tally.fault("shared entries", error)
                continue
            self._apply(place, logs, seen)
            reached[part] = logs.end
        found = ",".join(map(str, reached))
        if found != text and any(place.removals.log for place in reached):
            self._catalog.read_to(found)

    def _apply(self, place: Reached, logs: Logs, seen: set[bytes]) -> None:
        """Apply what a part's logs have after a place, without what was `seen` in others."""
        was_read = bool(place.removals.log)
        has_all = logs.removals.reach(place.removals) and logs.reports.reach(place.reports)
        if was_read and not has_all:  # one was emptied, or others were removed meanwhile
            self._start_anew()
        rows = [*logs.reports.rows]
        if was_read:  # at first there is nothing to remove
            rows += logs.removals.rows
        for _, data in rows:
            if data in seen:
                continue
            seen.add(data)
            try:
                self._remove(read_criteria(data))
            except CorruptValue as error:  # later removals are followed all the same
                self._tally.fault("shared removal", error)

    def _start_anew(self) -> None:
        """Remove all that is here, since it is not known what was removed elsewhere."""
        self._remove({})
        self._images_sent.clear()
        with self._knowing:
            self._known.clear()

    def _remove(self, criteria: Criteria) -> None:
        if "wrong" in criteria:
            self._catalog.bar(str(criteria["wrong"]), str(criteria["entry_id"]))
            return
        removed = self._catalog.apply_removal(criteria)
        self._tally.add("shared removals")
        if removed.entry_ids:
            self._removed(removed)

    # -- entries of others --------------------------------------------------------------------------------------

    def bring(self, partitions: Iterable[str]) -> None:
        """Bring what others have in some partitions. Never raises, and waits for ``limit_s`` at most: what takes longer
        goes on, and is there for a later request."""
        now = time.monotonic()
        if now < self._quiet_until or not self._is_following():
            return
        there = [
            partition
            for partition in partitions
            if self._is_followed(partition) and not self._rests_of(partition)
        ]
        reading = [self._reading(partition, now) for partition in there]
        for job, began in reading:
            if job is not None:
                left_s = began + self._limit_s - time.monotonic()
                wait([job], max(0.0, left_s))

    def _is_following(self) -> bool:
        """Whether a log was read, so that no pair found wrong is unheard of. Waits as `bring`."""
        found = self._followed.wait(self._limit_s)
        if not found:
            self._quiet_until = time.monotonic() + _PAUSE_S
        return found

    def _reading(self, name: str, now: float) -> tuple[Future[None] | None, float]:
        """The job that reads a partition, and when it began; None where the partition was read a moment ago."""
        with self._knowing:
            known = self._known.get(name, _Partition())
            self._known[name] = known  # the latest
            if known.job is not None and not known.job.done():
                return known.job, known.looked
            is_fresh = now - known.looked < _FRESH_S
            if is_fresh or self._closing.is_set():
                return None, known.looked
            known.looked = now
            known.job = self._readers.submit(self._read, name, known)
            return known.job, now

    def _read(self, name: str, known: _Partition) -> None:
        """Bring a partition's rows that are not known yet into the catalog, the latest first; of one that is searched
        only the pairs found wrong."""
        began = time.monotonic()
        done = False
        part = self._store.part_of(name)
        with self._tally.boundary("shared entries"), self._asking(part):
            # First, so that no request gets what was found wrong for it.
            known.cursor_wrong = self._read_rows(name, known.cursor_wrong, wrong=True)
            known.is_large = self._searches and self._store.is_large(name)
            if self._reads_all or not known.is_large:
                again = time.monotonic() - known.begun > _AGAIN_S
                if again and self._catalog.is_full():
                    known.cursor = ""
                if not known.cursor:
                    known.begun = time.monotonic()
                known.cursor = self._read_rows(name, known.cursor, wrong=False)
            done = True
        self._note_read(known, began, done=done)

    def _note_read(self, known: _Partition, began: float, *, done: bool) -> None:
        """Leave a partition that could not be read alone for a while: its node of a cluster may be away. Where several
        fail one after the other, all are left alone."""
        if done:
            self._failures = 0
            return
        self._failures += 1
        later = rest_from(began)
        known.looked = later
        if self._failures >= _FAILURES:
            self._failures = 0
            self._quiet_until = later

    def _read_rows(self, name: str, after: str, *, wrong: bool) -> str:
        """Bring rows after a place; the last place."""
        first = ""
        before = ""
        count = 0
        while not self._closing.is_set() and count < MOST:
            rows = self._store.read(name, after, before, wrong=wrong)
            if not rows:
                break
            first = first or rows[0].at
            before = rows[-1].at
            count += len(rows)
            self._take(name, rows)
        return first or after

    def is_searched(self, name: str) -> bool:
        """Whether a partition that was brought has more rows than are read, so that `bring_nearest` is to be asked."""
        with self._knowing:
            return self._known.get(name, _Partition()).is_large

    def bring_nearest(self, name: str, vector: Vector) -> None:
        """Bring the entries of a partition that are nearest to a unit vector. Never raises, and waits as `bring`."""
        now = time.monotonic()
        with self._knowing:
            known = self._known.get(name, _Partition())
        # Only a partition that was brought is searched, and so the log was read.
        if now < max(self._quiet_until, known.looked) or self._closing.is_set():
            return
        with suppress(RuntimeError):  # it is being closed
            job = self._readers.submit(self._read_nearest, name, known, vector)
            wait([job], self._limit_s)

    def _read_nearest(self, name: str, known: _Partition, vector: Vector) -> None:
        began = time.monotonic()
        done = False
        part = self._store.part_of(name)
        with self._tally.boundary("shared entries"), self._asking(part):
            near = self._store.nearest(name, vector, _NEAREST)
            self._take(name, self._store.rows_of(name, self._catalog.missing(near)))
            done = True
        self._note_read(known, began, done=done)

    def _take(self, name: str, rows: Sequence[SharedRow]) -> None:
        """Bring rows of a partition into the catalog."""
        part = self._store.part_of(name)
        arrivals = self._unremoved(part, self._arrivals(rows))
        for arrival in arrivals:  # first, so that no request gets what was found wrong for it
            if arrival.row.wrong:
                tenant = arrival.row.entry.namespace.tenant
                self._catalog.bar(arrival.row.wrong, arrival.entry_id, tenant)
        arrivals = [arrival for arrival in arrivals if not arrival.row.wrong]
        ids = [arrival.entry_id for arrival in arrivals]
        missing = set(self._catalog.missing(ids))
        arrivals = [arrival for arrival in arrivals if arrival.entry_id in missing]
        records: list[Record] = []
        for arrival in arrivals:
            with self._tally.boundary("shared entry"):
                records.append(self._record(arrival.row))
        if records:
            self._add_each(records)
            self._tally.add("shared in", len(records))
            self._undo(part, arrivals)

    def _arrivals(self, rows: Sequence[SharedRow]) -> list[_Arrival]:
        """What rows hold; what cannot be read is counted and left out."""
        found = []
        for row in rows:
            with self._tally.boundary("shared entry"):
                since = Place.of(row.since)
                found.append(_Arrival(since, load(row.data)))
        return found

    def _unremoved(self, part: int, arrivals: list[_Arrival]) -> list[_Arrival]:
        """Those that no later removal concerns, as far as the log of their part reaches back."""
        if not arrivals:
            return []
        first = min(arrival.since for arrival in arrivals)
        removals = self._store.removals(part, first)
        read = [(place, _criteria_or_none(data)) for place, data in removals.rows]
        kept = []
        for arrival in arrivals:
            later = (criteria for place, criteria in read if place > arrival.since)
            removed = any(c is None or _concerns(c, arrival.row.entry) for c in later)
            if removals.reach(arrival.since) and not removed:
                kept.append(arrival)
        return kept

    def _undo(self, part: int, arrivals: list[_Arrival]) -> None:
        """Take out again what was removed while it was brought. Later removals are followed after this."""
        kept = set[str]()
        try:
            kept = {arrival.entry_id for arrival in self._unremoved(part, arrivals)}
        finally:  # also where that cannot be said
            for arrival in arrivals:
                if arrival.entry_id not in kept:
                    self._remove({"entry_id": arrival.entry_id})

    def bring_images(self, tenant: str, media_ids: Iterable[str]) -> None:
        """Bring images of donors that are not here. Never raises, and waits for ``limit_s`` at most."""
        if self._media is None or time.monotonic() < self._quiet_until:
            return
        missing = [media_id for media_id in media_ids if self._media.path(media_id) is None]
        with self._tally.boundary("shared entries"):
            jobs = [self._readers.submit(self._read_image, tenant, one) for one in missing]
            if wait(jobs, self._limit_s).not_done:
                self._quiet_until = time.monotonic() + _PAUSE_S

    def _read_image(self, tenant: str, media_id: str) -> None:
        assert self._media is not None
        with self._tally.boundary("shared entries"):
            for row in self._store.read(_image(tenant, media_id), "", ""):
                if digest_of(row.data) == media_id:
                    self._media.put(row.data)
                    self._tally.add("shared images in")
                    return

    def _add_each(self, records: Sequence[Record]) -> None:
        """Add records. What others wrote must not keep a partition from being read; what this directory's file has
        against it is raised, and tried again."""
        try:
            self._add_records(records)
        except (sqlite3.ProgrammingError, sqlite3.DataError, ValueError, OverflowError):
            for record in records:
                with self._tally.boundary("shared entry"):
                    self._add_records([record])

    def _record(self, row: Shared) -> Record:
        record = self._to_record(row.entry, row.vectors)
        has_vectors = record.vectors or record.media_vectors
        if row.vectors and not has_vectors:
            self._tally.add("shared entry of another encoder")
        return replace(record, recorded=time.time())


# -- the form of what is shared -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shared:
    """What a row holds: an entry and its packed vectors, or the name of a pair ``wrong``, with the entry's head."""

    entry: Entry
    vectors: Mapping[str, bytes]
    wrong: str = ""


def dump(record: Record) -> bytes:
    """A checksum, and JSON of an entry and its vectors by layer and encoder."""
    entry = record.entry
    vectors = {layer: pack(vector) for layer, vector in record.vectors.items()}
    media = _media_of(entry)
    for layer in {layer for layer, _ in record.media_vectors}:
        if all((layer, item) in record.media_vectors for item in media):
            vectors[layer] = pack(np.stack([record.media_vectors[layer, item] for item in media]))
    return _sealed(Shared(entry, vectors))


def dump_wrong(pair: str, entry: Entry) -> bytes:
    """The same of a pair found wrong, as `Catalog.bar` takes it. It says nothing of the entry's texts."""
    head = replace(entry, segments=(), chunk_text="", response="", metadata={})
    return _sealed(Shared(head, {}, pair))


def _sealed(shared: Shared) -> bytes:
    entry = shared.entry
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
        "vectors": {
            layer: base64.b64encode(data).decode() for layer, data in shared.vectors.items()
        },
        "wrong": shared.wrong,
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


def load(data: bytes) -> Shared:
    """The reverse of `dump` and `dump_wrong`.

    Raises:
        CorruptValue: the checksum, the format or a value is not what it should be.
    """
    text = data[_CHECKSUM:]
    if len(data) > LARGEST or data[:_CHECKSUM] != xxhash.xxh3_128_hexdigest(text).encode():
        raise CorruptValue("shared entry: too large, or it fails its checksum")
    with _reading("shared entry"):
        body: Mapping[str, Any] = json.loads(text)
        if body["format"] != FORMAT:
            raise ValueError("of another format")
        shared = Shared(_entry_in(body), _vectors_in(body), str(body["wrong"]))
        if not (shared.entry.segments or shared.wrong):
            raise ValueError("no segments")
        for one in (*_media_of(shared.entry), shared.wrong):
            if one and not re.fullmatch(r"[0-9a-f]{64}", one):
                raise ValueError("no digest")
        return shared


def _entry_in(body: Mapping[str, Any]) -> Entry:
    names = ("id", "tenant", "model", "chunk_text", "response")
    words = {name: body[name] for name in names}
    segments = load_segments(body["segments"])
    tags = tuple(body["tags"])
    created = float(body["created"])
    texts = [one for s in segments for one in (getattr(s, "text", ""), getattr(s, "name", ""))]
    "".join([*words.values(), *texts, *tags]).encode()  # refuses half of a character
    if not math.isfinite(created):
        raise ValueError("no time")
    return Entry(
        words["id"],
        Namespace(words["tenant"], words["model"]),
        segments,
        chunk_text=words["chunk_text"],
        response=words["response"],
        tags=tags,
        created=min(created, time.time()),
        metadata=dict(body["metadata"]),
    )


def _vectors_in(body: Mapping[str, Any]) -> dict[str, bytes]:
    return {
        str(layer): base64.b64decode(text, validate=True) for layer, text in body["vectors"].items()
    }


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
        if "wrong" in criteria and criteria.keys() != {"wrong", "entry_id"}:
            raise ValueError("no pair")
        return criteria


def _criteria_or_none(data: bytes) -> Criteria | None:
    """The criteria of a removal; None where they cannot be read, so that it may concern anything."""
    with suppress(CorruptValue):
        return read_criteria(data)
    return None


def _concerns(criteria: Criteria, entry: Entry) -> bool:
    """Whether a removal is one of an entry."""
    if "wrong" in criteria:
        return False
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


def _concerns_data(removals: Sequence[Criteria], data: bytes) -> bool:
    """The same of several and a row; True where the row cannot be read."""
    try:
        entry = load(data).entry
    except CorruptValue:
        return True
    return any(_concerns(criteria, entry) for criteria in removals)


def _may_concern(removals: Sequence[Criteria], partition: str) -> bool:
    """Whether one of several removals may be one of a partition's rows."""
    name = partition.partition(":")[0]
    is_image = partition.partition(":")[2].startswith(_IMAGE)
    for criteria in removals:
        tenants = criteria.get("tenants")
        known = criteria.keys() <= {"tenants"}  # all that an image's partition says
        if (known or not is_image) and (
            not isinstance(tenants, list) or name in map(tenant_name, tenants)
        ):
            return True
    return False


def _image(tenant: str, media_id: str) -> str:
    """The name of the partition that has an image's bytes."""
    return f"{tenant_name(tenant)}:{_IMAGE}{media_id}"


def _media_of(entry: Entry) -> list[str]:
    return [segment.media_id for segment in entry.segments if isinstance(segment, MediaSegment)]
