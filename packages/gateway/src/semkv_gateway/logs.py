"""What operators see of single requests: log lines and OpenTelemetry spans, never a prompt, an answer or a key.

Every request has an id: the client's ``X-Request-Id`` where it is one, else a new one. The upstream gets it, the client
gets it, and every line that is logged for the request has it.

Where spans go, and how many are taken, is said in the usual variables: ``OTEL_EXPORTER_OTLP_ENDPOINT``,
``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER`` and others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from semkv.errors import SemkvError
from semkv_gateway.http import Answer, Scope, header
from semkv_gateway.outcome import Outcome
from semkv_gateway.usage import tokens_of

log = logging.getLogger(__name__)

ONLY = "only-if-cached"  # the reason of a 504 that the client asked for

_REQUEST_ID = b"x-request-id"
_SAYS = b"x-semkv"  # the header that says where an answer came from
_ID = re.compile(r"[!-+\--~]{1,128}")  # printable, and no comma: several headers are no id
_SHOWN = 200  # characters of what a client names
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}


@dataclass(slots=True)
class Seen:
    """What operators see of one request."""

    request_id: str
    method: str
    route: str  # without the query
    outcome: Outcome = field(default_factory=lambda: Outcome(""))
    status: int = 0  # of the answer; 0 where the client hung up first
    upstream_id: str = ""  # the upstream's own id for the answer, where it gave another
    start: float = field(default_factory=time.perf_counter)

    def sign(self, answer: Answer) -> None:
        """Note an answer, and give its client the outcome and the id. An id that the upstream gave stays."""
        self.status = answer.status
        if answer.outcome is not None:
            self.outcome = answer.outcome
            answer.headers.append((_SAYS, self.outcome.text.encode("latin-1", "replace")))
        own = b"" if answer.ours else next((v for k, v in answer.headers if k == _REQUEST_ID), b"")
        if own:
            self.upstream_id = own.decode("latin-1")
        else:
            answer.headers.append((_REQUEST_ID, self.request_id.encode()))

    def row(self) -> dict[str, Any]:
        """What operators are shown of it."""
        return {
            "request_id": self.request_id,
            "upstream_id": self.upstream_id[:_SHOWN],
            "route": self.route[:_SHOWN],
            "kind": self.outcome.kind,
            "reason": self.outcome.reason,
            "model": self.outcome.model[:_SHOWN],
            "tenant": self.outcome.tenant,
            "status": self.status,
            "seconds": time.perf_counter() - self.start,
        }

    def log(self) -> None:
        """Write the line of the access log."""
        upstream_id = "" if self.upstream_id == self.request_id else self.upstream_id
        fields = {
            "method": self.method,
            "route": self.route[:_SHOWN],
            "model": self.outcome.model[:_SHOWN],
            "tenant": self.outcome.tenant,
            "tenant_name": self.outcome.tenant_name,
            "cache": self.outcome.text,
            "upstream_request_id": upstream_id[:_SHOWN],
            "status": self.status or 499,  # as proxies say that the client hung up
            "ms": round((time.perf_counter() - self.start) * 1e3, 1),
        }
        log.info(
            "request",
            extra={"fields": {name: value for name, value in fields.items() if value != ""}},
        )

    def attributes(self) -> dict[str, Any]:
        """What a span says; only what is known."""
        outcome = self.outcome
        payload = outcome.payload()
        tokens = (0, 0) if payload is None else tokens_of(payload)
        known = {
            "http.request.method": self.method,
            "url.path": self.route,
            "http.response.status_code": self.status or None,
            "gen_ai.operation.name": _OPERATIONS.get(self.route),
            "gen_ai.request.model": outcome.model,
            "gen_ai.usage.input_tokens": tokens[0] or None,
            "gen_ai.usage.output_tokens": tokens[1] or None,
            "semkv.cache": outcome.kind,
            "semkv.reason": outcome.reason.replace(" ", "_"),
            "semkv.tier": outcome.tier,
            "semkv.score": None if outcome.score is None else round(outcome.score, 3),
            "semkv.donor.id": outcome.donor,
            "semkv.tokens_saved": tokens[1] or None if outcome.kind == "hit" else None,
            "semkv.request.id": self.request_id,
            "semkv.tenant": outcome.tenant,
            "semkv.tenant.name": outcome.tenant_name,
        }
        return {name: value for name, value in known.items() if value not in ("", None)}


_request_id = ContextVar("semkv_request_id", default="")  # of this task, for lines of any module


def request_id() -> str:
    """The id of this task's request."""
    return _request_id.get()


