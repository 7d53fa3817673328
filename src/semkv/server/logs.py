"""Logs of the gateway, and what they tell of a request: never a prompt, an answer or a key.

Every request has an id: the client's ``X-Request-Id`` where it is one, else a new one. The upstream gets it, the client
gets it, and every line that is logged for the request has it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import secrets
import sys
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any

from semkv.server.asgi import Answer, Scope, header
from semkv.server.settings import LogFormat, LogLevel

if TYPE_CHECKING:
    from semkv.server.cache_client import Lookup
    from semkv.server.singleflight import InFlight

log = logging.getLogger(__name__)

_REQUEST_ID = b"x-request-id"
_ID = re.compile(r"[!-+\--~]{1,128}")  # printable, and no comma: several headers are no id
_SHOWN = 200  # characters of what a client names
# Escapes of a terminal, what turns the direction of a text, what nobody sees, halves of a character. Line breaks, tabs
# and the joiners of scripts and emoji are text.
_CONTROLS = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)


@dataclass(slots=True)
class Seen:
    """What operators are told of one request.

    Attributes:
        request_id: names it.
        method, route: of its first line, without the query.
        tenant: the beginning of its tenant's digest.
        model: as the client named it; empty where the body was not read.
        cache: what ``X-Semkv`` says: hit, miss, joined or pass, with the reason.
        status: of the answer; 0 where the client hung up first.
        upstream_id: the upstream's own id for the answer, where it gave another.
        lookup: what the caches had, with the stored answer of a hit.
        flight: what the upstream answered.
    """

    request_id: str
    method: str
    route: str
    tenant: str = ""
    model: str = ""
    cache: str = ""
    status: int = 0
    upstream_id: str = ""
    lookup: Lookup | None = None
    flight: InFlight | None = None

    def sign(self, answer: Answer) -> None:
        """Note an answer, and tell its client the id. What the upstream has signed itself stays so."""
        self.status = answer.status
        own = b"" if answer.ours else next((v for k, v in answer.headers if k == _REQUEST_ID), b"")
        if own:
            self.upstream_id = own.decode("latin-1")
        else:
            answer.headers.append((_REQUEST_ID, self.request_id.encode()))

    def log(self, seconds: float) -> None:
        """Write the line of the access log."""
        upstream_id = "" if self.upstream_id == self.request_id else self.upstream_id
        fields = {
            "method": self.method,
            "route": self.route[:_SHOWN],
            "model": self.model[:_SHOWN],
            "tenant": self.tenant,
            "cache": self.cache,
            "upstream_request_id": upstream_id[:_SHOWN],
            "status": self.status or 499,  # as proxies say that the client hung up
            "ms": round(seconds * 1e3, 1),
        }
        log.info("request", extra={"fields": {name: value for name, value in fields.items() if value != ""}})


_current: ContextVar[Seen | None] = ContextVar("semkv_request", default=None)


def current() -> Seen | None:
    """The request that this task works for."""
    return _current.get()


def begin(scope: Scope) -> Seen:
    """Name the request of this task, and let its headers say so."""
    given = header(scope, _REQUEST_ID)
    named = given if _ID.fullmatch(given) else secrets.token_hex(16)
    if named != given:
        kept = [pair for pair in scope["headers"] if pair[0] != _REQUEST_ID]
        scope["headers"] = [*kept, (_REQUEST_ID, named.encode())]
    seen = Seen(named, scope["method"], scope["path"])
    _current.set(seen)
    return seen


def visible(text: str) -> str:
    r"""A text with its control characters written out.

    >>> visible("red: \x1b[31m")
    'red: \\x1b[31m'
    """
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


class _Lines(logging.Formatter):
    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """What is said of a record, in order."""
        seen = current()
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **({} if seen is None else {"request_id": seen.request_id}),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return fields


class JsonLines(_Lines):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.fields(record))


class TextLines(_Lines):
    """Time, level and message, then what else there is as ``name=value``; a trace on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        fields = self.fields(record)
        head = visible(" ".join(str(fields.pop(name)) for name in ("time", "level", "message"))).replace("\n", "\\n")
        trace = visible(fields.pop("exception", ""))
        rest = (f"{name}={_plain(value)}" for name, value in fields.items() if name != "logger")
        return "\\n".join(head.splitlines()) + "".join(f" {one}" for one in rest) + (f"\n{trace}" if trace else "")


def _plain(value: object) -> str:
    """A value without blanks as it is, any other in quotes: a client may name a model in several lines."""
    return str(value) if re.fullmatch(r"[!#-~]+", str(value)) else json.dumps(value)


def set_up_logs(level: LogLevel = LogLevel.INFO, form: LogFormat = LogFormat.JSON) -> None:
    """Lines on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form is LogFormat.JSON else TextLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "sentence_transformers", "faiss"):
        logging.getLogger(noisy).setLevel("WARNING")
    with contextlib.suppress(ImportError):  # it prints for itself what goes on to the root as well
        import_module("huggingface_hub.utils.logging")
        logging.getLogger("huggingface_hub").handlers.clear()
