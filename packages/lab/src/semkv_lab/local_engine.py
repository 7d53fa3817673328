"""A vLLM engine in this process, to look at and to compare: what benches and tests of connectors start."""

from __future__ import annotations

import gc
import json
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from semkv_stores.digests import weight_files
from semkv_vllm import read_outcome

BLOCK = 32

Answer = dict[str, Any]
"""What came for one prompt: tokens, the two best tokens and their gap at each place, and what was loaded."""


def connector(cache_dir: Path | str, **settings: Any) -> dict[str, Any]:
    """The configuration of one SemKVConnector over a directory, as ``--kv-transfer-config`` takes it.

    It stores every block and says what it loads, but where ``settings`` say otherwise.
    """
    usual = {
        "cache_dir": str(cache_dir),
        "break_even": False,
        "report_loads": True,
    }
    return {
        "kv_connector": "SemKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": usual | settings,
    }


@contextmanager
def all_computed_again() -> Iterator[None]:
    """What semkv moved to its places in documents is computed again, all of it, by the repair."""
    from semkv_vllm.placement import Placement

    passes = Placement._passes

    def whole(self: Any, loads: Any, prompts: Any) -> Any:
        return passes(self, [replace(load, pieces=()) for load in loads], prompts)

    with mock.patch.object(Placement, "_passes", whole):
        yield


class LocalEngine:
    """A small vLLM in this process, with or without a KV connector.

    Args:
        model: folder of the checkpoint.
        kv: the KV transfer configuration.
        args: of ``vllm.LLM``; None takes one of ours away.
    """

    def __init__(
        self,
        model: Path | str,
        kv: dict[str, Any] | None = None,
        **args: Any,
    ) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.platforms import current_platform

        spare_modules()
        wait_until_settled(Path(model))
        usual = {
            "max_model_len": 1024,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 1 << 26,
            "enable_prefix_caching": True,
            "disable_log_stats": False,
            "seed": 0,
        }
        if not current_platform.is_cpu():
            usual["gpu_memory_utilization"] = (
                0.02  # what must be free at the start; others may use the same GPU
            )
        args = {name: value for name, value in (usual | args).items() if value is not None}
        with mock.patch.dict(os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1"):
            self.llm = LLM(
                str(model),
                kv_transfer_config=KVTransferConfig(**kv) if kv else None,
                **args,
            )

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    def outputs(
        self,
        prompts: Sequence[Any],
        tokens: int = 16,
        lora: Any = None,
        **sampling: Any,
    ) -> list[Any]:
        """vLLM's outputs for prompts that are asked together; greedy by default."""
        from vllm import SamplingParams

        usual = {
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
        }
        params = SamplingParams(**(usual | sampling))
        return list(self.llm.generate(list(prompts), params, use_tqdm=False, lora_request=lora))

    def ask(
        self,
        prompts: Iterable[Any],
        tokens: int = 16,
        **fields: Any,
    ) -> list[Answer]:
        """The answers to prompts, asked one after another."""
        return [answered(self.outputs([prompt], tokens, **fields)[0]) for prompt in prompts]

    def settle(self) -> None:
        """Step until nothing is under way between the engine and its stores.

        A server's loop does so by itself; an engine in this process stands still after its last answer.
        """
        from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer

        while self.scheduler.has_requests():
            self.core.step_fn()
            time.sleep(0.001)
        if has_ec_transfer():
            assert get_ec_transfer().worker_half.flush(600)

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


def answered(output: Any, which: int = 0) -> Answer:
    """An output of vLLM as JSON can carry it."""
    completion, outcome = output.outputs[which], read_outcome(output)
    best = [
        sorted(p.items(), key=lambda item: -item[1].logprob)[:2] for p in completion.logprobs or []
    ]
    return {
        "tokens": list(completion.token_ids),
        "best": [[token for token, _ in two] for two in best],
        "gaps": [round(one.logprob - two.logprob, 6) for (_, one), (_, two) in best],
        "length": len(output.prompt_token_ids),
        "cached": output.num_cached_tokens,
        "loaded": outcome.loaded_tokens,
        "sources": report(output).get("sources"),
        "encoded": [outcome.fusion_loaded, outcome.fusion_encoded],
        "ended": completion.finish_reason,
    }


def report(output: Any, key: str = "semkv") -> dict[str, Any]:
    return (output.kv_transfer_params or {}).get(key) or {}


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


def wait_until_settled(model: Path, seconds: float = 1.5) -> None:
    """Nothing is kept of weights that are as young as the engine."""
    if model.is_dir():
        newest = max(place.lstat().st_ctime for place in (model, *weight_files(model)))
        time.sleep(max(0.0, newest + seconds - time.time()))


def spare_modules() -> None:
    """Collect garbage among what an engine makes only: vLLM looks through all modules eight times per engine."""
    module: Any = gc
    freeze = getattr(gc, "really_freeze", gc.freeze)
    gc.collect()
    freeze()
    module.really_freeze = freeze
    module.freeze = int
    module.unfreeze = int


def token_ids(rng: random.Random, count: int) -> list[int]:
    """A prompt's tokens, none of them special."""
    return [rng.randrange(10, 400) for _ in range(count)]


def prompt(ids: list[int], salt: str | None = None) -> dict[str, Any]:
    return {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {})


def write_adapter(
    folder: Path,
    seed: int,
    *,
    layers: Sequence[str],
    width: int,
    rows: Mapping[str, int],
) -> Path:
    """A random LoRA adapter of rank 8, large enough to change every answer.

    Args:
        folder: is made.
        seed: of its numbers.
        layers: names of the attention layers that it changes.
        width: numbers that each of their projections takes.
        rows: numbers that each projection gives, by its name.
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in layers:
        for name, count in rows.items():
            prefix = f"base_model.model.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(8, width, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(count, 8, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": list(rows),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder
