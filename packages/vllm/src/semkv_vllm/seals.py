"""A checksum (seal) behind each block in host memory, which checks blocks from other tiers of vLLM.

vLLM's other tiers (``fs``, ``obj``, ``p2p``, ...) move whole rows of host memory and check nothing: a bit that turned
on the way gives wrong tokens. Where such tiers are configured, each row is a page longer than its block. The seal in
that page is a checksum of the block, bound to the block's key and to the namespace of the model. It is written before a
tier may read the row, and travels with it: another engine, and the same one after a restart, finds it where it finds
the block. What comes back without the right seal is a miss.

A seal finds damage, exchanged blocks and blocks of other models. It does not stop a malicious peer: a process that can
write a block can write its seal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import compress, islice
from typing import Any

import numpy as np
import xxhash
from vllm.v1.kv_offload.base import LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from semkv_stores.block_file import PAGE, Bytes
from semkv_vllm.params import PEER_KEY
from semkv_vllm.shared import KVShared, facts_of

log = logging.getLogger("semkv.connectors")

_SEAL = 16  # bytes, at the end of a row
_THREADS = 4  # the hash runs without the interpreter's lock
WAIT_S = 2.0
"""How long a request waits until another tier says whether it has a block. vLLM's own ``p2p`` would have it wait for
half a minute for a peer that is not there."""

_AWAY_S = 60.0  # for which a peer that did not answer is not asked
_MOST_REFUSED = 1 << 16  # keys that failed a check and are not asked for again


class Seals:
    """Writes and checks the seals of host memory's rows. For one thread, which waits for the others."""

    def __init__(self, rows: Bytes, namespace: Callable[[], str]) -> None:
        """``rows``: host memory, uint8 ``[rows, row bytes]``, the last page of each row being the seal's.
        ``namespace``: what the blocks are stored under, known once the first request comes."""
        self._rows = rows
        self._namespace = namespace
        self._threads = ThreadPoolExecutor(_THREADS, "semkv-seal")

    def write(self, keys: Iterable[bytes], chunks: Sequence[int]) -> None:
        """Seal the blocks that lie in some rows."""
        for chunk, seal in zip(chunks, self._seals(keys, chunks), strict=True):
            self._rows[chunk, -_SEAL:] = np.frombuffer(seal, np.uint8)

    def right(self, keys: Iterable[bytes], chunks: Sequence[int]) -> list[bool]:
        """Of each row, whether it holds the block of its key, undamaged."""
        found = [self._rows[chunk, -_SEAL:].tobytes() for chunk in chunks]
        return [one == other for one, other in zip(found, self._seals(keys, chunks), strict=True)]

    def _seals(self, keys: Iterable[bytes], chunks: Sequence[int]) -> list[bytes]:
        name = self._namespace().encode()

        def seal(key: bytes, chunk: int) -> bytes:
            block = xxhash.xxh3_128_digest(self._rows[chunk, :-PAGE].data)
            return xxhash.xxh3_128_digest(block + name + b"\0" + bytes(key))

        return list(self._threads.map(seal, keys, chunks))

    def close(self) -> None:
        self._threads.shutdown()
        self._rows = np.empty((0, PAGE), np.uint8)


@dataclass
class _Waits:
    """Since when a request waits for the answer of another tier, and when it asked last, by the monotonic clock."""

    since: float
    asked: float


