"""Headers that decide who may have an answer: those in a request's key, ``Vary``, and what browsers must be told.

A page of another origin may read an answer only where a header allows it. With ``--cors-origin`` this is decided here,
and what the upstream says of it is dropped. Without it the upstream decides: its own answers pass as they are. Of an
answer that comes from here nobody knows what the upstream would say to this origin, unless it says the same to all
(``*``).
"""

from __future__ import annotations

from collections.abc import Iterable

from semkv.server.asgi import Answer, Headers, Scope, header
from semkv.server.routes import ROUTES
from semkv.server.tenancy import CREDENTIALS

_IN_KEY = frozenset(
    b"openai-organization openai-project openai-beta anthropic-version anthropic-beta accept-language x-model".split()
)
# Answers always come uncompressed, and who may read them in a browser is no part of them.
_HARMLESS = frozenset(b"accept-encoding origin access-control-request-method access-control-request-headers".split())

_ALLOWS = b"access-control-allow-origin"
_EXPOSED = (b"access-control-expose-headers", b"X-Semkv, X-Request-Id")
_TO_ALL = (_ALLOWS, b"*")
_VARY = (b"vary", b"Origin")
_METHODS = (b"access-control-allow-methods", b"DELETE, GET, OPTIONS, PATCH, POST, PUT")
_PREFLIGHT_S = (b"access-control-max-age", b"600")


class Vary:
    """Tells which requests may have one answer, as far as their headers go.

    Args:
        more: names of headers that count in addition to the usual ones.
    """

    def __init__(self, more: Iterable[str] = ()) -> None:
        self._names = _IN_KEY | {name.lower().encode() for name in more}

    def read(self, scope: Scope) -> tuple[tuple[str, str], ...]:
        """What goes into the key, in one order, the query (``?beta=true``) under a name that no header has.
        ``Accept-Language: *`` says what no such header says."""
        found = [(k, v) for k, v in scope["headers"] if k in self._names and (k, v) != (b"accept-language", b"*")]
        found.sort(key=lambda pair: pair[0])
        if query := scope.get("query_string"):
            found.append((b"?", query))
        return tuple((k.decode("latin-1"), v.decode("latin-1")) for k, v in found)

    def refusal(self, headers: Headers, *, by_credentials: bool) -> str:
        """Why an answer with these headers may go to nobody else; empty where it may.

        Args:
            headers: of the answer, names in lower case.
            by_credentials: every header with credentials is in the key.
        """
        for name, value in headers:
            if name == b"cache-control":
                words = {word.partition(b"=")[0].strip() for word in value.lower().split(b",")}
                if b"no-store" in words or b"private" in words:
                    return "no-store" if b"no-store" in words else "private"
            elif name == b"vary":
                names = {word.strip() for word in value.lower().split(b",")} - _HARMLESS - self._names - {b""}
                if names - CREDENTIALS if by_credentials else names:
                    return "vary"
        return ""


class Cors:
    """Adds to answers what browsers need.

    Args:
        origins: that may read answers; ``*`` for all, without credentials. None: the upstream decides.
    """

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)
        self._open: set[str] = set()  # what the upstream opens to all, by its latest answer to a browser

    def preflight(self, scope: Scope) -> Answer | None:
        """The answer to a browser that asks whether a page may send a request; None where that is for the upstream."""
        asks = scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method")
        if not self._origins or not asks or not header(scope, b"origin"):
            return None
        wanted = header(scope, b"access-control-request-headers").encode("latin-1")
        return Answer(200, [_METHODS, (b"access-control-allow-headers", wanted), _PREFLIGHT_S])

    def heard(self, scope: Scope, status: int, headers: Headers) -> None:
        """The upstream has answered so. Where it refuses, it may not have come to what it allows browsers."""
        if 200 <= status < 300 and not self._origins and header(scope, b"origin"):
            (self._open.add if _TO_ALL in headers else self._open.discard)(_place(scope))

    def dress(self, scope: Scope, answer: Answer) -> None:
        """Let the page that asks read an answer, if it may."""
        if self._origins:
            own = [pair for pair in answer.headers if answer.ours or not pair[0].startswith(b"access-control-")]
            answer.headers = [*own, *self._allowed(header(scope, b"origin").encode("latin-1"))]
        elif not answer.ours:
            if any(name == _ALLOWS for name, _ in answer.headers):
                answer.headers.append(_EXPOSED)
        elif self._open and _place(scope) in self._open and header(scope, b"origin"):
            answer.headers.extend((_TO_ALL, _EXPOSED))

    def _allowed(self, origin: bytes) -> Headers:
        if b"*" in self._origins:
            return [_TO_ALL, _EXPOSED]
        if origin not in self._origins:
            return [_VARY]
        return [(_ALLOWS, origin), (b"access-control-allow-credentials", b"true"), _EXPOSED, _VARY]


def _place(scope: Scope) -> str:
    """A cached path; all others are one."""
    return scope["path"] if scope["path"] in ROUTES else ""
