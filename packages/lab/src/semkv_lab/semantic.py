"""``semkv bench semantic``: pairs, traps, streams, last turns, images and the encoder.

The data are in two parts: one fits the calibration and warms up caches that learn, the other asks. Of ``bench/data``
the rows ask that were held out while the guards were tuned; of a file of one's own, half of the clusters.
"""

from __future__ import annotations

import json
import os
import platform
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from rich.console import Console

from semkv import guards, keys
from semkv.cache import SemanticCache
from semkv.config import CacheConfig
from semkv.encoders.text import SentenceEncoder, few_threads, load_sentence_transformer, resolve_model
from semkv.errors import ConfigError
from semkv.guards import no_veto, veto
from semkv.presets import get_preset
from semkv.tiers.checking import wilson
from semkv.tiers.policies import Calibrated, Calibration, Decider, FixedThreshold
from semkv.types import EmbeddingLayer, MediaSegment, Namespace, Request, TextSegment
from semkv_lab import caches
from semkv_lab.caches import Cache, Maker
from semkv_lab.console import interval, percent, progress_bar, table, write_json
from semkv_lab.evaluate import figure, fit
from semkv_lab.metrics import Estimate, share
from semkv_lab.quality import (
    SETTLED,
    TIER,
    Asked,
    Pair,
    Replay,
    build_corpus,
    clusters,
    encode,
    pair_curve,
    read_pairs,
    read_stream,
)
from semkv_lab.samples import read_jsonl
from semkv_lab.settings import SemanticFlags
from semkv_lab.streams import KINDS, Stream, halves, zipf
from semkv_lab.sweep import version

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from semkv_lab import scenes

_T = TypeVar("_T")
VERSIONS = ("semkv", "numpy", "sentence-transformers", "torch", "gptcache", "faiss-cpu", "sqlalchemy", "redisvl")
Row = dict[str, Any]


