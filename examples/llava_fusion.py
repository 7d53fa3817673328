"""A fusion provider of your own: the outputs of LLaVA's vision encoder and projector, in Hugging Face transformers.

PYTHONPATH=examples semkv run --engine llava_fusion:make --model MODEL --enable-fusion-cache
"""

import time

import numpy as np
import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

from semkv import (
    EnginePrompt,
    EngineResult,
    FusionEngine,
    MediaSegment,
    Status,
    TextSegment,
    model_fingerprint,
)
from semkv.engines import load_image
from semkv_lab.settings import RunSettings
from semkv_stores.digests import weights_digest


class LlavaEngine:
    """Greedy answers about images; its own `FusionProvider`."""

    accepts_images = True

    def __init__(self, model: str) -> None:
        self._processor = AutoProcessor.from_pretrained(model)
        self._model = LlavaForConditionalGeneration.from_pretrained(
            model, dtype=torch.float32
        ).eval()
        self._fingerprint = model_fingerprint(
            {"engine": "llava", "weights": weights_digest(model), "dtype": "float32"}
        )
        self._injected: dict[str, torch.Tensor] = {}
        self._computed: dict[str, torch.Tensor] = {}

    # -- the provider: a tensor [tokens, hidden size] for each image --

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def capture(self, media: MediaSegment) -> np.ndarray | None:
        tensor = self._computed.pop(media.media_id, None)
        return None if tensor is None else tensor.numpy()

    def inject(self, media: MediaSegment, tensor: np.ndarray) -> None:
        self._injected[media.media_id] = torch.from_numpy(tensor.copy())

    # -- the engine --

    def generate(self, prompt: EnginePrompt) -> EngineResult:
        start = time.perf_counter()
        self._computed.clear()
        media = [segment for segment in prompt.segments if isinstance(segment, MediaSegment)]
        texts = [segment.text for segment in prompt.segments if isinstance(segment, TextSegment)]
        text, images = (
            "<image>" * len(media) + "\n".join(texts),
            [load_image(item) for item in media],
        )
        inputs = self._processor(text=text, images=images or None, return_tensors="pt")
        with torch.inference_mode():
            embeds = self._model.get_input_embeddings()(inputs.input_ids)
            if media:
                features = [
                    self._features(item, inputs.pixel_values[[i]]) for i, item in enumerate(media)
                ]
                places = (
                    (inputs.input_ids == self._model.config.image_token_id)
                    .unsqueeze(-1)
                    .expand_as(embeds)
                )
                embeds = embeds.masked_scatter(places, torch.cat(features))
            answer = self._model.generate(
                inputs_embeds=embeds, attention_mask=inputs.attention_mask, max_new_tokens=prompt.max_tokens,
                do_sample=False, pad_token_id=0,
            )[0].tolist()  # fmt: skip
        self._injected.clear()
        said = self._processor.decode(answer, skip_special_tokens=True)
        return EngineResult(
            text=said, token_ids=tuple(answer), prompt_tokens=embeds.shape[1], cached_tokens=0, loaded_tokens=None,
            kv=Status.SKIP, fusion=Status.SKIP, ttft_s=None, latency_s=time.perf_counter() - start,
            finish_reason="stop" if len(answer) < prompt.max_tokens else "length",
        )  # fmt: skip

    def _features(self, media: MediaSegment, pixels: torch.Tensor) -> torch.Tensor:
        if media.media_id in self._injected:
            return self._injected[media.media_id]
        tensor = self._model.get_image_features(pixels).pooler_output[0]
        self._computed[media.media_id] = tensor
        return tensor

    def close(self) -> None: ...


def make(settings: RunSettings, attach: bool) -> LlavaEngine | FusionEngine:
    """The engine, with the fusion tier where that is on. ``attach`` is False for the cold pass."""
    engine, cache = LlavaEngine(settings.model), settings.cache
    if not attach or not cache.fusion:
        return engine
    return FusionEngine(engine, engine, cache.fusion_cache_dir or cache.cache_dir / "fusion")
