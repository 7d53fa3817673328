"""Operators' routes: health, metrics, the admin API and the dashboard.

Health and metrics are open; what shows or changes stored answers needs the admin key.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from semkv import __version__
from semkv.errors import SemkvError
from semkv.server.gateway import Gateway
from semkv.server.pool import Late
from semkv.stores.responses.base import Selector

_STATIC = {"": ("index.html", "text/html"), "app.js": ("app.js", "text/javascript"), "app.css": ("app.css", "text/css")}
_CRITERIA = ("key", "tag", "model", "partition", "prefix")
_LARGEST = 64 * 1024  # bytes of an admin request
_SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Handler = Callable[[Request], Awaitable[Response]]


def _error(status: int, message: str) -> JSONResponse:
    kind = "authentication_error" if status in (401, 403) else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return JSONResponse(body, status, headers=_SECURITY)


class Operations:
    """The routes' handlers.

    Args:
        gateway: what they show and change.
        key: the admin key; empty closes the admin routes.
    """

    def __init__(self, gateway: Gateway, key: str) -> None:
        self._gateway, self._key = gateway, key

    def application(self) -> Starlette:
        """The Starlette application."""
        return Starlette(
            routes=[
                Route("/healthz", self.health),
                Route("/readyz", self.ready),
                Route("/metrics", self.metrics),
                Route("/semkv/healthz", self.health),
                Route("/semkv/readyz", self.ready),
                Route("/semkv/metrics", self.metrics),
                Route("/openapi.json", self.schema),
                Route("/semkv/openapi.json", self.schema),
                Route("/semkv/api/stats", self._guarded(self.stats)),
                Route("/semkv/api/hits", self._guarded(self.hits)),
                Route("/semkv/api/invalidate", self._guarded(self.invalidate), methods=["POST"]),
                Route("/semkv/api/wrong", self._guarded(self.wrong), methods=["POST"]),
                Route("/semkv", self.to_dashboard),
                Route("/semkv/", partial(_static, name="")),
                Route("/semkv/{name}", _static),
            ]
        )

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            if not self._key:
                return _error(403, "the admin routes are closed: start with SEMKV_ADMIN_KEY set")
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(given.encode("utf-8", "replace"), self._key.encode()):
                return _error(401, "wrong admin key")
            try:
                response = await handler(request)
            except (SemkvError, Late) as error:
                return _error(503, f"the store does not answer: {error}")
            response.headers.update(_SECURITY)
            return response

        return guarded

    # -- open ---------------------------------------------------------------------------------------------------

    async def health(self, _: Request) -> Response:
        """This process runs."""
        return JSONResponse({"status": "ok", "version": __version__})

    async def ready(self, _: Request) -> Response:
        """200 where the upstream answers, else 503; cached answers are served either way."""
        up = await self._gateway.upstream.ready()
        return JSONResponse({"status": "ready" if up else "upstream down"}, 200 if up else 503)

    async def metrics(self, _: Request) -> Response:
        try:
            text = await self._gateway.cache.figures(self._gateway.metrics.text)
        except Late as error:
            return _error(503, str(error))
        return Response(text, media_type="text/plain; version=0.0.4")

    async def schema(self, _: Request) -> Response:
        return Response((files("semkv.server") / "openapi.json").read_bytes(), media_type="application/json")

    async def to_dashboard(self, request: Request) -> Response:
        return RedirectResponse(request.scope.get("root_path", "") + "/semkv/")

    # -- with the admin key -------------------------------------------------------------------------------------

    async def stats(self, _: Request) -> Response:
        gateway = self._gateway
        sizes = await gateway.cache.figures(gateway.sizes)
        live = gateway.metrics.live.view()
        return JSONResponse({**sizes, "totals": gateway.metrics.totals(), "live": live, "version": __version__})

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
            return _error(404, "no such hit")
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


async def _static(request: Request, name: str | None = None) -> Response:
    wanted = request.path_params.get("name", "") if name is None else name
    if wanted not in _STATIC:
        return _error(404, "not found")
    file, kind = _STATIC[wanted]
    return Response((files("semkv.server") / "static" / file).read_bytes(), media_type=kind, headers=_SECURITY)
