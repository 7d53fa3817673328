"""Pictures at another position: are the answers still right? On a model that was trained for such questions.

    python bench/pictures_quality.py train --minutes 5 --model /tmp/pictures-model --out pictures-train.json
    python bench/pictures_quality.py measure --model /tmp/pictures-model --out pictures-quality.json

and on a CPU, in some minutes (a tiny model, one and two small pictures):

    python bench/pictures_quality.py train --tiny --minutes 3 --stages 2 --tokens 8192 --model /tmp/m --out train.json
    python bench/pictures_quality.py measure --tiny --stages 2 --sets 20 --host-mib 512 --kv-mib 64 --block 32 \
        --eager --model /tmp/m --out quality.json

``train`` makes a Qwen3-VL of some 21 million parameters from nothing. Its texts are documents, each a title, a drawn
picture of 64 tokens and some words, with questions behind them (`picture_questions`). It begins with one picture that
has one glyph many times; pictures, and glyphs in them, become more as it learns. ``measure`` asks vLLM one question
about six such documents at a time, in others than those of the training. The arms are those of `quality`; without
pictures the prompt has its texts alone, and in another order the right answers to ``later`` and ``nth`` are others.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import picture_model
import picture_questions as questions
import quality
from common import write_json
from picture_questions import KINDS, ORDERED, Batch, Plan, Texts
from quality import Engine, Trainer, arms, known

STAGES = (
    (Plan(documents=1, side=8, glyphs=1, words=2, questions=1, copies=32), 0.06),
    (Plan(documents=1, side=8, glyphs=4, words=2, questions=4, copies=8), 0.15),
    (Plan(documents=1, side=8, glyphs=8, words=2, questions=8), 0.25),
    (Plan(documents=2, side=8, glyphs=8, words=4, questions=14), 0.45),
    (Plan(documents=4, side=8, glyphs=8, words=8, questions=24), 0.6),
    (Plan(documents=6, side=8, glyphs=8, words=8, questions=36), 1.0),
)
"""Plans, each with the share of the time at which it ends at the latest. Early steps are small."""

TINY_STAGES = (
    (Plan(documents=1, side=5, glyphs=1, words=4, questions=1, copies=25), 0.5),
    (Plan(documents=1, side=5, glyphs=3, words=4, questions=3, copies=8), 0.75),
    (Plan(documents=2, side=5, glyphs=6, words=4, questions=8), 1.0),
)
TOKENS = 65536  # of a step of the last stage
LAST_STEPS = 8  # of the evaluation at the end


def stages_of(options: argparse.Namespace) -> list[tuple[Plan, float]]:
    """As many as are wanted; the last one has the time that is left."""
    stages = list(TINY_STAGES if options.tiny else STAGES)[: options.stages]
    return [*stages[:-1], (stages[-1][0], 1.0)]


# ---------------------------------------------------------------------- training


def batch(plan: Plan, tokens: int, seed: int) -> Batch:
    """Texts of some tokens in all."""
    return questions.batch(plan, max(1, tokens // plan.longest), seed)


def train(options: argparse.Namespace) -> None:
    """Make the model, in a folder that vLLM loads."""
    stages = stages_of(options)
    last, _ = stages[-1]
    with multiprocessing.get_context("spawn").Pool(quality.workers()) as pool:
        model = checked_model(last, options)
        network = picture_model.Network(model, last.side)
        trainer = Trainer(model, network.hidden, KINDS, ("fact", "name", "which"), options)
        for number, (plan, end) in enumerate(stages):
            tokens = options.tokens >> min(2, len(stages) - 1 - number)
            first_seed = options.seed * 10**9 + number * 10**8
            source = quality.batches(partial(batch, plan, tokens), first_seed, pool)
            name = f"{plan.documents} pictures, {plan.glyphs} glyphs, {plan.copies} copies"
            trainer.stage(name, end, source)
        trainer.evaluate(f"{name}, at the end", source, LAST_STEPS)
        pool.terminate()
    quality.save_training(trainer, options)
    picture_model.save_processor(options.model, last.side)


def checked_model(plan: Plan, options: argparse.Namespace) -> Any:
    """A new model whose pass is that of transformers."""
    model = picture_model.new_model(
        side=plan.side,
        tiny=options.tiny,
        seed=options.seed,
    ).to(quality.device())
    given = questions.batch(plan, 2, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        off = picture_model.differs_from_transformers(model, given, plan.side, Path(folder))
    print(f"off from transformers' own pass by {off:.2g}", flush=True)
    assert off < 0.02, off
    return model


# ---------------------------------------------------------------------- asking


class Case:
    """One question about documents in one order, and about the same ones in another."""

    def __init__(
        self,
        texts: Texts,
        pictures: list[Any],
        kind: str,
        draws: np.random.Generator,
    ) -> None:
        count = len(texts.documents)
        order = draws.permutation(count).tolist()
        other = draws.permutation(count).tolist()
        while other == order and count > 1:
            other = draws.permutation(count).tolist()
        asked = {False: texts.questions(kind, order), True: texts.questions(kind, other)}
        number = int(draws.integers(len(asked[False])))
        self.kind = kind
        self._texts = texts
        self._pictures = pictures
        self._system = texts.system()
        self._orders = {False: order, True: other}
        self._questions = {changed: own[number] for changed, own in asked.items()}

    def prompt(self, *, other: bool = False) -> dict[str, Any]:
        order = self._orders[other]
        documents = [token for number in order for token in self._texts.documents[number]]
        ids = [*self._system, *documents, *self._questions[other].tokens]
        return as_prompt(ids, [self._pictures[number] for number in order])

    def alone(self) -> dict[str, Any]:
        """Without pictures."""
        ids = self.prompt()["prompt_token_ids"]
        return as_prompt([token for token in ids if token != questions.PICTURE], [])

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


def as_prompt(ids: list[int], pictures: list[Any]) -> dict[str, Any]:
    """As a client says it: one token for each picture."""
    short: list[int] = []
    for token, same in groupby(ids):
        short += [token] if token == questions.PICTURE else list(same)
    asked: dict[str, Any] = {"prompt_token_ids": short}
    if pictures:
        asked["multi_modal_data"] = {"image": pictures}
    return asked


def painted(texts: Texts) -> list[Any]:
    """The pictures of some documents, as a client sends them."""
    from PIL import Image

    drawn = picture_model.Painter("cpu").paint(texts.scenes, texts.grounds)
    return [Image.fromarray(picture.numpy()) for picture in drawn]


def measure(options: argparse.Namespace) -> None:
    """The table."""
    draws = np.random.default_rng(options.seed + 12345)
    plan, _ = stages_of(options)[-1]
    sets = [Texts(plan, draws) for _ in range(options.sets)]
    pictures = [painted(texts) for texts in sets]
    cases = []
    order = list(range(plan.documents))
    for texts, own in zip(sets, pictures, strict=True):
        asked = [kind for kind in KINDS if texts.questions(kind, order)]
        cases += [Case(texts, own, kind, draws) for kind in asked]
    kinds = [kind for kind in KINDS if any(case.kind == kind for case in cases)]
    with quality.scratch() as folder:
        engine = Engine(
            options,
            Path(folder),
            max_model_len=picture_model.LONGEST,
            dtype="float32" if options.tiny else "bfloat16",
            limit_mm_per_prompt={"image": plan.documents, "video": 0},
        )
        assert not engine.refused, engine.refused
        alone = []
        for texts, own in zip(sets, pictures, strict=True):
            for ids, picture in zip(texts.documents, own, strict=True):
                alone.append(as_prompt(ids, [picture]))
        engine.ask(alone, 1)
        engine.forget()
        quality.measure(
            engine,
            cases,
            arms(options.repair, "no pictures"),
            kinds,
            ordered=ORDERED,
            told=lambda rows: write_json(options.out, known(options, plan, rows, engine)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("do", choices=("train", "measure"))
    quality.add_options(
        parser,
        minutes=5,
        tokens=TOKENS,
        stages=len(STAGES),
        repairs=[0, 16, 32, 64],
    )
    options = parser.parse_args()
    {"train": train, "measure": measure}[options.do](options)


if __name__ == "__main__":
    main()
