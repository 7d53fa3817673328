"""What is left in host memory of agents' conversations while another tenant asks for much, by the settings.

    python bench/sessions.py --out bench/results/cpu/sessions.json

Agents of one tenant hold conversations that begin alike and grow with every turn. They take turns. Between two turns
another tenant asks one long prompt that nobody asks again. All of that does not fit into host memory, by far, and
vLLM's own cache is smaller still. Each arm is a real vLLM with a tiny random Llama, in a process of its own:

    lru     vLLM's LRU decides alone                    keep    the agents' conversations are kept (keep_bytes)
    bound   the other tenant is bounded (tenant_host_bytes)    both

``tokens`` are those of the agents' prompts, by where their KV came from: vLLM's own cache (``device``), host memory,
the disk, or computed. ``most_held`` is the most that the other tenant ever had in host memory. Counts, no times: they
do not depend on the machine. ``digest`` is of all the agents' answers, which must be equal in all arms.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from common import ROOT, machine, write_json

ROWS = 160  # blocks that host memory holds
DEVICE_ROWS = 64
AGENTS = 6
TURNS = 5
BEGINNING = 4  # blocks that all conversations begin with
TURN = 3  # blocks that a turn adds
OTHER = 30  # blocks of one prompt of the other tenant
ARMS: dict[str, dict[str, int]] = {
    "lru": {},
    "keep": {"keep_bytes": ROWS // 2},
    "bound": {"tenant_host_bytes": ROWS // 2},
    "both": {"keep_bytes": ROWS // 2, "tenant_host_bytes": ROWS * 5 // 8},
}
"""Settings of the connector, in blocks."""

AGENT_SALT = "agents"
OTHER_SALT = "another tenant"


def measure(model: Path, arm: str, folder: Path) -> dict[str, Any]:
    """Play the trace against one arm."""
    from semkv_lab.local_engine import (
        BLOCK,
        LocalEngine,
        connector,
        prompt,
        report,
        token_ids,
    )
    from semkv_stores.block_file import tenant_tag

    row = row_bytes(model)
    settings = {name: count * row for name, count in ARMS[arm].items()}
    engine = LocalEngine(
        model,
        connector(folder / "store", host_bytes=ROWS * row, **settings),
        kv_cache_memory_bytes=DEVICE_ROWS * row,
        max_num_batched_tokens=256,
        max_num_seqs=1,
    )
    half = engine.scheduler.connector
    rng = random.Random(7)  # noqa: S311
    beginning = token_ids(rng, BEGINNING * BLOCK)
    histories = [list(beginning) for _ in range(AGENTS)]
    tokens = Counter[str]()
    answers = hashlib.sha256()
    most_held = 0
    for _ in range(TURNS):
        for agent, history in enumerate(histories):
            history += token_ids(rng, TURN * BLOCK)
            hints = {"session": f"agent {agent}", "keep_s": 3600}
            extra = {"kv_transfer_params": {"semkv": {"hints": hints}}}
            asked = prompt([*history, 5], AGENT_SALT)
            (output,) = engine.outputs([asked], 4, extra_args=extra)
            engine.settle()
            sources = report(output).get("sources") or {}
            loaded = sum(sources.values())
            tokens.update(sources)
            tokens["device"] += output.num_cached_tokens - loaded
            tokens["computed"] += len(history) + 1 - output.num_cached_tokens
            answers.update(str(output.outputs[0].token_ids).encode())
            other = prompt(token_ids(rng, OTHER * BLOCK + 5), OTHER_SALT)
            engine.outputs([other], 1)
            engine.settle()
            most_held = max(most_held, held(half, tenant_tag(OTHER_SALT)))
    counters = dict(half.shared.counters)
    engine.close()
    return {
        "settings": ARMS[arm],
        "tokens": dict(tokens),
        "most_held": most_held,
        "kept_blocks": counters.get("kept_blocks", 0),
        "unkept_blocks": counters.get("unkept_blocks", 0),
        "tenant_evicted_blocks": counters.get("tenant_evicted_blocks", 0),
        "errors": counters.get("errors", 0),
        "digest": answers.hexdigest()[:16],
    }


def held(half: Any, owner: str) -> int:
    """How many blocks of a tenant are in host memory."""
    from semkv_vllm import private

    primary = half.manager.primary_tier
    records = half.shared.records
    mine = (key for key, (tag, _) in records.items() if tag == owner)
    return sum(private.chunk_of(primary, key) is not None for key in mine)


def row_bytes(model: Path) -> int:
    """Of one block of the model, float32: keys and values of all layers."""
    from semkv_lab.local_engine import BLOCK

    shape = json.loads((model / "config.json").read_text(encoding="utf-8"))
    head = shape["hidden_size"] // shape["num_attention_heads"]
    per_token = shape["num_hidden_layers"] * shape["num_key_value_heads"] * head
    return int(2 * 4 * per_token * BLOCK)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(options.model, options.one, Path(folder))
        print("FOUND " + json.dumps(found), flush=True)
        return
    arms = {}
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, str(ROOT / "tests"))
        import tiny_models

        model = tiny_models.make("llama", Path(folder, "llama"))
        for arm in options.arms.split(","):
            command = [sys.executable, __file__, "--one", arm, "--model", str(model)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr[-3000:])
            arms[arm] = json.loads(done.stdout.rpartition("FOUND ")[2])
            print(arm, arms[arm], file=sys.stderr, flush=True)
            shape = {
                "rows": ROWS,
                "device_rows": DEVICE_ROWS,
                "agents": AGENTS,
                "turns": TURNS,
                "beginning": BEGINNING,
                "turn": TURN,
                "other": OTHER,
            }
            write_json(options.out, {"machine": machine("vllm"), "blocks": shape, "arms": arms})


if __name__ == "__main__":
    main()
