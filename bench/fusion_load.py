"""Time to first token when an image's encoder output comes back: encoder, GPU memory, our store, vLLM's example.

    python bench/fusion_load.py --out bench/results/h200/fusion-load.json
    python bench/fusion_load.py --tiny --out /tmp/fusion.json                    (on a CPU, to see that it runs)
    python bench/fusion_load.py --table bench/results/h200/fusion-load-3.json

The shape of a vision-language model (see models.py) with dummy weights, one prompt at a time, the KV always computed.
Each engine runs in a process of its own, one after the other:

    plain    ``encoder``: the encoder runs; ``gpu``: its output is still in vLLM's own encoder cache
    semkv    ``encoder``: it also stores; ``gpu``; ``host`` and ``disk``: its output is loaded from there
    example  ``encoder``, ``gpu`` and ``disk``: vLLM's ECExampleConnector

The image has been through the processor before, so that its time is not part of this.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import engines
from common import machine, write_json
from models import SHAPES, draw_picture

LEVELS = {"plain": ["gpu"], "semkv": ["gpu", "host", "disk"], "example": ["gpu", "disk"]}
COLUMNS = {
    "encoder runs": ("plain", "encoder"), "in GPU memory": ("plain", "gpu"),
    "in GPU memory, semkv on": ("semkv", "gpu"),
    "semkv, host": ("semkv", "host"), "semkv, disk": ("semkv", "disk"), "ECExampleConnector": ("example", "disk"),
}  # fmt: skip
# The second model runner of vLLM 0.26 has no encoder-cache connector; the process that asks holds the halves.
ENVIRONMENT = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def connector(engine: str, folder: str, host_bytes: int) -> dict[str, Any] | None:
    if engine == "plain":
        return None
    if engine == "example":
        extra: dict[str, Any] = {"shared_storage_path": folder}
        return {"ec_connector": "ECExampleConnector", "ec_role": "ec_both", "ec_connector_extra_config": extra}
    return {
        "ec_connector": "SemECConnector", "ec_connector_module_path": "semkv.connectors.ec", "ec_role": "ec_both",
        "ec_connector_extra_config": {"cache_dir": folder, "host_bytes": host_bytes},
    }  # fmt: skip


def checkpoint(spec: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Which model, as vLLM's arguments: one of the full shapes with dummy weights, or the tiny one of the package."""
    if spec["tiny"]:
        from semkv.presets import get_preset

        small = {"max_model_len": 512, "enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 1 << 28}
        return {"model": get_preset("minigqa").model, **small}
    SHAPES[spec["shape"]](Path(folder), None)
    return {"model": folder, "load_format": "dummy", "max_model_len": 8192, "gpu_memory_utilization": 0.5}


class Bench:
    """One engine in this process."""

    def __init__(self, spec: Mapping[str, Any], folder: str, model: str) -> None:
        from vllm import LLM
        from vllm.config import ECTransferConfig

        self.engine, self.folder, self.prompt_tokens = spec["engine"], folder, 0
        config = connector(self.engine, folder, spec["host_bytes"])
        self.llm: Any = LLM(
            **checkpoint(spec, model),
            limit_mm_per_prompt={"image": 1, "video": 0},
            seed=0,
            prefix_caching_hash_algo="sha256_cbor",
            ec_transfer_config=ECTransferConfig(**config) if config else None,
        )

    @property
    def halves(self) -> tuple[Any, Any]:
        """Our connector's scheduler half and worker half."""
        from vllm.distributed.ec_transfer import get_ec_transfer

        core = self.llm.llm_engine.engine_core.engine_core
        return core.scheduler.ec_connector.scheduler_half, get_ec_transfer().worker_half

    def ask(self, picture: Any) -> float:
        """Milliseconds until the first token."""
        from vllm import SamplingParams

        content = [{"type": "image_pil", "image_pil": picture}, {"type": "text", "text": "What is in this picture?"}]
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        start = time.perf_counter()
        (output,) = self.llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        self.prompt_tokens = len(output.prompt_token_ids)
        return (time.perf_counter() - start) * 1e3

    def forget(self, level: str) -> None:
        """Empty what lies above a level."""
        if self.engine == "semkv":
            self.halves[1].flush()
        self.llm.reset_prefix_cache()
        if level != "gpu":
            self.llm.llm_engine.reset_encoder_cache()
        if level == "disk":
            if self.engine == "semkv":
                self.halves[0].host.clear()
            engines.drop_pages(self.folder)

    def measure(self, side: int, repeats: int) -> dict[str, Any]:
        times: dict[str, list[float]] = {}
        for i in range(repeats + 2):
            picture = draw_picture(side * 1000 + i, side, side)
            if self.engine == "plain":
                self.ask(picture)  # through the processor
            for level in ["encoder", *LEVELS[self.engine]]:
                if level == "encoder" and self.engine != "plain":
                    self.ask(picture)
                    continue
                self.forget(level)
                milliseconds = self.ask(picture)
                if i > 1:
                    times.setdefault(level, []).append(milliseconds)
        medians = {name: round(statistics.median(values), 2) for name, values in times.items()}
        return {"size": side, "prompt_tokens": self.prompt_tokens, "median_ms": medians, "ms": times}


def run_here(spec: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as model:
        bench = Bench(spec, folder, model)
        rows = [bench.measure(side, spec["repeats"]) for side in spec["sides"]]
        counters = dict(bench.halves[0].counters) if bench.engine == "semkv" else {}
        return {"machine": machine("vllm", "torch"), "counters": counters, "rows": rows}


def table(result: Mapping[str, Any]) -> str:
    """Markdown: a line for each size of the image."""
    rows: dict[int, dict[str, Any]] = {}
    for engine, found in result["engines"].items():
        for row in found.get("rows", []):
            rows.setdefault(row.get("size", row.get("side")), {})[engine] = row
    text = ["| pixels | prompt tokens | " + " | ".join(COLUMNS) + " | host beyond GPU memory |"]
    text.append("|---" * (len(COLUMNS) + 3) + "|")
    for side, by in sorted(rows.items()):
        found = [by.get(engine, {}).get("median_ms", {}).get(level) for engine, level in COLUMNS.values()]
        cells = ["-" if value is None else f"{value:.1f}" for value in found]
        # Each picture against itself: the processor's share varies from one minute to the next.
        ms = by.get("semkv", {}).get("ms", {})
        apart = [a - b for a, b in zip(ms.get("host", []), ms.get("gpu", []), strict=True)]
        cells.append(f"{statistics.median(apart):+.1f}" if apart else "-")
        tokens = next(iter(by.values()))["prompt_tokens"]
        text.append(f"| {side} x {side} | {tokens} | " + " | ".join(cells) + " |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--shape", default="qwen3-vl-2b", choices=SHAPES)
    parser.add_argument("--sides", type=int, nargs="+", default=[256, 512, 768, 1024], help="pixels")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--host-gib", type=int, default=4)
    parser.add_argument("--limit", type=float, default=660, help="seconds of one engine")
    parser.add_argument("--tiny", action="store_true", help="the package's own model, for a CPU")
    parser.add_argument("--out", type=Path, default=Path("fusion-load.json"))
    parser.add_argument("--table", type=Path, help="print the table of a result instead")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        engines.child(options.child, run_here)
        return
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    settings = {"shape": options.shape, "sides": [96] if options.tiny else options.sides, "repeats": options.repeats}
    settings |= {"tiny": options.tiny, "host_bytes": options.host_gib << 30}
    result: dict[str, Any] = {"settings": settings, "engines": {}}
    for engine in options.engines:
        log = options.out.parent / "logs" / f"fusion-{engine}.log"
        result["engines"][engine] = found = engines.run_child(
            settings | {"engine": engine}, log, options.limit, ENVIRONMENT
        )
        print(engine, found.get("error", "measured"), flush=True)
        write_json(options.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
