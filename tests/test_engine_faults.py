"""Random damage to the files under a running vLLM: every answer stays what it was, under vLLM's default policy."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from block_helpers import FAULTS
from kv_engines import CachedEngine
from tiny_models import Checkpoint

ROUNDS = 42  # six of each kind


@pytest.mark.engine
def test_damage_never_changes_an_answer(checkpoint: Checkpoint, tmp_path: Path) -> None:
    rng = random.Random(11)
    engine = CachedEngine(checkpoint("opt"), tmp_path)
    try:
        prompts = [engine.prompt(f"prompt {i} " + "and so on " * 8 * i) for i in range(3)]
        expected = [engine.one(prompt)[0] for prompt in prompts]
        engine.forget()
        loaded = sum(engine.one(prompt)[1].loaded_tokens or 0 for prompt in prompts)
        assert loaded > 100
        seen = noticed = 0
        for number in range(ROUNDS):
            engine.forget()
            files = sorted(engine.files())
            if len(files) < 2:
                continue
            FAULTS[number % len(FAULTS)](rng.choice(files), rng, files)
            seen += 1
            before = engine.counts()
            answers = [engine.one(prompt) for prompt in prompts]
            assert [tokens for tokens, _ in answers] == expected, FAULTS[number % len(FAULTS)].__name__
            after = engine.counts()
            noticed += any(after.get(name, 0) > before.get(name, 0) for name in ("corrupt", "missing"))
        # A counted miss each, but for a file that nothing leads to: its rows are in another one too, or the blocks
        # before them went with a damaged file.
        assert seen > ROUNDS // 2
        assert noticed > seen // 2
    finally:
        engine.close()
