"""The shape of the code gets no worse, and `bench/shape.py` counts what it says."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO / "bench"))

import shape  # noqa: E402


@cache
def measured() -> shape.Shape:
    return shape.measure()


@pytest.mark.parametrize("name", shape.BEFORE_AND_AIM)
def test_no_figure_gets_worse(name: str) -> None:
    now, most = measured().figures[name], shape.limits()[name]
    places = "\n".join(measured().places.get(name, []))
    assert now <= most, f"{places}\n{name}: {now}, at most {most}: see the head of bench/shape.py"


def test_the_page_says_the_limits() -> None:
    assert shape.limits().keys() == shape.BEFORE_AND_AIM.keys()
    assert shape.table(shape.limits()) in shape.PAGE.read_text(encoding="utf-8")


def test_a_table_takes_the_place_of_the_one_before() -> None:
    figures = dict.fromkeys(shape.BEFORE_AND_AIM, 1)
    page = f"# A page\n\n{shape.table(figures)}\n\nWhat follows.\n| another | table |\n"
    better = dict.fromkeys(shape.BEFORE_AND_AIM, 0)
    assert shape.with_table(page, shape.table(better)) == page.replace(
        shape.table(figures), shape.table(better)
    )
    assert shape.with_table(page, shape.table(figures)) == page


# -- what is counted ------------------------------------------------------------


def code(text: str, path: str = "x.py") -> shape.Code:
    return shape.Code(path=Path(path), text=text, tree=ast.parse(text))


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        ("a = 1  # why\n\n\nb = 2\n", (6, 2)),
        ('"""A module."""\n\ndef f():\n    """A function."""\n    return 1\n', (7, 2)),
        ('def f():\n    "text"\n    "no docstring"\n', (6, 2)),
        ("a = f'{b} and {c:>{d}}'\n", (3, 1)),
        ("a = '''1\n2'''\nb = f'''{c}\n\n{d}'''\n", (6, 5)),
        ("f(\n    1,\n)\n", (5, 3)),
    ],
)
def test_tokens_and_lines(text: str, counted: tuple[int, int]) -> None:
    assert shape.tokens_and_lines(text) == counted


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("if a:\n    pass\nelif b:\n    pass\nelse:\n    pass\n", 2),
        ("while a and b or c:\n    pass\n", 3),
        ("x = [a if b else c for d in e if f if g]\n", 4),
        ("try:\n    pass\nexcept A:\n    pass\nexcept B:\n    pass\n", 2),
        ("match a:\n    case 1:\n        pass\n    case _:\n        assert b\n", 3),
        ("with a as b:\n    return_ = lambda: 1\n", 0),
    ],
)
def test_branches(text: str, found: int) -> None:
    assert shape.branches(ast.walk(ast.parse(text))) == found


def test_a_function_is_counted_without_those_inside_it() -> None:
    nested = (
        "def f():\n    if a: pass\n    def g():\n"
        + "        if a: pass\n" * 15
        + "    if a: pass\n"
    )
    assert [place.split(" ", 1)[1] for place in shape.hard_functions(code(nested))] == ["g: 16"]
    assert shape.hard_functions(code("async def f():\n" + "    if a: pass\n" * 14)) == []
    assert len(shape.hard_functions(code("async def f():\n" + "    if a: pass\n" * 15))) == 1


def test_calls_by_position_are_those_of_own_classes() -> None:
    text = "A(1, 2, 3, 4, 5, 6)\nm.A(1, 2, 3, 4, 5, *b)\nA(1, 2, 3, 4, 5, d=6)\nother(1, 2, 3, 4, 5, 6)\n"
    assert len(shape.by_position(code(text), {"A"})) == 2


def test_assignments_of_more_than_two_names() -> None:
    text = "a, b = 1, 2\na, b, c = 1, 2, 3\nx = y, z, w = f()\n(a, (b, c)) = d\nfor a, b, c in d: pass\n"
    assert len(shape.wide_assignments(code(text))) == 2


def test_private_names_are_those_that_the_product_does_not_define() -> None:
    text = (
        "class A:\n    _mine = 1\n    def _own(self): self._written = self._own()\n"
        "a._mine; a._own; a._written; a._theirs; a.__dict__; a._replace(b=1)\n"
        "from vllm import _insides, open_\ngetattr(a, '_asked', None); getattr(a, 'plain')\nsetattr(a, '_set', 1)\n"
    )
    found = shape.private_names(code(text), shape.own_names([code(text)]))
    assert sorted(place.split(" ")[1] for place in found) == [
        "_asked",
        "_insides",
        "_set",
        "_theirs",
    ]


def test_imports_and_paths_that_lead_upwards() -> None:
    rows = {"keys": 0, "tiers": 1, "cli": 2}
    text = (
        "import semkv.cli.store\nfrom semkv import tiers, keys\nfrom semkv.tiers.layer import x\n"
        "def f():\n    g = Path(__file__).parent / 'tiers' / 'words'\n"
    )
    found = [place.split(" ")[1] for place in shape.upwards(code(text, "src/semkv/keys.py"), rows)]
    assert sorted(found) == ["cli", "tiers", "tiers", "tiers"]
    assert shape.upwards(code(text, "packages/gateway/src/semkv_gateway/app.py"), rows) == []


def test_records() -> None:
    text = "@dataclass(frozen=True)\nclass A: ...\n@dataclass\nclass B: ...\nclass C(NamedTuple): ...\nclass D(A): ...\n"  # noqa: E501
    assert [place.split(" ")[1] for place in shape.records(code(text))] == ["A", "B", "C"]


def test_all_that_is_installed_is_counted() -> None:
    found = shape.distributions()
    assert found.keys() >= {"semkv", *shape.LAB}
    assert all(found.values()), "a distribution without files has another layout"
