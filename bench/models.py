"""Models for the benches, made from their configurations with random weights: nothing is downloaded.

`FAMILIES` are small text models, one for each way in which vLLM keeps a context. `SHAPE` is a vision-language model
with the full layer, head and hidden sizes of the named one.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

from common import ROOT

COMMON = {
    "vocab_size": 1024, "max_position_embeddings": 8192, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 128,
}  # fmt: skip
MLA = {
    "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 128,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "rope_interleave": True,
    "moe_intermediate_size": 128, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LINEAR = {
    "head_dim": 64, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
SLIDING = ["sliding_attention"] * 5 + ["full_attention"]

# family: architecture, model type of transformers, configuration
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", {"num_hidden_layers": 4, "head_dim": 64}),
    # Without the name of its router vLLM 0.33 has no place for the router's correction, which transformers writes.
    "deepseek_v3": ("DeepseekV3ForCausalLM", "deepseek_v3", MLA | {"topk_method": "noaux_tc"}),
    "gpt_oss": ("GptOssForCausalLM", "gpt_oss", {
        "num_hidden_layers": 4, "head_dim": 64, "intermediate_size": 256, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", {
        "num_hidden_layers": 6, "head_dim": 64, "sliding_window": 128, "query_pre_attn_scalar": 64,
        "layer_types": SLIDING,
    }),
    "granite4": ("GraniteMoeHybridForCausalLM", "granitemoehybrid", MAMBA | {
        "num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"], "num_local_experts": 0,
        "num_experts_per_tok": 0, "shared_intermediate_size": 512, "position_embedding_type": "rope",
        "attention_multiplier": 0.1, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    }),
    "qwen3_next": ("Qwen3NextForCausalLM", "qwen3_next", LINEAR | {
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_experts": 4,
        "num_experts_per_tok": 2, "decoder_sparse_step": 1,
    }),
    "nemotron_h": ("NemotronHForCausalLM", "nemotron_h", {
        "hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5, "head_dim": 64, "mamba_num_heads": 8,
        "mamba_head_dim": 64, "n_groups": 1, "ssm_state_size": 64, "conv_kernel": 4, "expand": 2, "chunk_size": 128,
    }),
    "falcon_h1": ("FalconH1ForCausalLM", "falcon_h1", MAMBA | {"num_hidden_layers": 3, "mamba_d_ssm": 512}),
}  # fmt: skip


def write_family(family: str, directory: Path) -> None:
    """The configuration as transformers writes it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    architecture, kind, more = FAMILIES[family]
    config = CONFIG_MAPPING[kind](**(COMMON | more), architectures=[architecture], dtype="bfloat16")
    config.save_pretrained(directory)


# ------------------------------------------------------------------ a vision-language model

SHAPE = "qwen3-vl-2b"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
MOST_PIXELS = 1280 * 32 * 32  # its own 16.8 million make vLLM's profiling encode 16,384 tokens

_TEXT = {
    "vocab_size": 151936, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 262144,
}  # fmt: skip
_ROPE = {"rope_theta": 5e6, "mrope_section": [24, 20, 20]}
_LARGE_ENCODER = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip

# https://huggingface.co/Qwen/Qwen3-VL-2B-Instruct/blob/main/config.json, of 8B and 32B, and one for a CPU:
# text model, image encoder
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl-2b": (
        _TEXT | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "tie_word_embeddings": True},
        {
            "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
            "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
        },
    ),
    "qwen3-vl-8b": (
        _TEXT | {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
            "tie_word_embeddings": False,
        },
        _LARGE_ENCODER,
    ),
    "qwen3-vl-32b": (
        _TEXT | {
            "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
            "tie_word_embeddings": False,
        },
        _LARGE_ENCODER,
    ),
    "tiny": (
        _TEXT | {
            "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False,
        },
        {
            "depth": 3, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1, 2],
        },
    ),
}  # fmt: skip


def write_shape(directory: Path, shape: str = SHAPE, most_pixels: int = MOST_PIXELS) -> None:
    """The configuration of a model of these `SHAPES`, with a tokenizer of a few words."""
    sys.path.insert(0, str(ROOT / "tests"))
    import tiny_models

    text, vision = SHAPES[shape]
    config = tiny_models.qwen3_vl_config(
        directory,
        text | {"rope": dict(_ROPE)},
        vision | {"out_hidden_size": text["hidden_size"]},
        (65536, most_pixels),
        TEMPLATE,
    )
    more = {
        "tie_word_embeddings": text["tie_word_embeddings"],
        "dtype": "bfloat16",
        "architectures": ["Qwen3VLForConditionalGeneration"],
    }
    config.update(more)
    config.save_pretrained(directory)


def learn_words(directory: Path, text: str) -> None:
    """Train a model's tokenizer again, so that it takes the words of a text for one token each."""
    from tokenizers import Tokenizer, pre_tokenizers, trainers

    file = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    special = [token.content for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.save(file)


def draw_picture(seed: int, width: int, height: int) -> Any:
    """A few colored shapes on noise; every seed another."""
    import numpy as np
    from PIL import Image, ImageDraw

    rng = np.random.default_rng(seed)
    picture = Image.fromarray(rng.integers(0, 90, (height, width, 3), dtype=np.uint8))
    pen = ImageDraw.Draw(picture)
    for _ in range(6):
        x = int(rng.integers(0, width * 3 // 4))
        y = int(rng.integers(0, height * 3 // 4))
        box = [
            x,
            y,
            x + int(rng.integers(width // 10, width // 4)),
            y + int(rng.integers(height // 10, height // 4)),
        ]
        color = tuple(int(c) for c in rng.integers(0, 256, 3))
        (pen.ellipse if rng.random() < 0.5 else pen.rectangle)(box, fill=color)
    return picture


# ------------------------------------------------------------------ weights


def write_weights(directory: Path, bound: float = 0.04) -> None:
    """Weights by `draw_weights` as transformers writes them, for the configuration that is in a directory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(directory)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.bfloat16)
    draw_weights(model, bound)
    model.save_pretrained(directory)


def draw_weights(model: Any, bound: float) -> None:
    """A usual initialization: matrices uniform within 0.04 (standard deviation 0.023), biases within half of that.

    Norms are 1, the ``A`` of a state space model -1 (its logarithm is kept): its states decay.

    Every tensor has the seed of its name. vLLM's own dummy weights will not do: norms are about zero, tensors of one
    shape are equal, and all is so small that no answer depends on the KV cache.
    """
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():  # tied ones come once
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
            within = bound if parameter.ndim >= 2 else bound / 2
            if parameter.ndim >= 2 or name.endswith("bias"):
                parameter.uniform_(-within, within, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("A_log") else 1.0)
