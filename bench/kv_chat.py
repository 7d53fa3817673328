"""Chats of several rounds by many users at once, under pressure on the GPU's KV memory: what each engine makes of it.

    python bench/kv_chat.py --engines none,offload,semkv --repeats 2 --out bench/results/h200/kv-chat.json
    python bench/kv_chat.py --tp 2 --rate 10 --together --out ...         (two GPUs; all engines are started at once)
    python bench/kv_chat.py --tiny --engines none,semkv --out /tmp/chat.json      (on a CPU, to see that it runs)
    python bench/kv_chat.py --add 'mine={"kv_connector": ...}' --engines none,mine ...     (any other connector)
    python bench/kv_chat.py --table bench/results/h200/kv-chat.json

Every user has a document of 6,000 to 9,000 tokens behind a system text that all share. A round appends a question of 50
tokens and an answer of 64. The requests start at a fixed rate, round by round, each round in another order of users; a
user's next question waits for the last answer. Qwen2.5-7B's shape, dummy weights, random tokens, greedy.

Engines (see `engines`) run one after the other, each in a process of its own; ``--repeats`` goes through all of them
again. Times to first token are of the rounds after the first, and of the first. ``digest`` is of all answers: with
dummy weights two tokens may tie, so unequal ones are reported, no more. The file is written after every engine.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import engines
from common import machine, write_json
from engines import Answer, Engine, EngineError, Server

ASK_LIMIT_S = 60  # of a run beyond the time that its requests take to start, and as much again


def schedule(load: Mapping[str, Any]) -> list[list[float]]:
    """Seconds at which each user's rounds may start: ``[round][user]``."""
    import numpy as np

    rng, count = np.random.default_rng(load["seed"]), load["users"] * load["rounds"]
    gaps = rng.exponential(1.0, count) if load["arrivals"] == "poisson" else np.ones(count)
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
    return documents, [[tokens(load["question"]) for _ in range(load["rounds"])] for _ in range(load["users"])]


async def chat(server: Server, load: Mapping[str, Any], give_up_s: float) -> dict[str, Any]:
    """Run the load; what did not end within the limit is counted and given up."""
    starts, (documents, questions) = schedule(load), texts(load)
    answers: dict[tuple[int, int], Answer] = {}
    late: list[float] = []
    began = time.perf_counter()

    async def talk(user: int) -> None:
        history = documents[user]
        for number in range(load["rounds"]):
            ahead = began + starts[number][user] - time.perf_counter()
            late.append(max(0.0, -ahead))
            await asyncio.sleep(max(0.0, ahead))
            prompt = history + questions[user][number]
            answers[user, number] = answer = await server.ask(prompt, load["answer"])
            history = prompt + answer.tokens

    tasks = [asyncio.create_task(talk(user)) for user in range(load["users"])]
    done, hung = await asyncio.wait(tasks, timeout=give_up_s)
    for task in hung:
        task.cancel()
    errors = [error for task in done if (error := task.exception())]
    row = summary(answers, time.perf_counter() - began)
    row |= {"hung_users": len(hung), "failed_users": len(errors), "engine_died": bool(server.llm.errored)}
    row |= {"late_starts": sum(each > 0.05 for each in late), "late_most_s": round(max(late), 2)}
    return row | ({"error": f"{type(errors[0]).__name__}: {str(errors[0])[:300]}"} if errors else {})


async def forget(server: Server) -> dict[str, Any]:
    """Empty vLLM's prefix cache once everything is stored."""
    await server.settle()
    await server.forget()
    return {}


