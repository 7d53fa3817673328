"""Engines with the KV connector, in processes of their own.

A test calls `in_child` with a function of its module. The function runs in a new process, so that what an engine leaves
behind in one (threads, imports, a crash) does not reach the next test. Arguments and result travel as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import tiny_models
import vllm_forks
from semkv_lab import local_engine
from semkv_lab.local_engine import (
    BLOCK,
    Answer,
    LocalEngine,
    answered,
    differs,
    prompt,
    report,
    token_ids,
)
from semkv_vllm import ConnectorOutcome, disk_process, read_outcome

__all__ = ["BLOCK", "Answer", "answered", "differs", "prompt", "report", "token_ids"]  # for tests

SKIP = {"kv_transfer_params": {"semkv": {"skip": True}}}
HYBRID = {"block_size": None, "max_num_batched_tokens": 256}
"""For models with Mamba or linear attention: vLLM finds the size of a page, and steps end where pages do."""


# ---------------------------------------------------------------------- the test's side


_CHILD = """
import importlib, json, os, sys, traceback
module, function, arguments = sys.argv[1:]
status = 0
try:
    result = getattr(importlib.import_module(module), function)(*json.loads(arguments))
    print("\\nRESULT " + json.dumps(result), flush=True)
except BaseException:
    traceback.print_exc()
    status = 1
os._exit(status)  # what threads and native code do at an exit is not tested
"""


def command(function: Callable[..., Any], *args: Any) -> list[str]:
    """Runs a function of a test module; its result is the last line that begins with RESULT."""
    names = [function.__module__, function.__name__, json.dumps(args, default=str)]
    return [str(vllm_forks.prepare() / "python"), "-c", _CHILD, *names]


def in_child(function: Callable[..., Any], *args: Any, second_runner: bool = False) -> Any:
    """What a function of a test module returns in a new process; fails with the process's output if it ends badly.

    With ``second_runner`` vLLM takes its model runner V2 there (`vllm_defaults.choose_second_runner`).
    """
    program = command(function, *args)
    environment = dict(os.environ)
    if second_runner:  # vLLM must not be imported yet
        first = f"import vllm_defaults\nvllm_defaults.choose_second_runner()\n{_CHILD}"
        program[:3] = [sys.executable, "-c", first]
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        program,
        capture_output=True,
        text=True,
        errors="replace",
        env=environment,
    )
    assert done.returncode == 0, (
        f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    )
    return json.loads(done.stdout.rpartition("RESULT ")[2].splitlines()[0])


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


def connector(cache_dir: Path | str, **settings: Any) -> dict[str, Any]:
    """The configuration of one SemKVConnector over a directory, with 64 MiB of host memory."""
    return local_engine.connector(cache_dir, **{"host_bytes": 64 << 20, **settings})


def several(*connectors: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A MultiConnector over some connectors."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
        **fields,
    }


class Engine(LocalEngine):
    """A tiny vLLM in this process, with or without a KV connector."""

    def __init__(self, model: Path | str, kv: dict[str, Any] | None = None, **args: Any) -> None:
        split_mamba_steps()
        disk_process._SILENT_S = (
            1800.0  # on a busy machine a process may be silent for long, and lives
        )
        self.family = Path(model).name
        vllm_forks.quicken()
        super().__init__(model, kv, **args)
        step = self.core.step_fn

        def patient() -> tuple[Any, bool]:
            """A step that had nothing to compute waits for a load: the disk's process may need the processor."""
            outputs, computed = step()
            if not computed:
                time.sleep(0.001)
            return outputs, computed

        self.core.step_fn = patient

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def page(self) -> int:
        """How many tokens a block of the coarsest KV cache group holds: prompts are loaded in multiples of it."""
        return max(
            g.kv_cache_spec.block_size for g in self.scheduler.kv_cache_config.kv_cache_groups
        )

    def connectors(self) -> list[Any]:
        """The connectors that offload, below a MultiConnector too."""
        top = self.scheduler.connector
        return [
            c
            for c in getattr(top, "_connectors", [top])
            if getattr(c, "connector_scheduler", None) is not None
        ]

    def forget(self, *, keep_host: bool = False) -> None:
        """Drop vLLM's own copies and those in host memory, unless these are to stay: only the disk remains."""
        self.settle()
        assert self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()
        if not keep_host:
            for own in self.connectors():
                own.connector_scheduler.reset_cache()
            self.settle()

    def levels(self, asked: Sequence[Any], **fields: Any) -> dict[str, list[Answer]]:
        """The answers while nothing is stored, then from host memory, then from the disk."""
        found = {}
        for level, keep_host in (("cold", True), ("host", True), ("disk", False)):
            self.forget(keep_host=keep_host)
            found[level] = self.ask(asked, **fields)
        self.forget()
        return found

    def ways(self) -> list[bool]:
        """Whether it has model runner V2, and plans steps ahead."""
        config = self.core.vllm_config
        return [bool(config.use_v2_model_runner), bool(config.scheduler_config.async_scheduling)]

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


