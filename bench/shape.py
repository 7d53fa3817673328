"""The shape of the code: how much a line says, how hard functions are, whose insides they use. Needs Python alone.

    python bench/shape.py            the table of docs/architecture.md, measured now
    python bench/shape.py --places   and where each thing is that is counted
    python bench/shape.py --write    take what is measured as limits (shape.json), and put the table into the page

A distribution is a folder with a ``pyproject.toml``. The product is all of them but the lab and the demo. What is
counted:

- tokens a code line: Python's own, without comments, docstrings and ends of lines, by lines that hold any;
- branches a code line: if, for, while, except, assert, case, conditional expressions, ``and``, ``or``, and the loops
  and conditions of comprehensions;
- functions above complexity 15: their branches and 1, without the functions inside them;
- calls by position: of a class of the product, with more than five values by position;
- wide assignments: of more than two names at once;
- private names of others: with one underscore, that the product neither defines nor writes, as attribute, import or
  name for ``getattr``;
- imports upwards: by ``ROWS`` of ``tests/test_imports.py``, and paths below ``__file__`` that lead into a higher row;
- record types: dataclasses and named tuples of what carries a gateway's miss.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "architecture.md"
LAB = ("semkv-lab", "semkv-demo")

BEFORE_AND_AIM = {
    "tokens a code line": ("10.32", "8.5"),
    "branches a code line": ("0.32", ""),
    "functions above complexity 15": ("27", "8"),
    "calls by position": ("17", "0"),
    "wide assignments": ("86", "0"),
    "private names of others": ("28", "8"),
    "tokens of the largest distribution": ("139,309", "65,000"),
    "imports upwards": ("1", "0"),
    "record types": ("31", "24"),
    "lab: tokens a code line": ("11.51", "8.5"),
    "lab: functions above complexity 15": ("13", "0"),
    "lab: calls by position": ("5", "0"),
    "lab: wide assignments": ("30", "0"),
}
"""By figure, what it was on 2026-11-28 and what it shall be."""

MISS = ("types.py", "tiers/response.py", "server/*.py", "semkv_gateway/*.py")
"""Files whose records carry a gateway's miss, wherever their distribution lies."""

HARD = 15
MOST_BY_POSITION = 5
MOST_NAMES = 2
_LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
    tokenize.ENDMARKER,
}  # fmt: skip
_BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.IfExp,
    ast.Assert,
    ast.match_case,
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make", "_field_defaults"}


@dataclass
class Code:
    """A Python file."""

    path: Path
    text: str
    tree: ast.Module

    @classmethod
    def read(cls, path: Path) -> Code:
        text = path.read_text(encoding="utf-8")
        return cls(path=path, text=text, tree=ast.parse(text))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of them: to walk the tree takes longer than what is counted."""
        return list(ast.walk(self.tree))

    def at(self, node: ast.AST, said: str) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{getattr(node, 'lineno', 1)} {said}"


@dataclass
class Shape:
    """Figures by name, and the places where things that are counted are."""

    figures: dict[str, float] = field(default_factory=dict)
    places: dict[str, list[str]] = field(default_factory=dict)

    def count(self, name: str, places: list[str]) -> None:
        self.figures[name] = len(places)
        self.places[name] = places


# -- what is counted ------------------------------------------------------------


@cache
def tokens_and_lines(text: str) -> tuple[int, int]:
    """How many tokens a file has, and how many lines that hold any.

    A literal with values in it is one token, as Python counted it before 3.12.
    """
    documentation = _docstrings(ast.parse(text))
    tokens = 0
    inside = 0  # literals with values in them that are open
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _LAYOUT or (
            token.type == tokenize.STRING and token.start in documentation
        ):
            continue
        lines.update(range(token.start[0], token.end[0] + 1))
        kind = tokenize.tok_name[token.type]
        if kind.endswith("STRING_END"):
            inside -= 1
            continue
        tokens += inside == 0
        if kind.endswith("STRING_START"):
            inside += 1
    return tokens, len(lines)


def _docstrings(tree: ast.Module) -> set[tuple[int, int]]:
    """Where docstrings begin."""
    found = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS))
            and ast.get_docstring(node, clean=False) is not None
        ):
            found.add((node.body[0].lineno, node.body[0].col_offset))
    return found


def branches(nodes: Iterable[ast.AST]) -> int:
    found = 0
    for node in nodes:
        if isinstance(node, _BRANCHES):
            found += 1
        elif isinstance(node, ast.BoolOp):
            found += len(node.values) - 1
        elif isinstance(node, ast.comprehension):
            found += 1 + len(node.ifs)
    return found


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """What is in a function, without the functions inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, _FUNCTIONS):
            yield child
            yield from own_nodes(child)


