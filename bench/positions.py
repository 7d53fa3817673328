"""Documents at another position: time to the first token against computing them and against vLLM's prefix cache.

    python bench/positions.py --out bench/results/h100/positions.json

One engine with a 7B shape and dummy weights (Qwen2.5-7B's), one request at a time. Documents of 1,024 tokens were
computed once, alone; a prompt has them in another order behind a system text. The arms take turns: everything is
computed; documents are reused with their first tokens computed again; the same prompt comes exactly from host memory;
vLLM's own prefix cache has all but the question. Dummy weights say nothing of answers: that the tokens are right is
shown by tests/test_positions.py.

``parts`` are of one more turn, in which the processor waits for the GPU at the end of each: the scheduler's plan; the
load, from its order to the end of the step in which it has come; moving and rotating; the pass over what is computed
again; the live check; and the rest, which is vLLM's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from common import machine, write_json

from semkv_lab.local_engine import connector

DOCUMENT = 1024
SYSTEM = 64
QUESTION = 32
MOST_DOCUMENTS = 30
NO_REUSE: dict[str, Any] = {"semkv": {"skip": True}}
WORKER = "semkv_vllm.worker.DocumentWorker"
SHAPE = {
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "bfloat16",
    "architectures": ["Qwen2ForCausalLM"],
}
TINY = SHAPE | {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "dtype": "float32",
}


class Engine:
    """vLLM with semkv's connector, and the documents that it has stored."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that its parts can be timed
        from transformers import Qwen2Config
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.shape = (TINY if options.tiny else SHAPE) | options.shape
        Qwen2Config(**self.shape).save_pretrained(scratch / "model")
        host_bytes = options.host_gib << 30
        kv = connector(scratch / "cache", host_bytes=host_bytes, document_tokens=0)
        block = {"block_size": options.block} if options.block else {}
        self.llm = LLM(
            model=str(scratch / "model"),
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=options.eager,
            max_model_len=MOST_DOCUMENTS * DOCUMENT + 2 * DOCUMENT,
            max_num_batched_tokens=options.batch,
            max_num_seqs=options.seqs,
            kv_cache_memory_bytes=options.kv_gib << 30,
            gpu_memory_utilization=0.1,
            worker_cls=WORKER,
            kv_transfer_config=KVTransferConfig(**kv),
            **block,
        )
        self._random = np.random.default_rng(4)
        self.system = self.drawn(SYSTEM)
        self.question = self.drawn(QUESTION)
        self.documents = [self.drawn(DOCUMENT) for _ in range(MOST_DOCUMENTS)]
        for document in self.documents:
            self.ask(document)
        self.settle()

    def drawn(self, count: int) -> list[int]:
        high = int(self.shape["vocab_size"])
        return [int(token) for token in self._random.integers(10, high, count)]

    def prompt(self, count: int, system: list[int]) -> list[int]:
        """So many documents in some order, behind a system text and before the question."""
        order = self._random.permutation(MOST_DOCUMENTS)
        tokens = [token for number in order[:count] for token in self.documents[number]]
        return [*system, *tokens, *self.question]

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    def settle(self) -> None:
        """Until nothing is on its way to host memory."""
        while self.core.scheduler.has_requests():
            self.core.step_fn()
            time.sleep(0.001)

    def described(self) -> dict[str, Any]:
        """What a result says of the machine and the engine."""
        return {
            "machine": machine("vllm", "torch"),
            "shape": self.shape,
            "engine": self.told,
        }

    @property
    def told(self) -> dict[str, Any]:
        """Why nothing is reused, how tokens are moved, of which sizes CUDA graphs were used, and what went wrong."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = self.core.scheduler.connector
        placement = get_kv_transfer_group()._placement
        layers = placement._layers
        repair = placement._repair
        counters = connector.shared.counters
        return {
            "refused": connector._documents.refused,
            "moved_by": "torch" if layers is None or layers.fused is None else "one kernel",
            "graphs": sorted(repair._proven) if repair is not None else [],
            "block_size": connector._documents._block,
            "errors": counters["errors"],
            "mismatches": counters["document_mismatches"],
        }

    def sampling(self, said: dict[str, Any] | None, tokens: int = 1) -> Any:
        """For an answer of so many tokens, each told when it is there."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=0,
            max_tokens=tokens,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": said} if said else None,
        )

    def ask(
        self,
        tokens: list[int],
        said: dict[str, Any] | None = None,
        *,
        salt: str = "",
    ) -> dict[str, Any]:
        """One answer of one token: milliseconds, and what the connector says of it.

        Blocks that were stored with one salt are not found with another.
        """
        prompt: dict[str, Any] = {"prompt_token_ids": tokens}
        if salt:
            prompt["cache_salt"] = salt
        sampling = self.sampling(said)
        start = time.perf_counter()
        (output,) = self.llm.generate([prompt], sampling, use_tqdm=False)
        milliseconds = 1e3 * (time.perf_counter() - start)
        told = (output.kv_transfer_params or {}).get("semkv") or {}
        return {"ms": milliseconds, "cached": output.num_cached_tokens, **told}

    def forget(self) -> None:
        """Leave vLLM's prefix cache with nothing but the system text."""
        self.settle()
        assert self.llm.reset_prefix_cache()
        self.ask(self.system)


