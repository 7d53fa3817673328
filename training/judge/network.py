"""The judge's network: a sentence encoder's layers that read two requests at once, and a head over their states.

The encoder's matrices stay as they are. To each linear layer the product of two thin matrices is added (LoRA,
https://arxiv.org/abs/2106.09685). These are learned, and so are biases, norms and the head.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 320
"""Of both texts together. Longer pairs are not judged."""
RANK = 16
_HIDDEN = 128  # of the head
_DROPPED = 0.05  # share of a layer's input that its thin matrices do not see in training
_STRETCH = 2.0  # of what the thin matrices add
FILE = "judge.safetensors"


class Thin(nn.Module):
    """A linear layer that is left as it is, and what two thin matrices add to it."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.empty(rank, layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))
        self.dropped = nn.Dropout(_DROPPED)
        nn.init.kaiming_uniform_(self.down, a=5**0.5)

    def forward(self, states: Tensor) -> Tensor:
        added = self.dropped(states) @ self.down.T @ self.up.T
        found: Tensor = self.layer(states) + _STRETCH * added
        return found


class Network(nn.Module):
    """A BERT whose linear layers each have a pair of thin matrices added, and a head of two layers.

    The head reads the state of the first token, and how the mean states of both texts differ and agree.
    """

    def __init__(self, encoder: Any, rank: int) -> None:
        super().__init__()
        self.encoder = encoder
        width = encoder.config.hidden_size
        for parameter in encoder.parameters():
            parameter.requires_grad = False
        for block in encoder.encoder.layer:
            _thin(block, rank)
        for name, parameter in encoder.named_parameters():
            if _is_small(name):
                parameter.requires_grad = True
        self.hidden = nn.Linear(3 * width, _HIDDEN)
        self.last = nn.Linear(_HIDDEN, 1)

    def forward(self, ids: Tensor, kinds: Tensor, there: Tensor) -> Tensor:
        """The log odds that one answer serves both texts, [pairs]; all arguments are [pairs, tokens]."""
        states = self.encoder(
            input_ids=ids, token_type_ids=kinds, attention_mask=there
        ).last_hidden_state
        first = _mean(states, there * (1 - kinds))
        second = _mean(states, there * kinds)
        features = torch.cat([states[:, 0], (first - second).abs(), first * second], dim=1)
        found: Tensor = self.last(torch.tanh(self.hidden(features)))[:, 0]
        return found


def _mean(states: Tensor, chosen: Tensor) -> Tensor:
    weights = chosen.to(states.dtype)[:, :, None]
    found: Tensor = (states * weights).sum(dim=1) / weights.sum(dim=1)
    return found


def _thin(module: nn.Module, rank: int) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, Thin(child, rank))
        else:
            _thin(child, rank)


def _is_small(name: str) -> bool:
    return name.endswith(
        (".bias", "LayerNorm.weight", "token_type_embeddings.weight", "up", "down")
    )


def start(folder: Path, rank: int) -> tuple[Network, Any]:
    """The network with a sentence encoder's weights, and its tokenizer."""
    from tokenizers import Tokenizer
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(folder, dtype=torch.float32, add_pooling_layer=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(TOKENS)
    tokenizer.enable_padding()
    return Network(encoder, rank), tokenizer


def save(network: Network, folder: Path) -> None:
    """Write what was learned, in half precision, by the names of `semkv.encoders.pairs`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    halves = {name: value.half().contiguous().cpu() for name, value in learned(network)}
    save_file(halves, folder / FILE)


def learned(network: Network) -> Iterator[tuple[str, Tensor]]:
    """What was learned, by the encoder's names of its weights."""
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        own = name.removeprefix("encoder.").replace(".layer.bias", ".bias")
        value = parameter.detach()
        yield own, value * _STRETCH if own.endswith(".up") else value


def note(folder: Path, figures: dict[str, Any]) -> None:
    """Keep figures of a training beside its weights."""
    (folder / "training.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
