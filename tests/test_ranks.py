"""Two tensor-parallel ranks in a real vLLM: their blocks lie in one row of host memory and of a block file."""

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
    from semkv.connectors.adapter import settle
    llm = LLM(sys.argv[1], max_model_len=512, enforce_eager=True, dtype="float32", block_size=32,
              tensor_parallel_size=2,
              kv_cache_memory_bytes=1 << 27, limit_mm_per_prompt={"image": 1, "video": 0},
              kv_transfer_config={"kv_connector": "SemKVConnector", "kv_role": "kv_both",
                                  "kv_connector_extra_config": {"host_bytes": 1 << 26, "break_even": False}},
              ec_transfer_config={"ec_connector": "SemECConnector", "ec_role": "ec_both"})
    core = llm.llm_engine.engine_core.engine_core
    prompt = {"prompt": "<s><image>" + " is there a dog" * 20, "multi_modal_data": {"image": tiny_models.picture()}}
    seen = []

    def ask(what, host=False):
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        out = llm.generate([prompt], params, use_tqdm=False)[0]
        seen.append([what, list(out.outputs[0].token_ids), out.kv_transfer_params["semkv"]])
        settle(core)
        llm.reset_prefix_cache()
        llm.llm_engine.reset_encoder_cache()
        if not host:
            core.scheduler.connector.connector_scheduler.reset_cache()

    ask("computed", host=True)
    ask("from host")
    ask("from disk", host=True)
    subprocess.run([sys.executable, "-m", "semkv", "purge"], check=True, capture_output=True)
    ask("after a purge")
    ask("loaded again")
    print("RESULT" + json.dumps(seen))
    llm.llm_engine.engine_core.shutdown()

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
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    seen = json.loads(done.stdout.rpartition("RESULT")[2].splitlines()[0])
    assert len({tuple(tokens) for _, tokens, _ in seen}) == 1
    reports = {what: report for what, _, report in seen}
    n = reports["from host"]["loaded_tokens"]
    assert n >= 96
    assert reports["from host"]["sources"] == {"host": n}
    assert reports["from disk"] == reports["loaded again"] == {"loaded_tokens": n, "sources": {"disk": n}}
    assert reports["computed"]["loaded_tokens"] == reports["after a purge"]["loaded_tokens"] == 0
