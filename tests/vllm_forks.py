"""Processes in which vLLM is imported already.

Importing vLLM takes far longer than starting a tiny engine. So one process per test run imports it and forks for every
job. What a job leaves behind in its process (threads, imports, a crash) does not reach the next one.

A `Job` speaks to a keeper that was forked from that process, and the keeper forks the job. The keeper kills the job
when its `Job` is closed or the test ends, however that ends.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO, Any

_ADDRESS = "SEMKV_TEST_FORKS"
_STATUS = struct.Struct("i")
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler lives in the job's process, where it can be looked at
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMBA_DISABLE_JIT": "1",  # of tiny drafts, compiling takes far longer than running
}
_IMPORTED = ("vllm", "vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "compressed_tensors")
_STARTERS = ("vllm.v1.engine.utils", "vllm.v1.executor.multiproc_executor")
"""Where vLLM starts processes of its own: the engine core, and workers."""


class Job:
    """A running job: a function of a module of this folder with JSON arguments.

    Args:
        module: its name, as a test imports it.
        function: its name in the module; what it returns goes to ``output`` as a line "RESULT" and JSON.
        output, errors: what the job prints goes there.
    """

    def __init__(self, module: str, function: str, arguments: list[Any], output: IO[Any], errors: IO[Any]) -> None:
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(_address())
        with tempfile.TemporaryFile("w+") as order:
            json.dump([module, function, arguments], order, default=str)
            order.seek(0)
            socket.send_fds(self._line, [b"job"], [order.fileno(), output.fileno(), errors.fileno()])

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status; TimeoutError if it takes longer."""
        self._line.settimeout(timeout)
        status = self._line.recv(_STATUS.size, socket.MSG_WAITALL)
        assert status, "the process that keeps the job has ended"
        return int(_STATUS.unpack(status)[0])

    def close(self) -> None:
        """Kill it, if it still runs; on return it is gone."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)
            self._line.settimeout(None)
            self._line.recv(_STATUS.size)
        self._line.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _address() -> str:
    """Where the process that forks listens; the first call starts it, and jobs use their own parent's."""
    if _ADDRESS not in os.environ:
        from bound import Bound

        folder = tempfile.mkdtemp(prefix="semkv-forks-")
        address, log = f"{folder}/socket", Path(folder, "log")
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        variables = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": path, _ADDRESS: address}
        with log.open("w") as printed:
            command = [sys.executable, str(Path(__file__).resolve()), address]
            process = Bound(command, env=variables, stdout=printed, stderr=printed)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        atexit.register(process.stop)
        while not os.path.exists(address):  # noqa: PTH110
            assert process.running, f"vLLM cannot be imported: {log.read_text()[-4000:]}"
            time.sleep(0.05)
        os.environ[_ADDRESS] = address
    return os.environ[_ADDRESS]


def _serve(address: str) -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address + ".new")
        server.listen(64)
        Path(address + ".new").rename(address)
        while True:
            line, _ = server.accept()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if os.fork() == 0:
                server.close()
                _keep(line)
            line.close()


def _keep(line: socket.socket) -> None:
    """In a fork: run the job in another, kill it when the line is closed, and tell its exit status."""
    _, files, *_ = socket.recv_fds(line, 16, 3)
    job = os.fork()
    if job == 0:
        line.close()
        _run(files)
    ended = os.pidfd_open(job)
    ready, *_ = select.select([ended, line], [], [])
    if ended not in ready:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(job, 0)[1])
    with contextlib.suppress(OSError):
        line.sendall(_STATUS.pack(status))
    os._exit(0)


def _run(files: list[int]) -> None:
    """The job; it ends at once, since what threads and native code do at an exit is not tested."""
    for own, given in enumerate(files):
        os.dup2(given, own)
        os.close(given)
    status = 0
    try:
        for name in _STARTERS:  # vLLM would start a new interpreter for each of them on a CPU, which imports it again
            vars(importlib.import_module(name))["get_mp_context"] = lambda: multiprocessing.get_context("fork")
        module, function, arguments = json.load(sys.stdin)
        result = getattr(importlib.import_module(module), function)(*arguments)
        print("\nRESULT " + json.dumps(result))
    except BaseException:
        traceback.print_exc()
        status = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve(sys.argv[1])
