"""What a KV connector adds to the scheduler's steps, without a GPU: copies between GPU and host memory are left out.

    python bench/kv_steps.py --out bench/results/cpu/kv-steps.json

40 users ask at once about documents of 16,384 tokens (512 blocks), in four rounds. The KV memory holds 20 of them, so
the first waiting prompt is looked up again in every step, as in an overloaded server. A model of one tiny layer; random
tokens. Each engine runs in a process of its own, ``--repeats`` times, one after the other. Reported: milliseconds in
the scheduler per step, of the rounds after the first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import machine, write_json
from engines import NAMES, QWEN_7B, transfer_config, write_model

USERS, TOKENS, ROUNDS, BLOCK = 40, 16384, 4, 32
ROW = 256  # bytes of a token's KV
HOST = int(USERS * TOKENS * 1.3) * ROW
SHAPE = QWEN_7B | {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 1000,
}  # fmt: skip
DISK = 1 << 30


def without_copies() -> None:
    """Let every connector's worker answer at once that a copy is done: vLLM has none for a CPU."""
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from semkv.connectors.spec import SemKVSpec

    class NoWorker(OffloadingWorker):
        def __init__(self) -> None:
            self._done: list[TransferResult] = []

        def submit_store(self, job_id: int, *_: Any) -> bool:
            self._done.append(TransferResult(job_id, True, 1, 1e-3))
            return True

        submit_load = submit_store

        def get_finished(self) -> list[TransferResult]:
            done, self._done = self._done, []
            return done

        def wait(self, job_ids: set[int]) -> None: ...

        def shutdown(self) -> None: ...

    for spec in (CPUOffloadingSpec, TieringOffloadingSpec, SemKVSpec):
        spec.get_worker = lambda self, kv_caches: NoWorker()


def measure(name: str, folder: Path) -> dict[str, Any]:
    """In a process of its own."""
    from semkv_lab.local_engine import LocalEngine

    without_copies()
    write_model(folder / "model", SHAPE)
    transfer = transfer_config(name, str(folder / "store"), HOST, DISK, {})
    engine = LocalEngine(
        folder / "model", transfer, load_format="dummy", skip_tokenizer_init=True,
        max_model_len=24576, block_size=BLOCK, max_num_seqs=128, max_num_batched_tokens=8192, dtype="bfloat16",
        num_gpu_blocks_override=20 * TOKENS // BLOCK, kv_cache_memory_bytes=None,
    )  # fmt: skip
    spent = {"schedule": 0.0, "update_from_output": 0.0}
    steps = 0

    def timed(name: str) -> None:
        call = getattr(engine.scheduler, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            start = time.perf_counter()
            result = call(*args, **kwargs)
            spent[name] += time.perf_counter() - start
            steps += name == "schedule"
            return result

        setattr(engine.scheduler, name, measured)

    for method in spent:
        timed(method)
    rng = random.Random(0)  # noqa: S311
    prompts = [rng.choices(range(10, 900), k=TOKENS) for _ in range(USERS)]
    found = []
    for _ in range(ROUNDS):
        for prompt in prompts:
            prompt += rng.choices(range(10, 900), k=64)
        spent, steps = dict.fromkeys(spent, 0.0), 0
        engine.outputs([{"prompt_token_ids": list(p)} for p in prompts], 32, logprobs=None, detokenize=False)
        found.append({"steps": steps, **{name: s / steps * 1e3 for name, s in spent.items()}})
    return {"engine": name, "rounds": found[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(NAMES), help="comma-separated: " + ", ".join(NAMES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("kv-steps.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        with tempfile.TemporaryDirectory() as folder:
            print("RESULT", json.dumps(measure(options.child, Path(folder))), flush=True)
        os._exit(0)  # past the noise of engines that are collected
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONHASHSEED": "0"}
    runs = []
    for _ in range(options.repeats):
        for name in options.engines.split(","):
            command = [sys.executable, __file__, "--child", name]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | quiet, check=False)
            line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
            if line is None:
                raise SystemExit(f"{name}: {done.stderr[-2000:]}")
            runs.append(json.loads(line.removeprefix("RESULT ")))
            times = [r["schedule"] + r["update_from_output"] for r in runs[-1]["rounds"]]
            print(f"{name:8} {statistics.median(times):.2f} ms a step", flush=True)
    write_json(options.out, {"machine": machine("vllm", "torch"), "runs": runs})


if __name__ == "__main__":
    main()
