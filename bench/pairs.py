"""How often the comparator behind checks errs, and where the thresholds of an encoder may lie; prints JSON.

    python bench/pairs.py comparator    how often the comparator behind checks errs (results/comparator.json)
    python bench/pairs.py separation    cosines of what may stand in and of what may not (results/separation.json)

``semkv bench semantic`` measures the rest of what is labeled. No row of the data sets in ``shared/data`` is written.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, SHARED, commands, machine, write_json

from semkv.encoders.text import DEFAULT_MODEL, SentenceEncoder
from semkv.encoders.vision import TowerEncoder
from semkv.guards import veto
from semkv.keys import normalise
from semkv.tiers.checking import SameMeaning, same_text
from semkv_lab.minigqa.generate import Knobs, generate
from semkv_lab.samples import read_jsonl
from semkv_lab.semantic import rate

DATA = ROOT / "bench" / "data"
PAIRS, GQA = SHARED / "question_pairs_dev.jsonl.gz", SHARED / "gqa_testdev_llava13b.jsonl.gz"
CHECKPOINT = ROOT / "src" / "semkv" / "assets" / "minigqa-vlm"
THRESHOLD = 0.92  # the default
LONG = 7  # words from which the comparator compares meaning
QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
THRESHOLDS = (0.8, 0.85, 0.9, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.992, 0.993, 0.994, 0.995, 0.996, 0.997)

Row = dict[str, Any]
app = commands(__doc__)


def load(path: Path) -> list[Row]:
    return [dict(row) for _, row in read_jsonl(path)]


# -- comparator ------------------------------------------------------------

Labeled = tuple[str, str, bool]


def misjudged(pairs: Iterable[Labeled], same: SameMeaning) -> Row:
    """Shares of misjudged pairs with 95% intervals (Wilson's)."""
    verdicts = [(same(a, b), truth) for a, b, truth in pairs]
    found: Row = {}
    for name, truth in (("says different of the same", True), ("says same of different", False)):
        of_it = [verdict for verdict, label in verdicts if label is truth]
        found[name] = rate(sum(verdict is not truth for verdict in of_it), len(of_it))
    return found


def short_answers(encoder: SentenceEncoder) -> Iterator[Labeled]:
    """LLaVA-1.5-13B's answers to GQA questions on one picture that threshold and guards take for one another.

    Equal strings say the same; the others were labeled by reading, before the comparator was asked.
    """
    rows = {row["questionId"]: row for row in load(GQA)}
    pictures: dict[str, list[str]] = defaultdict(list)
    for number, row in rows.items():
        pictures[row["imageId"]].append(number)
    for numbers in pictures.values():
        vectors = encoder.encode([rows[number]["question"] for number in numbers])
        for i, j in combinations(range(len(numbers)), 2):
            first, second = rows[numbers[i]], rows[numbers[j]]
            near = float(vectors[i] @ vectors[j]) >= THRESHOLD and veto(first["question"], second["question"]) is None
            if near and same_text(first["llava13b"], second["llava13b"]):
                yield first["llava13b"], second["llava13b"], True
    for row in load(DATA / "short_answers.jsonl"):
        yield rows[row["first"]]["llava13b"], rows[row["second"]]["llava13b"], row["same"]


def long_texts(path: Path, same: bool | None = None) -> list[Labeled]:
    """Labeled texts of `LONG` words and more; those of a file without labels have the given one."""
    rows = [(row["a"], row["b"], bool(row["same"]) if same is None else same) for row in load(path)]
    return [row for row in rows if min(len(row[0].split()), len(row[1].split())) >= LONG]


@app.command
def comparator(*, out: Path | None = None) -> None:
    """How often the comparator says "different" of answers that say the same, and "same" of others."""
    encoder = SentenceEncoder()
    same = SameMeaning(encoder)
    result: Row = {"encoder": encoder.fingerprint}
    if GQA.exists():
        result["short answers, GQA"] = misjudged(short_answers(encoder), same)
    result["long answers"] = misjudged(long_texts(DATA / "long_answers.jsonl"), same)
    ours = long_texts(DATA / "paraphrases.jsonl", same=True) + long_texts(DATA / "traps.jsonl", same=False)
    result["stand-ins: paraphrases and traps"] = misjudged(ours, same)
    if PAIRS.exists():
        result["stand-ins: question pairs"] = misjudged(long_texts(PAIRS), same)
    write_json(out, result)


# -- separation ------------------------------------------------------------


def describe(cosines: Sequence[float]) -> Row:
    """Quantiles, and the share at or above each threshold."""
    values = np.asarray(cosines)
    return {
        "pairs": len(values),
        "quantiles": {str(q): round(float(np.quantile(values, q)), 4) for q in QUANTILES},
        "accepted": {str(t): round(float((values >= t).mean()), 4) for t in THRESHOLDS},
    }


def of_images(folder: Path, count: int, seed: int, encoder: TowerEncoder) -> Row:
    every = dict.fromkeys(("reencoded", "resized", "brightness", "shifted", "lookalike"), 1.0)
    generate(folder, Knobs(images=count, questions_per_image=1, questions_spread=0, **every), seed=seed)
    origin = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["val"]["images"]
    vectors = {name: encoder.encode((folder / "images" / f"{name}.jpg").read_bytes()) for name in origin}
    pairs: dict[str, list[float]] = defaultdict(list)
    for name, row in origin.items():
        if row["derivedFrom"]:
            pairs[row["variant"]].append(float(vectors[name] @ vectors[row["derivedFrom"]]))
    originals = np.stack([vectors[name] for name, row in origin.items() if not row["derivedFrom"]])
    pairs["other"] = list((originals @ originals.T)[~np.eye(len(originals), dtype=bool)])
    return {kind: describe(found) for kind, found in pairs.items()}


def of_questions(folder: Path, count: int, seed: int, encoder: SentenceEncoder) -> Row:
    generate(folder, Knobs(images=count, paraphrase=0.3, negative=0.3), seed=seed)
    origin = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["val"]["questions"]
    records = json.loads((folder / "val_balanced_questions.json").read_text(encoding="utf-8"))
    pairs: dict[str, dict[tuple[str, str], None]] = {"paraphrase": {}, "negative": {}}
    for name, row in origin.items():
        if row["variant"] in pairs and row["of"]:
            a, b = (normalise(records[key]["question"]) for key in (row["of"], name))
            if a != b:
                pairs[row["variant"]][a, b] = None
    vectors = {kind: [encoder.encode([pair[i] for pair in found]) for i in (0, 1)] for kind, found in pairs.items()}
    return {kind: describe(list(np.sum(a * b, axis=1))) for kind, (a, b) in vectors.items()}


@app.command
def separation(
    *,
    images: int = 150,
    seed: int = 3,
    checkpoint: Path = CHECKPOINT,
    grid: int = 6,
    layer: int = -2,
    index_encoder: str = DEFAULT_MODEL,
    out: Path | None = None,
) -> None:
    """Cosines of MiniGQA's pictures with near-duplicates and look-alikes, and of its questions with paraphrases and
    hard negatives: where to put the thresholds of an encoder.

    Args:
        checkpoint: a LLaVA checkpoint with a CLIP tower.
        grid: places on a side that the tower's output is pooled to.
        layer: of the tower.
    """
    tower, text = TowerEncoder(checkpoint, grid=grid, layer=layer), SentenceEncoder(index_encoder)
    with tempfile.TemporaryDirectory() as name:
        vision = {"encoder": checkpoint.name, "grid": grid, "layer": layer, "dim": tower.dim}
        vision["cosines"] = of_images(Path(name) / "images", images, seed, tower)
        words = {"encoder": index_encoder, "dim": text.dim}
        words["cosines"] = of_questions(Path(name) / "questions", images, seed, text)
    write_json(out, {"images": images, "seed": seed, "machine": machine(), "vision": vision, "text": words})


if __name__ == "__main__":
    app()
