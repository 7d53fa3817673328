"""What is left of the gateway's promises when things die under load: nothing lost that a client had in full, nothing
wrong.

Clients ask new questions and repeat answered ones, half of them streamed; the upstream's answer is the question, so
every answer can be checked. Then a fault strikes, and when it is over every answer that a client had in full is asked
for again, while the upstream refuses everything. Parts:

- ``kill``: kill -9 of a gateway on a file, which starts again on the same directory;
- ``workers``: kill -9 of one of two workers;
- ``redis``: two gateways on one Redis, which is killed and starts again, stands still for 3 s, is full for 3 s, or is
  emptied (what was answered before is then rightly gone); in every fourth round a gateway is killed as well. Answers
  are asked for at the gateway that did not compute them;
- ``streams``: 1,000 streams at once, as misses, then as hits, at a soft limit of 1,024 open files.

    python bench/gateway_faults.py --rounds 20 --out bench/results/cpu/gateway_faults.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from common import ROOT, machine, write_json
from gateway import free_port, gateway, process, uvicorn

sys.path.insert(0, str(ROOT / "tests"))
from redis_server import RedisServer

PARTS = ("kill", "workers", "redis", "streams")
FAULTS = ("kill", "freeze", "full", "flush")
_CLIENTS = 12
_LOAD_S = 5.0
_FAULT_S = 3.0
_SIZES = (10, 1_000, 30_000)  # characters of a question, and so of its answer
_STREAMS = 1_000
_PATIENT = ("--store-timeout", "1")


@dataclass
class Clients:
    """What the clients asked and were answered.

    Attributes:
        had: questions whose answer a client had in full, and whether as a stream.
        seen: how many answers were computed, hits, broken off, of another status, or wrong.
        gone: questions whose answers the operator removed.
    """

    had: dict[str, bool] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)

    async def ask(self, session: aiohttp.ClientSession, url: str, text: str, streamed: bool) -> str:
        """``X-Semkv`` of an answer that came in full and is right; else empty."""
        body = {"model": "scripted", "temperature": 0, "messages": [{"role": "user", "content": text}]}
        try:
            async with session.post(f"{url}/v1/chat/completions", json={**body, "stream": streamed}) as answer:
                raw = (await answer.read()).decode()
        except (aiohttp.ClientError, TimeoutError):
            self.seen["broken off"] += 1
            return ""
        if answer.status != 200 or (streamed and "[DONE]" not in raw):
            self.seen[f"status {answer.status}"] += 1
            return ""
        if said(raw, streamed) != f"You said: {text}":
            self.seen["wrong"] += 1
            self.wrong.append(text[:60])
            return ""
        return answer.headers["X-Semkv"]

    async def load(self, urls: list[str], name: str, seconds: float) -> None:
        """Ask until the time is over, half new questions and half repeats."""
        until = time.monotonic() + seconds

        async def client(number: int) -> None:
            chance = random.Random(f"{name} {number}")  # noqa: S311
            asked = 0
            while time.monotonic() < until:
                streamed, repeat = chance.random() < 0.5, self.had and chance.random() < 0.5
                asked += 1
                text = f"{name}: client {number} asks for number {asked}. " + "x" * chance.choice(_SIZES)
                if repeat:
                    text, streamed = chance.choice(list(self.had.items()))
                found = await self.ask(session, chance.choice(urls), text, streamed)
                if found:
                    self.had[text] = streamed
                    self.seen["hits" if found.startswith("hit") else "computed"] += 1
                else:
                    await asyncio.sleep(0.05)

        async with sessions() as session:
            await asyncio.gather(*(client(number) for number in range(_CLIENTS)))

    async def ask_again(self, urls: list[str]) -> dict[str, int]:
        """Ask for every answer once more at one of the gateways; how many of them are hits and how many are lost."""
        room = asyncio.Semaphore(8)
        lost: list[str] = []
        kept = {text: streamed for text, streamed in self.had.items() if text not in self.gone}

        async def one(place: int, text: str, streamed: bool) -> None:
            async with room:
                found = await self.ask(session, urls[place % len(urls)], text, streamed)
                if not found.startswith("hit"):
                    lost.append(text)

        async with sessions() as session:
            await asyncio.gather(*(one(place, *pair) for place, pair in enumerate(kept.items())))
        for text in lost[:3]:
            print(f"  lost: {text[:60]} ({len(text)} characters)", flush=True)
        return {"asked again": len(kept), "lost": len(lost)}


def sessions() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=120)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout)


def said(raw: str, streamed: bool) -> str:
    if not streamed:
        return str(json.loads(raw)["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


class Upstream:
    """A scripted upstream that can be stopped, so that whatever is answered then was kept."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def __call__(self) -> Any:
        return process(uvicorn("tests", "scripted_upstream:app", self.port), f"{self.url}/health")


