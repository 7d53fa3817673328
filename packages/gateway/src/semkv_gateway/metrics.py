"""What the gateway counts: Prometheus metrics in a registry of their own, the dashboard's live figures and latest hits.

Events are counters and durations histograms; only sizes are gauges. Labels have few values.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import Counter as Counts
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.samples import Sample

from semkv.latest import Latest
from semkv.periodic import Every
from semkv.types import MediaSegment, Request, Segment
from semkv_gateway.response_cache import Found
from semkv_gateway.responses.store import StoredResponse
from semkv_gateway.sse import text_of

if TYPE_CHECKING:
    from semkv_gateway.cache_client import Lookup

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
_WINDOWS = {
    "5 minutes": 3,
    "1 hour": 36,
    "6 hours": 216,
    "24 hours": 864,
}  # of the live view: seconds of a bin
_BINS = 100  # of each
_LATENCIES = 1024  # of each tier
_NAME = 100  # characters of a model, a tenant or a header
_COUNTED = 200  # models, and as many tenants, that are counted by themselves
_LISTED = 50  # of the busiest of them are shown
_VALUES = 10_000  # latest values of headers that are known again
_OFTEN = 8  # new values, from which on a header has a label of its own
_LABELS = 32  # headers that have one
_SHOWN = 100  # latest hits, and as many approximate ones
_TEXT = 4_000  # characters of one text that are shown
_TEXTS = 8_000  # of all texts of a prompt, each counted with the fields around it
_FIELDS = 100
_PAYLOAD = 64 * 1024  # bytes of an answer that is shown

FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""prometheus_client reads this variable when it is imported."""

# beside the tiers that found an answer
MISS = "miss"
JOINED = "joined"
PASSED = "passed"
EQUAL, SIMILAR = "equal", "similar"  # kinds of joins


class Busiest:
    """Counts by name, in bounded memory, for the names that come most often (the space-saving algorithm).

    A name that is new takes the place of the rarest one, and its rank with it, so that what comes often enough is
    never pushed out by many that come once. What a name counted before it lost its place is in ``others``.
    """

    def __init__(self, most: int) -> None:
        self.others: Counts[str] = Counts()
        self._most = most
        self._ranks: dict[str, int] = {}  # no less than how often a name came
        self._counts: dict[str, Counts[str]] = {}

    def add(self, name: str, what: str) -> int:
        """Count ``what`` for a name. Returns how often the name was counted since it has its place."""
        if name not in self._ranks:
            self._ranks[name] = self._make_room()
            self._counts[name] = Counts()
        self._ranks[name] += 1
        counts = self._counts[name]
        counts[what] += 1
        return counts.total()

    def _make_room(self) -> int:
        """The rank that a new name begins with."""
        if len(self._ranks) < self._most:
            return 0
        rarest = min(self._ranks, key=self._ranks.__getitem__)
        self.others.update(self._counts.pop(rarest))
        return self._ranks.pop(rarest)

    def view(self, shown: int) -> list[tuple[str, Counts[str]]]:
        """The names that were counted most, largest first, and all other counts under ``others``."""
        ordered = sorted(self._counts.items(), key=lambda pair: -pair[1].total())
        others = self.others.copy()
        for _, counts in ordered[shown:]:
            others.update(counts)
        return ordered[:shown] + ([("others", others)] if others else [])


