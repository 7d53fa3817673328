"""What the gateway costs and gives: wrk in front, a scripted upstream behind, each in a process of its own.

    python bench/gateway.py --out bench/results/cpu/gateway.json --litellm-python PATH
    python bench/gateway.py --workers 1 2 4 --out ...         (exact hits by number of workers, and nothing else)

Measured in turns, so that what else the machine does strikes all alike: the upstream by itself, a proxy that only
passes on, gateways by kind, and LiteLLM's proxy with its local cache where a Python that has it is named. A miss is
measured with an upstream that answers at once and with one that thinks for 50 ms (``slow``), exact hits at 64 and at 8
connections. Every figure is the median over the rounds. Give it quiet cores: ``load_average`` is kept. ``cpu_ms`` is
what a request costs a server in processor time, which other work on the machine changes least.

A miss is of one of three kinds. ``miss``: a conversation of its own, as every turn but the first is, so nothing can
match it. ``number``: behind one system prompt, each with another number, which no guard lets match. ``words``: behind
one system prompt, each with other words, so that each is compared with those before it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from common import ROOT, machine, write_json

sys.path.insert(0, str(ROOT / "tests"))
from ports import free_port

KINDS: dict[str, tuple[str, ...]] = {
    "exact": ("--no-semantic",),
    "semantic": ("--tiers", "all"),  # also where looking costs more than this upstream
}
BEFORE = ("before", "before_exact")  # kinds that run the other checkout's code
FIGURES = ("requests_per_s", "p50_ms", "p99_ms", "cpu_ms")
TICK_MS = 1000.0 / os.sysconf("SC_CLK_TCK")
BODY = {
    "model": "scripted",
    "temperature": 0,
    "max_tokens": 64,
    "messages": [
        {
            "role": "system",
            "content": "BEFOREYou are a helpful assistant. Answer briefly and say so when you do not know.",
        },
        {
            "role": "user",
            "content": "HERE What is the capital of France, and since when has it been?",
        },
    ],
}
THINGS = "bread cheese river garden engine guitar planet mirror window carpet bridge candle"
LUA = """
local n = 0
local things = {{}}
for word in ("{things}"):gmatch("%a+") do table.insert(things, word) end
local function words(number)
  local said = ""
  for _ = 1, 7 do
    said = said .. things[number % #things + 1] .. " "
    number = math.floor(number / #things)
  end
  return said
end
request = function()
  n = n + 1
  local before, here = "", {here}
  if "{kind}" == "miss" then before = "Case " .. n .. " of {run}. " end
  if "{kind}" == "number" then here = here .. "number " .. n .. " of {run}" end
  if "{kind}" == "words" then here = here .. words({first} + n * 7919) end
  return wrk.format("POST", "/v1/chat/completions",
    {{["Content-Type"] = "application/json", ["Authorization"] = "Bearer bench"}},
    {head} .. before .. {middle} .. here .. {tail})
end
"""


@contextmanager
def process(command: list[str], url: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers GET ``url``, until the block ends."""
    with tempfile.TemporaryFile() as log:
        running = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **environment}, cwd=ROOT
        )
        try:
            deadline = time.monotonic() + 300
            while True:
                try:
                    urllib.request.urlopen(url, timeout=2).close()  # noqa: S310
                    break
                except OSError:
                    if running.poll() is not None or time.monotonic() > deadline:
                        log.seek(0)
                        sys.exit(f"{command[0]} did not start: {log.read()[-2000:].decode()}")
                    time.sleep(0.2)
            yield running
        finally:
            running.terminate()
            try:
                running.wait(30)
            except subprocess.TimeoutExpired:
                running.kill()


