"""Do loaded KV blocks and encoder outputs give the answers that computing them gives?

    python bench/identity.py --models qwen3-vl-2b --samples 16 --out identity.json    (a shape: random weights)
    python bench/identity.py --models minigqa --samples 500 --out identity.json       (a preset or checkpoint, as is)
    python bench/identity.py --models families --jobs 8 --out families.json           (MLA, windows, Mamba, ...)
    python bench/identity.py --models llama,gemma3 --tiny --jobs 1 --out /tmp/families.json       (on a CPU)

Three engines a model run one after the other, each in a process of its own, one prompt at a time and greedy:

    plain       no connectors   cold            everything computed
                                hot             vLLM's own prefix cache has the prompt
                                sibling_hot     another prompt with the same beginning (the picture, 1,500 tokens)
                                sibling_cold    the same, everything computed
    connected   both            first           nothing stored yet; stores
                                warm            as hot
                                loaded          vLLM's caches emptied: KV comes from host memory
                                fusion          of a picture: the same, KV skipped: encoder outputs come from the store
                                fusion_gpu      the same, from vLLM's own encoder cache
                                fusion_disk     the same, from the store with a cold page cache
                                sibling_loaded  the common beginning's KV comes from the store
    restarted   both            restarted       a new process finds what the other stored, on disk

Passes that do the same arithmetic on the same shapes must agree to the last bit of every log-probability. Loaded
against cold computes the tail of a prompt in another shape, and hybrid models begin where a state was kept: there the
tokens are compared with those of computed passes.

The file has a report for every model, with the median time to first token of every pass by the width of the pictures:
with ``--sides 256,512,768,1024`` it tells what an encoder output costs that is computed, or comes from somewhere.

The exit status is 1 when a pass that must agree does not, when the stores were not used, or when an engine failed; the
next model goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from common import ROOT, drop_pages, options_of, run_child, write_json

from semkv.config import get_preset
from semkv_lab.local_engine import LocalEngine

sys.path.insert(0, str(ROOT / "tests"))

QUESTIONS = (
    "What color is the largest shape in this picture?",
    "Is there a red circle to the left of the square?",
    "How many different shapes can you see here?",
    "Which shape is closest to the bottom of the picture?",
    "Are there more circles than squares in the picture?",
)
FUSION = ("fusion", "fusion_gpu", "fusion_disk")
EXACT = {
    "first": "cold",
    **dict.fromkeys(FUSION, "cold"),
    "loaded": "hot",
    "restarted": "hot",
    "sibling_loaded": "sibling_hot",
}
CLOSE = (
    ("hot", "cold"), ("warm", "hot"), ("loaded", "warm"), ("loaded", "cold"), ("restarted", "warm"),
    ("restarted", "cold"), ("sibling_loaded", "sibling_cold"),
)  # fmt: skip
COMPUTED = {"loaded": ("warm", "hot", "cold"), "restarted": ("warm", "hot", "cold")}
TOKENS = (1500, 300)  # of a text prompt: common with its sibling, and its own
BOUND = 0.12  # of the weights: small models need larger ones for answers that depend on the context
SKIP_KV = {"kv_transfer_params": {"semkv": {"skip": True}}}
Answer = dict[str, Any]
Passes = Mapping[str, list[Answer]]


# ------------------------------------------------------------------ one engine


def flush(_worker: Any) -> None:
    """Wait until a rank's encoder outputs are on disk."""
    from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer

    if has_ec_transfer():
        get_ec_transfer().worker_half.flush()


