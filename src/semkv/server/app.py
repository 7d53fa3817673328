"""The ASGI applications: the gateway in front of a server (`App`), and the same inside it (`Middleware`).

The two cached routes are answered by hand, since they are the hot path; Starlette answers the operators' routes.

/v1/chat/completions, /v1/completions   answered from the cache where it can be
/healthz /readyz /metrics /openapi.json
/semkv                                  dashboard; /semkv/api: admin routes
anything else                           passed on
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from semkv.cache import SemanticCache
from semkv.config import Variables, parse
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
from semkv.server.cache_client import CacheClient
from semkv.server.gateway import Gateway
from semkv.server.metrics import Metrics
from semkv.server.operations import Operations
from semkv.server.settings import ServerSettings, admin_key, secret_of
from semkv.server.tenancy import SALTED, parse_tag_rule
from semkv.server.upstream import (
    Application,
    AppUpstream,
    Call,
    HttpUpstream,
    Message,
    Receive,
    Scope,
    Send,
    Upstream,
    UpstreamError,
)
from semkv.server.upstream_requests import ENDPOINTS
from semkv.stores.database import CATALOG
from semkv.stores.responses import open_store
from semkv.stores.responses.ahead import folder_of
from semkv.tiers.freshness import FOREVER, Freshness, Lifetime, parse_rule
from semkv.tiers.response import ResponseCache

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
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        elif scope["type"] == "http" and not await self.answered(scope, receive, send):
            await self._respond(scope, receive, send, cached=False)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """Answer the server's start and stop."""
        while (await receive())["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        await self.gateway.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def answered(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer the cached routes, those that get a salt, and the operators'. False for everything else."""
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


class Middleware:
    """ASGI middleware that answers from the cache inside vLLM: ``vllm serve --middleware semkv.server.Middleware``.

    vLLM makes it with the application it wraps and nothing else, so settings come from the environment (see
    `semkv.server.settings`). Operators' routes are only below ``/semkv``: ``/metrics`` and ``/health`` stay the
    application's own.

    Args:
        app: the application; it answers misses, in this process.

    Raises:
        ConfigError: a variable does not fit.
        StoreError: a store cannot be opened.
    """

    def __init__(self, app: Application) -> None:
        self._wrapped = app
        gateway = gateway_of(
            parse(ServerSettings, [], Variables(ServerSettings, os.environ)), os.environ, AppUpstream(app)
        )
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


def app_of(settings: ServerSettings, environment: Mapping[str, str]) -> App:
    """The gateway in front of ``settings.upstream``. Raises as `gateway_of` does."""
    limits = {"connect_s": settings.connect_timeout, "read_s": settings.upstream_timeout}
    key = admin_key(environment)
    gateway = gateway_of(settings, environment, HttpUpstream(settings.upstream, **limits))
    return App(gateway, Operations(gateway, key).application())


def gateway_of(settings: ServerSettings, environment: Mapping[str, str], upstream: Upstream) -> Gateway:
    """The gateway with its stores open and its encoder loaded.

    Raises:
        ConfigError: a setting does not fit.
        StoreError: a store cannot be opened.
    """
    secret = secret_of(settings, environment)
    config = settings.cache_config()
    rules = [parse_tag_rule(rule) for rule in settings.tag_rules]
    metrics = Metrics(tenants=settings.tenant_metrics)
    responses = _responses(settings)
    semantic = None if config is None else SemanticCache(config)
    if semantic is not None:
        semantic.warm_up()
    store_s, sampled = settings.store_timeout, settings.sampled
    cache = CacheClient(responses, semantic, metrics, store_s=store_s, sampled=sampled, tag_rules=rules)
    gateway = Gateway(settings, secret, upstream, cache, metrics)
    metrics.read_sizes(gateway.sizes)
    return gateway


def _responses(settings: ServerSettings) -> ResponseCache:
    file, most = settings.cache_dir / CATALOG, settings.store_mib << 20
    store = open_store(settings.store, file, timeout_s=settings.store_timeout, max_bytes=most)
    lifetime = Lifetime(settings.ttl or FOREVER, settings.stale, settings.sliding, settings.jitter)
    return ResponseCache(
        store,
        max_bytes=settings.memory_mib << 20,
        freshness=Freshness(lifetime, [parse_rule(rule) for rule in settings.ttl_rules]),
        sampled=settings.sampled,
        ahead=folder_of(settings.cache_dir, settings.store),
    )
