"""What the gateway costs and gives: wrk in front, a scripted upstream behind, each in a process of its own.

Measures exact hits at 64 and 8 connections, what a miss adds to the upstream's own time, memory over 200,000 requests,
and beside it the LiteLLM proxy with its local cache where a Python that has it is named.

    python bench/gateway.py --out bench/results/cpu/gateway.json --litellm-python PATH
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
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


def wrk(url: str, connections: int, seconds: int, share: int = 0, run: str = "") -> dict[str, Any]:
    """Requests a second and latencies in milliseconds."""
    text = json.dumps(BODY)
    cut = text.index("What is")
    script = LUA.format(share=share, head=json.dumps(text[:cut]), tail=json.dumps(text[cut:]), run=run)
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as file:
        file.write(script)
        file.flush()
        command = [
            "wrk",
            "-t1",
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


def measure(seconds: int, requests: int, litellm_python: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    up = free_port()
    upstream = f"http://127.0.0.1:{up}"
    command = [sys.executable, "-m", "uvicorn", "--app-dir", "tests", "scripted_upstream:app", "--port", str(up)]
    command += ["--no-access-log", "--log-level", "warning"]
    with tempfile.TemporaryDirectory() as folder, process(command, f"{upstream}/health"):
        result["bare_upstream_64"] = wrk(upstream, 64, seconds)
        result["bare_upstream_1"] = wrk(upstream, 1, seconds, share=1)
        for name, flags in (("", ("--no-semantic",)), ("_semantic", ())):
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            serve = gateway(Path(folder) / f"cache{name}", port, upstream, *flags)
            with process(serve, f"{url}/healthz"):
                wrk(url, 8, 2)
                result[f"hit_64{name}"] = wrk(url, 64, seconds)
                result[f"hit_8{name}"] = wrk(url, 8, seconds)
                result[f"miss_1{name}"] = wrk(url, 1, seconds, share=1, run="miss")
            own = result["bare_upstream_1"]["p50_ms"]
            result[f"miss_adds_ms{name}"] = round(result[f"miss_1{name}"]["p50_ms"] - own, 3)
            print(json.dumps({key: value for key, value in result.items() if name in key}, indent=1), flush=True)
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        serve = gateway(
            Path(folder) / "memory", port, upstream, "--no-semantic", "--memory-mib", "8", "--store-mib", "64"
        )
        with process(serve, f"{url}/healthz") as running:
            result["memory"] = measure_memory(running.pid, url, requests)
        if litellm_python:
            result["litellm"] = measure_litellm(litellm_python, Path(folder), upstream, seconds)
            ratio = result["hit_64"]["requests_per_s"] / result["litellm"]["hit_64"]["requests_per_s"]
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
    command = [
        str(Path(python).parent / "litellm"),
        "--config",
        str(config),
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    environment = {"LITELLM_LOG": "ERROR", "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
    ask = [python, "-c", "import importlib.metadata as m; print(m.version('litellm'))"]
    with process(command, f"{url}/health/liveliness", **environment):
        wrk(url, 8, 5)
        return {
            "version": subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip(),
            "hit_64": wrk(url, 64, seconds),
            "hit_8": wrk(url, 8, seconds),
        }


def machine() -> dict[str, Any]:
    names = ("uvicorn", "uvloop", "httptools", "aiohttp", "starlette", "prometheus-client")
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = ""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), "versions": versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=int, default=10, help="of each measurement")
    parser.add_argument("--requests", type=int, default=200_000, help="of the memory measurement")
    parser.add_argument("--litellm-python", default="", help="a Python that has litellm[proxy]")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    result = {"machine": machine(), "load_before": load, **measure(args.seconds, args.requests, args.litellm_python)}
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
