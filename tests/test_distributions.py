"""Each distribution alone, installed from this repository into an environment of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]
UV = (
    shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    or ""
)
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
}

# What vLLM's users get beside vLLM, with what these need themselves.
LIGHT = {"numpy", "pydantic", "safetensors", "xxhash"}
OF_PYDANTIC = {"annotated-types", "pydantic-core", "typing-extensions", "typing-inspection"}

pytestmark = pytest.mark.skipif(not UV, reason="uv is not installed")


def uv(*arguments: object, cwd: Path = TOP) -> str:
    command = [UV, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Environment:
    """A fresh environment with one requirement: as pip installs it, or as uv adds it to a project."""

    def __init__(self, folder: Path, requirement: str, *, project: bool = False) -> None:
        environment = folder / ".venv"
        self.python = environment / "bin" / "python"
        if project:
            uv("init", "--quiet", "--bare", "--python", sys.executable, "--name", "project", folder)
            uv("add", "--quiet", requirement, cwd=folder)
        else:
            uv("venv", "--quiet", "--python", sys.executable, environment)
            flags = ("--python", self.python, "--constraint", TOP / "constraints-cpu.txt")
            uv("pip", "install", "--quiet", *flags, requirement)

    def names(self) -> set[str]:
        listed = json.loads(uv("pip", "list", "--python", self.python, "--format", "json"))
        return {row["name"] for row in listed}

    def run(self, code: str) -> str:
        command = [self.python, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def loaded_by(self, code: str) -> set[str]:
        """Top-level names of what some code imports."""
        printed = self.run(
            f"{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
        )
        return set(printed.splitlines()[-1].split())


@pytest.mark.parametrize("project", [False, True])
def test_guards_need_nothing(tmp_path: Path, project: bool) -> None:
    alone = Environment(tmp_path, str(TOP / "packages/guards"), project=project)
    assert alone.names() == {"semkv-guards"}
    printed = alone.run("from semkv_guards import veto; print(veto('Is it on?', 'Is it off?'))")
    assert printed.strip() not in ("", "None")


def test_connectors_bring_four_packages(tmp_path: Path) -> None:
    alone = Environment(tmp_path, str(TOP / "packages/vllm"), project=True)
    assert alone.names() == {"semkv-vllm", "semkv-stores"} | LIGHT | OF_PYDANTIC
    loaded = alone.loaded_by(
        "import semkv_vllm, semkv_stores.blocks, semkv_stores.fusion; semkv_vllm.KVSettings()"
    )
    assert {name for name in loaded if name.startswith("semkv")} == {"semkv_vllm", "semkv_stores"}
    entry = alone.run(
        "from importlib.metadata import entry_points as e; print(e(group='vllm.general_plugins')['semkv'].value)"
    )
    assert entry.strip() == "semkv_vllm:register"


def test_the_gateway_without_encoders_loads_neither_torch_nor_faiss(tmp_path: Path) -> None:
    alone = Environment(tmp_path, str(TOP / "packages/gateway"), project=True)
    assert not alone.names() & {"torch", "sentence-transformers", "vllm", "datasets"}
    loaded = alone.loaded_by("import semkv_gateway.serve, semkv_gateway.app")
    assert not loaded & {"torch", "faiss", "semkv_vllm"}
    command = alone.python.with_name("semkv")
    shown = subprocess.run(
        [command, "serve", "--help"], capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    assert "--upstream" in shown.stdout


def test_the_library_alone_says_how_to_get_the_gateway(tmp_path: Path) -> None:
    alone = Environment(tmp_path, str(TOP), project=True)
    assert "semkv-gateway" not in alone.names()
    command = alone.python.with_name("semkv")
    refused = subprocess.run(
        [command, "serve"], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert refused.returncode == 2
    assert "packages/gateway" in refused.stderr


def test_old_names_bring_the_same(tmp_path: Path) -> None:
    alone = Environment(tmp_path, f"{TOP}[server]")
    assert {"semkv-gateway", "semkv-vllm"} <= alone.names()
    alone.run(
        "from semkv_gateway import Middleware, ResponseStore; from semkv import SemanticCache, Engine"
    )
