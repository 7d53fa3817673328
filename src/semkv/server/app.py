"""The ASGI application: the two cached routes by hand, since they are the hot path; Starlette for the rest.

/v1/chat/completions, /v1/completions   answered from the cache where it can be
/healthz /readyz /metrics /openapi.json
/semkv                                  dashboard; /semkv/api: admin routes
anything else                           passed on
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from semkv.server.asgi import (
    Answer,
    TooLarge,
    TooSlow,
    Vanished,
    error_answer,
    read_body,
    reply,
    route_path,
    unless_gone,
)
from semkv.server.asked import ENDPOINTS
from semkv.server.gateway import Gateway
from semkv.server.salt import SALTED
from semkv.server.upstream import Application, Call, Receive, Scope, Send, UpstreamError

log = logging.getLogger(__name__)

_OWN = frozenset(("/healthz", "/readyz", "/metrics", "/openapi.json"))
_HOME = "/semkv"


class App:
    """The gateway as an ASGI application.

    Args:
        gateway: answers the cached routes.
        operations: answers ``/semkv`` and the operators' routes.
        own: paths outside ``/semkv`` that ``operations`` answers.
    """

    def __init__(self, gateway: Gateway, operations: Application, own: frozenset[str] = _OWN) -> None:
        self.gateway, self._operations, self._own = gateway, operations, own
        self._limit, self._limit_s = gateway.settings.bounds[0], gateway.settings.body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await lifespan(receive, send, self.gateway.aclose)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        elif scope["type"] == "http" and not await self.answered(scope, receive, send):
            await self._respond(scope, receive, send, cached=False)

    async def answered(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer what is ours: the cached routes, those that get a salt, the operators'. False for everything else."""
        path = route_path(scope)
        if scope["method"] == "POST" and (path in ENDPOINTS or path in SALTED):
            await self._respond({**scope, "path": path, "root_path": ""}, receive, send, cached=path in ENDPOINTS)
        elif path in self._own or path == _HOME or path.startswith(_HOME + "/"):
            await self._operations(scope, receive, send)
        else:
            return False
        return True

    async def _respond(self, scope: Scope, receive: Receive, send: Send, *, cached: bool) -> None:
        try:
            if not scope["path"].startswith("/"):  # such as `OPTIONS *`, which cannot be passed on
                await reply(error_answer(400, "no such path", "invalid_request_error"), send)
                return
            call = Call(scope, await read_body(scope, receive, self._limit, self._limit_s))
            answer = await (self._handle(call, receive) if cached else self.gateway.forward(call, receive, ""))
            if answer.stream is None:
                await reply(answer, send)
            else:
                await unless_gone(reply(answer, send), receive)
        except TooLarge:
            limit = self._limit >> 20
            message = f"the request is larger than {limit} MiB (--max-body-mib)"
            await reply(error_answer(413, message, "invalid_request_error"), send)
        except TooSlow:
            message = f"the request came too slowly: it has {self._limit_s:g} seconds and its length (--body-timeout)"
            await reply(error_answer(408, message, "invalid_request_error", [(b"connection", b"close")]), send)
        except (Vanished, UpstreamError):  # the latter breaks off in the middle of an answer: so does the connection
            pass

    async def _handle(self, call: Call, receive: Receive) -> Answer:
        try:
            return await self.gateway.handle(call, receive)
        except Vanished:
            raise
        except Exception:  # a fault of ours must not cost the answer
            log.exception("the gateway failed")
            self.gateway.metrics.fault("gateway")
            return await self.gateway.forward(call, receive, "fault")


async def lifespan(receive: Receive, send: Send, stop: Callable[[], Awaitable[None]]) -> None:
    """Answer the server's start and stop."""
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        else:
            await stop()
            await send({"type": "lifespan.shutdown.complete"})
            return
