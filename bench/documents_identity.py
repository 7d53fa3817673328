"""Documents at another position in a model with random weights: how far from the computed answer?

    python bench/documents_identity.py pictures --out documents-pictures.json       (Qwen3-VL-2B's shape, on a GPU)
    python bench/documents_identity.py text --ranks 2 --out documents-identity-tp2.json    (Qwen2.5-1.5B's, two GPUs)
    python bench/documents_identity.py pictures --tiny --out /tmp/documents-pictures.json               (on a CPU)

A prompt is a text, documents that were computed alone, in another order, and a question. With ``pictures`` two of the
documents begin with a picture, and every other prompt has one more picture in front that is part of no document.
Of the log-probabilities of the first token it is said how far they are from those of the computed prompt: where it is
computed once more; where vLLM's prefix cache has all but the end; where documents were moved and then all of it was
computed again, and where each load fails (one rank only: these are planted in this process); and with some first tokens
of each computed again.
Random weights say nothing of quality. In bfloat16 the second row is the measure for the third.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from common import ROOT, machine, write_json
from models import draw_picture, write_shape, write_weights
from quality import WORKER, differences

from semkv_lab.local_engine import all_computed_again, connector

sys.path.insert(0, str(ROOT / "tests"))
import tiny_models

DOCUMENTS = 6
SYSTEM = 64
QUESTION = 32
VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
TEXT = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "max_position_embeddings": 8192, "rope_theta": 1e6, "vocab_size": 4096,
}  # fmt: skip
TINY_TEXT = TEXT | {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


class Prompts:
    """Texts and pictures of one model."""

    def __init__(self, options: argparse.Namespace, tokenizer: Any) -> None:
        self._draws = np.random.default_rng(options.seed)
        self._size = options.words
        self._side = options.side
        self._marks = [tokenizer.convert_tokens_to_ids(name) for name in VISION]
        self._rows = 1  # tokens of a picture, once `learn` was called
        self.pictures: dict[tuple[int, ...], list[int]] = {}  # by the beginning of a text

    def learn(self, output: Any) -> None:
        """How many tokens a picture has, from an answer to a prompt with one."""
        self._rows = list(output.prompt_token_ids).count(self._marks[1])

    def words(self, count: int) -> list[int]:
        return [int(token) for token in self._draws.integers(300, 400, count)]

    def document(self, picture: int | None) -> list[int]:
        """A text, behind a picture where one is named."""
        seen = [] if picture is None else self.picture(picture)
        return [*seen, *self.words(self._size)]

    def picture(self, number: int) -> list[int]:
        """A picture's tokens, with its number as the token behind it."""
        begin, pad, end = self._marks
        return [begin, *[pad] * self._rows, end, 300 + number]

    def asked(self, ids: list[int]) -> dict[str, Any]:
        """As a client says it: one mark for each picture."""
        short: list[int] = []
        numbers = []
        _, pad, end = self._marks
        for token, same in groupby(ids):
            short += [token] if token == pad else list(same)
        for place, token in enumerate(short[:-1]):
            if token == end:
                numbers.append(short[place + 1] - 300)
        prompt: dict[str, Any] = {"prompt_token_ids": short}
        if numbers:
            drawn = [draw_picture(number, self._side, self._side) for number in numbers]
            prompt["multi_modal_data"] = {"image": drawn}
        return prompt


def write_model(options: argparse.Namespace, folder: Path) -> None:
    """The configuration, tokenizer and weights."""
    if options.model == "pictures":
        write_shape(folder, "tiny" if options.tiny else "qwen3-vl-2b")
    else:
        from transformers import Qwen2Config

        tiny_models.tokenizer(folder, list(VISION))
        shape = TINY_TEXT if options.tiny else TEXT
        config = Qwen2Config(
            **shape,
            bos_token_id=0,
            eos_token_id=1,
            architectures=["Qwen2ForCausalLM"],
        )
        config.save_pretrained(folder)
    write_weights(folder)


