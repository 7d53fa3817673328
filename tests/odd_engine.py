"""Speculation by n-grams, prompt embeddings and an FP8 cache in one engine; a script: MODEL FOLDER.

The engine stores generated tokens too; rejected drafts must not be among them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from semkv.connectors.outcome import read_outcome
from test_connectors import BLOCK, Engine, answer, full_blocks

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def main(model: Path, folder: Path) -> None:
    odd = {"enable_prompt_embeds": True, "speculative_config": DRAFTS, "kv_cache_dtype": "fp8"}
    engine = Engine(model, folder, {"capture_decode": True}, **odd)
    try:
        (cold,) = engine.run(engine.prompt("drafts"), tokens=40)
        engine.forget()
        assert engine.counts()["stored_blocks"] > len(cold.prompt_token_ids) // BLOCK
        follow = {"prompt_token_ids": [*cold.prompt_token_ids, *answer(cold)]}
        (beyond,) = engine.run(follow, tokens=8, extra={"kv_transfer_params": {"semkv": {"skip": True}}})
        engine.forget()
        (loaded,) = engine.run(follow, tokens=8)
        assert answer(loaded) == answer(beyond)
        assert (read_outcome(loaded).loaded_tokens or 0) > full_blocks(cold)
        engine.forget()
        (warm,) = engine.run(engine.prompt("drafts"), tokens=40)
        assert answer(warm) == answer(cold)
        assert read_outcome(warm).loaded_tokens == full_blocks(cold)

        one = (torch.randn(100, 128, generator=torch.Generator().manual_seed(0)) / 10).to(torch.bfloat16)
        seen = []
        for embeddings in (one, -one, one):
            engine.forget()
            tokens, outcome = engine.one({"prompt_embeds": embeddings})
            seen.append((tokens, outcome.loaded_tokens))
        assert [loaded for _, loaded in seen] == [0, 0, 96]
        assert seen[0][0] == seen[2][0] != seen[1][0]
    finally:
        engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
