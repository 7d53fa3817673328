"""When things die under load, is an answer lost that a client had in full, or one wrong?

    python bench/gateway_faults.py --rounds 4 --minutes 20 --out bench/results/cpu/gateway_faults.json

Clients ask new questions and repeat answered ones, half of them streamed; the upstream's answer is the question, so
every answer can be checked. Then a fault strikes. When it is over, every answer that a client had in full is asked for
again, while the upstream is down. ``SEMKV_STORE_TIMEOUT`` (1 s) is the gateways': on a machine with other work a store
may need longer, and such an answer is not kept. Parts:

- ``kill``: kill -9 of a gateway on a file, which starts again on the same directory;
- ``workers``: kill -9 of one of two workers;
- ``redis``: two gateways on one Redis, which is killed and starts again, stands still for 3 s, is full for 3 s, or is
  emptied (what was answered before is then rightly gone). Answers are asked for at the gateway that did not compute
  them;
- ``streams``: 1,000 streams at once, as misses, then as hits, at a soft limit of 1,024 open files.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
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
from pathlib import Path
from typing import Any

import aiohttp
from common import ROOT, machine, write_json
from gateway import free_port, gateway, process, uvicorn

sys.path.insert(0, str(ROOT / "tests"))
from redis_server import RedisServer

CLIENTS = 12
LOAD_S, FAULT_S = 5.0, 3.0
SIZES = (10, 1_000, 30_000)  # characters of a question, and so of its answer
STREAMS = 1_000
PATIENCE_S = os.environ.get("SEMKV_STORE_TIMEOUT", "1")
Row = dict[str, Any]


@dataclass
class Clients:
    """What the clients asked and were answered.

    Attributes:
        had: questions whose answer a client had in full, and whether as a stream.
        gone: questions whose answers an emptied Redis may have lost.
        seen: how many answers were computed, hits, broken off, of another status, or wrong.
    """

    had: dict[str, bool] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)

    async def ask(self, session: aiohttp.ClientSession, url: str, text: str, streamed: bool) -> str:
        """``X-Semkv`` of an answer that came in full and is right; else empty."""
        body = {
            "model": "scripted",
            "temperature": 0,
            "messages": [{"role": "user", "content": text}],
        }
        try:
            async with session.post(
                f"{url}/v1/chat/completions", json={**body, "stream": streamed}
            ) as answer:
                raw = (await answer.read()).decode()
        except (aiohttp.ClientError, TimeoutError):
            self.seen["broken off"] += 1
            return ""
        if answer.status != 200 or (streamed and "[DONE]" not in raw):
            self.seen[f"status {answer.status}"] += 1
            return ""
        if said(raw, streamed) != f"You said: {text}":
            self.seen["wrong"] += 1
            print(f"  wrong: {text[:60]}", flush=True)
            return ""
        return answer.headers["X-Semkv"]

    async def load(self, urls: list[str], name: str, seconds: float) -> None:
        """Ask until the time is over, half new questions and half repeats."""
        until = time.monotonic() + seconds

        async def client(number: int) -> None:
            chance = random.Random(f"{name} {number}")  # noqa: S311
            asked = 0
            while time.monotonic() < until:
                asked += 1
                text = f"{name}: client {number} asks for number {asked}. " + "x" * chance.choice(
                    SIZES
                )
                streamed = chance.random() < 0.5
                if self.had and chance.random() < 0.5:
                    text, streamed = chance.choice(list(self.had.items()))
                found = await self.ask(session, chance.choice(urls), text, streamed)
                if found:
                    self.had[text] = streamed
                    self.seen["hits" if found.startswith("hit") else "computed"] += 1
                else:
                    await asyncio.sleep(0.05)

        async with sessions() as session:
            await asyncio.gather(*(client(number) for number in range(CLIENTS)))

    async def under(
        self, fault: Callable[[], object], urls: list[str], name: str, after: float = 0
    ) -> None:
        """Load, with a fault (which may block) in the midst of it, and ``after`` more seconds of load."""
        load = asyncio.create_task(self.load(urls, name, LOAD_S + after))
        await asyncio.sleep(LOAD_S * random.uniform(0.3, 0.9))  # noqa: S311
        await asyncio.to_thread(fault)
        await load

    async def ask_again(self, part: str, urls: list[str]) -> Row:
        """Ask for every answer once more at one of the gateways; the round's row says how many were lost."""
        room, lost = asyncio.Semaphore(8), 0
        kept = [(text, streamed) for text, streamed in self.had.items() if text not in self.gone]

        async def one(place: int, text: str, streamed: bool) -> None:
            nonlocal lost
            async with room:
                found = await self.ask(session, urls[place % len(urls)], text, streamed)
            if not found.startswith("hit"):
                lost += 1
                print(f"  lost: {text[:60]} ({len(text)} characters)", flush=True)

        async with sessions() as session:
            await asyncio.gather(*(one(place, *pair) for place, pair in enumerate(kept)))
        return {
            "part": part,
            **self.seen,
            "wrong": self.seen["wrong"],
            "asked again": len(kept),
            "lost": lost,
        }


def sessions() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=120)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=timeout
    )


