"""Hits against wrong answers, for every policy, on streams that none of them was fitted on; writes JSON and figures.

The labelled pairs are split into two halves that share no cluster: one fits the calibration, from the other
streams of 10,000 requests are drawn (70% by Zipf's law over clusters of several texts, 30% single texts). MiniGQA's
questions, with 30% hard negatives, are the second data set. A third stream is made up, of answers that are wrong by
chance alone. No row of any data is written.

    python bench/quality.py --pairs ../shared/data/question_pairs_dev.jsonl.gz
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from quality_curves import above, draw, draw_low_end
from quality_labels import REACH, corrected, verdicts, wrong_hits
from quality_streams import draw_stream, halves, minigqa_stream, pairs_of

from semkv.encoders.text import DEFAULT_MODEL, SentenceEncoder
from semkv.guards import no_veto, veto
from semkv.tiers.bounded import Bounded
from semkv.tiers.policies import Calibrated, Calibration, Decider, FixedThreshold
from semkv.types import Entry, Exactness, Match, Namespace, Request, TextSegment
from semkv_lab.evaluate import Fit, fit
from semkv_lab.quality import TIER, Asked, Corpus, Outcome, Replay, build_corpus, clusters, read_pairs

ROOT = Path(__file__).parents[1]
BOUNDS = (0.01, 0.005, 0.002)
# The last: exact hits alone. Both lists are dense where few answers are wrong: between points the curves are straight.
COSINES = (
    0.7, 0.75, 0.8, 0.84, 0.86, 0.88, 0.9, 0.91, 0.92, 0.93, 0.935, 0.94, 0.945, 0.95, 0.955, 0.96, 0.9625, 0.965,
    0.9675, 0.97, 0.9725, 0.975, 0.9775, 0.98, 0.9825, 0.985, 0.9875, 0.99, 0.995, 1.01,
)  # fmt: skip
LIMITS = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.0065, 0.007, 0.0075, 0.008, 0.0085, 0.009, 0.0095, 0.01, 0.0105,
    0.011, 0.0125, 0.015, 0.0175, 0.02, 0.0225, 0.025, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7,
)  # fmt: skip
CHECKS = 0.1
EARLY = 0.4  # of a stream: what of the difference to a static threshold came about by then
SETTLED = 500  # requests before which a share says little, as in the replay
TIERS = frozenset([TIER])
MADE_UP = {"streams": 12, "requests": 4000, "risk": 0.05}
MADE_UP_COSINES = (0.99, 0.93)  # where the prior without a calibration is too hopeful, and where it is too careful


def row(outcome: Outcome) -> dict[str, Any]:
    return {
        "requests": outcome.requests,
        "hits": outcome.hits,
        "exact": outcome.exact,
        "approximate": outcome.approximate,
        "wrong": outcome.wrong,
        "checks": outcome.checks,
        "overruled": outcome.overruled,
        "worst_at_any_time": round(outcome.worst or 0.0, 5),
    }


def mean(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    n = [o.requests for o in outcomes]
    risks = [share for o in outcomes if (share := o.wrong_per_approximate) is not None]
    return {
        "hits": round(float(np.mean([o.hit_rate for o in outcomes])), 5),
        "wrong": round(float(np.mean([o.wrong_rate for o in outcomes])), 6),
        "wrong_worst": round(max(o.wrong_rate for o in outcomes), 6),
        "wrong_per_approximate": round(float(np.mean(risks)), 5) if risks else None,
        "checks": round(float(np.mean([o.checks / k for o, k in zip(outcomes, n, strict=True)])), 5),
        "overruled": round(float(np.mean([o.overruled / k for o, k in zip(outcomes, n, strict=True)])), 5),
        "worst_at_any_time": round(max(o.worst or 0.0 for o in outcomes), 6),
    }


def early(outcome: Outcome) -> int:
    """Hits in the first part of a stream."""
    return next(hits for requests, hits, _ in outcome.curve if requests >= EARLY * outcome.requests)


def sweep(
    replays: Sequence[Replay], make: Callable[[float], Decider], checks: float, values: Sequence[float] = COSINES
) -> list[dict[str, Any]]:
    """Every threshold over every stream."""
    rows = []
    for value in values:
        outcomes = [replay.play(make(value), verify_rate=checks, seed=n) for n, replay in enumerate(replays)]
        streams = {"streams": [[o.hits, o.wrong] for o in outcomes], "early": [early(o) for o in outcomes]}
        rows.append({"threshold": value, **mean(outcomes), **streams})
    return rows


def fixed(cosine: float) -> Decider:
    return FixedThreshold({TIER: cosine})


def most_hits(static: Sequence[dict[str, Any]], stream: int, wrong: float) -> tuple[int, int]:
    """All and early hits of the threshold that serves most on a stream with at most so many wrong answers."""
    return max(
        (row["streams"][stream][0], row["early"][stream]) for row in static if row["streams"][stream][1] <= wrong
    )


def bounded(
    replays: Sequence[Replay], static: Sequence[dict[str, Any]], calibration: Calibration | None
) -> list[dict[str, Any]]:
    """The bound against the threshold that would have been best on each stream, known only afterwards: best under the
    bound, and best with no more wrong answers than the policy gave.
    """
    found = []
    for bound in BOUNDS:
        outcomes = [
            replay.play(Bounded(bound, calibration, TIERS), verify_rate=CHECKS, seed=n)
            for n, replay in enumerate(replays)
        ]
        best = [most_hits(static, n, bound * o.requests) for n, o in enumerate(outcomes)]
        more = [(o.hits - hits) / o.requests for o, (hits, _) in zip(outcomes, best, strict=True)]
        more_early = [(early(o) - hits) / o.requests for o, (_, hits) in zip(outcomes, best, strict=True)]
        at_its_error = [(o.hits - most_hits(static, n, o.wrong)[0]) / o.requests for n, o in enumerate(outcomes)]
        found.append(
            {
                "bound": bound,
                **mean(outcomes),
                "held": sum(o.wrong_rate <= bound for o in outcomes),
                "static_hits": round(float(np.mean([o.hit_rate for o in outcomes]) - np.mean(more)), 5),
                "more_hits_mean": round(float(np.mean(more)), 5),
                "more_hits_least": round(min(more), 5),
                "more_hits_deviation": round(float(np.std(more)), 5),
                "more_hits_early_mean": round(float(np.mean(more_early)), 5),
                "more_hits_at_its_error_mean": round(float(np.mean(at_its_error)), 5),
                "more_hits_at_its_error_least": round(min(at_its_error), 5),
                "streams": [row(o) for o in outcomes],
            }
        )
    return found


def curves(
    streams: Sequence[Sequence[Asked]], corpora: tuple[Corpus, Corpus], estimate: Calibration, most: float = 1.0
) -> dict[str, Any]:
    """Every sweep, and how far the others lie above the static one, up to ``most`` wrong answers per request."""
    bare = [Replay(stream, corpora[0]) for stream in streams]
    guarded = [Replay(stream, corpora[1]) for stream in streams]
    static, sizes = sweep(bare, fixed, 0.0), [len(stream) for stream in streams]
    calibrated = calibrated_by(estimate)
    others = {
        "fixed with guards": sweep(guarded, fixed, 0.0),
        "calibrated with guards": sweep(guarded, calibrated, 0.0, LIMITS),
        "calibrated with guards and checks": sweep(guarded, calibrated, CHECKS, LIMITS),
    }
    more = {label: above(rows, static, sizes, most) for label, rows in others.items()}
    return {"static": static, **others, "more hits than static at equal error, with 95% interval": more}


def calibrated_by(estimate: Calibration) -> Callable[[float], Decider]:
    return lambda limit: Calibrated(replace(estimate, limit=limit), TIERS, fixed(1.0))


def read(
    streams: Sequence[Sequence[Asked]], corpora: tuple[Corpus, Corpus], estimate: Calibration, found: dict[str, Any]
) -> dict[str, Any]:
    """The low end once more, with the pairs that say the same by the reader's word; and how many of the wrong hits
    there were such.
    """
    total = sum(len(stream) for stream in streams)
    kinds = (("static", corpora[0], fixed), ("calibrated with guards", corpora[1], calibrated_by(estimate)))
    hits = {
        label: [
            {"threshold": value, **verdicts(wrong_hits(streams, corpus, partial(make, value)))}
            for value in (row["threshold"] for row in found[label] if 0.0 < row["wrong"] <= REACH)
        ]
        for label, corpus, make in kinds
    }
    return {"requests": total, "wrong hits": hits, **curves(corrected(streams, corpora[0]), corpora, estimate, REACH)}


def measure(
    streams: Sequence[Sequence[Asked]], corpora: tuple[Corpus, Corpus], fitted: Fit, other: Calibration | None
) -> dict[str, Any]:
    """All policies on all streams. ``corpora`` without and with guards; ``other`` was fitted on the other data set."""
    start = time.perf_counter()
    guarded = [Replay(stream, corpora[1]) for stream in streams]
    estimate = fitted.calibration
    found = curves(streams, corpora, estimate)
    result = {
        "streams": len(streams),
        "requests": [len(stream) for stream in streams],
        "calibration": {
            "losses": fitted.losses,
            "weights": {"bias": estimate.bias, **estimate.weights},
            "vetoes": dict(estimate.vetoes),
        },
        **found,
        "bounded": bounded(guarded, found["static"], estimate),
        "bounded, no calibration": bounded(guarded, found["static"], None),
    }
    if other is not None:
        result["bounded, calibrated on the other data"] = bounded(guarded, found["static"], other)
    result["seconds"] = round(time.perf_counter() - start, 1)
    return result


def chance_alone(bound: float, cosine: float, seed: int) -> dict[str, float]:
    """A stream of new texts whose nearest donor always has one cosine and is wrong independently with one chance."""
    random = Random(seed)  # noqa: S311
    policy = Bounded(bound)
    donor, match = Entry("d", Namespace(), (), "", ""), Match(TIER, "d", cosine, Exactness.APPROXIMATE)
    requests, hits, wrong, worst = int(MADE_UP["requests"]), 0, 0, 0.0
    for number in range(1, requests + 1):
        policy.arrived()
        correct = random.random() >= MADE_UP["risk"]
        decision = policy.accept(Request(str(number), Namespace(), (TextSegment(str(number)),)), donor, match)
        hits += decision.accept
        wrong += decision.accept and not correct
        if not decision.accept or random.random() < max(CHECKS, decision.check):
            policy.observe(match, correct=correct, served=decision.accept)
        if number >= SETTLED:
            worst = max(worst, wrong / number)
    return {"hits": hits / requests, "wrong": wrong / requests, "worst_at_any_time": worst}


def made_up() -> dict[str, Any]:
    rows = []
    for cosine in MADE_UP_COSINES:
        for bound in BOUNDS:
            found = [chance_alone(bound, cosine, seed) for seed in range(int(MADE_UP["streams"]))]
            rows.append(
                {
                    "cosine": cosine,
                    "bound": bound,
                    "hits": round(float(np.mean([f["hits"] for f in found])), 5),
                    "wrong": round(float(np.mean([f["wrong"] for f in found])), 6),
                    "wrong_worst": max(f["wrong"] for f in found),
                    "held": sum(f["wrong"] <= bound for f in found),
                    "worst_at_any_time": round(max(f["worst_at_any_time"] for f in found), 6),
                }
            )
    return {**MADE_UP, "rows": rows}


class Remembering:
    """An encoder that keeps vectors in a file between runs."""

    def __init__(self, file: Path | None) -> None:
        self._encoder = SentenceEncoder(DEFAULT_MODEL)
        self._file = file
        self._known: dict[str, Any] = {}
        if file is not None and file.is_file():
            kept = np.load(file)
            self._known = dict(zip(kept["texts"].tolist(), kept["vectors"], strict=True))
        self.dim, self.fingerprint = self._encoder.dim, self._encoder.fingerprint

    def fits(self, text: str) -> bool:
        return len(text.split()) < 100 or self._encoder.fits(text)

    def encode(self, texts: Sequence[str]) -> Any:
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            self._known |= dict(zip(new, self._encoder.encode(new), strict=True))
        return np.stack([self._known[text] for text in texts])

    def keep(self) -> None:
        if self._file is not None and self._known:
            np.savez(self._file, texts=np.array(list(self._known)), vectors=np.stack(list(self._known.values())))


def quora(path: Path, seeds: int, encoder: Remembering) -> tuple[Fit, list[list[Asked]], tuple[Corpus, Corpus]]:
    pairs = read_pairs(path)
    first, second = halves(pairs, 0)
    fitted = fit(first, build_corpus(list(clusters(first)), encoder, veto), encoder.fingerprint)
    streams = [draw_stream(second, seed) for seed in range(seeds)]
    return fitted, streams, both(list(clusters(second)), encoder)


def both(items: list[tuple[str, str]], encoder: Remembering) -> tuple[Corpus, Corpus]:
    bare = build_corpus(items, encoder, no_veto)
    return bare, bare.with_guard(veto)


def minigqa(seeds: int, images: int, encoder: Remembering) -> tuple[Fit, list[list[Asked]], tuple[Corpus, Corpus]]:
    with tempfile.TemporaryDirectory() as folder:
        drawn = [minigqa_stream(Path(folder) / str(n), 100 + n, images=images) for n in range(seeds + 1)]
    pairs = pairs_of(drawn[0])
    fitted = fit(pairs, build_corpus(list(clusters(pairs)), encoder, veto), encoder.fingerprint)
    streams = [[Asked(a.text, f"{n}/{a.answer}", f"{n}/{a.group}") for a in s] for n, s in enumerate(drawn[1:])]
    return fitted, streams, both([(a.group, a.text) for stream in streams for a in stream], encoder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=Path, default=ROOT.parent / "shared" / "data" / "question_pairs_dev.jsonl.gz")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--images", type=int, default=100, help="pictures of a MiniGQA stream")
    parser.add_argument("--only", choices=("pairs", "minigqa", "made-up"), help="measure one, keep the others' figures")
    parser.add_argument("--vectors", type=Path, help="keep the vectors in this .npz for the next time")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "quality.json")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs" / "pictures")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    if options.only and options.out.is_file():
        result = json.loads(options.out.read_text(encoding="utf-8"))
    result |= {"encoder": DEFAULT_MODEL, "machine": platform.machine(), "checks": CHECKS}
    if options.only in (None, "made-up"):
        result["made up"] = made_up()
    encoder = Remembering(options.vectors)
    drawn = {}
    if options.only in (None, "minigqa"):
        drawn["minigqa"] = minigqa(options.seeds, options.images, encoder)
    if options.only in (None, "pairs"):
        if options.pairs.is_file():
            drawn["question pairs"] = quora(options.pairs, options.seeds, encoder)
        else:
            print(f"{options.pairs} is not there: question pairs are left out")
    encoder.keep()
    for name, (fitted, streams, corpora) in drawn.items():
        other = next((fit.calibration for key, (fit, _, _) in drawn.items() if key != name), None)
        result[name] = measure(streams, corpora, fitted, other)
        if name == "question pairs":
            result[name]["labels read"] = read(streams, corpora, fitted.calibration, result[name])
        print(name, result[name]["seconds"], "s", flush=True)
        draw(name, result[name], options.pictures / f"quality-{name.replace(' ', '-')}.png")
        if "labels read" in result[name]:
            draw_low_end(result[name], options.pictures / "quality-low-end.png")
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
