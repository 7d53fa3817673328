"""The worker's half of reusing documents: it moves what was loaded to its places, and computes the rest."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
from semkv_vllm.spans import Load, Piece, Span, staged

log = logging.getLogger("semkv.connectors")

_AT_ONCE = 8192  # tokens that are moved at once: their keys and values are in memory twice


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


class _Moves(NamedTuple):
    """Of tokens that are moved: vLLM's numbers of their slots, and their positions in document and prompt."""

    slots_before: torch.Tensor
    slots_after: torch.Tensor
    positions_before: torch.Tensor
    positions_after: torch.Tensor


class Placement:
    """See the module. For a worker's thread.

    Attributes:
        refused: why nothing is reused; empty where it may be.
        mismatched: the live check has failed, and the scheduler has not heard of it.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        block: int,
    ) -> None:
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

    @property
    def bound(self) -> bool:
        """Whether a model was found to be right."""
        return not self.refused

    def distrust(self, why: str) -> None:
        """Nothing is reused any more; what is under way is computed."""
        self._trusted = False
        self.mismatched = True
        log.error(
            "semkv: %s: no document is reused at another position until this engine is started again",
            why,
        )

    def put_right(self, loads: Sequence[Load]) -> None:
        """Before a forward pass: make the KV of some requests what their plans say."""
        reused = [load for load in loads if self._trusted and not load.exact]
        try:
            if reused and not self._put(reused):
                self.distrust("rotated keys are not what the model computes")
        except Exception:
            log.warning("semkv: documents could not be put right", exc_info=True)
            self.distrust("documents could not be put right")
        exact = loads if not self._trusted else [load for load in loads if load.exact]
        self._compute(replace(load, exact=True) for load in exact)

    def _put(self, loads: Sequence[Load]) -> bool:
        """Move what is reused and compute the rest; whether the live check holds."""
        self._move(loads)
        watched = [span_slots(load, load.watched(), self._block) for load in loads]
        before = self._first_layer(watched)
        self._compute(loads)
        after = self._first_layer(watched)
        return not self._differ(before, after)

    def _compute(self, loads: Iterable[Load]) -> None:
        assert self._repair is not None
        self._repair.run(
            Gap(
                blocks=load.blocks,
                tokens=load.tokens,
                begin=gap.begin,
                end=gap.end,
            )
            for load in loads
            for gap in load.gaps()
        )

    def _move(self, loads: Sequence[Load]) -> None:
        """All reused tokens of all requests, layer by layer.

        From the last ones to the first, some thousands at once: a document moves on by less than a block, so what is
        written is never what others have yet to be read from.
        """
        steps = [self._moves_of(load, piece) for load in loads for piece in load.pieces]
        parts = [torch.cat(column) for column in zip(*steps, strict=True)]
        count = len(parts[0])
        for end in range(count, 0, -_AT_ONCE):
            rows = slice(max(0, end - _AT_ONCE), end)
            self._move_some([part[rows] for part in parts])

    def _moves_of(self, load: Load, piece: Piece) -> _Moves:
        """Of a piece's tokens."""
        count = min(piece.last, load.end) - piece.first
        first = staged(piece, self._block).begin
        before = Span(first, first + count)
        after = Span(piece.first, piece.first + count)
        return _Moves(
            slots_before=span_slots(load, [before], self._block),
            slots_after=span_slots(load, [after], self._block),
            positions_before=torch.arange(piece.skip, piece.skip + count),
            positions_after=torch.arange(after.begin, after.end),
        )

    def _move_some(self, parts: Sequence[torch.Tensor]) -> None:
        assert self._layers is not None
        moves = _Moves(*(part.to(self._device, non_blocking=True) for part in parts))
        source = Slots.of(moves.slots_before, self._block)
        target = Slots.of(moves.slots_after, self._block)
        turns = self._layers.turns(moves.positions_before, moves.positions_after)
        for cells, turn in zip(self._layers.cells, turns, strict=True):
            move(cells, turn, source, target)

    def _first_layer(self, watched: Sequence[torch.Tensor]) -> torch.Tensor:
        """Keys and values of the first layer at some tokens."""
        assert self._layers is not None
        numbers = torch.cat(list(watched)).to(self._device)
        keys, values = self._layers.cells[0].read(Slots.of(numbers, self._block))
        return torch.stack((keys, values))

    def _differ(self, before: torch.Tensor, after: torch.Tensor) -> bool:
        """Whether the live check has failed, on any rank."""
        of_keys = distance(before[0], after[0])
        of_values = distance(before[1], after[1])
        failed = not max(of_keys, of_values) <= tolerance(before.dtype)
        if self._config.parallel_config.tensor_parallel_size == 1:
            return failed
        told = torch.tensor([float(failed)], device=self._device)
        return bool(tensor_model_parallel_all_reduce(told).item())


def span_slots(load: Load, spans: Iterable[Span], block: int) -> torch.Tensor:
    """vLLM's numbers of the slots of some tokens."""
    places = torch.cat([torch.arange(span.begin, span.end) for span in spans])
    return torch.tensor(load.blocks)[places // block] * block + places % block
