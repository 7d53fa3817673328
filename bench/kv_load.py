"""Time to first token when the KV blocks of a prompt come back: from where, and at what cost for those who compute.

    python bench/kv_load.py --out bench/results/h200/kv-load.json
    python bench/kv_load.py --engines plain,semkv --lengths 512,8192 --requests 16 --budget 300 --out ...   (a part)
    python bench/kv_load.py --dry-run                                             (the plan, with rough times)
    python bench/kv_load.py --tiny --out /tmp/kv.json                             (on a CPU, to see that it runs)
    python bench/kv_load.py --table bench/results/h200/kv-load.json               (prints the tables)

Random tokens through Qwen2.5-7B's shape with dummy weights. Each engine runs in a process of its own (`load_runs`):

    plain        vLLM's prefix cache alone: ``cold`` computes everything, ``prefix`` finds it in GPU memory
    semkv        our connector: ``cold`` also stores, ``host`` loads from host memory, ``disk`` from files whose pages
                 were dropped from the page cache (with ``--break-even`` only where that pays)
    offload-cpu  vLLM's OffloadingConnector with enough host memory
    offload-fs   the same with its file tier, and a host tier too small to hold what is asked for
    example      vLLM's ExampleConnector
    lmcache      LMCache 0.5.3 with its server process and enough host memory, where it is installed

One request at a time, and several at once (the time until all have their first token): medians of ``--repeats``. The
floor is the prefix cache's time and the bytes over the rate of a plain copy from page-locked memory, both measured. It
comes from another process, and processes differ by more than what is to be told apart; so each host hit is also set
against the prefix cache of its own process, asked the same a moment before ("of the same process").
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import load_runs
from load_runs import Cell, cell_of, number

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
TINY = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 151000,
}  # fmt: skip
TINY_ENGINE = {"kv_cache_memory_bytes": 1 << 28, "block_size": 32, "enforce_eager": True}
ENGINES = ("plain", "semkv", "offload-cpu", "offload-fs", "example", "lmcache")
NOT_ON_A_CPU = ("offload-cpu", "offload-fs", "lmcache")
LMCACHE_PORT = 5655
SMALL_TIER = 2 << 30  # of offload-fs: less than the prompts that are stored before one comes back
LEVELS = {"plain": [], "semkv": ["host", "disk"], "offload-fs": ["disk"], "example": ["disk"]}


def connector(engine: str, folder: str, spec: Mapping[str, Any]) -> dict[str, Any] | None:
    """The transfer configuration of an engine."""
    if engine == "plain":
        return None
    host_bytes = spec["host_bytes"]
    extra: dict[str, Any] = {"cpu_bytes_to_use": host_bytes}
    name = "OffloadingConnector"
    if engine == "semkv":
        name, extra = "SemKVConnector", {"cache_dir": folder, "host_bytes": host_bytes, "queue_bytes": host_bytes // 2}
        extra["break_even"] = spec["break_even"]
    elif engine == "offload-fs":
        tier = {"type": "fs", "root_dir": folder}
        extra = {"cpu_bytes_to_use": SMALL_TIER, "spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    elif engine == "example":
        name, extra = "ExampleConnector", {"shared_storage_path": folder}
    elif engine == "lmcache":
        # not LMCacheConnectorV1: by its source (0.5.3) it moves half the bytes of vLLM 0.26's packed blocks
        name, extra = "LMCacheMPConnector", {"lmcache.mp.port": LMCACHE_PORT}
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return config | ({"kv_connector_module_path": "semkv.connectors.kv"} if engine == "semkv" else {})


@contextmanager
def lmcache_server(spec: Mapping[str, Any]) -> Iterator[None]:
    """LMCache's server while its engine runs: all in page-locked host memory, taken at once; chunks of 256 tokens."""
    if spec["engine"] != "lmcache":
        yield
        return
    command = ["timeout", "-k10", str(spec["budget"] + load_runs.GRACE_S)]  # its own end, should this process be killed
    command += [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--port", str(LMCACHE_PORT)]
    command += ["--l1-size-gb", str(spec["host_bytes"] / 2**30), "--no-l1-use-lazy", "--eviction-policy", "LRU"]
    command += ["--supported-transfer-mode", "lmcache_driven", "--disable-observability"]
    server = subprocess.Popen(command, env=os.environ | {"LMCACHE_TRACK_USAGE": "false"})
    try:
        yield
    finally:
        server.terminate()
        server.wait()


class Bench:
    """One engine in this process."""

    def __init__(self, spec: Mapping[str, Any], folder: str) -> None:
        import numpy as np
        import torch
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.spec, self.folder, self.engine = spec, folder, spec["engine"]
        self.levels = [level for level in LEVELS.get(self.engine, ["host"]) if level != "disk" or spec["disk"]]
        self.rng = np.random.default_rng(0)
        config = connector(self.engine, folder, spec)
        with tempfile.TemporaryDirectory() as model:
            (Path(model) / "config.json").write_text(json.dumps(SHAPE | spec["shape"]))
            self.llm: Any = LLM(
                model,
                load_format="dummy",
                skip_tokenizer_init=True,
                max_model_len=max(size for size, _ in spec["cells"]) + 64,
                seed=0,
                prefix_caching_hash_algo="sha256_cbor",
                kv_transfer_config=KVTransferConfig(**config) if config else None,
                **spec["engine_args"],
            )

        self.on_gpu = torch.cuda.is_available()
        if self.on_gpu:
            self.copy_gb_s = copy_rate()
            self.ask(self.prompts(max(size for size, _ in spec["cells"]), 1))
            torch.cuda.synchronize()
            self.free = torch.cuda.mem_get_info()[0]

    def facts(self) -> dict[str, Any]:
        import torch

        found: dict[str, Any] = {}
        if self.on_gpu:
            found = {"copy_gb_s": self.copy_gb_s}
            found["gpu_growth_mib"] = round((self.free - torch.cuda.mem_get_info()[0]) / 2**20)
        if self.engine == "semkv":
            self.settle()
            found["counters"] = self.worker.counters.totals() | dict(self.worker.pool.counters)
        return found

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
        else:  # or the prefix cache would be measured under another name
            raise RuntimeError("vLLM's prefix cache cannot be emptied: the connector holds blocks")
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

    def measure(self, cell: Cell, repeats: int, in_time: Callable[[], bool]) -> dict[str, Any]:
        """Medians by level, in milliseconds, and the tokens that were not computed."""
        times: dict[str, list[float]] = {}
        cached: dict[str, int] = {}
        for i in range(repeats + 1):
            if i > 1 and not in_time():
                break
            prompts = self.prompts(cell.size, cell.requests)
            ways: list[tuple[str, Callable[[], None]]] = [("cold", lambda: None), ("prefix", self.settle)]
            ways += [(level, lambda level=level: self.forget(level)) for level in self.levels]  # type: ignore[misc]
            for name, before in ways:
                before()
                milliseconds, cached[name] = self.ask(prompts)
                if i:  # the first time compiles
                    times.setdefault(name, []).append(milliseconds)
            self.forget("")
        if self.engine == "example":  # it has no bound
            shutil.rmtree(self.folder, ignore_errors=True)
            Path(self.folder).mkdir()
        row = {"not_computed": cached, "ms": times}
        if self.engine == "semkv":
            layout = self.worker.transfer.layout
            row["bytes"] = cached["host"] // layout.block_size * layout.row_bytes * cell.requests
        if self.on_gpu:
            row["copy_gb_s"] = self.copy_gb_s
        return row | {"median_ms": {name: round(statistics.median(values), 2) for name, values in times.items()}}


def drop_pages(folder: str) -> None:
    os.sync()
    for path in Path(folder).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


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


def estimate(engine: str, cell: Cell) -> float:
    """Seconds on an H200, roughly: from the results of the first runs."""
    nbytes, cold = cell.size * cell.requests * 57_344, 0.01 + 25e-6 * cell.size * cell.requests
    once = 2 * cold
    if engine == "semkv":
        once += nbytes / 1e9 + nbytes / 2.3e9
    elif engine == "offload-fs":
        once += nbytes / 1e9 + nbytes / 2.3e9 + 2.5
    elif engine == "example":
        once += cold + nbytes / 0.5e9
    return once * 6


def tables(result: Mapping[str, Any]) -> str:
    """Markdown: one table for each number of requests at once."""
    text: list[str] = []
    columns = [
        ("recompute", "plain", "cold"), ("prefix cache", "plain", "prefix"), ("semkv, host", "semkv", "host"),
        ("semkv, disk", "semkv", "disk"), ("Offloading, CPU", "offload-cpu", "host"),
        ("Offloading, fs", "offload-fs", "disk"), ("Example", "example", "disk"), ("LMCache", "lmcache", "host"),
        ("cold, store on", "semkv", "cold"),
    ]  # fmt: skip
    counts = {row["requests"] for engine in result["engines"].values() for row in engine.get("rows", [])}
    for count in sorted(counts):
        title = "One request" if count == 1 else f"{count} requests at once, until all have their first token"
        text += [f"{title} (ms):", ""]
        names = ["tokens", "MB", "floor", "host / floor", "of the same process", *(c[0] for c in columns), "overhead"]
        text.append("| " + " | ".join(names) + " |")
        text.append("|---" * len(names) + "|")
        for tokens in load_runs.sizes(result, count):

            def ms(engine: str, level: str, count: int = count, tokens: int = tokens) -> float | None:
                value: float | None = cell_of(result, engine, tokens, count).get("median_ms", {}).get(level)
                return value

            ours = cell_of(result, "semkv", tokens, count)
            nbytes, rate = moved(ours)
            prefix, host, plain, stored = (
                ms("plain", "prefix"),
                ms("semkv", "host"),
                ms("plain", "cold"),
                ms("semkv", "cold"),
            )
            floor = prefix + nbytes / rate / 1e6 if prefix is not None and rate else None
            cells = [str(tokens), f"{nbytes / 1e6:.0f}", number(floor)]
            cells.append(f"{host / floor:.2f}" if host and floor else "-")
            pairs = zip(ours.get("ms", {}).get("prefix", ()), ours.get("ms", {}).get("host", ()), strict=False)
            own = [one / (found + nbytes / rate / 1e6) for found, one in pairs] if rate else []
            cells.append(f"{statistics.median(own):.2f}" if own else "-")
            cells += [number(ms(engine, level)) for _, engine, level in columns]
            cells.append(f"{stored / plain - 1:+.1%}" if plain and stored else "-")
            text.append("| " + " | ".join(cells) + " |")
        text.append("")
    return "\n".join(text)


def moved(row: Mapping[str, Any]) -> tuple[float, float]:
    """The bytes that came from host memory, and the rate of a plain copy in GB/s on that machine; 0 for unknown."""
    facts = row.get("run", {})
    nbytes = row.get("bytes")
    if nbytes is None:  # the first form of these files
        per_token = facts.get("row_bytes", 0) / max(1, facts.get("block_size", 1))
        nbytes = row.get("not_computed", {}).get("host", 0) * per_token * row.get("requests", 1)
    return nbytes, row.get("copy_gb_s") or facts.get("copy_gb_s", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    load_runs.add_arguments(parser, ENGINES, "kv-load.json")
    parser.add_argument("--lengths", type=load_runs.whole_numbers, help="tokens; 512,2048,8192,16000 by default")
    parser.add_argument("--requests", type=load_runs.whole_numbers, help="at once; 1,16 by default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--host-gib", type=int, default=32)
    parser.add_argument("--break-even", action="store_true", help="let semkv refuse loads that do not pay")
    parser.add_argument("--no-disk", action="store_true", help="nothing below host memory")
    parser.add_argument("--scratch", default=tempfile.gettempdir(), help="where the stores' folders go")
    parser.add_argument("--shape", default="{}", help="JSON: changes of the model's configuration")
    parser.add_argument("--engine-args", default='{"gpu_memory_utilization": 0.8}', help="JSON")
    options = parser.parse_args()
    if options.child:
        spec = json.loads(options.child)
        with tempfile.TemporaryDirectory(dir=spec["scratch"]) as folder, lmcache_server(spec):
            load_runs.child(spec, lambda spec: Bench(spec, folder))
        return
    shape, arguments = json.loads(options.shape), json.loads(options.engine_args)
    lengths, requests, host = options.lengths or [512, 2048, 8192, 16000], options.requests or [1, 16], options.host_gib
    if options.tiny:
        shape, arguments, host = TINY, TINY_ENGINE, 1
        lengths, requests = options.lengths or [128, 256], options.requests or [1, 4]
        options.engines = [engine for engine in options.engines if engine not in NOT_ON_A_CPU]
    if "lmcache" in options.engines and importlib.util.find_spec("lmcache") is None:
        print("lmcache: not installed, left out")
        options.engines.remove("lmcache")
    settings = {
        "shape": shape, "engine_args": arguments, "host_bytes": host << 30, "break_even": options.break_even,
    }  # fmt: skip
    place = {"scratch": options.scratch, "disk": not options.no_disk}
    cells = [Cell(size, count) for count in requests for size in lengths]
    load_runs.run(options, settings, cells, estimate=estimate, tables=tables, place=place)


if __name__ == "__main__":
    main()