@dataclass
class _Checks:
    """What is known of another tier's jobs.

    Attributes:
        jobs: handed over and not answered yet, by number.
        failed: what is to be answered of jobs that the tier did not take.
        given_up: their numbers; the tier may still have something to say of them.
        refused: keys that failed a check.
        stamps: by number, `KVShared.stamp` when a load was handed over. After a purge what it brings is not used.
    """

    shared: KVShared
    seals: Seals
    jobs: dict[int, TransferJob] = field(default_factory=dict)
    failed: list[JobResult] = field(default_factory=list)
    given_up: set[int] = field(default_factory=set)
    refused: dict[bytes, None] = field(default_factory=dict)
    stamps: dict[int, object] = field(default_factory=dict)

    def checked(self, result: JobResult, tier: str) -> JobResult:
        """A result of the tier's, in which a block without its seal has failed."""
        job = self.jobs.pop(result.job_id, None)
        is_purged = self.stamps.pop(result.job_id, None) is not self.shared.stamp
        # A tier that serves others has jobs that were not handed over.
        if job is None or not job.is_promotion:
            return result
        loaded = set(job.keys if result.success else result.successful_keys or ())
        places = {
            key: int(chunk)
            for key, chunk in zip(job.keys, job.chunk_ids, strict=True)
            if key in loaded
        }
        try:
            right = self.seals.right(places, list(places.values()))
        except Exception:
            self.shared.fault(f"a check of the tier {tier}")
            right = [False] * len(places)
        good = list(compress(places, right))
        self._refuse([key for key in places if key not in set(good)], tier)
        if is_purged:
            good = []
        record = (facts_of(job.req_context).owner, time.time())
        self.shared.records.update(dict.fromkeys(good, record))
        result.success = len(good) == len(job.keys)
        result.successful_keys = good
        return result

    def has_waited(self, context: Any) -> bool:
        """Whether a request has waited long enough for a tier to say whether it has a block. Then it goes on without,
        and the peer that it names is left alone for a while."""
        now = time.monotonic()
        waits = context.get_state(_Waits)
        # It is looked up for the first time, or again.
        if waits is None or now - waits.asked > WAIT_S:
            waits = _Waits(now, now)
            context.set_state(waits)
        waits.asked = now
        if now - waits.since < WAIT_S:
            return False
        peer = (context.kv_transfer_params or {}).get(PEER_KEY)
        if isinstance(peer, dict):
            name = f"{peer.get('remote_host')}:{peer.get('remote_port')}"
            self.shared.away[name] = now + _AWAY_S
        return True

    def _refuse(self, keys: list[bytes], tier: str) -> None:
        if not keys:
            return
        self.shared.counters["unsealed_blocks"] += len(keys)
        log.warning(
            "semkv: %d blocks from the tier %s failed their check and are computed", len(keys), tier
        )
        self.refused.update(dict.fromkeys(keys))
        for key in list(islice(self.refused, max(0, len(self.refused) - _MOST_REFUSED))):
            del self.refused[key]


class _CheckedTier(SecondaryTierManager):
    """What is put before another tier's class: it uses no block whose seal is not right.

    A fault in the tier is a miss, or a store that did not happen. A load that failed while it was handed over may still
    write into its rows, so the tier first ends what it has under way.
    """

    _semkv: _Checks

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        try:
            return super().on_new_request(req_context)
        except Exception:
            self._fault("a request")
            return RequestOffloadingContext()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        if key in self._semkv.refused:
            return LookupResult.MISS
        try:
            found = super().lookup(key, req_context)
        except Exception:
            self._fault("a lookup")
            return LookupResult.MISS
        if found is LookupResult.RETRY and self._semkv.has_waited(req_context):
            return LookupResult.MISS
        return found

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._hand_over(super().submit_store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._hand_over(super().submit_load, job_metadata)

    def _hand_over(self, submit: Callable[[TransferJob], None], job: TransferJob) -> None:
        checks = self._semkv
        checks.jobs[job.job_id] = job
        checks.stamps[job.job_id] = checks.shared.stamp
        try:
            submit(job)
        except Exception:
            self._fault("a transfer")
            super().drain_jobs()
            del checks.jobs[job.job_id]
            del checks.stamps[job.job_id]
            checks.given_up.add(job.job_id)
            checks.failed.append(JobResult(job.job_id, False))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        checks = self._semkv
        results = checks.failed
        checks.failed = []
        try:
            found = list(super().get_finished_jobs())
        except Exception:
            self._fault("the results")
            found = []
        for result in found:
            if result.job_id in checks.given_up:
                checks.given_up.discard(result.job_id)
            else:
                results.append(checks.checked(result, self.tier_type))
        return results

    def _fault(self, what: str) -> None:
        self._semkv.shared.fault(f"{what} of the tier {self.tier_type}")


def check_tier(tier: Any, shared: KVShared, seals: Seals) -> None:
    """Have a tier of vLLM's checked from now on."""
    kind = type(tier)
    tier._semkv = _Checks(shared, seals)
    # vLLM derives the source of hits for each new class from its medium, also where a tier had said another one.
    same = {"cache_hit_source": kind.cache_hit_source}
    tier.__class__ = type(f"Checked{kind.__name__}", (_CheckedTier, kind), same)
