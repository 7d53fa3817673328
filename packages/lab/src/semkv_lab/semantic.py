"""What the parts of ``semkv bench semantic`` share: data, encoder, caches, and how a cache answers a stream.

The data are in two parts: one fits the calibration and warms up caches that learn, the other asks. Of ``bench/data``
the rows ask that were held out while the guards were tuned; of a file of one's own, half of the clusters.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from semkv.encoders.text import SentenceEncoder
from semkv.errors import ConfigError
from semkv.guards import veto
from semkv.tiers.checking import wilson
from semkv.tiers.policies import Calibration
from semkv_lab import caches
from semkv_lab.caches import Cache, Maker
from semkv_lab.evaluate import fit
from semkv_lab.quality import Asked, Pair, build_corpus, clusters, encode, read_pairs
from semkv_lab.samples import read_jsonl
from semkv_lab.settings import SemanticFlags
from semkv_lab.streams import Stream, halves, zipf

if TYPE_CHECKING:
    from rich.progress import Progress

VERSIONS = ("semkv", "numpy", "sentence-transformers", "torch", "gptcache", "faiss-cpu", "sqlalchemy", "redisvl")
_SETTLED = 500  # requests before which a rate says little
Row = dict[str, Any]


def machine() -> Row:
    """What times depend on, the load of the moment included."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    found: Row = {"cpu": next(names, platform.machine()), "cores": len(os.sched_getaffinity(0)), "versions": {}}
    for name in VERSIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            found["versions"][name] = importlib.metadata.version(name)
    return found | {"python": platform.python_version(), "load_average": os.getloadavg()}


def times(seconds: Sequence[float]) -> Row:
    """Median and 99th percentile, in milliseconds."""
    return {"calls": len(seconds)} | {f"p{q}_ms": round(1e3 * float(np.percentile(seconds, q)), 4) for q in (50, 99)}


def rate(count: int, of: int) -> Row:
    """A share with its 95% interval (Wilson's)."""
    value = round(count / of, 5) if of else None
    return {"count": count, "of": of, "share": value, "interval": [round(end, 5) for end in wilson(count, of)]}


def shown(row: Row, digits: int = 1) -> str:
    """``12.3% [10.1, 14.2]``."""
    if row["share"] is None:
        return "-"
    low, high = (f"{100 * end:.{digits}f}" for end in row["interval"])
    return f"{100 * row['share']:.{digits}f}% [{low}, {high}]"


class Labeled(NamedTuple):
    """A row of ``bench/data``: a trap (two answers) or a paraphrase (one).

    Attributes:
        kind: what differs.
        held_out: not seen while the guards were tuned.
        first: of rows by strangers, whether the guards let it pass at first sight; else None.
    """

    pair: Pair
    kind: str
    held_out: bool
    first: bool | None


def read_rows(path: Path) -> list[Row]:
    """Rows of a file of ``--data``. Raises `ConfigError` where it is not there."""
    if not path.is_file():
        allowed = f"the folder bench/data of a checkout ({path.name} is not there); --parts streams --pairs needs none"
        raise ConfigError("--data", str(path.parent), allowed)
    return [dict(row) for _, row in read_jsonl(path)]


def _labeled(folder: Path) -> list[Labeled]:
    traps, same = (read_rows(folder / name) for name in ("traps.jsonl", "paraphrases.jsonl"))
    found = [Labeled(Pair(r["a"], r["b"], False), r["category"], r["held_out"], r.get("passed_first")) for r in traps]
    return found + [Labeled(Pair(r["a"], r["b"], True), r["kind"], r["held_out"], r.get("kept_first")) for r in same]


