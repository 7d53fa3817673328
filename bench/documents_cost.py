"""What `DocumentWorker` costs requests that name no documents: tokens a second, and the processor's time.

    python bench/documents_cost.py --out bench/results/h200/documents-cost.json           (nothing is stored)
    python bench/documents_cost.py --stores --out bench/results/h200/documents-cost-stores.json
    python bench/documents_cost.py --tiny --requests 8 --rounds 1 --kv-gib 0.1 --host-gib 1 --engines none documents

Engines with Qwen2.5-7B's shape and dummy weights in processes of their own, on one GPU, all up at once; only one works
at a time. In each round every arm gets new prompts, 64 at once, and each round has another order:

    none        no connector                 offloading  vLLM's OffloadingConnector
    semkv       `SemKVConnector`             documents   the same with `DocumentWorker`
    unhooked    the engine of ``documents`` with what it has for documents replaced by nothing
    timed       the same engine with a clock at each of these: what they took, divided by steps and by requests

Without ``--stores`` each request says ``max_offload_tokens: 0``, so that no arm stores a thing. With it all but
``none`` copy every prompt to host memory, and semkv also writes it to disk; a round waits for that outside of its time.
``against`` is the rate of an arm over that of another one in the same round: the median, the least and the most.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from common import Answer, Child, machine, options_of, wait_until_written, write_json
from positions import SHAPE, TINY, WORKER

from semkv_lab.local_engine import connector

PROMPT = 512
ANSWER = 64
AT_ONCE = 64
LIMIT_S = 300
DISK_BYTES = 8 << 30
QUIET_S = 0.3  # files that have not grown for so long are complete
ENGINES = ("none", "offloading", "semkv", "documents")
ARMS = {name: name for name in ENGINES} | {"unhooked": "documents", "timed": "documents"}
HOOKS = {
    "documents.Documents": (
        "on_new_request",
        "matched",
        "allocated",
        "take_orders",
        "arrived",
        "give_pictures",
        "used",
        "ended",
    ),
    "placement.Placement": ("begin", "finish", "take_news"),
}
AGAINST = (
    ("documents", "unhooked"),
    ("documents", "semkv"),
    ("documents", "none"),
    ("semkv", "none"),
    ("offloading", "none"),
)


class Engine:
    """One of `ENGINES`, with its scheduler and worker in this process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from transformers import Qwen2Config
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.folder = Path(spec["folder"])
        self.stores = spec["stores"]
        shape = TINY if spec["tiny"] else SHAPE
        self.words = int(shape["vocab_size"])
        Qwen2Config(**shape).save_pretrained(self.folder / "model")
        arguments = dict(spec["arguments"])
        if kv := self.transfer(spec["name"], spec["host_gib"] << 30):
            arguments["kv_transfer_config"] = KVTransferConfig(**kv)
        if spec["name"] == "documents":
            arguments["worker_cls"] = WORKER
        self.llm = LLM(
            model=str(self.folder / "model"),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=2048,
            max_num_seqs=AT_ONCE,
            gpu_memory_utilization=0.1,
            **arguments,
        )
        self.core: Any = self.llm.llm_engine.engine_core.engine_core
        if spec["name"] == "documents":
            documents = self.core.scheduler.connector._documents
            assert not documents.refused, documents.refused

    def transfer(self, name: str, host_bytes: int) -> dict[str, Any]:
        if name == "none":
            return {}
        if name == "offloading":
            return {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": host_bytes},
            }
        return connector(
            self.folder / "cache",
            host_bytes=host_bytes,
            max_bytes=DISK_BYTES,
            report_loads=False,
        )

    @contextmanager
    def unhooked(self) -> Iterator[None]:
        """Without what the scheduler and the worker have for documents."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        scheduler = self.core.scheduler.connector
        worker = get_kv_transfer_group()
        with (
            mock.patch.object(scheduler, "_documents", None),
            mock.patch.object(worker, "_placement", None),
        ):
            yield

    def round(self, arm: str, seed: int, count: int) -> dict[str, float]:
        """Answer ``count`` new prompts: tokens a second, prompts' included, and seconds of the processor."""
        from vllm import SamplingParams

        drawn = np.random.default_rng(seed).integers(10, self.words, (count, PROMPT))
        prompts: list[Any] = [{"prompt_token_ids": row.tolist()} for row in drawn]
        said = {} if self.stores else {"kv_transfer_params": {"max_offload_tokens": 0}}
        sampling = SamplingParams(
            temperature=0,
            max_tokens=ANSWER,
            ignore_eos=True,
            detokenize=False,
            extra_args=said,
        )
        spent: dict[str, float] = {}
        with ExitStack() as stack:
            if arm == "unhooked":
                stack.enter_context(self.unhooked())
            if arm == "timed":
                spent = stack.enter_context(timed_hooks())
            used = processor_s()
            begun = time.perf_counter()
            outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - begun
            used = processor_s() - used
            assert all(len(out.outputs[0].token_ids) == ANSWER for out in outputs)
            self.settle()
        found = {"per_s": count * (PROMPT + ANSWER) / seconds, "processor_s": used}
        if spent:
            found["hooks_us_a_step"] = 1e6 * spent["seconds"] / spent["steps"]
            found["hooks_us_a_request"] = 1e6 * spent["seconds"] / count
        return found

    def settle(self) -> None:
        """Until nothing is on its way to host memory or to the disk."""
        while self.core.scheduler.has_requests():
            self.core.step_fn()
            time.sleep(0.001)
        if self.stores:
            wait_until_written(self.folder, QUIET_S)


