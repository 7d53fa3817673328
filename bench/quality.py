"""What the benches of answers after reuse at another position share: training, the arms, the table.

A bench trains a small model on generated questions (`Trainer`), and then asks vLLM such questions about documents that
lie in semkv's store (`measure`), under these arms:

    computed         everything is computed
    again            the same a second time: what differs without any change
    another order    computed, with the same documents in another order
    first K again    each document's KV is loaded as it was computed alone; its first K tokens are computed again
    no ...           the question without what it is about: what guessing gives

``right`` is the share of right answers, with 95% intervals (Wilson); ``same`` the share of answers that are those of
``computed``. Where the order of the documents decides the right answer, ``same`` is not given for another order.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from common import machine, write_json

from semkv_lab.local_engine import connector, report

WORKER = "semkv_vllm.worker.DocumentWorker"
ENOUGH = 0.9  # of what is gated right, after which texts get longer
WARM_UP = 200  # steps
DECAY = 0.3  # of the time, at its end
AHEAD = 48  # batches


# ---------------------------------------------------------------------- training


def batches(
    make: Callable[[int], Any],
    first_seed: int,
    pool: Any,
) -> Iterator[Any]:
    """Batches without end, made by other processes some steps ahead; ``make`` gets another seed each time."""
    waiting: list[Any] = []
    seed = first_seed
    while True:
        while len(waiting) < AHEAD:
            waiting.append(pool.apply_async(make, (seed,)))
            seed += 1
        yield waiting.pop(0).get()


class Trainer:
    """A model, its optimizer and the time that it has.

    Args:
        model: has an ``lm_head``.
        hidden: gives its last hidden states, ``[rows, length, width]``, for the ids on its device and their batch. A
            batch has ``ids`` and ``kinds``, each ``[rows, length]``; kinds say which kind's answer comes next.
        kinds: of questions, by their numbers from 1 on.
        gated: kinds that must be right before texts get longer.
        options: ``rate``, ``minutes``, ``told_every`` (steps).
    """

    def __init__(
        self,
        model: Any,
        hidden: Callable[[Any, Any], Any],
        kinds: Sequence[str],
        gated: Sequence[str],
        options: argparse.Namespace,
    ) -> None:
        import torch

        self._torch = torch
        self._device = device()
        self._hidden = hidden
        self._kinds = kinds
        self._gated = gated
        self._options = options
        torch.backends.cuda.matmul.allow_tf32 = True
        # cuDNN's attention failed in the backward pass with torch 2.14 on an H200.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.model = model
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=options.rate,
            betas=(0.9, 0.98),
            weight_decay=0.05,
            fused=self._device == "cuda",
        )
        self._begun = time.monotonic()
        self.step = 0
        self.log: list[dict[str, Any]] = []

    @property
    def spent(self) -> float:
        """The share of the time that is over."""
        return (time.monotonic() - self._begun) / (60 * self._options.minutes)

    def stage(
        self,
        name: str,
        end: float,
        source: Iterator[Any],
    ) -> None:
        """Train on texts of one kind until they are easy, or their time is over."""
        told = _Told()
        while self.spent < end:
            told.add(*self._step(next(source)))
            if self.step % self._options.told_every:
                continue
            shares = self._tell(name, told)
            told = _Told()
            gated = [shares[kind] for kind in self._gated if kind in shares]
            if end < 1.0 and gated and min(gated) > ENOUGH:
                return

    def evaluate(
        self,
        name: str,
        source: Iterator[Any],
        steps: int,
    ) -> None:
        """Tell how many answers are right without training on them."""
        told = _Told()
        with self._torch.inference_mode():
            for _ in range(steps):
                told.add(*self._answered(next(source)))
        self._tell(name, told)

    def _tell(self, name: str, told: _Told) -> dict[str, float]:
        shares = told.shares()
        line = {
            "step": self.step,
            "seconds": round(time.monotonic() - self._begun, 1),
            "stage": name,
            "loss": told.loss(),
            "right": shares,
        }
        self.log.append(line)
        print(json.dumps(line), flush=True)
        return shares

    def _rate(self) -> float:
        warm = min(1.0, self.step / WARM_UP)
        left = min(1.0, (1.0 - self.spent) / DECAY)
        rate: float = self._options.rate * warm * max(0.02, left)
        return rate

    def _step(self, given: Any) -> tuple[Any, dict[str, tuple[Any, int]]]:
        """One step; its loss and by kind how many answers were right, of how many."""
        self.step += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        loss, found = self._answered(given)
        loss.backward()
        self._torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach(), found

    def _answered(self, given: Any) -> tuple[Any, dict[str, tuple[Any, int]]]:
        torch = self._torch
        ids = torch.from_numpy(given.ids.astype(np.int64)).to(self._device, non_blocking=True)
        rows, places = np.nonzero(given.kinds)
        of_kind = given.kinds[rows, places]
        at = torch.from_numpy(rows * ids.shape[1] + places).to(self._device)
        with torch.autocast(
            self._device,
            dtype=torch.bfloat16,
            enabled=self._device == "cuda",
        ):
            hidden = self._hidden(ids, given)
            logits = self.model.lm_head(hidden.flatten(0, 1)[at])
        wanted = ids.flatten()[at + 1]
        loss = torch.nn.functional.cross_entropy(logits.float(), wanted)
        hits = logits.argmax(-1) == wanted
        found = {}
        for number, kind in enumerate(self._kinds, 1):
            own = torch.from_numpy(of_kind == number).to(self._device)
            found[kind] = ((hits & own).sum(), int((of_kind == number).sum()))
        return loss, found


class _Told:
    """Losses and right answers since something was told of them."""

    def __init__(self) -> None:
        self._losses: list[Any] = []
        self._right = Counter[str]()
        self._asked = Counter[str]()

    def add(self, loss: Any, found: dict[str, tuple[Any, int]]) -> None:
        self._losses.append(loss)
        for kind, (right, asked) in found.items():
            self._right[kind] += right
            self._asked[kind] += asked

    def shares(self) -> dict[str, float]:
        """Of the kinds that were asked, the right answers."""
        return {
            kind: round(float(self._right[kind] / count), 4)
            for kind, count in self._asked.items()
            if count
        }

    def loss(self) -> float:
        return round(float(sum(self._losses) / len(self._losses)), 4)


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def workers() -> int:
    """Processes that make batches."""
    return max(1, min(14, len(os.sched_getaffinity(0)) - 1))


def save_training(trainer: Trainer, options: argparse.Namespace) -> None:
    """The model in a folder that vLLM loads, and how it was trained."""
    import torch

    kind = torch.float32 if options.tiny else torch.bfloat16
    trainer.model.to(kind).save_pretrained(options.model)
    known = {
        "machine": machine("vllm", "torch", "transformers"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "parameters": sum(part.numel() for part in trainer.model.parameters()),
        "minutes": options.minutes,
        "log": trainer.log,
    }
    write_json(options.out, known)
    write_json(options.model / "training.json", known)


# ---------------------------------------------------------------------- asking


class Case(Protocol):
    """One question about documents in one order, and about the same ones in another."""

    kind: str

    def prompt(self, *, other: bool = False) -> Any:
        """What vLLM is asked."""

    def alone(self) -> Any:
        """The question without what it is about."""

    def answer(self, *, other: bool = False) -> list[int]:
        """The right tokens."""

    def spans(self) -> list[list[int]]:
        """Where the documents stand in the first order."""


class Engine:
    """vLLM with semkv's connector, in this process.

    Args:
        options: ``model``, ``host_mib``, ``kv_mib``, ``block``, ``eager``.
        scratch: a folder for the store.
        args: of ``vllm.LLM``.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        scratch: Path,
        **args: Any,
    ) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        self._sampling = SamplingParams
        host_bytes = options.host_mib << 20
        kv = connector(scratch / "cache", host_bytes=host_bytes, document_tokens=0)
        if options.block:
            args["block_size"] = options.block
        self.llm = LLM(
            model=str(options.model),
            worker_cls=WORKER,
            enforce_eager=options.eager,
            gpu_memory_utilization=0.1,
            max_num_batched_tokens=8192,
            max_num_seqs=32,
            kv_cache_memory_bytes=options.kv_mib << 20,
            kv_transfer_config=KVTransferConfig(**kv),
            **args,
        )

    @property
    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def refused(self) -> str:
        """Why no document is reused; empty where they are."""
        documents = self._core.scheduler.connector._documents
        return "the connector refuses this engine" if documents is None else documents.refused

    @property
    def faults(self) -> dict[str, int]:
        counters = self._core.scheduler.connector.shared.counters
        return {name: counters[name] for name in ("errors", "document_mismatches")}

    def forget(self) -> None:
        """Empty vLLM's prefix cache, once nothing is on its way to host memory."""
        while self._core.scheduler.has_requests():
            self._core.step_fn()
            time.sleep(0.001)
        assert self.llm.reset_prefix_cache()

    def ask(
        self,
        prompts: list[Any],
        tokens: int,
        said: list[dict[str, Any]] | None = None,
        *,
        logprobs: int | None = None,
    ) -> list[Any]:
        """vLLM's outputs; with ``said`` nothing of the prompts is stored."""
        params = [
            self._sampling(
                temperature=0,
                max_tokens=tokens,
                detokenize=False,
                ignore_eos=True,
                logprobs=logprobs,
                extra_args={"kv_transfer_params": each} if each else None,
            )
            for each in (said or [{} for _ in prompts])
        ]
        return list(self.llm.generate(prompts, params, use_tqdm=False))


