"""Two tensor-parallel ranks in a real vLLM: each has its own blocks, and the scheduler cannot see their host memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_models

SCRIPT = """
import json, os, subprocess, sys, time
sys.path.insert(0, sys.argv[2])
import tiny_models

def main():
    from vllm import LLM, SamplingParams
    llm = LLM(sys.argv[1], max_model_len=512, enforce_eager=True, dtype="bfloat16", block_size=32,
              tensor_parallel_size=2,
              kv_cache_memory_bytes=1 << 27, limit_mm_per_prompt={"image": 1, "video": 0},
              kv_transfer_config={"kv_connector": "SemKVConnector", "kv_role": "kv_both"},
              ec_transfer_config={"ec_connector": "SemECConnector", "ec_role": "ec_both"})
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler.connector.scheduler_half
    prompt = {"prompt": "<s><image>" + " is there a dog" * 20, "multi_modal_data": {"image": tiny_models.picture()}}
    seen = []

    def ask(what):
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        out = llm.generate([prompt], params, use_tqdm=False)[0]
        seen.append([what, list(out.outputs[0].token_ids), out.kv_transfer_params["semkv"]["loaded_tokens"]])
        until = time.monotonic() + 60
        n = len(out.prompt_token_ids) // 32
        while min(s.lookup(scheduler.block_hashes(out.request_id)) for s in scheduler.stores()) < n:
            assert time.monotonic() < until, "not stored"
            time.sleep(0.05)
        llm.reset_prefix_cache()
        llm.llm_engine.reset_encoder_cache()

    ask("computed")
    ask("loaded")
    subprocess.run([sys.executable, "-m", "semkv", "purge"], check=True, capture_output=True)
    ask("after a purge")
    ask("loaded again")
    # As after a slow disk and a fast processor, neither of which this machine is sure to have.
    rates = [(2**n, seconds) for n in range(30) for seconds in [1000.0] * 64]
    scheduler.gate.forget()
    scheduler.gate.rates.learn({"disk": rates, "host": [(2**n, 1e-9) for n in range(30) for _ in range(4)],
                                "prefill": [(2**n, 1e-3) for n in range(12) for _ in range(4)]})
    ask("not worth it")
    scheduler.gate.told(list(scheduler._requests._recent.values())[-1], scheduler._stores.row_bytes())
    ask("in host memory")
    measured = sorted(name for name in ("disk", "host", "prefill") if getattr(scheduler.gate.rates, name)._measured)
    print("RESULT" + json.dumps([seen, measured, scheduler.counters.totals().get("refused_loads", 0)]))

if __name__ == "__main__":
    main()
"""


@pytest.mark.engine
def test_two_ranks_load_and_forget_alike(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {
        "SEMKV_CACHE_DIR": str(tmp_path / "cache"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler in the script's process, the ranks in their own
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }
    model = tiny_models.make("llava", tmp_path / "llava")
    command = [sys.executable, str(script), str(model), str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    seen, _, refused = json.loads(done.stdout.rpartition("RESULT")[2].splitlines()[0])
    assert len({tuple(tokens) for _, tokens, _ in seen}) == 1
    loaded = {what: tokens for what, _, tokens in seen}
    assert loaded.pop("loaded") == loaded.pop("loaded again") == loaded.pop("in host memory") >= 96
    assert loaded == {"computed": 0, "after a purge": 0, "not worth it": 0}
    assert refused >= 1
