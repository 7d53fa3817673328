"""What the benches of whole engines share: engines by name, a process for each, a watchdog, one way to ask.

An engine is an AsyncLLM in a process of its own, with vLLM's engine core in another below it, as in a server:

    none     vLLM's prefix cache alone                    offload  vLLM's OffloadingConnector with host memory
    tiering  the same with TieringOffloadingSpec          fs       the same with vLLM's tier of files below
    semkv    our connector with host memory and disk
    X-disk    X again, in a new process on the folder that X has filled

The process takes commands (a line of JSON on its standard input) and answers each through a pipe. One that does not
answer in time, or ends, is stopped with all its children, and the caller gets an `EngineError` with the end of its log.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 151000,
}  # fmt: skip
TINY_ENGINE = {"block_size": 32, "enforce_eager": True}
NAMES = ("none", "offload", "tiering", "fs", "semkv")
STORES = ("semkv", "fs")  # those that write files
ENVIRONMENT = {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
MAX_MODEL_LEN = 16384  # in all benches: what is compiled for one serves the others
START_LIMIT_S = 300
LOG_TAIL = 1500
DIR, HOST = "$DIR", "$HOST"


def base(name: str) -> str:
    return name.removesuffix("-disk")


def kv_token_bytes(shape: Mapping[str, Any]) -> int:
    """Bytes of KV that a token has, in bfloat16."""
    head = shape["hidden_size"] // shape["num_attention_heads"]
    return int(2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head)


def transfer_config(name: str, folder: str, host: int, disk: int, added: Mapping[str, Any]) -> dict[str, Any] | None:
    """The KV transfer configuration of an engine.

    Args:
        host: bytes of host memory.
        disk: bytes of files at most, where the engine has such a bound.
        added: configurations by name; ``"$DIR"`` and ``"$HOST"`` in them stand for the folder and the host memory.
    """
    if name in added:
        text = json.dumps(added[name]).replace(DIR, folder).replace(f'"{HOST}"', str(host))
        config: dict[str, Any] = json.loads(text)
        return config
    if name == "none":
        return None
    if name == "semkv":
        extra: dict[str, Any] = {"cache_dir": folder, "host_bytes": host, "max_bytes": disk, "break_even": False}
        return {"kv_connector": "SemKVConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    extra = {"cpu_bytes_to_use": host}
    if name != "offload":
        tiers = [{"type": "fs", "root_dir": folder}] if name == "fs" else []
        extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": tiers}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def named(text: str) -> tuple[str, Any]:
    """``NAME=JSON`` of a command line."""
    name, _, value = text.partition("=")
    return name, json.loads(value)


# ------------------------------------------------------------------ the calling process


class EngineError(Exception):
    """An engine ended, hung or refused; the text says which."""


class Engine:
    """An engine's process, seen from outside.

    Args:
        name: for messages.
        spec: what its process gets as JSON (see `Server`).
        log: where its output goes.
    """

    def __init__(self, name: str, spec: Mapping[str, Any], log: Path) -> None:
        self.name, self.log, self.rest = name, log, b""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.answers, write = os.pipe()
        command = [sys.executable, sys.argv[0], "--child", json.dumps(dict(spec) | {"answers": write})]
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, pass_fds=[write],
                start_new_session=True, env=ENVIRONMENT | os.environ,
            )  # fmt: skip
        os.close(write)
        atexit.register(self.kill)

    def ask(self, do: str, limit_s: float, **more: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: `answer` says how
            self.process.stdin.write(json.dumps({"do": do, **more}).encode() + b"\n")
            self.process.stdin.flush()
        return self.answer(do, limit_s)

    def answer(self, what: str, limit_s: float) -> dict[str, Any]:
        """The next answer; the first of all says that the engine has started."""
        deadline = time.monotonic() + limit_s
        while b"\n" not in self.rest:
            ready, _, _ = select.select([self.answers], [], [], 0.5)
            got = os.read(self.answers, 1 << 20) if ready else b""
            self.rest += got
            if not got and (ready or self.process.poll() is not None):
                self._fail(f"{what}: the process ended with status {self._status()}")
            if not got and time.monotonic() > deadline:
                self._fail(f"{what}: no answer within {limit_s:.0f} s")
        line, _, self.rest = self.rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            self._fail(f"{what}: {found['error']}")
        return found

    def wait_started(self) -> None:
        """Until it has answered or ended; the answer is still to be read."""
        deadline = time.monotonic() + START_LIMIT_S
        while not select.select([self.answers], [], [], 0.5)[0] and time.monotonic() < deadline:
            if self.process.poll() is not None:
                return

    def _status(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(5)
        return None

    def _fail(self, why: str) -> None:
        self.kill()
        raise EngineError(f"{self.name}: {why}\n{log_tail(self.log)}")

    def close(self, limit_s: float = 60) -> None:
        """Let it end by itself, so that what it has begun to store is stored; then by force."""
        with contextlib.suppress(Exception):
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(limit_s)
        self.kill()

    def kill(self) -> None:
        atexit.unregister(self.kill)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its engine core too
        self.process.wait()


def start(name: str, options: argparse.Namespace, folder: Path) -> Engine:
    """Start an engine on the store in ``folder``, beside which the model lies."""
    spec = {
        "engine": name, "folder": str(folder), "model": str(folder.parent / "model"), "added": options.add,
        "host_bytes": int(options.host_gib * 2**30), "disk_bytes": int(options.disk_gib * 2**30),
        "kv_bytes": int(options.kv_gib * 2**30), "shape": options.shape, "engine_args": options.engine_args,
        "max_model_len": options.max_model_len, "tp": options.tp,
    }  # fmt: skip
    return Engine(name, spec, options.logs / f"{options.out.stem}-{name}.log")


def start_all(makers: Iterable[tuple[str, Callable[[], Engine]]], compiles: bool) -> dict[str, Engine]:
    """Start engines at once; where they have to compile, the first alone, so that the others find its work."""
    started: dict[str, Engine] = {}
    cache = Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser() / "torch_compile_cache"
    for name, make in makers:
        started[name] = make()
        if compiles and not cache.exists():
            started[name].wait_started()
    return started


def log_tail(log: Path) -> str:
    """The last lines that name an error (vLLM's own process says only that another failed), and the log's end."""
    text = log.read_text(errors="replace") if log.exists() else ""
    named = [line for line in text.splitlines() if re.search(r"\w(Error|Exception)\b", line)]
    causes = [line[-300:] for line in named if "core initialization failed" not in line]
    return "\n".join([*dict.fromkeys(causes[-4:]), "...", text[-LOG_TAIL:]])


def stop_on_signals() -> None:
    """A call that is cut off ends its engines: the caller's ``finally`` runs."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))


def die_with_parent() -> None:
    """For a process without a pipe to its caller: a caller that is killed takes it along."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run_child(spec: Mapping[str, Any], log: Path, limit_s: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """What this script's `child` finds in a process of its own; one that fails, hangs or dies gives an error."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        process = subprocess.Popen(
            [sys.executable, sys.argv[0], "--child", json.dumps(dict(spec) | {"out": str(out)})],
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=ENVIRONMENT | environment | os.environ,
        )  # fmt: skip
        try:
            why = f"ended with status {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            why = f"more than {limit_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"error": why}
    return found | ({"log": log_tail(log)} if "error" in found else {})