class Live:
    """Requests of the last day by tier, the latest latencies by tier, and requests by model and by tenant since the
    start. For the dashboard; starts empty. Used only on the event loop."""

    def __init__(self) -> None:
        self._bins: dict[str, deque[tuple[int, Counts[str]]]] = {
            name: deque(maxlen=_BINS) for name in _WINDOWS
        }
        self._latencies: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_LATENCIES)
        )
        self._by = {"model": Busiest(_COUNTED), "tenant": Busiest(_COUNTED)}

    def add(self, tier: str, seconds: float) -> None:
        """Count a request."""
        now = int(time.time())
        for name, step in _WINDOWS.items():
            bins = self._bins[name]
            if not bins or bins[-1][0] != now - now % step:
                bins.append((now - now % step, Counts()))
            bins[-1][1][tier] += 1
        self._latencies[tier].append(seconds)

    def ended(self, model: str, tenant: str, outcome: str) -> None:
        """Count what a request was answered with: the first word of ``X-Semkv``."""
        self._by["model"].add(model[:_NAME] or "-", outcome)
        self._by["tenant"].add(tenant[:_NAME] or "-", outcome)

    def view(self) -> dict[str, Any]:
        """Counts by window, bin and tier; p50 and p95 in seconds by tier; counts by model and tenant, largest first."""
        now = int(time.time())
        windows = {
            name: {
                "step_s": step,
                "bins": [(at, n) for at, n in self._bins[name] if at > now - step * _BINS],
            }
            for name, step in _WINDOWS.items()
        }
        by = {kind: names.view(_LISTED) for kind, names in self._by.items()}
        latency = {tier: _quantiles(values) for tier, values in self._latencies.items()}
        return {"windows": windows, "bins": _BINS, "latency": latency, "by": by}


def _quantiles(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": ordered[len(ordered) // 2],
        "p95": ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)],
    }


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
_MODES["store_up"] = "livemin"


