"""Engines with the KV connector, in processes of their own.

A test calls `in_child` with a function of its module. The function runs in a new Python, so that what an engine leaves
behind in a process (threads, imports, a crash) does not reach the next test. Arguments and result travel as JSON.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from semkv.connectors.outcome import read_outcome

BLOCK = 32
HYBRID = {"block_size": None, "max_num_batched_tokens": 256}
"""For models with Mamba or linear attention: vLLM finds the size of a page, and steps end where pages do."""

Answer = dict[str, Any]
"""What came for one prompt: tokens, the two best tokens and their gap at each place, and what was loaded."""


# ---------------------------------------------------------------------- the test's side


def in_child(function: Callable[..., Any], *args: Any, timeout: float = 580) -> Any:
    """What a function of a test module returns in a new process; fails with the process's output if it ends badly."""
    pytest.importorskip("vllm")
    with child(json.dumps([function.__module__, function.__name__, args], default=str)) as process:
        try:
            said, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0, f"exit status {process.returncode}\n{said[-2000:]}\n{errors[-6000:]}"
    return json.loads(said.rpartition("RESULT ")[2].splitlines()[0])


def child(job: str, errors: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """A process that does a job: a module, the name of a function in it and its arguments, as JSON."""
    here = str(Path(__file__).parent)
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler lives in the child, where it can be looked at
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([here, *filter(None, sys.path)]),
    }
    command = [sys.executable, str(Path(__file__).resolve()), job]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
    )


def differs(answer: Answer, reference: Answer, tie: float = 1e-3) -> str:
    """Why an answer is not the reference's, or nothing.

    Where the reference's two best tokens are a tie, either is right, and what follows them is not compared: a step
    that loads computes fewer tokens at once than one that does not, which rounds in another way.
    """
    for at, (own, other) in enumerate(zip(answer["tokens"], reference["tokens"], strict=False)):
        if own != other:
            near = own in reference["best"][at] and reference["gaps"][at] < tie
            return "" if near else f"token {at}: {own} for {other}, gap {reference['gaps'][at]}"
    if len(answer["tokens"]) != len(reference["tokens"]):
        return f"{len(answer['tokens'])} tokens for {len(reference['tokens'])}"
    return ""


def gap_change(answer: Answer, reference: Answer) -> float:
    """By how much the gap between the two best tokens changed, at most, over the places before a first difference."""
    changes = [0.0]
    columns = (answer["tokens"], reference["tokens"], answer["gaps"], reference["gaps"])
    for own, other, gap, reference_gap in zip(*columns, strict=False):
        if own != other:
            break
        changes.append(abs(gap - reference_gap))
    return max(changes)


# ---------------------------------------------------------------------- the child's side


def connector(cache_dir: Path | str, **extra: Any) -> dict[str, Any]:
    """The configuration of one SemKVConnector over a directory, as ``--kv-transfer-config`` takes it."""
    settings = {"cache_dir": str(cache_dir), "host_bytes": 64 << 20, "break_even": False, **extra}
    return {"kv_connector": "SemKVConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}


def several(*connectors: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A MultiConnector over some connectors."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
        **fields,
    }


class Engine:
    """A tiny vLLM in this process, with or without a KV connector."""

    def __init__(self, model: Path | str, kv: dict[str, Any] | None = None, **args: Any) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        split_mamba_steps()
        spare_modules()
        usual = {
            "max_model_len": 1024, "dtype": "float32", "enforce_eager": True, "block_size": BLOCK, "max_num_seqs": 8,
            "kv_cache_memory_bytes": 1 << 26, "enable_prefix_caching": True, "disable_log_stats": False, "seed": 0,
        }  # fmt: skip
        args = {name: value for name, value in (usual | args).items() if value is not None}
        self.llm = LLM(str(model), kv_transfer_config=KVTransferConfig(**kv) if kv else None, **args)

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def page(self) -> int:
        """How many tokens a block of the coarsest KV cache group holds: prompts are loaded in multiples of it."""
        return max(g.kv_cache_spec.block_size for g in self.scheduler.kv_cache_config.kv_cache_groups)

    def connectors(self) -> list[Any]:
        """The connectors that offload, below a MultiConnector too."""
        top = self.scheduler.connector
        return [c for c in getattr(top, "_connectors", [top]) if getattr(c, "connector_scheduler", None) is not None]

    def outputs(self, prompts: Sequence[Any], tokens: int = 16, lora: Any = None, **sampling: Any) -> list[Any]:
        """vLLM's outputs for prompts that are asked together; greedy unless told otherwise."""
        from vllm import SamplingParams

        usual = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 2}
        params = SamplingParams(**(usual | sampling))
        return list(self.llm.generate(list(prompts), params, use_tqdm=False, lora_request=lora))

    def ask(self, prompts: Iterable[Any], tokens: int = 16, **fields: Any) -> list[Answer]:
        """The answers to prompts, asked one after another."""
        return [answered(self.outputs([prompt], tokens, **fields)[0]) for prompt in prompts]

    def settle(self) -> None:
        """Step until nothing is under way between the engine and its stores.

        A server's loop does so by itself; an engine in this process stands still after its last answer.
        """
        until = time.monotonic() + 300
        while self.scheduler.has_requests():
            assert time.monotonic() < until, "stores and loads do not end"
            self.core.step_fn()
            time.sleep(0.001)

    def forget(self, *, host: bool = False) -> None:
        """Drop vLLM's own copies and, unless told to leave host memory, those there: only the disk remains."""
        self.settle()
        assert self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()
        if not host:
            for own in self.connectors():
                own.connector_scheduler.reset_cache()
            self.settle()

    def left(self) -> dict[str, int]:
        """What is left in the scheduler and the connectors when every request has ended: nothing, if all is well."""
        self.settle()
        halves = [c.connector_scheduler for c in self.connectors()]
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "requests": len(self.scheduler.requests) + sum(len(h._req_status) for h in halves),
            "jobs": sum(len(h._jobs) for h in halves),
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),  # one is never lent
        }

    def count_preemptions(self) -> list[str]:
        """A list that gets the name of every request that is preempted from now on."""
        seen: list[str] = []
        preempt = self.scheduler._preempt_request

        def counted(request: Any, *args: Any, **fields: Any) -> Any:
            seen.append(request.request_id)
            return preempt(request, *args, **fields)

        self.scheduler._preempt_request = counted
        return seen

    def close(self) -> None:
        from vllm.distributed.ec_transfer import ensure_ec_transfer_shutdown
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        ensure_ec_transfer_shutdown()
        del self.llm
        gc.collect()