class Bench:
    """One run: what is asked and what fits, encoder, calibration and caches.

    Args:
        flags: of the command.
        names: of the caches that can be measured here.
        bars: where progress is drawn.
    """

    def __init__(self, flags: SemanticFlags, names: Sequence[str], bars: Progress) -> None:
        self.flags, self._names, self._bars = flags, names, bars
        self._task, self._steps = bars.add_task("encoding", total=0), 0
        self.encoder = SentenceEncoder(flags.index_encoder, remembered=1 << 20)

    @cached_property
    def data(self) -> list[Labeled]:
        """All traps and paraphrases of ``--data``."""
        return _labeled(self.flags.data)

    @cached_property
    def halves(self) -> tuple[list[Pair], list[Pair]]:
        """What fits, and what asks."""
        flags = self.flags
        if flags.pairs is None:
            fitting, asking = ([r.pair for r in self.data if r.held_out is held] for held in (False, True))
        else:
            fitting, asking = halves(read_pairs(flags.pairs), flags.seed)[:: -1 if flags.swap_halves else 1]
        return fitting if flags.fit is None else read_pairs(flags.fit), asking

    @cached_property
    def calibration(self) -> Calibration:
        """Fitted where a policy asks for it."""
        items = list(clusters(self.halves[0]))
        self.know(text for _, text in items)
        corpus = build_corpus(items, self.encoder, veto)
        fingerprint, precision = self.encoder.fingerprint, self.flags.precision
        return fit(self.halves[0], corpus, fingerprint, precision=precision).calibration

    def begin(self, name: str) -> None:
        """A new bar."""
        self._bars.update(self._task, visible=False)
        self._task, self._steps = self._bars.add_task(name, total=0), 0

    def more(self, steps: int) -> None:
        """The bar has so much more to go."""
        self._steps += steps
        self._bars.update(self._task, total=self._steps)

    def step(self, steps: int = 1) -> None:
        self._bars.advance(self._task, steps)

    def know(self, texts: Iterable[str]) -> None:
        """Encode texts, so that no lookup waits for the encoder."""
        distinct = list(dict.fromkeys(texts))
        self.more(len(distinct))
        encode(distinct, self.encoder, self.step)

    def makers(self, seed: int = 0) -> list[Maker]:
        """Makes each cache and setting, empty."""
        prior = self.calibration if {"calibrated", "bounded"} & {*self._names} else None
        return caches.makers(self._names, self.encoder, prior, self.flags, seed)

    def warm(self, cache: Cache) -> None:
        """A cache that learns answers a stream of the fitting part, in a group of its own."""
        if cache.learns:
            stream = [replace(asked, group="warm-up") for asked in zipf(self.halves[0], 0, self.flags.requests)]
            self.more(len(stream))
            play(cache, stream, self.step)


@dataclass
class Played:
    """What a cache made of a stream.

    ``outcomes`` are (right answer, whether a wrong one was given); ``worst`` is the highest share of wrong answers at
    any time after the first 500 requests, 0 for a shorter stream.
    """

    hits: int = 0
    wrong: int = 0
    checks: int = 0
    worst: float = 0.0
    seconds: list[float] = field(default_factory=list)
    outcomes: list[tuple[str, bool]] = field(default_factory=list)

    def to_json(self) -> Row:
        counts = {"requests": len(self.outcomes), "hits": self.hits, "wrong": self.wrong, "checks": self.checks}
        return counts | {"worst_at_any_time": round(self.worst, 6)}


def play(cache: Cache, stream: Stream, step: Callable[[], None] = lambda: None) -> Played:
    """Send every request: a hit is judged by the stream's answer, a miss is stored with it."""
    found = Played()
    for asked in stream:
        start = time.perf_counter()
        answer = cache.lookup(asked)
        found.seconds.append(time.perf_counter() - start)
        wrong = answer is not None and answer != asked.answer
        if answer is None:
            cache.store(asked)
        else:
            found.hits, found.wrong = found.hits + 1, found.wrong + wrong
            found.checks += cache.hit(asked, right=not wrong)
        found.outcomes.append((f"{asked.group} {asked.answer}", wrong))
        if len(found.outcomes) >= _SETTLED:
            found.worst = max(found.worst, found.wrong / len(found.outcomes))
        step()
    return found


def ask_pair(cache: Cache, pair: Pair, group: str, history: tuple[tuple[str, str], ...] = ()) -> bool:
    """Whether b hits where a alone is stored; a cache that learns goes on learning."""
    play(cache, [Asked(pair.a, pair.a, group, history)])
    return bool(play(cache, [Asked(pair.b, pair.a if pair.same else pair.b, group, history)]).hits)
