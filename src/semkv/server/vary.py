"""Headers that an answer depends on: those of the request that are in its key, and what the upstream says."""

from __future__ import annotations

from collections.abc import Iterable

from semkv.server.asgi import Headers, Scope
from semkv.server.tenancy import CREDENTIALS

_IN_KEY = frozenset((b"openai-organization", b"openai-project", b"openai-beta", b"accept-language", b"x-model"))
# Answers always come uncompressed, and who may read them in a browser is no part of them.
_HARMLESS = frozenset(b"accept-encoding origin access-control-request-method access-control-request-headers".split())


class Vary:
    """Tells which requests may have one answer, as far as their headers go.

    Args:
        more: names of headers that count in addition to the usual ones.
    """

    def __init__(self, more: Iterable[str] = ()) -> None:
        self._names = _IN_KEY | {name.lower().encode() for name in more}

    def read(self, scope: Scope) -> tuple[tuple[str, str], ...]:
        """What goes into the key, in one order. ``Accept-Language: *`` says what no such header says."""
        found = [(k, v) for k, v in scope["headers"] if k in self._names and (k, v) != (b"accept-language", b"*")]
        found.sort(key=lambda pair: pair[0])
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