class Engine:
    """vLLM with semkv's connector, in this process but for further ranks."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        write_model(options, scratch / "model")
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        self._sampling = SamplingParams
        host_bytes = options.host_mib << 20
        kv = connector(scratch / "cache", host_bytes=host_bytes, document_tokens=0)
        pictures = {"limit_mm_per_prompt": {"image": 3, "video": 0}}
        self.llm = LLM(
            model=str(scratch / "model"),
            max_model_len=8192,
            worker_cls=WORKER,
            dtype="float32" if options.tiny else "bfloat16",
            tensor_parallel_size=options.ranks,
            enforce_eager=options.eager or options.tiny,
            max_num_batched_tokens=8192,
            max_num_seqs=options.seqs,
            kv_cache_memory_bytes=options.kv_mib << 20,
            gpu_memory_utilization=0.1,
            kv_transfer_config=KVTransferConfig(**kv),
            **(pictures if options.model == "pictures" else {}),
        )
        self.prompts = Prompts(options, self.llm.get_tokenizer())
        if options.model == "pictures":
            (first,) = self.ask(self.prompts.picture(0), {"semkv": {"skip": True}})
            self.prompts.learn(first)

    @property
    def _core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def told(self) -> dict[str, Any]:
        """Why nothing is reused, and what went wrong."""
        connector = self._core.scheduler.connector
        documents = connector._documents
        counters = connector.shared.counters
        return {
            "graphs": self._graphs(),
            "refused": "the connector refuses this engine"
            if documents is None
            else documents.refused,
            "errors": counters["errors"],
            "mismatches": counters["document_mismatches"],
            "model_runner_v2": self._core.vllm_config.use_v2_model_runner,
            "async_scheduling": self._core.vllm_config.scheduler_config.async_scheduling,
        }

    def _graphs(self) -> list[int]:
        """Of which sizes CUDA graphs have repaired documents; of ranks in other processes it is not known."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        if not has_kv_transfer_group():
            return []
        repair = get_kv_transfer_group()._placement._repair
        return [] if repair is None else sorted(repair._proven)

    def ask(self, ids: list[int], said: dict[str, Any]) -> list[Any]:
        sampling = self._sampling(
            temperature=0,
            max_tokens=1,
            ignore_eos=True,
            logprobs=20,
            extra_args={"kv_transfer_params": said},
        )
        return list(self.llm.generate([self.prompts.asked(ids)], sampling, use_tqdm=False))

    def forget(self) -> None:
        """Empty vLLM's caches, once nothing is on its way to host memory."""
        while self._core.scheduler.has_requests():
            self._core.step_fn()
            time.sleep(0.001)
        assert self.llm.reset_prefix_cache()


def measured(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """By arm, how far from the computed answers."""
    prompts = engine.prompts
    has_pictures = options.model == "pictures"
    pictures = [0, 1] if has_pictures else []
    documents = [
        prompts.document(number if number in pictures else None) for number in range(DOCUMENTS)
    ]
    for document in documents:
        engine.ask(document, {})
    engine.forget()
    draws = np.random.default_rng(options.seed + 1)
    cases = []
    for number in range(options.prompts):
        ids = prompts.words(SYSTEM)
        if has_pictures and number % 2:
            ids = prompts.picture(2) + ids
        spans = []
        for place in draws.permutation(DOCUMENTS):
            spans.append([len(ids), len(ids) + len(documents[place])])
            ids = ids + documents[place]
        cases.append((ids + prompts.words(QUESTION), spans))

    def answers(repair: int | None, *, again: bool = False) -> list[Any]:
        found = []
        for ids, spans in cases:
            said: dict[str, Any] = {"semkv": {"skip": True}}
            if repair is not None:
                said = {"semkv": {"spans": spans, "repair": repair}, "max_offload_tokens": 0}
            engine.forget()
            for _ in range(1 + again):
                output = engine.ask(ids, said)
            found += output
        return found

    computed = answers(None)
    rows = {
        "computed again": differences(answers(None), computed),
        "prefix cache": differences(answers(None, again=True), computed),
    }
    if options.ranks == 1:
        from semkv_vllm.gate import Layers

        with all_computed_again():
            moved = answers(0)
        rows["moved, then all computed again"] = differences(moved, computed)
        with mock.patch.object(Layers, "move", side_effect=ValueError("planted")):
            failed = answers(0)
        rows["each load fails"] = differences(failed, computed)
    for repair in (0, 32, 128):
        rows[f"first {repair} again"] = differences(answers(repair), computed)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=("pictures", "text"))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--words", type=int, default=256, help="of a document")
    parser.add_argument("--side", type=int, default=512, help="pixels of a picture")
    parser.add_argument(
        "--seqs", type=int, default=8, help="max_num_seqs; twice as many tokens have CUDA graphs"
    )
    parser.add_argument("--host-mib", type=int, default=4096)
    parser.add_argument("--kv-mib", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU, in float32")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        engine = Engine(options, Path(scratch))
        refused = engine.told["refused"]
        rows = {} if refused else measured(engine, options)
        told = engine.told
    found = {
        "machine": machine("vllm", "torch", "transformers"),
        "options": {name: str(value) for name, value in vars(options).items()},
        "engine": told,
        "arms": rows,
    }
    write_json(options.out, found)
    print(json.dumps(rows | told, indent=1), flush=True)
    os._exit(1 if refused else 0)  # threads of engines may hang at an exit


if __name__ == "__main__":
    main()
