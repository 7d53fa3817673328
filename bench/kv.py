"""Time to first token when the KV blocks of a prompt come back, and chats under load: semkv and vLLM's own stores.

    python bench/kv.py --out bench/results/h100/kv.json                         (hits, then chats at 6 a second; disk)
    python bench/kv.py --repeats 0 --users 80 --rate 20 --engines offload,semkv --out ...    (only chats)
    python bench/kv.py --repeats 0 --tp 2 --rate 10 --out ...                   (two GPUs)
    python bench/kv.py --tiny --engines none,semkv,semkv-disk --out /tmp/kv.json    (on a CPU, to see that it runs)
    python bench/kv.py --table bench/results/h100/kv.json

Random tokens through Qwen2.5-7B's shape with dummy weights. An engine is an AsyncLLM in a process of its own, with
vLLM's engine core in another below it, as in a server. All are started at once, stay up and take turns, so that they
share the machine's good and bad minutes:

    none     vLLM's prefix cache only                    offload     vLLM's OffloadingConnector with host memory
    tiering  the same with TieringOffloadingSpec         semkv       our connector with host memory and disk
    idle     a connector that does nothing: what vLLM's hooks cost
    offload-again  a second one: how far two engines of the same code are apart
    semkv-disk  again, in a new process on the folder that semkv has filled, after all others have ended

One request and ``--many`` at once, of every length. ``ms`` is the time until each of them has its first token:

    cold  everything is computed; a connector also stores    prefix  the same again: it is in GPU memory
    host  three times, each after `reset_prefix_cache`       disk    with a cold page cache; ``gb_s`` is what was loaded

``decode`` is the rate of 16 requests that have their first token, while a connector stores. Beside ``disk`` stands what
plain reads of the same files give (O_DIRECT, by one thread and by eight).

In a chat every user has a document of 6,000 to 9,000 tokens behind a system text that all share. A round appends a
question of 50 tokens and an answer of 64. Requests start at ``--rate``, each round in another order of users; a user's
next question waits for the last answer. At 6 a second the first round asks for about what a GPU computes, and p95 (the
tenth slowest of 192 later requests) is of what comes while its queue is worked off: so each chat also tells p50 and p95
by round, and its slowest requests. ``digest`` is of all answers: with dummy weights two tokens may tie, so unequal
ones are reported, no more.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import (
    Answer,
    Child,
    ChildError,
    drop_pages,
    files_of,
    folder_bytes,
    machine,
    options_of,
    write_json,
)

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
TINY_OPTIONS = {
    "lengths": [128, 512], "many": 4, "repeats": 1, "users": 6, "rate": 4.0, "kv_gib": 3 / 1024, "host_gib": 1 / 8,
    "disk_gib": 1 / 4, "max_model_len": 1024,
}  # fmt: skip
TINY_LOAD = {"system": 64, "document": [300, 500], "question": 20, "answer": 8, "rounds": 3}
LOAD = {"system": 1000, "document": [6000, 9000], "question": 50, "answer": 64, "rounds": 5}
NAMES = ("none", "idle", "offload", "offload-again", "tiering", "semkv", "semkv-disk")
DECODE = {"size": 512, "count": 16, "tokens": 128}
SHORT = 8  # a prompt lacks so many tokens: a full last block would be loaded where vLLM's own cache leaves it out
HITS = 3  # of one prompt in host memory
# repeats whose prompts no other measurement has
WARM = 1000
DECODING = 2000
FILLED = 3000
START_LIMIT_S, LIMIT_S = 300, 180  # of a start and of one command
QUIET_S = 0.5  # a store whose files have not grown for so long has ended
# of one plain reading; for one rate
READ_BYTES = 4 << 20
READ_S = 4.0
SLOWEST = 10  # requests of a chat that are told one by one


def base(name: str) -> str:
    return name.removesuffix("-disk")


def kv_token_bytes(shape: Mapping[str, Any]) -> int:
    """Bytes of KV that a token has, in bfloat16."""
    head = shape["hidden_size"] // shape["num_attention_heads"]
    return int(2 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head)


def transfer_config(name: str, folder: Path, host: int, disk: int) -> dict[str, Any] | None:
    """The KV transfer configuration of an engine; sizes in bytes."""
    if name == "none":
        return None
    if name == "idle":
        module = "semkv_vllm.kv"
        return {
            "kv_connector": "IdleConnector",
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
        }
    if name == "semkv":
        from semkv_lab.local_engine import connector

        return connector(folder, host_bytes=host, max_bytes=disk)
    extra: dict[str, Any] = {"cpu_bytes_to_use": host}
    if name == "tiering":
        extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": []}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


# ------------------------------------------------------------------ the engine's process


@dataclass
class Request:
    """One request's answer; times are of `time.perf_counter`."""

    start: float
    prompt: int
    first: float = 0.0
    last: float = 0.0
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_ms(self) -> float:
        return (self.first - self.start) * 1e3


