"""Servers for tests of the gateway: on free ports of this machine, each with an event loop of its own."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from PIL import Image

from scripted_upstream import Scripted
from semkv_gateway.app import App, app_of
from semkv_gateway.serve import Protocol
from semkv_gateway.settings import ServerSettings

ADMIN = "an admin key of sufficient length"
SECRET = "a secret of sufficient length"


ONE, OTHER = "How do I bake sourdough bread at home?", "How can I bake sourdough bread at home?"
# Both servers share one busy process, where lookups may take longer than the upstream's answers.
PATIENT: dict[str, Any] = {"store_timeout": 60.0, "encoder_timeout": 60.0, "tiers": "all"}
_PATIENCE = {f"SEMKV_{name.upper()}": str(seconds) for name, seconds in PATIENT.items()}
NEAR = {"semantic": True, "similarity_threshold": 0.8, **PATIENT}
numbers = itertools.count()


class Served:
    """An ASGI application behind uvicorn, in a thread."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(
            app, log_level="critical", loop="uvloop", http=Protocol, ws="none", access_log=False, proxy_headers=False,
            timeout_graceful_shutdown=2,
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(
            target=lambda: asyncio.run(self.server.serve([self.socket])), daemon=True
        )

    def __enter__(self) -> Served:
        self.thread.start()
        wait_until(lambda: self.server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(120)
        self.socket.close()


class Started:
    """``semkv serve`` in a process of its own, without near-repeats unless ``--semantic`` is given.

    ``log`` is the file with what it says, ``files`` its soft and hard limit of open files.
    """

    def __init__(
        self,
        upstream: str,
        folder: Path,
        *flags: str,
        files: tuple[int, int] | None = None,
        **environment: str,
    ) -> None:
        self.log = folder / "log"
        command = [sys.executable, "-m", "semkv", "serve", "--port=0", f"--upstream={upstream}"]
        command += ["--no-semantic"] * ("--semantic" not in flags)
        with self.log.open("w") as out:
            self._process = subprocess.Popen(
                [*command, f"--cache-dir={folder / 'cache'}", *flags],
                stdout=out,
                stderr=out,
                env={**os.environ, "SEMKV_SECRET": SECRET, **_PATIENCE, **environment},
                preexec_fn=files and (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, files)),
            )

    def __enter__(self) -> Started:
        wait_until(
            lambda: "startup complete" in self.log.read_text() or self._process.poll() is not None
        )
        (self.url,) = re.findall(r"http://[\d.:]+(?=: upstream)", self.log.read_text())
        wait_until(
            lambda: self._listens() or self._process.poll() is not None
        )  # it says so a moment before it does
        return self

    def _listens(self) -> bool:
        there = httpx.URL(self.url)
        with socket.socket() as line:
            return line.connect_ex((there.host, there.port)) == 0

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """End it as an operator would; its exit code."""
        self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(120)
        finally:
            self._process.kill()


class Pair:
    """A gateway in front of a scripted upstream, or of another application."""

    def __init__(
        self,
        folder: Path,
        *,
        environment: dict[str, str] | None = None,
        upstream: Any = None,
        **settings: Any,
    ) -> None:
        self.upstream = upstream or Scripted()
        self.behind = Served(self.upstream)
        given = {
            "semantic": False,
            "cache_dir": folder,
            "upstreams": (self.behind.url,),
            **PATIENT,
            **settings,
        }
        variables = (
            {"SEMKV_ADMIN_KEY": ADMIN, "SEMKV_SECRET": SECRET}
            if environment is None
            else environment
        )
        self.app: App = app_of(ServerSettings(**given), variables)
        self.front = Served(self.app)
        self._pool = ThreadPoolExecutor(100)

    def __enter__(self) -> Pair:
        self.behind.__enter__()
        self.front.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.front.stop()
        self.behind.stop()

    @property
    def url(self) -> str:
        return self.front.url

    def client(self, key: str = "key", **more: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120, **more
        )

    def post(self, text: Any, *, headers: Any = None, **more: Any) -> httpx.Response:
        return httpx.post(
            f"{self.url}/v1/chat/completions", json=chat(text, **more), headers=headers, timeout=120
        )

    def soon(self, text: Any, **more: Any) -> Future[httpx.Response]:
        """The same in a thread of its own."""
        return self._pool.submit(self.post, text, **more)

    @property
    def asked(self) -> list[Any]:
        """What the upstream was asked."""
        return [body["messages"][-1]["content"] for body in self.upstream.calls]

    @property
    def readers(self) -> int:
        """How many wait for upstream answers."""
        return sum(len(flight.readers) for flight in list(self.app.gateway.flights.running))

    @property
    def semantic(self) -> Any:
        return self.app.gateway.cache.semantic

    @property
    def entries(self) -> int:
        return int(self.semantic.stats().entries)

    def settle(self) -> None:
        """Open the upstream again, wait until all work is done, and see that nothing was left behind or went wrong."""
        gateway, upstream = self.app.gateway, self.upstream
        upstream.script, upstream.hold_at = {}, 0
        upstream.gate.set()
        wait_until(
            lambda: (
                not gateway.background and not gateway.flights.running and not len(gateway.pending)
            )
        )
        wait_until(lambda: gateway.flights.held_bytes == 0)  # the last reader leaves after the end
        assert self.metric("semkv_faults_total") == 0
        upstream.calls.clear()

    def metric(self, name: str) -> float:
        """The sum over a metric's labels, or of those labels that ``name`` has, as Prometheus writes them."""
        lines = [
            line.rsplit(" ", 1)
            for line in httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        ]
        return sum(float(value) for said, value in lines if name in (said, said.split("{")[0]))

    def admin(self, path: str, body: Any = None, key: str = ADMIN) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{self.url}/semkv/api/{path}"
        method = "GET" if body is None else "POST"
        return httpx.request(method, url, json=body, headers=headers, timeout=60)


