"""The routes behind ``/semkv``: pages without a key, and an API that needs the admin key.

GET  api/stats?window=1 hour&days=30   figures
GET  api/recent                        latest hits and misses; ?id= those of one request
GET  api/entries?text=&model=..        what is stored, page by page
GET  api/entry?key=                    one answer
POST api/delete                        one answer, with the donors of its question
POST api/invalidate                    all answers that meet criteria
POST api/wrong                         a hit was wrong
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from semkv_dashboard.entries import BadQueryError, Source, Wanted, find
from semkv_dashboard.history import WINDOWS
from semkv_dashboard.limits import Buckets, site_of

log = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
CRITERIA = ("key", "tag", "model", "partition", "prefix")
_FILES = frozenset(file.name for file in STATIC.iterdir())
_GUESSES = 10  # wrong keys at once from one address, and from all together ten times as many
_GUESS_S = 6.0  # seconds after which one more wrong key is allowed
_EVERYBODY = "*"
_DAYS = 30
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


class Desk(Source, Protocol):
    """What the gateway lets operators see and do."""

    async def stats(
        self,
        window: str,
        days: int,
    ) -> dict[str, Any]:
        """Figures of a window, and what was saved in some days."""
        ...

    async def recent(self) -> dict[str, list[dict[str, Any]]]:
        """The latest ``hits``, ``misses`` and ``near`` misses."""
        ...

    async def answer(self, key: str) -> dict[str, Any] | None:
        """One row with the text of its answer."""
        ...

    async def delete(self, key: str) -> dict[str, int]:
        """Remove an answer, and donors of the same question; how many of each."""
        ...

    async def invalidate(
        self,
        criteria: Mapping[str, str],
        *,
        dry_run: bool,
    ) -> int:
        """Remove answers, or count them."""
        ...

    async def wrong(self, hit: str) -> int | None:
        """A hit was wrong: how many answers were removed; None where the id is none."""
        ...

    def tenants(self, text: str) -> frozenset[str] | None:
        """First digits of tenants whose name or digits a text begins with; None for all, where it is empty."""
        ...

    def refused(self, why: str) -> None:
        """Count a request without the right key."""
        ...


class AdminRoutes:
    """The routes' handlers.

    Args:
        desk: what they show.
        key: the admin key; empty closes the API.
    """

    def __init__(
        self,
        desk: Desk,
        key: str,
    ) -> None:
        self._desk = desk
        self._key = key.encode()
        self._guesses = Buckets(_GUESSES, _GUESS_S)
        self._all_guesses = Buckets(10 * _GUESSES, _GUESS_S / 10)

    def routes(self, home: str) -> list[Route]:
        """All of them, below a path."""
        admin: list[tuple[str, Handler]] = [
            ("GET", self.stats),
            ("GET", self.recent),
            ("GET", self.entries),
            ("GET", self.entry),
            ("POST", self.delete),
            ("POST", self.invalidate),
            ("POST", self.wrong),
        ]
        return [
            *(
                Route(
                    f"{home}/api/{do.__name__}",
                    partial(self._admin, do),
                    methods=[verb],
                )
                for verb, do in admin
            ),
            Route(f"{home}/", page),
            Route(f"{home}/{{name}}", page),
        ]

    async def _admin(
        self,
        handler: Handler,
        request: Request,
    ) -> Response:
        """Only with the admin key."""
        if not self._key:
            return error(403, "the admin routes are closed: start with SEMKV_ADMIN_KEY set")
        address = site_of(request.client.host if request.client else "")
        wait = max(self._guesses.wait(address), self._all_guesses.wait(_EVERYBODY))
        if wait:
            self._desk.refused("too many guesses")
            answer = error(429, f"too many wrong admin keys: try again in {math.ceil(wait)} s")
            answer.headers["Retry-After"] = str(math.ceil(wait))
            return answer
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode("utf-8", "replace"), self._key):
            self._note_guess(address, request.url.path)
            return error(401, "wrong admin key")
        try:
            response = await handler(request)
        except BadQueryError as wrong:
            return error(400, str(wrong))
        response.headers.update(_SECURITY)
        return response

    def _note_guess(
        self,
        address: str,
        path: str,
    ) -> None:
        self._desk.refused("wrong key")
        self._guesses.take(address)
        self._all_guesses.take(_EVERYBODY)
        log.warning("a wrong admin key came from %s for %s", address, path)
        if self._guesses.wait(address):
            log.warning("%s sent %s wrong admin keys: it is refused for a while", address, _GUESSES)

    # -- seeing -------------------------------------------------------------------------------------------------

    async def stats(self, request: Request) -> Response:
        window = request.query_params.get("window", next(iter(WINDOWS)))
        days = request.query_params.get("days", str(_DAYS))
        if window not in WINDOWS or not (days.isdecimal() and 0 < int(days) <= 366):
            raise BadQueryError(f"window is one of {', '.join(WINDOWS)}, days a number up to 366")
        return await _as_json(await self._desk.stats(window, int(days)))

    async def recent(self, request: Request) -> Response:
        rows = await self._desk.recent()
        wanted = request.query_params.get("id", "").strip()
        if wanted:
            rows = {
                kind: [row for row in them if _is_of(row, wanted)] for kind, them in rows.items()
            }
        return await _as_json(rows)

    async def entries(self, request: Request) -> Response:
        query = request.query_params
        wanted = Wanted.of(query, self._desk.tenants(query.get("tenant", "").strip()))
        return await _as_json(await find(self._desk, wanted))

    async def entry(self, request: Request) -> Response:
        found = await self._desk.answer(request.query_params.get("key", ""))
        return (
            error(404, "there is no such entry (any more)")
            if found is None
            else await _as_json(found)
        )

    # -- doing --------------------------------------------------------------------------------------------------

    async def delete(self, request: Request) -> Response:
        """Body: ``key`` of an entry."""
        key = (await body_of(request)).get("key")
        if not isinstance(key, str) or not key:
            return error(400, "give a JSON object with the key of an entry")
        return JSONResponse(await self._desk.delete(key))

    async def invalidate(self, request: Request) -> Response:
        """Body: criteria (at least one; all must hold) and ``dry_run`` (true unless it says false)."""
        body = await body_of(request)
        given = {name: body[name] for name in CRITERIA if name in body}
        unknown = set(body) - {*CRITERIA, "dry_run"}
        if (
            unknown
            or not given
            or not all(isinstance(value, str) and value for value in given.values())
        ):
            named = ", ".join(CRITERIA)
            return error(
                400, f"give a JSON object with at least one of {named}, as text, not empty"
            )
        dry_run = body.get("dry_run", True)
        if not isinstance(dry_run, bool):
            return error(400, "dry_run must be true or false")
        count = await self._desk.invalidate(given, dry_run=dry_run)
        return JSONResponse(
            {
                "count": count,
                "dry_run": dry_run,
            }
        )

    async def wrong(self, request: Request) -> Response:
        """Body: ``id`` of a hit. Its answer is removed; the donor of an approximate one is reported."""
        given = (await body_of(request)).get("id")
        removed = await self._desk.wrong(given) if isinstance(given, str) else None
        return error(404, "no such hit") if removed is None else JSONResponse({"removed": removed})


def _is_of(row: Mapping[str, Any], wanted: str) -> bool:
    return wanted in (row.get("request_id"), row.get("upstream_id"), row.get("id"))


async def _as_json(found: Any) -> Response:
    """An answer may hold half a character, which only escaped JSON can say."""
    return Response(await asyncio.to_thread(json.dumps, found), media_type="application/json")


def error(status: int, message: str) -> JSONResponse:
    """An error in the form of OpenAI's."""
    kind = "authentication_error" if status in (401, 403) else "invalid_request_error"
    said = {
        "error": {
            "message": message,
            "type": kind,
            "param": None,
            "code": status,
        }
    }
    return JSONResponse(
        said,
        status,
        headers=_SECURITY,
    )


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object in a body; an empty one where there is none."""
    try:
        body = await request.json()
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


async def page(request: Request) -> Response:
    """A file of the pages."""
    name = request.path_params.get("name", "index.html")
    if name not in _FILES:
        return error(404, "not found")
    return FileResponse(STATIC / name, headers=_SECURITY)