class Server:
    """An AsyncLLM on a store's folder."""

    def __init__(self, folder: Path, arguments: dict[str, Any]) -> None:
        import vllm
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        start = time.perf_counter()
        self.folder = folder
        self.asked = 0
        config = arguments.pop("kv_transfer_config")
        arguments["kv_transfer_config"] = KVTransferConfig(**config) if config else None
        engine_args = AsyncEngineArgs(**arguments)
        self.llm: Any = AsyncLLM.from_engine_args(
            engine_args, usage_context=UsageContext.OPENAI_API_SERVER
        )
        scheduler = self.llm.vllm_config.scheduler_config
        cache = self.llm.vllm_config.cache_config
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

    async def request(self, prompt: list[int], tokens: int) -> Request:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.asked += 1
        found = Request(time.perf_counter(), len(prompt))
        async for output in self.llm.generate(
            {"prompt_token_ids": prompt}, params, str(self.asked)
        ):
            if output.outputs[0].token_ids:
                found.last = time.perf_counter()
                found.first = found.first or found.last
                found.tokens += output.outputs[0].token_ids
            found.cached = max(found.cached, output.num_cached_tokens or 0)
            found.report = (output.kv_transfer_params or {}).get("semkv") or found.report
        return found

    async def ask(self, size: int, count: int, repeat: int, tokens: int = 1) -> dict[str, Any]:
        """Ask ``count`` random prompts at once."""
        import numpy as np

        rng = np.random.default_rng([size, count, repeat])
        prompts = [rng.integers(10, 150_000, size - SHORT).tolist() for _ in range(count)]
        found = await asyncio.gather(*(self.request(prompt, tokens) for prompt in prompts))
        start = min(each.start for each in found)
        first = max(each.first for each in found)
        row = {
            "ms": round((first - start) * 1e3, 2),
            "ttft_ms": round(statistics.median(each.ttft_ms for each in found), 2),
            "cached": sum(each.cached for each in found),
            "sources": sources(found),
            "answers": [each.tokens[0] for each in found],
        }
        if tokens > 1:
            rates = [(len(each.tokens) - 1) / (each.last - each.first) for each in found]
            row["decoded_per_s"] = round(statistics.median(rates) * count, 1)
        return row

    async def chat(self, load: Mapping[str, Any], give_up_s: float) -> dict[str, Any]:
        """Run the load, all of it within the limit."""
        starts, (documents, questions) = schedule(load), texts(load)
        found: dict[tuple[int, int], Request] = {}
        late = [0.0]
        began = time.perf_counter()

        async def talk(user: int) -> None:
            history = documents[user]
            for number in range(load["rounds"]):
                ahead = began + starts[number][user] - time.perf_counter()
                late.append(-ahead)
                await asyncio.sleep(max(0.0, ahead))
                prompt = history + questions[user][number]
                found[user, number] = answer = await self.request(prompt, load["answer"])
                history = prompt + answer.tokens

        async with asyncio.timeout(give_up_s):
            await asyncio.gather(*map(talk, range(load["users"])))
        return summary(found, time.perf_counter() - began) | {"late_most_s": round(max(late), 2)}

    async def forget(self) -> dict[str, Any]:
        """Empty vLLM's prefix cache once all is stored. What a connector holds in host memory or in files stays."""
        await self.settle()
        for _ in range(100):
            if await self.llm.reset_prefix_cache():
                return {}
            await asyncio.sleep(0.1)
        raise RuntimeError("vLLM's prefix cache cannot be emptied: somebody holds blocks")

    async def settle(self) -> None:
        """Until the files have not grown for a while."""
        deadline, size = time.monotonic() + 120, -1
        while size != (size := folder_bytes(self.folder)) and time.monotonic() < deadline:
            await asyncio.sleep(QUIET_S)


