"""Every name, path, command and flag that the pages show exists, and the README's first screen does what it shows."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bound import Bound
from gateway_helpers import Served, wait_until
from scripted_upstream import Scripted

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = ROOT / "bench" / "results"
FOLDERS = (ROOT, ROOT / "docs", RESULTS, RESULTS / "h200")  # what the pages' paths may be relative to
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_VLLMS = {"--api-key", "--api-server-count", "--gpu-memory-utilization", "--max-model-len", "--middleware", "--model"}
_VLLMS |= {"--served-model-name", "--kv-transfer-config", "--ec-transfer-config"}
_OTHERS = {
    "--extra",
    "--ipc",
    "--retry",
    "--retry-connrefused",
    "--retry-delay",
    "--shm-size",
}  # uv's, docker's, curl's
_OTHERS_CLASSES = {"OffloadingConnector", "MultiConnector", "ExampleConnector"}


def prose(page: Path) -> str:
    """The page without fenced blocks, and without what its tables say of the original design."""
    text = _FENCE.sub("", page.read_text("utf-8"))
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
    done = subprocess.run(
        ["semkv", *command.split(), "--help"],
        env={**ENVIRONMENT, "COLUMNS": "200", "TERM": "dumb"},
        capture_output=True,
        text=True,
    )
    return {"--help", *_FLAG.findall(done.stdout)} if done.returncode == 0 else set()


def commands(page: Path) -> list[tuple[str, set[str]]]:
    """Commands of semkv on the page, each with the flags that it is shown with."""
    shown = [
        line for _, text in _FENCE.findall(page.read_text("utf-8")) for line in text.replace("\\\n", " ").splitlines()
    ]
    shown = [line.removeprefix("$ ") for line in shown] + quoted(page)
    found = (re.match(r"(?:\w+=\S+ )*semkv ((?:bench )?[a-z][a-z-]*)(.*)", line) for line in shown)
    return [(match[1], set(_FLAG.findall(match[2].partition(" #")[0]))) for match in found if match]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_classes_and_their_methods_exist(page: Path) -> None:
    named = {match for text in quoted(page) if (match := re.fullmatch(r"([A-Z][a-z]\w+)(?:\.(\w+))?(?:\(.*\))?", text))}
    named = {match for match in named if match[1] not in _OTHERS_CLASSES}
    assert [m[0] for m in named if m[1] not in classes() or (m[2] and m[2] not in classes()[m[1]])] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_exist(page: Path) -> None:
    wrong = {command: sorted(given - flags(command)) for command, given in commands(page) if given - flags(command)}
    assert wrong == {}
    assert [command for command, _ in commands(page) if not flags(command)] == []
    known = set().union(*map(flags, listed())) | _VLLMS | _OTHERS
    assert sorted(set(_FLAG.findall(" ".join(quoted(page)))) - known) == []


@functools.cache
def listed() -> tuple[str, ...]:
    """The commands that the pages name."""
    return tuple(sorted({command for page in PAGES for command, _ in commands(page)}))


def test_the_readmes_first_screen_does_what_it_shows(tmp_path: Path) -> None:
    if not shutil.which("curl"):
        pytest.skip("needs curl")
    block = next(text for tag, text in _FENCE.findall((ROOT / "README.md").read_text("utf-8")) if tag == "console")
    shown = [line for line in block.splitlines() if line.startswith("x-semkv")]
    typed = "\n".join(line.removeprefix("$ ") for line in block.splitlines() if line not in shown)
    assert typed.startswith("pip install ")  # docs/serving.md and the README say how else
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Served(Scripted()) as upstream:
        script = typed.partition("\n")[2].replace("http://127.0.0.1:8000", upstream.url).replace("8080", str(port))
        output = tmp_path / "output"
        with output.open("w") as written:
            gateway = Bound(
                ["bash", "-c", script + "\necho done\nwait"],
                cwd=tmp_path, env={**ENVIRONMENT, "SEMKV_CACHE_DIR": str(tmp_path / "cache")}, stdout=written,
            )  # fmt: skip
        try:
            wait_until(lambda: "done" in output.read_text("utf-8").split(), 300)
        finally:
            gateway.stop()
    said = [line.strip() for line in output.read_text("utf-8").splitlines() if line.startswith("x-semkv")]
    assert [re.sub(r"age=\d+", "age=N", line) for line in said] == [re.sub(r"age=\d+", "age=N", line) for line in shown]
    assert len(shown) == 2
