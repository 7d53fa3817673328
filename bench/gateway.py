"""What the gateway costs and gives: wrk in front, a scripted upstream behind, each in a process of its own.

Gateways without and with the semantic tiers, and for misses with --no-overlap, are measured in turns,
so that what else the machine does strikes all alike. Measures what a miss adds to the upstream's own time, where
that answers at once and where it thinks for 50 ms (``slow``), exact hits at 64 and 8 connections that ask without a
pause, at 8 that pause for 10 ms, the same beside misses, memory over 200,000 requests, and beside it what a proxy adds
that does nothing else, and the LiteLLM proxy with its local cache where a Python that has it is named. Every figure is
the median over the rounds, which are kept.

Give it quiet cores (``load_average`` is kept), and no real-time priority: then the processes take turns of 100 ms, and
the p99 of hits is 30 ms in place of 2.

    python bench/gateway.py --out bench/results/cpu/gateway.json --litellm-python PATH
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from common import ROOT, machine, write_json

KINDS: dict[str, tuple[str, ...]] = {
    "exact": ("--no-semantic",),
    "exact_2_workers": ("--no-semantic", "--workers", "2"),
    "semantic": (),
    "waiting": ("--no-overlap",),
}
_PACE_MS = 10
_DELAY_S = 0.05
BODY = {
    "model": "scripted",
    "temperature": 0,
    "max_tokens": 64,
    "messages": [
        {"role": "system", "content": "You are a helpful assistant. Answer briefly and say so when you do not know."},
        {"role": "user", "content": "What is the capital of France, and since when has it been?"},
    ],
}
# Requests of wrk: every SHARE-th one (0: none, 1: all) has a question of its own.
LUA = """
local share, n = {share}, 0
local head, tail = {head}, {tail}
local fixed = head .. tail
request = function()
  n = n + 1
  local body = fixed
  if share > 0 and n % share == 0 then body = head .. "number " .. n .. " of {run} " .. tail end
  return wrk.format("POST", "/v1/chat/completions",
    {{["Content-Type"] = "application/json", ["Authorization"] = "Bearer bench"}}, body)
end
"""
PACE = "function delay() return {pace} end\n"  # milliseconds that a connection waits before its next request


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def process(command: list[str], url: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server that answers GET ``url``, until the block ends."""
    with tempfile.TemporaryFile() as log:
        running = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment}, cwd=ROOT)
        try:
            deadline = time.monotonic() + 120
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


def wrk(
    url: str,
    connections: int,
    seconds: int,
    share: int = 0,
    run: str = "",
    pace: int = 0,
    slow: bool = False,
    threads: int = 1,
) -> dict[str, Any]:
    """Requests a second and latencies in milliseconds. Without a pace the server has all the work that it can do.

    ``slow``: the upstream thinks for 50 ms, as a language model at the least does.
    """
    text = json.dumps(BODY)
    if slow:
        text = text.replace("What is", f"[delay={_DELAY_S}] What is")
    cut = text.index("[delay") if slow else text.index("What is")
    script = LUA.format(share=share, head=json.dumps(text[:cut]), tail=json.dumps(text[cut:]), run=run)
    script += PACE.format(pace=pace) if pace else ""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
        file.write(script)
        file.flush()
        command = [
            "wrk",
            f"-t{threads}",
            f"-c{connections}",
            f"-d{seconds}",
            "--latency",
            "--timeout",
            "20",
            "-s",
            file.name,
            url,
        ]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: _ms(value) for name, value in re.findall(r"^\s+(50|90|99)%\s+(\S+)", out, re.MULTILINE)}
    errors = re.search(r"Non-2xx or 3xx responses: (\d+)", out)
    socket_errors = re.search(r"Socket errors: (.*)", out)
    return {
        "connections": connections,
        "requests_per_s": float(re.search(r"Requests/sec:\s+([\d.]+)", out).group(1)),  # type: ignore[union-attr]
        "requests": int(re.search(r"(\d+) requests in", out).group(1)),  # type: ignore[union-attr]
        "p50_ms": found["50"],
        "p90_ms": found["90"],
        "p99_ms": found["99"],
        "errors": int(errors.group(1)) if errors else 0,
        "socket_errors": socket_errors.group(1) if socket_errors else "",
    }


def _ms(text: str) -> float:
    number, unit = re.fullmatch(r"([\d.]+)(us|ms|s|m)", text).groups()  # type: ignore[union-attr]
    return round(float(number) * {"us": 0.001, "ms": 1.0, "s": 1000.0, "m": 60_000.0}[unit], 3)


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def uvicorn(folder: str, app: str, port: int) -> list[str]:
    command = [sys.executable, "-m", "uvicorn", "--app-dir", folder, app, "--port", str(port)]
    return [*command, "--no-access-log", "--log-level", "warning"]