def begin(scope: Scope) -> Seen:
    """Name the request of this task, and let its headers say so."""
    given = header(scope, _REQUEST_ID)
    # It keeps nothing secret, and the system's own randomness would let go of Python's lock.
    named = given if _ID.fullmatch(given) else f"{random.getrandbits(128):032x}"
    if named != given:
        kept = [pair for pair in scope["headers"] if pair[0] != _REQUEST_ID]
        scope["headers"] = [*kept, (_REQUEST_ID, named.encode())]
    _request_id.set(named)
    return Seen(named, scope["method"], scope["path"])


# -- lines -------------------------------------------------------------------------------------------------------------


class JsonLines(logging.Formatter):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        request_id = _request_id.get()
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **({"request_id": request_id} if request_id else {}),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def set_up_logs() -> None:
    """Lines on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel("INFO")
    for noisy in ("httpx", "sentence_transformers", "faiss"):
        logging.getLogger(noisy).setLevel("WARNING")
    with contextlib.suppress(ImportError):  # it prints for itself what goes on to the root as well
        import_module("huggingface_hub.utils.logging")
        logging.getLogger("huggingface_hub").handlers.clear()


# -- spans -------------------------------------------------------------------------------------------------------------


class Tracing:
    """Makes a span for every request, named and described by OpenTelemetry's conventions for generative AI. A fault is
    counted and costs no request anything."""

    def __init__(self, on_fault: Callable[[str], None]) -> None:
        try:
            from opentelemetry import propagate, trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise SemkvError(
                f"--otel needs {error.name}: in a checkout of semkv, pip install '.[otel]'"
            ) from error
        self._on_fault = on_fault
        self._trace = trace
        self._propagate = propagate
        name = os.environ.get("OTEL_SERVICE_NAME") or "semkv"
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("semkv")

    def start(self, scope: Scope, seen: Seen) -> Any:
        """The span of a request. It continues the trace in the headers; the upstream gets the span's context."""
        trace, propagate = self._trace, self._propagate
        try:
            headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
            context = propagate.extract(headers)
            span = self._tracer.start_span(seen.method, context, trace.SpanKind.SERVER)
            injected: dict[str, str] = {}
            propagate.inject(injected, trace.set_span_in_context(span, context))
            ours = {
                name.lower().encode(): value.encode("latin-1") for name, value in injected.items()
            }
            scope["headers"] = [
                *(pair for pair in scope["headers"] if pair[0] not in ours),
                *ours.items(),
            ]
        except Exception:
            self._failed()
            return trace.INVALID_SPAN
        return span

    def end(self, span: Any, seen: Seen) -> None:
        """The request is answered."""
        try:
            if span.is_recording():
                operation = _OPERATIONS.get(seen.route)
                if operation is not None:
                    span.update_name(f"{operation} {seen.outcome.model}".rstrip())
                span.set_attributes(seen.attributes())
                if seen.status >= 500 and seen.outcome.reason != ONLY:
                    span.set_status(self._trace.StatusCode.ERROR)
            span.end()
        except Exception:
            self._failed()

    def _failed(self) -> None:
        log.exception("tracing failed")
        self._on_fault("tracing")

    def close(self) -> None:
        """Send what is left. Blocks."""
        self._provider.shutdown()
