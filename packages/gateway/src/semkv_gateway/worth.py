"""What the gateway's hits save: upstream time, the GPU's time, tokens and money; by tier, day, model and tenant.

A hit saves what a miss of its size takes: the median of the latest, by model. Of the upstream's machine a request takes
its share of each moment at which it runs: of two at once, a half each. So the shares of all requests make the time in
which the upstream was busy, and what a hit saves of that is the share of a miss of its size.

The event loop only counts hits; what they saved is looked up, and counters and files get the sums, every few seconds
and whenever they are read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from semkv.account import JUDGE, Account, Typical, name_of
from semkv.errors import StoreError
from semkv.latest import Latest
from semkv.periodic import Every
from semkv_dashboard.busiest import Busiest
from semkv_dashboard.worth import worth_of
from semkv_gateway.cache_client import EXACT, Lookup
from semkv_gateway.metrics import Metrics
from semkv_gateway.prices import Prices
from semkv_gateway.request_key import CanonicalRequest
from semkv_gateway.responses.store import StoredResponse
from semkv_gateway.singleflight import InFlight
from semkv_gateway.usage import tokens_of
from semkv_stores.ledger import OTHERS, Ledger, Saved, Sums, TierFigures, today

log = logging.getLogger(__name__)

JOINED = "joined"  # the tier of requests that had the answer of an equal one on its way
_WRITE_S = 5.0  # between two writes
_MODELS = 256  # whose pace is known
_KNOWN = 4096  # answers whose tokens are known
_NAME = 100  # characters of a model
_WAITING = 1000  # sums that wait for the next write
_COUNTED = 200  # pairs of a model and a tenant that are counted by themselves
_OFTEN = 8  # hits, from which on a pair has labels of its own
_LABELS = 64  # pairs that have
_SHOWN_DAYS = 30


class Shares:
    """The time of one machine, divided among the requests that run on it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._running = 0
        self._at = 0.0  # the share of a request that had run since the start
        self._latest = clock()

    @property
    def at(self) -> float:
        """A request's share is the difference between its end and its beginning."""
        now = self._clock()
        if self._running:
            self._at += (now - self._latest) / self._running
        self._latest = now
        return self._at

    def begin(self) -> float:
        at = self.at
        self._running += 1
        return at

    def end(self) -> None:
        _ = self.at
        self._running -= 1


class Pace:
    """How long whole answers of one model take, and their shares of the machine, by their tokens."""

    def __init__(self) -> None:
        self.whole = Typical()
        self.shares = Typical()


class Hits:
    """How often one answer was given since it was counted last."""

    __slots__ = ("canonical", "count", "payload")

    def __init__(self, canonical: CanonicalRequest, payload: bytes) -> None:
        self.canonical = canonical
        self.payload = payload
        self.count = 0


