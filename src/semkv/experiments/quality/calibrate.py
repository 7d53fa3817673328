"""Fits the curve of `semkv.tiers.policies.Calibration` from labelled pairs, with scikit-learn.

The share of same pairs in a file says nothing of how often a *nearest neighbour* is the same question, which is what a
cache meets. So the pairs' texts are used as traffic: a random part is stored, each other text is looked up, and what
it finds is labelled by the clusters that the same pairs make. A file too small for that is fitted pair by pair.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from semkv.errors import ConfigError, DatasetError
from semkv.experiments.quality.corpus import FLOOR, Corpus
from semkv.experiments.quality.rows import Pair, clusters
from semkv.tiers.policies import Calibration

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

_STORED = (0.15, 0.32, 0.5, 0.68, 0.85)  # shares of the texts that are stored, one round each
_STEP = 0.01
_ENOUGH = 300  # lookups with a neighbour, to fit from them
_LEAST_PAIRS = 20
_VETO_ENOUGH = 40  # vetoed lookups, to believe that a guard errs
_VETO_PRIOR = 2.0
_LEAST_RISK = 1e-4
_FOLDS = 5


@dataclass(frozen=True, slots=True)
class Lookup:
    """A text found its nearest neighbour."""

    score: float
    veto: str
    wrong: bool
    cluster: int


@dataclass(frozen=True, slots=True)
class Fit:
    """A calibration and what it was fitted from.

    Attributes:
        calibration: the curve.
        method: isotonic or logistic: which had the lower loss on clusters it was not fitted on.
        losses: cross-validated log loss of both.
        lookups: what it was fitted from.
        simulated: whether the pairs' texts served as traffic.
    """

    calibration: Calibration
    method: str
    losses: dict[str, float]
    lookups: tuple[Lookup, ...]
    simulated: bool


def lookups(
    pairs: Sequence[Pair], corpus: Corpus, *, seed: int = 0, tick: Callable[[int], None] = lambda _: None
) -> list[Lookup]:
    """Every text's nearest neighbour, in rounds in which a growing part of the texts is stored."""
    cluster = clusters(pairs)
    of = [cluster[item] for item in corpus.items]
    random = np.random.default_rng(seed)
    found: dict[tuple[int, int], Lookup] = {}
    for share in _STORED:
        stored = random.random(len(of)) < share
        for number in range(len(of)):
            if stored[number]:
                continue
            near = next(((m, s) for m, s in corpus.neighbours[number] if stored[m]), None)
            if near is not None:
                m, score = near
                found[number, m] = Lookup(score, corpus.veto(number, m), of[number] != of[m], of[number])
        tick(1)
    return list(found.values())


def labelled(pairs: Sequence[Pair], corpus: Corpus) -> list[Lookup]:
    """The pairs as they are."""
    rows = []
    for pair in pairs:
        a, b = corpus.number[pair.group, pair.a], corpus.number[pair.group, pair.b]
        score = dict(corpus.neighbours[a]).get(b)
        if score is not None:
            rows.append(Lookup(score, corpus.veto(a, b), not pair.same, a))
    return rows


