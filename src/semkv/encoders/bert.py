"""Sentence vectors of a BERT in sentence-transformers' form, by its files alone: no torch, no transformers.

Tokens come from the model's ``tokenizer.json``, their states from ONNX Runtime or a GPU. A text's vector is the mean
of its tokens' states, at length 1. Directories of another form are left to sentence-transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from semkv.encoders.text import at_unit_length

if TYPE_CHECKING:
    import numpy.typing as npt

    from semkv.encoders.text import Matrix
    from semkv.types import Vector

    Numbers = npt.NDArray[np.int64]

States = Callable[["Numbers", "Numbers"], "npt.NDArray[np.float32]"]
"""Makes states, [texts, tokens, width], of tokens, [texts, tokens], and of 1 where there is one and 0 behind them."""

_PASS = 1024  # tokens of a pass, padding included: attention takes 50 kB a token of a text of 256
_POOLED_AS_MEAN = ("pooling_mode_mean_tokens", True)
_MODULES = ("Transformer", "Pooling", "Normalize")
_CONFIG = {  # what `onnx_bert` computes; what is not there has these values
    "model_type": "bert",
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "dtype": "float32",
    "torch_dtype": "float32",
}
_READ = frozenset(  # by `onnx_bert`, by this module, or in the shapes of the weights
    (
        "hidden_size intermediate_size layer_norm_eps max_position_embeddings num_attention_heads num_hidden_layers"
        " type_vocab_size vocab_size"
    ).split()
)
_HARMLESS = frozenset(  # of training, of other uses, or a name
    (
        "_name_or_path architectures attention_probs_dropout_prob bos_token_id classifier_dropout eos_token_id"
        " gradient_checkpointing hidden_dropout_prob id2label initializer_range label2id pad_token_id"
        " transformers_version use_cache"
    ).split()
)


class OtherFormError(Exception):
    """A model has not the form that is read here; the message says in what."""


class Bert:
    """A BERT by its directory. `tokens` may be called from any thread, `encode` from one at a time.

    Args:
        directory: of the model.
        states: given the directory and its config, makes what computes states.

    Attributes:
        dim: length of the vectors.
        window: how many tokens are read of a text.
        unknown: the token that stands for what the tokenizer does not know.

    Raises:
        OtherFormError: the model has another form.
        Exception: what the libraries that read the files raise where one is damaged.
    """

    def __init__(
        self, directory: Path, states: Callable[[Path, Mapping[str, Any]], States]
    ) -> None:
        from tokenizers import Tokenizer

        config = read_config(directory)
        self.dim = int(config["hidden_size"])
        self.window = _window(directory, config)
        file = directory / "tokenizer.json"
        self._counting = Tokenizer.from_file(str(file))
        self._counting.no_padding()
        self._counting.no_truncation()
        self._reading = Tokenizer.from_file(str(file))
        self._reading.no_padding()
        self._reading.enable_truncation(self.window)
        self.unknown = self._counting.token_to_id("[UNK]")
        self._states = states(directory, config)

    def tokens(self, text: str) -> list[int]:
        """The tokens of a whole text."""
        found: list[int] = self._counting.encode(text).ids
        return found

    def encode(self, texts: Sequence[str]) -> Matrix:
        """The unit vectors of texts, [len(texts), dim]."""
        tokens = [self._reading.encode(text).ids for text in texts]
        found = np.zeros((len(texts), self.dim), dtype=np.float32)
        for rows in _passes(tokens):
            found[rows] = self._vectors([tokens[row] for row in rows])
        return at_unit_length(found)

    def _vectors(self, tokens: Sequence[Sequence[int]]) -> Matrix:
        """The mean of the states of each text."""
        longest = max(map(len, tokens))
        ids = np.zeros((len(tokens), longest), dtype=np.int64)
        there = np.zeros_like(ids)
        for row, own in enumerate(tokens):
            ids[row, : len(own)] = own
            there[row, : len(own)] = 1
        states = self._states(ids, there)
        vectors: list[Vector] = [
            states[row, : len(own)].mean(axis=0) for row, own in enumerate(tokens)
        ]
        return np.stack(vectors)


def _passes(tokens: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """The rows of texts that run together: those of about one length, few enough for one pass."""
    rows: list[int] = []
    for row in sorted(range(len(tokens)), key=lambda row: len(tokens[row])):
        longest = len(tokens[row])
        if rows and longest * (len(rows) + 1) > _PASS:
            yield rows
            rows = []
        rows.append(row)
    if rows:
        yield rows


def read_config(directory: Path) -> dict[str, Any]:
    """The config of a model that has the form.

    Raises:
        OtherFormError: it has another.
        OSError, ValueError: a file is damaged.
    """
    modules = [str(row["type"]).rpartition(".")[2] for row in _read(directory, "modules.json")]
    if modules not in ([*_MODULES], [*_MODULES[:2]]):
        raise OtherFormError(f"its modules are {', '.join(modules)}")
    pooling = _read(directory, "1_Pooling/config.json")
    modes = [
        (key, value) for key, value in pooling.items() if key.startswith("pooling_mode") and value
    ]
    if modes not in ([_POOLED_AS_MEAN], [("pooling_mode", "mean")]):
        raise OtherFormError("its vectors are not the mean of all tokens")
    settings = _read(directory, "config_sentence_transformers.json")
    if settings.get("default_prompt_name") or settings.get("truncate_dim"):
        raise OtherFormError("it puts a prompt before texts, or cuts vectors")
    if not (directory / "tokenizer.json").is_file():
        raise OtherFormError("it has no tokenizer.json")
    config: dict[str, Any] = _read(directory, "config.json")
    for key, value in _CONFIG.items():
        if config.get(key, value) not in (value, None):
            raise OtherFormError(f"{key} is {config[key]}")
    unknown = config.keys() - _CONFIG.keys() - _READ - _HARMLESS
    if said := sorted(key for key in unknown if config[key] is not None):
        raise OtherFormError(f"it is not known what {', '.join(said)} means")
    return config


def _window(directory: Path, config: Mapping[str, Any]) -> int:
    settings = _read(directory, "sentence_bert_config.json")
    if settings.get("do_lower_case") or not settings.get("max_seq_length"):
        raise OtherFormError("it folds letters by itself, or names no max_seq_length")
    return min(int(settings["max_seq_length"]), int(config["max_position_embeddings"]))


def _read(directory: Path, name: str) -> Any:
    file = directory / name
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise OtherFormError(f"it has no {name}") from error
