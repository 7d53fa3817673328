"""Time to first token when a long document returns: with semkv, and with vLLM's prefix cache alone.

    python bench/long_context.py --out bench/results/long-context-cpu.json
    python bench/long_context.py --shape qwen2.5-vl-7b --documents 12 --out FILE

Every document is asked about once as it is, then it returns with other white space, in other case and with one
sentence edited, each time with another question; an unrelated document is the control. Two settings: the document
returns while the engine still runs, or after a restart (a new engine, the same cache folder). The engine without
semkv answers the same requests in the same order. One warm-up prompt of another document precedes every pass.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from documents import VARIANTS, generate_documents

from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.engines.base import EnginePrompt
from semkv.engines.vllm import ConnectorOptions, VllmEngine, VllmOptions
from semkv.presets import get_preset
from semkv.types import Namespace, Plan, Request, ReuseReport, Role, TextSegment


def read_rows(documents: int, words: int, seed: int) -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "documents.jsonl"
        generate_documents(file, documents=documents, seed=seed, words=words)
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def ask(engine: VllmEngine, cache: SemanticCache | None, rows: Sequence[dict[str, str]], tokens: int) -> list[Any]:
    """One record a row: variant, times, what was reused, the answer's tokens."""
    records = []
    namespace = Namespace("", engine.fingerprint())
    for number, row in enumerate(rows):
        segments = (TextSegment(row["context"], Role.CONTEXT), TextSegment(row["question"]))
        request = Request(f"{row['variant']}-{number}", namespace, segments)
        report = cache.try_reuse(request) if cache else ReuseReport(request, Plan(segments), {})
        result = engine.generate(EnginePrompt(report.plan.segments, max_tokens=tokens))
        if cache:
            cache.add_observation(report, result.text)
        match = report.plan.match
        records.append(
            {
                "variant": row["variant"],
                "provenance": report.provenance,
                "exactness": str(match.exactness) if match else "",
                "lookup_ms": report.lookup_s * 1e3,
                "ttft_ms": (report.lookup_s + (result.ttft_s or result.latency_s)) * 1e3,
                "prompt_tokens": result.prompt_tokens,
                "prefix_tokens": result.prefix_tokens,
                "loaded_tokens": result.loaded_tokens or 0,
                "token_ids": list(result.token_ids),
            }
        )
    return records


def passes(options: Any, rows: list[dict[str, str]], warm: list[dict[str, str]], *, cached: bool) -> dict[str, Any]:
    """The two settings for one engine, each from an empty folder."""
    first = [row for row in rows if row["variant"] == "original"]
    again = [row for row in rows if row["variant"] != "original"]
    found = {}
    for setting, groups in (("running", [[*first, *again]]), ("restarted", [first, again])):
        records: list[Any] = []
        with tempfile.TemporaryDirectory() as folder:
            for group in groups:
                records += one_process(options, group, warm, Path(folder) if cached else None)
        found[setting] = records
    return found


def one_process(options: Any, rows: list[dict[str, str]], warm: list[dict[str, str]], folder: Path | None) -> list[Any]:
    """One engine in a process of its own, so that its memory is really gone before the next one starts."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(one_engine, options, rows, warm, folder).result()


def one_engine(options: Any, rows: list[dict[str, str]], warm: list[dict[str, str]], folder: Path | None) -> list[Any]:
    connectors = ConnectorOptions(folder) if folder else None
    engine = VllmEngine(
        VllmOptions(
            options.model,
            max_model_len=options.max_model_len,
            load_format=options.load_format,
            enforce_eager=options.eager or None,
            gpu_memory_utilization=options.gpu_memory_utilization,
            kv_cache_bytes=options.kv_cache_bytes,
            connectors=connectors,
        )
    )
    cache = SemanticCache(CacheConfig(folder, similarity_threshold=options.threshold)) if folder else None
    try:
        ask(engine, None, warm, options.tokens)
        if cache:
            cache.warm_up()
        return ask(engine, cache, rows, options.tokens)
    finally:
        if cache:
            cache.close()
        engine.close()
        gc.collect()


def table(off: list[Any], on: list[Any]) -> list[dict[str, Any]]:
    """A row a variant: median times without and with semkv, and what was found."""
    by_variant: dict[str, list[tuple[Any, Any]]] = defaultdict(list)
    for a, b in zip(off, on, strict=True):
        by_variant[b["variant"]].append((a, b))
    rows = []
    for variant in VARIANTS:
        pairs = by_variant[variant]
        ratios = [a["ttft_ms"] / b["ttft_ms"] for a, b in pairs]
        rows.append(
            {
                "variant": variant,
                "n": len(pairs),
                "prompt_tokens": statistics.median(b["prompt_tokens"] for _, b in pairs),
                "ttft_ms_without": round(statistics.median(a["ttft_ms"] for a, _ in pairs), 2),
                "ttft_ms_with": round(statistics.median(b["ttft_ms"] for _, b in pairs), 2),
                "speedup_median": round(statistics.median(ratios), 2),
                "lookup_ms": round(statistics.median(b["lookup_ms"] for _, b in pairs), 2),
                "prefix_tokens_without": statistics.median(a["prefix_tokens"] for a, _ in pairs),
                "prefix_tokens_with": statistics.median(b["prefix_tokens"] for _, b in pairs),
                "loaded_tokens": statistics.median(b["loaded_tokens"] for _, b in pairs),
                "provenance": dict(Counter(b["provenance"] or "miss" for _, b in pairs)),
                "exactness": dict(Counter(b["exactness"] or "none" for _, b in pairs)),
                "same_tokens_as_without": sum(a["token_ids"] == b["token_ids"] for a, b in pairs),
            }
        )
    return rows


def machine() -> dict[str, Any]:
    import torch
    import vllm

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"device": device, "vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=get_preset("minigqa").model)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--words", type=int, default=1300)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--threshold", type=float, default=0.85, help="least cosine of an edited sentence")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--kv-cache-bytes", type=int)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", help="dummy weights in the shape of this model (see identity.py) instead of --model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.shape:
            from identity import SHAPES

            options.model, options.load_format = folder, "dummy"
            SHAPES[options.shape](Path(folder), None)
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Run every pass, write the file, print the tables."""
    started = time.time()
    rows, warm = read_rows(options.documents, options.words, 0), read_rows(2, options.words, 999)[:3]
    off, on = passes(options, rows, warm, cached=False), passes(options, rows, warm, cached=True)
    tables = {setting: table(off[setting], on[setting]) for setting in on}
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()} | {
        "model": options.shape or Path(options.model).name
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine(), "settings": settings, "seconds": round(time.time() - started, 1), "tables": tables}
    result["raw"] = {"without": off, "with": on}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for setting, lines in tables.items():
        print(setting)
        for line in lines:
            print("  " + json.dumps(line))


if __name__ == "__main__":
    main()
