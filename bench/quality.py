"""Hits against wrong answers, for every policy, on streams that none of them was fitted on.

    python bench/quality.py curves    the table and the curves of docs/quality.md (results/quality.json)
    python bench/quality.py splits    the calibrated curve over several ways to split the pairs (quality_splits.json)
    python bench/quality.py unseen    the bound on streams that nothing was tuned on (quality_unseen.json)

The labelled pairs are split into two halves that share no cluster: one fits the calibration, from the other streams of
10,000 requests are drawn (70% by Zipf's law over clusters of several texts, 30% single texts). MiniGQA's questions,
with 30% hard negatives, are the second data set. No row of any data is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
from common import RESULTS, ROOT, SHARED, commands, machine, write_json
from streams import KINDS, REACH, Stream, corrected, halves, minigqa, pairs_of, questions

from semkv.encoders.text import DEFAULT_MODEL, SentenceEncoder
from semkv.guards import no_veto, veto
from semkv.tiers.bounded import Bounded
from semkv.tiers.policies import Calibrated, Calibration, Decider, FixedThreshold
from semkv_lab.evaluate import figure, fit
from semkv_lab.quality import TIER, Asked, Corpus, Outcome, Pair, Replay, build_corpus, clusters, read_pairs

PAIRS = SHARED / "question_pairs_dev.jsonl.gz"
PICTURES = ROOT / "docs" / "pictures"
BOUNDS = (0.01, 0.005, 0.002)
# The last cosine: exact hits only. Both lists are dense where few answers are wrong: curves are straight in between.
COSINES = (
    0.7, 0.75, 0.8, 0.84, 0.86, 0.88, 0.9, 0.91, 0.92, 0.93, 0.935, 0.94, 0.945, 0.95, 0.955, 0.96, 0.9625, 0.965,
    0.9675, 0.97, 0.9725, 0.975, 0.9775, 0.98, 0.9825, 0.985, 0.9875, 0.99, 0.995, 1.01,
)  # fmt: skip
LIMITS = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.0065, 0.007, 0.0075, 0.008, 0.0085, 0.009, 0.0095, 0.01, 0.0105,
    0.011, 0.0125, 0.015, 0.0175, 0.02, 0.0225, 0.025, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7,
)  # fmt: skip
# For the splits, whose curves are compared further out.
MORE_COSINES = sorted({*COSINES, 0.72, 0.74, 0.76, 0.78, 0.82, 0.83, 0.85, 0.87, 0.89})
MORE_LIMITS = sorted({*LIMITS, 0.06, 0.085, 0.12, 0.135, 0.175, 0.225, 0.25, 0.275, 0.35, 0.4, 0.45, 0.6})
SHARES = (0.0003, 0.0004, 0.0005, 0.0006, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1)
CHECKS = 0.1
DRAWS = 400  # of streams, for the intervals of the curves
FIRST_SEED = 1000  # of unseen streams
TIERS = frozenset([TIER])
STATIC, GUARDED, CALIBRATED = "static", "fixed with guards", "calibrated with guards"
CHECKED = f"{CALIBRATED} and checks"
MORE = "more hits than static at equal error, with 95% interval"
FAR, HIGH = {"question pairs": 2, "minigqa": 5}, {"question pairs": (74, 81), "minigqa": (0, 55)}  # of the figures

app = commands(__doc__)
Rows = list[dict[str, Any]]


def mean(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Of the shares of requests, over streams; the streams by themselves are ``streams``: [hits, wrong]."""
    return {
        "hits": round(float(np.mean([o.hit_rate for o in outcomes])), 5),
        "wrong": round(float(np.mean([o.wrong_rate for o in outcomes])), 6),
        "wrong_worst": round(max(o.wrong_rate for o in outcomes), 6),
        "checks": round(float(np.mean([o.checks / o.requests for o in outcomes])), 5),
        "worst_at_any_time": round(max(o.worst or 0.0 for o in outcomes), 6),
        "streams": [[o.hits, o.wrong] for o in outcomes],
    }


def sweep(replays: Sequence[Replay], make: Callable[[float], Decider], checks: float, values: Iterable[float]) -> Rows:
    """Every threshold over every stream."""
    rows = []
    for value in values:
        outcomes = [replay.play(make(value), verify_rate=checks, seed=n) for n, replay in enumerate(replays)]
        rows.append({"threshold": value, **mean(outcomes)})
    return rows