def machine() -> Row:
    """What times depend on, the load of the moment included."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(names, platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {name: installed for name in VERSIONS if (installed := version(name))},
        "python": platform.python_version(),
        "load_average": os.getloadavg(),
    }


def times(seconds: Sequence[float]) -> Row:
    """Median and 99th percentile, in milliseconds."""
    return {"calls": len(seconds)} | {f"p{q}_ms": round(1e3 * float(np.percentile(seconds, q)), 4) for q in (50, 99)}


def timed(call: Callable[[], _T]) -> tuple[_T, float]:
    """What a call gives, and its seconds."""
    start = time.perf_counter()
    return call(), time.perf_counter() - start


def rate(count: int, of: int) -> Row:
    """A share with its 95% interval (Wilson's)."""
    value = round(count / of, 5) if of else None
    return {"count": count, "of": of, "share": value, "interval": [round(end, 5) for end in wilson(count, of)]}


def shown(row: Row, digits: int = 1) -> str:
    """``12.3% [10.1, 14.2]``."""
    return interval(Estimate(1, row["share"], *row["interval"]), digits, "%", factor=100)


class Labeled(NamedTuple):
    """A row of ``bench/data``: a trap (two answers) or a paraphrase (one), which differ in what ``kind`` says.

    Rows that are ``held_out`` were not seen while the guards were tuned; ``first`` says of rows by strangers whether
    the guards let them pass at first sight, and is None of others.
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


class Bench:
    """One run: what is asked and what fits, encoder, calibration, and the caches that can be measured here."""

    def __init__(self, flags: SemanticFlags, names: Sequence[str], bars: Progress) -> None:
        self.flags, self._names, self._bars = flags, names, bars
        self.begin("encoding")
        self.encoder = SentenceEncoder(flags.index_encoder, remembered=1 << 20)

    @cached_property
    def data(self) -> list[Labeled]:
        """All traps and paraphrases of ``--data``."""
        files = (("traps.jsonl", False, "category", "passed_first"), ("paraphrases.jsonl", True, "kind", "kept_first"))
        return [
            Labeled(Pair(row["a"], row["b"], same), row[kind], row["held_out"], row.get(first))
            for name, same, kind, first in files
            for row in read_rows(self.flags.data / name)
        ]

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
        for task in self._bars.task_ids:
            self._bars.update(task, visible=False)
        self._task, self._steps = self._bars.add_task(name, total=0), 0

    def more(self, steps: int) -> None:
        """The bar has so much more to go."""
        self._steps += steps
        self._bars.update(self._task, total=self._steps)

    def track(self, items: Sequence[_T]) -> Iterator[_T]:
        """The items, one by one, each a step of the bar."""
        self.more(len(items))
        for item in items:
            yield item
            self._bars.advance(self._task)

    def know(self, texts: Iterable[str]) -> None:
        """Encode texts, so that no lookup waits for the encoder."""
        distinct = list(dict.fromkeys(texts))
        self.more(len(distinct))
        encode(distinct, self.encoder, partial(self._bars.advance, self._task))

    def makers(self, seed: int = 0) -> list[Maker]:
        """Makes each cache and setting, empty."""
        prior = self.calibration if {"calibrated", "bounded"} & {*self._names} else None
        return caches.makers(self._names, self.encoder, prior, self.flags, seed)

    def warm(self, cache: Cache) -> None:
        """A cache that learns answers a stream of the fitting part, in a group of its own."""
        if cache.learns:
            stream = [replace(asked, group="warm-up") for asked in zipf(self.halves[0], 0, self.flags.requests)]
            play(cache, self.track(stream))


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


def play(cache: Cache, stream: Iterable[Asked]) -> Played:
    """Send every request: a hit is judged by the stream's answer, a miss is stored with it."""
    found = Played()
    for asked in stream:
        answer, seconds = timed(lambda asked=asked: cache.lookup(asked))  # type: ignore[misc]
        found.seconds.append(seconds)
        wrong = answer is not None and answer != asked.answer
        if answer is None:
            cache.store(asked)
        else:
            found.hits, found.wrong = found.hits + 1, found.wrong + wrong
            found.checks += cache.hit(asked, right=not wrong)
        found.outcomes.append((f"{asked.group} {asked.answer}", wrong))
        if len(found.outcomes) >= SETTLED:
            found.worst = max(found.worst, found.wrong / len(found.outcomes))
    return found


def ask_pair(cache: Cache, pair: Pair, group: str, history: tuple[tuple[str, str], ...] = ()) -> bool:
    """Whether b hits where a alone is stored; a cache that learns goes on learning."""
    play(cache, [Asked(pair.a, pair.a, group, history)])
    return bool(play(cache, [Asked(pair.b, pair.a if pair.same else pair.b, group, history)]).hits)


# -- the parts ------------------------------------------------------------

Found = tuple[Row, list["Table"]]
SHARES = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)  # of the pairs, at which precision is shown
STAY = 0.8  # of pairs that are the same: where caches are compared by those that are not
ACCEPTED = 0.85  # a cosine that a threshold may well accept
# The last cosine: exact hits only. Dense where few answers are wrong: curves are straight in between.
COSINES = (*np.arange(0.7, 0.9, 0.02).round(2).tolist(), *np.arange(0.9, 1.0, 0.0025).round(4).tolist(), 1.01)
LIMITS = np.geomspace(0.0005, 0.7, 30).round(5).tolist()


def run(flags: SemanticFlags, screen: Console) -> Row:
    """Measure, print a table for each part, and return everything as JSON values.

    Raises:
        ConfigError, DatasetError: a flag or a file is at fault.
    """
    absent = {name: why for name in flags.caches if (why := caches.missing(name, flags.redis_url))}
    given = {name: value for name, value in asdict(flags).items() if name not in ("out", "plot", "redis_url")}
    found: Row = {"machine": machine(), "settings": json.loads(json.dumps(given, default=lambda path: path.name))}
    drawn = Console(stderr=True)
    with progress_bar(drawn, transient=True, disable=not drawn.is_terminal) as bars:
        bench = Bench(flags, [name for name in flags.caches if name not in absent], bars)
        found |= {"encoder": bench.encoder.fingerprint, "not measured": list(absent.values())}
        for name in flags.parts:
            bench.begin(name)
            found[name], tables = PARTS[name](bench)
            for made in tables:
                screen.print(made)
            if flags.out is not None:
                write_json(flags.out, found)
    for line in absent.values():
        screen.print(line, soft_wrap=True, highlight=False)
    return found


# -- pairs and traps ------------------------------------------------------------


def pairs_part(bench: Bench) -> Found:
    """Labeled pairs, each by itself: the first text is stored, the second asks."""
    return _pairs(bench, bench.halves[1], "pairs")


