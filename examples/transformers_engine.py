"""An engine of your own: a text model of Hugging Face transformers that computes a prompt's beginning once.

PYTHONPATH=examples semkv run --engine transformers_engine:TransformersEngine --model MODEL --dataset prompts.jsonl
"""

import time
from itertools import takewhile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from semkv import EnginePrompt, EngineResult, Status, TextSegment, model_fingerprint
from semkv_lab.settings import RunSettings
from semkv_stores.digests import weights_digest


class TransformersEngine:
    """Greedy answers. Keeps the KV of each tenant's last prompt; only what the next one does not share is computed."""

    accepts_images = False

    def __init__(self, settings: RunSettings, attach: bool) -> None:
        """``attach`` is False for the cold pass, which may use only the engine's own caches."""
        self._tokenizer = AutoTokenizer.from_pretrained(settings.model)
        self._model = AutoModelForCausalLM.from_pretrained(settings.model).eval()
        self._weights = weights_digest(settings.model)
        self._kept: dict[str, tuple[list[int], DynamicCache]] = {}

    def generate(self, prompt: EnginePrompt) -> EngineResult:
        start = time.perf_counter()
        text = "\n".join(
            segment.text for segment in prompt.segments if isinstance(segment, TextSegment)
        )
        ids = self._tokenizer(text).input_ids
        before, kv = self._kept.pop(prompt.tenant, ([], DynamicCache()))
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(before, ids, strict=False))
        shared = min(len([*equal]), len(ids) - 1)
        kv.crop(shared - len(before))  # as many tokens fewer
        with torch.inference_mode():
            inputs = torch.tensor([ids])
            out = self._model.generate(
                inputs, attention_mask=torch.ones_like(inputs), past_key_values=kv, max_new_tokens=prompt.max_tokens,
                do_sample=False, pad_token_id=0,
            )[0].tolist()  # fmt: skip
        self._kept[prompt.tenant] = out[:-1], kv  # the last token was never an input
        answer, seconds = out[len(ids) :], time.perf_counter() - start
        ended = "stop" if len(answer) < prompt.max_tokens else "length"
        said = self._tokenizer.decode(answer, skip_special_tokens=True)
        return EngineResult(
            text=said, token_ids=tuple(answer), prompt_tokens=len(ids), cached_tokens=shared, loaded_tokens=None,
            kv=Status.SKIP, fusion=Status.SKIP, ttft_s=None, latency_s=seconds, finish_reason=ended,
        )  # fmt: skip

    def fingerprint(self) -> str:
        return model_fingerprint({"engine": "transformers", "weights": self._weights})

    def close(self) -> None:
        self._kept.clear()
