"""MiniGQA: the same bytes for the same seed, whatever becomes of its code."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from random import Random

from semkv_lab.minigqa import VARIANTS, generate, make_document, returning
from semkv_lab.minigqa.questions import ask_any, restate
from semkv_lab.minigqa.scenes import make_scene


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_what_a_seed_gives_stays_as_it_is(tmp_path: Path) -> None:
    """The bundled model was trained on this data, and the tables in ``docs/results`` were made from it."""
    folder = generate(tmp_path, 30, seed=2, split="train")
    questions = (folder / "train_balanced_questions.json").read_bytes()
    assert sha256(questions) == "14360763e8580a6244ae62c3da26c6001ab278b924fa66c10c2b6b47689cc5ff"
    pictures = b"".join(p.read_bytes() for p in sorted((folder / "images").iterdir()))
    assert sha256(pictures) == "ed40dff7567f3fa4b291974bf0c9f06e59c5fb30a8aa0a0e842cd583a4701a3c"
    texts = "".join(make_document(Random(seed)).text for seed in range(20)) + json.dumps(returning(6, seed=4))
    assert sha256(texts.encode()) == "9ab0579e40c18af7ea9f74b786f51e6d4512fa102791a5e9a337feae13366e4a"


def test_splits_and_seeds_share_no_ids_and_no_pictures(tmp_path: Path) -> None:
    folders = [generate(tmp_path / split, 3, seed=1, split=split) for split in ("train", "val", "testdev")]
    folders.append(generate(tmp_path / "other", 3, seed=2))
    ids = [key for f in folders for file in f.glob("*.json") for key in json.loads(file.read_text())]
    pictures = [p.read_bytes() for f in folders for p in (f / "images").iterdir()]
    assert len(ids) == len(set(ids))
    assert len(pictures) == len(set(pictures))


def test_restating_a_question_in_its_own_scene_changes_nothing() -> None:
    rng = Random(11)
    for _ in range(300):
        scene = make_scene(rng)
        for _ in range(10):
            program = ask_any(scene, rng)
            assert restate(scene, program) == program


def test_documents_return_as_their_variants_say() -> None:
    by = {row["variant"]: row["context"] for row in returning(1, seed=4, words=400)}
    original = by["original"]
    assert set(by) == set(VARIANTS)
    assert by["whitespace"] != original
    assert by["whitespace"].split() == original.split()
    assert by["case"] == original.lower()
    for variant in ("reworded", "edited"):
        lines = zip(by[variant].split("\n"), original.split("\n"), strict=True)
        assert sum(a != b for a, b in lines) == 1
