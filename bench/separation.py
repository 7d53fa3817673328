"""How well the encoders tell what may stand in for a request from what may not; prints JSON.

Images: cosines of a picture with a near-duplicate of it (encoded again, resized, brightened, shifted by a pixel), with
a look-alike (the same scene, one object in another colour) and with other pictures. Questions: cosines of a question
with its paraphrase, and with a hard negative (the same sentence with another argument). All from MiniGQA.

    python bench/separation.py --images 150 --seed 3 > bench/results/separation.json
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from semkv.encoders.text import DEFAULT_MODEL, SentenceEncoder
from semkv.encoders.vision import TowerEncoder
from semkv.keys import normalise
from semkv_lab.minigqa.generate import Knobs, generate

CHECKPOINT = Path(__file__).parents[1] / "src" / "semkv" / "assets" / "minigqa-vlm"
QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
THRESHOLDS = (0.8, 0.85, 0.9, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.992, 0.993, 0.994, 0.995, 0.996, 0.997)


def describe(cosines: Sequence[float]) -> dict[str, Any]:
    """Quantiles, and the share at or above each threshold."""
    values = np.asarray(cosines)
    return {
        "pairs": len(values),
        "quantiles": {str(q): round(float(np.quantile(values, q)), 4) for q in QUANTILES},
        "accepted": {str(t): round(float((values >= t).mean()), 4) for t in THRESHOLDS},
    }


def images(folder: Path, count: int, seed: int, encoder: TowerEncoder) -> dict[str, Any]:
    every = dict.fromkeys(("reencoded", "resized", "brightness", "shifted", "lookalike"), 1.0)
    generate(folder, Knobs(images=count, questions_per_image=1, questions_spread=0, **every), seed=seed)
    origin = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["val"]["images"]
    vectors = {name: encoder.encode((folder / "images" / f"{name}.jpg").read_bytes()) for name in origin}
    pairs: dict[str, list[float]] = {}
    for name, row in origin.items():
        if row["derivedFrom"]:
            pairs.setdefault(row["variant"], []).append(float(vectors[name] @ vectors[row["derivedFrom"]]))
    originals = np.stack([vectors[name] for name, row in origin.items() if not row["derivedFrom"]])
    cosines = originals @ originals.T
    pairs["other"] = list(cosines[~np.eye(len(originals), dtype=bool)])
    return {kind: describe(found) for kind, found in pairs.items()}


def questions(folder: Path, count: int, seed: int, encoder: SentenceEncoder) -> dict[str, Any]:
    generate(folder, Knobs(images=count, paraphrase=0.3, negative=0.3), seed=seed)
    origin = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["val"]["questions"]
    records = json.loads((folder / "val_balanced_questions.json").read_text(encoding="utf-8"))
    pairs: dict[str, dict[tuple[str, str], None]] = {"paraphrase": {}, "negative": {}}
    for name, row in origin.items():
        if row["variant"] in pairs and row["of"]:
            first, second = records[row["of"]], records[name]
            a, b = normalise(first["question"]), normalise(second["question"])
            if a != b:
                pairs[row["variant"]][(a, b)] = None
    found = {}
    for kind, members in pairs.items():
        a, b = (encoder.encode([pair[i] for pair in members]) for i in (0, 1))
        found[kind] = describe(list(np.sum(a * b, axis=1)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--images", type=int, default=150)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="a LLaVA checkpoint with a CLIP tower")
    parser.add_argument("--grid", type=int, default=6)
    parser.add_argument("--layer", type=int, default=-2)
    parser.add_argument("--index-encoder", default=DEFAULT_MODEL)
    options = parser.parse_args()
    tower = TowerEncoder(options.checkpoint, grid=options.grid, layer=options.layer)
    text = SentenceEncoder(options.index_encoder)
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "images": options.images,
            "seed": options.seed,
            "machine": platform.machine(),
            "vision": {
                "encoder": options.checkpoint.name,
                "grid": options.grid,
                "layer": options.layer,
                "dim": tower.dim,
            },
            "text": {"encoder": options.index_encoder, "dim": text.dim},
        }
        result["vision"] |= {"cosines": images(Path(folder) / "images", options.images, options.seed, tower)}
        result["text"] |= {"cosines": questions(Path(folder) / "questions", options.images, options.seed, text)}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