class Runner(LocalEngine):
    """One vLLM engine, asked one prompt at a time."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm.config import ECTransferConfig
        from vllm.platforms import current_platform

        from semkv.connectors import register

        register()  # installed, vLLM finds the connectors by itself
        register_loader()
        self.spec, self.text, cpu = spec, spec["name"] in FAMILIES, current_platform.is_cpu()
        model, kv = Path(spec["model"]), None
        if spec["made"] and not (model / "config.json").exists():
            model.mkdir(exist_ok=True)
            (write_family if self.text else write_shape)(spec["name"], model)
        arguments: dict[str, Any] = {
            "dtype": "bfloat16", "tensor_parallel_size": spec["ranks"], "enforce_eager": cpu or self.text,
            "load_format": LOAD_FORMAT if spec["made"] else None, "block_size": 32 if cpu else None,
        }  # fmt: skip
        if spec["cache_dir"]:
            extra = {"cache_dir": spec["cache_dir"]}
            own = {"break_even": False, "host_bytes": 1 << 30} if self.text else {}
            kv = {"kv_connector": "SemKVConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra | own}
            if not self.text:
                arguments["ec_transfer_config"] = ECTransferConfig(
                    ec_connector="SemECConnector", ec_role="ec_both", ec_connector_extra_config=extra
                )
        if self.text:
            arguments |= {
                "model_loader_extra_config": {"bound": BOUND}, "max_model_len": 4096, "max_num_seqs": 4,
                "skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 28,
                "gpu_memory_utilization": None if cpu else 0.05,
            }  # fmt: skip
        else:
            positions = json.loads((model / "config.json").read_text()).get("text_config", {})
            arguments |= {
                "max_model_len": min(8192, positions.get("max_position_embeddings", 8192)), "max_num_seqs": None,
                "limit_mm_per_prompt": {"image": 1, "video": 0}, "kv_cache_memory_bytes": 1 << 30 if cpu else None,
                "gpu_memory_utilization": None if cpu else 0.6,
            }  # fmt: skip
        super().__init__(model, kv, **(arguments | spec["engine_args"]))

    def facts(self) -> dict[str, Any]:
        import torch
        import vllm

        kinds = [
            f"{len(group.layer_names)} {type(group.kv_cache_spec).__name__} of {group.kv_cache_spec.block_size}"
            for group in self.scheduler.kv_cache_config.kv_cache_groups
        ]
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        return {"vllm": vllm.__version__, "torch": torch.__version__, "device": device, "groups": kinds}

    def side(self, sample: int) -> int:
        return int(self.spec["sides"][sample % len(self.spec["sides"])])

    def answer(self, sample: int, sibling: bool, skip_kv: bool) -> Answer:
        from vllm import SamplingParams

        from semkv.connectors import read_outcome

        params = SamplingParams(
            max_tokens=24 if self.text else 16, temperature=0.0, logprobs=5, ignore_eos=True, detokenize=False,
            extra_args=SKIP_KV if skip_kv else None,
        )  # fmt: skip
        if self.text:
            prompt = text_prompt(sample, sibling, 4 if self.spec["tiny"] else 1)
            (output,) = self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        else:
            side = self.side(sample)
            content = [
                {"type": "image_pil", "image_pil": draw_picture(sample, side, side * 3 // 4)},
                {"type": "text", "text": QUESTIONS[(sample + sibling) % len(QUESTIONS)]},
            ]
            (output,) = self.llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        outcome = read_outcome(output)
        return {
            "prompt_tokens": len(output.prompt_token_ids),
            "ttft_ms": output.metrics.first_token_latency * 1e3,
            "side": 0 if self.text else self.side(sample),
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [{str(t): p.logprob for t, p in step.items()} for step in output.outputs[0].logprobs],
            "cached_tokens": outcome.cached_tokens,
            "loaded_tokens": outcome.loaded_tokens,
            "sources": dict(outcome.sources),
            "fusion_loaded": outcome.fusion_loaded,
        }

    def forget(self, *, encoder: bool = True) -> None:
        """Wait for the stores, then empty vLLM's own caches."""
        self.settle()
        self.llm.collective_rpc(flush)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache")
        if encoder:
            self.llm.llm_engine.reset_encoder_cache()

    def run(self) -> dict[str, list[Answer]]:
        passes: dict[str, list[Answer]] = {}

        def one(name: str, *, forget: bool = True, skip_kv: bool = False) -> None:
            results = passes.setdefault(name, [])
            if forget:
                self.forget(encoder=name != "fusion_gpu")
            if name == "fusion_disk":
                drop_pages(Path(self.spec["cache_dir"]))
            results.append(self.answer(len(results), name.startswith("sibling"), skip_kv))

        for _ in range(self.spec["samples"]):
            if self.spec["role"] == "plain":
                one("cold")
                one("hot", forget=False)
                one("sibling_hot", forget=False)
                one("sibling_cold")
            elif self.spec["role"] == "connected":
                one("first")
                one("warm", forget=False)
                one("loaded")
                for name in () if self.text else FUSION:
                    one(name, skip_kv=True)
                one("sibling_loaded")
            else:
                one("restarted")
        self.forget()
        return passes


