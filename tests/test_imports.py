"""Imports go in one direction, and the command line stays light. Read from the source, not from a running program."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "semkv"

# Each part of the package and what it may import, beside itself. Lowest first.
VOCABULARY = {"types", "errors", "keys", "config", "__init__"}
ALLOWED: dict[str, set[str]] = {
    "types": VOCABULARY,
    "errors": VOCABULARY,
    "keys": VOCABULARY,
    "config": VOCABULARY,
    "__init__": VOCABULARY,
    "presets": VOCABULARY,
    "stores": VOCABULARY,
    "indexes": VOCABULARY,
    "encoders": VOCABULARY,
    "connectors": VOCABULARY | {"stores"},
    "tiers": VOCABULARY | {"stores", "indexes", "encoders"},
    "cache": VOCABULARY | {"stores", "indexes", "encoders", "tiers"},
    "adapter": VOCABULARY | {"stores", "connectors"},
    "engines": VOCABULARY | {"presets", "stores", "encoders", "tiers", "cache", "connectors"},
    "experiments": VOCABULARY
    | {"presets", "stores", "indexes", "encoders", "tiers", "cache", "connectors", "engines", "adapter"},
    "server": VOCABULARY | {"presets", "stores", "indexes", "encoders", "tiers", "cache", "connectors", "engines"},
    "cli": VOCABULARY | {"presets", "stores", "connectors", "cache", "engines", "experiments", "server"},
    "__main__": {"cli"},
}

HEAVY = ("torch", "vllm", "transformers", "sentence_transformers", "faiss", "datasets", "pyarrow")
# May import torch when they are themselves imported: vLLM has loaded it long before.
LOADED_BY_VLLM = ("connectors",)


def modules() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


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


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {name for node in ast.walk(tree) for name in imported(node, path)}


def at_import_time(path: Path) -> set[str]:
    """What a module imports when it is itself imported: nothing inside functions or under ``TYPE_CHECKING``."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        found.update(imported(node, path))
        pending.extend(ast.iter_child_nodes(node))
    return found


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_imports_go_in_one_direction(path: Path) -> None:
    part = part_of(path)
    assert part in ALLOWED, f"{part}: say in ALLOWED what this new part may import"
    allowed = ALLOWED[part] | {part}
    for name in imports(path):
        if name.startswith("semkv."):
            target = name.split(".")[1]
            known = (SRC / target).is_dir() or (SRC / f"{target}.py").is_file()
            assert not known or target in allowed, f"{dotted(path)} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_vllm_is_imported_in_two_places_alone(path: Path) -> None:
    if any(name.split(".")[0] == "vllm" for name in imports(path)):
        assert part_of(path) == "connectors" or dotted(path) == "semkv.engines.vllm"


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_heavy_modules_are_imported_where_they_are_used(path: Path) -> None:
    if part_of(path) not in LOADED_BY_VLLM:
        heavy = {name for name in at_import_time(path) if name.split(".")[0] in HEAVY}
        assert not heavy, f"{dotted(path)} imports {heavy} when it is imported"


def test_the_reader_sees_relative_and_hidden_imports() -> None:
    tree = ast.parse("def f():\n    from ..stores import blocks\n    import vllm.config\n")
    path = SRC / "experiments" / "runner.py"
    found = {name for node in ast.walk(tree) for name in imported(node, path)}
    assert found == {"semkv.stores", "semkv.stores.blocks", "vllm.config"}


def test_the_command_line_loads_nothing_heavy() -> None:
    code = "import sys, semkv.cli; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    loaded = {name.split(".")[0] for name in out}
    assert not loaded & {*HEAVY, "numpy", "PIL", "rich", "huggingface_hub"}
