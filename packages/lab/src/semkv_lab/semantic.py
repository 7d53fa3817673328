"""How far approximate hits can be trusted: ``semkv calibrate``, ``eval-pairs``, ``eval-stream`` and ``bench semantic``.

None needs an engine: the data say which requests have the same answer. The data of the bench are in two parts: one fits
the calibration and warms up caches that learn, the other asks. Of ``bench/data`` the rows ask that were held out while
the guards were tuned; of a file of one's own, half of the clusters.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console

from semkv import keys
from semkv.cache import SemanticCache
from semkv.config import CacheConfig, PolicyConfig, get_preset
from semkv.encoders.text import SentenceEncoder, TextEncoder
from semkv.errors import DatasetError
from semkv.tiers.checking import wilson
from semkv.types import EmbeddingLayer, MediaSegment, Namespace, PolicyName, Request, TextSegment
from semkv_guards import veto
from semkv_lab import caches
from semkv_lab.caches import Cache, Maker, SemKV, ask_pair, pair_area, play
from semkv_lab.console import environment, percent, shown, table, version, write_json, writing
from semkv_lab.labels import KINDS, SEED, Asked, Pair, Stream, fit, halves, know, neighbors, zipf
from semkv_lab.metrics import Estimate, share
from semkv_lab.samples import read_jsonl, read_rows
from semkv_lab.settings import CACHES, SemanticFlags, refuse_judge

if TYPE_CHECKING:
    from rich.table import Table

    from semkv_lab import scenes

DATA = Path("bench/data")  # of the checkout in which the bench runs
SCENES = 7  # of each kind, for images
VERSIONS = ("numpy", "sentence-transformers", "gptcache", "faiss-cpu", "redisvl")
Row = dict[str, Any]
Found = tuple[Row, list["Table"]]

# -- one policy on a file ------------------------------------------------------------

_REMEMBERED = 1 << 20  # texts whose vectors an encoder keeps


def calibrate(
    path: Path,
    out: Path,
    encoder_name: str,
    precision: float,
) -> Row:
    """Fit a calibration from a file of pairs, and write it. Raises `ConfigError` and `DatasetError`."""
    pairs = read_rows(path, Pair)
    encoder = SentenceEncoder(encoder_name, remembered=_REMEMBERED)
    texts = {text for pair in pairs for text in (pair.a, pair.b)}
    know(texts, encoder)
    fitted = fit(pairs, encoder, precision=precision)
    curve = fitted.calibration
    with writing("--out", out):
        curve.save(out)
    return {
        "pairs": len(pairs),
        "same": sum(pair.same for pair in pairs),
        "texts": len(texts),
        "fitted_from": "lookups among the texts" if fitted.simulated else "the pairs as they are",
        "lookups": len(fitted.lookups),
        "precision": precision,
        "limit": curve.limit,
        "least_cosine": round(curve.least, 4),
        "weights": {"bias": curve.bias, **curve.weights},
    }


def eval_pairs(path: Path, flags: PolicyConfig) -> Row:
    """What a policy makes of pairs that it sees one by one. Raises `ConfigError` and `DatasetError`."""
    pairs = read_rows(path, Pair)
    with closing(_cache(flags, (text for pair in pairs for text in (pair.a, pair.b)))) as cache:
        figures = _pair_figures(cache, pairs)
    vetoed = sum(veto(pair.a, pair.b) is not None for pair in pairs) if flags.guards else 0
    return {
        **_header(flags),
        "pairs": len(pairs),
        "vetoed": vetoed,
        **figures,
    }


def eval_stream(path: Path, flags: PolicyConfig) -> Row:
    """Play a stream through a cache. Raises `ConfigError` and `DatasetError`."""
    stream = read_rows(path, Asked)
    with closing(_cache(flags, (asked.text for asked in stream))) as cache:
        played = play(cache, stream)
    size = len(stream)
    return {
        **_header(flags),
        "verify_rate": flags.checked_share,
        **played.to_json(),
        "exact_hits": played.hits - cache.approximate,
        "approximate_hits": cache.approximate,
        "wrong_exact_hits": played.wrong - cache.wrong_approximate,
        "hit_rate": rate(played.hits, size),
        "wrong_per_request": rate(played.wrong, size),
        "wrong_per_approximate_hit": rate(cache.wrong_approximate, cache.approximate),
    }


def _header(flags: PolicyConfig) -> Row:
    """What a result says of the flags."""
    shown: Row = {
        "policy": flags.policy,
        "encoder": flags.index_encoder,
        "guards": flags.guards,
    }
    if flags.policy is PolicyName.FIXED:
        shown["similarity_threshold"] = flags.similarity_threshold
    if flags.policy is PolicyName.BOUNDED:
        shown["max_error_rate"] = flags.max_error_rate
    return {**shown, "calibration": flags.calibration.name if flags.calibration else None}


def _cache(flags: PolicyConfig, texts: Iterable[str]) -> SemKV:
    """The cache under a policy, with an encoder that knows the texts."""
    refuse_judge(flags)
    encoder = SentenceEncoder(flags.index_encoder, remembered=_REMEMBERED)
    know(texts, encoder)
    return SemKV(encoder, flags, seed=0)


# -- the bench ------------------------------------------------------------


class Labeled(NamedTuple):
    """A row of ``bench/data``: a trap (two answers) or a paraphrase (one), which differ in what ``kind`` says.

    Rows that are ``held_out`` were not seen while the guards were tuned; ``first`` says of rows by strangers whether
    the guards let them pass at first sight, and is None of others.
    """

    pair: Pair
    kind: str
    held_out: bool
    first: bool | None


class Bench:
    """One run: what is asked and what fits, encoder, calibration, and the caches that can be measured here."""

    def __init__(self, flags: SemanticFlags, folder: Path) -> None:
        self.flags = flags
        self._calibration = folder / "calibration.json"
        self.encoder = SentenceEncoder(remembered=_REMEMBERED)
        self.absent: list[str] = []

    @cached_property
    def data(self) -> list[Labeled]:
        """All traps and paraphrases of ``bench/data``."""
        files = (
            ("traps.jsonl", False, "category", "passed_first"),
            ("paraphrases.jsonl", True, "kind", "kept_first"),
        )
        return [
            Labeled(
                pair=Pair(row["a"], row["b"], same),
                kind=row[kind],
                held_out=row["held_out"],
                first=row.get(first),
            )
            for name, same, kind, first in files
            for row in self.rows(name)
        ]

    def rows(self, name: str) -> list[Row]:
        """Rows of a file of ``bench/data``. Raises `DatasetError` where it is not there."""
        if not (DATA / name).is_file():
            raise DatasetError(
                f"{DATA / name} is not here: run this in a checkout, or with --parts pairs --pairs FILE"
            )
        return [dict(row) for _, row in read_jsonl(DATA / name)]

    @cached_property
    def halves(self) -> tuple[list[Pair], list[Pair]]:
        """What fits, and what asks."""
        if self.flags.pairs is None:
            fitting, asking = (
                [r.pair for r in self.data if r.held_out is held] for held in (False, True)
            )
            return fitting, asking
        asking, fitting = halves(read_rows(self.flags.pairs, Pair))
        if not all(len({pair.same for pair in half}) == 2 for half in (fitting, asking)):
            raise DatasetError(
                f"{self.flags.pairs}: each half of the clusters needs pairs that are the same, and others"
            )
        return fitting, asking

    @cached_property
    def makers(self) -> list[Maker]:
        """Makers of every cache and setting that works here; the others are named in ``absent``."""
        names = [name for name in CACHES if name in self.flags.caches]
        if {"calibrated", "bounded"} & {*names}:
            self.know(self.halves[0])
            fit(self.halves[0], self.encoder, precision=caches.PRECISION).calibration.save(
                self._calibration
            )
        found: list[Maker] = []
        for name in names:
            try:
                found += caches.makers(
                    name, self.encoder, self._calibration, self.flags.max_error_rate
                )
            except ImportError as error:
                self.absent.append(f"{name}: not installed: pip install {error.name}")
            except Exception as error:
                if name not in caches.PEERS:
                    raise
                self.absent.append(f"{name}: not measured: {error}")
        return found

    def know(self, pairs: Sequence[Pair]) -> None:
        """Encode the texts of pairs, so that no lookup waits for the encoder."""
        know((text for pair in pairs for text in (pair.a, pair.b)), self.encoder)

    @contextmanager
    def warm(self, make: Maker) -> Iterator[Cache]:
        """A cache; one that learns has answered a stream of the fitting part, in a group of its own."""
        with closing(make(0)) as cache:
            if cache.learns:
                stream = [
                    replace(asked, group="warm-up")
                    for asked in zipf(self.halves[0], 0, self.flags.requests)
                ]
                know((asked.text for asked in stream), self.encoder)
                play(cache, stream)
            yield cache


def run(flags: SemanticFlags, screen: Console) -> Row:
    """Measure, print a table for each part, and return everything as JSON values."""
    given = {name: value for name, value in asdict(flags).items() if name != "out"}
    found: Row = {
        "machine": machine(),
        "settings": json.loads(json.dumps(given, default=lambda path: path.name)),
    }
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(flags, Path(folder))
        found |= {"encoder": bench.encoder.fingerprint, "not measured": bench.absent}
        for name, part in _parts(flags).items():
            found[name], tables = part(bench)
            for made in tables:
                screen.print(made)
            if flags.out is not None:
                write_json("--out", flags.out, found)
    for line in bench.absent:
        screen.print(line, soft_wrap=True, highlight=False)
    return found


def _parts(flags: SemanticFlags) -> dict[str, Callable[[Bench], Found]]:
    """What a run measures, by name."""
    if flags.board is None:
        return {name: PARTS[name] for name in flags.parts}
    from semkv_lab.boards import BOARDS  # which stands on this module

    return {flags.board: BOARDS[flags.board]}


def machine() -> Row:
    """What times depend on, the load of the moment included."""
    versions = {name: installed for name in VERSIONS if (installed := version(name))}
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), ""
    )
    usable = {"cpu": cpu, "cores": len(os.sched_getaffinity(0))}
    return environment() | usable | {"versions": versions, "load_average": os.getloadavg()}


def times(seconds: Sequence[float]) -> Row:
    """Median and 99th percentile, in milliseconds."""
    return {"calls": len(seconds)} | {
        f"p{q}_ms": round(1e3 * float(np.percentile(seconds, q)), 4) for q in (50, 99)
    }


def rate(count: int, of: int) -> Row:
    """A share with its 95% interval (Wilson's)."""
    value = round(count / of, 6) if of else None
    return {
        "count": count,
        "of": of,
        "share": value,
        "interval": [round(end, 6) for end in wilson(count, of)],
    }


def share_of(row: Row, digits: int = 1) -> str:
    """``12.3% [10.1, 14.2]``."""
    return shown(Estimate(1, row["share"], *row["interval"]), "%", digits)


def _ms(row: Row) -> tuple[str, str]:
    return f"{row['lookup']['p50_ms']:.2f} ms", f"{row['lookup']['p99_ms']:.2f} ms"


# -- pairs and traps ------------------------------------------------------------

STAY = 0.8  # of pairs that are the same: where caches are compared by those that are not
ACCEPTED = 0.85  # a cosine that a threshold may well accept


def pairs_part(bench: Bench) -> Found:
    """Labeled pairs, each by itself: the first text is stored, the second asks."""
    return _pairs(bench, bench.halves[1], "pairs")


def traps_part(bench: Bench) -> Found:
    """The same for held-out traps and paraphrases by strangers; and the guards by themselves, on all of both."""
    strangers = [row.pair for row in bench.data if row.held_out and row.first is not None]
    found, tables = _pairs(bench, strangers, "held-out traps and paraphrases by strangers")
    alone = _guards(bench)
    names = ("all", "held out", "at first sight")
    rows = [
        (name, *(share_of(row[of]) if of in row else "" for of in names))
        for name, row in alone.items()
    ]
    return {"caches": found, "guards": alone}, [
        *tables,
        table("no veto by the guards", ("", *names), rows),
    ]


def _pairs(bench: Bench, asking: Sequence[Pair], what: str) -> Found:
    """Hits, precision at hit rate and the area under that curve (P-CHR AUC), by each cache's own confidence."""
    pairs = list(asking)
    Random(SEED).shuffle(pairs)  # noqa: S311
    bench.know(pairs)
    found, rows = {}, []
    for make in bench.makers:
        with bench.warm(make) as cache:
            row = _pair_figures(cache, pairs)
        judge = None if cache.judge is None else cache.judge.to_json()
        found[cache.name] = {"settings": cache.settings, "judge": judge} | row
        shares = (
            row[name] for name in ("hit_rate", "precision", "same that hit", "different that hit")
        )
        rows.append((cache.name, *map(share_of, shares), f"{row['p_chr_auc']:.3f}"))
    title = f"{what}: {len(pairs)}, {sum(pair.same for pair in pairs)} of them the same; 95% intervals (Wilson)"
    names = (
        "cache",
        "hit rate",
        "precision at it",
        "same that hit",
        "different that hit",
        "P-CHR AUC",
    )
    return found, [table(title, names, rows)]


def _pair_figures(cache: Cache, pairs: Sequence[Pair]) -> Row:
    """What a cache makes of pairs, each by itself; and, by its own confidence, how many different ones would hit where
    `STAY` of the same do."""
    hits = [(ask_pair(cache, pair, f"{number}"), pair.same) for number, pair in enumerate(pairs)]
    trust = [cache.confidence(pair.a, pair.b) for pair in pairs]
    accepted = sum(hit for hit, _ in hits)
    same = sum(pair.same for pair in pairs)
    right = hits.count((True, True))
    ranked = list(zip(trust, pairs, strict=True))
    least = np.quantile(
        [own for own, pair in ranked if pair.same] or [2.0], 1 - STAY, method="lower"
    )
    at = sum(bool(own >= least) and not pair.same for own, pair in ranked)
    return {
        "hit_rate": rate(accepted, len(pairs)),
        "precision": rate(right, accepted),
        "same that hit": rate(right, same),
        "different that hit": rate(accepted - right, len(pairs) - same),
        f"different where {STAY:.0%} hit": rate(at, len(pairs) - same),
        "p_chr_auc": round(pair_area(trust, [pair.same for pair in pairs]), 6),
    }


def _guards(bench: Bench) -> Row:
    """Traps without a veto, paraphrases without one that a threshold may accept, and what a new pair costs."""
    bench.know([row.pair for row in bench.data])
    cosine = {
        row: float(np.dot(*bench.encoder.encode([row.pair.a, row.pair.b]))) for row in bench.data
    }
    near = [row for row in bench.data if row.pair.same and cosine[row] >= ACCEPTED]
    sides = {
        "traps": [row for row in bench.data if not row.pair.same],
        f"paraphrases, cosine {ACCEPTED} or more": near,
    }
    found: Row = {name: _unvetoed(side) for name, side in sides.items()}
    for name in ("classes", "added", "last_turns", "long", "other_languages"):
        rows = bench.rows(f"{name}.jsonl")
        for kind, same in (("traps", False), ("paraphrases", True)):
            of_it = [veto(row["a"], row["b"]) for row in rows if row.get("same", False) == same]
            if of_it:
                found[f"{kind} of {name}.jsonl"] = {"all": rate(of_it.count(None), len(of_it))}
    return found


def _unvetoed(rows: Sequence[Labeled]) -> Row:
    """How many of the rows no guard objects to."""
    free = [row for row in rows if veto(row.pair.a, row.pair.b) is None]
    held = [row for row in rows if row.held_out]
    first = [row for row in rows if row.first is not None]
    every = Counter(row.kind for row in rows)
    passed = Counter(row.kind for row in free)
    return {
        "all": rate(len(free), len(rows)),
        "held out": rate(sum(row.held_out for row in free), len(held)),
        "at first sight": rate(sum(bool(row.first) for row in first), len(first)),
        "by kind": {kind: f"{passed[kind]} of {count}" for kind, count in every.items()},
    }


# -- streams ------------------------------------------------------------

# Of the best static threshold, dense where few answers are wrong; at the last one only exact repeats hit.
COSINES = (
    *np.arange(0.7, 0.9, 0.02).round(2).tolist(),
    *np.arange(0.9, 1.0, 0.0025).round(4).tolist(),
    1.01,
)
Static = list[tuple[float, int, int]]
"""Threshold, hits and wrong hits of a cache with a fixed cosine and nothing else."""


def streams_part(bench: Bench) -> Found:
    """Streams of each kind, or the user's own, through every cache; and the best that a fixed cosine could do."""
    flags = bench.flags
    tables = []
    found = {}
    seeds = range(SEED, SEED + flags.seeds)
    for kind in ["own"] if flags.stream else KINDS:
        if flags.stream:
            streams = [read_rows(flags.stream, Asked)]
        else:
            streams = [KINDS[kind](bench.halves[1], seed, flags.requests) for seed in seeds]
        know((asked.text for stream in streams for asked in stream), bench.encoder)
        static = [static_thresholds(stream, bench.encoder) for stream in streams]
        rows = dict(_through(streams, static, make) for make in bench.makers)
        sizes = [len(stream) for stream in streams]
        found[kind] = {
            "requests": sizes,
            "caches": rows,
            "thresholds": {"cosine": static},
        }
        title = f"stream {kind}: {len(streams)} of {sizes[0]} requests; 95% intervals by bootstrap over answers"
        names = (
            "cache",
            "hit rate",
            "wrong per request",
            "worst",
            "checks",
            "lookup p50",
            "p99",
            "best static",
        )
        tables.append(table(title, names, [_stream_cells(name, row) for name, row in rows.items()]))
    return found, tables


def static_thresholds(stream: Stream, encoder: TextEncoder) -> Static:
    """What each of `COSINES` gives."""
    items = list(dict.fromkeys((asked.group, asked.text) for asked in stream))
    place = {item: n for n, item in enumerate(items)}
    near = neighbors(items, encoder)
    found = []
    for threshold in COSINES:
        stored: dict[int, str] = {}
        hits = wrong = 0
        for asked in stream:
            own = place[asked.group, asked.text]
            candidates = [own, *(n for n, score in near[own] if score >= threshold)]
            nearest = next((n for n in candidates if n in stored), None)
            if nearest is None:
                stored[own] = asked.answer
            else:
                hits = hits + 1
                wrong = wrong + (stored[nearest] != asked.answer)
        found.append((threshold, hits, wrong))
    return found


def _through(
    streams: Sequence[Stream],
    static: Sequence[Static],
    make: Maker,
) -> tuple[str, Row]:
    """Name and figures of one cache and setting on every stream, empty at the start of each."""
    played = []
    for n, stream in enumerate(streams):
        with closing(make(SEED + n)) as cache:
            played.append(play(cache, stream))
    total = sum(map(len, streams))
    wrong = share(
        [(f"{n} {name}", bad) for n, one in enumerate(played) for name, _, bad in one.outcomes]
    )
    shares = [one.wrong / len(stream) for one, stream in zip(played, streams, strict=True)]
    bound = cache.settings.get("max error rate")
    allowed = shares if bound is None else [bound] * len(streams)
    best = [
        _most_hits(rows, own * len(stream))
        for rows, own, stream in zip(static, allowed, streams, strict=True)
    ]
    return cache.name, {
        "settings": cache.settings,
        "streams": [one.to_json() for one in played],
        "hit_rate": round(sum(one.hits for one in played) / total, 5),
        "wrong_per_request": {"share": wrong.value, "interval": [wrong.low, wrong.high]},
        "worst": round(max(shares), 6),
        "held": None if bound is None else sum(one.within(bound) for one in played),
        "checks": round(sum(one.checks for one in played) / total, 5),
        "best_static_hit_rate": round(sum(best) / total, 5),
        "best_static_hits": best,
        "judge": None if cache.judge is None else cache.judge.to_json(),
        "lookup": times([second for one in played for second in one.seconds]),
    }


def _most_hits(rows: Static, wrong: float) -> int:
    """The hits of the best threshold with at most so many wrong answers, which is known only afterwards."""
    return max((hits for _, hits, bad in rows if bad <= wrong), default=0)


def _stream_cells(name: str, row: Row) -> tuple[str, ...]:
    return (
        name,
        f"{row['hit_rate']:.1%}",
        share_of(row["wrong_per_request"], 2),
        f"{row['worst']:.2%}",
        f"{row['checks']:.1%}",
        *_ms(row),
        f"{row['best_static_hit_rate']:.1%}",
    )


# -- last turns ------------------------------------------------------------

_CHAT = (
    ("user", "Tell me about Lisbon."),
    ("assistant", "It is a city by the sea. Do you want to know more?"),
)
_DOCUMENT = (
    "The lease of the flat in Elm Street begins in May. "
    + "The tenant pays the rent on the first day. " * 40
)
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
    pairs = [Pair(row["a"], row["b"], row["same"]) for row in bench.rows("last_turns.jsonl")]
    last = ("What about the second one?", "How about the second one?")
    bench.know([*pairs, Pair(*last, same=True)])
    about = [
        (("user", f"Describe house {n}."), ("assistant", "Done.")) for n in range(CONVERSATIONS)
    ]
    found, rows = {}, []
    for make in bench.makers:
        with bench.warm(make) as cache:
            hits: dict[bool, list[tuple[str, bool]]] = {True: [], False: []}
            forms: Row = {form: {"paraphrases": 0, "traps": 0} for form in FORMS}
            for form, history in FORMS.items():
                for number, pair in enumerate(pairs):  # each in a group of its own
                    hit = ask_pair(cache, pair, f"{form} {number}", history)
                    forms[form]["paraphrases" if pair.same else "traps"] += hit
                    hits[pair.same].append((f"{number}", hit))
            streams = [
                [
                    Asked(
                        text=text,
                        answer=f"{n}",
                        group="houses",
                        history=h,
                    )
                    for n, h in enumerate(about)
                ]
                for text in last
            ]
            equal, reworded = (play(cache, stream) for stream in streams)
        found[cache.name] = {
            "settings": cache.settings,
            "forms": forms,
            "equal last turns": equal.to_json(),
            "reworded last turns": reworded.to_json(),
        }
        others = f"{equal.wrong + reworded.wrong} of {2 * CONVERSATIONS}"
        rows.append((cache.name, percent(share(hits[True])), percent(share(hits[False])), others))
    title = f"last turns: {len(pairs)} pairs after {len(FORMS)} histories; 95% intervals by bootstrap over pairs"
    return found, [
        table(
            title,
            ("cache", "paraphrases that hit", "traps that hit", "another conversation's"),
            rows,
        )
    ]


# -- images ------------------------------------------------------------


def images_part(bench: Bench) -> Found:
    """Generated scenes through the whole cache, with guards and without."""
    from semkv_lab import scenes

    made = scenes.pairs(SCENES)
    found = {
        "semkv": _image_cache(made, guarded=True),
        "semkv without guards": _image_cache(made, guarded=False),
    }
    rows = [
        (name, share_of(row["copies"]["all"]), share_of(row["changes"]["all"]), *_ms(row))
        for name, row in found.items()
    ]
    title = (
        f"images: {SCENES} scenes of each kind; 95% intervals (Wilson); lookups with the encoder"
    )
    return found, [table(title, ("", "copies that hit", "changes that hit", "p50", "p99"), rows)]


def _image_cache(made: Sequence[scenes.Pair], guarded: bool) -> Row:
    """All first images are in the cache. A copy must hit with its own scene's image; a change must hit none."""
    preset = get_preset("minigqa")
    layer = next(text for text in preset.embedding_layers if text.startswith("vision"))
    donors = list(dict.fromkeys(pair.donor for pair in made))
    hits, seconds = [], []
    with tempfile.TemporaryDirectory() as root:
        config = CacheConfig(
            Path(root) / "cache",
            embedding_layers=(EmbeddingLayer.parse(layer),),
            embedding_hook="vision",
            vision_encoder=preset.vision_encoder,
            semantic=False,
            guards=guarded,
        )

        def ask(data: bytes) -> Request:
            file = Path(root) / keys.media_id(data)
            file.write_bytes(data)
            return Request(
                "",
                Namespace(),
                (MediaSegment(file.name, file), TextSegment("What does the picture show?")),
            )

        with SemanticCache(config) as cache:
            for data in donors:
                cache.add_observation(cache.try_reuse(ask(data)), keys.media_id(data))
            for pair in made:
                report = cache.try_reuse(ask(pair.request))
                hits.append(
                    report.hit
                    and (report.donor_response == keys.media_id(pair.donor) or not pair.same)
                )
                seconds.append(report.lookup_s)
            vetoes = dict(cache.stats().vetoes)
    measured = {
        "layer": layer,
        "images": len(donors),
        "vetoes": vetoes,
        "lookup": times(seconds),
    }
    return _image_shares(made, hits) | measured


def _image_shares(made: Sequence[scenes.Pair], hits: Sequence[bool]) -> Row:
    """Shares of copies and of changes that hit, by what was done and by kind of scene."""
    groups: dict[str, dict[str, list[bool]]] = {
        name: defaultdict(list) for name in ("copies", "changes")
    }
    for pair, hit in zip(made, hits, strict=True):
        for group in ("all", pair.what, f"of {pair.kind}"):
            groups["copies" if pair.same else "changes"][group].append(hit)
    return {
        name: {group: rate(sum(v), len(v)) for group, v in of.items()}
        for name, of in groups.items()
    }


PARTS: dict[str, Callable[[Bench], Found]] = {
    part.__name__.removesuffix("_part"): part
    for part in (pairs_part, traps_part, streams_part, turns_part, images_part)
}
