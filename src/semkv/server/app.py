"""The ASGI applications: the gateway in front of a server (`App`), the same inside it (`Middleware`), and `Operations`.

The cached routes are answered by hand, since they are the hot path; Starlette answers the operators' routes.

those of `semkv.server.routes`            answered from the cache where it can be
/healthz /readyz /metrics /openapi.json
/semkv                                    dashboard; /semkv/api: admin routes
anything else                             passed on
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from importlib.resources import files
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from semkv import __version__
from semkv.cache import SemanticCache
from semkv.config import ConfigFile, Variables, parse
from semkv.errors import SemkvError
from semkv.server.asgi import (
    Answer,
    Application,
    Message,
    Receive,
    Refused,
    Room,
    Scope,
    Send,
    Vanished,
    busy_answer,
    error_answer,
    error_of,
    is_packed,
    read_body,
    reply,
    route_path,
    unless_gone,
    unpacked,
)
from semkv.server.cache_client import CacheClient, Late
from semkv.server.gateway import Gateway
from semkv.server.logs import Seen, begin
from semkv.server.metrics import Metrics
from semkv.server.routes import ROUTES
from semkv.server.settings import ServerSettings, admin_key, secret_of
from semkv.server.tenancy import SALTED, parse_tag_rule
from semkv.server.upstream import AppUpstream, Call, HttpUpstream, Upstream, UpstreamError
from semkv.stores.database import CATALOG
from semkv.stores.responses import open_store
from semkv.stores.responses.ahead import folder_of
from semkv.stores.responses.base import Selector, SteadyClock
from semkv.tiers.base import Latest
from semkv.tiers.response import FOREVER, Lifetime, ResponseCache, parse_rule
from semkv.tiers.sharing import open_entry_log

if TYPE_CHECKING:
    from semkv.server.tracing import Tracing

log = logging.getLogger(__name__)

_HOME = "/semkv"
_PROBES = ("/healthz", "/readyz")
_FILES = {
    "": ("static/index.html", "text/html"),
    "app.js": ("static/app.js", "text/javascript"),
    "app.css": ("static/app.css", "text/css"),
    "openapi.json": ("openapi.json", "application/json"),
}
FULL = "semkv.full"  # extension of a scope: there are too many connections, so only operators' routes are answered
_BODIES = 8  # of the largest size may come in at once
_CRITERIA = ("key", "tag", "model", "partition", "prefix")
_LARGEST = 64 * 1024  # bytes of an admin request
_GUESSES, _GUESSED_S = 10, 60  # wrong admin keys from one address, and for how long they count after the latest
_ADDRESSES = 10_000
_SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class App:
    """The gateway as an ASGI application.

    Args:
        gateway: answers the cached routes.
        key: the admin key; empty closes the admin routes.
        admin_port: where operators' routes are answered, and nothing else; 0: everything is on every port.
    """

    _own = frozenset(("/healthz", "/readyz", "/metrics", "/openapi.json"))  # of operators, outside ``/semkv``

    def __init__(self, gateway: Gateway, key: str, admin_port: int = 0) -> None:
        self.gateway, self._operations = gateway, Operations(gateway, key).application()
        self._admin_port = admin_port
        self._limit = gateway.settings.bounds[0]
        self._room = Room(_BODIES * self._limit)
        self._tracing: Tracing | None = None
        if gateway.settings.otel:
            from semkv.server.tracing import Tracing

            self._tracing = Tracing(gateway.metrics.fault)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" else ""
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        elif path and self._admin_port and scope["server"][1] == self._admin_port:
            await self._operations(scope, receive, send)
        elif path in self._own or path == _HOME or path.startswith(_HOME + "/"):
            closed = self._admin_port and not path.endswith(_PROBES)
            await (_error(404, "not at this port") if closed else self._operations)(scope, receive, send)
        elif path and FULL in scope.get("extensions", ()):
            self.gateway.metrics.turned_away("connections")
            answer = busy_answer("connections")
            self.gateway.cors.dress(scope, answer)
            await reply(answer, send)
        elif path and scope["method"] in ("POST", "OPTIONS") and path in SALTED:
            cached = path in ROUTES and scope["method"] == "POST"
            await self._respond({**scope, "path": path, "root_path": ""}, receive, send, cached=cached)
        else:
            await self._otherwise(scope, receive, send)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the server's start and stop."""
        while (await receive())["type"] == "lifespan.startup":
            self.gateway.look_upstream()
            await send({"type": "lifespan.startup.complete"})
        await self._close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _close(self) -> None:
        await self.gateway.aclose()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def _otherwise(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what the gateway has no route for."""
        if scope["type"] == "http":
            await self._respond(scope, receive, send, cached=False)
        else:
            await send({"type": "websocket.close", "code": 1000})

    async def _respond(self, scope: Scope, receive: Receive, send: Send, *, cached: bool) -> None:
        seen = begin(scope)
        logged, tracing, start = self.gateway.settings.access_log, self._tracing, time.perf_counter()
        span = None if tracing is None else tracing.start(scope, seen)
        try:
            await self._deliver(scope, receive, send, seen, cached=cached)
        finally:
            if seen.cache and seen.status == 200:  # names of no model, and keys that are refused, would fill the tables
                self.gateway.metrics.live.ended(seen.model, seen.tenant, seen.cache.split(None, 1)[0])
            if logged:
                seen.log(time.perf_counter() - start)
            if tracing is not None and span is not None:
                tracing.end(span, seen)

    async def _deliver(self, scope: Scope, receive: Receive, send: Send, seen: Seen, *, cached: bool) -> None:
        with suppress(Vanished, UpstreamError):  # an answer that breaks off in the middle takes the connection with it
            try:
                if not scope["path"].startswith("/"):  # such as `OPTIONS *`, which cannot be passed on
                    raise Refused(error_answer(400, "no such path", "invalid_request_error"))
                answer = self.gateway.cors.preflight(scope) or await self._answer(scope, receive, cached=cached)
            except Refused as refused:
                answer = refused.answer
                if answer.status == 503:
                    self.gateway.metrics.turned_away("bodies")
            seen.sign(answer)
            self.gateway.cors.dress(scope, answer)
            await (reply(answer, send) if answer.stream is None else unless_gone(reply(answer, send), receive))

    async def _answer(self, scope: Scope, receive: Receive, *, cached: bool) -> Answer:
        body = await read_body(scope, receive, self._limit, self._room)
        async with AsyncExitStack() as held:
            if scope["path"] in SALTED and is_packed(scope):
                scope, body = await held.enter_async_context(unpacked(scope, body, self._limit, self._room))
            call = Call(scope, body)
            if not cached:
                return await self.gateway.forward(call, receive, "route")
            try:
                return await self.gateway.handle(call, receive)
            except Vanished:
                raise
            except Exception:  # a fault of ours must not cost the answer
                log.exception("the gateway failed")
                self.gateway.metrics.fault("gateway")
                return await self.gateway.forward(call, receive, "fault")


class Middleware(App):
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

    _own = frozenset[str]()

    def __init__(self, app: Application) -> None:
        settings = parse(ServerSettings, [], Variables(ServerSettings, os.environ), ConfigFile(os.environ))
        super().__init__(gateway_of(settings, os.environ, AppUpstream(app)), admin_key(os.environ))
        self._otherwise = app  # type: ignore[assignment]

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Close the stores when the application has stopped."""

        async def closing(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown"):
                await self._close()
            await send(message)

        await self._otherwise(scope, receive, closing)


def app_of(settings: ServerSettings, environment: Mapping[str, str], workers: int = 1) -> App:
    """The gateway in front of ``settings.upstream``. Raises as `gateway_of` does."""
    key = admin_key(environment)
    upstream = HttpUpstream(settings.upstream, settings.connect_timeout, settings.upstream_timeout)
    return App(gateway_of(settings, environment, upstream, workers), key, settings.admin_port)


def gateway_of(
    settings: ServerSettings, environment: Mapping[str, str], upstream: Upstream, workers: int = 1
) -> Gateway:
    """The gateway with its stores open and its encoder loaded; one of ``workers`` processes.

    Raises:
        ConfigError: a setting does not fit.
        StoreError: a store cannot be opened.
    """
    secret = secret_of(settings, environment)
    config = settings.cache_config()
    rules = [parse_tag_rule(rule) for rule in settings.tag_rules]
    metrics = Metrics(workers)
    log.info("starting semkv %s: responses are kept in %s", __version__, _named(settings))
    clock = SteadyClock()
    store = open_store(
        settings.store,
        settings.cache_dir / CATALOG,
        timeout_s=settings.store_timeout,
        max_bytes=settings.store_mib << 20,
        max_tenant_bytes=settings.tenant_mib << 20,
        clock=clock,
    )
    responses = ResponseCache(
        store,
        max_bytes=settings.memory_mib << 20,
        lifetime=Lifetime(settings.ttl or FOREVER, settings.stale),
        rules=[parse_rule(rule) for rule in settings.ttl_rules],
        sampled=settings.sampled,
        unheard_s=settings.store_away,
        clock=clock,
        ahead=folder_of(settings.cache_dir, settings.store),
    )
    entry_log = None if config is None else open_entry_log(settings.store, settings.store_timeout, secret)
    semantic = None
    if config is not None:
        start = time.perf_counter()
        log.info("loading the encoder %s", settings.index_encoder)
        semantic = SemanticCache(config, log=entry_log)
        semantic.warm_up()
        log.info("the encoder is loaded after %.1f s", time.perf_counter() - start)
    cache = CacheClient(
        responses, semantic, metrics, store_s=settings.store_timeout, sampled=settings.sampled, tag_rules=rules
    )
    gateway = Gateway(settings, secret, upstream, cache, metrics)
    metrics.read_sizes(gateway.sizes)
    return gateway


def _named(settings: ServerSettings) -> str:
    """The store, without names and passwords in its URL."""
    if settings.store == "memory":
        return "memory alone"
    return re.sub("//.*@", "//", settings.store) or str(settings.cache_dir / CATALOG)


# -- operators ----------------------------------------------------------------------------------------------------

Handler = Callable[[Request], Awaitable[Response]]


def _error(status: int, message: str) -> JSONResponse:
    kind = "authentication_error" if status in (401, 403) else "invalid_request_error"
    return JSONResponse(error_of(status, message, kind), status, headers=_SECURITY)


class WrongKeys:
    """Wrong admin keys by address: after `_GUESSES` there is a minute in which no key is looked at.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._latest: Latest[str, tuple[int, float]] = Latest(_ADDRESSES)  # how many, and until when they count

    def wait_s(self, address: str) -> int:
        """How long the next key from an address has to wait; 0 where it may come now."""
        many, until = self._latest.get(_network(address), (0, 0.0))
        return max(0, math.ceil(until - self._clock())) if many >= _GUESSES else 0

    def add(self, address: str) -> None:
        """A wrong key has come."""
        name, now = _network(address), self._clock()
        many, until = self._latest.get(name, (0, 0.0))
        many = many + 1 if now < until else 1
        self._latest[name] = many, now + _GUESSED_S
        if many == _GUESSES:
            log.warning("%d wrong admin keys from %s: it has to wait for %d s", many, name, _GUESSED_S)


def _network(address: str) -> str:
    """The address, or of IPv6 the network that one client may have for itself."""
    return address if ":" not in address else str(ip_network(f"{address.partition('%')[0]}/64", strict=False))


class Operations:
    """The routes' handlers.

    Args:
        gateway: what they show and change.
        key: the admin key; empty closes the admin routes.
    """

    def __init__(self, gateway: Gateway, key: str) -> None:
        self._gateway, self._key, self._wrong_keys = gateway, key.encode(), WrongKeys()

    def application(self) -> Starlette:
        """The Starlette application."""
        anybody = {"healthz": self.health, "readyz": self.ready, "metrics": self._reading(self.metrics)}
        admin = [("GET", self.stats), ("GET", self.hits), ("POST", self.invalidate), ("POST", self.wrong)]
        return Starlette(
            routes=[
                *(Route(f"{at}/{name}", do) for at in ("", _HOME) for name, do in anybody.items()),
                *(Route(f"{_HOME}/api/{do.__name__}", self._guarded(do), methods=[verb]) for verb, do in admin),
                Route(_HOME, self.to_dashboard),
                *(Route(path, _file) for path in ("/openapi.json", f"{_HOME}/", f"{_HOME}/{{name}}")),
            ]
        )

    def _guarded(self, handler: Handler) -> Handler:
        """Only with the admin key."""

        async def guarded(request: Request) -> Response:
            if not self._key:
                return _error(403, "the admin routes are closed: start with SEMKV_ADMIN_KEY set")
            given = request.headers.get("authorization", "").removeprefix("Bearer ").encode("utf-8", "replace")
            address = "" if request.client is None else request.client.host
            if given and (wait_s := self._wrong_keys.wait_s(address)):
                refused = _error(429, f"too many wrong admin keys: try again in {wait_s} seconds")
                refused.headers["retry-after"] = str(wait_s)
                return refused
            if not hmac.compare_digest(given, self._key):
                if given:
                    self._wrong_keys.add(address)
                return _error(401, "wrong admin key")
            response = await self._reading(handler)(request)
            response.headers.update(_SECURITY)
            return response

        return guarded

    def _reading(self, handler: Handler) -> Handler:
        """503 where a store fails, in whatever way."""

        async def reading(request: Request) -> Response:
            try:
                return await handler(request)
            except (SemkvError, Late) as error:
                return _error(503, f"the store does not answer: {error}")
            except Exception as error:
                log.exception("an operators' route failed")
                self._gateway.metrics.fault("operators")
                return _error(503, f"the store failed: {type(error).__name__}")

        return reading

    # -- open ---------------------------------------------------------------------------------------------------

    async def health(self, _: Request) -> Response:
        """This process runs."""
        return JSONResponse({"status": "ok", "version": __version__})

    async def ready(self, _: Request) -> Response:
        """200 where the upstream answers, else 503; cached answers are served either way."""
        up, store_up = await self._gateway.upstream.ready(), self._gateway.cache.responses.store_up
        said = {"status": "ready" if up else "upstream down", "store": "up" if store_up else "away"}
        return JSONResponse(said, 200 if up else 503)

    async def metrics(self, _: Request) -> Response:
        text = await self._gateway.cache.figures(self._gateway.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def to_dashboard(self, request: Request) -> Response:
        return RedirectResponse(request.scope.get("root_path", "") + "/semkv/")

    # -- with the admin key -------------------------------------------------------------------------------------

    async def stats(self, _: Request) -> Response:
        gateway = self._gateway
        figures = await gateway.cache.figures(gateway.metrics.figures)
        live = gateway.metrics.live.view()
        about = {"version": __version__, "workers": gateway.metrics.workers}
        return JSONResponse({**figures, "live": live, **about})

    async def hits(self, request: Request) -> Response:
        given = request.query_params.get("limit", "50")
        limit = min(int(given), 200) if given.isascii() and given.isdecimal() and len(given) < 6 else 50
        return JSONResponse({"hits": [shown.view() for shown in self._gateway.recent_hits.recent(limit)]})

    async def invalidate(self, request: Request) -> Response:
        """Body: criteria (at least one; all must hold) and ``dry_run`` (true unless it says false)."""
        body = await _body(request)
        if body is None:
            return _error(400, "the body must be a JSON object")
        given = {name: body[name] for name in _CRITERIA if name in body}
        unknown = sorted(set(body) - {*_CRITERIA, "dry_run"})
        if unknown or not given or not all(isinstance(value, str) and value for value in given.values()):
            return _error(400, f"give at least one of {', '.join(_CRITERIA)}, as text that is not empty")
        dry_run = body.get("dry_run", True)
        if not isinstance(dry_run, bool):
            return _error(400, "dry_run must be true or false")
        count = await self._gateway.cache.invalidate(Selector(**given), dry_run=dry_run)
        return JSONResponse({"count": count, "dry_run": dry_run})

    async def wrong(self, request: Request) -> Response:
        """Body: ``id`` of a hit. Its answer, and the donor of an approximate one, are removed."""
        body = await _body(request)
        number = body.get("id") if body else None
        shown = self._gateway.recent_hits.find(number) if isinstance(number, str) else None
        if shown is None:
            if self._gateway.metrics.workers == 1:
                return _error(404, "no such hit")
            answer = _error(404, "no such hit at this worker: try again")
            answer.headers["Connection"] = "close"  # the next connection may be another worker's
            return answer
        return JSONResponse({"removed": await self._gateway.wrong(shown)})


async def _body(request: Request) -> dict[str, Any] | None:
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > _LARGEST:
            return None
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


async def _file(request: Request) -> Response:
    name = request.scope["path"].rpartition("/")[2]
    if name not in _FILES:
        return _error(404, "not found")
    file, kind = _FILES[name]
    return Response((files("semkv.server") / file).read_bytes(), media_type=kind, headers=_SECURITY)
