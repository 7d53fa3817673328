"""The worker's half of reusing documents: it moves what was loaded to its places, and computes the rest."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)

from semkv_vllm.gate import Layers, RefusedError, check, refusal
from semkv_vllm.moving import Slots, distance, move, tolerance
from semkv_vllm.repair import Gap, Repair
from semkv_vllm.spans import Load, Span, staged

log = logging.getLogger("semkv.connectors")


@dataclass
class Gated(KVConnectorHandshakeMetadata):
    """What a worker says of its model at the start; ``refused`` is empty where documents may be reused."""

    refused: str


@dataclass
class StepWithLoads(OffloadingConnectorMetadata):
    """What the scheduler tells the workers of a step; ``loads`` must be put right before its forward pass."""

    loads: Sequence[Load] = ()


@dataclass
class WorkerNews(OffloadingWorkerMetadata):
    """What workers tell the scheduler; ``mismatch``: the live check has failed."""

    mismatch: bool = False

    def aggregate(self, other: Any) -> Any:
        merged = super().aggregate(other)
        mismatch = self.mismatch or getattr(other, "mismatch", False)
        return WorkerNews(merged.completed_jobs, merged.transfer_stats, mismatch=mismatch)


class Placement:
    """See the module. For a worker's thread.

    Attributes:
        refused: why nothing is reused; empty where it may be.
        mismatched: the live check has failed, and the scheduler has not heard of it.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, block: int) -> None:
        self.refused = refusal(vllm_config, kv_cache_config) or "the model is not bound"
        self.mismatched = False
        self._config = vllm_config
        self._allowed = not refusal(vllm_config, kv_cache_config)
        self._block = block
        self._trusted = True
        self._layers: Layers | None = None
        self._repair: Repair | None = None
        self._device = torch.device("cpu")

    def bind(self, runner: Any, caches: dict[str, torch.Tensor]) -> None:
        """Look at the model, once its KV cache is there."""
        if not self._allowed:
            return
        try:
            self._layers = Layers(runner, caches)
            self._repair = Repair(runner, self._block)
            self._device = runner.device
            check(self._layers, self._repair, runner, self._block)
            self.refused = ""
        except RefusedError as reason:
            self.refused = str(reason)
        except Exception as error:  # whatever a model or a release of vLLM does not have
            log.warning("semkv: the check of the model for documents failed", exc_info=True)
            self.refused = f"the check of the model failed ({type(error).__name__}: {error})"

    def put_right(self, loads: Sequence[Load]) -> None:
        """Before a forward pass: make the KV of some requests what their plans say."""
        assert self._layers is not None
        assert self._repair is not None
        if not self._trusted:
            loads = [replace(load, exact=True) for load in loads]
        moved = [load for load in loads if not load.exact]
        if moved:
            self._move(moved)
        watched = [span_slots(load, load.watched(), self._block) for load in moved]
        before = self._first_layer(watched)
        self._compute(loads)
        if before is not None and self._differ(before, self._first_layer(watched)):
            self._trusted = False
            self.mismatched = True
            log.error(
                "semkv: keys that were rotated are not what the model computes: no document is "
                "reused at another position until this engine is started again"
            )
            self._compute([replace(load, exact=True) for load in moved])

    def _compute(self, loads: Iterable[Load]) -> None:
        assert self._repair is not None
        self._repair.run(
            Gap(blocks=load.blocks, tokens=load.tokens, begin=gap.begin, end=gap.end)
            for load in loads
            for gap in load.gaps()
        )

    def _move(self, loads: Sequence[Load]) -> None:
        """All reused tokens of all requests, layer by layer."""
        assert self._layers is not None
        held, targets = [], []
        sources, positions = [], []
        for load in loads:
            for piece in load.pieces:
                count = min(piece.last, load.end) - piece.first
                first = staged(piece, self._block).begin
                held.append(span_slots(load, [Span(first, first + count)], self._block))
                targets.append(
                    span_slots(load, [Span(piece.first, piece.first + count)], self._block)
                )
                sources.append(torch.arange(piece.skip, piece.skip + count))
                positions.append(torch.arange(piece.first, piece.first + count))
        source = self._slots(held)
        target = self._slots(targets)
        turns = self._layers.turns(self._on_device(sources), self._on_device(positions))
        for cells, turn in zip(self._layers.cells, turns, strict=True):
            move(cells, turn, source, target)

    def _on_device(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts)).to(self._device, non_blocking=True)

    def _slots(self, parts: Sequence[torch.Tensor]) -> Slots:
        return Slots.of(self._on_device(parts), self._block)

    def _first_layer(self, watched: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Keys and values of the first layer at some tokens."""
        if not watched or self._layers is None:
            return None
        keys, values = self._layers.cells[0].read(self._slots(watched))
        return torch.stack((keys, values)).clone()

    def _differ(self, before: torch.Tensor, after: torch.Tensor | None) -> bool:
        """Whether the live check has failed, on any rank."""
        assert after is not None
        error = max(distance(*pair) for pair in zip(before, after, strict=True))
        failed = not error <= tolerance(before.dtype)
        if self._config.parallel_config.tensor_parallel_size == 1:
            return failed
        told = torch.tensor([float(failed)], device=self._device)
        return bool(tensor_model_parallel_all_reduce(told).item())


def span_slots(load: Load, spans: Iterable[Span], block: int) -> torch.Tensor:
    """vLLM's numbers of the slots of some tokens."""
    places = torch.cat([torch.arange(span.begin, span.end) for span in spans])
    return torch.tensor(load.blocks)[places // block] * block + places % block
