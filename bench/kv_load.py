"""Time to first token when the KV blocks of a prompt come back: from where, and at what cost for those who compute.

    python bench/kv_load.py --out bench/results/h200/kv-load.json
    python bench/kv_load.py --engines none,semkv --lengths 512,8192 --repeats 5 --out ...   (a part)
    python bench/kv_load.py --tiny --engines none,semkv,semkv-disk --out /tmp/kv.json       (on a CPU, to see it run)
    python bench/kv_load.py --table bench/results/h200/kv-load.json

Random tokens through Qwen2.5-7B's shape with dummy weights; engines as in `engines`, each in a process of its own. All
are started at once and take turns at every size, so that they share the machine's good and bad minutes; X-disk comes
after X has ended, on its folder. Medians over ``--repeats`` (``--many-repeats`` for many requests at once) of:

    cold     everything is computed; a connector also stores      prefix  the same again: it is in GPU memory
    host     after `reset_prefix_cache`                           disk    in a new process, no page in the page cache

``ms`` is the time until every request of a cell has its first token. The floor of a host hit is the prefix cache's time
and the bytes over the rate of a plain copy from page-locked memory, measured in the same run. Beside a disk hit stand
its bytes over its time, and what the disk gives to plain reads of the same files (O_DIRECT, by one thread and by
eight). ``decode`` is the rate of 16 requests that have their first token: with a connector its stores run beside them.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import engines
from common import machine, write_json
from engines import Engine, EngineError, Server

LIMIT_S = 180  # of one command
DECODE = {"size": 512, "count": 16, "tokens": 128}
SHORT = 8  # a prompt lacks so many tokens: a full last block would be loaded where vLLM's own cache leaves it out
READ_BYTES, READ_S = 4 << 20, 4.0  # of one plain reading; for one rate


# ------------------------------------------------------------------ the engine's process


def commands(server: Server) -> dict[str, engines.Command]:
    import asyncio

    import numpy as np

    async def ask(size: int, count: int, repeat: int, tokens: int = 1) -> dict[str, Any]:
        rng = np.random.default_rng([size, count, repeat])
        prompts = [rng.integers(10, 150_000, size - SHORT).tolist() for _ in range(count)]
        answers = await asyncio.gather(*(server.ask(prompt, tokens) for prompt in prompts))
        start, first = min(a.start for a in answers), max(a.first for a in answers)
        found = {
            "ms": round((first - start) * 1e3, 2),
            "ttft_ms": round(statistics.median(a.ttft_ms for a in answers), 2),
            "cached": sum(a.cached for a in answers),
            "sources": engines.sources(list(answers)),
            "answers": [a.tokens[0] for a in answers],
        }
        if tokens > 1:
            rates = [(len(a.tokens) - 1) / (a.last - a.first) for a in answers]
            found["decoded_per_s"] = round(statistics.median(rates) * count, 1)
        return found

    async def forget() -> dict[str, Any]:
        await server.settle()
        await server.forget()
        return {}

    async def copy_rate() -> dict[str, Any]:
        return {"gb_s": await asyncio.to_thread(pinned_copy_rate)}

    return {"ask": ask, "forget": forget, "copy_rate": copy_rate}


def pinned_copy_rate() -> float:
    """GB/s of a plain copy from page-locked memory to the device, 512 MiB; 0 without one."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    host = torch.empty(1 << 29, dtype=torch.uint8, pin_memory=True)
    device, best = torch.empty(1 << 29, dtype=torch.uint8, device="cuda"), 1e9
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return round((1 << 29) / best / 1e9, 1)


# ------------------------------------------------------------------ the disk by itself


def read_rate(folder: Path, threads: int) -> float:
    """GB/s of plain reads of the folder's files with O_DIRECT, none of them in the page cache."""
    parts = [(p, at) for p in engines.files_of(folder) for at in range(0, p.stat().st_size, READ_BYTES)]
    deadline = time.perf_counter() + READ_S

    def read(mine: Iterable[tuple[Path, int]]) -> int:
        memory, total = mmap.mmap(-1, READ_BYTES), 0  # aligned to pages
        for path, at in mine:
            if time.perf_counter() > deadline:
                break
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            total += max(0, os.preadv(fd, [memory], at))
            os.close(fd)
        return total

    engines.drop_pages(folder)
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        try:
            total = sum(pool.map(read, [parts[i::threads] for i in range(threads)]))
        except OSError as error:  # a file system without O_DIRECT
            print(f"no plain rate of the disk: {error}", flush=True)
            return 0.0
    return round(total / (time.perf_counter() - start) / 1e9, 2)