def obey(spec: dict[str, Any], answer: Answer) -> None:
    """Start the engine and do what is asked until the standard input ends."""

    async def run() -> None:
        server = Server(Path(spec["folder"]), spec["arguments"])
        answer(server.facts)
        try:
            while line := await asyncio.to_thread(sys.stdin.readline):
                given = json.loads(line)
                answer(await getattr(server, given.pop("do"))(**given))
        finally:
            await server.settle()
            server.llm.shutdown()

    asyncio.run(run())


def schedule(load: Mapping[str, Any]) -> list[list[float]]:
    """Seconds at which each user's rounds may start, as a Poisson process: ``[round][user]``."""
    import numpy as np

    rng = np.random.default_rng(load["seed"])
    gaps = rng.exponential(1.0, load["users"] * load["rounds"])
    times = ((np.cumsum(gaps) - gaps[0]) / load["rate"]).reshape(load["rounds"], load["users"])
    return [row[rng.permutation(load["users"])].tolist() for row in times]


def texts(load: Mapping[str, Any]) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Each user's first prompt without its question, and the questions: ``[user][round]``."""
    import numpy as np

    rng = np.random.default_rng([load["seed"], 1])

    def tokens(count: int) -> list[int]:
        drawn: list[int] = rng.integers(10, 150_000, count).tolist()
        return drawn

    system = tokens(load["system"])
    low, high = load["document"]
    documents = [system + tokens(int(rng.integers(low, high + 1))) for _ in range(load["users"])]
    return documents, [
        [tokens(load["question"]) for _ in range(load["rounds"])] for _ in range(load["users"])
    ]


def summary(found: Mapping[tuple[int, int], Request], wall_s: float) -> dict[str, Any]:
    """One chat's figures, from its requests by user and round."""
    every = list(found.values())
    numbers = sorted({number for _, number in found})
    text = json.dumps([[*key, found[key].tokens] for key in sorted(found)])
    began = min(each.start for each in every)
    slowest = sorted(found, key=lambda key: -found[key].ttft_ms)[:SLOWEST]
    return {
        "later_ms": percentiles(each.ttft_ms for (_, number), each in found.items() if number),
        "rounds_ms": [percentiles(each.ttft_ms for (_, n), each in found.items() if n == number) for number in numbers],
        "slowest": [
            {"round": key[1], "user": key[0], "at_s": round(found[key].start - began, 2), "cached": found[key].cached,
             "ms": round(found[key].ttft_ms, 2), "sources": found[key].report.get("sources", {})}
            for key in slowest
        ],
        "wall_s": round(wall_s, 2),
        "requests": len(every),
        "prompt_tokens": sum(each.prompt for each in every),
        "computed_tokens": sum(each.prompt - each.cached for each in every),
        "hit_tokens": sum(each.cached for each in every),
        "decoded_per_s": round(sum(len(each.tokens) for each in every) / wall_s, 1),
        "sources": sources(every),
        "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
    }  # fmt: skip


def sources(found: Iterable[Request]) -> dict[str, int]:
    """Our connector's reports, added up: loaded tokens, and the same by source."""
    total: dict[str, int] = {}
    for each in found:
        for key, value in {
            "loaded": each.report.get("loaded_tokens"),
            **each.report.get("sources", {}),
        }.items():
            total[key] = total.get(key, 0) + int(value or 0)
    return total


