"""OpenTelemetry: a span for every request, named and described by its conventions for generative AI.

Where spans go, and how many are taken, is said in the usual variables: ``OTEL_EXPORTER_OTLP_ENDPOINT``,
``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER`` and others.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from semkv.errors import SemkvError
from semkv.server.asgi import Scope
from semkv.server.logs import Seen
from semkv.server.sse import usage_of

try:
    from opentelemetry import propagate, trace
    from opentelemetry.exporter.otlp.proto.http import trace_exporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
except ModuleNotFoundError as error:
    raise SemkvError(f"--otel needs {error.name}: in a checkout of semkv, pip install '.[otel]'") from error

log = logging.getLogger(__name__)

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
_LARGE = 64 * 1024  # bytes of an answer that is not read for its usage


class Tracing:
    """Makes the spans. A fault is counted and costs no request anything.

    Args:
        on_fault: counts a fault, by the part that failed.
    """

    def __init__(self, on_fault: Callable[[str], None]) -> None:
        self._on_fault = on_fault
        name = os.environ.get("OTEL_SERVICE_NAME") or "semkv"
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
        self._provider.add_span_processor(BatchSpanProcessor(trace_exporter.OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("semkv")

    def start(self, scope: Scope, seen: Seen) -> trace.Span:
        """Start the span of a request. It continues the trace in the headers; the upstream gets the span's context."""
        try:
            headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
            context = propagate.extract(headers)
            span = self._tracer.start_span(seen.method, context, trace.SpanKind.SERVER)
            told: dict[str, str] = {}
            propagate.inject(told, trace.set_span_in_context(span, context))
            ours = [(k.lower().encode(), v.encode("latin-1")) for k, v in told.items()]
            names = {name for name, _ in ours}
            scope["headers"] = [*(pair for pair in scope["headers"] if pair[0] not in names), *ours]
        except Exception:
            self._failed()
            return trace.INVALID_SPAN
        return span

    def end(self, span: trace.Span, seen: Seen) -> None:
        """The request is answered."""
        try:
            if span.is_recording():
                operation = _OPERATIONS.get(seen.route, "")
                if operation:
                    span.update_name(f"{operation} {seen.model}".rstrip())
                span.set_attributes({k: v for k, v in _attributes(seen, operation).items() if v not in ("", None)})
                if seen.status >= 500:
                    span.set_status(trace.StatusCode.ERROR)
            span.end()
        except Exception:
            self._failed()

    def _failed(self) -> None:
        log.exception("tracing failed")
        self._on_fault("tracing")

    def close(self) -> None:
        """Send what is left. Blocks."""
        self._provider.shutdown()


def _attributes(seen: Seen, operation: str) -> dict[str, Any]:
    """What a span says; without a value where nothing is known."""
    outcome, *words = seen.cache.split() or [""]
    said = dict(word.split("=", 1) for word in words if "=" in word)
    usage = _usage_of(seen)
    match = seen.lookup.report.plan.match if seen.lookup is not None and seen.lookup.report is not None else None
    return {
        "http.request.method": seen.method,
        "url.path": seen.route,
        "http.response.status_code": seen.status or None,
        "gen_ai.operation.name": operation,
        "gen_ai.request.model": seen.model,
        **{f"gen_ai.usage.{name}": count for name, count in usage.items()},
        "semkv.cache": outcome,
        "semkv.reason": said.get("reason"),
        "semkv.tier": said.get("tier") or said.get("reuse"),
        "semkv.score": float(said["score"]) if "score" in said else None,
        "semkv.donor.id": match.entry_id if match is not None and "score" in said else None,
        "semkv.tokens_saved": usage.get("output_tokens") if outcome == "hit" else None,
        "semkv.request.id": seen.request_id,
        "semkv.tenant": seen.tenant,
    }


def _usage_of(seen: Seen) -> dict[str, int]:
    """The tokens that the answer speaks of."""
    payload = None
    if seen.flight is not None:  # a miss, also where what was found could not be used
        payload = seen.flight.payload
    elif seen.lookup is not None and seen.lookup.found is not None:
        payload = seen.lookup.found.response.payload
    return {} if payload is None or len(payload) > _LARGE else usage_of(payload)
