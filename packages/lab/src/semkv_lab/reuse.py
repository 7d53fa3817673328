"""``--engine transformers``: what a hit costs and answers, by how the donor's KV is used (``--reuse``).

- ``inputs``: semkv. The donor's prompt is sent; KV is used where all tokens up to it are equal.
- ``prefix``: a prefix cache alone. The request's own prompt is sent; the donor is not used.
- ``literal``: the original design. The donor's KV stands under the request's own tokens, position by position.
- ``blend``: after CacheBlend (Yao et al., EuroSys 2025, arXiv:2405.16444). KV of tokens that donor and request share is
  moved to the request's positions; a share of it, where the values of the second layer deviate most, is computed again,
  and so are all other tokens. Before that it uses what ``prefix`` would: equal tokens at the beginning have exact KV.

KV lies in the memory of this process. Only what a prompt's own tokens gave is kept, so nothing that ``literal`` and
``blend`` make up can be read again, by whomever. Arithmetic is in float32: arms differ by what they use, not by
rounding.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
)
from transformers.models.llama.modeling_llama import rotate_half

from semkv import keys
from semkv.encoders.vision import READING
from semkv.engines import (
    TEXT_SEPARATOR,
    EnginePrompt,
    EngineResult,
    load_image,
    system_text,
    user_parts,
)
from semkv.errors import EngineError
from semkv.types import MediaSegment, Status
from semkv_lab.settings import RunSettings
from semkv_lab.vllm_engine import first_line
from semkv_stores.digests import digest, weights_digest

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # language models; images through LLaVA's layout
_MOST_BYTES = 2 << 30  # of kept KV; the oldest goes first
_CHECKED = 1  # CacheBlend's check layer: the first one whose KV depends on other tokens

Token = int | tuple[str, int]
"""A token's id; for a part of a picture the picture's id and the part."""
Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values by layer, each [1, heads, tokens, width]."""


@dataclass
class Kv:
    """The KV of a prompt at work: a cache as transformers' layers want it.

    Attributes:
        layers: with room for the answer.
        end: tokens so far.
        rows: where the layers write next.
    """

    layers: Layers
    end: int = 0
    rows: torch.Tensor | None = None

    def update(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer: int,
        *_: Any,
    ) -> tuple[torch.Tensor, ...]:
        for held, new in zip(self.layers[layer], (keys, values), strict=True):
            held[:, :, self.rows] = new
        return tuple(held[:, :, : self.end] for held in self.layers[layer])


@dataclass(frozen=True)
class Kept:
    """The exact KV of a prompt's tokens, under the keys of its leading segments."""

    names: list[tuple[str, str]]
    tokens: tuple[Token, ...]
    layers: Layers

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pair in self.layers for tensor in pair)