def fixed(cosine: float) -> Decider:
    return FixedThreshold({TIER: cosine})


def calibrated_by(estimate: Calibration) -> Callable[[float], Decider]:
    return lambda limit: Calibrated(replace(estimate, limit=limit), TIERS, fixed(1.0))


def bounded(replays: Sequence[Replay], static: Rows, calibration: Calibration | None) -> Rows:
    """The bound against the threshold that would have been best under it on each stream, known only afterwards."""
    rows = []
    for bound in BOUNDS:
        outcomes = [
            replay.play(Bounded(bound, calibration, TIERS), verify_rate=CHECKS, seed=n)
            for n, replay in enumerate(replays)
        ]
        best = [
            max(hits for hits, wrong in (row["streams"][n] for row in static) if wrong <= bound * o.requests)
            for n, o in enumerate(outcomes)
        ]
        more = [(o.hits - hits) / o.requests for o, hits in zip(outcomes, best, strict=True)]
        row = {"bound": bound, **mean(outcomes), "held": sum(o.wrong_rate <= bound for o in outcomes)}
        row |= {"requests": round(float(np.mean([o.requests for o in outcomes])))}
        row |= {"exact": round(float(np.mean([o.exact / o.requests for o in outcomes])), 5)}
        row |= {"static_hits": round(float(np.mean([o.hit_rate for o in outcomes]) - np.mean(more)), 5)}
        row |= {"more_hits_mean": round(float(np.mean(more)), 5), "more_hits_least": round(min(more), 5)}
        rows.append(row)
    return rows


def both(items: Iterable[tuple[str, str]], encoder: SentenceEncoder) -> tuple[Corpus, Corpus]:
    """The texts without guards and with them."""
    bare = build_corpus(list(items), encoder, no_veto)
    return bare, bare.with_guard(veto)


def fitted(pairs: Sequence[Pair], encoder: SentenceEncoder) -> Calibration:
    return fit(pairs, build_corpus(list(clusters(pairs)), encoder, veto), encoder.fingerprint).calibration


def curve(rows: Rows, sizes: Sequence[int], drawn: Sequence[int] | None = None) -> list[tuple[float, float]]:
    """Mean (wrong answers, hits) per request over all streams or the ``drawn`` ones, by rising error."""
    chosen = list(range(len(sizes))) if drawn is None else list(drawn)
    n = np.array(sizes, dtype=float)[chosen, None]
    shares = [(np.array(row["streams"])[chosen] / n).mean(axis=0) for row in rows]
    return sorted((float(wrong), float(hits)) for hits, wrong in shares)


def above(rows: Rows, static: Rows, sizes: Sequence[int]) -> dict[str, list[float]]:
    """Hits beyond those of the static threshold on the same streams, interpolated at equal shares of wrong answers;
    with the interval that 95% of draws of as many streams from these fall into.
    """
    reach = min(curve(rows, sizes)[-1][0], curve(static, sizes)[-1][0])
    shares = [share for share in SHARES if share <= reach]

    def more(drawn: Sequence[int] | None = None) -> Any:
        ours, theirs = (np.array(curve(each, sizes, drawn)).T for each in (rows, static))
        return np.interp(shares, ours[0], ours[1]) - np.interp(shares, theirs[0], theirs[1])

    random = np.random.default_rng(0)
    draws = [more(random.integers(len(sizes), size=len(sizes)).tolist()) for _ in range(DRAWS)]
    low, high = np.quantile(draws, (0.025, 0.975), axis=0)
    return {
        str(share): [round(float(x), 5) for x in found] for share, *found in zip(shares, more(), low, high, strict=True)
    }


# -- curves ------------------------------------------------------------


def measure(streams: Sequence[Stream], corpora: tuple[Corpus, Corpus], estimate: Calibration) -> dict[str, Any]:
    """All policies on all streams; ``corpora`` without and with guards."""
    bare, guarded = ([Replay(stream, corpus) for stream in streams] for corpus in corpora)
    sizes, static, calibrated = (
        [len(stream) for stream in streams],
        sweep(bare, fixed, 0.0, COSINES),
        calibrated_by(estimate),
    )
    others = {
        GUARDED: sweep(guarded, fixed, 0.0, COSINES),
        CALIBRATED: sweep(guarded, calibrated, 0.0, LIMITS),
        CHECKED: sweep(guarded, calibrated, CHECKS, LIMITS),
    }
    return {
        "requests": sizes,
        STATIC: static,
        **others,
        MORE: {label: above(rows, static, sizes) for label, rows in others.items()},
        "bounded": bounded(guarded, static, estimate),
        "bounded, no calibration": bounded(guarded, static, None),
    }


