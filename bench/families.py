"""Does reused KV give the same answers in every family of models: MLA, sliding windows, Mamba, linear attention?

    python bench/families.py --out families.jsonl
    python bench/families.py --families llama,gemma3 --jobs 1 --tiny --out /tmp/families.jsonl     (on a CPU)
    python bench/families.py --ranks 2 --families llama,granite4 --out ...

Small models of each family, made from their configurations with random weights (`identity.draw_weights`), greedy, one
prompt at a time; three prompts, of which two share most of their tokens. Three processes a family:

    plain    no connector           cold   everything computed           hot   from vLLM's own prefix cache
    filled   with the connector     filled  computed, and stored         warm  from vLLM's own prefix cache
                                    host   after `reset_prefix_cache`
    again    with the connector     disk   a new process, from files

A line of JSON a family: whether the tokens are equal and the largest difference of a log-probability, each loaded pass
against ``warm`` (the same arithmetic on the same shapes in the same engine), ``hot`` and ``cold``; tokens loaded, by
source; vLLM's KV cache groups. A family that fails has its error in its line, and the next one goes on. The exit status
is 1 when a loaded pass has the tokens of no computed one, or nothing was reused, or an engine failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import engines
from identity import LOAD_FORMAT, compare, register_loader

COMMON = {
    "vocab_size": 1024, "max_position_embeddings": 8192, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 128,
}  # fmt: skip
MLA = {
    "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 128,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "rope_interleave": True,
    "moe_intermediate_size": 128, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LINEAR = {
    "head_dim": 64, "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
}  # fmt: skip
SLIDING = ["sliding_attention"] * 5 + ["full_attention"]

# family: architecture, model type of transformers, configuration
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", {"num_hidden_layers": 4, "head_dim": 64}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "deepseek_v3", MLA),
    "gpt_oss": ("GptOssForCausalLM", "gpt_oss", {
        "num_hidden_layers": 4, "head_dim": 64, "intermediate_size": 256, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2,
    }),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", {
        "num_hidden_layers": 6, "head_dim": 64, "sliding_window": 128, "query_pre_attn_scalar": 64,
        "layer_types": SLIDING,
    }),
    "granite4": ("GraniteMoeHybridForCausalLM", "granitemoehybrid", MAMBA | {
        "num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"], "num_local_experts": 0,
        "num_experts_per_tok": 0, "shared_intermediate_size": 512, "position_embedding_type": "rope",
        "attention_multiplier": 0.1, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    }),
    "qwen3_next": ("Qwen3NextForCausalLM", "qwen3_next", LINEAR | {
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_experts": 4,
        "num_experts_per_tok": 2, "decoder_sparse_step": 1,
    }),
    "nemotron_h": ("NemotronHForCausalLM", "nemotron_h", {
        "hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5, "head_dim": 64, "mamba_num_heads": 8,
        "mamba_head_dim": 64, "n_groups": 1, "ssm_state_size": 64, "conv_kernel": 4, "expand": 2, "chunk_size": 128,
    }),
    "falcon_h1": ("FalconH1ForCausalLM", "falcon_h1", MAMBA | {"num_hidden_layers": 3, "mamba_d_ssm": 512}),
}  # fmt: skip
BOUND = 0.12  # of the weights: small models need larger ones for answers that depend on the context
PROMPTS = ((1500, 300), (1500, 137), (0, 2000))  # tokens that are shared, and of its own
LIMIT_S = 300  # of one process


# ------------------------------------------------------------------ one process


def write_model(family: str, folder: Path) -> None:
    """The configuration as transformers writes it."""
    from transformers import CONFIG_MAPPING

    architecture, kind, more = FAMILIES[family]
    config = CONFIG_MAPPING[kind](**(COMMON | more), architectures=[architecture], dtype="bfloat16")
    config.save_pretrained(folder)


def prompts(scale: int) -> list[list[int]]:
    import numpy as np

    rng = np.random.default_rng(3)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = rng.integers(10, COMMON["vocab_size"], count // scale).tolist()
        return drawn

    shared = tokens(PROMPTS[0][0])
    return [(shared if common else []) + tokens(own) for common, own in PROMPTS]


class Runner:
    """One engine in this process."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.platforms import current_platform

        from semkv.connectors import register

        register()
        register_loader()
        self.folder = Path(spec["folder"]) if spec["role"] != "plain" else None
        config = engines.transfer_config(spec["connector"], spec["folder"], 1 << 30, 4 << 30, spec["added"])
        more: dict[str, Any] = {"gpu_memory_utilization": 0.05}
        if current_platform.is_cpu():
            more = {"block_size": 32}
        self.scale = 4 if spec["tiny"] else 1
        self.llm: Any = LLM(
            spec["model"], load_format=LOAD_FORMAT, model_loader_extra_config={"bound": BOUND}, dtype="bfloat16",
            seed=0, max_model_len=4096, max_num_seqs=4, enforce_eager=True, skip_tokenizer_init=True,
            disable_log_stats=False,  # or vLLM does not say where loaded tokens came from
            enable_prefix_caching=True, kv_cache_memory_bytes=1 << 28, tensor_parallel_size=spec["ranks"],
            kv_transfer_config=KVTransferConfig(**config) if config and self.folder else None,
            **(more | spec["engine_args"]),
        )  # fmt: skip

    def groups(self) -> dict[str, Any]:
        config = self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        kinds = [
            f"{len(group.layer_names)} {type(group.kv_cache_spec).__name__} of {group.kv_cache_spec.block_size}"
            for group in config.kv_cache_groups
        ]
        return {"groups": kinds, "blocks": config.num_blocks}

    def ask(self) -> list[dict[str, Any]]:
        """Each prompt on its own; the stores of one are done before the next."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=24, temperature=0.0, logprobs=5, ignore_eos=True, detokenize=False)
        found = []
        for prompt in prompts(self.scale):
            (output,) = self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            report = (getattr(output, "kv_transfer_params", None) or {}).get("semkv") or {}
            found.append({
                "tokens": list(output.outputs[0].token_ids),
                "logprobs": [{str(t): p.logprob for t, p in step.items()} for step in output.outputs[0].logprobs],
                "cached": output.num_cached_tokens or 0,
                "loaded": report.get("loaded_tokens", 0),
                "sources": report.get("sources", {}),
            })  # fmt: skip
            engines.settle_llm(self.llm, self.folder)
        return found

    def forget(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache")

    def passes(self, role: str) -> dict[str, list[dict[str, Any]]]:
        if role == "again":
            return {"disk": self.ask()}
        found = {"cold" if role == "plain" else "filled": self.ask()}
        if role == "plain":
            return found | {"hot": self.ask()}
        found["warm"] = self.ask()
        self.forget()
        return found | {"host": self.ask()}


def child(spec: Mapping[str, Any]) -> None:
    engines.die_with_parent()
    found: dict[str, Any]
    try:
        write_model(spec["family"], Path(spec["model"]))
        runner = Runner(spec)
        found = {**runner.groups(), "passes": runner.passes(spec["role"])}
        runner.llm.llm_engine.engine_core.shutdown()
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    Path(spec["out"]).write_text(json.dumps(found))


# ------------------------------------------------------------------ the calling process


def run_role(spec: dict[str, Any], work: Path, log: Path, limit_s: float) -> dict[str, Any]:
    """One process; one that hangs or dies gives an error."""
    out = work / f"{spec['role']}.json"
    environment = engines.ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | os.environ
    command = [sys.executable, sys.argv[0], "--child", json.dumps(spec | {"out": str(out)})]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
            why = f"ended with status {status}"
        except subprocess.TimeoutExpired:
            why = f"more than {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"error": why}
    return found | ({"error": found["error"], "log": engines.log_tail(log)} if "error" in found else {})


def run_family(family: str, options: argparse.Namespace) -> dict[str, Any]:
    line: dict[str, Any] = {"family": family, "ranks": options.ranks, "connector": options.connector}
    passes: dict[str, list[dict[str, Any]]] = {}
    start, log = time.monotonic(), options.logs / f"family-{family}.log"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        work = Path(name)
        for role in ("plain", "filled", "again"):
            spec = {
                "family": family, "role": role, "folder": str(work / "cache"), "model": str(work / "model"),
                "connector": options.connector,
                "added": options.add, "ranks": options.ranks, "tiny": options.tiny, "engine_args": options.engine_args,
            }  # fmt: skip
            found = run_role(spec, work, log, options.limit)
            passes |= found.pop("passes", {})
            if "error" in found:
                line |= {"failed": role, "error": found["error"], "log": found["log"]}
                break
            line["groups" if role == "plain" else f"groups {role}"] = found
    return line | judge(passes) | {"seconds": round(time.monotonic() - start)}


def judge(passes: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Loaded passes against computed ones; ``wrong`` says what cannot be."""
    found: dict[str, Any] = {"wrong": [], "compared": {}}
    pairs = [("hot", "cold"), ("filled", "cold"), ("warm", "hot")]
    for one, other in pairs + [(name, other) for name in ("host", "disk") for other in ("warm", "hot", "cold")]:
        if one in passes and other in passes:
            result = compare(passes[one], passes[other])
            equal, most = result["same_tokens"] == result["samples"], result["max_logprob_difference"]
            found["compared"][f"{one} vs {other}"] = {"tokens_equal": equal, "max_logprob_difference": most}
            if not equal:
                found["compared"][f"{one} vs {other}"]["different_prompts"] = [d["sample"] for d in result["different"]]
    equal = {pair: each["tokens_equal"] for pair, each in found["compared"].items()}
    for name, answers in passes.items():
        found[name] = [
            {key: answer[key] for key in ("cached", "loaded", "sources") if answer[key]} for answer in answers
        ]
    for name in ("host", "disk"):
        if name not in passes:
            continue
        if not any(equal.get(f"{name} vs {other}") for other in ("warm", "hot", "cold")):
            found["wrong"].append(f"{name}: other tokens than computed ones and than vLLM's own prefix cache")
        if not any(answer["cached"] for answer in passes[name]):
            found["wrong"].append(f"{name}: nothing was reused")
    if "cold" in passes:
        found["distinct_answers"] = len({tuple(answer["tokens"]) for answer in passes["cold"]})
    return found


