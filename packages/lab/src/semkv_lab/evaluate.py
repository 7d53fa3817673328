"""``semkv calibrate``, ``eval-pairs`` and ``eval-stream``: from files to JSON values and figures.

A calibration (`semkv.tiers.policies.Calibration`) is fitted from labelled pairs. The share of same pairs in a file says
nothing of how often a *nearest neighbour* is the same question, which is what a cache meets. So the pairs' texts are
used as traffic: a random part is stored, each other text is looked up, and what it finds is labelled by the clusters
that the same pairs make. A file too small for that is fitted pair by pair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from semkv.encoders.text import SentenceEncoder
from semkv.errors import ConfigError, DatasetError
from semkv.guards import Guard, Wording, no_veto, veto
from semkv.tiers.checking import wilson
from semkv.tiers.policies import FEATURES, Calibration, Decider, build_policy, features
from semkv_lab.quality import (
    FLOOR,
    NEIGHBOURS,
    Corpus,
    Item,
    Judgement,
    Outcome,
    Pair,
    Replay,
    build_corpus,
    clusters,
    judge,
    read_pairs,
    read_stream,
)
from semkv_lab.settings import QualityFlags

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

_STORED = (0.15, 0.32, 0.5, 0.68, 0.85)  # shares of the texts that are stored, one round each
_ENOUGH = 300  # lookups with a neighbour, to fit from them
_LEAST_PAIRS = 20
_RIDGE = 10.0
_LEAST_RISK = 1e-4
_FOLDS = 5


class Lookup(NamedTuple):
    """A text found its nearest neighbour, and no guard objects."""

    score: float
    wrong: bool
    cluster: int
    wording: Wording


class Fit(NamedTuple):
    """A calibration and what it was fitted from.

    ``losses`` are log losses on clusters left out, of the cosine alone and of all features; ``simulated`` says whether
    the pairs' texts served as traffic.
    """

    calibration: Calibration
    losses: dict[str, float]
    lookups: tuple[Lookup, ...]
    simulated: bool


def lookups(pairs: Sequence[Pair], corpus: Corpus, *, seed: int = 0) -> list[Lookup]:
    """What every text finds that no guard objects to, in rounds in which a growing part of the texts is stored."""
    cluster = clusters(pairs)
    of = [cluster[item] for item in corpus.items]
    random = np.random.default_rng(seed)
    found: dict[tuple[int, int], Lookup] = {}
    for share in _STORED:
        stored = random.random(len(of)) < share
        for n in np.flatnonzero(~stored).tolist():
            there = islice(((m, s) for m, s in corpus.neighbours[n] if stored[m]), NEIGHBOURS)
            near = next(((m, s) for m, s in there if not corpus.veto(n, m)), None)
            if near is not None:
                m, score = near
                found[n, m] = Lookup(score, of[n] != of[m], of[n], corpus.wording(n, m))
    return list(found.values())


def labelled(pairs: Sequence[Pair], corpus: Corpus) -> list[Lookup]:
    """The pairs as they are, without those that a guard objects to."""
    rows = []
    for pair in pairs:
        a, b = corpus.number[pair.group, pair.a], corpus.number[pair.group, pair.b]
        score = dict(corpus.neighbours[a]).get(b)
        if score is not None and not corpus.veto(a, b):
            rows.append(Lookup(score, not pair.same, a, corpus.wording(a, b)))
    return rows


def fit(pairs: Sequence[Pair], corpus: Corpus, fingerprint: str, *, precision: float = 0.95) -> Fit:
    """Fit the chance of a wrong answer.

    Args:
        pairs: labelled pairs.
        corpus: of their texts.
        fingerprint: of the encoder.
        precision: least chance of a right answer with which a donor may be used.

    Raises:
        ConfigError: ``precision`` is no share.
        DatasetError: too few pairs, or all of one kind.
    """
    if not 0.0 < precision < 1.0:
        raise ConfigError("--precision", precision, "a share above 0 and below 1")
    if len(pairs) < _LEAST_PAIRS or len({pair.same for pair in pairs}) < 2:
        raise DatasetError(f"a calibration needs at least {_LEAST_PAIRS} pairs, same and different ones")
    rows = lookups(pairs, corpus)
    simulated = len(rows) >= _ENOUGH and 0 < sum(row.wrong for row in rows) < len(rows)
    rows = rows if simulated else labelled(pairs, corpus)
    if len({row.wrong for row in rows}) < 2:
        raise DatasetError(f"nothing can be fitted: among pairs above a cosine of {FLOOR}, all are of one kind")
    losses = {"cosine alone": _loss(rows, 2), "all features": _loss(rows, len(FEATURES))}
    return Fit(_calibration(rows, fingerprint, 1.0 - precision), losses, tuple(rows), simulated)


def _calibration(rows: Sequence[Lookup], fingerprint: str, limit: float, named: int = len(FEATURES)) -> Calibration:
    """Logistic regression by penalised likelihood, of the first ``named`` features.

    A higher cosine may not raise the chance. A feature's weight, by its standard deviation, is drawn to 0.
    """
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    raw = np.array([features(row.score, row.wording)[:named] for row in rows])
    wrong = np.array([row.wrong for row in rows], dtype=float)
    middle, spread = raw.mean(axis=0), np.maximum(raw.std(axis=0), 1e-6)
    table = np.hstack([np.ones((len(rows), 1)), (raw - middle) / spread])
    penalty = np.array([1e-3, *[_RIDGE] * named])

    def cost(weights: Floats) -> tuple[float, Floats]:
        odds = table @ weights
        value = float(np.sum(np.logaddexp(0.0, odds) - wrong * odds)) + 0.5 * float(penalty @ weights**2)
        return value, table.T @ (1.0 / (1.0 + np.exp(-odds)) - wrong) + penalty * weights

    bounds = [(None, None), (None, 0.0), (None, 0.0), *[(None, None)] * (named - 2)]
    found = minimize(cost, np.zeros(table.shape[1]), jac=True, method="L-BFGS-B", bounds=bounds).x
    weights = found[1:] / spread
    bias = float(found[0] - weights @ middle)
    named_weights = dict(zip(FEATURES, [*(round(float(w), 5) for w in weights), *[0.0] * len(FEATURES)], strict=False))
    return Calibration(fingerprint, round(bias, 5), named_weights, round(limit, 6))


def _loss(rows: Sequence[Lookup], named: int) -> float:
    """Mean log loss over clusters left out."""
    total, count = 0.0, 0
    for fold in range(_FOLDS):
        out = [row for row in rows if row.cluster % _FOLDS == fold]
        kept = [row for row in rows if row.cluster % _FOLDS != fold]
        if not out or len({row.wrong for row in kept}) < 2:
            continue
        fitted = _calibration(kept, "", 0.05, named)
        for row in out:
            risk = min(1 - _LEAST_RISK, max(_LEAST_RISK, fitted.risk(row.score, row.wording)))
            total -= math.log(risk if row.wrong else 1.0 - risk)
        count += len(out)
    return total / count if count else math.inf


# -- the commands ------------------------------------------------------------


def _corpus(items: Sequence[Item], encoder: SentenceEncoder, guard: Guard) -> Corpus:
    """The corpus, with a bar on stderr while texts are encoded."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("encoding", total=len(set(items)))
        return build_corpus(items, encoder, guard, lambda steps: bars.advance(bar, steps))


