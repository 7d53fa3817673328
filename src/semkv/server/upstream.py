"""The server behind the cache: over HTTP (`HttpUpstream`), or the wrapped ASGI application (`AppUpstream`).

Both are asked through one call, `Upstream.send`, and answer with a `Reply` whose body comes in pieces.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import aiohttp
import anyio
from yarl import URL

from semkv.server.asgi import Application, Headers, Message, Scope

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
# `expect` was between the client and the gateway, which has the whole body already.
_OURS = frozenset((b"host", b"expect", b"content-length", b"x-semkv-tenant", b"x-semkv-tags", b"x-semkv-bypass"))
_PLACES = frozenset((b"location", b"content-location"))
_NOT_KEPT = frozenset((b"content-length", b"x-semkv"))
_NAMES_REQUEST = (b"request-id", b"correlation-id")
_IDLE_S = 3.0  # uvicorn closes idle connections after 5
_RETRY_S = 0.5
_QUEUED = 16  # pieces between the wrapped application and its reader


class UpstreamError(Exception):
    """The upstream could not be reached, or broke off. ``status`` is what the client is told: 502 or 504."""

    def __init__(self, message: str, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the upstream.

    Attributes:
        scope: the client's ASGI scope: method, path, query, headers.
        body: the whole body.
        canonical: the body was written by the gateway, and the answer must come uncompressed.
    """

    scope: Scope
    body: bytes
    canonical: bool = False

    def with_body(self, body: bytes) -> Call:
        return replace(self, body=body, canonical=True)

    def headers(self) -> Headers:
        """What to send: without hop-by-hop fields and those that are meant for the gateway."""
        named = {name.strip().lower() for k, v in self.scope["headers"] if k == b"connection" for name in v.split(b",")}
        drop = _HOP_BY_HOP | _OURS | named
        if self.canonical:
            drop |= {b"accept-encoding", b"content-encoding", b"cache-control"}
        kept = [(k, v) for k, v in self.scope["headers"] if k not in drop]
        return [*kept, (b"accept-encoding", b"identity")] if self.canonical else kept


class Reply(Protocol):
    """An answer that is coming in. ``aclose`` must be called, also before the end: it tells the upstream to stop."""

    status: int
    headers: Headers

    def pieces(self) -> AsyncIterator[bytes]:
        """The body. Raises `UpstreamError` when it breaks off."""
        ...

    async def aclose(self) -> None: ...


class Upstream(Protocol):
    """Where misses go."""

    async def send(self, call: Call) -> Reply:
        """Send a request; returns when the headers of the answer are there.

        Raises:
            UpstreamError: there is no answer.
        """
        ...

    async def ready(self) -> bool:
        """Whether the upstream would answer now."""
        ...

    async def aclose(self) -> None: ...


def kept_headers(headers: Headers) -> Headers:
    """An answer's headers without hop-by-hop fields, the length, which the server in front sets, and what another semkv
    says of its cache."""
    return [(k, v) for k, v in headers if (low := k.lower()) not in _HOP_BY_HOP and low not in _NOT_KEPT]


def for_others(headers: Headers) -> Headers:
    """An answer's headers without those that are meant for who asked for it."""
    return [
        (k, v) for k, v in headers if not (k.startswith((b"access-control-", b"trace")) or k.endswith(_NAMES_REQUEST))
    ]


