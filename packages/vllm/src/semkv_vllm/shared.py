"""What the parts of a KV connector share: its names in the store, its counters, what was measured of its disk."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from semkv_stores.blocks import BlockStore
from semkv_stores.digests import digest
from semkv_vllm import REPORT_KEY, KVSettings, identity
from semkv_vllm.hints import NO_HINTS, Hints

if TYPE_CHECKING:
    from semkv_vllm.old_weights import OldWeights

log = logging.getLogger("semkv.connectors")

_QUIET_S = 60.0  # between two log lines of faults at one place
_LEAST = 4  # measurements before a pace counts
_WEIGHT = 0.2  # of the newest measurement
_RETRY = 32  # refusals after which one load is done all the same, to measure again
_BIG_STEP = 256  # steps of fewer tokens are too short to measure the pace


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What the tier must know of a request beyond its keys.

    It travels in the request's ``kv_transfer_params``, which vLLM hands to every tier. A client can send no value of
    this class, so nobody is believed who says whose blocks these are.

    Attributes:
        owner: the tag of its tenant (`semkv_stores.block_file.tenant_tag`); empty for none.
        adapter: the digest of its LoRA adapter's weights; empty for none.
        hints: what is said of its conversation.
    """

    owner: str = ""
    adapter: str = ""
    hints: Hints = NO_HINTS


def facts_of(req_context: Any) -> RequestFacts:
    """What the connector wrote of the request of a ``ReqContext``."""
    found = (req_context.kv_transfer_params or {}).get(REPORT_KEY)
    return found if isinstance(found, RequestFacts) else RequestFacts()


_P = ParamSpec("_P")
_T = TypeVar("_T")


