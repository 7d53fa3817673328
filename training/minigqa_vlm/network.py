"""The network of minigqa-vlm, its forward pass over packed rows, and its export as a LLaVA checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import prompt
import torch
from torch import Tensor, nn
from torch.nn import functional

TARGETS, TEXT_TARGETS = 72, 200
"""Most answer tokens in a row: 21 questions of at most 3 (`data.QUESTIONS`), 28 of at most 7, and some to spare."""


def build(seed: int = 0) -> Any:
    """A `LlavaForConditionalGeneration` of 6.8 million parameters in float32, randomly initialised."""
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    torch.manual_seed(seed)
    vision = CLIPVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=3,
        image_size=96,
        patch_size=8,
        projection_dim=192,
    )
    text = LlamaConfig(
        vocab_size=prompt.VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        bos_token_id=prompt.BOS_ID,
        eos_token_id=prompt.EOS_ID,
        pad_token_id=prompt.PAD_ID,
        tie_word_embeddings=True,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=prompt.IMAGE_ID,
        image_token_id=prompt.IMAGE_ID,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
        image_seq_length=prompt.IMAGE_TOKENS,
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config)


def load(checkpoint: Path) -> Any:
    """An exported checkpoint in float32, to train on."""
    from transformers import LlavaForConditionalGeneration

    return LlavaForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)


def targets_of(labels: Tensor, most: int = TARGETS) -> tuple[Tensor, Tensor]:
    """Labels and their columns, int64 ``[rows, most]``: every answer token of a row, then -1 where there are fewer.

    The count is fixed so that the host never waits for the device to count.
    """
    values, columns = labels.topk(most, dim=1)
    return values, columns


def forward(
    model: Any,
    pixels: Tensor | None,
    ids: Tensor,
    segments: Tensor,
    positions: Tensor,
    columns: Tensor,
) -> Tensor:
    """Logits ``[rows, targets, vocabulary]`` at the places that predict an answer.

    Args:
        pixels: ``[rows, 3, 96, 96]``, normalised; one picture a row. None for rows without.
        ids, segments, positions: int64 ``[rows, length]`` as `data.Chunk` describes them.
        columns: int64 ``[rows, targets]``, the places to predict at (`targets_of`).
    """
    body = model.model
    embeds = body.language_model.get_input_embeddings()(ids)
    if pixels is not None:
        seen = body.vision_tower(pixel_values=pixels).last_hidden_state[:, 1:]
        features = body.multi_modal_projector(seen)
        is_image = (ids == prompt.IMAGE_ID).unsqueeze(-1)
        embeds = embeds.masked_scatter(is_image, features.to(embeds.dtype))
    hidden = body.language_model(
        inputs_embeds=embeds,
        attention_mask=_mask(segments),
        position_ids=positions,
        use_cache=False,
    ).last_hidden_state
    chosen = hidden.gather(1, columns[:, :, None].expand(-1, -1, hidden.shape[-1]))
    logits: Tensor = model.lm_head(chosen)
    return logits


def _mask(segments: Tensor) -> Tensor:
    """Bool ``[rows, 1, length, length]``: a place sees the head and its own segment, never what comes later."""
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    same = segments[:, :, None] == segments[:, None, :]
    return (causal & (same | (segments == 0)[:, None, :]))[:, None]


def normalise(images: Tensor) -> Tensor:
    """uint8 ``[n, 96, 96, 3]`` to float ``[n, 3, 96, 96]`` in [-1, 1], as the image processor does."""
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1.0


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """`normalise` with small changes of brightness and contrast, a shift of up to 2 pixels, and noise."""
    pixels = normalise(images)
    count, device = len(pixels), pixels.device

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, device=device, generator=generator)

    moved = torch.randint(-2, 3, (count, 2), device=device, generator=generator)
    keep = torch.rand(count, 1, device=device, generator=generator) < 0.5
    moved = moved.masked_fill(keep, 0)
    side = torch.arange(pixels.shape[-1], device=device)
    rows = (side + moved[:, :1]).clamp(0, side[-1])
    columns = (side + moved[:, 1:]).clamp(0, side[-1])
    batch = torch.arange(count, device=device)[:, None, None]
    pixels = pixels.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]].permute(
        0, 3, 1, 2
    )
    pixels = (
        pixels * uniform(0.92, 1.08, 1, 1, 1)
        + uniform(-0.1, 0.1, 1, 1, 1)
        + uniform(-0.02, 0.02, 3, 1, 1)
    )
    noise = torch.randn(pixels.shape, device=device, generator=generator) * uniform(
        0, 0.02, 1, 1, 1
    )
    return (pixels + noise).clamp(-1, 1)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy over the answer tokens."""
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-1)


def parameter_groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Weight decay on matrices, none on gains, biases and embeddings."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decayed = [p for n, p in named if p.ndim >= 2 and "embed" not in n]
    others = [p for n, p in named if not (p.ndim >= 2 and "embed" not in n)]
    return [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def export(model: Any, bpe: Any, out: Path) -> int:
    """Writes a bfloat16 checkpoint that transformers and vLLM load; returns the bytes of its weights.

    vLLM looks for the vision tower's weights under ``vision_tower.vision_model.``; transformers 5 saves them without
    the middle name and reads both.
    """
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    out.mkdir(parents=True, exist_ok=True)
    prompt.save_tokenizer(bpe, out)
    config = model.config.__class__.from_dict(model.config.to_dict())
    config.architectures = ["LlavaForConditionalGeneration"]
    for part in (config, config.text_config, config.vision_config):
        part.dtype = torch.bfloat16
    config.save_pretrained(out)
    GenerationConfig(
        bos_token_id=prompt.BOS_ID,
        eos_token_id=prompt.EOS_ID,
        pad_token_id=prompt.PAD_ID,
        do_sample=False,
    ).save_pretrained(out)
    tensors = {
        _saved_name(name): value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight" and "position_ids" not in name
    }
    file = out / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)
    return file.stat().st_size


def _saved_name(name: str) -> str:
    """The names of LLaVA 1.5's own checkpoints: ``language_model.model.*``, ``vision_tower.vision_model.*``."""
    name = name.removeprefix("model.")
    if name.startswith("language_model.") and not name.startswith("language_model.model."):
        return name.replace("language_model.", "language_model.model.", 1)
    if name.startswith("vision_tower.") and not name.startswith("vision_tower.vision_model."):
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    return name
