"""Time to first token when an image's encoder output comes back: encoder, GPU memory, our store, vLLM's example.

    python bench/fusion_load.py --out bench/results/h200/fusion-load.json
    python bench/fusion_load.py --table bench/results/h200/fusion-load.json

The shape of a vision-language model (see identity.py) with dummy weights, one prompt at a time, the KV always computed:

    plain    ``encoder``: the encoder runs; ``gpu``: its output is still in vLLM's own encoder cache
    semkv    ``encoder``: it also stores; ``host`` and ``disk``: its output is loaded from there
    example  ``encoder``, and ``disk``: vLLM's ECExampleConnector

The image has been through the processor before, so that its time is not part of this.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from identity import SHAPES, draw
from kv_load import drop_pages

ENGINES = ("plain", "semkv", "example")


def connector(engine: str, folder: str) -> dict[str, Any] | None:
    if engine == "plain":
        return None
    if engine == "example":
        extra = {"shared_storage_path": folder}
        return {"ec_connector": "ECExampleConnector", "ec_role": "ec_both", "ec_connector_extra_config": extra}
    return {
        "ec_connector": "SemECConnector", "ec_connector_module_path": "semkv.connectors.ec", "ec_role": "ec_both",
        "ec_connector_extra_config": {"cache_dir": folder},
    }  # fmt: skip


class Bench:
    """One engine in this process."""

    def __init__(self, spec: dict[str, Any], folder: str, model: str) -> None:
        from vllm import LLM
        from vllm.config import ECTransferConfig

        self.engine, self.folder = spec["engine"], folder
        SHAPES[spec["shape"]](Path(model), None)
        config = connector(self.engine, folder)
        self.llm: Any = LLM(
            model,
            load_format="dummy",
            max_model_len=8192,
            gpu_memory_utilization=0.5,
            limit_mm_per_prompt={"image": 1, "video": 0},
            seed=0,
            prefix_caching_hash_algo="sha256_cbor",
            ec_transfer_config=ECTransferConfig(**config) if config else None,
        )

    def ask(self, picture: Any) -> float:
        from vllm import SamplingParams

        content = [{"type": "image_pil", "image_pil": picture}, {"type": "text", "text": "What is in this picture?"}]
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        start = time.perf_counter()
        (output,) = self.llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
        self.prompt_tokens = len(output.prompt_token_ids)
        return (time.perf_counter() - start) * 1e3

    def forget(self, level: str) -> None:
        if self.engine == "semkv":
            from vllm.distributed.ec_transfer import get_ec_transfer

            get_ec_transfer().worker_half.flush()
        self.llm.reset_prefix_cache()
        if level != "gpu":
            self.llm.llm_engine.reset_encoder_cache()
        if level == "disk" and self.engine == "semkv":
            core = self.llm.llm_engine.engine_core.engine_core
            core.scheduler.ec_connector.scheduler_half.host.clear()
        if level == "disk":
            drop_pages(self.folder)

    def measure(self, side: int, repeats: int) -> dict[str, Any]:
        levels = {"plain": ["gpu"], "semkv": ["disk", "host"], "example": ["disk"]}[self.engine]
        times: dict[str, list[float]] = {}
        for i in range(repeats + 2):
            picture = draw(side * 1000 + i, side, side)
            if self.engine == "plain":
                self.ask(picture)  # through the processor
            for level in ["encoder", *levels]:
                if level == "encoder" and self.engine != "plain":
                    self.ask(picture)
                    continue
                self.forget(level)
                milliseconds = self.ask(picture)
                if i > 1:
                    times.setdefault(level, []).append(milliseconds)
        medians = {name: round(statistics.median(values), 2) for name, values in times.items()}
        return {"side": side, "prompt_tokens": self.prompt_tokens, "median_ms": medians, "ms": times}


def child(spec: dict[str, Any]) -> None:
    import torch
    import vllm

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as model:
        bench = Bench(spec, folder, model)
        found: dict[str, Any] = {"vllm": vllm.__version__, "torch": torch.__version__, "rows": []}
        if torch.cuda.is_available():
            found["device"] = torch.cuda.get_device_name(0)
        for side in spec["sides"]:
            found["rows"].append(bench.measure(side, spec["repeats"]))
            print(spec["engine"], found["rows"][-1]["side"], found["rows"][-1]["median_ms"], flush=True)
            Path(spec["out"]).write_text(json.dumps(found))


def run_engine(engine: str, options: argparse.Namespace) -> dict[str, Any]:
    # vLLM 0.26's second model runner has no encoder-cache connector.
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "out.json"
        spec = {
            "engine": engine, "shape": options.shape, "sides": options.sides, "repeats": options.repeats,
            "out": str(out),
        }  # fmt: skip
        command = [sys.executable, __file__, "--child", json.dumps(spec)]
        done = subprocess.run(command, env=environment | os.environ, check=False)
        result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        return result | ({"failure": f"exit status {done.returncode}"} if done.returncode else {})


def table(result: dict[str, Any]) -> str:
    """Markdown: a line per image size."""
    rows = {(name, row["side"]): row for name, e in result["engines"].items() for row in e.get("rows", [])}
    columns = [
        ("encoder runs", "plain", "encoder"), ("in GPU memory", "plain", "gpu"), ("semkv, host", "semkv", "host"),
        ("semkv, disk", "semkv", "disk"), ("ECExampleConnector", "example", "disk"),
    ]  # fmt: skip
    text = ["| pixels | prompt tokens | " + " | ".join(c[0] for c in columns) + " |"]
    text.append("|---" * (len(columns) + 2) + "|")
    for side in result["settings"]["sides"]:
        cells = [f"{side} x {side}", str(rows.get(("plain", side), {}).get("prompt_tokens", "-"))]
        for _, engine, level in columns:
            value = rows.get((engine, side), {}).get("median_ms", {}).get(level)
            cells.append("-" if value is None else f"{value:.1f}")
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-vl-2b", choices=SHAPES)
    parser.add_argument("--sides", type=int, nargs="+", default=[256, 512, 768, 1024], help="pixels")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--out", type=Path, default=Path("fusion-load.json"))
    parser.add_argument("--table", type=Path, help="print the table of a result instead")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(json.loads(options.child))
        return
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    settings = {key: getattr(options, key) for key in ("shape", "sides", "repeats")}
    result: dict[str, Any] = {"settings": settings, "engines": {}}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for engine in options.engines:
        result["engines"][engine] = run_engine(engine, options)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
