"""What the gateway counts: Prometheus metrics in a registry of their own, the dashboard's live figures.

Events are counters and durations histograms; only sizes are gauges. Labels have few values.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from semkv.latest import Latest
from semkv.periodic import Every
from semkv_dashboard.busiest import Busiest
from semkv_dashboard.figures import Live, read
from semkv_dashboard.history import History
from semkv_dashboard.names import TenantNames

_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
_NAME = 100  # characters of a model, a tenant or a header
_COUNTED = 200  # models, and as many tenants, that are counted by themselves
_VALUES = 10_000  # latest values of headers that are known again
_OFTEN = 8  # new values, from which on a header has a label of its own
_LABELS = 32  # headers that have one

_REFRESH_S = 5.0
# Events of the caches that are counted by time, too.
_BY_TIME = (
    *("response fault:", "response refused:", "response unwritten:", "semantic fault:"),
    *("semantic veto:", "semantic refused", "semantic barred"),
)
_JUDGED = "semantic judged:"  # by the judge in this process

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client reads this variable when it is imported."""

# beside the tiers that found an answer
MISS = "miss"
JOINED = "joined"
PASSED = "passed"
EQUAL, SIMILAR = "equal", "similar"  # kinds of joins


_HELP = {
    "response_bytes": "Bytes of stored answers.",
    "response_entries": "Stored answers.",
    "memory_bytes": "Bytes of answers held in memory.",
    "store_up": "1 while the store answers; 0 while it is away and only memory is served.",
    "store_writable": "1 while the store takes new answers; 0 while it is full, read-only or away.",
    "unwritten_entries": "Answers that memory alone has, until the store takes them.",
    "salt_refused": "1 once the upstream has refused cache_salt: tenants share its prefix cache.",
    "flights": "Upstream requests on their way.",
    "flight_bytes": "Bytes of answers on their way.",
    "semantic_entries": "Entries of the semantic cache.",
    "media_bytes": "Bytes of stored images.",
    "hits_checked": "Approximate hits of the random sample that were checked.",
    "wrong_hit_share": "Share of checked approximate hits that the comparator calls wrong; its errors count in.",
    "wrong_hit_share_upper": "Upper end of its 95% interval, of chance alone.",
}

# How the gauges of several workers make one; all others are added up.
_SHARED = (
    "response_entries",
    "response_bytes",
    "response_limit_bytes",
    "semantic_entries",
    "media_bytes",
)
_MODES = dict.fromkeys(
    (*_SHARED, "media_limit_bytes", "wrong_hit_share", "wrong_hit_share_upper"), "livemax"
)
_MODES |= dict.fromkeys(("store_up", "store_writable"), "livemin")
_MODES["salt_refused"] = "livemax"