def said(raw: str, streamed: bool) -> str:
    if not streamed:
        return str(json.loads(raw)["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    return "".join(
        choice["delta"].get("content") or "" for event in events for choice in event["choices"]
    )


class Upstream:
    """A scripted upstream that can be stopped, so that whatever is answered then was kept."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def __call__(self) -> Any:
        return process(uvicorn("tests", "scripted_upstream:app", self.port), f"{self.url}/health")


@contextmanager
def serving(
    folder: Path, upstream: Upstream, *flags: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    command = gateway(folder, port, upstream.url, *flags)
    url = f"http://127.0.0.1:{port}"
    settings = {"SEMKV_SECRET": "x" * 16, "SEMKV_STORE_TIMEOUT": PATIENCE_S}
    with process(command, f"{url}/healthz", **settings) as running:
        yield url, running


def kill_rounds(folder: Path, up: Upstream, rounds: int) -> Iterator[Row]:
    for number in range(rounds):
        clients = Clients()
        with up(), serving(folder, up) as (url, running):
            asyncio.run(clients.under(running.kill, [url], f"round {number}"))
        with serving(folder, up) as (url, _):
            yield asyncio.run(clients.ask_again("kill", [url]))


def worker_rounds(folder: Path, up: Upstream, rounds: int) -> Iterator[Row]:
    with serving(folder, up, "--workers", "2") as (url, running):

        def workers() -> list[int]:
            command = ["pgrep", "-P", str(running.pid), "-f", "spawn_main"]
            return [
                int(word)
                for word in subprocess.run(command, capture_output=True, text=True).stdout.split()
            ]

        def kill_one() -> None:
            os.kill(random.choice(workers()), signal.SIGKILL)  # noqa: S311

        for number in range(rounds):
            clients = Clients()
            with up():
                asyncio.run(clients.under(kill_one, [url], f"round {number}"))
            yield asyncio.run(clients.ask_again("worker", [url]))
            until = time.monotonic() + 120
            while len(workers()) < 2 and time.monotonic() < until:
                time.sleep(0.1)


def redis_rounds(folder: Path, up: Upstream, rounds: int) -> Iterator[Row]:
    with ExitStack() as stack:
        redis = RedisServer(folder, durable=True)
        stack.callback(redis.kill)
        homes = [
            stack.enter_context(serving(folder / name, up, "--store", redis.url))
            for name in ("one", "two")
        ]
        urls = [url for url, _ in homes]
        for number in range(rounds):
            fault, clients = FAULTS[number % len(FAULTS)], Clients()

            def strike(fault: Fault = fault, clients: Clients = clients) -> None:
                fault(redis, clients)

            with up():
                asyncio.run(clients.under(strike, urls, f"round {number}", FAULT_S))
            time.sleep(2)  # what waited in the logs goes to the store
            yield asyncio.run(clients.ask_again(f"redis {fault.__name__}", urls[::-1]))


def kill(redis: RedisServer, _: Clients) -> None:
    redis.kill()
    time.sleep(FAULT_S)
    redis.start()


def freeze(redis: RedisServer, _: Clients) -> None:
    redis.freeze()
    time.sleep(FAULT_S)
    redis.thaw()


def full(redis: RedisServer, _: Clients) -> None:
    import redis as library

    with library.Redis(port=redis.port, socket_timeout=60.0) as client:
        client.config_set("maxmemory", 1)
        time.sleep(FAULT_S)
        client.config_set("maxmemory", 0)


def emptied(redis: RedisServer, clients: Clients) -> None:
    import redis as library

    with library.Redis(port=redis.port, socket_timeout=60.0) as client:
        client.flushall()
        time.sleep(0.5)  # for what was stored before and had not arrived
        clients.gone = set(clients.had)


Fault = Callable[[RedisServer, Clients], None]
FAULTS: tuple[Fault, ...] = (kill, freeze, full, emptied)


def streams(folder: Path, up: Upstream, _: int) -> Iterator[Row]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # As a shell has it; the gateway inherits it.
    resource.setrlimit(resource.RLIMIT_NOFILE, (1_024, hard))
    with up(), serving(folder, up, "--no-semantic") as (url, _):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        for kind in ("misses", "hits"):
            clients = Clients()

            async def ask_all(every: Clients = clients) -> list[str]:
                texts = [f"[events=20] [gap=0.1] stream {number}" for number in range(STREAMS)]
                async with sessions() as session:
                    return await asyncio.gather(
                        *(every.ask(session, url, text, True) for text in texts)
                    )

            found = asyncio.run(ask_all())
            hits = sum(each.startswith("hit") for each in found)
            whole = sum(bool(each) for each in found)
            yield {
                "part": f"streams, {kind}",
                "whole": whole,
                "hits": hits,
                "lost": STREAMS - whole,
                **clients.seen,
            }


PARTS = {"kill": kill_rounds, "workers": worker_rounds, "redis": redis_rounds, "streams": streams}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=20, help="of each part but the streams")
    parser.add_argument("--minutes", type=float, default=0, help="repeat all parts until then")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    before, rows = machine("uvicorn", "aiohttp", "redis"), []
    until = time.monotonic() + 60 * args.minutes
    cycle = itertools.cycle(args.parts)
    for part in itertools.chain(args.parts, iter(lambda: _next_part(cycle, until), "")):
        with tempfile.TemporaryDirectory() as folder:
            for row in PARTS[part](Path(folder), Upstream(), args.rounds):
                rows.append(row)
                print(row, flush=True)
                if args.out:
                    found = {
                        "machine": before,
                        "store_timeout_s": float(PATIENCE_S),
                        "rounds": rows,
                    }
                    write_json(args.out, found)
    lost, wrong = (sum(row.get(name, 0) for row in rows) for name in ("lost", "wrong"))
    print(
        f"{len(rows)} rounds: {sum(row.get('asked again', 0) for row in rows):,} answers, {lost} lost, {wrong} wrong"
    )
    sys.exit(bool(lost or wrong))


def _next_part(cycle: Iterator[str], until: float) -> str:
    """The part that runs next; empty once the time is over."""
    return next(cycle) if time.monotonic() < until else ""


if __name__ == "__main__":
    main()
