"""Imports go in one direction, and the command line stays light. What is heavy is banned in `pyproject.toml`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "semkv"

# Parts of the package, lowest first. A module may import its own part and the rows above its part's row.
ROWS = (
    "__init__ types errors keys config plug",
    "guards stores encoders",
    "index connectors",
    "tiers",
    "cache",
    "engines",
    "server",
    "cli",
    "__main__",
)
ROW = {part: number for number, row in enumerate(ROWS) for part in row.split()}

HEAVY = {"torch", "vllm", "transformers", "sentence_transformers", "faiss", "datasets", "pyarrow"}
MODULES = sorted(SRC.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    return ".".join(["semkv", *path.relative_to(SRC).with_suffix("").parts]).removesuffix(".__init__")


def imports(path: Path) -> set[str]:
    """Names of the modules that a file imports; relative imports are banned in `pyproject.toml`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_go_in_one_direction() -> None:
    parts = {part_of(path): path for path in MODULES}
    assert not parts.keys() - ROW.keys(), "say in ROWS where these new parts belong"
    wrong = [
        f"{dotted(path)} imports {name}"
        for part, path in ((part_of(path), path) for path in MODULES)
        if part != "__init__"  # whose names are imported when they are asked for
        for name in sorted(imports(path))
        if name.startswith("semkv.") and (target := name.split(".")[1]) in parts and target != part
        if ROW[target] > ROW[part] or (ROW[target] == ROW[part] and ROW[part] > 0)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_package_and_the_command_line_load_nothing_heavy_and_every_name_exists() -> None:
    code = (
        "import sys, semkv; print(*(m for m in sys.modules if m.startswith('semkv.')), 'end'); "
        "import semkv.cli; print(*sys.modules); "
        "[getattr(semkv, name) for name in semkv.__all__]; print(*(set(sys.modules) & {'torch', 'vllm', 'faiss'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    package, command_line, names = out.splitlines()
    assert (package, names) == ("end", "")
    loaded = {name.split(".")[0] for name in command_line.split()}
    assert not loaded & (HEAVY | {"numpy", "PIL", "rich", "huggingface_hub"})