def traps_part(bench: Bench) -> Found:
    """The same for held-out traps and paraphrases by strangers; and the guards by themselves, on all of both."""
    bench.know(text for row in bench.data for text in (row.pair.a, row.pair.b))
    strangers = [row.pair for row in bench.data if row.held_out and row.first is not None]
    found, tables = _pairs(bench, strangers, "held-out traps and paraphrases by strangers")
    alone = _guards(bench)
    names = ("all", "held out", "at first sight")
    rows = [(name, *(shown(row[which]) for which in names)) for name, row in alone.items() if "held out" in row]
    rows.append(("pairs in other languages", shown(alone["other languages"]), "", ""))
    return {"caches": found, "guards": alone}, [*tables, table("no veto by the guards", ("", *names), rows)]


def _pairs(bench: Bench, asking: Sequence[Pair], what: str) -> Found:
    """Hits, precision at hit rate and the area under that curve (P-CHR AUC), by each cache's own confidence."""
    pairs = list(asking)
    Random(bench.flags.seed).shuffle(pairs)  # noqa: S311
    bench.know(text for pair in pairs for text in (pair.a, pair.b))
    sides = {same: [n for n, pair in enumerate(pairs) if pair.same is same] for same in (True, False)}
    found, rows = {}, []
    for make in bench.makers():
        with closing(make()) as cache:
            bench.warm(cache)
            hits = [ask_pair(cache, pair, f"{number}") for number, pair in enumerate(bench.track(pairs))]
            trust = [cache.confidence(pair.a, pair.b) for pair in pairs]
        curve, area = pair_curve([(-value, pair.same) for value, pair in zip(trust, pairs, strict=True)])
        of = {same: rate(sum(hits[n] for n in side), len(side)) for same, side in sides.items()}
        least = np.quantile([trust[n] for n in sides[True]] or [2.0], 1 - STAY, method="lower")
        at = rate(sum(bool(trust[n] >= least) for n in sides[False]), len(sides[False]))
        precision = rate(of[True]["count"], sum(hits))
        found[cache.name] = {
            "settings": cache.settings, "hit_rate": rate(sum(hits), len(pairs)), "precision": precision,
            "same that hit": of[True], "different that hit": of[False], f"different where {STAY:.0%} hit": at,
            "precision_at_hit_rate": {str(s): round(next(p for r, p in curve if r >= s), 4) for s in SHARES},
            "p_chr_auc": round(area, 4),
        }  # fmt: skip
        cells = (f"{sum(hits) / len(pairs):.1%}", *map(shown, (precision, of[True], of[False])), f"{area:.3f}")
        rows.append((cache.name, *cells))
    title = f"{what}: {len(pairs)}, {len(sides[True])} of them the same; 95% intervals (Wilson)"
    names = ("cache", "hit rate", "precision at it", "same that hit", "different that hit", "P-CHR AUC")
    return found, [table(title, names, rows)]


def _guards(bench: Bench) -> Row:
    """Traps without a veto, paraphrases without one that a threshold may accept, and what a new pair costs."""
    cosine = {row: float(np.dot(*bench.encoder.encode([row.pair.a, row.pair.b]))) for row in bench.data}
    near = [row for row in bench.data if row.pair.same and cosine[row] >= ACCEPTED]
    sides = {"traps": [row for row in bench.data if not row.pair.same], f"paraphrases, cosine {ACCEPTED} or more": near}
    free = {row: veto(row.pair.a, row.pair.b) is None for row in bench.data}
    found: Row = {}
    for name, side in sides.items():
        held, first = [row for row in side if row.held_out], [row for row in side if row.first is not None]
        found[name] = {
            which: rate(sum(free[r] for r in of), len(of)) for which, of in (("all", side), ("held out", held))
        }
        found[name]["at first sight"] = rate(sum(bool(row.first) for row in first), len(first))
        every, passed = (Counter(row.kind for row in of) for of in (side, [row for row in side if free[row]]))
        found[name]["by kind"] = {kind: f"{passed[kind]} of {count}" for kind, count in every.items()}
    foreign = read_rows(bench.flags.data / "other_languages.jsonl")
    found["other languages"] = rate(sum(veto(row["a"], row["b"]) is None for row in foreign), len(foreign))
    seconds = []
    for row in near:
        for cache in guards._CACHES[:2]:  # texts and pairs are new; their words stay known, as they do in use
            cache.cache_clear()
        a, b = row.pair.a, row.pair.b
        seconds.append(timed(lambda a=a, b=b: (veto(a, b), guards.wording(a, b)))[1])  # type: ignore[misc]
    return found | {"a new pair": times(seconds)}