class Metrics:
    """Counters, histograms and gauges, of ``workers`` processes that count together through files in a folder."""

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
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

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"semkv_{name}", text, labels, buckets=_BUCKETS, registry=self.registry)

    def _labelled(self, tier: str, status: int) -> tuple[Counter, Histogram]:
        return self._requests.labels(tier, str(status)), self._seconds.labels(tier)

    def read_sizes(self, read: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """Where gauges and the caches' own counters come from: ``{"gauges": ..., "events": ...}``. A worker of several
        reads them every second, so that the others have them."""
        self._read = read
        if self._all is not self.registry:
            Every(1.0, self.refresh, "semkv-figures")

    def refresh(self) -> None:
        """Read sizes and the caches' own counters. Blocks."""
        with self._refreshing:
            found = self._read()
            for name, value in found["gauges"].items():
                if name not in self._gauges:
                    mode: Any = _MODES.get(name, "livesum")
                    text = _HELP.get(name, name)
                    self._gauges[name] = Gauge(
                        f"semkv_{name}", text, registry=self.registry, multiprocess_mode=mode
                    )
                self._gauges[name].set(value)
            for name, value in found["events"].items():
                self._events.labels(name).inc(max(0.0, value - self._counted.get(name, 0.0)))
                self._counted[name] = value

    def request(self, tier: str, status: int, seconds: float) -> None:
        """Count one request that was answered."""
        requests, durations = self._children(tier, status)
        requests.inc()
        durations.observe(seconds)
        self.live.add(tier, seconds)

    def unkept(self, reason: str) -> None:
        """Count a request that the cache could not answer, or an answer that it could not keep."""
        self._uncacheable.labels(reason).inc()

    def documents_settled(self, outcome: str) -> None:
        """Count a request with several documents: its documents are `reordered`, or why they are not."""
        self._documents.labels(outcome).inc()

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

    def figures(self) -> dict[str, Any]:
        """For the dashboard: ``gauges``, and as ``totals`` requests by tier and why some went upstream,
        joins, tokens and seconds saved, faults. Blocks."""
        self.refresh()
        found: dict[str, list[Sample]] = {}
        for family in self._all.collect():
            for sample in family.samples:
                found.setdefault(
                    sample.name.removeprefix("semkv_").removesuffix("_total"), []
                ).append(sample)

        def by(name: str, label: str) -> Counts[str]:
            counts: Counts[str] = Counts()
            for sample in found.get(name, ()):
                counts[sample.labels[label]] += sample.value  # type: ignore[assignment]
            return counts

        names = {
            "joins": "single_flight_joins",
            "tokens_saved": "tokens_saved",
            "seconds_saved": "seconds_saved",
        }
        return {
            "gauges": {name: found[name][0].value for name in self._gauges if name in found},
            "totals": {
                "tiers": by("requests", "tier"),
                "faults": by("faults", "part"),
                "reasons": by("uncacheable", "reason"),
                "headers": by("header_values", "header"),
                "holdout": {
                    "requests": by("holdout_requests", "group"),
                    "near": by("holdout_near_hits", "group"),
                    "seconds": by("holdout_seconds", "group"),
                    "answers": by("holdout_answers", "outcome"),
                },
                **{
                    ours: sum(sample.value for sample in found.get(name, ()))
                    for ours, name in names.items()
                },
            },
        }

    def close(self) -> None:
        """Let other workers no longer count this one's sizes."""
        if self.workers > 1:
            mark_process_dead(os.getpid())  # type: ignore[no-untyped-call]

    def text(self) -> bytes:
        """The Prometheus text format. Blocks."""
        self.refresh()
        return generate_latest(self._all)


# -- the latest hits ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hit:
    """One hit, in no more memory than is shown of it. ``asked`` and ``donor`` are the two prompts of an approximate
    hit."""

    number: str
    at: float
    tier: str
    score: float | None
    seconds: float
    age_s: float
    tenant: str
    response: StoredResponse
    hit_id: str = ""
    asked: list[dict[str, str]] | None = None
    donor: list[dict[str, str]] | None = None

    def view(self) -> dict[str, Any]:
        """As JSON. Of the answer the first choice, or what was kept where it has another form."""
        own = [{"role": "question", "text": self.response.prompt}]
        answer = text_of(self.response.payload) or self.response.payload.decode(errors="replace")
        shown = ("at", "tier", "score", "seconds", "age_s", "tenant")
        return {
            "id": self.number,
            "key": self.response.key,
            "model": self.response.model,
            "answer": answer[:_TEXT],
            **{name: getattr(self, name) for name in shown},
            "asked": self.asked or own,
            "donor": self.donor or own,
        }


class RecentHits:
    """Keeps the latest hits; approximate ones are not pushed out by exact ones. Used only on the event loop."""

    def __init__(self) -> None:
        self._hits: dict[bool, deque[Hit]] = {kind: deque(maxlen=_SHOWN) for kind in (True, False)}

    def add(
        self, lookup: Lookup, found: Found, asked: Request | None, tenant: str, seconds: float
    ) -> None:
        """Note a hit."""
        response, report = found.response, lookup.report
        shown = response
        if len(response.payload) > _PAYLOAD or len(response.prompt) > _TEXT:
            payload = response.payload if len(response.payload) <= _PAYLOAD else b""
            shown = replace(response, payload=payload, prompt=response.prompt[:_TEXT])
        hit = Hit(
            number=secrets.token_hex(8),
            at=time.time(),
            tier=lookup.tier,
            score=lookup.score,
            seconds=seconds,
            age_s=found.age_s,
            tenant=tenant,
            response=shown,
        )
        exact = report is None or lookup.tier == "exact"
        if report is not None and not exact:
            sent = None if asked is None else _parts(asked.segments)
            hit = replace(hit, hit_id=report.hit_id, asked=sent, donor=_parts(report.plan.segments))
        self._hits[exact].append(hit)

    def recent(self) -> list[Hit]:
        """The latest hits, newest first."""
        return sorted(
            (hit for hits in self._hits.values() for hit in hits), key=lambda hit: -hit.at
        )

    def find(self, number: str) -> Hit | None:
        """A hit by its id, if it is still known."""
        return next((hit for hit in self.recent() if hit.number == number), None)


def _parts(segments: Sequence[Segment]) -> list[dict[str, str]]:
    """The segments as they are shown: a long conversation from its end, as far as there is room."""
    parts: list[dict[str, str]] = []
    room = _TEXTS
    for segment in reversed(segments):
        if isinstance(segment, MediaSegment):
            part = {"role": "image", "text": segment.media_id}
        else:
            part = {"role": str(segment.role), "text": segment.text[:_TEXT]}
        room -= len(part["text"]) + _FIELDS
        if room < 0:
            parts.append({"role": "earlier", "text": f"({len(segments) - len(parts)} more)"})
            break
        parts.append(part)
    return parts[::-1]
