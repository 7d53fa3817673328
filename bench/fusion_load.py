"""Time to first token when an image's encoder output comes back: encoder, GPU memory, our store, vLLM's example.

    python bench/fusion_load.py --out bench/results/h200/fusion-load-4.json
    python bench/fusion_load.py --tiny --out /tmp/fusion.json                    (on a CPU, to see that it runs)
    python bench/fusion_load.py --table bench/results/h200/fusion-load-4.json

Qwen3-VL-2B's shape with dummy weights, one prompt at a time, the KV always computed.
Each engine runs in a process of its own, one after the other:

    plain    ``encoder``: the encoder runs; ``gpu``: its output is still in vLLM's own encoder cache
    semkv    ``gpu``; ``pages`` and ``disk``: its output is read from a file that is in the page cache, or not
    example  the same with vLLM's ECExampleConnector

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

from common import drop_pages, machine, options_of, run_child, write_json
from models import draw_picture, write_shape

STORED = ["gpu", "pages", "disk"]
LEVELS = {"plain": ["encoder", "gpu"], "semkv": STORED, "example": STORED}
COLUMNS = {
    "encoder runs": ("plain", "encoder"), "in GPU memory": ("plain", "gpu"),
    "in GPU memory, semkv on": ("semkv", "gpu"),
    "semkv, page cache": ("semkv", "pages"), "semkv, disk": ("semkv", "disk"),
    "ECExampleConnector, page cache": ("example", "pages"), "ECExampleConnector, disk": ("example", "disk"),
}  # fmt: skip
SIDES = [256, 512, 768, 1024]  # pixels
LIMIT_S = 660  # of one engine
# The process that asks holds the connector's halves.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def connector(engine: str, folder: str) -> dict[str, Any] | None:
    if engine == "plain":
        return None
    if engine == "example":
        extra: dict[str, Any] = {"shared_storage_path": folder}
        return {
            "ec_connector": "ECExampleConnector",
            "ec_role": "ec_both",
            "ec_connector_extra_config": extra,
        }
    return {
        "ec_connector": "SemECConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": {"cache_dir": folder},
    }


def checkpoint(spec: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Which model, as vLLM's arguments: one of the full shapes with dummy weights, or the tiny one of the package."""
    if spec["tiny"]:
        from semkv.config import get_preset

        small = {
            "max_model_len": 512,
            "enforce_eager": True,
            "block_size": 32,
            "kv_cache_memory_bytes": 1 << 28,
        }
        return {"model": get_preset("minigqa").model, **small}
    write_shape(Path(folder))
    return {
        "model": folder,
        "load_format": "dummy",
        "max_model_len": 8192,
        "gpu_memory_utilization": 0.5,
    }


class Bench:
    """One engine in this process."""

    def __init__(self, spec: Mapping[str, Any], folder: str, model: str) -> None:
        from vllm import LLM
        from vllm.config import ECTransferConfig

        from semkv_vllm import register

        register()  # installed, vLLM finds the connector by itself
        self.engine = spec["engine"]
        self.folder = folder
        self.prompt_tokens = 0
        config = connector(self.engine, folder)
        self.llm: Any = LLM(
            **checkpoint(spec, model),
            limit_mm_per_prompt={"image": 1, "video": 0},
            seed=0,
            ec_transfer_config=ECTransferConfig(**config) if config else None,
        )

    def ask(self, picture: Any) -> float:
        """Milliseconds until the first token."""
        from vllm import SamplingParams

        content = [
            {"type": "image_pil", "image_pil": picture},
            {"type": "text", "text": "What is in this picture?"},
        ]
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        start = time.perf_counter()
        (output,) = self.llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        self.prompt_tokens = len(output.prompt_token_ids)
        return (time.perf_counter() - start) * 1e3

    def forget(self, level: str) -> None:
        """Empty what lies above a level."""
        if self.engine == "semkv":
            from vllm.distributed.ec_transfer import get_ec_transfer

            get_ec_transfer().worker_half.flush()
        self.llm.reset_prefix_cache()
        if level != "gpu":
            self.llm.llm_engine.reset_encoder_cache()
        if level == "disk":
            drop_pages(Path(self.folder))

    def measure(self, side: int, repeats: int) -> dict[str, Any]:
        times: dict[str, list[float]] = {}
        for i in range(repeats + 2):
            picture = draw_picture(side * 1000 + i, side, side)
            self.ask(picture)  # through the processor, and into the store
            for level in LEVELS[self.engine]:
                self.forget(level)
                milliseconds = self.ask(picture)
                if i > 1:
                    times.setdefault(level, []).append(milliseconds)
        medians = {name: round(statistics.median(values), 2) for name, values in times.items()}
        return {
            "size": side,
            "prompt_tokens": self.prompt_tokens,
            "median_ms": medians,
            "ms": times,
        }


def run_here(spec: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as model:
        bench = Bench(spec, folder, model)
        rows = [bench.measure(side, spec["repeats"]) for side in spec["sides"]]
        return {"machine": machine("vllm", "torch"), "rows": rows}


def table(result: Mapping[str, Any]) -> str:
    """Markdown: a line for each size of the image."""
    rows: dict[int, dict[str, Any]] = {}
    for engine, found in result["engines"].items():
        for row in found.get("rows", []):
            rows.setdefault(row["size"], {})[engine] = row
    text = [
        "| pixels | prompt tokens | " + " | ".join(COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for side, by in sorted(rows.items()):
        found = [
            by.get(engine, {}).get("median_ms", {}).get(level) for engine, level in COLUMNS.values()
        ]
        cells = ["-" if value is None else f"{value:.1f}" for value in found]
        tokens = next(iter(by.values()))["prompt_tokens"]
        text.append(f"| {side} x {side} | {tokens} | " + " | ".join(cells) + " |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="the package's own model, for a CPU")
    parser.add_argument("--table", type=Path, help="print the table of a result instead")
    options = options_of(parser, lambda spec, answer: answer(run_here(spec)))
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    settings = {
        "sides": [96] if options.tiny else SIDES,
        "repeats": options.repeats,
        "tiny": options.tiny,
    }
    result: dict[str, Any] = {"settings": settings, "engines": {}}
    for engine in options.engines:
        log = options.logs / f"fusion-{engine}.log"
        spec = settings | {"engine": engine}
        result["engines"][engine] = found = run_child(engine, spec, log, LIMIT_S, ENVIRONMENT)
        print(engine, found.get("error", "measured"), flush=True)
        write_json(options.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
