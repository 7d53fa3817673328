"""A forward pass over chosen tokens of some requests, inside or beside another one."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from semkv_vllm import private
from semkv_vllm.exchanges import Exchanges
from semkv_vllm.moving import Cells, Slots, distances, on_device, tolerance
from semkv_vllm.pictures import Prompt, encoded, overlap

log = logging.getLogger("semkv.connectors")

_MOST_GAPS = 256  # of a pass: each has a row in its block table
_ALONE = 3  # times as far as all tokens together one token may be off


@dataclass(frozen=True)
class Gap:
    """Tokens that are computed: one row of the pass.

    Attributes:
        blocks: ids of the request's blocks, from the first one on.
        tokens: of the request, up to ``end`` at least.
        prompt: what the model is told of it, up to ``end`` at least.
        begin, end: places in the request.
    """

    blocks: np.ndarray
    tokens: Sequence[int]
    prompt: Prompt
    begin: int
    end: int


@dataclass(frozen=True)
class Pass:
    """One pass, ready on the device.

    Attributes:
        pictures: what an encoder has made of pictures, in the order of the tokens in whose place it stands.
        is_picture: which tokens these are.
    """

    common: CommonAttentionMetadata
    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    pictures: list[torch.Tensor]
    is_picture: torch.Tensor


class Repair:
    """Runs the model over gaps.

    In every layer all rows write their KV before attention reads, so a later gap of a request sees the earlier ones.
    The builders of attention metadata are this object's own: the runner's hold what the step that is about to run
    needs, and have buffers for its CUDA graphs, with so many rows as the engine has sequences.

    With several ranks the model is not run as it was compiled: vLLM may have fused what ranks exchange into other
    operations, where nobody sees it (`semkv_vllm.exchanges`). Neither are models with several axes of positions: they
    were compiled for positions that lie in memory as the runner's do.

    A pass of few tokens takes as long as its kernels are launched one by one. So it is run by the CUDA graphs that vLLM
    has captured for steps of as many tokens or some more, where they were seen to compute the same.

    Args:
        runner: vLLM's model runner.
        block: tokens of a block.
        cells: of all layers, where a pass leaves keys and values.
        most: tokens of a pass; 0 for as many as a step may have.

    Attributes:
        axes: on how many the model gives a token a position.
    """

    def __init__(
        self,
        runner: Any,
        block: int,
        *,
        cells: Sequence[Cells],
        most: int = 0,
    ) -> None:
        self._runner = runner
        self._cells = cells
        self._config = runner.vllm_config
        self._device = runner.device
        self._block = block
        budget = int(self._config.scheduler_config.max_num_batched_tokens)
        self._most_tokens = min(most or budget, budget)
        self._groups = [group for groups in runner.attn_groups for group in groups]
        config = _without_graphs(self._config)
        self._most_gaps = int(config.scheduler_config.max_num_seqs)
        self._builders = [self._builder(group, config) for group in self._groups]
        model = self._config.model_config
        self.axes = int(model.mrope_num_dims) if model.uses_mrope else 1
        self._by_embedding = bool(runner.supports_mm_inputs)
        ranks = get_tp_group()
        self._exchanges = (
            Exchanges(ranks.device_communicator, ranks.world_size) if ranks.world_size > 1 else None
        )
        self._proven = set[int]()  # sizes of graphs that have computed what the model computes
        self._may_use_graphs = self._has_plain_graphs()

    def _has_plain_graphs(self) -> bool:
        """Whether what graphs have captured depends on nothing but tokens and positions.

        Slots and attention do not: they must stay out of graphs. Experts read what the runner says of padding.
        """
        compilation = self._config.compilation_config
        split = compilation.splitting_ops_contain_attention()
        split &= compilation.splitting_ops_contain_kv_cache_update()
        plain = self.axes == 1 and not self._by_embedding and self._exchanges is None
        return split and plain and not self._config.model_config.is_moe

    def _builder(self, group: Any, config: Any) -> Any:
        kind = group.backend.get_builder_cls()
        return kind(group.kv_cache_spec, group.layer_names, config, self._device)

    def passes(self, gaps: Iterable[Gap]) -> list[Pass]:
        """As many passes as it takes, in the order in which they must run."""
        in_order = sorted(gaps, key=lambda gap: gap.begin)
        # What the encoder has made of pictures, by vLLM's names.
        known: dict[str, torch.Tensor] = {}
        found = []
        for part in self._parts(in_order):
            # Backends that treat decodes apart want them first.
            part.sort(key=lambda gap: gap.end - gap.begin)
            found.append(self._pass(part, known))
        return found

    def run(self, passes: Sequence[Pass]) -> None:
        """Run passes in their order.

        Raises:
            Exception: whatever one of them raises. No other rank waits for this one then.
            LeftWaitingError: others do.
        """
        with torch.inference_mode(), private.picture_inputs_cleared(self._runner.get_model()):
            if self._exchanges is None:
                for each in passes:
                    self._by_graphs(each)
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

    def _pass(self, gaps: list[Gap], known: dict[str, torch.Tensor]) -> Pass:
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
        told = [gap.prompt.positions[:, gap.begin : gap.end] for gap in gaps]
        positions = self._on_device(np.concatenate(told, axis=1).astype(np.int64))
        if self.axes == 1:
            positions = positions[0]
        pictures, is_picture = self._pictures(gaps, known)
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
            positions=positions if self.axes == 1 else positions[0],
            is_prefilling=torch.ones(len(gaps), dtype=torch.bool),
        )
        return Pass(
            common=common,
            ids=self._on_device(np.array(ids, np.int32)),
            positions=positions,
            slots=slots_there,
            pictures=pictures,
            is_picture=self._on_device(is_picture),
        )

    def _pictures(
        self, gaps: list[Gap], known: dict[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], np.ndarray]:
        """What stands in place of tokens of pictures, and which these are."""
        found = []
        masks = []
        for gap in gaps:
            mask = np.zeros(gap.end - gap.begin, np.bool_)
            for picture in gap.prompt.pictures:
                first, last = overlap(picture, gap.begin, gap.end)
                place = picture.mm_position
                rows = slice(*place.get_embeds_indices_in_range(first, last))
                if rows.start == rows.stop:
                    continue
                if picture.identifier not in known:
                    with torch.inference_mode():
                        model = self._runner.get_model()
                        known[picture.identifier] = encoded(model, picture, self._device)
                found.append(known[picture.identifier][rows])
                own = slice(place.offset + first - gap.begin, place.offset + last - gap.begin)
                is_embed = place.is_embed
                mask[own] = True if is_embed is None else is_embed[first:last].numpy()
            masks.append(mask)
        return found, np.concatenate(masks)

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        return on_device(values, self._device)

    def _by_graphs(self, one: Pass) -> None:
        """Run a pass, by CUDA graphs where those of its size were seen to be right."""
        inputs = self._graph_inputs(one)
        size = 0 if inputs is None else len(inputs[0])
        if inputs is None:
            self._forward(one)
        elif size in self._proven:
            self._forward(_padded(one, *inputs), CUDAGraphMode.PIECEWISE)
        elif self._is_same(one, inputs):
            self._proven.add(size)
        else:
            self._shun_graphs()

    def _is_same(self, one: Pass, inputs: tuple[torch.Tensor, torch.Tensor]) -> bool:
        """Run a pass by graphs and then without them: whether both leave the same in all layers."""
        made: torch.Tensor | None = None
        try:
            self._forward(_padded(one, *inputs), CUDAGraphMode.PIECEWISE)
            made = self._left_by(one)
        except Exception:
            self._shun_graphs()
        self._forward(one)
        known = self._left_by(one)
        if made is None:
            return False
        off = distances(made, known)
        return float(off.max()) <= _ALONE * tolerance(known.dtype)

    def _graph_inputs(self, one: Pass) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Where graphs of a pass's size read tokens and positions."""
        if not self._may_use_graphs:
            return None
        try:
            rows = one.common.num_reqs
            return private.graph_inputs(self._runner, rows, len(one.ids))
        except Exception:
            self._shun_graphs()
            return None

    def _shun_graphs(self) -> None:
        if self._may_use_graphs:
            why = "semkv: CUDA graphs are of no use for documents, which makes them slower"
            log.warning(why, exc_info=True)
        self._may_use_graphs = False

    def _left_by(self, one: Pass) -> torch.Tensor:
        """What a pass has left, a row for each token, layer and half (keys, values)."""
        slots = Slots.of(one.slots, self._block)
        halves = [half for cells in self._cells for half in cells.read(slots)]
        return torch.cat(halves)

    def _forward(self, one: Pass, mode: CUDAGraphMode = CUDAGraphMode.NONE) -> None:
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
            cudagraph_runtime_mode=mode,
            slot_mapping=mapping,
            skip_compiled=self._exchanges is not None or self.axes > 1,
        )
        model = self._runner.get_model()
        with context:
            model(
                positions=one.positions,
                intermediate_tensors=None,
                **self._inputs(model, one),
            )

    def _inputs(self, model: Any, one: Pass) -> dict[str, Any]:
        """The tokens as vLLM's runner gives them to this model."""
        if not self._by_embedding:
            return {
                "input_ids": one.ids,
                "inputs_embeds": None,
            }
        embedded = model.embed_input_ids(
            one.ids,
            multimodal_embeddings=one.pictures,
            is_multimodal=one.is_picture,
        )
        return {
            "input_ids": None,
            "inputs_embeds": embedded,
        }


def _padded(
    one: Pass,
    ids: torch.Tensor,
    positions: torch.Tensor,
) -> Pass:
    """A pass whose tokens and positions were copied to where graphs read them.

    Graphs also compute the rows behind these, as in vLLM's own steps. No token attends to those rows, and their keys
    and values are not stored.
    """
    count = len(one.ids)
    ids[:count] = one.ids
    positions[:count] = one.positions
    slots = torch.nn.functional.pad(
        one.slots,
        (0, len(ids) - count),
        value=PAD_SLOT_ID,
    )
    return replace(
        one,
        common=replace(one.common, slot_mapping=slots),
        ids=ids,
        positions=positions,
        slots=slots,
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