def hard_functions(code: Code) -> list[str]:
    functions = [node for node in code.nodes if isinstance(node, _FUNCTIONS)]
    complexity = {node: 1 + branches(own_nodes(node)) for node in functions}
    return [
        code.at(node, f"{node.name}: {found}") for node, found in complexity.items() if found > HARD
    ]


def by_position(code: Code, classes: set[str]) -> list[str]:
    found = []
    for node in code.nodes:
        if isinstance(node, ast.Call) and len(node.args) > MOST_BY_POSITION:
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in classes:
                found.append(code.at(node, f"{name}: {len(node.args)}"))
    return found


def wide_assignments(code: Code) -> list[str]:
    return [
        code.at(node, f"{len(target.elts)} names")
        for node in code.nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Tuple) and len(target.elts) > MOST_NAMES
    ]


def private_names(code: Code, own: set[str]) -> list[str]:
    found = []
    for node in code.nodes:
        names: list[object] = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "getattr",
            "setattr",
            "hasattr",
        ):
            names = [
                argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)
            ]
        for name in names:
            private = isinstance(name, str) and name.startswith("_") and not name.startswith("__")
            if private and name not in own | _OF_NAMED_TUPLES:
                found.append(code.at(node, str(name)))
    return found


def own_names(codes: list[Code]) -> set[str]:
    """What the product defines or writes."""
    found: set[str] = set()
    for code in codes:
        for node in code.nodes:
            if isinstance(node, (ast.ClassDef, *_FUNCTIONS)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return found


def upwards(code: Code, rows: dict[str, int]) -> list[str]:
    """Imports of a part in a higher row, and paths that lead into one."""
    if "semkv" not in code.path.parts:
        return []
    own = code.path.parts[len(code.path.parts) - code.path.parts[::-1].index("semkv")].removesuffix(
        ".py"
    )
    if own == "__init__":  # whose names are imported when they are asked for
        return []
    found = []
    for node in code.nodes:
        named: set[str] = set()
        if isinstance(node, ast.Import):
            named = {
                alias.name.split(".")[1] for alias in node.names if alias.name.startswith("semkv.")
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "semkv":
            below = (node.module or "").split(".")[1:2]
            named = set(below) or {alias.name for alias in node.names}
        elif isinstance(node, ast.stmt) and not isinstance(node, (ast.ClassDef, *_FUNCTIONS)):
            inner = [*ast.walk(node)]
            if any(isinstance(each, ast.Name) and each.id == "__file__" for each in inner):
                named = {
                    each.value
                    for each in inner
                    if isinstance(each, ast.Constant) and isinstance(each.value, str)
                }
        found += [
            code.at(node, part)
            for part in sorted(named)
            if rows.get(part, -1) > rows.get(own, len(rows))
        ]
    return found


def rows() -> dict[str, int]:
    """The row of each part, as the test of imports has them."""
    tree = Code.read(ROOT / "tests" / "test_imports.py").tree
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ROWS":
            return {
                part: number
                for number, row in enumerate(ast.literal_eval(node.value))
                for part in row.split()
            }
    raise SystemExit("tests/test_imports.py has no ROWS any more: say here where parts belong")


def records(code: Code) -> list[str]:
    found = []
    for node in code.nodes:
        if isinstance(node, ast.ClassDef):
            said = [ast.unparse(each) for each in (*node.decorator_list, *node.bases)]
            if any(text.startswith("dataclass") or text == "NamedTuple" for text in said):
                found.append(code.at(node, node.name))
    return found


# -- the figures ------------------------------------------------------------


def distributions() -> dict[str, list[Code]]:
    """The files of each distribution, by its name."""
    found = {}
    for project in [ROOT / "pyproject.toml", *sorted((ROOT / "packages").glob("*/pyproject.toml"))]:
        name = "semkv" if project.parent == ROOT else f"semkv-{project.parent.name}"
        found[name] = [Code.read(path) for path in sorted((project.parent / "src").rglob("*.py"))]
    return found


def measure() -> Shape:
    """All figures of the project."""
    shape = Shape()
    files = distributions()
    product = [code for name, codes in files.items() if name not in LAB for code in codes]
    _of_code(shape, product, "")
    _of_code(shape, [code for name in LAB for code in files[name]], "lab: ")
    own = own_names(product)
    parts = rows()
    shape.count(
        "private names of others", [place for code in product for place in private_names(code, own)]
    )
    shape.count("imports upwards", [place for code in product for place in upwards(code, parts)])
    carrying = [code for code in product if any(code.path.match(pattern) for pattern in MISS)]
    shape.count("record types", [place for code in carrying for place in records(code)])
    sizes = {
        name: sum(tokens_and_lines(code.text)[0] for code in codes) for name, codes in files.items()
    }
    largest = max(sizes, key=lambda name: sizes[name])
    shape.figures["tokens of the largest distribution"] = sizes[largest]
    shape.places["tokens of the largest distribution"] = [
        f"{name}: {size:,}" for name, size in sizes.items()
    ]
    return shape


def _of_code(shape: Shape, codes: list[Code], prefix: str) -> None:
    """What is counted of the product and of the lab alike."""
    counted = [tokens_and_lines(code.text) for code in codes]
    lines = sum(own for _, own in counted)
    found = sum(branches(code.nodes) for code in codes)
    shape.figures[f"{prefix}tokens a code line"] = round(sum(own for own, _ in counted) / lines, 2)
    shape.figures[f"{prefix}branches a code line"] = round(found / lines, 2)
    classes = {node.name for code in codes for node in code.nodes if isinstance(node, ast.ClassDef)}
    hard = [place for code in codes for place in hard_functions(code)]
    shape.count(f"{prefix}functions above complexity {HARD}", hard)
    shape.count(
        f"{prefix}calls by position",
        [place for code in codes for place in by_position(code, classes)],
    )
    shape.count(
        f"{prefix}wide assignments", [place for code in codes for place in wide_assignments(code)]
    )


def limits() -> dict[str, float]:
    """The most that each figure may be."""
    found: dict[str, float] = json.loads(LIMITS.read_text(encoding="utf-8"))
    return found


# -- the page ------------------------------------------------------------


def shown(value: float) -> str:
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}"


def table(figures: dict[str, float]) -> str:
    found = ["| | 2026-11-28 | now | aim |", "|---|---|---|---|"]
    for name, (before, aim) in BEFORE_AND_AIM.items():
        found.append(f"| {name} | {before} | {shown(figures[name])} | {aim} |")
    return "\n".join(found)


def with_table(page: str, made: str) -> str:
    """The page with this table in place of the one that begins alike."""
    head = made.splitlines()[0]
    before, _, rest = page.partition(f"{head}\n")
    if not rest:
        raise SystemExit(f"{PAGE} has no table that begins with {head}")
    after = rest.split("\n")
    while after and after[0].startswith("|"):
        del after[0]
    return before + made + "\n" + "\n".join(after)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--places", action="store_true", help="also say where each thing is")
    parser.add_argument(
        "--write", action="store_true", help="write the limits and the table of the page"
    )
    arguments = parser.parse_args()
    shape = measure()
    figures = {name: shape.figures[name] for name in BEFORE_AND_AIM}
    print(table(figures))
    if arguments.places:
        for name in figures:
            print("\n".join([f"\n{name}", *(f"  {place}" for place in shape.places.get(name, []))]))
    if arguments.write:
        for name, most in limits().items():
            if figures.get(name, 0) > most:
                print(f"worse: {name}: {shown(figures[name])}, and the limit was {shown(most)}")
        LIMITS.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(
            with_table(PAGE.read_text(encoding="utf-8"), table(figures)), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