def percentiles(values: Iterable[float], digits: int = 2) -> dict[str, float]:
    """p50, p95, p99 (nearest rank) and the mean."""
    ordered = sorted(values)
    found = {f"p{p}": ordered[-(-p * len(ordered) // 100) - 1] for p in (50, 95, 99)}
    return {
        name: round(value, digits)
        for name, value in (found | {"mean": statistics.fmean(ordered)}).items()
    }


# ------------------------------------------------------------------ the calling process


class Run:
    """The engines that are up, and the rows so far."""

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        self.options = options
        self.root = root
        self.up = dict[str, Child]()
        keep = (
            "kv_gib",
            "host_gib",
            "disk_gib",
            "tp",
            "shape",
            "engine_args",
            "repeats",
            "rounds_of_chats",
        )
        self.load = (TINY_LOAD if options.tiny else LOAD) | {
            "users": options.users,
            "rate": options.rate,
        }
        self.load |= {"document": options.document} if options.document else {}
        self.result: dict[str, Any] = {
            "settings": {key: getattr(options, key) for key in keep},
            "load": self.load,
        }
        self.result |= {"machine": machine("vllm", "torch"), "engines": {}, "hits": [], "chats": []}

    def cells(self) -> Iterator[dict[str, int]]:
        for repeat in range(self.options.repeats):
            for count in dict.fromkeys((1, self.options.many)):
                for size in self.options.lengths:
                    yield {"size": size, "count": count, "repeat": repeat}

    def guard(self, name: str, work: Callable[..., object], *given: Any, **fields: Any) -> None:
        """An engine that fails is left out from here on; why is in the result."""
        if name not in self.up:
            return
        try:
            work(name, *given, **fields)
        except ChildError as error:
            print(f"{name}: {str(error).splitlines()[0][:300]}", flush=True)
            self.result["engines"].setdefault(name, {})["error"] = str(error)
            self.up.pop(name).kill()
        write_json(self.options.out, self.result)

    def start(self, names: Sequence[str]) -> None:
        """Start engines at once; where they have to compile, the first before the others, which find its work."""
        cache = (
            Path(os.environ.get("VLLM_CACHE_ROOT", "~/.cache/vllm")).expanduser()
            / "torch_compile_cache"
        )
        alone = "enforce_eager" not in self.options.engine_args and not cache.exists()
        for some in [names[:1], names[1:]] if alone else [names]:
            for name in some:
                self.up[name] = self.make(name)
            for name in some:
                self.guard(name, self.warm)

    def make(self, name: str) -> Child:
        options = self.options
        folder = self.root / base(name)
        model = self.root / "model"
        folder.mkdir(mode=0o700, exist_ok=True)
        model.mkdir(exist_ok=True)  # one for all engines: stores tell models apart by their folder
        (model / "config.json").write_text(json.dumps(options.shape))
        kv, host, disk = (
            int(gib * 2**30) for gib in (options.kv_gib, options.host_gib, options.disk_gib)
        )
        arguments = {
            "model": str(model), "load_format": "dummy", "skip_tokenizer_init": True, "seed": 0,
            "max_model_len": options.max_model_len, "tensor_parallel_size": options.tp,
            "kv_cache_memory_bytes": kv // options.tp,
            "gpu_memory_utilization": 0.1,  # not used beside the line above, but asked for at the start
            "kv_transfer_config": transfer_config(base(name), folder, host, disk), **options.engine_args,
        }  # fmt: skip
        log = options.logs / f"{options.out.stem}-{name}.log"
        return Child(name, {"folder": str(folder), "arguments": arguments}, log, {})

    def warm(self, name: str) -> None:
        """Compile what computes and what loads; fills no cell."""
        engine = self.up[name]
        self.result["engines"][name] = engine.answer("start", START_LIMIT_S)
        few = [(size, 1) for size in self.options.lengths]
        chat = {**self.load, "seed": WARM, "users": 4, "rounds": 2, "rate": 1e3}
        for _ in range(2):
            for size, count in (*few, (min(self.options.lengths), self.options.many)):
                engine.ask("ask", LIMIT_S, size=size, count=count, repeat=WARM, tokens=8)
                engine.ask("forget", LIMIT_S)
            engine.ask("chat", LIMIT_S, load=chat, give_up_s=100)
            engine.ask("forget", LIMIT_S)

    def ask(self, name: str, level: str, **cell: int) -> dict[str, Any]:
        row = {"engine": name, "level": level, **cell, **self.up[name].ask("ask", LIMIT_S, **cell)}
        self.result["hits"].append(row)
        print(
            f"{name} {level} {cell}: {row['ms']} ms, cached {row['cached']} {row['sources']}",
            flush=True,
        )
        return row

    def hits(self, name: str, **cell: int) -> None:
        """From nowhere, from GPU memory, from host memory."""
        self.ask(name, "cold", **cell)
        self.ask(name, "prefix", **cell)
        self.up[name].ask("forget", LIMIT_S)
        for _ in range(HITS if name not in ("none", "idle") else 0):
            self.ask(name, "host", **cell)
            self.up[name].ask("forget", LIMIT_S)

    def chat(self, name: str, number: int) -> None:
        limit = self.load["users"] * self.load["rounds"] / self.load["rate"] * 2 + 60
        load = {**self.load, "seed": number}  # nobody has seen these documents
        row = self.up[name].ask("chat", limit + 30, load=load, give_up_s=limit)
        self.result["chats"].append({"engine": name, "run": number, **row})
        print(chat_line(self.result["chats"][-1]), flush=True)
        self.up[name].ask("forget", LIMIT_S)

    def fill(self, name: str) -> None:
        """Store what semkv-disk is going to ask."""
        for cell in self.cells():
            self.up[name].ask("ask", LIMIT_S, **cell | {"repeat": FILLED + cell["repeat"]})
        self.up[name].ask("forget", LIMIT_S)

    def disk(self, name: str) -> None:
        """Each prompt once: then it is in host memory."""
        folder = self.root / base(name)
        facts = self.result["engines"][name]
        facts["disk_gb_s"] = {
            f"{threads} threads": read_rate(folder, threads) for threads in (1, 8)
        }
        facts["folder_bytes"] = folder_bytes(folder)
        for cell in self.cells():
            drop_pages(folder)
            row = self.ask(name, "disk", **cell | {"repeat": FILLED + cell["repeat"]})
            tokens = row["sources"].get("loaded", 0) or row["cached"]
            row["gb_s"] = round(tokens * kv_token_bytes(self.options.shape) / row["ms"] / 1e6, 2)
            self.up[name].ask("forget", LIMIT_S)

    def all(self) -> None:
        names = [name for name in self.options.engines if base(name) == name]
        again = [name for name in self.options.engines if base(name) != name]
        self.start(names)
        for number, cell in enumerate(self.cells()):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                self.guard(name, self.hits, **cell)
        for repeat in range(2 if self.options.repeats else 0):
            for name in names:
                self.guard(name, self.ask, "decode", **DECODE, repeat=DECODING + repeat)
        for number in range(self.options.rounds_of_chats):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                self.guard(name, self.chat, number)
        for name in again:
            self.guard(base(name), self.fill)
        self.close()
        for name in again:
            self.start([name])
            self.guard(name, self.disk)
            self.close()

    def close(self) -> None:
        """End all engines; what they have begun to store is stored."""
        for engine in self.up.values():
            engine.close()
        self.up.clear()


def read_rate(folder: Path, threads: int) -> float:
    """GB/s of plain reads of the folder's files with O_DIRECT, none of them in the page cache."""
    parts = [
        (path, at) for path in files_of(folder) for at in range(0, path.stat().st_size, READ_BYTES)
    ]
    deadline = time.perf_counter() + READ_S

    def read(mine: Iterable[tuple[Path, int]]) -> int:
        # aligned to pages
        memory = mmap.mmap(-1, READ_BYTES)
        total = 0
        for path, at in mine:
            if time.perf_counter() > deadline:
                break
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            total += max(0, os.preadv(fd, [memory], at))
            os.close(fd)
        return total

    drop_pages(folder)
    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        try:
            total = sum(pool.map(read, [parts[i::threads] for i in range(threads)]))
        except OSError as error:  # a file system without O_DIRECT
            print(f"no plain rate of the disk: {error}", flush=True)
            return 0.0
    return round(total / (time.perf_counter() - start) / 1e9, 2)


# ------------------------------------------------------------------ tables


def table(result: Mapping[str, Any]) -> str:
    """Markdown: medians of the hits (of decoding, tokens a second) and their range; the chats; what failed."""
    cells: dict[str, dict[str, list[float]]] = {}
    for row in result["hits"]:
        cell = cells.setdefault(f"{row['count']} x {row['size']}", {})
        values = (
            {row["level"]: row["ms"]}
            if row["level"] != "decode"
            else {"decode": row["decoded_per_s"]}
        )
        values |= {"GB/s": row["gb_s"]} if "gb_s" in row else {}
        for key, value in values.items():
            cell.setdefault(f"{row['engine']} {key}", []).append(value)
    columns = list(dict.fromkeys(key for cell in cells.values() for key in cell))
    text = [head("requests x tokens", *columns)]
    for name, cell in cells.items():
        text.append(
            "| " + " | ".join([name, *(spread(cell.get(key, [])) for key in columns)]) + " |"
        )
    text += ["", head(*CHAT_COLUMNS), *map(chat_line, result["chats"])]
    for run in sorted({row["run"] for row in result["chats"]}):
        given = {row["digest"] for row in result["chats"] if row["run"] == run}
        text.append(f"answers of run {run}: {'equal' if len(given) == 1 else 'not equal'}")
    for name, facts in result["engines"].items():
        text += (
            [f"{name}: plain reads give {facts['disk_gb_s']} GB/s"] if "disk_gb_s" in facts else []
        )
        text += [f"{name}: {facts['error'].splitlines()[0]}"] if "error" in facts else []
    return "\n".join(text)


CHAT_COLUMNS = "engine run p50 p95 p99 mean p50-by-round p95-by-round wall-s computed hits tokens/s loaded".split()


def chat_line(row: Mapping[str, Any]) -> str:
    later = [row["later_ms"][key] for key in ("p50", "p95", "p99", "mean")]
    rounds = row.get("rounds_ms", [row.get("first_ms")])  # earlier results have the first only
    by_round = [" ".join(f"{each[p]:.0f}" for each in rounds) for p in ("p50", "p95")]
    cells = [row["engine"], row["run"], *later, *by_round, row["wall_s"], row["computed_tokens"]]
    cells += [row["hit_tokens"], row["decoded_per_s"], json.dumps(row["sources"])]
    return "| " + " | ".join(map(str, cells)) + " |"


def head(*columns: str) -> str:
    return "| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|"


def spread(values: Sequence[float]) -> str:
    return (
        f"{statistics.median(values):.5g} ({min(values):.5g} to {max(values):.5g})"
        if values
        else "-"
    )


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", default="none,offload,semkv,semkv-disk", help="see above")
    parser.add_argument("--lengths", type=numbers, default=[512, 8192], help="tokens")
    parser.add_argument("--many", type=int, default=16, help="requests at once")
    parser.add_argument(
        "--repeats", type=int, default=3, help=f"of each length, every one with {HITS} hits"
    )
    parser.add_argument("--rounds-of-chats", type=int, default=2)
    parser.add_argument("--users", type=int, default=48)
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--document", type=numbers, help="shortest and longest, tokens (6000,9000)")
    parser.add_argument("--tp", type=int, default=1, help="GPUs")
    parser.add_argument(
        "--kv-gib", type=float, default=8.0, help="KV memory of an engine, on all GPUs together"
    )
    parser.add_argument(
        "--host-gib", type=float, default=40.0, help="of an engine; all are up at the same time"
    )
    parser.add_argument("--disk-gib", type=float, default=40.0, help="the most that semkv keeps")
    parser.add_argument(
        "--scratch", default=tempfile.gettempdir(), help="where the folders of the stores go"
    )
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON, for vLLM")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model on a CPU, to see that all of it runs"
    )
    parser.add_argument("--table", type=Path, help="print the table of a result instead")
    parser.set_defaults(max_model_len=16384)
    options = options_of(parser, obey)
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    options.engines = options.engines.split(",")
    if unknown := {*options.engines}.difference(NAMES):
        parser.error(f"unknown engines {', '.join(unknown)}: choose from {', '.join(NAMES)}")
    if "semkv-disk" in options.engines and "semkv" not in options.engines:
        parser.error("semkv-disk needs semkv, which fills its folder")
    options.shape = QWEN_7B
    if options.tiny:
        vars(options).update(TINY_OPTIONS, shape=QWEN_7B | TINY)
        options.engine_args = {"block_size": 32, "enforce_eager": True} | options.engine_args
    with tempfile.TemporaryDirectory(dir=options.scratch, ignore_cleanup_errors=True) as root:
        run = Run(options, Path(root))
        try:
            run.all()
        finally:
            for engine in run.up.values():
                engine.kill()
    print(table(run.result))


if __name__ == "__main__":
    main()
