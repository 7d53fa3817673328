"""Tiny checkpoints with random weights, made offline, for tests with a real vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Checkpoint = Callable[[str], Path]
"""The folder of a checkpoint by its family: what the fixture ``checkpoint`` gives."""

SPECIAL = ["<s>", "</s>", "<pad>", "<unk>"]


def tokenizer(directory: Path, extra: list[str], **special: Any) -> Any:
    """A byte-level BPE with a few merges: every text has tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL + extra,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(
        ["what color is the car? is there a dog left of the tree?"] * 10, trainer
    )
    result = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        **special,
    )
    result.save_pretrained(directory)
    return result


def llava(directory: Path) -> Path:
    """LLaVA: CLIP tower on 64 pixels (64 image tokens), 4-layer Llama with 2 KV heads of 64."""
    import transformers
    from safetensors.torch import load_file, save_file

    tok = tokenizer(directory, ["<image>"])
    image = tok.convert_tokens_to_ids("<image>")
    processor = transformers.CLIPImageProcessor(
        size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64}
    )
    transformers.LlavaProcessor(
        image_processor=processor, tokenizer=tok, patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, image_token="<image>",
    ).save_pretrained(directory)  # fmt: skip
    vision = transformers.CLIPVisionConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, image_size=64,
        patch_size=8, projection_dim=64,
    )  # fmt: skip
    text = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=image, image_token_id=image,
        vision_feature_select_strategy="default", vision_feature_layer=-2, image_seq_length=64,
    )  # fmt: skip
    _save(transformers.LlavaForConditionalGeneration, config, directory)
    file = (
        directory / "model.safetensors"
    )  # vLLM wants vision_tower.vision_model.*, transformers 5 saves without
    tensors = {
        k if "vision_model." in k else k.replace("vision_tower.", "vision_tower.vision_model."): v
        for k, v in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


_QWEN_TOKENS = {
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
}  # fmt: skip


def qwen3_vl_config(
    directory: Path, text: Any, vision: Any, pixels: Any, template: str | None = None
) -> Any:
    """A configuration of Qwen3-VL whose tokenizer and processor are in the directory: deepstack (the encoder's output
    is wider than the model), interleaved M-RoPE. ``pixels``: the least and the most of a picture."""
    import transformers

    tok = tokenizer(
        directory, [*_QWEN_TOKENS.values()], **({"chat_template": template} if template else {})
    )
    least, most = pixels
    transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(
            size={"shortest_edge": least, "longest_edge": most}, patch_size=16
        ),
        tokenizer=tok, video_processor=transformers.Qwen3VLVideoProcessor(), chat_template=template,
    ).save_pretrained(directory)  # fmt: skip
    ids = {key: tok.convert_tokens_to_ids(name) for key, name in _QWEN_TOKENS.items()}
    rope = {"rope_type": "default", "mrope_interleaved": True, **text.pop("rope")}
    text |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "rope_parameters": rope}
    vision |= {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **ids)


def qwen3_vl(directory: Path, layers: int = 4, added: int = 3) -> Path:
    """Qwen3-VL; ``added``: behind how many of its ``layers`` the encoder's output is added."""
    import transformers

    text = {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "rope": {"rope_theta": 1e4, "mrope_section": [12, 10, 10]},
    }  # fmt: skip
    vision = {
        "depth": 4, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "out_hidden_size": 256,
        "num_position_embeddings": 256, "deepstack_visual_indexes": list(range(added)),
    }  # fmt: skip
    config = qwen3_vl_config(directory, text, vision, (4 * 32 * 32, 64 * 32 * 32))
    return _save(transformers.Qwen3VLForConditionalGeneration, config, directory)


def qwen2_5_vl(directory: Path) -> Path:
    """Qwen2.5-VL of one layer: M-RoPE by sections."""
    import transformers

    tok = tokenizer(directory, [*_QWEN_TOKENS.values()])
    transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(
            size={"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}, patch_size=14
        ),
        tokenizer=tok, video_processor=transformers.Qwen2VLVideoProcessor(),
    ).save_pretrained(directory)  # fmt: skip
    ids = {key: tok.convert_tokens_to_ids(name) for key, name in _QWEN_TOKENS.items()}
    text = {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "bos_token_id": 0,
        "eos_token_id": 1, "pad_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "out_hidden_size": 256,
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    return _save(transformers.Qwen2_5_VLForConditionalGeneration, config, directory)


def internvl(directory: Path) -> Path:
    """InternVL in the layout of transformers: InternViT with pixel shuffle, Qwen2 language model."""
    import transformers

    tokens = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
    }
    tok = tokenizer(
        directory,
        [*tokens.values(), "<video>"],
        extra_special_tokens={**tokens, "video_token": "<video>"},
    )
    size = {"height": 64, "width": 64}
    transformers.InternVLProcessor(
        image_processor=transformers.GotOcr2ImageProcessor(size=size, crop_to_patches=False),
        tokenizer=tok, video_processor=transformers.InternVLVideoProcessor(size=size), image_seq_length=16,
    ).save_pretrained(directory)  # fmt: skip
    text = {
        "model_type": "qwen2", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    vision = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
        "image_size": [64, 64], "patch_size": [8, 8],
    }  # fmt: skip
    config = transformers.InternVLConfig(
        text_config=text, vision_config=vision, image_token_id=tok.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=16, downsample_ratio=0.5,
    )  # fmt: skip
    return _save(transformers.InternVLForConditionalGeneration, config, directory)


