"""The scheduler half of the KV connector: which blocks to load, which to capture. No vLLM, no torch.

Everything here runs in the engine core's scheduler thread. vLLM's objects are taken as they come (``Any``): the
attributes used are the same from 0.26 to 0.33.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from semkv.connectors.break_even import RanksGate
from semkv.connectors.counters import Counters
from semkv.connectors.kv_plan import CapturePlan, KVStep, LoadPlan, PrefetchPlan
from semkv.connectors.lora import Adapters
from semkv.connectors.outcome import REPORT_KEY, wants_skip
from semkv.connectors.resets import Disowned, FreshBlocks, namespace_after
from semkv.connectors.settings import KVSettings
from semkv.errors import CorruptValue
from semkv.keys import digest
from semkv.stores.blocks import KVChunk, KVLayout, KVStore
from semkv.stores.container import Bytes, owner_of
from semkv.stores.extents import ExtentStore

log = logging.getLogger("semkv.connectors")

_OFFERED_SECONDS = 30.0  # after this a captured block that is still not stored is captured again
_OFFERED_MOST = 1 << 17
_OPEN_PROMISES = 2  # vLLM asks for the head of its queue, so few promises are open at a time
_REMEMBERED = 256


def rank_namespace(namespace: str, rank: int) -> str:
    """The namespace of one rank's blocks."""
    return digest("rank", namespace, str(rank))


def keyed(hashes: Sequence[bytes], adapter: str) -> list[bytes]:
    """The engine's block hashes as keys of the store, apart for each LoRA adapter's weights."""
    if not adapter:
        return [bytes(h) for h in hashes]
    return [hashlib.sha256(adapter.encode() + h).digest() for h in hashes]


class LocalWorker(Protocol):
    """What the scheduler half asks the worker half where both are in one process (`kv_worker.KVWorker`)."""

    def available(self, request_id: str, namespace: str, hashes: Sequence[bytes]) -> int | None: ...

    def holds(self, namespace: str, block_hash: bytes) -> bool: ...

    def forget(self, request_id: str) -> None: ...


@dataclass(slots=True)
class _Promise:
    """The blocks ``hashes``, from block ``start`` of the prompt on, can be loaded."""

    start: int
    hashes: list[bytes]
    rows: Bytes | None

    def covers(self, start: int, hashes: list[bytes]) -> bool:
        """Whether it still answers the question; that nothing was stored is asked again."""
        n = len(self.hashes)
        return bool(n) and self.start == start and self.hashes == hashes[:n]


@dataclass(slots=True)
class _Track:
    """An admitted request.

    Attributes:
        adapter: see `Adapters.identity`; None where the request is left alone.
        checked: leading blocks that need no more capturing.
        mixed: whether it rests on blocks of the engine's from before a reset; then it is not captured.
    """

    request: Any
    adapter: str | None
    block_ids: list[int] = field(default_factory=list)
    checked: int = 0
    loaded_tokens: int = 0
    load_failed: bool = False
    mixed: bool = False


