"""Benchmarks by others: their data, adapter and score, for every cache of the bench.

``pip install fow-cache`` has questions and conversations, traps among them (https://github.com/Maby0/fow-cache). Its
`evaluate` asks each pair in an empty cache and counts what is served. A cache that learns from answers would have to be
told them, so only caches that do not learn are measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from semkv.errors import DatasetError
from semkv_lab.caches import Cache
from semkv_lab.console import table
from semkv_lab.labels import Asked
from semkv_lab.semantic import Bench, Found, Row, rate, share_of, times

Said = Mapping[str, str]
"""A message of the board: role and content."""
Side = str | Sequence[Said]
"""A question, or a conversation whose last message asks."""

DATASETS = ("questions", "conversations")


class Asking:
    """What the board calls: whether one side's answer is served to the other, in an empty cache."""

    def __init__(self, cache: Cache, name: str) -> None:
        self._cache = cache
        self._name = name
        self._pairs = 0
        self.seconds: dict[str, list[float]] = {"hit": [], "miss": []}

    def __call__(self, stored: Side, asked: Side) -> bool:
        self._pairs += 1
        group = f"{self._name} {self._pairs}"
        first = _asked(stored, group)
        self._cache.lookup(first)
        self._cache.store(first)
        begin = time.perf_counter()
        answer = self._cache.lookup(_asked(asked, group))
        took = time.perf_counter() - begin
        self.seconds["miss" if answer is None else "hit"].append(took)
        return answer is not None


def fow_cache(bench: Bench) -> Found:
    """Hits, wrong answers, and times of lookups, by cache and data set. Raises `DatasetError` where it is not
    installed."""
    try:
        import fow_cache as board
    except ImportError as error:
        raise DatasetError("--board fow-cache needs: pip install fow-cache") from error
    found: Row = {"version": board.__version__}
    rows = []
    for make in bench.makers:
        for name in DATASETS:
            cache = make(0)
            if cache.learns:
                cache.close()
                bench.absent.append(f"{cache.name}: not measured on a board, since it learns")
                break
            asking = Asking(cache, name)
            report = board.evaluate(asking, dataset=name, threshold=0.5)
            cache.close()
            row = _figures(report) | {kind: times(s) for kind, s in asking.seconds.items() if s}
            found.setdefault(cache.name, {"settings": cache.settings})[name] = row
            rows.append(_line(cache.name, name, row))
    title = f"fow-cache {board.__version__}, by its own score; 95% intervals (Wilson)"
    names = ("cache", "pairs", "served", "traps served", "hit", "miss")
    return found, [table(title, names, rows)]


def _figures(report: Any) -> Row:
    """What was served of what one answer serves, and of what it does not; and of each kind."""
    served = {
        same: [row.served for row in report.results if row.same_answer is same]
        for same in (True, False)
    }
    kinds: dict[str, list[bool]] = {}
    for row in report.results:
        kinds.setdefault(row.group, []).append(row.served)
    return {
        "served": rate(sum(served[True]), len(served[True])),
        "traps served": rate(sum(served[False]), len(served[False])),
        "kinds": {kind: rate(sum(row), len(row)) for kind, row in kinds.items()},
    }


def _line(
    cache: str,
    name: str,
    row: Row,
) -> tuple[str, ...]:
    spent = (f"{row[kind]['p50_ms']:.1f} ms" if kind in row else "" for kind in ("hit", "miss"))
    return (cache, name, share_of(row["served"]), share_of(row["traps served"]), *spent)


def _asked(side: Side, group: str) -> Asked:
    if isinstance(side, str):
        return Asked(
            text=side,
            answer="stored",
            group=group,
        )
    history = tuple((said["role"], said["content"]) for said in side[:-1])
    return Asked(
        text=side[-1]["content"],
        answer="stored",
        group=group,
        history=history,
    )


BOARDS: Mapping[str, Callable[[Bench], Found]] = {"fow-cache": fow_cache}
"""By the name of ``--board``."""
