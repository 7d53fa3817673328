"""MiniGQA: the same bytes for the same seed, GQA's schema, and what a question was made from."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from semkv_lab.minigqa import VARIANTS, generate, make_document, returning
from semkv_lab.minigqa.questions import KINDS, ask_any, restate
from semkv_lab.minigqa.scenes import make_scene

Record = dict[str, Any]


class Written:
    """A generated split, read back the plain way."""

    def __init__(self, folder: Path, split: str = "val") -> None:
        self.folder = folder
        self.questions: dict[str, Record] = json.loads((folder / f"{split}_balanced_questions.json").read_text())
        self.images = {record["imageId"] for record in self.questions.values()}

    def source(self, record: Record) -> Record:
        return self.questions[record["of"]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(generate(tmp_path_factory.mktemp("minigqa"), 60, seed=5))


def test_the_questions_of_a_seed_stay_as_they_are(tmp_path: Path) -> None:
    """The bundled model was trained on this data, and the tables in ``docs/results`` were made from it."""
    folder = generate(tmp_path, 30, seed=2, split="train")
    asked = [
        (key, *(row[name] for name in ("imageId", "question", "answer", "semanticStr", "groups", "entailed")))
        for key, row in json.loads((folder / "train_balanced_questions.json").read_text()).items()
    ]
    pictures = b"".join(p.read_bytes() for p in sorted((folder / "images").iterdir()))
    assert (
        hashlib.sha256(json.dumps(asked).encode()).hexdigest()
        == "5a585327b73e9deddbe17c02789ae4beab6491292af8ed30d4ff08a1b6664e14"
    )
    assert hashlib.sha256(pictures).hexdigest() == "ed40dff7567f3fa4b291974bf0c9f06e59c5fb30a8aa0a0e842cd583a4701a3c"
    texts = [make_document(Random(seed)).text for seed in range(20)]
    assert (
        hashlib.sha256("".join(texts).encode()).hexdigest()
        == "a2647f9393e6e132b23d9c650a243b42a81715f62ffe0f0e2f61da29616928ac"
    )


def test_splits_and_seeds_share_no_ids_and_no_pictures(tmp_path: Path) -> None:
    for split in ("train", "val", "testdev"):
        generate(tmp_path / "all", 3, seed=1, split=split)
    generate(tmp_path / "other", 3, seed=2)
    splits = [Written(tmp_path / "all", s) for s in ("train", "val", "testdev")] + [Written(tmp_path / "other")]
    ids = [i for w in splits for i in (*w.questions, *w.images)]
    assert len(ids) == len(set(ids))
    pictures = [p.read_bytes() for f in ("all", "other") for p in (tmp_path / f / "images").iterdir()]
    assert len(pictures) == len(set(pictures)) == sum(len(w.images) for w in splits)


def test_questions_have_gqas_schema(data: Written) -> None:
    kinds = {
        "question": str,
        "imageId": str,
        "answer": str,
        "groups": dict,
        "semanticStr": str,
        "entailed": list,
        "variant": str,
    }
    for question_id, record in data.questions.items():
        assert question_id.isdigit()
        assert {key: type(value) for key, value in record.items() if key != "of"} == kinds
        assert record["imageId"] in data.images
        assert re.fullmatch(r"[a-z]+", record["answer"])
        assert all(data.questions[other]["imageId"] == record["imageId"] for other in record["entailed"])
    assert {r["groups"]["global"] for r in data.questions.values()} == {k.group or None for k in KINDS.values()}


def fold(text: str) -> str:
    return re.sub(r"[\s?]+", " ", text).strip().casefold()


def test_variants_are_what_they_say(data: Written) -> None:
    same = {"repeat": (True, True), "paraphrase": (False, False)}
    differing = negatives = 0
    for record in data.questions.values():
        variant = record["variant"]
        if not variant or variant.startswith("image:"):
            continue
        source = data.source(record)
        texts = record["question"], source["question"]
        assert source["imageId"] == record["imageId"]
        if variant == "negative":
            negatives += 1
            differing += source["answer"] != record["answer"]
            assert fold(texts[0]) != fold(texts[1])
            continue
        assert (record["answer"], record["semanticStr"]) == (source["answer"], source["semanticStr"])
        assert (texts[0] == texts[1], fold(texts[0]) == fold(texts[1])) == same.get(variant, (False, True))
    assert negatives > 100
    assert differing / negatives > 0.7


def test_lookalikes_are_asked_the_same_and_some_answers_differ(data: Written) -> None:
    answers: Counter[bool] = Counter()
    for record in data.questions.values():
        if record["variant"] == "image:lookalike":
            source = data.source(record)
            assert record["question"] == source["question"]
            assert record["imageId"] != source["imageId"]
            answers[record["answer"] == source["answer"]] += 1
    assert answers[True] > 20
    assert answers[False] > 15


def test_pictures_come_one_after_the_other_and_what_returns_after_its_source(data: Written) -> None:
    place = {q: i for i, q in enumerate(data.questions)}
    for question_id, record in data.questions.items():
        assert record["of"] is None or place[record["of"]] < place[question_id]
    images = [r["imageId"] for r in data.questions.values()]
    assert sum(a != b for a, b in pairwise(images)) == len(data.images) - 1


def test_restating_a_question_in_its_own_scene_changes_nothing() -> None:
    rng = Random(11)
    for _ in range(300):
        scene = make_scene(rng)
        for _ in range(10):
            program = ask_any(scene, rng)
            assert restate(scene, program) == program


def test_documents_return_as_their_variants_say() -> None:
    rows = returning(6, seed=4, words=400)
    assert rows == returning(6, seed=4, words=400)
    assert len(rows) == 6 * len(VARIANTS)
    assert rows[0]["variant"] == "original"
    for seed in range(20):
        by = {row["variant"]: row["context"] for row in returning(1, seed=seed, words=400)}
        assert set(by) == set(VARIANTS)
        original = by["original"]
        assert 380 <= len(original.split()) <= 460
        assert by["whitespace"] != original
        assert by["whitespace"].split() == original.split()
        assert by["case"] != original
        assert by["case"].casefold() == original.casefold()
        for variant in ("reworded", "edited"):
            lines = zip(by[variant].split("\n"), original.split("\n"), strict=True)
            assert sum(a != b for a, b in lines) == 1
        digits = [re.findall(r"\d+", by[variant]) for variant in ("original", "reworded", "edited")]
        assert digits[0] == digits[1] != digits[2]
        assert by["other"].split("\n")[:2] != original.split("\n")[:2]
    for row in rows:
        assert row["answer"].casefold() in " ".join(row["context"].split()).casefold()