class CachedEngine(Engine):
    """An engine of one of `tiny_models.PROMPTS` with both connectors over a directory.

    Args:
        model: the folder of the checkpoint, named as its family.
        cache_dir: what the connectors store.
        kv: settings of the KV connector.
        bucket: settings of both connectors for a bucket.
    """

    def __init__(
        self,
        model: Path,
        cache_dir: Path,
        kv: dict[str, Any] | None = None,
        bucket: dict[str, Any] | None = None,
        **args: Any,
    ) -> None:
        self.cache_dir = cache_dir
        if model.name != "opt":
            args["limit_mm_per_prompt"] = {"image": 1, "video": 0}
            args["ec_transfer_config"] = encoder_connector(cache_dir, **(bucket or {}))
        super().__init__(model, connector(cache_dir, **(kv or {}), **(bucket or {})), **args)

    def prompt(self, text: str = "", picture: int = 0, salt: str | None = None) -> dict[str, Any]:
        # Some 100 tokens after the picture, whatever the tokenizer's luck.
        asked: dict[str, Any] = {
            "prompt": tiny_models.PROMPTS[self.family] + text + " is there a dog 0123456789" * 7
        }
        if self.family != "opt":
            asked["multi_modal_data"] = {"image": tiny_models.picture(picture)}
        return asked | ({"cache_salt": salt} if salt is not None else {})

    def run(
        self, *prompts: dict[str, Any], extra: dict[str, Any] | None = None, tokens: int = 8
    ) -> list[Any]:
        return self.outputs(prompts, tokens, extra_args=extra, logprobs=None)

    def one(
        self, prompt: dict[str, Any], extra: dict[str, Any] | None = None
    ) -> tuple[list[int], ConnectorOutcome]:
        (output,) = self.run(prompt, extra=extra)
        return answer(output), read_outcome(output)

    def store(self, prompt: dict[str, Any], *, keep_host: bool = False) -> list[int]:
        """The answer to a prompt, whose blocks are then on disk, and in host memory if told."""
        tokens, _ = self.one(prompt)
        self.forget(keep_host=keep_host)
        return tokens

    def from_disk(
        self, prompt: dict[str, Any], **fields: Any
    ) -> tuple[list[int], ConnectorOutcome]:
        """As `one`, with nothing in vLLM's caches and in host memory."""
        self.forget()
        return self.one(prompt, **fields)

    def from_host(
        self, prompt: dict[str, Any], **fields: Any
    ) -> tuple[list[int], ConnectorOutcome]:
        """As `one`, with nothing in vLLM's caches."""
        self.forget(keep_host=True)
        return self.one(prompt, **fields)

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    def counts(self) -> Counter[str]:
        return Counter(self.connector.shared.counters)

    def files(self, store: str = "kv") -> set[Path]:
        return set((self.cache_dir / store).glob("*/*/*.safetensors"))


def encoder_connector(cache_dir: Path | str, **settings: Any) -> Any:
    """The configuration of a SemECConnector over a directory."""
    from vllm.config import ECTransferConfig

    extra = {"cache_dir": str(cache_dir), "report_loads": True, **settings}
    return ECTransferConfig(
        ec_connector="SemECConnector", ec_role="ec_both", ec_connector_extra_config=extra
    )


def answer(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def usable(tokens: int) -> int:
    """Tokens of a prompt that can be loaded: whole blocks, one token left to compute."""
    return (tokens - 1) // BLOCK * BLOCK


def full_blocks(output: Any) -> int:
    """The same of an output's prompt."""
    return usable(len(output.prompt_token_ids))


NOTHING = {"requests": 0, "jobs": 0, "blocks": 0}
"""What `Engine.left` says of an engine that lost nothing."""


def split_mamba_steps() -> None:
    """Let vLLM 0.32 cache prefixes of Mamba-2 models on a CPU; on a GPU nothing is changed.

    Its CPU scan gives the state after a step, none from inside of it, and the mixer asks for those (IndexError, without
    any connector). Told that there are none, the scheduler ends steps where pages end.
    """
    from dataclasses import replace

    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    if hasattr(MambaMixer2, "asked"):
        return
    MambaMixer2.asked = asked = MambaMixer2.get_kv_cache_spec

    def get_kv_cache_spec(self: Any, *args: Any, **fields: Any) -> Any:
        spec = asked(self, *args, **fields)
        return spec and replace(
            spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None
        )

    MambaMixer2.get_kv_cache_spec = get_kv_cache_spec
