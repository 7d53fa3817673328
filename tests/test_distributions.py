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
    """A fresh environment with some requirements."""

    def __init__(self, folder: Path, *requirements: str) -> None:
        self.python = folder / "bin" / "python"
        uv("venv", "--quiet", "--python", sys.executable, folder)
        flags = ("--quiet", "--python", self.python, "--constraint", TOP / "constraints-cpu.txt")
        uv("pip", "install", *flags, *requirements)

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


def test_guards_need_nothing(tmp_path: Path) -> None:
    alone = Environment(tmp_path / "env", str(TOP / "packages/guards"))
    assert alone.names() == {"semkv-guards"}
    printed = alone.run("from semkv_guards import veto; print(veto('Is it on?', 'Is it off?'))")
    assert printed.strip() not in ("", "None")


def test_connectors_bring_four_packages(tmp_path: Path) -> None:
    alone = Environment(tmp_path / "env", str(TOP / "packages/vllm"))
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
    alone = Environment(tmp_path / "env", str(TOP / "packages/gateway"))
    assert not alone.names() & {"torch", "sentence-transformers", "vllm", "datasets"}
    loaded = alone.loaded_by("import semkv_gateway.serve, semkv_gateway.app")
    assert not loaded & {"torch", "faiss", "semkv_vllm"}
    command = alone.python.with_name("semkv")
    shown = subprocess.run(
        [command, "serve", "--help"], capture_output=True, text=True, env=ENVIRONMENT, check=True
    )
    assert "--upstream" in shown.stdout


def test_the_library_alone_says_how_to_get_the_gateway(tmp_path: Path) -> None:
    alone = Environment(tmp_path / "env", str(TOP))
    assert "semkv-gateway" not in alone.names()
    command = alone.python.with_name("semkv")
    refused = subprocess.run(
        [command, "serve"], capture_output=True, text=True, env=ENVIRONMENT, check=False
    )
    assert refused.returncode == 2
    assert "packages/gateway" in refused.stderr


def test_old_names_bring_the_same(tmp_path: Path) -> None:
    alone = Environment(tmp_path / "env", f"{TOP}[server]")
    assert {"semkv-gateway", "semkv-vllm"} <= alone.names()
    alone.run(
        "from semkv_gateway import Middleware, ResponseStore; from semkv import SemanticCache, Engine"
    )


@pytest.mark.parametrize("part", ["packages/guards", "packages/vllm", "packages/gateway", "."])
def test_uv_adds_a_part_to_a_project(part: str, tmp_path: Path) -> None:
    uv(
        "init",
        "--quiet",
        "--bare",
        "--python",
        sys.executable,
        "--name",
        "project",
        ".",
        cwd=tmp_path,
    )
    uv("add", "--quiet", TOP / part, cwd=tmp_path)
    name = "semkv" if part == "." else f"semkv-{part.removeprefix('packages/')}"
    assert name in uv("pip", "list", cwd=tmp_path).split()
