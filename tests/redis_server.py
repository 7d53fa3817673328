"""A real redis-server on a free port, for as long as a test needs it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from ports import free_port


class RedisServer:
    """Starts, kills and restarts a redis-server whose files live in ``folder``.

    Args:
        folder: for its append-only file.
        durable: every write is in that file before it is acknowledged, and outlives kill -9. It is not waited for the
            disk, which takes seconds where others write.
    """

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("needs a Redis server: apt-get install redis-server")
        pytest.importorskip("redis", reason="needs redis: pip install 'semkv[redis]'")
        self.port = free_port()
        keep = ("--appendonly", "yes", "--appendfsync", "no") if durable else ("--appendonly", "no")
        self._command = [
            program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--dir",
            str(folder),
        ]
        self._command += ["--save", "", *keep]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        import redis

        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        client = redis.Redis(port=self.port, socket_timeout=60.0)
        while not _answers(client):
            assert self._process.poll() is None, "redis-server did not start"
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
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _answers(client: Any) -> bool:
    import redis

    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
