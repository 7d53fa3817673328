"""What the scheduler's lookup of one waiting prompt costs: by vLLM's own managers, and by ours.

    python bench/kv_lookups.py --out bench/results/cpu/kv-lookups.json

vLLM's scheduler asks for the blocks of a waiting prompt again in every step, 500 for 8,000 tokens. Here all of them lie
in host memory. Its `_maximal_prefix_lookup` runs over the manager of the OffloadingConnector, over that of vLLM's
tiering, and over ours, in turns. Microseconds for all blocks of one prompt, the least and the median of the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import machine, write_json

TOKENS, BLOCK, TURNS, TIMES = 8000, 16, 40, 20
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}


def start(folder: Path) -> Any:
    """An engine with our connector, a tiny model without weights."""
    from semkv_lab.local_engine import LocalEngine

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512,
        "max_position_embeddings": 8192, "head_dim": 32,
    }  # fmt: skip
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config))
    extra = {"cache_dir": str(folder / "store"), "host_bytes": 64 << 20, "break_even": False}
    connector = {"kv_connector": "SemKVConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return LocalEngine(
        folder / "model", connector, load_format="dummy", skip_tokenizer_init=True, max_model_len=8192, block_size=None
    )


def measure(engine: Any) -> dict[str, dict[str, float]]:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

    scheduler = engine.scheduler.connector.connector_scheduler
    ours, ours_class = scheduler.manager, type(scheduler.manager)
    group, context = scheduler.config.kv_group_configs[0], ReqContext(req_id="waiting")
    rng = random.Random(1)  # noqa: S311 - keys
    keys = [make_offload_key(rng.randbytes(32), group.group_idx) for _ in range(TOKENS // BLOCK)]
    offload = CPUOffloadingManager(num_chunks=len(keys))
    offload.prepare_store(keys, context)
    offload.complete_store(keys, context)
    primary = ours.primary_tier
    CPUOffloadingManager.prepare_store(primary, keys, context)
    CPUOffloadingManager.complete_store(primary, keys, context)
    times: dict[str, list[float]] = {}
    for _ in range(TURNS):
        for name in ("OffloadingConnector", "vLLM's tiering", "semkv"):
            ours.__class__ = ours_class if name == "semkv" else TieringOffloadingManager
            scheduler.manager = offload if name == "OffloadingConnector" else ours
            own = type(scheduler) if name == "semkv" else OffloadingConnectorScheduler
            begin = time.perf_counter()
            for _ in range(TIMES):
                found = own._maximal_prefix_lookup(scheduler, keys, context, None, group, 0)
            times.setdefault(name, []).append((time.perf_counter() - begin) / TIMES * 1e6)
            assert found == len(keys)
    ours.__class__, scheduler.manager = ours_class, ours
    return {name: {"least": round(min(v), 1), "median": round(statistics.median(v), 1)} for name, v in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        engine = start(Path(folder))
        found = measure(engine)
        result = {"tokens": TOKENS, "blocks": TOKENS // BLOCK, "machine": machine("vllm", "torch"), "us": found}
        write_json(options.out, result)
        print(json.dumps(found))
        engine.close()


if __name__ == "__main__":
    main()