class Metrics:
    """Counters, histograms and gauges, of ``workers`` processes that count together through files in a folder.

    Args:
        workers: processes.
        history: counts by time; None for none.
        names: of tenants, for labels.
    """

    def __init__(
        self, workers: int = 1, history: History | None = None, names: TenantNames | None = None
    ) -> None:
        self.workers = workers
        self.history = history
        self.names = names or TenantNames()
        self.registry = self._all = CollectorRegistry()
        if workers > 1:
            self._all = CollectorRegistry()
            MultiProcessCollector(self._all)  # type: ignore[no-untyped-call]
        self._refreshing = threading.Lock()
        self._read: Callable[[], Mapping[str, Mapping[str, float]]] = lambda: {
            "gauges": {},
            "events": {},
        }
        self._gauges: dict[str, Gauge] = {}
        self._counted: dict[str, float] = {}
        self.live = Live()
        self._events = self.counter("cache_events", "What the caches counted, by event.", "event")
        self._requests = self.counter("requests", "Requests, by tier and status.", "tier", "status")
        self._seconds = self._histogram(
            "request_seconds", "From the whole request to the start of the answer.", "tier"
        )
        self.upstream_seconds = self._histogram("upstream_seconds", "Whole upstream answers.")
        self.lookup_seconds = self._histogram(
            "semantic_lookup_seconds", "Semantic lookups, encoders included."
        )
        self.judge_seconds = self._histogram(
            "judge_seconds", "Verdicts of the judge, as they came."
        )
        self.judged = self.counter(
            "judged",
            "Pairs in doubt by what the judge said; late counts requests that waited in vain.",
            "outcome",
        )
        self._uncacheable = self.counter(
            "uncacheable",
            "Requests that the cache could not answer, and answers that it could not keep.",
            "reason",
        )
        self.turned_away = self.counter(
            "turned_away",
            "Requests answered with 503, or cut, for want of room, by what there is too much of.",
            "what",
        )
        for what in ("connections", "bodies", "unread"):
            self.turned_away.labels(what)
        self.admin_refused = self.counter(
            "admin_refused", "Requests of operators without the right key, by why.", "reason"
        )
        self.feedback = self.counter("feedback", "Hits that clients call wrong.", "outcome")
        self._headers = self.counter(
            "header_values",
            "New values of headers that nobody has reviewed, each of which separates requests; '?' is the query.",
            "header",
        )
        self._documents = self.counter(
            "documents",
            "Requests with several documents, by what became of their order.",
            "outcome",
        )
        self._document_reuse = self.counter(
            "document_reuse",
            "Requests that say where their documents stand, by what became of them, and checks of their answers.",
            "outcome",
        )
        self._values: Latest[int, None] = Latest(_VALUES)
        self._split = Busiest(_COUNTED)
        self._labels: set[str] = set()
        self._faults = self.counter("faults", "Faults that became a miss.", "part")
        self.joins = self.counter(
            "single_flight_joins",
            "Requests that joined another's, by how much alike they are.",
            "kind",
        )
        for kind in (EQUAL, SIMILAR):
            self.joins.labels(kind)
        self.tokens = self.counter("tokens_saved", "Completion tokens not computed.")
        self._children = lru_cache(256)(self._labelled)
        self.saved = self.counter(
            "seconds_saved", "Upstream seconds not spent, as measured on misses."
        )

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """A new counter of all processes."""
        return Counter(f"semkv_{name}", text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str, mode: str) -> Gauge:
        """A new gauge; ``mode`` says how those of several processes make one, see `prometheus_client`."""
        kind: Any = mode
        return Gauge(
            f"semkv_{name}",
            text,
            labels,
            registry=self.registry,
            multiprocess_mode=kind,
        )

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"semkv_{name}", text, labels, buckets=_BUCKETS, registry=self.registry)

    def _labelled(self, tier: str, status: int) -> tuple[Counter, Histogram]:
        return self._requests.labels(tier, str(status)), self._seconds.labels(tier)

    def read_sizes(self, sizes: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """Where gauges and the caches' own counters come from: ``{"gauges": ..., "events": ...}``. A worker of several
        reads them every second, so that the others have them; one alone now and then, for counts by time."""
        self._read = sizes
        several = self._all is not self.registry
        if several or self.history is not None:
            Every(1.0 if several else _REFRESH_S, self.refresh, "semkv-figures")

    def refresh(self) -> None:
        """Read sizes and the caches' own counters. Blocks."""
        with self._refreshing:
            found = self._read()
            for name, value in found["gauges"].items():
                if name not in self._gauges:
                    mode = _MODES.get(name, "livesum")
                    self._gauges[name] = self.gauge(name, _HELP.get(name, name), mode=mode)
                self._gauges[name].set(value)
            for name, value in found["events"].items():
                new = max(0.0, value - self._counted.get(name, 0.0))
                self._events.labels(name).inc(new)
                if name.startswith(_JUDGED):
                    self.judged.labels(name.removeprefix(_JUDGED)).inc(new)
                self._counted[name] = value
                if new and name.startswith(_BY_TIME):
                    self.note("event", name, int(new))

    def request(self, tier: str, status: int, seconds: float) -> None:
        """Count one request that was answered."""
        requests, durations = self._children(tier, status)
        requests.inc()
        durations.observe(seconds)
        self.live.add(tier, seconds)
        self.note("tier", tier)
        if status >= 400:
            self.note("status", str(status))

    def note(self, kind: str, name: str, count: int = 1) -> None:
        """Count something by time."""
        if self.history is not None:
            self.history.add(kind, name, count)

    def unkept(self, reason: str) -> None:
        """Count a request that the cache could not answer, or an answer that it could not keep."""
        self._uncacheable.labels(reason).inc()
        self.note("reason", reason)

    def documents_settled(self, outcome: str) -> None:
        """Count a request with several documents: its documents are `reordered`, or why they are not."""
        self._documents.labels(outcome).inc()

    def document_reused(self, outcome: str) -> None:
        """Count a request whose documents may be reused, or a check of its answer."""
        self._document_reuse.labels(outcome).inc()

    def separated(self, unknown: Iterable[tuple[bytes, bytes]]) -> None:
        """Count the new values of headers by their names, of which many may be made up: only those that come often
        have a label of their own."""
        for name, value in unknown:
            known = hash((name, value))
            is_new = known not in self._values
            self._values[known] = None
            if is_new:
                self._headers.labels(self._label(name[:_NAME].decode("latin-1"))).inc()

    def _label(self, name: str) -> str:
        count = self._split.add(name, "values")
        if count >= _OFTEN and len(self._labels) < _LABELS:
            self._labels.add(name)
        return name if name in self._labels else "others"

    def fault(self, part: str) -> None:
        self._faults.labels(part).inc()
        self.note("fault", part)

    def figures(self) -> dict[str, Any]:
        """For the dashboard: see `semkv_dashboard.figures.read`. Blocks."""
        self.refresh()
        return read(self._all, self._gauges)

    def close(self) -> None:
        """Let other workers no longer count this one's sizes."""
        if self.workers > 1:
            mark_process_dead(os.getpid())  # type: ignore[no-untyped-call]

    def text(self) -> bytes:
        """The Prometheus text format. Blocks."""
        self.refresh()
        return generate_latest(self._all)
