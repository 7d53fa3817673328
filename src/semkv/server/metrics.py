"""What the gateway counts: Prometheus metrics in a registry of their own, and the live figures of the dashboard.

Events are counters and durations histograms; only sizes are gauges. Labels have few values: tenants are no label
unless asked for, and then one of 64 buckets of their digest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SECONDS = 300  # of the live view
_LATENCIES = 1024
TENANT_BUCKETS = 64

MISS, JOINED, PASSED = "miss", "joined", "passed"  # beside the tiers that found an answer
EQUAL, SIMILAR = "equal", "similar"  # kinds of joins


@dataclass(slots=True)
class _Second:
    """What happened in one second."""

    at: int
    tiers: dict[str, int]


class Live:
    """The last five minutes by tier, and the latest latencies. For the dashboard; starts empty."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque(maxlen=_SECONDS)
        self._latencies: dict[str, deque[float]] = {kind: deque(maxlen=_LATENCIES) for kind in ("hit", MISS)}

    def add(self, tier: str, seconds: float) -> None:
        now = int(time.time())
        if not self._seconds or self._seconds[-1].at != now:
            self._seconds.append(_Second(now, {}))
        tiers = self._seconds[-1].tiers
        tiers[tier] = tiers.get(tier, 0) + 1
        if tier not in (PASSED, JOINED):
            self._latencies[MISS if tier == MISS else "hit"].append(seconds)

    def view(self) -> dict[str, Any]:
        """Counts by second and tier, and p50/p95 in seconds of hits and misses (None where there were none)."""
        since = int(time.time()) - _SECONDS
        seconds = [{"at": s.at, "tiers": s.tiers} for s in self._seconds if s.at > since]
        return {
            "seconds": seconds,
            "window_s": _SECONDS,
            "latency": {kind: quantiles(values) for kind, values in self._latencies.items()},
        }


def quantiles(values: Iterable[float]) -> dict[str, float | None]:
    """p50 and p95 of some seconds."""
    ordered = sorted(values)
    if not ordered:
        return {"p50": None, "p95": None}
    return {"p50": ordered[len(ordered) // 2], "p95": ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]}


class _Sizes(Collector):
    """Reads sizes and the cache's own counters when they are asked for."""

    def __init__(self, read: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        found = self._read()
        for name, value in found["gauges"].items():
            yield GaugeMetricFamily(f"semkv_{name}", _HELP.get(name, name), value=value)
        events = CounterMetricFamily("semkv_cache_events", "What the caches counted, by event.", labels=["event"])
        for name, value in found["events"].items():
            events.add_metric([name], value)
        yield events

    def describe(self) -> Iterable[Metric]:
        return ()


_HELP = {
    "response_bytes": "Bytes of stored answers.",
    "response_entries": "Stored answers.",
    "memory_bytes": "Bytes of answers held in memory.",
    "flights": "Upstream requests on their way.",
    "flight_bytes": "Bytes of answers on their way.",
    "semantic_entries": "Entries of the semantic cache.",
    "media_bytes": "Bytes of stored images.",
    "hits_checked": "Approximate hits of the random sample that were checked.",
    "wrong_hit_share": "Share of checked approximate hits that the comparator calls wrong; its errors count in.",
    "wrong_hit_share_upper": "Upper end of its 95% interval, of chance alone.",
}


class Metrics:
    """Counters and histograms.

    Args:
        tenants: label requests with a bucket of the tenant's digest.
    """

    def __init__(self, *, tenants: bool = False) -> None:
        self.registry = CollectorRegistry()
        self.live = Live()
        self._tenants = tenants
        labels = ["tier", "status", "tenant"] if tenants else ["tier", "status"]
        self._requests = Counter("semkv_requests", "Requests, by tier and status.", labels, registry=self.registry)
        self._seconds = Histogram(
            "semkv_request_seconds", "From the whole request to the start of the answer.", ["tier"],
            buckets=_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._upstream = Histogram(
            "semkv_upstream_seconds", "Whole upstream answers.", buckets=_BUCKETS, registry=self.registry
        )
        self._lookup = Histogram(
            "semkv_semantic_lookup_seconds", "Semantic lookups, encoders included.", buckets=_BUCKETS,
            registry=self.registry,
        )  # fmt: skip
        self._uncacheable = Counter(
            "semkv_uncacheable", "Requests passed on, by reason.", ["reason"], registry=self.registry
        )
        self._faults = Counter("semkv_faults", "Faults that became a miss.", ["part"], registry=self.registry)
        self.joins = Counter(
            "semkv_single_flight_joins", "Requests that joined another's, by how much alike they are.", ["kind"],
            registry=self.registry,
        )  # fmt: skip
        for kind in (EQUAL, SIMILAR):
            self.joins.labels(kind)
        self.parted = Counter(
            "semkv_single_flight_parted", "Similar requests that joined, and then went upstream themselves.",
            registry=self.registry,
        )  # fmt: skip
        self.cut = Counter(
            "semkv_overlap_cut", "Requests that were sent during the lookup, and given up for what it found.",
            registry=self.registry,
        )  # fmt: skip
        self.left_out = Counter(
            "semkv_overlap_left_out", "Lookups not made, since too many waited and the upstream was asked.",
            registry=self.registry,
        )  # fmt: skip
        self.tokens = Counter("semkv_tokens_saved", "Completion tokens not computed.", registry=self.registry)
        self.saved = Counter(
            "semkv_seconds_saved", "Upstream seconds not spent, as measured on misses.", registry=self.registry
        )
        self._made: dict[tuple[str, ...], Any] = {}

    def read_sizes(self, read: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """Where gauges and the caches' own counters come from: ``{"gauges": ..., "events": ...}``."""
        self.registry.register(_Sizes(read))

    def request(self, tier: str, status: int, seconds: float, tenant: str) -> None:
        """Count one request that was answered."""
        labels: tuple[str, ...] = (tier, str(status))
        if self._tenants:
            labels += (str(int(tenant[:8] or "0", 16) % TENANT_BUCKETS),)
        child = self._made.get(labels)
        if child is None:
            child = self._made[labels] = self._requests.labels(*labels)
        child.inc()
        timer = self._made.get((tier,))
        if timer is None:
            timer = self._made[(tier,)] = self._seconds.labels(tier)
        timer.observe(seconds)
        self.live.add(tier, seconds)

    def uncacheable(self, reason: str) -> None:
        self._uncacheable.labels(reason).inc()

    def fault(self, part: str) -> None:
        self._faults.labels(part).inc()

    def upstream(self, seconds: float) -> None:
        self._upstream.observe(seconds)

    def lookup(self, seconds: float) -> None:
        self._lookup.observe(seconds)

    def totals(self) -> dict[str, Any]:
        """Requests by tier, joins, tokens and seconds saved, faults; for the dashboard."""
        tiers: dict[str, float] = {}
        for sample in _samples(self._requests, "_total"):
            tiers[sample.labels["tier"]] = tiers.get(sample.labels["tier"], 0.0) + sample.value
        names = {"joins": self.joins, "tokens_saved": self.tokens, "seconds_saved": self.saved}
        single = {name: sum(s.value for s in _samples(counter, "_total")) for name, counter in names.items()}
        faults = {sample.labels["part"]: sample.value for sample in _samples(self._faults, "_total")}
        return {"tiers": tiers, "faults": faults, **single}

    def text(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


def _samples(counter: Counter, suffix: str) -> list[Sample]:
    return [sample for family in counter.collect() for sample in family.samples if sample.name.endswith(suffix)]
