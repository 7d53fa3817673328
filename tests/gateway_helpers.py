"""Servers for tests of the gateway: on free ports of this machine, each with an event loop of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from scripted_upstream import Scripted
from semkv.server.app import App, app_of
from semkv.server.serve import Protocol
from semkv.server.settings import ServerSettings

ADMIN = "an admin key of sufficient length"
SECRET = "a secret of sufficient length"


class Served:
    """An ASGI application behind uvicorn, in a thread."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        config = uvicorn.Config(
            app, log_level="critical", loop="uvloop", http=Protocol, access_log=False, proxy_headers=False,
            timeout_graceful_shutdown=2,
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve([self.socket])), daemon=True)

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


class Pair:
    """A gateway in front of a scripted upstream."""

    def __init__(self, folder: Path, *, environment: dict[str, str] | None = None, **settings: Any) -> None:
        self.upstream = Scripted()
        self.behind = Served(self.upstream)
        patient = {"connect_timeout": 60.0}  # both servers share one busy process
        given = {"semantic": False, "cache_dir": folder, "upstream": self.behind.url, **patient, **settings}
        variables = {"SEMKV_ADMIN_KEY": ADMIN, "SEMKV_SECRET": SECRET} if environment is None else environment
        self.app: App = app_of(ServerSettings(**given), variables)
        self.front = Served(self.app)

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
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20, **more)

    def post(self, text: str, *, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/chat/completions", json=chat(text, **more), headers=headers, timeout=20)

    def metric(self, name: str) -> float:
        """The sum over a metric's labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def admin(self, path: str, body: Any = None, key: str = ADMIN) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{self.url}/semkv/api/{path}"
        method = "GET" if body is None else "POST"
        return httpx.request(method, url, json=body, headers=headers, timeout=60)


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "scripted", "temperature": 0, "messages": [{"role": "user", "content": text}], **more}


def wait_until(ready: Any, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