def low_end(streams: Sequence[Stream], corpora: tuple[Corpus, Corpus], estimate: Calibration) -> dict[str, Any]:
    """The two curves once more, with the pairs that say the same by the reader's word."""
    bare, guarded = ([Replay(stream, corpus) for stream in corrected(streams, corpora[0])] for corpus in corpora)
    return {STATIC: sweep(bare, fixed, 0.0, COSINES), CALIBRATED: sweep(guarded, calibrated_by(estimate), 0.0, LIMITS)}


def draw(name: str, result: dict[str, Any], path: Path) -> None:
    """Hits against wrong answers: a curve per policy over its thresholds, a point per bound."""
    with figure(path, "wrong answers, % of requests", "hits, % of requests") as axes:
        for label, style in {STATIC: "o-", GUARDED: "s:", CALIBRATED: "^--", CHECKED: "v-"}.items():
            points = 100 * np.array(curve(result[label], result["requests"]))
            axes.plot(*points.T, style, markersize=4, label=label)
        points = 100 * np.array([(row["wrong"], row["hits"]) for row in result["bounded"]])
        axes.plot(*points.T, "*", color="black", markersize=11, label="bounded (1%, 0.5%, 0.2%)")
        axes.set_xlim(0, FAR[name])
        axes.set_ylim(*HIGH[name])
        axes.set_title(name)
        axes.legend(frameon=False)


def draw_low_end(result: dict[str, Any], path: Path) -> None:
    """The curves by the labels as they are, and by the reader's word."""
    with figure(path, "wrong answers, % of requests", "hits, % of requests") as axes:
        for label, color in ((STATIC, "tab:blue"), (CALIBRATED, "tab:green")):
            for source, style, by in ((result, "o-", "by the labels"), (result["labels read"], "s:", "read again")):
                points = 100 * np.array(curve(source[label], result["requests"]))
                axes.plot(*points.T, style, color=color, markersize=3, label=f"{label}, {by}")
        axes.set_xlim(-0.005, 100 * REACH)
        axes.set_ylim(74.5, 78)
        axes.set_title("question pairs, the low end")
        axes.legend(frameon=False)


@app.command
def curves(
    *,
    pairs: Path = PAIRS,
    seeds: int = 10,
    images: int = 100,
    data: Sequence[Literal["question pairs", "minigqa"]] = ("minigqa", "question pairs"),
    out: Path = RESULTS / "quality.json",
    pictures: Path = PICTURES,
) -> None:
    """Every policy over its thresholds, and the bound.

    Args:
        seeds: streams of each data set.
        images: pictures of a MiniGQA stream.
    """
    encoder = SentenceEncoder(remembered=1 << 20)
    result: dict[str, Any] = {"machine": machine(), "encoder": DEFAULT_MODEL, "checks": CHECKS}
    for name in data:
        if name == "minigqa":
            first, *drawn = [minigqa(100 + n, images=images) for n in range(seeds + 1)]
            estimate = fitted(pairs_of(first), encoder)
            streams = [[Asked(a.text, f"{n}/{a.answer}", f"{n}/{a.group}") for a in s] for n, s in enumerate(drawn)]
            corpora = both([(a.group, a.text) for stream in streams for a in stream], encoder)
        else:
            fitting, asking = halves(read_pairs(pairs), 0)
            estimate = fitted(fitting, encoder)
            streams, corpora = [questions(asking, seed) for seed in range(seeds)], both(clusters(asking), encoder)
        result[name] = measure(streams, corpora, estimate)
        draw(name, result[name], pictures / f"quality-{name.replace(' ', '-')}.png")
        if name == "question pairs":
            result[name]["labels read"] = low_end(streams, corpora, estimate)
            draw_low_end(result[name], pictures / "quality-low-end.png")
        for kind in ("bounded", "bounded, no calibration"):
            for row in result[name][kind]:
                print(name, kind, {key: value for key, value in row.items() if key != "streams"}, flush=True)
        write_json(out, result)


# -- splits ------------------------------------------------------------