def chat(text: Any, **more: Any) -> dict[str, Any]:
    return {
        "model": "scripted",
        "temperature": 0,
        "messages": [{"role": "user", "content": text}],
        **more,
    }


def wait_until(ready: Any, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


async def reached(ready: Callable[[], object]) -> None:
    """The same for a coroutine."""
    async with asyncio.timeout(300):
        while not ready():
            await asyncio.sleep(0.01)


@contextmanager
def near_pair(folder: Path) -> Iterator[Pair]:
    """A gateway that answers near-repeats."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("semkv_gateway.cache_client._LOOKUP_S", 120.0)  # a busy machine is no fault
        with Pair(folder, **NEAR) as pair:
            yield pair


def a_tenant() -> dict[str, str]:
    """A tenant of its own for a test, so that it finds nothing of another's."""
    return {"Authorization": f"Bearer {next(numbers)}"}


def picture(color: Any, size: tuple[int, int] = (1, 1)) -> dict[str, Any]:
    """A part of a message: an image of one color."""
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def kind(answer: httpx.Response) -> str:
    """``hit``, ``miss``, ``joined`` or ``pass``."""
    return str(answer.headers["x-semkv"]).split()[0]


def said(answer: httpx.Response) -> str:
    """The text of an answer, streamed or not."""
    if not answer.text.startswith("data:"):
        return str(answer.json()["choices"][0]["message"]["content"])
    events = [
        json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")
    ]
    return "".join(c["delta"].get("content") or "" for e in events for c in e.get("choices", ()))


@contextmanager
def beside(pair: Pair, text: Any = ONE, **more: Any) -> Iterator[Future[httpx.Response]]:
    """A request that waits at the closed gate; it is opened at the end of the block, where that was not done before."""
    pair.upstream.gate.clear()
    before = len(pair.upstream.calls)
    done = pair.soon(text, **more)
    try:
        wait_until(lambda: len(pair.upstream.calls) > before)
        yield done
    finally:
        pair.upstream.gate.set()
        done.result()


def later(pair: Pair, text: Any, *, waits: bool, **more: Any) -> httpx.Response:
    """A request that comes while another is at the gate, which opens once this one waits as well.

    Args:
        waits: on the other's answer; else for its own.
    """
    calls, readers = len(pair.upstream.calls), pair.readers
    answer = pair.soon(text, **more)
    wait_until(lambda: pair.readers > readers if waits else len(pair.upstream.calls) > calls)
    pair.upstream.gate.set()
    return answer.result()


class Held:
    """Calls of a method that wait until they are let go, at the latest at the end of the block.

    Args:
        target, name: the method.
        which: of a call's first argument; others do not wait.
        after: they have done their work before they wait.
    """

    def __init__(
        self, target: Any, name: str, which: Callable[[Any], bool] = bool, *, after: bool = False
    ) -> None:
        self._patch, self.go, self.waiting = (
            pytest.MonkeyPatch(),
            threading.Event(),
            threading.Event(),
        )
        work = getattr(target, name)

        def slow(first: Any, *args: Any, **more: Any) -> Any:
            done = work(first, *args, **more) if after or not which(first) else None
            if which(first):
                self.waiting.set()
                self.go.wait()
            return done if done is not None else work(first, *args, **more)

        self._patch.setattr(target, name, slow)

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self._patch.undo()


def asks(text: str) -> Callable[[Any], bool]:
    """Whether a lookup is of this question."""
    return lambda request: request.segments[-1].text == text
