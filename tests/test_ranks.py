"""Two tensor-parallel ranks in a real vLLM: their blocks lie in one row of host memory and of a block file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kv_engines import NOTHING, CachedEngine, answer, in_child
from semkv.stores.maintenance import purge_directory
from semkv_vllm import read_outcome
from tiny_models import Checkpoint


def ranks(model: str, cache: str) -> dict[str, Any]:
    """Tokens, loaded tokens and their sources: computed, from host memory, from the disk, and around a purge."""
    found: dict[str, Any] = {}
    with CachedEngine(
        Path(model), Path(cache), tensor_parallel_size=2, max_model_len=512
    ) as engine:
        for what in ("computed", "from host", "from disk", "after a purge", "loaded again"):
            engine.forget(keep_host=what not in ("from disk", "loaded again"))
            if what == "after a purge":
                purge_directory(Path(cache))
            (output,) = engine.run(
                engine.prompt(picture=1), tokens=4
            )  # few: ranks that wait for each other spin
            outcome = read_outcome(output)
            found[what] = [answer(output), outcome.loaded_tokens, outcome.sources]
        return {"seen": found, "left": engine.left()}


@pytest.mark.engine
def test_two_ranks_load_and_forget_alike(checkpoint: Checkpoint, tmp_path: Path) -> None:
    found = in_child(ranks, checkpoint("llava"), tmp_path)
    seen = found["seen"]
    assert len({tuple(tokens) for tokens, *_ in seen.values()}) == 1
    loads = {what: rest for what, (_, *rest) in seen.items()}
    n = loads["from host"][0]
    assert n >= 96
    assert loads["from host"] == [n, {"host": n}]
    assert loads["computed"][0] == loads["after a purge"][0] == 0, found
    assert loads["from disk"] == loads["loaded again"] == [n, {"disk": n}], found
    assert found["left"] == NOTHING
