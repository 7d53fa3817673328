"""The process that copies blocks between vLLM's host memory and block files.

vLLM schedules in one Python thread. Threads that read and write files in the same process compete with it for the
interpreter, and the engine's steps get slower. So another process reads and writes. It maps the same host memory and
gets one job for each file over a socket. Its answer says which blocks are right.

The process finishes its jobs and exits when the engine has ended. If the process dies first, its jobs count as failed
and another process is started.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import mmap
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import MsgspecError, msgpack

from semkv_stores.block_file import Bytes, room
from semkv_stores.block_index import BlockRef
from semkv_stores.blocks import BlockStore, Bounds

if TYPE_CHECKING:
    from semkv_vllm.bucket_log import Follower

log = logging.getLogger("semkv.connectors")

# threads of the process
_READERS = 8
_FAR_READERS = 8
_WRITERS = 2
_MOST_KEPT = 4  # reads from the bucket that wait to be written to the disk
_RESTART_S = 60.0  # between two starts, so that a process that cannot live costs next to nothing
_CLOSE_S = 60.0  # how long an engine that ends waits for what is being written
_SEND_S = 2  # how long sending a job may take
_SILENT_S = 60.0  # for a job that a thread has taken; one that is not answered by then hangs


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShape:
    """Host memory: ``rows`` of ``stride`` bytes, of which the first ``row_bytes`` are a block's."""

    rows: int
    stride: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class FileJob:
    """Blocks of one file to write or to read.

    Attributes:
        number: under which it is answered.
        namespace, layout, keys: as `BlockStore` takes them.
        chunks: the rows of host memory, one for each key.
        file, places: the file to read and the rows of it; empty for a job that writes.
        owner, since: as `BlockStore.write` takes them.
        far: the file is in the bucket. Without ``chunks`` its blocks are only to be brought to this directory.
    """

    number: int
    namespace: str
    layout: Any
    keys: list[bytes]
    chunks: list[int]
    file: str = ""
    places: list[int] = field(default_factory=list)
    owner: str = ""
    since: int = 0
    far: bool = False


@dataclass(frozen=True, slots=True)
class FileDone:
    """What became of a job: by place among its keys, whether the block is on disk now, or in host memory and right;
    and what the process's store has counted since its last answer. Small, so that it comes in one piece. ``hung``: it
    was given up because the disk did not answer. ``away_s``: for how long no read from the bucket will be tried."""

    number: int
    good: bytes
    counters: Mapping[str, int]
    hung: bool = False
    away_s: float = 0.0


