"""Thousands of random requests under every disturbance that the KV connector must stand: how many answers are wrong?

    python bench/kv_stress.py                           (2,000 answers, about half an hour on two cores)
    python bench/kv_stress.py --answers 200 --only tenants,drafts --seed 7

Greedy answers of tiny random models, compared with those of an engine without the connector; see tests/random_load.py
for what a load is. Each load runs in a process of its own. Prints one line of JSON: counts over all loads, by load,
and what was wrong, which should be nothing. Ends with status 1 if there is anything.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import random_load
import tiny_models
from kv_engines import HYBRID, NOTHING, in_child

TIGHT = {"tokens": 40, "longest": 300, "blocks": 24, "args": {"max_model_len": 640}}
SMALL = {"capture_decode": True, "host_bytes": 2 << 20, "max_bytes": 8 << 20}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 2}

LOADS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tenants": (5, "llama", {"tenants": 0.8, "prompts": 40}),
    "preemptions": (3, "llama", {**TIGHT, "connector": {"capture_decode": True}}),
    "small": (3, "llama", {**TIGHT, "connector": SMALL}),
    "purges": (2, "llama", {"purges": 0.008, "connector": {"capture_decode": True}}),
    "killed": (3, "llama", {**TIGHT, "kills": 0.1, "connector": SMALL}),
    "drafts": (1, "llama", {"connector": {"capture_decode": True}, "args": {"speculative_config": DRAFTS}}),
    "windows": (1, "gemma3", {"longest": 600, "blocks": 150}),
    "states": (1, "granite4", {"longest": 600, "blocks": 40, "args": HYBRID}),
    "parallel states": (1, "falcon-h1", {"longest": 600, "blocks": 40, "args": HYBRID}),
}
"""By name: its share of the answers, the family, the fields of `random_load.Load`."""


def one(name: str, answers: int, seed: int, folder: Path) -> dict[str, Any]:
    """One load on an empty directory. An engine that ends is a wrong answer as well."""
    _, family, fields = LOADS[name]
    model = folder / "models" / family
    if not model.exists():
        tiny_models.make(family, model)
    job = {"answers": answers, "seed": seed, **fields}
    try:
        return dict(in_child(random_load.run, model, folder / name, job, timeout=36000))
    except AssertionError as error:
        return {"wrong": 1, "examples": [str(error)[-2000:]], "left": NOTHING}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=2000, help="how many answers are compared, over all loads")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(LOADS), help=f"loads, of {', '.join(LOADS)}")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := set(names) - set(LOADS):
        parser.error(f"unknown loads: {', '.join(sorted(unknown))}")
    shares, start = sum(LOADS[name][0] for name in names), time.monotonic()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            answers = -(-args.answers * LOADS[name][0] // shares)
            found[name] = one(name, answers, args.seed, Path(folder))
            print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    total: Counter[str] = Counter()
    for counts in found.values():
        total.update({key: value for key, value in counts.items() if isinstance(value, int)})
    left = {name: counts["left"] for name, counts in found.items() if counts["left"] != NOTHING}
    seconds = round(time.monotonic() - start)
    print(json.dumps({"seed": args.seed, "seconds": seconds, **total, "left": left, "loads": found}))
    sys.exit(1 if total["wrong"] or left else 0)


if __name__ == "__main__":
    main()
