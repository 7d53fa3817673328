"""A proxy that passes requests on and does nothing else: what any gateway on uvicorn and aiohttp adds at least.

UPSTREAM=http://127.0.0.1:9000 python -m uvicorn --app-dir bench passthrough:app --port 9001
"""

from __future__ import annotations

import os
from typing import Any

import aiohttp

_DROP = (b"host", b"content-length", b"accept-encoding")


class Passthrough:
    """The ASGI application."""

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._session: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while (message := await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if self._session is None:
            jar, connector = aiohttp.DummyCookieJar(), aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=jar, auto_decompress=False)
        headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"] if k not in _DROP]
        url = self._upstream + scope["path"]
        async with self._session.request(scope["method"], url, data=body or None, headers=headers) as answer:
            whole = await answer.read()
            kind = answer.headers.get("content-type", "").encode("latin-1")
            told = [(b"content-type", kind), (b"content-length", str(len(whole)).encode())]
            await send({"type": "http.response.start", "status": answer.status, "headers": told})
            await send({"type": "http.response.body", "body": whole})


app = Passthrough(os.environ.get("UPSTREAM", ""))
