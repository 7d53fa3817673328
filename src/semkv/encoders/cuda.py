"""The states of a BERT's tokens on a CUDA device, beside the engine.

One text of some tokens keeps a GPU busy for less time than it takes to start the kernels of six layers. So the kernels
of transformers' own BERT are recorded once for each of some lengths, as a CUDA graph, and then start together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from semkv.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

    from semkv.encoders.bert import Numbers, States

DEVICE = "cuda"
_SHORTEST = 16  # tokens; the others are twice as long as the one before
_KEY = "--encoder-device"


def require_cuda() -> None:
    """
    Raises:
        ConfigError: torch finds no CUDA device, or torch or transformers is not installed, both of which vLLM brings.
    """
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        raise ConfigError(_KEY, DEVICE, f"cpu, where {error.name} is not installed") from error
    if not torch.cuda.is_available():
        raise ConfigError(_KEY, DEVICE, "cpu, where torch finds no CUDA device")


@dataclass(frozen=True)
class _Graph:
    """What was recorded for texts of up to so many tokens: a graph, what it reads, and what it writes."""

    bert: Any  # whose memory the graph reads as long as it lives
    graph: Any
    ids: Any
    there: Any
    states: Any

    def run(self, ids: Any) -> Any:
        """The states of a text's tokens, on the CPU."""
        count = ids.shape[1]
        self.ids[:, :count].copy_(ids)
        self.there.zero_()
        self.there[..., :count] = True
        self.graph.replay()
        return self.states[:, :count].cpu()


def cuda_states(directory: Path, config: Mapping[str, Any]) -> States:
    """What computes the states of a model's tokens, one text after the other.

    Raises:
        RuntimeError: the GPU has no room for it.
    """
    import torch
    from transformers import BertModel

    bert = BertModel.from_pretrained(
        directory,
        add_pooling_layer=False,
        attn_implementation="sdpa",
        dtype=torch.float32,
        local_files_only=True,
    )
    bert = bert.eval().to(DEVICE)
    window = int(config["max_position_embeddings"])
    graphs: dict[int, _Graph] = {}
    pool = torch.cuda.graph_pool_handle()  # one graph runs at a time
    with torch.inference_mode():
        length = _SHORTEST
        while length < 2 * window:
            longest = min(length, window)
            graphs[longest] = _recorded(bert, longest, pool)
            length *= 2

    def run(ids: Numbers, there: Numbers) -> npt.NDArray[np.float32]:
        found = np.zeros((*ids.shape, int(config["hidden_size"])), dtype=np.float32)
        with torch.inference_mode():
            for row, count in enumerate(there.sum(axis=1).tolist()):
                graph = next(one for most, one in graphs.items() if most >= count)
                found[row, :count] = graph.run(torch.from_numpy(ids[row : row + 1, :count]))[0]
        return found

    return run


def _recorded(bert: Any, length: int, pool: Any) -> _Graph:
    import torch

    ids = torch.zeros((1, length), dtype=torch.long, device=DEVICE)
    there = torch.ones((1, 1, length, length), dtype=torch.bool, device=DEVICE)

    def states() -> Any:
        return states_of(bert, ids, there)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what is loaded at a first call may not be recorded
        states()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        found = states()
    return _Graph(bert, graph, ids, there, found)


def states_of(bert: Any, ids: Any, there: Any) -> Any:
    """The states of the tokens, [1, tokens, width], of ``ids``, [1, tokens]; ``there``, [1, 1, tokens, tokens], says
    for each token which others are no padding."""
    import torch

    found = bert(input_ids=ids, token_type_ids=torch.zeros_like(ids), attention_mask=there)
    return found.last_hidden_state
