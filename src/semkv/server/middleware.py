"""The gateway inside vLLM: ``vllm serve MODEL --middleware semkv.server.Middleware``.

vLLM makes the middleware with the application it wraps and nothing else, so settings come from the environment (see
`semkv.server.settings`). The same core answers; the upstream is the wrapped application, called in this process.
"""

from __future__ import annotations

import logging
import os

from semkv.config import Variables, parse
from semkv.server.app import App
from semkv.server.assemble import gateway_of
from semkv.server.operations import Operations
from semkv.server.settings import ServerSettings, admin_key
from semkv.server.upstream import Application, AppUpstream, Message, Receive, Scope, Send

log = logging.getLogger(__name__)


class Middleware:
    """ASGI middleware that answers repeated and near-repeated requests from the cache.

    Operators' routes are below ``/semkv`` alone: ``/metrics`` and ``/health`` stay the application's own.

    Args:
        app: the application.

    Raises:
        ConfigError: a variable does not fit.
        StoreError: a store cannot be opened.
    """

    def __init__(self, app: Application) -> None:
        self._wrapped = app
        gateway = gateway_of(parse(ServerSettings, [], Variables(os.environ)), os.environ, AppUpstream(app))
        operations = Operations(gateway, admin_key(os.environ)).application()
        self._gateway, self._app = gateway, App(gateway, operations, own=frozenset())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._wrapped(scope, receive, self._closing(send))
        elif scope["type"] != "http" or not await self._app.answered(scope, receive, send):
            await self._wrapped(scope, receive, send)

    def _closing(self, send: Send) -> Send:
        """Close the stores when the application has stopped."""

        async def closing(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown"):
                await self._gateway.aclose()
            await send(message)

        return closing