def fit(
    pairs: Sequence[Pair],
    corpus: Corpus,
    fingerprint: str,
    *,
    precision: float = 0.95,
    tick: Callable[[int], None] = lambda _: None,
) -> Fit:
    """Fit the curve and choose the threshold.

    Args:
        pairs: labelled pairs.
        corpus: of their texts.
        fingerprint: of the encoder.
        precision: least share of right answers among matches at the threshold.
        tick: hears of each of five rounds.

    Raises:
        ConfigError: scikit-learn is not installed, or ``precision`` is no share.
        DatasetError: too few pairs, or all of one kind.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError("calibrate", "scikit-learn", "an installed extra: pip install 'semkv[calibration]'")
    if not 0.0 < precision < 1.0:
        raise ConfigError("--precision", precision, "a share above 0 and below 1")
    if len(pairs) < _LEAST_PAIRS or len({pair.same for pair in pairs}) < 2:
        raise DatasetError(f"a calibration needs at least {_LEAST_PAIRS} pairs, same and different ones")
    rows = lookups(pairs, corpus, tick=tick)
    simulated = len(rows) >= _ENOUGH and 0 < sum(row.wrong for row in rows) < len(rows)
    rows = rows if simulated else labelled(pairs, corpus)
    plain = [row for row in rows if not row.veto]
    if len({row.wrong for row in plain}) < 2:
        raise DatasetError(f"no curve can be fitted: among pairs above a cosine of {FLOOR}, all are of one kind")
    scores = np.array([row.score for row in plain])
    wrong = np.array([row.wrong for row in plain], dtype=float)
    folds = np.array([row.cluster for row in plain]) % _FOLDS
    losses = {name: _loss(make, scores, wrong, folds) for name, make in _METHODS.items()}
    method = min(losses, key=lambda name: losses[name])
    predict = _METHODS[method](scores, wrong)
    grid = np.round(np.arange(FLOOR, 1.0 + _STEP / 2, _STEP), 4)
    risks = np.minimum.accumulate(np.clip(predict(grid), _LEAST_RISK, 1.0))
    good = grid[risks <= 1.0 - precision]
    threshold = float(good[0]) if len(good) else 2.0  # nothing is that precise: nothing matches
    calibration = Calibration(
        fingerprint, tuple(grid.tolist()), tuple(risks.tolist()), threshold, _vetoes(rows, predict)
    )
    return Fit(calibration, method, losses, tuple(rows), simulated)


Predict = Any


def _logistic(scores: Floats, wrong: Floats) -> Predict:
    from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]

    model = LogisticRegression(C=100.0).fit(scores[:, None], wrong)
    return lambda s: model.predict_proba(np.asarray(s)[:, None])[:, 1]


def _isotonic(scores: Floats, wrong: Floats) -> Predict:
    """Isotonic regression of shares by band: a band that saw no error still has half a one."""
    from sklearn.isotonic import IsotonicRegression  # type: ignore[import-untyped]

    places = np.clip(((scores - FLOOR) / (1.0 - FLOOR) * 25).astype(int), 0, 24)
    counts = np.bincount(places, minlength=25)
    bad = np.bincount(places, weights=wrong, minlength=25)
    filled = counts > 0
    middles = FLOOR + (np.arange(25) + 0.5) * (1.0 - FLOOR) / 25
    model = IsotonicRegression(increasing=False, y_min=0.0, y_max=1.0, out_of_bounds="clip")
    model.fit(middles[filled], ((bad + 0.5) / (counts + 1.0))[filled], sample_weight=counts[filled])
    return model.predict


_METHODS: dict[str, Callable[[Floats, Floats], Predict]] = {"logistic": _logistic, "isotonic": _isotonic}


def _loss(make: Callable[[Floats, Floats], Predict], scores: Floats, wrong: Floats, folds: Floats) -> float:
    """Mean log loss over clusters left out."""
    total, count = 0.0, 0
    for fold in range(_FOLDS):
        out = folds == fold
        if not out.any() or len(set(wrong[~out])) < 2:
            continue
        p = np.clip(make(scores[~out], wrong[~out])(scores[out]), _LEAST_RISK, 1 - _LEAST_RISK)
        total -= float(np.sum(wrong[out] * np.log(p) + (1 - wrong[out]) * np.log(1 - p)))
        count += int(out.sum())
    return total / count if count else math.inf


def _vetoes(rows: Sequence[Lookup], predict: Predict) -> dict[str, float]:
    """By reason, the odds of a wrong answer as a multiple of those without a veto: the upper end of what the lookups
    allow. Reasons seen too seldom are left out, and so stay final."""
    found = {}
    for reason in sorted({row.veto for row in rows} - {""}):
        own = [row for row in rows if row.veto == reason]
        if len(own) < _VETO_ENOUGH:
            continue
        risk = np.clip(predict(np.array([row.score for row in own])), 0.001, 0.999)
        base = np.log(risk / (1 - risk))
        wrong = sum(row.wrong for row in own)
        shift, slope = 0.0, 1.0
        for _ in range(50):  # Newton's method on the likelihood, with some vetoed pairs that were wrong as a prior
            p, q = 1 / (1 + np.exp(-(base + shift))), 1 / (1 + math.exp(-shift))
            slope = float((p * (1 - p)).sum()) + _VETO_PRIOR * q * (1 - q) + 1e-9
            step = (wrong + _VETO_PRIOR * 0.9 - float(p.sum()) - _VETO_PRIOR * q) / slope
            shift += max(-1.0, min(1.0, step))
        upper = shift + 1.64 / math.sqrt(slope)
        found[reason] = round(max(1.0, math.exp(min(upper, 20.0))), 4)
    return found
