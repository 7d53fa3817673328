"""The judge's network: a sentence encoder's layers that read two requests at once, and one number over them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TOKENS = 224
"""Of both texts together; of longer ones the ends are cut."""
_PIECE = 15 << 20  # bytes of a file of weights
_PIECES = "weights.{}"
_BATCH = 64


def start(folder: Path) -> tuple[Any, Any]:
    """The network with a sentence encoder's weights, and its tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    network = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32
    )
    return network, tokenizer


def save(network: Any, tokenizer: Any, folder: Path) -> None:
    """Write half precision, in pieces that a transfer of small files takes."""
    from safetensors.torch import save as packed

    folder.mkdir(parents=True, exist_ok=True)
    network.config.save_pretrained(folder)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    halves = {name: value.half().contiguous().cpu() for name, value in network.state_dict().items()}
    weights = packed(halves)
    for number, begin in enumerate(range(0, len(weights), _PIECE)):
        (folder / _PIECES.format(number)).write_bytes(weights[begin : begin + _PIECE])


class Judge:
    """A trained judge.

    Args:
        folder: what `save` wrote.
        device: as torch names it.
    """

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        from safetensors.torch import load
        from tokenizers import Tokenizer
        from transformers import AutoConfig, AutoModelForSequenceClassification

        pieces = sorted(folder.glob(_PIECES.format("*")))
        state = load(b"".join(piece.read_bytes() for piece in pieces))
        config = AutoConfig.from_pretrained(folder)
        self._network = AutoModelForSequenceClassification.from_config(config).to(torch.float32)
        self._network.load_state_dict({name: value.float() for name, value in state.items()})
        self._network.to(device).eval()
        self._device = device
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(TOKENS)
        self._tokenizer.enable_padding()

    def chances(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """The chance that one answer serves both, for each pair: the lesser of its two orders."""
        both = [*pairs, *((b, a) for a, b in pairs)]
        order = sorted(range(len(both)), key=lambda place: sum(map(len, both[place])))
        found = [0.0] * len(both)
        for begin in range(0, len(order), _BATCH):
            places = order[begin : begin + _BATCH]
            chances = self._forward([both[place] for place in places])
            for place, chance in zip(places, chances, strict=True):
                found[place] = chance
        first, second = found[: len(pairs)], found[len(pairs) :]
        return [min(one, other) for one, other in zip(first, second, strict=True)]

    def _forward(self, pairs: list[tuple[str, str]]) -> list[float]:
        read = self._tokenizer.encode_batch(pairs)
        given = {
            "input_ids": [one.ids for one in read],
            "attention_mask": [one.attention_mask for one in read],
            "token_type_ids": [one.type_ids for one in read],
        }
        tensors = {name: torch.tensor(rows, device=self._device) for name, rows in given.items()}
        with torch.inference_mode():
            logits: Tensor = self._network(**tensors).logits[:, 0]
        chances: list[float] = torch.sigmoid(logits).tolist()
        return chances


def note(folder: Path, figures: dict[str, Any]) -> None:
    """Keep figures of a training beside its weights."""
    (folder / "training.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