def calibrate(path: Path, out: Path, encoder_name: str, precision: float, plot: Path | None) -> dict[str, Any]:
    """Fit a calibration from a file of pairs, and write and plot it. Raises `ConfigError` and `DatasetError`."""
    pairs = read_pairs(path)
    encoder = SentenceEncoder(encoder_name)
    items = list(clusters(pairs))
    fitted = fit(pairs, _corpus(items, encoder, veto), encoder.fingerprint, precision=precision)
    curve = fitted.calibration
    curve.save(out)
    if plot is not None:
        plot_fit(fitted, plot)
    return {
        "pairs": len(pairs),
        "same": sum(pair.same for pair in pairs),
        "texts": len(items),
        "fitted_from": "lookups among the texts" if fitted.simulated else "the pairs as they are",
        "lookups": len(fitted.lookups),
        "log_loss": {name: round(loss, 5) for name, loss in fitted.losses.items()},
        "precision": precision,
        "limit": curve.limit,
        "least_cosine": round(curve.least, 4),
        "weights": {"bias": curve.bias, **curve.weights},
    }


def _prepare(flags: QualityFlags, items: list[Item]) -> tuple[Corpus, Decider]:
    config = flags.config()
    encoder = SentenceEncoder(config.index_encoder)
    policy = build_policy(config, encoder.fingerprint if config.calibration else "")
    guard = veto if config.guards else no_veto
    return _corpus(items, encoder, guard), policy


