"""HTTP at both ends: ASGI requests in and answers out, without a framework on the hot path, and the server behind.

Misses go to an `Upstream`: over HTTP (`HttpUpstream`), or into the wrapped ASGI application (`AppUpstream`). Both
answer with a `Reply` whose body comes in pieces.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import aiohttp
from yarl import URL

from semkv_gateway.outcome import Outcome

Headers = list[tuple[bytes, bytes]]
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")
EVENTS: tuple[bytes, bytes] = (b"content-type", b"text/event-stream; charset=utf-8")

_T = TypeVar("_T")
_BODY_S = 60.0  # for a body to come, and what its bytes take at the least rate
_LEAST_RATE = 16 << 10  # bytes a second; slower bodies hold a connection that others wait for

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
# `expect` was between the client and the gateway, which has the whole body already.
_OURS = frozenset(
    (b"host", b"expect", b"content-length", b"x-semkv-tenant", b"x-semkv-tags", b"x-semkv-bypass")
)
# They describe the client's body, and are wrong for the body that the gateway writes in its place.
_OF_BODY = frozenset(
    b"accept-encoding cache-control content-digest content-encoding content-md5 content-type digest"
    b" repr-digest".split()
)
_UTF_8 = frozenset(("", "charset=utf-8", 'charset="utf-8"'))
# An upstream may be a semkv too: then it speaks of its own cache in the last two.
_THEIRS = frozenset((b"content-length", b"x-semkv", b"x-semkv-hit"))
_CONTROL = re.compile(rb"[\0-\x08\x0a-\x1f\x7f]")  # uvicorn sends no header with one of these
_NAMES_REQUEST = (b"request-id", b"correlation-id")
_FIELD_BYTES = 64 << 10  # of one header of an answer
_READ_S = 600.0  # until the upstream's next byte
_IDLE_S = 3.0  # uvicorn closes idle connections after 5
_RETRY_S = 0.5
_QUEUED = 16  # pieces between the wrapped application and its reader


# -- requests and answers ----------------------------------------------------------------------------------------------


class Vanished(Exception):  # noqa: N818
    """The client hung up. ``outcome`` is what was known of its request."""

    outcome: Outcome | None = None


@dataclass(slots=True)
class Answer:
    """What goes back to the client: whole in ``body``, or piece by piece from ``stream``.

    ``close`` is called when all was sent, or the client hung up. Not ``ours``: what the upstream said to this request.
    """

    status: int
    headers: Headers
    body: bytes = b""
    stream: AsyncIterator[bytes] | None = None
    close: Callable[[], Awaitable[None]] | None = None
    ours: bool = True
    outcome: Outcome | None = None  # of the request; None where it was not read


class Refused(Exception):  # noqa: N818
    """A request that gets ``answer`` and is not read on."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer


def error_of(status: int, message: str, kind: str) -> dict[str, dict[str, Any]]:
    """An error as the OpenAI API words it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def error_answer(
    status: int, message: str, kind: str = "invalid_request_error", headers: Headers | None = None
) -> Answer:
    return Answer(
        status, [JSON, *(headers or ())], json.dumps(error_of(status, message, kind)).encode()
    )


def busy_answer(what: str) -> Answer:
    """There is no room for a request."""
    more: Headers = [(b"retry-after", b"1"), (b"connection", b"close")]
    return error_answer(503, f"too many {what} at once", "server_error", more)


def header(scope: Scope, name: bytes) -> str:
    """What a header says, several of one name joined by commas; an empty string without it. ``name`` in lower case."""
    found: bytes | None = None
    for key, value in scope["headers"]:
        if key == name:
            found = value if found is None else found + b"," + value
    return "" if found is None else found.decode("latin-1")


def is_event_stream(headers: Headers) -> bool:
    """Whether an answer is a stream of events that can be read: a compressed one passes as it is."""
    named = dict(headers)
    is_stream = named.get(b"content-type", b"").lower().startswith(b"text/event-stream")
    return is_stream and b"content-encoding" not in named


def route_path(scope: Scope) -> str:
    """The path without the ``root_path`` in front of it, which a proxy may or may not have taken off."""
    path = str(scope["path"])
    root = str(scope.get("root_path", "")).rstrip("/")
    return path[len(root) :] if root and path.startswith(root + "/") else path


class Bodies:
    """Reads the bodies of requests.

    Args:
        limit: bytes of one body.
        most: bytes of all bodies that are not whole yet.
    """

    def __init__(self, limit: int, *, most: int) -> None:
        self._limit = limit
        self._most = most
        self._unfinished = 0

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body. Raises `Refused` where it is too long, comes too slowly or finds no room, and `Vanished`
        where the client hung up first."""
        declared = header(scope, b"content-length")
        if declared.isdecimal() and int(declared) > self._limit:
            raise self._too_large()
        pieces = []
        size = 0
        held = 0
        more = True
        try:
            async with asyncio.timeout(_BODY_S) as timer:
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Vanished
                    piece = message.get("body", b"")
                    more = message.get("more_body", False)
                    pieces.append(piece)
                    size += len(piece)
                    if size > self._limit:
                        raise self._too_large()
                    if more:  # one that is there in one piece needs no room
                        held += len(piece)
                        self._unfinished += len(piece)
                        if self._unfinished > self._most:
                            raise Refused(busy_answer("bytes of unfinished bodies"))
                        timer.reschedule((timer.when() or 0.0) + len(piece) / _LEAST_RATE)
        except TimeoutError:
            slow = (
                f"the request came too slowly: it has {_BODY_S:g} seconds, and one for every 16 KiB"
            )
            raise Refused(error_answer(408, slow, headers=[(b"connection", b"close")])) from None
        finally:
            self._unfinished -= held
        return b"".join(pieces)

    def _too_large(self) -> Refused:
        said = f"the request is larger than {self._limit >> 20} MiB (--max-body-mib)"
        return Refused(error_answer(413, said))


