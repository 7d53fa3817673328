"""What the scheduler half tells the worker half of the KV connector, once a step. No vLLM, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from semkv.stores.container import Bytes


@dataclass(slots=True)
class LoadPlan:
    """Blocks to put into the engine's cache before the forward pass.

    Attributes:
        request_id: for logs.
        block_ids: where they go.
        block_hashes: which they are, one per block id.
        rows: their bytes, uint8 ``[n, row_bytes]``, where they were injected by hand; else None. Travels within a
            process only.
    """

    request_id: str
    block_ids: list[int]
    block_hashes: list[bytes]
    rows: Bytes | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return (LoadPlan, (self.request_id, self.block_ids, self.block_hashes))


@dataclass(slots=True)
class PrefetchPlan:
    """Blocks of a request that waits for room in the engine's cache: workers may read them into host memory."""

    request_id: str
    block_hashes: list[bytes]


@dataclass(slots=True)
class CapturePlan:
    """Full blocks to copy out after the forward pass.

    Attributes:
        position: index in the prompt of the first.
        owner: `container.owner_of` the request.
    """

    block_ids: list[int]
    block_hashes: list[bytes]
    position: int
    owner: str = ""


@dataclass(slots=True)
class KVStep:
    """One step's work.

    Attributes:
        namespace: digest of the model and its settings; the worker adds its rank and layout.
        step: counts up.
        epoch: counts the load failures the scheduler knows of. After a failed load a worker captures nothing until
            the scheduler's epoch has moved on, since what was computed meanwhile may rest on the missing blocks.
        tokens: that the forward pass computes; with none of them the engine only waits for loads.
        loads: before the forward pass.
        captures: after it.
        prefetches: whenever there is time. Sent to workers in other processes, which the scheduler cannot ask.
    """

    namespace: str = ""
    step: int = 0
    epoch: int = 0
    tokens: int = 0
    loads: list[LoadPlan] = field(default_factory=list)
    captures: list[CapturePlan] = field(default_factory=list)
    prefetches: list[PrefetchPlan] = field(default_factory=list)