def reuse(count: int, repair: int) -> dict[str, Any]:
    """What a request says whose documents are reused: they stand behind a system text.

    What is stored of the prompt itself would be found first, exactly. So nothing is.
    """
    begins = [SYSTEM + DOCUMENT * place for place in range(count)]
    spans = [[begin, begin + DOCUMENT] for begin in begins]
    return {"semkv": {"spans": spans, "repair": repair}, "max_offload_tokens": 0}


def measured(engine: Engine, count: int, repairs: list[int], repeats: int) -> dict[str, Any]:
    """One number of documents: the arms in turns, each after the prefix cache was emptied."""
    prompt = engine.prompt(count, engine.system)
    arms = {"computed": NO_REUSE}
    arms |= {f"first {repair} again": reuse(count, repair) for repair in repairs}
    others = ["host memory", "prefix cache"]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in [*arms, *others]}
    for turn in range(repeats + 1):
        for name, asked in arms.items():
            engine.forget()
            answer = engine.ask(prompt, asked)
            if turn:  # the first compiles
                found[name].append(answer)
        engine.forget()
        engine.ask(prompt[:-QUESTION], salt=f"prefix {count}")
        in_gpu = engine.ask(prompt, salt=f"prefix {count}")
        engine.forget()
        in_host = engine.ask(prompt, salt=f"prefix {count}")
        if turn:
            found["prefix cache"].append(in_gpu)
            found["host memory"].append(in_host)
    rows = {name: summary(answers) for name, answers in found.items()}
    for row in rows.values():
        row["times_as_fast"] = round(rows["computed"]["ms"] / row["ms"], 2)
    for name, asked in arms.items():
        if name != "computed":
            engine.forget()
            rows[name]["parts"] = parts_of(partial(engine.ask, prompt, asked))
    return {"tokens": count * DOCUMENT, "documents": count, "arms": rows}


def parts_of(ask: Callable[[], dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of each part of a request; see the module."""
    from semkv_vllm.documents import Documents
    from semkv_vllm.gate import Layers
    from semkv_vllm.placement import Placement
    from semkv_vllm.repair import Repair

    spent = Counter[str]()
    marks: dict[str, float] = {}
    hooks = [
        (Documents, "on_new_request", "plan"),
        (Documents, "matched", "plan"),
        (Documents, "allocated", "plan"),
        (Placement, "_moved", ""),
        (Placement, "_passes", "tables"),
        (Layers, "move", "move"),
        (Repair, "run", "repair"),
        (Placement, "_is_right", "check"),
    ]
    with ExitStack() as stack:
        for kind, name, part in hooks:
            stack.enter_context(timed(kind, name, part, spent, marks))
        answer = ask()
    spent["load"] = marks.get("_moved begins", 0.0) - marks.get("allocated ends", 0.0)
    spent["rest"] = answer["ms"] - sum(spent.values())
    return {name: round(value, 2) for name, value in spent.items()}


@contextmanager
def timed(
    kind: type,
    name: str,
    part: str,
    spent: Counter[str],
    marks: dict[str, float],
) -> Iterator[None]:
    """Add up how long a method takes, the GPU's work included, as a part; and note when it first began and ended."""
    import torch

    method = getattr(kind, name)
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def longer(*args: Any, **fields: Any) -> Any:
        begun = time.perf_counter()
        marks.setdefault(f"{name} begins", 1e3 * begun)
        if part not in ("plan", ""):
            wait()
            begun = time.perf_counter()
        result = method(*args, **fields)
        if part not in ("plan", ""):
            wait()
        ended = time.perf_counter()
        marks.setdefault(f"{name} ends", 1e3 * ended)
        if part:
            spent[part] += 1e3 * (ended - begun)
        return result

    with mock.patch.object(kind, name, longer):
        yield


def summary(answers: list[dict[str, Any]]) -> dict[str, Any]:
    times = [answer["ms"] for answer in answers]
    last = {name: value for name, value in answers[-1].items() if name != "ms"}
    return {
        "ms": round(statistics.median(times), 2),
        "least_ms": round(min(times), 2),
        "all_ms": [round(value, 2) for value in times],
        **last,
    }


def engine_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """What `Engine` needs, and where the result goes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--batch", type=int, default=16384, help="max_num_batched_tokens")
    parser.add_argument(
        "--seqs", type=int, default=256, help="max_num_seqs; twice as many tokens have CUDA graphs"
    )
    parser.add_argument("--host-gib", type=int, default=8)
    parser.add_argument("--kv-gib", type=int, default=16)
    parser.add_argument("--block", type=int, help="tokens of a KV block; vLLM's choice by default")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON: what differs in it")
    parser.add_argument("--out", type=Path)
    parser.set_defaults(**defaults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, nargs="+", default=[2, 8, 16, 30])
    parser.add_argument("--repair", type=int, nargs="+", default=[0, 32, 128])
    parser.add_argument("--repeats", type=int, default=5)
    engine_options(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        engine = Engine(options, Path(scratch))
        rows = []
        for count in options.documents:
            row = measured(engine, count, options.repair, options.repeats)
            rows.append(row)
            line = ", ".join(f"{name} {arm['ms']} ms" for name, arm in row["arms"].items())
            print(f"{row['tokens']} tokens: {line}", flush=True)
            for name, arm in row["arms"].items():
                if "parts" in arm:
                    print(f"    {name}: {arm['parts']}", flush=True)
            result = {
                **engine.described(),
                "options": {name: str(value) for name, value in vars(options).items()},
                "measured": rows,
            }
            write_json(options.out, result)


if __name__ == "__main__":
    main()