def _text(value: bytes) -> str:
    """A header's value as aiohttp takes it. It writes UTF-8, so what was UTF-8 goes on byte for byte."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _outside(location: bytes, asked: URL, base: URL) -> bytes:
    """A redirect as the client can follow it: one to the upstream itself is a path of the gateway's.

    Args:
        location: where to, as the upstream says it.
        asked: the URL that it answers.
        base: of the upstream.
    """
    try:
        target = asked.join(URL(location.decode("latin-1"), encoded=True))
        if target.origin() != base.origin():
            return location
    except ValueError:  # no URL
        return location
    path, before = str(target.relative()), base.raw_path.rstrip("/")
    path = path[len(before) :] if path.startswith(before + "/") else path
    return b"/" + path.lstrip("/\\").encode("latin-1")  # with two slashes it would be another host


class _HttpReply:
    def __init__(self, response: aiohttp.ClientResponse, base: URL) -> None:
        self._response = response
        self.status = response.status
        headers = kept_headers([(k.lower(), v) for k, v in response.raw_headers])
        self.headers = [(k, _outside(v, response.url, base) if k in _PLACES else v) for k, v in headers]

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            async for piece in self._response.content.iter_any():
                yield piece
        except TimeoutError:
            raise UpstreamError("the upstream stopped answering", 504) from None
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamError(f"the upstream broke off: {type(error).__name__}") from None

    async def aclose(self) -> None:
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class HttpUpstream:
    """An OpenAI-compatible server at a URL.

    Args:
        url: scheme, host and port, and a path before ``/v1`` where there is one.
        connect_s: how long to wait for a connection.
        read_s: how long to wait for the next byte.
    """

    def __init__(self, url: str, connect_s: float, read_s: float) -> None:
        self._base = url.rstrip("/")
        self._base_url = URL(self._base)
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s, sock_read=read_s)
        self._session: aiohttp.ClientSession | None = None

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:  # needs the running loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                timeout=self._timeout,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._session

    def _url(self, scope: Scope) -> URL:
        path = scope.get("raw_path") or scope["path"].encode()
        query = b"?" + scope["query_string"] if scope.get("query_string") else b""
        return URL(self._base + (path + query).decode("latin-1"), encoded=True)

    async def send(self, call: Call) -> Reply:
        headers = [(k.decode("latin-1"), _text(v)) for k, v in call.headers()]
        method, url, data = call.scope["method"], self._url(call.scope), call.body or None
        start = time.monotonic()
        try:
            try:
                response = await self._client().request(method, url, data=data, headers=headers, allow_redirects=False)
            except aiohttp.ServerDisconnectedError:
                # Perhaps it closed an idle connection just as we took it. What it has done by then cannot be known, and
                # aiohttp repeats what HTTP calls idempotent alone; a completion may be asked for again all the same.
                if not call.canonical or time.monotonic() - start > _RETRY_S:
                    raise
                response = await self._client().request(method, url, data=data, headers=headers, allow_redirects=False)
        except TimeoutError:
            raise UpstreamError("the upstream did not answer in time", 504) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise UpstreamError(f"the upstream cannot be reached: {type(error).__name__}") from None
        return _HttpReply(response, self._base_url)

    async def ready(self) -> bool:
        scope = {"method": "GET", "path": "/health", "headers": []}
        try:
            reply = await asyncio.wait_for(self.send(Call(scope, b"")), 2.0)
            await reply.aclose()
        except (UpstreamError, TimeoutError):
            return False
        return reply.status < 500

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


class _AppReply:
    """The answer of an application that runs in a task of its own."""

    def __init__(self, app: Application, call: Call) -> None:
        self.status = 0
        self.headers: Headers = []
        self._sending, self._receiving = anyio.create_memory_object_stream[bytes](_QUEUED)
        self._started, self._gone = asyncio.Event(), asyncio.Event()
        self._ended = False
        self._body: bytes | None = call.body
        headers = [*call.headers(), (b"content-length", str(len(call.body)).encode())]
        headers += [(k, v) for k, v in call.scope["headers"] if k == b"host"]
        self._task = asyncio.ensure_future(self._run(app, {**call.scope, "headers": headers}))

    async def _run(self, app: Application, scope: Scope) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            self._started.set()
            self._sending.close()

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = kept_headers([(k.lower(), v) for k, v in message.get("headers", ())])
            self._started.set()
        elif message["type"] == "http.response.body":
            if body := message.get("body"):
                with suppress(anyio.BrokenResourceError):  # nobody reads on
                    await self._sending.send(body)
            if not message.get("more_body"):
                self._ended = True
                self._sending.close()

    async def started(self) -> None:
        await self._started.wait()
        if not self.status:
            await self.aclose()
            raise UpstreamError("the application failed")

    async def pieces(self) -> AsyncIterator[bytes]:
        async for piece in self._receiving:
            yield piece
        if not self._ended:
            raise UpstreamError("the application broke off")

    async def aclose(self) -> None:
        self._gone.set()
        self._receiving.close()
        if not self._ended:
            self._task.cancel()
        await asyncio.wait((self._task,), timeout=5.0)
        if self._task.done() and not self._task.cancelled():
            self._task.exception()


class AppUpstream:
    """The application that `semkv.server.Middleware` wraps, called in this process."""

    def __init__(self, app: Application) -> None:
        self._app = app

    async def send(self, call: Call) -> Reply:
        reply = _AppReply(self._app, call)
        try:
            await reply.started()
        except asyncio.CancelledError:
            await reply.aclose()
            raise
        return reply

    async def ready(self) -> bool:
        return True

    async def aclose(self) -> None:
        pass
