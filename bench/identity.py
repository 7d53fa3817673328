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
                                sibling_loaded  the common beginning's KV comes from the store
    restarted   both            restarted       a new process finds what the other stored, on disk

Passes that do the same arithmetic on the same shapes must agree to the last bit of every log-probability. Loaded
against cold computes the tail of a prompt in another shape, and hybrid models begin where a state was kept: there the
tokens are compared with those of computed passes.

The file has a report for every model. The exit status is 1 when a pass that must agree does not, when the stores were
not used, or when an engine failed; the next model goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from common import folder_bytes, options_of, run_child, write_json
from models import (
    COMMON,
    FAMILIES,
    SHAPE,
    draw_picture,
    write_family,
    write_shape,
    write_weights,
)

from semkv.config import get_preset

QUESTIONS = (
    "What color is the largest shape in this picture?",
    "Is there a red circle to the left of the square?",
    "How many different shapes can you see here?",
    "Which shape is closest to the bottom of the picture?",
    "Are there more circles than squares in the picture?",
)
EXACT = {
    "first": "cold",
    "fusion": "cold",
    "loaded": "hot",
    "restarted": "hot",
    "sibling_loaded": "sibling_hot",
}
CLOSE = (
    ("hot", "cold"), ("warm", "hot"), ("loaded", "warm"), ("loaded", "cold"), ("restarted", "warm"),
    ("restarted", "cold"), ("sibling_loaded", "sibling_cold"),
)  # fmt: skip
COMPUTED = {"loaded": ("warm", "hot", "cold"), "restarted": ("warm", "hot", "cold")}
PICTURE = (500, 375)  # pixels
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


class Runner:
    """One vLLM engine, asked one prompt at a time."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import ECTransferConfig, KVTransferConfig
        from vllm.platforms import current_platform

        from semkv_vllm import register

        register()  # installed, vLLM finds the connectors by itself
        self.spec = spec
        self.text = spec["name"] in FAMILIES
        cpu = current_platform.is_cpu()
        model = Path(spec["model"])
        arguments: dict[str, Any] = {"enforce_eager": cpu or self.text}
        if spec["cache_dir"]:
            extra = {"cache_dir": spec["cache_dir"], "report_loads": True}
            arguments["kv_transfer_config"] = KVTransferConfig(
                kv_connector="SemKVConnector", kv_role="kv_both",
                kv_connector_extra_config=extra | ({"break_even": False, "host_bytes": 1 << 30} if self.text else {}),
            )  # fmt: skip
            if not self.text:
                arguments["ec_transfer_config"] = ECTransferConfig(
                    ec_connector="SemECConnector",
                    ec_role="ec_both",
                    ec_connector_extra_config=extra,
                )
        if self.text:
            arguments |= {
                "max_model_len": 4096,
                "max_num_seqs": 4,
                "skip_tokenizer_init": True,
                "kv_cache_memory_bytes": 1 << 28,
                "seed": 0,
            }
            arguments |= {"block_size": 32} if cpu else {"gpu_memory_utilization": 0.05}
        else:
            positions = json.loads((model / "config.json").read_text()).get("text_config", {})
            arguments["max_model_len"] = min(8192, positions.get("max_position_embeddings", 8192))
            arguments["limit_mm_per_prompt"] = {"image": 1, "video": 0}
            room = (
                {"kv_cache_memory_bytes": 1 << 30, "block_size": 32}
                if cpu
                else {"gpu_memory_utilization": 0.6}
            )
            arguments |= room
        self.llm: Any = LLM(
            str(model), dtype="bfloat16", tensor_parallel_size=spec["ranks"], enable_prefix_caching=True,
            disable_log_stats=False,  # or vLLM does not say where loaded tokens came from
            **(arguments | spec["engine_args"]),
        )  # fmt: skip

    def facts(self) -> dict[str, Any]:
        import torch
        import vllm

        config = self.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
        kinds = [
            f"{len(group.layer_names)} {type(group.kv_cache_spec).__name__} of {group.kv_cache_spec.block_size}"
            for group in config.kv_cache_groups
        ]
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": device,
            "groups": kinds,
        }

    def ask(self, sample: int, sibling: bool, skip_kv: bool) -> Answer:
        from vllm import SamplingParams

        from semkv_vllm import read_outcome

        params = SamplingParams(
            max_tokens=24 if self.text else 16, temperature=0.0, logprobs=5, ignore_eos=True, detokenize=False,
            extra_args=SKIP_KV if skip_kv else None,
        )  # fmt: skip
        if self.text:
            prompt = text_prompt(sample, sibling, 4 if self.spec["tiny"] else 1)
            (output,) = self.llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        else:
            content = [
                {"type": "image_pil", "image_pil": draw_picture(sample, *PICTURE)},
                {"type": "text", "text": QUESTIONS[(sample + sibling) % len(QUESTIONS)]},
            ]
            (output,) = self.llm.chat(
                [{"role": "user", "content": content}], params, use_tqdm=False
            )
        outcome = read_outcome(output)
        return {
            "prompt_tokens": len(output.prompt_token_ids),
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [
                {str(t): p.logprob for t, p in step.items()} for step in output.outputs[0].logprobs
            ],
            "cached_tokens": outcome.cached_tokens,
            "loaded_tokens": outcome.loaded_tokens,
            "sources": dict(outcome.sources),
            "fusion_loaded": outcome.fusion_loaded,
        }

    def forget(self) -> None:
        """Wait for the stores, then empty vLLM's own caches."""
        if self.spec["cache_dir"]:
            self.settle(Path(self.spec["cache_dir"]))
            self.llm.collective_rpc(flush)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache")
        self.llm.llm_engine.reset_encoder_cache()

    def settle(self, folder: Path) -> None:
        """Until the files have not grown for a while: this LLM steps only while it has requests, so this steps it."""
        core = self.llm.llm_engine.engine_core.engine_core
        deadline = time.monotonic() + 60
        size = -1
        while size != (size := folder_bytes(folder)) and time.monotonic() < deadline:
            for _ in range(50):
                if core.scheduler.has_requests():
                    core.step_fn()
                time.sleep(0.005)

    def run(self) -> dict[str, list[Answer]]:
        passes: dict[str, list[Answer]] = {}

        def one(name: str, *, forget: bool = True, skip_kv: bool = False) -> None:
            results = passes.setdefault(name, [])
            if forget:
                self.forget()
            results.append(self.ask(len(results), name.startswith("sibling"), skip_kv))

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
                if not self.text:
                    one("fusion", skip_kv=True)
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
    runner.llm.llm_engine.engine_core.shutdown()
    return found


