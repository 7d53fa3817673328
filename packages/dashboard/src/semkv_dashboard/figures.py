"""Figures for the pages, from what Prometheus counts."""

from __future__ import annotations

from collections import Counter as Counts
from collections import defaultdict, deque
from collections.abc import Container, Iterable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

_LATENCIES = 1024  # of each tier
_BY = {
    "tiers": ("requests", "tier"),
    "faults": ("faults", "part"),
    "reasons": ("uncacheable", "reason"),
    "headers": ("header_values", "header"),
    "turned_away": ("turned_away", "what"),
    "admin_refused": ("admin_refused", "reason"),
    "feedback": ("feedback", "outcome"),
}
_HOLDOUT = {
    "requests": ("holdout_requests", "group"),
    "near": ("holdout_near_hits", "group"),
    "seconds": ("holdout_seconds", "group"),
    "answers": ("holdout_answers", "outcome"),
}
_SUMS = {
    "joins": "single_flight_joins",
    "tokens_saved": "tokens_saved",
    "seconds_saved": "seconds_saved",
}


class Live:
    """The latest latencies, by tier. For the dashboard; starts empty. Used only on the event loop."""

    def __init__(self) -> None:
        self._latencies: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_LATENCIES)
        )

    def add(
        self,
        tier: str,
        seconds: float,
    ) -> None:
        """Note how long a request took."""
        self._latencies[tier].append(seconds)

    def view(self) -> dict[str, dict[str, float]]:
        """p50 and p95 in seconds by tier."""
        return {tier: _quantiles(values) for tier, values in self._latencies.items()}


def _quantiles(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": ordered[len(ordered) // 2],
        "p95": ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)],
    }


def read(registry: CollectorRegistry, gauges: Container[str]) -> dict[str, Any]:
    """The ``gauges`` of these names, and as ``totals`` what was counted since the start, by name and label."""
    found: defaultdict[str, list[Sample]] = defaultdict(list)
    for family in registry.collect():
        for sample in family.samples:
            name = sample.name.removeprefix("semkv_").removesuffix("_total")
            found[name].append(sample)

    def by(name: str, label: str) -> Counts[str]:
        counts: Counts[str] = Counts()
        for sample in found[name]:
            counts[sample.labels[label]] += sample.value  # type: ignore[assignment]
        return counts

    totals: dict[str, Any] = {ours: by(*theirs) for ours, theirs in _BY.items()}
    totals["holdout"] = {ours: by(*theirs) for ours, theirs in _HOLDOUT.items()}
    totals |= {ours: sum(sample.value for sample in found[name]) for ours, name in _SUMS.items()}
    shown = {name: samples[0].value for name, samples in found.items() if name in gauges}
    return {
        "gauges": shown,
        "totals": totals,
    }