# ------------------------------------------------------------------ the calling process


class Run:
    """The engines that are up, and the rows so far."""

    def __init__(self, options: argparse.Namespace, root: str) -> None:
        self.options, self.root, self.up = options, Path(root), dict[str, Engine]()
        keep = ("kv_gib", "host_gib", "disk_gib", "tp", "shape", "engine_args", "repeats", "many_repeats")
        self.result: dict[str, Any] = {"settings": {key: getattr(options, key) for key in keep}}
        self.result |= {"machine": machine("vllm", "torch"), "engines": {}, "rows": []}
        singles = [(size, 1, options.repeats) for size in options.lengths]
        self.cells = singles + [
            (size, options.many, options.many_repeats) for size in options.many_lengths or options.lengths
        ]

    def start(self, names: Iterable[str]) -> None:
        """Start engines at once and wait for all; what does not start is a row of its own."""
        makers = [(name, partial(self._make, name)) for name in names]
        self.up |= engines.start_all(makers, "enforce_eager" not in self.options.engine_args)
        for name, engine in list(self.up.items()):
            if name not in self.result["engines"]:
                self.guard(name, partial(self._started, name, engine))
        self.write()

    def _make(self, name: str) -> Engine:
        folder = self.root / engines.base(name)
        folder.mkdir(mode=0o700, exist_ok=True)
        return engines.start(name, self.options, folder)

    def _started(self, name: str, engine: Engine) -> None:
        self.result["engines"][name] = engine.answer("start", engines.START_LIMIT_S)
        few, many = [(size, 1) for size in self.options.lengths], (min(self.options.lengths), self.options.many)
        for size, count in (*few, many, *few, many):  # compiles, the second time what loads; fills no cell
            engine.ask("ask", LIMIT_S, size=size, count=count, repeat=1000, tokens=8)
            engine.ask("forget", LIMIT_S)

    def guard(self, name: str, work: Any) -> None:
        """An engine that fails is left out from here on; why is in the result."""
        try:
            work()
        except EngineError as error:
            print(f"{name}: {str(error).splitlines()[0][:300]}", flush=True)
            self.result["engines"][name] = {**self.result["engines"].get(name, {}), "error": str(error)}
            self.up.pop(name).kill()

    def ask(self, name: str, level: str, size: int, count: int, repeat: int, tokens: int = 1) -> dict[str, Any]:
        found = self.up[name].ask("ask", LIMIT_S, size=size, count=count, repeat=repeat, tokens=tokens)
        row = {"engine": name, "level": level, "size": size, "count": count, "repeat": repeat, **found}
        self.result["rows"].append(row)
        print(
            name, level, f"{count} x {size}", found["ms"], "ms, cached", found["cached"], found["sources"], flush=True
        )
        return row

    def turns(self) -> Iterator[tuple[int, int, int]]:
        for repeat in range(max(self.options.repeats, self.options.many_repeats)):
            for size, count, repeats in self.cells:
                if repeat < repeats:
                    yield size, count, repeat

    def memory(self, name: str, size: int, count: int, repeat: int) -> None:
        """Cold, from GPU memory, from host memory."""
        self.ask(name, "cold", size, count, repeat)
        self.ask(name, "prefix", size, count, repeat)
        self.up[name].ask("forget", LIMIT_S)
        if name != "none":
            self.ask(name, "host", size, count, repeat)
            self.up[name].ask("forget", LIMIT_S)

    def disk(self, name: str) -> None:
        """What another process has stored, each prompt once: then it is in host memory."""
        folder = self.root / engines.base(name)
        rates = {f"{threads} threads": read_rate(folder, threads) for threads in (1, 8)}
        self.result["engines"][name] |= {"disk_gb_s": rates, "folder_bytes": engines.folder_bytes(folder)}
        for size, count, repeat in self.turns():
            engines.drop_pages(folder)
            row = self.ask(name, "disk", size, count, repeat)
            prefix = self.ask(name, "prefix", size, count, repeat)
            nbytes = row["sources"].get("loaded", 0) or row["cached"]
            row["bytes"] = nbytes * engines.kv_token_bytes(self.options.shape)
            row["gb_s"] = round(row["bytes"] / row["ms"] / 1e6, 2)
            row["gb_s_beyond_prefix"] = round(row["bytes"] / max(row["ms"] - prefix["ms"], 0.1) / 1e6, 2)
            self.up[name].ask("forget", LIMIT_S)
            self.write()

    def copy_rate(self) -> None:
        self.result["copy_gb_s"] = self.up["none"].ask("copy_rate", LIMIT_S)["gb_s"]

    def all(self) -> None:
        """Start, measure, write after every step."""
        names = [name for name in self.options.engines if engines.base(name) == name]
        self.start(names)
        for number, (size, count, repeat) in enumerate(self.turns()):
            turn = number % max(1, len(names))
            for name in names[turn:] + names[:turn]:
                if name in self.up:
                    self.guard(name, partial(self.memory, name, size, count, repeat))
            self.write()
        for repeat in range(2):
            for name in list(self.up):
                self.guard(name, partial(self.ask, name, "decode", **DECODE, repeat=2000 + repeat))
        if "none" in self.up:
            self.guard("none", self.copy_rate)
        self.write()
        for name in [name for name in self.options.engines if name not in names]:
            for engine in self.up.values():
                engine.close()
            self.up.clear()
            self.start([name])
            if name in self.up:
                self.guard(name, partial(self.disk, name))
        self.write()

    def write(self) -> None:
        self.result["medians"] = medians(self.result["rows"])
        write_json(self.options.out, self.result)

    def close(self) -> None:
        for engine in self.up.values():
            engine.kill()


