"""The ASGI applications: the gateway in front of a server (`App`), the same inside it (`Middleware`), and `Operations`.

The cached routes are answered by hand, since they are the hot path; Starlette answers the operators' routes.

those of `semkv_gateway.routes`            answered from the cache where it can be
/healthz /readyz /metrics
/v1/semkv/feedback                        a client calls a hit wrong
/semkv                                    dashboard; /semkv/api: admin routes
anything else                             passed on
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from semkv import __version__
from semkv.cache import SemanticCache
from semkv.command_line import Environment, parse
from semkv.errors import SemkvError
from semkv.stores.catalog import CATALOG
from semkv.stores.maintenance import make_cache_folder
from semkv_dashboard.admin import AdminRoutes, error
from semkv_dashboard.feedback import PATH as FEEDBACK
from semkv_dashboard.history import History
from semkv_dashboard.names import TenantNames, read_names
from semkv_gateway import http
from semkv_gateway.cache_client import CacheClient
from semkv_gateway.desk import GatewayDesk
from semkv_gateway.donors import open_donors
from semkv_gateway.gateway import Gateway
from semkv_gateway.http import (
    Answer,
    Application,
    Call,
    Message,
    Receive,
    Refused,
    Scope,
    Send,
    Upstream,
)
from semkv_gateway.judge import Judge
from semkv_gateway.logs import Seen, Tracing, begin
from semkv_gateway.metrics import Metrics
from semkv_gateway.prices import Prices, parse_price
from semkv_gateway.response_cache import FOREVER, Lifetime, ResponseCache, parse_rule
from semkv_gateway.responses.opening import open_store
from semkv_gateway.responses.store import SteadyClock
from semkv_gateway.routes import ROUTES
from semkv_gateway.rules import Rules
from semkv_gateway.salts import SALTED
from semkv_gateway.sampling import Sampling
from semkv_gateway.settings import ServerSettings, admin_key, secret_of
from semkv_gateway.upstreams import Upstreams
from semkv_gateway.worth import Worth

log = logging.getLogger(__name__)

_HOME = "/semkv"
_PATHS = frozenset((*SALTED, FEEDBACK))  # of requests that the gateway reads
FULL = "semkv.full"  # extension of a scope: there are too many connections, so only operators' routes are answered
_STORE_AWAY_S = 600.0  # for which responses in memory are served while the store cannot be reached
_CONNECT_S = 10.0
_CONNECT_SEVERAL_S = 2.0
_BODIES = 8  # of the largest size may come in at once
_TO_ALL = (b"access-control-allow-origin", b"*")
_EXPOSED = ("X-Semkv", "X-Semkv-Hit", "X-Request-Id")  # what pages may read of an answer's headers


class App:
    """The gateway as an ASGI application.

    Args:
        gateway: answers the cached routes.
        key: the admin key; empty closes the admin routes.
    """

    _own = frozenset(("/healthz", "/readyz", "/metrics"))  # of operators, outside ``/semkv``

    def __init__(self, gateway: Gateway, key: str) -> None:
        self.gateway = gateway
        self._operations = Operations(gateway, key).application()
        settings = gateway.settings
        limit = settings.max_body_mib << 20
        self._bodies = http.Bodies(limit, most=_BODIES * limit)
        self._tracing = Tracing(gateway.metrics.fault) if settings.otel else None
        # Paths for which the upstream's latest answer to a browser was open to all.
        self._open_paths: set[str] = set()
        self._proxy, self._busy = self._opened(self._respond), self._opened(self._turn_away)
        self._otherwise = self._proxy  # answers what the gateway has no route for

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = http.route_path(scope) if scope["type"] == "http" else ""
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        elif path in self._own or path == _HOME or path.startswith(_HOME + "/"):
            await self._operations(scope, receive, send)
        elif path and FULL in scope.get("extensions", ()):
            await self._busy(scope, receive, send)
        elif path in _PATHS and scope["method"] in ("POST", "OPTIONS"):
            await self._proxy({**scope, "path": path, "root_path": ""}, receive, send)
        else:
            await self._otherwise(scope, receive, send)

    def _opened(self, application: Application) -> Application:
        """With the headers for pages of ``--cors-origin``."""
        origins = self.gateway.settings.cors_origins
        if not origins:
            return application
        return CORSMiddleware(
            application,
            allow_origins=origins,
            allow_credentials="*" not in origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=_EXPOSED,
        )

    async def _turn_away(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.gateway.metrics.turned_away.labels("connections").inc()
        await http.reply(http.busy_answer("connections"), send)

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the server's start and stop."""
        while (await receive())["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        await self._close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _close(self) -> None:
        await self.gateway.aclose()
        self.gateway.metrics.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen = begin(scope)
        tracing = self._tracing
        span = None if tracing is None else tracing.start(scope, seen)
        try:
            await self._deliver(scope, receive, send, seen)
        except http.UpstreamError:
            pass  # an answer that breaks off takes the connection with it
        except http.Vanished as vanished:
            seen.outcome = vanished.outcome or seen.outcome
        except asyncio.CancelledError:
            if not self.gateway.stopping.is_set():
                raise  # otherwise the server cancelled it at its stop, and has logged that
        finally:
            self.gateway.ended(seen)
            if self.gateway.settings.access_log:
                seen.log()
            if tracing is not None:
                tracing.end(span, seen)

    async def _deliver(self, scope: Scope, receive: Receive, send: Send, seen: Seen) -> None:
        try:
            if not scope["path"].startswith("/"):  # such as `OPTIONS *`, which cannot be passed on
                raise Refused(http.error_answer(400, "no such path"))
            if scope["path"] in SALTED and http.header(scope, b"content-encoding").lower() not in (
                "",
                "identity",
            ):
                raise Refused(
                    http.error_answer(415, "a content encoding is not read: send the body as it is")
                )
            body = await self._bodies.read(scope, receive)
            answer = await self._answer(Call(scope, body), receive)
        except Refused as refused:
            answer = refused.answer
            if answer.status == 503:
                self.gateway.metrics.turned_away.labels("bodies").inc()
        seen.sign(answer)
        self._open_to_browsers(scope, answer)
        sending = http.reply(answer, send)
        await (sending if answer.stream is None else http.unless_gone(sending, receive))

    async def _answer(self, call: Call, receive: Receive) -> Answer:
        if call.scope["path"] == FEEDBACK and call.scope["method"] == "POST":
            return await self.gateway.hear(call)
        if call.scope["path"] not in ROUTES or call.scope["method"] != "POST":
            return await self.gateway.forward(call, receive, "route")
        try:
            return await self.gateway.handle(call, receive)
        except http.Vanished:
            raise
        except Exception:  # a fault of ours must not cost the answer
            log.exception("the gateway failed")
            self.gateway.metrics.fault("gateway")
            return await self.gateway.forward(call, receive, "fault")

    def _open_to_browsers(self, scope: Scope, answer: Answer) -> None:
        """Say who may read an answer. Without ``--cors-origin`` the upstream decides: its own answers pass as they are,
        and what it opens to all on a cached path is open to all where it comes from here."""
        if self.gateway.settings.cors_origins:
            if not answer.ours:
                answer.headers = [
                    pair for pair in answer.headers if not pair[0].startswith(b"access-control-")
                ]
        elif http.header(scope, b"origin"):
            path = scope["path"]
            if answer.ours and path in self._open_paths:
                answer.headers.append(_TO_ALL)
            elif not answer.ours and path in ROUTES and 200 <= answer.status < 300:
                (self._open_paths.add if _TO_ALL in answer.headers else self._open_paths.discard)(
                    path
                )
            if any(name == _TO_ALL[0] for name, _ in answer.headers):
                answer.headers.append(
                    (b"access-control-expose-headers", ", ".join(_EXPOSED).encode())
                )


class Middleware(App):
    """ASGI middleware that answers from the cache inside vLLM: ``vllm serve --middleware semkv_gateway.Middleware``.

    vLLM makes it with the application it wraps and nothing else, so settings come from the environment (see
    `semkv_gateway.settings`). Operators' routes are only below ``/semkv``: ``/metrics`` and ``/health`` stay the
    application's own.
    """

    _own = frozenset[str]()

    def __init__(self, app: Application) -> None:
        settings = parse(ServerSettings, [], Environment(os.environ))
        super().__init__(
            gateway_of(settings, os.environ, [http.AppUpstream(app)]), admin_key(os.environ)
        )
        self._otherwise = app

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Close the stores when the application has stopped."""

        async def closing(message: Message) -> None:
            if message["type"].startswith("lifespan.shutdown"):
                await self._close()
            await send(message)

        await self._otherwise(scope, receive, closing)


def app_of(settings: ServerSettings, environment: Mapping[str, str], workers: int = 1) -> App:
    """The gateway in front of ``settings.upstreams``. Raises as `gateway_of` does."""
    key = admin_key(environment)
    urls = list(dict.fromkeys(settings.upstreams))
    # Where there is another server, a request does not wait long for a connection.
    connect_s = _CONNECT_S if len(urls) == 1 else _CONNECT_SEVERAL_S
    upstreams = [http.HttpUpstream(url, connect_s=connect_s) for url in urls]
    return App(gateway_of(settings, environment, upstreams, workers), key)


def gateway_of(
    settings: ServerSettings,
    environment: Mapping[str, str],
    upstreams: Sequence[Upstream],
    workers: int = 1,
) -> Gateway:
    """The gateway with its stores open and its encoder loaded; one of ``workers`` processes."""
    secret = secret_of(settings, environment)
    config = settings.cache_config()
    rules = Rules.of(settings)
    sampling = Sampling.of(settings)
    prices = Prices([parse_price(price) for price in settings.prices])
    given = read_names(settings.tenant_names) if settings.tenant_names else {}
    make_cache_folder(settings.cache_dir)
    history = History(settings.cache_dir)
    metrics = Metrics(workers, history, TenantNames(given, history.names()))
    history.on_fault = partial(metrics.fault, "worth")
    # Without a password.
    where = re.sub("//.*@", "//", settings.store) or settings.cache_dir / CATALOG
    log.info("starting semkv %s: responses are kept in %s", __version__, where)
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
        unheard_s=_STORE_AWAY_S,
        clock=clock,
    )
    semantic = None
    if config is not None:
        shared = open_donors(
            settings.store,
            settings.store_timeout,
            secret,
            store_bytes=settings.store_mib << 20,
            search=settings.donor_search,
        )
        start = time.perf_counter()
        log.info("loading the encoder %s", settings.index_encoder)
        semantic = SemanticCache(
            config,
            encoder_limit_s=settings.encoder_timeout,
            judge=f"{settings.judge_url} {settings.judge_model}",
            shared=shared,
            shared_limit_s=settings.store_timeout,
        )
        semantic.warm_up()
        log.info("the encoder is loaded after %.1f s", time.perf_counter() - start)
    cache = CacheClient(
        responses,
        semantic,
        metrics,
        store_s=settings.store_timeout,
        rules=rules,
    )
    worth = Worth(cache.account, prices, metrics, settings.cache_dir, days=settings.worth_days)
    servers = Upstreams(upstreams, metrics, salt=settings.salt, peers=settings.peers)
    judge = None
    if config is not None and config.judges and not config.judges_itself:
        judge = Judge(
            settings,
            secret=secret,
            key=environment.get("SEMKV_JUDGE_KEY", ""),
            cache=cache,
            upstreams=servers,
            metrics=metrics,
            worth=worth,
        )
    gateway = Gateway(
        settings,
        secret,
        servers,
        cache,
        metrics,
        sampling=sampling,
        worth=worth,
        judge=judge,
    )
    metrics.read_sizes(gateway.sizes)
    return gateway


# -- operators ----------------------------------------------------------------------------------------------------


class Operations:
    """The routes that need no key; the others are `semkv_dashboard`'s."""

    def __init__(self, gateway: Gateway, key: str) -> None:
        self._gateway = gateway
        self._admin = AdminRoutes(GatewayDesk(gateway), key)

    def application(self) -> Starlette:
        """The Starlette application."""
        anybody = {"healthz": self.health, "readyz": self.ready, "metrics": self.metrics}
        return Starlette(
            routes=[
                *(Route(f"{at}/{name}", do) for at in ("", _HOME) for name, do in anybody.items()),
                Route(_HOME, self.to_dashboard),
                *self._admin.routes(_HOME),
            ],
            exception_handlers=dict.fromkeys((SemkvError, TimeoutError, Exception), self._failed),
        )

    async def _failed(self, _: Request, fault: Exception) -> Response:
        """A store fails, in whatever way."""
        if isinstance(fault, SemkvError | TimeoutError):
            return error(503, f"the store does not answer: {fault}")
        self._gateway.metrics.fault("operators")
        return error(503, f"the store failed: {type(fault).__name__}")

    async def health(self, _: Request) -> Response:
        """This process runs."""
        return JSONResponse({"status": "ok", "version": __version__})

    async def ready(self, _: Request) -> Response:
        """200 where the upstream answers, else 503; cached answers are served either way."""
        upstreams = self._gateway.upstreams
        up = await upstreams.ready()
        said = {
            "status": "ready" if up else "upstream down",
            "store": self._gateway.cache.responses.store_state,
            "salt_refused": upstreams.salt_refused,
            "upstreams": upstreams.view(),
        }
        return JSONResponse(said, 200 if up else 503)

    async def metrics(self, _: Request) -> Response:
        text = await self._gateway.cache.figures(self._gateway.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def to_dashboard(self, request: Request) -> Response:
        return RedirectResponse(request.scope.get("root_path", "") + "/semkv/")