def short(line: Mapping[str, Any]) -> str:
    if "error" in line:
        return f"{line['family']}: {line['failed']} failed: {line['error'][:200]}"
    parts = [
        f"{pair} {'equal' if each['tokens_equal'] else 'DIFFERENT'} {each['max_logprob_difference']:.1e}"
        for pair, each in line["compared"].items()
    ]
    used = {name: [answer.get("loaded", answer.get("cached", 0)) for answer in line[name]] for name in ("host", "disk")}
    return f"{line['family']}: {', '.join(parts)}; loaded {used}; {line['groups']['groups']}; wrong {line['wrong']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--connector", default="semkv", help="see engines.py; or one of --add")
    parser.add_argument("--add", type=engines.named, action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--jobs", type=int, default=4, help="families at once")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of one process")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON, for vLLM")
    parser.add_argument("--tiny", action="store_true", help="prompts of a quarter of the length, for a CPU")
    parser.add_argument("--out", type=Path, default=Path("families.jsonl"))
    parser.add_argument("--logs", type=Path, help="folder of the engines' logs; beside the result by default")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child))
        return 0
    options.add, options.logs = dict(options.add), options.logs or options.out.parent / "logs"
    options.logs.mkdir(parents=True, exist_ok=True)
    engines.stop_on_signals()
    bad = 0
    with ThreadPoolExecutor(options.jobs) as pool, options.out.open("w") as out:
        running = [pool.submit(run_family, family, options) for family in options.families.split(",")]
        for line in (done.result() for done in as_completed(running)):
            out.write(json.dumps(line) + "\n")
            out.flush()
            print(short(line), flush=True)
            bad += bool(line["wrong"] or "error" in line)
    return int(bool(bad))


if __name__ == "__mp_main__":  # the process of a rank
    register_loader()
if __name__ == "__main__":
    sys.exit(main())
