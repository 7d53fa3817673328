"""Trains minigqa-vlm, a LLaVA of 6.8 million parameters that answers questions about MiniGQA's pictures; with
``--documents`` about documents of 2,000 tokens, too, which takes a larger one to start from (`start_large.py`).

    python training/minigqa_vlm/train.py --out DIR --minutes 8.5
    python training/minigqa_vlm/train.py --out DIR --start CHECKPOINT --rate 5e-4 --minutes 5
    python training/minigqa_vlm/train.py --out DIR --start CHECKPOINT --documents --rate 3e-4 --minutes 7
    python training/minigqa_vlm/train.py --out DIR --smoke        20 steps on a CPU

``--minutes`` is the time of the whole command. DIR gets the checkpoint and ``training_log.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import data
import network
import prompt
import torch
from torch import Tensor

EVAL_SEED = "held out"


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how large a run is. ``steps`` ends a run before its time is up; ``reserve_s`` is for the end."""

    minutes: float
    steps: int = 10**9
    rows: int = 128
    text_rows: int = 0
    workers: int = 14
    buffer_images: int = 60_000
    buffer_texts: int = 12_000
    start_images: int = 4_000
    chunk_images: int = 64
    eval_images: int = 192
    eval_texts: int = 64
    eval_every_s: float = 30.0
    save_every_s: float = 120.0
    reserve_s: float = 45.0
    rate: float = 1e-3
    warmup: int = 300
    decay: float = 0.05


SMOKE = Plan(
    minutes=5,
    steps=20,
    rows=2,
    workers=1,
    buffer_images=32,
    buffer_texts=16,
    start_images=8,
    chunk_images=4,
    eval_images=4,
    eval_texts=2,
    eval_every_s=5,
)