class TransformersEngine:
    """Greedy answers of a language model with Llama's layers, or of a LLaVA around one.

    Args:
        settings: model, ``--reuse`` and ``--blend-share``.
        attach: keep KV; the cold pass computes every token of every prompt.
    """

    def __init__(self, settings: RunSettings, attach: bool) -> None:
        self._settings = settings
        self._attach = attach
        given = {"revision": settings.revision, "trust_remote_code": settings.trust_remote_code}
        try:
            config = AutoConfig.from_pretrained(settings.model, **given)
            _check(config, settings.model)
            kind = (
                AutoModelForImageTextToText
                if config.model_type == "llava"
                else AutoModelForCausalLM
            )
            processor = AutoProcessor.from_pretrained(settings.model, **given)
            self._model = kind.from_pretrained(settings.model, dtype=torch.float32, **given).eval()
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise EngineError(
                f"model {settings.model!r} cannot be loaded: {first_line(error)}"
            ) from error
        self._commit = getattr(config, "_commit_hash", None)  # of a hub id
        self.accepts_images = config.model_type == "llava"
        self._model.to("cuda" if torch.cuda.is_available() else "cpu")
        self._decoder = self._model.get_decoder()
        self._processor = processor
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self._template = getattr(processor, "chat_template", None) or self._tokenizer.chat_template
        ends = self._model.generation_config.eos_token_id
        self._ends = {ends} if isinstance(ends, int) else set(ends or ())
        self._each = config.image_seq_length if self.accepts_images else 0  # tokens of a picture
        self._picture = config.image_token_id if self.accepts_images else None
        self._limit = settings.max_model_len or config.get_text_config().max_position_embeddings
        self._kept: deque[Kept] = deque()

    def generate(self, prompt: EnginePrompt) -> EngineResult:
        """Answer ``prompt``. What it has in common with a kept prompt of the same beginning is not computed."""
        start = time.perf_counter()
        tokens = self._tokens(prompt)
        kept = self._find(prompt)
        shared = 0 if kept is None else min(_shared(kept.tokens, tokens), len(tokens) - 1)
        kv = self._room(len(tokens) + prompt.max_tokens)
        if kept is not None:
            self._take(kv, kept, [(n, n) for n in range(shared)])
        result = self._answer(start, prompt, tokens, kv, shared)
        if self._attach:
            layers = [(k[:, :, : len(tokens)], v[:, :, : len(tokens)]) for k, v in kv.layers]
            self._kept.append(Kept(self._names(prompt), tokens, layers))
            while sum(kept.nbytes for kept in self._kept) > _MOST_BYTES:
                self._kept.popleft()
        return result

    def reuse(self, prompt: EnginePrompt, canonical: EnginePrompt) -> EngineResult:
        """Answer ``prompt`` as ``--reuse`` says, other than ``inputs``. Nothing that a donor's KV gave is kept.

        Args:
            prompt: the request's own.
            canonical: with the donor's leading segments instead. Where no KV of these is kept, the prompt is computed:
                ``kv`` of the result is a miss.
        """
        start = time.perf_counter()
        kept = self._find(canonical)
        if kept is None or self._settings.reuse == "prefix":
            result = self.generate(prompt)
            return result if kept else replace(result, kv=Status.MISS)
        tokens = self._tokens(prompt)
        # the last token is always computed
        kv = self._room(len(tokens) + prompt.max_tokens)
        most = len(tokens) - 1
        if self._settings.reuse == "blend":
            exact = max(
                kept, self._find(prompt) or kept, key=lambda one: _shared(one.tokens, tokens)
            )
            first = min(_shared(exact.tokens, tokens), most)
            blocks = SequenceMatcher(
                None, kept.tokens[first:], tokens[first:-1], autojunk=False
            ).get_matching_blocks()
            moved = [(first + b.a + n, first + b.b + n) for b in blocks for n in range(b.size)]
            self._take(kv, exact, [(n, n) for n in range(first)])
            self._take(kv, kept, moved)
            return self._answer(start, prompt, tokens, kv, first, {own for _, own in moved})
        stand = len(kept.tokens)
        # The request's own segments follow the donor's.
        if kept.names[-1] != self._names(canonical)[-1]:
            sent = self._tokens(canonical)
            stand = _shared(kept.tokens, sent)
            most = min(most, len(tokens) - (len(sent) - stand))
        self._take(kv, kept, [(n, n) for n in range(min(stand, most))])
        return self._answer(start, prompt, tokens, kv, min(stand, most))

    def fingerprint(self) -> str:
        model = self._settings.model
        return keys.model_fingerprint(
            {
                "engine": "transformers",
                "version": transformers.__version__,
                "weights": weights_digest(model),
                "id": "" if Path(model).is_dir() else model,
                "revision": self._commit,
                "dtype": "float32",
                "chat_template": digest("template", self._template or ""),
                "pictures": READING,
            }
        )

    def close(self) -> None:
        self._kept.clear()

    # -- prompts ------------------------------------------------------------

    def _tokens(self, prompt: EnginePrompt) -> tuple[Token, ...]:
        parts = user_parts(prompt.segments)
        pictures = [part.media_id for part in parts if isinstance(part, MediaSegment)]
        text = self._text(system_text(prompt.segments), parts)
        if self._each:
            text = text.replace(
                self._processor.image_token, self._processor.image_token * self._each
            )
        ids = self._tokenizer(text, add_special_tokens=self._template is None).input_ids
        if len(ids) >= self._limit:
            raise EngineError(
                f"a prompt of {len(ids)} tokens: the model takes {self._limit} with the answer"
            )
        places = [n for n, token in enumerate(ids) if token == self._picture]
        if len(places) != self._each * len(pictures):
            raise EngineError(
                f"a text has {self._processor.image_token!r} in it, which stands for an image"
            )
        for n, place in enumerate(places):
            ids[place] = (pictures[n // self._each], n % self._each)
        return tuple(ids)

    def _text(self, system: str, parts: Sequence[str | MediaSegment]) -> str:
        """The prompt's text as the model's template has it, with a mark for each picture."""
        has_pictures = any(isinstance(part, MediaSegment) for part in parts)
        if self._template is None:
            if has_pictures:
                raise EngineError(
                    f"model {self._settings.model!r} has no chat template to place an image with"
                )
            return TEXT_SEPARATOR.join(
                part for part in (system, *parts) if isinstance(part, str) and part
            )
        turn = [
            {"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts
        ]
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        messages.append(
            {"role": "user", "content": turn if has_pictures else "".join(map(str, parts))}
        )
        text: str = self._tokenizer.apply_chat_template(
            messages,
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=True,
        )
        return text

    def _embed(self, prompt: EnginePrompt, tokens: Sequence[Token]) -> torch.Tensor:
        """The input of the first layer, [1, tokens, width]; only pictures that occur are read and encoded."""
        device = self._model.device
        ids = torch.tensor(
            [[0 if isinstance(token, tuple) else token for token in tokens]], device=device
        )
        embedded = self._model.get_input_embeddings()(ids)
        media = {part.media_id: part for part in prompt.segments if isinstance(part, MediaSegment)}
        for name in dict.fromkeys(token[0] for token in tokens if isinstance(token, tuple)):
            pixels = self._processor.image_processor(
                load_image(media[name]), return_tensors="pt"
            ).pixel_values
            features = self._model.get_image_features(pixels.to(device)).pooler_output[0]
            if len(features) != self._each:
                raise EngineError(
                    f"a picture has {len(features)} parts, and image_seq_length is {self._each}"
                )
            here = [
                (n, token[1])
                for n, token in enumerate(tokens)
                if isinstance(token, tuple) and token[0] == name
            ]
            places, parts = zip(*here, strict=True)
            embedded[0, list(places)] = features[list(parts)]
        return embedded

    # -- computing ------------------------------------------------------------

    def _answer(
        self,
        start: float,
        prompt: EnginePrompt,
        tokens: tuple[Token, ...],
        kv: Kv,
        first: int,
        blended: Collection[int] = (),
    ) -> EngineResult:
        """Compute the prompt, which came at ``start``, from its token ``first`` on, then the answer.

        ``kv`` holds KV of all tokens before ``first``, and of ``blended`` ones behind it.
        """
        rows = torch.arange(first, len(tokens), device=self._model.device)
        doubtful = torch.tensor(
            [n in blended for n in range(first, len(tokens))], device=self._model.device
        )
        most = min(prompt.max_tokens, self._limit - len(tokens))
        answer: list[int] = []
        with torch.inference_mode():
            token, work = self._step(self._embed(prompt, tokens[first:]), kv, rows, doubtful)
            first_s = time.perf_counter() - start
            answer.append(token)
            while len(answer) < most and token not in self._ends:
                place = torch.tensor([len(tokens) + len(answer) - 1], device=rows.device)
                token, _ = self._step(self._embed(prompt, [token]), kv, place, place < 0)
                answer.append(token)
        reused = len(tokens) - work
        return EngineResult(
            text=self._tokenizer.decode(answer, skip_special_tokens=True).strip(),
            token_ids=tuple(answer),
            prompt_tokens=len(tokens),
            cached_tokens=reused,
            loaded_tokens=reused if self._attach else None,
            kv=Status.SKIP if not self._attach else Status.HIT if reused else Status.MISS,
            fusion=Status.SKIP,
            ttft_s=first_s,
            latency_s=time.perf_counter() - start,
            finish_reason="stop" if token in self._ends else "length",
        )

    def _step(
        self,
        hidden: torch.Tensor,
        kv: Kv,
        rows: torch.Tensor,
        doubtful: torch.Tensor,
    ) -> tuple[int, int]:
        """Send tokens through the layers: their embeddings [1, rows, width], their positions, and which of them have KV
        of a donor's. Returns the next token, and how many were computed; one in a part of the layers counts for that
        part.
        """
        kv.end = int(rows[-1]) + 1
        work = 0
        layers = self._decoder.layers
        for number, layer in enumerate(layers):
            if number == _CHECKED and doubtful.any():
                again = self._deviating(layer, hidden, kv.layers[number][1][:, :, rows], doubtful)
                hidden = hidden[:, again]
                rows = rows[again]
                doubtful = doubtful[again]
            kv.rows = rows
            work += len(rows)
            before = torch.arange(kv.end, device=rows.device) <= rows[:, None]
            hidden = layer(
                hidden,
                attention_mask=None
                if len(rows) == kv.end or len(rows) == 1
                else before[None, None],
                position_ids=rows[None],
                position_embeddings=self._decoder.rotary_emb(hidden, rows[None]),
                past_key_values=kv,
                use_cache=True,
            )
        logits = self._model.lm_head(self._decoder.norm(hidden[:, -1]))
        return int(logits.argmax()), math.ceil(work / len(layers))

    def _deviating(
        self,
        layer: Any,
        hidden: torch.Tensor,
        values: torch.Tensor,
        doubtful: torch.Tensor,
    ) -> torch.Tensor:
        """Which rows to compute from this layer on: those without KV, and the share whose values deviate most."""
        new = layer.self_attn.v_proj(layer.input_layernorm(hidden))[0]
        deviation = (new - values[0].transpose(0, 1).flatten(1)).square().sum(-1)
        count = round(self._settings.blend_share * int(doubtful.sum()))
        chosen = deviation.where(doubtful, -1).topk(count).indices
        again = ~doubtful
        again[chosen] = True
        return again

    # -- kept KV ------------------------------------------------------------

    def _names(self, prompt: EnginePrompt) -> list[tuple[str, str]]:
        return [(prompt.tenant, key) for key in keys.chain_keys(prompt.segments, normalised=False)]

    def _find(self, prompt: EnginePrompt) -> Kept | None:
        """Of the kept prompts that share most leading segments, the latest."""
        for name in reversed(self._names(prompt)):
            for kept in reversed(self._kept):
                if name in kept.names:
                    return kept
        return None

    def _room(self, tokens: int) -> Kv:
        config = self._decoder.config
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        shape = (1, config.num_key_value_heads, tokens, width)
        device = self._model.device
        return Kv(
            [
                (torch.zeros(shape, device=device), torch.zeros(shape, device=device))
                for _ in self._decoder.layers
            ]
        )

    def _take(
        self,
        kv: Kv,
        kept: Kept,
        pairs: Sequence[tuple[int, int]],
    ) -> None:
        """Copy KV from the first to the second position of each pair; keys are turned by the distance."""
        if not pairs:
            return
        there, here = torch.tensor(pairs, device=self._model.device).T
        cos, sin = self._decoder.rotary_emb(kept.layers[0][0], (here - there)[None])
        for (old_keys, old_values), (keys_, values) in zip(kept.layers, kv.layers, strict=True):
            moved = old_keys[:, :, there]
            keys_[:, :, here] = moved * cos[:, None] + rotate_half(moved) * sin[:, None]
            values[:, :, here] = old_values[:, :, there]


def _check(config: Any, model: str) -> None:
    text = config.get_text_config()
    kinds = {"full_attention", *(getattr(text, "layer_types", None) or ())}
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type")
    plain = text.model_type in _FAMILIES and config.model_type in ("llava", text.model_type)
    if (
        not plain
        or rope != "default"
        or kinds != {"full_attention"}
        or getattr(text, "sliding_window", None)
    ):
        found = f"{config.model_type}, {text.model_type}, rope {rope}, {', '.join(sorted(kinds))}"
        raise EngineError(
            f"model {model!r} ({found}): --engine transformers takes {', '.join(_FAMILIES)}, alone or in LLaVA, with "
            "full attention and plain rotary positions; take --engine vllm"
        )


def _shared(one: Sequence[Token], other: Sequence[Token]) -> int:
    """How many leading tokens are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
