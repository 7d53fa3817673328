"""Thousands of random requests under every disturbance that the KV connector must stand: how many answers are wrong?

    python bench/kv_stress.py --out bench/results/cpu/kv-stress.json      (2,000 answers, ten minutes on two cores)
    python bench/kv_stress.py --answers 200 --only tenants,drafts --seed 7
    python bench/kv_stress.py --minutes 20                                (as many answers as come)

Greedy answers of tiny random models, compared with those of an engine without the connector; see tests/random_load.py
for what a load is. Each load runs in a process of its own, whose log lies beside the result. Ends with status 1 if an
answer is wrong, an engine ends, or something is left in it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import ROOT, Answer, machine, options_of, run_child, write_json

sys.path.insert(0, str(ROOT / "tests"))
import tiny_models
from kv_engines import HYBRID, NOTHING
from random_load import RandomLoad

LIMIT_S = 36000
SMALL = {"capture_decode": True, "host_bytes": 2 << 20, "max_bytes": 8 << 20}
TIGHT = {
    "longest": 300,
    "blocks": 24,
    "args": {"max_model_len": 640, "max_num_batched_tokens": 512},
}
STATES = {"longest": 600, "blocks": 40, "args": HYBRID}
DECODE = {"settings": {"capture_decode": True}}
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 2,
}

# name: its share of the answers, the family, the fields of `RandomLoad`
LOADS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tenants": (5, "llama", {"prompts": 40}),
    "preemptions": (3, "llama", TIGHT | DECODE),
    "small": (3, "llama", TIGHT | {"settings": SMALL}),
    "purges": (2, "llama", DECODE | {"purges": True}),
    "killed": (3, "llama", TIGHT | {"kills": 0.1, "settings": SMALL}),
    "drafts": (1, "llama", DECODE | {"args": {"speculative_config": DRAFTS}}),
    "windows": (1, "gemma3", {"longest": 600, "blocks": 150}),
    "states": (1, "granite4", STATES),
    "parallel states": (1, "falcon-h1", STATES),
}


def one(spec: dict[str, Any], answer: Answer) -> None:
    """One load on an empty directory."""
    _, family, fields = LOADS[spec["name"]]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        model = tiny_models.make(family, Path(folder) / family)
        load = RandomLoad(
            str(model), f"{folder}/cache", answers=spec["answers"], seconds=spec["seconds"],
            seed=spec["seed"], **fields,
        )  # fmt: skip
        begun = time.monotonic()
        found = load.run()
        answer({**found, "seconds": round(time.monotonic() - begun)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--answers", type=int, default=2000, help="how many answers are compared, over all loads"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=0.0,
        help="how long all loads go on at least, starts of engines not counted",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(LOADS), help=f"loads, of {', '.join(LOADS)}")
    options = options_of(parser, one)
    names = options.only.split(",")
    if unknown := set(names) - set(LOADS):
        parser.error(f"unknown loads: {', '.join(sorted(unknown))}")
    shares = sum(LOADS[name][0] for name in names)
    total = Counter[str]()
    loads = {}
    for name in names:
        spec = {
            "name": name,
            "answers": 1 if options.minutes else -(-options.answers * LOADS[name][0] // shares),
            "seconds": options.minutes * 60 * LOADS[name][0] / shares,
            "seed": options.seed,
        }
        log = options.logs / f"kv-stress-{name}.log"
        found = loads[name] = run_child(name, spec, log, LIMIT_S, {})
        total.update({key: value for key, value in found.items() if isinstance(value, int)})
        total["bad loads"] += bool(found.get("wrong")) or found.get("left") != NOTHING
        print(name, found, flush=True)
        write_json(
            options.out,
            {"machine": machine("vllm", "torch"), "seed": options.seed, **total, "loads": loads},
        )
    sys.exit(1 if total["bad loads"] else 0)


if __name__ == "__main__":
    main()