def summary(answers: Mapping[tuple[int, int], Answer], wall: float) -> dict[str, Any]:
    """One run's figures.

    Args:
        answers: by user and round.
        wall: seconds from the first request to the last answer.
    """
    every = list(answers.values())
    text = json.dumps([[*key, answers[key].tokens] for key in sorted(answers)])
    gaps = [(a.last - a.first) / (len(a.tokens) - 1) * 1e3 for a in every if len(a.tokens) > 1]
    return {
        "later_ms": percentiles([a.ttft_ms for (_, number), a in answers.items() if number]),
        "first_ms": percentiles([a.ttft_ms for (_, number), a in answers.items() if not number]),
        "token_gap_ms": percentiles(gaps),
        "wall_s": round(wall, 2),
        "requests": len(every),
        "prompt_tokens": sum(a.prompt for a in every),
        "computed_tokens": sum(a.prompt - a.cached for a in every),
        "hit_tokens": sum(a.cached for a in every),
        "decoded_per_s": round(sum(len(a.tokens) for a in every) / wall, 1),
        "sources": engines.sources(every),
        "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95, p99 (nearest rank) and the mean."""
    if not values:
        return {}
    ordered = sorted(values)
    found = {f"p{p}": ordered[min(len(ordered) - 1, -(-p * len(ordered) // 100) - 1)] for p in (50, 95, 99)}
    return {name: round(value, 2) for name, value in (found | {"mean": statistics.fmean(values)}).items()}


# ------------------------------------------------------------------ the calling process


def measure(engine: Engine, load: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Start, warm up, run the load; an engine that fails leaves its reason."""
    limit = load["users"] * load["rounds"] / load["rate"] * 2 + ASK_LIMIT_S
    row: dict[str, Any] = {}
    try:
        row["facts"] = engine.answer("start", engines.START_LIMIT_S)
        warm = dict(load) | {"seed": load["seed"] + 1000, "users": 4, "rounds": 1, "rate": 1e3}
        engine.ask("chat", ASK_LIMIT_S * 2, load=warm, give_up_s=ASK_LIMIT_S)
        engine.ask(
            "forget", ASK_LIMIT_S
        )  # the next load comes from the store: what vLLM compiles for it, it compiles now
        engine.ask("chat", ASK_LIMIT_S * 2, load=warm, give_up_s=ASK_LIMIT_S)
        row |= engine.ask("chat", limit + 30, load=load, give_up_s=limit)
        row["load_average"] = os.getloadavg()
        engine.close()
        row["folder_bytes"] = engines.folder_bytes(folder)
    except EngineError as error:
        row |= {"error": str(error), "engine_died": True}
    return row


def run(options: argparse.Namespace, load: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {
        "load": dict(load),
        "settings": {k: getattr(options, k) for k in ("kv_gib", "host_gib", "disk_gib", "tp", "shape", "engine_args")},
        "machine": machine("vllm", "torch"),
        "runs": [],
    }
    batches = [options.engines] if options.together else [[name] for name in options.engines]
    for number, batch in [(number, batch) for number in range(options.repeats) for batch in batches]:
        with tempfile.TemporaryDirectory(dir=options.scratch, ignore_cleanup_errors=True) as root:
            folders = {name: Path(root) / name for name in batch}
            for folder in folders.values():
                folder.mkdir(mode=0o700)
            makers = [(name, partial(engines.start, name, options, folders[name])) for name in batch]
            started = engines.start_all(makers, "enforce_eager" not in options.engine_args)
            try:
                for engine in started.values():
                    engine.wait_started()
                for name, engine in started.items():
                    row = measure(engine, load, folders[name])
                    result["runs"].append({"engine": name, "run": number, **row})
                    write_json(options.out, result | {"digests": digests(result)})
                    print(line(result["runs"][-1]), flush=True)
                    shutil.rmtree(folders[name], ignore_errors=True)
            finally:
                for engine in started.values():
                    engine.kill()
    return result


def digests(result: Mapping[str, Any]) -> dict[str, list[str]]:
    """Which engines gave which answers: one line where all agree."""
    found: dict[str, list[str]] = {}
    for row in result["runs"]:
        if "digest" in row:
            found.setdefault(row["digest"], []).append(f"{row['engine']} {row['run']}")
    return found


COLUMNS = "engine run p50 p95 p99 mean first-p50 wall-s computed hits tokens/s loaded".split()


def line(row: Mapping[str, Any]) -> str:
    """A line of the table."""
    later, first = row.get("later_ms", {}), row.get("first_ms", {})
    cells = [row["engine"], row["run"], *(later.get(k, "-") for k in ("p50", "p95", "p99", "mean"))]
    cells += [first.get("p50", "-"), row.get("wall_s", "-"), row.get("computed_tokens", "-")]
    cells += [row.get("hit_tokens", "-"), row.get("decoded_per_s", "-"), json.dumps(row.get("sources", {}))]
    failed = f" {row['error'].splitlines()[0][:200]}" if "error" in row else ""
    return "| " + " | ".join(str(cell) for cell in cells) + " |" + failed


def table(result: Mapping[str, Any]) -> str:
    head = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    rows = sorted(result["runs"], key=lambda row: (row["engine"], row["run"]))
    agree = len(digests(result)) <= 1
    return "\n".join([*head, *map(line, rows), "", f"all answers equal: {agree}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines.add_arguments(parser, "none,offload,semkv")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--together", action="store_true", help="start all engines at once; one at a time is measured")
    parser.add_argument("--users", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--arrivals", choices=["poisson", "uniform"], default="poisson")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.child:
        spec = json.loads(options.child)
        engines.serve(spec, lambda server: {"chat": partial(chat, server), "forget": partial(forget, server)})
        return
    if options.table:
        print(table(json.loads(options.table.read_text())))
        return
    tiny = {"users": 6, "rounds": 3, "rate": 4.0, "kv_gib": 2 / 1024, "host_gib": 1 / 32, "disk_gib": 1 / 4}
    engines.finish_arguments(options, tiny)
    sizes = {"system": 64, "document": [300, 500], "question": 20, "answer": 8} if options.tiny else {}
    load = {"system": 1000, "document": [6000, 9000], "question": 50, "answer": 64, **sizes}
    load |= {k: getattr(options, k) for k in ("users", "rounds", "rate", "arrivals", "seed")}
    engines.stop_on_signals()
    print(table(run(options, load)))


if __name__ == "__main__":
    main()
