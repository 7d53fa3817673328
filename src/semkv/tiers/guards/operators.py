"""Signs of arithmetic, comparison and shells between two operands, so that one written in two ways is one."""

from __future__ import annotations

import re

_FOLDED = str.maketrans(
    {"→": "->", "⇒": "=>", "×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "≤": "<=", "≥": ">=", "≠": "!="}
)
_RAISED = str.maketrans("²³", "23")
_SIZE = re.compile(r"\b([ckmd]?m)([²³])")
_SIZES = {"²": "sq", "³": "cb"}
_POWER = re.compile(r"(?<=[\w)\]])[²³]")
_SUM = re.compile(r"(?<![\d.,])\d[\d.,]*+(?:\s*+[-+*/%^]{1,2}\s*+\d[\d.,]*+)+")
DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}")
OPERATOR = re.compile(r"[<>=*+^|~%&]|[-/](?![^\W\d])|\b(?:AND|X?OR|NOT)\b")
_INSIDE = re.compile(r"(?<=[\w)\]])(?:[<>]=?|[=!]=+|<>|=|[*^|~]{1,2}|\+|&&|->|=>|\.[*/^])(?=[\w(\[])")
_ALONE = re.compile(r"[<>=!+*/^%&|~:-]*[<>=+*/^%&|~-]|\.[*/^]")
_MARKS = ".,;:?!'\"`()"
_PROSE = frozenset(("-", "--", "---", "/", "&", "%", "~"))
_WORDS = frozenset(("AND", "OR", "NOT", "XOR"))
_SAME = {"<>": "!="}


def folded(text: str) -> str:
    """A text with one form of every sign, powers as "x^2" and sizes as "sqm"."""
    text = _SIZE.sub(lambda found: f"{_SIZES[found[2]]}{found[1]}", text)
    return _POWER.sub(lambda found: f"^{found[0].translate(_RAISED)}", text).translate(_FOLDED)


def operators(text: str, *, typed: bool) -> tuple[str, ...]:
    """The operators of a folded text that has an `OPERATOR`, sorted; figures with a sign between them are one with
    their operands. ``typed``: its capitals are a way of typing."""
    sums = ["".join(found.split()).rstrip(".,") for found in _SUM.findall(text) if not DATE.match(found)]
    first, *chunks = _SUM.sub(" 0 ", text).split() or ("",)
    found = [sign for chunk in (first, *chunks) for sign in _INSIDE.findall(chunk)]
    alone = (chunk if _ALONE.fullmatch(chunk) else chunk.strip(_MARKS) for chunk in chunks)
    found += [sign for sign in alone if _ALONE.fullmatch(sign)]
    found += [] if typed else [word for word in chunks if word in _WORDS]
    return tuple(sorted([*sums, *(_SAME.get(sign, sign) for sign in found)]))


def other_operators(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    """Whether two texts with operators have others; a dash or a slash in one alone may be a mark of prose."""
    if not a or not b or a == b:
        return False
    first, second = ([sign for sign in own if sign not in _PROSE] for own in (a, b))
    return first != second or (len(first) < len(a) and len(second) < len(b))
