"""Do loaded KV blocks and encoder outputs give the answers that computing them gives?

    python bench/identity.py --model DIR --samples 32 --out results.json
    python bench/identity.py --shape qwen3-vl-2b --samples 16 --out results.json

With ``--model`` a checkpoint directory is used as it is. Without it, a checkpoint with the full layer, head and hidden
sizes of the named model is written from its configuration alone, with a small tokenizer made on the spot and random
weights (`draw_weights`): nothing is downloaded.

Three engines run one after the other, each in a process of its own, always one prompt at a time and greedy:

    plain       no connectors    cold            everything computed
                                 hot             vLLM's own prefix cache has the prompt
                                 sibling_cold    another question on the same picture, everything computed
                                 sibling_hot     the same, the picture in vLLM's own prefix cache
    connected   both connectors  first           nothing stored yet; stores
                                 loaded          vLLM's caches emptied: KV comes from host memory
                                 fusion          vLLM's caches emptied, KV skipped: encoder outputs come from the store
                                 sibling_loaded  the picture's KV comes from the store
    restarted   both connectors  restarted       a new process finds what the other stored, on disk

Passes that do the same arithmetic on the same shapes must agree to the last bit of every log-probability: first and
fusion with cold, loaded and restarted with hot, sibling_loaded with sibling_hot. Loaded against cold computes the tail
of the prompt in another shape, so there the tokens are compared and the largest difference of a log-probability is
reported beside what vLLM's own prefix cache does (hot against cold).

The exit status is 1 when a pass that must agree does not, or when the stores were not used.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines

QUESTIONS = (
    "What color is the largest shape in this picture?",
    "Is there a red circle to the left of the square?",
    "How many different shapes can you see here?",
    "Which shape is closest to the bottom of the picture?",
    "Are there more circles than squares in the picture?",
)
EXACT = (
    ("first", "cold"),
    ("fusion", "cold"),
    ("loaded", "hot"),
    ("restarted", "hot"),
    ("sibling_loaded", "sibling_hot"),
)
CLOSE = (("hot", "cold"), ("loaded", "cold"), ("restarted", "cold"), ("sibling_loaded", "sibling_cold"))
MOST_PIXELS = (
    1280 * 32 * 32
)  # of the Qwen shapes; their own 13 to 17 million make vLLM's profiling encode 16,384 tokens
SKIP_KV = {"kv_transfer_params": {"semkv": {"skip": True}}}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


# ------------------------------------------------------------------ checkpoints of a shape


def make_tokenizer(directory: Path, tokens: list[str], **special: Any) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    names = ["<s>", "</s>", "<pad>", "<unk>", *tokens]
    bpe.train_from_iterator(
        QUESTIONS, trainers.BpeTrainer(vocab_size=600, special_tokens=names, initial_alphabet=alphabet)
    )
    marks = dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), names, strict=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **marks, **special)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return tokenizer


QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def qwen_ids(tokenizer: Any) -> dict[str, int]:
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, tokenizer.convert_tokens_to_ids(QWEN_TOKENS), strict=True))


def qwen3_vl_2b(directory: Path, layers: int | None) -> None:
    """https://huggingface.co/Qwen/Qwen3-VL-2B-Instruct/blob/main/config.json"""
    from transformers import Qwen2VLImageProcessor, Qwen3VLConfig, Qwen3VLProcessor, Qwen3VLVideoProcessor

    tokenizer = make_tokenizer(directory, QWEN_TOKENS)
    pixels = {"shortest_edge": 65536, "longest_edge": MOST_PIXELS}
    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels, patch_size=16),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(),
        chat_template=TEMPLATE,
    ).save_pretrained(directory)
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    text = {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": layers or 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
        "tie_word_embeddings": True, "rope_parameters": rope, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    }  # fmt: skip
    vision = {
        "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 2048, "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    }  # fmt: skip
    config = Qwen3VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=True,
        architectures=["Qwen3VLForConditionalGeneration"], dtype="bfloat16", **qwen_ids(tokenizer),
    )  # fmt: skip
    config.save_pretrained(directory)


def qwen2_5_vl_7b(directory: Path, layers: int | None) -> None:
    """https://huggingface.co/Qwen/Qwen2.5-VL-7B-Instruct/blob/main/config.json"""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    tokenizer = make_tokenizer(directory, QWEN_TOKENS)
    pixels = {"shortest_edge": 3136, "longest_edge": MOST_PIXELS}
    Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=TEMPLATE,
    ).save_pretrained(directory)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": layers or 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128000,
        "tie_word_embeddings": False, "rope_parameters": rope, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584, "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    }  # fmt: skip
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, tie_word_embeddings=False,
        architectures=["Qwen2_5_VLForConditionalGeneration"], dtype="bfloat16", **qwen_ids(tokenizer),
    )  # fmt: skip
    config.save_pretrained(directory)


