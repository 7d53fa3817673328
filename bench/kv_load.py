"""Time to first token when the KV blocks of a prompt come back: from where, and at what cost for those who compute.

    python bench/kv_load.py --out bench/results/h200/kv-load.json
    python bench/kv_load.py --table bench/results/h200/kv-load.json        (prints the tables)

Random tokens through Qwen2.5-7B's shape with dummy weights. Each engine runs in a process of its own:

    plain        vLLM's prefix cache alone: ``cold`` computes everything, ``prefix`` finds it in GPU memory
    semkv        our connector: ``cold`` also stores, ``host`` loads from host memory, ``disk`` from files whose pages
                 were dropped from the page cache
    offload-cpu  vLLM's OffloadingConnector with enough host memory
    offload-fs   the same with its file tier, and a host tier too small to hold what is asked for
    example      vLLM's ExampleConnector
    lmcache      LMCache, where it is installed

One request at a time (median of ``--repeats``) and ``--concurrent`` at once (the time until all have their first
token). The floor is the prefix cache's time and the bytes over the rate of a plain copy from page-locked memory, both
measured in the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
ENGINES = ("plain", "semkv", "offload-cpu", "offload-fs", "example", "lmcache")
SMALL_TIER = 2 << 30  # of offload-fs: less than the prompts that are stored before one comes back


def connector(engine: str, folder: str, host_bytes: int) -> dict[str, Any] | None:
    """The transfer configuration of an engine."""
    if engine == "plain":
        return None
    extra: dict[str, Any] = {"cpu_bytes_to_use": host_bytes}
    name = "OffloadingConnector"
    if engine == "semkv":
        name, extra = "SemKVConnector", {"cache_dir": folder, "host_bytes": host_bytes, "queue_bytes": host_bytes // 2}
    elif engine == "offload-fs":
        tier = {"type": "fs", "root_dir": folder}
        extra = {"cpu_bytes_to_use": SMALL_TIER, "spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    elif engine == "example":
        name, extra = "ExampleConnector", {"shared_storage_path": folder}
    elif engine == "lmcache":
        name, extra = "LMCacheConnectorV1", {}
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return config | ({"kv_connector_module_path": "semkv.connectors.kv"} if engine == "semkv" else {})


class Bench:
    """One engine in this process."""

    def __init__(self, spec: dict[str, Any], folder: str) -> None:
        import numpy as np
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.spec, self.folder, self.engine = spec, folder, spec["engine"]
        self.rng = np.random.default_rng(0)
        config = connector(self.engine, folder, spec["host_bytes"])
        with tempfile.TemporaryDirectory() as model:
            (Path(model) / "config.json").write_text(json.dumps(SHAPE | spec["shape"]))
            self.llm: Any = LLM(
                model,
                load_format="dummy",
                skip_tokenizer_init=True,
                max_model_len=max(spec["tokens"]) + 64,
                enforce_eager=spec["eager"],
                seed=0,
                prefix_caching_hash_algo="sha256_cbor",
                kv_transfer_config=KVTransferConfig(**config) if config else None,
                **spec["engine_args"],
            )

    def ask(self, prompts: list[list[int]]) -> tuple[float, int]:
        """Milliseconds until every prompt has its first token, and the prompt tokens that were not computed."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        inputs = [{"prompt_token_ids": p} for p in prompts]
        start = time.perf_counter()
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return seconds * 1e3, sum(o.num_cached_tokens or 0 for o in outputs) // len(outputs)

    def prompts(self, tokens: int, count: int) -> list[list[int]]:
        return [self.rng.integers(10, 150_000, tokens).tolist() for _ in range(count)]

    def settle(self) -> None:
        """Until what was captured is stored."""
        if self.engine == "plain":
            return
        if self.engine == "semkv":
            self.worker.flush()
            return
        for _ in range(4):  # their stores go on with the steps of the engine
            self.ask(self.prompts(8, 1))
            time.sleep(0.05)

    @property
    def worker(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker_half

    def forget(self, level: str) -> None:
        """Empty vLLM's prefix cache and, for the disk, what lies above it."""
        for _ in range(50):
            if self.llm.reset_prefix_cache():
                break
            self.settle()
        if level != "disk":
            return
        if self.engine == "semkv":
            self.worker.pool.clear()
        else:
            for _ in range(SMALL_TIER // (2048 * 57344) + 4):  # push the prompt out of the small tier
                self.ask(self.prompts(2048, 1))
            self.settle()
            time.sleep(0.5)
            self.llm.reset_prefix_cache()
        drop_pages(self.folder)

    def measure(self, tokens: int, count: int, repeats: int) -> dict[str, Any]:
        """Medians by level, in milliseconds, and the tokens that were not computed."""
        levels = {"plain": [], "semkv": ["host", "disk"], "offload-fs": ["disk"], "example": ["disk"]}
        times: dict[str, list[float]] = {}
        cached: dict[str, int] = {}
        for i in range(repeats + 1):
            prompts = self.prompts(tokens, count)
            ways: list[tuple[str, Callable[[], None]]] = [("cold", lambda: None), ("prefix", self.settle)]
            ways += [(level, lambda level=level: self.forget(level)) for level in levels.get(self.engine, ["host"])]  # type: ignore[misc]
            for name, before in ways:
                before()
                milliseconds, cached[name] = self.ask(prompts)
                if i:  # the first time compiles
                    times.setdefault(name, []).append(milliseconds)
            self.forget("")
        return {
            "tokens": tokens, "requests": count, "not_computed": cached, "ms": times,
            "median_ms": {name: round(statistics.median(values), 2) for name, values in times.items()},
        }  # fmt: skip


def drop_pages(folder: str) -> None:
    os.sync()
    for path in Path(folder).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def child(spec: dict[str, Any]) -> None:
    """Measure one engine and write its results."""
    import torch
    import vllm

    folder, start = tempfile.mkdtemp(dir=spec["scratch"]), time.perf_counter()
    found: dict[str, Any] = {"vllm": vllm.__version__, "torch": torch.__version__, "rows": []}
    try:
        bench = Bench(spec, folder)
        found["start_s"] = round(time.perf_counter() - start, 1)
        gpu = torch.cuda.is_available()
        if gpu:
            found["device"] = torch.cuda.get_device_name(0)
            found["copy_gb_s"] = copy_rate()
            bench.ask(bench.prompts(max(spec["tokens"]), 1))
            torch.cuda.synchronize()
            free = torch.cuda.mem_get_info()[0]
        if spec["engine"] == "semkv":
            found["row_bytes"] = bench.worker.transfer.layout.row_bytes
            found["block_size"] = bench.worker.transfer.layout.block_size
        for count in (1, spec["concurrent"]):
            for tokens in spec["tokens"]:
                row = bench.measure(tokens, count, spec["repeats"] if count == 1 else 2)
                found["rows"].append(row)
                print(spec["engine"], tokens, count, row["median_ms"], row["not_computed"], flush=True)
                if spec["engine"] == "example":
                    shutil.rmtree(folder, ignore_errors=True)
                Path(folder).mkdir(exist_ok=True)
                Path(spec["out"]).write_text(json.dumps(found))
        if gpu:
            found["gpu_growth_mib"] = round((free - torch.cuda.mem_get_info()[0]) / 2**20)
        if spec["engine"] == "semkv":
            bench.settle()
            found["counters"] = bench.worker.counters.totals() | dict(bench.worker.pool.counters)
        Path(spec["out"]).write_text(json.dumps(found))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def copy_rate() -> float:
    """GB/s of a plain copy from page-locked memory to the device, 512 MiB."""
    import torch

    host, device = torch.empty(1 << 29, dtype=torch.uint8, pin_memory=True), torch.empty(1 << 29, dtype=torch.uint8)
    device, best = device.cuda(), 1e9
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    del device
    torch.cuda.empty_cache()
    return round((1 << 29) / best / 1e9, 1)


def run_engine(engine: str, options: argparse.Namespace) -> dict[str, Any]:
    if engine == "lmcache" and importlib.util.find_spec("lmcache") is None:
        return {"not_run": "LMCache is not installed"}
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "out.json"
        spec = {
            "engine": engine, "tokens": options.tokens, "repeats": options.repeats, "concurrent": options.concurrent,
            "host_bytes": options.host_gib << 30, "eager": options.eager, "out": str(out), "scratch": options.scratch,
            "shape": json.loads(options.shape), "engine_args": json.loads(options.engine_args),
        }  # fmt: skip
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "--child", json.dumps(spec)]
        failure = ""
        try:
            done = subprocess.run(command, env=environment | os.environ, timeout=options.timeout, check=False)
            failure = f"exit status {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            failure = f"more than {options.timeout} s"
        result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        return result | ({"failure": failure} if failure else {})


def tables(result: dict[str, Any]) -> str:
    """Markdown: one table for single requests and one for concurrent ones."""
    engines, text = result["engines"], []
    rows = {
        (name, row["requests"], row["tokens"]): row
        for name, engine in engines.items()
        for row in engine.get("rows", [])
    }
    ours = engines.get("semkv", {})
    per_token = ours.get("row_bytes", 0) / max(1, ours.get("block_size", 1))
    columns = [
        ("recompute", "plain", "cold"), ("prefix cache", "plain", "prefix"), ("semkv, host", "semkv", "host"),
        ("semkv, disk", "semkv", "disk"), ("Offloading, CPU", "offload-cpu", "host"),
        ("Offloading, fs", "offload-fs", "disk"), ("Example", "example", "disk"), ("cold, store on", "semkv", "cold"),
    ]  # fmt: skip
    for count in sorted({key[1] for key in rows}):
        title = "One request" if count == 1 else f"{count} requests at once, until all have their first token"
        text += [f"{title} (ms):", ""]
        text.append("| tokens | MB | floor | host / floor | " + " | ".join(c[0] for c in columns) + " | overhead |")
        text.append("|---" * (len(columns) + 5) + "|")
        for tokens in result["settings"]["tokens"]:

            def ms(engine: str, level: str, count: int = count, tokens: int = tokens) -> float | None:
                row = rows.get((engine, count, tokens))
                return row["median_ms"].get(level) if row else None

            nbytes = rows.get(("semkv", count, tokens), {}).get("not_computed", {}).get("host", 0) * per_token * count
            prefix, host = ms("plain", "prefix"), ms("semkv", "host")
            floor = prefix + nbytes / ours.get("copy_gb_s", 1) / 1e6 if prefix is not None else None
            plain, stored = ms("plain", "cold"), ms("semkv", "cold")
            cells = [str(tokens), f"{nbytes / 1e6:.0f}", number(floor)]
            cells.append(f"{host / floor:.2f}" if host and floor else "-")
            cells += [number(ms(engine, level)) for _, engine, level in columns]
            cells.append(f"{stored / plain - 1:+.1%}" if plain and stored else "-")
            text.append("| " + " | ".join(cells) + " |")
        text.append("")
    return "\n".join(text)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192, 16000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--concurrent", type=int, default=16)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--host-gib", type=int, default=32)
    parser.add_argument("--scratch", default=tempfile.gettempdir(), help="where the stores' folders go")
    parser.add_argument("--timeout", type=int, default=600, help="seconds an engine may take")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--shape", default="{}", help="JSON: changes of the model's configuration")
    parser.add_argument("--engine-args", default='{"gpu_memory_utilization": 0.8}', help="JSON")
    parser.add_argument("--out", type=Path, default=Path("kv-load.json"))
    parser.add_argument("--table", type=Path, help="print the tables of a result instead")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child))
        return
    if options.table:
        print(tables(json.loads(options.table.read_text())))
        return
    known = ("tokens", "repeats", "concurrent", "host_gib", "engine_args", "eager")
    result: dict[str, Any] = {
        "settings": {key: getattr(options, key) for key in known},
        "python": platform.python_version(),
        "engines": {},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for engine in options.engines:
        result["engines"][engine] = run_engine(engine, options)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(tables(result))


if __name__ == "__main__":
    main()
