"""Single and many hits in host memory, then chats under load, by engines that stay up side by side and take turns.

    SEMKV_STAMPS=/tmp/stamps python bench/kv_hits.py --engines offload,semkv --out bench/results/h200/kv-hits.json
    python bench/kv_hits.py --tiny --engines none,semkv --out /tmp/hits.json           (on a CPU, to see that it runs)
    python bench/kv_hits.py --table bench/results/h200/kv-hits.json

As in `kv_load` and `kv_chat`, with one start of each engine for both. A prompt is computed and stored, asked again from
GPU memory, and then several times after `reset_prefix_cache`, when nothing is being written any more. With ``--wait``
the engines are started and warmed up, and measuring begins once that file is there. With SEMKV_STAMPS the time of each
function (see `stamps`) is added up for the hits and for the chats, and the steps of one hit are listed. ``--profile``
runs py-spy on the engine's core in the second round of chats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import engines
import kv_chat
import kv_load
import stamps
from common import machine, write_json
from engines import Engine, EngineError, Server

HITS = 3  # of one prompt
QUIET_S = 0.3


def commands(server: Server) -> dict[str, engines.Command]:
    async def forget() -> dict[str, Any]:
        await server.settle(QUIET_S)
        await server.forget()
        return {}

    async def timed(work: engines.Command, **given: Any) -> dict[str, Any]:
        start = time.perf_counter()
        found = await work(**given)
        return {**found, "window": [start, time.perf_counter()]}

    ask = kv_load.commands(server)["ask"]
    return {"ask": partial(timed, ask), "chat": partial(timed, partial(kv_chat.chat, server)), "forget": forget}


class Run:
    """The engines that are up, and the rows so far."""

    def __init__(self, options: argparse.Namespace, root: Path, up: Mapping[str, Engine]) -> None:
        self.options, self.root, self.up = options, root, dict(up)
        keep = ("kv_gib", "host_gib", "disk_gib", "shape", "engine_args", "repeats", "rounds_of_chats")
        self.result: dict[str, Any] = {"settings": {key: getattr(options, key) for key in keep}, "engines": {}}
        self.result |= {"machine": machine("vllm", "torch"), "hits": [], "chats": []}
        self.load = {"system": 1000, "document": [6000, 9000], "question": 50, "answer": 64}
        if options.tiny:
            self.load = {"system": 64, "document": [300, 500], "question": 20, "answer": 8}
        self.load |= {"users": options.users, "rounds": 5, "rate": options.rate, "arrivals": "poisson", "seed": 0}
        self.result["load"] = self.load

    def warm(self, name: str) -> None:
        engine = self.up[name]
        self.result["engines"][name] = engine.answer("start", engines.START_LIMIT_S)
        few = [(size, 1) for size in self.options.lengths]
        for size, count in (*few, (min(self.options.lengths), self.options.many)) * 2:
            engine.ask("ask", 180, size=size, count=count, repeat=1000, tokens=8)
            engine.ask("forget", 180)
        load = {**self.load, "seed": 1000, "users": 4, "rounds": 1, "rate": 1e3}
        for _ in range(2):
            engine.ask("chat", 180, load=load, give_up_s=100)
            engine.ask("forget", 180)

    def cells(self) -> Iterator[tuple[int, int, int]]:
        for repeat in range(self.options.repeats):
            for size in self.options.lengths:
                yield repeat, size, 1
            if repeat < self.options.many_repeats:
                for size in self.options.lengths:
                    yield repeat, size, self.options.many

    def hits(self, name: str, repeat: int, size: int, count: int) -> None:
        for level in ("cold", "prefix", *["host"] * HITS):
            if level == "host":
                self.up[name].ask("forget", 180)
            found = self.up[name].ask("ask", 180, size=size, count=count, repeat=repeat)
            row = {"engine": name, "level": level, "size": size, "count": count, "repeat": repeat, **found}
            self.result["hits"].append(row)
        self.up[name].ask("forget", 180)

    def chat(self, name: str, number: int) -> None:
        profiler, pid = None, core_of(self.up[name].process.pid)
        if self.options.profile and number and pid:
            out = self.options.logs / f"{self.options.out.stem}-{name}-{number}.folded"
            command = ["py-spy", "record", "-p", str(pid), "-d", "25", "-r", "200", "-f", "raw", "--nonblocking"]
            profiler = subprocess.Popen([*command, "-o", str(out)], stdin=subprocess.DEVNULL)
        limit = self.load["users"] * self.load["rounds"] / self.load["rate"] * 2 + 60
        load = {**self.load, "seed": number}  # nobody has seen these documents
        found = self.up[name].ask("chat", limit + 30, load=load, give_up_s=limit)
        self.up[name].ask("forget", 180)
        self.result["chats"].append({"engine": name, "run": number, "profiled": profiler is not None, **found})
        print(kv_chat.line(self.result["chats"][-1]), flush=True)
        if profiler is not None:
            profiler.wait(60)

    def guard(self, name: str, work: Any, *given: Any) -> None:
        """An engine that fails is left out from here on; why is in the result."""
        if name in self.up:
            try:
                work(name, *given)
            except EngineError as error:
                print(f"{name}: {str(error).splitlines()[0][:300]}", flush=True)
                self.result["engines"][name] = {**self.result["engines"].get(name, {}), "error": str(error)}
                self.up.pop(name).kill()

    def all(self) -> None:
        names = list(self.up)
        for name in names:
            self.guard(name, self.warm)
        print("warm", flush=True)
        while self.options.wait and not self.options.wait.exists():
            time.sleep(0.2)
        for number, (repeat, size, count) in enumerate(self.cells()):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                self.guard(name, self.hits, repeat, size, count)
            self.write()
        print(table(self.result), flush=True)
        for number in range(self.options.rounds_of_chats):
            for name in names[:: 1 if number % 2 == 0 else -1]:
                self.guard(name, self.chat, number)
                self.write()

    def write(self) -> None:
        write_json(self.options.out, self.result)

    def stamps(self) -> None:
        """Add what the engines noted; after their end."""
        folder = Path(os.environ.get("SEMKV_STAMPS", ""))
        for name in self.result["engines"]:
            path = folder / f"{name}.stamps"
            if not path.is_file():
                continue
            facts = self.result["engines"][name]
            mine = [row for row in self.result["hits"] if row["engine"] == name and row["level"] == "host"]
            facts["stamps"] = {}
            for size, count in sorted({(row["size"], row["count"]) for row in mine}):
                rows = [row for row in mine if (row["size"], row["count"]) == (size, count)]
                facts["stamps"][f"{count} x {size}"] = stamps.totals(path, [tuple(row["window"]) for row in rows])
                middle = sorted(rows, key=lambda row: row["ms"])[len(rows) // 2]
                facts.setdefault("one_hit", {})[f"{count} x {size}"] = stamps.timeline(path, *middle["window"])[:400]
            for row in self.result["chats"]:
                if row["engine"] == name:
                    row["stamps"] = stamps.totals(path, [tuple(row["window"])])
        self.write()


def core_of(pid: int) -> int | None:
    """The process below that is vLLM's engine core: it has the most memory."""

    def below(one: int) -> Iterator[int]:
        for file in Path(f"/proc/{one}/task").glob("*/children"):
            for child in map(int, file.read_text().split()):
                yield child
                yield from below(child)

    def resident(one: int) -> int:
        try:
            return int(Path(f"/proc/{one}/statm").read_text().split()[1])
        except OSError:
            return 0

    return max(below(pid), key=resident, default=None)