def child(text: str, work: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The other side of `run_child`."""
    die_with_parent()
    spec = json.loads(text)
    try:
        found = work(spec)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    Path(spec["out"]).write_text(json.dumps(found))


def add_arguments(parser: argparse.ArgumentParser, names: str) -> None:
    """What the benches of whole engines have in common."""
    parser.add_argument("--engines", default=names, help="comma-separated, see the docstring of engines.py")
    parser.add_argument("--add", type=named, action="append", default=[], metavar="NAME=JSON",
                        help="a KV transfer configuration of your own; $DIR and $HOST in it are replaced")  # fmt: skip
    parser.add_argument("--tp", type=int, default=1, help="GPUs")
    parser.add_argument("--kv-gib", type=float, default=8.0, help="KV memory on all GPUs together")
    parser.add_argument("--host-gib", type=float, default=48.0)
    parser.add_argument("--disk-gib", type=float, default=40.0, help="the most that semkv keeps")
    parser.add_argument("--scratch", default=tempfile.gettempdir(), help="where the folders of the stores go")
    parser.add_argument("--shape", type=json.loads, default={}, help="JSON: changes of the model's configuration")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON, for vLLM")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU, to see that all of it runs")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    parser.add_argument("--logs", type=Path, help="folder of the engines' logs; beside the result by default")
    parser.add_argument("--table", type=Path, help="print the table of a result instead")
    parser.add_argument("--child", help=argparse.SUPPRESS)


def finish_arguments(options: argparse.Namespace, tiny: Mapping[str, Any]) -> None:
    """Fill in what depends on other arguments; ``tiny`` replaces sizes for ``--tiny``."""
    options.add, options.engines = dict(options.add), options.engines.split(",")
    options.logs = options.logs or options.out.parent / "logs"
    known = {*NAMES, *options.add}
    if unknown := {name for name in options.engines if base(name) not in known}:
        raise SystemExit(f"unknown engines {', '.join(sorted(unknown))}: choose from {', '.join(sorted(known))}")
    options.max_model_len = 1024 if options.tiny else MAX_MODEL_LEN
    if options.tiny:
        vars(options).update(tiny)
        options.engine_args = TINY_ENGINE | options.engine_args
    options.shape = QWEN_7B | (TINY if options.tiny else {}) | options.shape


# ------------------------------------------------------------------ the engine's process


@dataclass
class Answer:
    """What came back for one request; times are of `time.perf_counter`."""

    start: float
    first: float = 0.0
    last: float = 0.0
    prompt: int = 0
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_ms(self) -> float:
        return (self.first - self.start) * 1e3


def sources(answers: list[Answer]) -> dict[str, int]:
    """Our connector's reports, added up: loaded tokens, and the same by source."""
    total: dict[str, int] = {}
    for answer in answers:
        for key, value in {"loaded": answer.report.get("loaded_tokens"), **answer.report.get("sources", {})}.items():
            total[key] = total.get(key, 0) + int(value or 0)
    return total


class Server:
    """An AsyncLLM.

    Args:
        spec: engine; model, its folder, the same for all processes of a run, since stores tell models apart by it;
            folder, of the store; kv_bytes, of all ranks; shape, host_bytes, disk_bytes, added, engine_args,
            max_model_len, tp.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        import vllm
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        start = time.perf_counter()
        self.spec, self.folder, self.number = spec, Path(spec["folder"]), 0
        config = transfer_config(
            base(spec["engine"]), spec["folder"], spec["host_bytes"], spec["disk_bytes"], spec["added"]
        )
        write_model(Path(spec["model"]), spec["shape"])
        arguments = AsyncEngineArgs(
            model=spec["model"],
            load_format="dummy",
            skip_tokenizer_init=True,
            seed=0,
            max_model_len=spec["max_model_len"],
            kv_cache_memory_bytes=spec["kv_bytes"] // spec["tp"],
            gpu_memory_utilization=0.1,  # not used beside the line above, but asked for at the start
            tensor_parallel_size=spec["tp"],
            kv_transfer_config=KVTransferConfig(**config) if config else None,
            **spec["engine_args"],
        )
        self.llm: Any = AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)
        scheduler, cache = self.llm.vllm_config.scheduler_config, self.llm.vllm_config.cache_config
        self.facts = {
            "vllm": vllm.__version__,
            "torch": sys.modules["torch"].__version__,
            "device": "cpu" if current_platform.is_cpu() else current_platform.get_device_name(),
            "start_s": round(time.perf_counter() - start, 1),
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "max_num_seqs": scheduler.max_num_seqs,
            "block_size": cache.block_size,
            "num_gpu_blocks": cache.num_gpu_blocks,
        }

    async def ask(self, prompt: list[int], tokens: int) -> Answer:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        self.number += 1
        answer = Answer(time.perf_counter(), prompt=len(prompt))
        async for output in self.llm.generate({"prompt_token_ids": prompt}, params, str(self.number)):
            if output.outputs[0].token_ids:
                answer.last = time.perf_counter()
                answer.first = answer.first or answer.last
                answer.tokens += output.outputs[0].token_ids
            answer.cached = max(answer.cached, output.num_cached_tokens or 0)
            answer.report = (output.kv_transfer_params or {}).get("semkv") or answer.report
        return answer

    async def settle(self, quiet_s: float = 0.6, limit_s: float = 120) -> None:
        """Until the files have not grown for a while."""
        if base(self.spec["engine"]) == "none":
            return
        deadline = time.monotonic() + limit_s
        size = -1
        while size != (size := folder_bytes(self.folder)) and time.monotonic() < deadline:
            await asyncio.sleep(quiet_s)

    async def forget(self) -> None:
        """Empty vLLM's prefix cache. What a connector holds in host memory or in files stays."""
        for _ in range(100):
            if await self.llm.reset_prefix_cache():
                return
            await asyncio.sleep(0.1)
        raise RuntimeError("vLLM's prefix cache cannot be emptied: somebody holds blocks")


def write_model(folder: Path, shape: Mapping[str, Any]) -> None:
    """A model of this shape without weights; engines that start at once write the same."""
    folder.mkdir(exist_ok=True)
    part = folder / f"{os.getpid()}.tmp"
    part.write_text(json.dumps(shape))
    part.replace(folder / "config.json")


Command = Callable[..., Awaitable[dict[str, Any]]]


def serve(spec: Mapping[str, Any], commands: Callable[[Server], Mapping[str, Command]]) -> None:
    """Start the engine and obey until the standard input ends."""

    def answer(found: Mapping[str, Any]) -> None:
        os.write(spec["answers"], json.dumps(found).encode() + b"\n")

    async def obey() -> None:
        server = Server(spec)
        known = commands(server)
        answer(server.facts)
        try:
            while line := await asyncio.to_thread(sys.stdin.readline):
                given = json.loads(line)
                answer(await known[given.pop("do")](**given))
        finally:
            await server.settle()
            server.llm.shutdown()

    try:
        asyncio.run(obey())
    except Exception as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {str(error)[:400]}"})
        sys.exit(1)


# ------------------------------------------------------------------ files


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def folder_bytes(folder: Path) -> int:
    total = 0
    for path in files_of(folder):
        with contextlib.suppress(OSError):  # it may go meanwhile
            total += path.stat().st_size
    return total


def drop_pages(folder: str | Path) -> None:
    """Have the files read from the disk again: written back, then out of the page cache."""
    os.sync()
    for path in files_of(Path(folder)):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


# ------------------------------------------------------------------ an LLM in this process


def settle_llm(llm: Any, folder: Path | None, limit_s: float = 60) -> None:
    """Let an in-process LLM finish its stores: it steps only while it has requests, so this steps it."""
    core, deadline = llm.llm_engine.engine_core.engine_core, time.monotonic() + limit_s
    size = -1
    while time.monotonic() < deadline:
        for _ in range(50):
            if core.scheduler.has_requests():
                core.step_fn()
            time.sleep(0.005)
        if folder is None or size == (size := folder_bytes(folder)):
            return
