"""Training data, made as it is used: worker processes draw scenes, ask about them and pack the questions of a picture.

A row is one picture's prompt head followed by many questions with their answers. Each question sees the head and itself
only, and its positions start where the head ends, so a row equals that many separate prompts at a fraction of the cost.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from queue import Empty, Full
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import prompt

from semkv_lab.minigqa import make_document
from semkv_lab.minigqa.questions import (
    KINDS,
    WEIGHTS,
    Program,
    ask,
    change_case,
    change_whitespace,
    references,
    word,
)
from semkv_lab.minigqa.scenes import WIDTH, Scene, draw, make_scene

ROW = 448
"""Tokens of a row: a head of about 150 and some 20 questions."""

TEXT_ROW = 2560
"""Tokens of a row without a picture: a document of up to 1,300 words, about 2,050 tokens, and some 25 questions."""

QUESTIONS, TEXT_QUESTIONS = 21, 28
"""Most questions of a row; those that do not fit are dropped."""

HEAD_SEGMENT, PAD_SEGMENT = 0, 255

_SPATIAL = {
    "rel_verify": 20.0,
    "rel_choose": 12.0,
    "rel_query_shape": 9.0,
    "rel_query_color": 6.0,
    "rel_exist": 8.0,
    "position_query": 5.0,
    "position_verify": 5.0,
    "position_choose": 4.0,
    "compare_size": 4.0,
    "same_color": 12.0,
    "different_color": 10.0,
    "same_size": 8.0,
    "same_shape": 12.0,
    "query_color": 8.0,
    "query_shape": 7.0,
}
TRAINING_WEIGHTS = {**WEIGHTS, **_SPATIAL, "column": 7.0, "row": 7.0}
"""Relations and comparisons weigh more than in the data set: they are learned last. ``column`` and ``row`` ask where an
object stands on a grid of 6 by 6; they exist in training only and teach the positions that relations compare."""

KIND_NAMES = (*KINDS, "column", "row", "document")
_KIND_IDS = {name: i for i, name in enumerate(KIND_NAMES)}
_ASKED = KIND_NAMES[:-1]
_WEIGHTED = [TRAINING_WEIGHTS.get(name, 1.0) for name in _ASKED]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows as a worker hands them over.

    Attributes:
        images: uint8 ``[n, 96, 96, 3]``; none where rows are about documents.
        owner: int64 ``[rows]``, the image of each row.
        ids: int32 ``[rows, length]``, token ids; a row has `ROW` or `TEXT_ROW` of them.
        segments: uint8 ``[rows, length]``: 0 the head, 1.. the questions, 255 padding.
        positions: int16 ``[rows, length]``.
        labels: int32 ``[rows, length]``: the next token where it is part of an answer, else -1.
        kinds: int8 ``[rows, length]``: the question's kind where ``labels`` is set, else -1.
    """

    images: npt.NDArray[np.uint8]
    owner: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int32]
    segments: npt.NDArray[np.uint8]
    positions: npt.NDArray[np.int16]
    labels: npt.NDArray[np.int32]
    kinds: npt.NDArray[np.int8]


def make_chunk(
    rng: Random, bpe: Any, images: int, rows_per_image: int = 2, *, plain: bool = False
) -> Chunk:
    """``images`` new pictures with their rows. ``plain``: no case, white-space, system or context variants."""
    chunk = _empty(images, np.repeat(np.arange(images), rows_per_image), ROW)
    for i in range(images):
        scene = make_scene(rng)
        chunk.images[i] = _picture(scene, rng)
        for row in range(i * rows_per_image, (i + 1) * rows_per_image):
            _fill_row(
                chunk,
                row,
                _head(rng, plain),
                [_ask(scene, rng, plain) for _ in range(QUESTIONS)],
                bpe,
            )
    return chunk


def make_text_chunk(
    rng: Random, bpe: Any, rows: int, *, plain: bool = False, most_words: int = 1300
) -> Chunk:
    """``rows`` new documents of invented facts, each with questions. ``plain``: no variants of case and white space."""
    chunk = _empty(0, np.zeros(rows, np.int64), TEXT_ROW)
    for row in range(rows):
        document = make_document(rng, rng.randrange(40, most_words + 1))
        text = document.text if plain else _retyped(document.text, rng)
        pairs = [pair for entry in document.entries for pair in entry.questions]
        asked = [
            (_KIND_IDS["document"], *pair)
            for pair in rng.sample(pairs, min(TEXT_QUESTIONS, len(pairs)))
        ]
        _fill_row(chunk, row, prompt.head(image=False, context=text), asked, bpe)
    return chunk


def _empty(images: int, owner: npt.NDArray[np.int64], length: int) -> Chunk:
    shape = (len(owner), length)
    return Chunk(
        np.zeros((images, WIDTH, WIDTH, 3), np.uint8),
        owner,
        np.full(shape, prompt.PAD_ID, np.int32),
        np.full(shape, PAD_SEGMENT, np.uint8),
        np.zeros(shape, np.int16),
        np.full(shape, -1, np.int32),
        np.full(shape, -1, np.int8),
    )


def _retyped(text: str, rng: Random) -> str:
    """A document as it is, in small letters, or with some blanks doubled."""
    how = rng.random()
    if how < 0.1:
        return text.lower()
    return "".join(
        f"{word}{'  ' if how < 0.2 and rng.random() < 0.1 else ' '}" for word in text.split(" ")
    ).rstrip(" ")