def table(result: Mapping[str, Any]) -> str:
    """Markdown: medians of the hits and their range, then the chats."""
    found: dict[tuple[int, int], dict[str, list[float]]] = {}
    for row in result["hits"]:
        cell = found.setdefault((row["count"], row["size"]), {})
        cell.setdefault(f"{row['engine']} {row['level']}", []).append(row["ms"])
    columns = list(dict.fromkeys(key for cell in found.values() for key in cell))
    text = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for (count, size), cell in sorted(found.items()):
        values = [
            f"{statistics.median(v):.1f} ({min(v):.1f} to {max(v):.1f})" if (v := cell.get(key)) else "-"
            for key in columns
        ]
        text.append(f"| {count} x {size} | " + " | ".join(values) + " |")
    return "\n".join([*text, "", *map(kv_chat.line, result["chats"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines.add_arguments(parser, "offload,semkv")
    parser.add_argument("--lengths", type=kv_load.numbers, default=[512, 8192])
    parser.add_argument("--many", type=int, default=16, help="requests at once")
    parser.add_argument("--repeats", type=int, default=3, help=f"each with {HITS} hits")
    parser.add_argument("--many-repeats", type=int, default=2)
    parser.add_argument("--rounds-of-chats", type=int, default=2)
    parser.add_argument("--users", type=int, default=80)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--wait", type=Path, help="measure once this file is there")
    parser.add_argument("--profile", action="store_true")
    parser.set_defaults(host_gib=40.0)
    options = parser.parse_args()
    if options.child:
        spec = json.loads(options.child)
        os.environ["SEMKV_STAMPS_NAME"] = spec["engine"]
        engines.serve(spec, commands)
        return
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    tiny = {"lengths": [128, 512], "many": 4, "repeats": 1, "users": 6, "rate": 4.0}
    engines.finish_arguments(options, {**tiny, "kv_gib": 1 / 16, "host_gib": 1 / 8, "disk_gib": 1 / 4})
    engines.stop_on_signals()
    with tempfile.TemporaryDirectory(dir=options.scratch, ignore_cleanup_errors=True) as root:
        if os.environ.get("SEMKV_STAMPS"):
            stamps.plugin(Path(root) / "site")
            paths = [str(Path(root) / "site"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        makers = []
        for name in options.engines:
            folder = Path(root) / name
            folder.mkdir(mode=0o700)
            makers.append((name, partial(engines.start, name, options, folder)))
        started = engines.start_all(makers, "enforce_eager" not in options.engine_args)
        run = Run(options, Path(root), started)
        try:
            run.all()
        finally:
            for engine in run.up.values():
                engine.close()
            for engine in started.values():
                engine.kill()
            run.stamps()
    print(table(run.result))


if __name__ == "__main__":
    main()
