"""A sentence encoder's BERT on a CUDA device, beside the engine.

One text of some tokens keeps a GPU busy for less time than it takes to start the kernels of six layers. So the kernels
are recorded once for each of some lengths, as a CUDA graph, and then start together.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from semkv.encoders.text import ShortBert
from semkv.errors import ConfigError

DEVICE = "cuda"
_SHORTEST = 16  # tokens; the others are twice as long as the one before
_KEY = "--encoder-device"


def require_cuda() -> None:
    """
    Raises:
        ConfigError: torch finds no CUDA device.
    """
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(_KEY, DEVICE, "cpu, where torch finds no CUDA device")


@dataclass(frozen=True)
class _Graph:
    """What was recorded for texts of up to so many tokens: a graph, what it reads, and what it writes."""

    graph: Any
    ids: Any
    kinds: Any
    there: Any
    states: Any

    def run(self, ids: Any, kinds: Any) -> Any:
        """The states of a text's tokens, on the CPU."""
        count = ids.shape[1]
        self.ids[:, :count].copy_(ids)
        self.kinds[:, :count].copy_(kinds)
        self.there.zero_()
        self.there[..., :count] = True
        self.graph.replay()
        return self.states[:, :count].cpu()


def plain_linear(layer: Any) -> Any:
    """A linear layer as torch has it."""
    import torch.nn.functional as torch_functions

    def run(rows: Any, after: str = "none", how: str = "") -> Any:
        found = torch_functions.linear(rows, layer.weight, layer.bias)
        return torch_functions.gelu(found, approximate=how) if after == "gelu" else found

    return run


class CudaBert(ShortBert):
    """A `ShortBert` whose layers run on a CUDA device. Tokens, and the vector of a text's states, are made on the CPU.

    One thread at a time may call it.
    """

    few = sys.maxsize

    def __init__(self, model: Any) -> None:
        import torch

        bert = copy.deepcopy(model[0].auto_model).to(DEVICE)
        super().__init__(model, bert, plain_linear)
        self._graphs: dict[int, _Graph] = {}
        pool = torch.cuda.graph_pool_handle()  # one graph runs at a time
        with torch.inference_mode():
            length = _SHORTEST
            while length < 2 * int(model.max_seq_length):
                longest = min(length, int(model.max_seq_length))
                self._graphs[longest] = self._recorded(longest, pool)
                length *= 2

    def states_of(self, read: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [self._recalled(one["input_ids"], one["token_type_ids"]) for one in read]

    def _recalled(self, ids: Any, kinds: Any) -> Any:
        """The states of a text's tokens, by the graph that was recorded for its length."""
        graph = next(one for length, one in self._graphs.items() if length >= ids.shape[1])
        return graph.run(ids, kinds)

    def _recorded(self, length: int, pool: Any) -> _Graph:
        import torch

        ids = torch.zeros((1, length), dtype=torch.long, device=DEVICE)
        kinds = torch.zeros_like(ids)
        there = torch.ones((1, 1, 1, length), dtype=torch.bool, device=DEVICE)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is loaded at a first call may not be recorded
            self.states(ids, kinds, there)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            states = self.states(ids, kinds, there)
        return _Graph(graph, ids, kinds, there, states)
