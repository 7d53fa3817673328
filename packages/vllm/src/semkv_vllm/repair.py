"""A forward pass over chosen tokens of some requests, inside or beside another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata


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


class Repair:
    """Runs the model over gaps.

    In every layer all rows write their KV before attention reads, so a later gap of a request sees the earlier ones.
    The builders of attention metadata are this object's own: the runner's hold what the step that is about to run
    needs. They have buffers for so many rows as the engine has sequences, so a pass has no more.
    """

    def __init__(self, runner: Any, block: int) -> None:
        self._runner = runner
        self._config = runner.vllm_config
        self._device = runner.device
        self._block = block
        scheduler = self._config.scheduler_config
        self._most_tokens = int(scheduler.max_num_batched_tokens)
        self._most_gaps = int(scheduler.max_num_seqs)
        self._groups = [group for groups in runner.attn_groups for group in groups]
        self._builders = [self._builder(group) for group in self._groups]

    def _builder(self, group: Any) -> Any:
        kind = group.backend.get_builder_cls()
        return kind(group.kv_cache_spec, group.layer_names, self._config, self._device)

    def run(self, gaps: Iterable[Gap]) -> None:
        """Compute all gaps, in as many passes as it takes."""
        in_order = sorted(gaps, key=lambda gap: gap.begin)
        with torch.inference_mode():
            for part in self._passes(in_order):
                # Backends that treat decodes apart want them first.
                part.sort(key=lambda gap: gap.end - gap.begin)
                self._pass(part)

    def _passes(self, gaps: list[Gap]) -> Iterator[list[Gap]]:
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

    def _on_device(self, values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)

    def _pass(self, gaps: list[Gap]) -> None:
        lengths = [gap.end - gap.begin for gap in gaps]
        ends = [gap.end for gap in gaps]
        width = -(-max(ends) // self._block)
        rows = [list(gap.blocks[:width]) for gap in gaps]
        table = [row + [0] * (width - len(row)) for row in rows]
        places = torch.cat([torch.arange(gap.begin, gap.end) for gap in gaps])
        shifts = torch.tensor([gap.shift for gap in gaps])
        row = torch.repeat_interleave(torch.arange(len(gaps)), torch.tensor(lengths))
        ids = [token for gap in gaps for token in gap.tokens[gap.begin : gap.end]]
        slots = torch.tensor(table)[row, places // self._block] * self._block
        slots += places % self._block
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        slots = slots.to(self._device, non_blocking=True)
        positions = (places + shifts[row]).to(self._device, non_blocking=True)
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(self._device, non_blocking=True),
            query_start_loc_cpu=starts,
            seq_lens=self._on_device(ends),
            seq_lens_cpu_upper_bound=torch.tensor(ends, dtype=torch.int32),
            num_reqs=len(gaps),
            num_actual_tokens=len(ids),
            max_query_len=max(lengths),
            max_seq_len=max(ends),
            block_table_tensor=self._on_device(table),
            slot_mapping=slots,
            causal=True,
            positions=positions,
            is_prefilling=torch.ones(len(gaps), dtype=torch.bool),
        )
        self._forward(common, self._on_device(ids), positions, slots)

    def _forward(
        self,
        common: Any,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        metadata: dict[str, Any] = {}
        mapping: dict[str, torch.Tensor] = {}
        for group, builder in zip(self._groups, self._builders, strict=True):
            built = builder.build(0, common)
            metadata |= dict.fromkeys(group.layer_names, built)
            mapping |= dict.fromkeys(group.layer_names, slots)
        context = set_forward_context(
            metadata,
            self._config,
            num_tokens=len(ids),
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=mapping,
        )
        model = self._runner.get_model()
        with context:
            model(
                input_ids=ids,
                positions=positions,
                intermediate_tensors=None,
                inputs_embeds=None,
            )