@contextmanager
def serving(folder: Path, upstream: Upstream, *flags: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    command = gateway(folder, port, upstream.url, *_PATIENT, *flags)
    with process(command, f"http://127.0.0.1:{port}/healthz", SEMKV_SECRET="x" * 16) as running:
        yield f"http://127.0.0.1:{port}", running


async def struck(clients: Clients, urls: list[str], name: str, fault: Callable[[], object], after: float = 0) -> None:
    """Load, with a fault (which may block) in the midst of it, and ``after`` more seconds of load."""
    load = asyncio.create_task(clients.load(urls, name, _LOAD_S + after))
    await asyncio.sleep(_LOAD_S * random.uniform(0.3, 0.9))  # noqa: S311
    await asyncio.to_thread(fault)
    await load


def kill_rounds(rounds: int) -> Iterator[dict[str, Any]]:
    up = Upstream()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            clients = Clients()
            with up(), serving(Path(folder), up) as (url, running):
                asyncio.run(struck(clients, [url], f"round {number}", running.kill))
            with serving(Path(folder), up) as (url, _):
                again = asyncio.run(clients.ask_again([url]))
            yield report("kill", clients, again)


def worker_rounds(rounds: int) -> Iterator[dict[str, Any]]:
    up = Upstream()
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), up, "--workers", "2") as (url, running):

        def kill_one() -> None:
            os.kill(random.choice(workers_of(running.pid)), signal.SIGKILL)  # noqa: S311

        for number in range(rounds):
            clients = Clients()
            with up():
                asyncio.run(struck(clients, [url], f"round {number}", kill_one))
            again = asyncio.run(clients.ask_again([url]))
            wait_for(lambda: len(workers_of(running.pid)) == 2)
            yield report("worker", clients, again)


def workers_of(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid), "-f", "spawn_main"], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


def redis_rounds(rounds: int) -> Iterator[dict[str, Any]]:
    up = Upstream()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        redis = RedisServer(Path(folder), durable=True)
        stack.callback(redis.kill)
        homes = [Path(folder) / "one", Path(folder) / "two"]
        for number in range(rounds):
            fault = FAULTS[number % len(FAULTS)]
            kills = number // len(FAULTS) % 4 == 3
            clients = Clients()
            with ExitStack() as gateways:
                pair = [gateways.enter_context(serving(home, up, "--store", redis.url)) for home in homes]
                urls = [url for url, _ in pair]
                with up():
                    fails = partial(strike_redis, redis, fault, clients)
                    asyncio.run(struck(clients, urls, f"round {number}", fails, _FAULT_S))
                    if kills:
                        pair[0][1].kill()
                if kills:
                    pair[0] = gateways.enter_context(serving(homes[0], up, "--store", redis.url))
                    urls[0] = pair[0][0]
                time.sleep(2)  # what waited in the logs goes to the store
                again = asyncio.run(clients.ask_again(urls[::-1]))
            yield report(f"redis {fault}" + " and kill" * kills, clients, again)


def strike_redis(redis: RedisServer, fault: str, clients: Clients) -> None:
    import redis as library

    with library.Redis(port=redis.port, socket_timeout=60.0) as client:
        if fault == "kill":
            redis.kill()
            time.sleep(_FAULT_S)
            redis.start()
        elif fault == "freeze":
            redis.freeze()
            time.sleep(_FAULT_S)
            redis.thaw()
        elif fault == "full":
            client.config_set("maxmemory", 1)
            time.sleep(_FAULT_S)
            client.config_set("maxmemory", 0)
        else:
            client.flushall()
            time.sleep(0.5)  # for what was stored before and had not arrived
            clients.gone = set(clients.had)


def streams() -> Iterator[dict[str, Any]]:
    up = Upstream()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with tempfile.TemporaryDirectory() as folder:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, hard))  # as a shell has it; the gateway inherits it
        with up(), serving(Path(folder), up, "--no-semantic") as (url, _):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            for kind in ("misses", "hits"):
                clients = Clients()

                async def ask_all(every: Clients = clients) -> list[str]:
                    texts = [f"[events=20] [gap=0.1] stream {number}" for number in range(_STREAMS)]
                    async with sessions() as session:
                        return await asyncio.gather(*(every.ask(session, url, text, True) for text in texts))

                found = asyncio.run(ask_all())
                whole = sum(bool(each) for each in found)
                hits = sum(each.startswith("hit") for each in found)
                yield {"part": f"streams, {kind}", "at once": _STREAMS, "whole": whole, "hits": hits, **clients.seen}


def report(part: str, clients: Clients, again: dict[str, int]) -> dict[str, Any]:
    return {"part": part, **clients.seen, "wrong": clients.seen["wrong"], **again, "wrong answers": clients.wrong[:3]}


def wait_for(ready: Any) -> None:
    until = time.monotonic() + 120
    while not ready() and time.monotonic() < until:
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=20, help="of each part but the streams")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    made = {
        "kill": lambda: kill_rounds(args.rounds),
        "workers": lambda: worker_rounds(args.rounds),
        "redis": lambda: redis_rounds(args.rounds),
        "streams": streams,
    }
    before, rows = machine("uvicorn", "aiohttp", "redis"), []
    for part in args.parts:
        for row in made[part]():
            rows.append(row)
            print(row, flush=True)
            if args.out:
                write_json(args.out, {"machine": before, "rounds": rows})
    lost, wrong = (sum(row.get(name, 0) for row in rows) for name in ("lost", "wrong"))
    print(f"{len(rows)} rounds: {sum(row.get('asked again', 0) for row in rows):,} answers, {lost} lost, {wrong} wrong")
    sys.exit(bool(lost or wrong))


if __name__ == "__main__":
    main()
