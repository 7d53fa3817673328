"""Imports go in one direction, and the command line stays light. What is heavy is banned in `pyproject.toml`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[1]

# Which other distributions each one may import.
DISTRIBUTIONS: dict[str, set[str]] = {
    "semkv_guards": set(),
    "semkv_stores": set(),
    "semkv_vllm": {"semkv_stores"},
    "semkv": {"semkv_guards", "semkv_stores"},
    "semkv_dashboard": {"semkv", "semkv_guards", "semkv_stores"},
    "semkv_gateway": {"semkv", "semkv_dashboard", "semkv_stores"},
    "semkv_demo": {"semkv", "semkv_lab", "semkv_stores"},
    "semkv_lab": {"semkv", "semkv_gateway", "semkv_guards", "semkv_stores", "semkv_vllm"},
}

# Parts of the library, lowest first. A module may import its own part and the rows above its part's row.
ROWS = (
    "__init__ account types errors keys plug tenants user_files counting latest periodic niceness documents",
    "config command_line",
    "stores encoders",
    "index",
    "tiers",
    "cache",
    "engines frameworks",
    "cli",
    "__main__",
)
ROW = {part: number for number, row in enumerate(ROWS) for part in row.split()}
OLD_NAMES = {
    "server",
    "connectors",
}  # modules that other distributions have now; they only pass names on

HEAVY = {
    "torch",
    "vllm",
    "transformers",
    "sentence_transformers",
    "tokenizers",
    "onnx",
    "onnxruntime",
    "faiss",
    "datasets",
    "pyarrow",
    "cv2",
}


def source_of(distribution: str) -> Path:
    if distribution == "semkv":
        return TOP / "src" / "semkv"
    return TOP / "packages" / distribution.removeprefix("semkv_") / "src" / distribution


def modules_of(distribution: str) -> list[Path]:
    found = sorted(source_of(distribution).rglob("*.py"))
    assert found
    return [path for path in found if distribution != "semkv" or part_of(path) not in OLD_NAMES]


def part_of(path: Path) -> str:
    return path.relative_to(source_of("semkv")).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Names of the modules that a file imports; relative imports are banned in `pyproject.toml`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_each_distribution_is_named() -> None:
    projects = [*TOP.glob("packages/*/src/semkv_*/"), source_of("semkv")]
    assert {folder.name for folder in projects} == set(DISTRIBUTIONS)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_distribution_imports_only_those_below_it(distribution: str) -> None:
    allowed = {distribution, *DISTRIBUTIONS[distribution]}
    wrong = [
        f"{path.relative_to(TOP)} imports {name}"
        for path in modules_of(distribution)
        for name in sorted(imports(path))
        if (top := name.split(".")[0]) in DISTRIBUTIONS and top not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_within_the_library_go_in_one_direction() -> None:
    paths = modules_of("semkv")
    assert not {part_of(path) for path in paths} - ROW.keys(), (
        "say in ROWS where these new parts belong"
    )
    wrong = [
        f"{path.relative_to(TOP)} imports {name}"
        for path in paths
        if (part := part_of(path)) != "__init__"  # whose names are imported when they are asked for
        for name in sorted(imports(path))
        if name.startswith("semkv.") and (target := name.split(".")[1]) in ROW and target != part
        if ROW[target] > ROW[part] or (ROW[target] == ROW[part] and ROW[part] > 0)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_package_and_the_command_line_load_nothing_heavy_and_every_name_exists() -> None:
    code = (
        "import sys, semkv; print(*(m for m in sys.modules if m.startswith('semkv.')), 'end'); "
        "import semkv.cli; print(*sys.modules); "
        "[getattr(semkv, name) for name in semkv.__all__]; print(*(set(sys.modules) & {'torch', 'vllm', 'faiss'}))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    package, command_line, names = out.splitlines()
    assert (package, names) == ("end", "")
    loaded = {name.split(".")[0] for name in command_line.split()}
    assert not loaded & (HEAVY | {"numpy", "PIL", "rich", "huggingface_hub"})