# -- streams ------------------------------------------------------------


def streams_part(bench: Bench) -> Found:
    """Streams of each kind, or the user's own, through every cache."""
    flags, tables, found = bench.flags, [], {}
    for kind in ["own"] if flags.stream else flags.kinds:
        if flags.stream:
            streams = [read_stream(flags.stream)]
        else:
            streams = [KINDS[kind](bench.halves[1], flags.seed + n, flags.requests) for n in range(flags.seeds)]
        bench.know(asked.text for stream in streams for asked in stream)
        static = Sweep(bench, streams)
        rows = dict(_through(bench, streams, number, static) for number in range(len(bench.makers())))
        found[kind] = {"requests": static.sizes, "caches": rows, "thresholds": static.rows}
        if flags.plot is not None:
            static.draw(kind, rows, flags.plot / f"{kind}.png")
        title = f"stream {kind}: {len(streams)} of {static.sizes[0]} requests; 95% intervals by bootstrap over answers"
        names = ("cache", "hit rate", "wrong per request", "worst", "checks", "lookup p50*", "p99*", "best static")
        tables.append(table(title, names, [_stream_cells(name, row) for name, row in rows.items()]))
    return found, tables


def _through(bench: Bench, streams: Sequence[Stream], number: int, static: Sweep) -> tuple[str, Row]:
    """Name and figures of one cache and setting on every stream, empty at the start of each."""
    played = []
    for n, stream in enumerate(streams):
        with closing(bench.makers(bench.flags.seed + n)[number]()) as cache:
            played.append(play(cache, bench.track(stream)))
    wrong = share([(f"{n} {name}", bad) for n, one in enumerate(played) for name, bad in one.outcomes])
    shares = [one.wrong / size for one, size in zip(played, static.sizes, strict=True)]
    bound = cache.settings.get("max error rate")
    best = [static.best(n, shares[n] if bound is None else bound) for n in range(len(streams))]
    return cache.name, {
        "settings": cache.settings, "streams": [one.to_json() for one in played],
        "hit_rate": round(sum(one.hits for one in played) / sum(static.sizes), 5),
        "wrong_per_request": {"share": wrong.value, "interval": [wrong.low, wrong.high]},
        "worst": round(max(shares), 6), "held": None if bound is None else sum(one <= bound for one in shares),
        "checks": round(sum(one.checks for one in played) / sum(static.sizes), 5),
        "best_static_hit_rate": round(sum(best) / sum(static.sizes), 5), "best_static_hits": best,
        "lookup": times([second for one in played for second in one.seconds]),
    }  # fmt: skip


def _stream_cells(name: str, row: Row) -> tuple[str, ...]:
    hits, checks, best = (f"{row[key]:.1%}" for key in ("hit_rate", "checks", "best_static_hit_rate"))
    return (name, hits, shown(row["wrong_per_request"], 2), f"{row['worst']:.2%}", checks, *_ms(row), best)


def _ms(row: Row) -> tuple[str, str]:
    return f"{row['lookup']['p50_ms']:.2f} ms", f"{row['lookup']['p99_ms']:.2f} ms"


class Sweep:
    """Thresholds over streams, by replay: of the cosine by itself; where it is drawn, of guarded policies, too.

    ``rows`` has [threshold, [hits, wrong] of each stream] by curve.
    """

    def __init__(self, bench: Bench, streams: Sequence[Stream]) -> None:
        items = [(asked.group, asked.text) for stream in streams for asked in stream]
        corpus = build_corpus(items, bench.encoder, no_veto)
        self.sizes = [len(stream) for stream in streams]

        def swept(guard: guards.Guard, make: Callable[[float], Decider], values: Sequence[float]) -> list[Any]:
            replays = [Replay(stream, corpus.with_guard(guard)) for stream in streams]
            return [[value, *([o.hits, o.wrong] for o in (r.play(make(value)) for r in replays))] for value in values]

        def fixed(value: float) -> Decider:
            return FixedThreshold({TIER: value})

        def calibrated(limit: float) -> Decider:
            return Calibrated(replace(bench.calibration, limit=limit), frozenset([TIER]), fixed(1.0))

        self.rows = {"cosine": swept(no_veto, fixed, COSINES)}
        if bench.flags.plot is not None:
            self.rows["cosine and guards"] = swept(veto, fixed, COSINES)
            self.rows["calibrated and guards"] = swept(veto, calibrated, LIMITS)

    def best(self, stream: int, most: float) -> int:
        """Most hits of a cosine threshold with at most this share of wrong answers, known only afterwards."""
        outcomes = [row[1 + stream] for row in self.rows["cosine"]]
        return max((hits for hits, wrong in outcomes if wrong <= most * self.sizes[stream]), default=0)

    def draw(self, kind: str, rows: Row, path: Path) -> None:
        """Hits against wrong answers: a curve for each list of thresholds, a point for each cache."""
        with figure(path, "wrong answers, % of requests", "hits, % of requests") as axes:
            for name, values in self.rows.items():
                counts = np.array([row[1:] for row in values]) / np.array(self.sizes)[:, None]
                points = sorted((wrong, hits) for hits, wrong in 100 * counts.mean(axis=1))
                axes.plot(*np.array(points).T, "o-", markersize=3, label=name)
            for name, row in rows.items():
                axes.plot(100 * row["wrong_per_request"]["share"], 100 * row["hit_rate"], "*", markersize=9, label=name)
            axes.set_title(kind)
            axes.legend(frameon=False, fontsize=7)


