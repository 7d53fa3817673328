"""Labelled pairs and streams from JSONL files, plain or ``.gz``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semkv.errors import DatasetError
from semkv_lab.datasets.base import check_unicode, read_jsonl


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts, and whether one answer serves both. Texts of different groups (pictures) are never compared."""

    a: str
    b: str
    same: bool
    group: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a stream. Requests of one answer may stand in for one another; groups are never compared."""

    text: str
    answer: str
    group: str = ""


def read_pairs(path: Path) -> list[Pair]:
    """Read rows of ``a``, ``b``, ``same`` (0 or 1, or a boolean) and, where there is one, ``group``.

    Raises:
        DatasetError: names file and line.
    """
    pairs = []
    for number, row in _rows(path):
        where = f"{path}, line {number}"
        same = row.get("same")
        if same not in (0, 1):
            raise DatasetError(f"{where}: 'same' must be 0 or 1, not {same!r}")
        pairs.append(Pair(_text(row, "a", where), _text(row, "b", where), bool(same), _label(row, "group", where)))
    return pairs


def read_stream(path: Path) -> list[Asked]:
    """Read rows of ``text`` and ``cluster`` (or ``answer``) in the order of the requests, ``group`` where there is one.

    Raises:
        DatasetError: names file and line.
    """
    asked = []
    for number, row in _rows(path):
        where = f"{path}, line {number}"
        name = "cluster" if "cluster" in row else "answer"
        if name not in row:
            raise DatasetError(f"{where}: 'cluster' is missing: what names the answer that is right")
        asked.append(Asked(_text(row, "text", where), _label(row, name, where), _label(row, "group", where)))
    return asked


def clusters(pairs: Sequence[Pair]) -> dict[tuple[str, str], int]:
    """(group, text) to the number of its cluster: texts that a chain of same pairs connects."""
    parent: dict[tuple[str, str], tuple[str, str]] = {}

    def root(item: tuple[str, str]) -> tuple[str, str]:
        parent.setdefault(item, item)
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for pair in pairs:
        a, b = root((pair.group, pair.a)), root((pair.group, pair.b))
        if pair.same:
            parent[a] = b
    numbers: dict[tuple[str, str], int] = {}
    return {item: numbers.setdefault(root(item), len(numbers)) for item in parent}


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    count = 0
    for count, numbered in enumerate(read_jsonl(path), 1):  # noqa: B007
        yield numbered
    if not count:
        raise DatasetError(f"{path}: no rows")


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise DatasetError(f"{where}: {name!r} must be a text, not {value!r}")
    return check_unicode(value, name, where)


def _label(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row.get(name, "")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DatasetError(f"{where}: {name!r} must be a text or a whole number, not {value!r}")
    return check_unicode(str(value), name, where)