def processor_ms(pid: int) -> float:
    """The processor time of a process and all below it, so far."""
    pids = [pid]
    for found in pids:
        with suppress(OSError):
            for task in Path(f"/proc/{found}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    total = 0.0
    for found in pids:
        with suppress(OSError):
            columns = Path(f"/proc/{found}/stat").read_text().rpartition(")")[2].split()
            total += (int(columns[11]) + int(columns[12])) * TICK_MS
    return total


def uvicorn(folder: str, app: str, port: int) -> list[str]:
    command = [sys.executable, "-m", "uvicorn", "--app-dir", folder, app, "--port", str(port)]
    return [*command, "--no-access-log", "--log-level", "warning"]


def gateway(folder: Path, port: int, upstream: str, *flags: str) -> list[str]:
    command = [sys.executable, "-m", "semkv", "serve", "--upstream", upstream, "--port", str(port)]
    return [*command, "--cache-dir", str(folder), *flags]


def wrk(
    url: str,
    connections: int,
    seconds: int,
    *,
    kind: str = "",
    run: str = "",
    slow: bool = False,
    threads: int = 1,
) -> dict[str, Any]:
    """Requests a second and latencies in milliseconds; the server has all the work that it can do.

    Args:
        kind: of misses; empty for one request again and again.
        run: a name of these requests, so that they are none of another run.
        slow: the upstream thinks for 50 ms.
        threads: of wrk.
    """
    head, rest = json.dumps(BODY).split("BEFORE")
    middle, tail = rest.split("HERE")
    here = "[delay=0.05] " if slow else ""
    parts = {
        name: json.dumps(text)
        for name, text in (("head", head), ("middle", middle), ("tail", tail), ("here", here))
    }
    first = sum(map(ord, run)) * 1_000_003
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
        file.write(LUA.format(**parts, kind=kind, run=run, first=first, things=THINGS))
        file.flush()
        command = [
            "wrk",
            f"-t{threads}",
            f"-c{connections}",
            f"-d{seconds}",
            "--latency",
            "--timeout",
            "20",
        ]
        out = subprocess.run(
            [*command, "-s", file.name, url], check=True, capture_output=True, text=True
        ).stdout
    failed = re.search(r"(Non-2xx or 3xx responses|Socket errors).*", out)
    if failed:
        print(f"  {url}: {failed[0]}", flush=True)
    found = {
        f"p{at}_ms": milliseconds(value)
        for at, value in re.findall(r"^\s+(50|99)%\s+(\S+)", out, re.MULTILINE)
    }
    (rate,) = re.findall(r"Requests/sec:\s+([\d.]+)", out)
    return {"requests_per_s": float(rate), **found, "errors": failed[0] if failed else ""}


def milliseconds(text: str) -> float:
    ((number, unit),) = re.findall(r"([\d.]+)(us|ms|s|m)", text)
    return round(float(number) * {"us": 0.001, "ms": 1.0, "s": 1000.0, "m": 60_000.0}[unit], 3)


def figures(name: str) -> dict[str, dict[str, Any]]:
    """What is measured of a server: the arguments of `wrk` by name."""
    misses: dict[str, dict[str, Any]] = {}
    for kind in ("miss", "number", "words"):
        misses[kind] = {"connections": 1}
        misses[f"{kind}_slow"] = {"connections": 1, "slow": True}
        misses[f"{kind}_64"] = {"connections": 64}
    hits = {"hit_64": {"connections": 64}, "hit_8": {"connections": 8}}
    if name.endswith("_workers"):
        return {"hit_64": {"connections": 64, "threads": 4}}
    return {"litellm": hits, "proxy": misses}.get(name, misses | hits)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    up, pass_on = free_port(), free_port()
    upstream = f"http://127.0.0.1:{up}"
    urls: dict[str, str] = {}
    pids: dict[str, int] = {}
    kinds = dict(KINDS)
    if args.before:
        kinds["before"] = KINDS["semantic"]
        kinds["before_exact"] = KINDS["exact"]
    if args.workers:
        kinds = {
            f"{count}_workers": ("--no-semantic", "--workers", str(count)) for count in args.workers
        }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        servers.enter_context(
            process(uvicorn("tests", "scripted_upstream:app", up), f"{upstream}/health")
        )
        if not args.workers:
            urls = {"bare": upstream, "proxy": f"http://127.0.0.1:{pass_on}"}
            command = uvicorn("bench", "gateway:passthrough", pass_on)
            servers.enter_context(process(command, f"{urls['proxy']}/health", UPSTREAM=upstream))
        for kind, flags in kinds.items():
            port = free_port()
            urls[kind] = f"http://127.0.0.1:{port}"
            command = gateway(Path(folder) / kind, port, upstream, *flags)
            code = {"PYTHONPATH": sources(args.before)} if kind in BEFORE else {}
            running = servers.enter_context(process(command, f"{urls[kind]}/healthz", **code))
            pids[kind] = running.pid
            wrk(urls[kind], 1, 5, kind="words", run="warm")  # until it is known what lookups find
        if args.litellm_python:
            urls["litellm"] = servers.enter_context(
                litellm(args.litellm_python, Path(folder), upstream)
            )
        for name in urls.keys() - {"bare", "proxy"}:
            wrk(urls[name], 8, 2)
        for number in range(args.rounds):
            for name, url in urls.items():
                for figure, given in figures(name).items():
                    if args.only not in figure:
                        continue
                    kind = figure.partition("_")[0].replace("hit", "")
                    before = processor_ms(pids[name]) if name in pids else 0.0
                    found_now = wrk(
                        url,
                        seconds=args.seconds,
                        kind=kind,
                        run=f"{figure} {number}",
                        **given,
                    )
                    spent = processor_ms(pids[name]) - before if name in pids else 0.0
                    answered = found_now["requests_per_s"] * args.seconds
                    found_now["cpu_ms"] = spent / max(answered, 1.0)
                    rounds[name, figure].append(found_now)
            print(f"  round {number + 1} of {args.rounds}", flush=True)
    found: dict[str, Any] = {}
    for (name, figure), rows in rounds.items():
        row: dict[str, Any] = {
            measured: round(median(one[measured] for one in rows), 3) for measured in FIGURES
        }
        row["errors"] = [one["errors"] for one in rows if one["errors"]]
        found[f"{name}_{figure}"] = row
        bare = found.get(f"bare_{figure}")
        if bare and name != "bare" and "hit" not in figure:
            row["adds_p50_ms"] = round(row["p50_ms"] - bare["p50_ms"], 3)
        exact = found.get(f"exact_{figure}")
        if exact and name in ("semantic", *BEFORE):
            row["of_exact"] = round(row["requests_per_s"] / exact["requests_per_s"], 3)
            row["more_cpu_ms"] = round(row["cpu_ms"] - exact["cpu_ms"], 3)
    return found


def sources(checkout: Path) -> str:
    """Where a checkout has its packages, as PYTHONPATH wants it."""
    return os.pathsep.join(map(str, [checkout / "src", *checkout.glob("packages/*/src")]))


@contextmanager
def litellm(python: str, folder: Path, upstream: str) -> Iterator[str]:
    """LiteLLM's proxy with its local cache."""
    config, port = folder / "litellm.yaml", free_port()
    config.write_text(
        "model_list:\n  - model_name: scripted\n    litellm_params:\n      model: openai/scripted\n"
        f"      api_base: {upstream}/v1\n      api_key: none\n"
        "litellm_settings:\n  cache: true\n  cache_params:\n    type: local\n"
    )
    command = [str(Path(python).parent / "litellm"), "--config", str(config), "--port", str(port)]
    environment = {
        "LITELLM_LOG": "ERROR",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    url = f"http://127.0.0.1:{port}"
    with process([*command, "--host", "127.0.0.1"], f"{url}/health/liveliness", **environment):
        yield url


_upstream: list[Any] = []  # of `passthrough`: its session


async def passthrough(scope: Any, receive: Any, send: Any) -> None:
    """A proxy that only passes on: what any gateway on uvicorn and aiohttp adds at least."""
    import aiohttp
    from starlette.requests import Request
    from starlette.responses import Response

    if scope["type"] != "http":  # uvicorn starts without a lifespan too
        raise NotImplementedError
    if not _upstream:
        jar = aiohttp.DummyCookieJar()
        connector = aiohttp.TCPConnector(limit=0)
        _upstream.append(
            aiohttp.ClientSession(connector=connector, cookie_jar=jar, auto_decompress=False)
        )
    request = Request(scope, receive)
    headers = [
        (key, value)
        for key, value in request.headers.items()
        if key not in ("host", "content-length")
    ]
    url = os.environ["UPSTREAM"] + scope["path"]
    body = await request.body() or None
    async with _upstream[0].request(request.method, url, data=body, headers=headers) as answer:
        whole = Response(
            await answer.read(), answer.status, media_type=answer.headers.get("content-type")
        )
    await whole(scope, receive, send)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=int, default=2, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="figures whose names have this, as _64")
    parser.add_argument("--before", type=Path, help="another checkout, measured in turns")
    parser.add_argument("--litellm-python", default="", help="a Python that has litellm[proxy]")
    parser.add_argument(
        "--workers", nargs="+", type=int, help="only exact hits, by these numbers of workers"
    )
    args = parser.parse_args()
    before = machine("uvicorn", "uvloop", "httptools", "aiohttp", "starlette", "prometheus-client")
    if args.litellm_python:
        ask = "import importlib.metadata as m; print(m.version('litellm'))"
        before["versions"]["litellm"] = subprocess.check_output(
            [args.litellm_python, "-c", ask], text=True
        ).strip()
    found = measure(args)
    for name, row in found.items():
        print(name, row)
    if args.out:
        write_json(args.out, {"machine": before, **found})


if __name__ == "__main__":
    main()