class Worth:
    """See the module. The event loop calls all but what blocks.

    Args:
        account: of the tiers.
        prices: of tokens.
        metrics: whose counters it adds to.
        folder: the cache directory.
        days: that are kept there.
    """

    def __init__(
        self, account: Account, prices: Prices, metrics: Metrics, folder: Path, *, days: int
    ) -> None:
        self.shares = Shares()
        self._account = account
        self._prices = prices
        self._metrics = metrics
        self._folder = folder
        self._days = days
        self._ledger: Ledger | None = None
        self._said = ""  # the file's fault that was logged last
        self._paces: Latest[str, Pace] = Latest(_MODELS)
        self._all = Pace()
        self._tokens: Latest[str, tuple[int, int]] = Latest(_KNOWN)  # by an answer's key
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._exact: dict[str, Hits] = {}  # by the answer's key
        self._new: dict[tuple[int, str, str], Saved] = {}  # by day, model and tenant
        self._unwritten: dict[tuple[int, str, str], Saved] = {}
        self._unwritten_tiers: dict[str, TierFigures] = {}
        self._spent = metrics.counter("tier_seconds_spent", "Seconds that lookups took.", "tier")
        self._saved = metrics.counter("tier_seconds_saved", "Upstream seconds not spent.", "tier")
        self._left_out = metrics.counter(
            "tier_left_out",
            "Requests for which a tier did not pay; with --tiers auto it was not asked.",
            "tier",
        )
        self._asked = metrics.gauge(
            "tier_asked_share",
            "The share of requests for which a tier is asked now.",
            "tier",
            mode="livemin",
        )
        self._busiest = Busiest(_COUNTED)
        self._labels: set[tuple[str, str]] = set()
        pair = ("model", "tenant")
        self._requests = metrics.counter("requests_saved", "Requests not sent.", *pair)
        self._gpu = metrics.counter(
            "gpu_seconds_saved", "Seconds of the upstream's machine.", *pair
        )
        self._money = metrics.counter("money_saved", "What tokens not computed cost.", *pair)
        self._paid = metrics.counter("money_spent", "What the tokens of answers cost.", *pair)
        self._writer = Every(_WRITE_S, self.write, "semkv-worth")

    # -- on the event loop --------------------------------------------------------------------------------------

    def sent(self, flight: InFlight) -> float:
        """A request goes upstream. Returns the share of one that began with the gateway, for `computed`."""
        flight.task.add_done_callback(lambda _: self.shares.end())
        return self.shares.begin()

    def computed(
        self, canonical: CanonicalRequest, payload: bytes, *, seconds: float, begun: float
    ) -> None:
        """The upstream has answered in so many seconds; ``begun`` is what `sent` returned."""
        tokens = tokens_of(payload)
        share = self.shares.at - begun
        model = canonical.model[:_NAME]
        if model not in self._paces:
            self._paces[model] = Pace()
        for pace in (self._paces[model], self._all):
            pace.whole.measured(seconds, *tokens)
            pace.shares.measured(share, *tokens)
        self._account.missed(seconds)
        money = self._prices.money(canonical.model, *tokens)
        with self._lock:
            worth = self._of(canonical)
            worth.sent_requests += 1
            worth.sent_money += money

    def hit(self, lookup: Lookup, response: StoredResponse) -> None:
        """A stored answer was given, or that of a request on its way that asks the same in other words."""
        report = lookup.report
        if report is not None and lookup.tier != EXACT and report.plan.match is not None:
            match = report.plan.match
            tier = JUDGE if match.judged else name_of(match.tier)
            counts = tier not in report.left_out
            tokens = tokens_of(response.payload)
            self._add(lookup.canonical, tokens, tier, counts=counts)
            self._used(response.key, lookup.canonical, 1)
            return
        with self._lock:
            hits = self._exact.get(response.key)
            if hits is None:
                hits = self._exact[response.key] = Hits(lookup.canonical, response.payload)
            hits.count += 1
        if len(self._exact) >= _WAITING:
            self._add_exact()

    def judged(
        self,
        canonical: CanonicalRequest,
        model: str,
        payload: bytes,
        *,
        seconds: float,
        counts: bool,
    ) -> None:
        """A judge was asked for a request, and took so long; ``counts`` as for `Account.spent`."""
        self._account.spent(JUDGE, seconds, counts=counts)
        money = self._prices.money(model, *tokens_of(payload))
        with self._lock:
            self._of(canonical).sent_money += money

    def joined(self, canonical: CanonicalRequest, flight: InFlight) -> None:
        """A request has the answer of an equal one, which is still on its way."""

        def ended(_: object) -> None:
            if flight.whole and flight.payload is not None:
                self._add(canonical, tokens_of(flight.payload), JOINED)

        flight.task.add_done_callback(ended)

    def _add_exact(self) -> None:
        """Count the exact hits since the last time."""
        with self._lock:
            exact = self._exact
            self._exact = {}
        for key, hits in exact.items():
            with self._lock:
                tokens = self._tokens.get(key)
                if tokens is None:
                    tokens = tokens_of(hits.payload)
                    self._tokens[key] = tokens
            self._add(hits.canonical, tokens, EXACT, count=hits.count)
            self._used(key, hits.canonical, hits.count)

    def _used(self, key: str, canonical: CanonicalRequest, count: int) -> None:
        if self._metrics.history is not None:
            self._metrics.history.used(key, canonical.partition, count)

    def _add(
        self,
        canonical: CanonicalRequest,
        tokens: tuple[int, int],
        tier: str,
        *,
        count: int = 1,
        counts: bool = True,
    ) -> None:
        """Count requests that were not sent, all with one answer."""
        pace = self._paces.get(canonical.model[:_NAME], self._all)
        seconds = pace.whole.seconds(*tokens) or 0.0
        share = pace.shares.seconds(*tokens) or 0.0
        self._account.saved(tier, count * seconds, hits=count, counts=counts)
        money = self._prices.money(canonical.model, *tokens)
        with self._lock:
            worth = self._of(canonical)
            worth.requests += count
            worth.input_tokens += count * tokens[0]
            worth.output_tokens += count * tokens[1]
            worth.upstream_s += count * seconds
            worth.gpu_s += count * share
            worth.money += count * money

    def _of(self, canonical: CanonicalRequest) -> Saved:
        """The sum that a request belongs to. Called with the lock."""
        name = canonical.model[:_NAME].encode(errors="replace").decode()
        key = (today(), name or "-", canonical.partition)
        if key not in self._new and len(self._new) >= _WAITING:
            key = (key[0], OTHERS, OTHERS)
        if key not in self._new:
            self._new[key] = Saved()
        return self._new[key]

    # -- in threads ---------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Let the counters have what is new. Blocks."""
        self._add_exact()
        if self._metrics.history is not None:
            self._metrics.history.named(self._metrics.names.take())
        with self._lock:
            new, self._new = self._new, {}
        tiers = self._account.take()
        for (_, model, tenant), worth in new.items():
            self._count(model, tenant, worth)
            self._metrics.tokens.inc(worth.output_tokens)
            self._metrics.saved.inc(worth.upstream_s)
        for tier, figures in tiers.items():
            self._spent.labels(tier).inc(max(0.0, figures.spent_s))
            self._saved.labels(tier).inc(max(0.0, figures.saved_s))
            self._left_out.labels(tier).inc(figures.left_out)
        for tier, share in self._account.asked_share().items():
            self._asked.labels(tier).set(share)
        with self._lock:
            _add_all(self._unwritten, new)
            _add_all(self._unwritten_tiers, tiers)

    def _count(self, model: str, tenant: str, worth: Saved) -> None:
        pair = (model, self._metrics.names.shown(tenant))
        hits = 0
        for _ in range(min(worth.requests, _OFTEN)):
            hits = self._busiest.add(" ".join(pair), "hits")
        if hits >= _OFTEN and len(self._labels) < _LABELS:
            self._labels.add(pair)
        labels = pair if pair in self._labels else (OTHERS, OTHERS)
        self._requests.labels(*labels).inc(worth.requests)
        self._gpu.labels(*labels).inc(worth.gpu_s)
        self._money.labels(*labels).inc(worth.money)
        self._paid.labels(*labels).inc(worth.sent_money)

    def write(self) -> None:
        """Bring what is new into the file; what it does not take waits for the next time. Blocks."""
        self.publish()
        with self._writing:
            with self._lock:
                saved, self._unwritten = self._unwritten, {}
                tiers, self._unwritten_tiers = self._unwritten_tiers, {}
            if not saved and not tiers:
                return
            try:
                self._opened().add(tiers, saved)
            except Exception as error:  # it costs no request anything
                self._fault(error)
                with self._lock:
                    _add_all(self._unwritten, saved)
                    _add_all(self._unwritten_tiers, tiers)

    def _fault(self, error: Exception) -> None:
        """Count a fault of the file, and log the first of several alike."""
        self._metrics.fault("worth")
        if str(error) != self._said:
            self._said = str(error)
            log.warning("what was saved cannot be written or read: %s", error)

    def _opened(self) -> Ledger:
        if self._ledger is None:
            self._ledger = Ledger(self._folder, days=self._days)
        return self._ledger

    def view(self, days: int = _SHOWN_DAYS) -> dict[str, Any] | None:
        """For the dashboard: what all processes on the directory have saved; None where it cannot be read. Blocks."""
        self.write()
        try:
            shown = worth_of(self._opened(), min(self._days, days))
        except StoreError as error:
            self._fault(error)
            return None
        return shown | {"priced": bool(self._prices), "asked": self._account.asked_share()}

    def close(self) -> None:
        """Write what is left. Blocks."""
        self._writer.stop(_WRITE_S)
        self.write()
        if self._ledger is not None:
            self._ledger.close()


def _add_all(sums: dict[Any, Any], more: Mapping[Any, Sums]) -> None:
    """Add figures to those under the same keys, of which there are not too many."""
    for key, figures in more.items():
        known = key in sums or len(sums) < _WAITING
        place = key if known else (key[0], OTHERS, OTHERS)
        sums.setdefault(place, type(figures)()).add(figures)
