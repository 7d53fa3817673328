"""Fits `semkv.tiers.policies.Calibration` from labelled pairs.

The share of same pairs in a file says nothing of how often a *nearest neighbour* is the same question, which is what a
cache meets. So the pairs' texts are used as traffic: a random part is stored, each other text is looked up, and what
it finds is labelled by the clusters that the same pairs make. A file too small for that is fitted pair by pair.
"""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from semkv.errors import ConfigError, DatasetError
from semkv.guards import Wording
from semkv.tiers.policies.calibrated import FEATURES, Calibration, features
from semkv_lab.quality.corpus import FLOOR, Corpus
from semkv_lab.quality.rows import Pair, clusters

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

_STORED = (0.15, 0.32, 0.5, 0.68, 0.85)  # shares of the texts that are stored, one round each
_ENOUGH = 300  # lookups with a neighbour, to fit from them
_LEAST_PAIRS = 20
_VETO_ENOUGH = 10  # vetoed lookups, to believe that a guard errs
_VETO_PRIOR = 2.0  # log odds that a guard is believed to add, worth a few lookups
_RIDGE = 10.0
_LEAST_RISK = 1e-4
_FOLDS = 5


@dataclass(frozen=True, slots=True)
class Lookup:
    """A text found its nearest neighbour."""

    score: float
    veto: str
    wrong: bool
    cluster: int
    wording: Wording


@dataclass(frozen=True, slots=True)
class Fit:
    """A calibration and what it was fitted from.

    Attributes:
        calibration: the estimate.
        losses: log loss on clusters left out, of the cosine with the vetoes and of all features.
        lookups: what it was fitted from.
        simulated: whether the pairs' texts served as traffic.
    """

    calibration: Calibration
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
                found[number, m] = Lookup(
                    score, corpus.veto(number, m), of[number] != of[m], of[number], corpus.wording(number, m)
                )
        tick(1)
    return list(found.values())


def labelled(pairs: Sequence[Pair], corpus: Corpus) -> list[Lookup]:
    """The pairs as they are."""
    rows = []
    for pair in pairs:
        a, b = corpus.number[pair.group, pair.a], corpus.number[pair.group, pair.b]
        score = dict(corpus.neighbours[a]).get(b)
        if score is not None:
            rows.append(Lookup(score, corpus.veto(a, b), not pair.same, a, corpus.wording(a, b)))
    return rows


def fit(
    pairs: Sequence[Pair],
    corpus: Corpus,
    fingerprint: str,
    *,
    precision: float = 0.95,
    tick: Callable[[int], None] = lambda _: None,
) -> Fit:
    """Fit the chance of a wrong answer.

    Args:
        pairs: labelled pairs.
        corpus: of their texts.
        fingerprint: of the encoder.
        precision: least chance of a right answer with which a donor may be used.
        tick: hears of each of five rounds.

    Raises:
        ConfigError: scipy is not installed, or ``precision`` is no share.
        DatasetError: too few pairs, or all of one kind.
    """
    if importlib.util.find_spec("scipy") is None:
        raise ConfigError("calibrate", "scipy", "an installed extra: pip install 'semkv[calibration]'")
    if not 0.0 < precision < 1.0:
        raise ConfigError("--precision", precision, "a share above 0 and below 1")
    if len(pairs) < _LEAST_PAIRS or len({pair.same for pair in pairs}) < 2:
        raise DatasetError(f"a calibration needs at least {_LEAST_PAIRS} pairs, same and different ones")
    rows = lookups(pairs, corpus, tick=tick)
    simulated = len(rows) >= _ENOUGH and 0 < sum(row.wrong for row in rows) < len(rows)
    rows = rows if simulated else labelled(pairs, corpus)
    if len({row.wrong for row in rows}) < 2:
        raise DatasetError(f"nothing can be fitted: among pairs above a cosine of {FLOOR}, all are of one kind")
    losses = {"cosine alone": _loss(rows, 2), "all features": _loss(rows, len(FEATURES))}
    return Fit(_calibration(rows, fingerprint, 1.0 - precision), losses, tuple(rows), simulated)


def _calibration(rows: Sequence[Lookup], fingerprint: str, limit: float, named: int = len(FEATURES)) -> Calibration:
    """Logistic regression by penalised likelihood, of the first ``named`` features and of every reason seen enough.

    A higher cosine may not raise the chance, nor may a veto lower it. A feature's weight, by its standard deviation, is
    drawn to 0; a veto's log odds to `_VETO_PRIOR`.
    """
    from scipy.optimize import minimize  # type: ignore[import-untyped]

    seen = Counter(row.veto for row in rows if row.veto)
    reasons = sorted(reason for reason, count in seen.items() if count >= _VETO_ENOUGH)
    used = [row for row in rows if not row.veto or row.veto in reasons]
    raw = np.array([features(row.score, row.wording)[:named] for row in used])
    wrong = np.array([row.wrong for row in used], dtype=float)
    middle, spread = raw.mean(axis=0), np.maximum(raw.std(axis=0), 1e-6)
    vetoed = np.array([[row.veto == reason for reason in reasons] for row in used], dtype=float)
    table = np.hstack([np.ones((len(used), 1)), (raw - middle) / spread, vetoed.reshape(len(used), -1)])
    penalty = np.array([1e-3, *[_RIDGE] * named, *[1.0] * len(reasons)])
    target = np.array([0.0] * (1 + named) + [_VETO_PRIOR] * len(reasons))

    def cost(weights: Floats) -> tuple[float, Floats]:
        odds, off = table @ weights, weights - target
        value = float(np.sum(np.logaddexp(0.0, odds) - wrong * odds)) + 0.5 * float(penalty @ off**2)
        return value, table.T @ (1.0 / (1.0 + np.exp(-odds)) - wrong) + penalty * off

    bounds = [(None, None), (None, 0.0), (None, 0.0), *[(None, None)] * (named - 2), *[(0.0, None)] * len(reasons)]
    found = minimize(cost, np.zeros(table.shape[1]), jac=True, method="L-BFGS-B", bounds=bounds).x
    weights = found[1 : 1 + named] / spread
    bias = float(found[0] - weights @ middle)
    named_weights = dict(zip(FEATURES, [*(round(float(w), 5) for w in weights), *[0.0] * len(FEATURES)], strict=False))
    vetoes = {r: round(math.exp(min(20.0, w)), 4) for r, w in zip(reasons, found[1 + named :], strict=True)}
    return Calibration(fingerprint, round(bias, 5), named_weights, round(limit, 6), vetoes)


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
            risk = min(1 - _LEAST_RISK, max(_LEAST_RISK, fitted.risk(row.score, row.veto, row.wording)))
            total -= math.log(risk if row.wrong else 1.0 - risk)
        count += len(out)
    return total / count if count else math.inf
