"""The processes of the demo: engines of vLLM, vLLM's own server, and the gateway.

Importing vLLM takes far longer than starting a small engine. So one process imports it, and each engine is a fork of
that process, which never has an engine itself: what an engine keeps in memory ends with it.
"""

from __future__ import annotations

import contextlib
import http.client
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semkv.engines import EnginePrompt, EngineResult
from semkv.errors import EngineError, SemkvError

if TYPE_CHECKING:
    from semkv_lab.vllm_engine import VllmOptions

HOST = "127.0.0.1"
_PRELOADED = [
    "semkv_demo.model",
    "semkv_lab.vllm_engine",
    "transformers.models.llava.modeling_llava",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
]
_PRINTED = (1, 2)  # standard output and error
_START_S = 600.0
_STOP_S = 60.0
_LOOK_S = 0.05


def make_context(log: Path) -> Any:
    """The context in which processes begin with vLLM imported. What the import prints goes to a file."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    own = [os.dup(number) for number in _PRINTED]
    sys.stdout.flush()
    try:
        _print_to(log)
        ensure_running()
    finally:
        for number, before in zip(_PRINTED, own, strict=True):
            os.dup2(before, number)
            os.close(before)
    return context


def _print_to(log: Path) -> None:
    """Have all that this process prints, also from C, in a file."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    for number in _PRINTED:
        os.dup2(file, number)
    os.close(file)


# -- engines ------------------------------------------------------------


class Engine:
    """A `VllmEngine` in a process of its own. `ready` waits for it, `close` stores what it computed and ends it."""

    def __init__(self, context: Any, options: VllmOptions, log: Path) -> None:
        self._log = log
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, options, log))
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        self._receive()

    def ask(self, prompt: EnginePrompt) -> EngineResult:
        self._line.send(prompt)
        result: EngineResult = self._receive()
        return result

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._line.send(None)
        self._process.join(_STOP_S)
        self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._line.close()

    def _receive(self) -> Any:
        try:
            found = self._line.recv()
        except (EOFError, OSError):
            raise EngineError(f"an engine of the demo ended; its log is {self._log}") from None
        if isinstance(found, SemkvError):
            raise found
        return found


def _work(line: Connection, options: VllmOptions, log: Path) -> None:
    """Of an engine's process: answer prompts until there are no more."""
    from semkv_lab.vllm_engine import VllmEngine

    _print_to(log)
    try:
        engine = VllmEngine(options)
        with contextlib.closing(engine), contextlib.suppress(EOFError):
            line.send(None)
            while (prompt := line.recv()) is not None:
                line.send(engine.generate(prompt))
    except SemkvError as error:
        line.send(EngineError(str(error)))


# -- servers ------------------------------------------------------------


class Server:
    """A command that answers over HTTP. `ready` waits for it, `stop` ends it."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        port: int,
        log: Path,
    ) -> None:
        self.port = port
        self._log = log
        command = [sys.executable, "-m", module, *arguments, "--host", HOST, "--port", str(port)]
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )

    def ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SemkvError(f"a server of the demo did not start; its log is {self._log}")
            time.sleep(_LOOK_S)

    def page(self, path: str) -> str:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=_START_S)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return connection.getresponse().read().decode()

    def stop(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.page("/metrics"))
        return False


def free_port() -> int:
    """A port that nobody listens on, below those that systems give to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind((HOST, port))
            return port