NOTHING = {"requests": 0, "jobs": 0, "blocks": 0}
"""What `Engine.left` says of an engine that lost nothing."""


def answered(output: Any, which: int = 0) -> Answer:
    """An output of vLLM as JSON can carry it."""
    completion, outcome = output.outputs[which], read_outcome(output)
    best = [sorted(p.values(), key=lambda f: -f.logprob)[:2] for p in completion.logprobs or []]
    ids = [sorted(p, key=lambda token: -p[token].logprob)[:2] for p in completion.logprobs or []]
    return {
        "tokens": list(completion.token_ids),
        "best": ids,
        "gaps": [round(one.logprob - two.logprob, 6) for one, two in best],
        "length": len(output.prompt_token_ids),
        "cached": output.num_cached_tokens,
        "loaded": outcome.loaded_tokens,
        "sources": report(output).get("sources"),
        "ended": completion.finish_reason,
    }


def report(output: Any, key: str = "semkv") -> dict[str, Any]:
    return (output.kv_transfer_params or {}).get(key) or {}


def split_mamba_steps() -> None:
    """Let vLLM 0.32 cache prefixes of Mamba-2 models on a CPU.

    Its CPU scan gives the state after a step, none from inside of it, and the mixer asks for those (IndexError, without
    any connector). Told that there are none, the scheduler ends steps where pages end.
    """
    from dataclasses import replace

    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    if hasattr(MambaMixer2, "asked"):
        return
    MambaMixer2.asked = asked = MambaMixer2.get_kv_cache_spec

    def get_kv_cache_spec(self: Any, *args: Any, **fields: Any) -> Any:
        spec = asked(self, *args, **fields)
        return spec and replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    MambaMixer2.get_kv_cache_spec = get_kv_cache_spec


def spare_modules() -> None:
    """Collect garbage among what an engine makes only: vLLM looks through all modules eight times per engine."""
    freeze = getattr(gc, "really_freeze", gc.freeze)
    gc.collect()
    freeze()
    gc.really_freeze, gc.freeze, gc.unfreeze = freeze, int, int


class Heard(logging.Handler):
    """The lines that we and vLLM log, from its making on."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        for name in ("semkv", "vllm"):
            logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def ours(self) -> list[str]:
        return [line for line in self.lines if line.startswith("semkv:")]


def token_ids(rng: random.Random, count: int) -> list[int]:
    """A prompt's tokens, none of them special."""
    return [rng.randrange(10, 400) for _ in range(count)]


def prompt(ids: list[int], salt: str | None = None) -> dict[str, Any]:
    return {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {})


def main() -> None:
    """Do the job of the command line and end at once: what threads and native code do at an exit is not tested."""
    module, function, args = json.loads(sys.argv[1])
    status = 0
    try:
        result = getattr(importlib.import_module(module), function)(*args)
        print("\nRESULT " + json.dumps(result))
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
