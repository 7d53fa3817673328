"""Bundles of settings that belong together: a model, its embedding layers and the data set it is tried on.

A preset fills in what was not given on the command line; any flag overrides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from semkv.errors import ConfigError

DEFAULT_PRESET = "minigqa"
MINIGQA_VLM = Path(__file__).parent / "assets" / "minigqa-vlm"

# What lmms-eval appends to every GQA question; without it a chat model answers in sentences.
GQA_INSTRUCTION = "Answer the question using a single word or phrase."


@dataclass(frozen=True, slots=True)
class Preset:
    """Recommended settings for one model, named as the flags of ``semkv run``; ``instruction`` is appended to every
    question: it is part of the prompt, not of the text that the tiers match on."""

    model: str
    trust_remote_code: bool = False
    embedding_layers: tuple[str, ...] = ()
    embedding_hook: str = "none"
    vision_encoder: str = ""
    similarity_threshold: float = 0.92
    fusion: bool = False
    dataset: str = "gqa"
    instruction: str = ""
    max_model_len: int | None = None
    max_tokens: int = 16


_VLM = Preset(
    model="Qwen/Qwen3-VL-2B-Instruct",
    embedding_layers=("prompt:384:0.8", "vision:512:0.82"),
    embedding_hook="prompt_vision",
    fusion=True,
    instruction=GQA_INSTRUCTION,
    max_model_len=8192,
)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "minigqa": Preset(
            model=str(MINIGQA_VLM),
            embedding_layers=("prompt:384:0.92", "vision:6912:0.7"),  # as docs/quality.md measures
            embedding_hook="prompt_vision",
            vision_encoder=str(MINIGQA_VLM),
            fusion=True,
            dataset="minigqa",
            max_model_len=512,
            max_tokens=8,
        ),
        "opt-125m": Preset(model="facebook/opt-125m", dataset="gqa", max_model_len=2048),
        "qwen3-vl-2b": _VLM,
        "internvl3.5-2b": replace(_VLM, model="OpenGVLab/InternVL3_5-2B-Instruct", trust_remote_code=True),
        "qwen2.5-vl-7b": replace(_VLM, model="Qwen/Qwen2.5-VL-7B-Instruct"),
    }
)


def get_preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ConfigError: there is none; the message lists those there are.
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError("--preset", name, PRESETS) from None