async def unless_gone(work: Awaitable[_T], receive: Receive) -> _T:
    """Await ``work``, and cancel it when the client hangs up: then `Vanished` is raised."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Vanished
        return working.result()
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def reply(answer: Answer, send: Send) -> None:
    """Send an answer."""
    try:
        if answer.stream is None:
            headers = [*answer.headers, (b"content-length", str(len(answer.body)).encode())]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            await send({"type": "http.response.body", "body": answer.body})
            return
        await send(
            {"type": "http.response.start", "status": answer.status, "headers": answer.headers}
        )
        async for piece in answer.stream:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        if answer.close is not None:
            await answer.close()


# -- the server behind -------------------------------------------------------------------------------------------------


class UpstreamError(Exception):
    """The upstream could not be reached, or broke off. ``status`` is the client's: 502 or 504. Not ``begun``: the
    upstream knows nothing of the request, so another one may be asked."""

    def __init__(self, message: str, status: int = 502, *, begun: bool = True) -> None:
        super().__init__(message)
        self.status = status
        self.begun = begun


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the upstream, by the client's ASGI scope. ``canonical``: the body was written by the gateway, and
    the answer must come uncompressed."""

    scope: Scope
    body: bytes
    canonical: bool = False

    def with_body(self, body: bytes) -> Call:
        return replace(self, body=body, canonical=True)

    def headers(self) -> Headers:
        """What to send: without hop-by-hop fields and those that are meant for the gateway."""
        own = _OF_BODY if self.canonical else frozenset()
        kept = _passed_on(self.scope["headers"], _OURS | own)
        return [*kept, JSON, (b"accept-encoding", b"identity")] if self.canonical else kept


def is_json(content_type: str) -> bool:
    """Whether a body is JSON in UTF-8. An upstream may read one that names other letters in another way.

    >>> [is_json(name) for name in ("application/json", "application/json; charset=UTF-8")]
    [True, True]
    >>> is_json("application/json; charset=utf-7")
    False
    """
    if content_type == "application/json":  # as nearly all are
        return True
    words = content_type.lower().replace(" ", "").split(";")
    return words[0] == "application/json" and _UTF_8.issuperset(words[1:])


def _passed_on(headers: Iterable[tuple[bytes, bytes]], drop: frozenset[bytes]) -> Headers:
    """Headers that go on to the other side, with names in lower case."""
    low = [(name.lower(), value) for name, value in headers]
    named = {
        word.strip().lower()
        for name, value in low
        if name == b"connection"
        for word in value.split(b",")
    }
    drop |= _HOP_BY_HOP | named
    return [(name, value) for name, value in low if name not in drop]


def for_others(headers: Headers) -> Headers:
    """An answer's headers without those that are meant for who asked for it."""
    return [
        (k, v)
        for k, v in headers
        if not (k.startswith((b"access-control-", b"trace")) or k.endswith(_NAMES_REQUEST))
    ]