# ------------------------------------------------------------------ comparing


def compare(a: list[Answer], b: list[Answer]) -> dict[str, Any]:
    """Tokens one by one; log-probabilities as far as the tokens agree."""
    different = []
    largest = 0.0
    exact = 0
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        pairs = zip(x["tokens"], y["tokens"], strict=True)
        same = next((n for n, (s, t) in enumerate(pairs) if s != t), len(x["tokens"]))
        if same < len(x["tokens"]):
            different.append(
                {"sample": i, "first_difference": same, "a": x["tokens"], "b": y["tokens"]}
            )
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
    pairs = {
        f"{a} vs {b}": compare(passes[a], passes[b])
        for a, b in wanted
        if a in passes and b in passes
    }

    def lost(pair: str) -> int:
        return int(pairs[pair]["samples"] - pairs[pair]["same_tokens"]) if pair in pairs else 0

    wrong = []
    if exact:
        names = [f"{a} vs {b}" for a, b in EXACT.items()]
        found = {name: pairs[name] for name in names if name in pairs}
        wrong += [f"{name}: {c['bit_exact']} of {c['samples']} bit-exact" for name, c in found.items()
                  if c["bit_exact"] < c["samples"]]  # fmt: skip
        # Another shape may turn a near-tie: no worse than vLLM's own prefix cache does.
        wrong += [
            f"{name} vs cold: other tokens"
            for name in COMPUTED
            if lost(f"{name} vs cold") > lost("hot vs cold")
        ]
        wrong += [
            f"fusion, sample {i}: not loaded"
            for i, r in enumerate(passes.get("fusion", []))
            if r["fusion_loaded"] != 1
        ]
    for name, computed in COMPUTED.items():
        known = [f"{name} vs {other}" for other in computed if f"{name} vs {other}" in pairs]
        if not exact and known and all(lost(pair) for pair in known):
            wrong.append(
                f"{name}: other tokens than computed ones and than vLLM's own prefix cache"
            )
    for name in ("loaded", "restarted", "sibling_loaded") if exact else COMPUTED:
        loaded = [bool(r["loaded_tokens"]) for r in passes.get(name, [])]
        if loaded and not (all(loaded) if exact else any(loaded)):
            wrong.append(f"{name}: nothing was loaded for {loaded.count(False)} of {len(loaded)}")
    return {
        "wrong": wrong,
        "compared": pairs,
        "counts": {name: count(results) for name, results in passes.items()},
    }


def count(results: list[Answer]) -> dict[str, Any]:
    keys = ("prompt_tokens", "cached_tokens", "loaded_tokens", "fusion_loaded")
    sources = Counter[str]()
    for result in results:
        sources.update(result["sources"])
    totals = {key: sum(int(r[key] or 0) for r in results) for key in keys}
    return totals | {
        "kv_hits": sum(bool(r["loaded_tokens"]) for r in results),
        "sources": dict(sources),
    }


# ------------------------------------------------------------------ the calling process


def run_model(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A model's report; an engine that fails leaves its error, and what was compared until then."""
    made, start = name in FAMILIES or name == SHAPE, time.monotonic()
    report: dict[str, Any] = {
        "model": name,
        "weights": "drawn" if made else "real",
        "ranks": options.ranks,
    }
    passes: dict[str, list[Answer]] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        keep = ("samples", "ranks", "engine_args", "tiny")
        spec = {key: getattr(options, key) for key in keep} | {"name": name, "made": made}
        spec["model"] = (
            f"{folder}/model" if made else name if Path(name).is_dir() else get_preset(name).model
        )
        if made:  # before the engines start: of younger weights they keep nothing on disk
            write_model(name, Path(spec["model"]))
        environment = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `flush` goes to the ranks' processes
        }
        if name not in FAMILIES:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = (
                "0"  # the same model runner with and without connectors
            )
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


def write_model(name: str, directory: Path) -> None:
    directory.mkdir()
    if name in FAMILIES:
        write_family(name, directory)
        write_weights(directory, BOUND)
    else:
        write_shape(directory)
        write_weights(directory)


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
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--jobs", type=int, default=1, help="models at once")
    parser.add_argument("--limit", type=float, default=1800, help="seconds of one engine")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON, for vLLM")
    parser.add_argument(
        "--tiny", action="store_true", help="text prompts of a quarter of the length, for a CPU"
    )
    options = options_of(parser, lambda spec, answer: answer(run_here(spec)))
    names = [
        n
        for name in options.models.split(",")
        for n in (FAMILIES if name == "families" else [name])
    ]
    reports = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed([pool.submit(run_model, name, options) for name in names]):
            reports.append(done.result())
            write_json(options.out, reports)
            show(reports[-1])
    return int(any(report["wrong"] or "error" in report for report in reports))


if __name__ == "__main__":
    sys.exit(main())
