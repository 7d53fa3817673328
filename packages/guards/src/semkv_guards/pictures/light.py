"""Brightness and contrast that the second picture takes on, and what they have burnt out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from semkv_guards.pictures.aligning import GAINS
from semkv_guards.pictures.planes import Plane

_OFFSET = 60.0  # levels of 255 by which black or white may move
_BURNT = 40.0  # levels that white or black may hide
_ROUNDING = 1.5  # levels
_PIXELS = 16_000  # from which brightness and contrast are found
_STRIP = 65_536  # pixels that are lit together: they fit into a core's cache


@dataclass(frozen=True)
class Light:
    """The first picture's levels are ``gain`` times the second's and ``offset``."""

    gain: float
    offset: float

    @property
    def plausible(self) -> bool:
        least, most = GAINS
        if not least < self.gain < most:
            return False
        return max(abs(self.offset), abs(self.white)) <= _OFFSET

    @property
    def same(self) -> bool:
        """Whether it changes no level by more than rounding explains."""
        return max(abs(self.offset), abs(self.white)) < _ROUNDING

    @property
    def white(self) -> float:
        """By how many levels white moves; black moves by the offset."""
        return 255 * (self.gain - 1) + self.offset


def light(mine: Plane, other: Plane) -> Light:
    """From the pixels where two pictures that lie over one another agree best."""
    step = max(1, int((mine.size / _PIXELS) ** 0.5))
    sampled = slice(step // 2, None, step)
    a = mine[sampled, sampled].astype(np.float32).ravel()
    b = other[sampled, sampled].astype(np.float32).ravel()
    known = (np.minimum(a, b) > 1) & (np.maximum(a, b) < 254)
    if known.sum() < 64:
        return _moved(a, b)
    a = a[known]
    b = b[known]
    found = _moved(a, b)
    for _ in range(5):
        apart = a - found.gain * b - found.offset
        weight = 1 / (1 + (apart / 8) ** 2)
        weight /= weight.sum()
        middle_a, spread_a = _moments(a, weight)
        middle_b, spread_b = _moments(b, weight)
        gain = ((spread_a + 25) / (spread_b + 25)) ** 0.5
        found = Light(gain, middle_a - gain * middle_b)
    return found


def _moved(a: Plane, b: Plane) -> Light:
    """The same contrast, and another brightness."""
    return Light(1.0, float(np.median(a) - np.median(b)))


def _moments(levels: Plane, weight: Plane) -> tuple[float, float]:
    """Mean and variance."""
    middle = float(weight @ levels)
    return middle, float(weight @ (levels - middle) ** 2)


def lit(found: Light, mine: Plane, other: Plane) -> Plane:
    """The second picture's pixels in the first one's light. What was brighter than white, or darker than black, is
    lost: there the first picture's levels count."""
    import cv2

    step = max(16, _STRIP // other.shape[1])
    if len(other) <= step:
        return _lit(found, mine, other)
    strips = [slice(start, start + step) for start in range(0, len(other), step)]
    levels: Plane = cv2.vconcat([_lit(found, mine[strip], other[strip]) for strip in strips])
    return levels


def _lit(found: Light, mine: Plane, other: Plane) -> Plane:
    import cv2

    levels: Plane = cv2.addWeighted(other, found.gain, other, 0.0, found.offset)
    if found.white < 0:
        white = cv2.threshold(other, 253, 255, cv2.THRESH_BINARY)[1]
        levels = cv2.add(levels, _hidden(cv2.subtract(mine, levels), white))
    if found.offset > 0:
        black = cv2.threshold(other, 1, 255, cv2.THRESH_BINARY_INV)[1]
        levels = cv2.subtract(levels, _hidden(cv2.subtract(levels, mine), black))
    return levels


def _hidden(apart: Plane, burnt: Plane) -> Plane:
    """By how much the levels are apart where that is burnt out, and not too much for it."""
    import cv2

    few: Plane = cv2.threshold(apart, _BURNT - 1, 0, cv2.THRESH_TOZERO_INV)[1]
    hidden: Plane = cv2.bitwise_and(few, burnt)
    return hidden