def medians(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """``{"count x size": {"engine level": ms}}``; of decoding, tokens a second."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        cell = found.setdefault(f"{row['count']} x {row['size']}", {})
        value = row["decoded_per_s"] if row["level"] == "decode" else row["ms"]
        cell.setdefault(f"{row['engine']} {row['level']}", []).append(value)
        if "gb_s" in row:
            for key in ("gb_s", "gb_s_beyond_prefix"):
                cell.setdefault(f"{row['engine']} {key}", []).append(row[key])
    return {cell: {key: round(statistics.median(v), 2) for key, v in each.items()} for cell, each in found.items()}


def table(result: Mapping[str, Any]) -> str:
    """Markdown: a line for each number of requests and size."""
    keys = list(dict.fromkeys(key for cell in result["medians"].values() for key in cell))
    keys = [key for key in keys if not key.endswith("-disk prefix")]
    text = ["| | floor | " + " | ".join(keys) + " |", "|---" * (len(keys) + 2) + "|"]
    rate, token = result.get("copy_gb_s"), engines.kv_token_bytes(result["settings"]["shape"])
    for cell, found in result["medians"].items():
        count, _, size = cell.partition(" x ")
        prefix = found.get("none prefix")
        floor = f"{prefix + int(count) * int(size) * token / rate / 1e6:.1f}" if prefix and rate else "-"
        text.append(f"| {cell} | {floor} | " + " | ".join(str(found.get(key, "-")) for key in keys) + " |")
    for name, facts in result["engines"].items():
        if "disk_gb_s" in facts:
            text.append(f"\n{name}: the disk gives {facts['disk_gb_s']} GB/s")
        if "error" in facts:
            text.append(f"\n{name}: {facts['error'].splitlines()[0]}")
    return "\n".join(text)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines.add_arguments(parser, "none,offload,semkv,semkv-disk")
    parser.add_argument("--lengths", type=numbers, default=[512, 8192, 16000])
    parser.add_argument("--many", type=int, default=16, help="requests at once")
    parser.add_argument("--many-lengths", type=numbers, help="with many; by default all")
    parser.add_argument("--repeats", type=int, default=3, help="with one request")
    parser.add_argument("--many-repeats", type=int, default=1, help="with many: 16 times 16,000 tokens are 15 GB of KV")
    parser.set_defaults(kv_gib=15.0, host_gib=16.0)  # each: they are up at the same time
    options = parser.parse_args()
    if options.child:
        engines.serve(json.loads(options.child), commands)
        return
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    tiny = {"lengths": [128, 512], "many": 4, "repeats": 2, "kv_gib": 1 / 16, "host_gib": 1 / 8, "disk_gib": 1 / 4}
    engines.finish_arguments(options, tiny)
    engines.stop_on_signals()
    with tempfile.TemporaryDirectory(dir=options.scratch, ignore_cleanup_errors=True) as root:
        run = Run(options, root)
        try:
            run.all()
        finally:
            run.close()
    print(table(run.result))


if __name__ == "__main__":
    main()
