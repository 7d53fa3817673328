"""vLLM's own server on a free port, for tests; a run that is killed leaves none behind."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from bound import Bound
from ports import free_port

ROOT = Path(__file__).parents[1]
MODULE = ["-m", "vllm.entrypoints.openai.api_server"]
_PLAIN = [
    "--enforce-eager",
    "--kv-cache-memory-bytes",
    str(1 << 28),
    "--enable-prompt-tokens-details",
]
_START_S = 1200.0


class VllmServer:
    """A server that starts; `ready` waits for it.

    Args:
        command: that serves a model; host, port and what makes a start quick are added.
        log: file for what it prints.
        environment: variables beside this process's own.
    """

    def __init__(self, command: Sequence[str], log: Path, **environment: str) -> None:
        port = free_port()
        self.url, self._log = f"http://127.0.0.1:{port}", log
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
        with log.open("w") as printed:
            whole = [*command, "--host", "127.0.0.1", "--port", str(port), *_PLAIN]
            self._process = Bound(whole, cwd=ROOT, stdout=printed, stderr=printed, env=variables)

    def ready(self) -> VllmServer:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._process.running:
            try:
                httpx.get(f"{self.url}/health", timeout=2).raise_for_status()
            except httpx.HTTPError:
                time.sleep(0.5)
            else:
                return self
        raise AssertionError(f"the server did not start: {self._log.read_text()[-2000:]}")

    def stop(self) -> None:
        self._process.stop()

    def __enter__(self) -> VllmServer:
        try:
            return self.ready()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()