def ours(
    where: str,
    otherwise: Any = None,
    instead: Callable[..., Any] | None = None,
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """What of ours a hook of vLLM's does: a method of an object that has a ``shared``.

    vLLM calls the hooks in the engine's own thread, and what left one would end the engine. So each hook calls methods
    that are marked with this, and vLLM's own method beside them. A fault in a marked method is counted and logged, and
    ``otherwise`` is its result; or that of ``instead``, a method that gets the same arguments. That one does so little
    that it has no faults, wherever the other one stopped; what it raises ends the engine.
    """

    def mark(method: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(method)
        def guarded(*args: _P.args, **fields: _P.kwargs) -> _T:
            try:
                return method(*args, **fields)
            except Exception:
                owner: Any = args[0]
                owner.shared.fault(where)
                result: _T = otherwise if instead is None else instead(*args, **fields)
                return result

        return guarded

    return mark


@dataclass
class KVShared:
    """See the module.

    Attributes:
        settings: of the connector.
        store: on disk; None where it cannot be opened.
        layout: of a row, as it stands in the head of every block file.
        facts: what the namespace is a digest of; called once, when the first request comes.
        model: digest of the facts that are known at the start.
        gate: whether a load from disk is worth it; None where that is not asked.
        tells_events: whether vLLM's KV events are on: then it notes every block that a lookup finds.
        counters: of this process, its store's too, and of the disk process; see `semkv_vllm.tier.COUNTERS`.
        records: of each block in host memory, its tenant's tag and when it was computed, in seconds since the epoch.
        stamp: another object after each purge and reset; what was found in the index before no longer counts.
        heard: the last purge that host memory has applied.
        storing: False while nothing may be stored.
        loading: False while nothing may be loaded, after a reset that failed.
        old: what may rest on weights from before a reset; None where nothing does.
        row_bytes: of a block in host memory, without its seal.
        step_rows: as many blocks as one step may compute.
        renamed: whether a reset gave this engine a namespace of its own, which ends with it.
        away: peers that did not answer, and until when none is asked again, by the monotonic clock.
    """

    settings: KVSettings
    store: BlockStore | None
    layout: Any
    facts: Callable[[], dict[str, object]]
    model: str = ""
    gate: BreakEven | None = None
    tells_events: bool = False
    counters: Counter[str] = field(default_factory=Counter)
    records: dict[bytes, tuple[str, float]] = field(default_factory=dict)
    stamp: object = field(default_factory=object)
    heard: int = 0
    storing: bool = True
    loading: bool = True
    old: OldWeights | None = None
    row_bytes: int = 0
    step_rows: int = 0
    renamed: bool = False
    away: dict[str, float] = field(default_factory=dict)
    _quiet: dict[str, float] = field(default_factory=dict)  # by place, until when
    # By adapter, of the requests since the last reset.
    _names: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.store is not None:
            self.counters.update(self.store.counters)
            self.store.counters = self.counters

    def namespace(self, adapter: str = "") -> str:
        """The name under which this engine's blocks lie in the store, for one LoRA adapter or none."""
        if "" not in self._names:
            self._names[""] = digest("kv", json.dumps(self.facts(), sort_keys=True, default=str))
        if adapter not in self._names:
            self._names[adapter] = digest("adapter", self._names[""], adapter)
        return self._names[adapter]

    def rename(self) -> list[str]:
        """Go on under a namespace of this engine's own; returns the names that it used so far."""
        base, used = self.namespace(), self.used()
        self._names = {"": identity.namespace_after(base)}
        self.renamed = True
        self.stamp = object()
        return used

    def used(self) -> list[str]:
        """The namespaces in use since the last reset."""
        return list(self._names.values())

    def is_away(self, peer: str) -> bool:
        """Whether a peer did not answer a short while ago."""
        return time.monotonic() < self.away.get(peer, 0.0)

    def may_store(self, request: str) -> bool:
        """Whether the KV of a request may be stored under the names of now."""
        return self.storing and (self.old is None or request not in self.old.requests)

    def fault(self, where: str) -> None:
        """Count the exception that is being handled, which is a miss, and log it now and then: what is broken may fail
        in every step."""
        self.counters["errors"] += 1
        now = time.monotonic()
        if now < self._quiet.get(where, 0.0):
            return
        self._quiet[where] = now + _QUIET_S
        log.warning(
            "semkv: %s of KV blocks failed; the request goes on without. More of the same within %g s is "
            "counted (errors), not logged",
            where,
            _QUIET_S,
            exc_info=True,
        )


# ---------------------------------------------------------------------- is the disk faster than computing?


class Pace:
    """A moving average of the seconds that a unit takes.

    Of seconds a unit, not of units a second: what is asked is how long an amount will take, and the mean of the rates
    would say too little. One read that was ten times faster than the others would make the disk look twice as fast.
    """

    def __init__(self) -> None:
        self._seconds = 0.0  # a unit
        self._count = 0

    def measured(self, amount: int, seconds: float) -> None:
        if seconds > 0 and amount > 0:
            self._count += 1
            self._seconds += max(_WEIGHT, 1 / self._count) * (seconds / amount - self._seconds)

    def seconds(self, amount: int) -> float | None:
        """How long ``amount`` takes; None while too little was measured."""
        return amount * self._seconds if self._count >= _LEAST else None


class BreakEven:
    """Whether a load from disk is worth it. For the scheduler's thread.

    Attributes:
        disk: of bytes, from the request for them until they are checked in host memory.
        bucket: the same of bytes that come from the bucket.
        prefill: of tokens that the engine computes in steps of many tokens.
    """

    def __init__(self) -> None:
        self.disk = Pace()
        self.bucket = Pace()
        self.prefill = Pace()
        self._steps: deque[tuple[int, float]] = deque(maxlen=2)  # vLLM has at most two under way
        self._last_end = 0.0
        self._refused = 0

    def step_begins(self, tokens: int) -> None:
        """The scheduler hands out a step of so many tokens."""
        if tokens:
            self._steps.append((tokens, time.perf_counter()))

    def step_ends(self) -> None:
        """The oldest step under way has ended. A step begins no earlier than the one before it ends."""
        now = time.perf_counter()
        if self._steps:
            tokens, begun = self._steps.popleft()
            if tokens >= _BIG_STEP:
                self.prefill.measured(tokens, now - max(begun, self._last_end))
        self._last_end = now

    def worth(self, tokens: int, nbytes: int, far_bytes: int = 0) -> bool:
        """Whether to read ``nbytes`` from disk and ``far_bytes`` from the bucket rather than to compute ``tokens``: yes
        while a pace is not known, and once in a while all the same."""
        compute = self.prefill.seconds(tokens)
        read = self.disk.seconds(nbytes) if nbytes else 0.0
        fetch = self.bucket.seconds(far_bytes) if far_bytes else 0.0
        if compute is None or read is None or fetch is None or read + fetch <= compute:
            return True
        self._refused = (self._refused + 1) % _RETRY
        return self._refused == 0