# -- last turns ------------------------------------------------------------

_CHAT = (("user", "Tell me about Lisbon."), ("assistant", "It is a city by the sea. Do you want to know more?"))
_DOCUMENT = "The lease of the flat in Elm Street begins in May. " + "The tenant pays the rent on the first day. " * 40
FORMS: dict[str, tuple[tuple[str, str], ...]] = {
    "single turn": (),
    "second turn": _CHAT,
    "turn 21": _CHAT * 20,
    "document, question": (("user", _DOCUMENT),),
    "system prompt, document, question": (("system", "Be brief."), ("user", _DOCUMENT)),
}
CONVERSATIONS = 300


def turns_part(bench: Bench) -> Found:
    """Last turns after an equal history, pair by pair; then after 300 histories, none of which answers for another.

    semkv gets the messages as its gateway does. The other caches get the last message, GPTCache's default.
    """
    pairs = [Pair(row["a"], row["b"], row["same"]) for row in read_rows(bench.flags.data / "last_turns.jsonl")]
    last = ("What about the second one?", "How about the second one?")
    bench.know([*(text for pair in pairs for text in (pair.a, pair.b)), *last])
    about = [(("user", f"Describe house {n}."), ("assistant", "Done.")) for n in range(CONVERSATIONS)]
    found, rows = {}, []
    for make in bench.makers():
        with closing(make()) as cache:
            bench.warm(cache)
            hits: dict[bool, list[tuple[str, bool]]] = {True: [], False: []}
            forms: Row = {form: {"paraphrases": 0, "traps": 0} for form in FORMS}
            for form, history in FORMS.items():
                for number, pair in enumerate(bench.track(pairs)):  # each in a group of its own
                    hit = ask_pair(cache, pair, f"{form} {number}", history)
                    forms[form]["paraphrases" if pair.same else "traps"] += hit
                    hits[pair.same].append((f"{number}", hit))
            streams = [[Asked(text, f"{n}", "houses", h) for n, h in enumerate(about)] for text in last]
            equal, reworded = (play(cache, bench.track(stream)) for stream in streams)
        found[cache.name] = {
            "settings": cache.settings, "forms": forms, "equal last turns": equal.to_json(),
            "reworded last turns": reworded.to_json(),
        }  # fmt: skip
        others = f"{equal.wrong + reworded.wrong} of {2 * CONVERSATIONS}"
        rows.append((cache.name, percent(share(hits[True])), percent(share(hits[False])), others))
    title = f"last turns: {len(pairs)} pairs after {len(FORMS)} histories; 95% intervals by bootstrap over pairs"
    return found, [table(title, ("cache", "paraphrases that hit", "traps that hit", "another conversation's"), rows)]


# -- images ------------------------------------------------------------


