"""Means and medians with 95% intervals, by bootstrap over images.

Questions on one image are not independent, so whole images are drawn again, not questions (the cluster bootstrap;
Davison and Hinkley, Bootstrap Methods and their Application, 1997, 3.8). The seed is fixed: equal values give equal
intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from semkv.tiers.checking import wilson

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

RESAMPLES, FEW_RESAMPLES, MANY_IMAGES = 2_000, 500, 2_000  # fewer draws where there are many images
_AT_ONCE = 2_000_000  # numbers drawn at a time, to bound memory
_SEED = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure over ``n`` values with its 95% interval; all None for no values, no interval from one image."""

    n: int
    value: float | None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Times:
    """Median, its 95% interval, and the 95th percentile, in seconds; None for no samples."""

    n: int
    p50_s: float | None
    p95_s: float | None
    p50_low_s: float | None = None
    p50_high_s: float | None = None


def mean(values: Sequence[tuple[str, float]]) -> Estimate:
    """The mean of (image, value) pairs; empty for no pairs."""
    if not values:
        return Estimate(0, None)
    groups, numbers = split(values)
    total = np.bincount(groups).astype(np.float64)
    if len(total) == 1:
        return Estimate(len(values), float(numbers.mean()))
    sums = np.bincount(groups, weights=numbers)
    drawn = (sums[d].sum(axis=1) / total[d].sum(axis=1) for d in resamples(len(total)))
    return estimate(len(values), float(sums.sum() / total.sum()), drawn)


def share(outcomes: Sequence[tuple[str, bool]]) -> Estimate:
    """The share of True among (image, outcome) pairs.

    Where all outcomes are alike, drawing images again shows no spread, though there is one: the interval is Wilson's
    then, with as many trials as images.
    """
    found = mean([(image, float(outcome)) for image, outcome in outcomes])
    if found.value not in (0.0, 1.0):
        return found
    images = len({image for image, _ in outcomes})
    low, high = wilson(int(found.value) * images, images)
    return replace(found, low=low, high=high)


def median(values: Sequence[tuple[str, float]]) -> Estimate:
    """The median of (image, value) pairs; empty for no pairs."""
    if not values:
        return Estimate(0, None)
    groups, numbers = split(values)
    order = np.argsort(numbers, kind="stable")
    groups, numbers = groups[order], numbers[order]
    if not groups.any():
        return Estimate(len(values), float(np.median(numbers)))

    def medians() -> Iterator[Floats]:
        for weights in row_weights(groups):
            below = weights.cumsum(axis=1)
            half = below[:, -1:] / 2
            lower, upper = (below >= half).argmax(axis=1), (below > half).argmax(axis=1)
            yield (numbers[lower] + numbers[upper]) / 2

    return estimate(len(values), float(np.median(numbers)), medians())


def times(values: Iterable[tuple[str, float | None]]) -> Times:
    """Median with its interval, and 95th percentile, of the (image, seconds) pairs that have seconds."""
    there = [(image, seconds) for image, seconds in values if seconds is not None]
    if not there:
        return Times(0, None, None)
    middle = median(there)
    return Times(len(there), middle.value, float(np.percentile([s for _, s in there], 95)), middle.low, middle.high)


def split(values: Sequence[tuple[str, float]]) -> tuple[Integers, Floats]:
    """Images as numbers from 0 in order of appearance, and the values."""
    index: dict[str, int] = {}
    groups = [index.setdefault(image, len(index)) for image, _ in values]
    return np.array(groups), np.array([value for _, value in values], dtype=np.float64)


def resamples(groups: int, most: int = RESAMPLES) -> Iterator[Integers]:
    """Draws of ``groups`` images with replacement, some at a time ([n, groups]), ``most`` in all."""
    rng = np.random.default_rng(_SEED)
    for rows in parts(most if groups <= MANY_IMAGES else FEW_RESAMPLES, groups):
        yield rng.integers(0, groups, size=(rows, groups))


def row_weights(groups: Integers, most: int = RESAMPLES) -> Iterator[Integers]:
    """How often each row is there in each draw of whole images, some draws at a time ([draws, rows]).

    Args:
        groups: the image of every row, as a number from 0.
    """
    count = int(groups.max()) + 1
    for drawn in resamples(count, most):
        start = 0
        for draws in parts(len(drawn), len(groups)):
            how_often = np.stack([np.bincount(row, minlength=count) for row in drawn[start : start + draws]])
            start += draws
            yield how_often[:, groups]


def parts(rows: int, width: int) -> Iterator[int]:
    """``rows`` in parts, each with at most `_AT_ONCE` numbers when a row has ``width``."""
    most = max(1, _AT_ONCE // width)
    while rows > 0:
        yield min(rows, most)
        rows -= most


def estimate(n: int, value: float, drawn: Iterable[Floats]) -> Estimate:
    """The percentile interval of the figures of all resamples; draws without a figure (NaN) are left out."""
    figures = np.concatenate(list(drawn))
    low, high = np.nanpercentile(figures, [2.5, 97.5])
    return Estimate(n, value, float(low), float(high))
