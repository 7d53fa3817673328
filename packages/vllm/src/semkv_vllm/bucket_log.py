"""How a directory follows the log of a bucket, and puts its own files there. See `semkv_stores.bucket_index`.

    <url>/<kind>/semkv.json                  the name of this log; made once
    <url>/<kind>/<name>/log/0000000000000001     the records, each under the next number
    <url>/<kind>/<name>/snapshots/<place>-<part>-<parts>    what the bucket held at a place, in parts
    <url>/<kind>/<name>/blocks/ab/ab12...    block files as they lie in a directory

A record is put only where there is no object of its name (a conditional put). Whoever loses applies what has won and
tries the next number. A snapshot takes the place of the records before it, which are then deleted. A record that was
put at the number of a deleted one is found out, since there is a snapshot of that place, and taken back.

What cannot be read of the log may have been a purge, so it counts as a purge of everything.

One process of a directory does this, the one that holds a lock on it. The lock spares requests and decides nothing:
records are applied in a transaction that knows the place before.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import random
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from semkv_stores import bucket_index
from semkv_stores.block_file import Source
from semkv_stores.block_index import file_name, number_of
from semkv_stores.blocks import BUSY_S, BlockStore
from semkv_stores.bucket_index import EVERYTHING, At, FarFile, Record
from semkv_vllm.bucket import Address, BucketAwayError, FarSource, Listed, Objects
from semkv_vllm.bucket_records import (
    Snapshot,
    decode,
    encode,
    latest_snapshot,
    object_name,
    part_name,
    places,
    record_name,
)
from semkv_vllm.bucket_uploads import Uploads

log = logging.getLogger("semkv.connectors")

POLL_S = 2.0
"""How often the log is looked at."""

ROOM_S = 10.0
"""How often the bounds of the bucket are looked at."""

FORMAT = 1
ORPHAN_S = 3600.0
"""An object of no file is deleted when it is so old: the bucket compares its own times."""

_TRIES = 8  # to append one record
_LONGEST_GAP = 1000  # in the numbers of records; an object far behind them is none
_READS = 3  # of a record, until it counts as damaged
_FETCHED = 32  # records at once
_KEPT = 64  # records before a snapshot, for those who are a little behind
_SNAPSHOT_RECORDS = 256  # after which another snapshot is made, at the earliest
_PART_BLOCKS = 50_000
_MOST_FILES = 1000  # of one record
_CLOSE_S = 10.0  # for what is still to be put when the engine ends
_CLOCK_S = 3600.0  # between two looks at the bucket's clock
_SWEPT_SHARE = 1 / 24  # of these, with which the objects of no file are looked for

_T = TypeVar("_T")


class _Changed(Exception):  # noqa: N818
    """The index is not as it was when this turn began; the next turn sees."""


@dataclass
class _Clock:
    """The bucket's clock, by this machine's monotonic one."""

    ahead: float = 0.0
    looked: float = float("-inf")

    def set(self, stored: float) -> None:
        self.looked = time.monotonic()
        self.ahead = stored - self.looked

    def now(self) -> float:
        return time.monotonic() + self.ahead


@dataclass
class _Own:
    """What this directory wants to append, with the ids of its purges."""

    record: Record
    purges: list[int] = field(default_factory=list)


class Follower:
    """Follows a bucket's log for the directory of a store. `open_far` may be called from any thread."""

    def __init__(
        self, store: BlockStore, url: str, *, max_bytes: int = 0, max_age_s: float = 0.0
    ) -> None:
        """
        Args:
            store: of the directory.
            url: of the bucket.
            max_bytes: bound on the bytes of all block files in the bucket; 0 for none.
            max_age_s: seconds after which a block file goes from the bucket; 0 for never.
        """
        self.store = store
        self.url = url
        self.max_bytes = max_bytes
        self.max_age_s = max_age_s
        address = Address(url, store.kind)
        self.reads = Objects(address, "reads")
        self.uploads = Uploads(store, address)
        self.objects = Objects(address, "its log")
        self.bucket = ""  # the name of its log
        self.place = 0
        self.clock = _Clock()
        self._lock_fd: int | None = None
        self._room_looked = float("-inf")
        self._stop = threading.Event()
        self._quiet_until = 0.0
        self._fetchers = ThreadPoolExecutor(8, "semkv-log")
        self._cleaner = ThreadPoolExecutor(1, "semkv-clean")
        self._compacting: Future[None] | None = None
        self._not_deleted = 0  # times that something in the background failed
        self._threads = [
            threading.Thread(target=loop, name="semkv-bucket", daemon=True)
            for loop in (self._follow_on, self._upload_on)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def open_far(self, file: str) -> Source:
        """The object of a block file. Raises as `Objects` does.

        While the log cannot be followed, nobody knows what was purged, so nothing is read either.
        """
        if self.objects.away_s():
            raise BucketAwayError("its log cannot be followed")
        bucket, _ = self.store.ask(bucket_index.position, ("", 0))
        if not bucket:
            raise BucketAwayError("it is not known yet")
        return FarSource(self.reads, object_name(bucket, file))

    def away_s(self) -> float:
        """For how long nothing is read from now on."""
        return max(self.reads.away_s(), self.objects.away_s())

    # -- threads -----------------------------------------------------------------------------------------------------

    def _follow_on(self) -> None:
        while not self._stop.is_set():
            self.turn()
            self._stop.wait(POLL_S * random.uniform(0.8, 1.2))  # noqa: S311

    def _upload_on(self) -> None:
        while not self._stop.is_set():
            try:
                busy = self.uploads.step()
            except Exception:
                self._fault()
                busy = False
            if not busy:
                self._stop.wait(POLL_S / 2)

    def turn(self) -> bool:
        """Follow the log, and append what is to be; whether all went well."""
        try:
            self._turn()
        except (BucketAwayError, FileNotFoundError, _Changed):
            self.store.counters["bucket_errors"] += 1
            return False
        except Exception:
            self._fault()
            return False
        return True

    def _fault(self) -> None:
        self.store.counters["bucket_errors"] += 1
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + 60.0
            log.warning(
                "semkv: following the bucket %s failed; it is tried again", self.url, exc_info=True
            )

    def close(self) -> None:
        """Put what is still to be put, for a short while, where the bucket answers."""
        self._stop.set()
        until = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))
        with contextlib.suppress(Exception):
            while time.monotonic() < until and self.uploads.step():
                pass
        self.turn()
        self.uploads.close()
        for pool in (self._fetchers, self._cleaner):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def settle(self) -> bool:
        """Wait until what is to be deleted is; whether all of it could be, since the last call."""
        self._cleaner.submit(int).result()
        failed = self._not_deleted
        self._not_deleted = 0
        return not failed

    # -- one turn ----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        if not self._leads() or self.objects.away_s():
            return
        known = self.store.ask(bucket_index.position, None)
        if known is None:
            raise _Changed
        bucket, self.place = known
        if not bucket or bucket != self.bucket or self._is_old():
            self._join(bucket)
        self._follow()
        self._append(self._purges)
        while self._append(self._adds):
            pass
        self._make_room()

    def _leads(self) -> bool:
        """Whether this process follows the log for its directory."""
        if self._lock_fd is not None:
            return True
        try:
            folder = os.open(self.store.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(folder)
            return False
        self._lock_fd = folder
        return True

    def _is_old(self) -> bool:
        return time.monotonic() - self.clock.looked > _CLOCK_S

    def _join(self, known: str) -> None:
        """Find the name of the log, or make it; see whether the bucket can do what is needed, and its clock."""
        name = self._name()
        probe = f"{name}/probes/{secrets.token_hex(8)}"
        if not self.objects.create(probe, b"1") or self.objects.create(probe, b"2"):
            raise self.objects.fail("it has no conditional puts, which its log needs")
        self.clock.set(self.objects.get(probe)[1])
        self.objects.delete([probe])
        if random.random() < _SWEPT_SHARE:  # noqa: S311
            self._cleaner.submit(self._try, self.sweep)
        if known != name:
            self._write(lambda db: bucket_index.forget(db, name, pending=True))
            self.place = 0
        self.bucket = name
        self.uploads.begin(name)

    def _name(self) -> str:
        """The name of the log. Of several processes that make one, the first one's stays."""
        mine = {"format": FORMAT, "bucket": secrets.token_hex(8)}
        try:
            content, _ = self.objects.get("semkv.json")
        except FileNotFoundError:
            self.objects.create("semkv.json", json.dumps(mine).encode())
            content, _ = self.objects.get("semkv.json")
        try:
            found = json.loads(content)
            name = str(found["bucket"])
            is_ours = found["format"] == FORMAT and name.isalnum()
        except (ValueError, LookupError, TypeError):
            is_ours = False
        if not is_ours:
            raise self.objects.fail("its semkv.json is damaged, or of another version of semkv")
        return name

    def _write(self, what: Callable[..., _T | None]) -> _T:
        """A transaction of the index."""
        done = self.store.ask(what, None, write_s=BUSY_S)
        if done is None:
            raise _Changed
        return done

    def _path(self, folder: str) -> str:
        return f"{self.bucket}/{folder}"

    # -- following ---------------------------------------------------------------------------------------------------

    def _follow(self, *, replayed: bool = False) -> None:
        """Apply all records that there are."""
        after = record_name(self.place - 1) if self.place > 1 else ""
        listed = self.objects.listed(self._path("log"), after)
        there = places(listed)
        begins = [self.place] if self.place else [1]
        if there[:1] != begins and (there or self.place):
            if replayed:
                raise self.objects.fail("its log has gaps; empty it")
            self._replay()
            return self._follow(replayed=True)
        farthest = self.place + len(there) + _LONGEST_GAP
        new = [place for place in there if self.place < place <= farthest]
        for begin in range(0, len(new), _FETCHED):
            batch = new[begin : begin + _FETCHED]
            for place, (record, stored) in zip(
                batch, self._fetchers.map(self._fetch, batch), strict=True
            ):
                self._apply(_Own(record), place, stored)
        return None

    def _fetch(self, place: int) -> tuple[Record, float]:
        name = self._path(f"log/{record_name(place)}")
        stored = 0.0
        for _ in range(_READS):
            content, stored = self.objects.get(name)
            if (record := decode(content)) is not None:
                return record, stored
        log.warning(
            "semkv: a record of the log of %s is damaged; it counts as a purge of everything",
            self.url,
        )
        return Record(purges=[EVERYTHING]), stored

    def _apply(self, own: _Own, place: int, stored: float) -> list[int]:
        """Apply the record of a place. One that somebody has deleted before it may have been a purge."""
        before = self.place
        at = At(
            place=place,
            stored=int(stored),
            local=time.time() - max(0.0, self.clock.now() - stored),
        )

        def apply(db: sqlite3.Connection) -> list[int] | None:
            if bucket_index.position(db) != (self.bucket, before):
                return None
            if place > before + 1:
                lost = Record(purges=[EVERYTHING])
                bucket_index.apply(db, self.store.root, lost, At(place=place - 1))
            gone = bucket_index.apply(db, self.store.root, own.record, at, own.purges)
            bucket_index.advance(db, self.bucket, place)
            return gone

        gone = self._write(apply)
        self.place = place
        self.uploads.forget(file_name(file.number) for file in own.record.adds)
        return gone

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        return latest_snapshot(self.objects.listed(self._path("snapshots")))

    def _replay(self) -> None:
        """Begin anew with the latest snapshot."""
        name = self._name()
        snapshot = self._snapshot()
        if name != self.bucket:
            self.bucket = ""
            raise _Changed
        before = self.place
        if not snapshot.place:
            if not self._has_first():
                raise self.objects.fail("the beginning of its log is gone; empty it")
            self._write(lambda db: bucket_index.forget(db, self.bucket, pending=True))
            self.place = 0
            return
        at = At(place=snapshot.place, stored=int(self.clock.now()), local=time.time())
        for number, part in enumerate(snapshot.parts):
            record = decode(self.objects.get(part)[0])
            if record is None:
                raise self.objects.fail("a snapshot of its log is damaged; empty it")
            self._apply_part(record, at, before=before if number == 0 else None)
        self._write(lambda db: bucket_index.advance(db, self.bucket, at.place))
        self.place = at.place

    def _apply_part(self, part: Record, at: At, *, before: int | None) -> None:
        """Apply a part of a snapshot; with the first one come the purges, of which those after ``before`` are new."""

        def apply(db: sqlite3.Connection) -> list[int]:
            if before is not None:
                bucket_index.forget(db, self.bucket, pending=False)
                bucket_index.apply_purges(db, self.store.root, part.purges, before)
            return bucket_index.apply(db, self.store.root, Record(adds=part.adds), at)

        self._write(apply)

    def _has_first(self) -> bool:
        names = [each.name for each in self.objects.listed(self._path("log"))]
        return names[:1] in ([], [self._path(f"log/{record_name(1)}")])

    def _compact(self, latest: Snapshot) -> None:
        """Make a snapshot of this place, and have what it replaces deleted."""
        due = max(_SNAPSHOT_RECORDS, 4 * len(latest.parts))
        busy = self._compacting is not None and not self._compacting.done()
        if busy or self.place - latest.place < due:
            return
        purges = self.store.ask(bucket_index.log_purges, None)
        if purges is None:
            return
        pages = [Record(purges=purges)]
        while files := self._page(pages[-1]):
            pages.append(Record(adds=files))
        parts = [encode(page) for page in pages]
        place = self.place
        self._compacting = self._cleaner.submit(self._try, lambda: self._put_snapshot(place, parts))

    def _page(self, last: Record) -> list[FarFile]:
        """The files of the bucket that follow those of the last page."""
        after = last.adds[-1].number if last.adds else -1
        found = self.store.ask(
            lambda db: list(bucket_index.page(db, after, _PART_BLOCKS)),
            None,
        )
        if found is None:
            raise _Changed
        return found

    def _put_snapshot(self, place: int, parts: Sequence[bytes]) -> None:
        for number, part in enumerate(parts):
            name = part_name(place, number, len(parts))
            self.objects.put(self._path(f"snapshots/{name}"), part)
        snapshots = self.objects.listed(self._path("snapshots"))
        records = self.objects.listed(self._path("log"))
        this = self._path(f"snapshots/{record_name(place)}")
        last = self._path(f"log/{record_name(max(0, place - _KEPT))}")
        self.objects.delete([each.name for each in snapshots if each.name < this])
        self.objects.delete([each.name for each in records if each.name < last])
        self.sweep()

    def sweep(self) -> int:
        """Delete the objects of no file, which writers left that died. Returns how many went."""
        before = self.clock.now() - ORPHAN_S
        waiting = set(self.uploads.waiting())
        listed = self.objects.listed(self._path("blocks"))
        known = self.store.ask(bucket_index.in_bucket, None)
        if known is None:
            return 0

        def is_orphan(each: Listed) -> bool:
            file = each.name.rpartition("/")[2]
            return each.stored < before and file not in known and file not in waiting

        orphans = [each.name for each in listed if is_orphan(each)]
        self.objects.delete(orphans)
        return len(orphans)

    # -- appending ---------------------------------------------------------------------------------------------------

    def _append(self, make: Callable[[], _Own | None]) -> bool:
        """Append what ``make`` wants appended, which it is asked for at each try; whether anything was."""
        for _ in range(_TRIES):
            own = make()
            if own is None:
                return False
            stored = self._put(own.record)
            if stored is not None:
                gone = self._apply(own, self.place + 1, stored)
                self._delete_objects(gone)
                blocks = sum(len(file.keys) for file in own.record.adds)
                self.store.counters["bucket_stored_blocks"] += blocks
                return True
            time.sleep(random.uniform(0.0, 0.1))  # noqa: S311
            self._follow()
        return False

    def _put(self, record: Record) -> float | None:
        """Put a record at the next place; when that was, or None where another one is there."""
        name = self._path(f"log/{record_name(self.place + 1)}")
        won = self.objects.create(name, encode(record))
        # Also one that was put by a request of ours whose answer was lost.
        content, stored = self.objects.get(name)
        if not won:
            there = decode(content)
            if there is None or there.nonce != record.nonce:
                return None
        snapshot = self._snapshot()
        # Then the record that had this number is gone, and so ours was put where nobody will look.
        if self.place + 1 < snapshot.place - _KEPT:
            self.objects.delete([name])
            self._replay()
            return None
        self._compact(snapshot)
        return stored

    def _purges(self) -> _Own | None:
        found = self.store.ask(bucket_index.pending_purges, None)
        if not found:
            return None
        record = Record(nonce=secrets.token_bytes(16), purges=list(found.values()))
        return _Own(record, list(found))

    def _adds(self) -> _Own | None:
        files = self.uploads.waiting()[:_MOST_FILES]
        if not files:
            return None
        settled = self._write(lambda db: bucket_index.settled(db, files))
        self.uploads.forget(settled)
        self._delete_objects(number_of(file) for file, has in settled.items() if not has)
        found = self._write(lambda db: bucket_index.described(db, files, time.time(), _PART_BLOCKS))
        return _Own(Record(nonce=secrets.token_bytes(16), adds=found)) if found else None

    def _make_room(self) -> None:
        if time.monotonic() - self._room_looked < ROOM_S:
            return
        while self._append(self._drops):
            pass
        self._room_looked = time.monotonic()

    def _drops(self) -> _Own | None:
        too_old = int(self.clock.now() - self.max_age_s) if self.max_age_s else 0
        files = self.store.ask(lambda db: bucket_index.victims(db, self.max_bytes, too_old), None)
        if not files:
            return None
        return _Own(Record(nonce=secrets.token_bytes(16), drops=files[:_MOST_FILES]))

    def _delete_objects(self, files: Iterable[int]) -> None:
        names = [object_name(self.bucket, file_name(number)) for number in files]
        if names:
            self._cleaner.submit(self._try, lambda: self.objects.delete(names))

    def _try(self, what: Callable[[], object]) -> None:
        try:
            what()
        except (BucketAwayError, FileNotFoundError):  # what is left is swept later
            self.store.counters["bucket_errors"] += 1
            self._not_deleted += 1
        except Exception:
            self._fault()
            self._not_deleted += 1
