"""Time to first token when an image's encoder output comes back: encoder, GPU memory, our store, vLLM's example.

    python bench/fusion_load.py --out bench/results/h200/fusion-load.json
    python bench/fusion_load.py --engines semkv --sides 512,1024 --budget 200 --out ...     (a part)
    python bench/fusion_load.py --dry-run                                        (the plan, with rough times)
    python bench/fusion_load.py --tiny --out /tmp/fusion.json                    (on a CPU, to see that it runs)
    python bench/fusion_load.py --table bench/results/h200/fusion-load.json

The shape of a vision-language model (see identity.py) with dummy weights, one prompt at a time, the KV always computed.
Each engine runs in a process of its own (`load_runs`):

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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import load_runs
from engines import drop_pages
from identity import SHAPES, draw
from load_runs import Cell, cell_of, number

ENGINES = ("plain", "semkv", "example")
LEVELS = {"plain": ["gpu"], "semkv": ["gpu", "host", "disk"], "example": ["gpu", "disk"]}
TINY = "minigqa"  # the package's own model
# vLLM 0.26's second model runner has no encoder-cache connector.
ENVIRONMENT = load_runs.ENVIRONMENT | {"VLLM_USE_V2_MODEL_RUNNER": "0"}


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


def checkpoint(shape: str, folder: str) -> dict[str, Any]:
    """Which model, as vLLM's arguments: one of the full shapes with dummy weights, or the tiny one of the package."""
    if shape == TINY:
        from semkv.presets import get_preset

        small = {"max_model_len": 512, "enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 1 << 28}
        return {"model": get_preset(TINY).model, **small}
    SHAPES[shape](Path(folder), None)
    return {"model": folder, "load_format": "dummy", "max_model_len": 8192, "gpu_memory_utilization": 0.5}


class Bench:
    """One engine in this process."""

    def __init__(self, spec: Mapping[str, Any], folder: str, model: str) -> None:
        from vllm import LLM
        from vllm.config import ECTransferConfig

        self.engine, self.folder = spec["engine"], folder
        config = connector(self.engine, folder, spec["host_bytes"])
        self.llm: Any = LLM(
            **checkpoint(spec["shape"], model),
            limit_mm_per_prompt={"image": 1, "video": 0},
            seed=0,
            prefix_caching_hash_algo="sha256_cbor",
            ec_transfer_config=ECTransferConfig(**config) if config else None,
        )

    def facts(self) -> dict[str, Any]:
        if self.engine != "semkv":
            return {}
        return {"counters": dict(self.halves[0].counters)}

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
            if self.engine == "semkv" and (pool := self.halves[0].host.get()) is not None:
                pool.clear()
            drop_pages(self.folder)

    def measure(self, cell: Cell, repeats: int, in_time: Callable[[], bool]) -> dict[str, Any]:
        times: dict[str, list[float]] = {}
        for i in range(repeats + 2):
            if i > 2 and not in_time():
                break
            picture = draw(cell.size * 1000 + i, cell.size, cell.size)
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
        return {"prompt_tokens": self.prompt_tokens, "median_ms": medians, "ms": times}


def estimate(engine: str, cell: Cell) -> float:
    """Seconds on an H200 for the default repetitions, roughly."""
    return 17 * (len(LEVELS[engine]) + 1) * (0.03 + cell.size**2 * 3e-8)


def beyond_memory(row: Mapping[str, Any]) -> float:
    """Milliseconds that a load from host memory takes longer: the median over pictures, each against itself.

    The processor's share varies from one minute to the next; a picture's passes follow each other.
    """
    return statistics.median(a - b for a, b in zip(row["ms"]["host"], row["ms"]["gpu"], strict=True))


def tables(result: Mapping[str, Any]) -> str:
    """Markdown: a line for each size of the image."""
    columns = [
        ("encoder runs", "plain", "encoder"), ("in GPU memory", "plain", "gpu"),
        ("in GPU memory, semkv on", "semkv", "gpu"), ("semkv, host", "semkv", "host"), ("semkv, disk", "semkv", "disk"),
        ("ECExampleConnector", "example", "disk"),
    ]  # fmt: skip
    text = ["| pixels | prompt tokens | " + " | ".join(c[0] for c in columns) + " | host beyond GPU memory |"]
    text.append("|---" * (len(columns) + 3) + "|")
    for side in load_runs.sizes(result, 1):
        found = [cell_of(result, engine, side, 1).get("median_ms", {}).get(level) for _, engine, level in columns]
        tokens = next(
            (row["prompt_tokens"] for e in ENGINES if (row := cell_of(result, e, side, 1)).get("prompt_tokens")), "-"
        )
        beyond = (
            "-" if found[2] is None or found[3] is None else f"{beyond_memory(cell_of(result, 'semkv', side, 1)):+.1f}"
        )
        text.append(
            f"| {side} x {side} | {tokens} | " + " | ".join(number(value) for value in found) + f" | {beyond} |"
        )
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    load_runs.add_arguments(parser, ENGINES, "fusion-load.json")
    parser.add_argument("--shape", default="qwen3-vl-2b", choices=[*SHAPES, TINY])
    parser.add_argument("--sides", type=load_runs.whole_numbers, help="pixels; 256,512,768,1024 by default")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--host-gib", type=int, default=4)
    options = parser.parse_args()
    if options.child:
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as model:
            load_runs.child(json.loads(options.child), lambda spec: Bench(spec, folder, model))
        return
    settings = {"shape": TINY if options.tiny else options.shape, "host_bytes": options.host_gib << 30}
    cells = [Cell(side) for side in options.sides or ([96] if options.tiny else [256, 512, 768, 1024])]
    load_runs.run(options, settings, cells, estimate=estimate, tables=tables, environment=ENVIRONMENT)


if __name__ == "__main__":
    main()