def images_part(bench: Bench) -> Found:
    """Generated scenes: the comparison of pixels by itself; then the whole cache, with guards and without."""
    from semkv.encoders.vision import read_picture
    from semkv.guards.pictures import LIMIT, difference
    from semkv_lab import scenes

    made = scenes.pairs(bench.flags.scenes, bench.flags.seed)

    def differ(pair: scenes.Pair) -> float:
        return difference(read_picture(pair.donor), read_picture(pair.request))

    found_by, seconds = zip(*(timed(partial(differ, pair)) for pair in bench.track(made)), strict=True)
    found = {"pixels": _image_shares(made, [by < LIMIT for by in found_by]) | {"lookup": times(seconds)}}
    for name, guarded in (("semkv", True), ("semkv without guards", False)):
        found[name] = _image_cache(bench, made, guarded)
    rows = [(name, shown(row["copies"]["all"]), shown(row["changes"]["all"]), *_ms(row)) for name, row in found.items()]
    title = f"images: {bench.flags.scenes} scenes of each kind; 95% intervals (Wilson); lookups with the encoder"
    return found, [table(title, ("", "copies that hit", "changes that hit", "p50", "p99"), rows)]


def _image_cache(bench: Bench, made: Sequence[scenes.Pair], guarded: bool) -> Row:
    """All first images are in the cache. A copy must hit with its own scene's image; a change must hit none."""
    preset = get_preset("minigqa")
    layer = next(text for text in preset.embedding_layers if text.startswith("vision"))
    name, dim, threshold = layer.split(":")
    donors = list(dict.fromkeys(pair.donor for pair in made))
    hits, seconds = [], []
    with tempfile.TemporaryDirectory() as root:
        config = CacheConfig(
            Path(root) / "cache", embedding_layers=(EmbeddingLayer(name, int(dim), float(threshold)),),
            embedding_hook="vision", vision_encoder=preset.vision_encoder, semantic=False, guards=guarded,
        )  # fmt: skip

        def ask(data: bytes) -> Request:
            file = Path(root) / keys.media_id(data)
            file.write_bytes(data)
            return Request("", Namespace(), (MediaSegment(file.name, file), TextSegment("What does the picture show?")))

        with SemanticCache(config) as cache:
            for data in bench.track(donors):
                cache.add_observation(cache.try_reuse(ask(data)), keys.media_id(data))
            for pair in bench.track(made):
                report = cache.try_reuse(ask(pair.request))
                hits.append(report.hit and (report.donor_response == keys.media_id(pair.donor) or not pair.same))
                seconds.append(report.lookup_s)
            vetoes = dict(cache.stats().vetoes)
    return _image_shares(made, hits) | {
        "layer": layer,
        "images": len(donors),
        "vetoes": vetoes,
        "lookup": times(seconds),
    }


def _image_shares(made: Sequence[scenes.Pair], hits: Sequence[bool]) -> Row:
    """Shares of copies and of changes that hit, by what was done and by kind of scene."""
    groups: dict[str, dict[str, list[bool]]] = {name: defaultdict(list) for name in ("copies", "changes")}
    for pair, hit in zip(made, hits, strict=True):
        for group in ("all", pair.what, f"of {pair.kind}", f"{pair.what} of {pair.kind}"):
            groups["copies" if pair.same else "changes"][group].append(hit)
    return {name: {group: rate(sum(v), len(v)) for group, v in of.items()} for name, of in groups.items()}


# -- the encoder ------------------------------------------------------------


def encoder_part(bench: Bench, rounds: int = 110) -> Found:
    """One new short text, and 16, with semkv's encoder and with sentence-transformers on one thread."""
    name = bench.flags.index_encoder
    theirs = load_sentence_transformer("--index-encoder", resolve_model(name))

    def plain(batch: list[str]) -> object:
        with few_threads(1):
            return theirs.encode(batch, normalize_embeddings=True, show_progress_bar=False)

    found: Row = {}
    for label, encoded in (("semkv", SentenceEncoder(name).encode), ("sentence-transformers", plain)):
        found[label] = {}
        for size in (1, 16):
            seconds = []
            for n in bench.track(range(rounds)):
                batch = [f"What color is the car number {size}{n}{k} near the house?" for k in range(size)]
                seconds.append(timed(partial(encoded, batch))[1])
            found[label][f"{size} texts"] = times(seconds[10:])  # the first warm up
    cells = {
        label: [f"{row[q]:.1f} ms" for row in of.values() for q in ("p50_ms", "p99_ms")] for label, of in found.items()
    }
    rows = [(label, *row) for label, row in cells.items()]
    return found, [table("encoder", ("", "1 text, p50", "p99", "16 texts, p50", "p99"), rows)]


PARTS: dict[str, Callable[[Bench], Found]] = {
    part.__name__.removesuffix("_part"): part
    for part in (pairs_part, traps_part, streams_part, turns_part, images_part, encoder_part)
}
