"""``semkv calibrate``, ``eval-pairs`` and ``eval-stream``: how far approximate hits can be trusted, without an engine.

A calibration (`semkv.tiers.policies.Calibration`) is fitted from labeled pairs. The share of same pairs in a file says
nothing of how often a *nearest neighbor* is the same question, which is what a cache meets. So the pairs' texts are
used as traffic: a random part is stored, each other text is looked up, and what it finds is labeled by the clusters
that the same pairs make. A file too small for that is fitted pair by pair.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from semkv.encoders.text import SentenceEncoder, TextEncoder
from semkv.errors import ConfigError, DatasetError
from semkv.guards import Guard, Wording, veto, wording
from semkv.tiers.checking import wilson
from semkv.tiers.policies import FEATURES, Calibration, features
from semkv_lab.caches import SemKV, ask_pair, pair_curve, play
from semkv_lab.settings import QualityFlags
from semkv_lab.streams import Item, Pair, clusters, read_pairs, read_stream

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

FLOOR = 0.5  # cosines below are no neighbors
_MOST = 256  # neighbors of a text
_ASKED = 4  # stored neighbors that a lookup asks about, as the tier does
_BATCH = 512
_STORED = (0.15, 0.32, 0.5, 0.68, 0.85)  # shares of the texts that are stored, one round each
_ENOUGH = 300  # lookups with a neighbor, to fit from them
_LEAST_PAIRS = 20
_RIDGE = 10.0
_POINTS = 100  # of a curve along a stream


class Lookup(NamedTuple):
    """A text found its nearest neighbor, and no guard objects."""

    score: float
    wrong: bool
    wording: Wording


class Fit(NamedTuple):
    """A calibration and what it was fitted from; ``simulated`` says whether the pairs' texts served as traffic."""

    calibration: Calibration
    lookups: list[Lookup]
    simulated: bool


# -- neighbors ------------------------------------------------------------


def know(texts: Iterable[str], encoder: TextEncoder) -> None:
    """Encode texts, so that no lookup of an encoder that remembers them waits; a bar on stderr shows how far it is."""
    distinct = list(dict.fromkeys(texts))
    batches = [distinct[start : start + _BATCH] for start in range(0, len(distinct), _BATCH)]
    for batch in track(batches, "encoding", console=Console(stderr=True), transient=True):
        encoder.encode(batch)


def neighbors(items: Sequence[Item], encoder: TextEncoder) -> list[list[tuple[int, float]]]:
    """By item (group, text): the places of the nearest others of its group with their cosines, the nearest first.

    A text beyond the encoder's window has none.
    """
    found: list[list[tuple[int, float]]] = [[] for _ in items]
    groups: dict[str, list[int]] = defaultdict(list)
    for place, (group, text) in enumerate(items):
        if encoder.fits(text):
            groups[group].append(place)
    for members in groups.values():
        vectors = encoder.encode([items[place][1] for place in members])
        for start in range(0, len(members), _BATCH):
            scores = vectors[start : start + _BATCH] @ vectors.T
            order = np.argsort(-scores, axis=1, kind="stable")[:, : _MOST + 1]
            for row, places in enumerate(order):
                own = members[start + row]
                near = [(members[p], min(1.0, float(scores[row, p]))) for p in places if scores[row, p] >= FLOOR]
                found[own] = [(other, score) for other, score in near if other != own][:_MOST]
    return found


# -- calibrations ------------------------------------------------------------


