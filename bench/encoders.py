"""Ways to run the sentence encoder on one core, side by side: time by number of texts, and how far vectors differ.

    python bench/encoders.py --out encoders.json

``sentence-transformers`` is the library's own way. ``compiled`` is the same BERT through torch.compile. ``onnx`` is
semkv's: the same in float32 through ONNX Runtime. All have one thread and the same tokens; they take turns. Times are
of the process's processor, in milliseconds a pass, the least and the median of the rounds. ``pairs`` says whether
semkv's vectors give all pairs of ``bench/data`` the same verdict by cosine as the library's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, machine, write_json

from semkv.encoders.library import LibraryModel
from semkv.encoders.text import DEFAULT_MODEL, load_model, resolve_model

Encode = Callable[[list[str]], Any]
TEXTS = (
    "What is the capital of {}, and since when has it been one?",
    "How do I get from {} to the airport without a car?",
    "Who wrote the novel about {} that was made into a film?",
    "Explain the difference between {} and a republic in two sentences.",
)
PLACES = "France Chile Norway Kenya Japan Canada Egypt Peru Nepal Ghana".split()
COUNTS = (1, 2, 8)
THRESHOLDS = (0.3, 0.88, 0.9, 0.92)  # those by which something is decided


def texts_of(count: int, turn: int) -> list[str]:
    """Texts of about 16 tokens."""
    numbers = range(turn, turn + count)
    return [TEXTS[n % len(TEXTS)].format(PLACES[n % len(PLACES)]) + f" {n}" for n in numbers]


def of_bert(model: Any, run: Callable[[dict[str, Any]], Any]) -> Encode:
    """A way that runs BERT by itself: the library makes tokens of texts, and vectors of states."""
    import torch

    def encode(texts: list[str]) -> Any:
        with torch.inference_mode():
            features = model.preprocess(list(texts))
            features["token_embeddings"] = run(features)
            for module in list(model)[1:]:
                features = module(features)
            return features["sentence_embedding"].numpy()

    return encode


def compiled(model: Any) -> Encode:
    import torch

    bert = torch.compile(model[0].auto_model, dynamic=True)
    names = ("input_ids", "attention_mask", "token_type_ids")
    return of_bert(
        model,
        lambda features: bert(**{name: features[name] for name in names}).last_hidden_state,
    )


def ways() -> dict[str, Encode]:
    path = resolve_model(DEFAULT_MODEL)
    library = LibraryModel("--model", path)
    model = library._model
    model[0].auto_model.eval()
    return {
        "sentence-transformers": library.encode,
        "compiled": compiled(model),
        "onnx": load_model(path, "cpu").encode,
    }


def pairs_of_data() -> list[tuple[str, str]]:
    """All pairs of texts in ``bench/data``."""
    found = []
    for file in sorted((ROOT / "bench" / "data").rglob("*.jsonl")):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if isinstance(row.get("a"), str) and isinstance(row.get("b"), str):
                found.append((row["a"], row["b"]))
    return found


def compared(plain: Encode, own: Encode) -> dict[str, Any]:
    """How far the cosines of all pairs are from the library's, and on how many pairs a threshold decides otherwise."""
    pairs = pairs_of_data()
    texts = sorted({text for pair in pairs for text in pair})
    place = {text: row for row, text in enumerate(texts)}
    cosines = []
    for encode in (plain, own):
        vectors = encode(texts)
        cosines.append(np.array([vectors[place[a]] @ vectors[place[b]] for a, b in pairs]))
    first, second = cosines
    return {
        "pairs": len(pairs),
        "cosines_differ_by": float(np.abs(first - second).max()),
        "other_verdicts": {
            str(least): int(((first >= least) != (second >= least)).sum()) for least in THRESHOLDS
        },
    }


def measured(there: dict[str, Encode], rounds: int) -> dict[str, Any]:
    """By way: milliseconds by number of texts, and the largest difference of a number from the library's own."""
    found: dict[str, Any] = {}
    plain = there["sentence-transformers"]
    for name, encode in there.items():
        for count in COUNTS:
            encode(texts_of(count, 0))  # what a first call loads or compiles
        print(f"{name} is ready", flush=True)
        apart = np.abs(encode(texts_of(8, 0)) - plain(texts_of(8, 0))).max()
        found[name] = {"differs_by": float(apart), "ms": {count: [] for count in COUNTS}}
    for turn in range(rounds):
        for count in COUNTS:
            texts = texts_of(count, turn)
            for name, encode in there.items():
                start = time.process_time()
                encode(texts)
                found[name]["ms"][count].append(1e3 * (time.process_time() - start))
    for row in found.values():
        row["ms"] = {
            str(count): {
                "least": round(min(times), 2),
                "median": round(statistics.median(times), 2),
            }
            for count, times in row["ms"].items()
        }
    return found


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = machine("torch", "sentence-transformers", "onnxruntime")
    there = ways()
    found = measured(there, options.rounds)
    for name, row in found.items():
        print(name, row)
    same = compared(there["sentence-transformers"], there["onnx"])
    print(same)
    write_json(options.out, {"machine": before, "threads": 1, "ways": found, "pairs": same})


if __name__ == "__main__":
    main()
