"""Time to first token when a long document returns: with semkv, and with vLLM's prefix cache only.

    python bench/long_context.py --out bench/results/long-context-cpu.json
    python bench/long_context.py --shape qwen2.5-vl-7b --documents 12 --out FILE

Every document of invented facts is asked about once as it is. Then it returns with doubled spaces, in other case,
with one sentence reworded and with one fact edited, each time with another question; an unrelated document is the
control. Two settings: the document returns while the engine still runs, or after a restart (a new engine, the same
cache folder). The engine without semkv answers the same requests in the same order.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from common import machine, write_json

from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.engines.base import EnginePrompt
from semkv.engines.vllm import ConnectorOptions, VllmEngine, VllmOptions
from semkv.presets import get_preset
from semkv.types import Namespace, Plan, Request, ReuseReport, Role, TextSegment
from semkv_lab.minigqa.documents import VARIANTS, returning

Row = dict[str, Any]


# -- the engines ------------------------------------------------------------


def ask(engine: VllmEngine, cache: SemanticCache | None, rows: Sequence[Row], tokens: int) -> list[Row]:
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


def passes(options: Any, rows: list[Row], warm: list[Row], *, cached: bool) -> dict[str, Any]:
    """The two settings for one engine, each from an empty folder."""
    first = [row for row in rows if row["variant"] == "original"]
    again = [row for row in rows if row["variant"] != "original"]
    found = {}
    for setting, groups in (("running", [[*first, *again]]), ("restarted", [first, again])):
        records: list[Row] = []
        with tempfile.TemporaryDirectory() as folder:
            for group in groups:  # each in a process, so that its memory is really gone before the next one starts
                with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                    done = pool.submit(one_engine, options, group, warm, Path(folder) if cached else None)
                    records += done.result()
        found[setting] = records
    return found


def one_engine(options: Any, rows: list[Row], warm: list[Row], folder: Path | None) -> list[Row]:
    connectors = ConnectorOptions(folder) if folder else None
    given = {
        "load_format": options.load_format,
        "enforce_eager": options.eager,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": options.kv_cache_bytes,
    }
    engine = VllmEngine(
        VllmOptions(
            options.model,
            max_model_len=options.max_model_len,
            connectors=connectors,
            arguments={name: value for name, value in given.items() if value},
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


def table(off: list[Row], on: list[Row]) -> list[dict[str, Any]]:
    """A row a variant: median times without and with semkv, and what was found."""
    rows = []
    for variant in VARIANTS:
        pairs = [(a, b) for a, b in zip(off, on, strict=True) if b["variant"] == variant]

        def median(of: str, side: int, pairs: list[tuple[Row, Row]] = pairs) -> float:
            return round(statistics.median(pair[side][of] for pair in pairs), 2)

        rows.append(
            {
                "variant": variant,
                "n": len(pairs),
                "prompt_tokens": median("prompt_tokens", 1),
                "ttft_ms_without": median("ttft_ms", 0),
                "ttft_ms_with": median("ttft_ms", 1),
                "speedup_median": round(statistics.median(a["ttft_ms"] / b["ttft_ms"] for a, b in pairs), 2),
                "lookup_ms": median("lookup_ms", 1),
                "prefix_tokens_without": median("prefix_tokens", 0),
                "prefix_tokens_with": median("prefix_tokens", 1),
                "loaded_tokens": median("loaded_tokens", 1),
                "provenance": dict(Counter(b["provenance"] or "miss" for _, b in pairs)),
                "exactness": dict(Counter(b["exactness"] or "none" for _, b in pairs)),
                "same_tokens_as_without": sum(a["token_ids"] == b["token_ids"] for a, b in pairs),
            }
        )
    return rows


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
    rows, warm = returning(options.documents, words=options.words), returning(2, words=options.words, seed=999)[:3]
    off, on = passes(options, rows, warm, cached=False), passes(options, rows, warm, cached=True)
    tables = {setting: table(off[setting], on[setting]) for setting in on}
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    settings["model"] = options.shape or Path(options.model).name
    result = {"machine": machine("vllm", "torch"), "settings": settings, "tables": tables}
    write_json(options.out, result | {"raw": {"without": off, "with": on}})
    for setting, lines in tables.items():
        print(setting)
        for line in lines:
            print(" ", line)


if __name__ == "__main__":
    main()
