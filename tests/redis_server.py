"""A real redis-server on a free port, for as long as a test needs it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest


class RedisServer:
    """Starts, kills and restarts a redis-server whose files live in ``folder``.

    Args:
        folder: for its append-only file.
        durable: every write is on disk before it is acknowledged.
    """

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("redis-server is not installed")
        pytest.importorskip("redis")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        keep = ("--appendonly", "yes", "--appendfsync", "always") if durable else ("--appendonly", "no")
        self._command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command += ["--save", "", *keep]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        import redis

        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        client = redis.Redis(port=self.port, socket_timeout=1.0)
        end = time.monotonic() + 10.0
        while True:
            try:
                client.ping()
                break
            except redis.RedisError:
                assert time.monotonic() < end, "redis-server did not start"
                time.sleep(0.02)
        client.close()

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """It holds its connections and answers nothing."""
        import signal

        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        import signal

        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
