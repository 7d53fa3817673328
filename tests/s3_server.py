"""An S3 server of this machine: moto's, in a process and an environment of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self
from unittest.mock import patch

import httpx

from ports import free_port

UV = shutil.which(
    "uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
)
# Its library for AWS needs an earlier python-dateutil than matplotlib does.
_RUN = ["tool", "run", "--quiet", "--from", "moto[s3]==5.2.5", "--with", "flask", "--with", "flask-cors"]  # fmt: skip


class S3Server:
    """Listens on a free port, with a bucket ``blocks``, and is what obstore finds in the environment. A context
    manager."""

    def __init__(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [str(UV), *_RUN, "moto_server", "--host", "127.0.0.1", "--port", str(port)]
        # uv starts it as a child of its own, which ends with the group.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        until = time.monotonic() + 300.0
        while not self._answers():
            assert time.monotonic() < until, "the S3 server does not answer"
            time.sleep(0.1)
        self._environment = patch.dict(os.environ, self.environment())
        self._environment.start()
        httpx.put(f"{self.url}/blocks").raise_for_status()
        return self

    @property
    def pid(self) -> int:
        """Of its process group."""
        return self._process.pid

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the S3 server has ended"
        try:
            return httpx.get(self.url).is_success
        except httpx.TransportError:
            return False

    def __exit__(self, *_: object) -> None:
        self._environment.stop()
        self.kill()

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "us-east-1",
        }
