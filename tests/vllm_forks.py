"""A Python in which vLLM is imported already.

Importing vLLM takes far longer than starting a tiny engine. So one process of a test run imports it, and forks for
every program (``-m module`` or ``-c program``) that is run with ``python`` or ``semkv`` in the folder of `prepare`;
in such a program, ``sys.executable`` is that ``python`` too. What it leaves behind in its process (threads, imports, a
crash) does not reach the next one.

A program runs in a fork of its own, below a keeper, which is a fork too. The keeper kills it, with all that it
started, when the process that stands in for it has ended, or the test run has.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import importlib.util
import json
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import Any

_FOLDER = "FORKS_OF_SEMKV_TESTS"
_RUN = "RUN_OF_SEMKV_TESTS"
_NUMBER = struct.Struct("i")  # a signal, or an exit status
_IMPORTED = (
    "vllm.entrypoints.llm", "vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker",
    "vllm.v1.core.sched.scheduler", "vllm.v1.attention.backends.cpu_attn", "vllm.v1.kv_offload.tiering.spec",
    "vllm.model_executor.layers.quantization.online", "compressed_tensors", "onnx", "faiss",
    "semkv_vllm.kv", "semkv_vllm.spec", "semkv_vllm.tier", "semkv_vllm.ec", "semkv_lab.sweep", "semkv_gateway.serve",
    "semkv_gateway.app", "pytest", "hypothesis", "anthropic", "mlflow", "nbformat", "schemathesis",
)  # fmt: skip
"""What programs and tests import. Each would take its time again in every fork."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # workers share the machine: no engine takes all processors, or binds itself to one
    "OMP_WAIT_POLICY": "PASSIVE",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "NUMBA_DISABLE_JIT": "1",  # of what is tiny, compiling takes far longer than running
    "TORCHDYNAMO_DISABLE": "1",
}
"""Of all tests, unless the user sets another value."""

_REAL = sys.executable


def prepare() -> Path:
    """The folder of this run, which all its processes share. The process that makes it is the run."""
    if _FOLDER not in os.environ:
        folder = tempfile.mkdtemp(prefix="semkv-forks-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ |= {_FOLDER: folder, _RUN: str(os.getpid())}
        for name, more in (("python", ""), ("semkv", "-m semkv")):
            program = Path(folder, name)
            program.write_text(
                f"#!/bin/sh\nexec '{_REAL}' -S '{Path(__file__).resolve()}' {more} \"$@\"\n"
            )
            program.chmod(0o700)
    return Path(os.environ[_FOLDER])


def _address() -> str:
    """Where the process that forks listens; the first program of a run starts it."""
    folder = prepare()
    address, log = folder / "socket", folder / "log"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
            variables = {**ENVIRONMENT, **os.environ, "PYTHONPATH": path}
            with log.open("w") as printed:
                server = subprocess.Popen(
                    [_REAL, __file__, "--serve"], env=variables, stdin=subprocess.DEVNULL, stdout=printed,
                    stderr=printed, start_new_session=True,
                )  # fmt: skip
            while not address.exists():
                assert server.poll() is None, f"vLLM cannot be imported: {log.read_text()[-4000:]}"
                time.sleep(0.02)
    return str(address)


@functools.cache
def quicken() -> None:
    """Do once in a process, and for its forks, what vLLM does for every engine though nothing has changed.

    It collects garbage among all modules, sets the levels of all loggers, and looks for kernels that have a CPU's
    version.
    """
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging
    from vllm.platforms import current_platform

    from semkv_lab.local_engine import spare_modules

    spare_modules()
    configure_logging(LoggingConfig())
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)


def fork_always() -> None:
    """Let new processes be forks of this one, whatever vLLM asks for: a new interpreter would import it all again, and
    know nothing of what was replaced here."""
    import multiprocessing

    fork = multiprocessing.get_context("fork")
    for name in ("spawn", "forkserver"):
        multiprocessing.context._concrete_contexts[name] = fork  # type: ignore[attr-defined]