def fit(pairs: Sequence[Pair], encoder: TextEncoder, *, precision: float = 0.95, guard: Guard = veto) -> Fit:
    """Fit the chance of a wrong answer.

    Args:
        pairs: labeled pairs.
        encoder: gives their cosines.
        precision: least chance of a right answer with which a donor may be used.
        guard: what it objects to is left out.

    Raises:
        ConfigError: ``precision`` is no share.
        DatasetError: too few pairs, or all of one kind.
    """
    if not 0.0 < precision < 1.0:
        raise ConfigError("--precision", precision, "a share above 0 and below 1")
    if len(pairs) < _LEAST_PAIRS or len({pair.same for pair in pairs}) < 2:
        raise DatasetError(f"a calibration needs at least {_LEAST_PAIRS} pairs, same and different ones")
    cluster = clusters(pairs)
    items, of = list(cluster), list(cluster.values())
    near = neighbors(items, encoder)

    @cache
    def free(a: int, b: int) -> bool:
        return guard(items[a][1], items[b][1]) is None

    def lookup(a: int, b: int, score: float, wrong: bool) -> Lookup:
        return Lookup(score, wrong, wording(items[a][1], items[b][1]))

    random = np.random.default_rng(0)
    looked: dict[tuple[int, int], Lookup] = {}
    for share in _STORED:
        stored = random.random(len(items)) < share
        for a in np.flatnonzero(~stored).tolist():
            there = islice(((b, score) for b, score in near[a] if stored[b]), _ASKED)
            first = next(((b, score) for b, score in there if free(a, b)), None)
            if first is not None:
                looked[a, first[0]] = lookup(a, *first, of[a] != of[first[0]])
    rows = list(looked.values())
    simulated = len(rows) >= _ENOUGH and 0 < sum(row.wrong for row in rows) < len(rows)
    if not simulated:
        place = {item: n for n, item in enumerate(items)}
        sides = [(place[pair.group, pair.a], place[pair.group, pair.b], not pair.same) for pair in pairs]
        scored = [(a, b, dict(near[a]).get(b), wrong) for a, b, wrong in sides]
        rows = [lookup(a, b, score, wrong) for a, b, score, wrong in scored if score is not None and free(a, b)]
    if len({row.wrong for row in rows}) < 2:
        raise DatasetError(f"nothing can be fitted: among pairs above a cosine of {FLOOR}, all are of one kind")
    return Fit(_calibration(rows, encoder.fingerprint, 1.0 - precision), rows, simulated)


def _calibration(rows: Sequence[Lookup], fingerprint: str, limit: float) -> Calibration:
    """Logistic regression by penalized likelihood.

    A higher cosine may not raise the chance. A feature's weight, by its standard deviation, is drawn to 0.
    """
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    raw = np.array([features(row.score, row.wording) for row in rows])
    wrong = np.array([row.wrong for row in rows], dtype=float)
    middle, spread = raw.mean(axis=0), np.maximum(raw.std(axis=0), 1e-6)
    table = np.hstack([np.ones((len(rows), 1)), (raw - middle) / spread])
    penalty = np.array([1e-3, *[_RIDGE] * len(FEATURES)])

    def cost(weights: Floats) -> tuple[float, Floats]:
        odds = table @ weights
        value = float(np.sum(np.logaddexp(0.0, odds) - wrong * odds)) + 0.5 * float(penalty @ weights**2)
        return value, table.T @ (1.0 / (1.0 + np.exp(-odds)) - wrong) + penalty * weights

    bounds = [(None, None), (None, 0.0), (None, 0.0), *[(None, None)] * (len(FEATURES) - 2)]
    found = minimize(cost, np.zeros(table.shape[1]), jac=True, method="L-BFGS-B", bounds=bounds).x
    weights = found[1:] / spread
    bias = float(found[0] - weights @ middle)
    named = {name: round(float(weight), 5) for name, weight in zip(FEATURES, weights, strict=True)}
    return Calibration(fingerprint, round(bias, 5), named, round(limit, 6))


# -- the commands ------------------------------------------------------------


def calibrate(path: Path, out: Path, encoder_name: str, precision: float, plot: Path | None) -> dict[str, Any]:
    """Fit a calibration from a file of pairs, and write and plot it. Raises `ConfigError` and `DatasetError`."""
    pairs = read_pairs(path)
    encoder = SentenceEncoder(encoder_name, remembered=1 << 20)
    texts = {text for pair in pairs for text in (pair.a, pair.b)}
    know(texts, encoder)
    fitted = fit(pairs, encoder, precision=precision)
    curve = fitted.calibration
    curve.save(out)
    if plot is not None:
        with figure(plot, "estimated chance of a wrong answer", "share of wrong answers") as axes:
            axes.plot([0, 1], [0, 1], color="gray", linewidth=1)
            axes.plot(*zip(*_reliability(fitted), strict=True), "o", color="black")
            axes.axvline(curve.limit, color="gray", linestyle="--", label=f"limit {curve.limit:.2f}")
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