class _UnderWay:
    """The jobs of one kind that are not answered yet, and which of them hang.

    The process takes jobs of a kind in the order in which they came, so the oldest ones are those that its threads
    have. The time of a job begins there: one that waits behind others does not hang, however long it waits. Answers to
    other jobs say nothing of one that hangs.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        # By number, oldest first: since when a thread has it.
        self._taken: dict[int, float | None] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def add(self, number: int) -> None:
        self._taken[number] = None

    def discard(self, number: int) -> None:
        self._taken.pop(number, None)

    def hanging(self, now: float) -> list[int]:
        """The jobs that a thread has had for too long."""
        found = []
        for number in itertools.islice(self._taken, self._threads):
            since = self._taken[number]
            if since is None:
                self._taken[number] = now
            elif now - since > _SILENT_S:
                found.append(number)
        return found

    def wait_again(self) -> None:
        """Let the time of every job begin anew."""
        self._taken = dict.fromkeys(self._taken)

    def take_all(self) -> list[int]:
        numbers = list(self._taken)
        self._taken.clear()
        return numbers


class DiskProcess:
    """The engine's side. For one thread."""

    def __init__(
        self,
        memory: int,
        shape: HostShape,
        store: BlockStore,
        bucket: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the process.

        Args:
            memory: descriptor of vLLM's host memory.
            shape: of it.
            store: whose directory, bounds and writer the process shares.
            bucket: what `semkv_vllm.bucket_log.Follower` takes beside a store; None for no bucket.
        """
        self._memory = memory
        self._about = {
            "shape": asdict(shape),
            "root": str(store.root),
            "kind": store.kind,
            "bounds": asdict(store.bounds),
            "writer": store.writer,
            "bucket": bucket,
        }
        self._reads = _UnderWay(_READERS)
        self._far_reads = _UnderWay(_FAR_READERS)
        self._writes = _UnderWay(_WRITERS)
        self._numbers = itertools.count(1)
        self._started = -_RESTART_S
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        self._started = time.monotonic()
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                fds = (self._memory, theirs.fileno())
                arguments = ["-P", "-m", __name__, *map(str, fds), json.dumps(self._about)]
                process = subprocess.Popen(
                    [sys.executable, *arguments],
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            # A process that does not read must not hold up the engine: then sending fails.
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_S, 0))
            self._connection = Connection(ours.detach())
            self._process = process
        except Exception:  # whatever it is, a job that is half handed over would leave rows in use
            log.warning(
                "semkv: no process for the disk can be started: no KV is read or written",
                exc_info=True,
            )

    @property
    def _kinds(self) -> tuple[_UnderWay, _UnderWay, _UnderWay]:
        return self._reads, self._far_reads, self._writes

    @property
    def _under_way(self) -> int:
        return sum(map(len, self._kinds))

    def submit(self, **job: Any) -> int:
        """Hand over a job, given by the fields of `FileJob`; returns the number under which it is answered."""
        self._start_again()
        number = next(self._numbers)
        handed_over = FileJob(number, **job)
        message = msgpack.encode(handed_over)
        reads = self._far_reads if handed_over.far else self._reads
        (reads if handed_over.file else self._writes).add(number)
        if self._process is not None:
            try:
                self._connection.send_bytes(message)
            except OSError:
                self._ended()
        return number

    def _start_again(self) -> None:
        # What is still under way was given to another process, or to none: `finished` must say so first.
        late = time.monotonic() - self._started > _RESTART_S
        if self._process is None and not self._under_way and late:
            self._start()

    def revive(self) -> None:
        """Start the process again where it has ended, though it has no job: it may follow a bucket."""
        if self._process is not None and not self._under_way and self._process.poll() is not None:
            self._ended()
        self._start_again()

    def finished(self, wait_s: float = 0.0) -> Iterator[FileDone]:
        """What has ended since the last call; of what the process left undone, that nothing came of it.

        All answers that have come are read before a job counts as hanging: an engine that stood still did not see them.
        """
        while self._process is not None and self._under_way:
            try:
                if not self._connection.poll(wait_s):
                    break
                done = msgpack.decode(self._connection.recv_bytes(), type=FileDone)
            except (OSError, EOFError, MsgspecError):
                self._ended()
                break
            for jobs in self._kinds:
                jobs.discard(done.number)
            yield done
        hanging = self._hanging() if self._process is not None else []
        if hanging:
            log.warning(
                "semkv: the disk has not answered for %g s: %d jobs hang", _SILENT_S, len(hanging)
            )
            self._ended()
        if self._process is None:
            for number in [number for jobs in self._kinds for number in jobs.take_all()]:
                yield FileDone(number, b"", {"errors": 1}, hung=number in hanging)

    def _hanging(self) -> list[int]:
        now = time.monotonic()
        return [number for jobs in self._kinds for number in jobs.hanging(now)]

    def _ended(self) -> None:
        """The process is gone, or a job of it hangs. It must be dead before host memory is used for anything else;
        while the kernel does not let go of it, what it had to do stays unanswered."""
        process = self._process
        assert process is not None
        process.kill()
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            for jobs in self._kinds:
                jobs.wait_again()
            return
        log.warning(
            "semkv: the disk process has ended; the blocks that it was to read are computed"
        )
        self._process = None
        self._connection.close()

    def drain(self, limit_s: float = math.inf) -> list[FileDone]:
        """Wait until nothing is under way."""
        done, until = list[FileDone](), time.monotonic() + limit_s
        while self._under_way and time.monotonic() < until:
            done += self.finished(1.0)
        return done

    def close(self) -> None:
        """Let the process write what it was given, and wait for its end."""
        self.drain(_CLOSE_S)
        if (process := self._process) is None:
            return
        self._process = None
        self._connection.close()  # which ends the process
        try:
            process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()


# ---------------------------------------------------------------------- the other side


def main() -> None:
    """Serve one engine until it closes its end of the socket."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the engine's end is the sign
    memory = int(sys.argv[1])
    end = int(sys.argv[2])
    about = json.loads(sys.argv[3])
    shape = HostShape(**about["shape"])
    mapped = np.frombuffer(mmap.mmap(memory, shape.rows * shape.stride), np.uint8)
    rows = mapped.reshape(shape.rows, shape.stride)[:, : shape.row_bytes]
    store = BlockStore(
        Path(about["root"]), about["kind"], Bounds(**about["bounds"]), about["writer"]
    )
    Server(store, rows, Connection(end), about["bucket"]).serve()


class Server:
    """Does an engine's jobs, in threads."""

    def __init__(
        self,
        store: BlockStore,
        rows: Bytes,
        connection: Connection,
        bucket: Mapping[str, Any] | None,
    ) -> None:
        self._store = store
        self._rows = rows
        self._connection = connection
        self._lock = threading.Lock()
        self._sent = Counter[str]()
        self._room = threading.Semaphore(_MOST_KEPT)
        self._readers = ThreadPoolExecutor(_READERS, "semkv-read")
        self._far_readers = ThreadPoolExecutor(_FAR_READERS, "semkv-far")
        self._writers = ThreadPoolExecutor(_WRITERS, "semkv-write")
        self._follower = None if bucket is None else _follow(store, bucket)

    def serve(self) -> None:
        """Until the engine closes its end."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                job = msgpack.decode(self._connection.recv_bytes(), type=FileJob)
                readers = self._far_readers if job.far else self._readers
                (readers if job.file else self._writers).submit(self._run, job)
        for pool in (self._readers, self._far_readers, self._writers):
            pool.shutdown()
        if self._follower is not None:
            self._follower.close()
        self._store.close()

    def _run(self, job: FileJob) -> None:
        try:
            good = self._do(job)
        except Exception:
            log.warning("semkv: a job for the disk failed", exc_info=True)
            self._store.counters["errors"] += 1
            good = b""
        away_s = self._follower.away_s() if job.far and self._follower is not None else 0.0
        with self._lock, contextlib.suppress(OSError):
            new = Counter(self._store.counters) - self._sent
            self._sent.update(new)
            done = FileDone(job.number, good, new, away_s=away_s)
            self._connection.send_bytes(msgpack.encode(done))

    def _do(self, job: FileJob) -> bytes:
        if not job.file:
            return _write(self._store, self._rows, job)
        if not job.far:
            return _read(self._store, self._rows, job)
        good = _read(self._store, self._rows, job) if job.chunks else _bring(self._store, job)
        self._store.counters["bucket_read_blocks"] += sum(good)
        if job.chunks and all(good):
            self._keep(job)
        return good

    def _keep(self, job: FileJob) -> None:
        """Write what came from the bucket to the disk, from a copy: host memory may be used for something else now."""
        if not self._room.acquire(blocking=False):
            return
        copy = room(len(job.chunks), self._rows.shape[1])
        for row, chunk in zip(copy, job.chunks, strict=True):
            row[:] = self._rows[chunk]
        self._writers.submit(self._write_copy, job, copy)

    def _write_copy(self, job: FileJob, copy: Bytes) -> None:
        try:
            self._store.write(
                job.namespace,
                job.layout,
                job.keys,
                list(copy),
                owner=job.owner,
                since=job.since,
            )
        except Exception:
            log.warning("semkv: a block from the bucket was not kept", exc_info=True)
            self._store.counters["errors"] += 1
        finally:
            self._room.release()


def _follow(store: BlockStore, bucket: Mapping[str, Any]) -> Follower | None:
    """Follow the bucket's log; None where the library for it is missing or damaged."""
    try:
        from semkv_vllm.bucket_log import Follower

        follower = Follower(store, **bucket)
    except Exception:
        log.warning("semkv: the bucket cannot be used", exc_info=True)
        return None
    store.finds_far = True
    store.open_far = follower.open_far
    follower.start()
    return follower


def _refs(job: FileJob) -> list[BlockRef]:
    here = not job.far
    return [BlockRef(job.file, place, 0.0, owner=job.owner, here=here) for place in job.places]


def _bring(store: BlockStore, job: FileJob) -> bytes:
    return bytes(store.bring(job.namespace, job.keys, _refs(job), job.since))


def _read(store: BlockStore, rows: Any, job: FileJob) -> bytes:
    mine = [rows[chunk] for chunk in job.chunks]
    return bytes(store.read(job.layout, job.namespace, job.keys, _refs(job), mine))


def _write(store: BlockStore, rows: Any, job: FileJob) -> bytes:
    mine = [rows[chunk] for chunk in job.chunks]
    done = store.write(job.namespace, job.layout, job.keys, mine, owner=job.owner, since=job.since)
    return bytes([done is not None]) * len(job.keys)


if __name__ == "__main__":
    main()
