"""Planning of loads: what a request is promised when vLLM asks, and what is loaded once it has room. No vLLM."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from semkv.connectors.break_even import RanksGate
from semkv.connectors.counters import Counters
from semkv.connectors.kv_plan import LoadPlan, PrefetchPlan
from semkv.connectors.rank_stores import RankStores
from semkv.stores.blocks import KVChunk
from semkv.stores.container import Bytes

_OPEN_PROMISES = 2  # vLLM asks for the head of its queue, so few promises are open at a time


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


class Loads:
    """The loads of one engine, for its scheduler's thread; requests go by vLLM's id."""

    def __init__(self, stores: RankStores, counters: Counters, gate: RanksGate | None, block_size: int) -> None:
        self._stores, self._counters, self._gate, self._block_size = stores, counters, gate, block_size
        self._promises: OrderedDict[str, _Promise] = OrderedDict()
        self._injected: dict[str, KVChunk] = {}
        self._waiting: dict[str, list[bytes]] = {}
        self._planned: list[LoadPlan] = []

    def promised(self, request_id: str, start: int, hashes: list[bytes]) -> int | None:
        """How many leading ones of ``hashes``, from block ``start`` of the prompt on, can be loaded.

        None while they are being read from the disk: ask again.
        """
        promise = self._promises.get(request_id)
        if promise is None or not promise.covers(start, hashes):
            promise = self._promise(request_id, start, hashes)
            if promise is None:
                return None
            self._promises[request_id] = promise
            for old in list(self._promises)[:-_OPEN_PROMISES]:
                del self._promises[old]
        return len(promise.hashes)

    def _promise(self, request_id: str, start: int, hashes: list[bytes]) -> _Promise | None:
        injected = self._injected.get(request_id)
        if injected is not None and injected.position <= start:
            skip = start - injected.position
            mine = list(injected.block_hashes[skip : skip + len(hashes)])
            if mine and mine == hashes[: len(mine)]:
                return _Promise(start, mine, injected.rows()[skip : skip + len(mine)])
        count: int | None
        if (worker := self._stores.worker()) is not None:
            count = worker.available(request_id, self._stores.namespace, hashes)
        else:  # the workers read and check when they load
            count = self._worth(hashes[: self._stores.lookup(request_id, hashes)])
            self._waiting[request_id] = hashes[:count]
        if count is None:
            return None
        # Stored by now. What turned out damaged may be captured again; a local worker knows what is under way.
        self._stores.offered.settle(hashes if worker is not None else hashes[:count])
        return _Promise(start, hashes[:count], None)

    def _worth(self, hashes: list[bytes]) -> int:
        """How many leading ones of stored blocks to load."""
        if self._gate is None or not hashes:
            return len(hashes)
        count = self._gate.worth(hashes, self._block_size, self._stores.row_bytes())
        self._counters.add("refused_loads", int(count < len(hashes)))
        return count

    def inject(self, request_id: str, chunk: KVChunk) -> None:
        """Promise a chunk's blocks to the request."""
        self._injected[request_id] = chunk
        self._promises.pop(request_id, None)

    def admitted(self, request_id: str, block_ids: Sequence[int], num_tokens: int) -> list[int]:
        """The request lies in ``block_ids`` now, and ``num_tokens`` of its tokens are to be loaded; returns into which.

        Raises:
            RuntimeError: so many were never promised.
        """
        promise = self._promises.pop(request_id, None)
        self._injected.pop(request_id, None)
        self._waiting.pop(request_id, None)
        if num_tokens <= 0:
            return []
        count = num_tokens // self._block_size
        if promise is None or count > len(promise.hashes):
            raise RuntimeError(f"semkv: {num_tokens} tokens of {request_id} were never promised")
        plan = LoadPlan(
            request_id,
            list(block_ids[promise.start : promise.start + count]),
            promise.hashes[:count],
            None if promise.rows is None else promise.rows[:count],
        )
        self._planned.append(plan)
        self._counters.add("loads")
        self._counters.add("loaded_tokens", num_tokens)
        return plan.block_ids

    def take(self) -> tuple[list[LoadPlan], list[PrefetchPlan]]:
        """What was planned since the last step, and what was promised to requests that still wait for room."""
        loads, self._planned = self._planned, []
        prefetches = [PrefetchPlan(name, hashes) for name, hashes in self._waiting.items() if hashes]
        self._waiting.clear()
        return loads, prefetches

    def end(self, request_id: str) -> None:
        """Let go of a request."""
        self._promises.pop(request_id, None)
        self._injected.pop(request_id, None)

    def reset(self) -> None:
        """Nothing that was promised or injected is loaded any more."""
        self._promises.clear()
        self._injected.clear()