_WIDTHS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
_LLAMA = {**_WIDTHS, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 4}
_MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 32,
}  # fmt: skip
_SHALLOW = {**_LLAMA, "num_hidden_layers": 2}
_ONE_LAYER = {**_LLAMA, "num_hidden_layers": 1}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"

TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("opt", {**_WIDTHS, "ffn_dim": 256, "num_hidden_layers": 3, "word_embed_proj_dim": 128}),
    "llama": ("llama", _LLAMA),
    "llama-shallow": ("llama", _SHALLOW),
    "llama3": ("llama", {**_ONE_LAYER, "rope_parameters": _LLAMA3}),
    "yarn": ("llama", {**_ONE_LAYER, "rope_parameters": _YARN}),
    "qwen2": ("qwen2", _SHALLOW),
    "qwen3": ("qwen3", _SHALLOW),
    "mistral": ("mistral", {**_LLAMA, "sliding_window": 64}),
    "gemma3": (
        "gemma3_text",
        {
            **_LLAMA, "num_hidden_layers": 6, "sliding_window": 64, "query_pre_attn_scalar": 32,
            "layer_types": [_SLIDING] * 5 + [_FULL],
        },
    ),
    "granite4": (
        "granitemoehybrid",
        {
            **_WIDTHS, **_MAMBA, "intermediate_size": 256, "num_hidden_layers": 4, "num_local_experts": 0,
            "layer_types": ["mamba", "mamba", "attention", "mamba"], "num_experts_per_tok": 0,
            "shared_intermediate_size": 256, "position_embedding_type": "rope", "attention_multiplier": 0.1,
            "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
        },
    ),
    "falcon-h1": ("falcon_h1", {**_LLAMA, **_MAMBA, "num_hidden_layers": 3, "mamba_d_ssm": 256}),
    "qwen3-next": (
        "qwen3_next",
        {
            **_WIDTHS, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 4, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
            "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
        },
    ),
}  # fmt: skip
"""Text models by family: the name of transformers' configuration and its fields. Windows are of 64 tokens."""


def text(family: str, directory: Path) -> Path:
    """A text model of one of the families of `TEXT`, with weights in float32."""
    import transformers

    tokenizer(directory, [])
    name, fields = TEXT[family]
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = transformers.CONFIG_MAPPING[name](
        vocab_size=512, max_position_embeddings=2048, **ids, **fields
    )
    return _save(transformers.AutoModelForCausalLM.from_config, config, directory, "float32")


def _save(kind: Any, config: Any, directory: Path, dtype: str = "bfloat16") -> Path:
    """Random weights: the usual 0.02 makes a tiny model answer every prompt alike, so the matrices are scaled up."""
    import torch

    torch.manual_seed(0)
    model = kind(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4.0)
    model.save_pretrained(directory)
    return directory


def picture(seed: int = 0, size: int = 64) -> Any:
    """A random RGB picture."""
    import numpy as np
    from PIL import Image

    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype=np.uint8)
    )


MAKERS: dict[str, Callable[[Path], Path]] = {
    "llava": llava,
    "qwen3-vl": qwen3_vl,
    "qwen3-vl-shallow": partial(qwen3_vl, layers=1, added=1),
    "qwen2.5-vl": qwen2_5_vl,
    "internvl": internvl,
    **{family: partial(text, family) for family in TEXT},
}
"""A checkpoint by family; each takes an empty directory and returns it filled."""

PROMPTS = {
    "llava": "<s><image>",
    "qwen3-vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "internvl": "<IMG_CONTEXT>",
    "opt": "<s>",
}
"""How a prompt with one picture begins, by family."""


def make(family: str, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    MAKERS[family](directory)
    assert json.loads((directory / "config.json").read_text())["architectures"]
    return directory