def text_prompt(sample: int, sibling: bool, scale: int) -> list[int]:
    import numpy as np

    common, own = (count // scale for count in TOKENS)
    first = np.random.default_rng([3, sample]).integers(10, COMMON["vocab_size"], common)
    rest = np.random.default_rng([4, sample, sibling]).integers(10, COMMON["vocab_size"], own)
    tokens: list[int] = [*first.tolist(), *rest.tolist()]
    return tokens


def run_here(spec: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    runner = Runner(spec)
    ready = time.perf_counter()
    found = {"facts": runner.facts(), "passes": runner.run(), "start_s": round(ready - start, 1)}
    found["run_s"] = round(time.perf_counter() - ready, 1)
    runner.close()
    return found


# ------------------------------------------------------------------ models, made with random weights

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


def write_family(family: str, directory: Path) -> None:
    """The configuration as transformers writes it."""
    from transformers import CONFIG_MAPPING

    architecture, kind, more = FAMILIES[family]
    config = CONFIG_MAPPING[kind](**(COMMON | more), architectures=[architecture], dtype="bfloat16")
    config.save_pretrained(directory)


SHAPE = "qwen3-vl-2b"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
MOST_PIXELS = 1280 * 32 * 32  # its own 16.8 million make vLLM's profiling encode 16,384 tokens


def write_shape(_name: str, directory: Path) -> None:
    """https://huggingface.co/Qwen/Qwen3-VL-2B-Instruct/blob/main/config.json"""
    import tiny_models

    text = {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
        "tie_word_embeddings": True, "rope": {"rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    }  # fmt: skip
    vision = {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
        "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
    }  # fmt: skip
    config = tiny_models.qwen3_vl_config(directory, text, vision, (65536, MOST_PIXELS), TEMPLATE)
    more = {"tie_word_embeddings": True, "dtype": "bfloat16", "architectures": ["Qwen3VLForConditionalGeneration"]}
    config.update(more)
    config.save_pretrained(directory)


def draw_picture(seed: int, width: int, height: int) -> Any:
    """A few colored shapes on noise; every seed another."""
    import numpy as np
    from PIL import Image, ImageDraw

    rng = np.random.default_rng(seed)
    picture = Image.fromarray(rng.integers(0, 90, (height, width, 3), dtype=np.uint8))
    pen = ImageDraw.Draw(picture)
    for _ in range(6):
        x, y = int(rng.integers(0, width * 3 // 4)), int(rng.integers(0, height * 3 // 4))
        box = [x, y, x + int(rng.integers(width // 10, width // 4)), y + int(rng.integers(height // 10, height // 4))]
        color = tuple(int(c) for c in rng.integers(0, 256, 3))
        (pen.ellipse if rng.random() < 0.5 else pen.rectangle)(box, fill=color)
    return picture


LOAD_FORMAT = "dummy_drawn"  # our connectors tell weights of a format called dummy apart by configuration and seed


def draw_weights(model: Any, bound: float = 0.04) -> None:
    """A usual initialization: matrices uniform within 0.04 (standard deviation 0.023), biases within half of that.

    Norms are 1, the ``A`` of a state space model -1: its states decay.

    Every tensor has the seed of its name. vLLM's own dummy weights will not do: norms are about zero, tensors of one
    shape are equal, and all is so small that no answer depends on the KV cache.
    """
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():  # tied ones come once
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
            within = bound if parameter.ndim >= 2 else bound / 2
            if parameter.ndim >= 2 or name.endswith("bias"):
                parameter.uniform_(-within, within, generator=generator)
            else:
                parameter.fill_(-1.0 if name.endswith(".A") else 1.0)


def register_loader() -> None:
    """Have vLLM know `LOAD_FORMAT`."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class DrawnLoader(BaseModelLoader):  # type: ignore[misc]
        """Weights by `draw_weights`, before vLLM packs them for its kernels."""

        def download_model(self, model_config: Any) -> None:
            return

        def load_weights(self, model: Any, model_config: Any) -> None:
            draw_weights(model, **(self.load_config.model_loader_extra_config or {}))

    register_model_loader(LOAD_FORMAT)(DrawnLoader)


# ------------------------------------------------------------------ comparing


def compare(a: list[Answer], b: list[Answer]) -> dict[str, Any]:
    """Tokens one by one; log-probabilities as far as the tokens agree."""
    different, largest, exact = [], 0.0, 0
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        pairs = zip(x["tokens"], y["tokens"], strict=True)
        same = next((n for n, (s, t) in enumerate(pairs) if s != t), len(x["tokens"]))
        if same < len(x["tokens"]):
            different.append({"sample": i, "first_difference": same, "a": x["tokens"], "b": y["tokens"]})
        # The step at which the tokens part still had the same input.
        for p, q in list(zip(x["logprobs"], y["logprobs"], strict=True))[: same + 1]:
            largest = max([largest, *(abs(p[t] - q[t]) for t in p.keys() & q.keys())])
        exact += x["tokens"] == y["tokens"] and x["logprobs"] == y["logprobs"]
    return {
        "samples": len(a),
        "same_tokens": len(a) - len(different),
        "bit_exact": exact,
        "max_logprob_difference": largest,
        "different": different,
    }


def judge(passes: Passes, *, exact: bool) -> dict[str, Any]:
    """All comparisons; ``wrong`` says what cannot be.

    Args:
        exact: passes on the same shapes must agree to the last bit, and every sample must load; else a loaded pass must
            have the tokens of a computed one, and one sample must load.
    """
    wanted = [*EXACT.items(), *CLOSE]
    pairs = {f"{a} vs {b}": compare(passes[a], passes[b]) for a, b in wanted if a in passes and b in passes}

    def lost(pair: str) -> int:
        return int(pairs[pair]["samples"] - pairs[pair]["same_tokens"]) if pair in pairs else 0

    wrong = []
    if exact:
        names = [f"{a} vs {b}" for a, b in EXACT.items()]
        found = {name: pairs[name] for name in names if name in pairs}
        wrong += [f"{name}: {c['bit_exact']} of {c['samples']} bit-exact" for name, c in found.items()
                  if c["bit_exact"] < c["samples"]]  # fmt: skip
        # Another shape may turn a near-tie: no worse than vLLM's own prefix cache does.
        wrong += [f"{name} vs cold: other tokens" for name in COMPUTED if lost(f"{name} vs cold") > lost("hot vs cold")]
        for name in ("fusion", "fusion_disk"):
            missed = [i for i, answer in enumerate(passes.get(name, [])) if answer["fusion_loaded"] != 1]
            wrong += [f"{name}, sample {i}: not loaded" for i in missed]
    for name, computed in COMPUTED.items():
        known = [f"{name} vs {other}" for other in computed if f"{name} vs {other}" in pairs]
        if not exact and known and all(lost(pair) for pair in known):
            wrong.append(f"{name}: other tokens than computed ones and than vLLM's own prefix cache")
    for name in ("loaded", "restarted", "sibling_loaded") if exact else COMPUTED:
        loaded = [bool(r["loaded_tokens"]) for r in passes.get(name, [])]
        if loaded and not (all(loaded) if exact else any(loaded)):
            wrong.append(f"{name}: nothing was loaded for {loaded.count(False)} of {len(loaded)}")
    return {"wrong": wrong, "compared": pairs, "counts": {name: count(results) for name, results in passes.items()}}


def count(results: list[Answer]) -> dict[str, Any]:
    keys = ("prompt_tokens", "cached_tokens", "loaded_tokens", "fusion_loaded")
    sources = Counter[str]()
    for result in results:
        sources.update(result["sources"])
    totals: dict[str, Any] = {key: sum(int(r[key] or 0) for r in results) for key in keys}
    times = {side: [r["ttft_ms"] for r in results if r["side"] == side] for side in {r["side"] for r in results}}
    totals["ttft_ms"] = {side: round(statistics.median(times[side]), 2) for side in sorted(times)}
    return totals | {"kv_hits": sum(bool(r["loaded_tokens"]) for r in results), "sources": dict(sources)}


# ------------------------------------------------------------------ the calling process


def run_model(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A model's report; an engine that fails leaves its error, and what was compared until then."""
    made, start = name in FAMILIES or name == SHAPE, time.monotonic()
    report: dict[str, Any] = {"model": name, "weights": "drawn" if made else "real", "ranks": options.ranks}
    passes: dict[str, list[Answer]] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        keep = ("samples", "sides", "ranks", "engine_args", "tiny")
        spec = {key: getattr(options, key) for key in keep} | {"name": name, "made": made}
        spec["model"] = f"{folder}/model" if made else name if Path(name).is_dir() else get_preset(name).model
        environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `flush` goes to the ranks' processes
        }
        if name not in FAMILIES:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the same model runner with and without connectors
        for role in ("plain", "connected", "restarted"):
            own = {"role": role, "cache_dir": "" if role == "plain" else f"{folder}/cache"}
            log = options.logs / f"identity-{Path(name).name}.log"
            found = run_child(name, spec | own, log, options.limit, environment)
            if "error" in found:
                report |= {"failed": role, "error": found["error"]}
                break
            passes |= found.pop("passes")
            report |= found.pop("facts") | {role: found}
    report |= judge(passes, exact=name not in FAMILIES)
    report["distinct_answers"] = len({tuple(answer["tokens"]) for answer in passes.get("cold", [])})
    return report | {"settings": spec, "seconds": round(time.monotonic() - start)}


def show(report: Mapping[str, Any]) -> None:
    for pair, c in report["compared"].items():
        print(
            f"{report['model']:15} {pair:30} same tokens {c['same_tokens']}/{c['samples']}  bit-exact {c['bit_exact']}"
            f"/{c['samples']}  max log-probability difference {c['max_logprob_difference']:.2e}"
        )
    for name, totals in report["counts"].items():
        print(f"{report['model']:15} {name:15} {totals}")
    if "error" in report:
        print(f"{report['model']:15} {report['failed']} failed: {report['error'][:300]}")
    for why in report["wrong"]:
        print(f"{report['model']:15} WRONG {why}")
    print(f"{report['model']:15} {report['distinct_answers']} distinct answers", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="minigqa", help=f"comma-separated: families, {', '.join(FAMILIES)}; "
                        f"{SHAPE}, with random weights; presets; checkpoint directories")  # fmt: skip
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--sides", type=lambda text: [int(n) for n in text.split(",")], default=[500],
                        help="widths of the pictures, in turns")  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--jobs", type=int, default=1, help="models at once")
    parser.add_argument("--limit", type=float, default=1800, help="seconds of one engine")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON, for vLLM")
    parser.add_argument("--tiny", action="store_true", help="text prompts of a quarter of the length, for a CPU")
    options = options_of(parser, lambda spec, answer: answer(run_here(spec)))
    names = [n for name in options.models.split(",") for n in (FAMILIES if name == "families" else [name])]
    reports = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(run_model, name, options) for name in names]):
            reports.append(done.result())
            write_json(options.out, reports)
            show(reports[-1])
    return int(any(report["wrong"] or "error" in report for report in reports))


if __name__ == "__mp_main__":  # the process of a rank
    register_loader()
if __name__ == "__main__":
    sys.exit(main())
