"""A control group: a share of requests that get no near-repeats, to measure near-repeats against in production.

Which requests these are follows from their keys: the same one is held out at each time and at each gateway. They are
looked up all the same. Where a near-hit would have been given, the two answers are compared, at no request more.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

from semkv_gateway.cache_client import EXACT, Lookup
from semkv_gateway.metrics import Metrics
from semkv_gateway.request_key import CanonicalRequest

HELD = "held out"
SERVED = "served"
SAME = "same"
OTHER = "other"
_WHOLE = 1 << 32


class Holdout:
    """Decides who is held out, and counts what became of them and of the others.

    Args:
        share: of requests, from 0 to below 1.
        metrics: whose counters it adds to.
    """

    def __init__(self, share: float, metrics: Metrics) -> None:
        self._share = share
        self._requests = metrics.counter(
            "holdout_requests",
            "Requests that could have near-hits, however they were answered.",
            "group",
        )
        self._near = metrics.counter(
            "holdout_near_hits", "Near-hits among them, served or not.", "group"
        )
        self._seconds = metrics.counter(
            "holdout_seconds", "From these requests to the start of their answers.", "group"
        )
        self._answers = metrics.counter(
            "holdout_answers",
            "Near-hits that were not served, by whether they say the same as the request's own answer.",
            "outcome",
        )
        for group in (HELD, SERVED) if share else ():
            for counter in (self._requests, self._near, self._seconds):
                counter.labels(group)
        for outcome in (SAME, OTHER) if share else ():
            self._answers.labels(outcome)

    def holds(self, canonical: CanonicalRequest) -> bool:
        """Whether a request gets no near-hit."""
        return zlib.crc32(canonical.key.encode()) < self._share * _WHOLE

    def applied(self, canonical: CanonicalRequest, found: Lookup) -> Lookup:
        """What the caches have for a request, without a near-hit where it is held out."""
        if not self.holds(canonical) or found.report is None:
            return found
        if found.tier == EXACT:
            return replace(found, entry=None)  # it joins nobody that asks the same in other words
        return Lookup(canonical, None, found.report.unused())

    def answered(self, canonical: CanonicalRequest, lookup: Lookup, seconds: float) -> None:
        """Count a request, whatever it was answered with: an exact hit may be one of an answer that only those who
        are held out have."""
        if not self._share or not canonical.route.converts:
            return
        group = HELD if self.holds(canonical) else SERVED
        found = lookup.report is not None and bool(lookup.report.hit_id)
        is_near = found and (group == HELD or lookup.tier != EXACT)
        self._requests.labels(group).inc()
        self._near.labels(group).inc(is_near)
        self._seconds.labels(group).inc(seconds)

    def compared(self, *, same: bool) -> None:
        """Count a near-hit that was held out, once the request's own answer is there."""
        self._answers.labels(SAME if same else OTHER).inc()
