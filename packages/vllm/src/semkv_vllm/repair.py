"""A forward pass over chosen tokens of some requests, inside or beside another one."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from semkv_vllm.exchanges import Exchanges
from semkv_vllm.moving import on_device

_MOST_GAPS = 256  # of a pass: each has a row in its block table


@dataclass(frozen=True)
class Gap:
    """Tokens that are computed: one row of the pass.

    Attributes:
        blocks: ids of the request's blocks, from the first one on.
        tokens: of the request, up to ``end`` at least.
        begin, end: places in the request.
        shift: by how much the positions that the model is told are larger than the places.
    """

    blocks: Sequence[int]
    tokens: Sequence[int]
    begin: int
    end: int
    shift: int = 0


@dataclass(frozen=True)
class Pass:
    """One pass, ready on the device."""

    common: CommonAttentionMetadata
    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


class Repair:
    """Runs the model over gaps.

    In every layer all rows write their KV before attention reads, so a later gap of a request sees the earlier ones.
    The builders of attention metadata are this object's own: the runner's hold what the step that is about to run
    needs, and have buffers for its CUDA graphs, with so many rows as the engine has sequences.

    With several ranks the model is not run as it was compiled: vLLM may have fused what ranks exchange into other
    operations, where nobody sees it (`semkv_vllm.exchanges`).
    """

    def __init__(self, runner: Any, block: int) -> None:
        self._runner = runner
        self._config = runner.vllm_config
        self._device = runner.device
        self._block = block
        scheduler = self._config.scheduler_config
        self._most_tokens = int(scheduler.max_num_batched_tokens)
        self._groups = [group for groups in runner.attn_groups for group in groups]
        config = _without_graphs(self._config)
        self._most_gaps = int(config.scheduler_config.max_num_seqs)
        self._builders = [self._builder(group, config) for group in self._groups]
        ranks = get_tp_group()
        self._exchanges = (
            Exchanges(ranks.device_communicator, ranks.world_size) if ranks.world_size > 1 else None
        )

    def _builder(self, group: Any, config: Any) -> Any:
        kind = group.backend.get_builder_cls()
        return kind(group.kv_cache_spec, group.layer_names, config, self._device)

    def passes(self, gaps: Iterable[Gap]) -> list[Pass]:
        """As many passes as it takes, in the order in which they must run."""
        in_order = sorted(gaps, key=lambda gap: gap.begin)
        found = []
        for part in self._parts(in_order):
            # Backends that treat decodes apart want them first.
            part.sort(key=lambda gap: gap.end - gap.begin)
            found.append(self._pass(part))
        return found

    def run(self, passes: Sequence[Pass]) -> None:
        """Run passes in their order.

        Raises:
            Exception: whatever one of them raises. No other rank waits for this one then.
            LeftWaitingError: others do.
        """
        with torch.inference_mode():
            if self._exchanges is None:
                for each in passes:
                    self._forward(each)
            else:
                tokens = [len(each.ids) for each in passes]
                self._exchanges.run(tokens, lambda number: self._forward(passes[number]))

    def rehearse(self, one: Pass) -> None:
        """Run a pass by this rank alone, and learn what ranks exchange in passes; without other ranks do nothing.

        What it writes is of no use.

        Raises:
            Exception: whatever it raises; no other rank waits.
            UnknownExchangeError: as `Exchanges.rehearse`.
        """
        if self._exchanges is not None:
            with torch.inference_mode():
                self._exchanges.rehearse(len(one.ids), lambda: self._forward(one))

    def _parts(self, gaps: list[Gap]) -> Iterator[list[Gap]]:
        """In the order of places; a gap that is too long for one pass goes on in the next."""
        part: list[Gap] = []
        room = self._most_tokens
        for gap in gaps:
            begin = gap.begin
            while begin < gap.end:
                end = min(gap.end, begin + room)
                part.append(
                    replace(
                        gap,
                        begin=begin,
                        end=end,
                    )
                )
                room -= end - begin
                begin = end
                if room == 0 or len(part) == self._most_gaps:
                    yield part
                    part = []
                    room = self._most_tokens
        if part:
            yield part

    def _pass(self, gaps: list[Gap]) -> Pass:
        lengths = np.array([gap.end - gap.begin for gap in gaps])
        ends = np.array([gap.end for gap in gaps], np.int32)
        width = -(-int(ends.max()) // self._block)
        table = np.zeros((len(gaps), width), np.int32)
        for row, gap in enumerate(gaps):
            own = gap.blocks[:width]
            table[row, : len(own)] = own
        places = np.concatenate([np.arange(gap.begin, gap.end) for gap in gaps])
        rows = np.repeat(np.arange(len(gaps)), lengths)
        ids = [token for gap in gaps for token in gap.tokens[gap.begin : gap.end]]
        slots = table[rows, places // self._block].astype(np.int64) * self._block
        slots += places % self._block
        starts = np.concatenate(([0], lengths.cumsum())).astype(np.int32)
        shifts = np.array([gap.shift for gap in gaps])
        positions = self._on_device(places + shifts[rows])
        slots_there = self._on_device(slots)
        common = CommonAttentionMetadata(
            query_start_loc=self._on_device(starts),
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=self._on_device(ends),
            seq_lens_cpu_upper_bound=torch.from_numpy(ends),
            num_reqs=len(gaps),
            num_actual_tokens=len(ids),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=self._on_device(table),
            slot_mapping=slots_there,
            causal=True,
            positions=positions,
            is_prefilling=torch.ones(len(gaps), dtype=torch.bool),
        )
        return Pass(
            common=common,
            ids=self._on_device(np.array(ids, np.int32)),
            positions=positions,
            slots=slots_there,
        )

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        return on_device(values, self._device)

    def _forward(self, one: Pass) -> None:
        metadata: dict[str, Any] = {}
        mapping: dict[str, torch.Tensor] = {}
        for group, builder in zip(self._groups, self._builders, strict=True):
            built = builder.build(0, one.common)
            metadata |= dict.fromkeys(group.layer_names, built)
            mapping |= dict.fromkeys(group.layer_names, one.slots)
        context = set_forward_context(
            metadata,
            self._config,
            num_tokens=len(one.ids),
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=mapping,
            skip_compiled=self._exchanges is not None,
        )
        model = self._runner.get_model()
        with context:
            model(
                input_ids=one.ids,
                positions=one.positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )


def _without_graphs(vllm_config: Any) -> Any:
    """A copy of the configuration for builders whose passes no CUDA graph runs, and which have more rows."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    config.scheduler_config = copy.copy(vllm_config.scheduler_config)
    rows = max(_MOST_GAPS, vllm_config.scheduler_config.max_num_seqs)
    config.scheduler_config.max_num_seqs = rows
    return config