def gateway(folder: Path, port: int, upstream: str, *flags: str) -> list[str]:
    command = [sys.executable, "-m", "semkv", "serve", "--upstream", upstream, "--port", str(port)]
    return [*command, "--cache-dir", str(folder), "--log-level", "warning", *flags]


def measure_memory(pid: int, url: str, requests: int) -> dict[str, Any]:
    """Resident memory while a tenth of the requests are new ones; memory for answers is bounded far below them all."""
    samples, sent = [(0, round(resident_mib(pid), 1))], 0
    while sent < requests:
        done = wrk(url, 32, 5, share=10, run=f"memory {sent}")
        assert not done["errors"], done
        sent += done["requests"]
        samples.append((sent, round(resident_mib(pid), 1)))
        print(f"  {sent:,} requests: {samples[-1][1]} MiB", flush=True)
    half = [mib for at, mib in samples if at >= requests / 2]
    return {"samples": samples, "second_half_growth_mib": round(half[-1] - half[0], 1)}


def middle(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every figure, with the rounds themselves."""
    names = ("requests_per_s", "p50_ms", "p90_ms", "p99_ms")
    wrong = sum(found["errors"] for found in rounds)
    return {**{name: round(median(r[name] for r in rounds), 3) for name in names}, "errors": wrong, "rounds": rounds}


def beside_misses(url: str, seconds: int, run: str) -> dict[str, Any]:
    """Exact hits at 8 paced connections while one more sends misses, some 40 a second."""
    with ThreadPoolExecutor(1) as pool:
        misses = pool.submit(wrk, url, 1, seconds + 1, 1, f"beside {run}", 20)
        time.sleep(0.5)
        hits = wrk(url, 8, seconds, pace=_PACE_MS)
        return {**hits, "misses": misses.result()["requests"]}


def measure(
    seconds: int, rounds: int, requests: int, litellm_python: str, kinds: list[str], *, misses_only: bool
) -> dict[str, Any]:
    up = free_port()
    upstream = f"http://127.0.0.1:{up}"
    command = uvicorn("tests", "scripted_upstream:app", up)
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder, process(command, f"{upstream}/health"):
        with ExitStack() as gateways:
            port = free_port()
            proxy = f"http://127.0.0.1:{port}"
            passing = process(uvicorn("bench", "gateway:passthrough", port), f"{proxy}/health", UPSTREAM=upstream)
            gateways.enter_context(passing)
            wrk(proxy, 8, 2)
            urls = {}
            for name in kinds:
                port = free_port()
                urls[name] = f"http://127.0.0.1:{port}"
                serve = gateway(Path(folder) / name, port, upstream, *KINDS[name])
                gateways.enter_context(process(serve, f"{urls[name]}/healthz"))
                wrk(urls[name], 8, 2)
                wrk(urls[name], 1, 5, share=1, run="warm")  # until lookups are known to find little
            for number in range(rounds):
                if not misses_only:
                    found["bare_64"].append(wrk(upstream, 64, seconds))
                found["bare_miss_1"].append(wrk(upstream, 1, seconds, share=1))
                found["bare_miss_1_slow"].append(wrk(upstream, 1, seconds, share=1, slow=True))
                for name, url in {"proxy": proxy, **urls}.items():
                    found[f"{name}_miss_1"].append(wrk(url, 1, seconds, share=1, run=f"miss {number}"))
                    found[f"{name}_miss_1_slow"].append(wrk(url, 1, seconds, share=1, run=f"slow {number}", slow=True))
                    if misses_only or name not in ("exact", "exact_2_workers", "semantic"):
                        continue
                    found[f"{name}_hit_64"].append(wrk(url, 64, seconds))
                    found[f"{name}_hit_8"].append(wrk(url, 8, seconds))
                    found[f"{name}_hit_8_paced"].append(wrk(url, 8, seconds, pace=_PACE_MS))
                    found[f"{name}_hit_8_paced_beside_misses"].append(beside_misses(url, seconds, str(number)))
                print(f"  round {number + 1} of {rounds}", flush=True)
        result: dict[str, Any] = {name: middle(each) for name, each in found.items()}
        for name in ("proxy", *urls):
            for kind, quantile in product(("", "_slow"), ("p50_ms", "p99_ms")):
                added = result[f"{name}_miss_1{kind}"][quantile] - result[f"bare_miss_1{kind}"][quantile]
                result[f"{name}_miss{kind}_adds_{quantile}"] = round(added, 3)
        if misses_only:
            return result
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        bounds = ("--memory-mib", "8", "--store-mib", "64")
        serve = gateway(Path(folder) / "memory", port, upstream, "--no-semantic", *bounds)
        with process(serve, f"{url}/healthz") as running:
            result["memory"] = measure_memory(running.pid, url, requests)
        if litellm_python:
            result["litellm"] = measure_litellm(litellm_python, Path(folder), upstream, seconds)
            ratio = result["exact_hit_64"]["requests_per_s"] / result["litellm"]["hit_64"]["requests_per_s"]
            result["times_litellm"] = round(ratio, 1)
    return result


def measure_litellm(python: str, folder: Path, upstream: str, seconds: int) -> dict[str, Any]:
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n  - model_name: scripted\n    litellm_params:\n      model: openai/scripted\n"
        f"      api_base: {upstream}/v1\n      api_key: none\n"
        "litellm_settings:\n  cache: true\n  cache_params:\n    type: local\n"
    )
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(Path(python).parent / "litellm"), "--config", str(config), "--port", str(port)]
    command += ["--host", "127.0.0.1"]
    environment = {"LITELLM_LOG": "ERROR", "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
    ask = [python, "-c", "import importlib.metadata as m; print(m.version('litellm'))"]
    with process(command, f"{url}/health/liveliness", **environment):
        wrk(url, 8, 5)
        return {
            "version": subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip(),
            "hit_64": wrk(url, 64, seconds),
            "hit_8": wrk(url, 8, seconds),
        }


def measure_workers(counts: list[int], seconds: int, rounds: int) -> dict[str, Any]:
    """Exact hits at 64 connections by the number of workers, in turns; wrk has four threads."""
    up = free_port()
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory() as folder,
        process(uvicorn("tests", "scripted_upstream:app", up), f"http://127.0.0.1:{up}/health"),
        ExitStack() as gateways,
    ):
        urls = {}
        for count in counts:
            port = free_port()
            urls[count] = f"http://127.0.0.1:{port}"
            flags = ("--no-semantic", "--workers", str(count))
            serve = gateway(Path(folder) / str(count), port, f"http://127.0.0.1:{up}", *flags)
            gateways.enter_context(process(serve, f"{urls[count]}/healthz"))
            wrk(urls[count], 64, 2)
        for _ in range(rounds):
            for count, url in urls.items():
                found[count].append(wrk(url, 64, seconds, threads=4))
    result: dict[str, Any] = {str(count): middle(each) for count, each in found.items()}
    one = result[str(counts[0])]["requests_per_s"] / counts[0]
    for count in counts:
        result[f"{count}_times_as_many"] = round(result[str(count)]["requests_per_s"] / one, 2)
    return result


_upstream: list[Any] = []  # of `passthrough`: its session


async def passthrough(scope: Any, receive: Any, send: Any) -> None:
    """A proxy that passes requests on and does nothing else: what any gateway on uvicorn and aiohttp adds at least."""
    import aiohttp

    if scope["type"] == "lifespan":
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body")
    if not _upstream:
        jar, connector = aiohttp.DummyCookieJar(), aiohttp.TCPConnector(limit=0)
        _upstream.append(aiohttp.ClientSession(connector=connector, cookie_jar=jar, auto_decompress=False))
    dropped = (b"host", b"content-length", b"accept-encoding")
    headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"] if k not in dropped]
    url = os.environ["UPSTREAM"] + scope["path"]
    async with _upstream[0].request(scope["method"], url, data=body or None, headers=headers) as answer:
        whole = await answer.read()
        kind = answer.headers.get("content-type", "").encode("latin-1")
        told = [(b"content-type", kind), (b"content-length", str(len(whole)).encode())]
        await send({"type": "http.response.start", "status": answer.status, "headers": told})
        await send({"type": "http.response.body", "body": whole})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=int, default=2, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200_000, help="of the memory measurement")
    parser.add_argument("--litellm-python", default="", help="a Python that has litellm[proxy]")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of gateways")
    parser.add_argument("--misses-only", action="store_true", help="what misses add, and nothing else")
    parser.add_argument(
        "--workers", nargs="+", type=int, help="only hits, by numbers of workers; the first is the unit"
    )
    args = parser.parse_args()
    if args.litellm_python and "exact" not in args.kinds:
        parser.error("LiteLLM is compared with the kind exact")
    before = machine("uvicorn", "uvloop", "httptools", "aiohttp", "starlette", "prometheus-client")
    if args.workers:
        found = measure_workers(args.workers, args.seconds, args.rounds)
    else:
        found = measure(
            args.seconds, args.rounds, args.requests, args.litellm_python, args.kinds, misses_only=args.misses_only
        )
    for name, value in found.items():
        short = isinstance(value, dict) and {k: v for k, v in value.items() if k not in ("rounds", "samples")}
        print(name, short or value)
    if args.out:
        write_json(args.out, {"machine": before, **found})


if __name__ == "__main__":
    main()