def be_plain() -> None:
    """In a fork: its own new processes are new interpreters, as in any Python."""
    from multiprocessing import context

    sys.executable = _REAL
    context._concrete_contexts |= {
        "spawn": context.SpawnContext(),
        "forkserver": context.ForkServerContext(),
    }  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- the process that forks


def _serve(folder: Path) -> None:
    """Until the run ends, however it does."""
    run = os.pidfd_open(int(os.environ[_RUN]))
    for name in _IMPORTED:
        with contextlib.suppress(ImportError):  # not installed, or broken: its own tests say so
            importlib.import_module(name)
    known = importlib.import_module(Path(__file__).stem)  # the module that programs know
    if importlib.util.find_spec("vllm"):
        known.quicken()
    fork_always()
    sys.executable = str(folder / "python")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "new"))
        server.listen(64)
        (folder / "new").rename(folder / "socket")
        while True:
            ready, *_ = select.select([server, run], [], [])
            if run in ready:
                break
            line, _ = server.accept()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if os.fork() == 0:
                server.close()
                _keep(line, run)
                break
            line.close()


def _keep(line: socket.socket, run: int) -> None:
    """In a fork: run the program in another, pass signals on, kill it when ``line`` or the test run ends, and answer
    with its exit status."""
    _, (text, *files), *_ = socket.recv_fds(line, 16, 250)
    with os.fdopen(text) as file:
        order = json.load(file)
    program = os.fork()
    if program == 0:
        line.close()
        os.close(run)
        _run(order, files)
        return
    for number in files:
        os.close(number)
    ended = os.pidfd_open(program)
    while ended not in (ready := select.select([ended, line, run], [], [])[0]):
        told = b"" if run in ready else line.recv(_NUMBER.size, socket.MSG_WAITALL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(program, _NUMBER.unpack(told)[0] if told else signal.SIGKILL)
        if not told:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program, signal.SIGKILL)
    with contextlib.suppress(OSError):
        line.sendall(_NUMBER.pack(status))
    os._exit(0)


def _run(order: dict[str, Any], files: list[int]) -> None:
    """The program, as Python runs it; the process ends here, or as Python ends it after an exception."""
    os.setsid()
    high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 500) for number in files]
    for number in files:
        os.close(number)
    for number, own in zip(high, order["files"], strict=True):
        os.dup2(number, own)
        os.close(number)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    arguments = order["command"]
    while arguments[0] not in ("-c", "-m"):
        arguments = arguments[1:]
    how, what, *rest = arguments
    sys.path[:0] = [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]  # noqa: PTH109
    sys.argv = [how, *rest]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if how == "-m":
            runpy._run_module_as_main(what)  # type: ignore[attr-defined]
        else:
            exec(compile(what, "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    else:
        status = 0
    # As Python ends, but for taking all those libraries apart, which takes half a second.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _stand_in(arguments: list[str]) -> int:
    """Run a program in a fork that has this process's open files and gets its signals."""
    if not {"-c", "-m"} & set(arguments[:2]):
        os.execv(_REAL, [_REAL, *arguments])
    files = [
        int(entry.name) for entry in Path("/proc/self/fd").iterdir() if _inherited(int(entry.name))
    ]
    order = {
        "command": arguments,
        "files": files,
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
    }
    line = socket.socket(socket.AF_UNIX)
    line.connect(_address())
    with tempfile.TemporaryFile("w+") as text:
        json.dump(order, text)
        text.seek(0)
        socket.send_fds(line, [b"order"], [text.fileno(), *files])
    for number in files:
        os.close(number)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, lambda number, _: line.sendall(_NUMBER.pack(number)))
    (status,) = _NUMBER.unpack(line.recv(_NUMBER.size, socket.MSG_WAITALL))
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _inherited(number: int) -> bool:
    with contextlib.suppress(OSError):
        return os.get_inheritable(number)
    return False


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        _serve(Path(os.environ[_FOLDER]))
    else:
        os._exit(_stand_in(sys.argv[1:]))
