"""The largest change in any window of two pictures that lie over one another, in one light."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from semkv_guards.pictures.planes import Look, Plane, halved

# A change is at least so many levels of 255 in a window of 3 x 3, and such a share of the contrast there: both are more
# where contours differ more all over the picture, up to the second number. Chosen on docs/quality.md's tuned scenes.
_LEVELS = (5.0, 22.0)
_NOISY = 4.5
_SHARE = 0.8
_FLAT = 50.0  # variance that is taken for noise
# Of colors at 1/2, 1/4, 1/8 and 1/16 of the size: the larger a thing, the less re-encoding explains. 99% of the scenes'
# copies stay below 18, 8, 5 and 3.
_COLORS = (24.0, 14.0, 8.0, 5.0)

_REACH = 2  # pixels around a window's middle that it depends on
# windows from which the noise is found: so many at least, in whole rows, and one row of so many
_SAMPLED = 24_000
_ROWS_APART = 64
_GOLDEN = 0.618034
_STRIP = 131_072  # pixels that are looked at together: they fit into a core's cache
_CHUNK = 16_384  # windows that are looked at in one go
_ROUNDING = 1.0  # levels by which whole numbers are off

_BINOMIAL = np.zeros((25, 9), np.float32)  # from the pixels of a window to its smoothed ones
for _tap in range(81):
    _to, _from = divmod(_tap, 9)
    _row = _to // 3 + _from // 3
    _column = _to % 3 + _from % 3
    _pixel = 5 * _row + _column
    _BINOMIAL[_pixel, _to] = (1, 2, 1)[_from // 3] * (1, 2, 1)[_from % 3] / 16

_WEIGHTS = np.array((1, 2, 1), np.float32) / 4
_MEAN = np.array((1, 3, 4, 3, 1), np.float32) / 12  # of 3 smoothed pixels

_Numbers = Any  # an array of floats, mostly: NumPy's stubs do not follow their width


def changed(mine: Look, other: Look) -> float:
    """In units of what is a change, of luma at full and half size, and of colors at half size and below: from 1 on, the
    first that was found."""
    reds, blues = zip(mine.chroma, other.chroma, strict=True)
    checks: list[Callable[[], float]] = [
        lambda: change_of_color(*reds),
        lambda: change_of_color(*blues),
        lambda: change_of_luma(mine.luma, other.luma),
        lambda: change_of_luma(halved(mine.luma), halved(other.luma)),
    ]
    most = 0.0
    for check in checks:
        if most < 1:
            most = max(most, check())
    return most


def change_of_luma(a: Plane, b: Plane) -> float:
    """In units of what is a change, in any window of one size."""
    height, width = a.shape
    if min(height, width) <= 2 * _REACH:
        return 0.0
    levels = _levels(a, b)
    most = 0.0
    step = max(16, _STRIP // width)
    for start in range(0, height - 2 * _REACH, step):
        strip = slice(start, start + step + 2 * _REACH)
        most = max(most, _of_strip(a[strip], b[strip], levels))
        if most >= 1:
            break
    return most


def _of_strip(a: Plane, b: Plane, levels: float) -> float:
    rows, columns = _suspects(a, b, levels)
    most = 0.0
    for start in range(0, len(rows), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        scores = _scores(a, b, rows[chunk], columns[chunk], levels=levels)
        most = max(most, float(scores.max(initial=0.0)))
        if most >= 1:
            break
    return most


def _levels(a: Plane, b: Plane) -> float:
    """Least change in a window, by how much contours differ in rows of windows all over the picture."""
    height = len(a) - 2 * _REACH
    count = min(height, max(_SAMPLED // a.shape[1], height // _ROWS_APART))
    # neither at equal distances nor by chance: lines of text are at equal distances
    number = np.arange(count)
    parts = (number + number * _GOLDEN % 1) / count
    starts = (parts * height).astype(int)
    rows = starts[:, None] + np.arange(2 * _REACH + 1)
    first, second = (_smooth(plane[rows]) for plane in (a, b))
    rest = first - second
    power = _mean(rest * rest)
    contrast = np.maximum(_contrast(first), _contrast(second))
    noise = float((power * contrast).sum() / (contrast.sum() + 1))
    least = _NOISY * max(0.0, noise) ** 0.5
    return float(np.clip(least, *_LEVELS))


def _smooth(bands: Plane) -> _Numbers:
    """Binomial, over 3 x 3: [count, 5, width] to [count, 3, width - 2]."""
    import cv2

    rows = bands.reshape(-1, bands.shape[-1])
    levels = cv2.sepFilter2D(rows, cv2.CV_32F, _WEIGHTS, _WEIGHTS, delta=-128)
    found: _Numbers = levels.reshape(bands.shape)[:, 1:-1, 1:-1]
    return found


def _centered(levels: Plane) -> _Numbers:
    """Levels from -128 to 127: smaller numbers are rounded less."""
    return levels.astype(np.float32) - 128


def _contrast(bands: _Numbers) -> _Numbers:
    """The variance over 3 x 3."""
    return _mean(bands * bands) - _mean(bands) ** 2


def _mean(bands: _Numbers) -> _Numbers:
    """Over 3 x 3: [count, 3, width] to [count, width - 2]."""
    columns = bands.sum(axis=1)
    sums = columns[:, :-2] + columns[:, 1:-1] + columns[:, 2:]
    return sums / 9


def _suspects(a: Plane, b: Plane, levels: float) -> tuple[Any, Any]:
    """The windows whose means may differ by so many levels, by row and column, those that differ most first."""
    import cv2

    means = [cv2.sepFilter2D(plane, -1, _MEAN, _MEAN) for plane in (a, b)]
    apart = cv2.absdiff(*means)
    least = int(levels - _ROUNDING)
    if cv2.minMaxLoc(apart)[1] < least:
        return np.zeros(0, int), np.zeros(0, int)
    apart = np.ascontiguousarray(apart[_REACH:-_REACH, _REACH:-_REACH])
    places = np.flatnonzero(apart >= least)
    order = np.argsort(apart.ravel()[places])[::-1]
    rows, columns = np.divmod(places[order], apart.shape[1])
    return rows, columns


def _scores(a: Plane, b: Plane, rows: Any, columns: Any, *, levels: float) -> _Numbers:
    """Of windows by their upper left corner: in units of what is a change, the least of its mean and of its share."""
    first = _smoothed(a, rows, columns)
    second = _smoothed(b, rows, columns)
    rest = first - second
    power = np.einsum("ij,ij->i", rest, rest) / 9
    contrast = np.maximum(_variance(first), _variance(second))
    share = power / (contrast + _FLAT)
    least_share = _SHARE * levels / _LEVELS[1]
    mean = abs(rest.mean(axis=1))
    return np.minimum(mean / levels, share / least_share)


def _smoothed(plane: Plane, rows: Any, columns: Any) -> _Numbers:
    """The 9 values of each window, after a binomial over 3 x 3."""
    side = 2 * _REACH + 1
    windows = np.lib.stride_tricks.sliding_window_view(plane, (side, side))
    pixels = windows[rows, columns].reshape(-1, side * side)
    return _centered(pixels) @ _BINOMIAL


def _variance(values: _Numbers) -> _Numbers:
    middle = values.mean(axis=1)
    power = np.einsum("ij,ij->i", values, values) / 9
    return power - middle * middle


def change_of_color(a: Plane, b: Plane) -> float:
    """In units of what is a change, of one chroma plane of half the size, there and below."""
    import cv2

    most = 0.0
    for limit in _COLORS:
        if min(a.shape) < 3:
            break
        first = cv2.blur(a, (3, 3))
        second = cv2.blur(b, (3, 3))
        apart = cv2.absdiff(first, second)[1:-1, 1:-1]
        farthest = cv2.minMaxLoc(apart)[1]
        most = max(most, farthest / limit)
        a = halved(a).astype(np.float32)
        b = halved(b).astype(np.float32)
    return most
