"""The few pieces of ASGI that the hot path needs, without a framework: bodies in, answers out."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

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
_ENCODING = b"content-encoding"
_GZIP = 16 + zlib.MAX_WBITS


class Vanished(Exception):  # noqa: N818
    """The client hung up."""


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


def error_of(status: int, message: str, kind: str) -> dict[str, dict[str, Any]]:
    """An error as the OpenAI API words it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def error_answer(status: int, message: str, kind: str, headers: Headers | None = None) -> Answer:
    """An error as an answer."""
    return Answer(status, [JSON, *(headers or ())], json.dumps(error_of(status, message, kind)).encode())


class Refused(Exception):  # noqa: N818
    """A request that gets ``answer`` and is not read on."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


def header(scope: Scope, name: bytes) -> str:
    """What a header says, several of one name joined by commas; an empty string without it. ``name`` in lower case."""
    found = [value for key, value in scope["headers"] if key == name]
    return b",".join(found).decode("latin-1") if found else ""


def route_path(scope: Scope) -> str:
    """The path without the ``root_path`` in front of it, which a proxy may or may not have taken off; as Starlette
    reads it."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def is_plain_json(scope: Scope) -> bool:
    """The body is JSON by its content type: what any server reads in one way."""
    return header(scope, b"content-type").partition(";")[0].strip().lower() == "application/json"


@dataclass(slots=True)
class Room:
    """Bytes of the bodies that are coming in or were compressed: at most so many, and how many there are."""

    most: int
    used: int = 0


def busy_answer(what: str) -> Answer:
    """There is no room for a request."""
    more: Headers = [(b"retry-after", b"1"), (b"connection", b"close")]
    return error_answer(503, f"too many {what} at once", "server_error", more)


async def read_body(scope: Scope, receive: Receive, limit: int, room: Room) -> bytes:
    """The whole body.

    Raises:
        Refused: it is longer than ``limit`` bytes, or says so; or it was not there after `_BODY_S` seconds and what
            its bytes take at `_LEAST_RATE`; or there is no room for more of it.
        Vanished: the client hung up first.
    """
    declared = header(scope, b"content-length")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    pieces, size, held, more = [], 0, 0, True
    try:
        async with asyncio.timeout(_BODY_S) as timer:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Vanished
                piece, more = message.get("body", b""), message.get("more_body", False)
                pieces.append(piece)
                size += len(piece)
                if size > limit:
                    raise _too_large(limit)
                if more:  # one that is there in one piece needs no room
                    held += len(piece)
                    room.used += len(piece)
                    if room.used > room.most:
                        raise Refused(busy_answer("bytes of unfinished bodies"))
                    timer.reschedule((timer.when() or 0.0) + len(piece) / _LEAST_RATE)
    except TimeoutError:
        slow = f"the request came too slowly: it has {_BODY_S:g} seconds, and one for every 16 KiB"
        raise Refused(error_answer(408, slow, "invalid_request_error", [(b"connection", b"close")])) from None
    finally:
        room.used -= held
    return b"".join(pieces)


def is_packed(scope: Scope) -> bool:
    """The body came in an encoding."""
    return header(scope, _ENCODING).strip().lower() not in ("", "identity")


@asynccontextmanager
async def unpacked(scope: Scope, body: bytes, limit: int, room: Room) -> AsyncIterator[tuple[Scope, bytes]]:
    """A request whose body `is_packed`, as it would have come without. It takes room while the context is open.

    Raises:
        Refused: the encoding is not gzip, the body is no whole gzip stream or holds more than ``limit`` bytes, or there
            is no room for it.
    """
    encoding = header(scope, _ENCODING).strip().lower()
    if encoding not in ("gzip", "x-gzip"):
        said = f"the content encoding {encoding[:40]!r} is not read: send the body with gzip, or as it is"
        raise Refused(error_answer(415, said, "invalid_request_error", [(b"accept-encoding", b"gzip")]))
    plain = await asyncio.to_thread(_gunzip, body, limit)
    room.used += len(plain)
    try:
        if room.used > room.most:
            raise Refused(busy_answer("bytes of compressed bodies"))
        yield {**scope, "headers": [pair for pair in scope["headers"] if pair[0] != _ENCODING]}, plain
    finally:
        room.used -= len(plain)


def _gunzip(body: bytes, limit: int) -> bytes:
    packed = zlib.decompressobj(_GZIP)
    try:
        plain = packed.decompress(body, limit + 1)
    except zlib.error:
        plain = b""
    if len(plain) > limit:
        raise _too_large(limit)
    if not packed.eof or packed.unused_data:
        raise Refused(error_answer(400, "the body is not one whole gzip stream", "invalid_request_error"))
    return plain


def _too_large(limit: int) -> Refused:
    message = f"the request is larger than {limit >> 20} MiB (--max-body-mib)"
    return Refused(error_answer(413, message, "invalid_request_error"))


async def unless_gone(work: Awaitable[_T], receive: Receive) -> _T:
    """Await ``work``, and cancel it when the client hangs up.

    Raises:
        Vanished: it did.
    """
    own, gone = asyncio.current_task(), False
    assert own is not None

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        own.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not gone or own.cancelling() > 1:
            raise
        raise Vanished from None
    finally:
        watching.cancel()
        if gone:
            own.uncancel()


async def reply(answer: Answer, send: Send) -> None:
    """Send an answer."""
    try:
        if answer.stream is None:
            headers = [*answer.headers, (b"content-length", str(len(answer.body)).encode())]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            await send({"type": "http.response.body", "body": answer.body})
            return
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        async for piece in answer.stream:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        if answer.close is not None:
            await answer.close()
