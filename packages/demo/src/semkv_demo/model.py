"""A model for the demo's long documents and large pictures, with random weights: the bundled one is too small for them.

It is the bundled model with a vision tower of the size of a small real one, and with room for longer prompts. What it
answers means nothing, so answers are compared token by token.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from semkv.config import get_preset

SIDE = 384
PATCH = 16
TOKENS = (SIDE // PATCH) ** 2
"""Of a picture."""

LONGEST = 8192
_VISION = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "image_size": SIDE,
    "patch_size": PATCH,
    "projection_dim": 384,
}
# With the usual 0.02 all over, a small model answers every picture alike.
_SCALE = 4.0
_ATTENTION_SCALE = 12.0
# As the bundled checkpoint, and vLLM, name the parts of transformers' model.
_NAMES = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.vision_model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
}
_COPIED = (
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
)


def write_model(directory: Path) -> None:
    """Write the checkpoint. Its weights are the same each time."""
    bundled = Path(get_preset("minigqa").model)
    directory.mkdir(parents=True, exist_ok=True)
    for name in _COPIED:
        shutil.copyfile(bundled / name, directory / name)
    processor = _read(bundled / "processor_config.json")
    processor["patch_size"] = PATCH
    processor["image_processor"]["crop_size"] = {"height": SIDE, "width": SIDE}
    processor["image_processor"]["size"] = {"shortest_edge": SIDE}
    _write(directory / "processor_config.json", processor)
    config = _read(bundled / "config.json")
    config["vision_config"] |= _VISION
    config["image_seq_length"] = TOKENS
    config["text_config"]["max_position_embeddings"] = LONGEST
    config["tie_word_embeddings"] = False
    config["text_config"]["tie_word_embeddings"] = False
    config["dtype"] = "float32"
    config["text_config"]["dtype"] = "float32"
    _write(directory / "config.json", config)
    _draw_weights(directory)


def _draw_weights(directory: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, LlavaForConditionalGeneration

    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(AutoConfig.from_pretrained(directory)).float()
    tensors = {}
    for name, parameter in model.named_parameters():
        drawn = parameter.detach()
        tensors[_named(name)] = drawn * _scale(name) if drawn.ndim > 1 else drawn
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _scale(name: str) -> float:
    if "vision_tower" in name:
        return 1.0
    return _ATTENTION_SCALE if "q_proj" in name or "k_proj" in name else _SCALE


def _named(name: str) -> str:
    for theirs, ours in _NAMES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=1), encoding="utf-8")