def _text(value: bytes) -> str:
    """A header's value as aiohttp takes it. It writes UTF-8, so what was UTF-8 goes on byte for byte."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


class Reply(Protocol):
    """An answer that is coming in. Names of ``headers`` are in lower case."""

    status: int
    headers: Headers

    def pieces(self) -> AsyncIterator[bytes]:
        """The body. Raises `UpstreamError` when it breaks off."""

    async def aclose(self) -> None:
        """Must be called, also before the end: it tells the upstream to stop."""


class _HttpReply:
    """The answer of a server."""

    def __init__(self, response: aiohttp.ClientResponse, base: bytes) -> None:
        self._response = response
        self.status = response.status
        # A redirect to the upstream itself is one to the same path of the gateway.
        self.headers = [
            (
                k,
                v.removeprefix(base)
                if k.endswith(b"location") and v.startswith(base + b"/")
                else v,
            )
            for k, v in _passed_on(
                ((k, _CONTROL.sub(b" ", v)) for k, v in response.raw_headers), _THEIRS
            )
        ]

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body. Raises `UpstreamError` when it breaks off."""
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
    """An OpenAI-compatible server at a URL."""

    def __init__(self, url: str, *, connect_s: float) -> None:
        self._base = url.rstrip("/")
        self.name = self._base.partition("://")[2]
        self._timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=connect_s,
            sock_read=_READ_S,
        )
        self._session: aiohttp.ClientSession | None = None

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:  # needs the running loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                timeout=self._timeout,
                max_field_size=_FIELD_BYTES,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._session

    async def send(self, call: Call) -> _HttpReply:
        """Send a request; returns when the headers of the answer are there. Raises `UpstreamError` without one."""
        start = time.monotonic()
        sent_before = False
        try:
            try:
                response = await self._request(call)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                # Perhaps it closed an idle connection just as we took it. What it has done by then cannot be known, and
                # aiohttp repeats only what HTTP calls idempotent; a completion may be asked for again all the same.
                made = not isinstance(error, aiohttp.ClientConnectorError)
                if not (made and call.canonical and time.monotonic() - start <= _RETRY_S):
                    raise
                sent_before = True
                response = await self._request(call)
        except aiohttp.ConnectionTimeoutError:
            late = "the upstream did not answer in time"
            raise UpstreamError(late, 504, begun=sent_before) from None
        except TimeoutError:
            raise UpstreamError("the upstream did not answer in time", 504) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            why = f"the upstream cannot be reached: {type(error).__name__}"
            connected = not isinstance(error, aiohttp.ClientConnectorError)
            raise UpstreamError(why, begun=connected or sent_before) from None
        if not 200 <= response.status < 600:
            response.close()
            raise UpstreamError(f"the upstream answered with status {response.status}")
        return _HttpReply(response, self._base.encode())

    async def _request(self, call: Call) -> aiohttp.ClientResponse:
        scope = call.scope
        path = scope.get("raw_path") or scope["path"].encode()
        query = b"?" + scope["query_string"] if scope.get("query_string") else b""
        return await self._client().request(
            scope["method"],
            URL(self._base + (path + query).decode("latin-1"), encoded=True),
            data=call.body or None,
            headers=[(k.decode("latin-1"), _text(v)) for k, v in call.headers()],
            allow_redirects=False,
        )

    async def ready(self) -> bool:
        """Whether it would answer now."""
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

    status = 0
    headers: Headers

    def __init__(self, app: Application, call: Call) -> None:
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(_QUEUED)
        self._gone = asyncio.Event()  # nobody reads on
        self._body: bytes | None = call.body
        self._ended = False
        headers = [*call.headers(), (b"content-length", str(len(call.body)).encode())]
        headers += [(k, v) for k, v in call.scope["headers"] if k == b"host"]
        self._task = asyncio.ensure_future(self._run(app, {**call.scope, "headers": headers}))

    async def _run(self, app: Application, scope: Scope) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            if not self._ended:
                await self._send(None)

    async def _receive(self) -> Message:
        if self._body is None:
            await self._gone.wait()
            return {"type": "http.disconnect"}
        body = self._body
        self._body = None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: Message | None) -> None:
        if not self._gone.is_set():
            await self._messages.put(message)

    async def started(self) -> None:
        message = await self._messages.get()
        if message is None:
            raise UpstreamError("the application failed")
        self.status = message["status"]
        self.headers = _passed_on(message.get("headers", ()), _THEIRS)

    async def pieces(self) -> AsyncIterator[bytes]:
        while not self._ended:
            message = await self._messages.get()
            if message is None:
                raise UpstreamError("the application broke off")
            self._ended = not message.get("more_body")
            if body := message.get("body"):
                yield body

    async def aclose(self) -> None:
        """Say that the client hung up, by which vLLM aborts a generation; what does not end by that is canceled."""
        self._gone.set()
        while not self._messages.empty():  # it may wait for room
            self._messages.get_nowait()
        try:
            await asyncio.wait((self._task,), timeout=5.0)
        finally:
            if not self._ended:
                self._task.cancel()
        if self._task.done() and not self._task.cancelled():
            self._task.exception()


class AppUpstream:
    """The application that `semkv_gateway.Middleware` wraps, called in this process."""

    name = "application"

    def __init__(self, app: Application) -> None:
        self._app = app

    async def send(self, call: Call) -> _AppReply:
        """As `HttpUpstream` does."""
        reply = _AppReply(self._app, call)
        try:
            await reply.started()
        except BaseException:
            await reply.aclose()
            raise
        return reply

    async def ready(self) -> bool:
        return True

    async def aclose(self) -> None:
        pass


class BegunReply:
    """An answer of which the first bytes were read already."""

    status: int
    headers: Headers

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._pieces = reply.pieces()
        self._read: list[bytes] = []
        self.status = reply.status
        self.headers = reply.headers

    async def read(self, most: int) -> bytes:
        """The body, or about so many bytes of it. Raises as `pieces` does."""
        size = 0
        async for piece in self._pieces:
            self._read.append(piece)
            size += len(piece)
            if size >= most:
                break
        return b"".join(self._read)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body from its start."""
        for piece in self._read:
            yield piece
        async for piece in self._pieces:
            yield piece

    async def aclose(self) -> None:
        await self._reply.aclose()


Upstream = HttpUpstream | AppUpstream
"""Where misses go."""