@app.command
def splits(
    *,
    pairs: Path = PAIRS,
    seeds: int = 3,
    streams: int = 10,
    out: Path = RESULTS / "quality_splits.json",
    picture: Path = PICTURES / "quality-splits.png",
) -> None:
    """What the calibrated curve has beyond the static one, over several ways to split the pairs.

    Where few answers are wrong, a single pair of them moves the curve of one split.

    Args:
        seeds: ways to split; each half serves once to fit and once for streams.
        streams: of each half.
    """
    encoder = SentenceEncoder(remembered=1 << 20)
    ours = {CALIBRATED: 0.0, CHECKED: CHECKS}
    found: list[dict[str, Any]] = []
    for seed, swapped in product(range(seeds), (False, True)):
        fitting, asking = halves(read_pairs(pairs), seed)[:: -1 if swapped else 1]
        calibrated = calibrated_by(fitted(fitting, encoder))
        corpora = both(clusters(asking), encoder)
        drawn = [questions(asking, number) for number in range(streams)]
        bare, guarded = ([Replay(stream, corpus) for stream in drawn] for corpus in corpora)
        static, sizes = sweep(bare, fixed, 0.0, MORE_COSINES), [len(stream) for stream in drawn]
        more = {
            name: above(sweep(guarded, calibrated, checks, MORE_LIMITS), static, sizes) for name, checks in ours.items()
        }
        found.append({"seed": seed, "swapped": swapped, MORE: more})
        print(seed, swapped, {name: {s: row[0] for s, row in rows.items()} for name, rows in more.items()}, flush=True)
    summaries = {name: summary([each[MORE][name] for each in found]) for name in ours}
    write_json(out, {"encoder": DEFAULT_MODEL, "streams": streams, "over all splits": summaries, "splits": found})
    with figure(picture, "wrong answers, % of requests", "more hits than the static threshold, points") as axes:
        for (name, rows), color in zip(summaries.items(), ("tab:green", "tab:orange"), strict=True):
            at = [100 * float(share) for share in rows]
            mid, off = (np.array([100 * row[label] for row in rows.values()]) for label in ("mean", "deviation"))
            axes.plot(at, mid, "o-", color=color, markersize=4, label=name)
            axes.fill_between(at, mid - off, mid + off, color=color, alpha=0.15, linewidth=0)
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_title("question pairs: mean over splits, one standard deviation")
        axes.legend(frameon=False)
    for name, rows in summaries.items():
        print(name, {share: round(100 * row["mean"], 2) for share, row in rows.items()})


def summary(found: Sequence[dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """By share of wrong answers, over the splits that reach it."""
    rows = {}
    for share in found[0]:
        values = [row[share][0] for row in found if share in row]
        figures = {"mean": np.mean(values), "deviation": np.std(values), "least": min(values), "most": max(values)}
        rows[share] = {"splits": len(values), **{label: round(float(value), 5) for label, value in figures.items()}}
    return rows


# -- unseen ------------------------------------------------------------


@app.command
def unseen(
    *,
    pairs: Path = PAIRS,
    seeds: int = 10,
    kinds: Sequence[str] = tuple(KINDS),
    out: Path = RESULTS / "quality_unseen.json",
) -> None:
    """How often the bound holds on other kinds of streams, with seeds of their own.

    The calibration is fitted on the half that ``curves`` draws its streams from; these streams come from the other.

    Args:
        seeds: streams of each kind.
        kinds: of streams (bench/streams.py).
    """
    encoder = SentenceEncoder(remembered=1 << 20)
    asking, fitting = halves(read_pairs(pairs), 0)
    estimate = fitted(fitting, encoder)
    result: dict[str, Any] = {"machine": machine("semkv", "sentence-transformers", "numpy"), "encoder": DEFAULT_MODEL}
    result |= {"checks": CHECKS, "first_seed": FIRST_SEED, "kinds": {}}
    for name in kinds:
        streams = [KINDS[name](asking, FIRST_SEED + n) for n in range(seeds)]
        corpora = both([(asked.group, asked.text) for stream in streams for asked in stream], encoder)
        bare, guarded = ([Replay(stream, corpus) for stream in streams] for corpus in corpora)
        static = sweep(bare, fixed, 0.0, COSINES)
        result["kinds"][name] = {
            "calibrated": bounded(guarded, static, estimate),
            "no calibration": bounded(guarded, static, None),
        }
        for kind, rows in result["kinds"][name].items():
            for row in rows:
                print(name, kind, {key: value for key, value in row.items() if key != "streams"}, flush=True)
        write_json(out, result)


if __name__ == "__main__":
    app()
