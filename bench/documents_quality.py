"""Documents at another position: are the answers still right? On a model that was trained for such questions.

    python bench/documents_quality.py train --minutes 5.5 --model /tmp/documents-model --out train.json
    python bench/documents_quality.py measure --model /tmp/documents-model --out documents-quality.json
    python bench/documents_quality.py identity --model /tmp/documents-model --out documents-identity.json

``train`` makes a Llama of 25 million parameters from nothing, on texts of six documents of 192 to 320 tokens with
questions behind them (`document_questions`). It begins with tokens that repeat, then come few short documents.
``measure`` asks vLLM one question about six documents at a time, in other documents than those of the training. The
arms are those of `quality`; in another order the right answers to ``later`` and ``nth`` are others.

``identity`` asks for the log-probabilities of the first token of an answer: by how much do they differ from those of
the computed prompt where all is loaded, moved and then computed again by the connector (which must differ by rounding
alone), and where vLLM's own prefix cache has the prompt?
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import document_questions as questions
import numpy as np
import quality
from common import write_json
from document_questions import KINDS, LARGE, MIDDLE, ORDERED, SMALL, Plan, Texts
from quality import Engine, Trainer, arms, differences, known

from semkv_lab.local_engine import all_computed_again

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

TOKENS = 98304  # of a step of the last stage


# ---------------------------------------------------------------------- training


class Batch(NamedTuple):
    """As `quality.Trainer` wants it."""

    ids: np.ndarray
    kinds: np.ndarray


def batch(plan: Plan | None, tokens: int, seed: int) -> Batch:
    """Texts of some tokens in all; without a plan what repeats."""
    if plan is None:
        return Batch(*questions.repeats(max(1, tokens // questions.LENGTH), seed))
    return Batch(*questions.batch(plan, max(1, tokens // plan.longest), seed))


def new_model(options: argparse.Namespace) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(options.seed)
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
    return LlamaForCausalLM(config).to(quality.device())


def train(options: argparse.Namespace) -> None:
    """Make the model, in a folder that vLLM loads."""
    stages = STAGES[: options.stages]
    stages = (*stages[:-1], (stages[-1][0], 1.0))
    model = new_model(options)
    with multiprocessing.get_context("spawn").Pool(quality.workers()) as pool:
        trainer = Trainer(
            model,
            lambda ids, _: model.model(input_ids=ids, use_cache=False).last_hidden_state,
            KINDS,
            ("fact", "two"),
            options,
        )
        for number, (plan, end) in enumerate(stages):
            tokens = options.tokens >> (len(stages) - 1 - number)
            first_seed = options.seed * 10**9 + number * 10**8
            source = quality.batches(partial(batch, plan, tokens), first_seed, pool)
            trainer.stage(f"{plan.documents if plan else 0} documents", end, source)
        pool.terminate()
    quality.save_training(trainer, options)


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

    def prompt(self, *, other: bool = False) -> dict[str, list[int]]:
        parts = [self._texts.documents[number] for number in self._orders[other]]
        documents = [token for part in parts for token in part]
        ids = [*self._system, *documents, *self._questions[other].tokens]
        return {"prompt_token_ids": ids}

    def alone(self) -> dict[str, list[int]]:
        return {"prompt_token_ids": [*self._system, *self._questions[False].tokens]}

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


def start(options: argparse.Namespace, folder: Path, sets: list[Texts]) -> Engine:
    """An engine in whose store the documents lie."""
    engine = Engine(
        options,
        folder,
        skip_tokenizer_init=True,
        max_model_len=LONGEST,
    )
    assert not engine.refused, engine.refused
    alone = [{"prompt_token_ids": ids} for texts in sets for ids in texts.documents]
    engine.ask(alone, 1)
    engine.forget()
    return engine


def measure(options: argparse.Namespace) -> None:
    """The table."""
    draws = np.random.default_rng(options.seed + 12345)
    plan = STAGES[options.stages - 1][0] or SMALL
    sets = [Texts(plan, draws) for _ in range(options.sets)]
    cases = [Case(texts, kind, draws) for texts in sets for kind in KINDS]
    with quality.scratch() as folder:
        engine = start(options, Path(folder), sets)
        quality.measure(
            engine,
            cases,
            arms(options.repair, "no documents"),
            KINDS,
            ordered=ORDERED,
            told=lambda rows: write_json(options.out, known(options, plan, rows, engine)),
        )


def identity(options: argparse.Namespace) -> None:
    """Log-probabilities against those of the computed prompt."""
    draws = np.random.default_rng(options.seed + 54321)
    plan = STAGES[options.stages - 1][0] or SMALL
    sets = [Texts(plan, draws) for _ in range(options.sets)]
    cases = [Case(texts, KINDS[number % len(KINDS)], draws) for number, texts in enumerate(sets)]
    prompts = [case.prompt() for case in cases]
    exactly = [{"semkv": {"skip": True}} for _ in cases]
    arm = arms([32], "no documents")["first 32 again"]
    reused = [arm(case)[1] for case in cases]
    with quality.scratch() as folder:
        engine = start(options, Path(folder), sets)

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("do", choices=("train", "measure", "identity"))
    quality.add_options(
        parser,
        minutes=5.5,
        tokens=TOKENS,
        stages=len(STAGES),
        repairs=[0, 16, 32, 64, 128],
    )
    options = parser.parse_args()
    {"train": train, "measure": measure, "identity": identity}[options.do](options)


if __name__ == "__main__":
    main()
