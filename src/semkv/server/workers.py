"""Several processes that do the same work, until a signal to stop."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess

from prometheus_client.multiprocess import mark_process_dead

from semkv.errors import SemkvError
from semkv.server.metrics import FOLDER

log = logging.getLogger(__name__)

_CANNOT_START = 2  # exit code of a worker that said why
_PAUSE_S = 1.0  # before a worker that ended is started again
_LOOK_S = 0.2  # between two looks whether a signal came

_spawn = multiprocessing.get_context("spawn")  # a fork would have another process's locks


def run_workers(count: int, work: Callable[[], None]) -> None:
    """Do ``work``, which must be picklable, in ``count`` processes; one that ends is started again. SIGINT and SIGTERM
    end all, and so does the end of this process.

    Raises:
        SemkvError: a worker cannot start, and none runs that was started before it.
    """
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    # Each would take all cores for its encoder.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    running: dict[SpawnProcess, float] = {}  # and when it was started
    with tempfile.TemporaryDirectory(prefix="semkv-figures-") as folder:
        os.environ[FOLDER] = folder
        try:
            while not stopping.is_set():
                running |= {_started(work): time.monotonic() for _ in range(count - len(running))}
                if not wait([worker.sentinel for worker in running], _LOOK_S):
                    continue
                for worker in [worker for worker in running if worker.exitcode is not None]:
                    begun = running.pop(worker)
                    mark_process_dead(worker.pid, folder)  # type: ignore[no-untyped-call]
                    if worker.exitcode == _CANNOT_START and not any(at < begun - _PAUSE_S for at in running.values()):
                        raise SemkvError("a worker cannot start; its message is above")
                    if not stopping.is_set():
                        log.warning("worker %s ended (%s); another is started", worker.pid, worker.exitcode)
                stopping.wait(_PAUSE_S)
        finally:
            for worker in running:
                worker.terminate()
            for worker in running:
                worker.join()


def _started(work: Callable[[], None]) -> SpawnProcess:
    worker = _spawn.Process(target=_run, args=(work,))
    worker.start()
    return worker


def _run(work: Callable[[], None]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        work()
    except SemkvError as error:
        print(f"semkv: {error}", file=sys.stderr)
        sys.exit(_CANNOT_START)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
