"""Imports go in one direction, and the command line stays light. Read from the source, not from a running program."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
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

HEAVY = ("torch", "vllm", "transformers", "sentence_transformers", "faiss", "datasets", "pyarrow")
# May import torch when they are themselves imported: vLLM has loaded it long before.
LOADED_BY_VLLM = ("connectors",)


MODULES = sorted(SRC.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    return ".".join(["semkv", *path.relative_to(SRC).with_suffix("").parts]).removesuffix(".__init__")


def imported(node: ast.AST, path: Path) -> Iterator[str]:
    """Absolute names of the modules an import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        if node.level == 0:
            base = node.module or ""
        else:
            package = dotted(path).split(".")[: None if path.name == "__init__.py" else -1]
            package = package[: len(package) - (node.level - 1)]
            base = ".".join([*package, *([node.module] if node.module else [])])
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)


@functools.cache
def imports(path: Path, *, deferred: bool = True) -> frozenset[str]:
    """What a module imports; without ``deferred`` nothing inside functions or under ``TYPE_CHECKING``."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if not deferred and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if not deferred and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        found.update(imported(node, path))
        pending.extend(ast.iter_child_nodes(node))
    return frozenset(found)


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


def test_vllm_is_imported_in_two_places_alone() -> None:
    importers = {path for path in MODULES if any(name.split(".")[0] == "vllm" for name in imports(path))}
    wrong = [
        dotted(path) for path in importers if part_of(path) != "connectors" and path != SRC / "engines" / "vllm.py"
    ]
    assert not wrong, f"import vllm: {', '.join(sorted(wrong))}"


def test_heavy_modules_are_imported_where_they_are_used() -> None:
    wrong = [
        f"{dotted(path)} imports {name} when it is imported"
        for path in MODULES
        if part_of(path) not in LOADED_BY_VLLM
        for name in sorted(imports(path, deferred=False))
        if name.split(".")[0] in HEAVY
    ]
    assert not wrong, "\n".join(wrong)


def test_the_package_names_what_it_has_and_loads_nothing_before() -> None:
    code = (
        "import sys, semkv; print(*(m for m in sys.modules if m.startswith('semkv.')), 'end'); "
        "[getattr(semkv, name) for name in semkv.__all__]; print(*(set(sys.modules) & {'torch', 'vllm', 'faiss'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == ["end", ""]


def test_the_command_line_loads_nothing_heavy() -> None:
    code = "import sys, semkv.cli; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {name.split(".")[0] for name in out} & {*HEAVY, "numpy", "PIL", "rich", "huggingface_hub"}
