"""Ways to run the sentence encoder on one core, side by side: time by number of texts, and how far vectors differ.

    .venv/bin/python -m pip install --no-deps --target /tmp/onnx onnxruntime onnx ml_dtypes flatbuffers
    PYTHONPATH=/tmp/onnx python bench/encoders.py --out bench/results/cpu/encoders.json

``sentence-transformers`` is the library's own way. ``short`` is `semkv.encoders.text.ShortBert`, the default.
``compiled`` is the same BERT through torch.compile, ``onnx`` the same in float32 through ONNX Runtime. A way that is
not installed is left out. All have one thread and the same tokens; they take turns. Times are of the process's
processor, in milliseconds a pass, the least and the median of the rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, write_json

from semkv.encoders.text import (
    DEFAULT_MODEL,
    ShortBert,
    encode_batch,
    load_sentence_transformer,
    resolve_model,
)

Encode = Callable[[list[str]], Any]
TEXTS = (
    "What is the capital of {}, and since when has it been one?",
    "How do I get from {} to the airport without a car?",
    "Who wrote the novel about {} that was made into a film?",
    "Explain the difference between {} and a republic in two sentences.",
)
PLACES = "France Chile Norway Kenya Japan Canada Egypt Peru Nepal Ghana".split()
COUNTS = (1, 2, 8)


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


def onnx(model: Any) -> Encode:
    import onnxruntime
    import torch

    class Plain(torch.nn.Module):  # by position, and one tensor back, as the exporter wants it
        def __init__(self) -> None:
            super().__init__()
            self.bert = model[0].auto_model

        def forward(self, ids: Any, there: Any, kinds: Any) -> Any:
            found = self.bert(input_ids=ids, attention_mask=there, token_type_ids=kinds)
            return found.last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    example = model.preprocess(["one text", "another text that is longer"])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = Path(folder) / "model.onnx"
        torch.onnx.export(
            Plain(),
            tuple(example[name] for name in names),
            file,
            input_names=names,
            output_names=["states"],
            dynamic_axes={name: {0: "texts", 1: "tokens"} for name in [*names, "states"]},
            dynamo=False,
        )
        session = onnxruntime.InferenceSession(str(file), options)

    def run(features: dict[str, Any]) -> Any:
        given = {name: features[name].numpy() for name in names}
        return torch.from_numpy(session.run(None, given)[0])

    return of_bert(model, run)


def ways() -> dict[str, Encode]:
    model = load_sentence_transformer("--model", resolve_model(DEFAULT_MODEL))
    model[0].auto_model.eval()
    found: dict[str, Encode] = {
        "sentence-transformers": lambda texts: encode_batch(model, texts),
        "short": ShortBert(model).encode,
        "compiled": compiled(model),
    }
    if importlib.util.find_spec("onnxruntime") is not None:
        found["onnx"] = onnx(model)
    return found


def measured(rounds: int) -> dict[str, Any]:
    """By way: milliseconds by number of texts, and the largest difference of a number from the library's own."""
    found: dict[str, Any] = {}
    there = ways()
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
    found = measured(options.rounds)
    for name, row in found.items():
        print(name, row)
    write_json(options.out, {"machine": before, "threads": 1, "ways": found})


if __name__ == "__main__":
    main()