@contextmanager
def timed_hooks() -> Iterator[dict[str, float]]:
    """The seconds of all hooks of documents, and how many steps there were."""
    spent = {"seconds": 0.0, "steps": 0.0}

    def timed(hook: Callable[..., Any], steps: int) -> Callable[..., Any]:
        def longer(*args: Any, **fields: Any) -> Any:
            begun = time.perf_counter()
            result = hook(*args, **fields)
            spent["seconds"] += time.perf_counter() - begun
            spent["steps"] += steps
            return result

        return longer

    with ExitStack() as stack:
        for kind, names in HOOKS.items():
            owner = pkgutil.resolve_name(f"semkv_vllm.{kind}")
            for name in names:
                hook = timed(getattr(owner, name), int(name == "finish"))
                stack.enter_context(mock.patch.object(owner, name, hook))
        yield spent


def processor_s() -> float:
    """Of this process, without its children."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def obey(spec: dict[str, Any], answer: Answer) -> None:
    """An engine's process: one round for each command."""
    engine = Engine(spec)
    answer({"block_size": engine.core.vllm_config.cache_config.block_size})
    for line in sys.stdin:
        given = json.loads(line)
        answer(engine.round(given["arm"], given["seed"], given["count"]))


def started(options: argparse.Namespace, root: Path) -> dict[str, Child]:
    """All engines."""
    arguments: dict[str, Any] = {"kv_cache_memory_bytes": int(options.kv_gib * 2**30)}
    if options.tiny:
        arguments |= {"enforce_eager": True, "block_size": 32}
    children = {}
    for name in options.engines:
        (root / name).mkdir()
        spec = {
            "name": name,
            "folder": str(root / name),
            "arguments": arguments,
            "stores": options.stores,
            "tiny": options.tiny,
            "host_gib": options.host_gib,
        }
        alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        children[name] = Child(name, spec, options.logs / f"{name}.log", alone)
        if options.tiny:  # a small machine starts one after the other
            children[name].answer("start", LIMIT_S)
    if not options.tiny:
        for child in children.values():
            child.answer("start", LIMIT_S)
    return children


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    arms: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for arm in rounds[0]:
        for figure in rounds[0][arm]:
            arms[arm][figure] = spread([each[arm][figure] for each in rounds], 2)
    against = {}
    for one, other in AGAINST:
        if not rounds[0].keys() >= {one, other}:
            continue
        ratios = [each[one]["per_s"] / each[other]["per_s"] for each in rounds]
        against[f"{one} / {other}"] = spread(ratios, 4)
    return {"rounds": len(rounds), "arms": arms, "against": against}


def spread(values: list[float], digits: int) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), digits),
        "least": round(min(values), digits),
        "most": round(max(values), digits),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=128, help="of a round, 64 at once")
    parser.add_argument("--stores", action="store_true", help="prompts are stored")
    parser.add_argument("--kv-gib", type=float, default=6)
    parser.add_argument("--host-gib", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="a model for a CPU")
    options = options_of(parser, obey)
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        children = started(options, Path(folder))
        names = [arm for arm, engine in ARMS.items() if engine in children]
        for number in range(options.rounds + 1):
            found = {}
            first = number % len(names)
            order = names[first:] + names[:first]
            for arm in order[:: -1 if number % 2 else 1]:
                # Each arm has prompts that its engine has not seen.
                seed = len(ARMS) * number + names.index(arm)
                given = {"arm": arm, "seed": seed, "count": options.requests}
                found[arm] = children[ARMS[arm]].ask("round", LIMIT_S, **given)
            if number:  # the first compiles
                rounds.append(found)
        for child in children.values():
            child.close()
    result = {
        "machine": machine("vllm", "torch"),
        "stores": options.stores,
        "requests": options.requests,
        **summary(rounds),
    }
    print(result["arms"], result["against"], sep="\n", flush=True)
    write_json(options.out, result)


if __name__ == "__main__":
    main()