def eval_pairs(path: Path, flags: QualityFlags, plot: Path | None) -> dict[str, Any]:
    """Send labelled pairs through a policy. Raises `ConfigError` and `DatasetError`."""
    pairs, rate = read_pairs(path), flags.checked_share
    items = [(pair.group, text) for pair in pairs for text in (pair.a, pair.b)]
    corpus, policy = _prepare(flags, items)
    judged = judge(pairs, corpus, policy, verify_rate=rate)
    if plot is not None:
        plot_pairs(judged, plot)
    counts = {name: getattr(judged, name) for name in ("pairs", "same", "accepted", "right", "vetoed")}
    shares = {name: _short(getattr(judged, name)) for name in ("precision", "recall", "false_positive_rate")}
    return {**flags.header(), **counts, **shares, "p_chr_auc": _short(judged.area)}


def eval_stream(path: Path, flags: QualityFlags, plot: Path | None) -> dict[str, Any]:
    """Play a stream through a policy. Raises `ConfigError` and `DatasetError`."""
    stream, rate = read_stream(path), flags.checked_share
    corpus, policy = _prepare(flags, [(asked.group, asked.text) for asked in stream])
    outcome = Replay(stream, corpus).play(policy, verify_rate=rate)
    if plot is not None:
        plot_stream(outcome, flags.max_error_rate if flags.policy == "bounded" else None, plot)
    return {
        **flags.header(),
        "verify_rate": rate,
        "requests": outcome.requests,
        "hits": outcome.hits,
        "exact_hits": outcome.exact,
        "approximate_hits": outcome.approximate,
        "checks": outcome.checks,
        "wrong": outcome.wrong,
        "wrong_exact_hits": outcome.wrong_exact,
        "hit_rate": _short(outcome.hit_rate),
        "wrong_per_request": _short(outcome.wrong_rate),
        "wrong_per_request_95": [_short(end) for end in wilson(outcome.wrong, outcome.requests)],
        "wrong_per_approximate_hit": _short(outcome.wrong_per_approximate),
        "wrong_per_request_at_worst": _short(outcome.worst),
        "along_the_stream": [{"requests": n, "hits": h, "wrong": w} for n, h, w in outcome.curve],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


# -- figures ------------------------------------------------------------


@contextmanager
def figure(path: Path, x: str, y: str) -> Iterator[Any]:
    """One set of axes in the style of a report's figures, written to ``path``."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from semkv_lab.figures import STYLE

    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = drawn.add_subplot()
        axes.set(xlabel=x, ylabel=y)
        yield axes
        drawn.savefig(path, dpi=144)


def plot_fit(fitted: Fit, path: Path) -> None:
    """The share of wrong answers among lookups against the estimated chance, in bands that have five lookups."""
    curve = fitted.calibration
    with figure(path, "estimated chance of a wrong answer", "share of wrong answers") as axes:
        axes.plot([0, 1], [0, 1], color="gray", linewidth=1)
        risks = np.array([curve.risk(r.score, r.wording) for r in fitted.lookups])
        wrong = np.array([r.wrong for r in fitted.lookups])
        bands = [band for low in _LOWS if (band := (low <= risks) & (risks < low + _BAND)).sum() >= 5]
        axes.plot([risks[b].mean() for b in bands], [wrong[b].mean() for b in bands], "o", color="black")
        axes.axvline(curve.limit, color="gray", linestyle="--", label=f"limit {curve.limit:.2f}")
        axes.legend()


_BAND = 0.1
_LOWS = [_BAND * n for n in range(10)]


def plot_pairs(judged: Judgement, path: Path) -> None:
    """Precision against hit ratio."""
    with figure(path, "hit ratio", "precision") as axes:
        axes.plot(*zip(*judged.curve, strict=True), label=f"area {judged.area:.3f}")
        if judged.precision is not None:
            axes.plot(judged.accepted / judged.pairs, judged.precision, "o", color="black", label="the policy")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.02)
        axes.legend()


def plot_stream(outcome: Outcome, bound: float | None, path: Path) -> None:
    """Wrong answers per request along the stream, with the bound where there is one."""
    with figure(path, "requests", "wrong answers per request, %") as axes:
        axes.plot([n for n, _, _ in outcome.curve], [100 * wrong / n for n, _, wrong in outcome.curve], color="tab:red")
        if bound is not None:
            axes.axhline(100 * bound, color="gray", linestyle="--", label="bound")
            axes.legend()
        hits = axes.twinx()
        hits.plot([n for n, _, _ in outcome.curve], [100 * h / n for n, h, _ in outcome.curve], color="tab:blue")
        hits.set_ylabel("hits, % of requests", color="tab:blue")
        axes.set_ylim(bottom=0)