class KVScheduler:
    """See the module. ``namespace`` is asked for once, when the first request comes."""

    def __init__(
        self,
        settings: KVSettings,
        extents: ExtentStore,
        namespace: Callable[[], str],
        *,
        engine: str,
        world_size: int,
        block_size: int,
        speculative: bool = False,
        local_worker: Callable[[], LocalWorker | None] = lambda: None,
        gate: RanksGate | None = None,
    ) -> None:
        """``gate``: whether loads are worth it, where the workers are in other processes and none can be asked."""
        self.settings, self.counters = settings, Counters()
        self.block_size = block_size
        self._extents, self._make_namespace = extents, namespace
        self._generation = extents.generation
        self._engine, self._world_size, self._local_worker = engine, world_size, local_worker
        self.gate = gate if settings.break_even else None
        self._capture_decode = settings.capture_decode and not speculative
        if settings.capture_decode and speculative:
            log.warning("semkv: capture_decode has no effect with speculative decoding")
        self._adapters = Adapters(settings.cache_dir)
        self._namespace = ""
        self._disowned, self.fresh = Disowned(), FreshBlocks()
        self._stores: list[KVStore] = []
        self._tracks: dict[str, _Track] = {}
        self._promises: OrderedDict[str, _Promise] = OrderedDict()
        self._injected: dict[str, KVChunk] = {}
        self._offered: OrderedDict[bytes, float] = OrderedDict()
        self._recent: OrderedDict[str, list[bytes]] = OrderedDict()
        self._waiting: dict[str, list[bytes]] = {}
        self._loads: list[LoadPlan] = []
        self._step = self._epoch = 0
        self._last_load_step = self._confirmed_step = 0

    # ------------------------------------------------------------------ stores

    @property
    def namespace(self) -> str:
        if not self._namespace:
            self._namespace = self._make_namespace()
        return self._namespace

    def stores(self) -> list[KVStore]:
        """One store per rank, in order; empty until every worker has said how its blocks look."""
        if not self._stores and self._extents.on:
            layouts = self._extents.layouts(self._engine)
            if all(rank in layouts for rank in range(self._world_size)):
                try:
                    self._stores = [
                        KVStore(
                            self._extents,
                            rank_namespace(self.namespace, rank),
                            KVLayout.parse(json.loads(layouts[rank])),
                        )
                        for rank in range(self._world_size)
                    ]
                except (CorruptValue, ValueError) as error:
                    log.warning("semkv: a worker's layout cannot be read (%s)", error)
        return self._stores

    # ------------------------------------------------------------------ matching

    def matched_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        """Tokens that can be loaded beyond the computed ones: whole blocks, at least one token left to compute.

        None while they are being read from the disk: ask again.
        """
        if num_computed_tokens % self.block_size or not self._may_load(request):
            return 0
        if (adapter := self._adapter(request)) is None:
            return 0
        start = num_computed_tokens // self.block_size
        end = (request.num_tokens - 1) // self.block_size
        hashes = keyed(request.block_hashes[start:end], adapter)
        if not hashes:
            return 0
        promise = self._promises.get(request.request_id)
        if promise is None or not promise.covers(start, hashes):
            promise = self._promise(request.request_id, start, hashes)
            if promise is None:
                return None
            self._promises[request.request_id] = promise
            self._forget_promises()
        return len(promise.hashes) * self.block_size

    def _may_load(self, request: Any) -> bool:
        return not getattr(request, "skip_reading_prefix_cache", False) and bool(self.stores())

    def _adapter(self, request: Any) -> str | None:
        """`Adapters.identity` of the request's, or None where the request wants no cache."""
        return None if wants_skip(request.kv_transfer_params) else self._adapters.identity(request.lora_request)

    def _promise(self, request_id: str, start: int, hashes: list[bytes]) -> _Promise | None:
        injected = self._injected.get(request_id)
        if injected is not None and injected.position <= start:
            skip = start - injected.position
            mine = list(injected.block_hashes[skip : skip + len(hashes)])
            if mine and mine == hashes[: len(mine)]:
                return _Promise(start, mine, injected.rows()[skip : skip + len(mine)])
        count: int | None
        if (worker := self._local_worker()) is not None:
            count = worker.available(request_id, self.namespace, hashes)
        else:  # the workers read and check when they load
            count = min(store.lookup(hashes, self._holder(request_id)) for store in self.stores())
            count = self._worth(hashes[:count])
            self._waiting[request_id] = hashes[:count]
        if count is None:
            return None
        # Stored by now. What turned out damaged may be captured again; a local worker knows what is under way.
        for h in hashes if worker is not None else hashes[:count]:
            self._offered.pop(h, None)
        return _Promise(start, hashes[:count], None)

    def _worth(self, hashes: list[bytes]) -> int:
        """How many leading ones of stored blocks to load."""
        if self.gate is None or not hashes:
            return len(hashes)
        count = self.gate.worth(hashes, self.block_size, self._row_bytes())
        self.counters.add("refused_loads", int(count < len(hashes)))
        return count

    def _row_bytes(self) -> int:
        """Of a block, in the rank where it takes most."""
        return max(store.layout.row_bytes for store in self.stores())

    def _tell(self, plans: Sequence[LoadPlan | PrefetchPlan | CapturePlan]) -> None:
        if self.gate is not None and plans and self.stores():
            self.gate.told((h for plan in plans for h in plan.block_hashes), self._row_bytes())

    def _holder(self, request_id: str) -> str:
        return f"{self._engine}/{request_id}"  # engines that share a directory may count their requests alike

    def _forget_promises(self) -> None:
        for request_id in list(self._promises)[:-_OPEN_PROMISES]:
            del self._promises[request_id]

    def allocated(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """A request was admitted with its blocks; ``num_external_tokens`` of its tokens are to be loaded."""
        request_id = request.request_id
        track = self._tracks.get(request_id)
        if track is None:
            track = self._tracks[request_id] = _Track(request, self._adapter(request))
            self.counters.add("lora_skipped", int(track.adapter is None and request.lora_request is not None))
        track.block_ids, track.checked = list(block_ids), 0
        promise = self._promises.pop(request_id, None)
        self._injected.pop(request_id, None)
        self._waiting.pop(request_id, None)
        if num_external_tokens <= 0:
            return
        count = num_external_tokens // self.block_size
        if promise is None or count > len(promise.hashes):
            raise RuntimeError(f"semkv: {num_external_tokens} tokens of {request_id} were never promised")
        plan = LoadPlan(
            request_id,
            track.block_ids[promise.start : promise.start + count],
            promise.hashes[:count],
            None if promise.rows is None else promise.rows[:count],
        )
        self._loads.append(plan)
        self.fresh.note(plan.block_ids)
        track.loaded_tokens = max(track.loaded_tokens, num_external_tokens)
        self.counters.add("loads")
        self.counters.add("loaded_tokens", num_external_tokens)

    # ------------------------------------------------------------------ the step

    def build_step(self, scheduler_output: Any) -> KVStep:
        """Everything for the workers' next step; resets what was collected since the last."""
        self._step += 1
        self._disowned.settle()
        loads, self._loads = self._loads, []
        if loads:
            self._last_load_step = self._step
        tokens = sum(scheduler_output.num_scheduled_tokens.values())
        step = KVStep(self.namespace if self.stores() else "", self._step, self._epoch, tokens, loads)
        step.prefetches = [PrefetchPlan(name, hashes) for name, hashes in self._waiting.items() if hashes]
        self._waiting.clear()
        self._tell([*loads, *step.prefetches])
        self._update_block_ids(scheduler_output)
        # With several ranks one rank's failed load spoils what all of them compute: wait for their reports.
        if self.stores() and (self._world_size == 1 or self._last_load_step <= self._confirmed_step):
            self._expire_offers()
            for request_id, computed, complete in self._complete_blocks(scheduler_output):
                step.captures += self._plan_captures(self._tracks[request_id], computed, complete)
        self._tell(step.captures)
        return step

    def _update_block_ids(self, scheduler_output: Any) -> None:
        cached = scheduler_output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, block_ids, computed in rows:  # before the new ones, which may share what these get now
            track = self._tracks.get(request_id)
            if track is None or block_ids is None:
                continue
            if request_id in cached.resumed_req_ids:
                track.block_ids, track.checked = list(block_ids[0]), 0
                self._admitted(track, computed)
            else:
                track.block_ids.extend(block_ids[0])
                self.fresh.note(block_ids[0], mixed=track.mixed)
        for new in scheduler_output.scheduled_new_reqs:
            if (track := self._tracks.get(new.req_id)) is not None:
                track.block_ids = list(new.block_ids[0])
                self._admitted(track, new.num_computed_tokens)

    def _admitted(self, track: _Track, computed: int) -> None:
        """See whether what the engine's own prefix cache gave is of the weights of now."""
        track.mixed |= not self.fresh.cover(track.block_ids[: -(-computed // self.block_size)])
        self.fresh.note(track.block_ids, mixed=track.mixed)

    def _complete_blocks(self, scheduler_output: Any) -> list[tuple[str, int, int]]:
        """Per scheduled request, how many leading blocks were full before this step, and are full after it."""
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        complete = []
        for request_id, scheduled in scheduler_output.num_scheduled_tokens.items():
            track = self._tracks.get(request_id)
            if track is None or track.adapter is None or track.mixed or request_id not in computed:
                continue
            # A block's hash exists once all of its tokens are known, so a hash plus a scheduled token is a full block.
            tokens = computed[request_id] + scheduled
            if not self._capture_decode:
                tokens = min(tokens, track.request.num_prompt_tokens)
            blocks = min(tokens // self.block_size, len(track.request.block_hashes), len(track.block_ids))
            if blocks > track.checked:
                complete.append((request_id, computed[request_id] // self.block_size, blocks))
        return complete

    def _plan_captures(self, track: _Track, computed: int, complete: int) -> list[CapturePlan]:
        """What to copy out of blocks ``track.checked`` to ``complete``.

        What this step computes is not looked up: had it been stored, it would have been loaded, and the writer leaves
        out what is stored all the same. What was there before is as a rule stored as a whole or not at all, and
        eviction starts at the end, so the last of it is looked up first.
        """
        adapter = self._adapter(track.request)
        if adapter is None or adapter != track.adapter:  # its files were changed meanwhile
            track.adapter = None
            return []
        hashes = keyed(track.request.block_hashes[track.checked : complete], adapter)
        first, old = track.checked, computed - track.checked
        if old > 0 and self._kept([hashes[old - 1]]):
            hashes, first, old = hashes[old:], computed, 0
        missing = {i for i, h in enumerate(hashes) if h not in self._offered}
        missing -= self._kept(hashes[: max(0, old)])
        track.checked = complete
        chosen = sorted(missing)
        now, most = time.monotonic(), self.settings.max_extent_blocks
        self._offered.update((hashes[i], now) for i in chosen)
        plans, owner = [], owner_of(getattr(track.request, "cache_salt", None))
        for at in range(0, len(chosen), most):
            part = chosen[at : at + most]
            ids = [track.block_ids[first + i] for i in part]
            plans.append(CapturePlan(ids, [hashes[i] for i in part], first + part[0], owner))
        return plans

    def _kept(self, hashes: list[bytes]) -> set[int]:
        """Which of ``hashes`` are on their way to the disk, in host memory or stored. Several ranks ask nobody."""
        worker, offered = self._local_worker(), self._offered
        known = {
            i for i, h in enumerate(hashes) if h in offered or (worker is not None and worker.holds(self.namespace, h))
        }
        ask = [i for i in range(len(hashes)) if i not in known]
        for store in self.stores() if ask and self._world_size == 1 else []:
            known |= {i for i, there in zip(ask, store.stored([hashes[i] for i in ask]), strict=True) if there}
        return known

    def _expire_offers(self) -> None:
        if self._generation != self._extents.generation:  # purged: what was offered before is not stored
            self._generation = self._extents.generation
            self._offered.clear()
            if self.gate is not None:
                self.gate.forget()
        limit = time.monotonic() - _OFFERED_SECONDS
        while self._offered and (len(self._offered) > _OFFERED_MOST or next(iter(self._offered.values())) < limit):
            self._offered.popitem(last=False)

    # ------------------------------------------------------------------ what comes back

    def confirm(self, step: int) -> None:
        """All workers have finished step ``step``."""
        self._confirmed_step = max(self._confirmed_step, step)

    def load_failed(self, block_ids: set[int]) -> None:
        """Workers could not load these blocks; vLLM recomputes them."""
        self._epoch += 1
        self._offered.clear()  # what was to be captured meanwhile was not
        if self.gate is not None:
            self.gate.forget()
        for track in self._tracks.values():
            track.checked = 0
            if not block_ids.isdisjoint(track.block_ids):
                track.load_failed = True
        self.counters.add("failed_loads")

    def finished(self, request: Any) -> dict[str, Any] | None:
        """Forget a request, and say what was done for it."""
        request_id = request.request_id
        track = self._tracks.pop(request_id, None)
        self._promises.pop(request_id, None)
        self._injected.pop(request_id, None)
        if (worker := self._local_worker()) is not None:
            worker.forget(request_id)
        else:
            self._extents.release(self._holder(request_id))
        self._recent[request_id] = [bytes(h) for h in request.block_hashes]
        if len(self._recent) > _REMEMBERED:
            self._recent.popitem(last=False)
        if track is None or not self.settings.report:
            return None
        return {REPORT_KEY: {"loaded_tokens": track.loaded_tokens, "load_failed": track.load_failed}}

    def reset(self) -> bool:
        """Go on under a namespace of this engine's own, and delete what it captured so far.

        vLLM asks for this when the weights may have been exchanged or are about to be, and does not say which. So
        nothing that is stored is served to this engine any more, and nothing that it computes from now on is found
        under the old weights' name. What it captured may be of new weights already, so it goes, also what is under way;
        what other engines captured stays theirs. A request that goes on meanwhile rests on both, and so does one that
        finds blocks from before in the engine's own cache: nothing of them is captured. With ``fixed_weights`` nothing
        happens.

        Returns:
            Whether all of that is deleted; where not, each step tries again.
        """
        if self.settings.fixed_weights:
            return True
        before = self.stores()
        self._namespace = namespace_after(self.namespace)
        self._stores = []
        self._promises.clear()
        self._injected.clear()
        self._offered.clear()
        self.fresh.reset()
        for track in self._tracks.values():
            track.mixed = True
        return self._disowned.add(before)

    def take_counters(self) -> dict[str, int]:
        self.counters.merge({f"scheduler_{k}": v for k, v in self._extents.counters.items()})
        return self.counters.take()

    # ------------------------------------------------------------------ the research interface

    def block_hashes(self, request_id: str) -> list[bytes] | None:
        """The block hashes of a request that runs or finished lately, by vLLM's id or the caller's."""
        if (name := self.resolve(request_id, self._recent)) is not None:
            return self._recent[name]
        if (name := self.resolve(request_id, self._tracks)) is not None:
            return [bytes(h) for h in self._tracks[name].request.block_hashes]
        return None

    @staticmethod
    def resolve(request_id: str, names: Any) -> str | None:
        """vLLM appends a random suffix to the caller's id; the newest match counts."""
        if request_id in names:
            return request_id
        found = [n for n in names if n.rpartition("-")[0] == request_id]
        return found[-1] if found else None

    def inject(self, request_id: str, chunk: KVChunk) -> None:
        """Offer a chunk's blocks to the request of this (vLLM) id when it is scheduled first."""
        self._injected[request_id] = chunk
        self._promises.pop(request_id, None)

    def close(self) -> None:
        """Close the files; what was captured after a reset is of use to nobody any more, and goes."""
        self._disowned.add(self.stores() if self.fresh.after_reset else ())
        self._extents.close()