def internvl3_5_2b(directory: Path, layers: int | None) -> None:
    """https://huggingface.co/OpenGVLab/InternVL3_5-2B-HF/blob/main/config.json, tiles of 448 pixels."""
    from transformers import GotOcr2ImageProcessor, InternVLConfig, InternVLProcessor, InternVLVideoProcessor

    names = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    special = {"extra_special_tokens": {**names, "video_token": "<video>"}}
    tokenizer = make_tokenizer(directory, [*names.values(), "<video>"], **special)
    size = {"height": 448, "width": 448}
    InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=12),
        tokenizer=tokenizer,
        video_processor=InternVLVideoProcessor(size=size),
        image_seq_length=256,
        chat_template=TEMPLATE,
    ).save_pretrained(directory)
    text = {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": layers or 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip
    vision = {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "image_size": [448, 448], "patch_size": [14, 14], "attention_bias": True,
    }  # fmt: skip
    config = InternVLConfig(
        text_config=text, vision_config=vision, image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=256, downsample_ratio=0.5, tie_word_embeddings=True,
        architectures=["InternVLForConditionalGeneration"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(directory)


SHAPES: dict[str, Callable[[Path, int | None], None]] = {
    "qwen3-vl-2b": qwen3_vl_2b,
    "internvl3.5-2b": internvl3_5_2b,
    "qwen2.5-vl-7b": qwen2_5_vl_7b,
}


def draw_weights(model: Any, bound: float = 0.04) -> None:
    """A usual initialisation: matrices uniform within 0.04 (standard deviation 0.023), biases within half of that.

    Norms are 1, the ``A`` of a state space model -1: its states decay.

    Every tensor has the seed of its name. vLLM's own dummy weights will not do: norms are about zero, tensors of one
    shape are equal, and all is so small that no answer depends on the KV cache.
    """
    import zlib

    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():  # tied ones come once
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
            within = bound if parameter.ndim >= 2 else bound / 2
            if parameter.ndim >= 2 or name.endswith("bias"):
                parameter.uniform_(-within, within, generator=generator)
            else:
                parameter.fill_(-1.0 if name.endswith(".A") else 1.0)


LOAD_FORMAT = "dummy_drawn"  # our connectors tell weights of a format called dummy apart by configuration and seed


def register_loader() -> None:
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class DrawnLoader(BaseModelLoader):  # type: ignore[misc]
        """Weights by `draw_weights`, before vLLM packs them for its kernels."""

        def download_model(self, model_config: Any) -> None:
            return

        def load_weights(self, model: Any, model_config: Any) -> None:
            draw_weights(model, **(self.load_config.model_loader_extra_config or {}))

    register_model_loader(LOAD_FORMAT)(DrawnLoader)


# ------------------------------------------------------------------ one engine


def draw(seed: int, width: int, height: int) -> Any:
    """A picture of a few coloured shapes on noise; every seed another."""
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


def flush(_worker: Any) -> None:
    """Wait until a rank's encoder outputs, and its KV where it stores by itself, are on disk."""
    from vllm.distributed.ec_transfer import get_ec_transfer
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    for half in (getattr(connector, "worker_half", None) for connector in (get_kv_transfer_group(), get_ec_transfer())):
        if half is not None:
            half.flush()


class Runner:
    """One vLLM engine, asked one prompt at a time."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import ECTransferConfig, KVTransferConfig
        from vllm.platforms import current_platform

        from semkv.connectors import register

        register()  # installed, vLLM finds the connectors by itself
        register_loader()
        self.spec, connectors = spec, {}
        if spec["cache_dir"]:
            extra = {"cache_dir": spec["cache_dir"]}
            connectors = {
                "kv_transfer_config": KVTransferConfig(
                    kv_connector="SemKVConnector", kv_role="kv_both", kv_connector_extra_config=extra
                ),
                "ec_transfer_config": ECTransferConfig(
                    ec_connector="SemECConnector", ec_role="ec_both", ec_connector_extra_config=extra
                ),
            }
        cpu = current_platform.is_cpu()
        memory = (
            {"kv_cache_memory_bytes": 1 << 30, "block_size": 32}
            if cpu
            else {"gpu_memory_utilization": spec["gpu_memory_utilization"]}
        )
        self.llm = LLM(
            spec["model"],
            load_format=LOAD_FORMAT if spec["dummy"] else "auto",
            dtype="bfloat16",
            max_model_len=spec["max_model_len"],
            enforce_eager=cpu or spec["eager"],
            tensor_parallel_size=spec["ranks"],
            limit_mm_per_prompt={"image": 1, "video": 0},
            disable_log_stats=False,  # or vLLM does not say where loaded tokens came from
            **memory,
            **connectors,
        )

    def ask(self, sample: int, question: int, skip_kv: bool = False) -> dict[str, Any]:
        from vllm import SamplingParams

        from semkv.connectors.outcome import read_outcome

        content = [
            {"type": "image_pil", "image_pil": draw(sample, *self.spec["picture"])},
            {"type": "text", "text": QUESTIONS[question % len(QUESTIONS)]},
        ]
        params = SamplingParams(
            max_tokens=self.spec["max_tokens"], temperature=0.0, logprobs=5, ignore_eos=True, detokenize=False,
            extra_args=SKIP_KV if skip_kv else None,
        )  # fmt: skip
        (output,) = self.llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        outcome = read_outcome(output)
        return {
            "prompt_tokens": len(output.prompt_token_ids),
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [{str(t): p.logprob for t, p in step.items()} for step in output.outputs[0].logprobs],
            "cached_tokens": outcome.cached_tokens,
            "loaded_tokens": outcome.loaded_tokens,
            "sources": dict(outcome.sources),
            "fusion_loaded": outcome.fusion_loaded,
            "fusion_encoded": outcome.fusion_encoded,
        }

    def forget(self) -> None:
        """Wait for the stores, then empty vLLM's own caches."""
        if self.spec["cache_dir"]:
            engines.settle_llm(self.llm, Path(self.spec["cache_dir"]))
            self.llm.collective_rpc(flush)
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache")
        self.llm.llm_engine.reset_encoder_cache()

    def run(self) -> dict[str, list[dict[str, Any]]]:
        passes: dict[str, list[dict[str, Any]]] = {}

        def one(name: str, forget: bool, question: int = 0, skip_kv: bool = False) -> None:
            results = passes.setdefault(name, [])
            if forget:
                self.forget()
            results.append(self.ask(len(results), len(results) + question, skip_kv))

        for _ in range(self.spec["samples"]):
            if self.spec["role"] == "plain":
                one("cold", forget=True)
                one("hot", forget=False)
                one("sibling_hot", forget=False, question=1)
                one("sibling_cold", forget=True, question=1)
            elif self.spec["role"] == "connected":
                one("first", forget=True)
                one("loaded", forget=True)
                one("fusion", forget=True, skip_kv=True)
                one("sibling_loaded", forget=True, question=1)
            else:
                one("restarted", forget=True)
        self.forget()
        return passes


def child(spec: dict[str, Any]) -> None:
    """Run one engine and write its answers to ``spec['out']``."""
    import torch
    import vllm

    start = time.perf_counter()
    runner = Runner(spec)
    ready = time.perf_counter()
    passes = runner.run()
    done = time.perf_counter()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "device": device}
    result = {"passes": passes, "start_s": ready - start, "run_s": done - ready, **versions}
    Path(spec["out"]).write_text(json.dumps(result))
    runner.llm.llm_engine.engine_core.shutdown()


# ------------------------------------------------------------------ comparing


def compare(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens one by one; log-probabilities as far as the tokens agree."""
    different, largest, exact = [], 0.0, 0
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        same = next(
            (n for n, (s, t) in enumerate(zip(x["tokens"], y["tokens"], strict=True)) if s != t), len(x["tokens"])
        )
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


def count(results: list[dict[str, Any]]) -> dict[str, Any]:
    keys = ("prompt_tokens", "cached_tokens", "loaded_tokens", "fusion_loaded", "fusion_encoded", "load_failed")
    totals = {key: sum(int(r[key] or 0) for r in results) for key in keys}
    sources = Counter[str]()
    for result in results:
        sources.update(result["sources"])
    return {"kv_hits": sum(bool(r["loaded_tokens"]) for r in results), **totals, "sources": dict(sources)}


def verdict(passes: dict[str, list[dict[str, Any]]], exact: dict[str, Any], close: dict[str, Any]) -> list[str]:
    """What went wrong, if anything."""
    wrong = [
        f"{k}: {c['bit_exact']} of {c['samples']} bit-exact" for k, c in exact.items() if c["bit_exact"] < c["samples"]
    ]
    # Another shape may turn a near-tie: no worse than vLLM's own prefix cache does.
    allowed = close["hot vs cold"]["samples"] - close["hot vs cold"]["same_tokens"]
    wrong += [
        f"{name}: {close[name]['same_tokens']} of {close[name]['samples']} with the same tokens"
        for name in ("loaded vs cold", "restarted vs cold")
        if name in close and close[name]["samples"] - close[name]["same_tokens"] > allowed
    ]
    for name in ("loaded", "restarted", "sibling_loaded"):
        for i, r in enumerate(passes.get(name, [])):
            if not r["loaded_tokens"] or r["load_failed"]:
                wrong.append(f"{name}, sample {i}: nothing was loaded")
    wrong += [f"fusion, sample {i}: not loaded" for i, r in enumerate(passes["fusion"]) if r["fusion_loaded"] != 1]
    return wrong


def run_engine(role: str, spec: dict[str, Any], work: Path) -> dict[str, Any]:
    out = work / f"{role}.json"
    spec = spec | {"role": role, "out": str(out), "cache_dir": "" if role == "plain" else str(work / "cache")}
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the same model runner with and without connectors
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `flush` goes to the ranks' processes
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
    }
    subprocess.run([sys.executable, __file__, "--child", json.dumps(spec)], env=environment, check=True)
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint directory, or the name of a preset")
    parser.add_argument("--shape", choices=["minigqa-vlm", *SHAPES], help="random weights in the shape of this model")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--picture", default="500x375", help="width x height in pixels")
    parser.add_argument("--layers", type=int, help="fewer decoder layers, for a quick look")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--no-restart", action="store_true", help="leave the third engine out")
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.6)
    parser.add_argument("--out", type=Path, default=Path("identity.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return 0
    if not args.model and not args.shape:
        parser.error("--model or --shape is needed")

    with tempfile.TemporaryDirectory() as name:
        work, model, dummy = Path(name), args.model or "", False
        if not model and args.shape in SHAPES:
            model, dummy = str(work / args.shape), True
            Path(model).mkdir()
            SHAPES[args.shape](Path(model), args.layers)
        elif not model or not Path(model).is_dir():
            from semkv.presets import PRESETS

            model = PRESETS[model or "minigqa"].model
        width, height = (int(n) for n in args.picture.split("x"))
        positions = json.loads((Path(model) / "config.json").read_text()).get("text_config", {})
        longest = min(args.max_model_len, positions.get("max_position_embeddings", args.max_model_len))
        spec = {
            "model": model, "dummy": dummy, "samples": args.samples, "max_tokens": args.max_tokens,
            "max_model_len": longest, "picture": [width, height], "eager": args.eager, "ranks": args.ranks,
            "gpu_memory_utilization": args.gpu_memory_utilization,
        }  # fmt: skip
        roles = ["plain", "connected"] + ([] if args.no_restart else ["restarted"])
        engines = {role: run_engine(role, spec, work) for role in roles}

    passes = {name: results for e in engines.values() for name, results in e["passes"].items()}
    exact = {f"{a} vs {b}": compare(passes[a], passes[b]) for a, b in EXACT if a in passes}
    close = {f"{a} vs {b}": compare(passes[a], passes[b]) for a, b in CLOSE if a in passes}
    wrong = verdict(passes, exact, close)
    report = {
        "model": args.model or args.shape,
        "weights": "drawn" if dummy else "real",
        "layers": args.layers,
        **{key: engines["plain"][key] for key in ("vllm", "torch", "device")},
        "settings": {k: spec[k] for k in ("samples", "max_tokens", "max_model_len", "picture", "eager", "ranks")},
        "distinct_answers": len({tuple(r["tokens"]) for r in passes["cold"]}),
        "wrong": wrong,
        "must_agree": exact,
        "other_shapes": close,
        "counts": {name: count(results) for name, results in passes.items()},
        "start_s": {role: round(e["start_s"], 1) for role, e in engines.items()},
        "run_s": {role: round(e["run_s"], 1) for role, e in engines.items()},
    }
    args.out.write_text(json.dumps(report, indent=1))
    for title, group in (("must agree", exact), ("other shapes", close)):
        for pair, c in group.items():
            print(
                f"{title:13} {pair:30} same tokens {c['same_tokens']}/{c['samples']}  bit-exact {c['bit_exact']}"
                f"/{c['samples']}  max log-probability difference {c['max_logprob_difference']:.2e}"
            )
    for name, totals in report["counts"].items():
        print(f"{name:15} {totals}")
    print("distinct answers:", report["distinct_answers"], "of", args.samples)
    print("\n".join(wrong) or "identical")
    return int(bool(wrong))


if __name__ == "__mp_main__":  # the process of a rank
    register_loader()
if __name__ == "__main__":
    sys.exit(main())