def _reliability(fitted: Fit) -> list[tuple[float, float]]:
    """Mean estimated chance and share of wrong answers, in ten bands; those with fewer than five lookups are left
    out."""
    bands: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for row in fitted.lookups:
        risk = fitted.calibration.risk(row.score, row.wording)
        bands[int(risk * 10)].append((risk, row.wrong))
    kept = [np.array(band).mean(axis=0) for _, band in sorted(bands.items()) if len(band) >= 5]
    return [(float(risk), float(wrong)) for risk, wrong in kept] or [(math.nan, math.nan)]


def _cache(flags: QualityFlags, texts: Iterable[str]) -> SemKV:
    encoder = SentenceEncoder(flags.index_encoder, remembered=1 << 20)
    know(texts, encoder)
    prior = Calibration.load(flags.calibration) if flags.calibration else None
    return SemKV(encoder, flags, calibration=prior, seed=0)


def eval_pairs(path: Path, flags: QualityFlags) -> dict[str, Any]:
    """Send labeled pairs through a cache: the first text is stored, the second asks. Pairs do not meet.

    Raises `ConfigError` and `DatasetError`.
    """
    pairs = read_pairs(path)
    with closing(_cache(flags, (text for pair in pairs for text in (pair.a, pair.b)))) as cache:
        hits = [ask_pair(cache, pair, str(number)) for number, pair in enumerate(pairs)]
        trust = [cache.confidence(pair.a, pair.b) for pair in pairs]
    _, area = pair_curve([(value, pair.same) for value, pair in zip(trust, pairs, strict=True)])
    accepted, same = sum(hits), sum(pair.same for pair in pairs)
    right = sum(hit and pair.same for hit, pair in zip(hits, pairs, strict=True))
    return {
        **flags.header(),
        "pairs": len(pairs),
        "same": same,
        "accepted": accepted,
        "right": right,
        "vetoed": sum(veto(pair.a, pair.b) is not None for pair in pairs) if flags.guards else 0,
        "precision": _ratio(right, accepted),
        "recall": _ratio(right, same),
        "false_positive_rate": _ratio(accepted - right, len(pairs) - same),
        "p_chr_auc": round(area, 6),
    }


def eval_stream(path: Path, flags: QualityFlags, plot: Path | None) -> dict[str, Any]:
    """Play a stream through a cache. Raises `ConfigError` and `DatasetError`."""
    stream = read_stream(path)
    with closing(_cache(flags, (asked.text for asked in stream))) as cache:
        played = play(cache, stream)
    size, every = len(stream), max(1, len(stream) // _POINTS)
    counts = np.cumsum([(hit, wrong) for _, hit, wrong in played.outcomes], axis=0)
    curve = [(n, *counts[n - 1].tolist()) for n in range(every, size + 1, every)]
    if plot is not None:
        with figure(plot, "requests", "% of requests") as axes:
            for column, name, color in ((1, "hits", "tab:blue"), (2, "wrong answers", "tab:red")):
                axes.plot([row[0] for row in curve], [100 * row[column] / row[0] for row in curve], color, label=name)
            if flags.policy == "bounded":
                axes.axhline(100 * flags.max_error_rate, color="gray", linestyle="--", label="bound")
            axes.set_yscale("symlog", linthresh=1)
            axes.set_ylim(bottom=0)
    return {
        **flags.header(),
        "verify_rate": flags.checked_share,
        "requests": size,
        "hits": played.hits,
        "exact_hits": played.hits - cache.approximate,
        "approximate_hits": cache.approximate,
        "checks": played.checks,
        "wrong": played.wrong,
        "wrong_exact_hits": played.wrong - cache.wrong_approximate,
        "hit_rate": _ratio(played.hits, size),
        "wrong_per_request": _ratio(played.wrong, size),
        "wrong_per_request_95": [round(end, 6) for end in wilson(played.wrong, size)],
        "wrong_per_approximate_hit": _ratio(cache.wrong_approximate, cache.approximate),
        "wrong_per_request_at_worst": None if played.worst is None else round(played.worst, 6),
        "along_the_stream": [{"requests": n, "hits": hits, "wrong": wrong} for n, hits, wrong in curve],
    }


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None


@contextmanager
def figure(path: Path, x: str, y: str) -> Iterator[Any]:
    """One set of axes with a legend, in the style of a report's figures, written to ``path``."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from semkv_lab.figures import STYLE

    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = drawn.add_subplot()
        axes.set(xlabel=x, ylabel=y)
        yield axes
        axes.legend()
        drawn.savefig(path, dpi=144)