Arm = Callable[[Case], tuple[Any, dict[str, Any]]]


def arms(repairs: list[int], without: str) -> dict[str, Arm]:
    """By name what is sent for a case; ``without``: the name of the last one."""
    exactly: dict[str, Any] = {"semkv": {"skip": True}}

    def reused(repair: int) -> Arm:
        def sent(case: Case) -> tuple[Any, dict[str, Any]]:
            said = {"spans": case.spans(), "repair": repair}
            return case.prompt(), {"semkv": said, "max_offload_tokens": 0}

        return sent

    found: dict[str, Arm] = {
        "computed": lambda case: (case.prompt(), exactly),
        "again": lambda case: (case.prompt(), exactly),
        "another order": lambda case: (case.prompt(other=True), exactly),
    }
    found |= {f"first {repair} again": reused(repair) for repair in repairs}
    found[without] = lambda case: (case.alone(), exactly)
    return found


def measure(
    engine: Engine,
    cases: Sequence[Case],
    sent: dict[str, Arm],
    kinds: Sequence[str],
    *,
    ordered: Sequence[str],
    told: Callable[[dict[str, Any]], None],
) -> None:
    """Ask all cases under each arm.

    Args:
        kinds: of the cases.
        ordered: kinds whose right answer changes with the order.
        told: gets the rows of all arms so far, by their names.
    """
    rows: dict[str, Any] = {}
    longest = max(len(case.answer()) for case in cases)
    computed: list[list[int]] = []
    for name, arm in sent.items():
        asked = [arm(case) for case in cases]
        begun = time.monotonic()
        outputs = engine.ask([prompt for prompt, _ in asked], longest, [said for _, said in asked])
        engine.forget()
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        computed = computed or answers
        own = {
            kind: summary(
                [
                    (case, answer, was)
                    for case, answer, was in zip(cases, answers, computed, strict=True)
                    if case.kind == kind
                ],
                other=name == "another order",
                ordered=kind in ordered,
            )
            for kind in kinds
        }
        tokens = sum(len(output.prompt_token_ids) for output in outputs)
        rows[name] = {
            **own,
            "reused_share": round(reused_tokens(outputs) / tokens, 4),
            "seconds": round(time.monotonic() - begun, 1),
        }
        told(rows)
        print(table({name: rows[name]}, kinds), flush=True)
    print(table(rows, kinds))