class Log:
    """One JSON object a line, to a file and, shortened, to the screen."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._start = time.monotonic()

    def write(self, event: str, **values: Any) -> None:
        row = {"event": event, "s": round(time.monotonic() - self._start, 1), **values}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        print(json.dumps(row), flush=True)


class Pool:
    """The newest rows on the device: a ring that a thread fills from the workers and that batches are drawn from.

    Args:
        kept: images that the ring holds, or documents; whole chunks, so that no gap is left.
        length: tokens of a row.
        device: where they lie.
        rows_per_image: rows of an image; 0 for documents.
    """

    def __init__(self, kept: int, length: int, device: torch.device, rows_per_image: int) -> None:
        self._kept, self._per_image = kept, max(1, rows_per_image)
        rows = kept * self._per_image
        self._images = torch.zeros(
            kept if rows_per_image else 0, 96, 96, 3, dtype=torch.uint8, device=device
        )
        self._ids = torch.zeros(rows, length, dtype=torch.int32, device=device)
        self._segments = torch.zeros(rows, length, dtype=torch.uint8, device=device)
        self._positions = torch.zeros(rows, length, dtype=torch.int16, device=device)
        self._labels = torch.zeros(rows, length, dtype=torch.int32, device=device)
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._lock = threading.Lock()
        self.made = 0
        """Images or documents received so far; those beyond the ring's size have replaced the oldest."""

    def add(self, chunk: data.Chunk) -> None:
        """Puts a chunk in place of the oldest rows."""
        count = len(chunk.ids) // self._per_image
        new = self._to_device(
            (chunk.images, chunk.ids, chunk.segments, chunk.positions, chunk.labels)
        )
        with self._lock:
            at = self.made % self._kept
            rows = slice(at * self._per_image, (at + count) * self._per_image)
            if len(new[0]):
                self._images[at : at + count] = new[0]
            stores = (self._ids, self._segments, self._positions, self._labels)
            for store, values in zip(stores, new[1:], strict=True):
                store[rows] = values
            self.made += count

    def _to_device(self, arrays: tuple[Any, ...]) -> list[Tensor]:
        """Copies beside the training stream, so that a step never waits for a copy nor a copy for a step."""
        tensors = [torch.from_numpy(array) for array in arrays]
        if self._copies is None:
            return tensors
        with torch.cuda.stream(self._copies):
            tensors = [tensor.to(self._ids.device) for tensor in tensors]
        self._copies.synchronize()
        for tensor in tensors:
            tensor.record_stream(torch.cuda.current_stream())
        return tensors

    def batch(
        self, rows: int, generator: torch.Generator
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]:
        """Images uint8 ``[rows, 96, 96, 3]`` or None; ids, segments, positions, labels, int64 ``[rows, length]``."""
        with self._lock:
            filled = min(self.made, self._kept) * self._per_image
            pick = torch.randint(filled, (rows,), device=self._ids.device, generator=generator)
            return (
                self._images[pick // self._per_image] if len(self._images) else None,
                self._ids[pick].long(),
                self._segments[pick].long(),
                self._positions[pick].long(),
                self._labels[pick].long(),
            )


def feed(pictures: Pool, texts: Pool, chunks: Any, stop: threading.Event) -> None:
    """Moves chunks from the workers into the pools until told to stop."""
    while not stop.is_set():
        chunk = data.take(chunks, timeout=0.5)
        if chunk is not None:
            (pictures if len(chunk.images) else texts).add(chunk)


def autocast(device: torch.device) -> Any:
    return torch.autocast(device.type, dtype=torch.bfloat16)


@torch.no_grad()  # type: ignore[untyped-decorator]
def evaluate(
    model: Any, chunk: data.Chunk, device: torch.device, *, shuffled: bool
) -> dict[str, float]:
    """Share of held-out questions whose whole answer is predicted, by kind and ``all``.

    ``shuffled`` gives every row another row's picture, which shows how much the words alone give away. Rows about
    documents have none.
    """
    right: dict[int, list[bool]] = defaultdict(list)
    at_once, most = (64, network.TARGETS) if len(chunk.images) else (8, network.TEXT_TARGETS)
    for start in range(0, len(chunk.ids), at_once):
        rows = slice(start, start + at_once)
        owner = chunk.owner[rows]
        if shuffled and len(chunk.images):
            owner = (owner + len(chunk.images) // 2) % len(chunk.images)
        arrays = (chunk.ids[rows], chunk.segments[rows], chunk.positions[rows], chunk.labels[rows])
        ids, segments, positions, labels = (torch.from_numpy(a).to(device).long() for a in arrays)
        targets, columns = network.targets_of(labels, most)
        with autocast(device):
            pictured = len(chunk.images) > 0
            pixels = (
                network.normalise(torch.from_numpy(chunk.images[owner]).to(device))
                if pictured
                else None
            )
            logits = network.forward(model, pixels, ids, segments, positions, columns)
        good, asked = (logits.argmax(-1) == targets).cpu().numpy(), (targets >= 0).cpu().numpy()
        places = columns.cpu().numpy()
        whole: dict[tuple[int, int], bool] = {}
        kind_of: dict[tuple[int, int], int] = {}
        for row, target in zip(*asked.nonzero(), strict=True):
            column = places[row, target]
            question = (int(row), int(chunk.segments[start + row, column]))
            whole[question] = whole.get(question, True) and bool(good[row, target])
            kind_of[question] = int(chunk.kinds[start + row, column])
        for question, ok in whole.items():
            right[kind_of[question]].append(ok)
    scores = {data.KIND_NAMES[k]: round(sum(v) / len(v), 4) for k, v in sorted(right.items())}
    every = [ok for values in right.values() for ok in values]
    return {"all": round(sum(every) / len(every), 4), **scores}


def rate_at(plan: Plan, step: int, done: float) -> float:
    """The learning rate: a linear warm-up in steps, then a cosine to zero over the share of time that is used up."""
    return (
        plan.rate
        * min(1.0, (step + 1) / plan.warmup)
        * 0.5
        * (1 + math.cos(math.pi * min(1.0, done)))
    )


def train(
    model: Any, bpe: Any, pools: list[Pool], plan: Plan, out: Path, log: Log, deadline: float
) -> None:
    """Steps until the time or the steps are used up, over pictures and documents in turn; evaluates and saves on the
    way."""
    device = next(model.parameters()).device
    fused = device.type == "cuda"
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(
        network.parameter_groups(model, plan.decay), plan.rate, betas=(0.9, 0.98), fused=fused
    )
    generator = torch.Generator(device).manual_seed(0)
    held_out = [data.make_chunk(Random(EVAL_SEED), bpe, plan.eval_images, plain=True)]  # noqa: S311
    if len(pools) > 1:
        held_out.append(data.make_text_chunk(Random(EVAL_SEED), bpe, plan.eval_texts, plain=True))  # noqa: S311

    def scores(*, shuffled: bool) -> dict[str, float]:
        found: dict[str, float] = {}
        for chunk in held_out:
            # "all" is that of the pictures.
            found = {
                **evaluate(model, chunk, device, shuffled=shuffled),
                **found,
            }
        return found

    begun = time.monotonic()
    evaluated = saved = begun
    last_step, step = 0, 0
    losses: list[Tensor] = []
    while step < plan.steps and time.monotonic() < deadline:
        done = max((time.monotonic() - begun) / (deadline - begun), step / plan.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(plan, step, done)
        texts = len(pools) > 1 and step % 2
        images, ids, segments, positions, labels = (
            pools[1].batch(plan.text_rows, generator)
            if texts
            else pools[0].batch(plan.rows, generator)
        )
        targets, columns = network.targets_of(
            labels, network.TEXT_TARGETS if texts else network.TARGETS
        )
        with autocast(device):
            pixels = None if images is None else network.augment(images, generator)
            logits = network.forward(model, pixels, ids, segments, positions, columns)
        loss = network.loss_of(logits, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        losses.append(loss.detach())
        step += 1
        now = time.monotonic()
        if now - evaluated > plan.eval_every_s:
            model.eval()
            accuracy = scores(shuffled=False)
            log.write(
                "eval",
                step=step,
                loss=round(torch.stack(losses).mean().item(), 4),
                rate=round(rate_at(plan, step, done), 7),
                steps_per_s=round((step - last_step) / (now - evaluated), 2),
                made=[pool.made for pool in pools],
                accuracy=accuracy,
            )
            model.train()
            losses, last_step, evaluated = [], step, time.monotonic()
        if now - saved > plan.save_every_s:
            network.export(model, bpe, out)
            saved = time.monotonic()
    model.eval()
    log.write("trained", steps=step, made=[pool.made for pool in pools])
    log.write("final", shuffled=False, accuracy=scores(shuffled=False))
    log.write("final", shuffled=True, accuracy=scores(shuffled=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument(
        "--rows", type=int, default=128, help="pictures with packed questions in a step"
    )
    parser.add_argument("--rate", type=float, default=1e-3, help="the highest learning rate")
    parser.add_argument(
        "--start", type=Path, help="an exported checkpoint to train on, with its tokenizer"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--documents", action="store_true", help="every second step is one of documents"
    )
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    started = time.monotonic()
    plan = Plan(
        args.minutes,
        workers=args.workers,
        rows=args.rows,
        rate=args.rate,
        warmup=100 if args.start else 300,
    )
    if args.smoke:
        plan = SMOKE
    if args.documents:
        plan = replace(
            plan,
            rows=max(1, plan.rows // 2),
            text_rows=max(1, plan.rows // 10),
            workers=plan.workers + 1,
        )
    texts = plan.workers // 5 + 1 if args.documents else 0
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "training_log.jsonl")

    bpe = prompt.load_tokenizer(args.start) if args.start else prompt.train_tokenizer()
    workers, chunks = data.start_workers(
        bpe.to_str(), plan.workers, plan.chunk_images, args.seed, texts
    )
    stop = threading.Event()
    try:
        device = torch.device("cuda" if torch.cuda.is_available() and not args.smoke else "cpu")
        torch.set_float32_matmul_precision("high")
        model = (
            (network.load(args.start) if args.start else network.build(args.seed))
            .to(device)
            .train()
        )
        kept, kept_texts = (
            n - n % plan.chunk_images for n in (plan.buffer_images, plan.buffer_texts)
        )
        pools = [Pool(kept, data.ROW, device, 2)]
        if args.documents:
            pools.append(Pool(kept_texts, data.TEXT_ROW, device, 0))
        feeder = threading.Thread(
            target=feed, args=(pools[0], pools[-1], chunks, stop), daemon=True
        )
        feeder.start()
        size = sum(p.numel() for p in model.parameters())
        log.write(
            "start",
            device=str(device),
            parameters=size,
            vocabulary=bpe.get_vocab_size(),
            torch=torch.__version__,
        )
        while pools[0].made < plan.start_images or not pools[-1].made:
            time.sleep(0.1)
            if not any(worker.is_alive() for worker in workers):
                raise RuntimeError("the worker processes ended")
        log.write("data", made=[pool.made for pool in pools])
        train(model, bpe, pools, plan, args.out, log, started + plan.minutes * 60 - plan.reserve_s)
    finally:
        stop.set()
        for worker in workers:
            worker.terminate()
    log.write("export", weights_bytes=network.export(model, bpe, args.out))


if __name__ == "__main__":
    main()
