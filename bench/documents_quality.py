"""Documents at another position: are the answers still right? On a model that was trained for such questions.

    python bench/documents_quality.py train --minutes 5.5 --model /tmp/documents-model --out train.json
    python bench/documents_quality.py measure --model /tmp/documents-model --out documents-quality.json
    python bench/documents_quality.py identity --model /tmp/documents-model --out documents-identity.json

``train`` makes a Llama of 25 million parameters from nothing, on texts of six documents of 192 to 320 tokens with
questions behind them (`document_questions`). It begins with tokens that repeat, then come few short documents.
``measure`` asks vLLM one question about six documents at a time, in other documents than those of the training, under
these arms:

    computed         everything is computed
    again            the same a second time: what differs without any change
    another order    computed, with the same documents in another order
    first K again    each document's KV is loaded as it was computed alone; its first K tokens are computed again
    no documents     the question alone: what guessing gives

``right`` is the share of right answers, with 95% intervals (Wilson); ``same`` the share of answers that are those of
``computed``. In another order the right answers to ``later`` and ``nth`` are others, so there ``same`` is not given.

``identity`` asks for the log-probabilities of the first token of an answer: by how much do they differ from those of
the computed prompt where all is loaded, moved and then computed again by the connector (which must differ by rounding
alone), and where vLLM's own prefix cache has the prompt?
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import document_questions as questions
import numpy as np
from common import machine, write_json
from document_questions import KINDS, LARGE, MIDDLE, ORDERED, SMALL, Plan, Texts

from semkv_lab.local_engine import all_computed_again, connector, report

LONGEST = 2560
SHAPE = {
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
TINY = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
STAGES: tuple[tuple[Plan | None, float], ...] = (
    (None, 0.25),
    (SMALL, 0.45),
    (MIDDLE, 0.65),
    (LARGE, 1.0),
)
"""Plans (none: what repeats), each with the share of the time at which it ends at the latest. Early steps are small."""

ENOUGH = 0.9  # of facts right, after which texts get longer
TOKENS = 98304  # of a step of the last stage
RATE = 1e-3
WARM_UP = 200  # steps
DECAY = 0.3  # of the time, at its end
TOLD_EVERY = 50  # steps
WORKER = "semkv_vllm.worker.DocumentWorker"


# ---------------------------------------------------------------------- training


def batches(
    plan: Plan | None,
    tokens: int,
    first_seed: int,
    pool: Any,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches without end, made by other processes some steps ahead."""
    waiting: list[Any] = []
    make: Callable[..., Any] = questions.repeats
    rows = max(1, tokens // questions.LENGTH)
    if plan is not None:
        make = partial(questions.batch, plan)
        rows = max(1, tokens // plan.longest)
    seed = first_seed
    while True:
        while len(waiting) < 48:
            waiting.append(pool.apply_async(make, (rows, seed)))
            seed += 1
        yield waiting.pop(0).get()


class Trainer:
    """A model, its optimizer and the time that it has."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(options.seed)
        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._options = options
        torch.backends.cuda.matmul.allow_tf32 = True
        shape = TINY if options.tiny else SHAPE
        config = LlamaConfig(
            **shape,
            vocab_size=questions.VOCABULARY,
            max_position_embeddings=LONGEST,
            tie_word_embeddings=True,
            bos_token_id=questions.BEGIN,
            eos_token_id=questions.END_OF_TEXT,
            rms_norm_eps=1e-5,
            attn_implementation="sdpa",
        )
        self.model = LlamaForCausalLM(config).to(self._device)
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
        plan: Plan | None,
        end: float,
        source: Iterator[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """Train on texts of one plan until they are easy, or their time is over."""
        right = Counter[str]()
        asked = Counter[str]()
        losses: list[Any] = []
        last = end == 1.0
        while self.spent < end:
            ids, kinds = next(source)
            loss, found = self._step(ids, kinds)
            losses.append(loss)
            for kind, (good, of) in found.items():
                right[kind] += good
                asked[kind] += of
            if self.step % self._options.told_every:
                continue
            shares = {
                kind: round(float(right[kind] / count), 4) for kind, count in asked.items() if count
            }
            line = {
                "step": self.step,
                "seconds": round(time.monotonic() - self._begun, 1),
                "documents": plan.documents if plan else 0,
                "loss": round(float(sum(losses) / len(losses)), 4),
                "right": shares,
            }
            self.log.append(line)
            print(json.dumps(line), flush=True)
            right.clear()
            asked.clear()
            losses.clear()
            if not last and min(shares["fact"], shares.get("two", 1.0)) > ENOUGH:
                return

    def _rate(self) -> float:
        warm = min(1.0, self.step / WARM_UP)
        left = min(1.0, (1.0 - self.spent) / DECAY)
        return self._options.rate * warm * max(0.02, left)

    def _step(self, ids: np.ndarray, kinds: np.ndarray) -> tuple[Any, dict[str, tuple[Any, int]]]:
        """One step; its loss and by kind how many answers were right, of how many."""
        torch = self._torch
        given = torch.from_numpy(ids.astype(np.int64)).to(self._device, non_blocking=True)
        rows, places = np.nonzero(kinds)
        of_kind = kinds[rows, places]
        at = torch.from_numpy(rows * ids.shape[1] + places).to(self._device)
        self.step += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate()
        with torch.autocast(
            self._device,
            dtype=torch.bfloat16,
            enabled=self._device == "cuda",
        ):
            hidden = self.model.model(input_ids=given, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden.flatten(0, 1)[at])
        wanted = given.flatten()[at + 1]
        loss = torch.nn.functional.cross_entropy(logits.float(), wanted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        hits = logits.argmax(-1) == wanted
        found = {}
        for number, kind in enumerate(KINDS, 1):
            own = torch.from_numpy(of_kind == number).to(self._device)
            found[kind] = ((hits & own).sum(), int((of_kind == number).sum()))
        return loss.detach(), found


def train(options: argparse.Namespace) -> None:
    """Make the model, in a folder that vLLM loads."""
    stages = STAGES[: options.stages]
    stages = (*stages[:-1], (stages[-1][0], 1.0))
    workers = max(1, min(14, len(os.sched_getaffinity(0)) - 1))
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        trainer = Trainer(options)
        for number, (plan, end) in enumerate(stages):
            tokens = options.tokens >> (len(stages) - 1 - number)
            source = batches(plan, tokens, options.seed * 10**9 + number * 10**8, pool)
            trainer.stage(plan, end, source)
        pool.terminate()
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


class Case:
    """One question about documents in one order, and about the same ones in another."""

    def __init__(
        self,
        texts: Texts,
        kind: str,
        draws: np.random.Generator,
    ) -> None:
        count = len(texts.documents)
        order = draws.permutation(count).tolist()
        other = draws.permutation(count).tolist()
        while other == order:
            other = draws.permutation(count).tolist()
        number = int(draws.integers(len(texts.questions(kind, order))))
        self.kind = kind
        self._texts = texts
        self._system = texts.system()
        self._orders = {False: order, True: other}
        self._questions = {
            changed: texts.questions(kind, own)[number] for changed, own in self._orders.items()
        }

    def prompt(self, *, other: bool = False) -> list[int]:
        parts = [self._texts.documents[number] for number in self._orders[other]]
        documents = [token for part in parts for token in part]
        return [*self._system, *documents, *self._questions[other].tokens]

    def alone(self) -> list[int]:
        return [*self._system, *self._questions[False].tokens]

    def answer(self, *, other: bool = False) -> list[int]:
        return self._questions[other].answer

    def spans(self) -> list[list[int]]:
        at = len(self._system)
        found = []
        for number in self._orders[False]:
            size = len(self._texts.documents[number])
            found.append([at, at + size])
            at += size
        return found


class Engine:
    """vLLM with semkv's connector, in this process."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        self._sampling = SamplingParams
        host_bytes = options.host_mib << 20
        kv = connector(scratch / "cache", host_bytes=host_bytes, document_tokens=0)
        args: dict[str, Any] = {
            "max_num_batched_tokens": 8192,
            "max_num_seqs": 32,
            "kv_cache_memory_bytes": options.kv_mib << 20,
        }
        if options.block:
            args["block_size"] = options.block
        self.llm = LLM(
            model=str(options.model),
            skip_tokenizer_init=True,
            max_model_len=LONGEST,
            worker_cls=WORKER,
            enforce_eager=options.eager,
            gpu_memory_utilization=0.1,
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
        prompts: list[list[int]],
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
        asked: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
        return list(self.llm.generate(asked, params, use_tqdm=False))


Arm = Callable[[Case], tuple[list[int], dict[str, Any]]]


def arms(repairs: list[int]) -> dict[str, Arm]:
    """By name what is sent for a case."""
    exactly: dict[str, Any] = {"semkv": {"skip": True}}

    def reused(repair: int) -> Arm:
        def sent(case: Case) -> tuple[list[int], dict[str, Any]]:
            said = {"spans": case.spans(), "repair": repair}
            return case.prompt(), {"semkv": said, "max_offload_tokens": 0}

        return sent

    found: dict[str, Arm] = {
        "computed": lambda case: (case.prompt(), exactly),
        "again": lambda case: (case.prompt(), exactly),
        "another order": lambda case: (case.prompt(other=True), exactly),
    }
    found |= {f"first {repair} again": reused(repair) for repair in repairs}
    found["no documents"] = lambda case: (case.alone(), exactly)
    return found


def interval(right: int, of: int) -> list[float]:
    """Wilson's, 95%."""
    z = 1.96
    share = right / of
    middle = share + z * z / (2 * of)
    width = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    scale = 1 + z * z / of
    return [round((middle - width) / scale, 4), round((middle + width) / scale, 4)]


def summary(
    name: str,
    cases: list[Case],
    answers: list[list[int]],
    computed: list[list[int]],
) -> dict[str, Any]:
    """By kind: how many are right, and how many are those of the computed prompt."""
    other = name == "another order"
    row: dict[str, Any] = {}
    for kind in KINDS:
        own = [number for number, case in enumerate(cases) if case.kind == kind]
        right = sum(
            answers[n][: len(cases[n].answer())] == cases[n].answer(other=other) for n in own
        )
        row[kind] = {"asked": len(own), "right": right, "interval": interval(right, len(own))}
        if not other or kind not in ORDERED:
            length = len(cases[own[0]].answer())
            same = sum(answers[n][:length] == computed[n][:length] for n in own)
            row[kind] |= {"same": same, "same_interval": interval(same, len(own))}
    return row


def table(rows: dict[str, Any]) -> str:
    """For people: right and same of each arm, in percent."""
    lines = [f"{'':16}" + "".join(f"{kind:>26}" for kind in KINDS)]
    for name, row in rows.items():
        cells = []
        for kind in KINDS:
            found = row[kind]
            share = 100 * found["right"] / found["asked"]
            low, high = (100 * end for end in found["interval"])
            same = f"{100 * found['same'] / found['asked']:.1f}" if "same" in found else "-"
            cells.append(f"{share:5.1f} [{low:.0f}-{high:.0f}] same {same:>5}")
        lines.append(f"{name:16}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines)


def measure(options: argparse.Namespace) -> None:
    """The table."""
    draws = np.random.default_rng(options.seed + 12345)
    plan = STAGES[options.stages - 1][0] or SMALL
    sets = [Texts(plan, draws) for _ in range(options.sets)]
    cases = [Case(texts, kind, draws) for texts in sets for kind in KINDS]
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        engine = Engine(options, Path(scratch))
        assert not engine.refused, engine.refused
        engine.ask([ids for texts in sets for ids in texts.documents], 1)
        engine.forget()
        computed: list[list[int]] = []
        for name, arm in arms(options.repair).items():
            sent = [arm(case) for case in cases]
            begun = time.monotonic()
            outputs = engine.ask([ids for ids, _ in sent], 2, [said for _, said in sent])
            engine.forget()
            answers = [list(output.outputs[0].token_ids) for output in outputs]
            computed = computed or answers
            reused = reused_tokens(outputs)
            rows[name] = summary(name, cases, answers, computed)
            rows[name]["reused_share"] = round(reused / sum(len(ids) for ids, _ in sent), 4)
            rows[name]["seconds"] = round(time.monotonic() - begun, 1)
            write_json(options.out, known(options, plan, rows, engine))
            print(table({name: rows[name]}), flush=True)
    print(table(rows))


def reused_tokens(outputs: list[Any]) -> int:
    """How many tokens of all prompts were reused at another position."""
    return sum(report(output).get("approximate_tokens", 0) for output in outputs)


def differences(found: list[Any], wanted: list[Any]) -> dict[str, Any]:
    """Of the first token: how far apart are the log-probabilities of the likeliest tokens that both name?"""
    apart = []
    same = 0
    for output, other in zip(found, wanted, strict=True):
        own, computed = (answer.outputs[0].logprobs[0] for answer in (output, other))
        shared = own.keys() & computed.keys()
        apart.append(max(abs(own[token].logprob - computed[token].logprob) for token in shared))
        same += output.outputs[0].token_ids[0] == other.outputs[0].token_ids[0]
    return {
        "reused_tokens": reused_tokens(found),
        "median": float(np.median(apart)),
        "worst": float(np.max(apart)),
        "same_token": same,
        "of": len(apart),
    }


def identity(options: argparse.Namespace) -> None:
    """Log-probabilities against those of the computed prompt."""
    draws = np.random.default_rng(options.seed + 54321)
    plan = STAGES[options.stages - 1][0] or SMALL
    sets = [Texts(plan, draws) for _ in range(options.sets)]
    cases = [Case(texts, KINDS[number % len(KINDS)], draws) for number, texts in enumerate(sets)]
    prompts = [case.prompt() for case in cases]
    exactly = [{"semkv": {"skip": True}} for _ in cases]
    arm = arms([32])["first 32 again"]
    reused = [arm(case)[1] for case in cases]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        engine = Engine(options, Path(scratch))
        assert not engine.refused, engine.refused
        engine.ask([ids for texts in sets for ids in texts.documents], 1)

        def answers(said: list[dict[str, Any]], *, again: bool = False) -> list[Any]:
            found = []
            for prompt, own in zip(prompts, said, strict=True):  # one at a time: batches round, too
                engine.forget()
                for _ in range(1 + again):
                    output = engine.ask([prompt], 1, [own], logprobs=20)
                found += output
            return found

        computed = answers(exactly)
        rows = {"computed again": differences(answers(exactly), computed)}
        rows["prefix cache"] = differences(answers(exactly, again=True), computed)
        with all_computed_again():
            moved = answers(reused)
        rows["moved, then all computed again"] = differences(moved, computed)
        rows["first 32 again"] = differences(answers(reused), computed)
        write_json(options.out, known(options, plan, rows, engine))
    print(json.dumps(rows, indent=1))


def known(
    options: argparse.Namespace,
    plan: Plan,
    rows: dict[str, Any],
    engine: Engine,
) -> dict[str, Any]:
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("do", choices=("train", "measure", "identity"))
    parser.add_argument("--model", type=Path, required=True, help="the checkpoint's folder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="for a CPU: less of everything")
    parser.add_argument("--minutes", type=float, default=5.5, help="of training")
    parser.add_argument("--rate", type=float, default=RATE, help="of learning")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a training step")
    parser.add_argument(
        "--stages",
        type=int,
        default=len(STAGES),
        choices=range(1, len(STAGES) + 1),
        help="of the training; the questions are of the last one",
    )
    parser.add_argument("--told-every", type=int, default=TOLD_EVERY, help="steps")
    parser.add_argument("--sets", type=int, default=200, help="of documents, each asked five times")
    parser.add_argument("--repair", type=int, nargs="+", default=[0, 16, 32, 64, 128])
    parser.add_argument("--block", type=int, help="tokens of a KV block")
    parser.add_argument("--host-mib", type=int, default=6144)
    parser.add_argument("--kv-mib", type=int, default=4096)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    options = parser.parse_args()
    {"train": train, "measure": measure, "identity": identity}[options.do](options)


if __name__ == "__main__":
    main()
