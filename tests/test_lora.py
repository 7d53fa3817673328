"""LoRA adapters inside a real vLLM (CPU backend): one's own blocks, and nobody else's."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from kv_engines import NOTHING, CachedEngine, answer, full_blocks
from semkv_lab.local_engine import write_adapter
from semkv_vllm import read_outcome
from tiny_models import Checkpoint


def adapter(path: Path, model: Path, seed: int) -> None:
    config = json.loads((model / "config.json").read_text())
    width = config["hidden_size"]
    layers = range(config["num_hidden_layers"])
    write_adapter(
        path,
        seed,
        layers=[f"model.decoder.layers.{layer}.self_attn" for layer in layers],
        width=width,
        rows={"q_proj": width, "v_proj": width},
    )
    time.sleep(
        1.5
    )  # an adapter that is not older than the engine is left alone, and clocks of files are coarse


@pytest.mark.engine
def test_the_same_name_with_other_weights_loads_nothing(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    from semkv_vllm.adapter import KVAdapter

    model = checkpoint("opt")
    path, params = (
        tmp_path / "adapter",
        SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
    )

    def ask(engine: CachedEngine, lora: Any) -> tuple[list[int], int, int]:
        (output,) = engine.llm.generate(
            [engine.prompt("lora")], params, use_tqdm=False, lora_request=lora
        )
        return answer(output), read_outcome(output).loaded_tokens or 0, full_blocks(output)

    answers = []
    for seed in (1, 2):
        if path.exists():
            shutil.rmtree(path)
        adapter(path, model, seed)
        engine = CachedEngine(model, tmp_path / "cache", enable_lora=True, max_lora_rank=8)
        lora, adapter_of_blocks = LoRARequest("sql", 1, str(path)), KVAdapter(engine.llm)
        cold, loaded, usable = ask(engine, lora)
        assert loaded == 0  # the first engine's blocks lie under the same name and path
        for keep_host in (True, False):
            engine.forget(keep_host=keep_host)
            assert ask(engine, lora) == (cold, usable, usable)
        plain, loaded, _ = ask(engine, None)
        assert loaded == (0 if seed == 1 else usable)
        answers += [cold, plain]
        chunk = adapter_of_blocks.capture(engine.run(engine.prompt("lora"))[0].request_id)
        assert chunk is not None
        for name, request in (("with", lora), ("without", None)):
            engine.llm.llm_engine.add_request(
                name, engine.prompt("lora"), params, lora_request=request
            )
            assert (not adapter_of_blocks.refusal(name, chunk)) == (request is None)
            engine.llm.llm_engine.abort_request([name])
        engine.forget()
        path.joinpath("adapter_config.json").touch()  # changed under the running engine
        engine.llm.llm_engine.reset_prefix_cache()
        assert ask(engine, lora)[:2] == (cold, 0)
        assert engine.counts()["lora_skipped"] == 1
        assert engine.left() == NOTHING
        engine.close()
    assert answers[1] == answers[3]
    assert answers[0] != answers[2]
    assert answers[1] not in (answers[0], answers[2])