def summary(
    answered: list[tuple[Case, list[int], list[int]]],
    *,
    other: bool,
    ordered: bool,
) -> dict[str, Any]:
    """Of cases with their answer and the computed one: how many are right, and how many are the computed ones.

    Args:
        other: they were asked in another order.
        ordered: the order decides the right answer.
    """
    right = 0
    same = 0
    for case, answer, computed in answered:
        wanted = case.answer(other=other)
        size = len(wanted)
        right += answer[:size] == wanted
        same += answer[:size] == computed[:size]
    count = len(answered)
    found: dict[str, Any] = {"asked": count, "right": right, "interval": interval(right, count)}
    if not (other and ordered):
        found |= {"same": same, "same_interval": interval(same, count)}
    return found


def interval(right: int, of: int) -> list[float]:
    """Wilson's, 95%."""
    z = 1.96
    share = right / of
    middle = share + z * z / (2 * of)
    width = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    scale = 1 + z * z / of
    return [round((middle - width) / scale, 4), round((middle + width) / scale, 4)]


def table(rows: dict[str, Any], kinds: Sequence[str]) -> str:
    """For people: right and same of each arm, in percent."""
    lines = [f"{'':16}" + "".join(f"{kind:>26}" for kind in kinds)]
    for name, row in rows.items():
        cells = []
        for kind in kinds:
            found = row[kind]
            share = 100 * found["right"] / found["asked"]
            low, high = (100 * end for end in found["interval"])
            same = f"{100 * found['same'] / found['asked']:.1f}" if "same" in found else "-"
            cells.append(f"{share:5.1f} [{low:.0f}-{high:.0f}] same {same:>5}")
        lines.append(f"{name:16}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


def reused_tokens(outputs: list[Any]) -> int:
    """How many tokens of all prompts were reused at another position."""
    return sum(report(output).get("approximate_tokens", 0) for output in outputs)


def differences(found: list[Any], wanted: list[Any]) -> dict[str, Any]:
    """Of the first token: how far apart are the log-probabilities of the likeliest tokens that both name?

    ``strangers``: prompts of which both name no token.
    """
    apart = []
    strangers = 0
    same = 0
    for output, other in zip(found, wanted, strict=True):
        own, computed = (answer.outputs[0].logprobs[0] for answer in (output, other))
        shared = own.keys() & computed.keys()
        if shared:
            apart.append(max(abs(own[token].logprob - computed[token].logprob) for token in shared))
        else:
            strangers += 1
        same += output.outputs[0].token_ids[0] == other.outputs[0].token_ids[0]
    return {
        "reused_tokens": reused_tokens(found),
        "median": float(np.median(apart)) if apart else None,
        "worst": float(np.max(apart)) if apart else None,
        "strangers": strangers,
        "same_token": same,
        "of": len(found),
    }


def known(
    options: argparse.Namespace,
    plan: Any,
    rows: dict[str, Any],
    engine: Engine,
) -> dict[str, Any]:
    """A result with what it depends on."""
    import torch

    training = options.model / "training.json"
    log = json.loads(training.read_text())["log"] if training.exists() else []
    return {
        "machine": machine("vllm", "torch", "transformers"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "options": {name: str(value) for name, value in vars(options).items()},
        "plan": vars(plan),
        "trained": log[-1] if log else None,
        "faults": engine.faults,
        "arms": rows,
    }


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder for a store, that goes with the process at the latest."""
    return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)


def add_options(
    parser: argparse.ArgumentParser,
    *,
    minutes: float,
    tokens: int,
    stages: int,
    repairs: list[int],
) -> None:
    """The options that all these benches have, with a bench's own defaults."""
    parser.add_argument("--model", type=Path, required=True, help="the checkpoint's folder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="for a CPU: less of everything")
    parser.add_argument("--minutes", type=float, default=minutes, help="of training")
    parser.add_argument("--rate", type=float, default=1e-3, help="of learning")
    parser.add_argument("--tokens", type=int, default=tokens, help="of a training step")
    parser.add_argument(
        "--stages",
        type=int,
        default=stages,
        choices=range(1, stages + 1),
        help="of the training; the questions are of the last one",
    )
    parser.add_argument("--told-every", type=int, default=50, help="steps")
    parser.add_argument(
        "--sets", type=int, default=200, help="of documents, each asked once a kind"
    )
    parser.add_argument("--repair", type=int, nargs="+", default=repairs)
    parser.add_argument("--block", type=int, help="tokens of a KV block")
    parser.add_argument("--host-mib", type=int, default=6144)
    parser.add_argument("--kv-mib", type=int, default=4096)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