def _picture(scene: Scene, rng: Random) -> npt.NDArray[np.uint8]:
    """The drawn picture after the losses of a JPEG file, and sometimes of a change of size."""
    from PIL import Image

    image = draw(scene)
    if rng.random() < 0.2:
        side = rng.randrange(72, 160)
        image = image.resize(
            (side, side), rng.choice((Image.Resampling.BICUBIC, Image.Resampling.BILINEAR))
        )
    if rng.random() < 0.8:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=rng.choice((60, 75, 80, 85, 90, 90, 95)))
        image = Image.open(buffer)
    if image.size != (WIDTH, WIDTH):
        image = image.resize((WIDTH, WIDTH), Image.Resampling.BICUBIC)
    return np.asarray(image)


def _fill_row(
    chunk: Chunk, row: int, head: str, asked: list[tuple[int, str, str]], bpe: Any
) -> None:
    """One row: the head of a prompt, then as many (kind, question, answer) as fit."""
    ids = prompt.expand(bpe.encode(head, add_special_tokens=False).ids)
    at = start = len(ids)
    chunk.ids[row, :start] = ids
    chunk.segments[row, :start] = HEAD_SEGMENT
    chunk.positions[row, :start] = np.arange(start)
    texts = [prompt.tail(question) for _, question, _ in asked]
    answers = [f" {answer}" for _, _, answer in asked]
    encoded = bpe.encode_batch(texts + answers, add_special_tokens=False)
    for k, (kind, _, _) in enumerate(asked):
        question, answer = encoded[k].ids, [*encoded[len(asked) + k].ids, prompt.EOS_ID]
        unit = question + answer
        end = at + len(unit)
        if end > chunk.ids.shape[1]:
            break
        chunk.ids[row, at:end] = unit
        chunk.segments[row, at:end] = k + 1
        chunk.positions[row, at:end] = np.arange(start, start + len(unit))
        chunk.labels[row, end - len(answer) - 1 : end - 1] = answer
        chunk.kinds[row, end - len(answer) - 1 : end - 1] = kind
        at = end


def _head(rng: Random, plain: bool) -> str:
    draw_ = 1.0 if plain else rng.random()
    system = rng.choice(prompt.SYSTEM_TEXTS) if draw_ < 0.2 else ""
    context = _context(rng) if 0.15 < draw_ < 0.35 else ""
    return prompt.head(system=system, context=context)


def _context(rng: Random) -> str:
    """A line that says nothing about the picture: one of the fixed ones, or one to three lines of a document."""
    if rng.random() < 0.3:
        return rng.choice(prompt.CONTEXT_TEXTS)
    lines = make_document(rng, 60).text.split("\n")
    start = rng.randrange(len(lines))
    return "\n".join(lines[start : start + rng.randrange(1, 4)])


def _ask(scene: Scene, rng: Random, plain: bool) -> tuple[int, str, str]:
    while True:
        kind = rng.choices(_ASKED, _WEIGHTED)[0]
        program = (
            _ask_grid(scene, rng, kind) if kind in ("column", "row") else ask(scene, rng, kind)
        )
        if program is not None:
            break
    if isinstance(program, Program):
        question, answer = word(program, rng), program.answer
    else:
        question, answer = program
    if not plain:
        spot = rng.random()
        if spot < 0.10:
            question = change_case(question, rng)
        if 0.05 < spot < 0.15:
            question = change_whitespace(question, rng)
    return _KIND_IDS[kind], question, answer


def _ask_grid(scene: Scene, rng: Random, kind: str) -> tuple[str, str]:
    index = rng.randrange(len(scene.things))
    thing = scene.things[index]
    refs = references(scene, index)
    phrase = rng.choice(refs).text if refs else f"{thing.color} {thing.shape}"
    return f"In which {kind} is the {phrase}?", str(
        int((thing.x if kind == "column" else thing.y) * 6 / WIDTH) + 1
    )


def start_workers(
    bpe_json: str, count: int, images: int, seed: int, texts: int = 0
) -> tuple[list[BaseProcess], Queue[Chunk]]:
    """Worker processes that put chunks into a bounded queue until they are terminated. Call before CUDA is touched.

    The first ``texts`` of them make documents."""
    context = get_context("fork")
    chunks: Queue[Chunk] = context.Queue(maxsize=4 * count)
    workers = [
        context.Process(
            target=_work, args=(bpe_json, images, f"{seed}:{i}", i < texts, chunks), daemon=True
        )
        for i in range(count)
    ]
    for worker in workers:
        worker.start()
    return list(workers), chunks


def _work(bpe_json: str, images: int, seed: str, texts: bool, chunks: Queue[Chunk]) -> None:
    import os

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tokenizers import Tokenizer

    bpe, rng = Tokenizer.from_str(bpe_json), Random(seed)  # noqa: S311
    while True:
        chunk = make_text_chunk(rng, bpe, images) if texts else make_chunk(rng, bpe, images)
        while True:
            try:
                chunks.put(chunk, timeout=5)
                break
            except Full:
                continue


def take(chunks: Queue[Chunk], timeout: float) -> Chunk | None:
    """The next chunk, or None after ``timeout`` seconds."""
    try:
        return chunks.get(timeout=timeout)
    except Empty:
        return None
